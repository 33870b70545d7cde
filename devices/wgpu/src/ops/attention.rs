//! Softmax and attention.

use super::{elements, floats, load_four, matmul};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use crate::shader::{ATTENTION_MATRICES, Access};
use samite_core::{DType, Node};

/// Invocations per workgroup of attention.
const ATTENTION_GROUP: usize = 128;
/// Number of attention workgroups that keeps any adapter busy.
const ENOUGH_WORK: usize = 512;
/// Minimum number of keys per workgroup if several workgroups share a query's keys.
const MIN_KEYS: usize = 256;
/// Maximum number of workgroups per query.
const MAX_SHARES: usize = 32;
/// Queries per tile, and the minimum number of queries per head for tiled attention.
const QUERY_TILE: usize = 32;
const MIN_TILED: usize = 16;
/// Maximum elements of a value for tiled attention: an invocation accumulates a quarter of them.
const MAX_TILED: usize = 256;
/// Maximum elements of a query.
const MAX_QUERY_LEN: usize = 1024;

/// Returns the largest power of two that is at most the number of heads.
fn power(heads: usize) -> usize {
    1 << heads.max(1).ilog2()
}

/// Computes softmax of each row, scaled and masked.
pub fn soft_max(
    node: Node<'_>,
    scale: f32,
    max_bias: f32,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let mut operands = vec![node.result(), node.source_operand(0)?];
    let heads = operands[0].shape[2];
    let mut masked = "x";
    if let Some(mask) = node.optional(1) {
        operands.push(mask);
        masked = "masked(x, get_b(vec4<u32>(i.xy, i.zw % shape_b().zw)), factor)";
    }
    let mut sink = "LOWEST";
    if let Some(sinks) = node.optional(2) {
        operands.push(sinks);
        sink = "get_c(vec4<u32>(row.y, 0u, 0u, 0u))";
    }
    floats(&operands)?;
    elements(&operands[0])?;
    let alone = operands.len() == 2;
    let launch = Launch::new("soft_max", operands, WorkgroupCount::Rows)
        .floats([scale, max_bias])
        .ints([power(heads)])
        .with("masked", masked)
        .with("sink", sink)
        .with("group_size", GROUP)
        .reduces(capacity);
    Ok(if alone {
        launch.cut(&[1, 2, 3])
    } else {
        launch
    })
}

