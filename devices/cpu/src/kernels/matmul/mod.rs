//! Matrix products.
//!
//! The first phase converts columns of source 1 to the form that the product needs (packed F32, or
//! rounded to fewer bits). The second phase multiplies blocks of weight rows with blocks of
//! columns.
//!
//! - [`product`]: selection of a node's product, and access to rows of weights.
//! - [`gated`](mod@gated): a gated unit as the epilogue of two products.

mod gated;
mod product;

use super::columns::Columns;
use crate::detect::Isa;
use crate::kernel::{
    InputSource, Kernel, KernelContext, Phase, Scratch, UnsupportedKernel, decodable, dense_rows,
};
use crate::operand::Operand;
use crate::product::Column;
use samite_core::{Error, Node, Result};

pub(crate) use gated::{are_worth_gating, gated};
pub(crate) use product::{COLUMNS, ColumnList, Product};

/// Scratch memory of a product.
struct ProductScratchLayout {
    product: Product,
    columns: usize,
    worker: usize,
    total: usize,
}

fn plan(node: Node<'_>, isa: Isa, threads: usize) -> Option<ProductScratchLayout> {
    let x = node.source_layout(1)?;
    let k = x.shape()[0];
    let product = Product::for_node(node, isa)?;
    let columns = Columns::bytes(product.form, x)?;
    let worker = product.worker_bytes(k)?;
    Some(ProductScratchLayout {
        product,
        columns,
        worker,
        total: columns.checked_add(worker.checked_mul(threads)?)?,
    })
}

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let weights = node.source_layout(0).ok_or("there are no weights")?;
    decodable(weights.dtype())?;
    dense_rows(node, 0)?;
    Ok(Kernel::with_scratch(
        |node, isa, threads| Some(plan(node, isa, threads)?.total),
        build,
    ))
}

/// Returns the estimated nanoseconds of a product.
pub(crate) fn cost(rows: usize, columns: usize, k: usize) -> f64 {
    (rows * columns) as f64 * (k as f64 * 0.03 + 2.0)
}

/// Returns the scratch memory plan of the product `node`, that memory, and the columns `x` in it,
/// which come from `input`.
fn place(
    context: &KernelContext<'_>,
    node: Node<'_>,
    x: Operand,
    input: InputSource,
) -> Result<(ProductScratchLayout, Scratch, Columns)> {
    let plan = plan(node, context.isa, context.threads)
        .ok_or_else(|| Error::shape("mul_mat: the size of its workspace overflows"))?;
    let scratch = context.scratch(plan.total)?;
    let columns = Columns::new(x, input, plan.product.form, scratch);
    Ok((plan, scratch, columns))
}

/// Packs columns only.
pub(crate) fn pack(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (_, _, columns) = place(context, context.node, context.source(1)?, context.input)?;
    Ok(columns.pack(context.isa).into_iter().collect())
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, weights, x) = (context.result(), context.source(0)?, context.source(1)?);
    let (plan, scratch, columns) = place(context, context.node, x, context.input)?;
    let product = plan.product;
    let [_, m, w2, w3] = weights.shape();
    let [k, n, n2, n3] = x.shape();
    let (r2, r3) = (n2 / w2, n3 / w3);
    let row_bytes = weights.layout().row_bytes();
    let [rows, part] = product.task(m, row_bytes, context.threads);
    let (row_blocks, column_blocks) = (m.div_ceil(rows), n.div_ceil(part));
    let multiply = Phase::new(
        row_blocks * column_blocks * n2 * n3,
        cost(m, n * n2 * n3, k),
        move |tasks, worker| {
            let mut list = ColumnList::new();
            for task in tasks {
                let (block, rest) = (task % column_blocks, task / column_blocks);
                let (row, matrix) = (rest % row_blocks * rows, rest / row_blocks);
                let (i2, i3) = (matrix % n2, matrix / n2);
                let first = block * part;
                let list = list.fill((n - first).min(part), |c| Column {
                    x: columns.at([first + c, i2, i3]),
                    out: result.at([first + c, i2, i3]).cast(),
                });
                // SAFETY: rows and columns are inside the shapes, which inference checked to fit.
                // Tasks write different parts of the result. Workers have their own scratch memory.
                unsafe {
                    product.run(
                        &weights,
                        [i2 / r2, i3 / r3],
                        row..(row + rows).min(m),
                        list,
                        scratch.at(plan.columns + worker * plan.worker),
                    );
                }
            }
            Ok(())
        },
    );
    Ok(columns
        .pack(context.isa)
        .into_iter()
        .chain([multiply])
        .collect())
}
