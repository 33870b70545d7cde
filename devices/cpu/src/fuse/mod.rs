//! Fusion: decides which nodes are computed together.
//!
//! - Consecutive products of the same columns share their quantized activations. Threads do not
//!   wait for each other between them.
//! - A prologue is computed while activations are quantized: a scaled norm or a gated unit without
//!   other readers. It is never written to memory. If the norm's operand is a sum, that is also
//!   written then.
//! - A gated unit is the epilogue of two products of the same columns whose results exceed the
//!   caches. These results are never written to memory.
//! - Other scaled norms take one pass.
//! - Angles of positions are computed once for all nodes that rotate by them.
//!
//! Fusion does not change results: every number is computed by the same operations in the same
//! order.

use crate::activations::ActivationForm;
use crate::detect::Isa;
use crate::kernels::columns::is_usable;
use crate::kernels::matmul::{Product, are_worth_gating};
use crate::kernels::rope::Angles;
use crate::operand::whole;
use crate::table::kernel_for;
use samite_core::{DType, Layout, Node, Op, PlacedGraph, Readers, TensorId};

/// Role of a computed node in fusion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fusion {
    /// It is computed on its own.
    Alone,
    /// Computed by a later node, and never in memory.
    Absorbed,
    /// A sum that the product after it writes.
    WrittenByPrologue,
    /// A product whose columns the previous one has packed.
    SharesActivations,
    /// Like `SharesActivations`, and runs concurrently with the previous product.
    JoinsPhase,
    /// A rotation whose angles the previous one has computed.
    SharesAngles,
    /// A product that computes its own columns: source 1 is a scaled norm or a gated unit.
    FusedPrologue,
    /// A product of a gated unit. It only packs its columns. `fused` means that it computes them
    /// like `FusedPrologue`.
    PreparesActivations { fused: bool },
    /// A gated unit and the two products before it, whose columns are packed.
    GatedEpilogue,
    /// A scaled norm: the multiplication, together with the norm before it.
    ScaledNorm,
}

/// Identity of packed columns: source memory, form, length and number.
#[derive(PartialEq)]
struct ActivationKey {
    memory: (TensorId, usize),
    dtype: DType,
    shape: [usize; 2],
    form: ActivationForm,
}

