//! The graph: tensors in topological order, as plain data.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::infer::infer;
use crate::layout::{Layout, Shape};
use crate::memory::MemoryId;
use crate::op::Op;
use crate::stored::StoredTensor;
use std::sync::Arc;

/// Identifies a tensor of one graph by its position.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct TensorId(u32);

impl TensorId {
    /// Returns its position in [`Graph::tensors`].
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the tensor at position `index`. A graph has fewer than 2^32 - 1 tensors. A greater
    /// index identifies none.
    pub fn from_index(index: usize) -> Self {
        TensorId(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

impl std::fmt::Display for TensorId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// Memory of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewOf {
    /// The tensor that owns the memory. Never a view itself.
    pub base: TensorId,
    /// Byte offset of the view's first element.
    pub offset: usize,
}

/// Role of a tensor outside the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Written from outside before each run.
    pub input: bool,
    /// Read from outside after each run, so its memory is not reused.
    pub output: bool,
    /// Copied to [another tensor](Graph::copy_of) after it has been computed.
    pub copied: bool,
}

/// One tensor of a graph: a leaf, a computed node, or a view.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name to show to users. May be empty.
    pub name: Arc<str>,
    /// The operation that computes it.
    pub op: Op,
    /// Operands; absent optional ones are `None`.
    pub sources: Box<[Option<TensorId>]>,
    /// Type, shape and strides.
    pub layout: Layout,
    /// Set if the tensor lies in another tensor's memory.
    pub view: Option<ViewOf>,
    /// Role.
    pub flags: Flags,
    /// Memory of a leaf that already lies in a buffer, such as a weight or a cache.
    pub stored: Option<Arc<StoredTensor>>,
}

impl Tensor {
    /// Returns the operands that are present, with their indices.
    pub fn operands(&self) -> impl Iterator<Item = (usize, TensorId)> + '_ {
        self.sources
            .iter()
            .enumerate()
            .filter_map(|(i, source)| source.map(|id| (i, id)))
    }

    /// Returns the operands whose memory it writes to, with their indices.
    pub fn written(&self) -> impl Iterator<Item = (usize, TensorId)> + '_ {
        let written = self.op.written_sources();
        self.operands().filter(|(i, _)| written.contains(i))
    }

    /// Returns whether a device computes it, because it is neither a leaf nor a view.
    pub fn is_computed(&self) -> bool {
        !matches!(self.op, Op::Leaf) && !self.op.is_view()
    }
}

/// A computation over tensors as data, without memory or device.
///
/// [`leaf`](Graph::leaf), [`input`](Graph::input), [`stored`](Graph::stored) and the operations of
/// the [builder](crate::build) append tensors. Operands come first, so the order is topological.
/// The order also defines the effect of writes (`cpy`, `set_rows`): a node sees all writes of
/// earlier nodes.
///
/// ```
/// use samite_core::{DType, Graph};
///
/// let mut graph = Graph::new();
/// let weights = graph.leaf("weights", DType::Q4_0, [64, 8, 1, 1])?;
/// let x = graph.input("x", DType::F32, [64, 2, 1, 1])?;
/// let y = graph.mul_mat(weights, x)?;
/// graph.set_output(y);
/// assert_eq!(graph.tensor(y).layout.shape(), [8, 2, 1, 1]);
/// assert!(graph.mul_mat(x, y).is_err(), "the inner dimensions differ");
/// # Ok::<_, samite_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Graph {
    tensors: Vec<Tensor>,
}

