//! Running one graph on two devices and comparing node by node.

use crate::executor::Watch;
use crate::options::Options;
use crate::scheduler::Scheduler;
use samite_core::{
    CancelToken, Device, Error, Graph, Result, StoredTensor, TensorGroup, TensorId, Usage,
};
use std::sync::Arc;

/// A graph whose stored tensors live in one device's memory.
#[derive(Debug)]
pub struct GraphCopy {
    /// The graph; tensors have the same numbers as in the original.
    pub graph: Graph,
    /// The memory of the copied tensors.
    pub stored: TensorGroup,
}

/// Copies `graph` to `device`: same tensors, with everything stored copied into the device's memory.
///
/// # Errors
/// If the device has not enough memory, or a copy fails.
pub fn copy_graph(graph: &Graph, device: &dyn Device) -> Result<GraphCopy> {
    let originals: Vec<&Arc<StoredTensor>> = graph
        .tensors()
        .iter()
        .filter_map(|tensor| tensor.stored.as_ref())
        .collect();
    let layouts: Vec<_> = originals
        .iter()
        .map(|stored| (stored.name(), *stored.layout()))
        .collect();
    let stored = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &layouts)?;
    for (copy, original) in stored.tensors.iter().zip(&originals) {
        copy.tensor().copy_from(original.tensor())?;
    }
    let mut copies = stored.tensors.iter();
    let mut result = Graph::new();
    for tensor in graph.tensors() {
        let id = match (&tensor.stored, &tensor.op) {
            (Some(_), _) => result.stored(
                copies
                    .next()
                    .ok_or_else(|| Error::invalid("a stored tensor is missing"))?,
            )?,
            (None, samite_core::Op::Leaf) => {
                let (dtype, shape) = (tensor.layout.dtype(), tensor.layout.shape());
                let add = if tensor.flags.input {
                    Graph::input
                } else {
                    Graph::leaf
                };
                add(&mut result, &tensor.name, dtype, shape)?
            }
            (None, op) => result.push(*op, &tensor.sources)?,
        };
        result.set_name(id, Arc::clone(&tensor.name));
        if tensor.flags.output {
            result.set_output(id);
        }
    }
    Ok(GraphCopy {
        graph: result,
        stored,
    })
}

/// Runs `graph` on `first` and, copied, on `second` and calls `see` with the
/// bytes of every computed node in order, until that says stop. `inputs` are written before.
///
/// # Errors
/// If a graph cannot be placed or a device fails.
pub fn compare_devices(
    graph: &Graph,
    [first, second]: [Arc<dyn Device>; 2],
    inputs: &[(TensorId, Vec<u8>)],
    mut see: impl FnMut(TensorId, &[u8], &[u8]) -> Result<Watch>,
) -> Result<()> {
    let record = |device: Arc<dyn Device>| -> Result<Vec<(TensorId, Vec<u8>)>> {
        let copy = copy_graph(graph, &*device)?;
        let mut scheduler = Scheduler::new(vec![device], Options::default())?;
        scheduler.load(&copy.graph)?;
        for (id, bytes) in inputs {
            scheduler.write(*id, 0, bytes)?;
        }
        let mut values = Vec::new();
        scheduler.run_watched(
            &CancelToken::new(),
            |_| true,
            |id, place| {
                let mut bytes = vec![0; place.layout().bytes()];
                place.read(0, &mut bytes)?;
                values.push((id, bytes));
                Ok(Watch::Continue)
            },
        )?;
        Ok(values)
    };
    // Each device may run nodes in an order of its own.
    let (mut a, mut b) = (record(first)?, record(second)?);
    a.sort_unstable_by_key(|(id, _)| *id);
    b.sort_unstable_by_key(|(id, _)| *id);
    for ((id, x), (_, y)) in a.iter().zip(&b) {
        if see(*id, x, y)? == Watch::Stop {
            break;
        }
    }
    Ok(())
}

/// Normalized mean squared error of `values` against `reference`: `sum((a - b)²) / sum(b²)`; infinite where one is
/// not finite and the other is.
pub fn nmse(values: &[f32], reference: &[f32]) -> f64 {
    let (mut error, mut power) = (0.0f64, 0.0f64);
    for (&a, &b) in values.iter().zip(reference) {
        if !a.is_finite() || !b.is_finite() {
            if a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()) && a != b {
                return f64::INFINITY;
            }
            continue;
        }
        error += (f64::from(a) - f64::from(b)).powi(2);
        power += f64::from(b).powi(2);
    }
    if error == 0.0 {
        0.0
    } else {
        error / power.max(f64::MIN_POSITIVE)
    }
}
