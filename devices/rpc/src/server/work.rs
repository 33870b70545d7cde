//! Graphs, bound to devices.

use super::places::{Buffers, ClientGraph, allocate};
use super::staged::Staged;
use samite_core::{
    CancelToken, Charge, DType, Device, Layout, Ledger, Prepared, Result as Outcome, RunControl,
    Slot, Stream, Support, TensorId, TensorInfo, TensorRef,
};
use samite_wire::UnsupportedConversion;
use samite_wire::import::{Imported, Importer};
use samite_wire::numbers::Release;
use samite_wire::rpc::graph::GraphMessage;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A device of the server and the queue of one client on it.
pub(super) struct Lane {
    pub device: Arc<dyn Device>,
    stream: Option<Box<dyn Stream>>,
}

impl Lane {
    pub fn new(device: &Arc<dyn Device>) -> Self {
        Lane {
            device: Arc::clone(device),
            stream: None,
        }
    }

    fn stream(&mut self) -> Outcome<&mut dyn Stream> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => Arc::clone(&self.device).open_stream()?,
        };
        Ok(&mut **self.stream.insert(stream))
    }
}

/// Consecutive nodes on one device.
struct PreparedSegment {
    /// Index of the fallback; `None` for the device itself.
    fallback: Option<usize>,
    prepared: Box<dyn Prepared>,
    /// Memory that a fallback cannot access.
    staged: Staged,
    /// Scratch memory. Prepared work does not keep it alive.
    _workspace: Option<TensorRef>,
}

/// A graph that can run repeatedly.
pub(super) struct SegmentedGraph {
    pieces: Vec<PreparedSegment>,
    /// Buffer for copies to and from fallbacks.
    copied: Vec<u8>,
    /// Numbers of the buffers that it uses.
    pub buffers: BTreeSet<u64>,
    /// Memory that it uses.
    _places: Vec<Option<TensorRef>>,
    _charges: Vec<Charge>,
}

/// Parses and validates a graph, and binds each node to the device, or to the first fallback that
/// supports it.
pub(super) fn prepare(
    graph: &GraphMessage,
    release: &'static Release,
    buffers: &Buffers,
    ledger: &Arc<Ledger>,
    lane: &mut Lane,
    fallbacks: &mut [Lane],
) -> Result<SegmentedGraph, UnsupportedConversion> {
    let (mut used, mut charges) = (BTreeSet::new(), Vec::new());
    let tensors = ClientGraph {
        graph,
        release,
        buffers,
        device: &*Arc::clone(&lane.device),
        ledger,
        used: &mut used,
        charges: &mut charges,
    };
    let imported = Importer::new(tensors).graph(graph.nodes.iter().copied())?;
    check_room(&imported)?;
    let parts = divide(&imported, &*lane.device, fallbacks)?;
    let Imported {
        graph,
        nodes: _,
        mut places,
    } = imported;
    let mut pieces = Vec::with_capacity(parts.len());
    for (fallback, nodes) in parts {
        let lane = chosen(fallback, lane, fallbacks);
        let (staged, mut moved) = match fallback {
            None => (Staged::default(), Vec::new()),
            Some(_) => Staged::new(&graph, &nodes, &places, &*lane.device, ledger, &mut charges)?,
        };
        let text = |error: samite_core::Error| UnsupportedConversion::from(error.to_string());
        let bytes = lane.device.workspace(&graph, &nodes).map_err(text)?;
        let workspace = match bytes {
            0 => None,
            _ => {
                let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).map_err(text)?;
                let buffer = allocate(&*lane.device, bytes, ledger, &mut charges)?;
                let slot = Slot { offset: 0, layout };
                Some(TensorRef { buffer, slot })
            }
        };
        exchange(&mut places, &mut moved);
        let work = samite_core::PlacedGraph {
            graph: &graph,
            nodes: &nodes,
            places: &places,
            workspace: workspace.as_ref(),
            compiled: None,
        };
        let prepared = lane.stream().and_then(|stream| stream.prepare(work));
        exchange(&mut places, &mut moved);
        pieces.push(PreparedSegment {
            fallback,
            prepared: prepared.map_err(text)?,
            staged,
            _workspace: workspace,
        });
    }
    Ok(SegmentedGraph {
        pieces,
        copied: Vec::new(),
        buffers: used,
        _places: places,
        _charges: charges,
    })
}

