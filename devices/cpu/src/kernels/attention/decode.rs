//! Attention of few tokens, usually one, to many keys.
//!
//! A task handles up to [`COLUMNS`] heads of one token that share a KV head. It walks over the keys
//! in blocks. Keys are split among tasks, and a second phase merges the partial results.

use super::kv_rows::{
    BLOCK, DecodeFn, Rows, RowsFn, decode_of, is_loaded, products_of, weighted_sums_of,
};
use super::query_block::shows;
use super::{Extents, Logits, Operands, ScratchSplitter, element, no_kernel, rows_of, too_large};
use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::kernels::reduce::{max_of, sum_of};
use crate::kernels::softmax::scale_row;
use crate::product::Column;
use crate::simd::math;
use samite_core::{DType, Node, Result};

/// Maximum number of query rows of a task.
const COLUMNS: usize = 8;

/// Number of keys of a task if they are split: whole blocks.
const SPLIT: usize = 512;

/// Number of query rows for which there are enough tasks without splitting keys.
const ENOUGH_ROWS: usize = 64;

/// Division of the work.
#[derive(Clone, Copy)]
struct Plan {
    extents: Extents,
    /// Number of heads of a task, all of one KV head.
    head_block: usize,
    splits: usize,
    decode_keys: bool,
    decode_values: bool,
    /// Bytes of partial results, then bytes of a worker's memory.
    partials: usize,
    worker: usize,
    total: usize,
}

/// Returns whether a task has all keys of its rows.
fn is_whole(extents: Extents) -> bool {
    extents.rows() >= ENOUGH_ROWS
}

fn plan(node: Node<'_>, threads: usize, is_whole: bool) -> Option<Plan> {
    let extents = Extents::from_node(node, 0)?;
    let Extents { d, dv, keys, .. } = extents;
    let rows = extents.rows();
    let splits = if is_whole {
        1
    } else {
        keys.div_ceil(SPLIT).max(1)
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
            .is_some_and(|layout| !is_loaded(layout.dtype()))
    });
    let decoded = |decode, size| BLOCK.checked_mul(if decode { size } else { 0 });
    // Heads with separate masks do not see the same keys. In one task, a head would multiply hidden
    // values by 0, and 0 times NaN is NaN.
    let shares_mask = node
        .source_layout(3)
        .is_none_or(|mask| mask.shape()[2] == 1);
    let most = if shares_mask { COLUMNS } else { 1 };
    let floats = COLUMNS
        .checked_mul(dv.checked_add(2 * BLOCK)?)?
        .checked_add(decoded(decode_keys, d)?)?
        .checked_add(decoded(decode_values, dv)?)?;
    let worker = floats.checked_mul(4)?.checked_next_multiple_of(64)?;
    Some(Plan {
        extents,
        head_block: extents.group().clamp(1, most),
        splits,
        decode_keys,
        decode_values,
        partials,
        worker,
        total: partials.checked_add(worker.checked_mul(threads)?)?,
    })
}

pub(super) fn scratch(node: Node<'_>, threads: usize) -> Option<usize> {
    let is_whole = is_whole(Extents::from_node(node, 0)?);
    Some(plan(node, threads, is_whole)?.total)
}

/// Returns the bytes of scratch memory of [`SingleTokens`].
pub(super) fn scratch_alone(node: Node<'_>, threads: usize) -> Option<usize> {
    Some(plan(node, threads, true)?.total)
}

/// Data that tasks need.
#[derive(Clone, Copy)]
struct DecodeAttention {
    plan: Plan,
    operands: Operands,
    scratch: Scratch,
    products: RowsFn,
    weighted_sums: RowsFn,
    decode_mask: DecodeFn,
}

/// Values that a row of the mask adds to the logits of a block of keys. Minus infinity for hidden
/// or missing keys.
type Bias = [f32; BLOCK];

