//! Errors of training.

use std::path::PathBuf;

/// Result of fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of training. The message is one line that contains the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A graph cannot be differentiated.
    #[error("{0}")]
    Gradient(String),
    /// The configuration is contradictory, or requires something that does not exist.
    #[error("{0}")]
    Config(String),
    /// The data cannot be used for training.
    #[error("{0}")]
    Data(String),
    /// The loss is not a finite number.
    #[error("step {step}: the loss is {loss}; {first}")]
    Diverged {
        /// Step of the loss.
        step: u64,
        /// Value of the loss.
        loss: f32,
        /// First result that is not finite.
        first: String,
    },
    /// A checkpoint belongs to another model or run, or is damaged.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// Error of tensors, devices or plans.
    #[error(transparent)]
    Core(#[from] samite_core::Error),
    /// Error of a GGUF file.
    #[error(transparent)]
    Gguf(#[from] samite_gguf::Error),
    /// Error of a model.
    #[error(transparent)]
    Model(#[from] samite_llm::Error),
    /// Error of a vocabulary.
    #[error(transparent)]
    Vocabulary(#[from] samite_text::VocabError),
    /// Error of another file.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn gradient(problem: impl Into<String>) -> Self {
        Error::Gradient(problem.into())
    }

    pub(crate) fn config(problem: impl Into<String>) -> Self {
        Error::Config(problem.into())
    }

    pub(crate) fn data(problem: impl Into<String>) -> Self {
        Error::Data(problem.into())
    }

    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Error::Io {
            path: path.into(),
            source,
        }
    }
}
