//! Attention of few tokens, mostly one, to many keys.
//!
//! A task handles up to [`COLUMNS`] heads of one token that share a head of keys and values. It walks over the keys in blocks. Keys
//! are split among tasks and the partial results are merged in a second phase.

use super::{
    Extents, Logits, Memory, NO_KEY, Operands, element, is_decoded, no_kernel, rows_of, seen,
    too_large,
};
use crate::detect::vectorized;
use crate::kernels::reduce::{max_of, sum_of};
use crate::kernels::softmax::scale_row;
use crate::prepare::{Phase, Scratch, Site};
use crate::simd::float::Column;
use crate::simd::keys::{BLOCK, Rows, RowsFn, products_of, weighted_sums_of};
use crate::simd::math;
use half::f16;
use samite_core::{Node, Result};

/// Most query rows of a task.
const COLUMNS: usize = 8;

/// Keys of a task where they are split: whole blocks.
const SPLIT: usize = 512;

/// Query rows from which on there are enough tasks without splitting keys.
const ENOUGH_ROWS: usize = 64;

/// How the work is divided.
#[derive(Clone, Copy)]
struct Plan {
    extents: Extents,
    /// Heads of a task, all of one key head.
    head_block: usize,
    splits: usize,
    decode_keys: bool,
    decode_values: bool,
    /// Bytes of partial results, then bytes of a worker's memory.
    partials: usize,
    worker: usize,
    total: usize,
}

fn plan(node: Node<'_>, threads: usize) -> Option<Plan> {
    let extents = Extents::of(node, 0)?;
    let Extents { d, dv, keys, .. } = extents;
    let rows = extents.rows();
    let splits = if rows < ENOUGH_ROWS {
        keys.div_ceil(SPLIT).max(1)
    } else {
        1
    };
    let partials = if splits == 1 {
        0
    } else {
        rows.checked_mul(splits)?
            .checked_mul(dv.checked_add(2)?)?
            .checked_mul(4)?
            .checked_next_multiple_of(64)?
    };
    let [decode_keys, decode_values] = [1, 2].map(|i| {
        node.source_layout(i)
            .is_some_and(|layout| is_decoded(layout.dtype()))
    });
    let decoded = |decode, size| BLOCK.checked_mul(if decode { size } else { 0 });
    let floats = COLUMNS
        .checked_mul(BLOCK.checked_add(dv)?)?
        .checked_add(decoded(decode_keys, d)?)?
        .checked_add(decoded(decode_values, dv)?)?;
    let worker = floats.checked_mul(4)?.checked_next_multiple_of(64)?;
    Some(Plan {
        extents,
        head_block: extents.group().clamp(1, COLUMNS),
        splits,
        decode_keys,
        decode_values,
        partials,
        worker,
        total: partials.checked_add(worker.checked_mul(threads)?)?,
    })
}

pub(super) fn scratch(node: Node<'_>, threads: usize) -> Option<usize> {
    Some(plan(node, threads)?.total)
}

/// Everything that tasks need.
#[derive(Clone, Copy)]
struct Attention {
    plan: Plan,
    operands: Operands,
    scratch: Scratch,
    products: RowsFn,
    weighted_sums: RowsFn,
}

/// One query row of a task.
#[derive(Clone, Copy)]
struct Row {
    head: usize,
    slope: f32,
    /// The mask's row, as f16.
    mask: Option<*const f16>,
    /// Largest logit so far.
    max: f32,
    /// Sum of `exp(logit - max)` so far.
    sum: f32,
}

impl Row {
    /// The mask of `len` keys from `key` on.
    ///
    /// # Safety
    /// It must cover them.
    #[inline(always)]
    unsafe fn mask_of<'a>(&self, key: usize, len: usize) -> Option<&'a [u16]> {
        // SAFETY: the caller's contract.
        let at =
            |mask: *const f16| unsafe { std::slice::from_raw_parts(mask.add(key).cast(), len) };
        self.mask.map(at)
    }
}

