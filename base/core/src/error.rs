//! The error type. A message names the operation, tensor, device or file, and says what to do where that is known.

use std::sync::Arc;

/// The result of anything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the graph, device and scheduling layers.
///
/// Errors are values. They are cheap to clone and carry their whole message, so that nothing has to be looked up in a log.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes, strides or types that do not fit together. Found when a graph is built, never later.
    #[error("{0}")]
    Shape(Box<str>),

    /// An argument outside of what the called function documents.
    #[error("{0}")]
    InvalidArgument(Box<str>),

    /// A device was asked for something that it does not do.
    #[error("{device} does not support {what}: {reason}")]
    Unsupported {
        /// The device's name.
        device: Box<str>,
        /// The operation, buffer type or capability.
        what: Box<str>,
        /// Why not.
        reason: Box<str>,
    },

    /// A device has not enough memory.
    #[error("{device}: out of memory: {asked} bytes are needed for {what}{}", free.map_or(String::new(), |f| format!(", {f} are free")))]
    OutOfMemory {
        /// The device's name.
        device: Box<str>,
        /// What the memory was for.
        what: Box<str>,
        /// Bytes asked for.
        asked: usize,
        /// Bytes that were free, where the device knows.
        free: Option<usize>,
    },

    /// Work on a device failed; what the device holds is still valid.
    #[error("{device}: {message}")]
    Device {
        /// The device's name.
        device: Box<str>,
        /// What happened.
        message: Box<str>,
    },

    /// A device is gone: everything that lived on it is lost.
    #[error("{device}: device lost: {message}")]
    DeviceLost {
        /// The device's name.
        device: Box<str>,
        /// What happened.
        message: Box<str>,
    },

    /// No placement satisfies the graph, the devices and the rules.
    #[error("{0}")]
    Placement(Box<str>),

    /// The work was stopped by its [`CancelToken`](crate::CancelToken).
    #[error("cancelled")]
    Cancelled,

    /// A run was stopped by who watches its nodes.
    #[error("stopped by the watcher of the run")]
    Stopped,

    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// The file or action.
        what: Box<str>,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
}

impl Error {
    /// An [`Error::Shape`].
    pub fn shape(message: impl Into<String>) -> Self {
        Error::Shape(message.into().into())
    }

    /// An [`Error::InvalidArgument`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into().into())
    }

    /// An [`Error::Unsupported`].
    pub fn unsupported(device: &str, what: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Unsupported {
            device: device.into(),
            what: what.into().into(),
            reason: reason.into().into(),
        }
    }

    /// An [`Error::Device`].
    pub fn device(device: &str, message: impl Into<String>) -> Self {
        Error::Device {
            device: device.into(),
            message: message.into().into(),
        }
    }

    /// An [`Error::Io`].
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Error::Io {
            what: what.into().into(),
            source: Arc::new(source),
        }
    }
}
