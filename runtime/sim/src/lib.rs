//! Deterministic simulation testing of the scheduler, language models and the request engine:
//! simulated devices, memory, files and threads, with fault injection, reproducible from a seed.
//!
//! Concurrency bugs are rare and hard to reproduce. Here the real code runs on a simulated machine:
//! one thread, one seed, and time that is a number. The seed decides how fast each device is, when
//! effects become visible, what fails and when; the same seed gives the same run.
//! `docs/simulation.md` explains how it works and follows a failure step by step.
//!
//! - A [`SimCase`] is the complete input of a simulation. [`run`] runs it and reports what failed.
//! - A [`Workload`] is the simulated application: random graphs on a scheduler, contexts of
//!   language models, many requests in one context, or clients of an RPC or remote-mode server
//!   (feature `remote`, on by default). Everything also runs on one plain reference device, and
//!   results must be bit-identical.
//! - A [`Fault`] is an injected failure. The failed operation must state its reason, leave
//!   everything usable, and succeed when repeated.
//! - A [`Search`] runs many seeds; [`shrink`] minimizes a failed case.
//!
//! Internally, the module `world` advances time and streams. `shadow` records which work wrote and
//! read each byte of memory, so that a missing wait is found even if the timing happens to hide it.
//!
//! ```
//! use samite_sim::{SimCase, run};
//!
//! let outcome = run(&SimCase::new(7), false);
//! assert_eq!(outcome.failure, None);
//! assert_eq!(outcome.hash, run(&SimCase::new(7), false).hash);
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

pub use case::{CaseOutcome, SimCase, Workload};
use std::panic::{AssertUnwindSafe, catch_unwind};
use trace::Trace;
use tracing::subscriber::NoSubscriber;
use world::World;

pub use fault::{Fault, FaultOccurrence};
pub use search::{CaseFailure, Search, Summary, shrink};

/// Runs a case. Keeps its trace if `keeps_trace`.
pub fn run(case: &SimCase, keeps_trace: bool) -> CaseOutcome {
    let world = World::new(case.seed_for(2), case.faults(), Trace::new(keeps_trace));
    let mut outcome = CaseOutcome::default();
    let play = AssertUnwindSafe(|| match case.workload {
        Workload::Graphs => graphs::play(case, &world, &mut outcome),
        Workload::Models => models::play(case, &world, &mut outcome),
        Workload::Requests => requests::play(case, &world, &mut outcome),
        Workload::Rpc => rpc::play(case, &world, &mut outcome),
        #[cfg(feature = "remote")]
        Workload::Remote => remote::play(case, &world, &mut outcome),
    });
    // Suppress warnings about simulated devices.
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
        CaseOutcome {
            failure,
            hash: state.trace.hash(),
            strikes: state.struck().to_vec(),
            trace: state.trace.text().map(str::to_owned),
            ..outcome
        }
    })
}
