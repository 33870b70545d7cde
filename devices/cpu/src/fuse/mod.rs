//! Fused regions: which nodes are computed together.
//!
//! - Products of the same columns, one after the other, share their quantized activations. Threads do not wait for each other between them.
//! - A prologue is computed while activations are quantized: a scaled norm, or a gated unit, that nothing else reads. It is never written to
//!   memory. A sum that such a norm is of is written then, too.
//! - A gated unit is the epilogue of two products of the same columns where their results are too large for the caches: they never get
//!   to memory.
//! - Other scaled norms take one pass.
//! - Angles of positions are computed once for all that are rotated by them.
//!
//! No result changes by that: every number is computed by the same operations in the same order.

use crate::activations::ActivationForm;
use crate::detect::Isa;
use crate::kernels::columns::is_usable;
use crate::kernels::matmul::{Product, are_worth_gating};
use crate::kernels::rope::Angles;
use crate::operand::whole;
use crate::table::kernel_for;
use samite_core::{DType, Layout, Node, Op, Placed, Readers, TensorId};

/// What becomes of a computed node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fusion {
    /// It is computed on its own.
    Alone,
    /// Computed by what comes behind; never in memory.
    Absorbed,
    /// A sum that the product behind writes.
    WrittenByPrologue,
    /// A product whose columns the one before has packed.
    SharesActivations,
    /// The same, at the same time as the product before.
    JoinsPhase,
    /// A rotation whose angles the one before has computed.
    SharesAngles,
    /// A product that makes its columns: source 1 is a scaled norm or a gated unit.
    FusedPrologue,
    /// A product of a gated unit: only its columns are packed here, `fused` as those of `FusedPrologue`.
    PreparesActivations { fused: bool },
    /// A gated unit and the two products before it, whose columns are packed.
    GatedEpilogue,
    /// A scaled norm: the factor, with the norm before it.
    ScaledNorm,
}

/// Columns in a product's form: the memory that they come from, their type, how long they are and how many.
#[derive(PartialEq)]
struct ActivationKey {
    memory: (TensorId, usize),
    dtype: DType,
    shape: [usize; 2],
    form: ActivationForm,
}

/// The parts of all computed nodes, by position in the graph.
pub(crate) fn fusions(work: &Placed<'_>, isa: Isa, threads: usize) -> Vec<Fusion> {
    let nodes: Vec<_> = work.computed().collect();
    let mut fusions = vec![Fusion::Alone; work.graph.len()];
    let readers = Readers::new(work.graph);
    // The product that packed what lies in the scratch memory; and how many products use what each one packed.
    let mut packer: Option<(usize, ActivationKey)> = None;
    let mut uses = vec![0; nodes.len()];
    // The angles that lie in the workspace.
    let mut angles: Option<Angles> = None;
    for (i, &node) in nodes.iter().enumerate() {
        if matches!(node.op(), Op::Rope(_) | Op::RopeBack(_)) && !node.layout().is_empty() {
            let needed = Angles::of(node);
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
        // Operands may be read as late as that: nothing is written between the first of these nodes and the product, which writes
        // its result after all columns are packed.
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
    // The product that others join. A thread alone would gain nothing by it.
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

/// Whether the last of these products of the same columns touches nothing that the others do, so that it does not matter which is first.
fn are_independent(work: &Placed<'_>, products: &[Node<'_>], isa: Isa, threads: usize) -> bool {
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
    // Workers' parts of the scratch memory lie behind the columns: where it is of the same size, they are the same.
    scratch(*last).is_some()
        && others.iter().all(|&other| {
            scratch(other) == scratch(*last) && !writes_to(*last, other) && !writes_to(other, *last)
        })
}

/// The columns that a product packs.
fn columns(node: Node<'_>, isa: Isa) -> Option<ActivationKey> {
    let is_product = matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. });
    if !is_product || node.layout().is_empty() {
        return None;
    }
    let form = Product::of(node, isa)?.form;
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

/// Whether `view` is nothing but all rows of `node`.
fn has_rows_of(view: Node<'_>, node: Node<'_>) -> bool {
    let rows = |layout: &Layout| (layout.shape()[0], layout.rows());
    whole(view) == Some((node.id(), 0)) && rows(view.layout()) == rows(node.layout())
}

/// Whether scratch memory and all operands stay what they are.
fn leaves_scratch(node: Node<'_>, isa: Isa, threads: usize) -> bool {
    let scratch = kernel_for(node).map(|kernel| (kernel.scratch)(node, isa, threads));
    scratch.is_ok_and(|bytes| bytes == Some(0)) && node.tensor().written().next().is_none()
}

/// Whether `scaled` is nothing but `norm`, an RMS norm, times one row.
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

/// Whether `sum` is a sum of two tensors of equal shape, and what `norm` is a norm of.
fn is_sum_of(sum: Node<'_>, norm: Node<'_>) -> bool {
    let operands = [sum.source_layout(0), sum.source_layout(1)];
    matches!(sum.op(), Op::Add)
        && norm.source(0).is_some_and(|x| x.id() == sum.id())
        && operands
            .iter()
            .flatten()
            .all(|operand| is_usable(operand) && operand.shape() == sum.layout().shape())
}

/// Whether `node` is a gated unit of two tensors.
fn is_gated(node: Node<'_>) -> bool {
    matches!(node.op(), Op::Glu { .. })
        && [0, 1]
            .iter()
            .all(|&i| node.source_layout(i).is_some_and(is_usable))
}

/// Whether two products are computed with `gated`, the unit of their results.
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

/// Whether the memory of a scaled norm's result is exactly that of the norm's operand, or touches none of the operands.
fn may_be_written(work: &Placed<'_>, norm: Node<'_>, scaled: Node<'_>) -> bool {
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