/// One query row of a task.
#[derive(Clone, Copy, Default)]
struct QueryRow {
    head: usize,
    slope: f32,
    /// Weights are `exp(logit - base)`. No logit so far exceeds the base by more than [`SLACK`].
    base: f32,
    /// Sums of the weights so far.
    sums: [f32; LANES],
}

/// Amount by which logits may exceed the base of weights. Without it, every block would search its
/// maximum and rescale the earlier sums, which takes as long as the weights themselves and delays
/// them.
const SLACK: f32 = 8.0;

/// Number of weights that are summed in parallel.
const LANES: usize = 16;

/// Tokens that are computed one by one although others are computed in blocks.
#[derive(Clone, Copy)]
pub(super) struct SingleTokens(DecodeAttention);

impl SingleTokens {
    /// Creates the computation for a node, with [`scratch_alone`] bytes of memory.
    pub fn new(context: &KernelContext<'_>, scratch: Scratch) -> Result<Self> {
        let plan = plan(context.node, context.threads, true).ok_or_else(too_large)?;
        Ok(SingleTokens(DecodeAttention::new(context, plan, scratch)?))
    }

    /// Returns the number of tasks.
    pub fn tasks(&self) -> usize {
        self.0.tasks()
    }

    /// Returns the batch and token of a task.
    pub fn place(&self, task: usize) -> (usize, usize) {
        let DecodeTask { batch, token, .. } = self.0.decode_task(task);
        (batch, token)
    }

    /// Computes some heads of a token.
    ///
    /// # Safety
    /// See [`Operand`](crate::operand::Operand); `task` and `worker` must exist.
    pub unsafe fn task(&self, task: usize, worker: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.task(task, worker) }
    }
}

pub(super) fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let extents = Extents::from_node(context.node, 0).ok_or_else(too_large)?;
    let plan = plan(context.node, context.threads, is_whole(extents)).ok_or_else(too_large)?;
    let attention = DecodeAttention::new(context, plan, context.scratch(plan.total)?)?;
    let rows = extents.rows();
    let tasks = attention.tasks();
    let attend = Phase::new(tasks, extents.work(), move |tasks, worker| {
        for task in tasks {
            // SAFETY: tasks are inside the shapes, which inference checked to fit. They write
            // different parts of the result or of the partial results. Workers have their own
            // memory.
            unsafe { attention.task(task, worker) };
        }
        Ok(())
    });
    let merge = (plan.splits > 1).then(|| {
        let cost = (rows * plan.splits * extents.dv) as f64 * 0.3;
        Phase::new(rows, cost, move |tasks, _| {
            for row in tasks {
                // SAFETY: each row of the result has a task, so `row` exists and one task writes
                // it. The phase before wrote all its partial results.
                unsafe { attention.merge(row) };
            }
            Ok(())
        })
    });
    Ok([attend].into_iter().chain(merge).collect())
}

/// Work of a task: a block of the heads that share a KV head.
struct DecodeTask {
    block: usize,
    kv_head: usize,
    split: usize,
    token: usize,
    batch: usize,
}

impl DecodeAttention {
    fn new(context: &KernelContext<'_>, plan: Plan, scratch: Scratch) -> Result<Self> {
        let operands = Operands::new(context)?;
        let (isa, v) = (context.isa, &operands.v);
        Ok(DecodeAttention {
            plan,
            operands,
            scratch,
            products: products_of(isa, element(&operands.k)).ok_or_else(no_kernel)?,
            weighted_sums: weighted_sums_of(isa, element(v)).ok_or_else(no_kernel)?,
            decode_mask: decode_of(isa, DType::F16).ok_or_else(no_kernel)?,
        })
    }

    fn head_blocks(&self) -> usize {
        self.plan.extents.group().div_ceil(self.plan.head_block)
    }

    fn tasks(&self) -> usize {
        let Extents {
            tokens,
            kv_heads,
            batch,
            ..
        } = self.plan.extents;
        self.plan.splits * self.head_blocks() * tokens * kv_heads * batch
    }

