//! Vectors of 16 numbers in AVX-512 registers.

use super::Vector;
use half::f16;
use std::arch::x86_64::*;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// Four bits of each byte, those from bit `shift` on.
///
/// # Safety
/// AVX-512; 16 bytes must be readable.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> __m512i {
    // SAFETY: the caller's contract.
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
        // SAFETY: the trait's contract, here and below.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(x.to_bits() as i16)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: as above; masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: as above.
        unsafe {
            let codes = codes(from, shift);
            let codes = _mm512_mask_add_epi32(codes, fifth as u16, codes, _mm512_set1_epi32(16));
            _mm512_cvtepi32_ps(codes)
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_permutexvar_ps(codes(from, shift), _mm512_loadu_ps(values.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: as above; masked lanes are not read.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(count), from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: as above; masked lanes are not read.
        unsafe {
            let lanes = _mm256_maskz_loadu_epi16(mask(count), from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lanes), 16))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: as above; masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe {
            let high = _mm512_extractf32x8_ps(self, 1);
            super::avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(self), high))
        }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: as above.
        unsafe {
            // Each four of lanes holds sums of two lanes of two registers, then of all four lanes of four registers.
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
