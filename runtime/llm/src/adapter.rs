//! Adapters: small changes of a model's weights, in separate files ([Hu et al.
//! 2021](https://arxiv.org/abs/2106.09685)).
//!
//! An adapter consists of pairs of low-rank matrices: instead of `W x`, the graph computes `W x + s
//! B (A x)` with `s = share · alpha / rank`. The file format is llama.cpp's: the pair of weight `w`
//! is `w.lora_a` and `w.lora_b`. Control vectors, which change the results of layers instead, are
//! adapters as well.

mod control;

use crate::error::{Error, Result};
use crate::model::Model;
use samite_core::environment::{Files, SystemFiles};
use samite_core::{Layout, Shape, StoredTensor, TensorGroup, Usage};
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, LoadMode, Metadata, TensorInfo};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Key of the kind of file: absent or `model` for models.
pub const KEY_TYPE: &str = "general.type";
/// Key of the kind of adapter.
pub const KEY_ADAPTER_TYPE: &str = "adapter.type";
/// Key of alpha: the factor of a pair's product times its rank; 0 for no factor.
pub const KEY_ALPHA: &str = "adapter.lora.alpha";
/// Suffix of the matrix that is multiplied first.
pub const SUFFIX_A: &str = ".lora_a";
/// Suffix of the matrix that is multiplied second.
pub const SUFFIX_B: &str = ".lora_b";

/// Weight whose pair is swapped, so that rows of the first matrix can be looked up.
pub(crate) const EMBEDDING: &str = "token_embd.weight";

/// Key of the invocation tokens: the adapter changes nothing before them.
const KEY_INVOCATION: &str = "adapter.alora.invocation_tokens";

/// An adapter's file, whose pairs match a model's tensors.
#[derive(Debug)]
pub(crate) struct AdapterFile {
    pub file: GgufFile,
    alpha: f32,
    pub pairs: BTreeMap<String, FilePair>,
}

/// Matrices of a pair in a file.
#[derive(Clone, Debug)]
pub(crate) struct FilePair {
    pub a: TensorInfo,
    pub b: TensorInfo,
    pub is_embedding: bool,
}

impl FilePair {
    pub fn rank(&self) -> usize {
        self.b.shape[0]
    }
}

impl AdapterFile {
    /// Opens an adapter for a model of an architecture; `shape_of` returns the shape of a tensor of
    /// the model.
    pub fn open(
        files: &dyn Files,
        path: &Path,
        architecture: &str,
        shape_of: impl Fn(&str) -> Option<Shape>,
    ) -> Result<Self> {
        let file = GgufFile::open_in(files, path, LoadMode::Read)?;
        let wrong = |message: String| Error::model(format!("{}: {message}", path.display()));
        let metadata = file.metadata();
        let text = |key: &str| Ok::<_, Error>(metadata.get::<&str>(key)?.unwrap_or("").to_owned());
        let kind = text(KEY_TYPE)?;
        if kind != "adapter" {
            let kind = if kind.is_empty() { "model" } else { &kind };
            return Err(wrong(format!(
                "is no adapter: key \"{KEY_TYPE}\" says {kind:?}"
            )));
        }
        let kind = text(KEY_ADAPTER_TYPE)?;
        if kind != "lora" {
            return Err(wrong(format!(
                "key \"{KEY_ADAPTER_TYPE}\": adapters of type {kind:?} are not supported, \
                 only \"lora\""
            )));
        }
        let known = text(KEY_ARCHITECTURE)?;
        if known != architecture {
            return Err(wrong(format!(
                "is an adapter of a model of architecture {known:?}, this model is {architecture:?}"
            )));
        }
        if metadata.contains(KEY_INVOCATION) {
            return Err(wrong(format!(
                "waits for certain tokens (key \"{KEY_INVOCATION}\"), which is not supported"
            )));
        }
        let alpha = metadata.get_or(KEY_ALPHA, 0.0f32)?;
        if !alpha.is_finite() {
            return Err(wrong(format!("key \"{KEY_ALPHA}\" is {alpha}")));
        }
        let pairs = pairs(&file, &wrong)?;
        for (name, pair) in &pairs {
            let Some(shape) = shape_of(name) else {
                return Err(wrong(format!(
                    "changes tensor {name:?}, which the model does not have: it is an adapter of another model"
                )));
            };
            if let Some(problem) = pair.misfit(shape) {
                return Err(wrong(format!("tensor {name:?}: {problem}")));
            }
        }
        Ok(AdapterFile { file, alpha, pairs })
    }

    /// Returns the factor of a pair's product with scale 1.
    pub fn factor(&self, rank: usize) -> f32 {
        if self.alpha == 0.0 {
            1.0
        } else {
            self.alpha / rank as f32
        }
    }
}

