//! Products of quantized rows with one column on AVX-512 VNNI: 64 elements at a time.
//!
//! Rows are read in sequence, which hardware prefetchers follow best. Several interleaved rows are
//! streams that end after some thousand bytes, before the prefetcher has found them.

use super::decode::{Block32, GroupedBlock};
use super::{Blocks32, ColumnParts, GroupedBlocks, parts};
use crate::activations::int8_blocks::Int8Blocks;
use crate::product::{Column, Panel};
use std::arch::x86_64::*;

/// Formats for which 64 elements can be multiplied at a time.
pub(crate) trait RowDot {
    /// Returns the product of the row of `groups` groups of 32 elements at `row` with a column.
    ///
    /// # Safety
    /// The row and the column must exist, and AVX-512 with VNNI must be available.
    unsafe fn product(row: *const u8, x: &ColumnParts, groups: usize) -> f32;
}

/// Multiplies rows with a column.
///
/// # Safety
/// As [`PanelFn`](crate::product::PanelFn), and AVX-512 with VNNI must be available.
#[inline(always)]
pub(crate) unsafe fn gemv<T: RowDot>(panel: &Panel, column: &Column, int8: &Int8Blocks) {
    // SAFETY: the panel has this many rows, each of `k` elements, and the column's results have
    // room for a product of each from `first`.
    unsafe {
        let x = parts(column, int8);
        let out = column.out.add(panel.first);
        for row in 0..panel.rows {
            let weights = panel.weights.wrapping_add(row * panel.stride);
            *out.add(row) = T::product(weights, &x, panel.k / 32);
        }
    }
}

/// Combines two registers.
#[inline(always)]
unsafe fn both([a, b]: [__m256i; 2]) -> __m512i {
    // SAFETY: callers are compiled for AVX-512, here and below.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b) }
}

/// Returns the sums of four products of codes with those of a column.
#[inline(always)]
unsafe fn dot<const SIGNED: bool>(codes: __m512i, x: *const u8) -> __m512 {
    // SAFETY: the caller has 64 codes at `x`.
    unsafe {
        let x = _mm512_loadu_si512(x.cast());
        let zero = _mm512_setzero_si512();
        let sums = if SIGNED {
            // Codes of weights are above -128, so no sign is lost.
            let negative = _mm512_movepi8_mask(codes);
            let x = _mm512_mask_sub_epi8(x, negative, zero, x);
            _mm512_dpbusd_epi32(zero, _mm512_abs_epi8(codes), x)
        } else {
            _mm512_dpbusd_epi32(zero, codes, x)
        };
        _mm512_cvtepi32_ps(sums)
    }
}

/// Broadcasts each of the two lowest numbers to one half of a register.
#[inline(always)]
unsafe fn spread(two: __m128) -> __m512 {
    // SAFETY: callers are compiled for AVX-512; only registers are used.
    unsafe {
        let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        _mm512_permutexvar_ps(halves, _mm512_castps128_ps512(two))
    }
}

/// Loads two numbers.
#[inline(always)]
unsafe fn two(at: *const f32) -> __m128 {
    // SAFETY: the caller has two numbers there.
    unsafe { _mm_castpd_ps(_mm_load_sd(at.cast())) }
}

