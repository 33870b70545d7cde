//! Products of packed rows with columns of 8 bits.
//!
//! With few columns, codes are multiplied as they come out of memory. Otherwise, a slab of a panel, 32 rows of up to 256
//! elements, is unpacked to bytes in the first-level cache and multiplied with all columns: a few registers of rows and
//! columns at a time, as many as keep the multipliers busy, or [tile by tile](super::tiles) where the processor has such.
//! Products of a slab are added to sums in memory.
//!
//! Each element of a result is summed in one order whatever the number of rows and columns is, whichever of these ways it
//! takes, and whatever the instruction set is.
//!
//! # Crossed products
//!
//! Two products cost one multiplication (Winograd, "A New Algorithm for Inner Product", 1968): `(w1 + x2) * (w2 + x1)` is
//! `w1 * x1 + w2 * x2 + w1 * w2 + x1 * x2`, and sums of the last two are the same for all columns or all rows, so that they are computed once
//! and subtracted. What takes the place of a multiplication is two additions. Some processors (Zen 4
//! and 5) add bytes with four units, of which two multiply: if half of the products are crossed, all four have work. Others multiply and add
//! with the same two units. So [what is faster](crate::tune) is measured. Numbers are whole, and results are the same.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod gemm;
mod gemv;

use super::decode::{Format, column_spec};
use super::equal_part;
use super::formats::for_format;
use crate::activations::SLAB;
use crate::activations::int8::{ColumnSpec, Sums};
use crate::detect::Isa;
use crate::product::{Column, Panel, PanelFn};
use crate::simd;
use crate::simd::int8::Simd;
use crate::simd::math::ROUND;
use samite_core::DType;
use std::array::from_fn;

pub(crate) use gemm::{ASKING, Results, are_side_by_side, side_by_side};

/// The product for a type and what it needs columns to be.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
    // Others have none that are crossed.
    #[cfg(target_arch = "x86_64")]
    if isa.is_crossed()
        && let Some(product) = for_format!(dtype, F => avx512_vnni_crossed::product::<F>();
            Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, MXFP4 Mxfp4)
    {
        return Some(product);
    }
    for_format!(dtype, F => compiled::<F>(isa))
}

/// The product of portable code.
#[cfg(test)]
pub(crate) fn portable_product(dtype: DType) -> Option<PanelFn> {
    for_format!(dtype, F => portable::product::<F>().0)
}

/// The product for an instruction set, whose token proves that the function may be called.
fn compiled<F: Format>(isa: Isa) -> (PanelFn, ColumnSpec) {
    match isa {
        // With shorter groups, tiles are not faster.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.tiles().is_some() && F::GROUP == 32 => {
            (amx::multiply::<F>, F::COLUMNS)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.vnni() => avx512_vnni::product::<F>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => avx512::product::<F>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(token) if token.vnni() => avx_vnni::product::<F>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => avx2::product::<F>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(token) if token.i8mm() => i8mm::product::<F>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(_) => dotprod::product::<F>(),
        _ => base::product::<F>(),
    }
}

