//! Measures importance matrices while a model processes texts.

use super::ImportanceMatrix;
use crate::context::{Context, WatchedResult, Watcher};
use crate::error::{Error, Result};
use crate::perplexity::{self, Perplexity};
use samite_core::{Graph, Layout, Op, TensorId};
use samite_quant::RowReader;
use samite_sched::Watch;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Processes `tokens` in chunks of `chunk` tokens, each separately, and adds the statistics to
/// `matrix`. Chunks start as in [`perplexity`](crate::perplexity()), which is also measured. Calls
/// `on_chunk` after each chunk, which can save the matrix.
///
/// The output matrix is included only if `with_output` is set: it is large, and llama.cpp's tool
/// omits it.
///
/// # Errors
/// Fails like [`perplexity`](crate::perplexity()), with the errors of `on_chunk`, and with
/// [`Error::Model`] if a weight's input is not finite.
pub fn collect(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    matrix: ImportanceMatrix,
    with_output: bool,
    mut on_chunk: impl FnMut(&Perplexity, &ImportanceMatrix) -> Result<()>,
) -> Result<ImportanceMatrix> {
    let shared = Arc::new(Mutex::new(Collector {
        matrix,
        with_output,
        ..Collector::default()
    }));
    let before = context.watch(Some(Collector::watcher(&shared)));
    let measured = perplexity::measure(context, tokens, chunk, true, &mut |so_far: &Perplexity| {
        let collector = &mut *lock(&shared);
        collector.matrix.chunks += 1;
        on_chunk(so_far, &collector.matrix)
    });
    context.watch(before);
    let collector = std::mem::take(&mut *lock(&shared));
    match (collector.trouble, measured) {
        (Some(message), _) => Err(Error::model(message)),
        (None, measured) => measured.map(|_| collector.matrix),
    }
}

fn lock(shared: &Mutex<Collector>) -> MutexGuard<'_, Collector> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A product whose input is observed.
struct Dense {
    weight: String,
    /// Number of matrices: extents 2 and 3 of the weight.
    parts: [usize; 2],
}

/// A product with chosen experts, whose input and expert indices are observed.
struct Routed {
    weight: String,
    experts: usize,
    input: TensorId,
    numbers: TensorId,
}

impl Routed {
    fn has(&self, operand: TensorId) -> bool {
        self.input == operand || self.numbers == operand
    }
}

/// Observes the inputs of products, and sums their squares.
#[derive(Default)]
struct Collector {
    matrix: ImportanceMatrix,
    with_output: bool,
    /// Products by input.
    dense: BTreeMap<TensorId, Vec<Dense>>,
    /// Products of this run that are not complete yet.
    routed: Vec<Routed>,
    /// Operands of these products that were computed.
    held: BTreeMap<TensorId, (Layout, Vec<u8>)>,
    reader: RowReader,
    trouble: Option<String>,
}

impl Collector {
    fn watcher(shared: &Arc<Mutex<Self>>) -> Watcher {
        let [begins, wants, sees] = [0; 3].map(|_| Arc::clone(shared));
        let watcher = Watcher::new(
            move |node| lock(&wants).wants(node.id()),
            move |seen| {
                let collector = &mut *lock(&sees);
                match collector.see(seen) {
                    Ok(()) => Ok(Watch::Continue),
                    Err(CollectError::Core(error)) => Err(error),
                    Err(CollectError::Here(message)) => {
                        collector.trouble = Some(message);
                        Ok(Watch::Stop)
                    }
                }
            },
        );
        watcher.beginning_with(move |graph| lock(&begins).begin(graph))
    }

    /// Finds the products whose inputs are observed.
    fn begin(&mut self, graph: &Graph) {
        self.dense.clear();
        self.routed.clear();
        self.held.clear();
        for id in graph.ids() {
            let node = graph.node(id);
            let [Some(weight), Some(input)] = [node.source(0), node.source(1)] else {
                continue;
            };
            if weight.tensor().is_computed() || !graph.tensor(id).is_computed() {
                continue;
            }
            let name = weight.tensor().name.to_string();
            let [_, _, parts @ ..] = weight.tensor().layout.shape();
            match (node.op(), node.source(2)) {
                (Op::MulMat { .. }, _) if self.concerns(&name) => {
                    let dense = self.dense.entry(input.id()).or_default();
                    dense.push(Dense {
                        weight: name,
                        parts,
                    });
                }
                (Op::MulMatId { .. }, Some(numbers)) => self.routed.push(Routed {
                    weight: name,
                    experts: parts[0],
                    input: input.id(),
                    numbers: numbers.id(),
                }),
                _ => {}
            }
        }
    }

