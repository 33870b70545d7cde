//! What can go wrong.

use std::path::{Path, PathBuf};

/// The result of anything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be found or downloaded. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What should name a model does not.
    #[error("'{0}' names no model: write owner/name, owner/name:Q8_0 or owner/name:file.gguf")]
    Reference(String),

    /// The hub has no such repository, revision or file, or does not show it.
    #[error("{0}")]
    NotFound(String),

    /// The hub wants a token, or another one.
    #[error(
        "{url}: access is refused ({status}): check the name; for a repository that is private or has conditions to accept, give a token of your \
         account (--hf-token, HF_TOKEN)"
    )]
    Refused {
        /// What was asked for.
        url: String,
        /// The server's status.
        status: u16,
    },

    /// The server answered with something else than was asked for.
    #[error("{url}: {problem}")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong with the answer.
        problem: String,
    },

    /// No connection, or one that broke off or stood still.
    #[error("{url}: {problem}; what is there already is kept: run the command again to go on")]
    Connection {
        /// What was asked for.
        url: String,
        /// What happened.
        problem: String,
    },

    /// A file that came whole, but is not the one that the hub describes.
    #[error(
        "{name}: {problem}; it was deleted: download it again, and if that gives the same, tell the owner of the repository"
    )]
    Damaged {
        /// The file.
        name: String,
        /// What differs.
        problem: String,
    },

    /// The cache cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },

    /// Somebody stopped it.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |error| Error::Io { path, error }
    }

    /// Whether there was no usable connection, so that what is in the cache may do.
    pub fn is_connection(&self) -> bool {
        matches!(self, Error::Connection { .. })
    }
}
