//! Encoders return what their original implementations return: fixtures of `oracle.py`.

use crate::{expectations, fixture, image};
use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{Batch, Context, ContextOptions, Images, Model, ModelOptions, PlacedImage};
use samite_testing::nmse;
use samite_vision::{Encoder, EncoderOptions, RgbImage, SharedEncoder};
use serde_json::Value;
use std::sync::Arc;

/// Encoders, and their language models.
pub const NAMES: [&str; 10] = [
    "qwen2vl", "qwen25vl", "qwen3vl", "gemma3", "idefics3", "internvl", "pixtral", "llava", "lfm2",
    "gemma4v",
];

/// Variants of these encoders.
pub const VARIANTS: [&str; 2] = ["internvl6b", "mistral3"];

/// Bound on the error in F32. Sums have up to 128 terms, and errors add up over a dozen operations:
/// far below (12 · 128 · 2^-24)² = 8e-9 of the result's square, and mostly not in one direction.
const F32_ERROR: f64 = 1e-9;

fn options(name: &str) -> EncoderOptions {
    let cpu: Arc<dyn Device> = CpuDevice::new(CpuOptions::default().with_threads(2));
    EncoderOptions {
        // Fixtures are images that no processor resizes. Those of Gemma 4 are enlarged up to the
        // maximum.
        tokens: match name {
            "gemma4v" => [None, Some(6)],
            _ => [Some(1), Some(1024)],
        },
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
    for name in NAMES.into_iter().chain(VARIANTS) {
        let path = fixture(&format!("{name}.gguf"));
        let mut encoder = Encoder::load(path, &options(name)).unwrap();
        let unit = encoder.spec().patch_size * encoder.spec().merge;
        // The first image again, after another size.
        let mut cases = cases(name);
        cases.push(cases[0].clone());
        for (image, expected) in cases {
            let mut rows = Vec::new();
            for tile in encoder.encode(&image, &CancelToken::new()).unwrap() {
                let [columns, count] = tile.grid;
                let size = [columns, count].map(|extent| extent * unit);
                let count = encoder.spec().token_count(size);
                assert_eq!(tile.values.len(), count * encoder.spec().row_width());
                rows.extend(tile.values);
            }
            assert_eq!(rows.len(), expected.len(), "{name}");
            let error = nmse(&wide(&rows), &wide(&expected));
            assert!(error < F32_ERROR, "{name}: {error:e}");
        }
    }
}

#[test]
fn logits_after_images_equal_those_of_the_original() {
    for name in NAMES {
        let encoder = Encoder::load(fixture(&format!("{name}.gguf")), &options(name)).unwrap();
        let encoder = SharedEncoder::new(encoder);
        let expected = expectations(&format!("{name}.json"))["text"].take();
        let sizes = expected["sizes"].as_array().unwrap().iter();
        let mut tiles = sizes.flat_map(|size| {
            let extent = |at: usize| size[at].as_u64().unwrap() as usize;
            let image = image(extent(0), extent(1));
            let pieces = encoder.pieces(&image, &CancelToken::new()).unwrap();
            assert_eq!(pieces.texts.len(), pieces.tiles.len() + 1);
            pieces.tiles
        });
        // The text, with the IDs of its tiles.
        let (mut tokens, mut placed) = (Vec::new(), Vec::new());
        let text = expected["tokens"].as_array().unwrap();
        while let Some(token) = text.get(tokens.len()) {
            let start = tokens.len();
            if let Ok(id) = u32::try_from(token.as_i64().unwrap()) {
                tokens.push(id);
                continue;
            }
            let image = tiles.next().unwrap();
            let own = text[start..].iter().take(image.len());
            assert!(own.filter(|token| **token == -1).count() == image.len());
            tokens.extend(image.ids());
            placed.push(PlacedImage { start, image });
        }
        assert!(tiles.next().is_none());
        assert_eq!(tokens.len(), text.len());
        let images = Images::new(placed, &tokens).unwrap();
        let expected = floats(&expected["logits"]);
        let path = fixture(&format!("{name}-text.gguf"));
        let model = Model::load(path, &ModelOptions::new(options(name).devices)).unwrap();
        encoder.check(&model).unwrap();
        let least = encoder.spec().tokens_at_once().max(1);
        for n_ubatch in [64, 16, 7, least] {
            let context = ContextOptions {
                n_ctx: Some(128),
                n_ubatch,
                n_logits: Some(128),
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

#[test]
fn ids_of_tiles_derive_from_the_image_and_their_place() {
    let encoder = Encoder::load(fixture("idefics3.gguf"), &options("idefics3")).unwrap();
    let encoder = SharedEncoder::new(encoder);
    let ids = |grey: u8, [width, height]: [usize; 2]| {
        let image = RgbImage::new(width, height, vec![grey; width * height * 3]).unwrap();
        let pieces = encoder.pieces(&image, &CancelToken::new()).unwrap();
        let ids = pieces.tiles.iter().map(|tile| tile.ids().to_vec());
        ids.collect::<Vec<_>>()
    };
    // All tiles have equal pixels.
    let tiles = ids(7, [40, 24]);
    assert_eq!(tiles.len(), 3 * 2 + 1);
    assert_eq!(tiles, ids(7, [40, 24]));
    let others = [ids(8, [40, 24]), ids(7, [40, 23])].concat();
    let mut all = [tiles, others].concat();
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}
