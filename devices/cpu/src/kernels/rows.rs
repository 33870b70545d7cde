//! Rows selected by number.

use super::packed_table::PackedTable;
use crate::kernel::{Fault, KernelContext, Phase};
use crate::kernel::{Kernel, UnsupportedKernel, decodable, dense_rows};
use crate::operand::Operand;
use crate::packed;
use samite_core::{DType, Node, Result};

/// Elements of a row that one task writes.
const COLUMNS: usize = 512;

/// Reads a row number and checks it.
///
/// # Safety
/// See [`Operand`]; the element must exist.
#[inline]
pub(crate) unsafe fn row_number(
    numbers: &Operand,
    source: usize,
    row: [usize; 3],
    i: usize,
    limit: usize,
) -> Result<usize, Fault> {
    // SAFETY: the element exists, and the caller has locked its memory.
    let value = unsafe { numbers.integer(row, i) };
    match usize::try_from(value) {
        Ok(number) if number < limit => Ok(number),
        _ => {
            let [n0, n1, n2, _] = numbers.shape();
            let at = i + n0 * (row[0] + n1 * (row[1] + n2 * row[2]));
            Err(Fault {
                source,
                at,
                value,
                limit,
            })
        }
    }
}

/// Reads the number of an expert and checks it. Returns `None` for -1.
///
/// # Safety
/// See [`row_number`].
#[inline]
pub(crate) unsafe fn expert_number(
    numbers: &Operand,
    source: usize,
    row: [usize; 3],
    i: usize,
    limit: usize,
) -> Result<Option<usize>, Fault> {
    // SAFETY: as in `row_number`.
    unsafe {
        if numbers.integer(row, i) == -1 {
            return Ok(None);
        }
        row_number(numbers, source, row, i, limit).map(Some)
    }
}

pub(crate) fn get_rows_kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let table = node.source_layout(0).ok_or("there is no table")?;
    if table.dtype() != DType::I32 {
        decodable(table.dtype())?;
    }
    Ok(Kernel::plain(get_rows))
}

/// Decodes the rows of source 0 that source 1 selects.
fn get_rows(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, table, numbers) = (context.result(), context.source(0)?, context.source(1)?);
    let limit = table.shape()[1];
    let packed = packed::is_packed(context.node, 0)
        .then(|| PackedTable::new(table))
        .flatten();
    Ok(vec![Phase::new(
        result.rows(),
        result.elements() as f64 * 0.5,
        move |tasks, _| {
            for task in tasks {
                let [i1, i2, i3] = result.layout().row_index(task);
                // SAFETY: each row of the result has one number, checked against the table, and
                // tasks are rows.
                unsafe {
                    let number = row_number(&numbers, 1, [i2, i3, 0], i1, limit)?;
                    let from = [number, i2, i3];
                    if let Some(packed) = packed {
                        packed.load(from, result.row_mut::<f32>([i1, i2, i3]));
                    } else if table.dtype() == DType::I32 {
                        let (row, out) = (table.row::<i32>(from), result.row_mut([i1, i2, i3]));
                        out.copy_from_slice(row);
                    } else {
                        table.load(from, 0, result.row_mut::<f32>([i1, i2, i3]));
                    }
                }
            }
            Ok(())
        },
    )])
}

pub(crate) fn set_rows_kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    if !samite_quant::can_encode(node.dtype()) {
        return Err(format!("{} cannot be encoded", node.dtype()).into());
    }
    dense_rows(node, 0)?;
    Ok(Kernel::plain(set_rows))
}

/// Writes the rows of source 0 to the rows of source 2 that source 1 selects.
fn set_rows(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, rows, numbers) = (context.result(), context.source(0)?, context.source(1)?);
    let [n0, count, n2, n3] = rows.shape();
    let limit = result.shape()[1];
    let [_, m1, m2, _] = numbers.shape();
    let isa = context.isa;
    // Tasks are columns, not rows: one worker writes a row that is selected twice, in order.
    let parts = n0.div_ceil(COLUMNS);
    let cost = if result.dtype().is_quantized() {
        8.0
    } else {
        0.5
    };
    Ok(vec![Phase::new(
        parts * n2 * n3,
        rows.elements() as f64 * cost,
        move |tasks, _| {
            let mut buffer = [0.0; COLUMNS];
            for task in tasks {
                let start = task % parts * COLUMNS;
                let len = (n0 - start).min(COLUMNS);
                let (i2, i3) = (task / parts % n2, task / parts / n2);
                for i1 in 0..count {
                    // SAFETY: each row has one number, checked against the result. Tasks do not
                    // overlap, and the parts start at blocks.
                    unsafe {
                        let number = row_number(&numbers, 1, [i2 % m1, i3 % m2, 0], i1, limit)?;
                        let from = rows.at([i1, i2, i3]);
                        if rows.dtype() == DType::F32 {
                            let from = from.cast::<f32>().add(start);
                            let row = std::slice::from_raw_parts(from, len);
                            result.store(isa, [number, i2, i3], start, row);
                        } else {
                            rows.load([i1, i2, i3], start, &mut buffer[..len]);
                            result.store(isa, [number, i2, i3], start, &buffer[..len]);
                        }
                    }
                }
            }
            Ok(())
        },
    )])
}

/// Adds to source 0 the rows of source 1 that source 2 selects.
pub(crate) fn add_id(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, a, b, numbers) = (
        context.result(),
        context.source(0)?,
        context.source(1)?,
        context.source(2)?,
    );
    let limit = b.shape()[1];
    let isa = context.isa;
    Ok(vec![Phase::new(
        result.rows(),
        result.elements() as f64 * 0.4,
        move |tasks, _| {
            let mut buffer = [0.0; COLUMNS];
            for task in tasks {
                let row = result.layout().row_index(task);
                // SAFETY: each row has one number, checked against `b`, and tasks are rows.
                unsafe {
                    let number = expert_number(&numbers, 2, [row[1], 0, 0], row[0], limit)?;
                    let out = result.row_mut::<f32>(row);
                    a.load(row, 0, out);
                    let Some(number) = number else { continue };
                    for (part, out) in out.chunks_mut(COLUMNS).enumerate() {
                        let buffer = &mut buffer[..out.len()];
                        b.load([number, 0, 0], part * COLUMNS, buffer);
                        isa.run(|| out.iter_mut().zip(buffer).for_each(|(x, y)| *x += *y));
                    }
                }
            }
            Ok(())
        },
    )])
}
