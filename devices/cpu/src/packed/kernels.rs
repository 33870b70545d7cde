//! Products of packed rows with columns of 8 bits, for AVX-512 with VNNI.
//!
//! With one or two columns, codes of blocks of 256 are multiplied as they come out of memory. Otherwise, a slab of a panel, 32 rows of up
//! to 256 elements, is unpacked to bytes in the first-level cache and multiplied with all columns: six at a time (twelve
//! accumulators are enough to keep the multipliers busy), or [tile by tile](super::tiles) where the processor has such.
//! Products of a slab are added to sums in memory.
//!
//! Each element of a result is summed in one order whatever the number of rows and columns is, and whichever of these
//! ways it takes.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::activations::{ColumnSpec, SLAB, Sums};
use super::formats::{
    Format, Half, Iq4Nl, Iq4Xs, Mxfp4, PanelSlab, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K,
    Q8_0, Sink, Slab,
};
use super::{LANES, PANEL, Sum, tiles};
use crate::detect::Avx512;
use crate::simd::float::{Column, Panel, PanelFn};
use samite_core::DType;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The product for a type and what it needs columns to be. The token proves that the function may be called.
pub(super) fn product(token: Avx512, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
    fn of<F: Format>(token: Avx512) -> (PanelFn, ColumnSpec) {
        match token.tiles() {
            // With shorter groups, tiles are not faster.
            Some(_) if F::GROUP == 32 => (tiles::multiply::<F>, F::COLUMNS),
            _ => (multiply::<F>, F::COLUMNS),
        }
    }
    Some(match dtype {
        DType::Q8_0 => of::<Q8_0>(token),
        DType::Q4_0 => of::<Q4_0>(token),
        DType::Q4_1 => of::<Q4_1>(token),
        DType::Q5_0 => of::<Q5_0>(token),
        DType::Q5_1 => of::<Q5_1>(token),
        DType::IQ4_NL => of::<Iq4Nl>(token),
        DType::IQ4_XS => of::<Iq4Xs>(token),
        DType::MXFP4 => of::<Mxfp4>(token),
        DType::Q2_K => of::<Q2K>(token),
        DType::Q3_K => of::<Q3K>(token),
        DType::Q4_K => of::<Q4K>(token),
        DType::Q5_K => of::<Q5K>(token),
        DType::Q6_K => of::<Q6K>(token),
        _ => return None,
    })
}

/// Columns that are multiplied with one slab: their sums stay in the first-level cache too.
const COLUMNS: usize = 60;

/// Groups whose products are summed before they are multiplied with the scale of the column, if that is one for the whole
/// slab.
pub(super) const PART: usize = 4;

/// Whether columns have one scale for a whole slab, not one for each group.
#[inline(always)]
pub(super) const fn is_wide<F: Format>() -> bool {
    F::SCALED == SLAB
}

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply<F: Format>(panel: &Panel, columns: &[Column]) {
    // SAFETY: the caller's contract.
    unsafe {
        // Blocks of 32 have one sum at a time: waiting for it would keep memory waiting.
        match *columns {
            [] => {}
            [a] if F::DTYPE.block_len() == SLAB => few::<F, 1>(panel, &[a]),
            [a, b] if F::DTYPE.block_len() == SLAB => few::<F, 2>(panel, &[a, b]),
            _ => {
                for columns in columns.chunks(COLUMNS) {
                    many::<F>(panel, columns);
                }
            }
        }
    }
}

/// Stores the sums of a column for the rows of the panel that begins at row `row`.
///
/// # Safety
/// The column must have room for results of the panel's rows, and the instructions be there.
#[inline(always)]
unsafe fn store(panel: &Panel, row: usize, column: &Column, sums: [__m512; 2]) {
    for (half, sums) in sums.into_iter().enumerate() {
        let first = row + half * LANES;
        let rows = panel.rows.saturating_sub(first);
        let mask = if rows < LANES { (1 << rows) - 1 } else { !0 };
        // SAFETY: the caller's contract; lanes without rows are not stored.
        unsafe {
            let out = column.out.wrapping_add(panel.first + first);
            _mm512_mask_storeu_ps(out, mask, sums);
        }
    }
}

/// Stores the sums of all columns for the rows of the panel that begins at row `row`.
///
/// # Safety
/// As [`store`]; there must be sums of as many columns, aligned to 64.
#[inline(always)]
pub(super) unsafe fn store_all(panel: &Panel, row: usize, columns: &[Column], results: *const Sum) {
    for (c, column) in columns.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            let sums = results.add(c).cast::<f32>();
            let sums = [_mm512_load_ps(sums), _mm512_load_ps(sums.add(LANES))];
            store(panel, row, column, sums);
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn few<F: Format, const C: usize>(panel: &Panel, columns: &[Column; C]) {
    for row in (0..panel.rows).step_by(PANEL) {
        // SAFETY: the caller's contract: there are so many panels and columns.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); C]; 2];
            for part in PanelSlab::all::<F>(panel, row) {
                let x = columns.map(|c| c.x.wrapping_add(part.number * panel.slabs));
                for half in 0..2 {
                    let mut direct = Direct::<C>::new(x, sums[half]);
                    part.unpack::<F>(half, &mut direct);
                    sums[half] = direct.sums;
                }
            }
            for c in 0..C {
                store(panel, row, &columns[c], [sums[0][c], sums[1][c]]);
            }
        }
    }
}

