//! The device on whatever adapter there is: lavapipe will do.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

use samite_core::{Backend, Device};
use samite_testing::{check_contract, run_suite};
use samite_wgpu::WgpuBackend;
use std::sync::Arc;

/// The first adapter, with `parameters`; says so where there is none.
fn device(parameters: &str) -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let Some(device) = backend.devices().first() else {
        samite_testing::skipped("no adapter for wgpu, not even a software one");
        return None;
    };
    Some(backend.configure(device, parameters.parse().unwrap()).unwrap())
}

#[test]
fn it_keeps_the_contract() {
    let Some(device) = device("") else { return };
    let report = check_contract(&device);
    assert_eq!(report.failures(), [], "{report}");
}

#[test]
fn tmp_suite() {
    let Ok(filter) = std::env::var("F") else { return };
    let Some(device) = device(&std::env::var("P").unwrap_or_default()) else { return };
    let filter = (!filter.is_empty()).then_some(&*filter);
    let report = run_suite(&device, filter, &mut |_| {});
    println!("{report}");
}
