//! Products of packed F16, BF16 and F32 rows with F32 columns, written once over [`Vector`].
//!
//! The rows of a panel are the lanes, so nothing is summed across a register, and each element of a result is one chain
//! of sums from the first element to the last, whatever the number of columns is.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::activations::SLAB;
use super::{LANES, PANEL, Sum, store_all};
use crate::detect::Isa;
use crate::simd::float::{Column, Panel, PanelFn, choose};
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::Lanes;
use crate::simd::{Bf16, Element, F16, F32, Vector};
use samite_core::DType;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// Columns that are multiplied with one slab: a multiple of how many are multiplied at a time.
const COLUMNS: usize = 120;

/// Half a slab as f32.
#[repr(C, align(64))]
struct Half([[f32; LANES]; SLAB]);

/// What is needed besides weights and columns.
#[repr(C, align(64))]
struct Memory {
    slab: [Half; 2],
    results: [Sum; COLUMNS],
}

/// Multiplies whole panels; `R` registers make a panel, `C` columns are multiplied at a time.
#[inline(always)]
unsafe fn panels<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let mut memory = MaybeUninit::<Memory>::uninit();
    let memory = memory.as_mut_ptr();
    for columns in columns.chunks(COLUMNS) {
        for row in (0..panel.rows).step_by(PANEL) {
            let weights = panel.weights.wrapping_add(row / PANEL * panel.stride);
            // SAFETY: the caller's contract: there are so many panels, elements and columns, and room for all sums.
            unsafe {
                let results = (&raw mut (*memory).results).cast::<Sum>();
                results.write_bytes(0, columns.len().next_multiple_of(C));
                for first in (0..panel.k).step_by(SLAB) {
                    let len = SLAB.min(panel.k - first);
                    let weights = weights.wrapping_add(first * PANEL * E::BYTES);
                    let halves = [weights, weights.wrapping_add(len * LANES * E::BYTES)];
                    let mut slab = Slab { halves, first, len };
                    if E::BYTES == 4 || V::WIDENS || columns.len() <= C {
                        slab.all::<V, E, R, C>(columns, results);
                    } else {
                        for half in 0..2 {
                            let to = (&raw mut (*memory).slab[half]).cast::<f32>();
                            for i in (0..len * LANES).step_by(V::LANES) {
                                E::load::<V>(halves[half], i).store(to.add(i));
                            }
                            slab.halves[half] = to.cast();
                        }
                        slab.all::<V, F32, R, C>(columns, results);
                    }
                }
                store_all(panel, row, columns, results);
            }
        }
    }
}

/// Up to [`SLAB`] elements of the rows of a panel.
struct Slab {
    halves: [*const u8; 2],
    /// Where they begin in columns.
    first: usize,
    len: usize,
}

impl Slab {
    /// Multiplies with all columns and adds the products to `results`.
    ///
    /// # Safety
    /// The slab, the columns and their results must be there, and the instructions.
    #[inline(always)]
    unsafe fn all<V: Vector, E: Element, const R: usize, const C: usize>(
        &self,
        columns: &[Column],
        results: *mut Sum,
    ) {
        for (i, columns) in columns.chunks(C).enumerate() {
            let ahead = if i == 0 { SLAB * PANEL * E::BYTES } else { 0 };
            // SAFETY: the caller's contract.
            unsafe {
                let results = results.add(i * C);
                match *columns {
                    [a] => self.tile::<V, E, R, 1>(&[a], results, ahead),
                    [a, b] => self.tile::<V, E, R, 2>(&[a, b], results, ahead),
                    [a, b, c] => self.tile::<V, E, R, 3>(&[a, b, c], results, ahead),
                    [a, b, c, d] => self.tile::<V, E, R, 4>(&[a, b, c, d], results, ahead),
                    _ => {
                        // The last column again: there is room for its sums, too.
                        let last = columns.len() - 1;
                        let columns = from_fn(|c| columns[c.min(last)]);
                        self.tile::<V, E, R, C>(&columns, results, ahead);
                    }
                }
            }
        }
    }

    /// Multiplies with some columns, asking for weights that come so many bytes later.
    ///
    /// # Safety
    /// As [`all`](Slab::all).
    #[inline(always)]
    unsafe fn tile<V: Vector, E: Element, const R: usize, const C: usize>(
        &self,
        columns: &[Column; C],
        results: *mut Sum,
        ahead: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let x: [*const f32; C] = columns
                .each_ref()
                .map(|c| c.x.cast::<f32>().add(self.first));
            let result = |c: usize, r: usize| results.add(c).cast::<f32>().add(r * V::LANES);
            let mut sums = [[V::splat(0.0); R]; C];
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = V::load(result(c, r));
                }
            }
            let ahead = self.halves[0].wrapping_add(ahead);
            for i in 0..self.len {
                // F32 rows are found by processors themselves.
                if E::BYTES < 4 {
                    V::prefetch(ahead.wrapping_add(i * PANEL * E::BYTES));
                }
                let mut w = [V::splat(0.0); R];
                for r in 0..R {
                    let (half, lane) = (r * V::LANES / LANES, r * V::LANES % LANES);
                    w[r] = E::load::<V>(self.halves[half], i * LANES + lane);
                }
                for c in 0..C {
                    let x = V::splat(*x[c].add(i));
                    for r in 0..R {
                        sums[c][r] = w[r].mul_add(x, sums[c][r]);
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    sums[c][r].store(result(c, r));
                }
            }
        }
    }
}

/// Compiles the generic functions for one instruction set.
macro_rules! compile {
    ($name:ident, $vector:ty, $registers:literal x $columns:literal $(, $features:literal)?) => {
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub unsafe fn product<E: Element>(panel: &Panel, columns: &[Column]) {
                // SAFETY: the caller's contract.
                unsafe { panels::<$vector, E, $registers, $columns>(panel, columns) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, Lanes, 4 x 2);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, 4 x 3, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, std::arch::x86_64::__m512, 2 x 8, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t, 8 x 3);

/// The product for packed rows of `dtype`: F32, F16 or BF16. Columns are F32.
pub(super) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    choose!(isa, dtype, product)
}
