//! Fused attention with online softmax ([Milakov and Gimelshein
//! 2018](https://arxiv.org/abs/1805.02867)), and its gradient.
//!
//! - [`decode`]: few tokens, many keys, as in decoding. Products of rows.
//! - [`prompt`]: prefill and training. Products of blocks of queries and keys.
//! - [`gradient`]: the gradients of queries, keys and values.
//!
//! The shapes alone determine which one computes a node.

mod decode;
pub(crate) mod gradient;
mod kv_rows;
mod kv_types;
mod prompt;
mod query_block;

use crate::detect::Isa;
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::kernels::softmax::Slopes;
use crate::operand::Operand;

use crate::kernel::{Kernel, UnsupportedKernel, decodable};
use crate::simd::math;
use kv_rows::Rows;
use samite_core::{DType, Error, Node, Op, Result};

/// Minimum number of tokens that are computed in blocks. Fewer tokens often belong to different
/// sequences. Computed alone, a token skips the keys of other sequences.
const PROMPT_TOKENS: usize = 32;

/// Extents of queries, keys and values.
#[derive(Clone, Copy)]
struct Extents {
    /// Size of a head of queries and keys.
    d: usize,
    /// Size of a head of values.
    dv: usize,
    tokens: usize,
    heads: usize,
    batch: usize,
    keys: usize,
    kv_heads: usize,
}

impl Extents {
    /// Returns the extents of the node whose queries, keys and values are sources `first` to
    /// `first + 2`, or `None` if there are too many rows.
    fn from_node(node: Node<'_>, first: usize) -> Option<Self> {
        let [d, tokens, heads, batch] = node.source_layout(first)?.shape();
        let [_, keys, kv_heads, _] = node.source_layout(first + 1)?.shape();
        let dv = node.source_layout(first + 2)?.shape()[0];
        tokens.checked_mul(heads)?.checked_mul(batch)?;
        Some(Extents {
            d,
            dv,
            tokens,
            heads,
            batch,
            keys,
            kv_heads,
        })
    }

    /// Returns the number of query heads per KV head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of query rows.
    fn rows(&self) -> usize {
        self.tokens * self.heads * self.batch
    }

    /// Returns the estimated nanoseconds of attention.
    fn work(&self) -> f64 {
        self.rows() as f64 * self.keys as f64 * ((self.d + self.dv) as f64 * 0.03 + 1.0)
    }
}

/// Conversion of products to logits.
#[derive(Clone, Copy)]
struct Logits {
    scale: f32,
    max_bias: f32,
    softcap: f32,
}

impl Logits {
    fn from_op(op: &Op) -> Option<Self> {
        let Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            ..
        } = *op
        else {
            return None;
        };
        Some(Logits {
            scale: if softcap == 0.0 {
                scale
            } else {
                scale / softcap
            },
            max_bias,
            softcap,
        })
    }
}

/// Returns the element type in products.
fn element(operand: &Operand) -> DType {
    match operand.dtype() {
        dtype if kv_rows::is_loaded(dtype) => dtype,
        _ => DType::F32,
    }
}

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    for source in [1, 2] {
        let layout = node
            .source_layout(source)
            .ok_or("keys or values are missing")?;
        decodable(layout.dtype())?;
    }
    Ok(Kernel::with_scratch(
        |node, isa, threads| {
            if Extents::from_node(node, 0)?.tokens < PROMPT_TOKENS {
                decode::scratch(node, threads)
            } else {
                prompt::scratch(node, isa, threads)
            }
        },
        build,
    ))
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let extents = Extents::from_node(context.node, 0).ok_or_else(too_large)?;
    if extents.tokens < PROMPT_TOKENS {
        decode::build(context)
    } else {
        prompt::build(context)
    }
}

fn too_large() -> Error {
    Error::shape("attention: the size of its workspace overflows")
}

/// An additional logit in the softmax sum of each head.
#[derive(Clone, Copy)]
struct Sinks(Option<Operand>);

impl Sinks {
    /// Returns the final factor of the weighted values, given weights `exp(logit - base)` and their
    /// `sum`. A row that saw no key becomes 0.
    ///
    /// # Safety
    /// The head must exist.
    unsafe fn factor(&self, head: usize, base: f32, mut sum: f32) -> f32 {
        let mut factor = 1.0;
        if let Some(sinks) = &self.0 {
            // SAFETY: each head has one sink, without gaps.
            let sink = unsafe { *sinks.base().cast::<f32>().add(head) };
            if sink > base {
                factor = math::exp(base - sink);
                sum = sum * factor + 1.0;
            } else {
                sum += math::exp(sink - base);
            }
        }
        if sum == 0.0 { 0.0 } else { factor / sum }
    }
}

