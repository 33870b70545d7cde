//! Matrix products.

use super::blocks::{module_for, whole_blocks};
use super::{Launches, NO_KERNEL, floats, tensor_cores};
use crate::plan::{Card, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported};
use samite_core::{DType, Node, Op};

/// Maximum columns of a product in which warps walk along rows.
pub const MAX_COLUMNS: usize = 8;
/// Source of the kernels for weights as they lie in files.
const PLAIN: &str = "mul_mat";
/// Warps of a group that walks along rows.
pub const WARPS: usize = 8;
/// Rows and columns of a tile of larger products.
const TILE: usize = 64;

/// Returns the launches of a product.
pub fn launches(node: Node<'_>, card: &Card) -> Launches {
    let a = node.operand(0)?;
    if tensor_cores::can_multiply(node, card) {
        return tensor_cores::launches(node, a, tensor_cores::PLAIN, card);
    }
    match node.op() {
        Op::MulMat { .. } => mul_mat(node, a, PLAIN),
        Op::MulMatId { .. } => mul_mat_id(node, a, PLAIN),
        Op::OutProd => out_prod(node),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Computes products of decoded weights `a` with f32 columns, which every precision allows. The
/// kernels are those of the source `kernels`.
pub fn mul_mat(node: Node<'_>, a: LaunchOperand, kernels: &str) -> Launches {
    let operands = vec![node.result(), a, node.operand(1)?];
    let [y, a, b] = [operands[0], operands[1], operands[2]];
    whole_blocks(&a)?;
    floats([&y, &b])?;
    let (rows, columns, batches) = (a.shape[1], b.shape[1], b.shape[2] * b.shape[3]);
    // The kernel's name has the maximum number of columns.
    let (function, groups) = match columns {
        0 => ("mul_mat_vec_1", 0),
        1 => ("mul_mat_vec_1", rows.div_ceil(2 * WARPS)),
        2..=4 => ("mul_mat_vec_4", rows.div_ceil(WARPS)),
        5..=MAX_COLUMNS => ("mul_mat_vec_8", rows.div_ceil(WARPS)),
        _ => (
            "mul_mat_tiles",
            rows.div_ceil(TILE) * columns.div_ceil(TILE),
        ),
    };
    let groups = (groups * batches).min(MAX_GROUPS);
    let module = module_for(kernels, a.dtype);
    Ok(vec![PlannedLaunch::new(
        &module, function, operands, groups,
    )?])
}

/// Computes products with selected experts `a`. Few tokens are computed column by column; many are
/// tiled by expert. The kernels are those of the source `kernels`.
pub fn mul_mat_id(node: Node<'_>, a: LaunchOperand, kernels: &str) -> Launches {
    let mut operands = vec![node.result(), a, node.operand(1)?, node.operand(2)?];
    let [y, a, b, ids] = [operands[0], operands[1], operands[2], operands[3]];
    whole_blocks(&a)?;
    floats([&y, &b])?;
    let module = module_for(kernels, a.dtype);
    let (rows, experts, choices) = (a.shape[1], a.shape[2], ids.shape[0] * ids.shape[1]);
    if ids.shape[1] <= MAX_COLUMNS {
        let groups = (rows.div_ceil(2 * WARPS) * choices).min(MAX_GROUPS);
        let launch = PlannedLaunch::new(&module, "mul_mat_id_vec", operands, groups)?;
        return Ok(vec![launch.can_fail()]);
    }
    let (lists, find) = expert_lists(node, experts)?;
    operands.push(lists);
    // The last tile of each expert may be partial.
    let tiles = rows.div_ceil(TILE) * (choices.div_ceil(TILE) + experts);
    let groups = tiles.min(MAX_GROUPS);
    let product = PlannedLaunch::new(&module, "mul_mat_id_tiles", operands, groups)?;
    Ok(vec![find, product])
}

/// Returns scratch memory for the list of choices of each expert, and the launch that fills it.
pub fn expert_lists(
    node: Node<'_>,
    experts: usize,
) -> Result<(LaunchOperand, PlannedLaunch), Unsupported> {
    let (y, ids) = (node.result(), node.operand(2)?);
    let choices = ids.shape[0] * ids.shape[1];
    let lists = LaunchOperand::workspace(DType::I32, 0, experts * (1 + choices));
    let groups = experts.min(MAX_GROUPS);
    let launch = PlannedLaunch::new("experts", "expert_lists", vec![y, ids, lists], groups)?;
    Ok((lists, launch.ints([experts]).can_fail()))
}

/// Computes the sum of outer products.
fn out_prod(node: Node<'_>) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    whole_blocks(&operands[1])?;
    floats([&operands[0], &operands[2]])?;
    let [m, others @ ..] = operands[0].shape;
    let threads = m.div_ceil(32) * others.iter().product::<usize>();
    let groups = threads.div_ceil(128).min(MAX_GROUPS);
    let module = module_for("mul_mat", operands[1].dtype);
    Ok(vec![
        PlannedLaunch::new(&module, "out_prod", operands, groups)?.threads(128),
    ])
}
