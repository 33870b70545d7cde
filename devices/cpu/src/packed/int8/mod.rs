//! Products of packed rows with columns of 8 bits.
//!
//! - [`gemv`]: few columns. Codes are multiplied directly after loading.
//! - [`gemm`]: more columns. A slab of a panel, 32 rows of up to 256 elements, is decoded to bytes
//!   in the L1 cache. The micro-kernel multiplies it with all columns, a few registers of rows and
//!   columns at a time.
//! - `amx`: more columns with AMX, tile by tile.
//!
//! Products of a slab are added to sums in memory.
//!
//! Each element of a result is summed in the same order, whatever the number of rows and columns,
//! the method and the instruction set.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod gemm;
mod gemv;

use super::Sum;
use super::decode::{ColumnScales, Format, PanelSlab, Scheme, Slab};
use super::formats::for_format;
use super::tile::equal_part;
use crate::activations::SLAB;
use crate::activations::int8::ColumnSpec;
use crate::detect::Isa;
use crate::product::{Column, Panel, PanelFn};
use crate::simd;
use crate::simd::int8::Simd;
use crate::simd::math::ROUND;
use samite_core::DType;
use std::array::from_fn;

use gemm::Strip;

/// Returns the product for a type and its requirements for columns.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
    for_format!(dtype, F => compiled::<F>(isa))
}

/// Returns the product of portable code.
#[cfg(test)]
pub(crate) fn portable_product(dtype: DType) -> Option<PanelFn> {
    for_format!(dtype, F => product_of::<F, portable::Instructions>().0)
}

/// Returns the product for an instruction set, whose token proves that the function may be called.
fn compiled<F: Format>(isa: Isa) -> (PanelFn, ColumnSpec) {
    match isa {
        // With shorter groups, tiles are not faster.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.tiles().is_some() && F::GROUP == 32 => {
            (amx::multiply::<F>, F::COLUMNS)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.vnni() => product_of::<F, avx512_vnni::Instructions>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => product_of::<F, avx512::Instructions>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(token) if token.vnni() => product_of::<F, avx_vnni::Instructions>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => product_of::<F, avx2::Instructions>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(token) if token.i8mm() => product_of::<F, i8mm::Instructions>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(_) => product_of::<F, dotprod::Instructions>(),
        _ => product_of::<F, base::Instructions>(),
    }
}

/// Returns the product for an instruction set.
fn product_of<F: Format, L: Level>() -> (PanelFn, ColumnSpec) {
    (multiply::<F, L>, F::COLUMNS)
}

/// Instruction set that products are compiled for. Its functions are not inlined, so that each is
/// compiled once.
///
/// # Safety
/// The instruction set must be available. The functions of the same name document the other
/// requirements.
pub(crate) trait Level {
    type Simd: Simd;
    /// Scheme that micro-kernels are compiled for: that of a format, or its [wide](Scheme::Wide)
    /// one.
    type Scheme<S: Scheme>: Scheme;
    /// Number of row registers and of columns that the micro-kernel multiplies at a time.
    const ROWS: usize;
    const COLUMNS: usize;

    unsafe fn gemv<F: Format, const C: usize>(panel: &Panel, columns: &[Column; C]);
    unsafe fn gemm<F: Format>(panel: &Panel, columns: &[Column]);
    unsafe fn decode<F: Format>(part: &PanelSlab, slab: *mut Slab);
    unsafe fn strip<S: Scheme>(strip: &Strip, columns: &[Column], results: *mut Sum);
}

