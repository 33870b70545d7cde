//! Errors of images and encoders.

use std::path::Path;

/// Result of fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an image or of an encoder.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Error of a graph, device or scheduler, including [`samite_core::Error::Cancelled`].
    #[error(transparent)]
    Core(#[from] samite_core::Error),

    /// The file is not readable GGUF, or a key is missing or has another type.
    #[error(transparent)]
    Gguf(samite_gguf::Error),

    /// The file is readable, but its description of the encoder is contradictory or not supported.
    #[error("{0}")]
    Model(Box<str>),

    /// The file is readable, but its projector is not supported.
    #[error("{0}")]
    Unsupported(Box<str>),

    /// The image cannot be decoded, or is too large.
    #[error("{0}")]
    Image(Box<str>),
}

impl Error {
    pub(crate) fn model(message: impl Into<String>) -> Self {
        Error::Model(message.into().into())
    }

    /// Adds the name of the mmproj file.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        let path = path.display();
        match self {
            Error::Model(what) => Error::model(format!("{path}: {what}")),
            Error::Unsupported(what) => Error::Unsupported(format!("{path}: {what}").into()),
            Error::Core(
                error @ (samite_core::Error::Shape(_) | samite_core::Error::InvalidArgument(_)),
            ) => Error::model(format!("{path}: {error}")),
            error => error,
        }
    }

    pub(crate) fn image(message: impl Into<String>) -> Self {
        Error::Image(message.into().into())
    }
}

/// Errors of a sink come back as they are.
impl From<samite_gguf::Error> for Error {
    fn from(error: samite_gguf::Error) -> Self {
        match error.kind() {
            samite_gguf::ErrorKind::Cancelled => Error::Core(samite_core::Error::Cancelled),
            _ => Error::Gguf(error),
        }
    }
}