/// Returns the fusion of all computed nodes, by position in the graph.
pub(crate) fn fusions(work: &PlacedGraph<'_>, isa: Isa, threads: usize) -> Vec<Fusion> {
    let nodes: Vec<_> = work.computed().collect();
    let mut fusions = vec![Fusion::Alone; work.graph.len()];
    let readers = Readers::new(work.graph);
    // The product that packed the columns in scratch memory, and the number of products that use
    // each packing.
    let mut packer: Option<(usize, ActivationKey)> = None;
    let mut uses = vec![0; nodes.len()];
    // The angles in the workspace.
    let mut angles: Option<Angles> = None;
    for (i, &node) in nodes.iter().enumerate() {
        if matches!(node.op(), Op::Rope(_) | Op::RopeBack(_)) && !node.layout().is_empty() {
            let needed = Angles::for_node(node);
            if needed.is_some() && needed == angles {
                fusions[node.id().index()] = Fusion::SharesAngles;
            }
            angles = needed;
        }
        angles = angles.filter(|angles| !angles.change_with(node, work.graph));
        match columns(node, isa) {
            Some(key) => {
                let first = match &packer {
                    Some((first, held)) if *held == key => {
                        fusions[node.id().index()] = Fusion::SharesActivations;
                        *first
                    }
                    _ => {
                        packer = Some((i, key));
                        i
                    }
                };
                uses[first] += 1;
            }
            None if leaves_scratch(node, isa, threads) => {}
            None => packer = None,
        }
    }
    for i in 1..nodes.len() {
        let (before, node) = (nodes[i - 1], nodes[i]);
        let back = |steps: usize| i.checked_sub(steps).map(|i| nodes[i]);
        if let Some(first) = back(2)
            && fusions[before.id().index()] == Fusion::SharesActivations
            && are_gated_products([first, before], node, isa, &readers)
        {
            let fusion = &mut fusions[first.id().index()];
            *fusion = match *fusion {
                Fusion::SharesActivations => Fusion::Absorbed,
                fusion => Fusion::PreparesActivations {
                    fused: fusion == Fusion::FusedPrologue,
                },
            };
            fusions[before.id().index()] = Fusion::Absorbed;
            fusions[node.id().index()] = Fusion::GatedEpilogue;
            continue;
        }
        let is_written = fusions[before.id().index()] == Fusion::GatedEpilogue;
        let mut set = |node: Node<'_>, fusion| fusions[node.id().index()] = fusion;
        let is_columns = uses[i] > 0
            && node.source(1).is_some_and(|x| has_rows_of(x, before))
            && readers.only(before.id(), uses[i]);
        // Operands may be read as late as in the product: nothing is written between the first of
        // these nodes and the product, which writes its result after packing all columns.
        let norm = back(2).filter(|&norm| is_scaled_norm(norm, before, &readers));
        if is_columns && (norm.is_some() || is_gated(before) && !is_written) {
            let sum = back(3).filter(|&sum| norm.is_some_and(|norm| is_sum_of(sum, norm)));
            sum.into_iter()
                .for_each(|sum| set(sum, Fusion::WrittenByPrologue));
            norm.into_iter()
                .for_each(|norm| set(norm, Fusion::Absorbed));
            set(before, Fusion::Absorbed);
            set(node, Fusion::FusedPrologue);
        } else if let Some(norm) = norm.filter(|&norm| may_be_written(work, norm, before)) {
            set(norm, Fusion::Absorbed);
            set(before, Fusion::ScaledNorm);
        }
    }
    // The product that others join. A single thread would not benefit.
    let mut first = 0;
    for i in (1..nodes.len()).filter(|_| threads > 1) {
        let fusion = |i: usize| fusions[nodes[i].id().index()];
        if fusion(i) != Fusion::SharesActivations {
            continue;
        }
        if fusion(i - 1) != Fusion::JoinsPhase {
            first = i - 1;
        }
        if are_independent(work, &nodes[first..=i], isa, threads) {
            fusions[nodes[i].id().index()] = Fusion::JoinsPhase;
        }
    }
    fusions
}

/// Returns whether the last of these products of the same columns touches no memory of the others,
/// so that their order does not matter.
fn are_independent(
    work: &PlacedGraph<'_>,
    products: &[Node<'_>],
    isa: Isa,
    threads: usize,
) -> bool {
    let [others @ .., last] = products else {
        return false;
    };
    let scratch = |node: Node<'_>| match kernel_for(node) {
        Ok(kernel) if matches!(node.op(), Op::MulMat { .. }) => {
            (kernel.scratch)(node, isa, threads)
        }
        _ => None,
    };
    let sources = |node: Node<'_>| [0, 1].map(|i| node.source(i).map(|source| source.id()));
    let overlap = |a: TensorId, b: Option<TensorId>| {
        let place = |id| work.place(id).ok();
        match (place(a), b.map(place)) {
            (Some(a), Some(Some(b))) => a.overlaps(b),
            _ => true,
        }
    };
    let writes_to = |a: Node<'_>, b: Node<'_>| {
        overlap(a.id(), Some(b.id()))
            || sources(b).into_iter().any(|source| overlap(a.id(), source))
    };
    // The workers' scratch memory follows the columns, so products with the same sizes use the same
    // parts.
    scratch(*last).is_some()
        && others.iter().all(|&other| {
            scratch(other) == scratch(*last) && !writes_to(*last, other) && !writes_to(other, *last)
        })
}

