//! A gated unit as the epilogue of two products of the same columns, so that results stay in the
//! cache.

use super::{COLUMNS, ColumnList, Product, cost, place};
use crate::detect::Isa;
use crate::kernel::{InputSource, KernelContext, Phase};
use crate::kernels::glu;
use crate::operand::Operand;
use crate::packed::{self, PANEL};
use crate::product::Column;
use samite_core::{Error, Layout, Node, Op, Result};

/// Returns whether computing two products of the same columns together with a gated unit of their
/// results is faster. It is if the results would exceed the caches and the products process a panel
/// of rows at a time.
pub(crate) fn are_worth_gating(products: [Node<'_>; 2], isa: Isa) -> bool {
    let [Some(first), Some(second)] = products.map(|node| node.source_layout(0)) else {
        return false;
    };
    let is_one = |layout: &Layout| layout.shape()[2..] == [1, 1];
    first == second
        && is_one(products[0].layout())
        && products.iter().all(|&node| {
            matches!(node.op(), Op::MulMat { .. })
                && Product::for_node(node, isa).is_some_and(|product| product.goes_by_panels())
        })
}

/// Returns the phase of a gated unit of two products, including `product`: of the rows of two
/// matrices with the packed columns `x`.
pub(crate) fn gated(
    context: &KernelContext<'_>,
    product: Node<'_>,
    weights: [Operand; 2],
    x: Operand,
) -> Result<Vec<Phase>> {
    let &Op::Glu { kind, .. } = context.node.op() else {
        return Err(Error::invalid(format!(
            "{} is not gated",
            context.node.op()
        )));
    };
    let (plan, scratch, columns) = place(context, product, x, InputSource::Shared)?;
    let (result, isa, product) = (context.result(), context.isa, plan.product.within_caches());
    let ([_, m, ..], [k, n, ..]) = (weights[0].shape(), x.shape());
    let row_bytes = weights[0].layout().row_bytes();
    let [rows, part] = product.task(m, row_bytes, context.threads);
    let column_blocks = n.div_ceil(part);
    let cost = 2.0 * cost(m, n, k) + glu::cost(kind) * (m * n) as f64;
    let tasks = m.div_ceil(rows) * column_blocks;
    Ok(vec![Phase::new(tasks, cost, move |tasks, worker| {
        let scratch = scratch.at(plan.columns + worker * plan.worker);
        let mut list = ColumnList::new();
        let mut halves = [const { Lines([[0.0; PANEL]; COLUMNS]) }; 2];
        for task in tasks {
            let (first, row) = (task % column_blocks * part, task / column_blocks * rows);
            let count = (n - first).min(part);
            let last = (row + rows).min(m);
            // Few columns are multiplied with several panels at a time, which are read in streams.
            let step = PANEL * (COLUMNS / count).clamp(1, GATED_PANELS);
            for row in (row..last).step_by(step) {
                let end = (row + step).min(last);
                for (weights, half) in weights.iter().zip(&mut halves) {
                    let out = half.0.as_flattened_mut().as_mut_ptr().wrapping_sub(row);
                    let list = list.fill(count, |c| Column {
                        x: columns.at([first + c, 0, 0]),
                        out: out.wrapping_add(c * step),
                    });
                    // SAFETY: rows and columns are inside the shapes, which inference checked to
                    // fit, and there is room for their products. Workers have their own scratch
                    // memory.
                    unsafe { product.run(weights, [0, 0], row..end, list, scratch) };
                }
                let [Lines(a), Lines(b)] = &halves;
                let panels = step / PANEL;
                for first_line in (0..count * panels).step_by(GATED) {
                    let lines = first_line..(first_line + GATED).min(count * panels);
                    let mut out = Lines([[0.0; PANEL]; GATED]);
                    let (a, b) = (
                        a[lines.clone()].as_flattened(),
                        b[lines.clone()].as_flattened(),
                    );
                    let all = &mut out.0[..lines.len()];
                    glu::gate_slice(isa, kind, all.as_flattened_mut(), a, b);
                    for (line, out) in lines.zip(&out.0) {
                        let (c, row) = (line / panels, row + line % panels * PANEL);
                        if row >= end {
                            continue;
                        }
                        let to = result.at([first + c, 0, 0]).cast::<f32>().wrapping_add(row);
                        // SAFETY: the row is inside the result, and tasks write different parts of
                        // it.
                        unsafe { packed::store(out.as_ptr(), to, PANEL.min(end - row), true) };
                    }
                }
            }
            packed::all_stored();
        }
        Ok(())
    })])
}

/// Number of panels of a gated unit that are computed at a time.
const GATED: usize = 8;

/// Maximum number of panels of each matrix that are multiplied before results are gated.
const GATED_PANELS: usize = 16;

/// Results of some columns for a panel, aligned to cache lines.
#[repr(align(64))]
struct Lines<const N: usize>([[f32; PANEL]; N]);
