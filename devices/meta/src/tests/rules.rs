//! Tests each rule with random shapes and states.

use super::bench::Rng;
use super::cases::{layer, random};
use crate::partition::Exchange;
use crate::rules::decide;
use crate::state::SplitState;
use samite_core::OpKind;
use std::collections::BTreeMap;

/// Operations that write to a leaf in its division, which is an error for some divisions.
const WRITERS: [OpKind; 4] = [
    OpKind::SetRows,
    OpKind::Cpy,
    OpKind::OptStepAdamW,
    OpKind::OptStepSgd,
];

/// Operations that every member always computes as a whole.
const WHOLE: [OpKind; 6] = [
    OpKind::Arange,
    OpKind::FlashAttnBack,
    OpKind::GatedDeltaNet,
    OpKind::SsmScan,
    OpKind::CrossEntropyLoss,
    OpKind::CrossEntropyLossBack,
];

#[test]
fn shards_combine_to_the_whole_result() {
    for kind in OpKind::ALL {
        if samite_core::formula::is_formula(kind) {
            continue; // all members compute the whole node
        }
        // Number of results by state: mirrored, split, partial.
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for seed in 0..300u64 {
            let rng = &Rng::new(seed * 1000 + kind as u64);
            let members = 1 + rng.below(4);
            let case = random(rng, kind, members);
            let alike = rng.below(2) == 0;
            let outcome = case.compare(members, alike, &decide, rng);
            if let Some(wrong) = &outcome.wrong {
                let is_refused = WRITERS.contains(&kind) && wrong.contains("it cannot write to");
                assert!(
                    is_refused,
                    "{kind:?} seed {seed}: {wrong}\nof {members} members {:?}\n{}",
                    case.states, case.graph
                );
                continue;
            }
            let result = case.graph.ids().last().unwrap();
            let state = outcome.states[result.index()].as_ref().unwrap();
            *seen
                .entry(match state {
                    SplitState::Mirrored => "mirrored",
                    SplitState::Split { .. } => "split",
                    SplitState::Partial => "partial",
                })
                .or_default() += 1;
            if state == &SplitState::Mirrored && outcome.exchanges.contains(&Exchange::Gather) {
                *seen.entry("gathered").or_default() += 1;
            }
        }
        println!("{kind:?}: {seen:?}");
        if !WHOLE.contains(&kind) {
            let divided = ["split", "partial"].map(|state| seen.get(state).unwrap_or(&0));
            assert!(divided[0] + divided[1] > 10, "{kind:?}: {seen:?}");
        }
    }
}

#[test]
fn graphs_are_correct_for_any_leaf_states() {
    for seed in 0..150u64 {
        let rng = &Rng::new(seed);
        let members = 1 + rng.below(4);
        let case = layer(rng, members);
        let outcome = case.compare(members, rng.below(2) == 0, &decide, rng);
        if let Some(wrong) = outcome.wrong {
            panic!(
                "seed {seed}: {wrong}\n{members} members, {:?}\n{}",
                case.states, case.graph
            );
        }
    }
}
