//! The logits of llama.cpp for known models: that all devices here agree with each other does not say that the graphs are
//! right.

use crate::common::{known, *};
use known::{Known, adapter_path, known, known_tokens, write_adapter};
use samite_core::{DType, Device};
use samite_llm::{Adapter, ContextOptions, ScaledAdapter, SyntheticModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which logits the fixtures have: the same numbers as in `make.py`.
const ROWS_APART: usize = 4;
const COLUMNS: usize = 32;
const COLUMNS_APART: usize = 8;

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama_cpp");
    folder.join(format!("{name}.f32"))
}

/// What llama.cpp computed: rows of selected logits.
fn expected(name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(fixture(name)).unwrap();
    let values: Vec<f32> = (bytes.as_chunks().0.iter())
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    values.chunks_exact(COLUMNS).map(<[f32]>::to_vec).collect()
}

/// The logits that a fixture has, of those after every token.
fn select(logits: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let rows = logits.iter().skip(ROWS_APART - 1).step_by(ROWS_APART);
    rows.enumerate()
        .map(|(i, row)| {
            let column = |c| row[(i + c * COLUMNS_APART) % row.len()];
            (0..COLUMNS).map(column).collect()
        })
        .collect()
}

/// Does what `logits.c` does.
fn compute(known: &Known, device: &Arc<dyn Device>, flash: bool) -> Vec<Vec<f32>> {
    let file = TestModel::write(&known.model);
    let model = file.load(vec![Arc::clone(device)], "");
    let adapters = known.adapters.iter().enumerate().map(|(number, &share)| {
        write_adapter(&file.path, number, |name| known.is_changed(name)).unwrap();
        let adapter = Adapter::load(adapter_path(&file.path, number), &model).unwrap();
        ScaledAdapter { adapter, share }
    });
    let options = ContextOptions {
        n_ctx: Some(256),
        flash,
        adapters: adapters.collect(),
        // Not all tokens at once, so that later ones find earlier ones in the cache.
        n_ubatch: 40,
        ..precise()
    };
    let mut context = context(&model, options);
    let tokens = known_tokens();
    let logits = decode(&mut context, &tokens, 0, 0);
    if known.cut == 0 {
        return logits;
    }
    let cut = known.cut as i32;
    context.remove(0, 8..8 + cut).unwrap();
    context.shift(0, 8 + cut.., -cut).unwrap();
    decode(&mut context, &tokens, tokens.len() as i32 - cut, 0)
}

/// With weights of F32, both compute the same up to the order of sums. With others, llama.cpp rounds activations to a type
/// that goes with the weights', and devices here may too, or not.
///
/// Where two experts are about as probable as each other, a little rounding chooses another: llama.cpp's own two ways of
/// attention differ by up to 2e-3 for mixtures then.
fn limit(model: &SyntheticModel) -> f64 {
    match model.dtype {
        DType::F32 => 1e-10,
        DType::F16 | DType::BF16 => 1e-4,
        _ if model.experts.is_some() => 1e-2,
        _ => 2e-3,
    }
}

fn compare(device: &Arc<dyn Device>, flash: bool) {
    let mut wrong = Vec::new();
    for known in known() {
        let limit = limit(&known.model);
        let error = nmse(
            &select(&compute(&known, device, flash)),
            &expected(known.name),
        );
        if error.is_nan() || error > limit {
            wrong.push(format!("{}: {error:.1e} is above {limit:.0e}", known.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_reference_computes_what_llama_cpp_does() {
    compare(&reference("ref"), false);
}

#[test]
fn the_cpu_computes_what_llama_cpp_does() {
    compare(&cpu(), false);
}

#[test]
fn flash_attention_computes_what_llama_cpp_does() {
    compare(&cpu(), true);
}

/// Fixtures that no model belongs to would hide that a comparison was lost.
#[test]
fn every_fixture_is_compared() {
    let folder = std::fs::read_dir(fixture("any").parent().unwrap()).unwrap();
    let mut found: Vec<String> = folder
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| Some(name.strip_suffix(".f32")?.to_owned()))
        .collect();
    let mut names: Vec<&str> = known().iter().map(|known| known.name).collect();
    found.sort();
    names.sort_unstable();
    assert_eq!(found, names);
}
