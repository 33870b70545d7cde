//! A client's connection, which reads whole replies.

use samite_core::environment::{Clock, Connection, Instant};
use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

/// Bytes received at once, so that small messages arrive whole.
const BUFFER: usize = 64 << 10;

/// Minimum bytes per second that the peer must send or accept, besides the time that it may be
/// silent.
const SLOWEST: u64 = 64 << 10;

/// Returns the time limit for `len` bytes, for a peer that may be silent for `patience`.
pub(crate) fn allowance(patience: Duration, len: usize) -> Duration {
    patience.saturating_add(Duration::from_secs(len as u64 / SLOWEST))
}

/// A connection with a receive buffer.
pub(crate) struct Channel {
    connection: Box<dyn Connection>,
    clock: Arc<dyn Clock>,
    patience: Duration,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Channel {
    /// Creates a channel. `patience` is the time that the server may be silent before a reply, or
    /// may not accept data.
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
        })
    }

    /// Receives `out.len()` bytes.
    pub fn receive(&mut self, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        let mut end = None;
        while at < out.len() {
            if self.begin == self.end {
                check_time(&*self.clock, end)?;
                end = end.or_else(|| self.deadline(out.len()));
                // Receive large data directly into its destination.
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
        let end = self.deadline(bytes.len());
        send(&mut *self.connection, bytes, &*self.clock, end)
    }

    fn deadline(&self, len: usize) -> Option<Instant> {
        let now = self.clock.now();
        now.checked_add(allowance(self.patience, len))
    }
}

/// Sends all of `bytes` before `end`.
pub(crate) fn send(
    connection: &mut dyn Connection,
    mut bytes: &[u8],
    clock: &dyn Clock,
    end: Option<Instant>,
) -> Result<()> {
    while !bytes.is_empty() {
        check_time(clock, end)?;
        match connection.send(bytes)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            len => bytes = bytes.get(len..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Checks that a deadline has not passed.
fn check_time(clock: &dyn Clock, end: Option<Instant>) -> Result<()> {
    match end {
        Some(end) if clock.now() >= end => Err(ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

pub(crate) fn ended() -> Error {
    Error::new(
        ErrorKind::UnexpectedEof,
        "the connection ended within a message",
    )
}
