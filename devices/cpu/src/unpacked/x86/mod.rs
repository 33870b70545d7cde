//! Products of quantized rows in the file's layout, for AVX2 and AVX-512.
//!
//! - This file selects the function, and contains the AVX2 micro-kernels, which are also used at
//!   other levels for two to five columns.
//! - [`gemv_avx512`], [`gemm_avx512`]: one column, and six or more, with VNNI.
//! - [`legacy`], [`k_quants`], [`codebook`], [`ternary`], [`bits`], [`grids`]: decoding of each
//!   family of types. [`decode`]: their common parts.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

mod bits;
mod codebook;
mod decode;
mod gemm_avx512;
mod gemv_avx512;
mod grids;
mod k_quants;
mod legacy;
mod ternary;

use crate::activations::int8_blocks::Int8Blocks;
use crate::detect::Isa;
use crate::product::{Column, Panel, PanelFn};
use crate::simd::avx2::sum;
use decode::{Block32, GroupedBlock};
use gemm_avx512::{DecodeGroups, gemm};
use gemv_avx512::{RowDot, gemv};
use samite_core::DType;
use samite_quant::blocks::*;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Minimum number of columns for which rows are unpacked once for all of them.
const GEMM_COLUMNS: usize = 6;

/// Multiplication of bytes.
pub(crate) trait ByteDot {
    /// Returns the sums of four products of unsigned bytes, at most 127, with signed ones.
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i;
}

pub(crate) struct Avx2;
pub(crate) struct Vnni;

impl ByteDot for Avx2 {
    #[inline(always)]
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: called only if AVX2 is available. 2 * 127 * 128 fits into 16 bits.
        unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1)) }
    }
}

impl ByteDot for Vnni {
    #[inline(always)]
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: called only if AVX-512 VNNI is available.
        unsafe { _mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned, signed) }
    }
}

/// Returns the sums of four products of signed bytes.
#[inline(always)]
unsafe fn dot_signed<B: ByteDot>(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: callers are compiled for AVX2 and what `B` needs; only registers are used. Codes are
    // above -128 on one side, so no sign is lost.
    unsafe { B::dot(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)) }
}

/// Addresses of one column's parts.
#[derive(Clone, Copy)]
pub(crate) struct ColumnParts {
    pub codes: *const u8,
    pub scales: *const f32,
    pub sums: *const f32,
    pub half_sums: *const f32,
}

#[inline(always)]
pub(crate) unsafe fn parts(column: &Column, int8: &Int8Blocks) -> ColumnParts {
    let at = |offset| column.x.wrapping_add(offset);
    ColumnParts {
        codes: column.x,
        scales: at(int8.scales).cast(),
        sums: at(int8.sums).cast(),
        half_sums: at(int8.half_sums).cast(),
    }
}

/// Product of `R` rows with `C` columns.
pub(crate) trait MicroKernel {
    unsafe fn tile<B: ByteDot, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        int8: &Int8Blocks,
    );
}

pub(crate) struct Blocks32<T>(PhantomData<T>);
pub(crate) struct GroupedBlocks<T>(PhantomData<T>);

impl<T: Block32> MicroKernel for Blocks32<T> {
    #[inline(always)]
    unsafe fn tile<B: ByteDot, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        int8: &Int8Blocks,
    ) {
        // SAFETY: the rows and columns exist, by the contract of `PanelFn` and the loops in
        // `panel`.
        unsafe {
            let mut weights = [std::ptr::null::<T>(); R];
            for r in 0..R {
                weights[r] = panel.weights.wrapping_add((row + r) * panel.stride).cast();
            }
            let mut x = [parts(columns.get_unchecked(0), int8); C];
            for c in 1..C {
                x[c] = parts(columns.get_unchecked(c), int8);
            }
            let mut sums = [[_mm256_setzero_ps(); R]; C];
            let mut offsets = [[0.0f32; R]; C];
            for block in 0..panel.k / 32 {
                for r in 0..R {
                    let w = (*weights[r].add(block)).codes();
                    for c in 0..C {
                        let x = &x[c];
                        let q = _mm256_loadu_si256(x.codes.add(block * 32).cast());
                        let products = if T::SIGNED {
                            dot_signed::<B>(w.codes, q)
                        } else {
                            B::dot(w.codes, q)
                        };
                        let scale = _mm256_set1_ps(w.scale * *x.scales.add(block));
                        sums[c][r] =
                            _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums[c][r]);
                        if !T::SIGNED {
                            offsets[c][r] += w.offset * *x.sums.add(block);
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    *columns.get_unchecked(c).out.add(panel.first + row + r) =
                        sum(sums[c][r]) + offsets[c][r];
                }
            }
        }
    }
}

