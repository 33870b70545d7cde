//! Whole models on emulated NVIDIA cards, alone and with other devices.

use crate::common::*;
use crate::gpu::decode_all;
use samite_core::{Backend, Device};
use samite_llm::arch::ARCHITECTURES;
use std::sync::Arc;

fn card(index: usize) -> Arc<dyn Device> {
    Arc::clone(&samite_cuda_emu::backend().devices()[index])
}

/// Every so many-th architecture runs, because the interpreter takes a second for each;
/// `SAMITE_EMULATE_ALL` runs all.
const SAMPLE: usize = 5;

/// Cards differ in the order in which they run groups and warps, so architectures take turns.
#[test]
fn emulated_cards_compute_whole_models() {
    let is_complete = std::env::var_os("SAMITE_EMULATE_ALL").is_some();
    let step = if is_complete { 1 } else { SAMPLE };
    for (number, arch) in ARCHITECTURES.iter().enumerate().step_by(step) {
        let name = arch.name;
        let file = TestModel::tiny(name);
        let expected = decode_all(vec![cpu()], "", &file, true);
        let near = |devices, rules: &str, flash| {
            let found = decode_all(devices, rules, &file, flash);
            let error = nmse(&found, &expected);
            assert!(
                error <= 1e-8,
                "{name}, '{rules}', flash {flash}: {error:.1e}"
            );
        };
        near(vec![card(number % 4)], "", number % 8 < 4);
        if number % 6 == 0 {
            let all = vec![card(0), reference("b"), cpu()];
            near(all, "layers=0:cuda-emu0;layers=1:b;layers=2:cpu", true);
        }
    }
}
