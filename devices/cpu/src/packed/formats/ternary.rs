//! TQ1_0 and TQ2_0: elements are -1, 0 or 1.

// Loops over arrays of registers are written with indices, and there are no closures with registers: they must become part
// of functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::two_bits;
use crate::activations::SLAB;
use crate::activations::int8::Sums;
use crate::packed::decode::{Format, PerSlab, Rows, Sink, WithOffset, eight_times};
use crate::packed::layout::Field;
use crate::simd::int8::Simd;
use samite_core::DType;

/// Gives away two less the digits in word `i` of TQ1_0, of which a byte is the fraction in base 3: those of the first digit are word
/// `first` of the slab's codes, those of each other `step` words behind the ones before.
#[inline(always)]
unsafe fn ternary<V: Simd>(
    [rows, codes]: [Rows; 2],
    i: usize,
    (first, step, digits): (usize, usize, usize),
    to: &mut impl Sink<Tq1_0, V>,
) {
    // SAFETY: the block has 13 words of codes, of which `i` is one; the last word written, `first + (digits - 1) * step`, is
    // below the 64 of the slab. Asking for lines is allowed at any address.
    unsafe {
        rows.ahead::<Tq1_0>(0).ask::<V>(i);
        // Less 128, so that bytes with a sign can be compared. Three times that less 128 are the same in a byte.
        let mut rest = V::xor(codes.words::<V>(i), V::splat(0x8080_8080_u32 as i32));
        for digit in 0..digits {
            // From 86 on, three times a byte has a digit above the byte; from 171 on it is two.
            let negative = V::add_bytes(V::above(rest, -43), V::above(rest, 42));
            let codes = V::add_bytes(negative, V::splat(0x0202_0202));
            to.codes(first + digit * step, codes);
            rest = V::add_bytes(rest, V::add_bytes(rest, rest));
        }
    }
}

pub(crate) struct Tq1_0;

impl Format for Tq1_0 {
    const DTYPE: DType = DType::TQ1_0;
    const BLOCK: usize = SLAB;
    // As many as sums of 16 bits have room for.
    type Scheme = WithOffset<128, 3, PerSlab>;
    const FIELDS: &[Field] = &[(52, 2, 2), (0, 52, 4)];
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 2;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale and 13 words of codes. Digits of
        // words 0 to 7 fill words 0 to 39 of the slab of `to`, those of words 8 to 11 words 40 to 59, those of word 12 the last
        // four; it has two groups.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let d = rows.halves::<V>(0);
            let codes = rows.behind(blocks * 2);
            // Codes are two less the digits.
            let d = V::mul(d, V::splat_float(-1.0));
            eight_times!(i => ternary::<V>([rows, codes], i, (i, 8, 5), to));
            eight_times!(i => ternary::<V>([rows, codes], 8 + i, (40 + i, 4, 5), to); 0 1 2 3);
            ternary::<V>([rows, codes], 12, (60, 1, 4), to);
            rows.ahead::<Self>(0).ask::<V>(13);
            to.scale(0, d);
            to.scale(1, d);
        }
    }
}

pub(crate) struct Tq2_0;

impl Format for Tq2_0 {
    const DTYPE: DType = DType::TQ2_0;
    const BLOCK: usize = SLAB;
    // As many as sums of 16 bits have room for.
    type Scheme = WithOffset<128, 3, PerSlab>;
    const FIELDS: &[Field] = &[(64, 2, 2), (0, 64, 4)];
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale and 16 words of codes: `part * 8
        // + i` is below 16. They fill 64 words and two groups of the slab of `to`.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d = rows.halves::<V>(0);
            let codes = rows.behind(blocks * 2);
            for part in 0..2 {
                eight_times!(i => {
                    ahead.ask::<V>(8 * part + i);
                    let codes = two_bits::<V>(codes, part * 8 + i);
                    for j in 0..4 {
                        to.codes(part * 32 + j * 8 + i, codes[j]);
                    }
                });
                to.scale(part, d);
            }
            ahead.ask::<V>(16);
        }
    }
}
