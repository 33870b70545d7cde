//! Gradients of operations other than products.

use super::elementwise::zip;
use super::reduce::{change_rows, dot_of, sum_row};
use super::rows::row_number;
use crate::detect::vectorized;
use crate::kernel::{KernelContext, Phase};
use crate::simd::math;
use samite_core::Result;

/// Columns of a task that sums rows.
const COLUMNS: usize = 64;

/// Returns the gradient of silu.
pub(crate) fn silu(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (gradient, x) = (context.source(0)?, context.source(1)?);
    let phase = zip(context, gradient, x, 1.2, |g, x| {
        let s = math::sigmoid(x);
        g * s * (1.0 + x * (1.0 - s))
    });
    Ok(vec![phase?])
}

/// Returns the gradient of an RMS norm. Rows of its operand must have no gaps.
pub(crate) fn rms_norm(context: &KernelContext<'_>, eps: f32) -> Result<Phase> {
    let x = context.source(1)?;
    change_rows(context, 0.6, move |isa, row, out| {
        // SAFETY: inference checked that both sources have the same rows, and the table that they
        // have no gaps.
        let x = unsafe { x.row::<f32>(row) };
        rms_norm_row(isa, out, x, eps);
    })
}

/// Returns the gradient of softmax. Rows of its result must have no gaps.
pub(crate) fn soft_max(context: &KernelContext<'_>, scale: f32) -> Result<Phase> {
    let y = context.source(1)?;
    change_rows(context, 0.6, move |isa, row, out| {
        // SAFETY: inference checked that both sources have the same rows, and the table that they
        // have no gaps.
        let y = unsafe { y.row::<f32>(row) };
        soft_max_row(isa, out, y, scale);
    })
}

vectorized! {
    fn rms_norm_row(gradient: &mut [f32], x: &[f32], eps: f32) {
        let n = gradient.len() as f32;
        let scale = 1.0 / (dot_of(x, x) / n + eps).sqrt();
        let pull = scale * scale * dot_of(gradient, x) / n;
        for (g, x) in gradient.iter_mut().zip(x) {
            *g = scale * (*g - *x * pull);
        }
    }
}

vectorized! {
    fn soft_max_row(gradient: &mut [f32], y: &[f32], scale: f32) {
        let mean = dot_of(gradient, y);
        for (g, y) in gradient.iter_mut().zip(y) {
            *g = scale * *y * (*g - mean);
        }
    }
}

/// Sums all elements that a repetition created. Each task computes some columns of a row of the
/// result.
pub(crate) fn repeat(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    let [n0, n1, n2, n3] = result.shape();
    let [s0, s1, s2, s3] = source.shape();
    let parts = n0.div_ceil(COLUMNS);
    // Every row of the source that contributes to row `row` of the result.
    let rows_of = move |[i1, i2, i3]: [usize; 3]| {
        (i3..s3).step_by(n3).flat_map(move |i3| {
            (i2..s2)
                .step_by(n2)
                .flat_map(move |i2| (i1..s1).step_by(n1).map(move |i1| [i1, i2, i3]))
        })
    };
    Ok(vec![Phase::new(
        parts * result.rows(),
        source.elements() as f64 * 0.4,
        move |tasks, _| {
            let mut buffer = [0.0; COLUMNS];
            for task in tasks {
                let (start, row) = (
                    task % parts * COLUMNS,
                    result.layout().row_index(task / parts),
                );
                let len = (n0 - start).min(COLUMNS);
                let mut sums = [0.0; COLUMNS];
                let (sums, buffer) = (&mut sums[..len], &mut buffer[..len]);
                for from in rows_of(row) {
                    if n0 == 1 {
                        // SAFETY: the row is inside the source.
                        sums[0] += unsafe { sum_row(isa, &source, from) } as f32;
                        continue;
                    }
                    for first in (start..s0).step_by(n0) {
                        // SAFETY: the source's extents are multiples of the result's.
                        unsafe { source.load(from, first, buffer) };
                        isa.run(|| sums.iter_mut().zip(&*buffer).for_each(|(s, x)| *s += *x));
                    }
                }
                // SAFETY: inside the row, and tasks do not overlap.
                unsafe { result.store(isa, row, start, sums) };
            }
            Ok(())
        },
    )])
}

/// Sums the gradients of each row of a table. Each task computes some columns, in the order of the
/// rows.
pub(crate) fn get_rows(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, gradient, numbers, isa) = (
        context.result(),
        context.source(0)?,
        context.source(1)?,
        context.isa,
    );
    let [n0, count, ..] = result.shape();
    let given = gradient.shape()[1];
    Ok(vec![Phase::new(
        n0.div_ceil(COLUMNS),
        (result.elements() + gradient.elements()) as f64 * 0.4,
        move |tasks, _| {
            let mut buffer = [0.0; COLUMNS];
            for task in tasks {
                let start = task * COLUMNS;
                let len = (n0 - start).min(COLUMNS);
                // SAFETY: the columns are inside the rows of result and gradient. Row numbers are
                // checked. Tasks do not overlap.
                unsafe {
                    let part = |row: usize| {
                        let first = result.at([row, 0, 0]).cast::<f32>().add(start);
                        std::slice::from_raw_parts_mut(first, len)
                    };
                    for row in 0..count {
                        part(row).fill(0.0);
                    }
                    for row in 0..given {
                        let to = part(row_number(&numbers, 1, [0; 3], row, count)?);
                        let from = &mut buffer[..len];
                        gradient.load([row, 0, 0], start, from);
                        isa.run(|| to.iter_mut().zip(&*from).for_each(|(s, x)| *s += *x));
                    }
                }
            }
            Ok(())
        },
    )])
}
