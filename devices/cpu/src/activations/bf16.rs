//! BF16 activation columns for AMX: rounded, or split into two planes that keep 16 bits of each
//! element.

use super::SLAB;
use crate::activations::slabs::Slabs;
use crate::detect::Bf16Tiles;
use crate::simd::float::Vector;
use std::arch::x86_64::*;

/// Elements of a row or column in a tile.
pub(crate) const STEP: usize = 32;

/// Bytes of a slab of a column in one plane. The slabs of two tiles of columns stay in the L1 cache
/// while panels stream past.
pub(crate) const PLANE_BYTES: usize = SLAB * 2;

/// Maximum number of planes of rows or columns.
pub(crate) const MAX_PLANES: usize = 2;

/// Returns the distance of columns in bytes. It is not a power of two, which would map to few cache
/// sets.
pub(crate) const fn stride(planes: usize) -> usize {
    planes * PLANE_BYTES + 64
}

/// Columns of slabs with the elements' upper bits as BF16, then optionally the remainders as BF16.
/// Zeros pad the elements to a multiple of 32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bf16Slabs {
    token: Bf16Tiles,
    /// Number of planes, one or two.
    planes: usize,
    pub slabs: Slabs,
}

impl Bf16Slabs {
    /// Describes `columns` columns of `k` elements. Returns `None` if the size overflows.
    pub fn new(token: Bf16Tiles, planes: usize, k: usize, columns: usize) -> Option<Self> {
        let slabs = Slabs::new(SLAB, stride(planes), k, columns)?;
        Some(Bf16Slabs {
            token,
            planes,
            slabs,
        })
    }

    /// Splits elements of a column, from element `start`, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be one of the columns that `self` describes, writable and aligned to 64. The
    /// column must have these elements.
    pub unsafe fn split(&self, x: &[f32], start: usize, out: *mut u8) {
        let _ = self.token;
        for (x, to) in self.slabs.pieces(x, start, out) {
            // SAFETY: the token proves that the instructions are available. The caller guarantees
            // the rest.
            unsafe {
                match self.planes {
                    1 => round(x, to),
                    _ => split(x, to),
                }
            }
        }
    }
}

/// Loads 16 elements. Those past the end are zeros.
#[inline(always)]
unsafe fn load(x: &[f32], i: usize) -> __m512 {
    let from = x.as_ptr().wrapping_add(i);
    // SAFETY: lanes past the end are not read.
    unsafe {
        match x.len().saturating_sub(i) {
            count if count < __m512::LANES => __m512::load_part(from, count),
            _ => __m512::load(from),
        }
    }
}

/// Splits elements into their upper bits and the remainders, which follow them.
///
/// # Safety
/// There must be room for both, up to a multiple of 32 elements, and the instructions must be
/// available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split(x: &[f32], to: *mut u8) {
    for i in (0..x.len().next_multiple_of(STEP)).step_by(__m512::LANES) {
        // SAFETY: `i` stays below the number of elements, rounded up to 32, for which there is
        // room. `load` masks everything past the end of `x`.
        unsafe {
            let x = load(x, i);
            let high = _mm512_and_si512(_mm512_castps_si512(x), upper());
            // Elements that are not finite have no remainder.
            let finite = !_mm512_fpclass_ps_mask::<NOT_FINITE>(x);
            let rest = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(high));
            // Rounds half up in magnitude. The value is far from the largest number.
            let rest = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
            _mm256_storeu_si256(to.add(2 * i).cast(), narrow(high));
            _mm256_storeu_si256(to.add(2 * i + PLANE_BYTES).cast(), narrow(rest));
        }
    }
}

/// Rounds elements to the nearest BF16, ties to even.
///
/// # Safety
/// There must be room for a multiple of 32 elements, and the instructions must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn round(x: &[f32], to: *mut u8) {
    for i in (0..x.len().next_multiple_of(STEP)).step_by(__m512::LANES) {
        // SAFETY: `i` stays below the number of elements, rounded up to 32, for which there is
        // room. `load` masks everything past the end of `x`.
        unsafe {
            let bits = _mm512_castps_si512(load(x, i));
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = narrow(_mm512_add_epi32(bits, half));
            _mm256_storeu_si256(to.add(2 * i).cast(), rounded);
        }
    }
}

/// Returns the upper halves of lanes.
#[inline(always)]
unsafe fn narrow(x: __m512i) -> __m256i {
    // SAFETY: callers are compiled for AVX-512.
    unsafe { _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x)) }
}

/// Quiet and signalling NaN, and both infinities, for `vfpclassps`.
pub(crate) const NOT_FINITE: i32 = 0x01 | 0x08 | 0x10 | 0x80;

/// Returns a mask of the bits that an F32 shares with a BF16.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn upper() -> __m512i {
    _mm512_set1_epi32(0xffff_0000_u32 as i32)
}
