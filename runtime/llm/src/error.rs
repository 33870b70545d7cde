//! Errors of models, contexts and sessions.

/// Result of fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of loading or running a model. The message names the file, key, tensor, rule or limit,
/// and the remedy.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Error of a graph, device or scheduler, including [`samite_core::Error::Cancelled`].
    #[error(transparent)]
    Core(#[from] samite_core::Error),

    /// The file is not readable GGUF, or a key is missing or has another type.
    #[error(transparent)]
    Gguf(samite_gguf::Error),

    /// The file is readable, but its description of the model is contradictory or not supported.
    #[error("{0}")]
    Model(Box<str>),

    /// The vocabulary cannot be used.
    #[error(transparent)]
    Vocab(#[from] samite_text::VocabError),

    /// The tokenizer rejects a text or token.
    #[error(transparent)]
    Tokenize(#[from] samite_text::TokenizeError),

    /// Sampler parameters are out of range, or logits have no usable token.
    #[error(transparent)]
    Sampler(#[from] samite_text::SamplerError),

    /// A placement rule cannot be parsed, names no device, or matches nothing.
    #[error("{0}")]
    Rule(Box<str>),

    /// A batch or call is not valid for the context.
    #[error("{0}")]
    InvalidArgument(Box<str>),

    /// Requested logits are NaN or infinite.
    #[error(
        "the logits after token {token} of the batch are not finite; \
         use smaller scales of adapters and control vectors, or check the model's file"
    )]
    NotFinite {
        /// Index of the token in the batch.
        token: usize,
    },

    /// The KV cache has no room for a batch.
    #[error(
        "{tokens} tokens do not fit: the context of {size} has {free} free; use a larger context, a shorter prompt, or remove old tokens"
    )]
    ContextFull {
        /// Number of tokens that need room.
        tokens: usize,
        /// Number of cells in the cache.
        size: usize,
        /// Number of free cells.
        free: usize,
    },
}

impl Error {
    pub(crate) fn model(message: impl Into<String>) -> Self {
        Error::Model(message.into().into())
    }

    pub(crate) fn rule(message: impl Into<String>) -> Self {
        Error::Rule(message.into().into())
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into().into())
    }

    /// Returns whether a [`CancelToken`](samite_core::CancelToken) stopped the work.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Error::Core(samite_core::Error::Cancelled))
    }

    /// Returns whether a device is lost, with all data on it.
    pub fn is_lost(&self) -> bool {
        matches!(self, Error::Core(samite_core::Error::DeviceLost { .. }))
    }

    /// Returns whether a [`Watcher`](crate::Watcher) stopped the work.
    pub fn is_stopped(&self) -> bool {
        matches!(self, Error::Core(samite_core::Error::Stopped))
    }
}

impl From<samite_gguf::Error> for Error {
    fn from(error: samite_gguf::Error) -> Self {
        match error.kind() {
            samite_gguf::ErrorKind::Cancelled => Error::Core(samite_core::Error::Cancelled),
            _ => Error::Gguf(error),
        }
    }
}

/// Returns `count` copies of `value`, in fallibly allocated memory.
pub(crate) fn try_filled<T: Clone>(value: T, count: Option<usize>, what: &str) -> Result<Vec<T>> {
    let mut filled = Vec::new();
    try_resize(&mut filled, value, count, what)?;
    Ok(filled)
}

/// Extends `vec` to `count` elements, if it is shorter, in fallibly allocated memory. A count of
/// `None` has overflowed.
pub(crate) fn try_resize<T: Clone>(
    vec: &mut Vec<T>,
    value: T,
    count: Option<usize>,
    what: &str,
) -> Result<()> {
    let count = count.unwrap_or(usize::MAX);
    let more = count.saturating_sub(vec.len());
    if more == 0 {
        return Ok(());
    }
    try_reserve(vec, more, what)?;
    vec.resize(count, value);
    Ok(())
}

/// Reserves memory for `more` elements, fallibly.
pub(crate) fn try_reserve<T>(vec: &mut Vec<T>, more: usize, what: &str) -> Result<()> {
    let asked = vec.len().saturating_add(more);
    let refused = |_| samite_core::Error::OutOfMemory {
        device: "host".into(),
        what: what.into(),
        asked: asked.saturating_mul(size_of::<T>()),
        free: None,
    };
    Ok(vec.try_reserve_exact(more).map_err(refused)?)
}
