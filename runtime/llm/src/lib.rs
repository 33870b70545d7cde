//! Language models: from a GGUF file to the next token.
//!
//! # The path of a token
//! 1. [`Model::load`] opens the file, and its [architecture](arch) creates a [`Spec`](arch::Spec)
//!    from the metadata: layers, their sub-layers, and the required tensors. Each tensor gets a
//!    device, by default or by a [`PlacementRule`], and memory on that device. With `--mmap`, a
//!    device that can read the mapped file itself needs no copy. A [`ModelPlan`] decides all of
//!    this before any data is loaded. A [`ContextPlan`] does the same for step 2. Plans need
//!    neither weights nor memory for them.
//! 2. [`Context::new`] allocates all other memory: the KV cache of each layer on the layer's
//!    device, and what the scheduler needs for the largest graph. If it does not fit, this step
//!    returns the error, not a later decode.
//! 3. [`Context::decode`] takes a [`Batch`]: tokens with positions and sequences. It splits the
//!    batch into micro-batches. Each token gets any free [cell](Cells) of the cache and a row of
//!    the attention mask. The row selects the cells that the token sees: those of its sequence at
//!    positions up to its own.
//! 4. A walk over the spec has built a graph from embeddings to logits. Cells, positions and the
//!    mask are inputs of the graph. It therefore depends on only three numbers: tokens, tokens
//!    whose logits are requested, and cells that attention reads, which grow in steps. The graph of
//!    the last token serves the next one: **a steady decode step builds no graph, makes no plan and
//!    allocates nothing.**
//! 5. Only tokens whose logits are requested go through the output matrix. [`Context::logits`]
//!    returns their rows. A [`samite_text::Sampler`] samples a token, and [`Session`] repeats this
//!    until the text ends.
//!
//! [`ContextOptions::output`] selects the results: logits, or [embeddings](arch::spec::Pooling) of
//! tokens or of whole sequences. [`embed`] computes the embeddings of many texts. Models with
//! [bidirectional attention](arch::Spec::is_bidirectional) need all tokens of a sequence in one
//! batch, which is one micro-batch, and use no cells of the cache.
//!
//! A [`Watcher`] observes the results of nodes while they are computed. [`Context::compare`]
//! decodes in two contexts in lockstep. An [`Adapter`] changes a model's products while they are
//! computed; [`merge`] writes the changed model to a file.
//!
//! # Contract
//! - Data from files and callers is checked where it enters the crate. [`Error`] names the key,
//!   tensor, rule or limit.
//! - A decode that fails or is cancelled leaves the cache unchanged: the cells that it allocated
//!   are free again.
//! - Sequences can [share](KvCache::copy) their past, [remove](KvCache::remove) parts of it and
//!   [shift](KvCache::shift) it. Keys whose positions changed are rotated before their next use.
//! - The crate knows devices only as [`samite_core::Device`]. Models do not know which devices they
//!   run on.
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
mod embed;
mod error;
mod finite;
mod fit;
mod graphs;
mod images;
pub mod importance;
mod kv;
pub mod log_probs;
pub mod merge;
mod model;
mod perplexity;
mod placement_fallback;
pub mod quantize;
mod rules;
mod sampling;
mod saved;
mod session;
pub mod synthetic;
mod tensor_split;
#[cfg(test)]
mod testing;
mod text_generator;
mod vocab;
mod weights;

pub use adapter::{Adapter, ScaledAdapter};
pub use batch::{Batch, BatchToken};
pub use context::{
    Context, ContextOptions, ContextPlan, MemoryUse, NodeNames, Shortage, WatchedResult, Watcher,
};
pub use cost::TokenCost;
pub use embed::{Normalization, cosine, embed, fit_to};
pub use error::{Error, Result};
pub use fit::{DeviceNeed, Fit, FitOptions};
pub use images::{FIRST_IMAGE_ID, ImageTokens, Images, PlacedImage, image_marker, place_images};
pub use kv::{CacheKind, Cells, KvCache};
pub use model::{Model, ModelOptions, ModelPlan, Progress};
pub use perplexity::{
    Distribution, Estimate, KlDivergence, Perplexity, kl_divergence, perplexity, record_log_probs,
};
pub use placement_fallback::PlacementFallback;
pub use rules::{PlacementRule, Role, Selector};
pub use sampling::sampler_params;
pub use saved::{SavedHeader, SavedSequence};
pub use session::{GenerateOptions, Generation, Session, TEMPLATE_TAIL, Timings};
pub use synthetic::{SyntheticAdapter, SyntheticModel};
pub use text_generator::{Finish, GeneratedText, TextGenerator};
pub use vocab::vocab_data;
pub use weights::{PlannedTensor, Weights};
