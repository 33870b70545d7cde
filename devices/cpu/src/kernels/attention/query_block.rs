//! Blocks of query rows: the rows lie side by side, in the lanes of vectors, and keys follow one another. So logits, weights and their
//! gradients of a key are vectors; largest logits and sums of all rows come out lane by lane, and products are [sums of outer
//! products](crate::kernels::outer::float), of which all operands lie as they are needed.

use super::{Extents, Memory};
use crate::detect::vectorized;
use crate::kernels::softmax::Slopes;
use crate::operand::Operand;
use crate::simd::{math, prefetch};
use half::f16;

/// Rows of a block.
pub(super) const ROWS: usize = 64;

const NO_KEY: u16 = 0xfc00; // minus infinity as f16

/// A number for each row.
pub(super) type Lanes = [f32; ROWS];

/// Bytes from one key's numbers to the next key's.
pub(super) const LANES_STRIDE: usize = size_of::<Lanes>();

/// How query rows are divided into blocks: some heads, which share one of keys, of some tokens.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    extents: Extents,
    head_block: usize,
    token_block: usize,
}

impl Blocks {
    pub fn new(extents: Extents) -> Self {
        let head_block = extents.group().clamp(1, ROWS);
        Blocks {
            extents,
            head_block,
            token_block: ROWS / head_block,
        }
    }

    /// Blocks of each head of keys.
    pub fn of_a_head(&self) -> usize {
        let Extents { tokens, .. } = self.extents;
        tokens.div_ceil(self.token_block) * self.extents.group().div_ceil(self.head_block)
    }

    /// Blocks of tokens: blocks of different heads have the same ones.
    pub fn of_tokens(&self) -> usize {
        self.extents.tokens.div_ceil(self.token_block)
    }

    /// Which of [`of_tokens`](Blocks::of_tokens) a block has.
    pub fn tokens_of(&self, block: &Block) -> usize {
        self.block_of(block.first_token)
    }

    /// Which of [`of_tokens`](Blocks::of_tokens) has this token.
    pub fn block_of(&self, token: usize) -> usize {
        token / self.token_block
    }

    /// A block with so many of [`of_tokens`](Blocks::of_tokens) before it.
    pub fn with_tokens(&self, batch: usize, number: usize) -> Block {
        let head_blocks = self.extents.group().div_ceil(self.head_block);
        self.block(batch * self.extents.kv_heads, number * head_blocks)
    }

    /// Heads of keys, in all batches.
    pub fn kv_heads(&self) -> usize {
        self.extents.kv_heads * self.extents.batch
    }

    /// Block `number` of head `kv_head` of keys, which is counted through all batches.
    pub fn block(&self, kv_head: usize, number: usize) -> Block {
        let Extents {
            kv_heads, tokens, ..
        } = self.extents;
        let group = self.extents.group();
        let head_blocks = group.div_ceil(self.head_block);
        let first_head = number % head_blocks * self.head_block;
        let first_token = number / head_blocks * self.token_block;
        Block {
            kv_head: kv_head % kv_heads,
            batch: kv_head / kv_heads,
            first_head: kv_head % kv_heads * group + first_head,
            heads: self.head_block.min(group - first_head),
            first_token,
            tokens: self.token_block.min(tokens - first_token),
        }
    }
}

/// A block: row `heads * t + h` is that of token `first_token + t` and head `first_head + h`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub kv_head: usize,
    pub batch: usize,
    first_head: usize,
    heads: usize,
    first_token: usize,
    tokens: usize,
}

/// What a mask does to a block of keys for a block of query rows.
#[derive(Clone, Copy)]
pub(super) struct Class {
    /// How many keys some row may see: those behind are hidden from all.
    pub visible: u8,
    /// Whether the mask changes logits of these.
    pub changes: bool,
}

