//! Attention of many tokens. A task is some blocks of query rows, which walk over blocks of keys
//! together. If few rows of a block see the same keys, as with many sequences of one token each,
//! the block's tokens are computed one by one.

use super::decode::{SingleTokens, scratch_alone};
use super::query_block::{
    Class, LANES_STRIDE, QueryBlock, QueryBlocks, ROWS, RowLanes, Sums, cap, soften,
};
use super::{Extents, Operands, ScratchSplitter, rows_of, too_large};
use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::kernels::outer::float::{self as outer, Outer, OuterFn};
use crate::kernels::outer::int16::{self, Rounded};
use crate::kernels::softmax::scale_row;
use crate::operand::Operand;
use samite_core::{DType, Layout, Node, Result};
use std::array::from_fn;

/// Number of keys of a block.
const KEYS: usize = 64;

const _: () = assert!(KEYS <= u8::MAX as usize);

/// Maximum number of query blocks of a task. Keys, and usually values, are converted once for all
/// of them.
const MAX_BLOCKS: usize = 8;

/// Minimum average number of rows that must see a block of keys, among blocks that any row sees, to
/// compute the rows together.
const TOGETHER: usize = 6;

/// Number of tasks per thread from which tasks get more than one block.
const ENOUGH_TASKS: usize = 8;

const _: () = assert!(ROWS == int16::BESIDE && ROWS.is_multiple_of(int16::STEP));

/// Arithmetic of the products of queries with keys, and of weights with values.
#[derive(Clone, Copy)]
enum Arithmetic {
    /// F32.
    F32(OuterFn),
    /// [16-bit products](crate::kernels::outer::int16), chosen if keys and values have lower
    /// precision than F32.
    Int16(int16::Products),
}

/// Division of the work.
#[derive(Clone, Copy)]
struct PrefillPlan {
    extents: Extents,
    blocks: QueryBlocks,
    /// Number of blocks of a task.
    each: usize,
    arithmetic: Arithmetic,
    /// Numbers in the memory of a worker for each of a task's blocks: queries and sums of values.
    own: [usize; 2],
    /// Numbers that blocks need one after the other: decoded keys and values, lanes, and rounded
    /// keys, values and weights.
    shared: [usize; 6],
    floats: usize,
    /// If all heads have one mask, the numbers of masks, blocks of tokens and blocks of keys with
    /// classes.
    classes: [usize; 3],
}

impl PrefillPlan {
    /// Returns `None` if it takes too much memory.
    fn new(node: Node<'_>, isa: Isa, threads: usize) -> Option<Self> {
        let extents = Extents::from_node(node, 0)?;
        let Extents { d, dv, .. } = extents;
        let blocks = QueryBlocks::new(extents);
        let all = blocks.of_a_head().checked_mul(blocks.kv_heads())?;
        let tasks = threads.max(1).checked_mul(ENOUGH_TASKS)?;
        let each = (all / tasks).clamp(1, MAX_BLOCKS);
        let arithmetic = Arithmetic::for_node(node, isa, extents)?;
        let (queries, lanes, [keys, values, weights]) = match arithmetic {
            Arithmetic::F32(_) => (d.checked_mul(ROWS)?, KEYS * ROWS, [0; 3]),
            Arithmetic::Int16(_) => {
                let [keys, values] = [Rounded::words(d, KEYS)?, Rounded::words(KEYS, dv)?];
                let rounded = [keys, values, Rounded::words(KEYS, ROWS)?];
                let lanes = d.max(KEYS).checked_mul(ROWS)?;
                (Rounded::words(d, ROWS)?, lanes, rounded)
            }
        };
        let own = [queries, dv.checked_mul(ROWS)?];
        let [decoded_keys, decoded_values] = [d.checked_mul(KEYS)?, dv.checked_mul(KEYS)?];
        let shared = [decoded_keys, decoded_values, lanes, keys, values, weights];
        let sum = |parts: &[usize]| {
            let mut parts = parts.iter();
            parts.try_fold(0_usize, |sum, part| sum.checked_add(*part))
        };
        let floats = sum(&own)?.checked_mul(each)?.checked_add(sum(&shared)?)?;
        let classes = match node.source_layout(3).map(Layout::shape) {
            Some([_, _, 1, masks]) => [masks, blocks.of_tokens(), extents.keys.div_ceil(KEYS)],
            _ => [0; 3],
        };
        Some(PrefillPlan {
            extents,
            blocks,
            each,
            arithmetic,
            own,
            shared,
            floats,
            classes,
        })
    }