/// Compiles products for one instruction set, with the given numbers of row registers and columns
/// per tile.
macro_rules! compile {
    ($name:ident, $simd:ty, $scheme:ident,
        $rows:literal x $columns:literal $(, $features:literal)?) => {
        pub(crate) mod $name {
            use super::*;

            pub(crate) struct Instructions;

            impl Level for Instructions {
                type Simd = $simd;
                type Scheme<S: Scheme> = scheme!(S, $scheme);
                const ROWS: usize = $rows * <$simd as Simd>::LANES;
                const COLUMNS: usize = $columns;

                #[inline(never)]
                $(#[target_feature(enable = $features)])?
                unsafe fn gemv<F: Format, const C: usize>(panel: &Panel, columns: &[Column; C]) {
                    // SAFETY: the features above are those of the registers, and only a detected
                    // instruction set leads here; the caller of `gemv` has the same obligations.
                    unsafe { super::gemv::multiply::<F, $simd, C>(panel, columns) }
                }

                #[inline(never)]
                $(#[target_feature(enable = $features)])?
                unsafe fn gemm<F: Format>(panel: &Panel, columns: &[Column]) {
                    // SAFETY: the features above are those of the registers, and only a detected
                    // instruction set leads here; panels and columns are as `gemm` requires.
                    unsafe { super::gemm::multiply::<F, Self>(panel, columns) }
                }

                #[inline(never)]
                $(#[target_feature(enable = $features)])?
                unsafe fn decode<F: Format>(part: &PanelSlab, slab: *mut Slab) {
                    // SAFETY: the features above are those of the registers. The part of the panel
                    // is there, and `slab` writable, as the caller guarantees.
                    unsafe { part.decode::<F, $simd>(slab) }
                }

                #[inline(never)]
                $(#[target_feature(enable = $features)])?
                unsafe fn strip<S: Scheme>(strip: &Strip, columns: &[Column], results: *mut Sum) {
                    // A copy, so that its fields stay in registers.
                    let strip = *strip;
                    // SAFETY: the features above are those of the registers. The slab is decoded,
                    // and columns and their sums are there, as the caller guarantees.
                    unsafe { strip.all::<S, $simd, $rows, $columns>(columns, results) }
                }
            }
        }
    };
}

/// Selects the scheme that micro-kernels are compiled for.
macro_rules! scheme {
    ($scheme:ident, narrow) => {
        $scheme
    };
    ($scheme:ident, wide) => {
        $scheme::Wide
    };
}

#[cfg(target_arch = "x86_64")]
compile!(avx512_vnni, simd::avx512::Zmm<true>, wide, 2 x 6,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, simd::avx512::Zmm<false>, narrow, 2 x 4,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx_vnni, simd::avx2::Ymm<true>, wide, 2 x 4, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
compile!(avx2, simd::avx2::Ymm<false>, narrow, 2 x 4, "avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(i8mm, simd::neon::Neon<true, true>, wide, 4 x 4, "neon,dotprod,i8mm");
#[cfg(target_arch = "aarch64")]
compile!(dotprod, simd::neon::Neon<true, false>, wide, 4 x 4, "neon,dotprod");
#[cfg(target_arch = "aarch64")]
compile!(base, simd::neon::Neon<false, false>, narrow, 2 x 4);
#[cfg(target_arch = "x86_64")]
compile!(base, simd::sse2::Xmm, wide, 2 x 3);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use portable as base;
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile!(portable, simd::generic_int8::Portable, wide, 1 x 2);

/// Returns the maximum number of columns whose codes are multiplied directly after loading. All
/// sums must stay in registers, and codes of five bits also need some.
#[inline(always)]
const fn gemv_columns<F: Format, V: Simd>() -> usize {
    match F::LARGEST {
        _ if F::MIXED > 2 => 1,
        31 => V::GEMV_COLUMNS / 2,
        _ => V::GEMV_COLUMNS,
    }
}

/// Returns whether sums of products start with the contribution of the codes' offset.
#[inline(always)]
const fn is_offset<S: Scheme, V: Simd>() -> bool {
    !(S::MINIMUMS || S::FULL && V::SIGNED)
}

/// Returns a group's products of codes, times the scales of rows, rounded once. For columns with a
/// scale for each group.
///
/// # Safety
/// The instructions must be available.
#[inline(always)]
unsafe fn scaled<S: Scheme, V: Simd>(products: V::Words, scales: V::Floats) -> V::Floats {
    // SAFETY: only registers are touched, and callers are compiled for the instructions of `V`.
    unsafe {
        if S::Scales::BITS && is_offset::<S, V>() {
            // They are the bits of floats to which `ROUND` was added. Scales have half precision,
            // so the subtrahend is exact.
            let offset = V::mul(scales, V::splat_float(-ROUND));
            V::mul_add(V::from_bits(products), scales, offset)
        } else {
            V::mul(V::floats(products), scales)
        }
    }
}

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says.
pub(crate) unsafe fn multiply<F: Format, L: Level>(panel: &Panel, columns: &[Column]) {
    // SAFETY: panels and columns satisfy `PanelFn`, and the instructions of `L` are available.
    // `gemv` gets as many columns as it is compiled for, with the last one repeated if there are
    // fewer, and `gemm` at most `COLUMNS`.
    unsafe {
        match *columns {
            [] => return,
            [a] => return L::gemv::<F, 1>(panel, &[a]),
            _ => {}
        }
        // Values that are computed twice are stored twice in the same place.
        let last = columns.len() - 1;
        if const { F::BLOCK == SLAB || gemv_columns::<F, L::Simd>() >= 2 } && last == 1 {
            return L::gemv::<F, 2>(panel, &[columns[0], columns[1]]);
        }
        if const { gemv_columns::<F, L::Simd>() > 2 } && last < 4 {
            return L::gemv::<F, 4>(panel, &from_fn(|c| columns[c.min(last)]));
        }
        if const { gemv_columns::<F, L::Simd>() > 4 } && last < 8 {
            return L::gemv::<F, 8>(panel, &from_fn(|c| columns[c.min(last)]));
        }
        const { assert!(gemm::COLUMNS.is_multiple_of(L::COLUMNS)) };
        for columns in columns.chunks(equal_part(columns.len(), gemm::COLUMNS, L::COLUMNS)) {
            L::gemm::<F>(panel, columns);
        }
    }
}

/// Returns the initial sums of a slab: those of the previous slabs at `from`, unless they are added
/// in the end.
///
/// # Safety
/// The sums of as many rows as `V` has lanes must be readable at `from`, and the instructions of
/// `V` must be available.
#[inline(always)]
unsafe fn first_sums<S: Scheme, V: Simd>(from: *const f32) -> V::Floats {
    // SAFETY: the sums of as many rows as `V` has lanes are at `from`.
    unsafe {
        if S::SLAB_SCALE {
            V::splat_float(0.0)
        } else {
            V::load_floats(from)
        }
    }
}

/// Stores sums of a slab that started with [`first_sums`], in the same place. `x` is the column's
/// slab.
///
/// # Safety
/// A slab of a column, aligned to 4, must be readable at `x`. The sums of as many rows as `V` has
/// lanes must be writable at `to`, and the instructions of `V` must be available.
#[inline(always)]
unsafe fn store_sums<S: Scheme, V: Simd>(mut sums: V::Floats, x: *const u8, to: *mut f32) {
    // SAFETY: a column's slab has its scale after `SLAB` codes, aligned to 4, and the sums of as
    // many rows as `V` has lanes are at `to`.
    unsafe {
        if S::SLAB_SCALE {
            let scale = V::splat_float(x.add(SLAB).cast::<f32>().read());
            sums = V::mul_add(sums, scale, V::load_floats(to));
        }
        V::store_floats(sums, to);
    }
}
