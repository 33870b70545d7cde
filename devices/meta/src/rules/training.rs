//! Gradients and optimizer steps.

use super::{Case, Decision};
use crate::state::SplitState;

/// Divides the sum of parts that were repeated from one element.
pub(super) fn repeat_back(c: &Case<'_>) -> Option<Decision> {
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        return match c.result.shape()[axis] {
            extent if Some(extent) == c.extent(0, axis) => {
                Decision::each(vec![state.clone()], state)
            }
            1 => Decision::each(vec![state], SplitState::Partial),
            _ => None,
        };
    }
    c.linear_in(0)
}

/// Divides an elementwise operation that is linear in the gradient.
pub(super) fn silu_back(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(0) && c.is_mirrored(1) {
        return c.linear_in(0);
    }
    let (axis, runs) = c.split(0).or(c.split(1))?;
    let state = SplitState::split(axis, runs.clone());
    Decision::each(vec![state.clone(); 2], state)
}

/// Divides an operation by row that is linear in the gradient.
pub(super) fn back_of_rows(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(0) && c.is_mirrored(1) {
        return c.linear_in(0);
    }
    let (axis, runs) = c.split(0).or(c.split(1))?;
    if axis == 0 {
        return None;
    }
    let state = SplitState::split(axis, runs.clone());
    Decision::each(vec![state.clone(); 2], state)
}

/// Divides sums of gradients of rows by the table row that they belong to.
pub(super) fn get_rows_back(c: &Case<'_>) -> Option<Decision> {
    match c.split(0) {
        Some((0, runs)) => {
            let state = SplitState::split(0, runs.clone());
            Decision::each(c.want([(0, state.clone())]), state)
        }
        Some((1, runs)) => {
            let numbers = SplitState::split(0, runs.clone());
            Decision::each(
                vec![SplitState::split(1, runs.clone()), numbers],
                SplitState::Partial,
            )
        }
        Some(_) => None,
        None => c.linear_in(0),
    }
}

/// Divides an optimizer step. Weights and moments keep their division; the gradient and the moments
/// must be divided like the weights.
pub(super) fn step(c: &Case<'_>) -> Option<Decision> {
    let weights = c.source(0)?.state;
    weights.as_split()?;
    let mut want = vec![weights.clone(); c.sources.len()];
    // The parameters.
    *want.last_mut()? = SplitState::Mirrored;
    Decision::each(want, weights.clone())
}
