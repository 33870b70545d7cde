//! Attention and its parts.

use super::{Case, Decision};
use crate::state::{AxisRuns, SplitState};
use samite_core::Op;

/// Returns the state that a mask must have if the given extent belongs to the split axis. Returns
/// `None` if its parts do not match.
fn mask(
    c: &Case<'_>,
    index: usize,
    axis: usize,
    whole: usize,
    runs: &AxisRuns,
) -> Option<SplitState> {
    let Some(extent) = c.extent(index, axis) else {
        return Some(SplitState::Mirrored);
    };
    match extent {
        extent if extent == whole => Some(SplitState::split(axis, runs.clone())),
        1 if axis >= 2 => Some(SplitState::Mirrored),
        _ => None,
    }
}

/// Divides softmax of rows of logits, with a mask.
pub(super) fn soft_max(c: &Case<'_>) -> Option<Decision> {
    let Op::SoftMax { max_bias, .. } = *c.op else {
        return None;
    };
    let (axis, runs) = c.split(0).filter(|&(axis, _)| axis > 0)?;
    let state = SplitState::split(axis, runs.clone());
    let mut want = c.want([(0, state.clone())]);
    if let Some(place) = want.get_mut(1) {
        *place = mask(c, 1, axis, c.extent(0, axis)?, runs)?;
    }
    if axis == 2 {
        // Slopes depend on the head's index.
        if max_bias > 0.0 {
            return None;
        }
        if let Some(place) = want.get_mut(2) {
            *place = SplitState::split(0, runs.clone());
        }
    }
    Decision::each(want, state)
}

/// Divides the rotary embedding of heads.
pub(super) fn rope(c: &Case<'_>) -> Option<Decision> {
    let (Op::Rope(of) | Op::RopeBack(of)) = *c.op else {
        return None;
    };
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        return match axis {
            0 => None,
            // The positions of one token are not adjacent.
            2 if of.axes() > 1 => None,
            2 => {
                let positions = SplitState::split(0, runs.clone());
                let want = c.want([(0, state.clone()), (1, positions)]);
                Decision::each(want, state)
            }
            _ => Decision::each(c.want([(0, state.clone())]), state),
        };
    }
    c.linear_in(0)
}

/// Divides flash attention: queries `[d, tokens, heads, batch]`, keys and values
/// `[d, kv, kv heads, batch]`.
pub(super) fn flash_attn(c: &Case<'_>) -> Option<Decision> {
    let Op::FlashAttn { max_bias, .. } = *c.op else {
        return None;
    };
    let heads_kv = c.extent(1, 2)?;
    let group = c.extent(0, 2)?.checked_div(heads_kv)?;
    let by_heads = |heads: AxisRuns, cached: SplitState| {
        if max_bias > 0.0 {
            return None;
        }
        let mut want = c.want([
            (0, SplitState::split(2, heads.clone())),
            (1, cached.clone()),
            (2, cached),
        ]);
        if let Some(place) = want.get_mut(3) {
            *place = mask(c, 3, 2, c.extent(0, 2)?, &heads)?;
        }
        if let Some(place) = want.get_mut(4) {
            *place = SplitState::split(0, heads.clone());
        }
        Decision::each(want, SplitState::split(1, heads))
    };
    if let Some(runs) = c.split_on(1, 2).or(c.split_on(2, 2)) {
        return by_heads(runs.times(group), SplitState::split(2, runs.clone()));
    }
    let (axis, runs) = c.split(0)?;
    let queries = SplitState::split(axis, runs.clone());
    match axis {
        1 => {
            let mut want = c.want([(0, queries)]);
            if let Some(place) = want.get_mut(3) {
                *place = mask(c, 3, 1, c.extent(0, 1)?, runs)?;
            }
            Decision::each(want, SplitState::split(2, runs.clone()))
        }
        // All members need the head of keys and values that all queries share.
        2 if heads_kv == 1 => by_heads(runs.clone(), SplitState::Mirrored),
        2 => by_heads(runs.clone(), SplitState::split(2, runs.in_units(group)?)),
        3 => {
            let mut want = c.want([(0, queries.clone()), (1, queries.clone()), (2, queries)]);
            if let Some(place) = want.get_mut(3) {
                *place = mask(c, 3, 3, c.extent(0, 3)?, runs)?;
            }
            Decision::each(want, SplitState::split(3, runs.clone()))
        }
        _ => None,
    }
}
