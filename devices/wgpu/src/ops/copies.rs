//! Operations that move elements: copies, conversions, repetition, concatenation.

use crate::plan::{GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use samite_core::{DType, Node};

/// Returns the largest unit that divides the size of an element or block.
fn unit(dtype: DType) -> DType {
    match dtype.block_bytes() {
        bytes if bytes.is_multiple_of(4) => DType::I32,
        bytes if bytes.is_multiple_of(2) => DType::I16,
        _ => DType::I8,
    }
}

fn in_units(operand: Operand) -> Result<Operand, UnsupportedLaunch> {
    let unit = unit(operand.dtype);
    if operand.dtype.block_bytes() > unit.block_bytes() && !operand.has_contiguous_rows() {
        return Err(format!("elements of {} with gaps between them", operand.dtype).into());
    }
    Ok(operand.units(unit))
}

fn moved(operands: Vec<Operand>, from: &str) -> Result<Launch, UnsupportedLaunch> {
    let operands = operands
        .into_iter()
        .map(in_units)
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Launch::new("move", operands, WorkgroupCount::Elements).with("moved", from))
}

/// Copies the elements of source 0 in logical order and converts them to the type of the result.
pub fn convert(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    let same_shape = y.shape == a.shape;
    let cut: &[usize] = if same_shape { &[1, 2, 3] } else { &[] };
    if y.dtype == a.dtype {
        let from = if same_shape {
            "int_a(at_a(i))"
        } else {
            "int_a(at_a(indices(n, shape_a())))"
        };
        return Ok(moved(vec![y, a], from)?.cut(cut));
    }
    let is_quantized = [y.dtype.is_quantized(), a.dtype.is_quantized()];
    if y.dtype.is_integer() && is_quantized[1] || a.dtype.is_integer() && is_quantized[0] {
        return Err(format!("there is no conversion from {} to {}", a.dtype, y.dtype).into());
    }
    if is_quantized[0] {
        if y.dtype.block_len() != 32 {
            return Err(format!("{} is encoded on the host only", y.dtype).into());
        }
        return Ok(Launch::new(
            "encode",
            vec![y, a],
            WorkgroupCount::Groups((y.elements() / 32).div_ceil(GROUP as usize)),
        ));
    }
    let from = "let source = indices(n, shape_a())";
    let conversion = if y.dtype.is_integer() && a.dtype.is_integer() {
        format!("{from}; store_int_y(at_y(indices(n, shape)), int_a(at_a(source)))")
    } else {
        format!("{from}; put_y(indices(n, shape), get_a(source))")
    };
    let launch = Launch::new("cast", vec![y, a], WorkgroupCount::Elements);
    Ok(launch.with("conversion", conversion).cut(cut))
}

/// Repeats the source: element `i` of each dimension is element `i` modulo its extent in the
/// source.
pub fn repeat(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    moved(
        vec![node.result(), node.source_operand(0)?],
        "int_a(at_a(i % shape_a()))",
    )
}

/// Concatenates source 0 and source 1 along `dim`.
pub fn concat(node: Node<'_>, dim: usize) -> Result<Launch, UnsupportedLaunch> {
    let operands = vec![
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
    ];
    let axis = ["x", "y", "z", "w"].get(dim).ok_or("no such dimension")?;
    let step = [0, 1, 2, 3].map(|d| {
        if d == dim {
            format!("shape_a().{axis}")
        } else {
            "0u".into()
        }
    });
    let step = step.join(", ");
    // The index for the operand that is not selected may be out of bounds. WGSL allows such loads:
    // they return some value and touch nothing else.
    let from = format!(
        "select(int_b(at_b(i - vec4<u32>({step}))), int_a(at_a(i)), i.{axis} < shape_a().{axis})"
    );
    moved(operands, &from)
}
