//! Reshapes, views and copies.

use super::{Case, Decision, Mode};
use crate::state::SplitState;
use crate::window::{ViewWindow, reshaped};
use samite_core::Op;

pub(super) fn repeat(c: &Case<'_>) -> Option<Decision> {
    if let Some((axis, runs)) = c.split(0) {
        let times = c.result.shape()[axis].checked_div(c.extent(0, axis)?)?;
        let state = SplitState::split(axis, runs.clone());
        return Decision::each(vec![state], SplitState::split(axis, runs.repeated(times)));
    }
    c.linear_in(0)
}

pub(super) fn concat(c: &Case<'_>) -> Option<Decision> {
    let Op::Concat { dim } = *c.op else {
        return None;
    };
    if c.is_partial(0) && c.is_partial(1) {
        return Decision::each(vec![SplitState::Partial; 2], SplitState::Partial);
    }
    match (c.split(0), c.split(1)) {
        (Some((first, a)), Some((second, b))) if first == dim && second == dim => {
            let want = vec![
                SplitState::split(dim, a.clone()),
                SplitState::split(dim, b.clone()),
            ];
            Decision::each(want, SplitState::split(dim, a.followed_by(b)))
        }
        (Some((axis, runs)), _) | (None, Some((axis, runs))) if axis != dim => {
            let state = SplitState::split(axis, runs.clone());
            Decision::each(vec![state.clone(); 2], state)
        }
        _ => None,
    }
}

pub(super) fn pad(c: &Case<'_>) -> Option<Decision> {
    let Op::Pad { before, after } = *c.op else {
        return None;
    };
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        return if before[axis] == 0 && after[axis] == 0 {
            Decision::each(vec![state.clone()], state)
        } else {
            None
        };
    }
    c.linear_in(0)
}

pub(super) fn reshape(c: &Case<'_>) -> Option<Decision> {
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        let shape = c.source(0)?.layout.shape();
        let result = reshaped(shape, axis, runs, c.result.shape())?;
        result.check(c.result, usize::MAX).ok()?;
        return Decision::each(vec![state], result);
    }
    c.linear_in(0)
}

pub(super) fn view(c: &Case<'_>) -> Option<Decision> {
    let Some((axis, runs)) = c.split(0) else {
        return c.linear_in(0);
    };
    let source = c.source(0)?.layout;
    let window = ViewWindow::for_op(c.op, source, axis, runs)?;
    let result = window.state(source);
    result.check(c.result, usize::MAX).ok()?;
    Some(Decision {
        want: vec![SplitState::split(axis, runs.clone())],
        result,
        mode: Mode::View(Box::new(window)),
    })
}

pub(super) fn permute(c: &Case<'_>) -> Option<Decision> {
    let axes = match *c.op {
        Op::Permute { axes } => axes,
        _ => [1, 0, 2, 3],
    };
    if let Some((axis, runs)) = c.split(0) {
        let state = SplitState::split(axis, runs.clone());
        let result = SplitState::split(axes[axis], runs.clone());
        return Decision::each(vec![state], result);
    }
    c.linear_in(0)
}

/// Divides a copy into memory whose division stays the same.
pub(super) fn cpy(c: &Case<'_>) -> Option<Decision> {
    let (axis, runs) = c.split(1)?;
    let target = SplitState::split(axis, runs.clone());
    let (from, to) = (c.source(0)?.layout.shape(), c.source(1)?.layout.shape());
    let source = if from == to {
        target.clone()
    } else {
        reshaped(to, axis, runs, from)?
    };
    source.check(c.source(0)?.layout, usize::MAX).ok()?;
    Decision::each(vec![source, target.clone()], target)
}