/// Operands of attention tasks.
#[derive(Clone, Copy)]
struct Operands {
    logits: Logits,
    isa: Isa,
    slopes: Slopes,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
    sinks: Sinks,
    result: Operand,
}

impl Operands {
    fn new(context: &KernelContext<'_>) -> Result<Self> {
        let op = context.node.op();
        let logits =
            Logits::from_op(op).ok_or_else(|| Error::invalid(format!("{op} is not attention")))?;
        let q = context.source(0)?;
        Ok(Operands {
            logits,
            isa: context.isa,
            slopes: Slopes::new(q.shape()[2], logits.max_bias),
            q,
            k: context.source(1)?,
            v: context.source(2)?,
            mask: context.optional(3),
            sinks: Sinks(context.optional(4)),
            result: context.result(),
        })
    }
}

fn no_kernel() -> Error {
    Error::invalid("flash_attn_ext: no kernel for the types of keys and values")
}

/// Returns the address and stride of `len` rows of keys or values. Decodes them to `decoded` if
/// needed.
///
/// # Safety
/// See [`Operand`]. The rows must exist. If they are decoded, `decoded` must have room for `len`
/// rows, and the type must be decodable.
unsafe fn rows_of(
    isa: Isa,
    operand: &Operand,
    decode: bool,
    [first, i2, i3]: [usize; 3],
    len: usize,
    decoded: &mut [f32],
) -> (*const u8, usize) {
    if !decode {
        return (operand.at([first, i2, i3]), operand.strides()[1]);
    }
    // SAFETY: `decode_rows` has the same requirements: these rows exist, and `decoded` has room for
    // `len` of them.
    unsafe { decode_rows(isa, operand, [first, i2, i3], len, decoded) };
    (
        decoded.as_ptr().cast(),
        operand.shape()[0] * size_of::<f32>(),
    )
}

/// Decodes `len` rows of keys or values, row after row.
///
/// # Safety
/// As [`rows_of`], if rows are decoded.
unsafe fn decode_rows(
    isa: Isa,
    operand: &Operand,
    [first, i2, i3]: [usize; 3],
    len: usize,
    decoded: &mut [f32],
) {
    let (n0, dtype) = (operand.shape()[0], operand.dtype());
    if let Some(decode) = kv_rows::decode_of(isa, dtype)
        && operand.has_dense_rows()
    {
        let rows = Rows {
            first: operand.at([first, i2, i3]),
            stride: operand.strides()[1],
            count: len,
            len: n0,
        };
        // SAFETY: `len` rows of `n0` elements exist from `first`, dense as was just checked, and
        // `decoded` has room for `len * n0` numbers. `decode` was chosen for a detected `isa`.
        return unsafe { decode(&rows, decoded.as_mut_ptr()) };
    }
    for (i, row) in decoded.chunks_exact_mut(n0.max(1)).take(len).enumerate() {
        let place = [first + i, i2, i3];
        // SAFETY: `i` is below `len`, so the row exists, and `row` has exactly its `n0` elements,
        // which are whole blocks. `kernel` checked that the type is decodable.
        unsafe {
            operand.load(place, 0, row);
        }
    }
}

/// Splits the memory of one worker into parts.
struct ScratchSplitter {
    at: *mut f32,
    left: usize,
}

impl ScratchSplitter {
    /// # Safety
    /// `floats` numbers from byte `at` of the scratch memory must belong only to the worker while
    /// parts are used.
    unsafe fn new(scratch: Scratch, at: usize, floats: usize) -> Self {
        ScratchSplitter {
            at: scratch.at(at).cast(),
            left: floats,
        }
    }

    /// Returns the next `count` numbers.
    fn floats<'a>(&mut self, count: usize) -> &'a mut [f32] {
        assert!(count <= self.left, "the workspace is too small");
        let at = self.at;
        self.left -= count;
        self.at = at.wrapping_add(count);
        // SAFETY: they belong to the worker, by the contract of `new`, and are handed out once.
        unsafe { std::slice::from_raw_parts_mut(at, count) }
    }
}
