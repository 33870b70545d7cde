//! Runs graphs on the reference device, whole and divided.

use crate::partition::{Exchange, Leaf, Partition, PartitionStep, Task};
use crate::rules::{Case as RuleCase, Decision};
use crate::state::{SplitState, pieces};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};
use samite_core::{
    CancelToken, DType, Device, Graph, Layout, PlacedGraph, Result, RunControl, Slot, StoredTensor,
    TensorId, TensorRef, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

pub struct Rng(RefCell<Xoshiro256PlusPlus>);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(RefCell::new(Xoshiro256PlusPlus::seed_from_u64(seed)))
    }

    /// Returns a number below `n`.
    pub fn below(&self, n: usize) -> usize {
        (self.0.borrow_mut().next_u64() % n.max(1) as u64) as usize
    }

    pub fn pick<T: Clone>(&self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    /// Returns a multiple of 1/8, so that sums of a few are exact.
    pub fn number(&self) -> f32 {
        (self.below(65) as f32 - 32.0) / 8.0
    }
}

/// Separate memory for every tensor of a graph.
pub struct Bench {
    device: Arc<ReferenceDevice>,
    graph: Graph,
    places: Vec<Option<TensorRef>>,
}

impl Bench {
    pub fn new(graph: &Graph) -> Self {
        let device = ReferenceDevice::new(ReferenceOptions::default());
        let mut places: Vec<Option<TensorRef>> = Vec::new();
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            let place = match (tensor.view, &tensor.stored) {
                (Some(view), _) => {
                    let base = places[view.base.index()].clone().unwrap();
                    TensorRef {
                        slot: Slot {
                            offset: base.slot.offset + view.offset,
                            layout: tensor.layout,
                        },
                        buffer: base.buffer,
                    }
                }
                (None, Some(stored)) => stored.tensor().clone(),
                (None, None) => {
                    let bytes = tensor.layout.bytes().max(1);
                    let buffer = device.buffer_type().allocate(bytes, Usage::Any).unwrap();
                    TensorRef {
                        buffer,
                        slot: Slot {
                            offset: 0,
                            layout: tensor.layout,
                        },
                    }
                }
            };
            places.push(Some(place));
        }
        Bench {
            device,
            graph: graph.clone(),
            places,
        }
    }

    pub fn run(&self, nodes: &[TensorId]) -> Result<()> {
        let mut stream = (Arc::clone(&self.device) as Arc<dyn Device>).open_stream()?;
        let mut prepared = stream.prepare(PlacedGraph {
            graph: &self.graph,
            nodes,
            places: &self.places,
            workspace: None,
            compiled: None,
        })?;
        let control = RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        };
        stream.run(&mut *prepared, control)?;
        stream.synchronize()
    }

    pub fn write(&self, id: TensorId, bytes: &[u8]) {
        let place = self.places[id.index()].as_ref().unwrap();
        place.write(0, bytes).unwrap();
    }

    pub fn read(&self, id: TensorId) -> Vec<u8> {
        let place = self.places[id.index()].as_ref().unwrap();
        let mut bytes = vec![0; place.layout().bytes()];
        place.read(0, &mut bytes).unwrap();
        bytes
    }
}

/// Converts bytes to numbers.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks().0.iter();
    values.map(|b| f32::from_le_bytes(*b)).collect()
}

/// Returns a member's shard of a contiguous tensor.
pub fn part(layout: &Layout, state: &SplitState, bytes: &[u8], member: usize) -> Vec<u8> {
    let Some((axis, runs)) = state.as_split() else {
        return bytes.to_vec();
    };
    let mut part = Vec::new();
    pieces(layout, axis, runs, 0, bytes.len(), |piece| {
        if piece.member == member {
            assert_eq!(part.len(), piece.local);
            part.extend(&bytes[piece.global..piece.global + piece.len]);
        }
        Ok(())
    })
    .unwrap();
    part
}

