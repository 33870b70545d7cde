//! The suite on the CPU device.
#![allow(clippy::unwrap_used)]

use samite_core::Backend;
use samite_cpu::{CpuBackend, CpuOptions, IsaLevel};
use samite_testing::run_suite;

/// Runs all cases, and expects that none fails.
fn passes_every_case(options: CpuOptions) {
    let backend = CpuBackend::new(options);
    let report = run_suite(&backend.devices()[0], None, &mut |_| {});
    assert_eq!(report.failed(), 0, "{report}");
    // Sorting wants rows without gaps, as in ggml; everything else is there.
    for (op, counts) in &report.ops {
        let sorts = ["argsort", "top_k"].contains(&op.as_str());
        assert!(
            counts.unsupported == 0 || sorts && counts.unsupported <= 2,
            "{report}"
        );
    }
}

#[test]
fn the_cpu_device_passes_every_case() {
    for threads in [1, 3] {
        passes_every_case(CpuOptions::default().with_threads(threads));
    }
}

// Levels that a processor does not have become the next lower one.

#[test]
fn every_case_passes_without_vector_extensions() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::Generic));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_case_passes_with_avx2() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::Avx2));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_case_passes_with_avx_vnni() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::AvxVnni));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_case_passes_with_avx512() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::Avx512));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_case_passes_with_avx512_vnni() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::Avx512Vnni));
}

#[cfg(target_arch = "aarch64")]
#[test]
fn every_case_passes_with_dotprod() {
    passes_every_case(CpuOptions::default().with_isa(IsaLevel::Dotprod));
}