    /// Returns the offsets of the parts of the scratch memory.
    fn parts(&self, node: Node<'_>, threads: usize) -> Option<PrefillScratch> {
        let [masks, tokens, keys] = self.classes;
        let blocks = masks.checked_mul(tokens)?;
        let workers = self.floats.checked_mul(threads)?;
        let classes = workers.checked_mul(size_of::<f32>())?;
        let bytes = blocks.checked_mul(keys)?.checked_mul(size_of::<Class>())?;
        let alone = classes.checked_add(bytes)?;
        let one_by_one = alone.checked_add(blocks)?.checked_next_multiple_of(64)?;
        let end = match blocks {
            0 => one_by_one,
            _ => one_by_one.checked_add(scratch_alone(node, threads)?)?,
        };
        Some(PrefillScratch {
            classes,
            alone,
            one_by_one,
            end,
        })
    }
}

/// Parts of the scratch memory after that of the workers.
struct PrefillScratch {
    classes: usize,
    alone: usize,
    one_by_one: usize,
    end: usize,
}

impl Arithmetic {
    /// Returns `None` if there is no kernel.
    fn for_node(node: Node<'_>, isa: Isa, Extents { d, dv, .. }: Extents) -> Option<Self> {
        let is_coarse = |source| {
            let layout = node.source_layout(source);
            layout.is_some_and(|layout| layout.dtype() != DType::F32)
        };
        let fits = d.is_multiple_of(int16::STEP) && dv.is_multiple_of(int16::STEP);
        match int16::products(isa) {
            Some(products) if fits && is_coarse(1) && is_coarse(2) => {
                Some(Arithmetic::Int16(products))
            }
            _ => outer::sums(isa, DType::F32).map(Arithmetic::F32),
        }
    }
}

pub(super) fn scratch(node: Node<'_>, isa: Isa, threads: usize) -> Option<usize> {
    let plan = PrefillPlan::new(node, isa, threads)?;
    Some(plan.parts(node, threads)?.end)
}

/// Data that tasks need.
#[derive(Clone, Copy)]
struct PrefillAttention {
    plan: PrefillPlan,
    operands: Operands,
    scratch: Scratch,
    /// Classes of the mask.
    classes: *mut Class,
    /// Flags of blocks of tokens that are computed one by one.
    alone: *mut bool,
}

// SAFETY: addresses, as in `Scratch`.
unsafe impl Send for PrefillAttention {}
// SAFETY: tasks share the addresses. Each phase defines which part a task may read or write.
unsafe impl Sync for PrefillAttention {}

pub(super) fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let plan =
        PrefillPlan::new(context.node, context.isa, context.threads).ok_or_else(too_large)?;
    let parts = plan.parts(context.node, context.threads);
    let parts = parts.ok_or_else(too_large)?;
    let scratch = context.scratch(parts.end)?;
    let attention = PrefillAttention {
        plan,
        operands: Operands::new(context)?,
        scratch,
        classes: scratch.at(parts.classes).cast(),
        alone: scratch.at(parts.alone).cast(),
    };
    let work = plan.extents.work();
    let of_a_head = plan.blocks.of_a_head().div_ceil(plan.each);
    let tasks = of_a_head * plan.blocks.kv_heads();
    let together = Phase::new(tasks, work, move |tasks, worker| {
        for task in tasks {
            let first = task % of_a_head * plan.each;
            // SAFETY: blocks are inside the shapes, which inference checked to fit. They write
            // different rows of the result. Workers have their own memory.
            unsafe { attention.blocks(task / of_a_head, first, worker) };
        }
        Ok(())
    });
    let [masks, tokens, _] = plan.classes;
    let Some(mask) = attention.operands.mask.filter(|_| masks > 0) else {
        return Ok(vec![together]);
    };
    let cost = (masks * plan.extents.tokens * plan.extents.keys) as f64 * 0.05;
    let classify = Phase::new(masks * tokens, cost, move |tasks, _| {
        for task in tasks {
            // SAFETY: this mask and block of tokens exist, and each task has its own classes.
            unsafe { attention.classify(mask, task / tokens, task % tokens) };
        }
        Ok(())
    });
    let alone = SingleTokens::new(context, scratch.behind(parts.one_by_one))?;
    let one_by_one = Phase::new(alone.tasks(), work, move |tasks, worker| {
        for task in tasks {
            let (batch, token) = alone.place(task);
            if attention.is_alone(batch, plan.blocks.block_of(token)) {
                // SAFETY: tasks are inside the shapes, and write different rows of the result,
                // which no block writes. Workers have their own memory.
                unsafe { alone.task(task, worker) };
            }
        }
        Ok(())
    });
    Ok(vec![classify, together, one_by_one])
}

