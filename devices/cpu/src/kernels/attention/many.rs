//! Attention of many tokens: a task is a block of query rows, which walks over blocks of keys.

use super::block::{Block, Blocks, LANES_STRIDE, ROWS, Sums, cap, soften};
use super::{Extents, Memory, Operands, no_kernel, rows_of, too_large};
use crate::kernels::softmax::scale_row;
use crate::prepare::{Phase, Scratch, Site};
use crate::simd::outer::{self, Outer, OuterFn};
use samite_core::{DType, Node, Result};

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
    operands: Operands,
    scratch: Scratch,
    floats: usize,
    products: OuterFn,
}

pub(super) fn build(site: &Site<'_>) -> Result<Vec<Phase>> {
    let extents = Extents::of(site.node, 0).ok_or_else(too_large)?;
    let floats = floats(&extents).ok_or_else(too_large)?;
    let operands = Operands::of(site)?;
    let blocks = Blocks::new(extents);
    let attention = Attention {
        extents,
        operands,
        scratch: site.scratch(scratch(site.node, site.threads).ok_or_else(too_large)?)?,
        floats,
        products: outer::sums(site.isa, DType::F32).ok_or_else(no_kernel)?,
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
        let own = &self.operands;
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
            .map(|(head, token)| own.q.at([token, head, block.batch]).cast_const().cast());
        // SAFETY: queries are f32 without gaps in rows of `d`.
        unsafe { block.turn(rows, own.logits.scale, queries) };

        for key in (0..keys).step_by(KEYS) {
            let len = KEYS.min(keys - key);
            // SAFETY: masks are at least as large as there are tokens and keys.
            let len = unsafe { block.visible(own.mask, key, len) };
            if len == 0 {
                continue;
            }
            let logits = &mut logits[..len];
            let place = [key, block.kv_head, block.batch];
            // SAFETY: keys and values are inside of their shapes, and the worker's memory has room for them.
            unsafe {
                let decode = own.k.dtype() != DType::F32;
                let (from, stride) = rows_of(own.isa, &own.k, decode, place, len, decoded_keys);
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
                if own.logits.softcap != 0.0 {
                    cap(own.isa, logits, own.logits.softcap);
                }
                let hidden = own
                    .mask
                    .is_some_and(|mask| block.mask(mask, &own.slopes, key, logits));
                soften(own.isa, logits, &mut sums);
                let rescaled = values.chunks_exact_mut(dv.max(1)).zip(&sums.factor);
                for (row, &factor) in rescaled.take(block.rows()).filter(|(_, f)| **f != 1.0) {
                    scale_row(own.isa, row, factor);
                }

                let unseen = |key: usize| logits[key][..block.rows()].iter().all(|w| *w == 0.0);
                // What no row sees may hold anything, NaN too.
                let clear = hidden && (0..len).any(unseen);
                // Halves would be converted once for every few columns.
                let decode = clear || own.v.dtype() != DType::F32;
                let (from, stride) = rows_of(own.isa, &own.v, decode, place, len, decoded_values);
                if clear {
                    for key in (0..len).filter(|key| unseen(*key)) {
                        decoded_values[key * dv..][..dv].fill(0.0);
                    }
                }
                (self.products)(&Outer {
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
                let out = own.result.row_mut::<f32>([head, token, block.batch]);
                out.copy_from_slice(&values[row * dv..][..dv]);
                let factor = own.sinks.factor(head, sums.max[row], sums.sum[row]);
                scale_row(own.isa, out, factor);
            }
        }
    }
}
