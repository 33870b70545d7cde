//! Encoders return what their original implementations return: fixtures of `oracle.py`.

use crate::{expectations, fixture, image};
use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{Batch, Context, ContextOptions, Images, Model, ModelOptions, PlacedImage};
use samite_testing::nmse;
use samite_vision::{Encoder, EncoderOptions, RgbImage, SharedEncoder};
use serde_json::Value;
use std::sync::Arc;

const NAMES: [&str; 4] = ["qwen2vl", "qwen25vl", "qwen3vl", "gemma3"];

/// Bound on the error in F32. Sums have up to 128 terms, and errors add up over a dozen operations:
/// far below (12 · 128 · 2^-24)² = 8e-9 of the result's square, and mostly not in one direction.
const F32_ERROR: f64 = 1e-9;

fn options() -> EncoderOptions {
    let cpu: Arc<dyn Device> = CpuDevice::new(CpuOptions::default().with_threads(2));
    EncoderOptions {
        // Fixtures are images that no processor resizes.
        tokens: [Some(1), Some(1024)],
        ..EncoderOptions::new(vec![cpu])
    }
}

fn floats(value: &Value) -> Vec<f32> {
    let values = value.as_array().unwrap().iter();
    values.map(|value| value.as_f64().unwrap() as f32).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// The images of a fixture with their rows.
fn cases(name: &str) -> Vec<(RgbImage, Vec<f32>)> {
    let fixture = expectations(&format!("{name}.json"));
    let cases = fixture["cases"].as_array().unwrap().iter();
    let case = |case: &Value| {
        let extent = |name: &str| case[name].as_u64().unwrap() as usize;
        let image = image(extent("width"), extent("height"));
        (image, floats(&case["rows"]))
    };
    cases.map(case).collect()
}

#[test]
fn rows_equal_those_of_the_original() {
    for name in NAMES {
        let path = fixture(&format!("{name}.gguf"));
        let mut encoder = Encoder::load(path, &options()).unwrap();
        // The first image again, after another size.
        let mut cases = cases(name);
        cases.push(cases[0].clone());
        for (image, expected) in cases {
            let rows = encoder.encode(&image, &CancelToken::new()).unwrap();
            let [columns, count] = rows.grid;
            assert_eq!(
                rows.values.len(),
                columns * count * encoder.spec().row_width()
            );
            assert_eq!(rows.values.len(), expected.len(), "{name}");
            let error = nmse(&wide(&rows.values), &wide(&expected));
            assert!(error < F32_ERROR, "{name}: {error:e}");
        }
    }
}

#[test]
fn logits_after_images_equal_those_of_the_original() {
    for name in NAMES {
        let encoder = Encoder::load(fixture(&format!("{name}.gguf")), &options()).unwrap();
        let encoder = SharedEncoder::new(encoder);
        let expected = expectations(&format!("{name}.json"))["text"].take();
        // The text, with the IDs of its images.
        let (mut tokens, mut placed) = (Vec::new(), Vec::new());
        let mut sizes = expected["sizes"].as_array().unwrap().iter();
        let mut before = 0;
        for token in expected["tokens"].as_array().unwrap() {
            let token = token.as_i64().unwrap();
            if token >= 0 {
                tokens.push(token as u32);
            } else if before >= 0 {
                let size = sizes.next().unwrap();
                let extent = |at: usize| size[at].as_u64().unwrap() as usize;
                let image = image(extent(0), extent(1));
                let image = Arc::new(encoder.tokens(image, &CancelToken::new()));
                let start = tokens.len();
                tokens.extend(image.ids());
                placed.push(PlacedImage { start, image });
            }
            before = token;
        }
        assert_eq!(tokens.len(), expected["tokens"].as_array().unwrap().len());
        let images = Images::new(placed, &tokens).unwrap();
        let expected = floats(&expected["logits"]);
        let path = fixture(&format!("{name}-text.gguf"));
        let model = Model::load(path, &ModelOptions::new(options().devices)).unwrap();
        encoder.check(&model).unwrap();
        let least = encoder.spec().tokens_at_once().max(1);
        for n_ubatch in [64, 16, 7, least] {
            let context = ContextOptions {
                n_ctx: Some(64),
                n_ubatch,
                n_logits: Some(64),
                kv_types: [DType::F32; 2],
                ..ContextOptions::default()
            };
            let mut context = Context::new(Arc::clone(&model), context).unwrap();
            let mut batch = Batch::new();
            for (at, &id) in tokens.iter().enumerate() {
                images.add_to(&mut batch, at, id, 0, true).unwrap();
            }
            context.decode(&batch).unwrap();
            let logits = (0..tokens.len()).flat_map(|at| context.logits(at).unwrap());
            let logits: Vec<f32> = logits.copied().collect();
            let error = nmse(&wide(&logits), &wide(&expected));
            assert!(error < F32_ERROR, "{name} by {n_ubatch}: {error:e}");
        }
    }
}
