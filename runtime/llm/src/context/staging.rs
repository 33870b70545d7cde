//! Fills the inputs of a graph: tokens, positions, cells, mask.

use super::micro_batches::Room;
use super::options::Sizes;
use crate::arch::spec::Span;
use crate::arch::{GraphShape, Input, Spec};
use crate::batch::{Batch, BatchToken};
use crate::error::{Error, Result, try_filled};
use crate::kv::{Cells, KvCache};
use half::f16;

/// Values of a graph's inputs, in reused buffers.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// Cell of each token.
    cells: Vec<i64>,
    /// Cell of each token, for layers with a window.
    windowed: Vec<i64>,
    outputs: Vec<i32>,
    /// Rows of the states that sequences start with, and rows that they are written to.
    read: Vec<i32>,
    write: Vec<i64>,
    /// Values of the current input.
    integers: Vec<i32>,
    floats: Vec<f32>,
    mask: Vec<f16>,
    /// True if attention is bidirectional: tokens need no cells.
    is_bidirectional: bool,
    /// True if a micro-batch contains one sequence, or one token of each sequence.
    by_sequence: bool,
    /// Sequences whose means are requested, if there are any.
    means: Option<Vec<u32>>,
    /// Elements of an embedding.
    width: usize,
    /// True if positions can differ between axes.
    has_axes: bool,
}

impl Staging {
    /// Allocates memory for the largest mask.
    pub fn new(sizes: &Sizes, spec: &Spec) -> Result<Self> {
        let largest = sizes.largest();
        let largest = largest.n_tokens.checked_mul(largest.n_kv);
        Ok(Staging {
            mask: try_filled(f16::NEG_INFINITY, largest, "the attention mask")?,
            is_bidirectional: sizes.is_bidirectional,
            by_sequence: sizes.by_sequence,
            means: sizes.means.then(Vec::new),
            width: spec.input_width(),
            has_axes: spec.has_axes(),
            ..Staging::default()
        })
    }

    /// Allocates a cell for each token of `part`, a micro-batch of `batch`. The graph has
    /// additional `room`.
    pub fn place(
        &mut self,
        batch: &Batch,
        part: &[BatchToken],
        cache: &mut KvCache,
        room: Room,
    ) -> Result<GraphShape> {
        self.cells.clear();
        self.windowed.clear();
        self.outputs.clear();
        self.read.clear();
        self.write.clear();
        let mut n_seqs = 1;
        if self.by_sequence {
            // Either one sequence, or one token of each.
            let mut states = cache.states.as_mut();
            let mut before = None;
            n_seqs = 0;
            for token in part {
                let sequences = batch.sequences(token);
                if before.replace(sequences) != Some(sequences) {
                    n_seqs += 1;
                    if let Some(states) = &mut states {
                        let (read, write) = states.advance(sequences);
                        self.read.push(read as i32);
                        self.write.push(write as i64);
                    }
                }
            }
        }
        if let Some(means) = &mut self.means {
            means.clear();
            for sequence in part.iter().flat_map(|token| batch.sequences(token)) {
                if means.last() != Some(sequence) && !means.contains(sequence) {
                    means.push(*sequence);
                }
            }
        }
        for (i, token) in part.iter().enumerate() {
            let all = (&mut cache.cells, &mut self.cells);
            let window = cache.window.as_mut();
            let window = window.map(|window| (&mut window.cells, &mut self.windowed));
            for (cells, taken) in [all]
                .into_iter()
                .chain(window)
                .filter(|_| !self.is_bidirectional)
            {
                let cell = cells.take(token.position, batch.sequences(token));
                let cell = cell.ok_or(Error::ContextFull {
                    tokens: part.len(),
                    size: cells.len(),
                    free: 0,
                })?;
                taken.push(cell as i64);
            }
            if token.wants_logits {
                // Rows are limited to i32 at creation.
                self.outputs.push(i as i32);
            }
        }
        // Surplus outputs compute the first token's logits. A graph with as many outputs as tokens
        // selects no tokens: it returns the logits of all, in order.
        let wants_some = !self.outputs.is_empty();
        let n_outputs = room.n_outputs.min(part.len() - usize::from(wants_some));
        self.outputs.resize(n_outputs.max(self.outputs.len()), 0);
        let reached = |cells: &Cells| {
            let end = cells.end().saturating_add(room.n_to_come);
            padded(end, cells.len(), cells.n_sequences())
        };
        let window = cache.window.as_ref();
        Ok(GraphShape {
            n_tokens: part.len(),
            n_kv: if self.is_bidirectional {
                part.len()
            } else {
                reached(&cache.cells)
            },
            n_window: window.map_or(0, |window| reached(&window.cells)),
            n_outputs: self.outputs.len(),
            n_seqs,
            n_means: self.means.as_ref().map_or(0, Vec::len),
            is_embedded: part.first().is_some_and(BatchToken::is_embedded),
            has_axes: self.has_axes && part.iter().any(|token| token.axes != [token.axes[0]; 3]),
            mixed: None,
            n_top_k: 0,
        })
    }

