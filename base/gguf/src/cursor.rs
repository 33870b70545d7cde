//! Sequential parsing of fields. Every length is checked before use.

use crate::error::{Error, ErrorKind, quoted};
use std::fmt;

/// Reason for the end of parsing.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The available bytes end, but the file continues. Parsing can be repeated with at least this
    /// many bytes.
    NeedMore(u64),
    /// The file is invalid.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

/// Description of the current field, for messages. It is built for every field, so it only borrows.
#[derive(Clone, Copy)]
pub(crate) enum Field<'a> {
    /// A field of the header.
    Header(&'a str),
    /// The key with this number.
    Key(u64),
    /// A part of the value of a key.
    Value(&'a str, &'a str),
    /// An element of the array that is the value of a key.
    Element(&'a str, u64),
    /// The name of the tensor with this number.
    TensorName(u64),
    /// A property of a tensor.
    Tensor(&'a str, &'a str),
    /// A dimension of a tensor.
    Dimension(&'a str, usize),
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Field::Header(what) => f.write_str(what),
            Field::Key(number) => write!(f, "name of key {number}"),
            Field::Value(key, what) => write!(f, "key {}, {what}", quoted(key)),
            Field::Element(key, index) => write!(f, "key {}, element {index}", quoted(key)),
            Field::TensorName(number) => write!(f, "name of tensor {number}"),
            Field::Tensor(name, what) => write!(f, "tensor {}, {what}", quoted(name)),
            Field::Dimension(name, dimension) => {
                write!(f, "tensor {}, dimension {dimension}", quoted(name))
            }
        }
    }
}

/// A position in the first bytes of a file of known length.
#[derive(Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    file_len: u64,
}

impl<'a> Cursor<'a> {
    /// Creates a cursor at the start of `bytes`, the first bytes of a file of `file_len` bytes.
    pub(crate) fn new(bytes: &'a [u8], file_len: u64) -> Self {
        Cursor {
            bytes,
            position: 0,
            file_len,
        }
    }

    /// Returns the number of bytes before the cursor.
    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    /// Returns the number of bytes after the cursor.
    pub(crate) fn left(&self) -> u64 {
        self.file_len.saturating_sub(self.position())
    }

    /// Returns the next `count` bytes.
    pub(crate) fn take(&mut self, count: u64, field: Field<'_>) -> Result<&'a [u8], Stop> {
        if count > self.left() {
            let message = format!(
                "needs {count} bytes, but the file has only {} left: it is truncated or damaged, download it again",
                self.left()
            );
            return Err(Error::new(ErrorKind::Truncated, field, message)
                .at(self.position())
                .into());
        }
        // Cannot overflow: the end is inside the file.
        let end = self.position() + count;
        let taken = usize::try_from(end)
            .ok()
            .and_then(|end| self.bytes.get(self.position..end));
        let taken = taken.ok_or(Stop::NeedMore(end))?;
        self.position += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: Field<'_>) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub(crate) fn u32(&mut self, field: Field<'_>) -> Result<u32, Stop> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: Field<'_>) -> Result<u64, Stop> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Returns a count of items that each take at least `least` of the remaining bytes.
    pub(crate) fn count(&mut self, least: u64, field: Field<'_>) -> Result<u64, Stop> {
        let start = self.position();
        let count = self.u64(field)?;
        if count
            .checked_mul(least)
            .is_none_or(|bytes| bytes > self.left())
        {
            let message = format!(
                "is {count}, too many for the {} bytes left: the file is truncated or damaged, download it again",
                self.left()
            );
            return Err(Error::new(ErrorKind::Truncated, field, message)
                .at(start)
                .into());
        }
        Ok(count)
    }

    /// Returns the bytes of a string, which its length precedes.
    pub(crate) fn string(&mut self, field: Field<'_>) -> Result<&'a [u8], Stop> {
        // Vocabularies have hundreds of thousands of valid strings, so this path does not look for
        // errors.
        if let Some(string) = self.whole_string() {
            return Ok(string);
        }
        let len = self.count(1, field)?;
        self.take(len, field)
    }

    /// Returns the next string, if it is completely available.
    fn whole_string(&mut self) -> Option<&'a [u8]> {
        let (len, rest) = self.bytes.get(self.position..)?.split_first_chunk()?;
        let string = rest.get(..usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        self.position += len.len() + string.len();
        Some(string)
    }
}
