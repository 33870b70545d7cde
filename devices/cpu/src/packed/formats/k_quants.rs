//! Q2_K, Q3_K, Q4_K, Q5_K and Q6_K: blocks of 256 with a scale for each group.

// Loops over arrays of registers use indices, and no closures take registers: all code must be
// inlined into functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::{high, low, moved, number, or_masked, scaled, six_bit_scale, two_bits};
use crate::activations::SLAB;
use crate::activations::int8::Sums;
use crate::packed::decode::{
    FieldRows, Format, PerSlab, Sink, WithMinimums, WithOffset, eight_times,
};
use crate::packed::layout::BlockField;
use crate::simd::int8::Simd;
use samite_core::DType;

/// Scales and minimums of 6 bits, eight of each for a block of 256. Bytes 0..4 have the lower four
/// scales, bytes 4..8 the lower four minimums, bytes 8..12 the nibbles of the others, whose high
/// bits are above those of the first eight.
struct SixBits<V: Simd> {
    scales: [V::Words; 2],
    minimums: [V::Words; 2],
    d: V::Floats,
    d_min: V::Floats,
}

impl<V: Simd> SixBits<V> {
    /// Loads the scales and minimums of a block, with the factors of all scales and of all
    /// minimums.
    #[inline(always)]
    unsafe fn new(fields: FieldRows, d: V::Floats, d_min: V::Floats) -> Self {
        // SAFETY: the field has 12 bytes of each row, which are words 0 to 2; the rest touches
        // registers only.
        unsafe {
            let (a, b) = (fields.words::<V>(0), fields.words::<V>(1));
            let c = fields.words::<V>(2);
            let six = V::splat(0x3f3f_3f3f);
            SixBits {
                scales: [
                    V::and(a, six),
                    or_masked::<V>(low::<V>(c), V::shr(a, 2), 0x30),
                ],
                minimums: [
                    V::and(b, six),
                    or_masked::<V>(high::<V>(c), V::shr(b, 2), 0x30),
                ],
                d,
                d_min,
            }
        }
    }

    /// Passes the scale and minimum of a group to `to`.
    #[inline(always)]
    unsafe fn give<F: Format>(&self, group: usize, to: &mut impl Sink<F, V>) {
        // SAFETY: `group` is below 8, so that `word` is below 2 and the slab of `to` has the group;
        // only registers are touched here.
        unsafe {
            let (word, byte) = (group / 4, group % 4);
            let scale = V::byte(self.scales[word], byte);
            let minimum = V::byte(self.minimums[word], byte);
            to.scale(group, scaled::<V>(scale, self.d));
            to.minimum(group, scaled::<V>(minimum, self.d_min));
        }
    }
}

pub(crate) struct Q2K;

impl Format for Q2K {
    const DTYPE: DType = DType::Q2_K;
    const BLOCK: usize = SLAB;
    type Scheme = WithMinimums<16, 3, PerSlab>;
    const FIELDS: &[BlockField] = &[(80, 2, 2), (82, 2, 2), (0, 16, 1), (16, 64, 4)];
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are two scales
        // of two bytes, 16 bytes and 16 words of codes: `part * 8 + i` is below 16. They fill 64
        // words and 16 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d_min = rows.behind(blocks * 2);
            let fields = d_min.behind(blocks * 2);
            let codes = fields.behind(blocks * 16);
            let (d, d_min) = (rows.halves::<V>(0), d_min.halves::<V>(0));
            for part in 0..2 {
                eight_times!(i => {
                    ahead.ask_eighth::<V>(10 * part, 7, i);
                    let codes = two_bits::<V>(codes, part * 8 + i);
                    for j in 0..4 {
                        to.codes(part * 32 + j * 8 + i, codes[j]);
                    }
                });
                eight_times!(i => {
                    let group = part * 8 + i;
                    ahead.ask_eighth::<V>(10 * part + 7, 4, i);
                    let both = V::load_u8(fields.unit(group, 1));
                    to.scale(group, scaled::<V>(number::<V>(both, 0, 4), d));
                    to.minimum(group, scaled::<V>(number::<V>(both, 4, 4), d_min));
                });
            }
        }
    }
}

pub(crate) struct Q3K;

impl Format for Q3K {
    const DTYPE: DType = DType::Q3_K;
    const BLOCK: usize = SLAB;
    type Scheme = WithOffset<16, 7, PerSlab>;
    const FIELDS: &[BlockField] = &[(108, 2, 2), (96, 12, 4), (0, 32, 4), (32, 64, 4)];
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Offset(4);
    const LARGEST: usize = 7;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale,
        // three words of scales, eight words of third bits and 16 words of codes: `i` is below 8
        // and `part * 8 + i` below 16. They fill 64 words and 16 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d = rows.halves::<V>(0);
            let fields = rows.behind(blocks * 2);
            let bits = fields.behind(blocks * 12);
            let codes = bits.behind(blocks * 32);
            // Scales of six bits: bytes 0..8 have the lower four bits of the first eight scales,
            // then of the others. Bytes 8..12 have the upper two bits of all.
            let (a, b) = (fields.words::<V>(0), fields.words::<V>(1));
            let upper = fields.words::<V>(2);
            for part in 0..2 {
                eight_times!(i => {
                    ahead.ask_eighth::<V>(14 * part, 10, i);
                    let codes = two_bits::<V>(codes, part * 8 + i);
                    let bits = V::shr(bits.words::<V>(i), 4 * part);
                    for j in 0..4 {
                        let third = moved::<V>(bits, j, 2);
                        let codes = or_masked::<V>(codes[j], third, 4);
                        to.codes(part * 32 + j * 8 + i, codes);
                    }
                });
                eight_times!(i => {
                    let (group, byte) = (part * 8 + i, i % 4 * 8);
                    ahead.ask_eighth::<V>(14 * part + 10, 4, i);
                    let lower = if i < 4 { a } else { b };
                    let low = number::<V>(lower, byte + part * 4, 4);
                    let high = number::<V>(upper, byte + group / 4 * 2, 2);
                    to.scale(group, six_bit_scale::<V>(low, high, d));
                });
            }
        }
    }
}

