//! Rotary embedding, and the operations that are fused with it before attention.

use super::{elements, floats, load_four};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use crate::template::include;
use samite_core::{DType, Node, Rope, RopeMode};
use samite_fusion::{BeforeAttention, FusedRotation};
use std::f64::consts::PI;

/// Returns the pair index at which a dimension makes `rotations` turns over the original context.
fn correction(rope: &Rope, rotations: f64) -> f64 {
    let turns = rope.original_context as f64 / (rotations * 2.0 * PI);
    rope.dims as f64 * turns.ln() / (2.0 * f64::from(rope.freq_base).ln())
}

/// Maximum elements of a head that is held in workgroup memory until it is written in blocks.
const MAX_TURNED: usize = 1024;

/// Returns the number of invocations per head. Sums are then the same as those of the unfused norm.
fn invocations(size: usize) -> usize {
    let four = size.div_ceil(4).next_power_of_two();
    four.clamp(64, GROUP as usize)
}

/// Returns source `index` of `node` as an operand of a launch of several nodes.
fn operand(node: Node<'_>, index: usize, name: char) -> Result<Operand, UnsupportedLaunch> {
    Ok(node.source_operand(index)?.in_node(node).named(name))
}

/// Rotates heads, after their norm if there is one. Each head is one workgroup.
///
/// # Errors
/// Returns the reason if such a launch is unsupported.
pub fn norm_rope(
    turned: FusedRotation<'_>,
    of: Rope,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let mut all = rope(turned.rope, of, 1.0)?;
    for operand in &mut all.operands {
        *operand = operand.in_node(turned.rope);
    }
    if let Some(norm) = turned.norm {
        all.operands[1] = operand(norm.norm, 0, 'a')?;
        all.operands.push(operand(norm.scaled, 1, 'f')?);
        all.floats[8] = norm.eps;
    }
    floats(all.operands.iter().filter(|operand| operand.name != 'b'))?;
    let (y, a) = (all.operands[0], all.operands[1]);
    let launch = renamed("norm_rope", all, WorkgroupCount::Groups(y.rows()))
        .with("heads", heads(&a, turned.norm.map(|_| 'f')))
        .with("memory", "")
        .with("store", "")
        .with("group_size", invocations(y.shape[0]));
    Ok(launch.reduces(capacity))
}

/// Returns the functions that normalize and rotate heads `a`, with the operand `factor` of their
/// norm or without a norm.
fn heads(a: &Operand, factor: Option<char>) -> String {
    let heads = ("heads", a.name.to_string());
    match factor {
        Some(factor) => {
            let factor = ("factor", factor.to_string());
            include(
                "norm_rope_head",
                [heads, factor, ("loaded_row", load_four(a))],
            )
        }
        None => include("norm_rope_plain_head", [heads]),
    }
}

/// Rotates queries and keys, with norms of both or of neither, and writes keys and values to the KV
/// cache.
///
/// # Errors
/// Returns the reason if such a launch is unsupported.
pub fn rope_store(
    nodes: &BeforeAttention<'_>,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let &BeforeAttention {
        query,
        key,
        keys,
        values,
        rope: of,
    } = nodes;
    let (t, u) = (
        keys.result().in_node(keys).named('t'),
        values.result().in_node(values).named('u'),
    );
    let block_lens = [t, u].map(|cache| cache.dtype.block_len());
    if block_lens.iter().any(|len| ![1, 32].contains(len)) {
        return Err("a cache that is encoded on the host only".into());
    }
    if block_lens[0] > 1 && key.rope.layout().shape()[0] > MAX_TURNED {
        return Err("long heads".into());
    }
    // One invocation writes a block, so the whole head must be in workgroup memory.
    let mut launch = if query.norm.is_some() || block_lens != [1, 1] {
        norm_rope(query, of, capacity)?
    } else {
        rope(query.rope, of, 1.0)?
    };
    for operand in &mut launch.operands {
        *operand = operand.in_node(query.rope);
    }
    let k = match key.norm {
        Some(norm) => operand(norm.norm, 0, 'k')?,
        None => operand(key.rope, 0, 'k')?,
    };
    let v = operand(values, 0, 'v')?;
    launch.operands.extend([k, operand(keys, 1, 'n')?, t, v, u]);
    let y = launch.operands[0];
    let launch = match launch.shader.kernel {
        "rope" => {
            let per_row = y.shape[0] - of.dims / 2;
            let count = per_row * (y.rows() + k.rows()) + v.elements();
            let work = WorkgroupCount::Groups(count.div_ceil(GROUP as usize));
            renamed("rope_store", launch, work)
        }
        _ => {
            if let Some(norm) = key.norm {
                launch.operands.push(operand(norm.scaled, 1, 'g')?);
                launch.floats[9] = norm.eps;
            }
            let pieces = v.elements() / block_lens[1];
            let pieces = pieces.div_ceil(invocations(y.shape[0]));
            let work = WorkgroupCount::Groups(y.rows() + k.rows() + pieces);
            let mut launch = renamed("norm_rope", launch, work);
            let of_queries = launch.shader.values.remove("heads").unwrap_or_default();
            let of_keys = heads(&k, key.norm.map(|_| 'g'));
            let launch = launch.with("heads", of_queries + &of_keys);
            stores(launch, block_lens, y.shape[0])
        }
    };
    let numbers = ['b', 'n'];
    let others = launch.operands.iter();
    floats(others.filter(|operand| !numbers.contains(&operand.name)))?;
    Ok(launch.can_fail())
}