impl Graph {
    /// Creates a graph without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all tensors in topological order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Iterates over the ids of all tensors, in topological order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = TensorId> + ExactSizeIterator + use<> {
        (0..self.tensors.len()).map(TensorId::from_index)
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Returns whether the graph has no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns the tensor `id`.
    ///
    /// # Panics
    /// If `id` belongs to another, larger graph.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Returns the tensor `id` with access to its operands. The methods of the result panic if `id`
    /// belongs to another, larger graph.
    pub fn node(&self, id: TensorId) -> Node<'_> {
        Node { graph: self, id }
    }

    /// Returns the tensor that owns the memory of `id`: `id` itself, or the base if it is a view.
    ///
    /// # Panics
    /// If `id` belongs to another, larger graph.
    pub fn memory_of(&self, id: TensorId) -> TensorId {
        self.tensor(id).view.map_or(id, |view| view.base)
    }

    fn append(&mut self, tensor: Tensor) -> Result<TensorId> {
        if self.tensors.len() >= u32::MAX as usize {
            return Err(Error::invalid("a graph has fewer than 2^32 - 1 tensors"));
        }
        self.tensors.push(tensor);
        Ok(TensorId::from_index(self.tensors.len() - 1))
    }

    pub(crate) fn append_leaf(
        &mut self,
        name: &str,
        layout: Layout,
        flags: Flags,
        stored: Option<Arc<StoredTensor>>,
    ) -> Result<TensorId> {
        self.append(Tensor {
            name: name.into(),
            op: Op::Leaf,
            sources: Box::default(),
            layout,
            view: None,
            flags,
            stored,
        })
    }

    /// Appends a leaf that has no value until a node writes to it: scratch memory.
    ///
    /// # Errors
    /// [`Error::Shape`] if the size overflows or rows are not whole blocks.
    pub fn leaf(&mut self, name: &str, dtype: DType, shape: Shape) -> Result<TensorId> {
        let layout = Layout::contiguous(dtype, shape)?;
        self.append_leaf(name, layout, Flags::default(), None)
    }

    /// Appends a leaf that is written from outside before each run.
    ///
    /// # Errors
    /// [`Error::Shape`] if the size overflows or rows are not whole blocks.
    pub fn input(&mut self, name: &str, dtype: DType, shape: Shape) -> Result<TensorId> {
        let layout = Layout::contiguous(dtype, shape)?;
        self.append_leaf(
            name,
            layout,
            Flags {
                input: true,
                ..Flags::default()
            },
            None,
        )
    }

    /// Appends a leaf that already lies in a buffer.
    ///
    /// # Errors
    /// If the graph is full.
    pub fn stored(&mut self, tensor: &Arc<StoredTensor>) -> Result<TensorId> {
        self.append_leaf(
            tensor.name(),
            *tensor.layout(),
            Flags::default(),
            Some(Arc::clone(tensor)),
        )
    }

    /// Appends the node `op(sources…)` after checking it. All nodes are created here.
    ///
    /// # Errors
    /// [`Error::Shape`] if the sources do not fit, [`Error::InvalidArgument`] if one does not
    /// exist.
    pub fn push(&mut self, op: Op, sources: &[Option<TensorId>]) -> Result<TensorId> {
        if let Some(id) = sources
            .iter()
            .flatten()
            .find(|id| id.index() >= self.tensors.len())
        {
            return Err(Error::invalid(format!(
                "{}: there is no tensor {id} in this graph",
                op.name()
            )));
        }
        let last = sources
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |last| last + 1);
        let sources = &sources[..last];
        let layouts: Vec<_> = sources
            .iter()
            .map(|source| source.map(|id| &self.tensor(id).layout))
            .collect();
        let layout = infer(&op, &layouts)?;

        let view = match op.aliased_source().and_then(|index| sources[index]) {
            Some(source) => {
                let into = self.tensor(source).view.unwrap_or(ViewOf {
                    base: source,
                    offset: 0,
                });
                let shift = if let Op::View { offset, .. } = op {
                    offset
                } else {
                    0
                };
                let base = self.tensor(into.base);
                let offset = into.offset.checked_add(shift);
                let end = offset.and_then(|offset| offset.checked_add(layout.bytes()));
                let (Some(offset), true) =
                    (offset, end.is_some_and(|end| end <= base.layout.bytes()))
                else {
                    return Err(Error::shape(format!(
                        "{op}: {layout} at byte {} does not fit into the {} bytes of '{}' ({})",
                        into.offset.saturating_add(shift),
                        base.layout.bytes(),
                        base.name,
                        base.layout
                    )));
                };
                if !shift.is_multiple_of(layout.dtype().block_bytes()) {
                    return Err(Error::shape(format!(
                        "{op}: byte {shift} is not the start of a {} element or block",
                        layout.dtype()
                    )));
                }
                Some(ViewOf {
                    base: into.base,
                    offset,
                })
            }
            None => None,
        };
        self.check_written(&op, sources)?;
        self.append(Tensor {
            name: "".into(),
            op,
            sources: sources.into(),
            layout,
            view,
            flags: Flags::default(),
            stored: None,
        })
    }

    /// Rejects an operand that is written to and shares elements with another operand: the values
    /// read would depend on the order of computation. Copying a tensor to itself is allowed, since
    /// it changes nothing.
    fn check_written(&self, op: &Op, sources: &[Option<TensorId>]) -> Result<()> {
        for &written in op.written_sources() {
            let Some(target) = sources[written] else {
                continue;
            };
            for (index, source) in sources.iter().enumerate() {
                let Some(source) = source.filter(|_| index != written) else {
                    continue;
                };
                let same_elements = matches!(op, Op::Cpy)
                    && self.place_in_graph(source) == self.place_in_graph(target)
                    && self.tensor(source).layout == self.tensor(target).layout;
                if !same_elements && self.may_share_elements(source, target) {
                    return Err(Error::shape(format!(
                        "{op}: source {index} ('{}', {}) and source {written} ('{}', {}), which is written to, have elements in common: copy source {index} first (cont)",
                        self.tensor(source).name,
                        self.tensor(source).layout,
                        self.tensor(target).name,
                        self.tensor(target).layout
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns where a tensor starts, as far as the graph knows: at a byte of stored memory or of
    /// another tensor's memory.
    fn place_in_graph(&self, id: TensorId) -> (Option<MemoryId>, TensorId, usize) {
        let base = self.memory_of(id);
        let shift = self.tensor(id).view.map_or(0, |view| view.offset);
        match &self.tensor(base).stored {
            Some(stored) => {
                let start = stored.tensor().location();
                let offset = start.offset.saturating_add(shift);
                (Some(start.memory), TensorId(0), offset)
            }
            None => (None, base, shift),
        }
    }

    fn may_share_elements(&self, a: TensorId, b: TensorId) -> bool {
        let ((a_memory, a_base, a_at), (b_memory, b_base, b_at)) =
            (self.place_in_graph(a), self.place_in_graph(b));
        (a_memory, a_base) == (b_memory, b_base)
            && self
                .tensor(a)
                .layout
                .may_meet(a_at, &self.tensor(b).layout, b_at)
    }

    /// Sets the name of `id`.
    ///
    /// # Panics
    /// If `id` belongs to another, larger graph.
    pub fn set_name(&mut self, id: TensorId, name: impl Into<Arc<str>>) {
        self.tensors[id.index()].name = name.into();
    }

    pub(crate) fn set_flags(&mut self, id: TensorId, flags: Flags) {
        self.tensors[id.index()].flags = flags;
    }

    /// Declares that `id` is read from outside after each run.
    ///
    /// # Panics
    /// If `id` belongs to another, larger graph.
    pub fn set_output(&mut self, id: TensorId) {
        self.tensors[id.index()].flags.output = true;
    }

    /// Appends a leaf with the layout of `of`, including gaps. The scheduler copies `of` to it.
    ///
    /// # Errors
    /// If the graph is full.
    ///
    /// # Panics
    /// If `of` belongs to another, larger graph.
    pub fn copy_of(&mut self, of: TensorId, name: &str) -> Result<TensorId> {
        self.tensors[of.index()].flags.copied = true;
        let layout = self.tensor(of).layout;
        self.append_leaf(name, layout, Flags::default(), None)
    }

    /// Makes `node` read operand number `index` from another tensor of the same layout. For
    /// lowering only: the order of tensors need not be topological afterwards.
    ///
    /// # Errors
    /// [`Error::Shape`] if the layouts differ or the tensor or operand does not exist.
    pub fn redirect(&mut self, node: TensorId, index: usize, to: TensorId) -> Result<()> {
        let layout = |id: TensorId| self.tensors.get(id.index()).map(|tensor| tensor.layout);
        let current = self
            .tensors
            .get(node.index())
            .and_then(|tensor| tensor.sources.get(index).copied().flatten())
            .and_then(layout);
        if current.is_none() || current != layout(to) {
            return Err(Error::shape(format!(
                "operand {index} of {node} cannot become {to}: there is none, or the layouts differ"
            )));
        }
        self.tensors[node.index()].sources[index] = Some(to);
        Ok(())
    }

    /// Returns, by position, whether the memory of a tensor is needed outside `nodes`, some of the
    /// computed nodes. It is if the tensor is a leaf, an output or copied, or if other computed
    /// nodes read or write it. A device that [plans memory itself](crate::Device::member_memories)
    /// gets places for these tensors.
    pub fn needed_outside(&self, nodes: &[TensorId]) -> Vec<bool> {
        let mut inside = vec![false; self.tensors.len()];
        for id in nodes {
            inside[id.index()] = true;
        }
        let mut needed = vec![false; self.tensors.len()];
        // The other nodes are not computed, and no memory is kept for them.
        let live = self.live();
        for id in self.ids() {
            let tensor = self.tensor(id);
            let flags = tensor.flags;
            if flags.output || flags.copied || matches!(tensor.op, Op::Leaf) {
                needed[self.memory_of(id).index()] = true;
            }
            if tensor.is_computed() && live[id.index()] && !inside[id.index()] {
                for (_, source) in tensor.operands() {
                    needed[self.memory_of(source).index()] = true;
                }
            }
        }
        needed
    }

    /// Returns, by position, the tensors that must be computed for the outputs and for writes to
    /// stored tensors, inputs and the memory of outputs. Without any output, all tensors are live.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.tensors.len()];
        if !self.tensors.iter().any(|t| t.flags.output) {
            live.fill(true);
            return live;
        }
        // Writes to memory that outlives the run are effects. Writes to memory inside the graph
        // count if a live node reads that memory. Going backwards, all readers are known before
        // their writers.
        let mut memory_read = vec![false; self.tensors.len()];
        // Outputs are read after all nodes.
        for id in self.ids().filter(|&id| self.tensor(id).flags.output) {
            memory_read[self.memory_of(id).index()] = true;
        }
        for id in self.ids().rev() {
            let tensor = self.tensor(id);
            let effect = tensor.written().any(|(_, source)| {
                let base = self.memory_of(source);
                let root = self.tensor(base);
                root.stored.is_some() || root.flags.input || memory_read[base.index()]
            });
            if live[id.index()] || tensor.flags.output || effect {
                live[id.index()] = true;
                for (_, source) in tensor.operands() {
                    live[source.index()] = true;
                    memory_read[self.memory_of(source).index()] = true;
                }
            }
        }
        live
    }
}

/// A tensor of a graph with access to its operands. Devices decide by it whether they support an
/// operation.
#[derive(Clone, Copy)]
pub struct Node<'g> {
    graph: &'g Graph,
    id: TensorId,
}

impl<'g> Node<'g> {
    /// Returns the id of the tensor.
    pub fn id(self) -> TensorId {
        self.id
    }

    /// Returns the graph.
    pub fn graph(self) -> &'g Graph {
        self.graph
    }

    /// Returns the tensor.
    pub fn tensor(self) -> &'g Tensor {
        self.graph.tensor(self.id)
    }

    /// Returns the operation.
    pub fn op(self) -> &'g Op {
        &self.tensor().op
    }

    /// Returns the type, shape and strides of the result.
    pub fn layout(self) -> &'g Layout {
        &self.tensor().layout
    }

    /// Returns the element type of the result.
    pub fn dtype(self) -> DType {
        self.layout().dtype()
    }

    /// Returns operand number `index`, if present.
    pub fn source(self, index: usize) -> Option<Node<'g>> {
        let id = self.tensor().sources.get(index).copied().flatten()?;
        Some(self.graph.node(id))
    }

    /// Returns the layout of operand number `index`, if present.
    pub fn source_layout(self, index: usize) -> Option<&'g Layout> {
        self.source(index).map(Node::layout)
    }

    /// Returns the stored tensor in whose memory this one lies, if any.
    pub fn stored(self) -> Option<&'g Arc<StoredTensor>> {
        self.graph
            .tensor(self.graph.memory_of(self.id))
            .stored
            .as_ref()
    }
}

