//! Import of ggml tensors as a samite graph.
//!
//! Every node passes [`infer`](samite_core::infer), so shapes from a host or a file are checked
//! before a kernel relies on them. Where ggml's tensors express more than samite's operations, the
//! graph gets more nodes: `CONT` with another shape is followed by a reshape, and an in-place
//! operation on a tensor with gaps is computed elsewhere and copied.

use crate::numbers::{MAX_SRC, flag, op};
use crate::params::{decode, dtype, shape};
use crate::{Description, UnsupportedConversion};
use samite_core::{
    DIMS, Graph, Layout, Op, Slot, StoredTensor, Support, TensorId, TensorRef, Usage,
};
use std::collections::BTreeMap;

/// Maximum depth of views of views. Deeper views count as separate memory.
const MAX_VIEW_DEPTH: usize = 32;

/// ggml's tensors, from any source: a host's memory or a message.
pub trait Tensors {
    /// Identity of a tensor: an address or a number. Methods are only called with keys that these
    /// methods or the caller of the importer provided.
    type Key: Copy + Ord;

    /// Returns the tensor's description.
    fn describe(&self, key: Self::Key) -> Description;

    /// Returns its operands.
    fn sources(&self, key: Self::Key) -> [Option<Self::Key>; MAX_SRC];

    /// Returns its name.
    fn name(&self, key: Self::Key) -> String;

    /// Returns whether it has memory.
    fn is_placed(&self, key: Self::Key) -> bool;

    /// Returns how many operands in the whole graph refer to it, if known. The nodes are a part of
    /// that graph.
    fn uses(&self, key: Self::Key) -> Option<usize>;

    /// Returns its memory.
    ///
    /// # Errors
    /// If it has no memory, or if that is outside its buffer.
    fn place(&mut self, key: Self::Key, layout: Layout)
    -> Result<TensorRef, UnsupportedConversion>;

    /// Returns new memory for an intermediate result.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion>;
}

/// Returns the layout of a tensor.
///
/// # Errors
/// If its type is unknown or its extents and strides are invalid.
pub fn layout(tensor: &Description) -> Result<Layout, UnsupportedConversion> {
    Layout::strided(dtype(tensor)?, shape(tensor)?, tensor.nb)
        .map_err(|error| error.to_string().into())
}

/// Returns whether two layouts are equal, except for strides that are never used.
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

/// Builder of a graph from tensors.
pub struct Importer<T: Tensors> {
    tensors: T,
    graph: Graph,
    known: BTreeMap<T::Key, TensorId>,
    places: Vec<Option<TensorRef>>,
    nodes: Vec<TensorId>,
}

/// A graph with memory for every tensor.
pub struct Imported {
    /// The tensors.
    pub graph: Graph,
    /// Nodes to run, in order.
    pub nodes: Vec<TensorId>,
    /// Memory by position in the graph.
    pub places: Vec<Option<TensorRef>>,
}