/// Returns all pairs of a file by the name of their weight.
fn pairs(file: &GgufFile, wrong: &dyn Fn(String) -> Error) -> Result<BTreeMap<String, FilePair>> {
    let mut halves: BTreeMap<String, [Option<&TensorInfo>; 2]> = BTreeMap::new();
    for info in file.tensors().iter() {
        let name = &*info.name;
        let mut suffixes = [SUFFIX_A, SUFFIX_B].into_iter().enumerate();
        match suffixes.find_map(|(i, suffix)| Some((i, name.strip_suffix(suffix)?))) {
            Some((i, weight)) => halves.entry(weight.to_owned()).or_default()[i] = Some(info),
            // llama.cpp ignores them as well.
            None if name.ends_with("_norm.weight") => {
                tracing::warn!(tensor = name, "changes of norms by adapters are left out");
            }
            None => {
                return Err(wrong(format!(
                    "tensor {name:?} is no part of a pair: its name ends neither with {SUFFIX_A:?} nor with {SUFFIX_B:?}"
                )));
            }
        }
    }
    if halves.is_empty() {
        return Err(wrong("changes nothing: it has no pairs of tensors".into()));
    }
    let pair = |(name, halves): (String, [Option<&TensorInfo>; 2])| match halves {
        [Some(a), Some(b)] => {
            let pair = FilePair {
                a: a.clone(),
                b: b.clone(),
                is_embedding: name == EMBEDDING,
            };
            Ok((name, pair))
        }
        [a, _] => {
            let missing = if a.is_none() { SUFFIX_A } else { SUFFIX_B };
            Err(wrong(format!("tensor \"{name}{missing}\" is missing")))
        }
    };
    halves.into_iter().map(pair).collect()
}

impl FilePair {
    /// Returns the reason why the pair does not match a weight with this shape, if it does not.
    fn misfit(&self, weight: Shape) -> Option<String> {
        let [inputs, outputs, n2, n3] = weight;
        if weight[1..] == [1, 1, 1] {
            return Some("is a vector: adapters change matrices only".into());
        }
        let rank = self.rank();
        let (a, b) = if self.is_embedding {
            ([rank, outputs, 1, 1], [rank, inputs, 1, 1])
        } else {
            ([inputs, rank, n2, n3], [rank, outputs, n2, n3])
        };
        for (info, wanted) in [(&self.a, a), (&self.b, b)] {
            if info.shape != wanted {
                return Some(format!(
                    "{:?} has shape {:?}, but for a weight of shape {weight:?} and rank {rank} it \
                     must be {wanted:?}: it is an adapter of another model",
                    info.name, info.shape
                ));
            }
            if info.dtype.is_integer() || !samite_quant::can_decode(info.dtype) {
                return Some(format!(
                    "{:?} has the type {}: numbers are expected",
                    info.name, info.dtype
                ));
            }
        }
        (self.is_embedding && self.b.dtype.is_quantized()).then(|| {
            format!(
                "{:?} has the type {}: for an embedding, it must be f32, f16 or bf16",
                self.b.name, self.b.dtype
            )
        })
    }
}

/// Matrices of a pair in memory.
#[derive(Debug)]
pub(crate) struct Pair {
    /// `[inputs, rank]`, or `[rank, vocabulary]` for an embedding.
    pub a: Arc<StoredTensor>,
    /// `[rank, outputs]`, or `[rank, width]` for an embedding.
    pub b: Arc<StoredTensor>,
    pub is_embedding: bool,
    /// Factor of the product with scale 1.
    pub factor: f32,
}

/// An adapter or a control vector, in the memory of its model's devices. Contexts share it.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    metadata: Metadata,
    model: Arc<Model>,
    /// Number that grows with each adapter that is loaded for the model. Graphs apply adapters in
    /// this order.
    number: u64,
    pairs: BTreeMap<String, Pair>,
    /// Directions that are added to the results of layers, by layer: `[width]`.
    directions: BTreeMap<usize, Arc<StoredTensor>>,
    /// Bytes by name of the memory.
    bytes: BTreeMap<String, usize>,
}

impl Adapter {
    /// Loads an adapter for `model` from the file at `path`. Each pair goes to the device of its
    /// weight.
    ///
    /// # Errors
    /// Returns [`Error::Model`] if the file is not an adapter, belongs to another architecture or
    /// model, or has inconsistent tensors. Also fails if the file cannot be read, or if a device
    /// does not have enough memory.
    pub fn load(path: impl AsRef<Path>, model: &Arc<Model>) -> Result<Arc<Self>> {
        Self::load_in(&SystemFiles, path, model)
    }

