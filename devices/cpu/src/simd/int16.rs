//! 16-bit numbers: integers up to [`LARGEST`], with a scale for each [`GROUP`] of them. VNNI's
//! instruction for these multiplies and adds twice as many pairs at a time as one for F32 does.
//! AVX2's instruction multiplies as many, but processors have more units that add than units that
//! multiply.
//!
//! An element's error is at most 1/16382 of the largest of its group. For numbers of similar
//! magnitude that is less than the error of rounding them to F16.
//!
//! # Crossed products
//!
//! Two products cost one multiplication (Winograd, "A New Algorithm for Inner Product", 1968):
//! `(w1 + x2) * (w2 + x1)` is `w1 * x1 + w2 * x2 + w1 * w2 + x1 * x2`. The sums of the last two
//! terms are the same for all columns or all rows, so they are computed once and subtracted. Two
//! additions replace a multiplication. Some processors (Zen 4 and 5) add with four units and
//! multiply with two: if half of the products are crossed, all four have work. Others multiply and
//! add with the same two units. Therefore [the faster way](crate::tune) is measured. Numbers are
//! integers, so results are the same. Sums of two numbers of 14 bits fit into 16 bits. Sums of two
//! codes of 8 bits would not fit into 8, so [`packed::int8`](crate::packed::int8) has no crossed
//! products.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::float::{Element, Vector};
use super::int8::Simd;
#[cfg(target_arch = "x86_64")]
use super::int8::{functions, in_place};
use super::math;
use super::math::ROUND;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Ymm, avx512::Zmm};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Number of elements that share a scale.
pub(crate) const GROUP: usize = 32;

/// Maximum number. The sum of a group's products fits into 32 bits.
const LARGEST: i32 = 8191;
const _: () = assert!((LARGEST as i64).pow(2) * GROUP as i64 <= i32::MAX as i64);