    #[inline]
    fn decode_task(&self, task: usize) -> DecodeTask {
        let (plan, extents) = (&self.plan, &self.plan.extents);
        // Rows of all KV heads are adjacent in a cache. Processing them in sequence uses everything
        // that processors prefetch.
        let (rest, block) = divide(task, self.head_blocks());
        let (rest, kv_head) = divide(rest, extents.kv_heads);
        let (rest, split) = divide(rest, plan.splits);
        let (batch, token) = divide(rest, extents.tokens);
        DecodeTask {
            block,
            kv_head,
            split,
            token,
            batch,
        }
    }

    /// # Safety
    /// See [`Operand`](crate::operand::Operand); `task` and `worker` must exist.
    unsafe fn task(&self, task: usize, worker: usize) {
        let (plan, extents, own) = (&self.plan, &self.plan.extents, &self.operands);
        let group = extents.group();
        let DecodeTask {
            block,
            kv_head,
            split,
            token,
            batch,
        } = self.decode_task(task);

        let first_head = block * plan.head_block;
        let count = plan.head_block.min(group - first_head);

        // SAFETY: the plan has room for each worker's part.
        let mut memory = unsafe {
            let at = plan.partials + worker * plan.worker;
            ScratchSplitter::new(self.scratch, at, plan.worker / size_of::<f32>())
        };
        let (scores, _) = memory.floats(count * BLOCK).as_chunks_mut::<BLOCK>();
        let (biases, _) = memory.floats(count * BLOCK).as_chunks_mut::<BLOCK>();
        let sums = memory.floats(count * extents.dv);
        let room = |decode: bool, size: usize| if decode { BLOCK * size } else { 0 };
        let decoded_keys = memory.floats(room(plan.decode_keys, extents.d));
        let decoded_values = memory.floats(room(plan.decode_values, extents.dv));
        sums.fill(0.0);
        let mut rows = [QueryRow::default(); COLUMNS];
        let none = Column {
            x: std::ptr::null(),
            out: std::ptr::null_mut(),
        };
        let (mut queries, mut weights) = ([none; COLUMNS], [none; COLUMNS]);
        for (c, scores) in scores.iter_mut().enumerate() {
            let head = kv_head * group + first_head + c;
            rows[c] = QueryRow {
                head,
                slope: own.slopes.for_head(head),
                base: f32::NEG_INFINITY,
                sums: [0.0; LANES],
            };
            queries[c] = Column {
                x: own.q.at([token, head, batch]),
                out: scores.as_mut_ptr(),
            };
            weights[c] = Column {
                x: scores.as_ptr().cast(),
                out: sums.as_mut_ptr().wrapping_add(c * extents.dv),
            };
        }
        let (rows, queries, weights) = (&mut rows[..count], &queries[..count], &weights[..count]);
        // Usually all heads share a row of the mask.
        let is_shared = own.mask.is_none_or(|mask| mask.shape()[2] == 1);
        let biases = &mut biases[..if is_shared { 1 } else { count }];

        let (start, end) = if plan.splits == 1 {
            (0, extents.keys)
        } else {
            (split * SPLIT, ((split + 1) * SPLIT).min(extents.keys))
        };
        let mut shown_blocks = u64::MAX;
        for (number, key) in (start..end).step_by(BLOCK).enumerate() {
            // With many sequences, most blocks belong to other sequences.
            if let Some(mask) = own.mask.filter(|_| is_shared) {
                if number % 64 == 0 {
                    let row = mask.at([token, 0, divide(batch, mask.shape()[3]).1]);
                    let row = row.wrapping_add(key * size_of::<u16>()).cast::<u16>();
                    // SAFETY: the mask is F16 without gaps, as inference checked, and at least as
                    // long as the number of keys. A mask that is read is not written to.
                    let row =
                        unsafe { std::slice::from_raw_parts(row, (end - key).min(64 * BLOCK)) };
                    shown_blocks = blocks_shown(own.isa, row);
                }
                if shown_blocks >> (number % 64) & 1 == 0 {
                    continue;
                }
            }
            let mut len = 0;
            for (bias, row) in biases.iter_mut().zip(&*rows) {
                let place = [token, row.head, batch];
                // SAFETY: masks are at least as long as there are keys.
                unsafe { self.read_mask(place, key, BLOCK.min(end - key), bias) };
                len = len.max(shown(own.isa, bias));
            }
            if len == 0 {
                continue;
            }
            // SAFETY: the keys and values are inside their shapes, and the worker's memory has room
            // for them.
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
                (self.products)(&keys, queries);
                soften(own.isa, own.logits, rows, biases, scores, sums);
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
                (self.weighted_sums)(&values, weights);
            }
        }

