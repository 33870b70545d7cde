//! Panels of each type, unpacked to bytes: what is different between types of weights.

// Loops over arrays of registers are written with indices, and there are no closures with registers: they must become part
// of functions that may use the instructions.
#![allow(clippy::needless_range_loop)]

use super::activations::Sums;
use super::unpack::{Format, Rows, Sink, eight_times};
use crate::simd::int8::Simd;
use samite_core::DType;
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES};

/// The lower halves of bytes.
#[inline(always)]
unsafe fn low<V: Simd>(x: V::Words) -> V::Words {
    // SAFETY: the caller's contract.
    unsafe { V::and(x, V::splat(0x0f0f_0f0f)) }
}

/// The upper halves of bytes.
#[inline(always)]
unsafe fn high<V: Simd>(x: V::Words) -> V::Words {
    // SAFETY: the caller's contract.
    unsafe { low::<V>(V::shr(x, 4)) }
}

/// `a | b & mask`, with the same mask for all bytes.
#[inline(always)]
unsafe fn or_masked<V: Simd>(a: V::Words, b: V::Words, mask: u8) -> V::Words {
    // SAFETY: the caller's contract.
    unsafe { V::or(a, V::and(b, V::splat(i32::from_ne_bytes([mask; 4])))) }
}

/// `bits` of whole numbers, the lowest of which is bit `at`.
#[inline(always)]
unsafe fn number<V: Simd>(x: V::Words, at: usize, bits: usize) -> V::Words {
    // SAFETY: the caller's contract.
    unsafe { V::and(V::shr(x, at), V::splat((1 << bits) - 1)) }
}

/// Each bit moved from place `from` to place `to` of its byte; what the others of the byte are then is not said.
#[inline(always)]
unsafe fn moved<V: Simd>(x: V::Words, from: usize, to: usize) -> V::Words {
    // SAFETY: the caller's contract.
    unsafe {
        match from.checked_sub(to) {
            Some(bits) => V::shr(x, bits),
            None => V::shl(x, to - from),
        }
    }
}

/// Scales of six bits with an offset of 32, from the lower four and the upper two bits, times `d`.
#[inline(always)]
unsafe fn six_bit_scale<V: Simd>(low: V::Words, high: V::Words, d: V::Floats) -> V::Floats {
    // SAFETY: the caller's contract.
    unsafe {
        let scale = V::or(low, V::shl(high, 4));
        scaled::<V>(V::add(scale, V::splat(-32)), d)
    }
}

/// Whole numbers times others.
#[inline(always)]
unsafe fn scaled<V: Simd>(numbers: V::Words, d: V::Floats) -> V::Floats {
    // SAFETY: the caller's contract.
    unsafe { V::mul(V::floats(numbers), d) }
}

/// The lower and the upper halves of word `i` of each row: in blocks of 32 elements `4 * i..4 * i + 4` and those 16 behind.
#[inline(always)]
unsafe fn nibbles<V: Simd>(rows: Rows, i: usize) -> [V::Words; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        let both = rows.words::<V>(i);
        [low::<V>(both), high::<V>(both)]
    }
}

