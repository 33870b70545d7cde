//! Operations that read or write rows by index.

use super::{elements, floats, weights};
use crate::plan::{Capacity, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use samite_core::{DType, Node};

/// Checks the type of row indices.
fn numbers(dtype: DType) -> Result<(), UnsupportedLaunch> {
    match dtype {
        DType::I32 | DType::I64 => Ok(()),
        _ => Err(format!("numbers of rows in {dtype}").into()),
    }
}

/// Reads the rows of source 0 that source 1 names. A table larger than a binding is read in parts.
pub fn get(
    node: Node<'_>,
    capacity: &Capacity,
    packed: bool,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a, b) = (
        node.result(),
        weights(node, packed)?,
        node.source_operand(1)?,
    );
    numbers(b.dtype)?;
    elements(&y)?;
    let found = match (a.dtype.is_integer(), y.dtype.is_integer()) {
        (true, true) => "store_int_y(at_y(i), int_a(at_a(source)))",
        (false, false) => "put_y(i, get_a(source))",
        _ => return Err(format!("rows of {} as {}", a.dtype, y.dtype).into()),
    };
    let rows = a.shape[1];
    let parts = parts(&a, capacity).map(|(first, a)| {
        Launch::new("get_rows", vec![y, a, b], WorkgroupCount::Elements)
            .with("found", found)
            .ints([first, rows])
            .can_fail()
    });
    Ok(parts.collect())
}

/// Returns parts of the rows of each matrix of `table` that fit into a binding, with the first row
/// of each.
fn parts(table: &Operand, capacity: &Capacity) -> impl Iterator<Item = (usize, Operand)> {
    let (table, rows) = (*table, table.shape[1]);
    let room = capacity.binding.saturating_sub(capacity.alignment + 4);
    let mut part = rows.max(1);
    while part > 1 && table.part(1, 0, part).bytes() > room {
        part = part.div_ceil(2);
    }
    (0..rows.max(1))
        .step_by(part)
        .map(move |first| (first, table.part(1, first, part.min(rows - first))))
}

/// Writes the rows of source 0 to the rows that source 1 names. A target larger than a binding is
/// written in parts.
pub fn set(node: Node<'_>, capacity: &Capacity) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a, b) = (
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
    );
    numbers(b.dtype)?;
    floats([&a, &y])?;
    let (per, stored) = match y.dtype.block_len() {
        1 => (1, "put_y(to, get_a(i))"),
        32 => (32, BLOCK),
        _ => return Err(format!("{} is encoded on the host only", y.dtype).into()),
    };
    let rows = y.shape[1];
    let parts = parts(&y, capacity).map(|(first, y)| {
        Launch::new("set_rows", vec![a, b, y], WorkgroupCount::Pieces(per))
            .with("per_invocation", per)
            .with("stored", stored)
            .ints([first, rows])
            .can_fail()
    });
    Ok(parts.collect())
}

/// Stores a block of 32 elements.
const BLOCK: &str = "var x: array<f32, 32>;
    for (var j = 0u; j < 32u; j++) {
        x[j] = get_a(vec4<u32>(i.x * 32u + j, i.yzw));
    }
    encode_y(row_y(to.yzw) + to.x * parameters.tensors[2].strides.x, &x)";

/// Adds to each row of source 0 the row of source 1 that source 2 names.
pub fn add_id(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let operands = vec![
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
        node.source_operand(2)?,
    ];
    floats(&operands[..3])?;
    elements(&operands[0])?;
    numbers(operands[3].dtype)?;
    Ok(Launch::new("add_id", operands, WorkgroupCount::Elements).can_fail())
}
