//! Products of packed F16, BF16 and F32 rows with F32 columns, written once over [`Vector`].
//!
//! The rows of a panel are the lanes, so no sum crosses a register. Each element of a result is one
//! chain of additions from the first element to the last, whatever the number of columns.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::tile::equal_part;
use super::{LANES, PANEL, Sum, store_all};
use crate::activations::SLAB;
use crate::activations::f32::ELEMENTS;
use crate::detect::Isa;
use crate::detect::choose;
use crate::product::{Column, Panel, PanelFn};
use crate::simd::float::{Bf16, Element, F16, F32, Vector};
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::PortableVector;
use crate::simd::prefetch_here;
use samite_core::DType;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// Number of columns that are multiplied with one part of the rows: a multiple of the number
/// multiplied at a time.
const COLUMNS: usize = 120;

/// A half of a panel's part as f32.
#[repr(C, align(64))]
struct Half([[f32; LANES]; ELEMENTS]);

/// Working memory besides weights and columns.
#[repr(C, align(64))]
struct FloatScratch {
    part: [Half; 2],
    results: [Sum; COLUMNS],
}

/// Multiplies whole panels. `R` registers make a panel, `C` columns are multiplied at a time.
/// `multiply_decoded` is [`SlabPart::multiply`] for parts that were decoded to F32, which is the
/// same for all types.
#[inline(always)]
unsafe fn panels<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
    multiply_decoded: unsafe fn(&SlabPart, &[Column], *mut Sum, usize),
) {
    // In slabs, 256 elements of a column are not contiguous.
    if let ([column], false, 0) = (columns, panel.past_caches, panel.slabs) {
        // SAFETY: the panel and the column exist, as `PanelFn` requires.
        return unsafe { one_column::<V, E, R>(panel, column) };
    }
    let mut memory = MaybeUninit::<FloatScratch>::uninit();
    let memory = memory.as_mut_ptr();
    const { assert!(COLUMNS.is_multiple_of(C)) };
    for columns in columns.chunks(equal_part(columns.len(), COLUMNS, C)) {
        // Converting costs less than storing and loading.
        let is_direct = columns.len() <= if V::WIDENS { 2 * C } else { C };
        for row in (0..panel.rows).step_by(PANEL) {
            // SAFETY: whole panels lie in packed memory, `row / PANEL` of them before this one, and
            // each has `k` elements of `PANEL` rows. `results` has room for `COLUMNS` sums, of
            // which a multiple of `C` are set to zero first. `part` is written only where parts
            // have at most `ELEMENTS` elements, which are what its halves have room for. The
            // instructions of `V` are available.
            unsafe {
                let results = (&raw mut (*memory).results).cast::<Sum>();
                results.write_bytes(0, columns.len().next_multiple_of(C));
                let most = if is_direct && panel.slabs == 0 {
                    SLAB
                } else {
                    ELEMENTS
                };
                for mut part in SlabPart::all::<E>(panel, row, most) {
                    if is_direct {
                        part.multiply::<V, E, R, C, true>(columns, results, PANEL * E::BYTES);
                    } else {
                        for half in 0..2 {
                            let to = (&raw mut (*memory).part[half]).cast::<f32>();
                            for i in (0..part.len * LANES).step_by(V::LANES) {
                                E::load::<V>(part.halves[half], i).store(to.add(i));
                            }
                            part.halves[half] = to.cast();
                        }
                        multiply_decoded(&part, columns, results, PANEL * E::BYTES);
                    }
                }
                store_all(panel, row, columns, results);
            }
        }
    }
}

/// Multiplies one column with rows that are in a cache, several panels at a time, because each sum
/// waits for the previous one.
#[inline(always)]
unsafe fn one_column<V: Vector, E: Element, const R: usize>(panel: &Panel, column: &Column) {
    let mut row = 0;
    // SAFETY: `P` panels are multiplied only if the last of them starts below `panel.rows`, and
    // packed memory has whole panels.
    unsafe {
        while row + 3 * PANEL < panel.rows {
            some_panels::<V, E, R, 4>(panel, row, column);
            row += 4 * PANEL;
        }
        if row + PANEL < panel.rows {
            some_panels::<V, E, R, 2>(panel, row, column);
            row += 2 * PANEL;
        }
        if row < panel.rows {
            some_panels::<V, E, R, 1>(panel, row, column);
        }
    }
}