/// Gives away the codes of block `i` of 32 elements: halves of bytes, or entries of a table by these.
#[inline(always)]
unsafe fn four_bits<F: Format, V: Simd>(
    rows: Rows,
    codes: Rows,
    i: usize,
    table: Option<&[i8; 16]>,
    to: &mut impl Sink<F, V>,
) {
    // SAFETY: the caller's contract.
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

/// The same with their fifth bits, four bytes for each block.
#[inline(always)]
unsafe fn five_bits<F: Format, V: Simd>(
    rows: Rows,
    [bits, codes]: [Rows; 2],
    i: usize,
    to: &mut impl Sink<F, V>,
) {
    // SAFETY: the caller's contract.
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

/// Gives away minimum `i` of halves that are added, not subtracted.
#[inline(always)]
unsafe fn negative_minimum<F: Format, V: Simd>(minimums: Rows, i: usize, to: &mut impl Sink<F, V>) {
    // SAFETY: the caller's contract.
    unsafe {
        let minimums = minimums.halves::<V>(i);
        to.minimum(i, V::mul(minimums, V::splat_float(-1.0)));
    }
}

/// A table of signed numbers as codes that need [all bits](Format::FULL).
#[inline(always)]
fn full<V: Simd>(values: &[i8; 16]) -> [i8; 16] {
    let offset = if V::SIGNED { 0 } else { -128 };
    values.map(|value| value ^ offset)
}

pub(super) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    // Weights are about as exact as columns.
    const SCALED: usize = 32;
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
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

pub(super) struct Q4_0;

impl Format for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const SUMS: Sums = Sums::Offset(8);
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            four_bits::<Self, V>(rows, rows.behind(blocks * 2), i, None, to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(super) struct Iq4Nl;

impl Format for Iq4Nl {
    const DTYPE: DType = DType::IQ4_NL;
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let (codes, values) = (rows.behind(blocks * 2), full::<V>(&IQ4_NL_VALUES));
            four_bits::<Self, V>(rows, codes, i, Some(&values), to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    const DTYPE: DType = DType::MXFP4;
    const SUMS: Sums = Sums::Offset(12);
    const LARGEST: usize = 24;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let values = MXFP4_VALUES.map(|value| value + 12);
            four_bits::<Self, V>(rows, rows.behind(blocks), i, Some(&values), to);
            // As `e8m0_half`: 2^(e - 128), which is not normal for the smallest two; so as a product of two powers.
            let e = V::load_u8(rows.unit(i, 1));
            let half = V::shr(e, 1);
            let rest = V::add(half, V::and(e, V::splat(1)));
            let a = V::shl(V::add(half, V::splat(63)), 23);
            let b = V::shl(V::add(rest, V::splat(63)), 23);
            to.scale(i, V::mul(V::from_bits(a), V::from_bits(b)));
        }
    }
}

pub(super) struct Iq4Xs;

impl Format for Iq4Xs {
    const DTYPE: DType = DType::IQ4_XS;
    const SUMS: Sums = Sums::Offset(128);
    const LARGEST: usize = 255;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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

pub(super) struct Q4_1;

impl Format for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let minimums = rows.behind(blocks * 2);
            four_bits::<Self, V>(rows, minimums.behind(blocks * 2), i, None, to);
            to.scale(i, rows.halves::<V>(i));
            negative_minimum::<Self, V>(minimums, i, to);
        }
    }
}

pub(super) struct Q5_0;

impl Format for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const SUMS: Sums = Sums::Offset(16);
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = rows.behind(blocks * 2);
            five_bits::<Self, V>(rows, [bits, bits.behind(blocks * 4)], i, to);
            to.scale(i, rows.halves::<V>(i));
        }
    }
}

pub(super) struct Q5_1;

impl Format for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let minimums = rows.behind(blocks * 2);
            let bits = minimums.behind(blocks * 2);
            five_bits::<Self, V>(rows, [bits, bits.behind(blocks * 4)], i, to);
            to.scale(i, rows.halves::<V>(i));
            negative_minimum::<Self, V>(minimums, i, to);
        }
    }
}

/// Scales and minimums of 6 bits, eight of each for a block of 256: bytes 0..4 have the lower four scales, bytes 4..8
/// the lower four minimums, bytes 8..12 nibbles of the others, whose high bits are above those of the first eight.
struct SixBits<V: Simd> {
    scales: [V::Words; 2],
    minimums: [V::Words; 2],
    d: V::Floats,
    d_min: V::Floats,
}

