//! Blocks of query rows. The rows are adjacent, in the lanes of vectors, and keys follow one
//! another. Logits, weights and their gradients of a key are therefore vectors. Maxima and sums of
//! all rows are computed lane by lane. Products are [sums of outer
//! products](crate::kernels::outer::float), for which no operand needs rearranging.

use super::{Extents, ScratchSplitter};
use crate::detect::vectorized;
use crate::kernels::softmax::Slopes;
use crate::operand::Operand;
use crate::simd::{math, prefetch};
use half::f16;

/// Number of rows of a block.
pub(super) const ROWS: usize = 64;

const NO_KEY: u16 = 0xfc00; // minus infinity as f16

/// A number for each row.
pub(super) type RowLanes = [f32; ROWS];

/// Bytes from one key's numbers to the next key's.
pub(super) const LANES_STRIDE: usize = size_of::<RowLanes>();

/// Division of query rows into blocks. A block has some heads, which share a KV head, of some
/// tokens.
#[derive(Clone, Copy)]
pub(super) struct QueryBlocks {
    extents: Extents,
    head_block: usize,
    token_block: usize,
}

impl QueryBlocks {
    pub fn new(extents: Extents) -> Self {
        let head_block = extents.group().clamp(1, ROWS);
        QueryBlocks {
            extents,
            head_block,
            token_block: ROWS / head_block,
        }
    }

    /// Returns the number of blocks of each KV head.
    pub fn of_a_head(&self) -> usize {
        let Extents { tokens, .. } = self.extents;
        tokens.div_ceil(self.token_block) * self.extents.group().div_ceil(self.head_block)
    }

    /// Returns the number of blocks of tokens. Blocks of different heads have the same ones.
    pub fn of_tokens(&self) -> usize {
        self.extents.tokens.div_ceil(self.token_block)
    }

    /// Returns the index of a block's tokens among [`of_tokens`](QueryBlocks::of_tokens).
    pub fn tokens_of(&self, block: &QueryBlock) -> usize {
        self.block_of(block.first_token)
    }

    /// Returns the index of the block of tokens with this token, among
    /// [`of_tokens`](QueryBlocks::of_tokens).
    pub fn block_of(&self, token: usize) -> usize {
        token / self.token_block
    }

    /// Returns a block with block of tokens `number` of [`of_tokens`](QueryBlocks::of_tokens).
    pub fn with_tokens(&self, batch: usize, number: usize) -> QueryBlock {
        let head_blocks = self.extents.group().div_ceil(self.head_block);
        self.block(batch * self.extents.kv_heads, number * head_blocks)
    }

    /// Returns the number of KV heads in all batches.
    pub fn kv_heads(&self) -> usize {
        self.extents.kv_heads * self.extents.batch
    }

    /// Returns block `number` of KV head `kv_head`, which is counted through all batches.
    pub fn block(&self, kv_head: usize, number: usize) -> QueryBlock {
        let Extents {
            kv_heads, tokens, ..
        } = self.extents;
        let group = self.extents.group();
        let head_blocks = group.div_ceil(self.head_block);
        let first_head = number % head_blocks * self.head_block;
        let first_token = number / head_blocks * self.token_block;
        QueryBlock {
            kv_head: kv_head % kv_heads,
            batch: kv_head / kv_heads,
            first_head: kv_head % kv_heads * group + first_head,
            heads: self.head_block.min(group - first_head),
            first_token,
            tokens: self.token_block.min(tokens - first_token),
        }
    }
}

/// A block. Row `heads * t + h` belongs to token `first_token + t` and head `first_head + h`.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    pub kv_head: usize,
    pub batch: usize,
    first_head: usize,
    heads: usize,
    first_token: usize,
    tokens: usize,
}

/// Effect of a mask on a block of keys for a block of query rows.
#[derive(Clone, Copy)]
pub(super) struct Class {
    /// Number of keys up to the last one that any row may see.
    pub visible: u8,
    /// True if the mask changes logits of these keys.
    pub changes: bool,
}

