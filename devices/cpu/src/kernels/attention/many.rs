//! Attention of many tokens: a task is a block of query rows, which walks over blocks of keys.

use super::block::{Block, Blocks, LANES_STRIDE, Memory, ROWS, Sums, cap, soften};
use super::{Extents, Logits, Sinks, is_decoded, scale, too_large};
use crate::detect::Isa;
use crate::kernels::softmax::Slopes;
use crate::operand::Operand;
use crate::prepare::{Phase, Scratch, Site};
use crate::simd::outer::{self, Outer, OuterFn};
use samite_core::{DType, Error, Node, Result};

/// Keys of a block.
const KEYS: usize = 64;

/// Numbers in the memory of a worker: turned queries, logits, sums of values, keys and values as f32.
fn floats(extents: &Extents) -> Option<usize> {
    let Extents { d, dv, .. } = *extents;
    let rows = d.checked_add(KEYS)?.checked_add(dv)?.checked_mul(ROWS)?;
    rows.checked_add(d.checked_add(dv)?.checked_mul(KEYS)?)
}

pub(super) fn scratch(node: Node<'_>, threads: usize) -> Option<usize> {
    let floats = floats(&Extents::of(node, 0)?)?;
    floats.checked_mul(size_of::<f32>())?.checked_mul(threads)
}

/// Everything that tasks need.
#[derive(Clone, Copy)]
struct Attention {
    extents: Extents,
    logits: Logits,
    isa: Isa,
    slopes: Slopes,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
    sinks: Sinks,
    result: Operand,
    scratch: Scratch,
    floats: usize,
    products: OuterFn,
    weighted: OuterFn,
}

pub(super) fn build(site: &Site<'_>) -> Result<Vec<Phase>> {
    let extents = Extents::of(site.node, 0).ok_or_else(too_large)?;
    let floats = floats(&extents).ok_or_else(too_large)?;
    let logits = Logits::of(site.node.op())
        .ok_or_else(|| Error::invalid(format!("{} is not attention", site.node.op())))?;
    let v = site.source(2)?;
    let element = if is_decoded(v.dtype()) {
        DType::F32
    } else {
        v.dtype()
    };
    let missing = || Error::invalid("flash_attn_ext: no kernel for the types of keys and values");
    let blocks = Blocks::new(extents);
    let attention = Attention {
        extents,
        logits,
        isa: site.isa,
        slopes: Slopes::new(extents.heads, logits.max_bias),
        q: site.source(0)?,
        k: site.source(1)?,
        v,
        mask: site.optional(3),
        sinks: Sinks(site.optional(4)),
        result: site.result(),
        scratch: site.scratch(scratch(site.node, site.threads).ok_or_else(too_large)?)?,
        floats,
        products: outer::sums(site.isa, DType::F32).ok_or_else(missing)?,
        weighted: outer::sums(site.isa, element).ok_or_else(missing)?,
    };
    let tasks = blocks.of_a_head() * blocks.kv_heads();
    Ok(vec![Phase::new(
        tasks,
        extents.work(),
        move |tasks, worker| {
            for task in tasks {
                let each = blocks.of_a_head();
                // SAFETY: blocks are inside of the shapes, which inference checked to fit; they write different rows of the
                // result; workers have their own memory.
                unsafe { attention.block(blocks.block(task / each, task % each), worker) };
            }
            Ok(())
        },
    )])
}

