//! Sequential reading of fields. Every length is checked before it is used.

use crate::error::{Error, ErrorKind, quoted};
use std::fmt;

/// Why parsing stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The bytes at hand end, but the file goes on: parsing can be repeated with at least so many bytes.
    NeedMore(u64),
    /// The file is bad.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

/// What is being read, for messages. Built for every field, so it only borrows.
#[derive(Clone, Copy)]
pub(crate) enum Field<'a> {
    /// A field of the header.
    Header(&'a str),
    /// The key with this number.
    Key(u64),
    /// Something about the value of a key.
    Value(&'a str, &'a str),
    /// An element of the array that is the value of a key.
    Element(&'a str, u64),
    /// The name of the tensor with this number.
    TensorName(u64),
    /// Something about a tensor.
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
    /// Reads from `bytes`, the beginning of a file of `file_len` bytes.
    pub(crate) fn new(bytes: &'a [u8], file_len: u64) -> Self {
        Cursor {
            bytes,
            position: 0,
            file_len,
        }
    }

    /// Bytes from the start of the file.
    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    /// Bytes to the end of the file.
    pub(crate) fn left(&self) -> u64 {
        self.file_len.saturating_sub(self.position())
    }

    /// The next `count` bytes.
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

    /// A number of things of which each takes at least `least` bytes of what is left.
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

    /// A string: its length and its bytes.
    pub(crate) fn string(&mut self, field: Field<'_>) -> Result<&'a [u8], Stop> {
        // Vocabularies have hundreds of thousands of strings, all good: errors are looked for only when there is one.
        if let Some(string) = self.whole_string() {
            return Ok(string);
        }
        let len = self.count(1, field)?;
        self.take(len, field)
    }

    /// The next string, if all of it is at hand.
    fn whole_string(&mut self) -> Option<&'a [u8]> {
        let (len, rest) = self.bytes.get(self.position..)?.split_first_chunk()?;
        let string = rest.get(..usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        self.position += len.len() + string.len();
        Some(string)
    }
}
