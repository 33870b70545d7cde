//! Vectors of 8 numbers in AVX2 registers.

use super::Vector;
use half::f16;
use std::arch::x86_64::*;

/// A mask for the first `count` lanes lies `8 - count` numbers from the start.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// # Safety
/// AVX2, and `count <= 8`.
#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    // SAFETY: 8 numbers follow from there.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - count).cast()) }
}

/// Sum of all lanes.
///
/// # Safety
/// AVX.
#[inline(always)]
pub(crate) unsafe fn sum(x: __m256) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)))
    }
}

/// The sums of both halves of `a`, then those of `b`.
///
/// # Safety
/// AVX.
#[inline(always)]
pub(crate) unsafe fn halves([a, b]: [__m256; 2]) -> [f32; 8] {
    let mut sums = [0.0; 8];
    // SAFETY: the caller's contract.
    unsafe {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        let high = _mm256_permute2f128_ps::<0x31>(a, b);
        _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(low, high));
    }
    sums
}

/// Four bits of each byte, those from bit `shift` on.
///
/// # Safety
/// AVX2; 8 bytes must be readable.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
        let shifted = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
        _mm256_and_si256(shifted, _mm256_set1_epi32(15))
    }
}

impl Vector for __m256 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the trait's contract, here and below.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(x.to_bits() as i16)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: as above; masked lanes are not read.
        unsafe { _mm256_maskload_ps(from, mask(count)) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: as above.
        unsafe {
            let numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let fifth = _mm256_srlv_epi32(_mm256_set1_epi32(fifth as i32), numbers);
            let fifth = _mm256_slli_epi32::<4>(_mm256_and_si256(fifth, _mm256_set1_epi32(1)));
            _mm256_cvtepi32_ps(_mm256_or_si256(codes(from, shift), fifth))
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        // SAFETY: as above; eight values follow the first eight.
        unsafe {
            let codes = codes(from, shift);
            let half =
                |at| _mm256_permutevar8x32_ps(_mm256_loadu_ps(values.as_ptr().add(at)), codes);
            // The sign tells which half it is.
            let is_upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            _mm256_blendv_ps(half(0), half(8), is_upper)
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: as above; masked lanes are not written.
        unsafe { _mm256_maskstore_ps(to, mask(count), self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(self, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe { sum(self) }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: as above.
        unsafe {
            let mut pairs = [_mm256_setzero_ps(); 4];
            for (pair, [a, b]) in pairs.iter_mut().zip(of.as_chunks::<2>().0) {
                *pair = _mm256_hadd_ps(*a, *b);
            }
            let [a, b, c, d] = pairs;
            halves([_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)])
        }
    }
}
