//! The cells of layers with a window, which keep no more than the window needs.

use super::Cells;
use crate::error::{Error, Result};

/// Cells that drop tokens that no later token sees. Their tokens are a subset of those in the other
/// cells.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub cells: Cells,
    /// Maximum number of positions that a token sees.
    size: usize,
}

impl Window {
    /// Creates `count` free cells for up to `n_sequences` sequences.
    ///
    /// # Errors
    /// Returns [`samite_core::Error::OutOfMemory`].
    pub fn new(count: usize, n_sequences: usize, size: usize) -> Result<Self> {
        Ok(Window {
            cells: Cells::new(count, n_sequences)?,
            size,
        })
    }

    /// Makes room for a batch of `tokens` tokens, for which the capacity suffices. It frees only
    /// cells that no token of the batch sees, nor a token that replaces one of them.
    pub fn make_room(&mut self, tokens: usize) {
        if self.cells.free() < tokens {
            self.cells.forget_before(self.size);
        }
    }

    /// Returns the first position that a token at `position` sees.
    pub fn first_seen(&self, position: i32) -> i32 {
        let size = i32::try_from(self.size).unwrap_or(i32::MAX);
        position.saturating_sub(size - 1).max(0)
    }

    /// Returns whether a token at `position` of `sequence` would see the same positions here as in
    /// `all` cells.
    pub fn has(&self, all: &Cells, sequence: usize, position: i32) -> bool {
        let seen = self.first_seen(position)..position;
        self.cells.count(sequence, seen.clone()) == all.count(sequence, seen)
    }

    /// Returns an error if the next token of `sequence` would not see the same positions as in
    /// `all` cells.
    pub fn check(&self, all: &Cells, sequence: usize) -> Result<()> {
        let next = all.next_position(sequence);
        if self.has(all, sequence, next) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "sequence {sequence}: a token at position {next} would see tokens that layers with a \
             window have forgotten; remove the whole sequence, or have these layers keep \
             everything (full_windows, --swa-full)"
        )))
    }
}
