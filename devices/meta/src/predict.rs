//! Predicts whether dividing a model's tensors is worthwhile: from the bytes that each token reads,
//! and from two measurements of some milliseconds of the members' read rates and the time of an
//! exchange.

use crate::comm::{Communicator, ProcessGroup, ThreadGroup};
use crate::device::MetaDevice;
use crate::partition::{Partition, PartitionStep};
use crate::shard_workers::{ShardJob, ShardWorkers};
use samite_core::{
    CancelToken, DType, Device, Error, Graph, Op, PlacedGraph, Result, RunControl, Slot,
    TensorGroup, TensorId, TensorRef, Usage,
};
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Predicted times of a run, in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// Member that would be fastest alone.
    pub best: String,
    /// Time on that member alone.
    pub alone: f64,
    /// Time divided among the members.
    pub divided: f64,
    /// Part of it that exchanges take.
    pub exchanging: f64,
}

impl Prediction {
    /// Returns whether dividing is slower.
    pub fn is_slower(&self) -> bool {
        self.divided > self.alone
    }
}

/// Rows and columns of the matrix that the measurement reads: 32 MiB.
const MATRIX: [usize; 2] = [4096, 2048];
/// Number of reads, and of timed exchanges.
const READS: usize = 3;
const EXCHANGES: usize = 64;

/// A product that reads a large matrix on one device.
struct BandwidthProbe {
    stream: Box<dyn samite_core::Stream>,
    prepared: Box<dyn samite_core::Prepared>,
    _memory: Vec<TensorGroup>,
}

impl BandwidthProbe {
    fn new(device: &Arc<dyn Device>) -> Result<Self> {
        let [columns, rows] = MATRIX;
        let mut graph = Graph::new();
        let matrix = graph.leaf("matrix", DType::F32, [columns, rows, 1, 1])?;
        let x = graph.input("x", DType::F32, [columns, 1, 1, 1])?;
        let y = graph.mul_mat(matrix, x)?;
        graph.set_output(y);
        let layouts: Vec<_> = graph.tensors().iter().map(|t| ("", t.layout)).collect();
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &layouts)?;
        let places: Vec<_> = group
            .tensors
            .iter()
            .map(|tensor| Some(tensor.tensor().clone()))
            .collect();
        let mut memory = vec![group];
        let workspace = match device.workspace(&graph, &[y])? {
            0 => None,
            size => {
                let bytes = samite_core::Layout::contiguous(DType::I8, [size, 1, 1, 1])?;
                let group =
                    TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &[("", bytes)])?;
                let place = group.tensors.first().map(|tensor| TensorRef {
                    buffer: Arc::clone(&tensor.tensor().buffer),
                    slot: Slot {
                        offset: tensor.tensor().slot.offset,
                        layout: bytes,
                    },
                });
                memory.push(group);
                place
            }
        };
        let mut stream = Arc::clone(device).open_stream()?;
        let prepared = stream.prepare(PlacedGraph {
            graph: &graph,
            nodes: &[y],
            places: &places,
            workspace: workspace.as_ref(),
            compiled: None,
        })?;
        Ok(BandwidthProbe {
            stream,
            prepared,
            _memory: memory,
        })
    }

    /// Returns the bytes per second of the fastest read.
    fn rate(&mut self) -> Result<f64> {
        let cancel = CancelToken::new();
        let control = RunControl {
            cancel: &cancel,
            observer: None,
        };
        let mut best = Duration::MAX;
        // The first run touches the memory.
        for _ in 0..=READS {
            let start = Instant::now();
            self.stream.run(&mut *self.prepared, control)?;
            self.stream.synchronize()?;
            best = best.min(start.elapsed());
        }
        Ok((MATRIX[0] * MATRIX[1] * 4) as f64 / best.as_secs_f64().max(1e-9))
    }
}

/// Returns the bytes of weights that the nodes of a graph read. Of experts, only the selected ones
/// count.
fn bytes_read(graph: &Graph, nodes: impl IntoIterator<Item = TensorId>) -> f64 {
    let mut bytes = 0.0;
    for id in nodes {
        let node = graph.node(id);
        let Some(weights) = node.source(0).filter(|weights| weights.stored().is_some()) else {
            continue;
        };
        let all = weights.layout().bytes() as f64;
        bytes += match (node.op(), node.source_layout(2)) {
            (Op::MulMat { .. }, _) => all,
            (Op::MulMatId { .. }, Some(chosen)) => {
                let experts = weights.layout().shape()[2].max(1);
                all * chosen.elements().min(experts) as f64 / experts as f64
            }
            _ => 0.0,
        };
    }
    bytes
}