pub(super) fn build(site: &Site<'_>) -> Result<Vec<Phase>> {
    let plan = plan(site.node, site.threads).ok_or_else(too_large)?;
    let extents = plan.extents;
    let operands = Operands::of(site)?;
    let attention = Attention {
        plan,
        operands,
        scratch: site.scratch(plan.total)?,
        products: products_of(site.isa, element(&operands.k)).ok_or_else(no_kernel)?,
        weighted_sums: weighted_sums_of(site.isa, element(&operands.v)).ok_or_else(no_kernel)?,
    };
    let rows = extents.rows();
    let tasks = plan.splits
        * extents.group().div_ceil(plan.head_block)
        * extents.tokens
        * extents.kv_heads
        * extents.batch;
    let attend = Phase::new(tasks, extents.work(), move |tasks, worker| {
        for task in tasks {
            // SAFETY: tasks are inside of the shapes, which inference checked to fit; tasks write different parts of the
            // result or of the partial results; workers have their own memory.
            unsafe { attention.task(task, worker) };
        }
        Ok(())
    });
    let merge = (plan.splits > 1).then(|| {
        let cost = (rows * plan.splits * extents.dv) as f64 * 0.3;
        Phase::new(rows, cost, move |tasks, _| {
            for row in tasks {
                // SAFETY: as above; the phase before wrote all partial results.
                unsafe { attention.merge(row) };
            }
            Ok(())
        })
    });
    Ok([attend].into_iter().chain(merge).collect())
}

impl Attention {
    /// # Safety
    /// See [`Operand`]; `task` and `worker` must exist.
    unsafe fn task(&self, task: usize, worker: usize) {
        let (plan, extents, own) = (&self.plan, &self.plan.extents, &self.operands);
        let group = extents.group();
        let head_blocks = group.div_ceil(plan.head_block);
        // Rows of all heads of keys lie side by side in a cache: one after the other, they use all of what processors fetch.
        let (block, rest) = (task % head_blocks, task / head_blocks);
        let (kv_head, rest) = (rest % extents.kv_heads, rest / extents.kv_heads);
        let (split, rest) = (rest % plan.splits, rest / plan.splits);
        let (token, batch) = (rest % extents.tokens, rest / extents.tokens);

        let first_head = block * plan.head_block;
        let count = plan.head_block.min(group - first_head);

        // SAFETY: the plan has room for each worker's part.
        let mut memory = unsafe {
            let at = plan.partials + worker * plan.worker;
            Memory::new(self.scratch, at, plan.worker / size_of::<f32>())
        };
        let scores = memory.floats(COLUMNS * BLOCK);
        let sums = memory.floats(COLUMNS * extents.dv);
        let room = |decode: bool, size: usize| if decode { BLOCK * size } else { 0 };
        let decoded_keys = memory.floats(room(plan.decode_keys, extents.d));
        let decoded_values = memory.floats(room(plan.decode_values, extents.dv));
        sums.fill(0.0);
        let mut rows: [Row; COLUMNS] = std::array::from_fn(|c| {
            let head = kv_head * group + first_head + c.min(count - 1);
            Row {
                head,
                slope: own.slopes.of(head),
                mask: own.mask.map(|mask| {
                    let [_, _, m2, m3] = mask.shape();
                    mask.at([token, head % m2, batch % m3]).cast_const().cast()
                }),
                max: f32::NEG_INFINITY,
                sum: 0.0,
            }
        });
        let rows = &mut rows[..count];
        let queries: [Column; COLUMNS] = std::array::from_fn(|c| {
            let row = &rows[c.min(count - 1)];
            Column {
                x: own.q.at([token, row.head, batch]),
                out: scores.as_mut_ptr().wrapping_add(c * BLOCK),
            }
        });
        let weights: [Column; COLUMNS] = std::array::from_fn(|c| Column {
            x: scores.as_ptr().wrapping_add(c * BLOCK).cast(),
            out: sums.as_mut_ptr().wrapping_add(c * extents.dv),
        });

        let (start, end) = if plan.splits == 1 {
            (0, extents.keys)
        } else {
            (split * SPLIT, ((split + 1) * SPLIT).min(extents.keys))
        };
        for key in (start..end).step_by(BLOCK) {
            let len = BLOCK.min(end - key);
            // SAFETY: masks are at least as long as there are keys.
            let len = unsafe { visible(rows, key, len) };
            if len == 0 {
                continue;
            }
            // SAFETY: the keys and values are inside of their shapes, and the worker's memory has room for them.
            unsafe {
                let place = [key, kv_head, batch];
                let (first, stride) =
                    rows_of(own.isa, &own.k, plan.decode_keys, place, len, decoded_keys);
                let keys = Rows {
                    first,
                    stride,
                    count: len,
                    len: extents.d,
                };
                (self.products)(&keys, &queries[..count]);
                for ((row, scores), sums) in rows
                    .iter_mut()
                    .zip(scores.chunks_exact_mut(BLOCK))
                    .zip(sums.chunks_exact_mut(extents.dv.max(1)))
                {
                    let mask = row.mask_of(key, len);
                    soften(own.isa, own.logits, row, mask, &mut scores[..len], sums);
                }
                let (first, stride) = rows_of(
                    own.isa,
                    &own.v,
                    plan.decode_values,
                    place,
                    len,
                    decoded_values,
                );
                let values = Rows {
                    first,
                    stride,
                    count: len,
                    len: extents.dv,
                };
                (self.weighted_sums)(&values, &weights[..count]);
            }
        }

        for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(extents.dv.max(1))) {
            let place = [row.head, token, batch];
            // SAFETY: the row is inside of the result, or of the partial results; this task alone writes it.
            unsafe {
                if plan.splits == 1 {
                    let out = own.result.row_mut::<f32>(place);
                    out.copy_from_slice(sums);
                    let factor = own.sinks.factor(row.head, row.max, row.sum);
                    scale_row(own.isa, out, factor);
                } else {
                    let number = row.head + extents.heads * (token + extents.tokens * batch);
                    let partial = self.partial(number, split);
                    partial[0] = row.max;
                    partial[1] = row.sum;
                    partial[2..].copy_from_slice(sums);
                }
            }
        }
    }

    /// The partial result of a row: largest logit, sum of weights, weighted values.
    ///
    /// # Safety
    /// Row and split must exist, and nobody else may use them.
    #[allow(clippy::mut_from_ref)] // scratch memory is an address
    unsafe fn partial(&self, row: usize, split: usize) -> &mut [f32] {
        let len = self.plan.extents.dv + 2;
        let at = self.scratch.at((row * self.plan.splits + split) * len * 4);
        // SAFETY: the plan has room for them.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
    }

    /// # Safety
    /// Row number `row` must exist, and all its partial results.
    unsafe fn merge(&self, row: usize) {
        let (plan, extents) = (&self.plan, &self.plan.extents);
        let (head, rest) = (row % extents.heads, row / extents.heads);
        let place = [head, rest % extents.tokens, rest / extents.tokens];
        // SAFETY: the caller's contract.
        unsafe {
            let out = self.operands.result.row_mut::<f32>(place);
            let parts = (0..plan.splits).map(|split| &*self.partial(row, split));
            let max = parts
                .clone()
                .map(|part| part[0])
                .fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            out.fill(0.0);
            for part in parts.filter(|part| part[1] != 0.0) {
                let factor = math::exp(part[0] - max);
                sum += part[1] * factor;
                self.operands.isa.run(|| {
                    out.iter_mut()
                        .zip(&part[2..])
                        .for_each(|(x, y)| *x += *y * factor);
                });
            }
            let factor = self.operands.sinks.factor(head, max, sum);
            scale_row(self.operands.isa, out, factor);
        }
    }
}