impl QueryBlock {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.heads * self.tokens
    }

    /// Returns the number of heads of each token.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of blocks of `size` keys in which a token sees a key, by a mask that all
    /// heads share.
    ///
    /// # Safety
    /// See [`Operand`]. The mask must have a row for this token of the block, and `keys` keys.
    pub unsafe fn blocks_seen(
        &self,
        token: usize,
        mask: Operand,
        keys: usize,
        size: usize,
    ) -> usize {
        let [_, _, _, m3] = mask.shape();
        let row = mask.at([self.first_token + token, 0, self.batch % m3]);
        // SAFETY: this is a row of the mask, which has `keys` numbers. A mask that is read is not
        // written to.
        let row = unsafe { std::slice::from_raw_parts(row.cast_const().cast::<u16>(), keys) };
        let blocks = row.chunks(size);
        blocks.filter(|block| shows(block)).count()
    }

    /// Iterates over head and token of each row.
    pub fn places(self) -> impl Iterator<Item = (usize, usize)> {
        let heads = self.first_head..self.first_head + self.heads;
        (self.first_token..self.first_token + self.tokens)
            .flat_map(move |token| heads.clone().map(move |head| (head, token)))
    }

    /// Returns the number of used [`RowLanes`]: whole vectors.
    pub fn lanes(&self) -> usize {
        self.rows().next_multiple_of(16)
    }

    /// Transposes rows so that they are adjacent: element `i` of all rows, times `factor`, becomes
    /// `to[i]`. Lanes without rows are zeros.
    ///
    /// # Safety
    /// See [`Operand`]. `rows` must yield the addresses of at least [`rows`](QueryBlock::rows) rows
    /// of dense f32 numbers, each of `to.len()` or more.
    pub unsafe fn turn(
        &self,
        rows: impl Iterator<Item = *const f32>,
        factor: f32,
        to: &mut [RowLanes],
    ) {
        if self.rows() < ROWS {
            to.as_flattened_mut().fill(0.0);
        }
        let mut places = [std::ptr::null::<f32>(); ROWS];
        places.iter_mut().zip(rows).for_each(|(to, row)| *to = row);
        let places = &places[..self.rows()];
        for (lane, row) in places.iter().enumerate() {
            // Rows usually come from memory, in pieces that are too short for the hardware
            // prefetcher.
            if let Some(next) = places.get(lane + 8) {
                for i in (0..to.len()).step_by(16) {
                    prefetch(next.wrapping_add(i));
                }
            }
            for (i, lanes) in to.iter_mut().enumerate() {
                // SAFETY: `row` is one of the addresses that `rows` yielded, as there are at least
                // `self.rows()` of them, and `i` is below the `to.len()` numbers of each.
                lanes[lane] = unsafe { *row.add(i) } * factor;
            }
        }
    }

    /// Iterates over the mask's rows, each with its rows of the block.
    fn masks(self, mask: Operand) -> impl Iterator<Item = (*const u16, std::ops::Range<usize>)> {
        let [_, _, m2, m3] = mask.shape();
        // Usually all heads share a mask.
        let each = if m2 == 1 { self.heads } else { 1 };
        (0..self.rows()).step_by(each).map(move |row| {
            let token = self.first_token + row / self.heads;
            let head = self.first_head + row % self.heads;
            let at = mask.at([token, head % m2, self.batch % m3]);
            (at.cast_const().cast(), row..row + each)
        })
    }

    /// Returns the effect of a mask that all heads share on at most 255 keys from `key`.
    ///
    /// # Safety
    /// As [`visible`](QueryBlock::visible).
    pub unsafe fn class(&self, mask: Operand, key: usize, len: usize) -> Class {
        // SAFETY: `visible` has the same requirements.
        let visible = unsafe { self.visible(mask, key, len) };
        let changes = self.masks(mask).any(|(row, _)| {
            // SAFETY: `row` is a row of the mask with `len` keys from `key`, and `visible` is at
            // most `len`.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), visible) };
            row.iter().fold(0, |any, m| any | m) != 0
        });
        Class {
            visible: visible as u8,
            changes,
        }
    }

    /// Returns the number of keys, among `len` keys from `key`, up to the last one that any row may
    /// see.
    ///
    /// # Safety
    /// See [`Operand`]. The mask must have rows for all tokens, and the keys.
    pub unsafe fn visible(&self, mask: Operand, key: usize, len: usize) -> usize {
        let mut visible = 0;
        for (row, _) in self.masks(mask) {
            // SAFETY: `row` is a row of the mask, which has `len` keys from `key`. A mask that is
            // read is not written to.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), len) };
            // The keys before are known to be visible. Usually the last one is visible as well.
            visible += seen(&row[visible..]);
            if visible == len {
                break;
            }
        }
        visible
    }

    /// Adds the mask from `key`, times the slopes of the heads, to logits. Logits of masked keys
    /// become minus infinity. Returns which of the first 64 keys are masked for some row, a bit for
    /// each.
    ///
    /// # Safety
    /// See [`Operand`]. The mask must have rows for all tokens, and the keys.
    pub unsafe fn mask(
        &self,
        mask: Operand,
        slopes: &Slopes,
        key: usize,
        logits: &mut [RowLanes],
    ) -> u64 {
        let mut hidden = 0;
        for (row, lanes) in self.masks(mask) {
            // SAFETY: `row` is a row of the mask, which has a number for each key with logits. A
            // mask that is read is not written to.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), logits.len()) };
            // Usually only keys at the end are hidden. An unused cell of a cache may hold anything,
            // which must not be seen.
            let seen = seen(row);
            let (logits, unseen) = logits.split_at_mut(seen);
            if !unseen.is_empty() {
                hidden |= u64::MAX.checked_shl(seen as u32).unwrap_or(0);
            }
            for lane in lanes.clone() {
                unseen
                    .iter_mut()
                    .for_each(|logits| logits[lane] = f32::NEG_INFINITY);
            }
            for (chunk, (row, logits)) in row.chunks(32).zip(logits.chunks_mut(32)).enumerate() {
                // Usually all keys are visible.
                if row.iter().fold(0, |any, m| any | m) == 0 {
                    continue;
                }
                for (key, (&m, logits)) in (32 * chunk..).zip(row.iter().zip(logits)) {
                    if m == NO_KEY {
                        logits[lanes.clone()].fill(f32::NEG_INFINITY);
                        hidden |= 1_u64.checked_shl(key as u32).unwrap_or(0);
                    } else if m != 0 {
                        let m = f16::from_bits(m).to_f32();
                        for lane in lanes.clone() {
                            logits[lane] +=
                                slopes.for_head(self.first_head + lane % self.heads) * m;
                        }
                    }
                }
            }
        }
        hidden
    }
}