    /// Loads an adapter like [`load`](Adapter::load), from `files`.
    ///
    /// # Errors
    /// Fails like [`load`](Adapter::load).
    pub fn load_in(
        files: &dyn Files,
        path: impl AsRef<Path>,
        model: &Arc<Model>,
    ) -> Result<Arc<Self>> {
        let path = path.as_ref();
        let weights = model.weights();
        let known = AdapterFile::open(files, path, model.architecture().name, |name| {
            // A name that is an alias for another tensor's data is not in the file.
            let weight = weights.get(name)?;
            (weights.data_name(name) == Some(name)).then(|| weight.layout().shape())
        })?;
        let mut by_device: BTreeMap<usize, Vec<(&String, &FilePair)>> = BTreeMap::new();
        for entry in &known.pairs {
            let device = weights.device(entry.0).unwrap_or(0);
            by_device.entry(device).or_default().push(entry);
        }
        let (mut pairs, mut bytes) = (BTreeMap::new(), BTreeMap::new());
        for (device, entries) in by_device {
            let device = model.devices().get(device);
            let infos: Vec<_> = entries.iter().flat_map(|(_, p)| [&p.a, &p.b]).collect();
            let mut layouts = Vec::with_capacity(infos.len());
            for info in &infos {
                layouts.push((&*info.name, Layout::contiguous(info.dtype, info.shape)?));
            }
            let memory = device.buffer_type();
            let sizes = layouts.iter().map(|(_, layout)| layout.bytes());
            let size = sizes.fold(0usize, usize::saturating_add);
            device.check_free(size, "an adapter")?;
            *bytes.entry(memory.name().to_owned()).or_insert(0) += size;
            let group = TensorGroup::allocate(&memory, Usage::Weights, &layouts)?;
            for (info, stored) in infos.iter().zip(&group.tensors) {
                let data = read(&known.file, info)?;
                stored.tensor().write(0, &data)?;
            }
            for ((name, pair), stored) in entries.into_iter().zip(group.tensors.chunks(2)) {
                let [a, b] = stored else { continue };
                let pair = Pair {
                    a: Arc::clone(a),
                    b: Arc::clone(b),
                    is_embedding: pair.is_embedding,
                    factor: known.factor(pair.rank()),
                };
                pairs.insert(name.clone(), pair);
            }
        }
        Ok(Arc::new(Adapter {
            path: path.to_owned(),
            metadata: known.file.metadata().clone(),
            model: Arc::clone(model),
            number: model.next_adapter(),
            pairs,
            directions: BTreeMap::new(),
            bytes,
        }))
    }

    /// Returns the pair of the weight whose data is called `name`.
    pub(crate) fn pair(&self, name: &str) -> Option<&Pair> {
        self.pairs.get(name)
    }

    /// Returns all directions by layer.
    pub(crate) fn directions(&self) -> impl Iterator<Item = (usize, &Arc<StoredTensor>)> {
        let directions = self.directions.iter();
        directions.map(|(&layer, direction)| (layer, direction))
    }

    /// Returns the direction that is added to the result of this layer.
    pub(crate) fn direction(&self, layer: usize) -> Option<&Arc<StoredTensor>> {
        self.directions.get(&layer)
    }

    /// Returns the adapter's place in the order of application, see [`number`](Self::number).
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the model that the adapter was loaded for.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Returns the names of the weights that the adapter changes, in order.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.pairs.keys().map(String::as_str)
    }

    /// Returns the bytes by name of the memory.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        let bytes = self.bytes.iter();
        bytes.map(|(name, &bytes)| (name.as_str(), bytes))
    }
}

/// Reads all data of a tensor.
pub(crate) fn read(file: &GgufFile, info: &TensorInfo) -> Result<Vec<u8>> {
    let mut data = crate::error::try_filled(0, Some(info.size), "an adapter")?;
    file.read_tensor_into(info, &mut data)?;
    Ok(data)
}

/// An adapter with its scale.
#[derive(Clone, Debug)]
pub struct ScaledAdapter {
    /// The adapter.
    pub adapter: Arc<Adapter>,
    /// Scale: 1 for the learned change, 0 for no change, negative for the opposite change. Its
    /// magnitude is at most [`MAX_SHARE`](Self::MAX_SHARE).
    pub share: f32,
}

impl ScaledAdapter {
    /// Largest magnitude of a scale; useful ones are below 10. With this one, a change of the size
    /// of common activations (up to 6) still fits into F16, the type of KV caches, and the largest
    /// F16 weight is far from overflowing F32. llama.cpp has no limit: there, 1e20 results in NaN.
    pub const MAX_SHARE: f32 = 1e4;

    /// Returns whether `share` is a number of at most [`MAX_SHARE`](Self::MAX_SHARE).
    pub fn is_share(share: f32) -> bool {
        share.abs() <= Self::MAX_SHARE
    }
}

/// Checks that the adapters can be used with `model`.
pub(crate) fn check(model: &Arc<Model>, adapters: &[ScaledAdapter]) -> Result<()> {
    for ScaledAdapter { adapter, share } in adapters {
        let path = adapter.path.display();
        if !Arc::ptr_eq(&adapter.model, model) {
            return Err(Error::invalid(format!(
                "{path}: the adapter was loaded for another model: load it for this one"
            )));
        }
        if !ScaledAdapter::is_share(*share) {
            let most = ScaledAdapter::MAX_SHARE;
            return Err(Error::invalid(format!(
                "{path}: the adapter's share is {share}; it must be from -{most} to {most}"
            )));
        }
    }
    Ok(())
}
