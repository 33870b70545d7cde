//! Which nodes are computed together.
//!
//! - Products of packed weights with few columns take these as 8-bit numbers, which are made once for all products that follow each other with the
//!   same columns. Up to three of them are one launch.
//! - A norm of rows and the factor that follows it are one launch, with the sum that it is of, if there is one.
//! - Where such a norm, a gated unit, or attention gives the columns of a product, it makes the 8-bit numbers, too.
//! - The rotations of queries and keys, with norms of both before them, and the writes of keys and values to their caches, are one launch.
//!
//! Launches are made from layouts, and from what is known of memory: which weights are packed, and which tensors overlap.

mod before_attention;

use crate::buffer::BUFFER_UNIT;
use crate::ops::{self, Known, attention, elementwise, matmul, reductions};
use crate::packed;
use crate::plan::{Capacity, Launch, Operands, Reason, Which};
use samite_core::{Graph, Layout, Node, Op, Readers, TensorId, TensorRef};

/// A launch, and the node that it is counted for.
pub struct Step {
    pub node: TensorId,
    pub launch: Launch,
}

/// What is known of memory.
#[derive(Clone, Copy)]
pub enum Memory<'a> {
    /// Where tensors lie, by position in the graph.
    Places(&'a [Option<TensorRef>]),
    /// Stored tensors only.
    Stored,
    /// Nothing: weights that can be packed are.
    AllPacked,
}

impl Memory<'_> {
    /// Whether these weights are packed.
    fn is_packed(self, weights: Node<'_>) -> bool {
        let is_packed = |place: &TensorRef| place.buffer.as_any().is::<packed::PackedBuffer>();
        match self {
            _ if !is_packable(weights) => false,
            Memory::Places(places) => {
                let place = places.get(weights.id().index());
                place.is_some_and(|place| place.as_ref().is_some_and(is_packed))
            }
            Memory::Stored => weights
                .stored()
                .is_some_and(|stored| is_packed(stored.tensor())),
            Memory::AllPacked => true,
        }
    }

    /// Whether a tensor begins at a multiple of 16 bytes, as far as is known.
    fn is_aligned(self, id: TensorId) -> bool {
        let Memory::Places(places) = self else {
            return true;
        };
        let place = places.get(id.index()).and_then(Option::as_ref);
        place.is_some_and(|place| place.slot.offset.is_multiple_of(BUFFER_UNIT))
    }

    /// Whether two tensors do not overlap, as far as is known; or, if `same` is allowed, lie in exactly the same place.
    fn are_apart(self, a: TensorId, b: TensorId, same: bool) -> bool {
        let Memory::Places(places) = self else {
            return true;
        };
        let place = |id: TensorId| places.get(id.index()).and_then(Option::as_ref);
        match (place(a), place(b)) {
            (Some(a), Some(b)) => {
                !a.overlaps(b) || same && a.location() == b.location() && a.layout() == b.layout()
            }
            _ => false,
        }
    }
}

/// Whether a tensor can lie in packed memory: whole matrices of a type that is packed.
pub fn is_packable(weights: Node<'_>) -> bool {
    weights.tensor().view.is_none()
        && packed::is_packed_type(weights.dtype())
        && weights.layout().is_contiguous()
        && !weights.layout().is_empty()
}

/// The launches of `nodes`.
///
/// # Errors
/// The node that the device does not compute, and why.
pub fn steps(
    graph: &Graph,
    nodes: &[TensorId],
    capacity: &Capacity,
    memory: Memory<'_>,
) -> Result<Vec<Step>, (TensorId, Reason)> {
    let computed = nodes.iter().map(|&id| graph.node(id));
    let nodes: Vec<_> = computed
        .filter(|node| node.tensor().is_computed())
        .collect();
    let fusion = Fusion {
        nodes: &nodes,
        readers: Readers::new(graph),
        capacity,
        memory,
    };
    let mut steps = Vec::new();
    let mut held = None;
    let mut at = 0;
    while at < nodes.len() {
        let first = steps.len();
        let earlier = held;
        let mut fused = None;
        for fuse in [
            Fusion::products,
            Fusion::before_attention,
            Fusion::norm,
            Fusion::gated,
            Fusion::attention,
        ] {
            fused = fuse(&fusion, at, &mut held, &mut steps)
                .filter(|_| steps[first..].iter().all(|step| step.launch.fits(capacity)));
            if fused.is_some() {
                break;
            }
            steps.truncate(first);
            held = earlier;
        }
        if let Some(count) = fused {
            at += count;
            continue;
        }
        let node = nodes[at];
        let source = |index: usize| node.source(index);
        let known = Known {
            packed: source(0).is_some_and(|source| memory.is_packed(source)),
            aligned: [1, 2]
                .into_iter()
                .filter_map(source)
                .all(|source| memory.is_aligned(source.id())),
        };
        let launches =
            ops::launches_of(node, capacity, known).map_err(|reason| (node.id(), reason))?;
        let uses_scratch = |launch: &Launch| {
            let mut operands = launch.operands.iter();
            operands.any(|operand| operand.which == Which::Workspace)
        };
        if launches.iter().any(uses_scratch) || node.tensor().written().next().is_some() {
            held = None;
        }
        steps.extend(launches.into_iter().map(|launch| Step {
            node: node.id(),
            launch,
        }));
        at += 1;
    }
    Ok(steps)
}

