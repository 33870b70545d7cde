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
use super::activations::{ColumnSpec, Places, Sums};
use super::formats::{
    Format, Half, Iq4Nl, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, SLAB, Slab,
};
use crate::detect::Avx512;
use crate::simd::float::{Column, Panel, PanelFn};
use samite_core::DType;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The product for a type and what it needs columns to be. The token proves that the function may be called.
pub(super) fn product(token: Avx512, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
    fn of<F: Format>(_: Avx512) -> (PanelFn, ColumnSpec) {
        let spec = ColumnSpec {
            scaled: F::SCALED,
            group: F::GROUP,
            sums: F::SUMS,
        };
        (multiply::<F>, spec)
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

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<F: Format>(panel: &Panel, columns: &[Column]) {
    let mut slab = MaybeUninit::<Slab>::uninit();
    let slab = slab.as_mut_ptr();
    let places = Places::new(panel.k, F::SCALED);
    // SAFETY: the caller's contract: there are so many panels and columns; a tile reads what was unpacked before.
    unsafe {
        for row in (0..panel.rows).step_by(2 * PANEL) {
            let rows = panel.rows - row;
            let first = panel.weights.wrapping_add(row / PANEL * panel.stride);
            // Where there is no second panel, the first one is used twice; nothing is stored for the second.
            let second = first.wrapping_add(if rows > PANEL { panel.stride } else { 0 });
            let mut tile = Tile {
                slab,
                masks: [mask(rows), mask(rows.saturating_sub(PANEL))],
                row: panel.first + row,
                start: 0,
                len: 0,
                places,
            };
            while tile.start == 0 || tile.start < panel.k {
                tile.len = SLAB.min(panel.k - tile.start);
                let blocks = panel.k / F::BLOCK;
                let (block, count) = (tile.start / F::BLOCK, tile.len / F::BLOCK);
                if count > 0 {
                    F::unpack(first, blocks, block, count, Half::new(slab, 0));
                    F::unpack(second, blocks, block, count, Half::new(slab, 1));
                }
                let (sixes, rest) = columns.as_chunks::<6>();
                for columns in sixes {
                    tile.run::<F, 6>(columns);
                }
                match rest {
                    [] => {}
                    [a] => tile.run::<F, 1>(&[*a]),
                    [a, b] => tile.run::<F, 2>(&[*a, *b]),
                    [a, b, c] => tile.run::<F, 3>(&[*a, *b, *c]),
                    [a, b, c, d] => tile.run::<F, 4>(&[*a, *b, *c, *d]),
                    [a, b, c, d, e, ..] => tile.run::<F, 5>(&[*a, *b, *c, *d, *e]),
                }
                tile.start += SLAB;
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
    /// Which rows of each panel there are.
    masks: [__mmask16; 2],
    /// Where the first row's product goes.
    row: usize,
    /// The first element of the rows.
    start: usize,
    /// Number of elements.
    len: usize,
    places: Places,
}

impl Tile {
    /// Multiplies the slab with columns.
    ///
    /// # Safety
    /// The slab must be unpacked, the columns be there, and the instructions.
    #[inline(always)]
    unsafe fn run<F: Format, const C: usize>(&self, columns: &[Column; C]) {
        // One scale of the column for the whole slab, or one for each group.
        let wide = F::SCALED == SLAB;
        // SAFETY: the caller's contract.
        unsafe {
            let (x, out) = (columns.map(|c| c.x), columns.map(|c| c.out.add(self.row)));
            let results = |c: usize, r: usize| {
                let out: *mut f32 = out[c].wrapping_add(r * PANEL);
                if self.start == 0 {
                    _mm512_setzero_ps()
                } else {
                    _mm512_maskz_loadu_ps(self.masks[r], out)
                }
            };
            let zero = _mm512_setzero_ps();
            let mut sums = [[zero; 2]; C];
            if !wide {
                for c in 0..C {
                    for r in 0..2 {
                        sums[c][r] = results(c, r);
                    }
                }
            }
            let mut codes_at = self.start;
            let mut scales_at = self.places.scales + self.start / F::SCALED * 4;
            let mut sums_at = self.places.sums + self.start / F::GROUP * 4;
            for group in 0..self.len / F::GROUP {
                let codes = (&raw const (*self.slab).codes[group * (F::GROUP / 4)]).cast::<u8>();
                let mut whole = [[_mm512_setzero_si512(); 2]; C];
                if let Sums::Offset(_) = F::SUMS {
                    for c in 0..C {
                        let start = x[c].add(sums_at).cast::<i32>().read();
                        whole[c] = [_mm512_set1_epi32(start); 2];
                    }
                }
                for i in 0..F::GROUP / 4 {
                    let w = [0, 1].map(|r| _mm512_load_si512(codes.add((2 * i + r) * 64).cast()));
                    for c in 0..C {
                        let x = x[c].add(codes_at + 4 * i).cast::<i32>().read_unaligned();
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
                            let scale = x[c].add(scales_at).cast::<f32>().read();
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
                            let sum = _mm512_set1_ps(x[c].add(sums_at).cast::<f32>().read());
                            sums[c][r] = _mm512_fmadd_ps(minimums, sum, sums[c][r]);
                        }
                    }
                }
                codes_at += F::GROUP;
                scales_at += 4 * F::GROUP / F::SCALED;
                sums_at += 4;
            }
            for c in 0..C {
                for r in 0..2 {
                    if wide {
                        let scale = x[c].add(scales_at).cast::<f32>().read();
                        sums[c][r] =
                            _mm512_fmadd_ps(sums[c][r], _mm512_set1_ps(scale), results(c, r));
                    }
                    let out = out[c].wrapping_add(r * PANEL);
                    _mm512_mask_storeu_ps(out, self.masks[r], sums[c][r]);
                }
            }
        }
    }
}
