//! Gradients, losses and steps of optimizers.

use super::reductions::norm_threads;
use super::{Launches, NO_KERNEL, elementwise, floats, reductions};
use crate::plan::{
    LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported, groups_for,
};
use samite_core::{DType, Node, Op};

/// Returns the launches of an operation for training.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::RepeatBack { .. } => {
            let operands = all(node, 1)?;
            let groups = groups_for(operands[0].elements());
            Ok(vec![PlannedLaunch::new(
                "training",
                "repeat_back",
                operands,
                groups,
            )?])
        }
        Op::SiluBack => elementwise::silu_back(node),
        Op::RmsNormBack { eps } => row_gradient(node, 0, eps),
        Op::SoftMaxBack { scale } => row_gradient(node, 1, scale),
        Op::GetRowsBack { .. } => get_rows_back(node),
        Op::CrossEntropyLoss => cross_entropy(node),
        Op::CrossEntropyLossBack => {
            let operands = all(node, 3)?;
            let rows = operands[0].rows();
            let launch = by_rows("cross_entropy_back", operands, rows)?;
            Ok(vec![launch.floats([rows as f32])])
        }
        Op::OptStepAdamW => step(node, "adamw", 5),
        Op::OptStepSgd => step(node, "sgd", 3),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns the result and the sources, all of them floats.
fn all(node: Node<'_>, sources: usize) -> Result<Vec<LaunchOperand>, Unsupported> {
    let mut operands = vec![node.result()];
    for index in 0..sources {
        operands.push(node.operand(index)?);
    }
    floats(&operands)?;
    Ok(operands)
}

/// Returns a launch with a group per row.
fn by_rows(
    function: &'static str,
    operands: Vec<LaunchOperand>,
    rows: usize,
) -> Result<PlannedLaunch, Unsupported> {
    let threads = norm_threads(operands[1].shape[0].max(operands[0].shape[0]));
    let launch = PlannedLaunch::new("training", function, operands, rows.min(MAX_GROUPS))?;
    Ok(launch.threads(threads))
}

fn row_gradient(node: Node<'_>, kind: usize, number: f32) -> Launches {
    let operands = all(node, 2)?;
    let rows = operands[0].rows();
    let launch = by_rows("row_gradient", operands, rows)?;
    Ok(vec![launch.ints([kind]).floats([number])])
}

fn get_rows_back(node: Node<'_>) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    floats(&operands[..2])?;
    if operands[2].dtype != DType::I32 {
        return Err("row numbers must be i32".into());
    }
    let groups = groups_for(operands[0].elements());
    let launch = PlannedLaunch::new("training", "get_rows_back", operands, groups)?;
    Ok(vec![launch.can_fail()])
}

/// Computes the loss of each row, then their mean.
fn cross_entropy(node: Node<'_>) -> Launches {
    let mut operands = all(node, 2)?;
    let (y, rows) = (operands[0], operands[1].rows());
    let losses = LaunchOperand::workspace(DType::F32, 0, rows);
    operands[0] = losses;
    let mut launches = vec![by_rows("cross_entropy", operands, rows)?];
    // The sum of many rows uses other scratch memory than their losses.
    let mean = reductions::sum_in_one_group(y, losses, 1.0 / rows as f32)?;
    launches.push(mean);
    Ok(launches)
}

/// Updates weights and moments in place.
fn step(node: Node<'_>, function: &'static str, sources: usize) -> Launches {
    let operands = all(node, sources)?[1..].to_vec();
    let groups = groups_for(operands[0].elements());
    Ok(vec![PlannedLaunch::new(
        "training", function, operands, groups,
    )?])
}