/// How many of `len` keys from `key` on some row may see: those behind are masked for all.
///
/// # Safety
/// The rows' masks must cover the keys.
#[inline]
unsafe fn visible(rows: &[Row], key: usize, len: usize) -> usize {
    let mut visible = 0;
    for row in rows {
        // SAFETY: the caller's contract.
        let Some(mask) = (unsafe { row.mask_of(key, len) }) else {
            return len;
        };
        // Those before are known to be seen.
        visible += seen(&mask[visible..]);
        if visible == len {
            return len;
        }
    }
    visible
}

vectorized! {
    /// Turns the products of a row into weights, and scales what was summed so far.
    fn soften(
        logits: Logits,
        row: &mut Row,
        mask: Option<&[u16]>,
        scores: &mut [f32],
        sums: &mut [f32],
    ) {
        let Logits { scale, softcap, .. } = logits;
        scores.iter_mut().for_each(|x| *x *= scale);
        if softcap != 0.0 {
            scores.iter_mut().for_each(|x| *x = softcap * math::tanh(*x));
        }
        if let Some(mask) = mask {
            // Bits, not truth values: these become vector code.
            let (mut seen, mut others) = (0, 0);
            for (x, &m) in scores.iter_mut().zip(mask) {
                seen |= m ^ NO_KEY;
                others |= if m == NO_KEY { 0 } else { m };
                // Whatever an unused place of a cache holds must not be seen.
                *x = if m == NO_KEY { f32::NEG_INFINITY } else { *x };
            }
            if seen == 0 {
                scores.fill(0.0);
                return;
            }
            if others != 0 {
                for (x, &m) in scores.iter_mut().zip(mask).filter(|(_, m)| **m != NO_KEY) {
                    *x += row.slope * f16::from_bits(m).to_f32();
                }
            }
        }
        let max = row.max.max(max_of(scores));
        if max == f32::NEG_INFINITY {
            scores.fill(0.0);
            return;
        }
        scores.iter_mut().for_each(|x| *x = math::exp_with::<FUSED>(*x - max));
        if max > row.max {
            let factor = math::exp_with::<FUSED>(row.max - max);
            row.sum *= factor;
            sums.iter_mut().for_each(|x| *x *= factor);
            row.max = max;
        }
        row.sum += sum_of(scores, |x| x);
    }
}
