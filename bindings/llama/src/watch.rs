//! Evaluation callbacks (`cb_eval`): each node is passed to the caller's function as a tensor of
//! its ggml, before and after it is computed.
//!
//! The callback is queried for all nodes before a graph runs, matrix products first. Products are
//! passed with the activations that the weights are multiplied with, because programs that collect
//! activations need them. Other operands only have names, types and shapes.

use crate::devices::function;
use crate::layout::{EvalCallback, GgmlTensor};
use bytemuck::{Pod, Zeroable};
use samite_core::{Graph, Layout, Node, TensorId};
use samite_llm::{WatchedResult, Watcher};
use samite_sched::Watch;
use samite_wire::Description;
use samite_wire::export::{bare, describe};
use samite_wire::numbers::op::{MUL_MAT, MUL_MAT_ID};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Block with ggml's memory alignment.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct AlignedBlock([u8; 64]);

/// Value of a tensor in host memory.
struct HostValue {
    blocks: Vec<AlignedBlock>,
    layout: Layout,
}

impl HostValue {
    fn from_seen(seen: &WatchedResult<'_>) -> Result<Self, samite_core::Error> {
        let layout = *seen.value.layout();
        let bytes = layout.bytes();
        let mut blocks = Vec::new();
        let count = bytes.div_ceil(size_of::<AlignedBlock>()).max(1);
        let refused = |_| samite_core::Error::OutOfMemory {
            device: "host".into(),
            what: format!("the value of '{}'", seen.node.tensor().name).into(),
            asked: bytes,
            free: None,
        };
        blocks.try_reserve_exact(count).map_err(refused)?;
        blocks.resize(count, AlignedBlock::zeroed());
        let all: &mut [u8] = bytemuck::cast_slice_mut(&mut blocks);
        seen.value.read(0, &mut all[..bytes])?;
        Ok(HostValue { blocks, layout })
    }

    fn address(&mut self) -> *mut c_void {
        self.blocks.as_mut_ptr().cast()
    }
}

/// A host buffer of the caller's ggml, if that is loaded, because ggml queries a tensor's buffer
/// for its location.
struct CallerBuffer(*mut c_void);

impl CallerBuffer {
    fn new(value: &mut HostValue) -> Self {
        let Some(make) = function(c"ggml_backend_cpu_buffer_from_ptr") else {
            return CallerBuffer(null_mut());
        };
        let (address, bytes) = (value.address(), size_of_val(&*value.blocks));
        // SAFETY: the function has this type, and the memory has its required alignment and
        // outlives the buffer.
        CallerBuffer(unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
            >(make)(address, bytes)
        })
    }
}

impl Drop for CallerBuffer {
    fn drop(&mut self) {
        if let Some(free) = function(c"ggml_backend_buffer_free").filter(|_| !self.0.is_null()) {
            // SAFETY: the function has this type, and the buffer belongs to the same library.
            unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(free)(self.0);
            }
        }
    }
}

fn description(node: Node<'_>) -> Description {
    // A node without a ggml operation or type is shown as a leaf.
    describe(node)
        .or_else(|_| bare(node.layout()))
        .unwrap_or_default()
}

/// Converts a node to a tensor of the caller's ggml.
fn tensor(node: Node<'_>) -> GgmlTensor {
    let about = description(node);
    let mut name = [0; 64];
    for (to, from) in name[..63].iter_mut().zip(node.tensor().name.bytes()) {
        *to = from as _;
    }
    GgmlTensor {
        dtype: about.dtype as i32,
        ne: about.ne,
        nb: about.nb,
        op: about.op as i32,
        op_params: about.op_params,
        flags: about.flags,
        name,
        ..GgmlTensor::EMPTY
    }
}

fn is_product(node: Node<'_>) -> bool {
    matches!(description(node).op, MUL_MAT | MUL_MAT_ID)
}