    /// Returns the values of an input of the graph with this shape, whose tokens have been
    /// [placed](Self::place).
    pub fn fill<'a>(
        &'a mut self,
        input: &Input,
        shape: GraphShape,
        batch: &'a Batch,
        part: &[BatchToken],
        cache: &KvCache,
    ) -> Result<&'a [u8]> {
        match *input {
            // Ids are limited to i32 at creation.
            Input::Tokens => self.set_integers(part.iter().map(|token| token.id as i32)),
            Input::Embeddings => {
                return Ok(bytemuck::cast_slice(batch.embeddings_of(part, self.width)));
            }
            Input::Positions => self.set_integers(part.iter().map(|token| token.position)),
            Input::RopePositions => self.set_integers(part.iter().map(|token| token.axes[0])),
            Input::Axes => {
                let axes = [0, 1, 2, 0].into_iter();
                let axis = |axis: usize| part.iter().map(move |token| token.axes[axis]);
                self.set_integers(axes.flat_map(axis));
            }
            Input::Cells { windowed: false } => return Ok(bytemuck::cast_slice(&self.cells)),
            Input::Cells { windowed: true } => return Ok(bytemuck::cast_slice(&self.windowed)),
            Input::StateRead => return Ok(bytemuck::cast_slice(&self.read)),
            Input::StateWrite => return Ok(bytemuck::cast_slice(&self.write)),
            Input::Outputs => return Ok(bytemuck::cast_slice(&self.outputs)),
            Input::RopeFactors(yarn) => return Ok(self.floats(yarn.rope_factors())),
            Input::Temperature(temperature) => {
                let scales = part.iter().map(|token| temperature.at(token.position));
                return Ok(self.floats(scales));
            }
            Input::Shares { .. } => {
                return Err(Error::invalid(
                    "shares of adapters are not known here: this is a mistake in samite",
                ));
            }
            Input::Means => {
                let sequences = self.means.as_deref().unwrap_or_default();
                self.floats.clear();
                for sequence in sequences {
                    let is_of = |token| batch.sequences(token).contains(sequence);
                    let count = part.iter().filter(|token| is_of(token)).count();
                    let share = 1.0 / count as f32;
                    let shares = part
                        .iter()
                        .map(|token| if is_of(token) { share } else { 0.0 });
                    self.floats.extend(shares);
                }
                return Ok(bytemuck::cast_slice(&self.floats));
            }
            Input::Mask {
                span,
                is_bidirectional: true,
                distances,
                ..
            } => {
                self.mask.clear();
                for token in part {
                    let row = on_both_sides(span, distances, token, batch, part);
                    self.mask.extend(row);
                }
                return Ok(bytemuck::cast_slice(&self.mask));
            }
            Input::Mask {
                span,
                is_bidirectional: false,
                are_images_causal,
                distances,
                windowed,
            } => {
                let window = cache.window.as_ref().filter(|_| windowed);
                let (cells, n_kv) = match window {
                    Some(window) => (&window.cells, shape.n_window),
                    None => (&cache.cells, shape.n_kv),
                };
                self.mask.resize(part.len() * n_kv, f16::NEG_INFINITY);
                for (token, row) in part.iter().zip(self.mask.chunks_exact_mut(n_kv)) {
                    let sequence = batch.sequences(token).first().copied().unwrap_or(0);
                    let first = *span.positions(token.position).start();
                    let last = if are_images_causal {
                        token.position
                    } else {
                        token.last_attended
                    };
                    cells.visible(sequence, first..=last, row);
                    if distances {
                        cells.distances(token.position, row);
                    }
                }
                return Ok(bytemuck::cast_slice(&self.mask));
            }
        }
        Ok(bytemuck::cast_slice(&self.integers))
    }

    /// Returns the bytes of float values.
    pub fn floats(&mut self, values: impl Iterator<Item = f32>) -> &[u8] {
        self.floats.clear();
        self.floats.extend(values);
        bytemuck::cast_slice(&self.floats)
    }

    fn set_integers(&mut self, values: impl Iterator<Item = i32>) {
        self.integers.clear();
        self.integers.extend(values);
    }
}

/// Checks that an input is filled completely: otherwise the graph would read the previous contents
/// of the memory.
pub(crate) fn check_filled(name: &str, size: usize, given: usize) -> Result<()> {
    if given == size {
        Ok(())
    } else {
        Err(Error::invalid(format!(
            "the input {name} has {size} bytes, and {given} are given: this is a mistake in samite"
        )))
    }
}

/// Returns a token's row of a mask over the tokens of its micro-batch. It sees the tokens of its
/// first sequence within `span`.
fn on_both_sides<'a>(
    span: Span,
    distances: bool,
    token: &BatchToken,
    batch: &'a Batch,
    part: &'a [BatchToken],
) -> impl Iterator<Item = f16> + use<'a> {
    let position = token.position;
    let seen = span.on_both_sides(position);
    let sequence = batch.sequences(token).first().copied();
    part.iter().map(move |other| {
        let is_near = seen.contains(&other.position);
        let sequences = batch.sequences(other);
        match is_near && sequence.is_some_and(|sequence| sequences.contains(&sequence)) {
            true if distances => f16::from_f32(-(position.abs_diff(other.position) as f32)),
            true => f16::ZERO,
            false => f16::NEG_INFINITY,
        }
    })
}

/// Returns the number of cells that attention reads if `end` are in use. It grows in steps, so that
/// graphs stay the same for many tokens. The step is larger with several sequences, which allocate
/// as many cells at a time.
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
    use super::{check_filled, padded};

    #[test]
    fn partially_filled_inputs_are_refused() {
        check_filled("rs_s_copy", 4, 4).unwrap();
        for given in [0, 3, 8] {
            let error = check_filled("rs_s_copy", 4, given).unwrap_err();
            assert!(error.to_string().contains("rs_s_copy"), "{error}");
        }
    }

    #[test]
    fn attention_length_is_padded_in_steps() {
        assert_eq!((padded(1, 256, 1), padded(33, 256, 1)), (32, 64));
        assert_eq!((padded(8, 512, 8), padded(257, 512, 8)), (256, 512));
        assert_eq!((padded(8, 512, 2), padded(65, 512, 2)), (64, 128));
        assert_eq!((padded(300, 310, 1), padded(1, 4096, 1)), (310, 256));
    }
}
