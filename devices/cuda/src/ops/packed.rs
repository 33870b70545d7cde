//! Products and rows of packed weights.

use super::blocks::{self, module_for};
use super::matmul::{self, MAX_COLUMNS, WARPS};
use super::{Launches, NO_KERNEL, floats, tensor_cores};
use crate::plan::{Card, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch};
use samite_core::{Node, Op};

/// Source of the kernels that decode packed weights.
const DECODING: &str = "mul_mat_packed";
/// Source of the kernels that decode rows.
const ROWS: &str = "get_rows_packed";
/// Module of the kernel that quantizes columns.
pub const QUANTIZE: &str = "quantize";
/// Source of the kernels that multiply with quantized columns.
pub const QUANTIZED_PRODUCT: &str = "mul_mat_int8";
/// Elements of a column that a warp quantizes.
const QUANTIZED_PIECE: usize = 128;

/// Returns the launches of a node with packed weights.
pub fn launches(node: Node<'_>, card: &Card) -> Launches {
    let weights = node.operand(0)?.packed();
    if tensor_cores::can_multiply(node, card) {
        return tensor_cores::launches(node, weights, tensor_cores::PACKED, card);
    }
    match node.op() {
        Op::MulMat { .. } => {
            let [_, columns, batches @ ..] = node.operand(1)?.shape;
            if columns <= MAX_COLUMNS && batches == [1, 1] {
                products(node, weights)
            } else {
                matmul::mul_mat(node, weights, DECODING)
            }
        }
        Op::MulMatId { .. } => matmul::mul_mat_id(node, weights, DECODING),
        Op::GetRows => blocks::get_rows(node, weights, ROWS),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Computes a product with few columns, which are quantized to 8 bits.
fn products(node: Node<'_>, a: LaunchOperand) -> Launches {
    let (y, b) = (node.result(), node.operand(1)?);
    floats([&y, &b])?;
    let (length, columns) = (b.shape[0], b.shape[1]);
    let codes = length * columns;
    // A scale and a scaled sum for each 16 elements.
    let quantized = LaunchOperand::scratch_bytes(0, codes + codes / 16 * 8);
    let warps = length.div_ceil(QUANTIZED_PIECE) * columns;
    let quantize = PlannedLaunch::new(
        QUANTIZE,
        "quantize",
        vec![quantized, b],
        warps.div_ceil(WARPS).min(MAX_GROUPS),
    )?;
    let rows_per_warp = if columns <= 4 { 2 } else { 1 };
    let rows = if columns == 0 { 0 } else { a.shape[1] };
    let product = PlannedLaunch::new(
        &module_for(QUANTIZED_PRODUCT, a.dtype),
        format!("mul_mat_int8_{}", columns.max(1)),
        vec![y, a, quantized],
        rows.div_ceil(WARPS * rows_per_warp).min(MAX_GROUPS),
    )?;
    Ok(vec![quantize.ints([codes]), product.ints([codes])])
}
