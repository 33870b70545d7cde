//! Recurrent operations, which carry a state from token to token.

use super::floats;
use crate::plan::{GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use samite_core::{DType, Node};

/// Longest row of a state. One invocation holds it.
const MAX_STATE: usize = 256;

fn all(node: Node<'_>, sources: usize) -> Result<Vec<Operand>, UnsupportedLaunch> {
    let mut operands = vec![node.result()];
    for index in 0..sources {
        operands.push(node.source_operand(index)?);
    }
    Ok(operands)
}

/// Computes a convolution over time.
pub fn conv(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let operands = all(node, 2)?;
    floats(&operands)?;
    Ok(Launch::new("ssm_conv", operands, WorkgroupCount::Elements))
}

/// Computes a selective state space scan (Mamba).
pub fn scan(node: Node<'_>, snapshots: usize) -> Result<Launch, UnsupportedLaunch> {
    let operands = all(node, 7)?;
    floats(&operands[..7])?;
    if operands[7].dtype != DType::I32 {
        return Err("numbers of rows must be i32".into());
    }
    let (size, x) = (operands[1].shape[0], operands[2]);
    if size > MAX_STATE {
        return Err(format!("states longer than {MAX_STATE}").into());
    }
    let work =
        WorkgroupCount::Groups((x.shape[0] * x.shape[1] * x.shape[3]).div_ceil(GROUP as usize));
    let launch = Launch::new("ssm_scan", operands, work).ints([snapshots]);
    Ok(launch.with("state_size", size).can_fail())
}

/// Computes the gated delta rule.
pub fn delta_net(node: Node<'_>, snapshots: usize) -> Result<Launch, UnsupportedLaunch> {
    let operands = all(node, 6)?;
    floats(&operands)?;
    let v = operands[3];
    if v.shape[0] > MAX_STATE {
        return Err(format!("states longer than {MAX_STATE}").into());
    }
    let work =
        WorkgroupCount::Groups((v.shape[0] * v.shape[1] * v.shape[3]).div_ceil(GROUP as usize));
    let launch = Launch::new("gated_delta_net", operands, work).ints([snapshots]);
    Ok(launch.with("state_size", v.shape[0]))
}