impl<T: GroupedBlock> MicroKernel for GroupedBlocks<T> {
    #[inline(always)]
    unsafe fn tile<B: ByteDot, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        int8: &Int8Blocks,
    ) {
        // SAFETY: the rows and columns exist, by the contract of `PanelFn` and the loops in
        // `panel`. Each row has this many blocks, and columns have all their groups.
        unsafe {
            let mut weights = [std::ptr::null::<T>(); R];
            for r in 0..R {
                weights[r] = panel.weights.wrapping_add((row + r) * panel.stride).cast();
            }
            let mut x = [parts(columns.get_unchecked(0), int8); C];
            for c in 1..C {
                x[c] = parts(columns.get_unchecked(c), int8);
            }
            let mut sums = [[_mm256_setzero_ps(); R]; C];
            for block in 0..panel.k / T::LEN {
                for r in 0..R {
                    let w = &*weights[r].add(block);
                    let unpacked = w.unpack();
                    for group in 0..T::GROUPS {
                        let codes = w.codes(&unpacked, group);
                        let scales = T::scales(&unpacked, group);
                        for c in 0..C {
                            let x = &x[c];
                            let at = block * T::GROUPS + group;
                            let q = _mm256_loadu_si256(x.codes.add(at * 32).cast());
                            let products = if T::SIGNED {
                                dot_signed::<B>(codes, q)
                            } else {
                                B::dot(codes, q)
                            };
                            let scale =
                                _mm256_mul_ps(scales, _mm256_broadcast_ss(&*x.scales.add(at)));
                            sums[c][r] =
                                _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums[c][r]);
                        }
                    }
                    if !T::SIGNED {
                        for c in 0..C {
                            let x = &x[c];
                            let offsets = T::offsets(
                                &unpacked,
                                x.sums.add(block * 8),
                                x.half_sums.add(block * 16),
                            );
                            sums[c][r] = _mm256_add_ps(sums[c][r], offsets);
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    *columns.get_unchecked(c).out.add(panel.first + row + r) = sum(sums[c][r]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn strip<T: MicroKernel, B: ByteDot, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
    int8: &Int8Blocks,
) {
    let mut row = 0;
    // SAFETY: a tile starts only where `R` rows, or one, are left in the panel, and all columns
    // exist.
    unsafe {
        while row + R <= panel.rows {
            T::tile::<B, R, C>(panel, row, columns, int8);
            row += R;
        }
        if const { R > 1 } {
            while row < panel.rows {
                T::tile::<B, 1, C>(panel, row, columns, int8);
                row += 1;
            }
        }
    }
}

#[inline(always)]
unsafe fn panel<T: MicroKernel, B: ByteDot>(panel: &Panel, columns: &[Column]) {
    let Some(int8) = Int8Blocks::new(panel.k) else {
        return; // such columns could not be allocated
    };
    let (groups, rest) = columns.as_chunks::<4>();
    // SAFETY: `strip` asks for the panel and for columns of its length, which the callers of a
    // `PanelFn` provide; `int8` describes them, as it depends on `k` only.
    unsafe {
        for group in groups {
            strip::<T, B, 1, 4>(panel, group, &int8);
        }
        for column in rest.as_chunks::<1>().0 {
            strip::<T, B, 4, 1>(panel, column, &int8);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: MicroKernel>(rows: &Panel, columns: &[Column]) {
    // SAFETY: `compiled` gives this function out only with a token for AVX2 or more; rows and
    // columns are as `PanelFn` requires.
    unsafe { panel::<T, Avx2>(rows, columns) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn vnni<T: MicroKernel + DecodeGroups + RowDot>(rows: &Panel, columns: &[Column]) {
    // SAFETY: `compiled` gives this function out only with a token for AVX-512 VNNI; rows and
    // columns are as `PanelFn` requires.
    unsafe {
        if columns.len() >= GEMM_COLUMNS {
            return gemm::<T>(rows, columns);
        }
        let Some(int8) = Int8Blocks::new(rows.k) else {
            return; // such columns could not be allocated
        };
        let (groups, rest) = columns.as_chunks::<4>();
        for group in groups {
            strip::<T, Vnni, 1, 4>(rows, group, &int8);
        }
        for column in rest {
            gemv::<T>(rows, column, &int8);
        }
    }
}

fn compiled<T: MicroKernel + DecodeGroups + RowDot>(isa: Isa) -> Option<PanelFn> {
    match isa {
        Isa::Avx512(token) if token.vnni() => Some(vnni::<T>),
        Isa::Avx512(_) | Isa::Avx2(_) => Some(avx2::<T>),
        _ => None,
    }
}

/// Returns the product for weights of `dtype` with columns quantized to 8 bits, if there is one.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    match dtype {
        DType::Q4_0 => compiled::<Blocks32<BlockQ4_0>>(isa),
        DType::Q4_1 => compiled::<Blocks32<BlockQ4_1>>(isa),
        DType::Q5_0 => compiled::<Blocks32<BlockQ5_0>>(isa),
        DType::Q5_1 => compiled::<Blocks32<BlockQ5_1>>(isa),
        DType::Q8_0 => compiled::<Blocks32<BlockQ8_0>>(isa),
        DType::IQ4_NL => compiled::<Blocks32<BlockIq4Nl>>(isa),
        DType::MXFP4 => compiled::<Blocks32<BlockMxfp4>>(isa),
        DType::Q2_K => compiled::<GroupedBlocks<BlockQ2K>>(isa),
        DType::Q3_K => compiled::<GroupedBlocks<BlockQ3K>>(isa),
        DType::Q4_K => compiled::<GroupedBlocks<BlockQ4K>>(isa),
        DType::Q5_K => compiled::<GroupedBlocks<BlockQ5K>>(isa),
        DType::Q6_K => compiled::<GroupedBlocks<BlockQ6K>>(isa),
        DType::IQ4_XS => compiled::<GroupedBlocks<BlockIq4Xs>>(isa),
        DType::TQ1_0 => compiled::<GroupedBlocks<BlockTq1_0>>(isa),
        DType::TQ2_0 => compiled::<GroupedBlocks<BlockTq2_0>>(isa),
        DType::IQ1_S => compiled::<GroupedBlocks<BlockIq1S>>(isa),
        DType::IQ1_M => compiled::<GroupedBlocks<BlockIq1M>>(isa),
        DType::IQ2_XXS => compiled::<GroupedBlocks<BlockIq2Xxs>>(isa),
        DType::IQ2_XS => compiled::<GroupedBlocks<BlockIq2Xs>>(isa),
        DType::IQ2_S => compiled::<GroupedBlocks<BlockIq2S>>(isa),
        DType::IQ3_XXS => compiled::<GroupedBlocks<BlockIq3Xxs>>(isa),
        DType::IQ3_S => compiled::<GroupedBlocks<BlockIq3S>>(isa),
        DType::NVFP4 => compiled::<GroupedBlocks<BlockNvfp4>>(isa),
        DType::Q1_0 => compiled::<GroupedBlocks<BlockQ1_0>>(isa),
        DType::Q2_0 => compiled::<GroupedBlocks<BlockQ2_0>>(isa),
        _ => None,
    }
}