/// Returns the columns that a product packs.
fn columns(node: Node<'_>, isa: Isa) -> Option<ActivationKey> {
    let is_product = matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. });
    if !is_product || node.layout().is_empty() {
        return None;
    }
    let form = Product::for_node(node, isa)?.form;
    let source = node.source(1)?;
    let layout = source.layout();
    if form == ActivationForm::F32 && is_usable(layout) {
        return None;
    }
    Some(ActivationKey {
        memory: whole(source)?,
        dtype: source.dtype(),
        shape: [layout.shape()[0], layout.rows()],
        form,
    })
}

/// Returns whether `view` consists of exactly all rows of `node`.
fn has_rows_of(view: Node<'_>, node: Node<'_>) -> bool {
    let rows = |layout: &Layout| (layout.shape()[0], layout.rows());
    whole(view) == Some((node.id(), 0)) && rows(view.layout()) == rows(node.layout())
}

/// Returns whether `node` leaves the scratch memory and all operands unchanged.
fn leaves_scratch(node: Node<'_>, isa: Isa, threads: usize) -> bool {
    let scratch = kernel_for(node).map(|kernel| (kernel.scratch)(node, isa, threads));
    scratch.is_ok_and(|bytes| bytes == Some(0)) && node.tensor().written().next().is_none()
}

/// Returns whether `scaled` is just the RMS norm `norm` times one row.
fn is_scaled_norm(norm: Node<'_>, scaled: Node<'_>, readers: &Readers) -> bool {
    let (Op::RmsNorm { .. }, Op::Mul) = (norm.op(), scaled.op()) else {
        return false;
    };
    let [Some(x), Some(product), Some(scale)] =
        [norm.source(0), scaled.source(0), scaled.source(1)]
    else {
        return false;
    };
    product.id() == norm.id()
        && readers.only(norm.id(), 1)
        && [x, scale, scaled]
            .iter()
            .all(|node| is_usable(node.layout()))
        && scale.layout().rows() == 1
        && scale.layout().shape()[0] == x.layout().shape()[0]
}

/// Returns whether `sum` is a sum of two tensors of equal shape, and is the operand of `norm`.
fn is_sum_of(sum: Node<'_>, norm: Node<'_>) -> bool {
    let operands = [sum.source_layout(0), sum.source_layout(1)];
    matches!(sum.op(), Op::Add)
        && norm.source(0).is_some_and(|x| x.id() == sum.id())
        && operands
            .iter()
            .flatten()
            .all(|operand| is_usable(operand) && operand.shape() == sum.layout().shape())
}

/// Returns whether `node` is a gated unit of two tensors.
fn is_gated(node: Node<'_>) -> bool {
    matches!(node.op(), Op::Glu { .. })
        && [0, 1]
            .iter()
            .all(|&i| node.source_layout(i).is_some_and(is_usable))
}

/// Returns whether two products are computed together with `gated`, the gated unit of their
/// results.
fn are_gated_products(
    products: [Node<'_>; 2],
    gated: Node<'_>,
    isa: Isa,
    readers: &Readers,
) -> bool {
    let ids = products.map(|product| product.id());
    let operands = [0, 1].map(|i| gated.source(i).map(|source| source.id()));
    is_gated(gated)
        && is_usable(gated.layout())
        && (operands == ids.map(Some) || operands == [ids[1], ids[0]].map(Some))
        && ids.into_iter().all(|id| readers.only(id, 1))
        && are_worth_gating(products, isa)
}

/// Returns whether the memory of a scaled norm's result is exactly that of the norm's operand, or
/// disjoint from all operands.
fn may_be_written(work: &PlacedGraph<'_>, norm: Node<'_>, scaled: Node<'_>) -> bool {
    let place = |node: Option<Node<'_>>| node.and_then(|node| work.place(node.id()).ok());
    let (Some(x), Some(scale), Some(result)) = (
        place(norm.source(0)),
        place(scaled.source(1)),
        place(Some(scaled)),
    ) else {
        return false;
    };
    let in_place = x.location() == result.location() && x.layout() == result.layout();
    !scale.overlaps(result) && (in_place || !x.overlaps(result))
}

#[cfg(test)]
mod tests;
