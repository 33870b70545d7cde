//! Matrix products on tensor cores, which multiply halves and add in f32.

use super::Launches;
use super::blocks::{module_for, whole_blocks};
use super::matmul::{MAX_COLUMNS, expert_lists};
use crate::plan::{
    Card, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported, groups_for,
};
use samite_core::{DType, Layout, Node, Op, Precision};

/// Source of the kernels for weights as they lie in files.
pub const PLAIN: &str = "mul_mat_mma";
/// Source of the kernels for packed weights.
pub const PACKED: &str = "mul_mat_mma_packed";
/// Columns of halves have a multiple of this number of elements.
const DEPTH: usize = 64;
/// Minimum elements of a group if several groups share the length of rows.
const MIN_LENGTH: usize = 256;
/// Maximum number of groups that share the length of rows.
const MAX_SHARES: usize = 16;
/// Offsets in scratch memory are multiples of this.
const ALIGNMENT: usize = 256;

/// Returns whether tensor cores compute a product. Halves have the precision of all weights but
/// f32.
pub fn can_multiply(node: Node<'_>, card: &Card) -> bool {
    let (columns, precision) = match *node.op() {
        Op::MulMat { precision } => (node.layout().shape()[1], precision),
        Op::MulMatId { precision } => (node.layout().shape()[2], precision),
        _ => return false,
    };
    let Some(weights) = node.source_layout(0).map(Layout::dtype) else {
        return false;
    };
    let are_halves = weights.is_quantized() || matches!(weights, DType::F16 | DType::BF16);
    columns > MAX_COLUMNS && are_halves && precision == Precision::Default && card.capability >= 80
}

/// Returns whether halves in place of the columns of a product are bf16, for weights with the range
/// of f32.
pub fn are_wide(weights: DType) -> bool {
    matches!(weights, DType::BF16 | DType::MXFP4)
}

/// Columns as halves in scratch memory.
pub struct Halves {
    scratch: LaunchOperand,
    /// Parameters of the kernels: elements of a column with padding, bytes before the columns, and
    /// 1 for bf16.
    ints: [usize; 3],
}

impl Halves {
    /// Returns scratch memory from byte `first` on for all columns of `b`.
    pub fn new(weights: DType, b: &LaunchOperand, first: usize) -> Self {
        let length = b.shape[0].next_multiple_of(DEPTH);
        let offset = (4 * b.rows()).next_multiple_of(ALIGNMENT);
        let words = (offset + 2 * length * b.rows()) / 4;
        Halves {
            scratch: LaunchOperand::workspace(DType::I32, first, words),
            ints: [length, offset, are_wide(weights).into()],
        }
    }

    /// Returns the launch that converts the columns.
    pub fn convert(&self, b: LaunchOperand) -> Result<PlannedLaunch, Unsupported> {
        let groups = b.rows().min(MAX_GROUPS);
        let launch = PlannedLaunch::new("halves", "halves", vec![self.scratch, b], groups)?;
        Ok(launch.ints(self.ints))
    }
}

/// A tile of a product: rows, columns, and the end of the kernel's name.
type ProductTile = (usize, usize, &'static str);

/// Returns a large tile for products with enough rows and columns, otherwise a small one. A small
/// tile decodes weights more often; where large ones are few, groups share the length of rows.
fn tile(rows: usize, columns: usize) -> ProductTile {
    if columns > 64 && rows >= 128 {
        (128, 128, "128")
    } else {
        (64, 32, "32")
    }
}

/// Returns the launches of a product with weights `a`, for which [`can_multiply`] holds. The
/// kernels are those of the source `kernels`.
pub fn launches(node: Node<'_>, a: LaunchOperand, kernels: &str, card: &Card) -> Launches {
    if let Op::MulMatId { .. } = node.op() {
        return with_experts(node, a, kernels);
    }
    let b = node.operand(1)?;
    let mut launches = vec![Halves::new(a.dtype, &b, 0).convert(b)?];
    launches.extend(product(node, a, kernels, card)?);
    Ok(launches)
}

/// Returns the launches of a product with selected experts.
fn with_experts(node: Node<'_>, a: LaunchOperand, kernels: &str) -> Launches {
    let (y, b, ids) = (node.result(), node.operand(1)?, node.operand(2)?);
    whole_blocks(&a)?;
    super::floats([&y, &b])?;
    let (rows, experts, choices) = (a.shape[1], a.shape[2], ids.shape[0] * ids.shape[1]);
    let (lists, find) = expert_lists(node, experts)?;
    let halves = Halves::new(a.dtype, &b, lists.bytes().next_multiple_of(ALIGNMENT));
    let (height, width, end) = tile(rows, choices / experts.max(1));
    // The last tile of each expert may be partial.
    let groups = rows.div_ceil(height) * (choices.div_ceil(width) + experts);
    let function = format!("mul_mat_id_mma_{end}");
    let operands = vec![y, a, b, ids, lists, halves.scratch];
    let module = module_for(kernels, a.dtype);
    let product = PlannedLaunch::new(&module, function, operands, groups.min(MAX_GROUPS))?;
    Ok(vec![find, halves.convert(b)?, product.ints(halves.ints)])
}

/// Returns the launches of a product whose columns are halves at the start of scratch memory.
pub fn product(node: Node<'_>, a: LaunchOperand, kernels: &str, card: &Card) -> Launches {
    let (y, b) = (node.result(), node.operand(1)?);
    whole_blocks(&a)?;
    super::floats([&y, &b])?;
    let module = module_for(kernels, a.dtype);
    let rows = a.shape[1];
    let (columns, batches) = (b.shape[1], b.shape[2] * b.shape[3]);
    let halves = Halves::new(a.dtype, &b, 0);
    let (height, width, end) = tile(rows, columns);
    let tiles = rows.div_ceil(height) * columns.div_ceil(width) * batches;
    let (shares, length) = shares(tiles, a.shape[0], card);
    let parts = match shares {
        1 => LaunchOperand::missing(),
        _ => {
            let first = halves.scratch.bytes().next_multiple_of(ALIGNMENT);
            LaunchOperand::workspace(DType::F32, first, shares * y.elements())
        }
    };
    let function = format!("mul_mat_mma_{end}");
    let operands = vec![y, a, b, halves.scratch, parts];
    let groups = (shares * tiles).min(MAX_GROUPS);
    let product = PlannedLaunch::new(&module, function, operands, groups)?;
    let [padded, offset, is_wide] = halves.ints;
    let product = product.ints([padded, offset, is_wide, shares, length]);
    let mut launches = vec![product];
    if shares > 1 {
        let groups = groups_for(y.elements());
        let sum = PlannedLaunch::new("halves", "sum_parts", vec![y, parts], groups)?;
        launches.push(sum.ints([shares]));
    }
    Ok(launches)
}

/// Returns the number of groups that share the length of rows, so that few tiles still occupy the
/// card, and the elements that each has.
fn shares(tiles: usize, length: usize, card: &Card) -> (usize, usize) {
    let enough = 2 * card.processors as usize;
    let shares = (enough / tiles.max(1))
        .min(length / MIN_LENGTH)
        .clamp(1, MAX_SHARES);
    let length = length.max(1);
    let share = length.div_ceil(shares).next_multiple_of(DEPTH);
    (length.div_ceil(share), share)
}