        for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(extents.dv.max(1))) {
            let place = [row.head, token, batch];
            let sum = sum_of(&row.sums, |x| x);
            // SAFETY: the row is inside the result or the partial results, and only this task
            // writes it.
            unsafe {
                if plan.splits == 1 {
                    let out = own.result.row_mut::<f32>(place);
                    out.copy_from_slice(sums);
                    let factor = own.sinks.factor(row.head, row.base, sum);
                    scale_row(own.isa, out, factor);
                } else {
                    let number = row.head + extents.heads * (token + extents.tokens * batch);
                    let partial = self.partial(number, split);
                    partial[0] = row.base;
                    partial[1] = sum;
                    partial[2..].copy_from_slice(sums);
                }
            }
        }
    }

    /// Reads the mask of a query's row for `len` keys, starting with `key`.
    ///
    /// # Safety
    /// Token, head and batch must be inside the shapes, `key + len` at most the number of keys, and
    /// `len` at most [`BLOCK`].
    #[inline]
    unsafe fn read_mask(
        &self,
        [token, head, batch]: [usize; 3],
        key: usize,
        len: usize,
        bias: &mut Bias,
    ) {
        *bias = [f32::NEG_INFINITY; BLOCK];
        let Some(mask) = self.operands.mask else {
            return bias[..len].fill(0.0);
        };
        let [_, _, m2, m3] = mask.shape();
        let row = mask.at([token, divide(head, m2).1, divide(batch, m3).1]);
        let row = Rows {
            first: row.wrapping_add(key * size_of::<u16>()),
            stride: 0,
            count: 1,
            len,
        };
        // SAFETY: the mask is F16 without gaps, as inference checked, and has `len` numbers from
        // `key`. `bias` has room for `BLOCK`, which `len` does not exceed. `decode_mask` was chosen
        // for a detected `isa`.
        unsafe { (self.decode_mask)(&row, bias.as_mut_ptr()) }
    }

    /// Returns the partial result of a row: base and sum of weights, weighted values.
    ///
    /// # Safety
    /// Row and split must exist, and no other code may use them.
    #[allow(clippy::mut_from_ref)] // scratch memory is an address
    unsafe fn partial(&self, row: usize, split: usize) -> &mut [f32] {
        let len = self.plan.extents.dv + 2;
        let at = self.scratch.at((row * self.plan.splits + split) * len * 4);
        // SAFETY: the plan has room for them.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
    }

    /// # Safety
    /// Row number `row` must exist and all its partial results must be written. No other code may
    /// use them or the result's row.
    unsafe fn merge(&self, row: usize) {
        let (plan, extents) = (&self.plan, &self.plan.extents);
        let (head, rest) = (row % extents.heads, row / extents.heads);
        let place = [head, rest % extents.tokens, rest / extents.tokens];
        // SAFETY: the row exists, is F32 without gaps, and belongs only to this task. `split` is
        // below `splits`, so each partial result is in the plan's part of the scratch memory. One
        // of them is borrowed at a time.
        unsafe {
            let out = self.operands.result.row_mut::<f32>(place);
            let parts = (0..plan.splits).map(|split| &*self.partial(row, split));
            let base = parts
                .clone()
                .map(|part| part[0])
                .fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            out.fill(0.0);
            for part in parts.filter(|part| part[1] != 0.0) {
                let factor = math::exp(part[0] - base);
                sum += part[1] * factor;
                self.operands.isa.run(|| {
                    out.iter_mut()
                        .zip(&part[2..])
                        .for_each(|(x, y)| *x += *y * factor);
                });
            }
            let factor = self.operands.sinks.factor(head, base, sum);
            scale_row(self.operands.isa, out, factor);
        }
    }
}

