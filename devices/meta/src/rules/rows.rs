//! Operations on rows: norms, sums, orders, rows by number.

use super::{Case, Decision};
use crate::state::State;
use samite_core::DType;

/// Needs whole rows.
pub(super) fn whole(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis > 0)?;
    let state = State::split(axis, runs.clone());
    Decision::each(vec![state.clone()], state)
}

/// Needs whole rows, and is linear.
pub(super) fn whole_or_linear(c: &Case<'_>) -> Option<Decision> {
    c.linear_in(0).or_else(|| whole(c))
}

/// Sums of rows; of parts of rows, sums to be summed.
pub(super) fn sum_rows(c: &Case<'_>) -> Option<Decision> {
    if let Some(runs) = c.split_on(0, 0) {
        return Decision::each(vec![State::split(0, runs.clone())], State::Partial);
    }
    whole_or_linear(c)
}

/// One sum of everything.
pub(super) fn sum(c: &Case<'_>) -> Option<Decision> {
    if let Some((axis, runs)) = c.split(0)
        && c.result.dtype() == DType::F32
    {
        return Decision::each(vec![State::split(axis, runs.clone())], State::Partial);
    }
    c.linear_in(0)
}

/// Channels over time, each by itself: `[time, channels, sequences]` gives `[channels, tokens, sequences]`.
pub(super) fn conv(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis > 0)?;
    let state = State::split(axis, runs.clone());
    match axis {
        1 => Decision::each(vec![state.clone(), state], State::split(0, runs.clone())),
        _ => Decision::each(vec![state.clone(), State::Mirrored], state),
    }
}

/// One number for each row of a matrix.
pub(super) fn argmax(c: &Case<'_>) -> Option<Decision> {
    let runs = c.split_on(0, 1)?;
    let rows = State::split(1, runs.clone());
    Decision::each(vec![rows], State::split(0, runs.clone()))
}

/// Rows of a table.
pub(super) fn get_rows(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(0) {
        return c.linear_in(0);
    }
    match c.split(0) {
        Some((0, runs)) => {
            let state = State::split(0, runs.clone());
            Decision::each(c.want([(0, state.clone())]), state)
        }
        // Several tables, each with numbers of its own.
        Some((axis @ (2 | 3), runs)) => {
            let state = State::split(axis, runs.clone());
            let numbers = State::split(axis - 1, runs.clone());
            Decision::each(vec![state.clone(), numbers], state)
        }
        Some(_) => None,
        None => {
            let (axis, runs) = c.split(1)?;
            let numbers = State::split(axis, runs.clone());
            let state = State::split(axis + 1, runs.clone());
            match axis {
                0 => Decision::each(c.want([(1, numbers)]), state),
                1 | 2 => Decision::each(vec![state.clone(), numbers], state),
                _ => None,
            }
        }
    }
}

/// Rows into a table, which stays as it is divided.
pub(super) fn set_rows(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(2)?;
    let state = State::split(axis, runs.clone());
    let numbers = match axis {
        0 => State::Mirrored,
        2 | 3 if c.extent(1, axis - 1) == Some(1) => State::Mirrored,
        2 | 3 if c.extent(1, axis - 1) == c.extent(2, axis) => State::split(axis - 1, runs.clone()),
        _ => return None,
    };
    Decision::each(vec![state.clone(), numbers, state.clone()], state)
}