/// Returns the operands shown with a product: the activations, and the selected experts.
fn activations(node: Node<'_>) -> impl Iterator<Item = Node<'_>> {
    [1, 2]
        .into_iter()
        .filter_map(move |index| node.source(index))
}

/// Nodes of the current graph that the caller wants to see.
#[derive(Default)]
struct WatchedNodes {
    /// The caller's answers for products.
    products: BTreeMap<TensorId, bool>,
    /// Operands shown with products.
    operands: BTreeSet<TensorId>,
    /// Nodes that the caller wants to see.
    wanted: BTreeSet<TensorId>,
    values: BTreeMap<TensorId, HostValue>,
}

/// The caller's callback.
struct CallerCallback {
    callback: unsafe extern "C" fn(*mut c_void, bool, *mut c_void) -> bool,
    data: usize,
    asked: Mutex<WatchedNodes>,
}

impl CallerCallback {
    fn lock(&self) -> MutexGuard<'_, WatchedNodes> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a node, with the available values, to the caller. Returns the callback's answer.
    fn show(
        &self,
        node: Node<'_>,
        is_query: bool,
        values: &mut BTreeMap<TensorId, HostValue>,
    ) -> bool {
        let mut buffers = Vec::new();
        let mut with_value = |node: Node<'_>| {
            let mut shown = tensor(node);
            if let Some(value) = values.get_mut(&node.id()).filter(|_| !is_query) {
                let buffer = CallerBuffer::new(value);
                shown.nb = value.layout.strides();
                (shown.data, shown.buffer) = (value.address(), buffer.0);
                buffers.push(buffer);
            }
            shown
        };
        let mut top = with_value(node);
        let mut sources: Vec<Option<GgmlTensor>> = (0..top.src.len())
            .map(|index| node.source(index).map(&mut with_value))
            .collect();
        for (pointer, source) in top.src.iter_mut().zip(&mut sources) {
            *pointer = source.as_mut().map_or(null_mut(), |source| source);
        }
        if top.view_offs == 0 && description(node).is_view {
            top.view_src = top.src[0];
        }
        let data = std::ptr::with_exposed_provenance_mut(self.data);
        // SAFETY: the caller guarantees a function that can be called like this while its context
        // decodes. The tensor and everything it points to outlive the call.
        unsafe { (self.callback)((&raw mut top).cast(), is_query, data) }
    }

    /// Queries the callback for the products of a graph.
    fn begin(&self, graph: &Graph) {
        let mut asked = self.lock();
        *asked = WatchedNodes::default();
        for id in graph.ids() {
            let node = graph.node(id);
            if graph.tensor(id).is_computed() && is_product(node) {
                let is_selected = self.show(node, true, &mut BTreeMap::new());
                asked.products.insert(id, is_selected);
                if is_selected {
                    asked.operands.extend(activations(node).map(Node::id));
                }
            }
        }
    }

    fn wants(&self, node: Node<'_>) -> bool {
        let mut asked = self.lock();
        let id = node.id();
        let is_selected = match asked.products.get(&id) {
            Some(&is_selected) => is_selected,
            None => self.show(node, true, &mut BTreeMap::new()),
        };
        if is_selected {
            asked.wanted.insert(id);
        }
        is_selected || asked.operands.contains(&id)
    }

    fn see(&self, seen: &WatchedResult<'_>) -> Result<Watch, samite_core::Error> {
        let mut asked = self.lock();
        let id = seen.node.id();
        asked.values.insert(id, HostValue::from_seen(seen)?);
        let goes_on = if asked.wanted.contains(&id) {
            self.show(seen.node, false, &mut asked.values)
        } else {
            true
        };
        if !asked.operands.contains(&id) {
            asked.values.remove(&id);
        }
        Ok(if goes_on {
            Watch::Continue
        } else {
            Watch::Stop
        })
    }
}

/// Returns a watcher that shows nodes to a caller's function, if there is one.
pub fn watcher(callback: EvalCallback, data: *mut c_void) -> Option<Watcher> {
    let caller = Arc::new(CallerCallback {
        callback: callback?,
        data: data.expose_provenance(),
        asked: Mutex::default(),
    });
    let [beginning, asking] = [Arc::clone(&caller), Arc::clone(&caller)];
    let wants = move |node: Node<'_>| asking.wants(node);
    let watcher = Watcher::new(wants, move |seen| caller.see(seen));
    Some(watcher.beginning_with(move |graph| beginning.begin(graph)))
}
