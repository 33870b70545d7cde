//! Copies and conversions between layouts and types, element by element in logical order.

use crate::detect::Isa;
use crate::kernel::{Kernel, UnsupportedKernel};
use crate::kernel::{KernelContext, Phase};
use crate::operand::{Operand, pieces};
use samite_core::{DType, Layout, Node, Op, Result};
use std::ops::Range;

/// Number of elements that one task copies: a multiple of every block length.
const TASK: usize = 4096;

/// Maximum number of elements of a short row, and number of such rows in a task.
const SHORT: usize = 8;
const ROWS: usize = 512;

/// Returns the kernel of dup, cont, cast and cpy.
pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let (from, to) = (
        node.source_layout(0).map(Layout::dtype),
        node.layout().dtype(),
    );
    let from = from.ok_or("there is nothing to copy")?;
    let number = |dtype: DType| dtype.is_float() || samite_quant::can_decode(dtype);
    let possible = from == to
        || (number(from) && samite_quant::can_encode(to))
        || matches!(
            (from, to),
            (DType::I32, DType::F32) | (DType::F32, DType::I32)
        );
    if !possible {
        return Err(format!("{from} cannot be converted to {to}").into());
    }
    if from != to && from.is_quantized() && to.is_quantized() && from.block_len() != to.block_len()
    {
        return Err("blocks of different length".into());
    }
    let rows = node.source_layout(0).map(|layout| layout.shape()[0]);
    if (from.is_quantized() || to.is_quantized()) && rows != Some(node.layout().shape()[0]) {
        // Otherwise a block could cross the end of a row.
        let contiguous = |layout: &Layout| !layout.dtype().is_quantized() || layout.is_contiguous();
        if !(node.source_layout(0).is_some_and(contiguous) && contiguous(node.layout())) {
            return Err("blocks would be cut at the ends of rows".into());
        }
    }
    Ok(Kernel::plain(build))
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (mut result, mut source) = (context.result(), context.source(0)?);
    debug_assert!(matches!(
        context.node.op(),
        Op::Dup | Op::Cont | Op::Cast { .. } | Op::Cpy
    ));
    if let (Some(flat_result), Some(flat_source)) = (result.flat(), source.flat()) {
        (result, source) = (flat_result, flat_source);
    }
    if let Some(phase) = short_rows(&source, &result) {
        return Ok(vec![phase]);
    }
    let elements = result.elements();
    let (isa, same_type) = (context.isa, result.dtype() == source.dtype());
    let cost = if same_type {
        0.2
    } else if result.dtype().is_quantized() {
        8.0
    } else {
        0.5
    };
    Ok(vec![Phase::new(
        elements.div_ceil(TASK),
        elements as f64 * cost,
        move |tasks, _| {
            let range = tasks.start * TASK..(tasks.end * TASK).min(elements);
            // SAFETY: both have `elements` elements, and tasks do not overlap in the result.
            unsafe {
                if same_type {
                    copy(&source, &result, range);
                } else {
                    convert(isa, &source, &result, range);
                }
            }
            Ok(())
        },
    )])
}

/// Copies short rows of four-byte elements row by row, if that suffices, because counting elements
/// would take longer than copying them.
fn short_rows(source: &Operand, result: &Operand) -> Option<Phase> {
    let [n0, n1, n2, n3] = result.shape();
    let dtype = result.dtype();
    let is_alike = source.dtype() == dtype && source.shape() == result.shape();
    if !is_alike || n0 > SHORT || (dtype.block_bytes(), dtype.block_len()) != (4, 1) {
        return None;
    }
    let (source, result) = (*source, *result);
    let parts = n1.div_ceil(ROWS);
    let cost = result.elements() as f64 * 0.4;
    Some(Phase::new(parts * n2 * n3, cost, move |tasks, _| {
        for task in tasks {
            let first = task % parts * ROWS;
            for i1 in first..(first + ROWS).min(n1) {
                let row = [i1, task / parts % n2, task / parts / n2];
                // SAFETY: both have the row, and tasks do not overlap.
                unsafe {
                    copy_blocks(
                        source.at(row),
                        source.strides()[0],
                        result.at(row),
                        result.strides()[0],
                        4,
                        n0,
                    );
                }
            }
        }
        Ok(())
    }))
}

