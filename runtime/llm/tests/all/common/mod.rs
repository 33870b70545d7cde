//! Shared helpers of the tests: devices, tiny models, and comparisons.
#![allow(dead_code)] // the test of the steady state uses some of it

pub mod known;

use samite_core::{DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::arch::Output;
use samite_llm::arch::spec::Pooling;
use samite_llm::{
    Batch, Context, ContextOptions, Model, ModelOptions, PlacementRule, SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

pub const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

pub fn reference(name: &str) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions {
        name: name.to_owned(),
        ..ReferenceOptions::default()
    })
}

pub fn cpu() -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(1))
}

/// A model file that exists as long as this value.
pub struct TestModel {
    _dir: TempDir,
    pub path: PathBuf,
}

impl TestModel {
    pub fn write(model: &SyntheticModel) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        model.write(&path).unwrap();
        TestModel { _dir: dir, path }
    }

    pub fn tiny(architecture: &'static str) -> Self {
        Self::write(&SyntheticModel::tiny(architecture))
    }

    pub fn load(&self, devices: Vec<Arc<dyn Device>>, rules: &str) -> Arc<Model> {
        let options = ModelOptions {
            rules: PlacementRule::parse_all(rules).unwrap(),
            ..ModelOptions::new(devices)
        };
        Model::load(&self.path, &options).unwrap()
    }
}

/// Options with a full-precision cache, so that results can be compared closely.
pub fn precise() -> ContextOptions {
    ContextOptions {
        n_ctx: Some(64),
        kv_types: [DType::F32; 2],
        ..ContextOptions::default()
    }
}

pub fn context(model: &Arc<Model>, options: ContextOptions) -> Context {
    Context::new(Arc::clone(model), options).unwrap()
}

/// Returns `count` deterministic tokens.
pub fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|i| 3 + (i * 37 + i * i * 11) % 250)
        .collect()
}

/// Returns the output of a model: embeddings if it does not return logits.
pub fn output_of(model: &Model) -> Output {
    match model.spec().head.output {
        Some(_) => Output::Logits,
        None => Output::Embeddings(Pooling::None),
    }
}

/// Decodes tokens at consecutive positions of a sequence and returns the logits after each, or its
/// embedding.
pub fn decode(
    context: &mut Context,
    tokens: &[u32],
    position: i32,
    sequence: u32,
) -> Vec<Vec<f32>> {
    let mut batch = Batch::new();
    for (i, &token) in tokens.iter().enumerate() {
        batch.add(token, position + i as i32, &[sequence], true);
    }
    context.decode(&batch).unwrap();
    (0..tokens.len())
        .map(|i| context.logits(i).or_else(|| context.embedding(i)))
        .map(|row| row.unwrap().to_vec())
        .collect()
}

pub fn nmse(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (a, b) = (a.concat(), b.concat());
    assert_eq!(a.len(), b.len());
    assert!(b.iter().any(|&x| x.abs() > 0.01), "logits are all but zero");
    samite_sched::nmse(&a, &b)
}
