//! ggml's tensors as a samite graph.
//!
//! Every node passes [`infer`](samite_core::infer), so whatever a host or a file says about shapes is checked before a kernel
//! relies on it. Where ggml's tensors say more than operations do, the graph gets more nodes: `CONT` with another shape is a
//! reshape behind it, an operation in place on a tensor with gaps is computed elsewhere and copied.

use super::Reason;
use super::params::{decode, dtype, shape};
use crate::abi::{CGraph, MAX_SRC, Tensor, flag, op};
use samite_core::{
    DIMS, Graph, Layout, Op, Slot, StoredTensor, Support, TensorId, TensorRef, Usage,
};
use std::collections::HashMap;

/// Views of views are followed so far; beyond that, a view counts as memory of its own.
const DEEPEST_VIEW: usize = 32;

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
    Layout::strided(dtype(tensor)?, shape(tensor)?, tensor.nb)
        .map_err(|error| error.to_string().into())
}

/// Equal but for strides that are never used.
fn same_places(a: &Layout, b: &Layout) -> bool {
    let unused = |dim: usize| match dim {
        0 => a.shape()[0] <= a.dtype().block_len(),
        _ => a.shape()[dim] <= 1,
    };
    a.dtype() == b.dtype()
        && a.shape() == b.shape()
        && (a.is_empty()
            || (0..DIMS).all(|dim| unused(dim) || a.strides()[dim] == b.strides()[dim]))
}

/// Makes a graph of tensors.
pub struct Importer<M> {
    memory: M,
    graph: Graph,
    known: HashMap<*const Tensor, TensorId>,
    places: Vec<Option<TensorRef>>,
    nodes: Vec<TensorId>,
}

/// A graph with a place for every tensor.
pub struct Imported {
    /// The tensors.
    pub graph: Graph,
    /// What is to be run, in order.
    pub nodes: Vec<TensorId>,
    /// By position in the graph.
    pub places: Vec<Option<TensorRef>>,
}

