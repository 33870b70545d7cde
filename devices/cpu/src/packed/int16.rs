//! Products of packed F16 and BF16 rows with many columns, both rounded to [16-bit
//! numbers](crate::simd::int16). Fewer columns, and those of F32 rows, are [not
//! rounded](super::float).

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::tile::{ASKING, Results, are_side_by_side, equal_part, side_by_side};
use super::{LANES, PANEL, Sum, store_all};
use crate::activations::SLAB;
use crate::activations::int16::{GROUPS, Int16Slabs, SLAB_BYTES, terms};
use crate::activations::slabs::Slabs;
use crate::detect::Isa;
use crate::product::{Column, Panel, PanelFn};
use crate::simd::avx2::Ymm;
use crate::simd::avx512::Zmm;
use crate::simd::float::{Bf16, Element, F16};
use crate::simd::int16::{self, Columns, GROUP, Int16Simd, Terms};
use samite_core::DType;
use std::mem::MaybeUninit;

/// Number of columns that are multiplied with the same rows: a multiple of the number multiplied at
/// a time.
const COLUMNS: usize = 516;

/// A part of the rows of a panel, rounded: two adjacent elements of each row next to each other,
/// the first one in the lower half, and scales of each group.
#[repr(C, align(64))]
struct Slab {
    pairs: [[i32; PANEL]; SLAB / 2],
    scales: [[f32; PANEL]; GROUPS],
    /// Initial values of the sums of crossed products, before what columns add.
    starts: [[i32; PANEL]; GROUPS],
}

impl Slab {
    /// Returns the groups of the rows, starting with row `row` of the panel.
    ///
    /// # Safety
    /// `slab` must point to a slab, and `row` be below `PANEL`.
    #[inline(always)]
    unsafe fn terms(slab: *mut Slab, row: usize) -> Terms {
        // SAFETY: the slab exists, and `row` is below the number of rows of a panel. Only addresses
        // are computed.
        unsafe {
            Terms {
                pairs: &raw mut (*slab).pairs[0][row],
                scales: &raw mut (*slab).scales[0][row],
                starts: &raw mut (*slab).starts[0][row],
                step: PANEL,
            }
        }
    }

    /// Rounds `len` elements of the rows of half a panel.
    ///
    /// # Safety
    /// `len` elements, at most a slab's, of `LANES` rows must be readable at `weights`. `half` must
    /// be 0 or 1, `slab` must be writable and disjoint, and the instructions of `V` must be
    /// available.
    #[inline(always)]
    unsafe fn round<V: Int16Simd, E: Element>(
        slab: *mut Slab,
        weights: *const u8,
        len: usize,
        half: usize,
    ) {
        for (first, lane) in (0..len)
            .step_by(GROUP)
            .flat_map(|first| (0..LANES).step_by(V::LANES).map(move |lane| (first, lane)))
        {
            let row = half * LANES + lane;
            let count = GROUP.min(len - first);
            // SAFETY: `count` elements from `first` on are below `len`, and rows from `lane` on
            // fill a register inside the half. The slab is writable and has `PANEL` rows of each
            // pair, and group `first / GROUP`, as `len` is at most `SLAB`.
            unsafe {
                let weights = weights.add((first * LANES + lane) * E::BYTES);
                let to = Slab::terms(slab, row);
                int16::round::<V, E>(weights, LANES, count, to, first / GROUP);
            }
        }
    }
}

/// Multiplies whole panels, `R` registers of rows with up to `C` columns at a time.
/// `multiply_strip` is [`Strip::all`], which is the same for both types.
///
/// # Safety
/// As [`PanelFn`], with panels as in [`PackedProduct`](super::PackedProduct).
#[inline(always)]
unsafe fn panels<V: Int16Simd, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
    multiply_strip: unsafe fn(&Strip, &[Column], *mut Sum),
) {
    const { assert!(COLUMNS.is_multiple_of(C)) };
    let mut slab = MaybeUninit::<Slab>::uninit();
    let mut results = MaybeUninit::<Results<COLUMNS>>::uninit();
    let (slab, results) = (slab.as_mut_ptr(), results.as_mut_ptr().cast::<Sum>());
    for columns in columns.chunks(equal_part(columns.len(), COLUMNS, C)) {
        let beside = are_side_by_side(columns, SLAB_BYTES);
        for row in (0..panel.rows).step_by(PANEL) {
            let weights = panel.weights.wrapping_add(row / PANEL * panel.stride);
            // SAFETY: packed memory has whole panels, with `k` elements of `PANEL` rows, `len` of
            // them in this slab. `results` has room for `COLUMNS` sums, and parts have no more
            // columns. Only this function uses `slab` and `results`. The instructions of `V` are
            // available.
            unsafe {
                results.write_bytes(0, columns.len());
                for first in (0..panel.k).step_by(SLAB) {
                    let len = SLAB.min(panel.k - first);
                    let weights = weights.wrapping_add(first * PANEL * E::BYTES);
                    for half in 0..2 {
                        let weights = weights.wrapping_add(half * len * LANES * E::BYTES);
                        Slab::round::<V, E>(slab, weights, len, half);
                    }
                    for first_row in (0..PANEL).step_by(R * V::LANES) {
                        let strip = Strip {
                            slab,
                            beside,
                            row: first_row,
                            at: first / SLAB * panel.slabs,
                            next: panel.slabs,
                            groups: len.div_ceil(GROUP),
                            weights: weights.wrapping_add(len * PANEL * E::BYTES),
                        };
                        multiply_strip(&strip, columns, results);
                    }
                }
                store_all(panel, row, columns, results);
            }
        }
    }
}

