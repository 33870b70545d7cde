//! Operations that arrange elements: repeat, concat, pad, arange.

use super::copy::copy_blocks;
use crate::kernel::{KernelContext, Phase};
use crate::operand::Operand;
use samite_core::{Error, Op, Result};

/// Copies a row of `source` to block number `start` of a row of `result` with the same type.
///
/// # Safety
/// See [`Operand`]. Both places must exist.
unsafe fn copy_row(
    source: &Operand,
    from: [usize; 3],
    result: &Operand,
    to: [usize; 3],
    start: usize,
) {
    let dtype = source.dtype();
    let (from_stride, to_stride) = (source.strides()[0], result.strides()[0]);
    // SAFETY: both places exist, for all blocks of the row. Result and source have one type, so
    // blocks have one size.
    unsafe {
        copy_blocks(
            source.at(from),
            from_stride,
            result.at(to).wrapping_add(start * to_stride),
            to_stride,
            dtype.block_bytes(),
            source.shape()[0] / dtype.block_len(),
        );
    }
}

/// Returns a phase that calls `f` for each row of the result.
fn each_row(
    context: &KernelContext<'_>,
    f: impl Fn(&Operand, [usize; 3]) + Send + Sync + 'static,
) -> Phase {
    let result = context.result();
    Phase::new(
        result.rows(),
        result.elements() as f64 * 0.3,
        move |tasks, _| {
            for row in tasks {
                f(&result, result.layout().row_index(row));
            }
            Ok(())
        },
    )
}

/// Repeats source 0 along every dimension.
pub(crate) fn repeat(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let source = context.source(0)?;
    let [s0, s1, s2, s3] = source.shape();
    Ok(vec![each_row(context, move |result, row| {
        let [i1, i2, i3] = row;
        for start in (0..result.shape()[0]).step_by(s0) {
            // SAFETY: the result's extents are multiples of the source's, and tasks are rows.
            unsafe { copy_row(&source, [i1 % s1, i2 % s2, i3 % s3], result, row, start) };
        }
    })])
}

/// Writes source 0 followed by source 1.
pub(crate) fn concat(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let Op::Concat { dim } = *context.node.op() else {
        return Err(Error::invalid("not concat"));
    };
    let (a, b) = (context.source(0)?, context.source(1)?);
    let extent = a.shape()[dim];
    Ok(vec![each_row(context, move |result, row| {
        // SAFETY: rows of the result are those of the sources, and tasks are rows.
        unsafe {
            if dim == 0 {
                copy_row(&a, row, result, row, 0);
                copy_row(&b, row, result, row, extent / a.dtype().block_len());
            } else if row[dim - 1] < extent {
                copy_row(&a, row, result, row, 0);
            } else {
                let mut from = row;
                from[dim - 1] -= extent;
                copy_row(&b, from, result, row, 0);
            }
        }
    })])
}

/// Surrounds source 0 with zeros.
pub(crate) fn pad(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let Op::Pad { before, .. } = *context.node.op() else {
        return Err(Error::invalid("not pad"));
    };
    let source = context.source(0)?;
    let [_, s1, s2, s3] = source.shape();
    Ok(vec![each_row(context, move |result, row| {
        let from: [usize; 3] = std::array::from_fn(|d| row[d].wrapping_sub(before[d + 1]));
        // SAFETY: the result is F32 and holds the source at `before`, and tasks are rows.
        unsafe {
            result.row_mut::<f32>(row).fill(0.0);
            if from[0] < s1 && from[1] < s2 && from[2] < s3 {
                copy_row(&source, from, result, row, before[0]);
            }
        }
    })])
}

/// Writes evenly spaced numbers.
pub(crate) fn arange(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let Op::Arange { start, step, .. } = *context.node.op() else {
        return Err(Error::invalid("not arange"));
    };
    Ok(vec![each_row(context, move |result, row| {
        // SAFETY: the result is one F32 row.
        for (i, x) in unsafe { result.row_mut::<f32>(row) }.iter_mut().enumerate() {
            *x = start + step * i as f32;
        }
    })])
}
