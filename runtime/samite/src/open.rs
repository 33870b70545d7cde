//! Models in one call.

use crate::llm::{self, Context, ContextOptions, Model, ModelOptions};
use crate::registry::Registry;
use std::path::Path;
use std::sync::Arc;

/// Opens the model in a file on the best devices of this machine, in a context with default
/// options.
///
/// ```no_run
/// use samite::llm::{GenerateOptions, Session};
/// use samite::text::{Sampler, SamplerParams};
/// use std::ops::ControlFlow;
///
/// let mut session = Session::new(samite::open("model.gguf")?)?;
/// let tokens = session.tokenizer().tokenize("Once upon a time", true, false)?;
/// let mut sampler = Sampler::new(SamplerParams::default())?;
/// session.generate(&tokens, &mut sampler, &GenerateOptions::default(), |piece| {
///     print!("{piece}");
///     ControlFlow::Continue(())
/// })?;
/// # Ok::<_, samite::llm::Error>(())
/// ```
///
/// # Errors
/// If the model cannot be loaded, or memory is short.
pub fn open(model: impl AsRef<Path>) -> llm::Result<Context> {
    Context::new(load(model)?, ContextOptions::default())
}

/// Loads the model in a file on the best devices of this machine.
pub(crate) fn load(model: impl AsRef<Path>) -> llm::Result<Arc<Model>> {
    let devices = Registry::built_in(Default::default()).automatic();
    Model::load(model, &ModelOptions::new(devices))
}
