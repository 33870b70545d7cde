//! Errors of the hub client.

use std::path::{Path, PathBuf};

/// Result of a hub operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a model could not be found or downloaded. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The reference does not name a model.
    #[error("'{0}' names no model: write owner/name, owner/name:Q8_0 or owner/name:file.gguf")]
    Reference(String),

    /// The repository, revision or file does not exist or is not visible.
    #[error("{0}")]
    NotFound(String),

    /// The hub requires a token, or a different one.
    #[error(
        "{url}: access is refused ({status}): check the name; for a repository that is private or \
         has conditions to accept, give a token of your account (--hf-token, HF_TOKEN)"
    )]
    Refused {
        /// Requested URL.
        url: String,
        /// HTTP status.
        status: u16,
    },

    /// The server sent an invalid response.
    #[error("{url}: {problem}")]
    Answer {
        /// Requested URL.
        url: String,
        /// Description of the problem.
        problem: String,
    },

    /// The connection failed, broke or timed out.
    #[error("{url}: {problem}; what is there already is kept: run the command again to go on")]
    Connection {
        /// Requested URL.
        url: String,
        /// Description of the problem.
        problem: String,
    },

    /// The downloaded file does not match the hub's description.
    #[error(
        "{name}: {problem}; it was deleted: download it again, and if that gives the same, tell the owner of the repository"
    )]
    Damaged {
        /// Name of the file.
        name: String,
        /// Description of the mismatch.
        problem: String,
    },

    /// The cache cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },

    /// No folder for downloads is known.
    #[error("no folder for downloads is known: set HF_HUB_CACHE to one, or HOME")]
    NoCache,

    /// The download was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |error| Error::Io { path, error }
    }

    /// Returns whether no usable connection could be made, so that the cache may serve as a
    /// fallback.
    pub fn is_connection(&self) -> bool {
        matches!(self, Error::Connection { .. })
    }
}
