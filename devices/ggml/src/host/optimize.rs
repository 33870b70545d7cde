//! A plugin's preferences for node order and memory.
//!
//! A plugin with `graph_optimize` sees each part of a graph that it will run before memory is
//! planned: tensors have no addresses yet, except those that exist before the graph. It may reorder
//! the nodes, and ask to keep memory of tensors until a node is computed, because it will fuse
//! several nodes.

use super::buffer::GgmlBuffer;
use super::device::GgmlDevice;
use super::library::Plugin;
use crate::abi::{self, GraphOptimize, GraphOptimizeParams, Tensor};
use crate::convert::UnsupportedConversion;
use crate::convert::export::{Exported, TensorLocation, with_views};
use samite_core::reorder::{check_order, memories};
use samite_core::{Buffer, Graph, KeepAlive, TensorId, Usage};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// A stream of the plugin that is only queried and computes nothing. Plugins may record data about
/// the graph's structures there, and these structures are gone before the graph runs.
pub struct Optimizer {
    plugin: Arc<Plugin>,
    /// Locked while one thread queries.
    stream: Mutex<OwnedBackend>,
    function: GraphOptimize,
}

/// A backend of ggml's that this value owns.
struct OwnedBackend {
    raw: NonNull<abi::Backend>,
}

// SAFETY: a backend may be used from any thread, by one at a time.
unsafe impl Send for OwnedBackend {}

impl Drop for OwnedBackend {
    fn drop(&mut self) {
        // SAFETY: this value owns the backend, and it is not used again.
        unsafe {
            if let Some(free) = (*self.raw.as_ptr()).iface.free {
                free(self.raw.as_ptr());
            }
        }
    }
}

/// Tensors that the plugin wants to keep, and the tensor until which to keep each.
type LifetimeRequests = Vec<(*mut Tensor, *mut Tensor)>;

unsafe extern "C" fn add_alloc_dep(wishes: *mut c_void, tensor: *mut Tensor, until: *mut Tensor) {
    // SAFETY: `ask` passes a pointer that lives as long as the call.
    unsafe { &mut *wishes.cast::<LifetimeRequests>() }.push((tensor, until));
}

/// Returns the location of a tensor before memory is planned.
fn place(plugin: &Arc<Plugin>, graph: &Graph, id: TensorId) -> TensorLocation {
    let nowhere = TensorLocation::At(null_mut(), null_mut());
    let Some(stored) = &graph.tensor(id).stored else {
        return nowhere;
    };
    let place = stored.tensor();
    let own = place.buffer.as_any().downcast_ref::<GgmlBuffer>();
    match own.filter(|buffer| buffer.is_of(plugin)) {
        Some(buffer) if buffer.usage() == Usage::Compute => {
            TensorLocation::At(buffer.raw(), buffer.address(place.slot.offset))
        }
        Some(buffer) => buffer
            .tensor(place.slot)
            .map_or(nowhere, TensorLocation::Tensor),
        None => nowhere,
    }
}

impl Optimizer {
    /// Opens a stream of the device, if its streams optimize graphs.
    pub fn open(device: &GgmlDevice) -> Option<Self> {
        let raw = device.open_backend()?;
        let stream = OwnedBackend { raw };
        // SAFETY: the backend is new.
        let function = unsafe { (*raw.as_ptr()).iface }.graph_optimize?;
        Some(Optimizer {
            plugin: Arc::clone(&device.core().plugin),
            stream: Mutex::new(stream),
            function,
        })
    }