impl std::fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.id, self.op())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Unary;

    fn f32s(g: &mut Graph, extents: &[usize]) -> TensorId {
        g.input("x", DType::F32, crate::shape(extents).unwrap())
            .unwrap()
    }

    #[test]
    fn nodes_computed_elsewhere_need_their_operands_outside() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[8]);
        let unary = |g: &mut Graph, of| g.push(Op::Unary(Unary::Neg), &[Some(of)]).unwrap();
        let [a, b] = [unary(&mut g, x), unary(&mut g, x)];
        let _dead = unary(&mut g, a);
        let reader = unary(&mut g, b);
        let result = unary(&mut g, reader);
        g.set_output(result);
        let needed = g.needed_outside(&[a, b]);
        assert!(!needed[a.index()], "its reader is never computed");
        assert!(needed[b.index()] && needed[result.index()] && needed[x.index()]);
        assert!(!g.needed_outside(&[a, b, reader, result])[b.index()]);
    }

    #[test]
    fn views_of_views_point_to_the_owner_of_the_memory() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[8, 4]);
        let row = g
            .push(
                Op::View {
                    shape: [8, 2, 1, 1],
                    strides: [32, 64, 64],
                    offset: 64,
                },
                &[Some(x)],
            )
            .unwrap();
        let half = g
            .push(
                Op::View {
                    shape: [4, 2, 1, 1],
                    strides: [32, 64, 64],
                    offset: 16,
                },
                &[Some(row)],
            )
            .unwrap();
        assert_eq!(
            g.tensor(half).view,
            Some(ViewOf {
                base: x,
                offset: 80
            })
        );
        let turned = g.push(Op::Transpose, &[Some(half)]).unwrap();
        assert_eq!(
            g.tensor(turned).view,
            Some(ViewOf {
                base: x,
                offset: 80
            })
        );
    }

    #[test]
    fn out_of_bounds_views_are_refused() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[8, 4]);
        for (rows, offset) in [(4, 4), (5, 0), (1, usize::MAX), (1, 128)] {
            let op = Op::View {
                shape: [8, rows, 1, 1],
                strides: [32, 0, 0],
                offset,
            };
            assert!(g.push(op, &[Some(x)]).is_err(), "{rows} rows at {offset}");
        }
        let misaligned = Op::View {
            shape: [1, 1, 1, 1],
            strides: [4, 4, 4],
            offset: 2,
        };
        assert!(g.push(misaligned, &[Some(x)]).is_err());
        assert!(
            g.push(Op::Sqr, &[Some(TensorId(9))])
                .unwrap_err()
                .to_string()
                .contains("%9")
        );
    }

    #[test]
    fn written_and_read_elements_must_not_overlap() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[8, 4]);
        let rows = |g: &mut Graph, first, count| g.rows(x, first, count).unwrap();
        let (top, bottom, middle) = (rows(&mut g, 0, 2), rows(&mut g, 2, 2), rows(&mut g, 1, 2));
        g.cpy(top, bottom).unwrap();
        g.cpy(top, top).unwrap();
        let error = g.cpy(top, middle).unwrap_err().to_string();
        assert!(error.contains("cont"), "{error}");
        let apart = g.cont(top).unwrap();
        g.cpy(apart, middle).unwrap();
        // Columns side by side: their byte ranges overlap, but their elements do not.
        let left = g.view(x, [4, 4, 1, 1], [32, 128, 128], 0).unwrap();
        let right = g.view(x, [4, 4, 1, 1], [32, 128, 128], 16).unwrap();
        let inner = g.view(x, [4, 4, 1, 1], [32, 128, 128], 8).unwrap();
        g.cpy(left, right).unwrap();
        assert!(g.cpy(left, inner).is_err());
        // The same rows in another order.
        let turned = g.view(x, [4, 4, 1, 1], [32, 128, 128], 0).unwrap();
        let turned = g.transpose(turned).unwrap();
        assert!(g.cpy(turned, left).is_err());
        let ids = g.input("ids", DType::I32, [2, 1, 1, 1]).unwrap();
        assert!(g.set_rows(top, ids, x).is_err());
        g.set_rows(apart, ids, x).unwrap();
    }

    #[test]
    fn stored_tensors_over_the_same_bytes_are_the_same_memory() {
        let memory = crate::HostMemory::allocate(128, "test", "x").unwrap();
        let mut g = Graph::new();
        // Two buffers, and two tensors that start at different bytes.
        let [a, b, c] = [(0, 16), (32, 16), (64, 16)].map(|(at, n)| {
            let buffer = crate::host_buffer(Arc::clone(&memory), crate::Usage::Any);
            let layout = Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap();
            let stored = StoredTensor::new("x", buffer, at, layout).unwrap();
            g.stored(&stored).unwrap()
        });
        assert!(g.cpy(a, b).is_err());
        g.cpy(a, c).unwrap();
    }

    #[test]
    fn writes_to_the_memory_of_outputs_are_live() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[4]);
        let scratch = g.leaf("scratch", DType::F32, [4, 1, 1, 1]).unwrap();
        g.set_output(scratch);
        let written = g.cpy(x, scratch).unwrap();
        assert!(g.live()[written.index()]);
    }

    #[test]
    fn tensors_of_other_graphs_are_refused() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[4]);
        let y = g.sqr(x).unwrap();
        let far = TensorId::from_index(1 << 33);
        assert_eq!(
            far,
            TensorId::from_index(usize::MAX),
            "and not a small number"
        );
        assert!(g.sqr(far).is_err());
        assert!(g.rows(far, 0, 1).is_err());
        assert!(g.redirect(far, 0, x).is_err());
        assert!(g.redirect(y, 0, far).is_err());
        assert!(g.redirect(y, 1, x).is_err());
        g.redirect(y, 0, x).unwrap();
    }

    #[test]
    fn views_do_not_split_blocks_or_elements() {
        let mut g = Graph::new();
        let q = g.leaf("q", DType::Q8_0, [64, 4, 1, 1]).unwrap();
        assert!(g.view(q, [32, 4, 1, 1], [68, 0, 0], 34).is_ok());
        assert!(g.view(q, [32, 3, 1, 1], [68, 0, 0], 2).is_err());
        let x = f32s(&mut g, &[8, 4]);
        assert!(g.view(x, [4, 3, 1, 1], [34, 0, 0], 0).is_err());
    }

    #[test]
    fn only_nodes_needed_by_outputs_and_writes_are_live() {
        let mut g = Graph::new();
        let x = f32s(&mut g, &[4]);
        let scratch = g.leaf("scratch", DType::F32, [4, 1, 1, 1]).unwrap();
        let dead = g.push(Op::Sqr, &[Some(x)]).unwrap();
        let written = g.push(Op::Cpy, &[Some(x), Some(scratch)]).unwrap();
        let y = g.push(Op::Unary(Unary::Neg), &[Some(scratch)]).unwrap();
        let late = g.push(Op::Cpy, &[Some(y), Some(scratch)]).unwrap();
        assert!(g.live().iter().all(|&l| l));
        g.set_output(y);
        let live = g.live();
        assert!(
            live[y.index()] && live[written.index()] && live[scratch.index()] && live[x.index()]
        );
        assert!(!live[dead.index()]);
        assert!(
            !live[late.index()],
            "nobody reads what is written after the last use"
        );
    }
}
