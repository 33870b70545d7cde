//! Softmax, attention, rotary embedding.

use super::{elements, floats, load_four, matmul};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, Reason, Work};
use crate::shader::Access;
use samite_core::{DType, Node, Rope, RopeMode};
use std::f64::consts::PI;

/// Invocations of a workgroup of attention.
const ATTENTION_GROUP: usize = 128;
/// So many workgroups of attention are enough for any adapter.
const ENOUGH_WORK: usize = 512;
/// A workgroup of those that share keys has so many at least.
const LEAST_KEYS: usize = 256;
/// Most workgroups for one query.
const MOST_SHARES: usize = 32;
/// Most elements of a query.
const LONGEST_QUERY: usize = 1024;

/// The largest power of two up to the number of heads.
fn power(heads: usize) -> usize {
    1 << heads.max(1).ilog2()
}

/// Softmax of each row, scaled and masked.
pub fn soft_max(
    node: Node<'_>,
    scale: f32,
    max_bias: f32,
    capacity: &Capacity,
) -> Result<Launch, Reason> {
    let mut operands = vec![node.result(), node.source_operand(0)?];
    let heads = operands[0].shape[2];
    let mut masked = "";
    if let Some(mask) = node.optional(1) {
        operands.push(mask);
        masked = "+ factor * max(get_b(vec4<u32>(i.xy, i.zw % shape_b().zw)), LOWEST)";
    }
    let mut sink = "LOWEST";
    if let Some(sinks) = node.optional(2) {
        operands.push(sinks);
        sink = "get_c(vec4<u32>(row.y, 0u, 0u, 0u))";
    }
    floats(&operands)?;
    elements(&operands[0])?;
    let alone = operands.len() == 2;
    let launch = Launch::new("soft_max", operands, Work::Rows)
        .floats([scale, max_bias])
        .ints([power(heads)])
        .with("MASKED", masked)
        .with("SINK", sink)
        .with("GROUP_SIZE", GROUP)
        .reduces(capacity);
    Ok(if alone {
        launch.cut(&[1, 2, 3])
    } else {
        launch
    })
}

