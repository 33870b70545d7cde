//! Operations that read or write rows by number.

use super::{Launches, NO_KERNEL, blocks, floats, row_numbers};
use crate::plan::{LaunchOperands, PlannedLaunch, groups_for};
use samite_core::{DType, Node, Op};

/// Returns the launches of an operation with row numbers.
pub fn launches(node: Node<'_>) -> Launches {
    match node.op() {
        Op::GetRows => get(node),
        Op::SetRows => set(node),
        Op::AddId => add_id(node),
        _ => Err(NO_KERNEL.into()),
    }
}

fn get(node: Node<'_>) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    let (y, a) = (operands[0], operands[1]);
    if a.dtype.is_quantized() {
        return blocks::get_rows(node, a, blocks::PLAIN);
    }
    row_numbers(&operands[2])?;
    if (y.dtype, a.dtype) != (DType::I32, DType::I32) {
        floats([&y, &a])?;
    }
    let groups = groups_for(y.elements());
    let launch = PlannedLaunch::new("rows", "get_rows", operands, groups)?;
    Ok(vec![launch.can_fail()])
}

fn set(node: Node<'_>) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    let (y, a) = (operands[0], operands[1]);
    if y.dtype.is_quantized() {
        return blocks::set_rows(node);
    }
    row_numbers(&operands[2])?;
    floats([&y, &a])?;
    let groups = groups_for(a.elements());
    let launch = PlannedLaunch::new("rows", "set_rows", operands, groups)?;
    Ok(vec![launch.can_fail()])
}

fn add_id(node: Node<'_>) -> Launches {
    let mut operands = vec![node.result()];
    for index in 0..3 {
        operands.push(node.operand(index)?);
    }
    floats(&operands[..3])?;
    row_numbers(&operands[3])?;
    let groups = groups_for(operands[0].elements());
    let launch = PlannedLaunch::new("rows", "add_id", operands, groups)?;
    Ok(vec![launch.can_fail()])
}
