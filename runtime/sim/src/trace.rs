//! Trace of a simulation: a hash of all events and, on request, their text.

use std::fmt::Write as _;

/// Events in order.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    hash: u64,
    lines: Option<String>,
}

impl Trace {
    /// Creates a trace. It always has a hash; it keeps its text if `is_kept`.
    pub fn new(is_kept: bool) -> Self {
        Trace {
            hash: 0xcbf2_9ce4_8422_2325,
            lines: is_kept.then(String::new),
        }
    }

    /// Adds an event.
    pub fn note(&mut self, time: u64, text: &str) {
        // FNV-1a.
        for byte in time.to_le_bytes().iter().chain(text.as_bytes()) {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        if let Some(lines) = &mut self.lines {
            // Writing to a string cannot fail.
            let _ = writeln!(lines, "{:>14.3} µs  {text}", time as f64 / 1e3);
        }
    }

    /// Returns the hash, which is equal for equal runs.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns the text, if it was kept.
    pub fn text(&self) -> Option<&str> {
        self.lines.as_deref()
    }
}
