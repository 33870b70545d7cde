//! Conformance suites, which test every device against the reference and against the contract.
//!
//! - [`cases`] creates thousands of small graphs that together cover every operation with its
//!   types, odd sizes, strides, broadcasts, views and in-place results. A [`Case`] is data: a
//!   graph, a [`Recipe`] for each input, and a [`Limit`].
//! - [`run_case`] runs a case on a device and on the reference and compares them: the result must
//!   be within the limit, and everything else in memory (sources, and the bytes between tensors)
//!   unchanged. [`run_suite`] runs all of them and creates a [`Report`]. It also tries weights in
//!   every special layout that the device offers.
//! - [`run_suite_isolated`] does so in another process, which a plugin may end.
//! - [`check_contract`] checks the rest of the contract: buffers, copies, import, compiled work,
//!   order, events, faults.
//! - [`random_graph`] creates larger graphs of many operations, for tests of schedulers.
//! - [`FusionCase`] runs nodes together and separately, for tests of fused kernels.
//! - [`Counter`] shows if runs were done exactly once, and [`ticking`] is a clock for tests.
//! - [`wait_until`] waits for a state, however busy the machine is.
//! - [`wrong_device`] computes some nodes incorrectly, for tests of code that must detect this.
//!
//! Everything is deterministic: data comes from recipes and seeds.
//!
//! ```
//! use samite_reference::{ReferenceDevice, ReferenceOptions};
//! use samite_testing::run_suite;
//!
//! let device = ReferenceDevice::new(ReferenceOptions::default());
//! let report = run_suite(&(device as _), Some("cumsum"), &mut |_| {});
//! assert!(report.is_success(), "{report}");
//! ```
#![forbid(unsafe_code)]

mod case;
mod cases;
mod compare;
mod contract;
mod counter;
mod fusion_case;
mod fusion_layers;
mod isolated;
mod perf;
mod random;
mod recipe;
mod report;
mod run;
mod skip;
mod ticking;
mod wait;
mod wrong;

pub use case::{Case, Input, Limit};
pub use cases::{DECODED, cases};
pub use compare::nmse;
pub use contract::{ContractOutcome, ContractReport, check_contract};
pub use counter::Counter;
pub use fusion_case::{Contents, FusionCase};
pub use fusion_layers::{
    LayerKind, RotationKind, layer_case, layer_kind, rotation_case, rotation_kind,
};
pub use isolated::{report_cases, run_suite_isolated};
pub use perf::{PerfCase, PerfResult, measure, perf_cases};
pub use random::{RANDOM_GRAPH_OPS, RandomGraph, StoreTensor, random_graph, random_graph_up_to};
pub use recipe::{Recipe, Rng};
pub use report::{Counts, Failure, Progress, Report, Suite, run_suite};
pub use run::{Outcome, run_case, run_case_in};
pub use skip::skipped;
pub use ticking::ticking;
pub use wait::{HANG_GUARD, wait_until};
pub use wrong::{imprecise_device, wrong_device};
