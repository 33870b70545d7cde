//! Sums of outer products: the gradients of matrix products.

use crate::kernel::{Kernel, UnsupportedKernel, dense_rows};
use crate::kernel::{KernelContext, Phase};
use crate::kernels::outer::float::{Outer, sums};
use samite_core::{DType, Error, Node, Result};

/// Number of columns of a task: several times that of a tile.
const COLUMNS: usize = 48;

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let rows = node.source_layout(0).ok_or("there are no rows")?;
    if !matches!(rows.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(format!("rows of {} cannot be multiplied", rows.dtype()).into());
    }
    dense_rows(node, 0)?;
    Ok(Kernel::plain(build))
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, rows, factors) = (context.result(), context.source(0)?, context.source(1)?);
    let function = sums(context.isa, rows.dtype())
        .ok_or_else(|| Error::invalid("out_prod: there is no kernel for such rows"))?;
    let [len, terms, a2, a3] = rows.shape();
    let [columns, _, n2, n3] = factors.shape();
    let (r2, r3) = (n2 / a2, n3 / a3);
    let blocks = columns.div_ceil(COLUMNS);
    let cost = result.elements() as f64 * (terms as f64 * 0.02 + 0.3);
    Ok(vec![Phase::new(blocks * n2 * n3, cost, move |tasks, _| {
        for task in tasks {
            let (column, matrix) = (task % blocks * COLUMNS, task / blocks);
            let (i2, i3) = (matrix % n2, matrix / n2);
            let [column_stride, term_stride, ..] = factors.strides();
            let work = Outer {
                rows: rows.at([0, i2 / r2, i3 / r3]),
                row_stride: rows.strides()[1],
                len,
                terms,
                factors: factors
                    .at([0, i2, i3])
                    .wrapping_add(column * column_stride)
                    .cast(),
                column_stride,
                term_stride,
                out: result.at([column, i2, i3]).cast(),
                out_stride: result.strides()[1],
                columns: (columns - column).min(COLUMNS),
                add: false,
            };
            // SAFETY: rows, factors and sums are inside the shapes, which inference checked to fit.
            // Tasks write different columns. The function belongs to the detected instruction set.
            unsafe { function(&work) };
        }
        Ok(())
    })])
}
