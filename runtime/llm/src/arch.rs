//! Architectures: which tensors a model has and how they make a graph.
//!
//! An [`Architecture`] is a name and a function that makes a [`Spec`] of what a file says: [`Base`] reads what most have in common and
//! makes parts as in llama, and the function changes what is different. They are in `families`, those that resemble each other in one
//! file. Everything else comes from the [`Spec`].

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

/// A family of models.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// The name in `general.architecture`; also the prefix of the metadata keys.
    pub name: &'static str,
    /// Makes the model of what a file says.
    pub spec: fn(&Keys<'_>) -> Result<Spec>,
}

impl std::fmt::Debug for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The architecture called `name`.
///
/// # Errors
/// [`Error::Model`] if there is none.
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
    /// The model that `metadata` describe, in a file with `n_tensors` tensors, of which `has_tensor` knows the names.
    ///
    /// # Errors
    /// A key that is missing or of another type; a number that is zero, absurd, or contradicts another: by key. An architecture that is
    /// not supported.
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