    fn concerns(&self, weight: &str) -> bool {
        weight.starts_with("blk.") || self.with_output && weight == "output.weight"
    }

    fn wants(&self, id: TensorId) -> bool {
        self.dense.contains_key(&id) || self.routed.iter().any(|product| product.has(id))
    }

    fn see(&mut self, seen: &WatchedResult<'_>) -> Result<(), CollectError> {
        let id = seen.node.id();
        let mut bytes = vec![0; seen.value.layout().bytes()];
        seen.value.read(0, &mut bytes)?;
        for Dense { weight, parts } in self.dense.remove(&id).unwrap_or_default() {
            self.add_input(&weight, parts, seen.value.layout(), &bytes)?;
        }
        if self.routed.iter().any(|product| product.has(id)) {
            self.held.insert(id, (*seen.value.layout(), bytes));
            let routed = std::mem::take(&mut self.routed);
            for product in routed {
                if !self.add_routed(&product)? {
                    self.routed.push(product);
                }
            }
            let waiting = &self.routed;
            self.held
                .retain(|&id, _| waiting.iter().any(|product| product.has(id)));
        }
        Ok(())
    }

    fn add_input(
        &mut self,
        weight: &str,
        parts: [usize; 2],
        layout: &Layout,
        bytes: &[u8],
    ) -> Result<(), CollectError> {
        let columns = layout.shape()[0];
        let matrices = parts[0] * parts[1];
        let entry = self.matrix.entries.entry(weight.to_owned()).or_default();
        let counts = entry.counts.len().max(1);
        entry
            .of_size(weight, columns * matrices, counts)
            .map_err(CollectError::Here)?;
        let mut squares = vec![0.0; columns * matrices];
        for row in 0..layout.rows() {
            let [_, i2, i3] = layout.row_index(row);
            let part = i3 % parts[1] * parts[0] + i2 % parts[0];
            let values = self.reader.read(layout, bytes, row)?;
            let squares = &mut squares[part * columns..][..columns];
            for (square, value) in squares.iter_mut().zip(values) {
                *square += value * value;
            }
        }
        check(weight, &squares)?;
        for (sum, square) in entry.sums.iter_mut().zip(&squares) {
            *sum += square;
        }
        let rows = (layout.rows() / matrices) as u64;
        entry.counts.iter_mut().for_each(|count| *count += rows);
        Ok(())
    }

    /// Adds the input of a product with experts, if both operands were computed. Returns whether
    /// they were.
    fn add_routed(&mut self, product: &Routed) -> Result<bool, CollectError> {
        let Routed {
            weight,
            experts,
            input,
            numbers,
        } = product;
        let [Some((layout, bytes)), Some((chosen, chosen_bytes))] =
            [input, numbers].map(|id| self.held.get(id))
        else {
            return Ok(false);
        };
        let columns = layout.shape()[0];
        let entry = self.matrix.entries.entry(weight.to_owned()).or_default();
        entry
            .of_size(weight, columns * experts, *experts)
            .map_err(CollectError::Here)?;
        for token in 0..chosen.shape()[1] {
            let of_token = self.reader.read(chosen, chosen_bytes, token)?.to_vec();
            // The number -1 skips a product.
            let chosen = of_token.into_iter().enumerate();
            for (place, expert) in chosen.filter(|&(_, expert)| expert != -1.0) {
                let expert = expert as usize;
                let Some(count) = entry.counts.get_mut(expert) else {
                    return Err(CollectError::Here(format!(
                        "'{weight}' has {experts} experts, and number {expert} is asked for"
                    )));
                };
                *count += 1;
                let row = place % layout.shape()[1] + token * layout.shape()[1];
                let values = self.reader.read(layout, bytes, row)?;
                let sums = &mut entry.sums[expert * columns..][..columns];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += value * value;
                }
            }
        }
        check(weight, &entry.sums)?;
        Ok(true)
    }
}

/// Rejects sums that would make the matrix useless.
fn check(weight: &str, sums: &[f64]) -> Result<(), CollectError> {
    if sums.iter().all(|sum| sum.is_finite()) {
        Ok(())
    } else {
        Err(CollectError::Here(format!(
            "the input of '{weight}' is not finite: the model computes nonsense of this text; is it damaged?"
        )))
    }
}

/// Reason for stopping a run.
enum CollectError {
    Core(samite_core::Error),
    Here(String),
}

impl From<samite_core::Error> for CollectError {
    fn from(error: samite_core::Error) -> Self {
        CollectError::Core(error)
    }
}
