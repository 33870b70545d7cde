//! Operations that move elements: copies, conversions, repetition, concatenation.

use super::{Launches, NO_KERNEL, blocks};
use crate::plan::{LaunchOperand, LaunchOperands, PlannedLaunch, Unsupported, groups_for};
use samite_core::{DType, Node, Op};

/// Returns the launches of an operation that moves elements.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::Dup | Op::Cont | Op::Cpy | Op::Cast { .. } => convert(node),
        Op::Repeat { .. } => {
            let operands = vec![node.result(), node.operand(0)?];
            Ok(vec![moved("repeat", operands, 0)?])
        }
        Op::Concat { dim } => {
            let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
            Ok(vec![moved("concat", operands, dim)?])
        }
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns the largest unit, in bytes, that divides the size of an element or block.
fn unit(dtype: DType) -> usize {
    let units = [8, 4, 2].into_iter().filter(|unit| {
        // Blocks lie at multiples of 4 at most.
        dtype.block_bytes().is_multiple_of(*unit) && (*unit < 8 || !dtype.is_quantized())
    });
    units.max().unwrap_or(1)
}

/// Returns an operand that views the same bytes as units.
fn in_units(mut operand: LaunchOperand) -> Result<LaunchOperand, Unsupported> {
    let unit = unit(operand.dtype);
    let per_block = operand.dtype.block_bytes() / unit;
    if per_block > 1 && !operand.has_contiguous_rows() {
        return Err("blocks with gaps between them".into());
    }
    let blocks = operand.shape[0] / operand.dtype.block_len();
    operand.shape[0] = blocks * per_block;
    if per_block > 1 {
        operand.strides[0] = unit;
    }
    operand.dtype = match unit {
        8 => DType::I64,
        4 => DType::I32,
        2 => DType::I16,
        _ => DType::I8,
    };
    Ok(operand)
}

/// Returns a launch that moves units.
fn moved(
    function: &'static str,
    operands: Vec<LaunchOperand>,
    dim: usize,
) -> Result<PlannedLaunch, Unsupported> {
    let unit = unit(operands[0].dtype);
    let operands: Vec<_> = operands
        .into_iter()
        .map(in_units)
        .collect::<Result<_, _>>()?;
    let groups = groups_for(operands[0].elements());
    let launch = PlannedLaunch::new("copies", function, operands, groups)?;
    Ok(launch.ints([unit, dim]))
}

/// Copies the elements of source 0 in logical order and converts them to the type of the result.
fn convert(node: Node<'_>) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    if y.dtype.is_quantized() || a.dtype.is_quantized() {
        if y.dtype.is_integer() || a.dtype.is_integer() {
            return Err(format!("there is no conversion from {} to {}", a.dtype, y.dtype).into());
        }
        return blocks::convert(node);
    }
    let groups = groups_for(y.elements());
    if y.dtype == a.dtype {
        let launch = PlannedLaunch::new("copies", "copy", vec![y, a], groups)?;
        return Ok(vec![launch.ints([y.dtype.block_bytes()])]);
    }
    for operand in [&y, &a] {
        if !(operand.dtype.is_integer()
            || matches!(operand.dtype, DType::F32 | DType::F16 | DType::BF16))
        {
            return Err(format!("a conversion from {} to {}", a.dtype, y.dtype).into());
        }
    }
    Ok(vec![PlannedLaunch::new(
        "copies",
        "convert",
        vec![y, a],
        groups,
    )?])
}