/// A block with its results so far.
struct QueryBlockState<'a> {
    block: QueryBlock,
    sums: Sums,
    /// Transposed queries.
    queries: &'a mut [f32],
    /// Sums of weighted values: a row for each row of the block.
    values: &'a mut [f32],
}

/// Memory that blocks use one after the other.
struct BlockScratch<'a> {
    /// Decoded keys of the current block.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// Queries before rounding. Later logits, which become weights.
    lanes: &'a mut [RowLanes],
    rounded_keys: &'a mut [f32],
    rounded_values: &'a mut [f32],
    rounded_weights: &'a mut [f32],
}

/// Rows of keys or values, ready for products: the first row and the stride in bytes.
type StridedRows = (*const u8, usize);

/// Keys of a block that the mask hides from a block of rows, a bit for each.
#[derive(Clone, Copy)]
struct Hidden {
    /// Keys that at least one row does not see.
    from_some: u64,
    /// Keys that no row sees.
    from_all: u64,
}

/// Values of a block of keys, ready for products.
#[derive(Clone, Copy)]
struct Values {
    place: StridedRows,
    count: usize,
    /// Keys whose values are known to be finite, a bit for each.
    finite: u64,
    /// True if no values were replaced with zeros.
    are_all_there: bool,
    /// Keys whose values are not finite, a bit for each. Zeros replace them.
    not_finite: u64,
}

impl Values {
    /// Returns whether rows that do not see `hidden` can use them.
    fn fits(&self, hidden: Hidden) -> bool {
        hidden.from_all == 0 && hidden.from_some & !self.finite == 0
    }
}

const _: () = assert!(KEYS == u64::BITS as usize);

/// Iterates over the indices of the set bits, from the lowest.
fn bits(mut set: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        lowest
    })
}

impl PrefillAttention {
    /// Writes the classes of a block of tokens.
    ///
    /// # Safety
    /// The block must exist.
    unsafe fn classify(&self, mask: Operand, number: usize, tokens: usize) {
        let PrefillPlan {
            blocks, extents, ..
        } = self.plan;
        let block = blocks.with_tokens(number, tokens);
        for key in (0..extents.keys).step_by(KEYS) {
            let len = KEYS.min(extents.keys - key);
            // SAFETY: masks cover all tokens and keys, and there is room for all classes.
            unsafe { self.place(&block, key).write(block.class(mask, key, len)) };
        }
        // SAFETY: each mask and block of tokens has a flag, and classes were just written.
        unsafe {
            let is_alone = self.are_seen_by_few(&block, mask);
            self.noted(number, tokens).write(is_alone);
        }
    }

