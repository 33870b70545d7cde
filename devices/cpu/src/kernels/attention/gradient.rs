//! Gradients of attention ([Dao et al. 2022](https://arxiv.org/abs/2205.14135), appendix B.4). The
//! softmax is recomputed, so the forward pass only needs to keep the operands.

use super::query_block::{
    LANES_STRIDE, QueryBlock, QueryBlocks, ROWS, RowLanes, Sums, logit_gradients, soften,
};
use super::{Extents, ScratchSplitter, too_large};
use crate::detect::Isa;
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::kernels::outer::float::{self as outer, Outer, OuterFn};
use crate::kernels::softmax::{Slopes, scale_row};
use crate::operand::Operand;
use samite_core::{DType, Error, Node, Op, Result};

/// Returns the bytes of scratch memory for all threads. A task is a KV head.
pub(crate) fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    let floats = floats(&Extents::from_node(node, 1)?)?;
    floats.checked_mul(size_of::<f32>())?.checked_mul(threads)
}

/// Returns the numbers in the memory of a worker: queries and gradients of results, each also
/// transposed; softmax of all keys and their gradients; gradients of queries.
fn floats(extents: &Extents) -> Option<usize> {
    let Extents { d, dv, keys, .. } = *extents;
    let rows = d.checked_mul(3)?.checked_add(dv.checked_mul(2)?)?;
    rows.checked_add(keys.checked_mul(2)?)?.checked_mul(ROWS)
}

/// Data that tasks need.
#[derive(Clone, Copy)]
struct Gradient {
    extents: Extents,
    blocks: QueryBlocks,
    scale: f32,
    isa: Isa,
    g: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
    result: Operand,
    scratch: Scratch,
    floats: usize,
    products: OuterFn,
}

/// Returns the gradients of queries, keys and values.
pub(crate) fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let &Op::FlashAttnBack { scale } = context.node.op() else {
        let op = context.node.op();
        return Err(Error::invalid(format!(
            "{op} is not a gradient of attention"
        )));
    };
    let extents = Extents::from_node(context.node, 1).ok_or_else(too_large)?;
    let floats = floats(&extents).ok_or_else(too_large)?;
    let bytes = scratch(context.node, context.isa, context.threads).ok_or_else(too_large)?;
    let blocks = QueryBlocks::new(extents);
    let gradient = Gradient {
        extents,
        blocks,
        scale,
        isa: context.isa,
        g: context.source(0)?,
        q: context.source(1)?,
        k: context.source(2)?,
        v: context.source(3)?,
        mask: context.optional(4),
        result: context.result(),
        scratch: context.scratch(bytes)?,
        floats,
        products: outer::sums(context.isa, DType::F32)
            .ok_or_else(|| Error::invalid("there is no kernel for sums of f32 rows"))?,
    };
    let work = extents.work() * 2.5;
    Ok(vec![Phase::new(
        blocks.kv_heads(),
        work,
        move |tasks, worker| {
            for kv_head in tasks {
                // SAFETY: heads are inside the shapes, which inference checked to fit. They write
                // different parts of the result. Workers have their own memory.
                unsafe { gradient.head(kv_head, worker) };
            }
            Ok(())
        },
    )])
}

impl Gradient {
    /// Returns the start of the gradients of queries, keys or values, as in [`Op::FlashAttnBack`],
    /// at one row of `size` elements.
    fn at(
        &self,
        first: usize,
        size: usize,
        heads: usize,
        [head, row, batch]: [usize; 3],
        rows: usize,
    ) -> *mut f32 {
        let row = head + heads * (row + rows * batch);
        self.result
            .base()
            .cast::<f32>()
            .wrapping_add(first + size * row)
    }

    /// # Safety
    /// See [`Operand`]; head and worker must exist.
    unsafe fn head(&self, kv_head: usize, worker: usize) {
        let Extents {
            d,
            dv,
            keys,
            kv_heads,
            batch,
            ..
        } = self.extents;
        let place = [kv_head % kv_heads, 0, kv_head / kv_heads];
        let all_keys = self.extents.rows() * d;
        let all_values = all_keys + d * kv_heads * keys * batch;
        let to = KvGradients {
            keys: self.at(all_keys, d, kv_heads, place, keys),
            key_stride: d * kv_heads * size_of::<f32>(),
            values: self.at(all_values, dv, kv_heads, place, keys),
            value_stride: dv * kv_heads * size_of::<f32>(),
        };
        for key in 0..keys {
            // SAFETY: the result has room for the gradients of all keys and values.
            unsafe {
                to.keys
                    .wrapping_byte_add(key * to.key_stride)
                    .write_bytes(0, d);
                to.values
                    .wrapping_byte_add(key * to.value_stride)
                    .write_bytes(0, dv);
            }
        }
        for number in 0..self.blocks.of_a_head() {
            // SAFETY: `number` is below the number of blocks of this KV head, so the block exists.
            // `to` is where the result has this head's gradients, which only this task writes.
            unsafe { self.block(self.blocks.block(kv_head, number), worker, to) };
        }
    }
}

