//! Removes logits, cells and states that are not finite: the traces of a failed computation.
//!
//! Flash attention skips the cells that a token does not see. Without it, such a cell has weight 0,
//! but its value is still multiplied, and 0 times NaN is NaN. Then one cell that is not finite
//! corrupts the tokens of all other sequences, even after the cell is free again.

use super::Context;
use crate::arch::Output;
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::finite::are_finite;
use crate::kv::{Cells, States};
use crate::saved::{places, runs};
use samite_core::StoredTensor;

/// Rows of memory: cells, cells of layers with a window, and states.
#[derive(Debug, Default)]
pub(super) struct UsedRows {
    cells: Vec<usize>,
    windowed: Vec<usize>,
    states: Vec<usize>,
}

impl Context {
    /// Decodes a batch like [`decode`](Self::decode), but fails if requested logits are NaN or
    /// positive infinity. Cache and states are then as they were before, and zeros replace what the
    /// batch wrote.
    ///
    /// # Errors
    /// Returns [`Error::NotFinite`], and the errors of [`decode`](Self::decode).
    pub fn decode_finite(&mut self, batch: &Batch) -> Result<()> {
        self.begin(batch)?;
        let result = self
            .decode_all(batch)
            .and_then(|()| Ok(self.scheduler.synchronize()?))
            .and_then(|()| self.check_logits());
        let taken = match &result {
            Err(Error::NotFinite { .. }) => self.taken_rows(),
            _ => UsedRows::default(),
        };
        let result = self.end(result);
        self.zero(&taken)?;
        result
    }

    /// Returns an error if logits of the current batch are not finite.
    fn check_logits(&mut self) -> Result<()> {
        if !matches!(self.options.output, Output::Logits | Output::Both) {
            return Ok(());
        }
        let wanted = (0..self.rows.len()).filter(|&token| self.rows[token].is_some());
        let wanted: Vec<usize> = wanted.collect();
        // Minus infinity is the logit of a token that is never chosen.
        let is_sound = |logit: f32| logit < f32::INFINITY;
        for &token in &wanted {
            let is_fine = match self.device_top_k(token) {
                Some(device_top_k) => device_top_k.iter().all(|&(_, logit)| logit.is_finite()),
                None => {
                    let logits = self.logits(token).unwrap_or_default();
                    let mut chunks = logits.chunks(1024);
                    // Compilers vectorize this, but not a search.
                    chunks.all(|chunk| chunk.iter().fold(true, |all, &x| all & is_sound(x)))
                }
            };
            // The top-k may contain minus infinity without a fault; all logits decide.
            if !is_fine && !self.read_logits(token)?.iter().all(|&x| is_sound(x)) {
                return Err(Error::NotFinite { token });
            }
        }
        Ok(())
    }

    /// Returns the rows that the current batch writes.
    fn taken_rows(&self) -> UsedRows {
        self.rows_of(Cells::taken, States::written)
    }

    /// Removes `sequence`, and writes zeros to the rows that no other sequence shares with it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist. Also fails if a device
    /// fails.
    pub fn scrub(&mut self, sequence: usize) -> Result<()> {
        self.cache.cells.check(sequence)?;
        self.scheduler.synchronize()?;
        let held = |states: &States| states.held(sequence);
        let mut rows = self.rows_of(|cells| cells.only_of(sequence), held);
        self.cache.remove(sequence, ..)?;
        if let Some(states) = &self.cache.states {
            rows.states.retain(|&row| states.is_free(row));
        }
        self.zero(&rows)
    }

    /// Writes zeros to all free cells.
    ///
    /// # Errors
    /// Returns an error if a device fails.
    pub fn scrub_free_cells(&mut self) -> Result<()> {
        self.scheduler.synchronize()?;
        self.zero(&self.rows_of(Cells::free_cells, |_| Vec::new()))
    }

    /// Returns whether all cached data of `sequence` is finite.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist. Also fails if a device
    /// fails.
    pub fn is_finite(&mut self, sequence: usize) -> Result<bool> {
        self.scheduler.synchronize()?;
        let cache = &self.cache;
        let cells = |cells: &Cells| -> Result<Vec<usize>> {
            let mut cells: Vec<_> = cells.sorted(sequence)?.into_iter().map(|it| it.1).collect();
            cells.sort_unstable();
            Ok(cells)
        };
        let rows = UsedRows {
            cells: cells(&cache.cells)?,
            windowed: match &cache.window {
                Some(window) => cells(&window.cells)?,
                None => Vec::new(),
            },
            states: cache
                .states
                .iter()
                .flat_map(|states| states.held(sequence))
                .collect(),
        };
        let mut bytes = Vec::new();
        for (tensor, rows) in places(cache, rows.all()) {
            let layout = tensor.layout();
            for (first, count) in pieces(rows) {
                bytes.resize(count * layout.row_bytes(), 0);
                tensor
                    .tensor()
                    .read(first * layout.row_bytes(), &mut bytes)?;
                if !are_finite(layout.dtype(), layout.shape()[0], &bytes)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns the chosen rows of the cache.
    fn rows_of(
        &self,
        cells: impl Fn(&Cells) -> Vec<usize>,
        states: impl Fn(&States) -> Vec<usize>,
    ) -> UsedRows {
        let cache = &self.cache;
        let windowed = cache
            .window
            .as_ref()
            .map_or(&cache.cells, |window| &window.cells);
        UsedRows {
            cells: cells(&cache.cells),
            windowed: cells(windowed),
            states: cache.states.as_ref().map(states).unwrap_or_default(),
        }
    }

    fn zero(&self, rows: &UsedRows) -> Result<()> {
        let zero = |tensor: &StoredTensor, rows: &[usize]| -> Result<()> {
            let row = tensor.layout().row_bytes();
            for (first, count) in pieces(rows) {
                tensor.tensor().write(first * row, &vec![0; count * row])?;
            }
            Ok(())
        };
        places(&self.cache, rows.all()).try_for_each(|(tensor, rows)| zero(tensor, rows))
    }
}

impl UsedRows {
    fn all(&self) -> [&[usize]; 3] {
        [&self.cells, &self.windowed, &self.states]
    }
}

/// Yields runs of adjacent rows as first row and length. The length is limited, so the buffer for a
/// run is small.
fn pieces(rows: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    const MAX_ROWS: usize = 64;
    let runs = runs(rows).flat_map(|(_, run)| run.chunks(MAX_ROWS));
    runs.map(|run| (run[0], run.len()))
}
