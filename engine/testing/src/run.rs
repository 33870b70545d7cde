//! Runs of one case on a device and on the reference.

use crate::case::Case;
use crate::compare::{compare, source_rows};
use samite_core::{
    BufferType, CancelToken, DType, Device, Error, Graph, Layout, Op, PlacedGraph, Result,
    RunControl, Slot, StoredTensor, Stream, Support, TensorGroup, TensorId, TensorInfo, TensorRef,
    Usage, align_up,
};
use std::sync::{Arc, OnceLock};

/// Outcome of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result is within the limit, and nothing else in memory changed.
    Passed {
        /// Normalised mean squared error.
        nmse: f64,
    },
    /// The device does not support the case.
    Unsupported {
        /// Reason.
        reason: String,
    },
    /// The result is wrong, or other memory was changed.
    Failed {
        /// Normalised mean squared error. Infinite if the numbers were not compared.
        nmse: f64,
        /// Description of the failure.
        detail: String,
    },
    /// The device, or the reference, failed.
    Error {
        /// The error.
        message: String,
    },
}

/// Runs `case` on `device` and on `reference`, with all tensors in the memory of the device.
pub fn run_case(device: &Arc<dyn Device>, reference: &Arc<dyn Device>, case: &Case) -> Outcome {
    judge(device, reference, case, &Answer::default(), None)
}

/// Does what [`run_case`] does, with weights in memory of the type `weights`, such as one of the
/// device's [extra buffer types](Device::extra_buffer_types). If that does not accept them, the
/// case is unsupported.
pub fn run_case_in(
    device: &Arc<dyn Device>,
    reference: &Arc<dyn Device>,
    case: &Case,
    weights: &Arc<dyn BufferType>,
) -> Outcome {
    judge(device, reference, case, &Answer::default(), Some(weights))
}

/// Expected result of a case: the bytes of its inputs, and the reference's memory after the run.
/// Both are computed on first use and shared by all runs of the case, whatever the device.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    inputs: OnceLock<Result<Vec<Vec<u8>>>>,
    /// Bytes of each compared tensor, by position in the graph.
    expected: OnceLock<Result<Vec<Option<Vec<u8>>>>>,
}

impl Answer {
    fn inputs(&self, case: &Case) -> Result<&[Vec<u8>]> {
        let all = || {
            (0..case.inputs.len())
                .map(|index| case.input_bytes(index))
                .collect()
        };
        match self.inputs.get_or_init(all) {
            Ok(inputs) => Ok(inputs),
            Err(error) => Err(error.clone()),
        }
    }

    fn expected(&self, reference: &Arc<dyn Device>, case: &Case) -> Result<&[Option<Vec<u8>>]> {
        let compute = || match execute(reference, case, self.inputs(case)?, None)? {
            Ok(mut memory) => {
                let kept = compared(case);
                for id in case.graph.ids().filter(|id| !kept.contains(id)) {
                    memory.owners[id.index()] = None;
                }
                Ok(memory.owners)
            }
            Err(reason) => Err(Error::unsupported(reference.name(), &case.name, reason)),
        };
        match self.expected.get_or_init(compute) {
            Ok(expected) => Ok(expected),
            Err(error) => Err(error.clone()),
        }
    }
}

/// Runs `case` on `device`, optionally with weights in memory of a special type.
pub(crate) fn judge(
    device: &Arc<dyn Device>,
    reference: &Arc<dyn Device>,
    case: &Case,
    answer: &Answer,
    weights: Option<&Arc<dyn BufferType>>,
) -> Outcome {
    try_judge(device, reference, case, answer, weights).unwrap_or_else(|error| Outcome::Error {
        message: error.to_string(),
    })
}

/// Fill byte around and between tensors, which must not change.
const SENTINEL: u8 = 0xa5;

/// Minimum number of bytes between tensors.
const GUARD: usize = 64;

/// Fill byte of results, to detect if they were written. It is NaN in f32, f16 and bf16.
const UNWRITTEN: u8 = 0xff;

/// Contents of memory after a run.
struct MemorySnapshot {
    /// Bytes of each tensor that owns memory, by position in the graph.
    owners: Vec<Option<Vec<u8>>>,
    /// Description of changed bytes between tensors.
    damage: Option<String>,
}