    /// Asks the plugin about `nodes`, reorders them as it requests, and returns the tensors that it
    /// wants to keep. `device` is the name of the device. An order that changes the meaning is
    /// ignored and logged.
    pub fn optimize(&self, device: &str, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        // Plugins may not support empty results.
        let is_empty = |id: &TensorId| graph.tensor(*id).layout.is_empty();
        if nodes.len() < 2 || nodes.iter().any(is_empty) {
            return Vec::new();
        }
        let mut sequence = with_views(graph, nodes);
        let exported =
            Exported::new::<UnsupportedConversion>(self.plugin.version, graph, &sequence, |id| {
                Ok(place(&self.plugin, graph, id))
            });
        let Ok(mut exported) = exported else {
            return Vec::new(); // the device does not support such nodes
        };
        exported.count_uses(graph);
        let names = exported.names();
        let wishes = self.ask(&mut exported);

        let wanted = wishes.as_ref().map_err(|reason| (*reason).to_owned());
        let wanted = wanted.and_then(|_| wanted_order(&exported, &names, &sequence));
        match wanted.and_then(|wanted| reorder(graph, nodes, &wanted).map(|()| wanted)) {
            Ok(wanted) => sequence = wanted,
            Err(reason) => {
                tracing::warn!(target: "ggml", device, reason,
                    "the plugin's order of nodes is not used");
            }
        }
        let kept = keep(graph, &sequence, &names, &wishes.unwrap_or_default());
        tracing::debug!(target: "ggml", device, nodes = nodes.len(), kept = kept.len(),
            "graph_optimize");
        kept
    }

    /// Calls the plugin.
    fn ask(&self, exported: &mut Exported) -> Result<LifetimeRequests, &'static str> {
        let mut wishes = LifetimeRequests::new();
        let mut params = GraphOptimizeParams {
            add_alloc_dep: Some(add_alloc_dep),
            user_data: (&raw mut wishes).cast(),
        };
        let mut graph = exported.graph();
        let (count, array) = (graph.n_nodes, graph.nodes);
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the function belongs to this backend; the graph, its arrays and the parameters
        // are valid during the call.
        unsafe { (self.function)(stream.raw.as_ptr(), &raw mut graph, &raw mut params) };
        if graph.n_nodes == count && graph.nodes == array {
            Ok(wishes)
        } else {
            Err("it changed the number of nodes")
        }
    }
}

/// Returns the order that the plugin left in the graph, including views.
fn wanted_order(
    exported: &Exported,
    names: &HashMap<*mut Tensor, TensorId>,
    before: &[TensorId],
) -> Result<Vec<TensorId>, String> {
    let nodes = exported.nodes().iter();
    let wanted: Option<Vec<_>> = nodes.map(|node| names.get(node).copied()).collect();
    let wanted = wanted.ok_or("it put in nodes of its own")?;
    let sorted = |ids: &[TensorId]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    if sorted(&wanted) == sorted(before) {
        Ok(wanted)
    } else {
        Err("it left nodes out".into())
    }
}

/// Orders `nodes` like `wanted`, if that does not change the meaning.
fn reorder(graph: &Graph, nodes: &mut [TensorId], wanted: &[TensorId]) -> Result<(), String> {
    let computed = wanted.iter().copied();
    let computed: Vec<_> = computed
        .filter(|&id| graph.tensor(id).is_computed())
        .collect();
    if computed != nodes {
        check_order(graph, &memories(graph), nodes, &computed)
            .map_err(|error| error.to_string())?;
        nodes.copy_from_slice(&computed);
    }
    Ok(())
}

/// Converts the plugin's requests. A tensor to keep until an unknown one is kept until the end of
/// `sequence`.
fn keep(
    graph: &Graph,
    sequence: &[TensorId],
    names: &HashMap<*mut Tensor, TensorId>,
    wishes: &LifetimeRequests,
) -> Vec<KeepAlive> {
    let position: HashMap<TensorId, usize> = sequence
        .iter()
        .enumerate()
        .map(|(i, &id)| (id, i))
        .collect();
    // The longest lifetime counts.
    let mut ends: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (tensor, until) in wishes {
        let Some(&tensor) = names.get(tensor) else {
            continue;
        };
        let memory = graph.memory_of(tensor);
        if graph.tensor(memory).stored.is_some() {
            continue; // it is kept anyway
        }
        let until = names.get(until).and_then(|id| position.get(id));
        let until = until.copied().unwrap_or(sequence.len());
        let end = ends.entry(memory).or_default();
        *end = until.max(*end);
    }
    let is_computed = |id: &&TensorId| graph.tensor(**id).is_computed();
    let last = sequence.iter().rfind(is_computed);
    let kept = ends.into_iter().filter_map(|(tensor, end)| {
        let rest = sequence.get(end..).unwrap_or_default();
        // A view is available when the next node is.
        let &until = rest.iter().find(is_computed).or(last)?;
        Some(KeepAlive { tensor, until })
    });
    kept.collect()
}
