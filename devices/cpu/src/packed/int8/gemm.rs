//! Products with many columns. A slab of a panel is decoded to bytes in the L1 cache, then
//! multiplied with all columns by a micro-kernel, a few registers of rows and columns at a time.
//! Micro-kernels exist once for each [`Scheme`], not for each type.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::{Level, first_sums, is_offset, scaled, store_sums};
use crate::activations::SLAB;
use crate::packed::decode::{Format, PanelSlab, Scheme, Slab, column_layout, eight_times};
use crate::packed::tile::{ASKING, Results, are_side_by_side, side_by_side};
use crate::packed::{PANEL, Sum, store_all};
use crate::product::{Column, Panel};
use crate::simd::int8::{Simd, steps_between_carries};
use std::mem::MaybeUninit;

/// Maximum number of columns that are multiplied with one slab, large enough that unpacking it
/// takes little of the time. It is a multiple of the number multiplied at a time, to which equal
/// parts are rounded up.
pub(crate) const COLUMNS: usize = 528;

/// Room for slabs of columns.
#[repr(C, align(64))]
struct ColumnSlabs<const C: usize>([[u8; 2 * SLAB]; C]);

/// Multiplies panels with columns.
///
/// # Safety
/// As [`multiply`](super::multiply), with at most [`COLUMNS`] columns.
#[inline(always)]
pub(crate) unsafe fn multiply<F: Format, L: Level>(panel: &Panel, columns: &[Column]) {
    let mut slab = MaybeUninit::<Slab>::uninit();
    let mut results = MaybeUninit::<Results<COLUMNS>>::uninit();
    let (slab, results) = (slab.as_mut_ptr(), results.as_mut_ptr().cast::<Sum>());
    let beside = are_side_by_side(columns, F::COLUMNS.slab_bytes());
    for row in (0..panel.rows).step_by(PANEL) {
        // SAFETY: packed memory has whole panels, whose parts have at most `SLAB` elements, for
        // which `slab` has room. `results` has room for `COLUMNS` sums: all columns, and one more
        // if their number is odd. Only this function uses `slab` and `results`, and the
        // instructions of `L` are available.
        unsafe {
            results.write_bytes(0, COLUMNS.min(columns.len() + 1));
            for part in PanelSlab::all::<F>(panel, row) {
                L::decode::<F>(&part, slab);
                for first in (0..PANEL).step_by(L::ROWS) {
                    let strip = Strip {
                        slab,
                        beside,
                        first,
                        weights: part.end::<F>(),
                        lines: (F::DTYPE.block_bytes() * PANEL * F::GROUP).div_ceil(F::BLOCK * 64),
                        spread: columns.len() >= ASKING * L::COLUMNS,
                        at: part.number * panel.slabs,
                        next: panel.slabs,
                        groups: part.len / F::GROUP,
                    };
                    L::strip::<L::Scheme<F::Scheme>>(&strip, columns, results);
                }
            }
            store_all(panel, row, columns, results);
        }
    }
}

/// Rows of an unpacked slab and its place in columns.
#[derive(Clone, Copy)]
pub(crate) struct Strip {
    slab: *const Slab,
    /// True if columns' slabs are [adjacent](are_side_by_side).
    beside: bool,
    /// The first row.
    first: usize,
    /// Address of the next slab of weights.
    weights: *const u8,
    /// Number of its lines to prefetch with each group, if all are prefetched with the first tile
    /// of columns.
    lines: usize,
    /// True if they are prefetched with the first [`ASKING`] tiles of columns.
    spread: bool,
    /// Offset of the slab in a column, in bytes.
    at: usize,
    /// Distance to the next slab.
    next: usize,
    groups: usize,
}

impl Strip {
    /// Returns the first line of weights that a tile of columns prefetches, and the number that it
    /// prefetches with each group.
    #[inline(always)]
    fn weights_to_ask_for(&self, tile: usize) -> (*const u8, usize) {
        let (skipped, lines) = match (self.first, self.spread) {
            (0, true) if tile < ASKING => (tile * self.groups, self.lines.div_ceil(ASKING)),
            (0, false) if tile == 0 => (0, self.lines),
            _ => (0, 0),
        };
        (self.weights.wrapping_add(skipped * lines * 64), lines)
    }

