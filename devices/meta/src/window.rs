//! Views of split tensors: which axes a view looks at, whatever the strides are.
//!
//! A view is a shape, strides and an offset in the memory of its source, and a member's part of that source has strides of its own. So strides
//! and offset are read as steps and positions along the source's axes, which can then be said in the member's strides.

use crate::state::{Runs, State};
use samite_core::{DIMS, Layout, Op, Shape};

/// A view along the axes of its source.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// By dimension of the view: along which axis of the source it goes, and how many of its elements (blocks on axis 0) one step is.
    steps: [Option<(usize, usize)>; DIMS],
    /// By axis of the source: where the view begins, in elements (blocks on axis 0).
    start: [usize; DIMS],
    shape: Shape,
    /// The axis along which the source is split.
    axis: usize,
    /// How many of its elements (blocks) belong together.
    unit: usize,
    /// The dimension of the view that is split.
    split: usize,
    /// The source's runs in units, and the view's.
    source: Runs,
    runs: Runs,
}

/// Elements that one index of `axis` stands for: of quantized types, blocks lie along axis 0.
fn grain(layout: &Layout, axis: usize) -> usize {
    match axis {
        0 => layout.dtype().block_len(),
        _ => 1,
    }
}

/// The axes that have a step, with stride and extent in elements or blocks, the innermost first; `None` if they reach over each other.
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

impl Window {
    /// The view that `op` makes of a split source; `None` where its parts are not views of the source's parts.
    pub fn of(op: &Op, source: &Layout, axis: usize, runs: &Runs) -> Option<Self> {
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
        // A step over the end of an axis would be one along the next.
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
            // The inner one stays within a unit of the outer one.
            [(1, inner), (unit, outer)] if start[axis] % unit + extent_of(inner) <= unit => {
                (unit, outer)
            }
            _ => return None,
        };
        let source_units = runs.in_units(unit)?;
        let window = source_units.window(start[axis] / unit, extent_of(split));
        (window.total() == extent_of(split)).then_some(Window {
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

    /// The state of the view.
    pub fn state(&self, source: &Layout) -> State {
        let grain = if self.split == 0 { grain(source, 0) } else { 1 };
        State::split(self.split, self.runs.times(grain))
    }

    /// The view of what `member` has of the source; `None` where no view does it.
    pub fn local(&self, member: usize, source: &Layout) -> Option<Op> {
        let strides = source.strides();
        let mut shape = self.shape;
        let grain = if self.split == 0 { grain(source, 0) } else { 1 };
        shape[self.split] = self.runs.len_of(member) * grain;
        let mut offset = 0;
        for (axis, stride) in strides.into_iter().enumerate() {
            let at = match axis == self.axis {
                true => {
                    let first = self.start[axis] / self.unit;
                    self.source.before(member, first) * self.unit + self.start[axis] % self.unit
                }
                false => self.start[axis],
            };
            offset += at * stride;
        }
        let block = source.dtype().block_bytes();
        let mut result = [block; DIMS];
        let mut next = block * shape[0] / source.dtype().block_len();
        for d in 0..DIMS {
            let stride = match self.steps[d] {
                Some((axis, step)) => step * strides[axis],
                // One element: any stride that is valid.
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

/// The state of a split tensor in another shape, where its parts are runs of whole elements along one axis of that.
pub(crate) fn reshaped(from: Shape, axis: usize, runs: &Runs, to: Shape) -> Option<State> {
    let product = |extents: &[usize]| extents.iter().product::<usize>();
    let (inner, outer) = (product(&from[..axis]), product(&from[axis + 1..]));
    let elements = runs.times(inner);
    (0..DIMS)
        .filter(|&axis| product(&to[axis + 1..]) == outer)
        .find_map(|axis| {
            let runs = elements.in_units(product(&to[..axis]))?;
            (runs.total() == to[axis]).then(|| State::split(axis, runs))
        })
}