/// Makes `launch` write keys with heads of `size` elements, and values, after the queries: as
/// elements or as blocks.
fn stores(launch: Launch, [of_keys, of_values]: [usize; 2], size: usize) -> Launch {
    let number = |name: char| {
        let mut operands = launch.operands.iter();
        let number = operands.position(|operand| operand.name == name);
        number.unwrap_or(0).to_string()
    };
    let (keys, memory) = match of_keys {
        1 => ("{{>norm_rope_keys}}".to_owned(), String::new()),
        _ => (
            include("norm_rope_key_blocks", [("cache", number('t'))]),
            format!("var<workgroup> turned: array<f32, {size}>;"),
        ),
    };
    let value = match of_values {
        1 => "put_u(vec4<u32>(i.x, row, 0u, 0u), get_v(i));".to_owned(),
        _ => include("norm_rope_value_block", [("cache", number('u'))]),
    };
    launch
        .with("store", "{{>norm_rope_store}}")
        .with("memory", memory)
        .with("stored_keys", keys)
        .with("stored_value", value)
        .with("values_each", of_values)
}

/// Returns `launch`, whose operands may have changed, as a launch of `kernel`.
fn renamed(kernel: &'static str, launch: Launch, work: WorkgroupCount) -> Launch {
    let mut renamed = Launch::new(kernel, launch.operands, work);
    renamed.shader.values = launch.shader.values;
    renamed.shader.subgroups = launch.shader.subgroups;
    (renamed.ints, renamed.floats) = (launch.ints, launch.floats);
    renamed
}

/// Computes rotary embedding. With `direction` -1, pairs rotate backwards.
pub fn rope(node: Node<'_>, rope: Rope, direction: f32) -> Result<Launch, UnsupportedLaunch> {
    let mut operands = vec![
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
    ];
    floats(&operands[..2])?;
    elements(&operands[0])?;
    if operands[2].dtype != DType::I32 {
        return Err("positions must be i32".into());
    }
    let mut divided = "";
    if let Some(divisors) = node.optional(2) {
        floats([&divisors])?;
        operands.push(divisors);
        divided = "/ get_c(vec4<u32>(pair, 0u, 0u, 0u))";
    }
    // The log2 of the ratio of frequencies of successive pairs, as a sum of two numbers. The first
    // has few bits.
    let step = -2.0 * f64::from(rope.freq_base).log2() / rope.dims as f64;
    let high = f32::from_bits((step as f32).to_bits() & 0xffff_f000);
    let low = (step - f64::from(high)) as f32;
    let (mut ramp, mut magnitude) = ([0.0; 2], f64::from(rope.attn_factor));
    if rope.ext_factor != 0.0 {
        let low = correction(&rope, rope.beta_fast.into()).floor().max(0.0);
        let high = correction(&rope, rope.beta_slow.into())
            .ceil()
            .min(rope.dims as f64 - 1.0);
        ramp = [low as f32, high as f32];
        magnitude *= 1.0 + 0.1 * (1.0 / f64::from(rope.freq_scale)).ln();
    }
    let (partner, next) = match rope.mode {
        RopeMode::Normal => (1, 2),
        RopeMode::Neox => (rope.dims / 2, 1),
        _ => return Err("tokens have several positions".into()),
    };
    let y = operands[0];
    let per_row = y.shape[0] - rope.dims / 2;
    let work = WorkgroupCount::Groups((per_row * y.rows()).div_ceil(GROUP as usize));
    Ok(Launch::new("rope", operands, work)
        .floats([
            high,
            low,
            rope.freq_scale,
            rope.ext_factor,
            ramp[0],
            ramp[1],
            magnitude as f32,
            direction,
        ])
        .ints([rope.offset, rope.dims, partner, next])
        .with("divided", divided))
}
