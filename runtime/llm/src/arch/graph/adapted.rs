//! Changes that adapters add to the results of weights and of layers.
//!
//! If all tokens of a micro-batch use the same adapters, their scales are constants of the graph.
//! If sequences have their own adapters, the graph computes the changes of every adapter that one
//! of them uses. An input holds the scale of each adapter for each token, which is 0 for tokens
//! that do not use it. Scales can then change without building another graph, adapters of all ranks
//! and types mix, and none is copied. Both forms round alike: the result of a token does not depend
//! on the adapters of other tokens.

use super::{Builder, GraphContext, GraphShape, Input};
use crate::adapter::{Adapter, Pair};
use samite_core::{DType, Result, TensorId};

/// Scale of an adapter.
#[derive(Clone, Copy, Debug)]
pub(super) enum AdapterScale {
    /// A common scale for all tokens.
    OfAll(f32),
    /// A scale for each token, with the index of the adapter among those of sequences.
    OfEach(usize),
}

/// Adapter of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change<'a> {
    adapter: &'a Adapter,
    share: AdapterScale,
}

/// Returns the adapters of a graph, in the order in which they are applied.
pub(super) fn changes<'a>(parts: &GraphContext<'a>, shape: GraphShape) -> Vec<Change<'a>> {
    let mut changes: Vec<Change<'a>> = match shape.mixed {
        None => {
            let used = parts.adapters.iter().filter(|scaled| scaled.share != 0.0);
            let used = used.map(|scaled| Change {
                adapter: &scaled.adapter,
                share: AdapterScale::OfAll(scaled.share),
            });
            used.collect()
        }
        Some(bits) => {
            let all = parts.mixed.iter().enumerate();
            let used = all.filter(|(place, _)| *place < 64 && bits >> place & 1 == 1);
            let used = used.map(|(place, adapter)| Change {
                adapter,
                share: AdapterScale::OfEach(place),
            });
            used.collect()
        }
    };
    changes.sort_by_key(|change| change.adapter.number());
    changes
}

impl Builder<'_> {
    /// Adds the changes of adapters to `y`, the result of an operation with the weight called
    /// `name`. `change` appends the product with the two matrices of a pair. `tokens` is the shape
    /// in which the scales of the tokens are multiplied; by default, the tokens are the columns of
    /// `y`.
    pub(super) fn adapted(
        &mut self,
        mut y: TensorId,
        name: &str,
        tokens: Option<[usize; 4]>,
        change: impl Fn(&mut Self, &Pair, [TensorId; 2]) -> Result<TensorId>,
    ) -> Result<TensorId> {
        if self.changes.is_empty() {
            return Ok(y);
        }
        let weights = self.parts.weights;
        let name = format!("{}{name}", self.prefix);
        let name = weights.data_name(&name).unwrap_or(&name);
        for at in 0..self.changes.len() {
            let Change { adapter, share } = self.changes[at];
            let Some(pair) = adapter.pair(name) else {
                continue;
            };
            let matrices = [self.stored(&pair.a)?, self.stored(&pair.b)?];
            let change = change(self, pair, matrices)?;
            let change = match share {
                AdapterScale::OfAll(share) => self.graph.scale(change, share * pair.factor)?,
                AdapterScale::OfEach(place) => {
                    let [_, n1, n2, _] = self.extents(y);
                    let by_sequence = n2 == self.shape.n_seqs && n1 * n2 == self.shape.n_tokens;
                    let columns = if by_sequence {
                        [1, n1, n2, 1]
                    } else {
                        [1, n1, 1, 1]
                    };
                    let columns = tokens.unwrap_or(columns);
                    let shares = self.shares(place, pair.factor, columns)?;
                    self.graph.mul(change, shares)?
                }
            };
            y = self.graph.add(y, change)?;
        }
        Ok(y)
    }

    /// Adds the directions of control vectors to the result of a layer.
    pub(super) fn directed(&mut self, mut x: TensorId) -> Result<TensorId> {
        for at in 0..self.changes.len() {
            let Change { adapter, share } = self.changes[at];
            let Some(direction) = adapter.direction(self.il) else {
                continue;
            };
            let direction = self.stored(direction)?;
            let direction = match share {
                AdapterScale::OfAll(share) => self.graph.scale(direction, share)?,
                AdapterScale::OfEach(place) => {
                    let shape = self.extents(x);
                    let each = self.graph.repeat(direction, shape)?;
                    let shares = self.shares(place, 1.0, [1, shape[1], 1, 1])?;
                    self.graph.mul(each, shares)?
                }
            };
            x = self.graph.add(x, direction)?;
            self.named(x, "l_out");
        }
        Ok(x)
    }

    /// Returns the scale of an adapter for each token, or for each requested one, reshaped to
    /// `shape`.
    fn shares(&mut self, adapter: usize, factor: f32, shape: [usize; 4]) -> Result<TensorId> {
        let GraphShape {
            n_tokens,
            n_outputs,
            ..
        } = self.shape;
        let input = Input::Shares { adapter, factor };
        let mut shares = self.input(input, DType::F32, [1, n_tokens, 1, 1])?;
        let count: usize = shape.iter().product();
        if count != n_tokens {
            let rows = self.input(Input::Outputs, DType::I32, [n_outputs, 1, 1, 1])?;
            shares = self.graph.get_rows(shares, rows)?;
        }
        if self.extents(shares) == shape {
            Ok(shares)
        } else {
            self.graph.reshape(shares, shape)
        }
    }
}
