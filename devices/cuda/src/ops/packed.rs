//! Products and rows of packed weights.

use super::blocks::module_for;
use super::matmul::{self, MAX_COLUMNS, WARPS};
use super::{Launches, NO_KERNEL, floats};
use crate::plan::{LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch};
use samite_core::{DType, Node, Op};

/// Source of the kernels that decode packed weights.
const DECODING: &str = "mul_mat_packed";
/// Module of the kernel that quantizes columns.
pub const QUANTIZE: &str = "quantize";
/// Source of the kernels that multiply with quantized columns.
pub const QUANTIZED_PRODUCT: &str = "mul_mat_int8";
/// Elements of a column that a warp quantizes.
const QUANTIZED_PIECE: usize = 128;

/// Returns the launches of a node with packed weights.
pub fn launches(node: Node<'_>) -> Launches {
    let weights = node.operand(0)?.packed();
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
        Op::GetRows => rows(node, weights),
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

/// Reads the rows that source 1 selects.
fn rows(node: Node<'_>, a: LaunchOperand) -> Launches {
    let (y, numbers) = (node.result(), node.operand(1)?);
    if y.dtype != DType::F32 || !matches!(numbers.dtype, DType::I32 | DType::I64) {
        return Err("rows or numbers of another type".into());
    }
    let groups = (y.elements() / 32).div_ceil(128).min(MAX_GROUPS);
    let module = module_for("get_rows_packed", a.dtype);
    let launch = PlannedLaunch::new(&module, "get_rows", vec![y, a, numbers], groups)?;
    Ok(vec![launch.threads(128).can_fail()])
}
