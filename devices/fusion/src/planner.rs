//! Builds launch lists.

use crate::memory::{Facts, RecordedMemory};
use crate::{
    ColumnForm, ColumnReader, Fused, Kernels, Memory, NodeLaunch, OperandFacts, ScaledNorm,
    Unsupported,
};
use samite_core::{Graph, Layout, Node, Op, Readers, TensorId};

/// The launches of some nodes, without addresses.
pub struct LaunchList<K: Kernels> {
    /// Launches in order.
    pub launches: Vec<NodeLaunch<K::Launch>>,
    facts: Facts,
}

impl<K: Kernels> LaunchList<K> {
    /// Returns whether the list for `memory` would be the same. The graph must be the same.
    pub fn fits(&self, graph: &Graph, memory: Memory<'_>) -> bool {
        self.facts.hold::<K>(graph, memory)
    }
}

/// Returns the launches of `nodes`.
///
/// # Errors
/// Returns the node that the device does not support, and the reason.
pub fn launch_list<K: Kernels>(
    graph: &Graph,
    nodes: &[TensorId],
    kernels: K,
    memory: Memory<'_>,
) -> Result<LaunchList<K>, (TensorId, Unsupported)> {
    let computed = nodes.iter().map(|&id| graph.node(id));
    let nodes: Vec<_> = computed
        .filter(|node| node.tensor().is_computed())
        .collect();
    let mut planner = FusionPlanner {
        nodes: &nodes,
        readers: Readers::new(graph),
        kernels,
        memory: RecordedMemory::new(graph, memory),
        launches: Vec::new(),
        held: None,
    };
    let mut at = 0;
    while at < nodes.len() {
        at += planner.add(at)?;
    }
    Ok(LaunchList {
        launches: planner.launches,
        facts: planner.memory.into_facts(),
    })
}

/// The elements that a product has as columns.
#[derive(Clone, Copy, PartialEq)]
pub struct ColumnSource {
    memory: TensorId,
    offset: usize,
    layout: Layout,
}

impl ColumnSource {
    pub fn from_node(node: Node<'_>) -> Self {
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
    pub fn are_rows_of_memory(&self, node: Node<'_>) -> bool {
        (self.memory, self.offset) == (node.id(), 0)
            && self.layout.is_contiguous()
            && node.layout().is_contiguous()
            && self.layout.dtype() == node.dtype()
            && self.layout.bytes() == node.layout().bytes()
    }

    /// Returns whether the columns are exactly all rows of `node`.
    fn are_rows_of(&self, node: Node<'_>) -> bool {
        let rows = |layout: &Layout| (layout.shape()[0], layout.rows());
        self.are_rows_of_memory(node) && rows(&self.layout) == rows(node.layout())
    }
}

/// Columns in scratch memory.
#[derive(Clone, Copy, PartialEq)]
struct ConvertedColumns {
    source: ColumnSource,
    form: ColumnForm,
}

/// A product that reads converted columns.
#[derive(Clone, Copy)]
struct ColumnProduct<'a> {
    node: Node<'a>,
    columns: ConvertedColumns,
    packed: bool,
}

pub struct FusionPlanner<'a, K: Kernels> {
    pub nodes: &'a [Node<'a>],
    pub readers: Readers,
    pub kernels: K,
    pub memory: RecordedMemory<'a, K>,
    launches: Vec<NodeLaunch<K::Launch>>,
    /// The columns that scratch memory begins with.
    held: Option<ConvertedColumns>,
}

impl<'a, K: Kernels> FusionPlanner<'a, K> {
    /// Adds the launches of node number `at` and of those that are fused with it. Returns the
    /// number of nodes.
    fn add(&mut self, at: usize) -> Result<usize, (TensorId, Unsupported)> {
        let before = self.held;
        let fusions: [fn(&mut Self, usize) -> Option<usize>; 5] = [
            FusionPlanner::products,
            FusionPlanner::before_attention,
            FusionPlanner::norm,
            FusionPlanner::gated,
            FusionPlanner::attention,
        ];
        let count = match fusions.iter().find_map(|fuse| fuse(self, at)) {
            Some(count) => count,
            None => self.one(at)?,
        };
        let mut nodes = self.nodes[at..at + count].iter();
        if let Some(held) = self.held.filter(|_| self.held == before)
            && nodes.any(|&node| self.may_write(node, held.source.memory))
        {
            self.held = None;
        }
        Ok(count)
    }