/// Multiplies half a panel with columns while it is unpacked.
struct Direct<const C: usize> {
    /// The columns' slabs.
    x: [*const u8; C],
    /// Products of codes, for each group of a block.
    whole: [[__m512i; C]; SLAB / 16],
    /// Products of the part, without the column's scale if there is one for the slab.
    part: [__m512; C],
    sums: [__m512; C],
}

impl<const C: usize> Direct<C> {
    #[inline(always)]
    unsafe fn new(x: [*const u8; C], sums: [__m512; C]) -> Self {
        // SAFETY: the instructions are there, by the caller's contract.
        unsafe {
            Direct {
                x,
                whole: [[_mm512_setzero_si512(); C]; SLAB / 16],
                part: [_mm512_setzero_ps(); C],
                sums,
            }
        }
    }

    /// Which accumulators a group has: groups of a block may come together.
    #[inline(always)]
    fn place<F: Format>(group: usize) -> usize {
        group % (F::DTYPE.block_len() / F::GROUP)
    }

    /// After the last step of a group.
    #[inline(always)]
    unsafe fn end<F: Format>(&mut self, group: usize) {
        if is_wide::<F>() && group % PART == PART - 1 {
            for c in 0..C {
                // SAFETY: the caller's contract.
                unsafe {
                    let scale = _mm512_set1_ps(self.x[c].add(SLAB).cast::<f32>().read());
                    self.sums[c] = _mm512_fmadd_ps(self.part[c], scale, self.sums[c]);
                    self.part[c] = _mm512_setzero_ps();
                }
            }
        }
    }
}

