//! AVX-512 registers: 16 numbers, or words of 16 rows; with or without byte products of VNNI.

use super::float::Vector;
use super::int8::{Simd, functions, in_place};
use super::prefetch_here;
use half::f16;
use std::arch::x86_64::*;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// Returns four bits of each byte, starting with bit `shift`.
///
/// # Safety
/// Requires AVX-512, and 16 readable bytes.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> __m512i {
    // SAFETY: the caller has AVX-512 and 16 readable bytes at `from`, which are all that is loaded.
    unsafe {
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        let shifted = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
        _mm512_and_si512(shifted, _mm512_set1_epi32(15))
    }
}

impl Vector for __m512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; only registers are touched.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; only registers are touched.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(x.to_bits() as i16)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; `LANES`, 16, numbers are
        // readable at `from`; the load needs no alignment.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; masked lanes are not read, and
        // the first `count` numbers are readable.
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; 16 numbers of two bytes, which
        // are the 32 bytes loaded, are readable at `from`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; 16 numbers of two bytes, which
        // are the 32 bytes loaded, are readable at `from`.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; 16 bytes are readable at
        // `from`, and no more are loaded.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; 16 bytes are readable at
        // `from`, which is all that `codes` asks for.
        unsafe {
            let codes = codes(from, shift);
            let codes = _mm512_mask_add_epi32(codes, fifth as u16, codes, _mm512_set1_epi32(16));
            _mm512_cvtepi32_ps(codes)
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; 16 bytes are readable at
        // `from`, as `codes` requires, and `values` has the 16 numbers loaded.
        unsafe { _mm512_permutexvar_ps(codes(from, shift), _mm512_loadu_ps(values.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; masked lanes are not read, and
        // the first `count` numbers of two bytes are readable.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(count), from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; masked lanes are not read, and
        // the first `count` numbers of two bytes are readable.
        unsafe {
            let lanes = _mm256_maskz_loadu_epi16(mask(count), from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lanes), 16))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the type is used only where AVX-512 was detected; 16 numbers are writable at
        // `to`; the store needs no alignment.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: the type is used only where AVX-512 was detected; masked lanes are not written,
        // and the first `count` numbers are writable.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the type is used only where AVX-512 was detected; only registers are touched.
        unsafe { _mm512_fmadd_ps(self, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the type is used only where AVX-512 was detected; only registers are touched.
        unsafe {
            let high = _mm512_extractf32x8_ps(self, 1);
            super::avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(self), high))
        }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: the type is used only where AVX-512 was detected; `of` has eight registers, and
        // results are new arrays.
        unsafe {
            // Each four lanes hold sums of two lanes of two registers, then of all four lanes of
            // four registers.
            let mut pairs = [_mm512_setzero_pd(); 4];
            for (pair, [a, b]) in pairs.iter_mut().zip(of.as_chunks::<2>().0) {
                let (low, high) = (_mm512_unpacklo_ps(*a, *b), _mm512_unpackhi_ps(*a, *b));
                *pair = _mm512_castps_pd(_mm512_add_ps(low, high));
            }
            let mut fours = [_mm256_setzero_ps(); 2];
            for (four, [a, b]) in fours.iter_mut().zip(pairs.as_chunks::<2>().0) {
                let (low, high) = (_mm512_unpacklo_pd(*a, *b), _mm512_unpackhi_pd(*a, *b));
                let sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
                let half = _mm512_extractf32x8_ps(sums, 1);
                *four = _mm256_add_ps(_mm512_castps512_ps256(sums), half);
            }
            super::avx2::halves(fours)
        }
    }
}

/// Registers of 16 rows.
pub(crate) struct Zmm<const VNNI: bool, const CROSSED: bool = false>;

/// A sum with a part in 16 bits, two for each row.
#[derive(Clone, Copy)]
pub(crate) struct ZmmSum {
    short: __m512i,
    whole: __m512i,
}

impl<const VNNI: bool, const CROSSED: bool> Simd for Zmm<VNNI, CROSSED> {
    const LANES: usize = 16;
    const SIGNED: bool = !VNNI;
    const GEMV_COLUMNS: usize = 8;
    const CROSSED: bool = VNNI && CROSSED;
    type Words = __m512i;
    type Floats = __m512;
    type Sum = ZmmSum;

    functions! {
        fn prefetch_here(at: *const u8) { prefetch_here(at) }
        fn accumulate(sum: &mut __m512, a: __m512, b: __m512) {
            accumulate(sum, a, b)
        }
        fn load(at: *const u8) -> __m512i { _mm512_loadu_si512(at.cast()) }
        fn load_u8(at: *const u8) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
        fn load_i8(at: *const u8) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())) }
        fn load_u16(at: *const u8) -> __m512i { _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())) }
        fn store(words: __m512i, to: *mut u8) { _mm512_storeu_si512(to.cast(), words) }
        fn splat(word: i32) -> __m512i { _mm512_set1_epi32(word) }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn add(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn add_bytes(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi8(a, b) }
        fn above(bytes: __m512i, limit: i8) -> __m512i {
            _mm512_movm_epi8(_mm512_cmpgt_epi8_mask(bytes, _mm512_set1_epi8(limit)))
        }
        fn shl(words: __m512i, bits: usize) -> __m512i { _mm512_sll_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn shr(words: __m512i, bits: usize) -> __m512i { _mm512_srl_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn look_up(table: &[i8; 16], bytes: __m512i) -> __m512i {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes)
        }
        fn fifth_bits(words: __m512i, i: usize) -> __m512i {
            let byte = 0x0101_0101 * (i as i32 / 2);
            let lanes = _mm_setr_epi32(
                byte,
                byte + 0x0404_0404,
                byte + 0x0808_0808,
                byte + 0x0c0c_0c0c,
            );
            let bytes = _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(lanes));
            let one = if i.is_multiple_of(2) {
                0x0804_0201
            } else {
                0x8040_2010_u32 as i32
            };
            let set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(one));
            _mm512_maskz_set1_epi8(set, 16)
        }
        fn load_f16(at: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
        fn load_floats(at: *const f32) -> __m512 { _mm512_loadu_ps(at) }
        fn store_floats(floats: __m512, to: *mut f32) { _mm512_storeu_ps(to, floats) }
        fn splat_float(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn floats(words: __m512i) -> __m512 { _mm512_cvtepi32_ps(words) }
        fn from_bits(words: __m512i) -> __m512 { _mm512_castsi512_ps(words) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn start(start: __m512i) -> ZmmSum {
            ZmmSum {
                short: _mm512_setzero_si512(),
                whole: start,
            }
        }
        fn dot(sum: &mut ZmmSum, codes: __m512i, x: __m512i, full: bool) {
            if VNNI {
                sum.whole = _mm512_dpbusd_epi32(sum.whole, codes, x);
                return;
            }
            // Codes of columns are above -128, so their sign can be changed. 2 * 128 * 127 fits
            // into 16 bits.
            let products = if full {
                let negative = _mm512_movepi8_mask(codes);
                let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
                _mm512_maddubs_epi16(_mm512_abs_epi8(codes), x)
            } else {
                _mm512_maddubs_epi16(codes, x)
            };
            sum.short = _mm512_add_epi16(sum.short, products);
        }
        fn carry(sum: &mut ZmmSum) {
            if !VNNI {
                let pairs = _mm512_madd_epi16(sum.short, _mm512_set1_epi16(1));
                sum.whole = _mm512_add_epi32(sum.whole, pairs);
                sum.short = _mm512_setzero_si512();
            }
        }
        fn total(sum: ZmmSum) -> __m512i { sum.whole }
    }
}

in_place! {
    /// Implements [`Simd::accumulate`].
    fn accumulate(__m512), "avx512f", zmm_reg, "vfmadd231ps"
}