    /// Returns whether few rows of a block see the same keys.
    ///
    /// # Safety
    /// The block must exist, and its classes must be written.
    unsafe fn are_seen_by_few(&self, block: &QueryBlock, mask: Operand) -> bool {
        let keys = self.plan.extents.keys;
        // SAFETY: guaranteed by the caller.
        let visible = |key: usize| unsafe { self.place(block, key).read().visible };
        let seen = (0..keys).step_by(KEYS).filter(|&key| visible(key) > 0);
        let all = seen.count() * TOGETHER;
        // The first and the last token of a sequence see nearly the same keys. SAFETY: the mask has
        // a row for each token of the block, and all keys.
        let blocks_of = |token| unsafe { block.blocks_seen(token, mask, keys, KEYS) };
        let ends = blocks_of(0) + blocks_of(block.tokens() - 1);
        if ends * block.rows() >= 2 * all {
            return false;
        }
        let mut rows = 0;
        (0..block.tokens()).all(|token| {
            rows += blocks_of(token) * block.heads();
            rows < all
        })
    }

    /// Returns the address of the flag that tells if a block's tokens are computed one by one.
    fn noted(&self, number: usize, tokens: usize) -> *mut bool {
        let [_, of_tokens, _] = self.plan.classes;
        self.alone.wrapping_add(number * of_tokens + tokens)
    }

    /// Returns whether tokens of a block are computed one by one.
    fn is_alone(&self, batch: usize, tokens: usize) -> bool {
        let [masks, ..] = self.plan.classes;
        // SAFETY: if there are classes, the phase before wrote a flag for each mask and block of
        // tokens.
        masks > 0 && unsafe { self.noted(batch % masks, tokens).read() }
    }

    /// Returns the address of the class of a block.
    fn place(&self, block: &QueryBlock, key: usize) -> *mut Class {
        let [masks, tokens, keys] = self.plan.classes;
        let row = block.batch % masks * tokens + self.plan.blocks.tokens_of(block);
        self.classes.wrapping_add(row * keys + key / KEYS)
    }

    /// Returns how the mask affects `len` keys from `key` for a block.
    ///
    /// # Safety
    /// The block and the keys must exist, `key` must be the first of a block of keys, and classes
    /// must be written, if there are any.
    unsafe fn class(&self, block: &QueryBlock, key: usize, len: usize) -> Class {
        let class = |visible: usize, changes| Class {
            visible: visible as u8,
            changes,
        };
        // SAFETY: the mask has rows for all tokens of the block, and `len` numbers from `key`, as
        // inference checked its shape. If there are classes, `classify` wrote one for each mask,
        // block of tokens and block of keys, so also that at `place`.
        unsafe {
            match self.operands.mask {
                None => class(len, false),
                Some(_) if self.plan.classes[0] > 0 => self.place(block, key).read(),
                // Separate masks of heads are read completely, once.
                Some(mask) => class(block.visible(mask, key, len), true),
            }
        }
    }

    /// Computes blocks of KV head `kv_head`, starting with number `first`.
    ///
    /// # Safety
    /// See [`Operand`](crate::operand::Operand). Blocks and worker must exist.
    unsafe fn blocks(&self, kv_head: usize, first: usize, worker: usize) {
        let PrefillPlan { blocks, floats, .. } = self.plan;
        let Extents {
            dv, keys: all_keys, ..
        } = self.plan.extents;
        let own = &self.operands;
        let at = worker * floats * size_of::<f32>();
        // SAFETY: each worker has this part of the scratch memory.
        let mut memory = unsafe { ScratchSplitter::new(self.scratch, at, floats) };
        let [
            keys,
            values,
            lanes,
            rounded_keys,
            rounded_values,
            rounded_weights,
        ] = self.plan.shared.map(|count| memory.floats(count));
        let shared = &mut BlockScratch {
            keys,
            values,
            lanes: lanes.as_chunks_mut().0,
            rounded_keys,
            rounded_values,
            rounded_weights,
        };
        let end = blocks.of_a_head().min(first + self.plan.each);
        let mut states: [Option<QueryBlockState<'_>>; MAX_BLOCKS] = from_fn(|i| {
            let number = first + i;
            let block = (number < end).then(|| blocks.block(kv_head, number))?;
            if self.is_alone(block.batch, blocks.tokens_of(&block)) {
                return None;
            }
            let [queries, values] = self.plan.own.map(|count| memory.floats(count));
            values.fill(0.0);
            // SAFETY: the block exists.
            unsafe { self.turn(block, queries, shared) };
            Some(QueryBlockState {
                block,
                sums: Sums::NONE,
                queries,
                values,
            })
        });
        let QueryBlock { kv_head, batch, .. } = blocks.block(kv_head, first);

