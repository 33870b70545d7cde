//! The conformance suite of the contract itself, one file for each subject.
//!
//! [`run_suite`](crate::run_suite) tests the results of a device. Here, one simple operation that
//! the device supports suffices. Checks use the device only through the contract, so they work for
//! every device.

mod bench;
mod buffers;
mod compile;
mod copies;
mod events;
mod faults;
mod import;
mod order;
mod report;

use bench::{Bench, End, Named};
pub use report::{ContractOutcome, ContractReport};
use samite_core::Device;
use std::sync::Arc;

/// The checks by subject.
const SUBJECTS: &[&[Named]] = &[
    buffers::CHECKS,
    copies::CHECKS,
    import::CHECKS,
    compile::CHECKS,
    order::CHECKS,
    events::CHECKS,
    faults::CHECKS,
];

/// Checks that `device` fulfils the contract of [`samite_core::device`].
pub fn check_contract(device: &Arc<dyn Device>) -> ContractReport {
    let bench = Bench {
        device: Arc::clone(device),
    };
    let checks = SUBJECTS.iter().copied().flatten();
    ContractReport {
        checks: checks
            .map(|&(name, check)| {
                let outcome = match check(&bench) {
                    Ok(()) => ContractOutcome::Passed,
                    Err(End::Skip(why)) => ContractOutcome::Skipped(why),
                    Err(End::Fail(why)) => ContractOutcome::Failed(why),
                };
                (name, outcome)
            })
            .collect(),
    }
}
