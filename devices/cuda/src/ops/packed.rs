//! Products and rows of packed weights.

use super::blocks::{self, module_for};
use super::matmul::{self, MAX_COLUMNS, WARPS};
use super::{Launches, NO_KERNEL, floats, row_numbers, tensor_cores};
use crate::plan::{Card, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported};
use samite_core::{Node, Op};

/// Source of the kernels that decode packed weights.
const DECODING: &str = "mul_mat_packed";
/// Source of the kernels that decode rows.
const ROWS: &str = "get_rows_packed";
/// Source of the kernels that multiply with columns of 8-bit numbers.
const INT8: &str = "mul_mat_int8";
/// Elements of a column that a warp quantizes.
const PIECE: usize = 128;
/// Maximum number of products of one launch.
pub const MAX_PRODUCTS: usize = 3;

/// Returns the launches of a node with packed weights.
pub fn launches(node: Node<'_>, card: &Card) -> Launches {
    let weights = node.operand(0)?.packed();
    if tensor_cores::can_multiply(node, card) {
        return tensor_cores::launches(node, weights, tensor_cores::PACKED, card);
    }
    match node.op() {
        Op::MulMat { .. } | Op::MulMatId { .. } if reads_int8(node) => {
            let products = products(&[node])?;
            Ok(vec![quantize(node.operand(1)?)?, products])
        }
        Op::MulMat { .. } => matmul::mul_mat(node, weights, DECODING),
        Op::MulMatId { .. } => matmul::mul_mat_id(node, weights, DECODING),
        Op::GetRows => blocks::get_rows(node, weights, ROWS),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns whether a product of packed weights reads its columns as 8-bit numbers.
pub fn reads_int8(node: Node<'_>) -> bool {
    let (Some(b), Some(y)) = (node.source_layout(1), Some(node.layout())) else {
        return false;
    };
    let [_, columns, tokens, batches] = b.shape();
    let are_few = match node.op() {
        Op::MulMat { .. } => columns <= MAX_COLUMNS && tokens == 1,
        Op::MulMatId { .. } => tokens <= MAX_COLUMNS,
        _ => false,
    };
    are_few && batches == 1 && !y.is_empty()
}

/// Scratch memory for columns `b` as 8-bit numbers: the codes, then a scale and a scaled sum for
/// each 16 elements.
#[derive(Clone, Copy)]
pub struct Int8Columns {
    pub scratch: LaunchOperand,
    /// Bytes before the scales.
    pub codes: usize,
}

impl Int8Columns {
    pub fn new(b: &LaunchOperand) -> Self {
        let codes = b.shape[0] * b.rows();
        Int8Columns {
            scratch: LaunchOperand::scratch_bytes(0, codes + codes / 16 * 8),
            codes,
        }
    }
}

/// Returns the groups of a kernel whose warps have 128 elements of the rows of `x`.
pub fn groups_of_pieces(x: &LaunchOperand) -> usize {
    let warps = x.shape[0].div_ceil(PIECE) * x.rows();
    warps.div_ceil(WARPS).min(MAX_GROUPS)
}

/// Converts columns to 8-bit numbers.
pub fn quantize(b: LaunchOperand) -> Result<PlannedLaunch, Unsupported> {
    floats([&b])?;
    let columns = Int8Columns::new(&b);
    let operands = vec![columns.scratch, b];
    let launch = PlannedLaunch::new("quantize", "quantize", operands, groups_of_pieces(&b))?;
    Ok(launch.ints([columns.codes]))
}

/// Computes products of weights of one type with the same columns, which are 8-bit numbers in
/// scratch memory.
pub fn products(nodes: &[Node<'_>]) -> Result<PlannedLaunch, Unsupported> {
    let first = *nodes.first().ok_or("no products")?;
    let (a, b) = (first.operand(0)?.packed(), first.operand(1)?);
    let columns = Int8Columns::new(&b);
    let module = module_for(INT8, a.dtype);
    floats([&first.result(), &b])?;
    if let Op::MulMatId { .. } = first.op() {
        let ids = first.operand(2)?;
        row_numbers(&ids)?;
        let groups = a.shape[1].div_ceil(2 * WARPS) * ids.elements();
        let operands = vec![first.result(), a, columns.scratch, ids];
        let launch = PlannedLaunch::new(&module, "mul_mat_id_int8", operands, groups)?;
        return Ok(launch.ints([columns.codes, b.shape[1]]).can_fail());
    }
    let count = b.shape[1];
    let rows_per_warp = if count <= 4 { 2 } else { 1 };
    let mut operands = Vec::new();
    let mut groups = [0; MAX_PRODUCTS];
    for (number, (&node, groups)) in nodes.iter().zip(&mut groups).enumerate() {
        let a = node.operand(0)?.packed().in_node(node);
        operands.extend([node.result().in_node(node), a]);
        if number == 0 {
            operands.push(columns.scratch);
        }
        *groups = a.shape[1].div_ceil(WARPS * rows_per_warp);
    }
    operands.resize(2 * MAX_PRODUCTS + 1, LaunchOperand::missing());
    let function = format!("mul_mat_int8_{count}");
    let launch = PlannedLaunch::new(&module, function, operands, groups.iter().sum())?;
    Ok(launch.ints([columns.codes, groups[0], groups[1]]))
}
