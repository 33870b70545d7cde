//! Builds the graphs of a model, and caches those whose shapes recur.

use crate::adapter::{Adapter, ScaledAdapter};
use crate::arch::graph::{self, GraphContext};
use crate::arch::{GraphInputs, GraphShape, LayerCache, Output, Spec};
use crate::assign::{assign, layer_of};
use crate::error::Result;
use crate::rules::Choice;
use crate::weights::Weights;
use samite_core::{Graph, Support, TensorId};
use samite_sched::{Assignments, DeviceSet, Options, Plan};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Context of a model's graphs. Neither weights nor caches need memory.
#[derive(Clone, Copy)]
pub(crate) struct GraphSource<'a> {
    pub spec: &'a Spec,
    pub devices: &'a DeviceSet,
    pub weights: &'a Weights,
    /// Cache of each layer.
    pub layers: &'a [LayerCache],
    /// Device of each layer's cache.
    pub kv: &'a [Choice],
    pub adapters: &'a [ScaledAdapter],
    /// Adapters that belong to sequences.
    pub mixed: &'a [Arc<Adapter>],
    pub flash: bool,
    /// Capacity of the context, in tokens.
    pub n_ctx: usize,
    /// Requested results.
    pub output: Output,
}

impl GraphSource<'_> {
    /// Builds the graph for a shape.
    pub fn build(&self, shape: GraphShape) -> Result<Built> {
        let parts = GraphContext {
            spec: self.spec,
            weights: self.weights,
            cache: self.layers,
            adapters: self.adapters,
            mixed: self.mixed,
            flash: self.flash,
            n_ctx: self.n_ctx,
            output: self.output,
        };
        let (graph, inputs) = graph::build(parts, shape)?;
        let assignments = assign(&graph, self.devices, self.weights, self.layers, self.kv);
        Ok(Built {
            shape,
            graph,
            inputs: Arc::new(inputs),
            assignments,
        })
    }

    /// Returns the layers whose cache cannot be on its device in `kv`, because the device does not
    /// support an operation on it. Each comes with the device and the reason. Does not query the
    /// host, because there is no other device to fall back to.
    pub fn refused_caches(&self, shape: GraphShape) -> Result<BTreeMap<usize, (usize, String)>> {
        let host = self.devices.last();
        let mut refused: BTreeMap<usize, (usize, String)> = BTreeMap::new();
        if self.kv.iter().all(|choice| choice.device == host) {
            return Ok(refused);
        }
        let graph = self.build(shape)?.graph;
        let mut asked: Vec<(Vec<TensorId>, Vec<usize>)> = vec![Default::default(); host];
        for id in graph.ids() {
            let operands = graph.tensor(id).operands();
            let mut stored = operands.filter_map(|(_, source)| graph.node(source).stored());
            let layer = stored.find_map(|tensor| layer_of(self.layers, tensor));
            if let Some(il) = layer.filter(|_| graph.tensor(id).is_computed())
                && let Some((ids, layers)) = asked.get_mut(self.kv[il].device)
            {
                ids.push(id);
                layers.push(il);
            }
        }
        for (device, (ids, layers)) in asked.iter().enumerate() {
            let answers = self.devices.get(device).supports_each(&graph, ids);
            for ((&id, &il), answer) in ids.iter().zip(layers).zip(answers) {
                if let Support::No(reason) = answer {
                    let operation = graph.node(id).op().name();
                    let refusal = || (device, format!("{operation}: {reason}"));
                    refused.entry(il).or_insert_with(refusal);
                }
            }
        }
        Ok(refused)
    }

    /// Plans the graph for a shape.
    pub fn plan(&self, options: &Options, shape: GraphShape) -> Result<Plan> {
        let built = self.build(shape)?;
        let plan = Plan::new(&built.graph, self.devices, &built.assignments, options)?;
        Ok(plan)
    }
}

/// A graph with everything that is needed to run it again.
#[derive(Debug)]
pub(crate) struct Built {
    pub shape: GraphShape,
    pub graph: Graph,
    pub inputs: Arc<GraphInputs>,
    pub assignments: Assignments,
}

/// Cache of decode graphs and prefill graphs, each from least to most recently used. A prefill with
/// many shapes does not evict the decode graphs, which recur after it.
#[derive(Debug)]
pub(crate) struct GraphCache {
    /// Maximum number of tokens in a decode step: one for each sequence.
    step: usize,
    steps: Vec<Built>,
    prompts: Vec<Built>,
}

impl GraphCache {
    /// Maximum number of cached decode graphs.
    const STEPS: usize = 8;
    /// Maximum number of cached prefill graphs.
    const PROMPTS: usize = 4;
    /// Maximum number of cached graphs.
    pub const SIZE: usize = Self::STEPS + Self::PROMPTS;

    /// Creates an empty cache. Graphs with up to `step` tokens are decode graphs.
    pub fn new(step: usize) -> Self {
        GraphCache {
            step,
            steps: Vec::with_capacity(Self::STEPS),
            prompts: Vec::with_capacity(Self::PROMPTS),
        }
    }

    fn class(&mut self, shape: GraphShape) -> (&mut Vec<Built>, usize) {
        if shape.n_tokens <= self.step {
            (&mut self.steps, Self::STEPS)
        } else {
            (&mut self.prompts, Self::PROMPTS)
        }
    }

    /// Returns the graph of this shape, and makes it the most recently used one.
    pub fn get(&mut self, shape: GraphShape) -> Option<&Built> {
        let (graphs, _) = self.class(shape);
        let at = graphs.iter().position(|built| built.shape == shape)?;
        graphs[at..].rotate_left(1);
        graphs.last()
    }

    /// Caches a graph. Returns the one that it evicts.
    pub fn insert(&mut self, built: Built) -> Option<Built> {
        let (graphs, most) = self.class(built.shape);
        let gone = (graphs.len() >= most).then(|| graphs.remove(0));
        graphs.push(built);
        gone
    }

    /// Removes all graphs.
    pub fn clear(&mut self) {
        self.steps.clear();
        self.prompts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(n_tokens: usize, n_kv: usize) -> Built {
        Built {
            shape: GraphShape {
                n_tokens,
                n_kv,
                n_window: 0,
                n_outputs: 1,
                n_seqs: 1,
                n_means: 0,
                is_embedded: false,
                has_axes: false,
                mixed: None,
                n_top_k: 0,
            },
            graph: Graph::new(),
            inputs: Arc::default(),
            assignments: Assignments::new(),
        }
    }

    #[test]
    fn lru_eviction_keeps_decode_graphs_over_prefill_graphs() {
        let mut cache = GraphCache::new(2);
        let step = built(1, 32).shape;
        assert!(cache.insert(built(1, 32)).is_none());
        for n_kv in 1..20 {
            cache.insert(built(512, 256 * n_kv));
        }
        assert_eq!(cache.get(step).map(|built| built.shape), Some(step));
        assert!(cache.get(built(512, 256 * 15).shape).is_none());
        // The oldest prefill graph is used, so the next one is evicted.
        assert!(cache.get(built(512, 256 * 16).shape).is_some());
        let gone = cache.insert(built(512, 256 * 20)).unwrap();
        assert_eq!(gone.shape.n_kv, 256 * 17);
        for n_kv in 2..=GraphCache::STEPS {
            assert!(cache.insert(built(2, 32 * n_kv)).is_none());
        }
        assert_eq!(cache.insert(built(2, 999)).unwrap().shape, step);
    }
}
