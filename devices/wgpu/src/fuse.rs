//! Fuses nodes into launches.
//!
//! - Products of packed weights with few columns read these columns as 8-bit numbers. One launch
//!   quantizes the columns for all consecutive products with the same columns. Up to three products
//!   are one launch.
//! - A norm and the multiplication by its weights are one launch, with the addition before it if
//!   there is one.
//! - If such a norm, a gated unit or attention produces the columns of a product, it also quantizes
//!   them.
//! - RoPE of queries and keys, with the QK norms before it, and the writes of keys and values to
//!   the KV cache are one launch.
//!
//! Launches depend on layouts and on facts about memory: which weights are packed, and which
//! tensors overlap.

mod before_attention;

use crate::buffer::{BUFFER_UNIT, WgpuBuffer};
use crate::ops::{self, OperandFacts, attention, elementwise, matmul, reductions};
use crate::plan::{Capacity, Launch, OperandSource, Operands, UnsupportedLaunch};
use samite_core::{Graph, Layout, Node, Op, Readers, TensorId, TensorRef};
use samite_quant::{PackedBuffer, is_packable};
use std::cell::RefCell;

/// A launch, and the node to which it is attributed.
pub struct NodeLaunch {
    pub node: TensorId,
    pub launch: Launch,
}

/// Facts about the memory of tensors.
#[derive(Clone, Copy)]
pub enum Memory<'a> {
    /// Location of each tensor, by position in the graph.
    Places(&'a [Option<TensorRef>]),
    /// Locations of stored tensors only.
    Stored,
    /// No locations. Every weight that can be packed counts as packed.
    AllPacked,
}

/// A fact about the memory of tensors.
#[derive(Clone, Copy)]
enum Fact {
    /// The weights are packed.
    Packed(TensorId),
    /// The tensor starts at a multiple of 16 bytes.
    Aligned(TensorId),
    /// The tensors do not overlap. If `same` is set, they may also lie in exactly the same place.
    Apart { tensors: [TensorId; 2], same: bool },
}

impl Memory<'_> {
    /// Returns whether a fact is true. Without locations, tensors count as aligned and apart.
    fn has(self, fact: Fact, graph: &Graph) -> bool {
        let is_packed = |place: &TensorRef| place.buffer.as_any().is::<PackedBuffer<WgpuBuffer>>();
        let places = match (self, fact) {
            (Memory::Places(places), _) => places,
            (Memory::Stored, Fact::Packed(id)) => {
                let stored = graph.node(id).stored();
                return stored.is_some_and(|stored| is_packed(stored.tensor()));
            }
            _ => return true,
        };
        let place = |id: TensorId| places.get(id.index()).and_then(Option::as_ref);
        match fact {
            Fact::Packed(id) => place(id).is_some_and(is_packed),
            Fact::Aligned(id) => {
                place(id).is_some_and(|place| place.slot.offset.is_multiple_of(BUFFER_UNIT))
            }
            Fact::Apart { tensors, same } => match tensors.map(place) {
                [Some(a), Some(b)] => {
                    !a.overlaps(b)
                        || same && a.location() == b.location() && a.layout() == b.layout()
                }
                _ => false,
            },
        }
    }
}

/// Memory that records each fact that fusion asks for.
struct RecordedMemory<'a> {
    memory: Memory<'a>,
    graph: &'a Graph,
    facts: RefCell<Vec<(Fact, bool)>>,
}

impl RecordedMemory<'_> {
    fn has(&self, fact: Fact) -> bool {
        let is_true = self.memory.has(fact, self.graph);
        self.facts.borrow_mut().push((fact, is_true));
        is_true
    }

    fn is_packed(&self, weights: Node<'_>) -> bool {
        is_packable(weights) && self.has(Fact::Packed(weights.id()))
    }

    fn is_aligned(&self, id: TensorId) -> bool {
        self.has(Fact::Aligned(id))
    }

    fn are_apart(&self, a: TensorId, b: TensorId, same: bool) -> bool {
        let tensors = [a, b];
        self.has(Fact::Apart { tensors, same })
    }
}

/// The launches of some nodes, without addresses.
pub struct LaunchList {
    pub launches: Vec<NodeLaunch>,
    /// Facts about memory on which the launches depend.
    facts: Vec<(Fact, bool)>,
}

impl LaunchList {
    /// Returns whether the list for `memory` would be the same. The graph must be the same.
    pub fn fits(&self, graph: &Graph, memory: Memory<'_>) -> bool {
        let mut facts = self.facts.iter();
        facts.all(|&(fact, is_true)| memory.has(fact, graph) == is_true)
    }
}

