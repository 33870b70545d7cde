//! Plans of encoders have the memory of the real ones.

use crate::encoders::{NAMES, VARIANTS};
use crate::{fixture, image};
use samite_core::{CancelToken, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_vision::{Encoder, EncoderOptions, EncoderPlan};
use std::sync::Arc;

#[test]
fn a_plan_has_the_memory_of_the_encoder_for_all_sizes() {
    for name in NAMES.into_iter().chain(VARIANTS) {
        let cpu: Arc<dyn Device> = CpuDevice::new(CpuOptions::default().with_threads(1));
        let options = EncoderOptions {
            tokens: [None, Some(60)],
            ..EncoderOptions::new(vec![cpu])
        };
        let path = fixture(&format!("{name}.gguf"));
        let plan = EncoderPlan::new(&path, &options).unwrap();
        let mut encoder = Encoder::load(&path, &options).unwrap();
        assert_eq!(encoder.memory(), plan.memory(), "{name}");
        let sum: usize = plan
            .memory()
            .iter()
            .map(|row| row.weights + row.compute)
            .sum();
        assert_eq!(plan.bytes(), sum);
        assert!(
            plan.memory()
                .iter()
                .any(|row| row.weights > 0 && row.compute > 0)
        );
        for [width, height] in [
            [10, 10],
            [400, 300],
            [300, 400],
            [2000, 50],
            [50, 2000],
            [333, 333],
            [1000, 1000],
            [200, 1000],
        ] {
            encoder
                .encode(&image(width, height), &CancelToken::new())
                .unwrap();
            assert_eq!(
                encoder.memory(),
                plan.memory(),
                "{name}: {width} x {height}"
            );
        }
    }
    let missing = EncoderPlan::new("missing.gguf", &EncoderOptions::new(Vec::new()));
    assert!(missing.unwrap_err().to_string().contains("missing.gguf"));
}
