//! Products with one column, up to four with AVX2, up to eight with AVX-512: codes are multiplied
//! directly after loading.
//!
//! Each type has its own code here, because decoding and multiplying form one loop.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::{first_sums, gemv_columns, is_offset, scaled, store_sums};
use crate::activations::SLAB;
use crate::packed::decode::{Format, PanelSlab, Scheme, Sink};
use crate::packed::tile::Results;
use crate::packed::{LANES, PANEL, Sum, store_all};
use crate::product::{AccessPattern, Column, Panel};
use crate::simd::int8::{Simd, steps_between_carries};
use samite_core::DType;

/// Returns whether a group has two independent sums of products. More columns keep the multipliers
/// busy without them.
#[inline(always)]
const fn is_split<F: Format>(columns: usize) -> bool {
    F::MIXED == 1 && columns < 4
}

/// Returns whether multiplying the codes takes longer than reading them.
#[inline(always)]
const fn is_busy<F: Format>(columns: usize) -> bool {
    columns == 8 && !matches!(F::DTYPE, DType::Q8_0)
}

/// Returns the number of words after which sums must be [carried](Simd::carry). Sums are carried
/// after multiples of it: words of a sum come in order, unless codes are halves of bytes and both
/// halves of a group share a sum. Then sums are carried after each word.
const fn gemv_steps_between_carries<F: Format>(columns: usize) -> usize {
    let steps = steps_between_carries(F::LARGEST, F::GROUP / 4);
    if steps == F::GROUP / 4 || is_split::<F>(columns) || F::MIXED > 1 {
        steps
    } else {
        1
    }
}

/// Multiplies panels with `C` columns, interleaving several streams.
///
/// # Safety
/// As [`multiply`](super::multiply).
#[inline(always)]
pub(crate) unsafe fn multiply<F: Format, V: Simd, const C: usize>(
    panel: &Panel,
    columns: &[Column; C],
) {
    let AccessPattern { ahead, streams } = panel.reading;
    let panels = panel.rows.div_ceil(PANEL);
    // Each stream has consecutive panels.
    let run = panels.div_ceil(streams.clamp(1, STREAMS));
    for first in 0..run {
        let mut results = [const { Results([[[0.0; LANES]; 2]; C]) }; STREAMS];
        let rows = |stream: usize| (stream * run + first) * PANEL;
        let count = (first..panels).step_by(run).len();
        debug_assert!(count <= STREAMS);
        // SAFETY: packed memory holds whole panels, and `rows(stream)` is below `panel.rows` for
        // streams below `count`. `results` has `STREAMS` elements, at least `count`, each with the
        // sums of `C` columns. `half + V::LANES` is at most `PANEL`. Columns have a slab for each
        // part. The caller has the instructions of `V`.
        unsafe {
            for part in PanelSlab::all::<F>(panel, 0) {
                let mut x = [std::ptr::null(); C];
                for c in 0..C {
                    x[c] = columns[c].x.wrapping_add(part.number * panel.slabs);
                }
                for half in (0..PANEL).step_by(V::LANES) {
                    // An iterator over `results` has a known maximum length, so compilers would
                    // unroll this loop completely.
                    for stream in 0..count {
                        let results = results.as_mut_ptr().add(stream).cast::<Sum>();
                        let place = |c: usize| results.add(c).cast::<f32>().add(half);
                        let mut products = GemvSums::<V, C>::new(x, ahead);
                        for c in 0..C {
                            products.sums[c] = first_sums::<F::Scheme, V>(place(c));
                        }
                        let part = part.of_row(panel, rows(stream));
                        part.unpack::<F, V, _>(half, &mut products);
                        for c in 0..C {
                            store_sums::<F::Scheme, V>(products.sums[c], x[c], place(c));
                        }
                    }
                }
            }
            for (stream, results) in results.iter().enumerate().take(count) {
                store_all(panel, rows(stream), columns, results.0.as_ptr());
            }
        }
    }
}

/// Maximum number of interleaved panels with few columns.
const STREAMS: usize = 4;

/// Maximum number of groups whose codes are interleaved.
const MAX_MIXED: usize = 8;

/// Multiplies rows of a register with columns while they are unpacked.
struct GemvSums<V: Simd, const C: usize> {
    /// The columns' slabs.
    x: [*const u8; C],
    /// Sums of products of codes, for each of the current groups. Groups with a single sum use two,
    /// so that they are independent.
    whole: [[[V::Sum; 2]; C]; MAX_MIXED],
    /// Sums before multiplication with the column's scale, if there is one for the slab.
    sums: [V::Floats; C],
    /// Prefetch distance of weights in bytes.
    ahead: usize,
}

