//! Messages of ggml's RPC protocol, as bytes.
//!
//! A request is `command u8 | length u64 | payload`. A reply is `length u64 | payload`, for
//! commands that have one. Numbers are little-endian, without padding. There are no request numbers
//! and no errors: replies come in the order of the requests, and a server that cannot reply closes
//! the connection.
//!
//! - [`version`]: differences between protocol versions.
//! - [`frame`]: commands, and the lengths of their messages.
//! - [`message`]: requests and replies.
//! - [`record`]: the 296 bytes of a tensor.
//! - [`graph`]: the message of a graph.
//! - [`cache`]: the graphs that a server keeps and a client refers to.
//!
//! Decoding allocates no more memory than the message fills. The users of sizes and offsets in a
//! message check these.

pub mod cache;
pub mod frame;
pub mod graph;
pub mod message;
pub mod record;
pub mod version;

use crate::UnsupportedConversion;

/// Sequential parser of fields.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Creates a parser of a payload.
    pub fn new(payload: &'a [u8]) -> Self {
        Fields { rest: payload }
    }

    /// Returns the next `N` bytes.
    ///
    /// # Errors
    /// If the payload ends too early.
    pub fn bytes<const N: usize>(&mut self) -> Result<[u8; N], UnsupportedConversion> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk()
            .ok_or("a message ends too early")?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// Returns the next number.
    ///
    /// # Errors
    /// If the payload ends too early.
    pub fn u8(&mut self) -> Result<u8, UnsupportedConversion> {
        Ok(u8::from_le_bytes(self.bytes()?))
    }

    /// Returns the next number.
    ///
    /// # Errors
    /// If the payload ends too early.
    pub fn u32(&mut self) -> Result<u32, UnsupportedConversion> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    /// Returns the next number.
    ///
    /// # Errors
    /// If the payload ends too early.
    pub fn i32(&mut self) -> Result<i32, UnsupportedConversion> {
        Ok(i32::from_le_bytes(self.bytes()?))
    }

    /// Returns the next number.
    ///
    /// # Errors
    /// If the payload ends too early.
    pub fn u64(&mut self) -> Result<u64, UnsupportedConversion> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// Returns the remaining bytes.
    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// If bytes are left.
    pub fn end(self) -> Result<(), UnsupportedConversion> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(format!("a message has {more} bytes too many").into()),
        }
    }
}
