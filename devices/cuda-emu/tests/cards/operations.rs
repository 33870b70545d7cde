//! A sample of the conformance suite. `examples/test_ops.rs` runs all of it.

use super::card;
use samite_core::Device;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Outcome, cases, run_case};
use std::sync::Arc;

/// Every so many-th case runs.
const SAMPLE: usize = 23;

#[test]
fn sampled_cases_match_the_reference() {
    let cards = [0, 1, 2, 3].map(card);
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let mut passed = 0;
    for (number, case) in cases().iter().enumerate().step_by(SAMPLE) {
        let device = &cards[number / SAMPLE % cards.len()].device;
        match run_case(device, &reference, case) {
            Outcome::Passed { .. } => passed += 1,
            Outcome::Unsupported { .. } => {}
            outcome => panic!("{} on {}: {outcome:?}", case.name, device.name()),
        }
    }
    assert!(passed > 200, "{passed}");
}
