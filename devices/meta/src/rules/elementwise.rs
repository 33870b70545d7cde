//! Elementwise operations.

use super::{Case, Decision, Mode};
use crate::state::{AxisRuns, SplitState};
use samite_core::{DType, Op, Unary};

/// Divides operations with one source.
pub(super) fn each(c: &Case<'_>) -> Option<Decision> {
    if let Op::Fill { .. } = c.op {
        // Only the shape matters.
        let state = c.source(0)?.state.clone();
        let result = match &state {
            SplitState::Split { .. } => state.clone(),
            SplitState::Mirrored | SplitState::Partial => SplitState::Mirrored,
        };
        return Decision::each(vec![state], result);
    }
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        state.check(c.result, usize::MAX).ok()?;
        return Decision::each(vec![state.clone()], state);
    }
    let linear = match c.op {
        Op::Dup | Op::Cont | Op::Unary(Unary::Neg) => true,
        Op::Cast { dtype } => *dtype == DType::F32,
        Op::Scale { bias, .. } => *bias == 0.0,
        _ => false,
    };
    if linear { c.linear_in(0) } else { None }
}

/// Returns the state that the second operand must have if the first is split along `axis`. Returns
/// `None` if its parts do not match.
fn second(c: &Case<'_>, axis: usize, runs: &AxisRuns) -> Option<SplitState> {
    let (whole, part) = (c.extent(0, axis)?, c.extent(1, axis)?);
    match part {
        part if part == whole => Some(SplitState::split(axis, runs.clone())),
        1 => Some(SplitState::Mirrored),
        // The operand is broadcast: each run must consist of whole periods.
        period => runs.in_units(period).map(|_| SplitState::Mirrored),
    }
}

/// Divides operations with two operands. The second may be broadcast.
pub(super) fn binary(c: &Case<'_>) -> Option<Decision> {
    let [a, b] = [0, 1].map(|index| c.is_partial(index));
    let is_sum = matches!(c.op, Op::Add | Op::Sub);
    let is_f32 = c.result.dtype() == DType::F32;
    let same_shape = c.source(0)?.layout.shape() == c.source(1)?.layout.shape();
    if a && is_f32 {
        return match (is_sum, b) {
            (true, true) => Decision::each(vec![SplitState::Partial; 2], SplitState::Partial),
            // Only one member adds the replicated operand.
            (true, false) => Some(Decision {
                want: c.want([(0, SplitState::Partial)]),
                result: SplitState::Partial,
                mode: Mode::First { pass: 0 },
            }),
            (false, _) => c.linear_in(0),
        };
    }
    if b && is_f32 && c.is_mirrored(0) {
        match c.op {
            Op::Add if same_shape => {
                return Some(Decision {
                    want: c.want([(1, SplitState::Partial)]),
                    result: SplitState::Partial,
                    mode: Mode::First { pass: 1 },
                });
            }
            Op::Mul => return c.linear_in(1),
            _ => {}
        }
    }
    let (axis, runs) = match (c.split(0), c.split(1)) {
        (Some(first), _) => first,
        // Cut the replicated operand like the split one if both have the same extent.
        (None, Some((axis, runs))) if c.extent(0, axis) == c.extent(1, axis) => (axis, runs),
        _ => return None,
    };
    let state = SplitState::split(axis, runs.clone());
    state.check(c.result, usize::MAX).ok()?;
    let second = second(c, axis, runs)?;
    Decision::each(vec![state.clone(), second], state)
}

/// Divides the addition of rows selected by index.
pub(super) fn add_id(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(0) {
        return Some(Decision {
            want: c.want([(0, SplitState::Partial)]),
            result: SplitState::Partial,
            mode: Mode::First { pass: 0 },
        });
    }
    if let Some(runs) = c.split_on(0, 0).or(c.split_on(1, 0)) {
        let state = SplitState::split(0, runs.clone());
        return Decision::each(c.want([(0, state.clone()), (1, state.clone())]), state);
    }
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis <= 2)?;
    let state = SplitState::split(axis, runs.clone());
    let numbers = SplitState::split(axis - 1, runs.clone());
    Decision::each(c.want([(0, state.clone()), (2, numbers)]), state)
}

/// Divides gated units of one or two sources.
pub(super) fn glu(c: &Case<'_>) -> Option<Decision> {
    if c.source(1).is_some() {
        let (axis, runs) = c.split(0).or(c.split(1))?;
        let state = SplitState::split(axis, runs.clone());
        return Decision::each(vec![state.clone(); 2], state);
    }
    let (axis, runs) = c.split(0)?;
    let state = SplitState::split(axis, runs.clone());
    if axis > 0 {
        return Decision::each(vec![state.clone()], state);
    }
    // If both halves of a row are divided alike, they are the halves of each member's part.
    let half = c.extent(0, 0)? / 2;
    let (first, rest) = (runs.window(0, half), runs.window(half, half));
    if first == rest {
        Decision::each(vec![state], SplitState::split(0, first))
    } else {
        None
    }
}

/// Divides the masking of rows at the diagonal by their index.
pub(super) fn diag_mask(c: &Case<'_>) -> Option<Decision> {
    if matches!(c.op, Op::DiagMaskZero { .. }) && c.is_partial(0) {
        return c.linear_in(0);
    }
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis >= 2)?;
    let state = SplitState::split(axis, runs.clone());
    Decision::each(vec![state.clone()], state)
}