impl<T: Tensors> Importer<T> {
    /// Returns an importer of `tensors`.
    pub fn new(tensors: T) -> Self {
        Importer {
            tensors,
            graph: Graph::new(),
            known: BTreeMap::new(),
            places: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// Returns the tensors.
    pub fn tensors_mut(&mut self) -> &mut T {
        &mut self.tensors
    }

    /// Imports one node. Unknown sources count as memory with a value.
    ///
    /// # Errors
    /// The reason, if samite does not have the operation or the operands do not fit.
    pub fn node(&mut self, key: T::Key) -> Result<TensorId, UnsupportedConversion> {
        let (t, sources) = (self.tensors.describe(key), self.tensors.sources(key));
        let operation = decode(&t)?;
        if operation.is_view() {
            return self.operand(key, 0);
        }
        let wanted = match operation {
            Op::Cast { .. } => 1, // source 1 is the result itself
            _ => sources
                .iter()
                .rposition(Option::is_some)
                .map_or(0, |last| last + 1),
        };
        let mut ids = Vec::with_capacity(wanted);
        for source in &sources[..wanted] {
            ids.push(source.map(|source| self.operand(source, 0)).transpose()?);
        }
        let result = layout(&t)?;
        self.trim(&operation, &mut ids)?;
        self.clear_hazards(&operation, &mut ids, key, result)?;

        let id = self.push(operation, &ids)?;
        let computed = self.graph.tensor(id).layout;
        let id = if same_places(&computed, &result) {
            self.set_place(id, key, computed)?;
            id
        } else if computed.dtype() != result.dtype() || computed.elements() != result.elements() {
            return Err(format!("the result would be {computed}, but is {result}").into());
        } else if result.is_contiguous() && matches!(operation, Op::Cont | Op::Dup) {
            self.set_place(id, key, computed)?;
            let shape = result.shape();
            let reshaped = self.push(Op::Reshape { shape }, &[Some(id)])?;
            self.set_place(reshaped, key, result)?;
            reshaped
        } else if computed.shape() == result.shape() && operation.aliased_source().is_none() {
            let place = self.tensors.temporary(computed)?;
            self.places[id.index()] = Some(place);
            let target = self.leaf(key)?;
            let copy = self.push(Op::Cpy, &[Some(id), Some(target)])?;
            self.set_place(copy, key, result)?;
            copy
        } else {
            return Err(format!("the result would be {computed}, but is {result}").into());
        };
        if t.flags & flag::OUTPUT != 0 || t.is_view {
            // Results in another tensor's memory are also read through that tensor.
            self.graph.set_output(id);
        }
        self.known.insert(key, id);
        Ok(id)
    }

    /// Imports all of these nodes that are computed.
    ///
    /// # Errors
    /// Number and name of a node, and the reason.
    pub fn graph(
        mut self,
        nodes: impl IntoIterator<Item = T::Key>,
    ) -> Result<Imported, UnsupportedConversion> {
        for (number, key) in nodes.into_iter().enumerate() {
            let t = self.tensors.describe(key);
            if t.flags & flag::COMPUTE == 0 || op::is_view(t.op) || t.op == op::NONE {
                continue; // views are imported when something reads them
            }
            let name = self.tensors.name(key);
            let id = self.node(key).map_err(|reason| {
                UnsupportedConversion::from(format!("node {number} '{name}': {reason}"))
            })?;
            self.graph.set_name(id, name);
        }
        // Tensors that are also read outside this part of the graph are outputs.
        let mut uses = vec![0; self.graph.len()];
        for tensor in self.graph.tensors() {
            for (_, source) in tensor.operands() {
                uses[source.index()] += 1;
            }
        }
        for (&key, &id) in &self.known {
            let uses_of_all = self.tensors.uses(key);
            let outside = uses_of_all.is_none_or(|all| all != uses[id.index()]);
            if self.graph.tensor(id).is_computed() && (outside || uses[id.index()] == 0) {
                self.graph.set_output(id);
            }
        }
        Ok(self.finish())
    }

    /// Returns the graph so far.
    pub fn finish(self) -> Imported {
        Imported {
            graph: self.graph,
            nodes: self.nodes,
            places: self.places,
        }
    }

    /// Returns the id of a tensor that is read.
    fn operand(&mut self, key: T::Key, depth: usize) -> Result<TensorId, UnsupportedConversion> {
        if let Some(&id) = self.known.get(&key) {
            return Ok(id);
        }
        let mut id = None;
        if op::is_view(self.tensors.describe(key).op)
            && depth < MAX_VIEW_DEPTH
            && let Some(source) = self.tensors.sources(key)[0]
        {
            let source = self.operand(source, depth + 1)?;
            id = self.view(key, source);
            if id.is_none() {
                // The graph no longer shows that this reads the source's memory.
                self.graph.set_output(self.graph.memory_of(source));
            }
        }
        let id = match id {
            Some(id) => id,
            None => self.leaf(key)?,
        };
        self.known.insert(key, id);
        Ok(id)
    }

    /// Returns a view as an operation, if one describes the same memory.
    fn view(&mut self, key: T::Key, source: TensorId) -> Option<TensorId> {
        let t = self.tensors.describe(key);
        let operation = decode(&t).ok()?;
        let layouts = [Some(&self.graph.tensor(source).layout)];
        let inferred = samite_core::infer(&operation, &layouts).ok()?;
        let of = self.places[source.index()].as_ref()?;
        let shift = match operation {
            Op::View { offset, .. } => offset,
            _ => 0,
        };
        let place = self.tensors.place(key, inferred).ok()?;
        let here = same_places(&inferred, &layout(&t).ok()?)
            && place.location().memory == of.location().memory
            && of.location().offset.checked_add(shift) == Some(place.location().offset);
        if !here {
            return None;
        }
        let id = self.push(operation, &[Some(source)]).ok()?;
        self.places[id.index()] = Some(place);
        Some(id)
    }

    /// Returns a leaf for memory with a value.
    fn leaf(&mut self, key: T::Key) -> Result<TensorId, UnsupportedConversion> {
        let layout = layout(&self.tensors.describe(key))?;
        let TensorRef { buffer, slot } = self.tensors.place(key, layout)?;
        let stored = StoredTensor::new(self.tensors.name(key), buffer, slot.offset, slot.layout)
            .map_err(|error| UnsupportedConversion::from(error.to_string()))?;
        let id = self
            .graph
            .stored(&stored)
            .map_err(|error| UnsupportedConversion::from(error.to_string()))?;
        self.places.push(Some(stored.tensor().clone()));
        Ok(id)
    }

    fn push(
        &mut self,
        operation: Op,
        ids: &[Option<TensorId>],
    ) -> Result<TensorId, UnsupportedConversion> {
        let id = self
            .graph
            .push(operation, ids)
            .map_err(|error| UnsupportedConversion::from(error.to_string()))?;
        self.places.push(None);
        if self.graph.tensor(id).is_computed() {
            self.nodes.push(id);
        }
        Ok(id)
    }

    /// Trims operands. ggml's gradient of row lookup may have more rows than numbers, and reads the
    /// first ones. For rows with an odd number of elements, gated units skip the last one.
    fn trim(
        &mut self,
        operation: &Op,
        ids: &mut [Option<TensorId>],
    ) -> Result<(), UnsupportedConversion> {
        let layout = |id: TensorId| self.graph.tensor(id).layout;
        let (source, shape) = match (operation, &*ids) {
            (Op::GetRowsBack { .. }, &[Some(gradient), Some(numbers)]) => {
                let [n0, n1, n2, n3] = layout(gradient).shape();
                let count = layout(numbers).shape()[0];
                (gradient, [n0, n1.min(count), n2, n3])
            }
            (Op::Glu { .. }, &[Some(pairs)]) => {
                let [n0, n1, n2, n3] = layout(pairs).shape();
                (pairs, [n0 - n0 % 2, n1, n2, n3])
            }
            _ => return Ok(()),
        };
        let all = layout(source);
        let (Some(place), true) = (&self.places[source.index()], shape != all.shape()) else {
            return Ok(());
        };
        let mut place = place.clone();
        let [_, strides @ ..] = all.strides();
        let operation = Op::View {
            shape,
            strides,
            offset: 0,
        };
        let part = self.push(operation, &[Some(source)])?;
        place.slot.layout = self.graph.tensor(part).layout;
        self.places[part.index()] = Some(place);
        ids[0] = Some(part);
        Ok(())
    }

    fn set_place(
        &mut self,
        id: TensorId,
        key: T::Key,
        layout: Layout,
    ) -> Result<(), UnsupportedConversion> {
        self.places[id.index()] = Some(self.tensors.place(key, layout)?);
        Ok(())
    }

    /// Copies operands whose memory a result reuses. ggml lets a result take the memory of any
    /// operand of the same layout that is not used again, which samite's operation may not allow.
    fn clear_hazards(
        &mut self,
        operation: &Op,
        ids: &mut [Option<TensorId>],
        key: T::Key,
        result: Layout,
    ) -> Result<(), UnsupportedConversion> {
        if !self.tensors.is_placed(key) || operation.aliased_source().is_some() {
            return Ok(());
        }
        let target = self.tensors.place(key, result)?;
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
            self.places[copy.index()] = Some(self.tensors.temporary(layout)?);
            *id = Some(copy);
        }
        Ok(())
    }
}

/// Returns whether all nodes of an imported graph are supported.
pub fn supported(device: &dyn samite_core::Device, imported: &Imported) -> Support {
    imported
        .nodes
        .iter()
        .map(|&id| device.supports(imported.graph.node(id)))
        .find(|answer| !answer.is_yes())
        .unwrap_or(Support::Yes)
}

/// Returns new host memory for a tensor.
///
/// # Errors
/// If there is not enough memory.
pub fn temporary(layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
    let buffer = samite_core::host_buffer_type()
        .allocate(layout.bytes(), Usage::Compute)
        .map_err(|error| UnsupportedConversion::from(error.to_string()))?;
    let slot = Slot { offset: 0, layout };
    Ok(TensorRef { buffer, slot })
}