    /// Returns whether a node may write to the memory of `id`.
    fn may_write(&self, node: Node<'_>, id: TensorId) -> bool {
        let written = node.tensor().written().map(|(_, id)| id).chain([node.id()]);
        let mut written = written.map(|written| self.memory.are_apart(written, id, false));
        written.any(|is_apart| !is_apart)
    }

    /// Adds the launches of one node.
    fn one(&mut self, at: usize) -> Result<usize, (TensorId, Unsupported)> {
        let node = self.nodes[at];
        let facts = OperandFacts {
            packed: self.memory.is_packed(node),
            aligned: self.has_aligned_sources(node),
        };
        let launches = self.kernels.launches_of(node, facts);
        self.push_other(node, launches.map_err(|reason| (node.id(), reason))?);
        Ok(1)
    }

    fn has_aligned_sources(&self, node: Node<'_>) -> bool {
        let mut sources = [1, 2].into_iter().filter_map(|index| node.source(index));
        sources.all(|source| self.memory.is_aligned(source.id()))
    }

    fn push(&mut self, node: Node<'_>, launches: Vec<K::Launch>) {
        let node = node.id();
        let launches = launches.into_iter();
        self.launches
            .extend(launches.map(|launch| NodeLaunch { node, launch }));
    }

    /// Adds launches that use scratch memory for other things than columns, if they use it.
    pub fn push_other(&mut self, node: Node<'_>, launches: Vec<K::Launch>) {
        if launches.iter().any(K::uses_scratch) {
            self.held = None;
        }
        self.push(node, launches);
    }

