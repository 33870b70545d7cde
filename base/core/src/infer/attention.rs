//! Attention and its parts: softmax and rotary positions.

use super::{Check, FLOATS};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::op::{Rope, RopeMode};

pub(super) fn soft_max(c: &Check<'_>, max_bias: f32) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    c.is(1, "the mask", &[DType::F32, DType::F16])?;
    c.is(2, "the sinks", &[DType::F32])?;
    let a = c.source(0)?;
    c.ensure(a.is_contiguous(), "source 0 is not contiguous")?;
    let n = a.shape();
    if let Some(mask) = c.optional(1) {
        let m = mask.shape();
        c.ensure(mask.is_contiguous(), "the mask is not contiguous")?;
        c.ensure(
            m[0] == n[0] && m[1] >= n[1],
            "the mask is smaller than source 0",
        )?;
        c.ensure(
            m[2] != 0 && m[3] != 0 && n[2] % m[2] == 0 && n[3] % m[3] == 0,
            "the mask does not repeat over source 0's batches",
        )?;
    }
    c.ensure(
        max_bias <= 0.0 || c.optional(1).is_some(),
        "ALiBi needs a mask",
    )?;
    if let Some(sinks) = c.optional(2) {
        c.ensure(
            sinks.shape() == [n[2], 1, 1, 1] && sinks.is_contiguous(),
            "there is not one sink for each head",
        )?;
    }
    c.like(a)
}

pub(super) fn rope(c: &Check<'_>, rope: Rope) -> Result<Layout> {
    c.is(0, "source 0", FLOATS)?;
    c.is(1, "the positions", &[DType::I32])?;
    c.is(2, "the frequency divisors", &[DType::F32])?;
    let (a, positions) = (c.source(0)?, c.source(1)?);
    let [n0, _, tokens, _] = a.shape();
    let count = tokens.checked_mul(rope.axes());
    c.ensure(
        positions.shape()[1..] == [1; 3]
            && Some(positions.shape()[0]) == count
            && positions.is_contiguous(),
        match rope.axes() {
            1 => "there is not one position for each token",
            _ => "there are not four positions for each token",
        },
    )?;
    if let Some(sections) = rope.mode.sections() {
        let all = sections.iter().map(|&n| u64::from(n)).sum::<u64>();
        c.ensure(
            sections[..3].iter().any(|&n| n > 0) && all <= n0 as u64,
            "the sections have no pairs, or more than a head",
        )?;
    }
    c.ensure(a.has_contiguous_rows(), "the rows of source 0 have gaps")?;
    c.ensure(
        rope.dims.is_multiple_of(2) && rope.offset.is_multiple_of(2),
        "the rotated part is not a whole number of pairs",
    )?;
    c.ensure(
        rope.offset <= n0 && rope.dims <= n0 - rope.offset,
        "the rotated part is larger than a head",
    )?;
    if let RopeMode::Vision { .. } = rope.mode {
        c.ensure(
            rope.offset == 0 && rope.dims == n0 / 2 && n0.is_multiple_of(2),
            "dims is not half of a head",
        )?;
    }
    if let Some(divisors) = c.optional(2) {
        c.ensure(
            divisors.is_contiguous() && divisors.shape()[0] >= rope.pairs(),
            "there are fewer frequency divisors than pairs",
        )?;
    }
    c.like(a)
}

pub(super) fn flash_attn(c: &Check<'_>, max_bias: f32) -> Result<Layout> {
    c.is(0, "the queries", &[DType::F32])?;
    let result = attention(c, 0)?;
    c.ensure(
        !c.source(1)?.dtype().is_integer() && !c.source(2)?.dtype().is_integer(),
        "keys and values cannot be integers",
    )?;
    c.ensure(
        max_bias <= 0.0 || c.optional(3).is_some(),
        "ALiBi needs a mask",
    )?;
    c.is(4, "the sinks", &[DType::F32])?;
    if let Some(sinks) = c.optional(4) {
        c.ensure(
            sinks.shape() == [result.shape()[1], 1, 1, 1] && sinks.is_contiguous(),
            "there is not one sink for each head",
        )?;
    }
    Ok(result)
}

pub(super) fn flash_attn_back(c: &Check<'_>) -> Result<Layout> {
    for (index, what) in ["the gradient", "the queries", "the keys", "the values"]
        .into_iter()
        .enumerate()
    {
        c.is(index, what, &[DType::F32])?;
    }
    c.ensure(
        c.source(0)?.shape() == attention(c, 1)?.shape(),
        "the gradient does not have the shape of the attention's result",
    )?;
    let elements = (1..4).try_fold(0usize, |sum, index| {
        sum.checked_add(c.source(index).ok()?.elements())
    });
    let elements = elements.ok_or_else(|| c.error("the size overflows"))?;
    c.result(DType::F32, [elements, 1, 1, 1])
}

/// Checks queries in source `first`, then keys, values and the optional mask. Returns the layout of
/// the attention's result.
fn attention(c: &Check<'_>, first: usize) -> Result<Layout> {
    let (q, k, v) = (c.source(first)?, c.source(first + 1)?, c.source(first + 2)?);
    let ([d, tokens, heads, batch], [kd, kv, k_heads, k_batch], [dv, v_kv, v_heads, v_batch]) =
        (q.shape(), k.shape(), v.shape());
    c.ensure(d == kd, "queries and keys differ in head size")?;
    c.ensure(
        kv == v_kv && k_heads == v_heads,
        "keys and values differ in extents",
    )?;
    c.ensure(
        k_heads != 0 && heads % k_heads == 0,
        "the heads of keys do not repeat over those of queries",
    )?;
    c.ensure(
        batch == k_batch && batch == v_batch,
        "queries, keys and values differ in extent 3",
    )?;
    c.ensure(
        [q, k, v].iter().all(|l| l.has_contiguous_rows()),
        "the rows of queries, keys or values have gaps",
    )?;
    c.is(first + 3, "the mask", &[DType::F16])?;
    if let Some(mask) = c.optional(first + 3) {
        let m = mask.shape();
        c.ensure(mask.is_contiguous(), "the mask is not contiguous")?;
        c.ensure(
            m[0] == kv && m[1] >= tokens,
            "the mask is smaller than keys times queries",
        )?;
        c.ensure(
            m[2] != 0 && m[3] != 0 && heads % m[2] == 0 && batch % m[3] == 0,
            "the mask does not repeat over heads and batch",
        )?;
    }
    c.result(DType::F32, [dv, heads, tokens, batch])
}
