//! Converts a part of a samite graph to ggml's tensors.
//!
//! Tensors that exist before the graph (weights, caches) keep the structure with which they were
//! initialised, because backends attach their own data to it. All others are created here, at
//! stable addresses.

use super::UnsupportedConversion;
use crate::abi::{Buffer, CGraph, HashSet, Tensor, Version, flag};
use samite_core::{Graph, Layout, Node, Op, TensorId};
pub use samite_wire::export::with_views;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Location of a tensor of the graph in ggml's terms.
#[derive(Clone, Copy)]
pub enum TensorLocation {
    /// An initialised tensor.
    Tensor(*mut Tensor),
    /// An address in a buffer.
    At(*mut Buffer, *mut u8),
}

/// A graph with everything that it points to.
pub struct Exported {
    /// The structures. They never move, because they point to each other.
    #[allow(clippy::vec_box)]
    tensors: Vec<Box<Tensor>>,
    /// Nodes, with a null after the last, because some plugins read one too many.
    nodes: Vec<*mut Tensor>,
    used: Vec<u32>,
    keys: Vec<*mut Tensor>,
    use_counts: Vec<i32>,
    known: HashMap<TensorId, *mut Tensor>,
    /// Identity of the graph for plugins that keep what they derive from it.
    uid: u64,
}

/// Returns a number that no other graph of this process has.
fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

// SAFETY: the pointers refer to memory of this value or to memory that its creator keeps alive.
// Only one thread at a time uses them.
unsafe impl Send for Exported {}

impl Exported {
    /// Exports `nodes` of `graph` for a plugin or host of this version. `place` returns the
    /// location of a tensor. To run the graph, its [uses](Exported::count_uses) must also be
    /// counted.
    ///
    /// # Errors
    /// Returns the first node that ggml does not support, or the error of `place`.
    pub fn new<E: From<UnsupportedConversion>>(
        version: Version,
        graph: &Graph,
        nodes: &[TensorId],
        mut place: impl FnMut(TensorId) -> Result<TensorLocation, E>,
    ) -> Result<Self, E> {
        let mut exported = Exported {
            tensors: Vec::new(),
            nodes: Vec::with_capacity(nodes.len() + 1),
            used: Vec::new(),
            keys: Vec::new(),
            use_counts: Vec::new(),
            known: HashMap::new(),
            uid: unique(),
        };
        let mut known = HashMap::new();
        for &id in nodes {
            for (_, source) in graph.tensor(id).operands() {
                exported.leaf(version, graph, source, &mut known, &mut place)?;
            }
            let node = graph.node(id);
            let base = match node.tensor().view {
                Some(view) => Some((
                    exported.leaf(version, graph, view.base, &mut known, &mut place)?,
                    view.offset,
                )),
                None => None,
            };
            let at = place(id)?;
            let mut tensor = describe(node, version)?;
            tensor.flags |= flag::COMPUTE;
            match at {
                TensorLocation::At(buffer, data) => {
                    tensor.buffer = buffer;
                    tensor.data = data.cast();
                }
                // SAFETY: `place` returns valid tensors.
                TensorLocation::Tensor(at) => unsafe {
                    tensor.buffer = (*at).buffer;
                    tensor.data = (*at).data;
                },
            }
            if let Some((base, offset)) = base {
                tensor.view_src = base;
                tensor.view_offs = offset;
            }
            for (index, source) in node.tensor().operands() {
                // The sources were exported above.
                tensor.src[index] = known.get(&source).copied().unwrap_or(null_mut());
            }
            let pointer = exported.keep(tensor);
            if matches!(node.op(), Op::Cast { .. }) {
                // SAFETY: `keep` returned a valid tensor of this graph.
                unsafe { (*pointer).src[1] = pointer };
            }
            known.insert(id, pointer);
            exported.nodes.push(pointer);
        }
        exported.nodes.push(null_mut());
        exported.known = known;
        Ok(exported)
    }