/// Swaps the locations of some tensors.
fn exchange(places: &mut [Option<TensorRef>], others: &mut [(TensorId, TensorRef)]) {
    for (id, other) in others {
        if let Some(place) = &mut places[id.index()] {
            std::mem::swap(place, other);
        }
    }
}

/// Checks that every result has the memory that its operation needs: some devices write past the
/// last element.
fn check_room(imported: &Imported) -> Result<(), UnsupportedConversion> {
    for &id in &imported.nodes {
        let node = imported.graph.node(id);
        let (Some(place), None) = (&imported.places[id.index()], node.tensor().view) else {
            continue;
        };
        let buffer = &place.buffer;
        let info = TensorInfo::from_node(node, buffer.usage());
        let wanted = buffer.buffer_type().alloc_size(&info);
        let wanted = wanted.map_err(|error| error.to_string())?;
        let end = place.slot.offset.checked_add(wanted);
        if wanted > 0 && end.is_none_or(|end| end > buffer.size()) {
            return Err(format!(
                "'{}' has not the {wanted} bytes that its operation wants in its buffer of {} bytes",
                node.tensor().name,
                buffer.size()
            )
            .into());
        }
    }
    Ok(())
}

/// Returns the queue of the device, or of a fallback.
fn chosen<'l>(
    fallback: Option<usize>,
    lane: &'l mut Lane,
    fallbacks: &'l mut [Lane],
) -> &'l mut Lane {
    match fallback.and_then(|number| fallbacks.get_mut(number)) {
        Some(fallback) => fallback,
        None => lane,
    }
}

/// Consecutive nodes, and the fallback that computes them.
type GraphSegment = (Option<usize>, Vec<TensorId>);

/// Assigns nodes to the device or a fallback.
fn divide(
    imported: &Imported,
    device: &dyn Device,
    fallbacks: &[Lane],
) -> Result<Vec<GraphSegment>, UnsupportedConversion> {
    let mut parts: Vec<GraphSegment> = Vec::new();
    for &id in &imported.nodes {
        let node = imported.graph.node(id);
        let fallback = match device.supports(node) {
            Support::Yes => None,
            Support::No(reason) => {
                let mut lanes = fallbacks.iter();
                let found = lanes.position(|lane| lane.device.supports(node).is_yes());
                let nobody = || {
                    UnsupportedConversion::from(format!(
                        "{} cannot compute {} '{}': {reason}",
                        device.name(),
                        node.op(),
                        node.tensor().name
                    ))
                };
                Some(found.ok_or_else(nobody)?)
            }
        };
        match parts.last_mut() {
            Some((on, nodes)) if *on == fallback => nodes.push(id),
            _ => parts.push((fallback, vec![id])),
        }
    }
    Ok(parts)
}

/// Computes the graph and waits for the end.
pub(super) fn run(
    work: &mut SegmentedGraph,
    lane: &mut Lane,
    fallbacks: &mut [Lane],
    cancel: &CancelToken,
) -> Outcome<()> {
    for piece in &mut work.pieces {
        cancel.check()?;
        let lane = chosen(piece.fallback, lane, fallbacks);
        let stream = lane.stream()?;
        let control = RunControl {
            cancel,
            observer: None,
        };
        piece.staged.bring(&mut work.copied)?;
        // Synchronize even after a failure, so that no work remains in flight.
        let result = stream.run(&mut *piece.prepared, control);
        stream.synchronize().and(result)?;
        piece.staged.bring_back(&mut work.copied)?;
    }
    Ok(())
}