impl<V: Simd, const C: usize> GemvSums<V, C> {
    #[inline(always)]
    unsafe fn new(x: [*const u8; C], ahead: usize) -> Self {
        // SAFETY: only registers are touched; `multiply`, which calls this, is compiled for the
        // instructions of `V`.
        unsafe {
            GemvSums {
                x,
                whole: [[[V::start(V::splat(0)); 2]; C]; MAX_MIXED],
                sums: [V::splat_float(0.0); C],
                ahead,
            }
        }
    }

    /// Returns the index of a group's sums.
    #[inline(always)]
    fn place<F: Format>(group: usize) -> usize {
        const { assert!(F::MIXED <= MAX_MIXED) };
        group % F::MIXED
    }
}

impl<F: Format, V: Simd, const C: usize> Sink<F, V> for GemvSums<V, C> {
    // Measured: for plain halves of bytes and one column, the compiler's order is better.
    const EVENLY: bool = if C == 1 {
        F::LARGEST != 15
    } else {
        C <= gemv_columns::<F, V>()
    };
    #[inline(always)]
    fn ahead(&self) -> usize {
        self.ahead
    }

    // Where multipliers are the limit, indexed addresses would cost another instruction each time.
    // Where adders have room left, loops are faster.
    const UNROLLED: bool = is_busy::<F>(C);

    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: V::Words) {
        let place = Self::place::<F>(i / (F::GROUP / 4));
        let chain = if is_split::<F>(C) { i / 4 % 2 } else { 0 };
        for c in 0..C {
            // SAFETY: `i` is below `SLAB / 4`, and columns' slabs, aligned to 4, have as many words
            // of codes, and a sum for each group. `place` is below `MIXED`, and `chain` is 0 or 1.
            // The instructions of `V` are available.
            unsafe {
                let x = self.x[c].add(4 * i).cast::<i32>().read_unaligned();
                let whole = &mut self.whole[place][c][chain];
                // The sum starts with a group's first codes.
                if C > 1 && is_offset::<F::Scheme, V>() && i.is_multiple_of(F::GROUP / 4) {
                    let start = self.x[c].add(F::COLUMNS.sums_at() + i / (F::GROUP / 4) * 4);
                    *whole = V::start(V::splat(start.cast::<i32>().read()));
                }
                V::dot(whole, codes, V::splat(x), F::FULL);
                let between = const { gemv_steps_between_carries::<F>(C) };
                if between < F::GROUP / 4 && (i + 1).is_multiple_of(between) {
                    V::carry(whole);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: V::Floats) {
        let place = Self::place::<F>(group);
        for c in 0..C {
            // SAFETY: columns' slabs, aligned to 4, have a sum for this group, and a scale if each
            // group has one. The instructions of `V` are available.
            unsafe {
                let chains = &mut self.whole[place][c];
                if const { gemv_steps_between_carries::<F>(C) } == F::GROUP / 4 {
                    for chain in chains.iter_mut() {
                        V::carry(chain);
                    }
                }
                let mut whole = V::total(chains[0]);
                if is_split::<F>(C) {
                    whole = V::add(whole, V::total(chains[1]));
                }
                *chains = [V::start(V::splat(0)); 2];
                if C == 1 && is_offset::<F::Scheme, V>() {
                    // An addition, because the compiler then does not move the prefetches.
                    let start = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                    whole = V::add(whole, V::splat(start.cast::<i32>().read()));
                }
                let sum = &mut self.sums[c];
                if F::Scheme::SLAB_SCALE {
                    *sum = V::mul_add(V::floats(whole), scales, *sum);
                } else {
                    let product = scaled::<F::Scheme, V>(whole, scales);
                    let scale = self.x[c].add(SLAB + 4 * group).cast::<f32>().read();
                    *sum = V::mul_add(product, V::splat_float(scale), *sum);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats) {
        for c in 0..C {
            // SAFETY: columns' slabs, aligned to 4, have a sum for this group. The instructions of
            // `V` are available.
            unsafe {
                let sum = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                let sum = V::splat_float(sum.cast::<f32>().read());
                self.sums[c] = V::mul_add(minimums, sum, self.sums[c]);
            }
        }
    }
}
