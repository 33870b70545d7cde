//! Fills the inputs of a graph: tokens, positions, cells, mask.

use super::micro_batches::Room;
use crate::arch::{GraphInputs, GraphShape};
use crate::batch::{Batch, BatchToken};
use crate::error::{Error, Result, try_filled};
use crate::kv::Cells;
use half::f16;
use samite_sched::Scheduler;

/// Values of a graph's inputs, in buffers that are reused.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    cells: Vec<i64>,
    mask: Vec<f16>,
    outputs: Vec<i32>,
}

impl Staging {
    /// With memory for the largest mask.
    pub fn new(n_ubatch: usize, n_cells: usize) -> Result<Self> {
        let largest = n_ubatch.checked_mul(n_cells);
        Ok(Staging {
            mask: try_filled(f16::NEG_INFINITY, largest, "the attention mask")?,
            ..Staging::default()
        })
    }

    /// Takes a cell for each token of `part`, a micro-batch of `batch`, and sets all values. The graph is to have `room`, too.
    pub fn fill(
        &mut self,
        batch: &Batch,
        part: &[BatchToken],
        cells: &mut Cells,
        room: Room,
    ) -> Result<GraphShape> {
        self.tokens.clear();
        self.positions.clear();
        self.cells.clear();
        self.outputs.clear();
        for (i, token) in part.iter().enumerate() {
            let cell = cells.take(token.position, batch.sequences(token));
            let cell = cell.ok_or(Error::ContextFull {
                tokens: part.len(),
                size: cells.len(),
                free: 0,
            })?;
            // Ids, cells and rows are limited to i32 at creation.
            self.tokens.push(token.id as i32);
            self.positions.push(token.position);
            self.cells.push(cell as i64);
            if token.wants_logits {
                self.outputs.push(i as i32);
            }
        }
        // What is computed in vain is the first token's logits. The graph of as many outputs as tokens picks none: it has those of all, in order.
        let wants_some = !self.outputs.is_empty();
        let n_outputs = room.n_outputs.min(part.len() - usize::from(wants_some));
        self.outputs.resize(n_outputs.max(self.outputs.len()), 0);
        let end = cells.end().saturating_add(room.n_to_come);
        let n_kv = padded(end, cells.len(), cells.n_sequences());
        self.mask.resize(part.len() * n_kv, f16::NEG_INFINITY);
        for (token, row) in part.iter().zip(self.mask.chunks_exact_mut(n_kv)) {
            let sequence = batch.sequences(token).first().copied().unwrap_or(0);
            cells.visible(sequence, token.position, row);
        }
        Ok(GraphShape {
            n_tokens: part.len(),
            n_kv,
            n_outputs: self.outputs.len(),
        })
    }

    /// Writes all values to the inputs of the graph that is loaded.
    pub fn write(&self, scheduler: &mut Scheduler, inputs: GraphInputs) -> Result<()> {
        scheduler.write(inputs.tokens, 0, bytemuck::cast_slice(&self.tokens))?;
        scheduler.write(inputs.positions, 0, bytemuck::cast_slice(&self.positions))?;
        scheduler.write(inputs.cells, 0, bytemuck::cast_slice(&self.cells))?;
        if let Some(mask) = inputs.mask {
            scheduler.write(mask, 0, bytemuck::cast_slice(&self.mask))?;
        }
        if let Some(outputs) = inputs.outputs {
            scheduler.write(outputs, 0, bytemuck::cast_slice(&self.outputs))?;
        }
        Ok(())
    }
}

/// How many cells attention looks at if `end` are in use: in steps, so that graphs stay the same for many tokens. Several
/// sequences take as many cells at a time.
fn padded(end: usize, n_cells: usize, n_sequences: usize) -> usize {
    let step = if n_cells <= 512 {
        (32 * n_sequences).min(256)
    } else {
        256
    };
    end.next_multiple_of(step).min(n_cells)
}

#[cfg(test)]
mod tests {
    use super::padded;

    #[test]
    fn attention_looks_at_more_cells_in_steps() {
        assert_eq!((padded(1, 256, 1), padded(33, 256, 1)), (32, 64));
        assert_eq!((padded(8, 512, 8), padded(257, 512, 8)), (256, 512));
        assert_eq!((padded(8, 512, 2), padded(65, 512, 2)), (64, 128));
        assert_eq!((padded(300, 310, 1), padded(1, 4096, 1)), (310, 256));
    }
}
