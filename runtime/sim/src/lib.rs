#![forbid(unsafe_code)]
mod case;
mod clock;
mod device;
mod fault;
mod graphs;
mod machine;
mod memory;
mod shadow;
mod stream;
mod time;
mod trace;
mod world;

pub use case::{Case, Outcome, Workload};
pub use fault::{Fault, Strike};

/// Runs a case. Its trace is kept if that `is_wanted`.
pub fn run(case: &Case, is_wanted: bool) -> Outcome {
    graphs::run(case, is_wanted)
}