/// Instruction sets that multiply 16-bit numbers, and the functions that rounding to these needs.
///
/// # Safety
/// As [`Simd`].
pub(crate) trait Int16Simd: Simd<Floats: Vector> {
    /// Adds the products of both halves of each word to `sum`.
    unsafe fn dot_i16(sum: &mut Self::Words, a: Self::Words, b: Self::Words);
    /// Does what [`dot_i16`](Int16Simd::dot_i16) does, exactly where it is called. Compilers tend
    /// to put the products of one sum next to each other, where each waits for the previous one.
    unsafe fn dot_i16_here(sum: &mut Self::Words, a: Self::Words, b: Self::Words);
    /// Returns the sums of halves, truncated to 16 bits.
    unsafe fn add_i16(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Returns the maximums of signed words.
    unsafe fn max(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Returns the inverse of [`from_bits`](Simd::from_bits).
    unsafe fn bits(floats: Self::Floats) -> Self::Words;
    unsafe fn divide(a: Self::Floats, b: Self::Floats) -> Self::Floats;
}

#[cfg(target_arch = "x86_64")]
impl<const CROSSED: bool> Int16Simd for Zmm<true, CROSSED> {
    functions! {
        fn dot_i16(sum: &mut __m512i, a: __m512i, b: __m512i) { dot_512(sum, a, b) }
        fn dot_i16_here(sum: &mut __m512i, a: __m512i, b: __m512i) { dot_512_here(sum, a, b) }
        fn add_i16(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi16(a, b) }
        fn max(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn bits(floats: __m512) -> __m512i { _mm512_castps_si512(floats) }
        fn divide(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
    }
}

#[cfg(target_arch = "x86_64")]
impl<const VNNI: bool> Int16Simd for Ymm<VNNI> {
    functions! {
        fn dot_i16(sum: &mut __m256i, a: __m256i, b: __m256i) {
            if VNNI {
                dot_256(sum, a, b);
            } else {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(a, b));
            }
        }
        fn dot_i16_here(sum: &mut __m256i, a: __m256i, b: __m256i) { Self::dot_i16(sum, a, b) }
        fn add_i16(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi16(a, b) }
        fn max(a: __m256i, b: __m256i) -> __m256i { _mm256_max_epi32(a, b) }
        fn bits(floats: __m256) -> __m256i { _mm256_castps_si256(floats) }
        fn divide(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
    }
}

#[cfg(target_arch = "x86_64")]
in_place! {
    /// Executes the instruction, for which compilers would generate two.
    fn dot_512(__m512i), "avx512f", zmm_reg, "vpdpwssd"
}

#[cfg(target_arch = "x86_64")]
in_place! {
    /// Implements [`Int16Simd::dot_i16_here`].
    fn dot_512_here(__m512i), "avx512f", zmm_reg, "vpdpwssd", in order
}

#[cfg(target_arch = "x86_64")]
in_place! {
    /// Executes the version of the instruction for AVX-VNNI.
    fn dot_256(__m256i), "avx2", ymm_reg, "{{vex}} vpdpwssd"
}

/// Number of pairs of a group whose products are [crossed](self), each with its neighbour: the
/// first half. Sums of crossed products may wrap around 32 bits on the way, but the final value
/// fits.
const CROSSED: usize = GROUP / 4;

/// Groups of terms of a column, or of each of some adjacent lanes.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Pairs of adjacent elements, the first one in the lower half.
    pub pairs: *mut i32,
    /// Scales, one for each group.
    pub scales: *mut f32,
    /// Contributions of groups to the initial values of sums of crossed products. Present only for
    /// those.
    pub starts: *mut i32,
    /// Distance in words to the next pair, scale or start.
    pub step: usize,
}

/// # Safety
/// The groups must exist: their pairs, scales and places of starts lie in memory of one slab, and
/// so must the data after them.
impl Terms {
    /// Returns the terms whose first pair and scale are `pairs` and `scales` words later.
    #[inline(always)]
    pub unsafe fn behind(self, pairs: usize, scales: usize) -> Self {
        // SAFETY: the caller guarantees groups that many words later, so the addresses stay inside
        // the slab. Starts are placed like scales and have room even if they are unused.
        unsafe {
            Terms {
                pairs: self.pairs.add(pairs),
                scales: self.scales.add(scales),
                starts: self.starts.add(scales),
                ..self
            }
        }
    }

    #[inline(always)]
    unsafe fn pair(self, group: usize, i: usize) -> *mut i32 {
        // SAFETY: the group exists, and `i` is below its `GROUP / 2` pairs.
        unsafe { self.pairs.add((group * (GROUP / 2) + i) * self.step) }
    }

    #[inline(always)]
    pub unsafe fn scale(self, group: usize) -> *mut f32 {
        // SAFETY: the group exists and has one scale.
        unsafe { self.scales.add(group * self.step) }
    }

    #[inline(always)]
    unsafe fn start(self, group: usize) -> *mut i32 {
        // SAFETY: the group exists and has a place for one start.
        unsafe { self.starts.add(group * self.step) }
    }
}

/// Groups of terms of some columns.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub first: Terms,
    /// Distance in words between the first pairs of adjacent columns, and between their first
    /// scales or starts.
    pub apart: [usize; 2],
}

impl Columns {
    /// # Safety
    /// The column must exist.
    #[inline(always)]
    pub unsafe fn at(self, column: usize) -> Terms {
        let [pairs, scales] = self.apart;
        // SAFETY: column number `column` exists, `apart` words after the first one for each before
        // it.
        unsafe { self.first.behind(column * pairs, column * scales) }
    }
}

/// Rounds a column's group of elements, whose pairs must follow one another. `crossed` says if
/// products are.
///
/// # Safety
/// The group must have room for its pairs, its scale and its start, writable and aligned to 4, with
/// a step of 1.
#[inline(always)]
pub(crate) unsafe fn round_group(x: &[f32; GROUP], to: Terms, group: usize, crossed: bool) {
    // SAFETY: pairs of a column follow one another, so 16 of them are the `GROUP` 16-bit numbers.
    // The group's scale and start are disjoint from them.
    unsafe {
        let numbers = &mut *to.pair(group, 0).cast::<[i16; GROUP]>();
        *to.scale(group) = math::round(x, LARGEST as f32, numbers, |bits| bits as i16);
        if crossed {
            // Numbers of a group that is not finite are undefined.
            let subtract = |sum: i32, (a, b)| sum.wrapping_sub(i32::from(a) * i32::from(b));
            let four = numbers[..2 * CROSSED].as_chunks::<4>().0.iter();
            let pairs = four.flat_map(|&[a, b, c, d]| [(a, c), (b, d)]);
            *to.start(group) = pairs.fold(0, subtract);
        }
    }
}

/// Rounds `count` elements, at most [`GROUP`], of each lane of a register. `from` is the first
/// element of the first lane, and the next one is `step` elements later. Missing elements become
/// zeros.
///
/// # Safety
/// `count` elements of `V::LANES` lanes must be readable. The group must have room, in other
/// memory, for the pairs, scales and starts of as many adjacent lanes. The instructions must be
/// available.
#[inline(always)]
pub(crate) unsafe fn round<V: Int16Simd, E: Element>(
    from: *const u8,
    step: usize,
    count: usize,
    to: Terms,
    group: usize,
) {
    // SAFETY: `count` elements of each lane are readable, and `load` reads number `i` below
    // `count`. The group has `GROUP / 2` pairs, a scale and a start for `V::LANES` lanes side by
    // side, which are elsewhere. The instructions of `V` are available.
    unsafe {
        let load = |i: usize| E::load::<V::Floats>(from, i * step);
        // The bits of magnitudes are ordered like the magnitudes, with infinity and NaN above.
        let mut largest = V::splat(0);
        for i in 0..count {
            let magnitude = V::and(V::bits(load(i)), V::splat(i32::MAX));
            largest = V::max(largest, magnitude);
        }
        let largest = V::from_bits(largest);
        let scale = V::mul(largest, V::splat_float(1.0 / LARGEST as f32));
        V::store_floats(scale, to.scale(group));
        // If all are zero, their products are NaN, whose lower bits are also zeros. Numbers below
        // 2.4e-35 become zeros.
        let inverse = V::divide(V::splat_float(LARGEST as f32), largest);
        let number = |i: usize| {
            if i < count {
                V::bits(V::mul_add(load(i), inverse, V::splat_float(ROUND)))
            } else {
                V::splat(0)
            }
        };
        for pair in 0..GROUP / 2 {
            let low = V::and(number(2 * pair), V::splat(0xffff));
            let both = V::or(low, V::shl(number(2 * pair + 1), 16));
            V::store(both, to.pair(group, pair).cast());
        }
        if V::CROSSED {
            let mut products = V::splat(0);
            for pair in (0..CROSSED).step_by(2) {
                let load = |pair: usize| V::load(to.pair(group, pair).cast());
                V::dot_i16(&mut products, load(pair), load(pair + 1));
            }
            let negative = V::add(V::xor(products, V::splat(-1)), V::splat(1));
            V::store(negative, to.start(group).cast());
        }
    }
}

/// Returns the sums of the products of a group's terms: of the lanes of `R` registers, starting
/// with `rows`, with the columns.
///
/// # Safety
/// The group must exist for `R * V::LANES` adjacent lanes and for `C` columns, and the instructions
/// must be available.
#[inline(always)]
pub(crate) unsafe fn products<V: Int16Simd, const R: usize, const C: usize>(
    rows: Terms,
    columns: Columns,
    group: usize,
) -> [[V::Words; R]; C] {
    // SAFETY: `R * V::LANES` lanes have this group with all pairs and starts, and so have `C`
    // columns; `i + 3` is below `GROUP / 2` in one loop and `CROSSED + i + 1` in the other. The
    // instructions of `V` are available.
    unsafe {
        let mut sums = [[V::splat(0); R]; C];
        if V::CROSSED {
            for c in 0..C {
                let start = V::splat(columns.at(c).start(group).read());
                for r in 0..R {
                    let starts = V::load(rows.start(group).add(r * V::LANES).cast());
                    sums[c][r] = V::add(starts, start);
                }
            }
            // Alternates between both kinds, because they use different units.
            for i in (0..CROSSED).step_by(2) {
                two_pairs_crossed::<V, R, C>([group, i], rows, columns, &mut sums);
                pair::<V, R, C>([group, CROSSED + i], rows, columns, &mut sums);
                pair::<V, R, C>([group, CROSSED + i + 1], rows, columns, &mut sums);
            }
        } else {
            for i in (0..GROUP / 2).step_by(4) {
                pair::<V, R, C>([group, i], rows, columns, &mut sums);
                pair::<V, R, C>([group, i + 1], rows, columns, &mut sums);
                pair::<V, R, C>([group, i + 2], rows, columns, &mut sums);
                pair::<V, R, C>([group, i + 3], rows, columns, &mut sums);
            }
        }
        sums
    }
}

/// Adds the products of pair `i` of a group.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn pair<V: Int16Simd, const R: usize, const C: usize>(
    [group, i]: [usize; 2],
    rows: Terms,
    columns: Columns,
    sums: &mut [[V::Words; R]; C],
) {
    // SAFETY: `i` is below `GROUP / 2`; pair `i` of the group is there for `R * V::LANES` lanes
    // side by side and for `C` columns, and is only read. The instructions of `V` are available.
    unsafe {
        let mut w = [V::splat(0); R];
        for r in 0..R {
            w[r] = V::load(rows.pair(group, i).add(r * V::LANES).cast());
        }
        for c in 0..C {
            let x = V::splat(columns.at(c).pair(group, i).read());
            for r in 0..R {
                if V::CROSSED {
                    V::dot_i16_here(&mut sums[c][r], w[r], x);
                } else {
                    V::dot_i16(&mut sums[c][r], w[r], x);
                }
            }
        }
    }
}

/// Adds the products of pair `i` of a group and the next one, crossed.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn two_pairs_crossed<V: Int16Simd, const R: usize, const C: usize>(
    [group, i]: [usize; 2],
    rows: Terms,
    columns: Columns,
    sums: &mut [[V::Words; R]; C],
) {
    // SAFETY: `i + 1` is below `CROSSED`; both pairs of the group are there for `R * V::LANES`
    // lanes side by side and for `C` columns, and are only read. The instructions of `V` are
    // available.
    unsafe {
        let mut w = [[V::splat(0); 2]; R];
        for r in 0..R {
            let at = |i: usize| rows.pair(group, i).add(r * V::LANES);
            w[r] = [V::load(at(i).cast()), V::load(at(i + 1).cast())];
        }
        for c in 0..C {
            // Not with `map`, which some builds do not inline.
            let at = columns.at(c);
            let x = [at.pair(group, i).read(), at.pair(group, i + 1).read()];
            let x = [V::splat(x[0]), V::splat(x[1])];
            for r in 0..R {
                let (a, b) = (V::add_i16(w[r][0], x[1]), V::add_i16(w[r][1], x[0]));
                V::dot_i16_here(&mut sums[c][r], a, b);
            }
        }
    }
}