impl Block {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.heads * self.tokens
    }

    /// How many heads of each token.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// How many blocks of `size` keys a token sees some key of, by a mask that is the same for all heads.
    ///
    /// # Safety
    /// See [`Operand`]; the mask must have a row for this token of the block, and `keys` keys.
    pub unsafe fn blocks_seen(
        &self,
        token: usize,
        mask: Operand,
        keys: usize,
        size: usize,
    ) -> usize {
        let [_, _, _, m3] = mask.shape();
        let row = mask.at([self.first_token + token, 0, self.batch % m3]);
        // SAFETY: this is a row of the mask, which has `keys` numbers; nobody writes to a mask that is read.
        let row = unsafe { std::slice::from_raw_parts(row.cast_const().cast::<u16>(), keys) };
        let blocks = row.chunks(size);
        blocks.filter(|block| shows(block)).count()
    }

    /// Head and token of each row.
    pub fn places(self) -> impl Iterator<Item = (usize, usize)> {
        let heads = self.first_head..self.first_head + self.heads;
        (self.first_token..self.first_token + self.tokens)
            .flat_map(move |token| heads.clone().map(move |head| (head, token)))
    }

    /// How many numbers of [`Lanes`] are used: whole vectors.
    pub fn lanes(&self) -> usize {
        self.rows().next_multiple_of(16)
    }

    /// Turns rows so that they lie side by side: element `i` of all rows, times `factor`, becomes `to[i]`. Lanes without rows are zeros.
    ///
    /// # Safety
    /// See [`Operand`]; `rows` gives the places of at least [`rows`](Block::rows) rows of dense f32 numbers, each of
    /// `to.len()` or more.
    pub unsafe fn turn(
        &self,
        rows: impl Iterator<Item = *const f32>,
        factor: f32,
        to: &mut [Lanes],
    ) {
        if self.rows() < ROWS {
            to.as_flattened_mut().fill(0.0);
        }
        let mut places = [std::ptr::null::<f32>(); ROWS];
        places.iter_mut().zip(rows).for_each(|(to, row)| *to = row);
        let places = &places[..self.rows()];
        for (lane, row) in places.iter().enumerate() {
            // Mostly, rows come from memory, in pieces that are too short for processors to ask for the next one.
            if let Some(next) = places.get(lane + 8) {
                for i in (0..to.len()).step_by(16) {
                    prefetch(next.wrapping_add(i));
                }
            }
            for (i, lanes) in to.iter_mut().enumerate() {
                // SAFETY: `row` is one of the places that `rows` gave, as there are at least `self.rows()` of them, and `i` is
                // below the `to.len()` numbers of each.
                lanes[lane] = unsafe { *row.add(i) } * factor;
            }
        }
    }

    /// The mask's rows, and which rows of the block each belongs to.
    fn masks(self, mask: Operand) -> impl Iterator<Item = (*const u16, std::ops::Range<usize>)> {
        let [_, _, m2, m3] = mask.shape();
        // Mostly, all heads have the same.
        let each = if m2 == 1 { self.heads } else { 1 };
        (0..self.rows()).step_by(each).map(move |row| {
            let token = self.first_token + row / self.heads;
            let head = self.first_head + row % self.heads;
            let at = mask.at([token, head % m2, self.batch % m3]);
            (at.cast_const().cast(), row..row + each)
        })
    }

    /// What a mask that is the same for all heads does to at most 255 keys from `key` on.
    ///
    /// # Safety
    /// As [`visible`](Block::visible).
    pub unsafe fn class(&self, mask: Operand, key: usize, len: usize) -> Class {
        // SAFETY: `visible` asks the same.
        let visible = unsafe { self.visible(mask, key, len) };
        let changes = self.masks(mask).any(|(row, _)| {
            // SAFETY: `row` is a row of the mask with `len` keys from `key` on, and `visible` is at most `len`.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), visible) };
            row.iter().fold(0, |any, m| any | m) != 0
        });
        Class {
            visible: visible as u8,
            changes,
        }
    }

    /// How many of `len` keys from `key` on some row may see: those behind are masked for all.
    ///
    /// # Safety
    /// See [`Operand`]; the mask must have rows for all tokens, and the keys.
    pub unsafe fn visible(&self, mask: Operand, key: usize, len: usize) -> usize {
        let mut visible = 0;
        for (row, _) in self.masks(mask) {
            // SAFETY: `row` is a row of the mask, which has `len` keys from `key` on; nobody writes to a mask that is read.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), len) };
            // Those before are known to be seen; mostly the last one is, too.
            visible += seen(&row[visible..]);
            if visible == len {
                break;
            }
        }
        visible
    }

    /// Adds the mask from `key` on, times the slopes of the heads, to logits; those of masked keys
    /// become minus infinity. Returns which of the first 64 keys are masked for some row, a bit for
    /// each.
    ///
    /// # Safety
    /// See [`Operand`]; the mask must have rows for all tokens, and the keys.
    pub unsafe fn mask(
        &self,
        mask: Operand,
        slopes: &Slopes,
        key: usize,
        logits: &mut [Lanes],
    ) -> u64 {
        let mut hidden = 0;
        for (row, lanes) in self.masks(mask) {
            // SAFETY: `row` is a row of the mask, which has a number for each key that there are logits of; nobody writes to a mask that is read.
            let row = unsafe { std::slice::from_raw_parts(row.add(key), logits.len()) };
            // Mostly, only those at the end are hidden. Whatever an unused place of a cache holds must not be seen.
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
                // Mostly all keys are seen.
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
                            logits[lane] += slopes.of(self.first_head + lane % self.heads) * m;
                        }
                    }
                }
            }
        }
        hidden
    }
}

/// Whether a part of a mask's row shows a key, found without branches.
#[inline(always)]
pub(super) fn shows(part: &[u16]) -> bool {
    part.iter().fold(0, |any, m| any | (m ^ NO_KEY)) != 0
}

/// How many keys there are up to the last one that a row of a mask shows.
fn seen(row: &[u16]) -> usize {
    let mut end = row.len();
    for chunk in row.rchunks(32) {
        // Mostly all or nothing.
        if shows(chunk) {
            let hidden = chunk.iter().rev().take_while(|m| **m == NO_KEY);
            return end - hidden.count();
        }
        end -= chunk.len();
    }
    0
}

/// The largest logit of each row so far, and the sum of `exp(logit - largest)`.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub max: Lanes,
    pub sum: Lanes,
    /// What the sums before the last block were multiplied with.
    pub factor: Lanes,
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
    pub(super) fn cap(logits: &mut [Lanes], softcap: f32) {
        for x in logits.as_flattened_mut() {
            *x = softcap * math::tanh(*x);
        }
    }
}

vectorized! {
    /// Turns logits into weights `exp(logit - largest)`, and adds them to the sums.
    pub(super) fn soften(logits: &mut [Lanes], sums: &mut Sums) {
        let mut max = sums.max;
        for logits in &*logits {
            for (m, x) in max.iter_mut().zip(logits) {
                *m = if *x > *m { *x } else { *m };
            }
        }
        // A row that has seen no key yet has no largest logit to take away.
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
    /// Turns weights into shares of their sum, and the gradients of shares into gradients of logits: `share (g - sum(share g))`.
    pub(super) fn logit_gradients(shares: &mut [Lanes], gradients: &mut [Lanes], sum: &Lanes) {
        let mut factor = [0.0; ROWS];
        for lane in 0..ROWS {
            // A row that sees no key has no shares.
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

impl Memory {
    /// The next numbers for `count` keys.
    pub(super) fn lanes<'a>(&mut self, count: usize) -> &'a mut [Lanes] {
        self.floats(count * ROWS).as_chunks_mut().0
    }
}
