//! Parameters in memory, with gradients and means, and the graph that updates them.

use crate::error::{Error, Result};
use crate::gradient::Gradients;
use crate::model::ParameterSpec;
use crate::optimizer::{Optimizer, Parameter};
use samite_core::{
    CancelToken, DType, Device, Graph, Layout, StoredTensor, TensorGroup, TensorId, TensorRef,
    Usage,
};
use samite_sched::Scheduler;
use samite_text::Rng;
use std::sync::Arc;

/// One parameter in memory.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub spec: ParameterSpec,
    pub weights: Arc<StoredTensor>,
    pub gradient: Arc<StoredTensor>,
    pub means: [Arc<StoredTensor>; 2],
}

pub(crate) fn bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

pub(crate) fn numbers(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks().0.iter();
    values.map(|value| f32::from_le_bytes(*value)).collect()
}

pub(crate) fn scalar(scheduler: &mut Scheduler, id: TensorId) -> Result<f32> {
    let mut data = [0; 4];
    scheduler.read(id, 0, &mut data)?;
    Ok(f32::from_le_bytes(data))
}

/// Number of bytes of a tensor that are read or written at a time: this much memory is always
/// available.
const PIECE: usize = 64 << 10;

/// Allocates `bytes` bytes for a tensor, fallibly.
pub(crate) fn buffer(bytes: usize) -> Result<Vec<u8>> {
    reserved(bytes).map(|mut buffer| {
        buffer.resize(bytes, 0);
        buffer
    })
}

fn reserved<T>(count: usize) -> Result<Vec<T>> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| {
        Error::Core(samite_core::Error::OutOfMemory {
            device: "host".into(),
            what: "the values of a tensor".into(),
            asked: count.saturating_mul(size_of::<T>()),
            free: None,
        })
    })?;
    Ok(all)
}

/// Calls `each` with the numbers of a stored tensor, some at a time.
pub(crate) fn read_pieces(
    place: &TensorRef,
    mut each: impl FnMut(&[f32]) -> samite_core::Result<()>,
) -> samite_core::Result<()> {
    let mut piece = [0; PIECE];
    let end = place.layout().bytes();
    for start in (0..end).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(end - start)];
        place.read(start, piece)?;
        each(&numbers(piece))?;
    }
    Ok(())
}

/// Reads all numbers of a stored tensor.
pub(crate) fn read(tensor: &StoredTensor) -> Result<Vec<f32>> {
    let mut all = reserved(tensor.layout().shape().iter().product())?;
    read_pieces(tensor.tensor(), |piece| {
        all.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(all)
}

/// Sets the elements of a stored tensor, some at a time, to values given as bytes.
pub(crate) fn write<const N: usize>(
    tensor: &StoredTensor,
    values: impl Iterator<Item = [u8; N]>,
) -> Result<()> {
    let (mut piece, mut start) = (Vec::with_capacity(PIECE), 0);
    for value in values {
        piece.extend_from_slice(&value);
        if piece.len() + N > PIECE {
            tensor.tensor().write(start, &piece)?;
            start += piece.len();
            piece.clear();
        }
    }
    Ok(tensor.tensor().write(start, &piece)?)
}

impl Stored {
    pub fn allocate(spec: ParameterSpec, device: &Arc<dyn Device>) -> Result<Self> {
        let layout = Layout::contiguous(DType::F32, spec.shape)?;
        let names =
            ["", ".gradient", ".mean", ".square"].map(|part| format!("{}{part}", spec.name));
        let wanted: Vec<_> = names.iter().map(|name| (name.as_str(), layout)).collect();
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &wanted)?;
        let [weights, gradient, mean, square] = &group.tensors[..] else {
            return Err(Error::config("a parameter has no memory"));
        };
        group.clear(0)?;
        Ok(Stored {
            weights: Arc::clone(weights),
            gradient: Arc::clone(gradient),
            means: [mean, square].map(Arc::clone),
            spec,
        })
    }
}

/// Writes the initial weights: normally distributed, or ones.
pub(crate) fn initialize(parameters: &[Stored], seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for parameter in parameters {
        let count = parameter.spec.shape.iter().product();
        let deviation = parameter.spec.deviation;
        let value = || deviation.map_or(1.0, |deviation| normal(&mut rng) * deviation);
        let values = std::iter::repeat_with(value).take(count);
        write(&parameter.weights, values.map(f32::to_le_bytes))?;
    }
    Ok(())
}

/// Returns a normally distributed number (Box and Muller 1958).
fn normal(rng: &mut Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.uniform()).ln()).sqrt();
    (radius * (2.0 * std::f64::consts::PI * rng.uniform()).cos()) as f32
}

