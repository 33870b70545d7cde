//! Compares the logits of many models with those of llama.cpp:
//! `architectures FOLDER [PART OF A NAME]`.
//!
//! `architectures FOLDER --write` first writes tiny random models of all architectures.
//!
//! For each `NAME.gguf` the folder has a `NAME.f32`: rows of logits after each of the [tokens], as
//! little-endian f32. Every model decodes them in one batch with attention in one operation, in
//! pieces with attention in steps, and token by token. A model without causal attention decodes
//! them in one batch, both ways.
//!
//! `NAME.none.f32`, `NAME.mean.f32`, `NAME.cls.f32`, `NAME.last.f32` and `NAME.rank.f32` have
//! embeddings of two texts in one batch: the first 60 tokens, and the rest.
//! `tests/fixtures/llama_cpp/embeddings.c` gets them from llama.cpp.

use samite_core::{DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::arch::{Output, spec::Pooling};
use samite_llm::{Batch, Context, ContextOptions, Model, ModelOptions, SyntheticModel};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

/// The normalised mean squared error that is allowed.
const LIMIT: f64 = 1e-8;

/// The tokens, of a vocabulary of at least 128.
fn tokens(count: usize) -> Vec<u32> {
    let mut state = 12345u32;
    let mut next = || {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
        (state >> 16) % 128
    };
    (0..count).map(|_| next()).collect()
}

fn error(found: &[f32], expected: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>();
    let pairs = found.iter().zip(expected);
    let wrong = sum(&mut pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)));
    wrong / sum(&mut expected.iter().map(|&b| f64::from(b).powi(2)))
}

/// The logits after each token, decoded `at_once` tokens at a time.
fn logits(
    model: &Arc<Model>,
    tokens: &[u32],
    at_once: usize,
    flash: bool,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let options = ContextOptions {
        n_ctx: Some(256),
        kv_types: [DType::F32; 2],
        n_logits: Some(at_once),
        n_ubatch: at_once,
        flash,
        ..ContextOptions::default()
    };
    let mut context = Context::new(Arc::clone(model), options)?;
    let mut all = Vec::new();
    for (number, part) in tokens.chunks(at_once).enumerate() {
        let mut batch = Batch::new();
        for (i, &id) in part.iter().enumerate() {
            batch.add(id, (number * at_once + i) as i32, &[0], true);
        }
        context.decode(&batch)?;
        for i in 0..part.len() {
            all.extend_from_slice(context.logits(i).ok_or("no logits")?);
        }
    }
    Ok(all)
}

/// Tokens of the two texts that embeddings are compared of.
const TEXTS: [usize; 2] = [60, 36];

/// The embeddings of the texts, computed in one batch.
fn embeddings(
    model: &Arc<Model>,
    pooling: Pooling,
    flash: bool,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let options = ContextOptions {
        n_ctx: Some(256),
        n_seq: TEXTS.len(),
        output: Output::Embeddings(pooling),
        kv_types: [DType::F32; 2],
        flash,
        ..ContextOptions::default()
    };
    let mut context = Context::new(Arc::clone(model), options)?;
    let mut batch = Batch::new();
    let mut ids = tokens(TEXTS.iter().sum()).into_iter();
    for (sequence, length) in TEXTS.into_iter().enumerate() {
        for (position, id) in ids.by_ref().take(length).enumerate() {
            batch.add(id, position as i32, &[sequence as u32], true);
        }
    }
    context.decode(&batch)?;
    let rows: Option<Vec<&[f32]>> = match pooling {
        Pooling::None => (0..batch.len()).map(|i| context.embedding(i)).collect(),
        _ => (0..TEXTS.len() as u32)
            .map(|sequence| context.pooled(sequence))
            .collect(),
    };
    Ok(rows.ok_or("no embeddings")?.concat())
}

/// The values in a file, if it is there.
fn values(path: &Path) -> Result<Option<Vec<f32>>, std::io::Error> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = std::fs::read(path)?;
    let values = bytes.as_chunks().0.iter();
    Ok(Some(
        values.map(|&bytes| f32::from_le_bytes(bytes)).collect(),
    ))
}

fn compare(path: &Path, device: &Arc<dyn Device>) -> Result<Vec<f64>, Box<dyn Error>> {
    let model = Model::load(path, &ModelOptions::new(vec![Arc::clone(device)]))?;
    let mut errors = Vec::new();
    if let Some(expected) = values(&path.with_extension("f32"))? {
        let tokens = tokens(expected.len() / model.spec().n_vocab);
        let whole = tokens.len();
        let ways = if model.spec().is_bidirectional() {
            vec![(whole, true), (whole, false)]
        } else {
            vec![(whole, true), (17, false), (1, true)]
        };
        for (at_once, flash) in ways {
            errors.push(error(&logits(&model, &tokens, at_once, flash)?, &expected));
        }
    }
    let names = ["none", "mean", "cls", "last", "rank"];
    for (name, pooling) in names.into_iter().zip(Pooling::ALL) {
        if let Some(expected) = values(&path.with_extension(format!("{name}.f32")))? {
            for flash in [true, false] {
                errors.push(error(&embeddings(&model, pooling, flash)?, &expected));
            }
        }
    }
    if errors.is_empty() {
        Err("there are no results of llama.cpp beside it".into())
    } else {
        Ok(errors)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments
        .next()
        .ok_or("usage: architectures FOLDER [PART OF A NAME]")?;
    let mut wanted = arguments.next().unwrap_or_default();
    if wanted == "--write" {
        wanted.clear();
        for arch in samite_llm::arch::ARCHITECTURES {
            let path = Path::new(&folder).join(format!("{}.gguf", arch.name));
            SyntheticModel::tiny(arch.name).write(path)?;
        }
    }
    let mut one_thread = CpuOptions::default();
    one_thread.threads = Some(1);
    let device: Arc<dyn Device> = CpuDevice::new(one_thread);
    let mut paths: Vec<_> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_, std::io::Error>>()?;
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "gguf")
    });
    paths.sort();
    let (mut good, mut all) = (0, 0);
    for path in paths {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !name.contains(&wanted) {
            continue;
        }
        all += 1;
        match compare(&path, &device) {
            Ok(errors) => {
                let is_good = errors.iter().all(|&error| error <= LIMIT);
                good += usize::from(is_good);
                let word = if is_good { "ok" } else { "WRONG" };
                let errors: Vec<String> =
                    errors.iter().map(|error| format!("{error:.1e}")).collect();
                println!("{name:28} {word:6} {}", errors.join(" "));
            }
            Err(error) => println!(
                "{name:28} failed {}",
                error.to_string().chars().take(120).collect::<String>()
            ),
        }
    }
    println!("{good} of {all} are as llama.cpp computes them");
    Ok(())
}
