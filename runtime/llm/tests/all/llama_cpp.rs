//! Logits compared with llama.cpp for known models. Agreement of all devices with each other does
//! not show that the graphs are correct.

use crate::common::{known, *};
use known::{Known, adapter_path, known, known_tokens, write_adapter};
use known::{KnownEmbedding, known_embeddings, known_texts};
use known::{N_DECODED, known_decoders};
use samite_core::{DType, Device};
use samite_llm::arch::Output;
use samite_llm::arch::spec::Pooling;
use samite_llm::{Adapter, Batch, ContextOptions, ScaledAdapter, SyntheticModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Strides of the logits in the fixtures: the same numbers as in `make.py`.
const ROWS_APART: usize = 4;
const COLUMNS: usize = 32;
const COLUMNS_APART: usize = 8;

/// Number of tokens whose logits `logits.py` writes.
const DECODED: usize = 8;

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama_cpp");
    folder.join(format!("{name}.f32"))
}

/// Returns llama.cpp's results: rows of selected logits.
fn expected(name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(fixture(name)).unwrap();
    let values: Vec<f32> = (bytes.as_chunks().0.iter())
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    values.chunks_exact(COLUMNS).map(<[f32]>::to_vec).collect()
}

/// Selects the logits that a fixture contains from those after every token.
fn select(logits: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let rows = logits.iter().skip(ROWS_APART - 1).step_by(ROWS_APART);
    rows.enumerate()
        .map(|(i, row)| {
            let column = |c| row[(i + c * COLUMNS_APART) % row.len()];
            (0..COLUMNS).map(column).collect()
        })
        .collect()
}

/// Does the same as `logits.c`.
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
    context.kv_cache_mut().remove(0, 8..8 + cut).unwrap();
    context.kv_cache_mut().shift(0, 8 + cut.., -cut).unwrap();
    decode(&mut context, &tokens, tokens.len() as i32 - cut, 0)
}

/// Bound on the error where only the order of sums in F32 differs: 2^-48, the unit roundoff
/// squared, for each of the consecutive roundings that a logit depends on, some 2^14 in these
/// models.
const F32_SUMS: f64 = 1e-10;

