//! A client's connection, from which whole replies are read.

use samite_core::environment::Connection;
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;

/// Bytes that are received at once, so that small messages come whole.
const BUFFER: usize = 64 << 10;

/// A connection with bytes that were received before they were asked for.
pub(crate) struct Channel {
    connection: Box<dyn Connection>,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Channel {
    /// `patience` is how long the server may be silent when it has to answer, or not take what is sent.
    pub fn new(mut connection: Box<dyn Connection>, patience: Duration) -> Result<Self> {
        connection.set_timeout(Some(patience))?;
        Ok(Channel {
            connection,
            buffer: vec![0; BUFFER],
            begin: 0,
            end: 0,
        })
    }

    /// Receives `out.len()` bytes.
    pub fn receive(&mut self, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        while at < out.len() {
            if self.begin == self.end {
                // Much is received where it belongs.
                let rest = &mut out[at..];
                if rest.len() >= BUFFER {
                    match self.connection.receive(rest)? {
                        0 => return Err(ended()),
                        len => at += len,
                    }
                    continue;
                }
                match self.connection.receive(&mut self.buffer)? {
                    0 => return Err(ended()),
                    len => (self.begin, self.end) = (0, len),
                }
            }
            let len = (self.end - self.begin).min(out.len() - at);
            out[at..at + len].copy_from_slice(&self.buffer[self.begin..self.begin + len]);
            self.begin += len;
            at += len;
        }
        Ok(())
    }

    /// Sends all of `bytes`.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        send(&mut *self.connection, bytes)
    }
}

/// Sends all of `bytes`.
pub(crate) fn send(connection: &mut dyn Connection, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match connection.send(bytes)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            len => bytes = bytes.get(len..).unwrap_or_default(),
        }
    }
    Ok(())
}

pub(crate) fn ended() -> Error {
    Error::new(
        ErrorKind::UnexpectedEof,
        "the connection ended within a message",
    )
}