/// Columns as 8-bit numbers: what they are made of.
#[derive(Clone, Copy, PartialEq)]
struct Columns {
    memory: TensorId,
    offset: usize,
    layout: Layout,
}

impl Columns {
    fn of(node: Node<'_>) -> Self {
        let (memory, offset) = match node.tensor().view {
            Some(view) => (view.base, view.offset),
            None => (node.id(), 0),
        };
        Columns {
            memory,
            offset,
            layout: *node.layout(),
        }
    }

    /// Whether they are nothing but all elements of `node`, in rows of any length.
    fn are_rows_of_memory(&self, node: Node<'_>) -> bool {
        (self.memory, self.offset) == (node.id(), 0)
            && self.layout.is_contiguous()
            && node.layout().is_contiguous()
            && self.layout.dtype() == node.dtype()
            && self.layout.bytes() == node.layout().bytes()
    }

    /// Whether they are nothing but all rows of `node`.
    fn are_rows_of(&self, node: Node<'_>) -> bool {
        let rows = |layout: &Layout| (layout.dtype(), layout.shape()[0], layout.rows());
        (self.memory, self.offset) == (node.id(), 0)
            && self.layout.is_contiguous()
            && node.layout().is_contiguous()
            && rows(&self.layout) == rows(node.layout())
    }
}

struct Fusion<'a> {
    nodes: &'a [Node<'a>],
    readers: Readers,
    capacity: &'a Capacity,
    memory: Memory<'a>,
}

