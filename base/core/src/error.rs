//! The error type. A message names the operation, tensor, device or file, and says what to do if
//! that is known.

use std::sync::Arc;

/// Result of everything fallible in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the graph, device and scheduling layers.
///
/// Errors are values. They are cheap to clone and carry their whole message, so no log is needed to
/// understand them.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes, strides or types that do not fit together. Found when a graph is built, never later.
    #[error("{0}")]
    Shape(Box<str>),

    /// An argument that the called function's documentation excludes.
    #[error("{0}")]
    InvalidArgument(Box<str>),

    /// A request that the device does not support.
    #[error("{device} does not support {what}: {reason}")]
    Unsupported {
        /// The device's name.
        device: Box<str>,
        /// The operation, buffer type or capability.
        what: Box<str>,
        /// The reason.
        reason: Box<str>,
    },

    /// Not enough memory on a device.
    #[error("{device}: out of memory: {asked} bytes are needed for {what}{}",
        free.map_or(String::new(), |f| format!(", {f} are free")))]
    OutOfMemory {
        /// The device's name.
        device: Box<str>,
        /// Purpose of the memory.
        what: Box<str>,
        /// Requested bytes.
        asked: usize,
        /// Free bytes, if the device knows.
        free: Option<usize>,
    },

    /// A failure of work on a device. The device's memory is still valid.
    #[error("{device}: {message}")]
    Device {
        /// The device's name.
        device: Box<str>,
        /// Description of the failure.
        message: Box<str>,
    },

    /// A lost device, with everything that was on it.
    #[error("{device}: device lost: {message}")]
    DeviceLost {
        /// The device's name.
        device: Box<str>,
        /// Description of the failure.
        message: Box<str>,
    },

    /// No placement satisfies the graph, the devices and the rules.
    #[error("{0}")]
    Placement(Box<str>),

    /// The work was stopped by its [`CancelToken`](crate::CancelToken).
    #[error("cancelled")]
    Cancelled,

    /// The run's observer stopped it.
    #[error("stopped by the watcher of the run")]
    Stopped,

    /// A refusal by the operating system.
    #[error("{what}: {source}")]
    Io {
        /// The file or action.
        what: Box<str>,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
}

impl Error {
    /// Returns an [`Error::Shape`].
    pub fn shape(message: impl Into<String>) -> Self {
        Error::Shape(message.into().into())
    }

    /// Returns an [`Error::InvalidArgument`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into().into())
    }

    /// Returns an [`Error::Unsupported`].
    pub fn unsupported(device: &str, what: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Unsupported {
            device: device.into(),
            what: what.into().into(),
            reason: reason.into().into(),
        }
    }

    /// Returns an [`Error::Device`].
    pub fn device(device: &str, message: impl Into<String>) -> Self {
        Error::Device {
            device: device.into(),
            message: message.into().into(),
        }
    }

    /// Returns an [`Error::Io`].
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Error::Io {
            what: what.into().into(),
            source: Arc::new(source),
        }
    }
}