/// Attention in one step. Where the results are the columns of a product that takes these as 8-bit numbers, `columns` is that operand, and they are made
/// such numbers, too: each head of a size that [`can_be_quantized`].
pub fn flash(
    node: Node<'_>,
    [scale, max_bias, softcap]: [f32; 3],
    capacity: &Capacity,
    aligned: bool,
    columns: Option<&Operand>,
) -> Result<Vec<Launch>, Reason> {
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
    if q.shape[0] > LONGEST_QUERY || v.shape[0] > 4 * ATTENTION_GROUP {
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
    let queries = q.rows();
    let shares = shares(queries, k.shape[1]);
    let mut first = Vec::new();
    let mut second = Vec::new();
    let mut finish = FINISH.replace("SINK", sink);
    let numbers = columns.map(|columns| matmul::numbers(columns, Access::Write));
    if shares > 1 {
        let wide = v.shape[0].next_multiple_of(4) + 2;
        // Behind the 8-bit numbers, and so far behind that no binding shows both.
        let first = numbers.map_or(0, |numbers| (numbers.bytes() + 256).next_multiple_of(256));
        let scratch = |name, access| Operand {
            first,
            ..Operand::workspace(name, access, DType::F32, queries * shares * wide)
        };
        operands[0] = scratch('w', Access::Write);
        operands.retain(|operand| operand.name != 'e');
        finish = LEAVE.to_owned();
        let mut combined = vec![y, scratch('p', Access::Read)];
        combined.extend(node.optional(4));
        combined.extend(numbers);
        let combine = Launch::new("flash_attn_combine", combined, Work::Rows);
        let combine = with_numbers(combine, columns)
            .with(
                "KEEP_RESULT",
                if columns.is_some() {
                    "results[i] = result"
                } else {
                    ""
                },
            )
            .with("VALUE_SIZE", v.shape[0])
            .with("SHARES", shares)
            .with("SINK", sink)
            .with("GROUP_SIZE", ATTENTION_GROUP);
        second.push(combine);
    } else {
        operands.extend(numbers);
    }
    let kept = match (shares, columns) {
        (1, Some(_)) => "results[mine + #ju] = ELEMENT / total;",
        _ => "",
    };
    finish = finish.replace("KEEP_RESULT", kept);
    let (loads, per, element) = match is_wide {
        true => (
            include_str!("../kernels/flash_attn_wide.wgsl"),
            8,
            "sum[#ju / 4u][#ju % 4u]",
        ),
        false => (include_str!("../kernels/flash_attn_any.wgsl"), 4, "sum[#j]"),
    };
    // Loads of a key that are made at once.
    let chunk = [8, 4, 2, 1]
        .into_iter()
        .find(|chunk| (q.shape[0] / 8).is_multiple_of(*chunk))
        .unwrap_or(1);
    let attention = Launch::new("flash_attn", operands, Work::Groups(queries * shares));
    let attention = with_numbers(attention, columns.filter(|_| shares == 1))
        .floats([scale, max_bias, softcap])
        .ints([power(heads)])
        .with("LOADS", loads)
        .with("FINISH", finish)
        .with("PER_INVOCATION", per)
        .with("ELEMENT", element)
        .with("QUERY_SIZE", q.shape[0].next_multiple_of(4))
        .with("LOADED_KEY", load_four(&k))
        .with("LOADED_VALUE", load_four(&v))
        .with("LOADED_QUERY", load_four(&q))
        .with("VALUE_SIZE", v.shape[0])
        .with("CHUNK", chunk)
        .with("MASK_VALUE", mask)
        .with("SHARES", shares)
        .with("GROUP_SIZE", ATTENTION_GROUP);
    first.push(attention.reduces(capacity));
    first.extend(second);
    Ok(first)
}

/// Heads whose results are made 8-bit numbers: in whole groups that share a scale, of four elements for each invocation.
pub fn can_be_quantized(size: usize) -> bool {
    size.is_multiple_of(32) && size <= 4 * ATTENTION_GROUP
}

/// Has a kernel of attention make its results 8-bit numbers, in its last operand, if they are `columns`.
fn with_numbers(launch: Launch, columns: Option<&Operand>) -> Launch {
    let Some(columns) = columns else {
        return launch.with("DECLARATIONS", "").with("AT_THE_END;", "");
    };
    let functions = concat!(
        include_str!("../kernels/q8.wgsl"),
        include_str!("../kernels/flash_attn_q8.wgsl")
    );
    let scratch = launch.operands.len() - 1;
    launch
        .with("DECLARATIONS", functions)
        .with("AT_THE_END", "quantize_results(head, token, local)")
        .with("SCRATCH", scratch)
        .with("COLUMN_LENGTH", columns.shape[0])
        .with("COLUMN_COUNT", columns.shape[1])
}

/// Into how many parts keys are divided, so that the adapter has enough to do where there are few queries.
fn shares(queries: usize, keys: usize) -> usize {
    (ENOUGH_WORK / queries.max(1))
        .min(keys / LEAST_KEYS)
        .clamp(1, MOST_SHARES)
}

/// Writes the result of one query.
const FINISH: &str = "let sink = SINK;
        let last = max(largest, sink);
        if is_masked(largest) {
            sum *= 0.0;
            total = 1.0;
        } else {
            let rescale = exp(largest - last);
            total = total * rescale + select(exp(sink - last), 0.0, is_masked(sink));
            sum *= rescale;
        }
        EACH(j, PER_INVOCATION) {
            if mine + #ju < values.x {
                put_y(vec4<u32>(mine + #ju, head, token, batch), ELEMENT / total);
                KEEP_RESULT
            }
        }";

/// Leaves what one of several workgroups made of a query.
const LEAVE: &str = "let at = number * ((values.x + 3u) / 4u * 4u + 2u);
        if local == 0u {
            put_w(vec4<u32>(at, 0u, 0u, 0u), largest);
            put_w(vec4<u32>(at + 1u, 0u, 0u, 0u), total);
        }
        EACH(j, PER_INVOCATION) {
            put_w(vec4<u32>(at + 2u + mine + #ju, 0u, 0u, 0u), ELEMENT);
        }";

/// The gradients of attention: first those of queries, with what each row of logits needs, then those of keys and values.
pub fn flash_back(node: Node<'_>, scale: f32, capacity: &Capacity) -> Result<Vec<Launch>, Reason> {
    let mut operands = vec![node.result()];
    for index in 0..4 {
        operands.push(node.source_operand(index)?);
    }
    let [q, k, v] = [1, 2, 3].map(|index| operands[index + 1]);
    if q.shape[0].max(v.shape[0]) > LONGEST_QUERY {
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
        Launch::new(kernel, operands, Work::Groups(work))
            .floats([scale])
            .ints([q.elements(), k.elements()])
            .with("MASK_VALUE", mask)
            .with("GROUP_SIZE", ATTENTION_GROUP)
            .with(
                "PIECES",
                q.shape[0].max(v.shape[0]).div_ceil(ATTENTION_GROUP),
            )
            .reduces(capacity)
    };
    Ok(vec![
        launch("flash_attn_back_queries", Access::Write, queries),
        launch("flash_attn_back_keys", Access::Read, k.rows()),
    ])
}

/// The pair number at which a dimension makes `rotations` turns over the original context.
fn correction(rope: &Rope, rotations: f64) -> f64 {
    let turns = rope.original_context as f64 / (rotations * 2.0 * PI);
    rope.dims as f64 * turns.ln() / (2.0 * f64::from(rope.freq_base).ln())
}

/// What comes before attention: queries and keys turned, keys and values written to their caches. `nodes` are the two rotations and the two writes.
pub fn rope_store(nodes: [Node<'_>; 4], rope_of: Rope) -> Result<Launch, Reason> {
    let [query, key, keys, values] = nodes;
    let mut launch = rope(query, rope_of, 1.0)?;
    for operand in &mut launch.operands {
        *operand = operand.of(query);
    }
    let source = |node: Node<'_>, index: usize, name| -> Result<Operand, Reason> {
        Ok(node.source_operand(index)?.of(node).named(name))
    };
    let added = [
        source(key, 0, 'k')?,
        source(keys, 1, 'n')?,
        keys.result().of(keys).named('t'),
        source(values, 0, 'v')?,
        values.result().of(values).named('u'),
    ];
    floats(added.iter().filter(|operand| operand.name != 'n'))?;
    let (y, v) = (launch.operands[0], added[3]);
    let per_row = y.shape[0] - rope_of.dims / 2;
    let count = per_row * (y.rows() + added[0].rows()) + v.elements();
    let operands = launch.operands.into_iter().chain(added).collect();
    let mut all = Launch::new(
        "rope_store",
        operands,
        Work::Groups(count.div_ceil(GROUP as usize)),
    );
    all.shader.text = launch.shader.text;
    (all.ints, all.floats) = (launch.ints, launch.floats);
    Ok(all.can_fail())
}

/// Rotary embedding; with `direction` -1, pairs turn the other way.
pub fn rope(node: Node<'_>, rope: Rope, direction: f32) -> Result<Launch, Reason> {
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
    // The exponent of two by which frequencies fall from pair to pair, in two parts of which the first has few bits.
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
    };
    let y = operands[0];
    let per_row = y.shape[0] - rope.dims / 2;
    let work = Work::Groups((per_row * y.rows()).div_ceil(GROUP as usize));
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
        .with("DIVIDED", divided))
}
