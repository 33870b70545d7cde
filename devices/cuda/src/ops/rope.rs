//! Rotary position embedding.

use super::{Launches, NO_KERNEL, floats, row_numbers};
use crate::plan::{
    LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported, groups_for,
};
use samite_core::{DType, Node, Op, Rope, RopeMode};
use samite_fusion::{BeforeAttention, FusedRotation};
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
    let y = operands[0];
    let groups = groups_for((y.shape[0] - rope.pairs()) * y.rows());
    let launch = PlannedLaunch::new("rope", "rope", operands, groups)?;
    Ok(vec![with_angles(launch, rope, direction)])
}

/// Adds the parameters of angles to a launch.
fn with_angles(launch: PlannedLaunch, rope: Rope, direction: f32) -> PlannedLaunch {
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
    let launch = launch.ints([rope.offset, pairs, partner, next, mode, a, b, c, d]);
    launch.floats([
        high,
        low,
        rope.freq_scale,
        rope.ext_factor,
        ramp[0],
        ramp[1],
        magnitude as f32,
        direction,
    ])
}

/// Maximum elements of a head, and warps of a group, as in `kernels/rope.cu`.
const MAX_HEAD: usize = 512;
const WARPS: usize = 4;

/// Operands of heads that are rotated after a norm: the heads, and the factors of the norm if there
/// is one.
fn heads(rotation: &FusedRotation<'_>) -> Result<[LaunchOperand; 2], Unsupported> {
    let Some(norm) = rotation.norm else {
        let heads = rotation.rope.operand(0)?.in_node(rotation.rope);
        return Ok([heads, LaunchOperand::missing()]);
    };
    let factors = norm.scaled.operand(1)?.in_node(norm.scaled);
    if factors.dtype != DType::F32 || !factors.has_contiguous_rows() {
        return Err("such factors of a norm".into());
    }
    Ok([norm.norm.operand(0)?.in_node(norm.norm), factors])
}

/// Rotates heads, after their norm if there is one, of one or two sources. Those of the second and
/// other values are written to the KV cache.
pub fn fused(
    query: &FusedRotation<'_>,
    cached: Option<&BeforeAttention<'_>>,
    rope: Rope,
) -> Result<PlannedLaunch, Unsupported> {
    let node = query.rope;
    let [q, q_factors] = heads(query)?;
    let y = node.result().in_node(node);
    if y.shape[0] > MAX_HEAD {
        return Err("long heads".into());
    }
    let [positions, divisors] = [node.operand(1)?, node.optional(2)];
    if positions.dtype != DType::I32 {
        return Err("positions must be i32".into());
    }
    let [positions, divisors] = [positions, divisors].map(|operand| operand.in_node(node));
    let mut others = [LaunchOperand::missing(); 5];
    let mut k_factors = LaunchOperand::missing();
    if let Some(nodes) = cached {
        let [k, factors] = heads(&nodes.key)?;
        let [keys, values] = [nodes.keys, nodes.values];
        others = [
            k,
            keys.operand(1)?.in_node(keys),
            keys.result().in_node(keys),
            values.operand(0)?.in_node(values),
            values.result().in_node(values),
        ];
        row_numbers(&others[1])?;
        k_factors = factors;
    }
    let [k, numbers, keys, v, values] = others;
    floats([&y, &q, &divisors, &k, &keys, &v, &values])?;
    let items = y.rows() + k.rows() + v.shape[0].div_ceil(128) * v.shape[1];
    let groups = items.div_ceil(WARPS).min(MAX_GROUPS);
    let operands = vec![
        y, q, positions, divisors, k, numbers, keys, v, values, q_factors, k_factors,
    ];
    let launch = PlannedLaunch::new("rope", "rope_store", operands, groups)?.threads(128);
    let mut launch = with_angles(launch, rope, 1.0);
    let eps = |rotation: &FusedRotation<'_>| rotation.norm.map_or(0.0, |norm| norm.eps);
    launch.floats[8] = eps(query);
    if let Some(nodes) = cached {
        launch.floats[9] = eps(&nodes.key);
        launch.can_fail = true;
    }
    Ok(launch)
}