        for key in (0..all_keys).step_by(KEYS) {
            let place = [key, kv_head, batch];
            let most = KEYS.min(all_keys - key);
            let class = |state: &QueryBlockState<'_>| {
                // SAFETY: the keys exist, and the phase before wrote classes.
                unsafe { self.class(&state.block, key, most) }
            };
            let classes = states.each_ref().map(|state| state.as_ref().map(class));
            let seen = classes.iter().flatten().map(|class| class.visible);
            let len = usize::from(seen.max().unwrap_or(0));
            if len == 0 {
                continue;
            }
            // SAFETY: this many keys and values are inside their shapes.
            unsafe {
                let keys = self.keys(place, len, shared);
                // Values that the previous block was multiplied with.
                let mut ready: Option<Values> = None;
                let states = states
                    .iter_mut()
                    .flatten()
                    .zip(classes.into_iter().flatten());
                for (state, class) in states.filter(|(_, class)| class.visible > 0) {
                    let len = usize::from(class.visible);
                    let hidden = self.weigh(state, key, class, keys, shared);
                    let values = match ready {
                        Some(ready) if ready.count == len && ready.fits(hidden) => ready,
                        _ => self.values(place, len, hidden, shared),
                    };
                    self.add(state, len, values.place, shared);
                    if values.not_finite != 0 {
                        self.spoil(state, &values, shared);
                    }
                    ready = values.are_all_there.then_some(values);
                }
            }
        }

        for state in states.iter().flatten() {
            for (row, (head, token)) in state.block.places().enumerate() {
                // SAFETY: the row is inside the result, and only this task writes it.
                unsafe {
                    let out = own.result.row_mut::<f32>([head, token, batch]);
                    out.copy_from_slice(&state.values[row * dv..][..dv]);
                    let Sums { max, sum, .. } = &state.sums;
                    scale_row(own.isa, out, own.sinks.factor(head, max[row], sum[row]));
                }
            }
        }
    }

    /// Transposes the queries of a block.
    ///
    /// # Safety
    /// The block must exist.
    unsafe fn turn(&self, block: QueryBlock, queries: &mut [f32], shared: &mut BlockScratch<'_>) {
        let (own, d) = (&self.operands, self.plan.extents.d);
        let rows = block
            .places()
            .map(|(head, token)| own.q.at([token, head, block.batch]).cast_const().cast());
        let scale = own.logits.scale;
        // SAFETY: queries are f32 without gaps in rows of `d`.
        unsafe {
            match self.plan.arithmetic {
                Arithmetic::F32(_) => block.turn(rows, scale, queries.as_chunks_mut().0),
                Arithmetic::Int16(products) => {
                    block.turn(rows, scale, &mut shared.lanes[..d]);
                    let to = Rounded::at(queries, d, ROWS);
                    (products.round)(shared.lanes.as_ptr().cast(), d, ROWS, to);
                }
            }
        }
    }

    /// Prepares `len` keys from `place` for products.
    ///
    /// # Safety
    /// They must exist, and be at most [`KEYS`].
    unsafe fn keys(
        &self,
        place: [usize; 3],
        len: usize,
        shared: &mut BlockScratch<'_>,
    ) -> StridedRows {
        let (Operands { isa, k, .. }, d) = (&self.operands, self.plan.extents.d);
        let decode = k.dtype() != DType::F32;
        // SAFETY: `len` rows of keys exist from `place`. There is room for `KEYS` rows of `d`,
        // decoded and rounded, and `len` is at most that. Keys are rounded only if they are not
        // F32, so they were decoded before.
        unsafe {
            let keys = rows_of(*isa, k, decode, place, len, shared.keys);
            if let Arithmetic::Int16(products) = self.plan.arithmetic {
                let to = Rounded::at(shared.rounded_keys, d, KEYS);
                int16::round_columns(*isa, &shared.keys[..len * d], to, products.crossed);
            }
            keys
        }
    }

    /// Prepares `len` values from `place` for products. Zeros replace values that no row of the
    /// block sees. If the mask hides a key from some row, zeros also replace values that are not
    /// finite: the hidden key has weight 0, and 0 times NaN is NaN.
    ///
    /// # Safety
    /// They must exist, and be at most [`KEYS`].
    unsafe fn values(
        &self,
        place: [usize; 3],
        len: usize,
        hidden: Hidden,
        shared: &mut BlockScratch<'_>,
    ) -> Values {
        let (Operands { isa, v, .. }, dv) = (&self.operands, self.plan.extents.dv);
        // Otherwise Int16 would be converted once for every few columns.
        let decode = hidden.from_all != 0 || v.dtype() != DType::F32;
        // SAFETY: `len` rows of values exist from `place`. There is room for `KEYS` rows of `dv`,
        // decoded and rounded, and `len` is at most that. Values that are not decoded are F32, and
        // no task writes to them. Values are rounded only if they are not F32 and `dv` is a
        // multiple of `STEP`, and the product's instructions were detected.
        unsafe {
            let mut values = rows_of(*isa, v, decode, place, len, shared.values);
            let row = |key: usize| {
                let row = values.0.wrapping_add(key * values.1).cast::<f32>();
                std::slice::from_raw_parts(row, dv)
            };
            let hidden_keys = bits(hidden.from_some & !hidden.from_all);
            let bad_keys = hidden_keys.filter(|&key| !is_finite(*isa, row(key)));
            let not_finite = bad_keys.fold(0, |keys, key| keys | 1 << key);
            if not_finite != 0 && !decode {
                values = rows_of(*isa, v, true, place, len, shared.values);
            }
            let replaced = hidden.from_all | not_finite;
            for key in bits(replaced) {
                shared.values[key * dv..][..dv].fill(0.0);
            }
            if let Arithmetic::Int16(products) = self.plan.arithmetic {
                let to = Rounded::at(shared.rounded_values, KEYS, dv);
                (products.round)(shared.values.as_ptr(), len, dv, to);
            }
            Values {
                place: values,
                count: len,
                finite: hidden.from_some & !not_finite,
                are_all_there: replaced == 0,
                not_finite,
            }
        }
    }

    /// Makes sums NaN if their row sees values that are not finite and were replaced with zeros.
    fn spoil(&self, state: &mut QueryBlockState<'_>, values: &Values, shared: &BlockScratch<'_>) {
        let weights = &shared.lanes[..values.count];
        let keys = bits(values.not_finite);
        let rows = state.values.chunks_exact_mut(self.plan.extents.dv.max(1));
        for (row, sums) in rows.take(state.block.rows()).enumerate() {
            if keys.clone().any(|key| weights[key][row] != 0.0) {
                sums.fill(f32::NAN);
            }
        }
    }

    /// Computes the weights of the visible keys of a block with this class, from number `key`.
    /// Returns the keys that the mask hides.
    ///
    /// # Safety
    /// The keys must be prepared at `keys` by [`keys`](Self::keys), and the queries of the block in
    /// `state` by [`turn`](Self::turn).
    unsafe fn weigh(
        &self,
        state: &mut QueryBlockState<'_>,
        key: usize,
        class: Class,
        keys: StridedRows,
        shared: &mut BlockScratch<'_>,
    ) -> Hidden {
        let (own, d) = (&self.operands, self.plan.extents.d);
        let (block, len) = (state.block, usize::from(class.visible));
        let logits = &mut shared.lanes[..len];
        // SAFETY: `turn` made `d` terms of `ROWS` queries, `keys` has `len` rows of `d` numbers,
        // and `logits` has `len` rows of `ROWS`, which overlap neither. `rounded_weights` has room
        // for `KEYS` terms, and `len` is at most that. The mask has `len` numbers from `key`. The
        // products' instructions were detected.
        unsafe {
            match self.plan.arithmetic {
                Arithmetic::F32(products) => products(&Outer {
                    rows: state.queries.as_ptr().cast(),
                    row_stride: LANES_STRIDE,
                    len: block.lanes(),
                    terms: d,
                    factors: keys.0.cast(),
                    column_stride: keys.1,
                    term_stride: size_of::<f32>(),
                    out: logits.as_mut_ptr().cast(),
                    out_stride: LANES_STRIDE,
                    columns: len,
                    add: false,
                }),
                Arithmetic::Int16(products) => (products.along)(&int16::Outer {
                    rows: Rounded::at(state.queries, d, ROWS),
                    lanes: ROWS,
                    groups: d.div_ceil(int16::GROUP),
                    factors: Rounded::at(shared.rounded_keys, d, KEYS),
                    columns: len,
                    out: logits.as_mut_ptr().cast(),
                    before: None,
                }),
            }
            if own.logits.softcap != 0.0 {
                cap(own.isa, logits, own.logits.softcap);
            }
            let masked = own.mask.filter(|_| class.changes);
            let masked = masked.map_or(0, |mask| block.mask(mask, &own.slopes, key, logits));
            let from_some = masked & u64::MAX >> (KEYS - len);
            soften(own.isa, logits, &mut state.sums);
            if let Arithmetic::Int16(products) = self.plan.arithmetic {
                let to = Rounded::at(shared.rounded_weights, KEYS, ROWS);
                (products.round)(logits.as_ptr().cast(), len, ROWS, to);
            }
            let is_unseen = |key: &usize| logits[*key][..block.rows()].iter().all(|w| *w == 0.0);
            let unseen = bits(from_some).filter(is_unseen);
            Hidden {
                from_some,
                from_all: unseen.fold(0, |keys, key| keys | 1 << key),
            }
        }
    }

    /// Adds the first `len` values of the current block of keys, weighted.
    ///
    /// # Safety
    /// The values must be prepared at `values` by [`values`](Self::values), and their weights in
    /// `shared` by [`weigh`](Self::weigh).
    unsafe fn add(
        &self,
        state: &mut QueryBlockState<'_>,
        len: usize,
        values: StridedRows,
        shared: &mut BlockScratch<'_>,
    ) {
        let (isa, dv) = (self.operands.isa, self.plan.extents.dv);
        let rows = state.block.rows();
        match self.plan.arithmetic {
            Arithmetic::F32(products) => {
                let sums = state.values.chunks_exact_mut(dv.max(1));
                let sums = sums.zip(&state.sums.factor).take(rows);
                for (sums, &factor) in sums.filter(|(_, factor)| **factor != 1.0) {
                    scale_row(isa, sums, factor);
                }
                // SAFETY: `values` has `len` rows of `dv` F32 numbers, and `lanes` weights of `len`
                // keys for `ROWS` rows. `state.values` has `ROWS` rows of `dv` sums, at least
                // `rows`, and overlaps neither. The product's instructions were detected.
                unsafe {
                    products(&Outer {
                        rows: values.0,
                        row_stride: values.1,
                        len: dv,
                        terms: len,
                        factors: shared.lanes.as_ptr().cast(),
                        column_stride: size_of::<f32>(),
                        term_stride: LANES_STRIDE,
                        out: state.values.as_mut_ptr(),
                        out_stride: dv * size_of::<f32>(),
                        columns: rows,
                        add: true,
                    });
                }
            }
            // SAFETY: `values` rounded `len` terms of `dv` lanes, and `weigh` as many of `ROWS`
            // weights: whole groups of both. `state.values` has `ROWS` rows of `dv` sums, and
            // `factor` has `ROWS` numbers. `rows` is at most that. The product's instructions were
            // detected.
            Arithmetic::Int16(products) => unsafe {
                (products.beside)(&int16::Outer {
                    rows: Rounded::at(shared.rounded_values, KEYS, dv),
                    lanes: dv,
                    groups: len.div_ceil(int16::GROUP),
                    factors: Rounded::at(shared.rounded_weights, KEYS, ROWS),
                    columns: rows,
                    out: state.values.as_mut_ptr(),
                    before: Some(&state.sums.factor),
                });
            },
        }
    }
}

vectorized! {
    /// Returns whether all numbers of a row are finite.
    fn is_finite(row: &[f32]) -> bool {
        let magnitudes = row.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        magnitudes.fold(0, u32::max) < f32::INFINITY.to_bits()
    }
}