impl<F: Format, const C: usize> Sink<F> for Direct<C> {
    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: __m512i) {
        let place = Self::place::<F>(i / (F::GROUP / 4));
        for c in 0..C {
            // SAFETY: columns have as many elements as there are codes.
            unsafe {
                let x = self.x[c].add(4 * i).cast::<i32>().read_unaligned();
                let whole = &mut self.whole[place][c];
                *whole = _mm512_dpbusd_epi32(*whole, codes, _mm512_set1_epi32(x));
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: __m512) {
        let place = Self::place::<F>(group);
        for c in 0..C {
            // SAFETY: as in `codes`.
            unsafe {
                let whole = &mut self.whole[place][c];
                if let Sums::Offset(_) = F::SUMS {
                    let start = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                    let start = _mm512_set1_epi32(start.cast::<i32>().read());
                    *whole = _mm512_add_epi32(*whole, start);
                }
                let product = _mm512_cvtepi32_ps(*whole);
                *whole = _mm512_setzero_si512();
                if is_wide::<F>() {
                    self.part[c] = _mm512_fmadd_ps(product, scales, self.part[c]);
                } else {
                    let scale = self.x[c].add(SLAB + 4 * group).cast::<f32>().read();
                    let scales = _mm512_mul_ps(scales, _mm512_set1_ps(scale));
                    self.sums[c] = _mm512_fmadd_ps(product, scales, self.sums[c]);
                }
            }
        }
        if let Sums::Offset(_) = F::SUMS {
            // SAFETY: the caller's contract.
            unsafe { self.end::<F>(group) };
        }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: __m512) {
        for c in 0..C {
            // SAFETY: as in `codes`.
            unsafe {
                let sum = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                let sum = _mm512_set1_ps(sum.cast::<f32>().read());
                let to = if is_wide::<F>() {
                    &mut self.part[c]
                } else {
                    &mut self.sums[c]
                };
                *to = _mm512_fmadd_ps(minimums, sum, *to);
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.end::<F>(group) };
    }
}

#[repr(C, align(64))]
struct Results([Sum; COLUMNS]);

/// # Safety
/// As [`multiply`], with at most [`COLUMNS`] columns.
#[inline(always)]
unsafe fn many<F: Format>(panel: &Panel, columns: &[Column]) {
    let mut slab = MaybeUninit::<Slab>::uninit();
    let mut results = MaybeUninit::<Results>::uninit();
    let (slab, results) = (slab.as_mut_ptr(), results.as_mut_ptr().cast::<Sum>());
    for row in (0..panel.rows).step_by(PANEL) {
        // SAFETY: the caller's contract: there are so many panels and columns, and there is room for all sums.
        unsafe {
            results.write_bytes(0, columns.len());
            for part in PanelSlab::all::<F>(panel, row) {
                for half in 0..2 {
                    part.unpack::<F>(half, &mut Half::new(slab, half));
                }
                let tile = Strip {
                    slab,
                    weights: part.end::<F>(),
                    at: part.number * panel.slabs,
                    next: panel.slabs,
                    groups: part.len / F::GROUP,
                };
                tile.all::<F>(columns, results);
            }
            store_all(panel, row, columns, results);
        }
    }
}

/// A slab and its place in columns.
struct Strip {
    slab: *const Slab,
    /// Where the next slab of weights lies.
    weights: *const u8,
    /// Where the slab begins in a column, in bytes.
    at: usize,
    /// Where the next one begins, seen from there.
    next: usize,
    groups: usize,
}

impl Strip {
    /// Multiplies the slab with all columns.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn all<F: Format>(&self, columns: &[Column], results: *mut Sum) {
        let (sixes, rest) = columns.as_chunks::<6>();
        // SAFETY: the caller's contract.
        unsafe {
            for (i, six) in sixes.iter().enumerate() {
                // What comes next is not in the first-level cache; the last ones ask for their own next slabs.
                let next: [*const u8; 6] = match sixes.get(i + 1) {
                    Some(next) => next.map(|c| c.x.wrapping_add(self.at)),
                    None => six.map(|c| c.x.wrapping_add(self.at + self.next)),
                };
                self.run::<F, 6>(six, next, results.add(6 * i), i == 0);
            }
            let first = sixes.is_empty();
            let results = results.add(6 * sixes.len());
            match *rest {
                [] => {}
                [a] => self.rest::<F, 1>(&[a], results, first),
                [a, b] => self.rest::<F, 2>(&[a, b], results, first),
                [a, b, c] => self.rest::<F, 3>(&[a, b, c], results, first),
                [a, b, c, d] => self.rest::<F, 4>(&[a, b, c, d], results, first),
                [a, b, c, d, e, ..] => self.rest::<F, 5>(&[a, b, c, d, e], results, first),
            }
        }
    }

    /// Like [`run`](Strip::run), asking for the columns' own next slabs.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn rest<F: Format, const C: usize>(
        &self,
        columns: &[Column; C],
        results: *mut Sum,
        first: bool,
    ) {
        let next = columns.map(|c| c.x.wrapping_add(self.at + self.next));
        // SAFETY: the caller's contract.
        unsafe { self.run::<F, C>(columns, next, results, first) }
    }

    /// Multiplies the slab with columns and adds the products to `results`. Meanwhile asks for as many slabs of columns
    /// that come next and, if these are the `first` columns, for the weights that come next.
    ///
    /// # Safety
    /// The slab must be unpacked, the columns and their results be there, and the instructions.
    #[inline(always)]
    unsafe fn run<F: Format, const C: usize>(
        &self,
        columns: &[Column; C],
        next: [*const u8; C],
        results: *mut Sum,
        first: bool,
    ) {
        // Lines of the next slab of weights for each group.
        let lines = F::DTYPE.block_bytes() * PANEL * F::GROUP / F::DTYPE.block_len() / 64;
        // SAFETY: the caller's contract.
        unsafe {
            let zero = _mm512_setzero_ps();
            let x = columns.map(|c| c.x.add(self.at));
            let result = |c: usize, r: usize| (&raw mut (*results.add(c))[r]).cast::<f32>();
            let mut sums = [[zero; 2]; C];
            if !is_wide::<F>() {
                for c in 0..C {
                    for r in 0..2 {
                        sums[c][r] = _mm512_load_ps(result(c, r));
                    }
                }
            }
            let sums_at = F::COLUMNS.sums_at();
            for group in 0..self.groups {
                let step = F::COLUMNS.slab_bytes() / (SLAB / F::GROUP);
                for next in next {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(group * step).cast());
                }
                if first {
                    // Evenly, so that memory is busy all the time.
                    for line in 0..lines {
                        let line = self.weights.wrapping_add((group * lines + line) * 64);
                        _mm_prefetch::<_MM_HINT_T0>(line.cast());
                    }
                }
                let codes = (&raw const (*self.slab).codes)
                    .cast::<u8>()
                    .add(group * F::GROUP * PANEL);
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
                        let scale = if is_wide::<F>() {
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
                if is_wide::<F>() && group % PART == PART - 1 {
                    for c in 0..C {
                        let scale = _mm512_set1_ps(x[c].add(SLAB).cast::<f32>().read());
                        for r in 0..2 {
                            let sum = _mm512_load_ps(result(c, r));
                            let sum = _mm512_fmadd_ps(sums[c][r], scale, sum);
                            _mm512_store_ps(result(c, r), sum);
                            sums[c][r] = zero;
                        }
                    }
                }
            }
            if !is_wide::<F>() {
                for c in 0..C {
                    for r in 0..2 {
                        _mm512_store_ps(result(c, r), sums[c][r]);
                    }
                }
            }
        }
    }
}
