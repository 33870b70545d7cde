//! Distribution of a tensor over the members.

use samite_core::{DType, Error, Layout, Result};
use serde::Serialize;
use std::fmt;

/// Consecutive elements along an axis that belong to one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AxisRun {
    /// Index of the member.
    pub member: usize,
    /// Number of elements.
    pub len: usize,
}

/// Assignment of the elements along an axis to members, in order. Adjacent runs of one member are
/// merged and none is empty, so equal lists mean equal divisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AxisRuns(Vec<AxisRun>);

impl FromIterator<AxisRun> for AxisRuns {
    fn from_iter<I: IntoIterator<Item = AxisRun>>(list: I) -> Self {
        let mut runs: Vec<AxisRun> = Vec::new();
        for run in list.into_iter().filter(|run| run.len > 0) {
            match runs.last_mut() {
                Some(last) if last.member == run.member => last.len += run.len,
                _ => runs.push(run),
            }
        }
        AxisRuns(runs)
    }
}

impl AxisRuns {
    /// Creates one run per member, in the order of members.
    pub fn in_order(lens: &[usize]) -> Self {
        lens.iter()
            .enumerate()
            .map(|(member, &len)| AxisRun { member, len })
            .collect()
    }

    /// Returns the runs.
    pub fn iter(&self) -> impl Iterator<Item = AxisRun> + '_ {
        self.0.iter().copied()
    }

    /// Returns the number of elements of all members.
    pub fn total(&self) -> usize {
        self.iter().map(|run| run.len).sum()
    }

    /// Returns the number of elements of one member.
    pub fn len_of(&self, member: usize) -> usize {
        self.ranges(member).map(|(_, len)| len).sum()
    }

    /// Returns the start and length of each run of one member.
    pub fn ranges(&self, member: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut end = 0;
        self.iter().filter_map(move |run| {
            let start = end;
            end += run.len;
            (run.member == member).then_some((start, run.len))
        })
    }

    /// Returns how many of the elements before `end` belong to one member.
    pub fn before(&self, member: usize, end: usize) -> usize {
        self.ranges(member)
            .map(|(start, len)| end.saturating_sub(start).min(len))
            .sum()
    }

    /// Multiplies the length of each run by `factor`.
    #[must_use]
    pub fn times(&self, factor: usize) -> Self {
        let longer = |run: AxisRun| AxisRun {
            len: run.len * factor,
            ..run
        };
        self.iter().map(longer).collect()
    }

    /// Divides the length of each run by `unit`. Returns `None` if a length is not a multiple.
    pub fn in_units(&self, unit: usize) -> Option<Self> {
        self.iter()
            .map(|run| {
                let whole = unit > 0 && run.len.is_multiple_of(unit);
                whole.then(|| AxisRun {
                    len: run.len / unit,
                    ..run
                })
            })
            .collect()
    }

    /// Returns the runs of `len` elements from `start` on.
    #[must_use]
    pub fn window(&self, start: usize, len: usize) -> Self {
        let mut at = 0;
        let cut = |run: AxisRun| {
            let (from, to) = (at.max(start), (at + run.len).min(start + len));
            at += run.len;
            AxisRun {
                len: to.saturating_sub(from),
                ..run
            }
        };
        self.iter().map(cut).collect()
    }

    /// Appends other runs.
    #[must_use]
    pub fn followed_by(&self, others: &AxisRuns) -> Self {
        self.iter().chain(others.iter()).collect()
    }

    /// Repeats the list `times` times.
    #[must_use]
    pub fn repeated(&self, times: usize) -> Self {
        (0..times).flat_map(|_| self.iter()).collect()
    }
}

impl fmt::Display for AxisRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<_> = self
            .iter()
            .map(|run| format!("{}:{}", run.member, run.len))
            .collect();
        f.write_str(&list.join(" "))
    }
}

/// Distribution of a tensor over the members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitState {
    /// Each member has the whole tensor.
    Mirrored,
    /// Each member has a shard: its runs along an axis, concatenated.
    Split {
        /// Axis, 0 to 3.
        axis: usize,
        /// Assignment of the elements to members.
        runs: AxisRuns,
    },
    /// Each member has an f32 tensor of the whole shape. The value is their sum.
    Partial,
}

impl SplitState {
    /// Creates a split along `axis`.
    pub fn split(axis: usize, runs: AxisRuns) -> Self {
        SplitState::Split { axis, runs }
    }

    /// Returns the axis and the runs of a split tensor.
    pub fn as_split(&self) -> Option<(usize, &AxisRuns)> {
        match self {
            SplitState::Split { axis, runs } => Some((*axis, runs)),
            SplitState::Mirrored | SplitState::Partial => None,
        }
    }

