//! Recurrent operations, which carry a state from token to token.

use super::{Launches, NO_KERNEL, floats};
use crate::plan::{LaunchOperand, LaunchOperands, PlannedLaunch, Unsupported, groups_for};
use samite_core::{DType, Node, Op};

/// Modules of recurrent kernels, each with the longest row of a state that its threads hold.
const MODULES: [(&str, usize); 3] = [("state_32", 32), ("state_128", 128), ("state_256", 256)];

/// Threads of a group of these kernels.
const THREADS: u32 = 128;

/// Returns the launches of a recurrent operation.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::SsmConv => {
            let operands = all(node, 2)?;
            floats(&operands)?;
            let groups = groups_for(operands[0].elements());
            Ok(vec![PlannedLaunch::new(
                "ssm_conv", "ssm_conv", operands, groups,
            )?])
        }
        Op::SsmScan { snapshots } => scan(node, snapshots),
        Op::GatedDeltaNet { snapshots } => delta_net(node, snapshots),
        _ => Err(NO_KERNEL.into()),
    }
}

fn all(node: Node<'_>, sources: usize) -> Result<Vec<LaunchOperand>, Unsupported> {
    let mut operands = vec![node.result()];
    for index in 0..sources {
        operands.push(node.operand(index)?);
    }
    Ok(operands)
}

/// Returns a launch with `threads` threads. Each holds a row of `size` numbers.
fn recurrent(
    function: &'static str,
    operands: Vec<LaunchOperand>,
    (size, threads): (usize, usize),
) -> Result<PlannedLaunch, Unsupported> {
    let module = MODULES.iter().find(|(_, longest)| size <= *longest);
    let (module, _) = module.ok_or_else(|| format!("states longer than {}", MODULES[2].1))?;
    if operands[0].dtype != DType::F32 || !operands[0].is_contiguous() {
        return Err("a result that is not one piece of f32".into());
    }
    let groups = threads.div_ceil(THREADS as usize);
    Ok(PlannedLaunch::new(module, function, operands, groups)?.threads(THREADS))
}

/// Computes a selective state space scan (Mamba).
fn scan(node: Node<'_>, snapshots: usize) -> Launches {
    let operands = all(node, 7)?;
    floats(&operands[..7])?;
    if operands[7].dtype != DType::I32 {
        return Err("row numbers must be i32".into());
    }
    let (size, [d, heads, _, sequences]) = (operands[1].shape[0], operands[2].shape);
    let launch = recurrent("ssm_scan", operands, (size, d * heads * sequences))?;
    Ok(vec![launch.ints([snapshots]).can_fail()])
}

/// Computes the gated delta rule.
fn delta_net(node: Node<'_>, snapshots: usize) -> Launches {
    let operands = all(node, 6)?;
    floats(&operands)?;
    let [size, heads, _, sequences] = operands[3].shape;
    let launch = recurrent(
        "gated_delta_net",
        operands,
        (size, size * heads * sequences),
    )?;
    Ok(vec![launch.ints([snapshots])])
}
