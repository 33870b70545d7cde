//! The error type of this crate.

use std::fmt;
use std::path::Path;

/// Result of everything fallible in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error that names the file, the field and the byte offset, and says what to do if that is
/// known.
///
/// Its text is a single line, whatever the file contains: names from the file are escaped and
/// shortened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    kind: ErrorKind,
    path: Option<Box<Path>>,
    field: Box<str>,
    offset: Option<u64>,
    message: Box<str>,
}

/// Kind of an [`Error`], for programs that react to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A failure of the operating system.
    Io(std::io::ErrorKind),
    /// Not a GGUF file, by its first bytes.
    NotGguf,
    /// GGUF of an unsupported version or byte order.
    Unsupported,
    /// The file ends too early.
    Truncated,
    /// The file violates the format or contradicts itself.
    Corrupt,
    /// Missing metadata key.
    MissingKey,
    /// A metadata key with an unexpected type, or with a value that does not fit.
    WrongType,
    /// Missing tensor.
    MissingTensor,
    /// A part of a split file is missing, or does not belong to the others.
    Split,
    /// An invalid request by the caller.
    InvalidArgument,
    /// Not enough memory for a tensor.
    OutOfMemory,
    /// The cancel function stopped the work.
    Cancelled,
}

impl Error {
    /// Returns an error about `field` (empty if it is about the file as a whole).
    pub fn new(kind: ErrorKind, field: impl fmt::Display, message: impl Into<String>) -> Self {
        Error {
            kind,
            path: None,
            field: field.to_string().into(),
            offset: None,
            message: message.into().into(),
        }
    }

    /// Returns an operating system error while `doing`.
    pub(crate) fn io(doing: &str, source: &std::io::Error) -> Self {
        Error::new(
            ErrorKind::Io(source.kind()),
            "",
            format!("{doing}: {source}"),
        )
    }

    /// Returns an error for invalid use of the library.
    pub(crate) fn invalid(field: impl fmt::Display, message: impl Into<String>) -> Self {
        Error::new(ErrorKind::InvalidArgument, field, message)
    }

    /// Returns the error for work that its cancel function stopped.
    pub(crate) fn cancelled() -> Self {
        Error::new(ErrorKind::Cancelled, "", "cancelled")
    }

    /// Adds the byte offset in the file.
    pub(crate) fn at(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    /// Adds the file, unless the error already names one.
    pub fn in_file(mut self, path: &Path) -> Self {
        self.path.get_or_insert_with(|| path.into());
        self
    }

    /// Returns the kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the file, if known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the subject of the error, such as `tensor "output.weight", dimension 1`. Empty for
    /// the file as a whole.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Returns the byte offset of the subject in the file, if known.
    pub fn offset(&self) -> Option<u64> {
        self.offset
    }

    /// Returns the problem and what to do, without file, field and offset.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}: ", path.display().to_string().escape_debug())?;
        }
        match (self.field.is_empty(), self.offset) {
            (false, Some(offset)) => write!(f, "{} at byte {offset}: ", self.field)?,
            (false, None) => write!(f, "{}: ", self.field)?,
            (true, Some(offset)) => write!(f, "at byte {offset}: ")?,
            (true, None) => {}
        }
        f.write_str(&self.message)
    }
}

impl From<Error> for samite_core::Error {
    fn from(error: Error) -> Self {
        match error.kind {
            ErrorKind::Cancelled => samite_core::Error::Cancelled,
            _ => samite_core::Error::invalid(error.to_string()),
        }
    }
}

/// Returns a name from a file in a form for one-line messages: quoted, escaped, shortened.
pub(crate) fn quoted(name: &str) -> String {
    const SHOWN: usize = 80;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &name[..end]),
        None => format!("{name:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_messages_are_one_line_and_complete() {
        let error = Error::new(
            ErrorKind::Corrupt,
            format!("key {}", quoted("a\nb")),
            "is bad; download it again",
        )
        .at(17)
        .in_file(Path::new("dir/model.gguf"))
        .in_file(Path::new("other.gguf"));
        assert_eq!(
            error.to_string(),
            r#"dir/model.gguf: key "a\nb" at byte 17: is bad; download it again"#
        );
        assert_eq!(
            quoted(&"x".repeat(100)),
            format!("\"{}\"...", "x".repeat(80))
        );
    }

    #[test]
    fn cancellation_survives_conversion() {
        assert!(matches!(
            samite_core::Error::from(Error::cancelled()),
            samite_core::Error::Cancelled
        ));
    }
}
