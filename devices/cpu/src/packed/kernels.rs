//! Products of packed rows with columns of 8 bits, for AVX-512 with VNNI.
//!
//! A slab of two panels, 32 rows of up to 256 elements, is unpacked to bytes in the first-level cache and multiplied
//! with all columns, six at a time: twelve accumulators are enough to keep the multipliers busy. Products of a slab are
//! added to the results in memory.
//!
//! Each element of a result is summed in one order whatever the number of rows and columns is.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::PANEL;
use super::activations::{ColumnSpec, SLAB, Sums};
use super::formats::{Format, Half, Iq4Nl, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Slab};
use crate::detect::Avx512;
use crate::simd::float::{Column, Panel, PanelFn};
use samite_core::DType;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The product for a type and what it needs columns to be. The token proves that the function may be called.
pub(super) fn product(token: Avx512, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
    fn of<F: Format>(_: Avx512) -> (PanelFn, ColumnSpec) {
        (multiply::<F>, F::COLUMNS)
    }
    Some(match dtype {
        DType::Q8_0 => of::<Q8_0>(token),
        DType::Q4_0 => of::<Q4_0>(token),
        DType::Q4_1 => of::<Q4_1>(token),
        DType::Q5_0 => of::<Q5_0>(token),
        DType::Q5_1 => of::<Q5_1>(token),
        DType::IQ4_NL => of::<Iq4Nl>(token),
        DType::Q4_K => of::<Q4K>(token),
        DType::Q5_K => of::<Q5K>(token),
        DType::Q6_K => of::<Q6K>(token),
        _ => return None,
    })
}

/// Columns that are multiplied with one slab: their sums stay in the first-level cache too.
const COLUMNS: usize = 60;

/// Sums of one column for the rows of two panels.
type Sum = [[f32; PANEL]; 2];

#[repr(C, align(64))]
struct Results([Sum; COLUMNS]);

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<F: Format>(panel: &Panel, columns: &[Column]) {
    let mut slab = MaybeUninit::<Slab>::uninit();
    let mut results = MaybeUninit::<Results>::uninit();
    let (slab, results) = (slab.as_mut_ptr(), results.as_mut_ptr().cast::<Sum>());
    let blocks = panel.k / F::BLOCK;
    for columns in columns.chunks(COLUMNS) {
        for row in (0..panel.rows).step_by(2 * PANEL) {
            let rows = panel.rows - row;
            let first = panel.weights.wrapping_add(row / PANEL * panel.stride);
            // Where there is no second panel, the first one is used twice; its results are not stored.
            let second = first.wrapping_add(if rows > PANEL { panel.stride } else { 0 });
            let mut tile = Tile {
                slab,
                start: 0,
                len: 0,
            };
            // SAFETY: the caller's contract: there are so many panels and columns; sums are written before they are
            // read, by the first slab, and there is room for those of all columns.
            unsafe {
                while tile.start == 0 || tile.start < panel.k {
                    tile.len = SLAB.min(panel.k - tile.start);
                    let (block, count) = (tile.start / F::BLOCK, tile.len / F::BLOCK);
                    if count > 0 {
                        F::unpack(first, blocks, block, count, Half::new(slab, 0));
                        F::unpack(second, blocks, block, count, Half::new(slab, 1));
                    }
                    tile.all::<F>(columns, results);
                    tile.start += SLAB;
                }
                for (c, column) in columns.iter().enumerate() {
                    let out = column.out.add(panel.first + row);
                    for r in 0..rows.div_ceil(PANEL).min(2) {
                        let sums = _mm512_load_ps((&raw const (*results.add(c))[r]).cast());
                        _mm512_mask_storeu_ps(out.add(r * PANEL), mask(rows - r * PANEL), sums);
                    }
                }
            }
        }
    }
}

/// The first `count` lanes.
fn mask(count: usize) -> __mmask16 {
    if count < 16 { (1 << count) - 1 } else { !0 }
}

/// A slab and its place in the product.
struct Tile {
    slab: *const Slab,
    /// The first element of the rows.
    start: usize,
    /// Number of elements.
    len: usize,
}

impl Tile {
    /// Multiplies the slab with all columns.
    ///
    /// # Safety
    /// As [`run`](Tile::run).
    #[inline(always)]
    unsafe fn all<F: Format>(&self, columns: &[Column], results: *mut Sum) {
        let (sixes, rest) = columns.as_chunks::<6>();
        // SAFETY: the caller's contract.
        unsafe {
            for (i, six) in sixes.iter().enumerate() {
                // What comes next is not in the first-level cache; the last ones ask for their own next slabs.
                let next: [*const u8; 6] = match sixes.get(i + 1) {
                    Some(next) => next.map(|c| self.slab_of::<F>(c.x)),
                    None => {
                        six.map(|c| self.slab_of::<F>(c.x).wrapping_add(F::COLUMNS.slab_bytes()))
                    }
                };
                self.run::<F, 6>(six, next, results.add(6 * i));
            }
            let results = results.add(6 * sixes.len());
            match *rest {
                [] => {}
                [a] => self.few::<F, 1>(&[a], results),
                [a, b] => self.few::<F, 2>(&[a, b], results),
                [a, b, c] => self.few::<F, 3>(&[a, b, c], results),
                [a, b, c, d] => self.few::<F, 4>(&[a, b, c, d], results),
                [a, b, c, d, e, ..] => self.few::<F, 5>(&[a, b, c, d, e], results),
            }
        }
    }

