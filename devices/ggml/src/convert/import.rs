//! Converts ggml's structures to a samite graph. The shared [importer](samite_wire::import) finds
//! tensors by their addresses.

use super::UnsupportedConversion;
use crate::abi::{CGraph, MAX_SRC, Tensor, Version};
use samite_core::{Layout, TensorId, TensorRef};
pub use samite_wire::import::{Imported, supported, temporary};
use samite_wire::{Description, import};

/// Locations of ggml's tensors.
pub trait TensorMemory {
    /// Returns the location of `tensor`.
    ///
    /// # Errors
    /// Returns an error if it has none, or if it is outside its buffer.
    fn place(
        &mut self,
        tensor: &Tensor,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion>;

    /// Allocates memory for an intermediate result.
    ///
    /// # Errors
    /// Returns an error if no memory is available.
    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion>;
}

/// Returns the layout of a tensor.
///
/// # Errors
/// Returns an error if its type is unknown, or if its extents and strides are invalid.
pub fn layout(tensor: &Tensor) -> Result<Layout, UnsupportedConversion> {
    // The numbers of operations do not matter, and those of types are the same in all versions.
    import::layout(&tensor.description(Version::V28))
}

/// Converts tensors to a graph.
pub struct Importer<M: TensorMemory>(import::Importer<Addresses<M>>);

/// Tensors by address: those that the caller of an [`Importer`] passed, and those that they point
/// to.
struct Addresses<M> {
    memory: M,
    version: Version,
    /// Graph with use counts, or null.
    graph: *const CGraph,
}

impl<M> Addresses<M> {
    fn tensor(&self, address: *const Tensor) -> &Tensor {
        // SAFETY: the callers of `Importer::node` and `Importer::graph` guarantee that their
        // arguments and everything that these point to are valid. The addresses are used only
        // during these calls.
        unsafe { &*address }
    }
}

impl<M: TensorMemory> import::Tensors for Addresses<M> {
    type Key = *const Tensor;

    fn describe(&self, key: *const Tensor) -> Description {
        self.tensor(key).description(self.version)
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
        // SAFETY: `graph` is null or, during `Importer::graph`, a valid graph. Of `key`, only the
        // address is compared.
        unsafe { self.graph.as_ref()?.uses(key) }
    }

    fn place(
        &mut self,
        key: *const Tensor,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion> {
        // SAFETY: as in `tensor`.
        let tensor = unsafe { &*key };
        self.memory.place(tensor, layout)
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        self.memory.temporary(layout)
    }
}

impl<M: TensorMemory> Importer<M> {
    /// Creates an importer of a host's tensors of `version`, which lie in `memory`.
    pub fn new(memory: M, version: Version) -> Self {
        Importer(import::Importer::new(Addresses {
            memory,
            version,
            graph: std::ptr::null(),
        }))
    }

    /// Imports one node. Unknown sources count as memory with a value.
    ///
    /// # Errors
    /// Returns the reason if samite does not have the operation or the operands do not match.
    ///
    /// # Safety
    /// `tensor` and everything that it points to must be valid.
    pub unsafe fn node(
        &mut self,
        tensor: *const Tensor,
    ) -> Result<TensorId, UnsupportedConversion> {
        self.0.node(tensor)
    }

    /// Imports all nodes of `graph` that must be computed.
    ///
    /// # Errors
    /// Returns the number and name of a node, and the reason.
    ///
    /// # Safety
    /// The graph must be valid.
    pub unsafe fn graph(mut self, graph: &CGraph) -> Result<Imported, UnsupportedConversion> {
        self.0.tensors_mut().graph = graph;
        // SAFETY: the graph is valid, so its list has this many nodes.
        let nodes = unsafe { graph.nodes() };
        self.0.graph(nodes.iter().map(|node| node.cast_const()))
    }

    /// Returns the graph so far.
    pub fn finish(self) -> Imported {
        self.0.finish()
    }
}
