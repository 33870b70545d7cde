//! Tests of the CUDA device on emulated cards.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod faults;
mod fused;
mod operations;
mod planted;
mod random;
mod work;

use samite_core::{Backend, Device};
use samite_cuda::CudaBackend;
use samite_cuda_emu::{EmulatedContext, EmulatedDriver};
use samite_testing::check_contract;
use std::sync::Arc;

/// An emulated card as a device, and as a card into which faults can be injected.
struct TestCard {
    device: Arc<dyn Device>,
    card: Arc<EmulatedContext>,
}

/// Opens card `index` of a new driver.
fn card(index: usize) -> TestCard {
    with_driver(EmulatedDriver::default(), index)
}

fn with_driver(driver: EmulatedDriver, index: usize) -> TestCard {
    let card = Arc::clone(driver.card(index).unwrap());
    let backend = CudaBackend::with_driver("cuda-emu", Arc::new(driver));
    TestCard {
        device: Arc::clone(&backend.devices()[index]),
        card,
    }
}

#[test]
fn the_device_fulfils_the_contract() {
    for index in 0..4 {
        let report = check_contract(&card(index).device);
        assert_eq!(report.failures(), [], "card {index}\n{report}");
        assert!(report.passed() >= 15, "card {index}\n{report}");
    }
}
