//! Architectures: which tensors a model has and how they form a graph.
//!
//! An [`Architecture`] is a name and a function that creates a [`Spec`] from the metadata of a
//! file. [`Base`] reads what most architectures have in common and creates the layers of Llama; the
//! function changes what differs. The architectures are in `families`, with similar ones in the
//! same file. Everything else derives from the [`Spec`].

mod base;
mod families;
pub(crate) mod graph;
mod keys;
pub mod spec;
mod tensors;

pub use base::Base;
pub use families::ARCHITECTURES;
pub use graph::{GraphInputs, GraphShape, Input, LayerCache, Output};
pub use keys::Keys;
pub use spec::Spec;
pub use tensors::{TensorSpec, WeightUse};

use crate::error::{Error, Result};
use samite_gguf::{KEY_ARCHITECTURE, Metadata};

/// An architecture: a family of models.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// Name in `general.architecture`, which is also the prefix of the metadata keys.
    pub name: &'static str,
    /// Creates the model's structure from the metadata of a file.
    pub spec: fn(&Keys<'_>) -> Result<Spec>,
}

impl std::fmt::Debug for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Returns the architecture called `name`.
///
/// # Errors
/// Returns [`Error::Model`] if it is not supported.
pub fn find(name: &str) -> Result<&'static Architecture> {
    let found = ARCHITECTURES.iter().find(|arch| arch.name == name);
    found.ok_or_else(|| {
        Error::model(format!(
            "key \"general.architecture\": '{}' is not supported; docs/models.md lists the {} that are",
            name.escape_debug(),
            ARCHITECTURES.len()
        ))
    })
}

impl Spec {
    /// Returns the structure of the model that `metadata` describe. The file has `n_tensors`
    /// tensors, and `has_tensor` returns whether it has one of a given name.
    ///
    /// # Errors
    /// Returns an error if a key is missing or has another type, if a number is zero, absurd or
    /// contradicts another, or if the architecture is not supported. The message names the key.
    pub fn from_metadata(
        metadata: &Metadata,
        n_tensors: usize,
        has_tensor: &dyn Fn(&str) -> bool,
    ) -> Result<Self> {
        let arch = find(metadata.require::<&str>(KEY_ARCHITECTURE)?)?;
        let keys = Keys::new(metadata, arch.name, n_tensors, has_tensor);
        base::outputs::read((arch.spec)(&keys)?, &keys)
    }
}