    fn keep(&mut self, tensor: Tensor) -> *mut Tensor {
        self.tensors.push(Box::new(tensor));
        // The box moves, but not the tensor in it.
        self.tensors
            .last_mut()
            .map_or(null_mut(), |tensor| &raw mut **tensor)
    }

    /// Adds a tensor whose value already exists.
    fn leaf<E: From<UnsupportedConversion>>(
        &mut self,
        version: Version,
        graph: &Graph,
        id: TensorId,
        known: &mut HashMap<TensorId, *mut Tensor>,
        place: &mut impl FnMut(TensorId) -> Result<TensorLocation, E>,
    ) -> Result<*mut Tensor, E> {
        if let Some(&pointer) = known.get(&id) {
            return Ok(pointer);
        }
        let pointer = match place(id)? {
            TensorLocation::Tensor(tensor) => tensor,
            TensorLocation::At(buffer, data) => {
                let mut tensor = bare(&graph.tensor(id).layout, version)?;
                tensor.set_name(&graph.tensor(id).name);
                tensor.buffer = buffer;
                tensor.data = data.cast();
                self.keep(tensor)
            }
        };
        known.insert(id, pointer);
        Ok(pointer)
    }

    /// Fills the table of use counts over the whole graph: a tensor that is used elsewhere must not
    /// be fused away.
    pub fn count_uses(&mut self, graph: &Graph) {
        let mut uses: HashMap<TensorId, i32> = HashMap::new();
        for tensor in graph.tensors() {
            for (_, source) in tensor.operands() {
                *uses.entry(source).or_default() += 1;
            }
        }
        let size = 2 * self.known.len() + 1;
        self.used = vec![0; size.div_ceil(32)];
        self.keys = vec![null_mut(); size];
        self.use_counts = vec![0; size];
        for (id, &tensor) in &self.known {
            let mut slot = (tensor as usize >> 4) % size;
            while !self.keys[slot].is_null() && self.keys[slot] != tensor {
                slot = (slot + 1) % size;
            }
            self.keys[slot] = tensor;
            self.used[slot / 32] |= 1 << (slot % 32);
            self.use_counts[slot] += uses.get(id).copied().unwrap_or(0);
        }
    }

    /// Returns the structures that were created for this graph, which their buffers must
    /// initialise.
    pub fn tensors(&mut self) -> impl Iterator<Item = *mut Tensor> + '_ {
        self.tensors.iter_mut().map(|tensor| &raw mut **tensor)
    }

    /// Returns the tensors of the nodes in order.
    pub fn nodes(&self) -> &[*mut Tensor] {
        self.nodes.split_last().map_or(&[], |(_, nodes)| nodes)
    }

    /// Returns the tensor of samite's graph for each structure.
    pub fn names(&self) -> HashMap<*mut Tensor, TensorId> {
        let known = self.known.iter();
        known.map(|(&id, &tensor)| (tensor, id)).collect()
    }

    /// Returns the graph for one call. It points to `self`, and is the same in every call.
    pub fn graph(&mut self) -> CGraph {
        let count = self.nodes().len();
        CGraph {
            use_counts: self.use_counts.as_mut_ptr(),
            visited: HashSet {
                size: self.keys.len(),
                used: self.used.as_mut_ptr(),
                keys: self.keys.as_mut_ptr(),
            },
            uid: self.uid,
            ..CGraph::new(self.nodes.as_mut_ptr(), count)
        }
    }
}

/// Returns a leaf with this layout, without memory.
///
/// # Errors
/// Returns an error if an extent does not fit into 63 bits, or if the version lacks the type.
pub fn bare(layout: &Layout, version: Version) -> Result<Tensor, UnsupportedConversion> {
    let leaf = samite_wire::export::bare(layout)?;
    Tensor::from_description(&leaf, version)
}

/// Returns a node without memory and sources.
fn describe(node: Node<'_>, version: Version) -> Result<Tensor, UnsupportedConversion> {
    let mut tensor = Tensor::from_description(&samite_wire::export::describe(node)?, version)?;
    tensor.set_name(&node.tensor().name);
    Ok(tensor)
}
