//! The suite on the CPU device.
#![allow(clippy::unwrap_used)]

use samite_core::Backend;
use samite_cpu::{CpuBackend, CpuOptions};
use samite_testing::run_suite;

#[test]
fn the_cpu_device_passes_every_case() {
    for threads in [1, 3] {
        let backend = CpuBackend::new(CpuOptions::default().with_threads(threads));
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
}
