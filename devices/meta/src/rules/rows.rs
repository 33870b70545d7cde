//! Operations on rows: norms, sums, sorting, lookups.

use super::{Case, Decision};
use crate::state::SplitState;
use samite_core::DType;

/// Divides operations that need whole rows.
pub(super) fn whole(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis > 0)?;
    let state = SplitState::split(axis, runs.clone());
    Decision::each(vec![state.clone()], state)
}

/// Divides linear operations that need whole rows.
pub(super) fn whole_or_linear(c: &Case<'_>) -> Option<Decision> {
    c.linear_in(0).or_else(|| whole(c))
}

/// Divides sums of rows. Sums of partial rows are partial results.
pub(super) fn sum_rows(c: &Case<'_>) -> Option<Decision> {
    if let Some(runs) = c.split_on(0, 0) {
        return Decision::each(
            vec![SplitState::split(0, runs.clone())],
            SplitState::Partial,
        );
    }
    whole_or_linear(c)
}

/// Divides the sum of all elements.
pub(super) fn sum(c: &Case<'_>) -> Option<Decision> {
    if let Some((axis, runs)) = c.split(0)
        && c.result.dtype() == DType::F32
    {
        return Decision::each(
            vec![SplitState::split(axis, runs.clone())],
            SplitState::Partial,
        );
    }
    c.linear_in(0)
}

/// Divides a convolution over time per channel: `[time, channels, sequences]` gives
/// `[channels, tokens, sequences]`.
pub(super) fn conv(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis > 0)?;
    let state = SplitState::split(axis, runs.clone());
    match axis {
        1 => Decision::each(
            vec![state.clone(), state],
            SplitState::split(0, runs.clone()),
        ),
        _ => Decision::each(vec![state.clone(), SplitState::Mirrored], state),
    }
}

/// Divides an operation that gives one number per row of a matrix.
pub(super) fn argmax(c: &Case<'_>) -> Option<Decision> {
    let runs = c.split_on(0, 1)?;
    let rows = SplitState::split(1, runs.clone());
    Decision::each(vec![rows], SplitState::split(0, runs.clone()))
}

/// Divides a lookup of rows in a table.
pub(super) fn get_rows(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(0) {
        return c.linear_in(0);
    }
    match c.split(0) {
        Some((0, runs)) => {
            let state = SplitState::split(0, runs.clone());
            Decision::each(c.want([(0, state.clone())]), state)
        }
        // Several tables, each with its own indices.
        Some((axis @ (2 | 3), runs)) => {
            let state = SplitState::split(axis, runs.clone());
            let numbers = SplitState::split(axis - 1, runs.clone());
            Decision::each(vec![state.clone(), numbers], state)
        }
        Some(_) => None,
        None => {
            let (axis, runs) = c.split(1)?;
            let numbers = SplitState::split(axis, runs.clone());
            let state = SplitState::split(axis + 1, runs.clone());
            match axis {
                0 => Decision::each(c.want([(1, numbers)]), state),
                1 | 2 => Decision::each(vec![state.clone(), numbers], state),
                _ => None,
            }
        }
    }
}

/// Divides writes of rows to a table, whose division stays the same.
pub(super) fn set_rows(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(2)?;
    let state = SplitState::split(axis, runs.clone());
    let numbers = match axis {
        0 => SplitState::Mirrored,
        2 | 3 if c.extent(1, axis - 1) == Some(1) => SplitState::Mirrored,
        2 | 3 if c.extent(1, axis - 1) == c.extent(2, axis) => {
            SplitState::split(axis - 1, runs.clone())
        }
        _ => return None,
    };
    Decision::each(vec![state.clone(), numbers, state.clone()], state)
}