/// Appends nodes that write the gradients of `ids` to the gradients of `parameters`, or add to
/// them.
pub(crate) fn store_gradients(
    graph: &mut Graph,
    gradients: &Gradients,
    parameters: &[Stored],
    ids: &[TensorId],
    adds: bool,
) -> Result<()> {
    for (parameter, &id) in parameters.iter().zip(ids) {
        let Some(gradient) = gradients.get(id) else {
            continue;
        };
        let into = graph.stored(&parameter.gradient)?;
        let value = if adds {
            graph.add(into, gradient)?
        } else {
            gradient
        };
        graph.cpy(value, into)?;
    }
    Ok(())
}

/// A graph that updates the weights.
pub(crate) struct StepGraph {
    graph: Graph,
    optimizer: Optimizer,
    /// Values of the optimizer for matrices and for other weights.
    numbers: [TensorId; 2],
    norm: TensorId,
}

impl StepGraph {
    /// Creates the graph for steps by `optimizer`. It limits the norm of all gradients together to
    /// `clip`, if that is above 0.
    pub fn new(optimizer: Optimizer, clip: f32, parameters: &[Stored]) -> Result<Self> {
        let mut graph = Graph::new();
        let shape = [optimizer.numbers(), 1, 1, 1];
        let numbers = [
            graph.input("numbers for matrices", DType::F32, shape)?,
            graph.input("numbers", DType::F32, shape)?,
        ];
        let mut all = Vec::new();
        let mut total = None;
        for parameter in parameters {
            let [m, v] = &parameter.means;
            let ids = Parameter {
                weights: graph.stored(&parameter.weights)?,
                gradient: graph.stored(&parameter.gradient)?,
                means: [graph.stored(m)?, graph.stored(v)?],
            };
            all.push(ids);
            let squares = graph.sqr(ids.gradient)?;
            let sum = graph.sum(squares)?;
            total = Some(match total {
                Some(total) => graph.add(total, sum)?,
                None => sum,
            });
        }
        let total = total.ok_or_else(|| Error::config("the model has no parameters"))?;
        let norm = graph.sqrt(total)?;
        graph.set_name(norm, "gradient norm");
        graph.set_output(norm);
        let factor = if clip > 0.0 {
            let limit = graph.fill(norm, clip)?;
            let longest = graph.clamp(norm, clip, f32::INFINITY)?;
            Some(graph.div(limit, longest)?)
        } else {
            None
        };
        for (parameter, mut ids) in parameters.iter().zip(all) {
            if let Some(factor) = factor {
                ids.gradient = graph.mul(ids.gradient, factor)?;
            }
            let number = numbers[usize::from(!parameter.spec.is_matrix())];
            optimizer.append(&mut graph, ids, number)?;
        }
        Ok(StepGraph {
            graph,
            optimizer,
            numbers,
            norm,
        })
    }

    /// Runs step `step`, counted from 0, with a learning rate. Returns the norm of the gradient
    /// before it was clipped.
    pub fn run(
        &self,
        scheduler: &mut Scheduler,
        step: u64,
        rate: f32,
        cancel: &CancelToken,
    ) -> Result<f32> {
        scheduler.load(&self.graph)?;
        for (id, decays) in self.numbers.into_iter().zip([true, false]) {
            let values = self.optimizer.values(step, rate, decays);
            scheduler.write(id, 0, &bytes(values.into_iter()))?;
        }
        scheduler.run(cancel)?;
        scalar(scheduler, self.norm)
    }
}