pub(crate) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4_K;
    const BLOCK: usize = SLAB;
    type Scheme = WithMinimums<32, 15, PerSlab>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 2, 2), (4, 12, 4), (16, 128, 4)];
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are two scales
        // of two bytes, three words of scales and 32 words of codes: `i * 8 + j` is below 32. They
        // fill 64 words and 8 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d_min = rows.behind(blocks * 2);
            let fields = d_min.behind(blocks * 2);
            let codes = fields.behind(blocks * 12);
            let scales = SixBits::<V>::new(fields, rows.halves::<V>(0), d_min.halves::<V>(0));
            for i in 0..4 {
                for j in 0..8 {
                    ahead.ask::<V>(9 * i + j);
                    let both = codes.words::<V>(i * 8 + j);
                    to.codes(i * 16 + j, low::<V>(both));
                    to.codes(i * 16 + 8 + j, high::<V>(both));
                }
                ahead.ask::<V>(9 * i + 8);
                scales.give(2 * i, to);
                scales.give(2 * i + 1, to);
            }
        }
    }
}

pub(crate) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5_K;
    const BLOCK: usize = SLAB;
    type Scheme = WithMinimums<32, 31, PerSlab>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 2, 2), (4, 12, 4), (16, 32, 4), (48, 128, 4)];
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are two scales
        // of two bytes, three words of scales, eight words of fifth bits and 32 words of codes: `j`
        // is below 8 and `i * 8 + j` below 32. They fill 64 words and 8 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d_min = rows.behind(blocks * 2);
            let fields = d_min.behind(blocks * 2);
            let bits = fields.behind(blocks * 12);
            let nibbles = bits.behind(blocks * 32);
            let scales = SixBits::<V>::new(fields, rows.halves::<V>(0), d_min.halves::<V>(0));
            eight_times!(i => {
                eight_times!(j => {
                    ahead.ask_eighth::<V>(11 * i, 10, j);
                    // Bit `i` belongs to element `32 * i` and the following ones.
                    let bits = bits.words::<V>(j);
                    let both = nibbles.words::<V>(i * 8 + j);
                    let codes = [low::<V>(both), high::<V>(both)];
                    for k in 0..2 {
                        let fifth = moved::<V>(bits, 2 * i + k, 4);
                        to.codes(i * 16 + k * 8 + j, or_masked::<V>(codes[k], fifth, 16));
                    }
                });
                ahead.ask::<V>(11 * i + 10);
                scales.give(2 * i, to);
                scales.give(2 * i + 1, to);
            }; 0 1 2 3);
        }
    }
}

pub(crate) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6_K;
    const BLOCK: usize = SLAB;
    type Scheme = WithOffset<16, 63, PerSlab>;
    const FIELDS: &[BlockField] = &Q6_K_FIELDS;
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Offset(32);
    const LARGEST: usize = 63;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale, 16
        // bytes of scales and 48 words of codes: 24 for each part, and `3 * j + 2` is the last of
        // these. They fill 64 words and 16 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d = rows.halves::<V>(0);
            let scales = rows.behind(blocks * 2);
            let codes = scales.behind(blocks * 16);
            for part in 0..2 {
                let codes = codes.behind(blocks * 96 * part);
                eight_times!(j => {
                    ahead.ask_eighth::<V>(26 * part, 24, j);
                    let (a, b) = (codes.words::<V>(3 * j), codes.words::<V>(3 * j + 1));
                    let bits = codes.words::<V>(3 * j + 2);
                    let codes = [low::<V>(a), low::<V>(b), high::<V>(a), high::<V>(b)];
                    for i in 0..4 {
                        let upper = moved::<V>(bits, 2 * i, 4);
                        let codes = or_masked::<V>(codes[i], upper, 0x30);
                        to.codes(part * 32 + i * 8 + j, codes);
                    }
                });
                eight_times!(i => {
                    let group = part * 8 + i;
                    ahead.ask_eighth::<V>(26 * part + 24, 3, i);
                    let scales = V::load_i8(scales.unit(group, 1));
                    to.scale(group, scaled::<V>(scales, d));
                });
            }
        }
    }
}

/// Fields of Q6_K. Codes of six bits come from three words each, which are adjacent: some hardware
/// prefetchers cannot follow words that are used together but lie apart.
const Q6_K_FIELDS: [BlockField; 50] = {
    let mut fields = [(208, 2, 2); 50];
    fields[1] = (192, 16, 1);
    let mut i = 0;
    while i < 16 {
        // The lower bits of elements 4 * i and of those 32 later, and the upper bits of both and of
        // those 64 and 96 later.
        let (half, at) = (i / 8, i % 8 * 4);
        fields[2 + 3 * i] = (64 * half + at, 4, 4);
        fields[3 + 3 * i] = (64 * half + at + 32, 4, 4);
        fields[4 + 3 * i] = (128 + 32 * half + at, 4, 4);
        i += 1;
    }
    fields
};