impl MetaDevice {
    /// Takes short measurements and predicts the time of a graph's nodes for one token.
    ///
    /// # Errors
    /// Returns the errors of [`partition`](MetaDevice::partition) and of the members.
    pub fn predict(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Prediction> {
        let partition = self.partition(graph, nodes)?;
        let measured = match &self.group {
            None => self.measure(&partition)?,
            Some(group) => self.measure_among(group, &partition)?,
        };
        let whole = bytes_read(graph, nodes.iter().copied());
        let fastest = measured.alone.iter().copied().enumerate();
        let (best, rate) = fastest
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
            .ok_or_else(|| Error::invalid("a device without members"))?;
        let read = (0..self.members().len())
            .map(|member| bytes_of(&partition, member) / measured.together[member].max(1.0))
            .fold(0.0, f64::max);
        let exchanging = measured.exchange * partition.exchanges() as f64;
        Ok(Prediction {
            best: self.members()[best].name().to_owned(),
            alone: whole / rate.max(1.0),
            divided: read + exchanging,
            exchanging,
        })
    }

    /// Measures the members of this process.
    fn measure(&self, partition: &Partition) -> Result<Measured> {
        let mut readings = self
            .members()
            .iter()
            .map(|member| BandwidthProbe::new(member).map(Mutex::new))
            .collect::<Result<Vec<_>>>()?;
        // First each member alone.
        let alone = readings
            .iter_mut()
            .map(|reading| {
                let reading = reading.get_mut();
                reading.unwrap_or_else(PoisonError::into_inner).rate()
            })
            .collect::<Result<_>>()?;
        // Then all at once, because they share the memory bandwidth.
        let members = self.members().len();
        let rates: Arc<Vec<Mutex<f64>>> = Arc::new((0..members).map(|_| Mutex::new(0.0)).collect());
        let readings = Arc::new(readings);
        let mut shard_workers =
            ShardWorkers::new(&self.name, members, self.spins(), self.deadline)?;
        let (their_rates, their_readings) = (Arc::clone(&rates), Arc::clone(&readings));
        let job: ShardJob = Arc::new(move |member| {
            let mut reading = their_readings[member]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let rate = reading.rate()?;
            *their_rates[member]
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = rate;
            Ok(())
        });
        self.run_all(&mut shard_workers, &job)?;
        let rate = |rate: &Mutex<f64>| *rate.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Measured {
            alone,
            together: rates.iter().map(rate).collect(),
            exchange: self.exchange(partition, &mut shard_workers)?,
        })
    }

    /// Measures the members of all processes. All get the same figures.
    fn measure_among(&self, group: &ProcessGroup, partition: &Partition) -> Result<Measured> {
        let own = self.here().next();
        let own = own.ok_or_else(|| Error::invalid("a device without members"))?;
        let mut reading = BandwidthProbe::new(own)?;
        let mut mine = [0.0; 3];
        for rank in 0..group.size() {
            group.wait_for_all(self.deadline)?;
            if rank == group.rank() {
                mine[0] = reading.rate()?;
            }
        }
        group.wait_for_all(self.deadline)?;
        mine[1] = reading.rate()?;
        if let Some(numbers) = numbers(partition) {
            mine[2] = time_exchanges(&mut group.communicator(), numbers)?;
        }
        let told = group.tell(bytemuck::cast_slice(&mine))?;
        let figure = |number: usize| {
            told.iter().map(move |told| {
                let figures = told.as_chunks::<8>().0;
                figures
                    .get(number)
                    .map_or(0.0, |bytes| f64::from_ne_bytes(*bytes))
            })
        };
        Ok(Measured {
            alone: figure(0).collect(),
            together: figure(1).collect(),
            exchange: figure(2).fold(0.0, f64::max),
        })
    }

    fn run_all(&self, shard_workers: &mut ShardWorkers, job: &ShardJob) -> Result<()> {
        for (member, result) in self.members().iter().zip(shard_workers.run(job)) {
            result.unwrap_or_else(|| {
                Err(Error::device(
                    &self.name,
                    format!("{} does not come back from its work", member.name()),
                ))
            })?;
        }
        Ok(())
    }

    /// Returns the seconds of an exchange between members of this process.
    fn exchange(&self, partition: &Partition, shard_workers: &mut ShardWorkers) -> Result<f64> {
        let members = self.members().len();
        let Some(numbers) = numbers(partition).filter(|_| members > 1) else {
            return Ok(0.0);
        };
        let group = ThreadGroup::new(members, self.spins(), self.deadline);
        let ends: Vec<_> = group.members().into_iter().map(Mutex::new).collect();
        let took = Arc::new(Mutex::new(0.0));
        let result = Arc::clone(&took);
        let job: ShardJob = Arc::new(move |member| {
            let mut comm = ends[member].lock().unwrap_or_else(PoisonError::into_inner);
            let each = time_exchanges(&mut *comm, numbers)?;
            if member == 0 {
                *result.lock().unwrap_or_else(PoisonError::into_inner) = each;
            }
            Ok(())
        });
        self.run_all(shard_workers, &job)?;
        let each = *took.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(each)
    }
}

/// Measurements of members.
struct Measured {
    /// Bytes per second of each member while the others are idle.
    alone: Vec<f64>,
    /// Bytes per second of each member while all read.
    together: Vec<f64>,
    /// Seconds of an exchange of average size.
    exchange: f64,
}

/// Returns the number of elements of an average exchange, or `None` without exchanges.
fn numbers(partition: &Partition) -> Option<usize> {
    let bytes = partition.bytes_exchanged();
    bytes
        .checked_div(partition.exchanges())
        .map(|bytes| bytes / 4)
}

/// Returns the seconds of an exchange.
fn time_exchanges(comm: &mut dyn Communicator, numbers: usize) -> Result<f64> {
    let mut x = vec![1.0; numbers];
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..EXCHANGES {
        x.fill(1.0);
        comm.all_reduce(&mut x)?;
    }
    Ok(start.elapsed().as_secs_f64() / EXCHANGES as f64)
}

/// Returns the bytes of weights that a member reads.
fn bytes_of(partition: &Partition, member: usize) -> f64 {
    let nodes = partition.steps.iter().flat_map(|step| match step {
        PartitionStep::Run(nodes) => nodes[member].clone(),
        PartitionStep::Exchange(_) => Vec::new(),
    });
    bytes_read(&partition.graphs[member], nodes)
}