/// Room for slabs of columns.
#[repr(C, align(64))]
struct Tile<const C: usize>([[u8; SLAB_BYTES]; C]);

/// Weights that a tile of columns prefetches.
#[derive(Clone, Copy)]
struct Prefetch {
    from: *const u8,
    /// Number of lines for each group.
    lines: usize,
}

/// Some rows of a rounded slab and its place in columns.
struct Strip {
    slab: *const Slab,
    /// True if columns' slabs are [adjacent](are_side_by_side).
    beside: bool,
    /// The first row.
    row: usize,
    /// Offset of the slab in a column, in bytes.
    at: usize,
    /// Distance to the next slab.
    next: usize,
    groups: usize,
    /// Address of the next slab of weights.
    weights: *const u8,
}

impl Strip {
    /// Multiplies with all columns.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn all<V: Int16Simd, const R: usize, const C: usize>(
        &self,
        columns: &[Column],
        results: *mut Sum,
    ) {
        let mut copy = MaybeUninit::<Tile<C>>::uninit();
        let copy = copy.as_mut_ptr().cast::<u8>();
        // Each of the first tiles of the first rows prefetches this number of lines with each
        // group. All at once, they would delay other loads.
        let asking = columns.len().div_ceil(C).min(ASKING);
        let lines = (SLAB * PANEL * size_of::<u16>() / 64).div_ceil(asking * GROUPS);
        for (i, tile) in columns.chunks(C).enumerate() {
            let ask = Prefetch {
                from: self.weights.wrapping_add(i * GROUPS * lines * 64),
                lines: if i < asking && self.row == 0 {
                    lines
                } else {
                    0
                },
            };
            // The data after this many columns is not in the L1 cache.
            let next = match columns.get(C * i + tile.len()) {
                Some(next) => next.x.wrapping_add(self.at),
                None => columns[0].x.wrapping_add(self.at + self.next),
            };
            // SAFETY: columns have a slab at byte `at`, and `copy` has room for `C` of them, the
            // maximum of a tile. `C * i` columns come before these, so their sums exist. The slab
            // is rounded, and the instructions are available.
            unsafe {
                let x = side_by_side(tile, self.beside, self.at, SLAB_BYTES, copy);
                let results = results.add(C * i);
                match tile.len() {
                    1 => self.run::<V, R, 1>(x, next, results, ask),
                    2 => self.run::<V, R, 2>(x, next, results, ask),
                    3 => self.run::<V, R, 3>(x, next, results, ask),
                    4 if C > 4 => self.run::<V, R, 4>(x, next, results, ask),
                    5 if C > 5 => self.run::<V, R, 5>(x, next, results, ask),
                    _ => self.run::<V, R, C>(x, next, results, ask),
                }
            }
        }
    }

    /// Multiplies with the columns whose slabs are at `x`, one after the other, and adds the
    /// products to `results`. Meanwhile prefetches as many slabs from `next`, and weights.
    ///
    /// # Safety
    /// `groups` groups of the slab must be rounded for `R` registers of rows from `row`. `C` slabs
    /// of columns must be readable at `x`, one after the other, and their sums must be writable at
    /// `results`, elsewhere. The instructions of `V` must be available.
    #[inline(always)]
    unsafe fn run<V: Int16Simd, const R: usize, const C: usize>(
        &self,
        x: *const u8,
        next: *const u8,
        results: *mut Sum,
        weights: Prefetch,
    ) {
        let row = |r: usize| self.row + r * V::LANES;
        // SAFETY: groups below `groups` of the slab are rounded, `R` registers of rows from
        // `self.row` are inside the panel, and `C` slabs of `SLAB_BYTES` are at `x`, one after the
        // other. `results` has sums of as many columns, in other memory. Prefetching is allowed at
        // any address.
        unsafe {
            let result = |c: usize, r: usize| results.add(c).cast::<f32>().add(row(r));
            let rows = Slab::terms(self.slab.cast_mut(), self.row);
            let columns = Columns {
                first: terms(x.cast_mut()),
                apart: [SLAB_BYTES / 4; 2],
            };
            let mut sums = [[V::splat_float(0.0); R]; C];
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = V::load_floats(result(c, r));
                }
            }
            for group in 0..self.groups {
                let ask = |from: *const u8, bytes: usize| {
                    let from = from.wrapping_add(group * (bytes / GROUPS));
                    for line in 0..(bytes / GROUPS).div_ceil(64) {
                        V::prefetch(from.wrapping_add(line * 64));
                    }
                };
                ask(next, C * SLAB_BYTES);
                ask(results.add(C).cast(), C * size_of::<Sum>());
                for line in group * weights.lines..(group + 1) * weights.lines {
                    V::prefetch(weights.from.wrapping_add(line * 64));
                }
                let whole = int16::products::<V, R, C>(rows, columns, group);
                let mut scales = [V::splat_float(0.0); R];
                for r in 0..R {
                    scales[r] = V::load_floats(rows.scale(group).add(r * V::LANES));
                }
                for c in 0..C {
                    let scale = columns.at(c).scale(group).read();
                    for r in 0..R {
                        let scale = V::mul(scales[r], V::splat_float(scale));
                        V::accumulate(&mut sums[c][r], V::floats(whole[c][r]), scale);
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    V::store_floats(sums[c][r], result(c, r));
                }
            }
        }
    }
}