fn try_judge(
    device: &Arc<dyn Device>,
    reference: &Arc<dyn Device>,
    case: &Case,
    answer: &Answer,
    weights: Option<&Arc<dyn BufferType>>,
) -> Result<Outcome> {
    let inputs = answer.inputs(case)?;
    let memory = match execute(device, case, inputs, weights)? {
        Ok(memory) => memory,
        Err(reason) => return Ok(Outcome::Unsupported { reason }),
    };
    let expected = answer.expected(reference, case)?;
    let failed = |detail: String| {
        Ok(Outcome::Failed {
            nmse: f64::INFINITY,
            detail,
        })
    };
    if let Some(damage) = memory.damage {
        return failed(damage);
    }
    let written = written(case);
    for (input, bytes) in case.inputs.iter().zip(inputs) {
        let found = &memory.owners[input.tensor.index()];
        if !written.contains(&input.tensor) && found.as_ref().is_some_and(|found| found != bytes) {
            return failed(format!("input {} was changed", input.tensor));
        }
    }
    let mut nmse = 0.0f64;
    for id in compared(case) {
        let index = id.index();
        let (Some(bytes), Some(expected)) = (&memory.owners[index], &expected[index]) else {
            return Err(Error::invalid(format!("tensor {id} has no memory")));
        };
        let layout = &case.graph.tensor(id).layout;
        let rows = || source_rows(case, inputs);
        let difference = compare(layout, case.limit, rows, [bytes, expected])?;
        if let Some(detail) = difference.problem {
            return Ok(Outcome::Failed {
                nmse: difference.nmse,
                detail,
            });
        }
        nmse = nmse.max(difference.nmse);
    }
    Ok(Outcome::Passed { nmse })
}

/// Returns the inputs that the case writes to.
fn written(case: &Case) -> Vec<TensorId> {
    let graph = &case.graph;
    graph
        .ids()
        .flat_map(|id| graph.tensor(id).written())
        .map(|(_, source)| graph.memory_of(source))
        .chain(overwritten(case))
        .collect()
}

/// Returns the tensors whose memory is compared. Unless the result is in place, memory that is
/// written counts like the result.
fn compared(case: &Case) -> Vec<TensorId> {
    let owner = case.graph.memory_of(case.output);
    written(case)
        .into_iter()
        .filter(|&id| case.in_place.is_none() && id != owner)
        .chain([owner])
        .collect()
}

/// Returns the leaf in whose memory the output is placed.
fn overwritten(case: &Case) -> Option<TensorId> {
    let sources = &case.graph.tensor(case.output).sources;
    case.in_place.and_then(|number| sources[number])
}

/// Returns the graph with its weights stored in memory of the type `memory`, or `Err` with the
/// reason if that does not accept them.
pub(crate) fn store_weights(
    case: &Case,
    inputs: &[Vec<u8>],
    memory: &Arc<dyn BufferType>,
) -> Result<Result<Graph, String>> {
    for id in case.graph.ids() {
        let node = case.graph.node(id);
        let uses_weights = node.source(0).is_some_and(|source| {
            case.inputs
                .iter()
                .any(|input| input.weights && input.tensor == source.id())
        });
        if uses_weights && let Support::No(reason) = memory.accepts(node) {
            return Ok(Err(reason.into_owned()));
        }
    }
    let mut graph = Graph::new();
    for id in case.graph.ids() {
        let tensor = case.graph.tensor(id);
        let input = case.inputs.iter().position(|input| input.tensor == id);
        match input {
            Some(index) if case.inputs[index].weights => {
                let wanted = [(&*tensor.name, tensor.layout)];
                let group = TensorGroup::allocate(memory, Usage::Weights, &wanted)?;
                for stored in &group.tensors {
                    stored.tensor().write(0, &inputs[index])?;
                    graph.stored(stored)?;
                }
            }
            Some(_) => {
                graph.input(&tensor.name, tensor.layout.dtype(), tensor.layout.shape())?;
            }
            None => {
                graph.push(tensor.op, &tensor.sources)?;
            }
        }
    }
    Ok(Ok(graph))
}

fn execute(
    device: &Arc<dyn Device>,
    case: &Case,
    inputs: &[Vec<u8>],
    weights: Option<&Arc<dyn BufferType>>,
) -> Result<Result<MemorySnapshot, String>> {
    let graph = match weights {
        None => case.graph.clone(),
        Some(memory) => match store_weights(case, inputs, memory)? {
            Ok(graph) => graph,
            Err(reason) => return Ok(Err(reason)),
        },
    };
    for id in graph.ids().filter(|&id| graph.tensor(id).is_computed()) {
        if let Support::No(reason) = device.supports(graph.node(id)) {
            return Ok(Err(reason.into_owned()));
        }
    }
    let arena = Arena::new(device, case, &graph)?;
    for (input, bytes) in case.inputs.iter().zip(inputs) {
        if graph.tensor(input.tensor).stored.is_none() {
            arena.place(input.tensor)?.write(0, bytes)?;
        }
    }
    let nodes: Vec<_> = graph.ids().collect();
    let scratch = device.workspace(&graph, &nodes)?;
    let scratch = TensorGroup::allocate(
        &device.buffer_type(),
        Usage::Compute,
        &[("workspace", bytes_layout(scratch)?)],
    )?;
    let mut stream = Arc::clone(device).open_stream()?;
    run(&mut *stream, &graph, &nodes, &arena, &scratch)?;
    arena.read(&graph).map(Ok)
}

