//! The operation table: maps a node to its launches, or to the reason why the node is unsupported.
//! Both the device's `supports` and its runs use it.

pub mod attention;
mod blocks;
mod copies;
pub mod elementwise;
mod matmul;
pub mod packed;
mod reductions;
pub mod rope;
mod rows;
mod state;
pub mod tensor_cores;
mod training;

use crate::plan::{Card, LaunchOperand, PlannedLaunch, Unsupported};
use samite_core::{DType, Node, Op};
use samite_fusion::OperandFacts;

/// Launches of a node, in order.
pub type Launches = Result<Vec<PlannedLaunch>, Unsupported>;

/// Returns the launches of one node. Leaves, views and empty results need none.
///
/// # Errors
/// Returns the reason if the device does not support the node.
pub fn launches_of(node: Node<'_>, card: &Card, facts: OperandFacts) -> Launches {
    if matches!(node.op(), Op::Leaf) || node.op().is_view() {
        return Ok(Vec::new());
    }
    let mut launches = if facts.packed {
        packed::launches(node, card)
    } else {
        whole(node, card)
    }?;
    launches.retain(|launch| launch.groups > 0);
    Ok(launches)
}

fn whole(node: Node<'_>, card: &Card) -> Launches {
    match *node.op() {
        Op::Dup | Op::Cont | Op::Cpy | Op::Cast { .. } | Op::Repeat { .. } | Op::Concat { .. } => {
            copies::launches(node)
        }

        Op::Add
        | Op::Sub
        | Op::Mul
        | Op::Div
        | Op::Scale { .. }
        | Op::Sqr
        | Op::Sqrt
        | Op::Log
        | Op::Clamp { .. }
        | Op::Fill { .. }
        | Op::Arange { .. }
        | Op::Pad { .. }
        | Op::Unary(_)
        | Op::Glu { .. }
        | Op::DiagMaskInf { .. }
        | Op::DiagMaskZero { .. }
        | Op::Sin
        | Op::Cos
        | Op::LeakyRelu { .. } => elementwise::launches(node),

        Op::AddId | Op::GetRows | Op::SetRows => rows::launches(node),

        Op::Sum
        | Op::SumRows
        | Op::Mean
        | Op::CumSum
        | Op::Norm { .. }
        | Op::RmsNorm { .. }
        | Op::L2Norm { .. }
        | Op::ArgMax
        | Op::ArgSort { .. }
        | Op::TopK { .. }
        | Op::SoftMax { .. } => reductions::launches(node),

        Op::MulMat { .. } | Op::MulMatId { .. } | Op::OutProd => matmul::launches(node, card),
        Op::FlashAttn { .. } | Op::FlashAttnBack { .. } => attention::launches(node, card),
        Op::Rope(_) | Op::RopeBack(_) => rope::launches(node),
        Op::SsmConv | Op::SsmScan { .. } | Op::GatedDeltaNet { .. } => state::launches(node),

        Op::RepeatBack { .. }
        | Op::SiluBack
        | Op::RmsNormBack { .. }
        | Op::SoftMaxBack { .. }
        | Op::GetRowsBack { .. }
        | Op::CrossEntropyLoss
        | Op::CrossEntropyLossBack
        | Op::OptStepAdamW
        | Op::OptStepSgd => training::launches(node),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Fails for row numbers that are not integers of 32 or 64 bits.
fn row_numbers(operand: &LaunchOperand) -> Result<(), Unsupported> {
    match operand.dtype {
        DType::I32 | DType::I64 => Ok(()),
        dtype => Err(format!("row numbers in {dtype}").into()),
    }
}

const NO_KERNEL: &str = "there is no kernel for it";

/// Fails for operands that kernels cannot read as floats: all types but f32, f16 and bf16.
pub fn floats<'a>(
    operands: impl IntoIterator<Item = &'a LaunchOperand>,
) -> Result<(), Unsupported> {
    let is_float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    match operands
        .into_iter()
        .find(|operand| !is_float(operand.dtype))
    {
        Some(operand) => Err(format!("{} in place of floats", operand.dtype).into()),
        None => Ok(()),
    }
}
