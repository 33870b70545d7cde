//! Language models: from a GGUF file to the next token.
//!
//! # How a token goes through
//! 1. [`Model::load`] opens the file, and has the [architecture](arch) make a
//!    [`Spec`](arch::Spec) of what it says: layers, their parts, and the tensors that there must be. Each gets a device, by default or by a [`PlacementRule`], and memory of that device; with `--mmap`, where
//!    the device can read the mapped file itself, nothing is copied. All of this is decided in a [`ModelPlan`], before a byte
//!    is loaded. A [`ContextPlan`] does the same for step 2. Plans need neither data nor memory for it.
//! 2. [`Context::new`] allocates all other memory: the KV cache, each layer's part on its layer's device, and what the
//!    scheduler needs for the largest graph. If it does not fit, the error comes here and not while tokens are decoded.
//! 3. [`Context::decode`] takes a [`Batch`]: tokens with positions and sequences. It is cut into micro-batches. Each token
//!    gets a free [cell](Cells) of the cache, wherever one is, and a row of the mask that says which cells it sees:
//!    those of its sequence at positions up to its own.
//! 4. A walk over the spec has built a graph from embeddings to logits. Cells, positions and mask are its inputs. So it depends on three numbers only:
//!    tokens, tokens whose logits are wanted, and cells that attention looks at, which grow in steps. So the graph of
//!    the last token serves the next one: **a steady decode step builds no graph, makes no plan and allocates nothing.**
//! 5. Only tokens whose logits are wanted go through the output matrix. [`Context::logits`] returns their rows; a
//!    [`samite_text::Sampler`] picks a token, and [`Session`] does this until the text ends.
//!
//! What is computed of tokens is a matter of [`ContextOptions::output`]: logits, or [embeddings](arch::spec::Pooling) of tokens or of whole sequences;
//! [`embed`] computes those of many texts. In models [whose tokens look at later ones](arch::Spec::sees_later), all tokens of a sequence come in one batch,
//! which is one micro-batch, and no cell of the cache is taken.
//!
//! A [`Watcher`] sees results of nodes while they are computed; [`Context::compare`] lets two contexts decode in step. An [`Adapter`] changes a model's products while they are computed; [`merge`] writes the changed model to a file.
//!
//! # Contract
//! - What comes from a file or a caller is checked where it comes in; [`Error`] names key, tensor, rule or limit.
//! - A decode that fails or is cancelled leaves the cache as it was: the cells that it took are free again.
//! - Sequences can [share](Context::copy) their past, [forget](Context::remove) parts of it and [move](Context::shift) it. Keys
//!   whose positions moved are rotated before they are used next.
//! - The crate knows devices only as [`samite_core::Device`]. Models do not know which they run on.
//!
//! ```no_run
//! use samite_llm::{Context, ContextOptions, GenerateOptions, Model, ModelOptions, Session};
//! use samite_text::{Sampler, SamplerParams};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let devices = Vec::new();
//! let model = Model::load("model.gguf", &ModelOptions::new(devices))?;
//! let prompt = model.tokenizer()?.tokenize("Once upon a time", true, false)?;
//! let mut session = Session::new(Context::new(model, ContextOptions::default())?)?;
//! let mut sampler = Sampler::new(SamplerParams::default())?;
//! session.generate(&prompt, &mut sampler, &GenerateOptions::default(), |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod adapter;
pub mod arch;
mod assign;
mod batch;
mod context;
mod convert;
mod cost;
mod displaced;
mod embed;
mod error;
mod finite;
mod fit;
mod graphs;
pub mod importance;
mod kv;
pub mod log_probs;
pub mod merge;
mod model;
mod perplexity;
pub mod quantize;
mod rules;
mod sampling;
mod saved;
mod session;
pub mod synthetic;
mod tensor_split;
#[cfg(test)]
mod testing;
mod vocab;
mod weights;

pub use adapter::{Adapter, ScaledAdapter};
pub use batch::{Batch, BatchToken};
pub use context::{
    Context, ContextOptions, ContextPlan, MemoryUse, NodeNames, Seen, Shortage, Watcher,
};
pub use cost::TokenCost;
pub use displaced::Displaced;
pub use embed::{Normalization, cosine, embed, fit_to};
pub use error::{Error, Result};
pub use fit::{DeviceNeed, Fit, FitOptions};
pub use kv::Cells;
pub use model::{Model, ModelOptions, ModelPlan, Progress};
pub use perplexity::{
    Distribution, Estimate, KlDivergence, Perplexity, kl_divergence, perplexity, record_log_probs,
};
pub use rules::{PlacementRule, Role, Selector};
pub use sampling::sampler_params;
pub use saved::{SavedHeader, SavedSequence};
pub use session::{Finish, GenerateOptions, Generation, Session, Timings};
pub use synthetic::{SyntheticAdapter, SyntheticModel};
pub use vocab::vocab_data;
pub use weights::{PlannedTensor, Weights};