/// Returns the error limit for a model. With F32 weights, both implementations compute the same
/// values up to the order of sums. With other types, llama.cpp rounds activations to a type that
/// matches the weights', and devices here may do so as well or not.
///
/// If two experts are almost equally probable, a small rounding difference selects another one. For
/// mixtures, llama.cpp's own two implementations of attention then differ by up to 2e-3.
fn limit(model: &SyntheticModel) -> f64 {
    match model.dtype {
        DType::F32 => F32_SUMS,
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
fn the_reference_matches_llama_cpp() {
    compare(&reference("ref"), false);
}

#[test]
fn the_cpu_matches_llama_cpp() {
    compare(&cpu(), false);
}

#[test]
fn flash_attention_matches_llama_cpp() {
    compare(&cpu(), true);
}

/// Returns the embeddings in a file.
fn expected_embeddings(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let values = bytes.as_chunks().0.iter();
    values.map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Does the same as `embeddings.c`.
fn embeddings(
    known: &KnownEmbedding,
    pooling: Pooling,
    device: &Arc<dyn Device>,
    flash: bool,
) -> Vec<f32> {
    let file = TestModel::write(&known.model);
    let model = file.load(vec![Arc::clone(device)], "");
    let texts = known_texts();
    let options = ContextOptions {
        n_ctx: Some(256),
        n_seq: texts.len(),
        output: Output::Embeddings(pooling),
        flash,
        ..precise()
    };
    let mut context = context(&model, options);
    let mut batch = Batch::new();
    for (sequence, text) in texts.iter().enumerate() {
        for (position, &id) in text.iter().enumerate() {
            batch.add(id, position as i32, &[sequence as u32], true);
        }
    }
    context.decode(&batch).unwrap();
    let rows: Vec<&[f32]> = match pooling {
        Pooling::None => (0..batch.len())
            .map(|i| context.embedding(i).unwrap())
            .collect(),
        _ => (0..texts.len() as u32)
            .map(|sequence| context.pooled(sequence).unwrap())
            .collect(),
    };
    rows.concat()
}

#[test]
fn embeddings_match_llama_cpp() {
    let mut wrong = Vec::new();
    for known in known_embeddings() {
        // These models have exact GELU, and llama.cpp uses an approximation.
        let is_gelu = [
            "bert",
            "nomic-bert-moe",
            "jina-bert-v2",
            "jina-bert-v3",
            "modern-bert",
        ]
        .contains(&known.model.architecture);
        let limit = match is_gelu && !known.name.contains("silu") {
            // A score may be close to 0.
            true if known.pooling == Pooling::Rank => 1e-5,
            true => 2e-7,
            false => F32_SUMS,
        };
        let path = fixture(&format!("embeddings/{}", known.name));
        let expected = [expected_embeddings(&path)];
        for (device, flash) in [(reference("ref"), false), (cpu(), false), (cpu(), true)] {
            let found = embeddings(&known, known.pooling, &device, flash);
            let error = nmse(&[found], &expected);
            if error.is_nan() || error > limit {
                wrong.push(format!("{}: {error:.1e} is above {limit:.0e}", known.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The models' own code uses exact GELU, and has more digits.
#[test]
fn embeddings_match_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transformers");
    let names = files_in(&folder);
    assert_eq!(names.len(), 10);
    for name in names {
        let known = known_embeddings();
        let known = known.iter().find(|known| known.name == name).unwrap();
        let pooling = match known.pooling {
            Pooling::Rank => Pooling::Rank,
            _ => Pooling::None,
        };
        let expected = [expected_embeddings(&folder.join(format!("{name}.f32")))];
        for (device, flash) in [(reference("ref"), false), (cpu(), false), (cpu(), true)] {
            let error = nmse(&[embeddings(known, pooling, &device, flash)], &expected);
            assert!(error <= F32_SUMS, "{name}: {error:.1e}");
        }
    }
}

/// The models' own code computed the logits after the last tokens.
#[test]
fn logits_match_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transformers/logits");
    let mut names: Vec<_> = known_decoders().iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert_eq!(files_in(&folder), names);
    let tokens = &known_tokens()[..N_DECODED];
    let mut wrong = Vec::new();
    for (name, model) in known_decoders() {
        let file = TestModel::write(&model);
        let expected = expected_embeddings(&folder.join(format!("{name}.f32")));
        let limit = match name {
            // The reference code adds 1e-6 in two norms, regardless of the file.
            "deepseek2" => 1e-9,
            _ => F32_SUMS,
        };
        for (device, flash) in [(reference("ref"), false), (cpu(), true)] {
            let options = ContextOptions {
                n_ctx: Some(256),
                flash,
                n_ubatch: 40,
                ..precise()
            };
            let mut context = context(&file.load(vec![device], ""), options);
            let logits = decode(&mut context, tokens, 0, 0);
            let last = logits[N_DECODED - DECODED..].concat();
            let error = nmse(&[last], std::slice::from_ref(&expected));
            if error.is_nan() || error > limit {
                wrong.push(format!("{name}: {error:.1e} is above {limit:.0e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn files_in(folder: &Path) -> Vec<String> {
    let found = std::fs::read_dir(folder).unwrap();
    let mut found: Vec<String> = found
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| Some(name.strip_suffix(".f32")?.to_owned()))
        .collect();
    found.sort();
    found
}

/// Fixtures without a model would hide that a comparison was lost.
#[test]
fn every_fixture_is_compared() {
    let folder = fixture("any").parent().unwrap().to_owned();
    let mut names: Vec<&str> = known().iter().map(|known| known.name).collect();
    names.sort_unstable();
    assert_eq!(files_in(&folder), names);
    let known = known_embeddings();
    let mut names: Vec<&str> = known.iter().map(|known| known.name).collect();
    names.sort_unstable();
    assert_eq!(files_in(&folder.join("embeddings")), names);
}