/// Assembles the whole tensor from the members' data.
pub fn whole(layout: &Layout, state: &SplitState, parts: &[Option<Vec<u8>>]) -> Vec<u8> {
    match state {
        SplitState::Mirrored => parts[0].clone().unwrap(),
        SplitState::Partial => {
            let mut sum = vec![0f32; layout.elements()];
            for part in parts {
                let part = part.as_ref().unwrap();
                for (sum, value) in sum.iter_mut().zip(part.as_chunks().0) {
                    *sum += f32::from_le_bytes(*value);
                }
            }
            sum.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        SplitState::Split { axis, runs } => {
            let mut bytes = vec![0; layout.bytes()];
            pieces(layout, *axis, runs, 0, layout.bytes(), |piece| {
                let part = parts[piece.member].as_ref().unwrap();
                bytes[piece.global..piece.global + piece.len]
                    .copy_from_slice(&part[piece.local..piece.local + piece.len]);
                Ok(())
            })
            .unwrap();
            bytes
        }
    }
}

/// A graph with values and states of its inputs.
pub struct Case {
    /// Maximum normalized mean squared error if members sum something.
    pub limit: f64,
    pub graph: Graph,
    pub inputs: Vec<(TensorId, Vec<u8>)>,
    pub states: BTreeMap<TensorId, SplitState>,
}

/// Result of comparing a divided graph with the whole one.
#[derive(Debug)]
pub struct Outcome {
    /// The error, if there is one.
    pub wrong: Option<String>,
    pub states: Vec<Option<SplitState>>,
    pub exchanges: Vec<Exchange>,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            limit: 1e-12,
            graph: Graph::new(),
            inputs: Vec::new(),
            states: BTreeMap::new(),
        }
    }
}

impl Case {
    fn whole(&self) -> Bench {
        let bench = Bench::new(&self.graph);
        for (id, bytes) in &self.inputs {
            bench.write(*id, bytes);
        }
        let nodes: Vec<_> = self.computed();
        bench.run(&nodes).unwrap();
        bench
    }

    pub fn computed(&self) -> Vec<TensorId> {
        let ids = self.graph.ids();
        ids.filter(|&id| self.graph.tensor(id).is_computed())
            .collect()
    }

