//! Numbers of 16 bits: whole ones up to [`LARGEST`], with a scale for each [`GROUP`] of them. VNNI's instruction for these multiplies
//! and adds twice as many pairs at a time as one for F32 does.
//!
//! An element's error is at most 1/16382 of the largest of its group. For numbers of about the same size that is less than rounding
//! them to F16 would cost.

use super::activations::{self, ROUND};
use super::simd::Simd;
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Ymm, avx512::Zmm, functions, in_place};
use crate::simd::{Element, Vector};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Elements that share a scale.
pub(crate) const GROUP: usize = 32;

/// The largest number: the sum of a group's products fits into 32 bits.
const LARGEST: i32 = 8191;
const _: () = assert!((LARGEST as i64).pow(2) * GROUP as i64 <= i32::MAX as i64);

/// Instruction sets that multiply numbers of 16 bits, and what it takes to round to these.
///
/// # Safety
/// As [`Simd`].
pub(super) trait Halves: Simd<Floats: Vector> {
    /// Adds the products of both halves of each word to `sum`.
    unsafe fn dot_halves(sum: &mut Self::Words, a: Self::Words, b: Self::Words);
    /// The larger ones of signed words.
    unsafe fn max(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The inverse of [`from_bits`](Simd::from_bits).
    unsafe fn bits(floats: Self::Floats) -> Self::Words;
    unsafe fn divide(a: Self::Floats, b: Self::Floats) -> Self::Floats;
}

#[cfg(target_arch = "x86_64")]
impl Halves for Zmm<true> {
    functions! {
        fn dot_halves(sum: &mut __m512i, a: __m512i, b: __m512i) { dot_512(sum, a, b) }
        fn max(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn bits(floats: __m512) -> __m512i { _mm512_castps_si512(floats) }
        fn divide(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
    }
}

#[cfg(target_arch = "x86_64")]
impl<const VNNI: bool> Halves for Ymm<VNNI> {
    functions! {
        fn dot_halves(sum: &mut __m256i, a: __m256i, b: __m256i) {
            if VNNI {
                dot_256(sum, a, b);
            } else {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(a, b));
            }
        }
        fn max(a: __m256i, b: __m256i) -> __m256i { _mm256_max_epi32(a, b) }
        fn bits(floats: __m256) -> __m256i { _mm256_castps_si256(floats) }
        fn divide(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
    }
}

#[cfg(target_arch = "x86_64")]
in_place! {
    /// The instruction, which compilers make two of.
    fn dot_512(__m512i), "avx512f", zmm_reg, "vpdpwssd"
}

#[cfg(target_arch = "x86_64")]
in_place! {
    /// The same for AVX-VNNI.
    fn dot_256(__m256i), "avx2", ymm_reg, "{{vex}} vpdpwssd"
}

/// Rounds a group of elements that follow one another, as its numbers do.
///
/// # Safety
/// There must be room for numbers and scale.
#[inline(always)]
pub(super) unsafe fn round_group(x: &[f32; GROUP], numbers: *mut [i16; GROUP], scale: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe { *scale = activations::round(x, LARGEST as f32, &mut *numbers, |bits| bits as i16) }
}

/// Rounds `count` elements, at most [`GROUP`], of each lane of a register: `from` is that of the first lane, and `step` elements
/// behind it is the next one. Two neighbouring elements of a lane become a pair, the first one in the lower half; `lanes` words behind a
/// pair is the next one. Elements that are not there become zeros.
///
/// # Safety
/// They must be there, room for all pairs of a group and for scales, and the instructions.
#[inline(always)]
pub(super) unsafe fn round<V: Halves, E: Element>(
    from: *const u8,
    step: usize,
    count: usize,
    pairs: *mut i32,
    lanes: usize,
    scales: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let load = |i: usize| E::load::<V::Floats>(from, i * step);
        // Bits of magnitudes are in the order of the magnitudes, with infinity and NaN above.
        let mut largest = V::splat(0);
        for i in 0..count {
            let magnitude = V::and(V::bits(load(i)), V::splat(i32::MAX));
            largest = V::max(largest, magnitude);
        }
        let largest = V::from_bits(largest);
        let scale = V::mul(largest, V::splat_float(1.0 / LARGEST as f32));
        V::store_floats(scale, scales);
        // If all are zero, their products are NaN, whose lower bits are zeros, too. Those below 2.4e-35 become zeros.
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
            V::store(both, pairs.add(pair * lanes).cast());
        }
    }
}
