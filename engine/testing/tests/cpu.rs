//! The suite on the CPU device.
#![allow(clippy::unwrap_used)]

use samite_core::Backend;
use samite_cpu::{CpuBackend, CpuOptions, IsaLevel};
use samite_testing::Suite;
use std::sync::LazyLock;

/// The reference device computes every case once for all tests.
static SUITE: LazyLock<Suite> = LazyLock::new(Suite::new);

/// Runs all cases and checks that none fails.
fn passes_every_case(backend: &CpuBackend) {
    let report = SUITE.run(&backend.devices()[0]);
    assert_eq!(report.failed(), 0, "{report}");
    // Like ggml, sorting requires contiguous rows; everything else is supported.
    for (op, counts) in &report.ops {
        let sorts = ["argsort", "top_k"].contains(&op.as_str());
        assert!(
            counts.unsupported == 0 || sorts && counts.unsupported <= 2,
            "{report}"
        );
    }
}

/// Returns the instruction set that a device uses.
fn isa(backend: &CpuBackend) -> String {
    let features = backend.features();
    let isa = features.into_iter().find(|(key, _)| key == "isa");
    isa.unwrap().1
}

#[test]
fn the_cpu_device_passes_every_case() {
    for threads in [1, 3] {
        passes_every_case(&CpuBackend::new(
            CpuOptions::default().with_threads(threads),
        ));
    }
}

/// Every level below the best, which the test above runs. A level that the processor lacks falls
/// back to the next lower one, which is not run twice.
#[test]
fn every_case_passes_at_every_level() {
    let mut seen = vec![isa(&CpuBackend::new(CpuOptions::default()))];
    for level in [
        IsaLevel::Generic,
        IsaLevel::Dotprod,
        IsaLevel::I8mm,
        IsaLevel::Avx2,
        IsaLevel::AvxVnni,
        IsaLevel::Avx512,
        IsaLevel::Avx512Vnni,
        IsaLevel::Amx,
    ] {
        let backend = CpuBackend::new(CpuOptions::default().with_isa(level));
        let isa = isa(&backend);
        if !seen.contains(&isa) {
            passes_every_case(&backend);
            seen.push(isa);
        }
    }
    println!("levels: {seen:?}");
}