impl Attention {
    /// # Safety
    /// See [`Operand`]; block and worker must exist.
    unsafe fn block(&self, block: Block, worker: usize) {
        let Extents { d, dv, keys, .. } = self.extents;
        let at = worker * self.floats * size_of::<f32>();
        // SAFETY: each worker has such a part of the scratch memory.
        let mut memory = unsafe { Memory::new(self.scratch, at, self.floats) };
        let (queries, logits) = (memory.lanes(d), memory.lanes(KEYS));
        let values = memory.floats(ROWS * dv);
        let (decoded_keys, decoded_values) = (memory.floats(KEYS * d), memory.floats(KEYS * dv));
        values.fill(0.0);
        let mut sums = Sums::NONE;
        let rows = block
            .places()
            .map(|(head, token)| self.q.at([token, head, block.batch]).cast_const().cast());
        // SAFETY: queries are f32 without gaps in rows of `d`.
        unsafe { block.turn(rows, self.logits.scale, queries) };

        for key in (0..keys).step_by(KEYS) {
            let len = KEYS.min(keys - key);
            // SAFETY: masks are at least as large as there are tokens and keys.
            let len = unsafe { block.visible(self.mask, key, len) };
            if len == 0 {
                continue;
            }
            let logits = &mut logits[..len];
            let place = [key, block.kv_head, block.batch];
            // SAFETY: keys and values are inside of their shapes, and the worker's memory has room for them.
            unsafe {
                let decode = self.k.dtype() != DType::F32;
                let (from, stride) = self.rows(&self.k, decode, place, len, decoded_keys);
                (self.products)(&Outer {
                    rows: queries.as_ptr().cast(),
                    row_stride: LANES_STRIDE,
                    len: block.lanes(),
                    terms: d,
                    factors: from.cast(),
                    column_stride: stride,
                    term_stride: size_of::<f32>(),
                    out: logits.as_mut_ptr().cast(),
                    out_stride: LANES_STRIDE,
                    columns: len,
                    add: false,
                });
                if self.logits.softcap != 0.0 {
                    cap(self.isa, logits, self.logits.softcap);
                }
                let hidden = self
                    .mask
                    .is_some_and(|mask| block.mask(mask, &self.slopes, key, logits));
                soften(self.isa, logits, &mut sums);
                let rescaled = values.chunks_exact_mut(dv.max(1)).zip(&sums.factor);
                for (row, &factor) in rescaled.take(block.rows()).filter(|(_, f)| **f != 1.0) {
                    scale(self.isa, row, factor);
                }

                let unseen = |key: usize| logits[key][..block.rows()].iter().all(|w| *w == 0.0);
                // What no row sees may hold anything, NaN too.
                let clear = hidden && (0..len).any(unseen);
                let decode = clear || is_decoded(self.v.dtype());
                let (from, stride) = self.rows(&self.v, decode, place, len, decoded_values);
                let mut weighted = self.weighted;
                if clear {
                    for key in (0..len).filter(|key| unseen(*key)) {
                        decoded_values[key * dv..][..dv].fill(0.0);
                    }
                    weighted = self.products;
                }
                weighted(&Outer {
                    rows: from,
                    row_stride: stride,
                    len: dv,
                    terms: len,
                    factors: logits.as_ptr().cast(),
                    column_stride: size_of::<f32>(),
                    term_stride: LANES_STRIDE,
                    out: values.as_mut_ptr(),
                    out_stride: dv * size_of::<f32>(),
                    columns: block.rows(),
                    add: true,
                });
            }
        }

        for (row, (head, token)) in block.places().enumerate() {
            // SAFETY: the row is inside of the result, and this task alone writes it.
            unsafe {
                let out = self.result.row_mut::<f32>([head, token, block.batch]);
                out.copy_from_slice(&values[row * dv..][..dv]);
                let factor = self.sinks.factor(head, sums.max[row], sums.sum[row]);
                scale(self.isa, out, factor);
            }
        }
    }

    /// Where rows of keys or values lie, and their distance; decoded to `decoded` where needed.
    ///
    /// # Safety
    /// See [`Operand`]; the rows must exist.
    unsafe fn rows(
        &self,
        operand: &Operand,
        decode: bool,
        [first, i2, i3]: [usize; 3],
        len: usize,
        decoded: &mut [f32],
    ) -> (*const u8, usize) {
        if !decode {
            return (operand.at([first, i2, i3]), operand.strides()[1]);
        }
        let n0 = operand.shape()[0];
        for (i, row) in decoded.chunks_exact_mut(n0.max(1)).take(len).enumerate() {
            // SAFETY: the caller's contract.
            unsafe { operand.load([first + i, i2, i3], 0, row) };
        }
        (decoded.as_ptr().cast(), n0 * size_of::<f32>())
    }
}
