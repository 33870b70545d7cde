//! AVX2, with or without byte products of AVX-VNNI.

use super::Simd;
use std::arch::x86_64::*;

/// Registers of 8 rows.
pub(crate) struct Ymm<const VNNI: bool>;

/// A sum of which a part is still in 16 bits, two for each row.
#[derive(Clone, Copy)]
pub(crate) struct Sum {
    short: __m256i,
    whole: __m256i,
}

impl<const VNNI: bool> Simd for Ymm<VNNI> {
    const LANES: usize = 8;
    const SIGNED: bool = !VNNI;
    const STRAIGHT: usize = 4;
    type Words = __m256i;
    type Floats = __m256;
    type Sum = Sum;

    functions! {
        fn load(at: *const u8) -> __m256i { _mm256_loadu_si256(at.cast()) }
        fn load_u8(at: *const u8) -> __m256i { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())) }
        fn load_i8(at: *const u8) -> __m256i { _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())) }
        fn load_u16(at: *const u8) -> __m256i { _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())) }
        fn store(words: __m256i, to: *mut u8) { _mm256_storeu_si256(to.cast(), words) }
        fn splat(word: i32) -> __m256i { _mm256_set1_epi32(word) }
        fn and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn add(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn add_bytes(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi8(a, b) }
        fn above(bytes: __m256i, limit: i8) -> __m256i { _mm256_cmpgt_epi8(bytes, _mm256_set1_epi8(limit)) }
        fn shl(words: __m256i, bits: usize) -> __m256i { _mm256_sll_epi32(words, _mm_cvtsi32_si128(bits as i32)) }
        fn shr(words: __m256i, bits: usize) -> __m256i { _mm256_srl_epi32(words, _mm_cvtsi32_si128(bits as i32)) }
        fn look_up(table: &[i8; 16], bytes: __m256i) -> __m256i {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes)
        }
        fn fifth_bits(words: __m256i, i: usize) -> __m256i {
            let byte = 0x0101_0101 * (i as i32 / 2);
            let lanes = _mm_setr_epi32(
                byte,
                byte + 0x0404_0404,
                byte + 0x0808_0808,
                byte + 0x0c0c_0c0c,
            );
            let bytes = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(lanes));
            let one = if i.is_multiple_of(2) {
                0x0804_0201
            } else {
                0x8040_2010_u32 as i32
            };
            let one = _mm256_set1_epi32(one);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, one), one);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        }
        fn load_f16(at: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
        fn load_floats(at: *const f32) -> __m256 { _mm256_loadu_ps(at) }
        fn store_floats(floats: __m256, to: *mut f32) { _mm256_storeu_ps(to, floats) }
        fn splat_float(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn floats(words: __m256i) -> __m256 { _mm256_cvtepi32_ps(words) }
        fn from_bits(words: __m256i) -> __m256 { _mm256_castsi256_ps(words) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn start(start: __m256i) -> Sum {
            Sum {
                short: _mm256_setzero_si256(),
                whole: start,
            }
        }
        fn dot(sum: &mut Sum, codes: __m256i, x: __m256i, full: bool) {
            if VNNI {
                sum.whole = _mm256_dpbusd_avx_epi32(sum.whole, codes, x);
                return;
            }
            // Codes of columns are above -128, so that their sign can be changed. 2 * 128 * 127 fits into 16 bits.
            let products = if full {
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
            } else {
                _mm256_maddubs_epi16(codes, x)
            };
            sum.short = _mm256_add_epi16(sum.short, products);
        }
        fn carry(sum: &mut Sum) {
            if !VNNI {
                let pairs = _mm256_madd_epi16(sum.short, _mm256_set1_epi16(1));
                sum.whole = _mm256_add_epi32(sum.whole, pairs);
                sum.short = _mm256_setzero_si256();
            }
        }
        fn total(sum: Sum) -> __m256i { sum.whole }
    }
}