/// Returns quotient and remainder. Avoids the slow division in the usual case of a divisor of 1.
#[inline(always)]
fn divide(number: usize, by: usize) -> (usize, usize) {
    if by == 1 {
        (number, 0)
    } else {
        (number / by, number % by)
    }
}

vectorized! {
    /// Returns a bit for each of up to 64 blocks of keys, set if the mask row shows a key of the
    /// block. The lowest bit is the first block.
    fn blocks_shown(row: &[u16]) -> u64 {
        let (whole, rest) = row.as_chunks::<BLOCK>();
        let mut bits = 0;
        for (i, block) in whole.iter().enumerate() {
            bits |= u64::from(shows(block)) << i;
        }
        if shows(rest) {
            bits |= 1 << whole.len();
        }
        bits
    }
}

/// Returns the number of keys up to the last visible one.
#[inline]
fn shown(isa: Isa, bias: &Bias) -> usize {
    isa.run(|| {
        let numbered = bias.iter().zip(1i32..);
        let shown = numbered.map(|(x, number)| if *x == f32::NEG_INFINITY { 0 } else { number });
        shown.fold(0, i32::max) as usize
    })
}

vectorized! {
    /// Turns the products of rows with a block of keys into weights, and adds them to the rows'
    /// sums. If the base of weights changes, the earlier sums are rescaled, including those of
    /// values.
    fn soften(
        logits: Logits,
        rows: &mut [QueryRow],
        biases: &[Bias],
        scores: &mut [[f32; BLOCK]],
        values: &mut [f32],
    ) {
        let Logits { scale, softcap, .. } = logits;
        let len = values.len() / rows.len();
        for (c, (row, scores)) in rows.iter_mut().zip(scores).enumerate() {
            scores.iter_mut().for_each(|x| *x *= scale);
            if softcap != 0.0 {
                scores.iter_mut().for_each(|x| *x = softcap * math::tanh(*x));
            }
            let most = row.base + SLACK;
            let mut exceeds = false;
            for (x, bias) in scores.iter_mut().zip(&biases[c.min(biases.len() - 1)]) {
                let sum = *x + row.slope * *bias;
                // An unused cell of a cache may hold anything, which must not be seen.
                *x = if *bias == f32::NEG_INFINITY { f32::NEG_INFINITY } else { sum };
                exceeds |= *x > most;
            }
            if exceeds {
                let base = max_of(scores);
                let factor = math::bounded_exp::<FUSED>(row.base - base);
                row.base = base;
                row.sums.iter_mut().for_each(|x| *x *= factor);
                values[c * len..][..len].iter_mut().for_each(|x| *x *= factor);
            }
            // A row that has seen no key yet has no base and no weights.
            let base = if row.base == f32::NEG_INFINITY { 0.0 } else { row.base };
            let mut sums = row.sums;
            for scores in scores.as_chunks_mut::<LANES>().0 {
                for (x, sum) in scores.iter_mut().zip(&mut sums) {
                    *x = math::bounded_exp::<FUSED>(*x - base);
                    *sum += *x;
                }
            }
            row.sums = sums;
        }
    }
}