/// Multiplies `P` panels, starting with row `row`.
#[inline(always)]
unsafe fn some_panels<V: Vector, E: Element, const R: usize, const P: usize>(
    panel: &Panel,
    row: usize,
    column: &Column,
) {
    // SAFETY: the instructions of `V` are available, as `PanelFn` requires; no memory is touched.
    let mut sums = unsafe { [[[V::splat(0.0); R]; 1]; P] };
    for first in (0..panel.k).step_by(SLAB) {
        let parts: [SlabPart; P] =
            from_fn(|p| SlabPart::new::<E>(panel, row + p * PANEL, first, SLAB));
        let x = column.x.wrapping_add(parts[0].at).cast();
        for i in 0..parts[0].len {
            for p in 0..P {
                // SAFETY: `i` is below the number of elements of this part, which panels and column
                // have. Panels exist from row `row`.
                unsafe { parts[p].step::<V, E, R, 1>(i, [x], &mut sums[p]) };
            }
        }
    }
    for p in 0..P {
        let mut sum = Sum::default();
        // SAFETY: `R` registers are a panel, so they fill `sum`. `store_all` writes the rows that
        // exist.
        unsafe {
            for r in 0..R {
                sums[p][0][r].store((&raw mut sum).cast::<f32>().add(r * V::LANES));
            }
            store_all(panel, row + p * PANEL, std::slice::from_ref(column), &sum);
        }
    }
}

/// Some elements of the rows of a panel.
struct SlabPart {
    halves: [*const u8; 2],
    len: usize,
    /// Offset of the elements in columns, in bytes.
    at: usize,
    /// Address of the weights to prefetch meanwhile.
    ahead: *const u8,
}

impl SlabPart {
    /// Iterates over all parts of up to `most` elements of the panel that starts at row `row`.
    #[inline(always)]
    fn all<E: Element>(panel: &Panel, row: usize, most: usize) -> impl Iterator<Item = Self> {
        let firsts = (0..panel.k).step_by(most);
        firsts.map(move |first| Self::new::<E>(panel, row, first, most))
    }

    /// Returns up to `most` elements, starting with element `first`.
    #[inline(always)]
    fn new<E: Element>(panel: &Panel, row: usize, first: usize, most: usize) -> Self {
        let weights = panel.weights.wrapping_add(row / PANEL * panel.stride);
        let (k, slabs) = (panel.k, panel.slabs);
        let (start, inner) = (first / SLAB * SLAB, first % SLAB);
        let slab = weights.wrapping_add(start * PANEL * E::BYTES);
        let slab_len = SLAB.min(k - start);
        let half = |half| slab.wrapping_add((half * slab_len + inner) * LANES * E::BYTES);
        SlabPart {
            halves: [half(0), half(1)],
            len: most.min(k - first),
            at: match slabs {
                0 => first * size_of::<f32>(),
                slabs => first / ELEMENTS * slabs,
            },
            ahead: slab.wrapping_add((slab_len + inner) * PANEL * E::BYTES),
        }
    }

    /// Multiplies with all columns and adds the products to `results`. The part's elements have
    /// type `L` and take `bytes` bytes of a panel in memory. `DIRECT` means that they are read from
    /// there.
    ///
    /// # Safety
    /// Both halves of the part must be readable, columns must have its elements from byte `at`, and
    /// `results` must have sums for a multiple of `C` columns, in other memory. The instructions of
    /// `V` must be available. Without `DIRECT`, the part must have at most `ELEMENTS` elements.
    #[inline(always)]
    unsafe fn multiply<
        V: Vector,
        L: Element,
        const R: usize,
        const C: usize,
        const DIRECT: bool,
    >(
        &self,
        columns: &[Column],
        results: *mut Sum,
        bytes: usize,
    ) {
        let tiles = columns.len().div_ceil(C);
        for (i, columns) in columns.chunks(C).enumerate() {
            let last = (i + 1 == tiles).then_some(bytes);
            // SAFETY: `i * C` is below the number of columns, whose sums lie from `results` on, up
            // to a multiple of `C`: a tile has as many columns as it has sums there. The part and
            // the instructions are available.
            unsafe {
                let results = results.add(i * C);
                match *columns {
                    [a] => self.tile::<V, L, R, 1, DIRECT>(&[a], results, last),
                    [a, b] => self.tile::<V, L, R, 2, DIRECT>(&[a, b], results, last),
                    [a, b, c] if const { C > 3 } => {
                        self.tile::<V, L, R, 3, DIRECT>(&[a, b, c], results, last)
                    }
                    [a, b, c, d] if const { C > 4 } => {
                        self.tile::<V, L, R, 4, DIRECT>(&[a, b, c, d], results, last)
                    }
                    _ => {
                        // The last column again, since there is also room for its sums.
                        let most = columns.len() - 1;
                        let columns = from_fn(|c| columns[c.min(most)]);
                        self.tile::<V, L, R, C, DIRECT>(&columns, results, last);
                    }
                }
            }
        }
    }

