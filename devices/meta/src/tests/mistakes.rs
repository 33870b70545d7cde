//! Planted bugs: wrong rules that a person could have written. The tests must find each.

use super::bench::Rng;
use super::cases::random;
use crate::rules::{Case, Decision, Mode, decide};
use crate::state::SplitState;
use samite_core::OpKind;

type Change = fn(&Case<'_>, Decision) -> Decision;

fn state(case: &Case<'_>, index: usize) -> SplitState {
    case.sources[index].unwrap().state.clone()
}

/// Takes every source as it is and gives the result the state of the first one.
fn as_it_is(case: &Case<'_>, mut decision: Decision) -> Decision {
    for (index, want) in decision.want.iter_mut().enumerate() {
        if let Some(source) = &case.sources[index] {
            *want = source.state.clone();
        }
    }
    decision.result = state(case, 0);
    decision
}

/// Keeps a partial first source partial.
fn stays_partial(case: &Case<'_>, decision: Decision) -> Decision {
    match state(case, 0) {
        SplitState::Partial => as_it_is(case, decision),
        _ => decision,
    }
}

/// Keeps a split first source split.
fn stays_split(case: &Case<'_>, decision: Decision) -> Decision {
    match state(case, 0) {
        SplitState::Split { .. } => as_it_is(case, decision),
        _ => decision,
    }
}

/// Omits a sum.
fn not_summed(_: &Case<'_>, mut decision: Decision) -> Decision {
    if decision.result == SplitState::Partial {
        decision.result = SplitState::Mirrored;
    }
    decision
}

/// Lets all members add an operand that only one must add.
fn added_by_all(_: &Case<'_>, mut decision: Decision) -> Decision {
    if matches!(decision.mode, Mode::First { .. }) {
        decision.mode = Mode::Each;
    }
    decision
}

fn part_of_mean(case: &Case<'_>, mut decision: Decision) -> Decision {
    if let SplitState::Split { axis: 0, .. } = state(case, 0) {
        decision.want = vec![state(case, 0)];
        decision.result = SplitState::Partial;
    }
    decision
}

fn other_order(case: &Case<'_>, mut decision: Decision) -> Decision {
    if let [
        SplitState::Split { axis, runs: a },
        SplitState::Split { runs: b, .. },
    ] = &decision.want[..]
        && let SplitState::Split { axis: result, .. } = decision.result
        && *axis == result
        && case.result.shape()[result] != a.total()
    {
        decision.result = SplitState::split(result, b.followed_by(a));
    }
    decision
}

fn longer_runs(case: &Case<'_>, mut decision: Decision) -> Decision {
    if let (SplitState::Split { axis, runs }, SplitState::Split { .. }) =
        (state(case, 0), &decision.result)
    {
        let times = case.result.shape()[axis] / runs.total();
        decision.result = SplitState::split(axis, runs.times(times));
    }
    decision
}

fn heads_with_slopes(case: &Case<'_>, decision: Decision) -> Decision {
    match (state(case, 0), case.sources.len()) {
        (SplitState::Split { axis: 2, .. }, 2) => {
            let mut wrong = as_it_is(case, decision);
            wrong.want[1] = SplitState::Mirrored;
            wrong
        }
        _ => decision,
    }
}

fn half_rows(case: &Case<'_>, mut decision: Decision) -> Decision {
    if let (SplitState::Split { axis: 0, runs }, 1) = (state(case, 0), case.sources.len()) {
        // Lets the first half decide alone.
        let half = case.result.shape()[0];
        decision.want = vec![state(case, 0)];
        decision.result = SplitState::split(0, runs.window(0, half));
    }
    decision
}

const MISTAKES: [(&str, OpKind, Change); 22] = [
    (
        "a bias is added by every member",
        OpKind::Scale,
        stays_partial,
    ),
    (
        "a function of a part of a sum",
        OpKind::Unary,
        stays_partial,
    ),
    ("squares of parts of a sum", OpKind::Sqr, stays_partial),
    ("a norm of a part of a sum", OpKind::RmsNorm, stays_partial),
    ("a norm of parts of rows", OpKind::RmsNorm, stays_split),
    ("a norm of parts of rows", OpKind::Norm, stays_split),
    ("softmax of parts of rows", OpKind::SoftMax, stays_split),
    (
        "slopes of the wrong heads",
        OpKind::SoftMax,
        heads_with_slopes,
    ),
    ("running sums of parts of rows", OpKind::CumSum, stays_split),
    ("order of parts of rows", OpKind::ArgSort, stays_split),
    (
        "the diagonal of a member's rows",
        OpKind::DiagMaskInf,
        stays_split,
    ),
    ("added by all", OpKind::Add, added_by_all),
    ("added by all", OpKind::AddId, added_by_all),
    ("a sum that nobody makes", OpKind::MulMat, not_summed),
    ("a sum that nobody makes", OpKind::MulMatId, not_summed),
    ("a sum that nobody makes", OpKind::SumRows, not_summed),
    ("a sum that nobody makes", OpKind::OutProd, not_summed),
    (
        "a mean by the number of a member's elements",
        OpKind::Mean,
        part_of_mean,
    ),
    ("joined in the other order", OpKind::Concat, other_order),
    (
        "longer runs instead of repeated ones",
        OpKind::Repeat,
        longer_runs,
    ),
    (
        "halves that are divided differently",
        OpKind::Glu,
        half_rows,
    ),
    (
        "gradients of parts of rows",
        OpKind::SoftMaxBack,
        stays_split,
    ),
];

#[test]
fn planted_rule_bugs_are_detected() {
    for (what, kind, change) in MISTAKES {
        let wrong = |case: &Case<'_>| {
            let decision = decide(case);
            if case.op.kind() == kind {
                change(case, decision)
            } else {
                decision
            }
        };
        let noticed = (0..300u64)
            .filter(|&seed| {
                let rng = &Rng::new(seed * 1000 + kind as u64);
                let members = 1 + rng.below(4);
                let case = random(rng, kind, members);
                let outcome = case.compare(members, rng.below(2) == 0, &wrong, rng);
                outcome.wrong.is_some()
            })
            .count();
        println!("{kind:?}, {what}: noticed by {noticed} of 300");
        assert!(noticed > 0, "{kind:?}: {what} is not noticed");
    }
}
