#![forbid(unsafe_code)]
mod case;
mod clock;
mod device;
mod fault;
mod files;
mod graphs;
mod machine;
mod memory;
mod models;
mod player;
mod search;
mod shadow;
mod stream;
mod time;
mod trace;
mod world;

pub use case::{Case, Outcome, Workload};
use std::panic::{AssertUnwindSafe, catch_unwind};
use trace::Trace;
use world::World;

pub use fault::{Fault, Strike};
pub use search::{Failure, Search, Summary, shrink};

/// Runs a case. Its trace is kept if that `is_wanted`.
pub fn run(case: &Case, is_wanted: bool) -> Outcome {
    let world = World::new(case.seed_for(2), case.faults(), Trace::new(is_wanted));
    let mut outcome = Outcome::default();
    let play = AssertUnwindSafe(|| match case.workload {
        Workload::Graphs => graphs::play(case, &world, &mut outcome),
        Workload::Models => models::play(case, &world, &mut outcome),
    });
    let played = catch_unwind(play).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a panic: {}", text.unwrap_or("without a message")))
    });
    world.with(|state| {
        let failure = state.violations().first().cloned().or(played.err());
        if let Some(failure) = &failure {
            state.note(|_| format!("FAILURE: {failure}"));
        }
        Outcome {
            failure,
            hash: state.trace.hash(),
            strikes: state.struck().to_vec(),
            trace: state.trace.text().map(str::to_owned),
            ..outcome
        }
    })
}
