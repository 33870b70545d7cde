//! AVX2 registers: 8 numbers, or words of 8 rows; with or without byte products of AVX-VNNI.

use super::float::Vector;
use super::int8::{Simd, functions};
use half::f16;
use std::arch::x86_64::*;

/// Masks. The mask for the first `count` lanes starts at index `8 - count`.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// # Safety
/// Requires AVX2, and `count <= 8`.
#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    // SAFETY: 8 numbers follow from there.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - count).cast()) }
}

/// Returns the sum of all lanes.
///
/// # Safety
/// Requires AVX.
#[inline(always)]
pub(crate) unsafe fn sum(x: __m256) -> f32 {
    // SAFETY: the caller has AVX; no memory is touched.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)))
    }
}

/// Returns the sums of both halves of `a`, then those of `b`.
///
/// # Safety
/// Requires AVX.
#[inline(always)]
pub(crate) unsafe fn halves([a, b]: [__m256; 2]) -> [f32; 8] {
    let mut sums = [0.0; 8];
    // SAFETY: the caller has AVX; the eight numbers that are stored fill `sums`.
    unsafe {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        let high = _mm256_permute2f128_ps::<0x31>(a, b);
        _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(low, high));
    }
    sums
}

/// Returns four bits of each byte, starting with bit `shift`.
///
/// # Safety
/// Requires AVX2, and 8 readable bytes.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> __m256i {
    // SAFETY: the caller has AVX2, and 8 bytes at `from`, which are all that is loaded.
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
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; only registers are
        // touched.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; only registers are
        // touched.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(x.to_bits() as i16)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 numbers are
        // readable at `from`, and the load needs no alignment.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; masked lanes are
        // not read, the first `count` numbers are readable, and `count` is below 8, as `mask`
        // requires.
        unsafe { _mm256_maskload_ps(from, mask(count)) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 numbers of two
        // bytes, which are the 16 bytes loaded, are readable at `from`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 numbers of two
        // bytes, which are the 16 bytes loaded, are readable at `from`.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 bytes are
        // readable at `from`, and no more are loaded.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 bytes are
        // readable at `from`, which is all that `codes` asks for.
        unsafe {
            let numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let fifth = _mm256_srlv_epi32(_mm256_set1_epi32(fifth as i32), numbers);
            let fifth = _mm256_slli_epi32::<4>(_mm256_and_si256(fifth, _mm256_set1_epi32(1)));
            _mm256_cvtepi32_ps(_mm256_or_si256(codes(from, shift), fifth))
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 bytes are
        // readable at `from`, as `codes` requires, and `values` has 16 numbers: 8 from each of 0
        // and 8 on.
        unsafe {
            let codes = codes(from, shift);
            let half =
                |at| _mm256_permutevar8x32_ps(_mm256_loadu_ps(values.as_ptr().add(at)), codes);
            // The sign selects the half.
            let is_upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            _mm256_blendv_ps(half(0), half(8), is_upper)
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; 8 numbers are
        // writable at `to`, and the store needs no alignment.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; masked lanes are
        // not written, the first `count` numbers are writable, and `count` is below 8, as `mask`
        // requires.
        unsafe { _mm256_maskstore_ps(to, mask(count), self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the type is used only where FMA is also available; no memory is touched.
        unsafe { _mm256_fmadd_ps(self, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; only registers are
        // touched.
        unsafe { sum(self) }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: the type is used only where AVX2, FMA and F16C were detected; `of` has eight
        // registers, and the result is a new array.
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

/// Registers of 8 rows.
pub(crate) struct Ymm<const VNNI: bool>;

/// A sum with a part in 16 bits, two for each row.
#[derive(Clone, Copy)]
pub(crate) struct Sum {
    short: __m256i,
    whole: __m256i,
}

impl<const VNNI: bool> Simd for Ymm<VNNI> {
    const LANES: usize = 8;
    const SIGNED: bool = !VNNI;
    const GEMV_COLUMNS: usize = 4;
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
        fn above(bytes: __m256i, limit: i8) -> __m256i { _mm256_cmpgt_epi8(bytes,
            _mm256_set1_epi8(limit)) }
        fn shl(words: __m256i, bits: usize) -> __m256i { _mm256_sll_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn shr(words: __m256i, bits: usize) -> __m256i { _mm256_srl_epi32(words,
            _mm_cvtsi32_si128(bits as i32)) }
        fn byte(words: __m256i, i: usize) -> __m256i {
            // Zeros where the highest bit is set. Shifts by a number in a register are slower.
            let number = _mm256_set1_epi32(0x8080_8000_u32 as i32 + i as i32);
            let first = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 4, 8, 12));
            _mm256_shuffle_epi8(words, _mm256_add_epi32(first, number))
        }
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
            // Codes of columns are above -128, so their sign can be changed. 2 * 128 * 127 fits
            // into 16 bits.
            let products = if full {
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
            } else {
                _mm256_maddubs_epi16(codes, x)
            };
            sum.short = _mm256_add_epi16(sum.short, products);
        }
        fn dot_here(sum: &mut Sum, codes: __m256i, x: __m256i, full: bool) {
            if VNNI || full {
                Self::dot(sum, codes, x, full);
            } else {
                add_products(&mut sum.short, codes, x);
            }
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

/// Adds products of bytes, two at a time, to 16-bit sums.
#[inline]
#[target_feature(enable = "avx2")]
fn add_products(sums: &mut __m256i, codes: __m256i, x: __m256i) {
    // SAFETY: the function requires AVX2, and the instructions only change these registers.
    unsafe {
        std::arch::asm!(
            "vpmaddubsw {products}, {codes}, {x}",
            "vpaddw {sums}, {sums}, {products}",
            products = out(ymm_reg) _,
            codes = in(ymm_reg) codes,
            x = in(ymm_reg) x,
            sums = inout(ymm_reg) *sums,
            options(nomem, nostack, preserves_flags)
        )
    }
}
