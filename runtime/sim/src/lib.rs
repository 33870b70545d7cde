//! The scheduler, language models and the engine of many requests in a test tube: simulated devices, memory, files and threads, with faults, replayed from a number.
//!
//! What waits goes wrong rarely and cannot be repeated. Here the real code runs on a simulated machine: one thread, one seed, time that is a
//! number. The seed decides how fast each device is, when work is felt, what fails and when; the same seed does the same again.
//! `docs/simulation.md` tells how it works, with a failure followed step by step.
//!
//! - A [`Case`] is everything that a simulation depends on. [`run`] plays it and says what was wrong.
//! - A [`Workload`] is what the application does: random graphs on a scheduler, contexts of language models, many requests in one context, or clients of an RPC server or of
//!   one of the remote mode (feature `remote`, on by default). Everything is also done on one plain
//!   reference device, and results must be equal bit by bit.
//! - A [`Fault`] is something that goes wrong. What fails must say why, leave everything usable, and work when it is done again.
//! - A [`Search`] runs many seeds; [`shrink`] makes a case that failed small.
//!
//! Inside, the module `world` moves time and streams, and `shadow` knows of each byte of memory who wrote and who read it, so that a
//! forgotten wait is found even where luck hides it.
//!
//! ```
//! use samite_sim::{Case, run};
//!
//! let outcome = run(&Case::new(7), false);
//! assert_eq!(outcome.failure, None);
//! assert_eq!(outcome.hash, run(&Case::new(7), false).hash);
//! ```
#![forbid(unsafe_code)]

mod case;
mod clock;
mod device;
mod economy;
mod environment;
mod fault;
mod graphs;
mod hostile;
mod known;
mod machine;
mod memory;
mod models;
mod net;
mod player;
#[cfg(feature = "remote")]
mod remote;
mod requests;
mod rpc;
mod search;
mod served;
mod shadow;
mod stream;
mod time;
mod trace;
mod world;

pub use case::{Case, Outcome, Workload};
use std::panic::{AssertUnwindSafe, catch_unwind};
use trace::Trace;
use tracing::subscriber::NoSubscriber;
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
        Workload::Requests => requests::play(case, &world, &mut outcome),
        Workload::Rpc => rpc::play(case, &world, &mut outcome),
        #[cfg(feature = "remote")]
        Workload::Remote => remote::play(case, &world, &mut outcome),
    });
    // Warnings about simulated devices concern nobody.
    let play = || tracing::subscriber::with_default(NoSubscriber::new(), || catch_unwind(play));
    let played = play().unwrap_or_else(|panic| {
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
