//! Rotates cached keys whose positions changed.

use crate::arch::graph::rope_factors_name;
use crate::arch::spec::{RopeFactors, Yarn};
use crate::arch::{LayerCache, Spec};
use crate::error::Result;
use crate::kv::cache::KvCache;
use crate::weights::Weights;
use samite_core::{CancelToken, DType, Graph, TensorId};
use samite_sched::Scheduler;
use std::collections::BTreeMap;

/// A graph that rotates the keys of some cells.
#[derive(Debug)]
struct ShiftStep {
    graph: Graph,
    /// Cells to read: i32.
    read: TensorId,
    /// Cells to write, which are the same ones: i64.
    write: TensorId,
    /// Distances: i32.
    distances: TensorId,
    /// Divisors that are not in the file: f32.
    rope_factors: Vec<(Yarn, TensorId)>,
}

/// Context of a key rotation.
pub(crate) struct Rotation<'a> {
    pub spec: &'a Spec,
    /// Weights, which include the divisors of the frequencies.
    pub weights: &'a Weights,
    /// Capacity of the context, in tokens.
    pub n_ctx: usize,
    /// Number of cells that are rotated at a time.
    pub count: usize,
}

impl Rotation<'_> {
    /// Rotates the keys of all cells of `cache` whose positions changed. The work can be cancelled
    /// between two runs but not within one, because keys must not be rotated in some layers only.
    /// Leaves its own graph loaded.
    pub fn apply(
        &self,
        cache: &mut KvCache,
        scheduler: &mut Scheduler,
        cancel: &CancelToken,
    ) -> Result<()> {
        for windowed in [false, true] {
            if cache
                .cells_of(windowed)
                .is_some_and(|cells| cells.has_shifts())
            {
                self.apply_to(windowed, cache, scheduler, cancel)?;
            }
        }
        Ok(())
    }

    fn apply_to(
        &self,
        windowed: bool,
        cache: &mut KvCache,
        scheduler: &mut Scheduler,
        cancel: &CancelToken,
    ) -> Result<()> {
        let count = self.count;
        let step = self.step(&cache.layers, windowed)?;
        scheduler.load(&step.graph)?;
        let never = CancelToken::new();
        while let Some(cells) = cache.cells_of(windowed).filter(|cells| cells.has_shifts()) {
            cancel.check()?;
            let pending = cells.pending_shifts(count);
            // The last cell is repeated. It is read before anything is written, so that all copies
            // have the same result.
            let padded = |i: usize| pending[i.min(pending.len() - 1)];
            let read: Vec<i32> = (0..count).map(|i| padded(i).0 as i32).collect();
            let write: Vec<i64> = (0..count).map(|i| padded(i).0 as i64).collect();
            let distances: Vec<i32> = (0..count).map(|i| padded(i).1).collect();
            scheduler.write(step.read, 0, bytemuck::cast_slice(&read))?;
            scheduler.write(step.write, 0, bytemuck::cast_slice(&write))?;
            scheduler.write(step.distances, 0, bytemuck::cast_slice(&distances))?;
            for (yarn, tensor) in &step.rope_factors {
                let rope_factors: Vec<f32> = yarn.rope_factors().collect();
                scheduler.write(*tensor, 0, bytemuck::cast_slice(&rope_factors))?;
            }
            let result = scheduler.run(&never).and_then(|()| scheduler.synchronize());
            if let Err(error) = result {
                // It is unknown which layers were rotated.
                cache.clear()?;
                tracing::error!(%error, "moving cached keys failed; the cache was cleared");
                return Err(error.into());
            }
            if let Some(cells) = cache.cells_of(windowed) {
                cells.shifted(&pending);
            }
        }
        Ok(())
    }

    /// Builds the graph for some layers: it gathers, rotates and scatters the keys, so that its
    /// memory does not depend on the size of the cache.
    fn step(&self, layers: &[LayerCache], windowed: bool) -> Result<ShiftStep> {
        let count = self.count;
        let mut graph = Graph::new();
        let each = [count, 1, 1, 1];
        let read = graph.input("shift_read", DType::I32, each)?;
        let write = graph.input("shift_write", DType::I64, each)?;
        let distances = graph.input("shift_distances", DType::I32, each)?;
        // Leaves by name: each tensor is in the graph once.
        let mut leaves = BTreeMap::new();
        let mut computed: Vec<(Yarn, TensorId)> = Vec::new();
        for (il, (layer, spec)) in layers.iter().zip(&self.spec.layers).enumerate() {
            let (Some(keys), Some(attention)) = (&layer.k, spec.attention()) else {
                continue;
            };
            if layer.windowed != windowed {
                continue;
            }
            // Keys without a rotation stay unchanged.
            let Some(rotation) = &attention.rotation else {
                continue;
            };
            let name = rope_factors_name(rotation.rope_factors, self.n_ctx);
            let stored = name.and_then(|name| Some((name, self.weights.get(name)?)));
            let rope_factors = match (rotation.rope_factors, stored) {
                (RopeFactors::Yarn(yarn), _) => {
                    let known = computed.iter().find(|(known, _)| *known == yarn);
                    Some(match known {
                        Some(&(_, leaf)) => leaf,
                        None => {
                            let pairs = [yarn.0.dims / 2, 1, 1, 1];
                            let name = format!("shift_divisors-{il}");
                            let leaf = graph.input(&name, DType::F32, pairs)?;
                            computed.push((yarn, leaf));
                            leaf
                        }
                    })
                }
                (_, None) => None,
                (_, Some((name, stored))) => Some(match leaves.get(name) {
                    Some(&leaf) => leaf,
                    None => {
                        let leaf = graph.stored(stored)?;
                        leaves.insert(name, leaf);
                        leaf
                    }
                }),
            };
            let cache = graph.stored(keys)?;
            let rows = graph.get_rows(cache, read)?;
            let (size, heads) = (attention.head_k, attention.n_head_kv);
            let keys = graph.reshape(rows, [size, heads, count, 1])?;
            let keys = graph.rope(keys, distances, rope_factors, rotation.shift())?;
            graph.set_name(keys, format!("K_shifted-{il}"));
            let rows = graph.reshape(keys, [size * heads, count, 1, 1])?;
            graph.set_rows(rows, write, cache)?;
        }
        Ok(ShiftStep {
            graph,
            read,
            write,
            distances,
            rope_factors: computed,
        })
    }
}