/// Computes attention in one step (flash attention). If its result is the columns of a product that
/// reads them as 8-bit numbers, `columns` is that operand and the kernel also quantizes the result.
/// The head size must then satisfy [`can_be_quantized`].
pub fn flash(
    node: Node<'_>,
    [scale, max_bias, softcap]: [f32; 3],
    capacity: &Capacity,
    aligned: bool,
    columns: Option<&Operand>,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, q) = (node.result(), node.source_operand(0)?);
    let (mut k, mut v) = (node.source_operand(1)?, node.source_operand(2)?);
    let are_halves = |operand: &Operand| {
        operand.dtype == DType::F16
            && operand.has_contiguous_rows()
            && operand.shape[0].is_multiple_of(8)
            && operand.strides[1..]
                .iter()
                .all(|stride| stride.is_multiple_of(16))
    };
    let is_wide = aligned && are_halves(&k) && are_halves(&v) && v.shape[0] <= 8 * ATTENTION_GROUP;
    if is_wide {
        [k.access, v.access] = [Access::Wide; 2];
    }
    let mut operands = vec![y, q, k, v];
    let heads = q.shape[2];
    if q.shape[0] > MAX_QUERY_LEN || v.shape[0] > 4 * ATTENTION_GROUP {
        return Err("heads of this size".into());
    }
    let mut mask = "0.0";
    if let Some(operand) = node.optional(3) {
        operands.push(operand);
        mask = "get_d(vec4<u32>(key, token, head % shape_d().z, batch % shape_d().w))";
    }
    let mut sink = "LOWEST";
    if let Some(operand) = node.optional(4) {
        operands.push(operand);
        sink = "get_e(vec4<u32>(head, 0u, 0u, 0u))";
    }
    floats(&operands)?;
    elements(&y)?;
    if columns.is_none() && q.shape[1] >= MIN_TILED && v.shape[0] <= MAX_TILED {
        let launch = if is_wide && fits_matrices([&k, &v], capacity) {
            by_matrices(operands, capacity)
        } else {
            tiled(operands, is_wide, capacity)
        };
        let launch = launch
            .floats([scale, max_bias, softcap])
            .ints([power(heads)])
            .with("mask_value", mask)
            .with("sink", sink);
        return Ok(vec![launch]);
    }
    let queries = q.rows();
    let shares = shares(queries, k.shape[1]);
    let mut first = Vec::new();
    let mut second = Vec::new();
    let numbers = columns.map(|columns| matmul::numbers(columns, Access::Write));
    if shares > 1 {
        let wide = v.shape[0].next_multiple_of(4) + 2;
        // Place the scratch after the 8-bit numbers, far enough that the two bindings do not
        // overlap.
        let first = numbers.map_or(0, |numbers| (numbers.bytes() + 256).next_multiple_of(256));
        let scratch = |name, access| Operand {
            first,
            ..Operand::workspace(name, access, DType::F32, queries * shares * wide)
        };
        operands[0] = scratch('w', Access::Write);
        operands.retain(|operand| operand.name != 'e');
        let mut combined = vec![y, scratch('p', Access::Read)];
        combined.extend(node.optional(4));
        combined.extend(numbers);
        let combine = Launch::new("flash_attn_combine", combined, WorkgroupCount::Rows);
        let combine = match columns {
            Some(_) => combine
                .with("keep_result", "results[i] = result")
                .with("value_size", v.shape[0]),
            None => combine.with("keep_result", ""),
        };
        let combine = with_numbers(combine, columns)
            .with("shares", shares)
            .with("sink", sink)
            .with("group_size", ATTENTION_GROUP);
        second.push(combine);
    } else {
        operands.extend(numbers);
    }
    let attention = Launch::new(
        "flash_attn",
        operands,
        WorkgroupCount::Groups(queries * shares),
    );
    let attention = with_numbers(attention, columns.filter(|_| shares == 1));
    let attention = if is_wide {
        // Number of loads of a key to issue together.
        let chunk = [8, 4, 2, 1]
            .into_iter()
            .find(|chunk| (q.shape[0] / 8).is_multiple_of(*chunk))
            .unwrap_or(1);
        attention
            .with("loads", "{{>flash_attn_wide}}")
            .with("per_invocation", 8)
            .with("element", "sum[{{j}}u / 4u][{{j}}u % 4u]")
            .with("loaded_query", load_four(&q))
            .with("chunk", chunk)
    } else {
        attention
            .with("loads", "{{>flash_attn_any}}")
            .with("per_invocation", 4)
            .with("element", "sum[{{j}}]")
            .with("loaded_key", load_four(&k))
            .with("loaded_value", load_four(&v))
    };
    let attention = if shares > 1 {
        attention.with("finish", "{{>flash_attn_leave}}")
    } else {
        let kept = match columns {
            Some(_) => "results[mine + {{j}}u] = {{element}} / total;",
            None => "",
        };
        attention
            .with("finish", "{{>flash_attn_finish}}")
            .with("sink", sink)
            .with("keep_result", kept)
    };
    let attention = attention
        .floats([scale, max_bias, softcap])
        .ints([power(heads)])
        .with("query_size", q.shape[0].next_multiple_of(4))
        .with("value_size", v.shape[0])
        .with("mask_value", mask)
        .with("shares", shares)
        .with("group_size", ATTENTION_GROUP);
    first.push(attention.reduces(capacity));
    first.extend(second);
    Ok(first)
}

/// Computes tiled attention for many queries, over operands `y`, `a`, `b`, `c` and others.
fn tiled(operands: Vec<Operand>, is_wide: bool, capacity: &Capacity) -> Launch {
    let [q, k, v] = [1, 2, 3].map(|number| operands[number]);
    let tiles = q.shape[1].div_ceil(QUERY_TILE) * q.shape[2] * q.shape[3];
    let launch = Launch::new("flash_attn_tiles", operands, WorkgroupCount::Groups(tiles));
    let launch = if is_wide {
        launch.with("loads", "{{>flash_attn_tiles_wide}}")
    } else {
        launch
            .with("loads", "{{>flash_attn_tiles_any}}")
            .with("loaded_key", load_four(&k))
            .with("loaded_value", load_four(&v))
    };
    launch
        .with("loaded_query", load_four(&q))
        .with("value_chunks", v.shape[0].div_ceil(32))
        .with("group_size", ATTENTION_GROUP)
        .reduces(capacity)
}

