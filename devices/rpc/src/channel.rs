//! A connection that whole messages are read from, within a time.

use samite_core::environment::{Clock, Connection, Instant};
use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are received at once, so that small messages come whole.
const BUFFER: usize = 64 << 10;

/// Bytes per second that a peer sends at least, besides the time that it may be silent.
const SLOWEST: u64 = 64 << 10;

/// A connection with bytes that were received before they were asked for.
pub(crate) struct Channel {
    connection: Box<dyn Connection>,
    clock: Arc<dyn Clock>,
    /// How long the peer may be silent in the middle of a message, or not take what is sent.
    patience: Duration,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// When the message that is being read must be complete.
    deadline: Option<Instant>,
}

impl Channel {
    pub fn new(
        mut connection: Box<dyn Connection>,
        clock: Arc<dyn Clock>,
        patience: Duration,
    ) -> Result<Self> {
        connection.set_timeout(Some(patience))?;
        Ok(Channel {
            connection,
            clock,
            patience,
            buffer: vec![0; BUFFER],
            begin: 0,
            end: 0,
            deadline: None,
        })
    }

    /// Waits, as long as it takes, for the first byte of a message; `None` if the peer has closed.
    pub fn first(&mut self) -> Result<Option<u8>> {
        self.deadline = None;
        while self.begin == self.end {
            match self.connection.receive(&mut self.buffer) {
                Ok(0) => return Ok(None),
                Ok(len) => (self.begin, self.end) = (0, len),
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) => return Err(error),
            }
        }
        self.begin += 1;
        self.expect(0);
        Ok(Some(self.buffer[self.begin - 1]))
    }

    /// `len` more bytes have to come, quickly.
    pub fn expect(&mut self, len: u64) {
        let time = self.patience + Duration::from_secs(len / SLOWEST);
        self.deadline = self.clock.now().checked_add(time);
    }

    /// Receives `out.len()` bytes.
    pub fn receive(&mut self, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        while at < out.len() {
            if self.begin == self.end {
                if self.deadline.is_some_and(|end| self.clock.now() >= end) {
                    return Err(ErrorKind::TimedOut.into());
                }
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
    pub fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.connection.send(bytes)? {
                0 => return Err(ErrorKind::WriteZero.into()),
                len => bytes = bytes.get(len..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

fn ended() -> Error {
    Error::new(
        ErrorKind::UnexpectedEof,
        "the connection ended within a message",
    )
}
