//! Errors of training.

use std::path::PathBuf;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in one line that says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A graph cannot be differentiated.
    #[error("{0}")]
    Gradient(String),
    /// The configuration contradicts itself or asks for what is not there.
    #[error("{0}")]
    Config(String),
    /// The data cannot be trained on.
    #[error("{0}")]
    Data(String),
    /// The loss is not a finite number.
    #[error("step {step}: the loss is {loss}; {first}")]
    Diverged {
        /// The step.
        step: u64,
        /// What the loss is.
        loss: f32,
        /// Where it began.
        first: String,
    },
    /// A checkpoint is of another model or run, or damaged.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Tensors, devices, plans.
    #[error(transparent)]
    Core(#[from] samite_core::Error),
    /// Files of tensors.
    #[error(transparent)]
    Gguf(#[from] samite_gguf::Error),
    /// Models.
    #[error(transparent)]
    Model(#[from] samite_llm::Error),
    /// Vocabularies.
    #[error(transparent)]
    Vocabulary(#[from] samite_text::VocabError),
    /// Other files.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
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
