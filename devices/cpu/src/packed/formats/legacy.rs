//! Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 with one scale each.

// Loops over arrays of registers use indices, and no closures take registers: all code must be
// inlined into functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::{four_bits, nibbles};
use crate::activations::int8::Sums;
use crate::packed::decode::{Bytes, FieldRows, Format, PerGroup, Sink, WithMinimums, WithOffset};
use crate::packed::layout::BlockField;
use crate::simd::int8::Simd;
use samite_core::DType;

/// Does what [`four_bits`] does, with a fifth bit of each code from four more bytes of each block.
#[inline(always)]
unsafe fn five_bits<F: Format, V: Simd>(
    rows: FieldRows,
    [bits, codes]: [FieldRows; 2],
    i: usize,
    to: &mut impl Sink<F, V>,
) {
    // SAFETY: block `i` has one word of fifth bits and four of codes, `j` is below 4, and `to` a
    // slab with its eight words from `i * 8` on. Prefetching is allowed at any address, and the
    // instructions of `V` are available.
    unsafe {
        let ahead = rows.ahead::<F>(i);
        let bits = bits.words::<V>(i);
        for j in 0..4 {
            ahead.ask::<V>(j);
            let codes = nibbles::<V>(codes, i * 4 + j);
            for half in 0..2 {
                let at = j + 4 * half;
                to.codes(i * 8 + at, V::or(codes[half], V::fifth_bits(bits, at)));
            }
        }
        ahead.ask::<V>(4);
        ahead.ask::<V>(5);
    }
}

/// Passes minimum `i` to `to`, negated because these formats add minimums.
#[inline(always)]
unsafe fn negative_minimum<F: Format, V: Simd>(
    minimums: FieldRows,
    i: usize,
    to: &mut impl Sink<F, V>,
) {
    // SAFETY: block `i` has a minimum of two bytes for each row, and it is that of group `i` of the
    // slab of `to`.
    unsafe {
        let minimums = minimums.halves::<V>(i);
        to.minimum(i, V::mul(minimums, V::splat_float(-1.0)));
    }
}

pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    type Scheme = Bytes<PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 32, 4)];
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has a scale, and eight words of codes after
        // the scales of all blocks. It fills words `i * 8..i * 8 + 8` and group `i` of the slab of
        // `to`.
        unsafe {
            let ahead = rows.ahead::<Self>(i);
            let (scales, codes) = (rows, rows.behind(blocks * 2));
            for j in 0..8 {
                ahead.ask::<V>(j);
                let codes = codes.words::<V>(i * 8 + j);
                let offset = if V::SIGNED { 0 } else { 0x8080_8080_u32 };
                to.codes(i * 8 + j, V::xor(codes, V::splat(offset as i32)));
            }
            ahead.ask::<V>(8);
            to.scale(i, scales.halves::<V>(i));
        }
    }
}

pub(crate) struct Q4_0;

impl Format for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    type Scheme = WithOffset<32, 15, PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 16, 4)];
    const SUMS: Sums = Sums::Offset(8);
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has a scale, and four words of codes after the
        // scales of all blocks, as `four_bits` requires. Group `i` of the slab of `to` is its own.
        unsafe {
            four_bits::<Self, V>(rows, rows.behind(blocks * 2), i, None, to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(crate) struct Q4_1;

impl Format for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    type Scheme = WithMinimums<32, 15, PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 2, 2), (4, 16, 4)];
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has a scale, a minimum after those of all
        // blocks, and four words of codes after these, as `four_bits` requires. Group `i` of the
        // slab of `to` is its own.
        unsafe {
            let minimums = rows.behind(blocks * 2);
            four_bits::<Self, V>(rows, minimums.behind(blocks * 2), i, None, to);
            to.scale(i, rows.halves::<V>(i));
            negative_minimum::<Self, V>(minimums, i, to);
        }
    }
}

pub(crate) struct Q5_0;

impl Format for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    type Scheme = WithOffset<32, 31, PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 4, 4), (6, 16, 4)];
    const SUMS: Sums = Sums::Offset(16);
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has a scale, a word of fifth bits after those
        // of all blocks, and four words of codes after these, as `five_bits` requires. Group `i` of
        // the slab of `to` is its own.
        unsafe {
            let bits = rows.behind(blocks * 2);
            five_bits::<Self, V>(rows, [bits, bits.behind(blocks * 4)], i, to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(crate) struct Q5_1;

impl Format for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    type Scheme = WithMinimums<32, 31, PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 2, 2), (4, 4, 4), (8, 16, 4)];
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has a scale, then, each after those of all
        // blocks, a minimum, a word of fifth bits and four words of codes. Group `i` of the slab of
        // `to` is its own.
        unsafe {
            let minimums = rows.behind(blocks * 2);
            let bits = minimums.behind(blocks * 2);
            five_bits::<Self, V>(rows, [bits, bits.behind(blocks * 4)], i, to);
            to.scale(i, rows.halves::<V>(i));
            negative_minimum::<Self, V>(minimums, i, to);
        }
    }
}
