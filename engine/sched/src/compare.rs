//! Running one graph on two devices in step, and comparing node by node.

use crate::options::Options;
use crate::scheduler::Scheduler;
use crate::watch::{Watch, WatchedRun};
use samite_core::{
    CancelToken, Delegate, Delegating, Device, Error, Graph, Keep, Layout, Node, Op, Result,
    StoredTensor, TensorGroup, TensorId, TensorRef, Usage,
};
use samite_quant::RowReader;
use std::sync::Arc;

/// A graph whose stored tensors live in one device's memory.
#[derive(Debug)]
pub struct GraphCopy {
    /// The graph; tensors have the same numbers as in the original.
    pub graph: Graph,
    /// The memory of the copied tensors.
    pub stored: TensorGroup,
}

/// Copies `graph` to `device`: same tensors, with everything stored copied into the device's memory. What appears as several leaves stays one
/// memory.
///
/// # Errors
/// If the device has not enough memory, or a copy fails; [`Error::InvalidArgument`] if stored tensors share a part of their memory only.
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

/// The number of the memory that `stored` lies in among `known`, to which it is added if it is new.
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

/// How much one result differs from another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Normalised mean squared error: `Σ(a - b)² / Σb²`. Infinite where one is not finite and the other is not the same.
    pub nmse: f64,
    /// The largest distance of two elements.
    pub largest: f64,
    /// Where that is, innermost extent first.
    pub at: [usize; 4],
    /// The two elements there.
    pub values: [f64; 2],
    /// Whether all elements of both are NaN: that is no difference, and no sign that the devices do the same.
    pub all_nan: bool,
    /// Mean of the squares of `b`.
    power: f64,
}

impl Difference {
    /// How many times further than the average one element may be off.
    const WORST: f64 = 10.0;

    /// Whether that is more than rounding: the error is beyond `limit`, or a single element is so far off that it would be if a hundredth
    /// of all were. An error in the last element of each row would pass otherwise where rows are long.
    pub fn exceeds(&self, limit: f64) -> bool {
        let worst = self.largest * self.largest;
        self.nmse > limit || worst > Self::WORST * Self::WORST * limit * self.power
    }
}

/// Compares the elements of two tensors of equal shape, out of the bytes that they span.
///
/// # Errors
/// [`Error::Shape`] if their shapes differ; [`Error::InvalidArgument`] for a type that cannot be decoded.
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
            // Also where the power is 0 or infinite, too.
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
    /// How many nodes were compared before.
    pub number: usize,
    /// The node in both graphs.
    pub nodes: [Node<'a>; 2],
    /// The devices that computed it.
    pub devices: [&'a Arc<dyn Device>; 2],
    /// How much the first result differs from the second.
    pub difference: Difference,
}

/// Runs the loaded graphs of two schedulers in step and calls `see` with every computed node. They are the same graph, with stored tensors of their
/// own, and devices that [keep its order](in_order). One result of each is in memory at a time.
///
/// The first goes on with the second's results: so each node is compared on the same operands, and the error of one does not show in all
/// that follow.
///
/// # Errors
/// [`Error::Stopped`] if `see` says stop; [`Error::InvalidArgument`] if the graphs are not the same; as [`Scheduler::run`].
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
        // Both end in order. Why is known.
        let _ = second.fail(error.clone());
        return first.fail(error);
    }
}

/// A run that shows every computed node.
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

/// A device that runs nodes in the order of their graph, whatever it wishes, so that it keeps step with others.
pub fn in_order(device: &Arc<dyn Device>) -> Arc<dyn Device> {
    struct InOrder(Arc<dyn Device>);

    impl Delegate for InOrder {
        fn inner(&self) -> &Arc<dyn Device> {
            &self.0
        }

        fn optimize(&self, _: &Graph, _: &mut [TensorId]) -> Vec<Keep> {
            Vec::new()
        }
    }

    Delegating::device(InOrder(Arc::clone(device)))
}

/// Copies `graph` to two devices, writes `inputs`, and runs both copies [in step](in_step). Behind each device may be others for what it cannot
/// do.
///
/// # Errors
/// If a graph cannot be placed; otherwise as [`in_step`], but a stop by `see` is none.
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