    /// Checks that a tensor of this layout can be in this state among `members` members.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if runs do not cover the axis, cut blocks, or name a
    /// member that does not exist. Also fails for a partial tensor that is not f32.
    pub fn check(&self, layout: &Layout, members: usize) -> Result<()> {
        let wrong = |why: &str| Err(Error::invalid(format!("{layout} cannot be {self}: {why}")));
        match self {
            SplitState::Mirrored => Ok(()),
            SplitState::Partial if layout.dtype() != DType::F32 => wrong("only f32 is summed"),
            SplitState::Partial => Ok(()),
            SplitState::Split { axis, runs } => {
                let Some(&extent) = layout.shape().get(*axis) else {
                    return wrong("there are 4 axes");
                };
                if runs.total() != extent {
                    return wrong("the runs do not cover the axis");
                }
                if runs.iter().any(|run| run.member >= members) {
                    return wrong("a member is not there");
                }
                let block = if *axis == 0 {
                    layout.dtype().block_len()
                } else {
                    1
                };
                match runs.in_units(block) {
                    Some(_) => Ok(()),
                    None => wrong("runs cut blocks"),
                }
            }
        }
    }

    /// Returns the shape of the shard of `member` of a tensor of this shape.
    pub fn local_shape(&self, mut shape: samite_core::Shape, member: usize) -> samite_core::Shape {
        if let SplitState::Split { axis, runs } = self {
            shape[*axis] = runs.len_of(member);
        }
        shape
    }
}

impl fmt::Display for SplitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SplitState::Mirrored => f.write_str("mirrored"),
            SplitState::Partial => f.write_str("partial"),
            SplitState::Split { axis, runs } => write!(f, "split({axis}; {runs})"),
        }
    }
}

/// Consecutive bytes of a contiguous tensor that belong to one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRange {
    /// Index of the member.
    pub member: usize,
    /// Offset in the member's shard.
    pub local: usize,
    /// Offset in the whole tensor.
    pub global: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Returns the pieces of bytes `from..to` of a contiguous tensor that is split along `axis`, in the
/// order of the whole tensor.
pub fn pieces(
    layout: &Layout,
    axis: usize,
    runs: &AxisRuns,
    from: usize,
    to: usize,
    mut each: impl FnMut(ShardRange) -> Result<()>,
) -> Result<()> {
    let dtype = layout.dtype();
    let blocks = |len: usize| match axis {
        0 => len / dtype.block_len(),
        _ => len,
    };
    let inner = layout.strides()[axis];
    let whole = inner * blocks(layout.shape()[axis]);
    if whole == 0 || from >= to {
        return Ok(());
    }
    // For each run: its member, length in bytes, and offset in a row of the member's shard.
    let members = runs.iter().map(|run| run.member + 1).max().unwrap_or(0);
    let mut lens = vec![0; members];
    let starts: Vec<(AxisRun, usize)> = runs
        .iter()
        .map(|run| {
            let len = blocks(run.len) * inner;
            let start = lens[run.member];
            lens[run.member] += len;
            (AxisRun { len, ..run }, start)
        })
        .collect();
    for row in from / whole..to.div_ceil(whole) {
        let mut at = row * whole;
        for (run, start) in &starts {
            let (first, last) = (at.max(from), (at + run.len).min(to));
            if first < last {
                each(ShardRange {
                    member: run.member,
                    local: row * lens[run.member] + start + (first - at),
                    global: first,
                    len: last - first,
                })?;
            }
            at += run.len;
        }
    }
    Ok(())
}