fn run(
    stream: &mut dyn Stream,
    graph: &Graph,
    nodes: &[TensorId],
    arena: &Arena,
    scratch: &TensorGroup,
) -> Result<()> {
    let mut prepared = stream.prepare(PlacedGraph {
        graph,
        nodes,
        places: &arena.places,
        workspace: scratch.tensors.first().map(|tensor| tensor.tensor()),
        compiled: None,
    })?;
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control)?;
    stream.synchronize()
}

pub(crate) fn bytes_layout(len: usize) -> Result<Layout> {
    Layout::contiguous(DType::I8, [len, 1, 1, 1])
}

/// All tensors of a graph in one buffer, with guards between them.
pub(crate) struct Arena {
    pub(crate) places: Vec<Option<TensorRef>>,
    /// The whole buffer as bytes.
    everything: Arc<StoredTensor>,
    /// Start and end of the tensors' memory, in order.
    taken: Vec<(usize, usize)>,
}

impl Arena {
    pub(crate) fn new(device: &Arc<dyn Device>, case: &Case, graph: &Graph) -> Result<Self> {
        let memory = device.buffer_type();
        let (alignment, mut end) = (memory.alignment(), 0usize);
        let overflow = || Error::invalid("the case is too large");
        let mut offsets = vec![None; graph.len()];
        let mut taken = Vec::new();
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            if tensor.view.is_some() || tensor.stored.is_some() {
                continue;
            }
            if id == case.output
                && let Some(source) = overwritten(case)
            {
                offsets[id.index()] = offsets[source.index()];
                continue;
            }
            let start = align_up(end + GUARD, alignment).ok_or_else(overflow)?;
            end = start
                + memory.alloc_size(&TensorInfo::from_node(graph.node(id), Usage::Compute))?;
            taken.push((start, end));
            offsets[id.index()] = Some(start);
        }
        let size = end + GUARD;
        let buffer = memory.allocate(size, Usage::Compute)?;
        buffer.clear(SENTINEL)?;
        let everything =
            StoredTensor::new("everything", Arc::clone(&buffer), 0, bytes_layout(size)?)?;
        let mut places: Vec<Option<TensorRef>> = vec![None; graph.len()];
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            places[id.index()] = if let Some(stored) = &tensor.stored {
                Some(stored.tensor().clone())
            } else if let Some(view) = tensor.view {
                places[view.base.index()].as_ref().map(|base| TensorRef {
                    buffer: Arc::clone(&base.buffer),
                    slot: Slot {
                        offset: base.slot.offset + view.offset,
                        layout: tensor.layout,
                    },
                })
            } else if let Some(offset) = offsets[id.index()] {
                let stored = StoredTensor::new(
                    Arc::clone(&tensor.name),
                    Arc::clone(&buffer),
                    offset,
                    tensor.layout,
                )?;
                if !matches!(tensor.op, Op::Leaf) {
                    let len = tensor.layout.bytes();
                    buffer.fill(stored.tensor().slot, 0, len, UNWRITTEN)?;
                }
                Some(stored.tensor().clone())
            } else {
                None
            };
        }
        Ok(Arena {
            places,
            everything,
            taken,
        })
    }

    pub(crate) fn place(&self, id: TensorId) -> Result<&TensorRef> {
        self.places[id.index()]
            .as_ref()
            .ok_or_else(|| Error::invalid(format!("tensor {id} has no place")))
    }

    fn read(&self, graph: &Graph) -> Result<MemorySnapshot> {
        let mut all = vec![0; self.everything.layout().bytes()];
        self.everything.tensor().read(0, &mut all)?;
        let mut owners = vec![None; graph.len()];
        for id in graph.ids().filter(|&id| graph.memory_of(id) == id) {
            let place = self.place(id)?;
            let mut bytes = vec![0; place.layout().bytes()];
            owners[id.index()] = match place.read(0, &mut bytes) {
                Ok(()) => Some(bytes),
                // Some weight layouts cannot be converted back.
                Err(Error::Unsupported { .. }) if graph.tensor(id).stored.is_some() => None,
                Err(error) => return Err(error),
            };
        }
        let mut damage = None;
        let mut start = 0;
        for &(tensor, end) in self.taken.iter().chain([&(all.len(), all.len())]) {
            if let Some(at) = all[start..tensor].iter().position(|&byte| byte != SENTINEL) {
                damage = Some(match start {
                    0 => format!("a byte {} before the first tensor was changed", tensor - at),
                    _ => format!("a byte {at} behind the end of a tensor was changed"),
                });
            }
            start = end;
        }
        Ok(MemorySnapshot { owners, damage })
    }
}
