//! Planted bugs in kernels: the interpreter names the kernel and the instruction.

use super::with_driver;
use samite_core::Device;
use samite_cuda_emu::EmulatedDriver;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Outcome, cases, run_case};
use std::sync::Arc;

/// Returns the messages of failures of the cases of `operation`, with `right` replaced by `wrong`
/// in the PTX of all kernels.
fn failures(operation: &str, right: &'static str, wrong: &'static str) -> Vec<String> {
    let mut driver = EmulatedDriver::default();
    driver.replace(right, wrong);
    let card = with_driver(driver, 0);
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let mut failures = Vec::new();
    for case in cases().iter().filter(|case| case.op == operation).take(20) {
        match run_case(&card.device, &reference, case) {
            Outcome::Failed { detail, .. } => failures.push(detail),
            Outcome::Error { message } => failures.push(message),
            _ => {}
        }
    }
    failures
}

#[test]
fn a_missing_barrier_is_a_race_in_a_named_kernel() {
    let failures = failures("rms_norm", "bar.sync 0;", "");
    let named = failures
        .iter()
        .any(|message| message.contains("norm") && message.contains("line"));
    assert!(named, "{failures:#?}");
}