    /// Multiplies `R` registers of rows with all columns.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    pub unsafe fn all<S: Scheme, V: Simd, const R: usize, const C: usize>(
        &self,
        columns: &[Column],
        results: *mut Sum,
    ) {
        let (full, rest) = columns.as_chunks::<C>();
        let mut copy = MaybeUninit::<ColumnSlabs<C>>::uninit();
        let copy = copy.as_mut_ptr().cast::<u8>();
        // The data after this many columns is not in the L1 cache.
        let next = |count: usize| match columns.get(count) {
            Some(next) => next.x.wrapping_add(self.at),
            None => columns[0].x.wrapping_add(self.at + self.next),
        };
        let bytes = column_layout::<S>().slab_bytes();
        // SAFETY: columns have a slab of `bytes` bytes at byte `at`, and `copy` has room for `C` of
        // them. That suffices for `rest`, which is shorter, and its last one again. `results` has
        // room for the sums of one more column if their number is odd. The slab is decoded, and the
        // instructions are available.
        unsafe {
            for (i, tile) in full.iter().enumerate() {
                let x = side_by_side(tile, self.beside, self.at, bytes, copy);
                let next = next(C * (i + 1));
                self.run::<S, V, R, C>(x, next, results.add(C * i), i);
            }
            if rest.is_empty() {
                return;
            }
            // An odd last column is multiplied twice. Otherwise each number of columns would need
            // its own code.
            let last = rest.len() - 1;
            let is_odd = last.is_multiple_of(2);
            let x = side_by_side(rest, self.beside && !is_odd, self.at, bytes, copy);
            if is_odd {
                let from = copy.add(last * bytes);
                copy.add((last + 1) * bytes)
                    .copy_from_nonoverlapping(from, bytes);
            }
            let (next, i) = (next(columns.len()), full.len());
            let results = results.add(C * full.len());
            match last / 2 {
                0 => self.run::<S, V, R, 2>(x, next, results, i),
                1 if C > 4 => self.run::<S, V, R, 4>(x, next, results, i),
                _ => self.run::<S, V, R, C>(x, next, results, i),
            }
        }
    }

    /// Multiplies rows with the columns whose slabs are at `x`, one after the other, and adds the
    /// products to `results`. Meanwhile prefetches as many slabs from `next` and, in the first
    /// tiles of columns, the weights that come next.
    ///
    /// # Safety
    /// `groups` groups of the slab must be unpacked for `R` registers of rows from `first`. `C`
    /// slabs of columns must be readable at `x`, one after the other and aligned to 4, and their
    /// sums must be writable at `results`, elsewhere. The instructions of `V` must be available.
    #[inline(always)]
    unsafe fn run<S: Scheme, V: Simd, const R: usize, const C: usize>(
        &self,
        x: *const u8,
        next: *const u8,
        results: *mut Sum,
        tile: usize,
    ) {
        let (mut ask, lines) = self.weights_to_ask_for(tile);
        // SAFETY: `C` slabs are at `x`, one after the other, with codes, scales, sums and starts as
        // in the layout, aligned to 4. `R` registers of rows from `self.first` are inside the
        // panel, groups below `groups` are inside the decoded slab, and `results` has sums of `C`
        // columns, in other memory. Prefetching is allowed at any address.
        unsafe {
            let zero = V::splat_float(0.0);
            let row = |r: usize| self.first + r * V::LANES;
            let mut all = [x; C];
            for c in 0..C {
                all[c] = x.wrapping_add(c * column_layout::<S>().slab_bytes());
            }
            let x = all;
            let result = |c: usize, r: usize| results.add(c).cast::<f32>().add(row(r));
            let mut sums = [[zero; R]; C];
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = first_sums::<S, V>(result(c, r));
                }
            }
            let layout = column_layout::<S>();
            let sums_at = layout.sums_at();
            for group in 0..self.groups {
                let step = C * column_layout::<S>().slab_bytes() / (SLAB / S::GROUP);
                for line in 0..step.div_ceil(64) {
                    V::prefetch(next.wrapping_add(group * step + line * 64));
                }
                let step = C * size_of::<Sum>() / (SLAB / S::GROUP);
                for line in 0..step.div_ceil(64) {
                    let at = C * size_of::<Sum>() + group * step + line * 64;
                    V::prefetch(results.cast::<u8>().wrapping_add(at));
                }
                for _ in 0..lines {
                    V::prefetch(ask);
                    ask = ask.wrapping_add(64);
                }
                let mut whole = [[V::start(V::splat(0)); R]; C];
                if is_offset::<S, V>() {
                    for c in 0..C {
                        let start = x[c].add(sums_at + 4 * group).cast::<i32>().read();
                        whole[c] = [V::start(V::splat(start)); R];
                    }
                }
                if V::COLUMN_PAIRS {
                    self.pairs::<S, V, R, C>(group, x, &mut whole);
                } else {
                    self.products::<S, V, R, C>(group, x, &mut whole);
                }
                let mut scales = [zero; R];
                for r in 0..R {
                    scales[r] = V::load_floats(&raw const (*self.slab).scales[group][row(r)]);
                }
                for c in 0..C {
                    for r in 0..R {
                        let (sum, whole) = (&mut sums[c][r], V::total(whole[c][r]));
                        if S::SLAB_SCALE {
                            V::accumulate(sum, V::floats(whole), scales[r]);
                        } else {
                            let product = scaled::<S, V>(whole, scales[r]);
                            let scale = x[c].add(SLAB + 4 * group).cast::<f32>().read();
                            V::accumulate(sum, product, V::splat_float(scale));
                        }
                    }
                }
                if S::MINIMUMS {
                    for r in 0..R {
                        let minimums =
                            V::load_floats(&raw const (*self.slab).minimums[group][row(r)]);
                        for c in 0..C {
                            let sum = x[c].add(sums_at + 4 * group).cast::<f32>().read();
                            V::accumulate(&mut sums[c][r], minimums, V::splat_float(sum));
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    store_sums::<S, V>(sums[c][r], x[c], result(c, r));
                }
            }
        }
    }

    /// Adds the products of a group to sums. `x` are the columns' slabs.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn products<S: Scheme, V: Simd, const R: usize, const C: usize>(
        &self,
        group: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        let steps = S::GROUP / 4;
        let between = const { steps_between_carries(S::LARGEST, S::GROUP / 4) };
        for first in (0..steps).step_by(8) {
            // SAFETY: `first + i` is below `steps` and `group` below `groups`, so word `at + i` is
            // inside the slab and inside the slabs of the columns. The caller has the instructions
            // of `V`.
            unsafe {
                let at = group * steps + first;
                // One address, to which constants are added.
                let codes = (&raw const (*self.slab).codes[at][self.first]).cast::<u8>();
                eight_times!(i => if i < steps {
                    let mut w = [V::splat(0); R];
                    for r in 0..R {
                        w[r] = V::load(codes.add(4 * (i * PANEL + r * V::LANES)));
                    }
                    for c in 0..C {
                        let x = x[c].add(4 * (at + i)).cast::<i32>();
                        let x = V::splat(x.read_unaligned());
                        for r in 0..R {
                            // The first product initialises the sum.
                            if (first + i).is_multiple_of(between) {
                                V::dot(&mut sums[c][r], w[r], x, S::FULL);
                            } else {
                                V::dot_here(&mut sums[c][r], w[r], x, S::FULL);
                            }
                            if (first + i + 1).is_multiple_of(between) {
                                V::carry(&mut sums[c][r]);
                            }
                        }
                    }
                });
            }
        }
    }

    /// Does what [`products`](Strip::products) does, for two columns at a time as long as there are
    /// two.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn pairs<S: Scheme, V: Simd, const R: usize, const C: usize>(
        &self,
        group: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        // SAFETY: words `at` and `at + 1` are of `group`, which is below `groups`: `i + 1` is below
        // `GROUP / 4`. Slabs of columns have the eight codes from byte `4 * at` on. The
        // instructions of `V` are available.
        unsafe {
            for c in (1..C).step_by(2) {
                for r in 0..R {
                    [sums[c - 1][r], sums[c][r]] = V::mix([sums[c - 1][r], sums[c][r]]);
                }
            }
            for i in (0..S::GROUP / 4).step_by(2) {
                let at = group * (S::GROUP / 4) + i;
                let mut w = [[V::splat(0); 2]; R];
                for r in 0..R {
                    w[r] = [self.codes::<V>(at, r), self.codes::<V>(at + 1, r)];
                }
                for c in (1..C).step_by(2) {
                    let codes = [x[c - 1].wrapping_add(4 * at), x[c].wrapping_add(4 * at)];
                    for r in 0..R {
                        let pair = [sums[c - 1][r], sums[c][r]];
                        let pair = V::dot_pairs(pair, w[r], codes, S::FULL);
                        [sums[c - 1][r], sums[c][r]] = pair;
                    }
                }
            }
            for c in (1..C).step_by(2) {
                for r in 0..R {
                    [sums[c - 1][r], sums[c][r]] = V::separate([sums[c - 1][r], sums[c][r]]);
                }
            }
            if !C.is_multiple_of(2) {
                let last = std::array::from_mut(&mut sums[C - 1]);
                self.products::<S, V, R, 1>(group, [x[C - 1]], last);
            }
        }
    }

    /// Loads four codes of each row of register `r`.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn codes<V: Simd>(&self, at: usize, r: usize) -> V::Words {
        let row = self.first + r * V::LANES;
        // SAFETY: `at` is a word of a group that the slab has, and `V::LANES` rows from `row` on
        // are inside the panel.
        unsafe { V::load((&raw const (*self.slab).codes[at][row]).cast()) }
    }
}
