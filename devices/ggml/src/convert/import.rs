//! ggml's structures as a samite graph: where the shared [importer](samite_wire::import) finds tensors by their addresses.

use super::Reason;
use crate::abi::{CGraph, MAX_SRC, Tensor};
use samite_core::{Layout, TensorId, TensorRef};
pub use samite_wire::import::{Imported, supported, temporary};
use samite_wire::{Description, import};

/// Where ggml's tensors lie.
pub trait Memory {
    /// The place of `tensor`.
    ///
    /// # Errors
    /// If it has none, or if it is not inside of its buffer.
    fn place(&mut self, tensor: &Tensor, layout: Layout) -> Result<TensorRef, Reason>;

    /// New memory for an intermediate result.
    ///
    /// # Errors
    /// If there is none.
    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, Reason>;
}

/// The layout of a tensor.
///
/// # Errors
/// If its type is not known or its extents and strides make no sense.
pub fn layout(tensor: &Tensor) -> Result<Layout, Reason> {
    import::layout(&tensor.description())
}

/// Makes a graph of tensors.
pub struct Importer<M: Memory>(import::Importer<Addresses<M>>);

/// Tensors by their addresses, which are those that the caller of an [`Importer`] gave and what these point to.
struct Addresses<M> {
    memory: M,
    /// Where uses are counted, or null.
    graph: *const CGraph,
}

impl<M> Addresses<M> {
    fn tensor(&self, address: *const Tensor) -> &Tensor {
        // SAFETY: the callers of `Importer::node` and `Importer::graph` promised that what they give is valid, and everything that it points to.
        // Both keep that for as long as they run, and nothing is asked later.
        unsafe { &*address }
    }
}

impl<M: Memory> import::Tensors for Addresses<M> {
    type Key = *const Tensor;

    fn describe(&self, key: *const Tensor) -> Description {
        self.tensor(key).description()
    }

    fn sources(&self, key: *const Tensor) -> [Option<*const Tensor>; MAX_SRC] {
        let sources = self.tensor(key).src;
        sources.map(|source| (!source.is_null()).then_some(source.cast_const()))
    }

    fn name(&self, key: *const Tensor) -> String {
        self.tensor(key).name()
    }

    fn is_placed(&self, key: *const Tensor) -> bool {
        !self.tensor(key).data.is_null()
    }

    fn uses(&self, key: *const Tensor) -> Option<usize> {
        // SAFETY: `graph` is null or, during `Importer::graph`, a valid graph; of `key`, only the address is compared.
        unsafe { self.graph.as_ref()?.uses(key) }
    }

    fn place(&mut self, key: *const Tensor, layout: Layout) -> Result<TensorRef, Reason> {
        // SAFETY: as in `tensor`.
        let tensor = unsafe { &*key };
        self.memory.place(tensor, layout)
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, Reason> {
        self.memory.temporary(layout)
    }
}

impl<M: Memory> Importer<M> {
    /// An importer of tensors that lie in `memory`.
    pub fn new(memory: M) -> Self {
        Importer(import::Importer::new(Addresses {
            memory,
            graph: std::ptr::null(),
        }))
    }

    /// Imports one node. Sources that are not known yet count as memory with a value.
    ///
    /// # Errors
    /// The reason, if samite has no such operation or if the operands do not fit.
    ///
    /// # Safety
    /// `tensor` and everything that it points to must be valid.
    pub unsafe fn node(&mut self, tensor: *const Tensor) -> Result<TensorId, Reason> {
        self.0.node(tensor)
    }

    /// Imports all nodes of `graph` that are to be computed.
    ///
    /// # Errors
    /// Number and name of a node, and the reason.
    ///
    /// # Safety
    /// The graph must be valid.
    pub unsafe fn graph(mut self, graph: &CGraph) -> Result<Imported, Reason> {
        self.0.tensors_mut().graph = graph;
        // SAFETY: the graph is valid, so its list has as many nodes as it says.
        let nodes = unsafe { graph.nodes() };
        self.0.graph(nodes.iter().map(|node| node.cast_const()))
    }

    /// The graph so far.
    pub fn finish(self) -> Imported {
        self.0.finish()
    }
}
