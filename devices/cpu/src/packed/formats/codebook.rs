//! IQ4_NL, IQ4_XS and MXFP4: codes of 4 bits index a table of 16 numbers.

// Loops over arrays of registers use indices, and no closures take registers: all code must be
// inlined into functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::{four_bits, high, low, number, six_bit_scale};
use crate::activations::SLAB;
use crate::activations::int8::Sums;
use crate::packed::decode::{
    Bytes, FieldRows, Format, PerGroup, PerGroupWide, PerSlab, Sink, WithOffset,
};
use crate::packed::layout::BlockField;
use crate::simd::int8::Simd;
use samite_core::DType;
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES};

/// Returns a table of signed numbers as codes that need [all bits](Format::FULL).
#[inline(always)]
fn full<V: Simd>(values: &[i8; 16]) -> [i8; 16] {
    let offset = if V::SIGNED { 0 } else { -128 };
    values.map(|value| value ^ offset)
}

pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const DTYPE: DType = DType::IQ4_NL;
    type Scheme = Bytes<PerGroup>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 16, 4)];
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

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
            let (codes, values) = (rows.behind(blocks * 2), full::<V>(&IQ4_NL_VALUES));
            four_bits::<Self, V>(rows, codes, i, Some(&values), to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(crate) struct Mxfp4;

impl Format for Mxfp4 {
    const DTYPE: DType = DType::MXFP4;
    type Scheme = WithOffset<32, 31, PerGroupWide>;
    const FIELDS: &[BlockField] = &[(0, 1, 1), (1, 16, 4)];
    const SUMS: Sums = Sums::Offset(12);
    const LARGEST: usize = 24;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: block `i` is below `blocks`, so it has an exponent of one byte for each row, and
        // four words of codes after those of all blocks, as `four_bits` requires. Group `i` of the
        // slab of `to` is its own.
        unsafe {
            let values = MXFP4_VALUES.map(|value| value + 12);
            four_bits::<Self, V>(rows, rows.behind(blocks), i, Some(&values), to);
            // Like `e8m0_half`: 2^(e - 128), which is subnormal for the smallest two exponents, so
            // it is computed as a product of two powers.
            let e = V::load_u8(rows.unit(i, 1));
            let half = V::shr(e, 1);
            let rest = V::add(half, V::and(e, V::splat(1)));
            let a = V::shl(V::add(half, V::splat(63)), 23);
            let b = V::shl(V::add(rest, V::splat(63)), 23);
            to.scale(i, V::mul(V::from_bits(a), V::from_bits(b)));
        }
    }
}

pub(crate) struct Iq4Xs;

impl Format for Iq4Xs {
    const DTYPE: DType = DType::IQ4_XS;
    const BLOCK: usize = SLAB;
    type Scheme = Bytes<PerSlab>;
    const FIELDS: &[BlockField] = &[(0, 2, 2), (2, 2, 2), (4, 4, 4), (8, 128, 4)];
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale, two
        // bytes and one word of bits of scales, and 32 words of codes: `group * 4 + j` is below 32.
        // They fill 64 words and 8 groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d = rows.halves::<V>(0);
            let high_bits = rows.behind(blocks * 2);
            let low_bits = high_bits.behind(blocks * 2);
            let codes = low_bits.behind(blocks * 4);
            let low_bits = low_bits.words::<V>(0);
            let high_bits = V::load_u16(high_bits.unit(0, 2));
            let values = full::<V>(&IQ4_NL_VALUES);
            for group in 0..8 {
                let line = group * 17 / 4;
                for j in 0..4 {
                    ahead.ask::<V>(line + j);
                    let both = codes.words::<V>(group * 4 + j);
                    let at = group * 8 + j;
                    to.codes(at, V::look_up(&values, low::<V>(both)));
                    to.codes(at + 4, V::look_up(&values, high::<V>(both)));
                }
                ahead.ask::<V>(line + 4);
                let low = number::<V>(low_bits, 4 * group, 4);
                let high = number::<V>(high_bits, 2 * group, 2);
                to.scale(group, six_bit_scale::<V>(low, high, d));
            }
        }
    }
}
