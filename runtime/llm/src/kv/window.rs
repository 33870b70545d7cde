//! Cells of layers that look through a window: they keep no more than it needs.

use super::Cells;
use crate::error::{Error, Result};

/// Cells that forget what no later token sees. They hold a part of what the other cells hold.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub cells: Cells,
    /// How many positions a token sees at most.
    size: usize,
}

impl Window {
    /// `count` free cells for up to `n_sequences` sequences.
    ///
    /// # Errors
    /// [`samite_core::Error::OutOfMemory`].
    pub fn new(count: usize, n_sequences: usize, size: usize) -> Result<Self> {
        Ok(Window {
            cells: Cells::new(count, n_sequences)?,
            size,
        })
    }

    /// Has room for a batch of so many tokens, of which there is enough: what is forgotten, no token of the batch sees, nor one in its place.
    pub fn make_room(&mut self, tokens: usize) {
        if self.cells.free() < tokens {
            self.cells.forget_before(self.size);
        }
    }

    /// The first position that a token at `position` sees.
    pub fn first_seen(&self, position: i32) -> i32 {
        let size = i32::try_from(self.size).unwrap_or(i32::MAX);
        position.saturating_sub(size - 1).max(0)
    }

    /// Whether a token at `position` of `sequence` would see here what it sees in `all` cells.
    pub fn has(&self, all: &Cells, sequence: usize, position: i32) -> bool {
        let seen = self.first_seen(position)..position;
        self.cells.count(sequence, seen.clone()) == all.count(sequence, seen)
    }

    /// Fails if the next token of `sequence` would not see what it does in `all` cells.
    pub fn check(&self, all: &Cells, sequence: usize) -> Result<()> {
        let next = all.last_position(sequence).map_or(0, |last| last + 1);
        if self.has(all, sequence, next) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "sequence {sequence}: a token at position {next} would see tokens that layers with a window have forgotten; \
             remove the whole sequence, or have these layers keep everything (full_windows, --swa-full)"
        )))
    }
}