impl Fusion<'_> {
    /// The columns that node number `at` takes as 8-bit numbers, if it is such a product.
    fn columns(&self, at: usize) -> Option<Columns> {
        let node = *self.nodes.get(at)?;
        let (a, b) = (node.source(0)?, node.source(1)?);
        let is_one = |layout: &Layout| layout.shape()[2..] == [1, 1];
        let fits = matches!(node.op(), Op::MulMat { .. })
            && !node.layout().is_empty()
            && b.layout().shape()[1] <= matmul::MOST_COLUMNS
            && [a, b].iter().all(|source| is_one(source.layout()))
            && !b.dtype().is_quantized()
            && !b.dtype().is_integer()
            && self.memory.is_packed(a);
        fits.then(|| Columns::of(b))
    }

    /// Products from node `at` on.
    fn products(
        &self,
        at: usize,
        held: &mut Option<Columns>,
        steps: &mut Vec<Step>,
    ) -> Option<usize> {
        let columns = self.columns(at)?;
        let mut count = 1;
        while count < matmul::MOST_MATRICES && self.columns(at + count) == Some(columns) {
            let next = self.nodes[at + count].id();
            let mut others = self.nodes[at..at + count].iter();
            if !others.all(|other| self.memory.are_apart(other.id(), next, false)) {
                break;
            }
            count += 1;
        }
        let nodes = &self.nodes[at..at + count];
        let node = nodes[0];
        let mut push = |launch| {
            steps.push(Step {
                node: node.id(),
                launch,
            })
        };
        if *held != Some(columns) {
            push(matmul::quantize(node).ok()?);
            *held = Some(columns);
        }
        push(matmul::packed_products(nodes, self.capacity).ok()?);
        Some(count)
    }

    /// A scaled norm of rows from node `at` on, with the sum before it.
    fn norm(&self, at: usize, held: &mut Option<Columns>, steps: &mut Vec<Step>) -> Option<usize> {
        let sum = self.nodes[at];
        let is_sum = matches!(sum.op(), Op::Add);
        let first = at + usize::from(is_sum);
        let (norm, scaled) = (*self.nodes.get(first)?, *self.nodes.get(first + 1)?);
        let (Op::RmsNorm { eps }, Op::Mul) = (norm.op(), scaled.op()) else {
            return None;
        };
        let (x, factor) = (norm.source(0)?, scaled.source(1)?);
        let rows = |node: Node<'_>| node.layout().shape();
        let fits = scaled.source(0)?.id() == norm.id()
            && self.readers.only(norm.id(), 1)
            && norm.tensor().view.is_none()
            && factor.layout().rows() == 1
            && rows(factor)[0] == rows(x)[0]
            && rows(x)[0].is_multiple_of(4)
            && [x, scaled, factor]
                .iter()
                .all(|node| node.layout().is_contiguous())
            && self.memory.are_apart(scaled.id(), factor.id(), false);
        if !fits {
            return None;
        }
        let mut summed = None;
        if is_sum {
            let terms = [sum.source(0)?, sum.source(1)?];
            let fits = x.id() == sum.id()
                && terms
                    .iter()
                    .all(|&term| rows(term) == rows(sum) && term.layout().is_contiguous())
                && terms
                    .iter()
                    .all(|term| self.memory.are_apart(scaled.id(), term.id(), true))
                && self.memory.are_apart(sum.id(), factor.id(), false);
            if !fits {
                return None;
            }
            summed = Some((sum, terms));
        }
        if !self.memory.are_apart(scaled.id(), x.id(), true) {
            return None;
        }
        let columns = self
            .columns(first + 2)
            .filter(|columns| columns.are_rows_of(scaled));
        let launch =
            reductions::scaled_norm(norm, scaled, summed, *eps, columns.is_some(), self.capacity);
        steps.push(Step {
            node: scaled.id(),
            launch: launch.ok()?,
        });
        *held = columns.or(*held);
        Some(first + 2 - at)
    }

    /// Attention that gives the columns of the product behind it.
    fn attention(
        &self,
        at: usize,
        held: &mut Option<Columns>,
        steps: &mut Vec<Step>,
    ) -> Option<usize> {
        let node = self.nodes[at];
        let &Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            ..
        } = node.op()
        else {
            return None;
        };
        let columns = self
            .columns(at + 1)
            .filter(|columns| columns.are_rows_of_memory(node))?;
        let [size, heads, tokens, batch] = node.layout().shape();
        let fits = attention::can_be_quantized(size)
            && batch == 1
            && columns.layout.shape() == [size * heads, tokens, 1, 1];
        if !fits {
            return None;
        }
        let b = self.nodes[at + 1].source_operand(1).ok()?;
        let aligned = [1, 2].into_iter().filter_map(|index| node.source(index));
        let aligned = aligned
            .into_iter()
            .all(|source| self.memory.is_aligned(source.id()));
        let numbers = [scale, max_bias, softcap];
        let launches = attention::flash(node, numbers, self.capacity, aligned, Some(&b)).ok()?;
        if !launches
            .iter()
            .all(|launch| launch.has_bindings(self.capacity))
        {
            return None;
        }
        steps.extend(launches.into_iter().map(|launch| Step {
            node: node.id(),
            launch,
        }));
        *held = Some(columns);
        Some(1)
    }

    /// A gated unit that gives the columns of the product behind it.
    fn gated(&self, at: usize, held: &mut Option<Columns>, steps: &mut Vec<Step>) -> Option<usize> {
        let node = self.nodes[at];
        let &Op::Glu { kind, swapped } = node.op() else {
            return None;
        };
        let columns = self
            .columns(at + 1)
            .filter(|columns| columns.are_rows_of(node))?;
        let sources = [node.source(0)?, node.source(1)?];
        let fits = sources.iter().all(|source| {
            source.layout().is_contiguous() && self.memory.are_apart(node.id(), source.id(), true)
        });
        if !fits {
            return None;
        }
        let launch = elementwise::gated_columns(node, kind, swapped).ok()?;
        steps.push(Step {
            node: node.id(),
            launch,
        });
        *held = Some(columns);
        Some(1)
    }
}
