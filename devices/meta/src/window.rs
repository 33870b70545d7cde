//! Views of split tensors: finds the axes that a view covers, for any strides.
//!
//! A view is a shape, strides and an offset in the memory of its source, but a member's shard of
//! the source has other strides. So strides and offset are converted to steps and positions along
//! the source's axes, and from there to the member's strides.

use crate::state::{AxisRuns, SplitState};
use samite_core::{DIMS, Layout, Op, Shape};

/// A view along the axes of its source.
#[derive(Clone, Debug)]
pub(crate) struct ViewWindow {
    /// For each dimension of the view: the source's axis, and the number of its elements (blocks on
    /// axis 0) per step.
    steps: [Option<(usize, usize)>; DIMS],
    /// Start of the view along each axis of the source, in elements (blocks on axis 0).
    start: [usize; DIMS],
    shape: Shape,
    /// Axis along which the source is split.
    axis: usize,
    /// Number of its elements (blocks) that form a unit.
    unit: usize,
    /// Dimension of the view that is split.
    split: usize,
    /// Runs of the source in units, and runs of the view.
    source: AxisRuns,
    runs: AxisRuns,
}

/// Returns the number of elements per index of `axis`. Blocks of quantized types lie along axis 0.
fn grain(layout: &Layout, axis: usize) -> usize {
    match axis {
        0 => layout.dtype().block_len(),
        _ => 1,
    }
}

/// Returns the axes that have a step, innermost first, with stride and extent in elements or
/// blocks. Returns `None` if they overlap.
fn nested(layout: &Layout) -> Option<Vec<(usize, usize, usize)>> {
    let mut axes: Vec<_> = (0..DIMS)
        .map(|axis| {
            let extent = layout.shape()[axis] / grain(layout, axis);
            (layout.strides()[axis], axis, extent)
        })
        .filter(|&(_, _, extent)| extent > 1)
        .map(|(stride, axis, extent)| (axis, stride, extent))
        .collect();
    axes.sort_by_key(|&(_, stride, _)| stride);
    let apart = axes
        .windows(2)
        .all(|two| two[1].1 >= two[0].1.saturating_mul(two[0].2));
    apart.then_some(axes)
}

impl ViewWindow {
    /// Returns the view that `op` makes of a split source. Returns `None` if its parts are not
    /// views of the source's parts.
    pub fn for_op(op: &Op, source: &Layout, axis: usize, runs: &AxisRuns) -> Option<Self> {
        let Op::View {
            shape,
            strides: [s1, s2, s3],
            offset,
        } = *op
        else {
            return None;
        };
        if shape.contains(&0) || source.is_empty() {
            return None;
        }
        let axes = nested(source)?;
        let mut start = [0; DIMS];
        let mut rest = offset;
        for &(axis, stride, _) in axes.iter().rev() {
            start[axis] = rest / stride;
            rest %= stride;
        }
        if rest > 0 {
            return None;
        }
        let strides = [source.dtype().block_bytes(), s1, s2, s3];
        let mut steps = [None; DIMS];
        let mut reach = start;
        for d in 0..DIMS {
            let extent = shape[d] / if d == 0 { grain(source, 0) } else { 1 };
            if extent <= 1 {
                continue;
            }
            let &(axis, stride, _) = axes.iter().rfind(|axis| axis.1 <= strides[d])?;
            if !strides[d].is_multiple_of(stride) {
                return None;
            }
            let step = strides[d] / stride;
            steps[d] = Some((axis, step));
            reach[axis] = step.checked_mul(extent - 1)?.checked_add(reach[axis])?;
        }
        // A step past the end of an axis would be a step along the next.
        let inside = axes.iter().all(|&(axis, _, extent)| reach[axis] < extent);
        if !inside || !axes.iter().any(|&(known, ..)| known == axis) {
            return None;
        }
        let runs = runs.in_units(grain(source, axis))?;
        let mut along: Vec<(usize, usize)> = (0..DIMS)
            .filter_map(|d| match steps[d] {
                Some((known, step)) if known == axis => Some((step, d)),
                _ => None,
            })
            .collect();
        along.sort_unstable();
        let extent_of = |d: usize| shape[d] / if d == 0 { grain(source, 0) } else { 1 };
        let (unit, split) = match along[..] {
            [(1, d)] => (1, d),
            [(unit, d)] => (unit, d),
            // The inner dimension stays within a unit of the outer one.
            [(1, inner), (unit, outer)] if start[axis] % unit + extent_of(inner) <= unit => {
                (unit, outer)
            }
            _ => return None,
        };
        let source_units = runs.in_units(unit)?;
        let window = source_units.window(start[axis] / unit, extent_of(split));
        (window.total() == extent_of(split)).then_some(ViewWindow {
            steps,
            start,
            shape,
            axis,
            unit,
            split,
            runs: window,
            source: source_units,
        })
    }

    /// Returns the state of the view.
    pub fn state(&self, source: &Layout) -> SplitState {
        let grain = if self.split == 0 { grain(source, 0) } else { 1 };
        SplitState::split(self.split, self.runs.times(grain))
    }

    /// Returns the view of the source's shard of `member`, or `None` if no view can express it.
    pub fn local(&self, member: usize, source: &Layout) -> Option<Op> {
        let strides = source.strides();
        let mut shape = self.shape;
        let grain = if self.split == 0 { grain(source, 0) } else { 1 };
        shape[self.split] = self.runs.len_of(member) * grain;
        let mut offset = 0;
        for (axis, stride) in strides.into_iter().enumerate() {
            let at = if axis == self.axis {
                let first = self.start[axis] / self.unit;
                self.source.before(member, first) * self.unit + self.start[axis] % self.unit
            } else {
                self.start[axis]
            };
            offset += at * stride;
        }
        let block = source.dtype().block_bytes();
        let mut result = [block; DIMS];
        let mut next = block * shape[0] / source.dtype().block_len();
        for d in 0..DIMS {
            let stride = match self.steps[d] {
                Some((axis, step)) => step * strides[axis],
                // A single element: any valid stride will do.
                None if d == 0 => block,
                None => next,
            };
            if d == 0 && stride != block {
                return None;
            }
            result[d] = stride;
            next = next.max(stride.saturating_mul(if d == 0 {
                shape[0] / source.dtype().block_len()
            } else {
                shape[d]
            }));
        }
        Some(Op::View {
            shape,
            strides: [result[1], result[2], result[3]],
            offset,
        })
    }
}

/// Returns the state of a split tensor in another shape, if its parts are runs of whole elements
/// along one axis of that shape.
pub(crate) fn reshaped(from: Shape, axis: usize, runs: &AxisRuns, to: Shape) -> Option<SplitState> {
    let product = |extents: &[usize]| extents.iter().product::<usize>();
    let (inner, outer) = (product(&from[..axis]), product(&from[axis + 1..]));
    let elements = runs.times(inner);
    (0..DIMS)
        .filter(|&axis| product(&to[axis + 1..]) == outer)
        .find_map(|axis| {
            let runs = elements.in_units(product(&to[..axis]))?;
            (runs.total() == to[axis]).then(|| SplitState::split(axis, runs))
        })
}
