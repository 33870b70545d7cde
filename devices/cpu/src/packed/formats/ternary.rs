//! TQ1_0 and TQ2_0: elements are -1, 0 or 1.

// Loops over arrays of registers use indices, and no closures take registers: all code must be
// inlined into functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::two_bits;
use crate::activations::SLAB;
use crate::activations::int8::Sums;
use crate::packed::decode::{FieldRows, Format, PerSlab, Sink, WithOffset, eight_times};
use crate::packed::layout::BlockField;
use crate::simd::int8::Simd;
use samite_core::DType;

/// Passes two minus the digits in word `i` of TQ1_0 to `to`. A byte is a fraction in base 3. The
/// first digits become word `first` of the slab's codes, the other digits the words at steps of
/// `step`.
#[inline(always)]
unsafe fn ternary<V: Simd>(
    [rows, codes]: [FieldRows; 2],
    i: usize,
    (first, step, digits): (usize, usize, usize),
    to: &mut impl Sink<Tq1_0, V>,
) {
    // SAFETY: the block has 13 words of codes, including word `i`; the last word written, `first +
    // (digits - 1) * step`, is below the 64 of the slab. Prefetching is allowed at any address.
    unsafe {
        rows.ahead::<Tq1_0>(0).ask::<V>(i);
        // Subtracts 128, so that signed byte comparisons work. Three times the byte, minus 128, is
        // the same in a byte.
        let mut rest = V::xor(codes.words::<V>(i), V::splat(0x8080_8080_u32 as i32));
        for digit in 0..digits {
            // From 86, three times a byte overflows into the digit 1; from 171, into 2.
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
    // As many elements as 16-bit sums have room for.
    type Scheme = WithOffset<128, 3, PerSlab>;
    const FIELDS: &[BlockField] = &[(52, 2, 2), (0, 52, 4)];
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 2;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale and
        // 13 words of codes. Digits of words 0 to 7 fill words 0 to 39 of the slab of `to`, those
        // of words 8 to 11 words 40 to 59, those of word 12 the last four; it has two groups.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let d = rows.halves::<V>(0);
            let codes = rows.behind(blocks * 2);
            // Codes are two minus the digits.
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
    // As many elements as 16-bit sums have room for.
    type Scheme = WithOffset<128, 3, PerSlab>;
    const FIELDS: &[BlockField] = &[(64, 2, 2), (0, 64, 4)];
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        _: usize,
        to: &mut impl Sink<Self, V>,
    ) {
        // SAFETY: the slab is one block, and its fields, in the order of `FIELDS`, are a scale and
        // 16 words of codes: `part * 8 + i` is below 16. They fill 64 words and two groups of the
        // slab of `to`.
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
