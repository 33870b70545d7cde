//! Adapters and control vectors of a model.

use crate::args::{AdapterArgs, ControlArgs};
use crate::failure::CommandResult;
use samite::llm::{Adapter, Model, ScaledAdapter};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the files of adapters, and their scales.
pub fn scaled_files(args: &AdapterArgs) -> Vec<(PathBuf, f32)> {
    let plain = args.lora.iter().map(|file| (file.into(), 1.0));
    plain.chain(args.lora_scaled.iter().cloned()).collect()
}

/// Adapters and control vectors to apply.
#[derive(Clone)]
pub struct AdapterSetup {
    /// LoRA adapters and their scales.
    loras: Vec<(PathBuf, f32)>,
    /// Control vectors and their scales.
    vectors: Vec<(PathBuf, f32)>,
    /// Layers that control vectors change.
    layers: RangeInclusive<usize>,
}

impl AdapterSetup {
    /// Resolves the flags.
    pub fn new(adapters: &AdapterArgs, control: &ControlArgs) -> Self {
        let plain = control.control_vector.iter().map(|file| (file.into(), 1.0));
        let scaled = control.control_vector_scaled.iter().cloned();
        AdapterSetup {
            loras: scaled_files(adapters),
            vectors: plain.chain(scaled).collect(),
            layers: match control.control_vector_layer_range.as_deref() {
                Some(&[start, end]) => start..=end,
                _ => 0..=usize::MAX,
            },
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.loras.is_empty() && self.vectors.is_empty()
    }

    /// Returns the number of LoRA adapters.
    #[cfg(feature = "serve")]
    pub fn n_loras(&self) -> usize {
        self.loras.len()
    }

    /// Returns all files and their scales, LoRA adapters first.
    pub fn files(&self) -> impl Iterator<Item = (&Path, f32)> {
        let files = self.loras.iter().chain(&self.vectors);
        files.map(|(path, share)| (path.as_path(), *share))
    }

    /// Returns the layers that control vectors change.
    pub fn layers(&self) -> &RangeInclusive<usize> {
        &self.layers
    }

    /// Loads all for a model, LoRA adapters first.
    pub fn load(&self, model: &Arc<Model>) -> CommandResult<Vec<ScaledAdapter>> {
        let mut adapters = Vec::new();
        for (path, share) in &self.loras {
            let (adapter, share) = (Adapter::load(path, model)?, *share);
            adapters.push(ScaledAdapter { adapter, share });
        }
        for (path, share) in &self.vectors {
            let adapter = Adapter::load_control_vector(path, model, self.layers.clone())?;
            let share = *share;
            adapters.push(ScaledAdapter { adapter, share });
        }
        Ok(adapters)
    }
}