/// Compiles the product for one instruction set: so many registers of rows with so many columns at a time.
macro_rules! compile {
    ($name:ident, $simd:ty, $rows:literal x $columns:literal $(, $features:literal)?) => {
        pub(crate) mod $name {
            use super::*;

            pub(crate) fn product<F: Format>() -> (PanelFn, ColumnSpec) {
                (multiply::<F>, column_spec::<F, $simd>())
            }

            /// Multiplies whole panels.
            ///
            /// # Safety
            /// As [`PanelFn`], with panels as [`PackedProduct`](crate::packed::PackedProduct) says.
            $(#[target_feature(enable = $features)])?
            pub unsafe fn multiply<F: Format>(panel: &Panel, columns: &[Column]) {
                // SAFETY: the caller's contract.
                unsafe { super::multiply::<F, $simd, $rows, $columns>(panel, columns) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
compile!(avx512_vnni, simd::avx512::Zmm<true>, 2 x 6, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512_vnni_crossed, simd::avx512::Zmm<true, true>, 2 x 6, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, simd::avx512::Zmm<false>, 2 x 4, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx_vnni, simd::avx2::Ymm<true>, 2 x 4, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
compile!(avx2, simd::avx2::Ymm<false>, 2 x 4, "avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(i8mm, simd::neon::Neon<true, true>, 4 x 4, "neon,dotprod,i8mm");
#[cfg(target_arch = "aarch64")]
compile!(dotprod, simd::neon::Neon<true, false>, 4 x 4, "neon,dotprod");
#[cfg(target_arch = "aarch64")]
compile!(base, simd::neon::Neon<false, false>, 2 x 4);
#[cfg(target_arch = "x86_64")]
compile!(base, simd::sse2::Xmm, 2 x 3);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use portable as base;
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile!(portable, simd::generic_int8::Portable, 1 x 2);

/// Whether columns have one scale for a whole slab, not one for each group. Then the sums of a slab are multiplied with it before they
/// are added to those of the slabs before.
#[inline(always)]
pub(crate) const fn has_slab_scale<F: Format>() -> bool {
    F::SCALED == SLAB
}

/// Whether so many columns are multiplied with codes as they come out of memory: all sums must stay in registers, of
/// which codes of five bits need some, too.
#[inline(always)]
const fn is_gemv<F: Format, V: Simd>(columns: usize) -> bool {
    let most = match F::LARGEST {
        31 => V::GEMV_COLUMNS / 2,
        _ => V::GEMV_COLUMNS,
    };
    columns <= most && F::MIXED <= 2
}

/// Whether sums of products start with what the offset of codes adds.
#[inline(always)]
const fn is_offset<F: Format, V: Simd>() -> bool {
    matches!(F::SUMS, Sums::Offset(_)) && !(F::FULL && V::SIGNED)
}

/// A group's products of codes, times the scales of rows, rounded once: for columns with a scale for each group.
///
/// # Safety
/// The instructions must be there.
#[inline(always)]
unsafe fn scaled<F: Format, V: Simd>(products: V::Words, scales: V::Floats) -> V::Floats {
    // SAFETY: the caller's contract.
    unsafe {
        if is_offset::<F, V>() {
            // They are the bits of numbers that `ROUND` was added to. Scales are of half precision, so that what is subtracted is exact.
            let offset = V::mul(scales, V::splat_float(-ROUND));
            V::mul_add(V::from_bits(products), scales, offset)
        } else {
            V::mul(V::floats(products), scales)
        }
    }
}

/// Multiplies whole panels, `R` registers of rows with up to `C` columns at a time.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says.
#[inline(always)]
unsafe fn multiply<F: Format, V: Simd, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    // SAFETY: the caller's contract.
    unsafe {
        match *columns {
            [] => {}
            [a] => gemv::multiply::<F, V, 1>(panel, &[a]),
            [a, b] if F::DTYPE.block_len() == SLAB || is_gemv::<F, V>(2) => {
                gemv::multiply::<F, V, 2>(panel, &[a, b]);
            }
            _ if is_gemv::<F, V>(columns.len()) => {
                // What is computed twice is stored twice in the same place.
                let last = columns.len() - 1;
                if last < 4 {
                    gemv::multiply::<F, V, 4>(panel, &from_fn(|c| columns[c.min(last)]));
                } else {
                    gemv::multiply::<F, V, 8>(panel, &from_fn(|c| columns[c.min(last)]));
                }
            }
            _ => {
                const { assert!(gemm::COLUMNS.is_multiple_of(C)) };
                for columns in columns.chunks(equal_part(columns.len(), gemm::COLUMNS, C)) {
                    gemm::multiply::<F, V, R, C>(panel, columns);
                }
            }
        }
    }
}

/// What sums of a slab begin with: those of the slabs before, which are at `from`, if they are not added in the end.
///
/// # Safety
/// They must be there, and the instructions.
#[inline(always)]
unsafe fn first_sums<F: Format, V: Simd>(from: *const f32) -> V::Floats {
    // SAFETY: the caller's contract.
    unsafe {
        if has_slab_scale::<F>() {
            V::splat_float(0.0)
        } else {
            V::load_floats(from)
        }
    }
}

/// Stores sums of a slab, which began with [`first_sums`], where those were; `x` is the column's slab.
///
/// # Safety
/// The slab and the sums must be there, and the instructions.
#[inline(always)]
unsafe fn store_sums<F: Format, V: Simd>(mut sums: V::Floats, x: *const u8, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        if has_slab_scale::<F>() {
            let scale = V::splat_float(x.add(SLAB).cast::<f32>().read());
            sums = V::mul_add(sums, scale, V::load_floats(to));
        }
        V::store_floats(sums, to);
    }
}