/// Returns whether a part of a mask's row shows a key. Does not branch.
#[inline(always)]
pub(super) fn shows(part: &[u16]) -> bool {
    part.iter().fold(0, |any, m| any | (m ^ NO_KEY)) != 0
}

/// Returns the number of keys up to the last one that a row of a mask shows.
fn seen(row: &[u16]) -> usize {
    let mut end = row.len();
    for chunk in row.rchunks(32) {
        // A chunk is usually all visible or all hidden.
        if shows(chunk) {
            let hidden = chunk.iter().rev().take_while(|m| **m == NO_KEY);
            return end - hidden.count();
        }
        end -= chunk.len();
    }
    0
}

/// The maximum logit of each row so far, and the sum of `exp(logit - max)`.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub max: RowLanes,
    pub sum: RowLanes,
    /// Factor by which the sums before the last block were multiplied.
    pub factor: RowLanes,
}

impl Sums {
    pub const NONE: Self = Sums {
        max: [f32::NEG_INFINITY; ROWS],
        sum: [0.0; ROWS],
        factor: [1.0; ROWS],
    };
}

vectorized! {
    /// Bounds logits: `softcap · tanh(logit)`.
    pub(super) fn cap(logits: &mut [RowLanes], softcap: f32) {
        for x in logits.as_flattened_mut() {
            *x = softcap * math::tanh(*x);
        }
    }
}

vectorized! {
    /// Turns logits into weights `exp(logit - max)`, and adds them to the sums.
    pub(super) fn soften(logits: &mut [RowLanes], sums: &mut Sums) {
        let mut max = sums.max;
        for logits in &*logits {
            for (m, x) in max.iter_mut().zip(logits) {
                *m = if *x > *m { *x } else { *m };
            }
        }
        // A row that has seen no key yet has no maximum to subtract.
        let mut base = max;
        for m in &mut base {
            *m = if *m == f32::NEG_INFINITY { 0.0 } else { *m };
        }
        let mut sum = sums.sum;
        for lane in 0..ROWS {
            let factor = math::bounded_exp::<FUSED>(sums.max[lane] - base[lane]);
            sum[lane] *= factor;
            sums.factor[lane] = factor;
        }
        for logits in logits {
            for lane in 0..ROWS {
                let weight = math::bounded_exp::<FUSED>(logits[lane] - base[lane]);
                sum[lane] += weight;
                logits[lane] = weight;
            }
        }
        sums.max = max;
        sums.sum = sum;
    }
}

vectorized! {
    /// Divides weights by their sum, and turns the gradients of the softmax into gradients of
    /// logits: `p (g - sum(p g))`.
    pub(super) fn logit_gradients(
        shares: &mut [RowLanes],
        gradients: &mut [RowLanes],
        sum: &RowLanes,
    ) {
        let mut factor = [0.0; ROWS];
        for lane in 0..ROWS {
            // A row that sees no key has no weights.
            factor[lane] = if sum[lane] == 0.0 { 0.0 } else { 1.0 / sum[lane] };
        }
        let mut mean = [0.0; ROWS];
        for (shares, gradients) in shares.iter_mut().zip(&*gradients) {
            for lane in 0..ROWS {
                shares[lane] *= factor[lane];
                mean[lane] += shares[lane] * gradients[lane];
            }
        }
        for (shares, gradients) in shares.iter().zip(gradients) {
            for lane in 0..ROWS {
                gradients[lane] = shares[lane] * (gradients[lane] - mean[lane]);
            }
        }
    }
}

impl ScratchSplitter {
    /// Returns the next lanes for `count` keys.
    pub(super) fn lanes<'a>(&mut self, count: usize) -> &'a mut [RowLanes] {
        self.floats(count * ROWS).as_chunks_mut().0
    }
}