impl<T: Block32> RowDot for Blocks32<T> {
    #[inline(always)]
    unsafe fn product(row: *const u8, x: &ColumnParts, groups: usize) -> f32 {
        let row = row.cast::<T>();
        // SAFETY: the row has `groups` blocks, and the column 32 codes, a scale and a sum for each.
        // Pairs end at or before `groups`; of an odd last group only 32 codes are read. Callers are
        // compiled for AVX-512 with VNNI.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); 2];
            let mut offsets = _mm_setzero_ps();
            for pair in 0..groups / 2 {
                // Not in a closure, which would be compiled without these instructions.
                let a = (*row.add(2 * pair)).codes();
                let b = (*row.add(2 * pair + 1)).codes();
                let scales = _mm_unpacklo_ps(_mm_set_ss(a.scale), _mm_set_ss(b.scale));
                let scales = _mm_mul_ps(scales, two(x.scales.add(2 * pair)));
                let codes = both([a.codes, b.codes]);
                let products = if T::SIGNED {
                    dot::<true>(codes, x.codes.add(64 * pair))
                } else {
                    let two_offsets = _mm_unpacklo_ps(_mm_set_ss(a.offset), _mm_set_ss(b.offset));
                    offsets = _mm_fmadd_ps(two_offsets, two(x.sums.add(2 * pair)), offsets);
                    dot::<false>(codes, x.codes.add(64 * pair))
                };
                let sum = &mut sums[pair % 2];
                *sum = _mm512_fmadd_ps(products, spread(scales), *sum);
            }
            let mut rest = 0.0;
            if !groups.is_multiple_of(2) {
                let last = groups - 1;
                let block = (*row.add(last)).codes();
                let codes = _mm512_castsi256_si512(block.codes);
                let codes = _mm512_maskz_mov_epi64(0x0f, codes);
                // The second half repeats codes of the column, but does not contribute.
                let behind = _mm256_loadu_si256(x.codes.add(32 * last).cast());
                let mut column = [0u8; 64];
                _mm256_storeu_si256(column.as_mut_ptr().cast(), behind);
                let products = if T::SIGNED {
                    dot::<true>(codes, column.as_ptr())
                } else {
                    rest = block.offset * *x.sums.add(last);
                    dot::<false>(codes, column.as_ptr())
                };
                let scale = _mm512_set1_ps(block.scale * *x.scales.add(last));
                sums[0] = _mm512_fmadd_ps(products, scale, sums[0]);
            }
            let offsets = _mm_cvtss_f32(offsets) + _mm_cvtss_f32(_mm_movehdup_ps(offsets));
            _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])) + offsets + rest
        }
    }
}

impl<T: GroupedBlock> RowDot for GroupedBlocks<T> {
    #[inline(always)]
    unsafe fn product(row: *const u8, x: &ColumnParts, groups: usize) -> f32 {
        // SAFETY: the row has blocks of `groups` groups, and the column 32 codes, a scale, a sum
        // and two half sums for each group of these. Callers are compiled for AVX-512 with VNNI.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); 2];
            let mut offsets = _mm256_setzero_ps();
            for block in 0..groups / T::GROUPS {
                let weights = &*row.cast::<T>().add(block);
                let unpacked = weights.unpack();
                for pair in 0..T::GROUPS / 2 {
                    let at = block * T::GROUPS + 2 * pair;
                    // Not in closures, as above.
                    let codes = [
                        weights.codes(&unpacked, 2 * pair),
                        weights.codes(&unpacked, 2 * pair + 1),
                    ];
                    let a = T::scales(&unpacked, 2 * pair);
                    let b = T::scales(&unpacked, 2 * pair + 1);
                    let scales = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(a), b);
                    let scales = _mm512_mul_ps(scales, spread(two(x.scales.add(at))));
                    let products = if T::SIGNED {
                        dot::<true>(both(codes), x.codes.add(32 * at))
                    } else {
                        dot::<false>(both(codes), x.codes.add(32 * at))
                    };
                    let sum = &mut sums[pair % 2];
                    *sum = _mm512_fmadd_ps(products, scales, *sum);
                }
                if !T::SIGNED {
                    let sums = x.sums.add(block * 8);
                    let added = T::offsets(&unpacked, sums, x.half_sums.add(block * 16));
                    offsets = _mm256_add_ps(offsets, added);
                }
            }
            let sums = _mm512_add_ps(sums[0], sums[1]);
            _mm512_reduce_add_ps(_mm512_add_ps(sums, _mm512_zextps256_ps512(offsets)))
        }
    }
}