/// Gradients of a head's keys and values. Strides are in bytes.
#[derive(Clone, Copy)]
struct KvGradients {
    keys: *mut f32,
    key_stride: usize,
    values: *mut f32,
    value_stride: usize,
}

impl Gradient {
    /// Adds the contribution of one block of queries.
    ///
    /// # Safety
    /// See [`Operand`]; block and worker must exist, and `to` must be the gradients of its keys and
    /// values.
    unsafe fn block(&self, block: QueryBlock, worker: usize, to: KvGradients) {
        let Extents {
            d,
            dv,
            keys,
            tokens,
            heads,
            ..
        } = self.extents;
        let at = worker * self.floats * size_of::<f32>();
        // SAFETY: each worker has this part of the scratch memory.
        let mut memory = unsafe { ScratchSplitter::new(self.scratch, at, self.floats) };
        let (turned_q, turned_g) = (memory.lanes(d), memory.lanes(dv));
        let (q, g) = (memory.floats(ROWS * d), memory.floats(ROWS * dv));
        let out = memory.floats(ROWS * d);
        let (shares, gradients) = (memory.lanes(keys), memory.lanes(keys));
        let seen = self.mask.map(|mask| {
            // SAFETY: masks are at least as large as there are tokens and keys.
            unsafe { block.visible(mask, 0, keys) }
        });
        let len = seen.unwrap_or(keys);
        let (shares, gradients) = (&mut shares[..len], &mut gradients[..len]);
        for (row, (head, token)) in block.places().enumerate() {
            // SAFETY: the rows are inside the shapes.
            unsafe {
                let q = &mut q[row * d..][..d];
                self.q.load([token, head, block.batch], 0, q);
                scale_row(self.isa, q, self.scale);
                self.g
                    .load([head, token, block.batch], 0, &mut g[row * dv..][..dv]);
            }
        }
        let float = size_of::<f32>();
        let columns = |x: &mut [RowLanes]| (x.as_mut_ptr().cast::<f32>(), LANES_STRIDE);
        let lanes_of = |rows: &[RowLanes], from: &Operand, size, (out, out_stride)| Outer {
            rows: rows.as_ptr().cast(),
            row_stride: LANES_STRIDE,
            len: block.lanes(),
            terms: size,
            factors: from.at([0, block.kv_head, block.batch]).cast_const().cast(),
            column_stride: from.strides()[1],
            term_stride: float,
            out,
            out_stride,
            columns: len,
            add: false,
        };
        let sum_of = |rows: &[f32], size: usize, factors: &[RowLanes], out, out_stride| Outer {
            rows: rows.as_ptr().cast(),
            row_stride: size * float,
            len: size,
            terms: block.rows(),
            factors: factors.as_ptr().cast(),
            column_stride: LANES_STRIDE,
            term_stride: float,
            out,
            out_stride,
            columns: len,
            add: true,
        };
        // SAFETY: all parts have the stated extents. Keys and values are f32 without gaps in rows,
        // as inference checked.
        unsafe {
            let rows = |from: &[f32], size: usize| {
                let from = from.as_ptr();
                (0..block.rows()).map(move |row| from.wrapping_add(row * size))
            };
            block.turn(rows(q, d), 1.0, turned_q);
            block.turn(rows(g, dv), 1.0, turned_g);
            (self.products)(&lanes_of(turned_q, &self.k, d, columns(shares)));
            if let Some(mask) = self.mask {
                block.mask(mask, &Slopes::new(heads, 0.0), 0, shares);
            }
            let mut sums = Sums::NONE;
            soften(self.isa, shares, &mut sums);
            (self.products)(&lanes_of(turned_g, &self.v, dv, columns(gradients)));
            logit_gradients(self.isa, shares, gradients, &sums.sum);
            (self.products)(&sum_of(g, dv, shares, to.values, to.value_stride));
            (self.products)(&sum_of(q, d, gradients, to.keys, to.key_stride));
            (self.products)(&Outer {
                rows: self.k.at([0, block.kv_head, block.batch]),
                row_stride: self.k.strides()[1],
                len: d,
                terms: len,
                factors: gradients.as_ptr().cast(),
                column_stride: float,
                term_stride: LANES_STRIDE,
                out: out.as_mut_ptr(),
                out_stride: d * float,
                columns: block.rows(),
                add: false,
            });
        }
        for (from, (head, token)) in out.chunks_exact(d.max(1)).zip(block.places()) {
            let to = self.at(0, d, heads, [head, token, block.batch], tokens);
            // SAFETY: the result has room for the gradients of all queries; tasks write different
            // ones.
            let to = unsafe { std::slice::from_raw_parts_mut(to, d) };
            to.iter_mut()
                .zip(from)
                .for_each(|(to, x)| *to = *x * self.scale);
        }
    }
}