    /// Where a column's part of this slab begins.
    #[inline(always)]
    fn slab_of<F: Format>(&self, column: *const u8) -> *const u8 {
        column.wrapping_add(self.start / SLAB * F::COLUMNS.slab_bytes())
    }

    /// Like [`run`](Tile::run), asking for the columns' own next slabs.
    ///
    /// # Safety
    /// As [`run`](Tile::run).
    #[inline(always)]
    unsafe fn few<F: Format, const C: usize>(&self, columns: &[Column; C], results: *mut Sum) {
        let slab_bytes = F::COLUMNS.slab_bytes();
        let next = columns.map(|c| self.slab_of::<F>(c.x).wrapping_add(slab_bytes));
        // SAFETY: the caller's contract.
        unsafe { self.run::<F, C>(columns, next, results) }
    }

    /// Multiplies the slab with columns and adds the products to `results`; the first slab begins them. Meanwhile asks
    /// for as many slabs of columns that come next.
    ///
    /// # Safety
    /// The slab must be unpacked, the columns and room for their results be there, and the instructions.
    #[inline(always)]
    unsafe fn run<F: Format, const C: usize>(
        &self,
        columns: &[Column; C],
        next: [*const u8; C],
        results: *mut Sum,
    ) {
        // One scale of the column for the whole slab, or one for each group.
        let wide = F::SCALED == SLAB;
        // SAFETY: the caller's contract.
        unsafe {
            let x = columns.map(|c| self.slab_of::<F>(c.x));
            let before = |c: usize, r: usize| {
                if self.start == 0 {
                    _mm512_setzero_ps()
                } else {
                    _mm512_load_ps((&raw const (*results.add(c))[r]).cast())
                }
            };
            let zero = _mm512_setzero_ps();
            let mut sums = [[zero; 2]; C];
            if !wide {
                for c in 0..C {
                    for r in 0..2 {
                        sums[c][r] = before(c, r);
                    }
                }
            }
            let sums_at = F::COLUMNS.sums_at();
            for group in 0..self.len / F::GROUP {
                let step = F::COLUMNS.slab_bytes() / (SLAB / F::GROUP);
                for next in next {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(group * step).cast());
                }
                let codes = (&raw const (*self.slab).codes)
                    .cast::<u8>()
                    .add(group * F::GROUP * 32);
                let mut whole = [[_mm512_setzero_si512(); 2]; C];
                if let Sums::Offset(_) = F::SUMS {
                    for c in 0..C {
                        let start = x[c].add(sums_at + 4 * group).cast::<i32>().read();
                        whole[c] = [_mm512_set1_epi32(start); 2];
                    }
                }
                for i in 0..F::GROUP / 4 {
                    let w = [0, 1].map(|r| _mm512_load_si512(codes.add((2 * i + r) * 64).cast()));
                    for c in 0..C {
                        let x = x[c]
                            .add(group * F::GROUP + 4 * i)
                            .cast::<i32>()
                            .read_unaligned();
                        let x = _mm512_set1_epi32(x);
                        for r in 0..2 {
                            whole[c][r] = _mm512_dpbusd_epi32(whole[c][r], w[r], x);
                        }
                    }
                }
                let scales = [0, 1]
                    .map(|r| _mm512_load_ps((&raw const (*self.slab).scales[group][r]).cast()));
                for c in 0..C {
                    for r in 0..2 {
                        let scale = if wide {
                            scales[r]
                        } else {
                            let scale = x[c].add(SLAB + 4 * group).cast::<f32>().read();
                            _mm512_mul_ps(scales[r], _mm512_set1_ps(scale))
                        };
                        let product = _mm512_cvtepi32_ps(whole[c][r]);
                        sums[c][r] = _mm512_fmadd_ps(product, scale, sums[c][r]);
                    }
                }
                if let Sums::Minus = F::SUMS {
                    for r in 0..2 {
                        let minimums = (&raw const (*self.slab).minimums[group][r]).cast();
                        let minimums = _mm512_load_ps(minimums);
                        for c in 0..C {
                            let sum =
                                _mm512_set1_ps(x[c].add(sums_at + 4 * group).cast::<f32>().read());
                            sums[c][r] = _mm512_fmadd_ps(minimums, sum, sums[c][r]);
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..2 {
                    if wide {
                        let scale = _mm512_set1_ps(x[c].add(SLAB).cast::<f32>().read());
                        sums[c][r] = _mm512_fmadd_ps(sums[c][r], scale, before(c, r));
                    }
                    _mm512_store_ps((&raw mut (*results.add(c))[r]).cast(), sums[c][r]);
                }
            }
        }
    }
}