/// Returns the launches of `nodes`.
///
/// # Errors
/// Returns the node that the device does not support, and the reason.
pub fn launch_list(
    graph: &Graph,
    nodes: &[TensorId],
    capacity: &Capacity,
    memory: Memory<'_>,
) -> Result<LaunchList, (TensorId, UnsupportedLaunch)> {
    let computed = nodes.iter().map(|&id| graph.node(id));
    let nodes: Vec<_> = computed
        .filter(|node| node.tensor().is_computed())
        .collect();
    let fusion = Fusion {
        nodes: &nodes,
        readers: Readers::new(graph),
        capacity,
        memory: RecordedMemory {
            memory,
            graph,
            facts: RefCell::default(),
        },
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
        let known = OperandFacts {
            packed: source(0).is_some_and(|source| fusion.memory.is_packed(source)),
            aligned: [1, 2]
                .into_iter()
                .filter_map(source)
                .all(|source| fusion.memory.is_aligned(source.id())),
        };
        let launches =
            ops::launches_of(node, capacity, known).map_err(|reason| (node.id(), reason))?;
        let uses_scratch = |launch: &Launch| {
            let mut operands = launch.operands.iter();
            operands.any(|operand| operand.which == OperandSource::Workspace)
        };
        if launches.iter().any(uses_scratch) || node.tensor().written().next().is_some() {
            held = None;
        }
        steps.extend(launches.into_iter().map(|launch| NodeLaunch {
            node: node.id(),
            launch,
        }));
        at += 1;
    }
    Ok(LaunchList {
        launches: steps,
        facts: fusion.memory.facts.into_inner(),
    })
}

/// The source of quantized columns.
#[derive(Clone, Copy, PartialEq)]
struct ColumnSource {
    memory: TensorId,
    offset: usize,
    layout: Layout,
}

impl ColumnSource {
    fn from_node(node: Node<'_>) -> Self {
        let (memory, offset) = match node.tensor().view {
            Some(view) => (view.base, view.offset),
            None => (node.id(), 0),
        };
        ColumnSource {
            memory,
            offset,
            layout: *node.layout(),
        }
    }

    /// Returns whether the columns are exactly all elements of `node`, in rows of any length.
    fn are_rows_of_memory(&self, node: Node<'_>) -> bool {
        (self.memory, self.offset) == (node.id(), 0)
            && self.layout.is_contiguous()
            && node.layout().is_contiguous()
            && self.layout.dtype() == node.dtype()
            && self.layout.bytes() == node.layout().bytes()
    }

    /// Returns whether the columns are exactly all rows of `node`.
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
    memory: RecordedMemory<'a>,
}

impl Fusion<'_> {
    /// Returns the columns that node number `at` reads as 8-bit numbers, if it is such a product.
    fn columns(&self, at: usize) -> Option<ColumnSource> {
        let node = *self.nodes.get(at)?;
        let (a, b) = (node.source(0)?, node.source(1)?);
        let is_one = |layout: &Layout| layout.shape()[2..] == [1, 1];
        let fits = matches!(node.op(), Op::MulMat { .. })
            && !node.layout().is_empty()
            && b.layout().shape()[1] <= matmul::MAX_COLUMNS
            && [a, b].iter().all(|source| is_one(source.layout()))
            && !b.dtype().is_quantized()
            && !b.dtype().is_integer()
            && self.memory.is_packed(a);
        fits.then(|| ColumnSource::from_node(b))
    }

    /// Fuses the products that start at node `at`.
    fn products(
        &self,
        at: usize,
        held: &mut Option<ColumnSource>,
        steps: &mut Vec<NodeLaunch>,
    ) -> Option<usize> {
        let columns = self.columns(at)?;
        let mut count = 1;
        while count < matmul::MAX_MATRICES && self.columns(at + count) == Some(columns) {
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
            steps.push(NodeLaunch {
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

    /// Fuses a norm and its weights, and the addition before them, starting at node `at`.
    fn norm(
        &self,
        at: usize,
        held: &mut Option<ColumnSource>,
        steps: &mut Vec<NodeLaunch>,
    ) -> Option<usize> {
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
        steps.push(NodeLaunch {
            node: scaled.id(),
            launch: launch.ok()?,
        });
        *held = columns.or(*held);
        Some(first + 2 - at)
    }

    /// Fuses attention with the quantization of its result for the product after it.
    fn attention(
        &self,
        at: usize,
        held: &mut Option<ColumnSource>,
        steps: &mut Vec<NodeLaunch>,
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
        steps.extend(launches.into_iter().map(|launch| NodeLaunch {
            node: node.id(),
            launch,
        }));
        *held = Some(columns);
        Some(1)
    }

    /// Fuses a gated unit with the quantization of its result for the product after it.
    fn gated(
        &self,
        at: usize,
        held: &mut Option<ColumnSource>,
        steps: &mut Vec<NodeLaunch>,
    ) -> Option<usize> {
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
        steps.push(NodeLaunch {
            node: node.id(),
            launch,
        });
        *held = Some(columns);
        Some(1)
    }
}
