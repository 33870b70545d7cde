//! Comparison of one graph on two devices, node by node in lockstep.

use crate::options::Options;
use crate::scheduler::Scheduler;
use crate::watch::{Watch, WatchedRun};
use samite_core::{
    CancelToken, Device, DeviceWrapper, Error, Graph, KeepAlive, Layout, Node, Op, Result,
    StoredTensor, TensorGroup, TensorId, TensorRef, Usage, WrappedDevice,
};
use samite_quant::RowReader;
use std::sync::Arc;

/// A graph whose stored tensors live in one device's memory.
#[derive(Debug)]
pub struct GraphCopy {
    /// The graph. Tensors have the same numbers as in the original.
    pub graph: Graph,
    /// Memory of the copied tensors.
    pub stored: TensorGroup,
}

/// Copies `graph` to `device`: the same tensors, with all stored tensors copied to the device's
/// memory. Leaves with the same memory still share it.
///
/// # Errors
/// If the device has too little memory or a copy fails. [`Error::InvalidArgument`] if stored
/// tensors overlap only partly.
pub fn copy_graph(graph: &Graph, device: &dyn Device) -> Result<GraphCopy> {
    let (mut originals, mut numbers) = (Vec::new(), Vec::new());
    for stored in graph.tensors().iter().filter_map(|t| t.stored.as_ref()) {
        numbers.push(number_of(stored, &mut originals)?);
    }
    let layouts: Vec<_> = originals
        .iter()
        .map(|stored| (stored.name(), *stored.layout()))
        .collect();
    let stored = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &layouts)?;
    for (copy, original) in stored.tensors.iter().zip(&originals) {
        copy.tensor().copy_from(original.tensor())?;
    }
    let mut numbers = numbers.into_iter();
    let mut result = Graph::new();
    for tensor in graph.tensors() {
        let id = match (&tensor.stored, &tensor.op) {
            (Some(_), _) => {
                let number = numbers.next();
                let copy = number.and_then(|number| stored.tensors.get(number));
                result.stored(copy.ok_or_else(|| Error::invalid("a stored tensor is missing"))?)?
            }
            (None, Op::Leaf) => {
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

/// Returns the index in `known` of the memory of `stored`. Adds new memory to `known`.
fn number_of<'g>(
    stored: &'g Arc<StoredTensor>,
    known: &mut Vec<&'g Arc<StoredTensor>>,
) -> Result<usize> {
    let place = stored.tensor();
    for (number, other) in known.iter().enumerate() {
        if place.location() == other.tensor().location() && stored.layout() == other.layout() {
            return Ok(number);
        }
        if place.overlaps(other.tensor()) {
            return Err(Error::invalid(format!(
                "'{}' and '{}' share a part of their memory, which a copy of the graph would not",
                other.name(),
                stored.name()
            )));
        }
    }
    known.push(stored);
    Ok(known.len() - 1)
}

/// Difference between two results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Normalised mean squared error: `Σ(a - b)² / Σb²`. Infinite if one element of a pair is not
    /// finite and the other one differs.
    pub nmse: f64,
    /// Maximum distance between two elements.
    pub largest: f64,
    /// Position of the maximum, innermost extent first.
    pub at: [usize; 4],
    /// The two elements at that position.
    pub values: [f64; 2],
    /// True if all elements of both are NaN. That is no difference, but does not show that the
    /// devices agree.
    pub all_nan: bool,
    /// Mean of the squares of `b`.
    power: f64,
}

impl Difference {
    /// Factor by which a single element may exceed the average error.
    const WORST: f64 = 10.0;

    /// Returns whether the difference is more than rounding. It is if the error exceeds `limit`, or
    /// if a single element is so far off that the error would exceed `limit` if one element in a
    /// hundred were. Without the second rule, an error in the last element of each long row would
    /// pass.
    pub fn exceeds(&self, limit: f64) -> bool {
        let worst = self.largest * self.largest;
        self.nmse > limit || worst > Self::WORST * Self::WORST * limit * self.power
    }
}

/// Compares the elements of two tensors of equal shape, read from the bytes that they span.
///
/// # Errors
/// [`Error::Shape`] if their shapes differ. [`Error::InvalidArgument`] for a type that cannot be
/// decoded.
pub fn difference([a, b]: [(&Layout, &[u8]); 2]) -> Result<Difference> {
    if a.0.shape() != b.0.shape() {
        return Err(Error::shape(format!(
            "{} cannot be compared with {}",
            a.0, b.0
        )));
    }
    let mut readers = [RowReader::default(), RowReader::default()];
    let [first, second] = &mut readers;
    let (mut error, mut power) = (0.0f64, 0.0f64);
    let mut worst = (0.0f64, [0; 4], [0.0; 2]);
    let mut all_nan = a.0.elements() > 0;
    for row in 0..a.0.rows() {
        let [i1, i2, i3] = a.0.row_index(row);
        let (x, y) = (first.read(a.0, a.1, row)?, second.read(b.0, b.1, row)?);
        for (i0, (&x, &y)) in x.iter().zip(y).enumerate() {
            power += if y.is_finite() { y * y } else { 0.0 };
            let both_nan = x.is_nan() && y.is_nan();
            all_nan &= both_nan;
            if x == y || both_nan {
                continue;
            }
            let distance = (x - y).abs();
            let distance = if distance.is_nan() {
                f64::INFINITY
            } else {
                distance
            };
            error += distance * distance;
            if distance > worst.0 {
                worst = (distance, [i0, i1, i2, i3], [x, y]);
            }
        }
    }
    let (largest, at, values) = worst;
    Ok(Difference {
        nmse: match error {
            // Also if the power is 0 or infinite.
            0.0 | f64::INFINITY => error,
            _ => error / power,
        },
        largest,
        at,
        values,
        all_nan,
        power: power / a.0.elements().max(1) as f64,
    })
}

/// One node of a graph, computed twice.
#[derive(Debug)]
pub struct Pair<'a> {
    /// Number of nodes compared before.
    pub number: usize,
    /// The node in both graphs.
    pub nodes: [Node<'a>; 2],
    /// The devices that computed it.
    pub devices: [&'a Arc<dyn Device>; 2],
    /// Difference between the first result and the second.
    pub difference: Difference,
}

/// Runs the loaded graphs of two schedulers in lockstep and calls `see` with every computed node.
/// Both graphs must be the same, each with its own stored tensors, and the devices must [keep the
/// node order](in_order). Only one result of each graph is in memory at a time.
///
/// The first graph continues with the second's results. Each node is therefore compared on the same
/// operands, and its error does not propagate.
///
/// # Errors
/// [`Error::Stopped`] if `see` stops the run, [`Error::InvalidArgument`] if the graphs differ.
/// Otherwise as [`Scheduler::run`].
pub fn in_step(
    schedulers: [&mut Scheduler; 2],
    cancel: &CancelToken,
    mut see: impl FnMut(&Pair<'_>) -> Result<Watch>,
) -> Result<()> {
    let [first, second] = schedulers;
    let (mut first, mut second) = (watch(first, cancel)?, watch(second, cancel)?);
    let mut bytes = [Vec::new(), Vec::new()];
    let mut number = 0;
    loop {
        let seen = match (first.advance()?, second.advance()?) {
            (None, None) => return Ok(()),
            (Some(a), Some(b)) => compare([&first, &second], [a, b], &mut bytes, number, &mut see),
            _ => Err(Error::invalid(
                "the two graphs do not have the same number of nodes",
            )),
        };
        let error = match seen {
            Ok(Watch::Continue) => {
                number += 1;
                continue;
            }
            Ok(Watch::Stop) => Error::Stopped,
            Err(error) => error,
        };
        // Ends the second run cleanly. The cause is already known.
        let _ = second.fail(error.clone());
        return first.fail(error);
    }
}

/// Starts a run that shows every computed node.
fn watch<'s>(scheduler: &'s mut Scheduler, cancel: &'s CancelToken) -> Result<WatchedRun<'s>> {
    let tensors = scheduler.current_plan()?.graph().tensors().iter();
    let computed: Vec<bool> = tensors.map(|tensor| tensor.is_computed()).collect();
    scheduler.watch(cancel, |id| computed[id.index()])
}

fn compare(
    runs: [&WatchedRun<'_>; 2],
    seen: [(TensorId, TensorRef); 2],
    bytes: &mut [Vec<u8>; 2],
    number: usize,
    see: &mut impl FnMut(&Pair<'_>) -> Result<Watch>,
) -> Result<Watch> {
    let plans = [runs[0].plan()?, runs[1].plan()?];
    let ([a, b], places) = ([seen[0].0, seen[1].0], [&seen[0].1, &seen[1].1]);
    let nodes = [plans[0].graph().node(a), plans[1].graph().node(b)];
    let [x, y] = nodes.map(Node::tensor);
    if x.op != y.op || (x.layout.dtype(), x.layout.shape()) != (y.layout.dtype(), y.layout.shape())
    {
        return Err(Error::invalid(format!(
            "the two graphs, or the orders in which devices run them, are not the same: node {number} is {:?} '{}' and {:?} '{}'",
            nodes[0], x.name, nodes[1], y.name
        )));
    }
    for (bytes, place) in bytes.iter_mut().zip(places) {
        bytes.resize(place.layout().bytes(), 0);
        place.read(0, bytes)?;
    }
    let of = |side: usize| (places[side].layout(), &*bytes[side]);
    let pair = Pair {
        number,
        nodes,
        devices: [(plans[0], a), (plans[1], b)].map(|(plan, id)| {
            let device = plan.placement().devices[id.index()];
            plan.devices().get(device.unwrap_or(plan.devices().last()))
        }),
        difference: difference([of(0), of(1)])?,
    };
    let watch = see(&pair)?;
    if places[0].layout() == places[1].layout() && bytes[0] != bytes[1] {
        places[0].write(0, &bytes[1])?;
    }
    Ok(watch)
}

/// Returns a device wrapper that runs nodes in graph order, without the device's own reordering,
/// for use in lockstep.
pub fn in_order(device: &Arc<dyn Device>) -> Arc<dyn Device> {
    struct InOrder(Arc<dyn Device>);

    impl DeviceWrapper for InOrder {
        fn inner(&self) -> &Arc<dyn Device> {
            &self.0
        }

        fn optimize(&self, _: &Graph, _: &mut [TensorId]) -> Vec<KeepAlive> {
            Vec::new()
        }
    }

    WrappedDevice::device(InOrder(Arc::clone(device)))
}

/// Copies `graph` to two devices, writes `inputs`, and runs both copies [in lockstep](in_step).
/// Each side may list further devices for unsupported operations.
///
/// # Errors
/// If a graph cannot be placed, or as [`in_step`]. A stop by `see` is not an error.
pub fn compare_devices(
    graph: &Graph,
    sides: [&[Arc<dyn Device>]; 2],
    inputs: &[(TensorId, Vec<u8>)],
    see: impl FnMut(&Pair<'_>) -> Result<Watch>,
) -> Result<()> {
    let load = |side: &[Arc<dyn Device>]| -> Result<(Scheduler, Option<GraphCopy>)> {
        let devices = side.iter().map(in_order).collect();
        let mut scheduler = Scheduler::new(devices, Options::default())?;
        let copy = side.first().map(|device| copy_graph(graph, &**device));
        let copy = copy.transpose()?;
        if let Some(copy) = &copy {
            scheduler.load(&copy.graph)?;
        }
        for (id, bytes) in inputs {
            scheduler.write(*id, 0, bytes)?;
        }
        Ok((scheduler, copy))
    };
    let ((mut first, _a), (mut second, _b)) = (load(sides[0])?, load(sides[1])?);
    match in_step([&mut first, &mut second], &CancelToken::new(), see) {
        Err(Error::Stopped) => Ok(()),
        result => result,
    }
}

/// Returns the normalised mean squared error of `values` against `reference`: `sum((a - b)²) /
/// sum(b²)`. Infinite if one element of a pair is not finite and the other is.
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