/// Divides `units` units among members in proportion to `ratios`. Remaining units go to the largest
/// remainders; of equal ones, to the first member from index `turn` on.
pub fn divide(units: usize, ratios: &[f32], turn: usize) -> Vec<usize> {
    let n = ratios.len();
    let total: f64 = ratios.iter().map(|&ratio| f64::from(ratio)).sum();
    let wanted: Vec<f64> = ratios
        .iter()
        .map(|&ratio| units as f64 * f64::from(ratio) / total)
        .collect();
    let mut shares: Vec<usize> = wanted.iter().map(|&share| share as usize).collect();
    let mut order: Vec<usize> = (0..n).map(|i| (i + turn) % n.max(1)).collect();
    let rest = |i: &usize| wanted[*i] - shares[*i] as f64;
    // The sort is stable, so the turn decides between equal remainders. Remainders that differ only
    // by rounding count as equal.
    order.sort_by_key(|i| std::cmp::Reverse((rest(i) * 1e6).round() as i64));
    let left = units.saturating_sub(shares.iter().sum());
    for &member in order.iter().cycle().take(if n == 0 { 0 } else { left }) {
        shares[member] += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn runs(list: &[(usize, usize)]) -> AxisRuns {
        list.iter()
            .map(|&(member, len)| AxisRun { member, len })
            .collect()
    }

    #[test]
    fn equal_splits_have_equal_run_lists() {
        assert_eq!(
            runs(&[(0, 2), (0, 3), (1, 0), (2, 4)]),
            runs(&[(0, 5), (2, 4)])
        );
        assert_ne!(runs(&[(0, 2), (1, 2)]), runs(&[(1, 2), (0, 2)]));
        assert_ne!(
            runs(&[(0, 1), (1, 2), (0, 1)]),
            runs(&[(0, 2), (1, 2)]),
            "the same sums"
        );
    }

    #[test]
    fn split_runs_support_windows_units_and_positions() {
        let r = runs(&[(1, 4), (0, 6), (1, 2)]);
        assert_eq!((r.total(), r.len_of(1), r.len_of(7)), (12, 6, 0));
        assert_eq!(r.ranges(1).collect::<Vec<_>>(), [(0, 4), (10, 2)]);
        assert_eq!(
            [0, 3, 5, 11, 99].map(|end| r.before(1, end)),
            [0, 3, 4, 5, 6]
        );
        assert_eq!(r.window(3, 8), runs(&[(1, 1), (0, 6), (1, 1)]));
        assert_eq!(r.in_units(2), Some(runs(&[(1, 2), (0, 3), (1, 1)])));
        assert_eq!(r.in_units(4), None);
        assert_eq!(r.in_units(2).unwrap().times(2), r);
        assert_eq!(r.repeated(2).window(12, 12), r);
    }

    #[test]
    fn states_are_checked() {
        let layout = Layout::contiguous(DType::Q8_0, [64, 3, 1, 1]).unwrap();
        let check = |state: SplitState| state.check(&layout, 2).is_ok();
        assert!(check(SplitState::Mirrored) && !check(SplitState::Partial));
        assert!(check(SplitState::split(0, runs(&[(0, 32), (1, 32)]))));
        assert!(
            !check(SplitState::split(0, runs(&[(0, 16), (1, 48)]))),
            "blocks"
        );
        assert!(check(SplitState::split(1, runs(&[(1, 3)]))));
        assert!(!check(SplitState::split(1, runs(&[(1, 2)]))), "not all");
        assert!(
            !check(SplitState::split(1, runs(&[(2, 3)]))),
            "no such member"
        );
        assert!(
            !check(SplitState::split(4, runs(&[(0, 1)]))),
            "no such axis"
        );
    }

    #[test]
    fn units_are_divided_by_largest_remainders() {
        assert_eq!(divide(8, &[1.0, 1.0], 0), [4, 4]);
        assert_eq!(divide(7, &[1.0, 1.0], 0), [4, 3]);
        assert_eq!(divide(7, &[1.0, 1.0], 1), [3, 4]);
        assert_eq!(divide(8, &[3.0, 1.0], 0), [6, 2]);
        assert_eq!(divide(1, &[0.0, 1.0], 0), [0, 1]);
        assert_eq!(divide(4, &[1.0, 0.0, 1.0], 5), [2, 0, 2]);
        assert_eq!(divide(0, &[1.0], 3), [0]);
    }

    proptest! {
        #[test]
        fn division_assigns_all_units(units in 0usize..100,
            ratios in prop::collection::vec(0.01f32..9.0, 1..6), turn in 0usize..9) {
            let shares = divide(units, &ratios, turn);
            prop_assert_eq!(shares.iter().sum::<usize>(), units);
            let total: f32 = ratios.iter().sum();
            for (share, ratio) in shares.iter().zip(&ratios) {
                prop_assert!((*share as f32 - units as f32 * ratio / total).abs() < 1.001);
            }
        }

        #[test]
        fn pieces_cover_every_byte_once(
            list in prop::collection::vec((0usize..3, 0usize..4), 1..6),
            axis in 0usize..4, others in 1usize..4,
            dtype in prop::sample::select(vec![DType::F32, DType::Q8_0]),
            ends in [0usize..2000, 0..2000],
        ) {
            let block = if axis == 0 { dtype.block_len() } else { 1 };
            let runs = runs(&list).times(block);
            prop_assume!(runs.total() > 0);
            let mut shape = [others, others, others, others];
            shape[0] *= dtype.block_len();
            shape[axis] = runs.total();
            let layout = Layout::contiguous(dtype, shape).unwrap();
            let (from, to) = (
                ends[0].min(ends[1]).min(layout.bytes()),
                ends[0].max(ends[1]).min(layout.bytes()),
            );
            let mut at = from;
            let mut last = [None; 3];
            pieces(&layout, axis, &runs, from, to, |piece| {
                assert_eq!(piece.global, at);
                at += piece.len;
                // A shard keeps the order of the whole tensor.
                assert!(last[piece.member] <= Some(piece.local));
                last[piece.member] = Some(piece.local + piece.len);
                let local = SplitState::split(axis, runs.clone()).local_shape(shape, piece.member);
                assert!(
                    piece.local + piece.len <= Layout::contiguous(dtype, local).unwrap().bytes()
                );
                Ok(())
            })
            .unwrap();
            prop_assert_eq!(at, to.max(from));
        }
    }
}
