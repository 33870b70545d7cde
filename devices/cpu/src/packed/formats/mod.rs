//! Decoding of packed blocks to bytes, one file for each family of types, and common functions.

// Loops over arrays of registers use indices, and no closures take registers: all code must be
// inlined into functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::decode::{FieldRows, Format, Sink};
use crate::simd::int8::Simd;

mod codebook;
mod k_quants;
mod legacy;
mod ternary;

pub(crate) use codebook::{Iq4Nl, Iq4Xs, Mxfp4};
pub(crate) use k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(crate) use ternary::{Tq1_0, Tq2_0};

/// Evaluates an expression with the format of a type, if it can be packed.
macro_rules! for_format {
    ($dtype:expr, $format:ident => $result:expr) => {
        for_format!($dtype, $format => $result; Q8_0 Q8_0, Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0,
            Q5_1 Q5_1, IQ4_NL Iq4Nl,
            IQ4_XS Iq4Xs, MXFP4 Mxfp4, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K,
            TQ1_0 Tq1_0, TQ2_0 Tq2_0)
    };
    ($dtype:expr, $format:ident => $result:expr; $($name:ident $type:ident),*) => {
        match $dtype {
            $(samite_core::DType::$name => {
                type $format = $crate::packed::formats::$type;
                Some($result)
            })*
            _ => None,
        }
    };
}
pub(crate) use for_format;

/// Returns the lower halves of bytes.
#[inline(always)]
unsafe fn low<V: Simd>(x: V::Words) -> V::Words {
    // SAFETY: the instructions of `V` are available, since only functions that are compiled for
    // them call this. No memory is touched. The same holds for the functions up to `scaled`.
    unsafe { V::and(x, V::splat(0x0f0f_0f0f)) }
}

/// Returns the upper halves of bytes.
#[inline(always)]
unsafe fn high<V: Simd>(x: V::Words) -> V::Words {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe { low::<V>(V::shr(x, 4)) }
}

/// Returns `a | b & mask`, with the same mask for all bytes.
#[inline(always)]
unsafe fn or_masked<V: Simd>(a: V::Words, b: V::Words, mask: u8) -> V::Words {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe { V::or(a, V::and(b, V::splat(i32::from_ne_bytes([mask; 4])))) }
}

/// Returns `bits` bits of integers, starting with bit `at`.
#[inline(always)]
unsafe fn number<V: Simd>(x: V::Words, at: usize, bits: usize) -> V::Words {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe { V::and(V::shr(x, at), V::splat((1 << bits) - 1)) }
}

/// Moves each bit from place `from` to place `to` of its byte. The other bits of the byte are
/// undefined.
#[inline(always)]
unsafe fn moved<V: Simd>(x: V::Words, from: usize, to: usize) -> V::Words {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe {
        match from.checked_sub(to) {
            Some(bits) => V::shr(x, bits),
            None => V::shl(x, to - from),
        }
    }
}

/// Returns scales of six bits with an offset of 32, from the lower four and the upper two bits,
/// times `d`.
#[inline(always)]
unsafe fn six_bit_scale<V: Simd>(low: V::Words, high: V::Words, d: V::Floats) -> V::Floats {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe {
        let scale = V::or(low, V::shl(high, 4));
        scaled::<V>(V::add(scale, V::splat(-32)), d)
    }
}

/// Returns integers times floats.
#[inline(always)]
unsafe fn scaled<V: Simd>(numbers: V::Words, d: V::Floats) -> V::Floats {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe { V::mul(V::floats(numbers), d) }
}

/// Returns the lower and the upper halves of word `i` of each row. In blocks of 32 these are
/// elements `4 * i..4 * i + 4` and those 16 later.
#[inline(always)]
unsafe fn nibbles<V: Simd>(rows: FieldRows, i: usize) -> [V::Words; 2] {
    // SAFETY: the block has word `i`, as the format's `unpack` counts them; the rest touches
    // registers only.
    unsafe {
        let both = rows.words::<V>(i);
        [low::<V>(both), high::<V>(both)]
    }
}

/// Passes the codes of block `i` of 32 elements to `to`: halves of bytes, or entries of a table
/// that they index.
#[inline(always)]
unsafe fn four_bits<F: Format, V: Simd>(
    rows: FieldRows,
    codes: FieldRows,
    i: usize,
    table: Option<&[i8; 16]>,
    to: &mut impl Sink<F, V>,
) {
    // SAFETY: block `i` has four words of codes, `j` is below 4, and `to` a slab with its eight
    // words from `i * 8` on. Prefetching is allowed at any address, and the instructions of `V` are
    // available.
    unsafe {
        let ahead = rows.ahead::<F>(i);
        for j in 0..4 {
            ahead.ask::<V>(j);
            let codes = nibbles::<V>(codes, i * 4 + j);
            for half in 0..2 {
                let at = j + 4 * half;
                let codes = match table {
                    Some(table) => V::look_up(table, codes[half]),
                    None => codes[half],
                };
                to.codes(i * 8 + at, codes);
            }
        }
        ahead.ask::<V>(4);
    }
}

/// Returns the codes of two bits in word `i`: four times four elements, each 32 after the previous
/// ones.
#[inline(always)]
unsafe fn two_bits<V: Simd>(rows: FieldRows, i: usize) -> [V::Words; 4] {
    // SAFETY: the block has word `i`, as the format's `unpack` counts them; the rest touches
    // registers only.
    unsafe {
        let all = rows.words::<V>(i);
        let mut codes = [all; 4];
        for j in 0..4 {
            codes[j] = V::and(V::shr(all, 2 * j), V::splat(0x0303_0303));
        }
        codes
    }
}