/// Compiles the product for one instruction set, with the given numbers of row registers and
/// columns per tile.
macro_rules! compile {
    ($name:ident, $simd:ty, $rows:literal x $columns:literal, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<E: Element>(panel: &Panel, columns: &[Column]) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn strip(strip: &Strip, columns: &[Column], results: *mut Sum) {
                // SAFETY: `panels`, which calls this, has rounded the slab, and has the columns and
                // their sums; the features above are those of the registers.
                unsafe { strip.all::<$simd, $rows, $columns>(columns, results) }
            }
            // SAFETY: the features above are those of the registers, and only a detected
            // instruction set leads here. Panels and columns are as `PanelFn` requires.
            unsafe { panels::<$simd, E, $rows, $columns>(panel, columns, strip) }
        }
    };
}

compile!(avx512, Zmm<true>, 2 x 6, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
compile!(avx512_crossed, Zmm<true, true>, 2 x 6,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
compile!(avx_vnni, Ymm<true>, 2 x 4, "avx2,fma,f16c,avxvnni");
compile!(avx2, Ymm<false>, 2 x 4, "avx2,fma,f16c");

/// Returns the product for packed rows of `k` elements of `dtype` with `columns` columns, if about
/// `each` of them are multiplied with one matrix, and the form of columns that it needs. Returns
/// `None` if there is none, or none that is worthwhile.
pub(crate) fn product(
    isa: Isa,
    dtype: DType,
    k: usize,
    columns: usize,
    each: usize,
) -> Option<(PanelFn, Int16Slabs)> {
    let crossed = isa.is_crossed();
    let function: PanelFn = match (isa, dtype) {
        (Isa::Avx512(token), DType::F16) if token.vnni() && crossed => avx512_crossed::<F16>,
        (Isa::Avx512(token), DType::BF16) if token.vnni() && crossed => avx512_crossed::<Bf16>,
        (Isa::Avx512(token), DType::F16) if token.vnni() => avx512::<F16>,
        (Isa::Avx512(token), DType::BF16) if token.vnni() => avx512::<Bf16>,
        (Isa::Avx2(token), DType::F16) if token.vnni() => avx_vnni::<F16>,
        (Isa::Avx2(token), DType::BF16) if token.vnni() => avx_vnni::<Bf16>,
        (Isa::Avx2(_), DType::F16) => avx2::<F16>,
        (Isa::Avx2(_), DType::BF16) => avx2::<Bf16>,
        _ => return None,
    };
    let form = Int16Slabs {
        isa,
        crossed,
        slabs: Slabs::new(SLAB, SLAB_BYTES, k, columns)?,
    };
    // Minimum number of columns for which rows are rounded.
    let worth = match isa {
        Isa::Avx512(_) => 16,
        _ => 8,
    };
    (each >= worth).then_some((function, form))
}
