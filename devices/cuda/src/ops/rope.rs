//! Rotary position embedding.

use super::{Launches, NO_KERNEL, floats};
use crate::plan::{LaunchOperands, PlannedLaunch, groups_for};
use samite_core::{DType, Node, Op, Rope, RopeMode};
use std::f64::consts::PI;

/// Returns the launches of a rotation.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::Rope(of) => rope(node, of, 1.0),
        Op::RopeBack(of) => rope(node, of, -1.0),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns the pair index at which a dimension makes `rotations` turns over the original context.
fn correction(rope: &Rope, rotations: f64) -> f64 {
    let turns = rope.original_context as f64 / (rotations * 2.0 * PI);
    rope.dims as f64 * turns.ln() / (2.0 * f64::from(rope.freq_base).ln())
}

fn rope(node: Node<'_>, rope: Rope, direction: f32) -> Launches {
    let operands = vec![
        node.result(),
        node.operand(0)?,
        node.operand(1)?,
        node.optional(2),
    ];
    floats([&operands[0], &operands[1], &operands[3]])?;
    if operands[2].dtype != DType::I32 {
        return Err("positions must be i32".into());
    }
    // The binary logarithm of the ratio of successive frequencies, as a sum of two numbers.
    let step = -2.0 * f64::from(rope.freq_base).log2() / rope.dims as f64;
    let (high, low) = (step as f32, (step - f64::from(step as f32)) as f32);
    let (mut ramp, mut magnitude) = ([0.0; 2], f64::from(rope.attn_factor));
    if rope.ext_factor != 0.0 {
        let first = correction(&rope, rope.beta_fast.into()).floor().max(0.0);
        let last = correction(&rope, rope.beta_slow.into()).ceil();
        ramp = [first as f32, last.min(rope.dims as f64 - 1.0) as f32];
        magnitude *= 1.0 + 0.1 * (1.0 / f64::from(rope.freq_scale)).ln();
    }
    let pairs = rope.pairs();
    let (mode, partner, next) = match rope.mode {
        RopeMode::Normal => (0, 1, 2),
        RopeMode::Neox => (0, pairs, 1),
        RopeMode::Interleaved { .. } => (2, pairs, 1),
        RopeMode::Vision { .. } => (3, pairs, 1),
        _ => (1, pairs, 1),
    };
    let [a, b, c, d] = rope.mode.sections().unwrap_or_default().map(|n| n as usize);
    let y = operands[0];
    let groups = groups_for((y.shape[0] - pairs) * y.rows());
    let launch = PlannedLaunch::new("rope", "rope", operands, groups)?;
    let launch = launch.ints([rope.offset, pairs, partner, next, mode, a, b, c, d]);
    Ok(vec![launch.floats([
        high,
        low,
        rope.freq_scale,
        rope.ext_factor,
        ramp[0],
        ramp[1],
        magnitude as f32,
        direction,
    ])])
}