    /// Multiplies with some columns. Meanwhile prefetches as many columns after them or, if they
    /// are the last ones, weights, which take `bytes` bytes per element.
    ///
    /// # Safety
    /// As [`multiply`](SlabPart::multiply).
    #[inline(always)]
    unsafe fn tile<V: Vector, L: Element, const R: usize, const C: usize, const DIRECT: bool>(
        &self,
        columns: &[Column; C],
        results: *mut Sum,
        last: Option<usize>,
    ) {
        let mut copy = MaybeUninit::<[[f32; ELEMENTS]; C]>::uninit();
        // SAFETY: columns have `len` elements from byte `at`. They are copied only if not `DIRECT`,
        // and then parts have at most `ELEMENTS` elements, for which each column has room in
        // `copy`. `results` has sums of `C` columns, each of `R` registers, which make a panel. The
        // instructions of `V` are available.
        unsafe {
            let mut x = [std::ptr::null::<f32>(); C];
            for c in 0..C {
                x[c] = columns[c].x.wrapping_add(self.at).cast();
            }
            let next = x[0].wrapping_add(C * ELEMENTS).cast();
            // One address with constant offsets then suffices for all. With few columns, copying
            // costs more than that saves.
            if !DIRECT {
                let mut is_run = true;
                for c in 0..C {
                    is_run &= x[c] == x[0].wrapping_add(c * ELEMENTS);
                }
                let mut base = x[0];
                if !is_run {
                    let to = copy.as_mut_ptr().cast::<f32>();
                    for c in 0..C {
                        to.add(c * ELEMENTS)
                            .copy_from_nonoverlapping(x[c], self.len);
                    }
                    base = to;
                }
                for c in 0..C {
                    x[c] = base.wrapping_add(c * ELEMENTS);
                }
            }
            let result = |c: usize, r: usize| results.add(c).cast::<f32>().add(r * V::LANES);
            let mut sums = [[V::splat(0.0); R]; C];
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = V::load(result(c, r));
                }
            }
            // Separate loops, without branches inside.
            if let Some(bytes) = last {
                self.steps::<V, L, R, C, DIRECT>(x, &mut sums, self.ahead, bytes);
            } else {
                self.steps::<V, L, R, C, DIRECT>(x, &mut sums, next, C * size_of::<f32>());
            }
            for c in 0..C {
                for r in 0..R {
                    sums[c][r].store(result(c, r));
                }
            }
        }
    }

    /// Adds the products of all elements. Prefetches `bytes` bytes from `ask` for each element.
    ///
    /// # Safety
    /// As [`multiply`](SlabPart::multiply).
    #[inline(always)]
    unsafe fn steps<V: Vector, L: Element, const R: usize, const C: usize, const DIRECT: bool>(
        &self,
        x: [*const f32; C],
        sums: &mut [[V; R]; C],
        ask: *const u8,
        bytes: usize,
    ) {
        // Without a loop, the compiler moves requests together, which matters if they go to memory.
        let at_once = if DIRECT { 1 } else { 4 };
        let whole = self.len / at_once * at_once;
        for first in (0..whole).step_by(at_once) {
            for i in 0..at_once {
                // SAFETY: `first + i` is below `whole`, so below `len`. Prefetching is allowed at
                // any address.
                unsafe {
                    // Evenly, so that memory is always busy.
                    for line in (i * bytes).div_ceil(64)..((i + 1) * bytes).div_ceil(64) {
                        prefetch_here(ask.wrapping_add(first * bytes + line * 64));
                    }
                    self.step::<V, L, R, C>(first + i, x, sums);
                }
            }
        }
        for i in whole..self.len {
            // SAFETY: `i` is below `len`.
            unsafe { self.step::<V, L, R, C>(i, x, sums) }
        }
    }

    /// Adds the products of element `i`.
    ///
    /// # Safety
    /// As [`multiply`](SlabPart::multiply).
    #[inline(always)]
    unsafe fn step<V: Vector, L: Element, const R: usize, const C: usize>(
        &self,
        i: usize,
        x: [*const f32; C],
        sums: &mut [[V; R]; C],
    ) {
        // SAFETY: `i` is below `len`, so each half has `LANES` rows of this element and each column
        // has it. `lane + V::LANES` is at most `LANES`, as lanes divide it. The instructions of `V`
        // are available.
        unsafe {
            let mut w = [V::splat(0.0); R];
            for r in 0..R {
                let (half, lane) = (r * V::LANES / LANES, r * V::LANES % LANES);
                w[r] = L::load::<V>(self.halves[half], i * LANES + lane);
            }
            for c in 0..C {
                let x = V::splat(*x[c].add(i));
                for r in 0..R {
                    sums[c][r] = w[r].mul_add(x, sums[c][r]);
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
                // SAFETY: the features above are those of the vector type, and only a detected
                // instruction set leads here. Panels and columns are as `PanelFn` requires.
                unsafe { panels::<$vector, E, $registers,
                    $columns>(panel, columns, multiply_decoded) }
            }

            #[inline(never)]
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_decoded(part: &SlabPart, columns: &[Column], results: *mut Sum,
                bytes: usize) {
                // SAFETY: the features above are those of the vector type. `panels`, which calls
                // this, has the part, its columns and sums for a multiple of as many as are
                // multiplied at a time.
                unsafe { part.multiply::<$vector, F32, $registers, $columns,
                    false>(columns, results, bytes) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, PortableVector, 4 x 2);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, 4 x 3, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, std::arch::x86_64::__m512, 2 x 8,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t, 8 x 3);

/// Returns the product for packed rows of `dtype`: F32, F16 or BF16. Columns are F32.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    choose!(isa, dtype, product)
}