impl<M: Memory> Importer<M> {
    /// An importer of tensors that lie in `memory`.
    pub fn new(memory: M) -> Self {
        Importer {
            memory,
            graph: Graph::new(),
            known: HashMap::new(),
            places: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// Imports one node. Sources that are not known yet count as memory with a value.
    ///
    /// # Errors
    /// The reason, if samite has no such operation or if the operands do not fit.
    ///
    /// # Safety
    /// `tensor` and everything that it points to must be valid.
    pub unsafe fn node(&mut self, tensor: *const Tensor) -> Result<TensorId, Reason> {
        // SAFETY: `tensor` is valid, and so are its sources where they are not null; nobody changes it during the call.
        let (t, sources) = unsafe { (&*tensor, sources(&*tensor)) };
        let operation = decode(t)?;
        if operation.is_view() {
            // SAFETY: `operand` asks the same: `tensor` and everything that it points to is valid.
            return unsafe { self.operand(tensor, 0) };
        }
        let wanted = match operation {
            Op::Cast { .. } => 1, // source 1 is the result itself
            _ => sources
                .iter()
                .rposition(|source| !source.is_null())
                .map_or(0, |last| last + 1),
        };
        let mut ids = Vec::with_capacity(wanted);
        for &source in &sources[..wanted] {
            ids.push(match source.is_null() {
                true => None,
                // SAFETY: sources of a valid tensor are valid where they are not null, as this one is not.
                false => Some(unsafe { self.operand(source, 0) }?),
            });
        }
        let result = layout(t)?;
        self.clear_hazards(&operation, &mut ids, t, result)?;

        let id = self.push(operation, &ids)?;
        let computed = self.graph.tensor(id).layout;
        let id = if same_places(&computed, &result) {
            self.set_place(id, t, computed)?;
            id
        } else if computed.dtype() != result.dtype() || computed.elements() != result.elements() {
            return Err(format!("the result would be {computed}, but is {result}").into());
        } else if result.is_contiguous() && matches!(operation, Op::Cont | Op::Dup) {
            self.set_place(id, t, computed)?;
            let shape = result.shape();
            let reshaped = self.push(Op::Reshape { shape }, &[Some(id)])?;
            self.set_place(reshaped, t, result)?;
            reshaped
        } else if computed.shape() == result.shape() && operation.aliased_source().is_none() {
            let place = self.memory.temporary(computed)?;
            self.places[id.index()] = Some(place);
            let target = self.leaf(t)?;
            let copy = self.push(Op::Cpy, &[Some(id), Some(target)])?;
            self.set_place(copy, t, result)?;
            copy
        } else {
            return Err(format!("the result would be {computed}, but is {result}").into());
        };
        if t.flags & flag::OUTPUT != 0 || !t.view_src.is_null() {
            // Results in another tensor's memory are read through that, too.
            self.graph.set_output(id);
        }
        self.known.insert(tensor, id);
        Ok(id)
    }

    /// Imports all nodes of `graph` that are to be computed.
    ///
    /// # Errors
    /// Number and name of a node, and the reason.
    ///
    /// # Safety
    /// The graph must be valid.
    pub unsafe fn graph(mut self, graph: &CGraph) -> Result<Imported, Reason> {
        // SAFETY: the graph is valid, so its list has as many nodes as it says.
        let nodes = unsafe { graph.nodes() };
        for (number, &node) in nodes.iter().enumerate() {
            // SAFETY: nodes of a valid graph are valid tensors, which nobody changes during the call.
            let t = unsafe { &*node };
            if t.flags & flag::COMPUTE == 0 || op::is_view(t.op) || t.op == op::NONE {
                continue; // views are imported when something reads them
            }
            // SAFETY: nodes of a valid graph and everything that they point to are valid, as `node` asks.
            let id = unsafe { self.node(node) }.map_err(|reason| {
                Reason::from(format!("node {number} '{}': {reason}", t.name()))
            })?;
            self.graph.set_name(id, t.name());
        }
        // What is read outside of this part of the graph, too, is an output.
        let mut uses = vec![0; self.graph.len()];
        for tensor in self.graph.tensors() {
            for (_, source) in tensor.operands() {
                uses[source.index()] += 1;
            }
        }
        for (&tensor, &id) in &self.known {
            // SAFETY: the graph is valid, so its table of counts is; of `tensor`, only the address is compared.
            let outside = unsafe { graph.uses(tensor) }.is_none_or(|all| all != uses[id.index()]);
            if self.graph.tensor(id).is_computed() && (outside || uses[id.index()] == 0) {
                self.graph.set_output(id);
            }
        }
        Ok(self.finish())
    }

    /// The graph so far.
    pub fn finish(self) -> Imported {
        Imported {
            graph: self.graph,
            nodes: self.nodes,
            places: self.places,
        }
    }

    /// The id of something that is read.
    unsafe fn operand(&mut self, tensor: *const Tensor, depth: usize) -> Result<TensorId, Reason> {
        if let Some(&id) = self.known.get(&tensor) {
            return Ok(id);
        }
        // SAFETY: the caller of `node` promised that everything is valid.
        let t = unsafe { &*tensor };
        let mut id = None;
        if op::is_view(t.op) && !t.src[0].is_null() && depth < DEEPEST_VIEW {
            // SAFETY: sources of a valid tensor are null or valid, and this one is not null.
            let source = unsafe { self.operand(t.src[0], depth + 1) }?;
            id = self.view(t, source);
            if id.is_none() {
                // Nobody can see any more that this reads the source's memory.
                self.graph.set_output(self.graph.memory_of(source));
            }
        }
        let id = match id {
            Some(id) => id,
            None => self.leaf(t)?,
        };
        self.known.insert(tensor, id);
        Ok(id)
    }

    /// A view as an operation, if that describes the same place.
    fn view(&mut self, t: &Tensor, source: TensorId) -> Option<TensorId> {
        let operation = decode(t).ok()?;
        let layouts = [Some(&self.graph.tensor(source).layout)];
        let inferred = samite_core::infer(&operation, &layouts).ok()?;
        let of = self.places[source.index()].as_ref()?;
        let shift = match operation {
            Op::View { offset, .. } => offset,
            _ => 0,
        };
        let place = self.memory.place(t, inferred).ok()?;
        let here = same_places(&inferred, &layout(t).ok()?)
            && place.location().memory == of.location().memory
            && of.location().offset.checked_add(shift) == Some(place.location().offset);
        if !here {
            return None;
        }
        let id = self.push(operation, &[Some(source)]).ok()?;
        self.places[id.index()] = Some(place);
        Some(id)
    }

    /// Memory with a value.
    fn leaf(&mut self, t: &Tensor) -> Result<TensorId, Reason> {
        let TensorRef { buffer, slot } = self.memory.place(t, layout(t)?)?;
        let stored = StoredTensor::new(t.name(), buffer, slot.offset, slot.layout)
            .map_err(|error| Reason::from(error.to_string()))?;
        let id = self
            .graph
            .stored(&stored)
            .map_err(|error| Reason::from(error.to_string()))?;
        self.places.push(Some(stored.tensor().clone()));
        Ok(id)
    }

    fn push(&mut self, operation: Op, ids: &[Option<TensorId>]) -> Result<TensorId, Reason> {
        let id = self
            .graph
            .push(operation, ids)
            .map_err(|error| Reason::from(error.to_string()))?;
        self.places.push(None);
        if self.graph.tensor(id).is_computed() {
            self.nodes.push(id);
        }
        Ok(id)
    }

    fn set_place(&mut self, id: TensorId, t: &Tensor, layout: Layout) -> Result<(), Reason> {
        self.places[id.index()] = Some(self.memory.place(t, layout)?);
        Ok(())
    }

    /// ggml lets a result take the memory of any operand of the same layout that is not used again. Where samite's operation
    /// does not allow that, the operand is copied first.
    fn clear_hazards(
        &mut self,
        operation: &Op,
        ids: &mut [Option<TensorId>],
        t: &Tensor,
        result: Layout,
    ) -> Result<(), Reason> {
        if t.data.is_null() || operation.aliased_source().is_some() {
            return Ok(());
        }
        let target = self.memory.place(t, result)?;
        for (index, id) in ids.iter_mut().enumerate() {
            let Some(source) = *id else { continue };
            let Some(place) = &self.places[source.index()] else {
                continue;
            };
            let harmless = !place.overlaps(&target)
                || (operation.may_overwrite(index)
                    && place.slot.offset == target.slot.offset
                    && same_places(place.layout(), &result));
            if harmless {
                continue;
            }
            let copy = self.push(Op::Cont, &[Some(source)])?;
            let layout = self.graph.tensor(copy).layout;
            self.places[copy.index()] = Some(self.memory.temporary(layout)?);
            *id = Some(copy);
        }
        Ok(())
    }
}

fn sources(t: &Tensor) -> [*const Tensor; MAX_SRC] {
    t.src.map(<*mut Tensor>::cast_const)
}

/// Whether all nodes of an imported graph are supported.
pub fn supported(device: &dyn samite_core::Device, imported: &Imported) -> Support {
    imported
        .nodes
        .iter()
        .map(|&id| device.supports(imported.graph.node(id)))
        .find(|answer| !answer.is_yes())
        .unwrap_or(Support::Yes)
}

/// New host memory as a place.
///
/// # Errors
/// If there is not enough.
pub fn temporary(layout: Layout) -> Result<TensorRef, Reason> {
    let buffer = samite_core::host_buffer_type()
        .allocate(layout.bytes(), Usage::Compute)
        .map_err(|error| Reason::from(error.to_string()))?;
    let slot = Slot { offset: 0, layout };
    Ok(TensorRef { buffer, slot })
}
