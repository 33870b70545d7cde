//! Control vectors: directions that are added to the results of layers ([Zou et al.
//! 2023](https://arxiv.org/abs/2310.01405)).
//!
//! The file format is llama.cpp's: `direction.N` is added to the result of layer `N`. The first
//! layer is number 0 and has no direction.

use super::{Adapter, read};
use crate::error::{Error, Result};
use crate::model::Model;
use samite_core::environment::{Files, SystemFiles};
use samite_core::{DType, Layout, TensorGroup, Usage};
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, LoadMode, Metadata, TensorInfo};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

const ARCHITECTURE: &str = "controlvector";
/// Key of the architecture of the model that the vector was made for.
const KEY_MODEL: &str = "controlvector.model_hint";
const PREFIX: &str = "direction.";

impl Adapter {
    /// Loads a control vector for `model` from the file at `path`, with only the directions of the
    /// layers in `layers`. Each direction goes to the device of its layer.
    ///
    /// # Errors
    /// Returns [`Error::Model`] if the file is not a control vector, belongs to another model, or
    /// has no direction for these layers. Also fails if the file cannot be read, or if a device
    /// does not have enough memory.
    pub fn load_control_vector(
        path: impl AsRef<Path>,
        model: &Arc<Model>,
        layers: RangeInclusive<usize>,
    ) -> Result<Arc<Self>> {
        Self::load_control_vector_in(&SystemFiles, path, model, layers)
    }

    /// Loads a control vector like [`load_control_vector`](Adapter::load_control_vector), from
    /// `files`.
    ///
    /// # Errors
    /// Fails like [`load_control_vector`](Adapter::load_control_vector).
    pub fn load_control_vector_in(
        files: &dyn Files,
        path: impl AsRef<Path>,
        model: &Arc<Model>,
        layers: RangeInclusive<usize>,
    ) -> Result<Arc<Self>> {
        let path = path.as_ref();
        let file = GgufFile::open_in(files, path, LoadMode::Read)?;
        let wrong = |message: String| Error::model(format!("{}: {message}", path.display()));
        let known = file.metadata().get::<&str>(KEY_ARCHITECTURE)?.unwrap_or("");
        if known != ARCHITECTURE {
            return Err(wrong(format!(
                "is no control vector: key \"{KEY_ARCHITECTURE}\" says {known:?}"
            )));
        }
        let (architecture, spec) = (model.architecture().name, model.spec());
        let hint = file.metadata().get::<&str>(KEY_MODEL)?;
        if let Some(hint) = hint.filter(|hint| *hint != architecture) {
            return Err(wrong(format!(
                "is a control vector for a model of architecture {hint:?}, this model is {architecture:?}"
            )));
        }
        let (n_embd, n_layer) = (spec.n_embd, spec.layers.len());
        let mut chosen: Vec<(usize, &TensorInfo)> = Vec::new();
        for info in file.tensors().iter() {
            let number = info.name.strip_prefix(PREFIX);
            let Some(layer) = number.and_then(|number| number.parse::<usize>().ok()) else {
                return Err(wrong(format!("tensor {:?} is no direction", info.name)));
            };
            if info.shape != [n_embd, 1, 1, 1] || info.dtype != DType::F32 {
                return Err(wrong(format!(
                    "tensor {:?} is {} of shape {:?}, this model needs f32 of {n_embd} elements",
                    info.name, info.dtype, info.shape
                )));
            }
            if !(1..n_layer).contains(&layer) {
                return Err(wrong(format!(
                    "tensor {:?} is for a layer that this model does not have: its last one has number {}",
                    info.name,
                    n_layer - 1
                )));
            }
            if layers.contains(&layer) {
                chosen.push((layer, info));
            }
        }
        if chosen.is_empty() {
            let which = match layers.end() {
                &usize::MAX => "any layer".to_owned(),
                end => format!("layers {} to {end}", layers.start()),
            };
            return Err(wrong(format!("has no direction for {which}")));
        }
        let mut directions = Vec::with_capacity(chosen.len());
        for (layer, info) in chosen {
            directions.push((layer, read(&file, info)?));
        }
        let metadata = file.metadata().clone();
        Self::of_directions(path, metadata, model, directions)
    }

    /// Creates a control vector for `model` from directions in memory, by layer.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the model does not have a layer, if a layer is the
    /// first one, or if a direction has another width. Also fails if a device does not have enough
    /// memory.
    pub fn control_vector<'a>(
        model: &Arc<Model>,
        directions: impl IntoIterator<Item = (usize, &'a [f32])>,
    ) -> Result<Arc<Self>> {
        let (n_embd, n_layer) = (model.spec().n_embd, model.spec().layers.len());
        let mut chosen = Vec::new();
        for (layer, direction) in directions {
            if !(1..n_layer).contains(&layer) || direction.len() != n_embd {
                return Err(Error::invalid(format!(
                    "a direction of {} elements for layer {layer}: this model needs {n_embd}, for layers 1 to {}",
                    direction.len(),
                    n_layer.saturating_sub(1)
                )));
            }
            chosen.push((layer, bytemuck::cast_slice(direction).to_vec()));
        }
        Self::of_directions(
            Path::new("a control vector"),
            Metadata::new(),
            model,
            chosen,
        )
    }

    /// Uploads directions to the devices of their layers.
    fn of_directions(
        path: &Path,
        metadata: Metadata,
        model: &Arc<Model>,
        chosen: Vec<(usize, Vec<u8>)>,
    ) -> Result<Arc<Self>> {
        let spec = model.spec();
        let device_of = |layer: usize| {
            let prefix = format!("blk.{layer}.");
            let names = spec.tensors().into_iter().map(|tensor| tensor.name);
            let mut of_layer = names.filter(|name| name.starts_with(&prefix));
            of_layer.find_map(|name| model.weights().device(&name))
        };
        let mut by_device: BTreeMap<usize, Vec<(usize, Vec<u8>)>> = BTreeMap::new();
        for (layer, direction) in chosen {
            let device = device_of(layer).unwrap_or(0);
            by_device
                .entry(device)
                .or_default()
                .push((layer, direction));
        }
        let (mut directions, mut bytes) = (BTreeMap::new(), BTreeMap::new());
        let layout = Layout::contiguous(DType::F32, [spec.n_embd, 1, 1, 1])?;
        for (device, entries) in by_device {
            let device = model.devices().get(device);
            let memory = device.buffer_type();
            let names: Vec<_> = entries
                .iter()
                .map(|(layer, _)| format!("{PREFIX}{layer}"))
                .collect();
            let layouts: Vec<_> = names.iter().map(|name| (&**name, layout)).collect();
            let size = layout.bytes() * layouts.len();
            device.check_free(size, "a control vector")?;
            *bytes.entry(memory.name().to_owned()).or_insert(0) += size;
            let group = TensorGroup::allocate(&memory, Usage::Weights, &layouts)?;
            for ((layer, direction), stored) in entries.into_iter().zip(&group.tensors) {
                stored.tensor().write(0, &direction)?;
                directions.insert(layer, Arc::clone(stored));
            }
        }
        Ok(Arc::new(Adapter {
            path: path.to_owned(),
            metadata,
            model: Arc::clone(model),
            number: model.next_adapter(),
            pairs: BTreeMap::new(),
            directions,
            bytes,
        }))
    }
}
