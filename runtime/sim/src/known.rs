//! Tiny models and their adapters, as files and loaded on one device.

use samite_core::DType;
use samite_llm::{Adapter, Model, ModelOptions, SyntheticAdapter, SyntheticModel};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::Rng;
use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

pub(crate) const MODEL: &str = "model.gguf";
pub(crate) const ADAPTER: &str = "adapter.gguf";

/// A model's files, and the model loaded on one device.
pub(crate) struct KnownModel {
    pub files: BTreeMap<PathBuf, Arc<[u8]>>,
    pub alone: Arc<Model>,
    pub adapter: Arc<Adapter>,
}

/// Returns the models, which are created once.
pub(crate) fn known() -> Result<&'static [KnownModel], String> {
    static KNOWN: OnceLock<Result<Vec<KnownModel>, String>> = OnceLock::new();
    let all = [
        ("llama", DType::F32),
        ("qwen2", DType::Q8_0),
        ("qwen3", DType::F16),
        ("qwen3moe", DType::F32),
    ];
    let known = KNOWN.get_or_init(|| {
        let all = all.iter();
        let known = all.map(|&(architecture, dtype)| KnownModel::new(architecture, dtype));
        let known: Result<_, Box<dyn Error>> = known.collect();
        known.map_err(|error| format!("a model for simulations: {error}"))
    });
    known.as_deref().map_err(Clone::clone)
}

/// A model for the request workload: one whose cache can be truncated, one with sliding windows, or
/// one with recurrent state. Each has two adapters and a draft model.
pub(crate) struct KnownForRequests {
    pub files: BTreeMap<PathBuf, Arc<[u8]>>,
    pub adapter_names: [PathBuf; 2],
    pub alone: Arc<Model>,
    pub adapters: Vec<Arc<Adapter>>,
    /// Draft model, on its own device.
    pub draft: Arc<Model>,
    /// True if drafted tokens can be rolled back.
    pub takes_drafts: bool,
}

/// Returns the models, which are created once.
pub(crate) fn known_for_requests() -> Result<&'static [KnownForRequests], String> {
    static KNOWN: OnceLock<Result<Vec<KnownForRequests>, String>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| {
        let all = ["llama", "gemma3", "lfm2"].into_iter();
        let known: Result<_, Box<dyn Error>> = all.map(KnownForRequests::new).collect();
        known.map_err(|error| format!("a model for simulations: {error}"))
    });
    known.as_deref().map_err(Clone::clone)
}

/// Returns a model that is cheap to compute.
fn small(architecture: &'static str, width: usize) -> SyntheticModel {
    SyntheticModel {
        n_layer: 2,
        n_embd: width,
        n_head: width / 16,
        n_head_kv: 1,
        head_dim: 16,
        n_ff: width,
        n_vocab: 264,
        ..SyntheticModel::tiny(architecture)
    }
}

impl KnownForRequests {
    fn new(architecture: &'static str) -> Result<Self, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        small(architecture, 32).write(path(MODEL))?;
        small("llama", 16).write(path("draft.gguf"))?;
        let load = |name: &str| {
            let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
            Model::load(path(name), &ModelOptions::new(vec![device]))
        };
        let alone = load(MODEL)?;
        let mut adapters = Vec::new();
        let mut names = vec![MODEL];
        for (number, name) in ["first.gguf", "second.gguf"].into_iter().enumerate() {
            let mut rng = Rng::new(7 + number as u64);
            let next = || rng.uniform(-0.5, 0.5);
            let adapter = SyntheticAdapter {
                rank: 2 + number,
                alpha: 4.0,
            };
            let changes = |name: &str| number == 0 || name.contains("ffn");
            adapter.write(path(MODEL), path(name), changes, next)?;
            adapters.push(Adapter::load(path(name), &alone)?);
            names.push(name);
        }
        let files = names.iter().map(|name| {
            let content = std::fs::read(path(name))?;
            Ok::<_, std::io::Error>((PathBuf::from(name), content.into()))
        });
        Ok(KnownForRequests {
            files: files.collect::<Result<_, _>>()?,
            adapter_names: ["first.gguf", "second.gguf"].map(PathBuf::from),
            draft: load("draft.gguf")?,
            takes_drafts: architecture == "llama",
            alone,
            adapters,
        })
    }
}

impl KnownModel {
    fn new(architecture: &'static str, dtype: DType) -> Result<Self, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        SyntheticModel {
            n_layer: 2,
            n_embd: 32,
            n_head: 2,
            n_head_kv: 1,
            head_dim: 16,
            n_ff: 32,
            n_vocab: 264,
            n_ctx_train: 64,
            dtype,
            experts: (architecture == "qwen3moe").then_some([4, 2]),
            ..SyntheticModel::tiny(architecture)
        }
        .write(path(MODEL))?;
        let mut rng = Rng::new(7);
        let changes = |name: &str| name.ends_with("attn_output.weight");
        let next = || rng.uniform(-0.3, 0.3);
        let adapter = SyntheticAdapter {
            rank: 4,
            alpha: 4.0,
        };
        adapter.write(path(MODEL), path(ADAPTER), changes, next)?;
        let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
        let alone = Model::load(path(MODEL), &ModelOptions::new(vec![device]))?;
        let adapter = Adapter::load(path(ADAPTER), &alone)?;
        let files = [MODEL, ADAPTER].map(|name| {
            let content = std::fs::read(path(name))?;
            Ok::<_, std::io::Error>((PathBuf::from(name), content.into()))
        });
        Ok(KnownModel {
            files: files.into_iter().collect::<Result<_, _>>()?,
            alone,
            adapter,
        })
    }
}
