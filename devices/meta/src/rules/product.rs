//! Matrix products.

use super::{Case, Decision};
use crate::state::SplitState;

/// Divides the product of `W [k, m, …]` and `X [k, n, …]`.
pub(super) fn mul_mat(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(1) && c.is_mirrored(0) {
        return c.linear_in(1);
    }
    if c.is_partial(0) && c.is_mirrored(1) {
        return c.linear_in(0);
    }
    match c.split(0) {
        // Rows of the weights are elements of the result.
        Some((1, runs)) => {
            let rows = SplitState::split(1, runs.clone());
            Decision::each(c.want([(0, rows)]), SplitState::split(0, runs.clone()))
        }
        // Partial dot products.
        Some((0, runs)) => {
            let columns = SplitState::split(0, runs.clone());
            columns.check(c.source(1)?.layout, usize::MAX).ok()?;
            Decision::each(vec![columns; 2], SplitState::Partial)
        }
        // Heads or other batches: each of the first operand serves several of the second.
        Some((axis, runs)) => {
            let group = c.extent(1, axis)? / c.extent(0, axis)?;
            let batches = SplitState::split(axis, runs.clone());
            let result = SplitState::split(axis, runs.times(group));
            Decision::each(vec![batches, result.clone()], result)
        }
        None => {
            let (axis, runs) = c.split(1)?;
            let state = SplitState::split(axis, runs.clone());
            match axis {
                0 => None,
                1 => Decision::each(c.want([(1, state.clone())]), state),
                _ if c.extent(0, axis)? == 1 => Decision::each(c.want([(1, state.clone())]), state),
                _ => {
                    let group = c.extent(1, axis)? / c.extent(0, axis)?;
                    let batches = SplitState::split(axis, runs.in_units(group)?);
                    Decision::each(vec![batches, state.clone()], state)
                }
            }
        }
    }
}

/// Divides products with selected experts `[k, m, experts]`. All members select the same ones.
pub(super) fn mul_mat_id(c: &Case<'_>) -> Option<Decision> {
    if c.is_partial(1) && c.is_mirrored(0) {
        return c.linear_in(1);
    }
    match c.split(0) {
        Some((1, runs)) => {
            let rows = SplitState::split(1, runs.clone());
            Decision::each(c.want([(0, rows)]), SplitState::split(0, runs.clone()))
        }
        Some((0, runs)) => {
            let columns = SplitState::split(0, runs.clone());
            Decision::each(
                c.want([(0, columns.clone()), (1, columns)]),
                SplitState::Partial,
            )
        }
        Some(_) => None,
        None => {
            // Split by tokens, or by each token's experts.
            let (axis, runs) = c.split(1).filter(|&(axis, _)| axis == 1 || axis == 2)?;
            if c.extent(1, axis)? != c.extent(2, axis - 1)? {
                return None;
            }
            let state = SplitState::split(axis, runs.clone());
            let chosen = SplitState::split(axis - 1, runs.clone());
            Decision::each(c.want([(1, state.clone()), (2, chosen)]), state)
        }
    }
}

/// Divides sums of outer products of `A [m, k, …]` and `B [n, k, …]`.
pub(super) fn out_prod(c: &Case<'_>) -> Option<Decision> {
    for (one, other) in [(0, 1), (1, 0)] {
        if c.is_partial(one) && c.is_mirrored(other) {
            return c.linear_in(one);
        }
    }
    if let Some(runs) = c.split_on(0, 1).or(c.split_on(1, 1)) {
        return Decision::each(
            vec![SplitState::split(1, runs.clone()); 2],
            SplitState::Partial,
        );
    }
    for index in 0..2 {
        if let Some(runs) = c.split_on(index, 0)
            && c.split(1 - index).is_none()
        {
            let part = SplitState::split(0, runs.clone());
            let want = c.want([(index, part)]);
            return Decision::each(want, SplitState::split(index, runs.clone()));
        }
    }
    None
}