impl<V: Simd> SixBits<V> {
    /// Those of a block with the factors of all scales and of all minimums.
    #[inline(always)]
    unsafe fn new(fields: Rows, d: V::Floats, d_min: V::Floats) -> Self {
        // SAFETY: the caller's contract.
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

    /// Gives away those of a group.
    #[inline(always)]
    unsafe fn give<F: Format>(&self, group: usize, to: &mut impl Sink<F, V>) {
        // SAFETY: the caller's contract.
        unsafe {
            let (word, byte) = (group / 4, group % 4 * 8);
            let scale = number::<V>(self.scales[word], byte, 8);
            let minimum = number::<V>(self.minimums[word], byte, 8);
            to.scale(group, scaled::<V>(scale, self.d));
            to.minimum(group, scaled::<V>(minimum, self.d_min));
        }
    }
}

/// Codes of two bits in word `i`: four times four elements, each 32 behind those before.
#[inline(always)]
unsafe fn two_bits<V: Simd>(rows: Rows, i: usize) -> [V::Words; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        let all = rows.words::<V>(i);
        let mut codes = [all; 4];
        for j in 0..4 {
            codes[j] = V::and(V::shr(all, 2 * j), V::splat(0x0303_0303));
        }
        codes
    }
}

pub(super) struct Q2K;

impl Format for Q2K {
    const DTYPE: DType = DType::Q2_K;
    const GROUP: usize = 16;
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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

pub(super) struct Q3K;

impl Format for Q3K {
    const DTYPE: DType = DType::Q3_K;
    const GROUP: usize = 16;
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Offset(4);
    const LARGEST: usize = 7;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d = rows.halves::<V>(0);
            let fields = rows.behind(blocks * 2);
            let bits = fields.behind(blocks * 12);
            let codes = bits.behind(blocks * 32);
            // Scales of six bits: bytes 0..8 have the lower four of the first eight, then of the others; bytes 8..12 have
            // the upper two of all.
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

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4_K;
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5_K;
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Minus;
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let ahead = rows.ahead::<Self>(0);
            let d_min = rows.behind(blocks * 2);
            let fields = d_min.behind(blocks * 2);
            let bits = fields.behind(blocks * 12);
            let nibbles = bits.behind(blocks * 32);
            let scales = SixBits::<V>::new(fields, rows.halves::<V>(0), d_min.halves::<V>(0));
            // A loop, since one column and two are read slower without.
            for i in 0..4 {
                eight_times!(j => {
                    ahead.ask_eighth::<V>(11 * i, 10, j);
                    // Bit `i` is that of element `32 * i` and following ones.
                    let bits = bits.words::<V>(j);
                    let both = nibbles.words::<V>(i * 8 + j);
                    let codes = [low::<V>(both), high::<V>(both)];
                    for k in 0..2 {
                        // Bits that are moved out of their byte are masked.
                        let fifth = V::shl(V::shr(bits, 2 * i + k), 4);
                        to.codes(i * 16 + k * 8 + j, or_masked::<V>(codes[k], fifth, 16));
                    }
                });
                ahead.ask::<V>(11 * i + 10);
                scales.give(2 * i, to);
                scales.give(2 * i + 1, to);
            }
        }
    }
}

pub(super) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6_K;
    const GROUP: usize = 16;
    const MIXED: usize = 8;
    const SUMS: Sums = Sums::Offset(32);
    const LARGEST: usize = 63;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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
                    let [a, b, bits] = [0, 1, 2].map(|i| codes.words::<V>(3 * j + i));
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

/// Gives away two less the digits in word `i` of TQ1_0, of which a byte is the fraction in base 3: those of the first digit are word
/// `first` of the slab's codes, those of each other `step` words behind the ones before.
#[inline(always)]
unsafe fn ternary<V: Simd>(
    [rows, codes]: [Rows; 2],
    i: usize,
    (first, step, digits): (usize, usize, usize),
    to: &mut impl Sink<Tq1_0, V>,
) {
    // SAFETY: the caller's contract.
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

pub(super) struct Tq1_0;

impl Format for Tq1_0 {
    const DTYPE: DType = DType::TQ1_0;
    // As many as sums of 16 bits have room for.
    const GROUP: usize = 128;
    const MIXED: usize = 2;
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 2;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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

pub(super) struct Tq2_0;

impl Format for Tq2_0 {
    const DTYPE: DType = DType::TQ2_0;
    // As many as sums of 16 bits have room for.
    const GROUP: usize = 128;
    const SUMS: Sums = Sums::Offset(1);
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, _: usize, to: &mut impl Sink<Self, V>) {
        // SAFETY: the caller's contract; a slab is one block.
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