    /// Runs the graph whole and divided, and compares.
    pub fn compare(
        &self,
        members: usize,
        alike: bool,
        decide: &dyn Fn(&RuleCase<'_>) -> Decision,
        rng: &Rng,
    ) -> Outcome {
        let reference = self.whole();
        let nodes = self.computed();
        let escaping = self.graph.needed_outside(&nodes);
        let task = Task {
            graph: &self.graph,
            nodes: &nodes,
            escaping: &escaping,
            members,
            alike,
        };
        let leaves = |id: TensorId| {
            let state = self
                .states
                .get(&id)
                .cloned()
                .unwrap_or(SplitState::Mirrored);
            Ok(Leaf {
                state,
                stored: None::<Vec<Option<Arc<StoredTensor>>>>,
            })
        };
        let partition = match Partition::with_rules(&task, &leaves, decide) {
            Ok(partition) => partition,
            Err(error) => {
                return Outcome {
                    wrong: Some(error.to_string()),
                    states: Vec::new(),
                    exchanges: Vec::new(),
                };
            }
        };
        let wrong = match self.divided(&partition, members, rng) {
            Ok(outputs) => self.difference(&reference, &partition, &outputs),
            Err(error) => Some(error.to_string()),
        };
        Outcome {
            wrong,
            exchanges: partition
                .conversions
                .iter()
                .filter_map(|conversion| conversion.exchange)
                .collect(),
            states: partition.states,
        }
    }

    /// Computes the outputs with the members.
    fn divided(
        &self,
        partition: &Partition,
        members: usize,
        rng: &Rng,
    ) -> Result<BTreeMap<TensorId, Vec<u8>>> {
        let benches: Vec<Bench> = partition.graphs.iter().map(Bench::new).collect();
        for input in &partition.inputs {
            let (_, bytes) = self
                .inputs
                .iter()
                .find(|(id, _)| *id == input.tensor)
                .unwrap();
            let layout = &self.graph.tensor(input.tensor).layout;
            let state = self
                .states
                .get(&input.tensor)
                .unwrap_or(&SplitState::Mirrored);
            let mut rest: Vec<f32> = match state {
                SplitState::Partial => floats(bytes),
                _ => Vec::new(),
            };
            for (member, local) in input.locals.iter().enumerate() {
                let Some(local) = *local else { continue };
                match state {
                    SplitState::Partial => {
                        let share: Vec<f32> = if member + 1 == members {
                            rest.clone()
                        } else {
                            rest.iter().map(|_| rng.number()).collect()
                        };
                        rest.iter_mut().zip(&share).for_each(|(rest, s)| *rest -= s);
                        benches[member].write(local, bytemuck::cast_slice(&share));
                    }
                    state => benches[member].write(local, &part(layout, state, bytes, member)),
                }
            }
        }
        for step in &partition.steps {
            match step {
                PartitionStep::Run(nodes) => {
                    for (bench, nodes) in benches.iter().zip(nodes) {
                        bench.run(nodes)?;
                    }
                }
                PartitionStep::Exchange(collective) => {
                    let parts: Vec<_> = collective
                        .sources
                        .iter()
                        .zip(&benches)
                        .map(|(source, bench)| source.map(|id| bench.read(id)))
                        .collect();
                    let bytes = whole(&collective.layout, &collective.from, &parts);
                    for (bench, result) in benches.iter().zip(&collective.results) {
                        bench.write(*result, &bytes);
                    }
                }
            }
        }
        let outputs = partition.outputs.iter().map(|output| {
            let parts: Vec<_> = output
                .locals
                .iter()
                .zip(&benches)
                .map(|(local, bench)| local.map(|id| bench.read(id)))
                .collect();
            let layout = &self.graph.tensor(output.tensor).layout;
            (output.tensor, whole(layout, &output.state, &parts))
        });
        Ok(outputs.collect())
    }

    /// Returns the first wrong output. Values must be bitwise equal, or nearly equal if members
    /// summed something.
    fn difference(
        &self,
        reference: &Bench,
        partition: &Partition,
        outputs: &BTreeMap<TensorId, Vec<u8>>,
    ) -> Option<String> {
        let is_exact = !partition
            .conversions
            .iter()
            .any(|conversion| conversion.exchange == Some(Exchange::Sum))
            && !self
                .states
                .values()
                .any(|state| *state == SplitState::Partial);
        for id in self.graph.ids().filter(|&id| {
            let tensor = self.graph.tensor(id);
            tensor.flags.output && self.graph.memory_of(id) == id
        }) {
            assert!(outputs.contains_key(&id), "output {id} is missing");
        }
        for (id, bytes) in outputs {
            let expected = reference.read(*id);
            if expected == *bytes {
                continue;
            }
            let tensor = self.graph.tensor(*id);
            let what = format!("{id} {} {}", tensor.op, tensor.layout);
            if is_exact || tensor.layout.dtype() != DType::F32 {
                return Some(format!("{what}: other bits"));
            }
            let [a, b]: [Vec<f32>; 2] = [&expected, bytes].map(|b| floats(b));
            let (mut error, mut norm) = (0f64, 0f64);
            for (a, b) in a.iter().zip(&b) {
                if a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan() {
                    continue;
                }
                error += f64::from(a - b).powi(2);
            }
            norm += a
                .iter()
                .filter(|a| a.is_finite())
                .map(|&a| f64::from(a).powi(2))
                .sum::<f64>();
            // NaN is also wrong.
            let is_near = error <= self.limit * norm.max(1e-3);
            if !is_near {
                return Some(format!("{what}: error {error:e} of {norm:e}"));
            }
        }
        None
    }
}
