//! Architectures: which tensors a model has and how they make a graph.
//!
//! Each is one file with one type that implements [`Architecture`], and one line in [`ARCHITECTURES`].

mod blocks;
mod llama;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod tensors;

pub use blocks::{Blocks, GraphInputs, GraphShape, LayerCache};
pub use tensors::{Bias, TensorList, TensorSpec, WeightUse};

use crate::error::{Error, Result};
use crate::hparams::ExpertUse;
use samite_core::RopeMode;

/// A family of models: a list of tensors and a graph.
pub trait Architecture: Sync + std::fmt::Debug {
    /// The name in `general.architecture`; also the prefix of the metadata keys.
    fn name(&self) -> &'static str;

    /// Which elements of a head are rotated together.
    fn rope_mode(&self) -> RopeMode;

    /// Whether its models are mixtures of experts.
    fn expert_use(&self) -> ExpertUse {
        ExpertUse::Never
    }

    /// Lists the tensors of a model.
    fn tensors(&self, list: &mut TensorList<'_>);

    /// Builds the graph for a micro-batch, from tokens to logits.
    ///
    /// # Errors
    /// If operands do not fit; not for a model whose tensors were checked.
    fn build(&self, blocks: &mut Blocks<'_>) -> samite_core::Result<()>;
}

/// All architectures.
pub const ARCHITECTURES: [&dyn Architecture; 4] = [
    &llama::Llama,
    &qwen2::Qwen2,
    &qwen3::Qwen3,
    &qwen3moe::Qwen3Moe,
];

/// The architecture called `name`.
///
/// # Errors
/// [`Error::Model`] with a list of those that exist.
pub fn find(name: &str) -> Result<&'static dyn Architecture> {
    let found = ARCHITECTURES.into_iter().find(|arch| arch.name() == name);
    found.ok_or_else(|| {
        Error::model(format!(
            "key \"general.architecture\": '{}' is not supported; supported are: {}",
            name.escape_debug(),
            ARCHITECTURES.map(|arch| arch.name()).join(", ")
        ))
    })
}
