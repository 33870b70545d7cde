//! The messages of ggml's RPC protocol, as bytes.
//!
//! A request is `command u8 | length u64 | payload`; a reply is `length u64 | payload`, for commands that have one. Numbers are little-endian,
//! and nothing is padded. There are no request numbers and no errors: replies come in the order of the requests, and whoever cannot answer closes the
//! connection.
//!
//! - [`version`]: what differs between versions of the protocol.
//! - [`frame`]: commands, and how long their messages may be.
//! - [`message`]: requests and replies.
//! - [`record`]: the 296 bytes of a tensor.
//! - [`graph`]: the message of a graph.
//!
//! Decoding takes no memory that the message does not fill, and every number of it that stands for a size or a place is checked by who uses it.

pub mod frame;
pub mod graph;
pub mod message;
pub mod record;
pub mod version;

use crate::Reason;

/// Reads fields one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of a payload.
    pub fn of(payload: &'a [u8]) -> Self {
        Fields { rest: payload }
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// If the payload ends before that.
    pub fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Reason> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk()
            .ok_or("a message ends too early")?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// The next number.
    ///
    /// # Errors
    /// If the payload ends before that.
    pub fn u8(&mut self) -> Result<u8, Reason> {
        Ok(u8::from_le_bytes(self.bytes()?))
    }

    /// The next number.
    ///
    /// # Errors
    /// If the payload ends before that.
    pub fn u32(&mut self) -> Result<u32, Reason> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    /// The next number.
    ///
    /// # Errors
    /// If the payload ends before that.
    pub fn i32(&mut self) -> Result<i32, Reason> {
        Ok(i32::from_le_bytes(self.bytes()?))
    }

    /// The next number.
    ///
    /// # Errors
    /// If the payload ends before that.
    pub fn u64(&mut self) -> Result<u64, Reason> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// The bytes behind what was read.
    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Makes sure that nothing is left.
    ///
    /// # Errors
    /// If something is.
    pub fn end(self) -> Result<(), Reason> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(format!("a message has {more} bytes too many").into()),
        }
    }
}