    /// Returns node number `at` if it is a product that reads converted columns.
    fn column_product(&self, at: usize) -> Option<ColumnProduct<'a>> {
        let node = *self.nodes.get(at)?;
        let b = node.source(1)?;
        if !matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. }) || node.layout().is_empty()
        {
            return None;
        }
        let packed = self.memory.is_packed(node);
        let columns = ConvertedColumns {
            source: ColumnSource::from_node(b),
            form: self.kernels.column_form(node, packed)?,
        };
        Some(ColumnProduct {
            node,
            columns,
            packed,
        })
    }

    /// Fuses the products that start at node `at`.
    fn products(&mut self, at: usize) -> Option<usize> {
        let ColumnProduct {
            node,
            columns,
            packed,
        } = self.column_product(at)?;
        let mut count = 1;
        while count < self.kernels.max_products() {
            let Some(next) = self.column_product(at + count) else {
                break;
            };
            let mut others = self.nodes[at..at + count].iter();
            let joins = next.columns == columns
                && next.packed == packed
                && self.kernels.may_join([node, next.node], columns.form)
                && others.all(|other| {
                    let [a, b] = [other.id(), next.node.id()];
                    self.memory.are_apart(a, b, false)
                });
            if !joins {
                break;
            }
            count += 1;
        }
        let nodes = &self.nodes[at..at + count];
        let products = self.kernels.products(nodes, packed)?;
        if self.held != Some(columns) {
            let converted = self.kernels.convert(node, packed)?;
            self.push(node, converted);
            self.held = Some(columns);
        }
        self.push(node, products);
        Some(count)
    }

    /// Adds the launches of `node`. If the product at node `next` has the result as its columns, by
    /// `is_source`, and the device has such a kernel, they also convert the columns.
    fn convert_for(
        &mut self,
        node: Node<'a>,
        next: usize,
        is_source: impl Fn(&ColumnSource) -> bool,
        launches: impl Fn(K, Option<ColumnReader<'a>>) -> Fused<K::Launch>,
    ) -> Option<()> {
        let product = self.column_product(next);
        let product = product.filter(|product| is_source(&product.columns.source));
        let converted = product.and_then(|product| {
            let reader = ColumnReader {
                product: product.node,
                form: product.columns.form,
            };
            let launches = launches(self.kernels, Some(reader))?;
            Some((launches, product.columns))
        });
        match converted {
            Some((launches, columns)) => {
                self.held = Some(columns);
                self.push(node, launches);
            }
            None => self.push_other(node, launches(self.kernels, None)?),
        }
        Some(())
    }

    /// Fuses a norm and its weights, and the addition before them, starting at node `at`.
    fn norm(&mut self, at: usize) -> Option<usize> {
        let first = self.nodes[at];
        let is_sum = matches!(first.op(), Op::Add);
        let start = at + usize::from(is_sum);
        let norm = self.scaled_norm(start)?;
        let (x, factor) = (norm.norm.source(0)?, norm.scaled.source(1)?);
        let scaled = norm.scaled;
        let shape = |node: Node<'_>| node.layout().shape();
        let apart = |a: Node<'_>, b: Node<'_>, same| self.memory.are_apart(a.id(), b.id(), same);
        if !apart(scaled, factor, false) || !apart(scaled, x, true) {
            return None;
        }
        if is_sum {
            let terms = [first.source(0)?, first.source(1)?];
            let fits = x.id() == first.id()
                && terms.iter().all(|&term| shape(term) == shape(first))
                && terms.iter().all(|&term| apart(scaled, term, true))
                && apart(first, factor, false)
                && apart(scaled, first, false);
            if !fits {
                return None;
            }
        }
        let norm = ScaledNorm {
            sum: is_sum.then_some(first),
            ..norm
        };
        self.convert_for(
            scaled,
            start + 2,
            |columns| columns.are_rows_of(scaled),
            |kernels, reader| kernels.scaled_norm(&norm, reader),
        )?;
        Some(start + 2 - at)
    }

    /// Returns the norm at node `at` with the multiplication after it, which only reads the norm.
    pub fn scaled_norm(&self, at: usize) -> Option<ScaledNorm<'a>> {
        let (norm, scaled) = (*self.nodes.get(at)?, *self.nodes.get(at + 1)?);
        let (&Op::RmsNorm { eps }, Op::Mul) = (norm.op(), scaled.op()) else {
            return None;
        };
        let factor = scaled.source(1)?.layout();
        let fits = scaled.source(0)?.id() == norm.id()
            && self.readers.only(norm.id(), 1)
            && norm.tensor().view.is_none()
            && factor.rows() == 1
            && factor.shape()[0] == norm.layout().shape()[0]
            && !scaled.layout().is_empty();
        fits.then_some(ScaledNorm {
            norm,
            scaled,
            sum: None,
            eps,
        })
    }

    /// Fuses attention with the conversion of its result for the product after it.
    fn attention(&mut self, at: usize) -> Option<usize> {
        let node = self.nodes[at];
        let &Op::FlashAttn { .. } = node.op() else {
            return None;
        };
        let [size, heads, tokens, batch] = node.layout().shape();
        let facts = OperandFacts {
            packed: false,
            aligned: self.has_aligned_sources(node),
        };
        self.convert_for(
            node,
            at + 1,
            |columns| {
                batch == 1
                    && columns.are_rows_of_memory(node)
                    && columns.layout.shape() == [size * heads, tokens, 1, 1]
            },
            |kernels, reader| kernels.attention(node, facts, reader?),
        )?;
        Some(1)
    }

    /// Fuses a gated unit with the conversion of its result for the product after it.
    fn gated(&mut self, at: usize) -> Option<usize> {
        let node = self.nodes[at];
        if !matches!(node.op(), Op::Glu { .. }) {
            return None;
        }
        let sources = [node.source(0)?, node.source(1)?];
        let mut sources = sources.iter();
        if !sources.all(|source| self.memory.are_apart(node.id(), source.id(), true)) {
            return None;
        }
        self.convert_for(
            node,
            at + 1,
            |columns| columns.are_rows_of(node),
            |kernels, reader| kernels.gated(node, reader?),
        )?;
        Some(1)
    }
}
