//! SSE2, which every x86-64 processor has.

use super::int8::{Simd, functions};
use std::arch::x86_64::*;

/// Registers of 4 rows.
pub(crate) struct Xmm;

/// Returns each byte with an even index as 16 bits.
#[inline(always)]
unsafe fn even(words: __m128i) -> __m128i {
    // SAFETY: SSE2 is part of the architecture, here and below.
    unsafe { _mm_srai_epi16::<8>(_mm_slli_epi16::<8>(words)) }
}

/// Returns each byte with an odd index as 16 bits.
#[inline(always)]
unsafe fn odd(words: __m128i) -> __m128i {
    // SAFETY: SSE2 is part of the architecture; no memory is touched.
    unsafe { _mm_srai_epi16::<8>(words) }
}

/// Returns `a * b + c` of numbers that were `f32`, such that rounding the result to `f32` is like
/// rounding once. The product is exact, and if the sum is not, its last bit is set.
#[inline(always)]
unsafe fn mul_add(a: __m128d, b: __m128d, c: __m128d) -> __m128d {
    // SAFETY: SSE2 is part of the architecture; no memory is touched.
    unsafe {
        let product = _mm_mul_pd(a, b);
        let sum = _mm_add_pd(product, c);
        // The rounding error, exactly.
        let added = _mm_sub_pd(sum, product);
        let error = _mm_add_pd(
            _mm_sub_pd(product, _mm_sub_pd(sum, added)),
            _mm_sub_pd(c, added),
        );
        let magnitude = _mm_andnot_pd(_mm_set1_pd(-0.0), error);
        let is_rounded = _mm_castpd_si128(_mm_cmplt_pd(_mm_setzero_pd(), magnitude));
        let bits = _mm_castpd_si128(sum);
        let one = _mm_set1_epi64x(1);
        let is_even = _mm_sub_epi64(_mm_setzero_si128(), _mm_andnot_si128(bits, one));
        // Away from zero if the error has the sum's sign, towards it otherwise.
        let signs = _mm_castpd_si128(_mm_xor_pd(sum, error));
        let differ = _mm_srai_epi32::<31>(_mm_shuffle_epi32::<0b11_11_01_01>(signs));
        let step = _mm_and_si128(
            _mm_or_si128(differ, one),
            _mm_and_si128(is_rounded, is_even),
        );
        _mm_castsi128_pd(_mm_add_epi64(bits, step))
    }
}

impl Simd for Xmm {
    const LANES: usize = 4;
    const SIGNED: bool = true;
    type Words = __m128i;
    type Floats = __m128;
    type Sum = __m128i;

    functions! {
        fn load(at: *const u8) -> __m128i { _mm_loadu_si128(at.cast()) }
        fn load_u8(at: *const u8) -> __m128i {
            let bytes = _mm_cvtsi32_si128(at.cast::<i32>().read_unaligned());
            let zero = _mm_setzero_si128();
            _mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero)
        }
        fn load_i8(at: *const u8) -> __m128i {
            let bytes = _mm_cvtsi32_si128(at.cast::<i32>().read_unaligned());
            let twice = _mm_unpacklo_epi8(bytes, bytes);
            _mm_srai_epi32::<24>(_mm_unpacklo_epi16(twice, twice))
        }
        fn load_u16(at: *const u8) -> __m128i {
            _mm_unpacklo_epi16(_mm_loadl_epi64(at.cast()), _mm_setzero_si128())
        }
        fn store(words: __m128i, to: *mut u8) { _mm_storeu_si128(to.cast(), words) }
        fn splat(word: i32) -> __m128i { _mm_set1_epi32(word) }
        fn and(a: __m128i, b: __m128i) -> __m128i { _mm_and_si128(a, b) }
        fn or(a: __m128i, b: __m128i) -> __m128i { _mm_or_si128(a, b) }
        fn xor(a: __m128i, b: __m128i) -> __m128i { _mm_xor_si128(a, b) }
        fn add(a: __m128i, b: __m128i) -> __m128i { _mm_add_epi32(a, b) }
        fn add_bytes(a: __m128i, b: __m128i) -> __m128i { _mm_add_epi8(a, b) }
        fn above(bytes: __m128i, limit: i8) -> __m128i { _mm_cmpgt_epi8(bytes,
            _mm_set1_epi8(limit)) }
        fn shl(words: __m128i, bits: usize) -> __m128i { _mm_sll_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn shr(words: __m128i, bits: usize) -> __m128i { _mm_srl_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn look_up(table: &[i8; 16], bytes: __m128i) -> __m128i {
            let mut all = [0u8; 16];
            _mm_storeu_si128(all.as_mut_ptr().cast(), bytes);
            for byte in &mut all {
                *byte = table[usize::from(*byte & 15)] as u8;
            }
            _mm_loadu_si128(all.as_ptr().cast())
        }
        fn load_f16(at: *const u8) -> __m128 {
            let bits = Self::load_u16(at);
            let magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fff));
            let sign = _mm_slli_epi32::<16>(_mm_xor_si128(bits, magnitude));
            // The exponent's bias is 15 there and 127 here. This is also correct for subnormal
            // numbers.
            let scaled = _mm_castsi128_ps(_mm_slli_epi32::<13>(magnitude));
            let scaled = _mm_mul_ps(scaled, _mm_set1_ps(f32::from_bits((127 + 112) << 23)));
            let is_infinite = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
            let infinite = _mm_and_si128(is_infinite, _mm_set1_epi32(0x7f80_0000));
            _mm_or_ps(scaled, _mm_castsi128_ps(_mm_or_si128(sign, infinite)))
        }
        fn load_floats(at: *const f32) -> __m128 { _mm_loadu_ps(at) }
        fn store_floats(floats: __m128, to: *mut f32) { _mm_storeu_ps(to, floats) }
        fn splat_float(x: f32) -> __m128 { _mm_set1_ps(x) }
        fn floats(words: __m128i) -> __m128 { _mm_cvtepi32_ps(words) }
        fn from_bits(words: __m128i) -> __m128 { _mm_castsi128_ps(words) }
        fn mul(a: __m128, b: __m128) -> __m128 { _mm_mul_ps(a, b) }
        fn mul_add(a: __m128, b: __m128, c: __m128) -> __m128 {
            let low = mul_add(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c));
            let [a, b, c] = [_mm_movehl_ps(a, a), _mm_movehl_ps(b, b), _mm_movehl_ps(c, c)];
            let high = mul_add(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c));
            _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high))
        }
        fn start(start: __m128i) -> __m128i { start }
        fn dot(sum: &mut __m128i, codes: __m128i, x: __m128i, _full: bool) {
            *sum = _mm_add_epi32(*sum, _mm_madd_epi16(even(codes), even(x)));
            *sum = _mm_add_epi32(*sum, _mm_madd_epi16(odd(codes), odd(x)));
        }
        fn total(sum: __m128i) -> __m128i { sum }
    }
}