/// Queries per tile with cooperative matrices, and keys per iteration.
const MATRIX_QUERIES: usize = 64;
const MATRIX_KEYS: usize = 32;

/// Returns whether cooperative matrices can compute attention over these keys and values, which
/// must be halves.
fn fits_matrices([k, v]: [&Operand; 2], capacity: &Capacity) -> bool {
    let [k, v] = [k.shape[0], v.shape[0]];
    // Workgroup memory: both tiles, weights, logits, row state and reductions.
    let stride = 2 * k.max(v) + 16;
    let tiles = stride * (MATRIX_QUERIES + MATRIX_KEYS) + 80 * MATRIX_QUERIES;
    let memory = tiles + (8 << 10) + 3 * 4 * GROUP as usize;
    capacity.attends_by_matrices
        && k.is_multiple_of(16)
        && v.is_multiple_of(32)
        && memory <= capacity.memory
}

/// Computes attention of many queries with cooperative matrices.
fn by_matrices(operands: Vec<Operand>, capacity: &Capacity) -> Launch {
    let [q, k, v] = [1, 2, 3].map(|number| operands[number]);
    let tiles = q.shape[1].div_ceil(MATRIX_QUERIES) * q.shape[2] * q.shape[3];
    Launch::new(ATTENTION_MATRICES, operands, WorkgroupCount::Groups(tiles))
        .with("loaded_query", load_four(&q))
        .with("head_size", k.shape[0].max(v.shape[0]))
        .with("key_size", k.shape[0])
        .with("value_size", v.shape[0])
        .with("key_steps", k.shape[0] / 16)
        .with("value_chunks", v.shape[0] / 32)
        .with("group_size", GROUP)
        .reduces(capacity)
}

/// Returns whether heads of `size` elements can be quantized to 8 bits: `size` is a multiple of the
/// group size of a scale, and each invocation handles at most four elements.
pub fn can_be_quantized(size: usize) -> bool {
    size.is_multiple_of(32) && size <= 4 * ATTENTION_GROUP
}

/// Makes an attention kernel quantize its result into its last operand if `columns` is set.
fn with_numbers(launch: Launch, columns: Option<&Operand>) -> Launch {
    let Some(columns) = columns else {
        return launch.with("declarations", "").with("at_the_end", "");
    };
    let scratch = launch.operands.len() - 1;
    launch
        .with("declarations", "{{>q8}}{{>flash_attn_q8}}")
        .with("at_the_end", "quantize_results(head, token, local);")
        .with("scratch", scratch)
        .with("column_length", columns.shape[0])
        .with("column_count", columns.shape[1])
}

/// Returns the number of parts into which to split the keys, so that a few queries still occupy the
/// adapter.
fn shares(queries: usize, keys: usize) -> usize {
    (ENOUGH_WORK / queries.max(1))
        .min(keys / MIN_KEYS)
        .clamp(1, MAX_SHARES)
}

/// Computes gradients of attention. The first launch computes those of queries and the row
/// statistics of logits; the next launches compute those of keys and values.
pub fn flash_back(
    node: Node<'_>,
    scale: f32,
    capacity: &Capacity,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let mut operands = vec![node.result()];
    for index in 0..4 {
        operands.push(node.source_operand(index)?);
    }
    let [q, k, v] = [1, 2, 3].map(|index| operands[index + 1]);
    if q.shape[0].max(v.shape[0]) > MAX_QUERY_LEN {
        return Err("heads of this size".into());
    }
    let mut mask = "0.0";
    if let Some(operand) = node.optional(4) {
        operands.push(operand);
        mask = "get_e(vec4<u32>(key, token, head % shape_e().z, batch % shape_e().w))";
    }
    floats(&operands)?;
    let queries = q.rows();
    let launch = |kernel, access, work| {
        let scratch = Operand::workspace('w', access, DType::F32, 2 * queries);
        let operands = operands.iter().copied().chain([scratch]).collect();
        Launch::new(kernel, operands, WorkgroupCount::Groups(work))
            .floats([scale])
            .ints([q.elements(), k.elements()])
            .with("mask_value", mask)
            .with("group_size", ATTENTION_GROUP)
            .with(
                "pieces",
                q.shape[0].max(v.shape[0]).div_ceil(ATTENTION_GROUP),
            )
            .reduces(capacity)
    };
    Ok(vec![
        launch("flash_attn_back_queries", Access::Write, queries),
        launch("flash_attn_back_keys", Access::Read, k.rows()),
    ])
}