/// Copies elements of one type, counted in logical order.
///
/// # Safety
/// See [`Operand`]. Both must have the elements.
unsafe fn copy(source: &Operand, result: &Operand, range: Range<usize>) {
    let dtype = source.dtype();
    let source_n0 = source.shape()[0];
    pieces(result.layout(), range, |piece| {
        let [_, n1, n2, _] = result.shape();
        let [i1, i2, i3] = piece.row;
        let first = (i1 + n1 * (i2 + n2 * i3)) * result.shape()[0] + piece.start;
        pieces(source.layout(), first..first + piece.len, |from| {
            let (row, start) = (from.row[0], from.start);
            let [_, s1, s2, _] = source.shape();
            let number = (row + s1 * (from.row[1] + s2 * from.row[2])) * source_n0 + start;
            let to_start = piece.start + (number - first);
            let blocks = from.len / dtype.block_len();
            let (from_stride, to_stride) = (source.strides()[0], result.strides()[0]);
            let src = source
                .at(from.row)
                .wrapping_add(start / dtype.block_len() * from_stride);
            let dst = result
                .at(piece.row)
                .wrapping_add(to_start / dtype.block_len() * to_stride);
            // SAFETY: both pieces lie inside their rows.
            unsafe {
                copy_blocks(
                    src,
                    from_stride,
                    dst,
                    to_stride,
                    dtype.block_bytes(),
                    blocks,
                )
            };
        });
    });
}

/// Copies `count` blocks of `size` bytes at equal distances.
///
/// # Safety
/// All blocks must be readable at `from` and writable at `to`, and aligned to `size` where that is
/// 2 or 4. Both may be the same memory.
#[inline]
pub(crate) unsafe fn copy_blocks(
    from: *const u8,
    from_stride: usize,
    to: *mut u8,
    to_stride: usize,
    size: usize,
    count: usize,
) {
    // SAFETY: `i` is below `count`, so each block is readable at `from` and writable at `to`, and
    // blocks of 2 and 4 bytes are aligned to that. Blocks may overlap, since `cpy` onto itself is
    // allowed, so no reference is created.
    unsafe {
        // For few numbers, a call takes longer than the copy.
        let is_short = size == 4 && count <= SHORT;
        if ((from_stride == size && to_stride == size) || count == 1) && !is_short {
            std::ptr::copy(from, to, size * count);
            return;
        }
        match size {
            4 => {
                for i in 0..count {
                    *to.add(i * to_stride).cast::<u32>() = *from.add(i * from_stride).cast::<u32>();
                }
            }
            2 => {
                for i in 0..count {
                    *to.add(i * to_stride).cast::<u16>() = *from.add(i * from_stride).cast::<u16>();
                }
            }
            _ => {
                for i in 0..count {
                    std::ptr::copy(from.add(i * from_stride), to.add(i * to_stride), size);
                }
            }
        }
    }
}

/// Converts elements, counted in logical order.
///
/// # Safety
/// See [`Operand`]. Both must have the elements.
unsafe fn convert(isa: Isa, source: &Operand, result: &Operand, range: Range<usize>) {
    const BUFFER: usize = 256; // a multiple of every block length
    let mut buffer = [0.0; BUFFER];
    let mut start = range.start;
    while start < range.end {
        let end = (start + BUFFER).min(range.end);
        let mut filled = 0;
        pieces(source.layout(), start..end, |from| {
            // SAFETY: the piece is inside its row. Quantized rows are cut at blocks, as `kernel`
            // checked.
            unsafe { source.load(from.row, from.start, &mut buffer[filled..][..from.len]) };
            filled += from.len;
        });
        let mut written = 0;
        pieces(result.layout(), start..end, |to| {
            // SAFETY: the piece is inside the result's row. Quantized rows are cut at blocks, as
            // `kernel` checked.
            unsafe { result.store(isa, to.row, to.start, &buffer[written..][..to.len]) };
            written += to.len;
        });
        start = end;
    }
}
