//! Planted bugs in kernels. The interpreter names the kernel and the instruction.

use super::with_driver;
use samite_core::Device;
use samite_cuda_emu::EmulatedDriver;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Outcome, cases, run_case};
use std::sync::Arc;

/// Cases of an operation that run with a bug.
const CASES: usize = 12;

/// Returns the messages of failed cases of `operation`, with `right` replaced by `wrong` in the PTX
/// of all kernels.
fn failures(operation: &str, right: &'static str, wrong: &'static str) -> Vec<String> {
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let mut failures = Vec::new();
    let all = cases();
    let of_operation = all.iter().filter(|case| case.op == operation);
    let count = of_operation.clone().count();
    for case in of_operation.step_by(count.div_ceil(CASES).max(1)) {
        // A fault makes a card unusable.
        let mut driver = EmulatedDriver::default();
        driver.replace(right, wrong);
        let card = with_driver(driver, 1);
        match run_case(&card.device, &reference, case) {
            Outcome::Failed { detail, .. } => failures.push(detail),
            Outcome::Error { message } => failures.push(message),
            _ => {}
        }
    }
    failures
}

/// Bugs: the operation, a piece of its kernels' PTX, and its replacement.
const BUGS: [(&str, &str, &str); 22] = [
    // Barriers that are missing.
    ("norm", "bar.sync 0;", ""),
    ("rms_norm", "bar.sync 0;", ""),
    ("soft_max", "bar.sync 0;", ""),
    ("argmax", "bar.sync 0;", ""),
    ("argsort", "bar.sync 0;", ""),
    ("top_k", "bar.sync 0;", ""),
    ("cumsum", "bar.sync 0;", ""),
    ("sum", "bar.sync 0;", ""),
    ("mul_mat", "bar.sync 0;", ""),
    ("mul_mat_id", "bar.sync 0;", ""),
    ("flash_attn_ext", "bar.sync 0;", ""),
    ("cross_entropy_loss", "bar.sync 0;", ""),
    // A barrier that half of a group passes.
    ("rms_norm", "bar.sync 0;", "bar.sync 0, 128;"),
    // Lanes that take part in an exchange, but are not in its mask.
    ("rms_norm", ", 31, -1;", ", 31, 65535;"),
    ("mul_mat", ", 31, -1;", ", 31, 1;"),
    // Kernels that start early and do not wait for those before them.
    ("silu", "griddepcontrol.wait;", ""),
    ("flash_attn_ext", "griddepcontrol.wait;", ""),
    // Groups that take the places of others.
    ("silu", "%ctaid.x", "%laneid"),
    ("add", "%ctaid.x", "%warpid"),
    ("rope", "%tid.x", "%laneid"),
    ("swiglu", "%tid.x", "%laneid"),
    ("cpy", "%ctaid.x", "%laneid"),
];

#[test]
fn planted_bugs_are_named() {
    let mut quiet = Vec::new();
    for (operation, right, wrong) in BUGS {
        let failures = failures(operation, right, wrong);
        let is_named =
            |message: &String| message.contains(": line ") && message.contains(": block ");
        if !failures.iter().any(is_named) {
            quiet.push(format!(
                "{operation}, {right} as {wrong}: {:?}",
                failures.first()
            ));
        }
    }
    assert!(quiet.len() <= 1, "{quiet:#?}");
}
