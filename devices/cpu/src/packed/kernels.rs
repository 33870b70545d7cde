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

use super::activations::{ColumnSpec, SLAB, Sums};
use super::formats::{
    Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Tq1_0, Tq2_0,
};
use super::unpack::{
    CROSSED, Format, PanelSlab, Sink, Slab, Store, WORDS, column_spec, is_crossed,
};
use super::{LANES, PANEL, Sum, equal_part, store_all};
use crate::detect::Isa;
use crate::simd;
use crate::simd::float_products::{Column, Panel, PanelFn};
use crate::simd::int8::{Simd, room};
use crate::simd::math::ROUND;
use crate::tune::Reading;
use samite_core::DType;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// What an expression is for the format of a type, if it can be packed.
macro_rules! for_format {
    ($dtype:expr, $format:ident => $result:expr) => {
        for_format!($dtype, $format => $result; Q8_0 Q8_0, Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, IQ4_NL Iq4Nl,
            IQ4_XS Iq4Xs, MXFP4 Mxfp4, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K,
            TQ1_0 Tq1_0, TQ2_0 Tq2_0)
    };
    ($dtype:expr, $format:ident => $result:expr; $($name:ident $type:ty),*) => {
        match $dtype {
            $(DType::$name => {
                type $format = $type;
                Some($result)
            })*
            _ => None,
        }
    };
}

/// The product for a type and what it needs columns to be.
pub(super) fn product(isa: Isa, dtype: DType) -> Option<(PanelFn, ColumnSpec)> {
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
pub(super) fn portable_product(dtype: DType) -> Option<PanelFn> {
    for_format!(dtype, F => portable::product::<F>().0)
}

/// The product for an instruction set, whose token proves that the function may be called.
fn compiled<F: Format>(isa: Isa) -> (PanelFn, ColumnSpec) {
    match isa {
        // With shorter groups, tiles are not faster.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.tiles().is_some() && F::GROUP == 32 => {
            (super::tiles::multiply::<F>, F::COLUMNS)
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
        pub(super) mod $name {
            use super::*;

            pub(in super::super) fn product<F: Format>() -> (PanelFn, ColumnSpec) {
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
pub(super) use portable as base;
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile!(portable, simd::generic_int8::Portable, 1 x 2);

/// Most columns that are multiplied with one slab, so many that unpacking it takes little of the time: a multiple of how many
/// are multiplied at a time, which equal parts are rounded up to.
const COLUMNS: usize = 528;

/// With how many tiles of columns the next slab of weights is asked for, at most: all of it at once would keep columns waiting.
pub(super) const ASKING: usize = 8;

/// Whether columns have one scale for a whole slab, not one for each group. Then the sums of a slab are multiplied with it before they
/// are added to those of the slabs before.
#[inline(always)]
pub(super) const fn is_wide<F: Format>() -> bool {
    F::SCALED == SLAB
}

/// Whether a group has two sums of products at a time. More columns keep the multipliers busy without.
#[inline(always)]
const fn is_split<F: Format>(columns: usize) -> bool {
    F::MIXED == 1 && columns < 4
}

/// Whether so many columns are multiplied with codes as they come out of memory: all sums must stay in registers, of
/// which codes of five bits need some, too.
#[inline(always)]
const fn is_straight<F: Format, V: Simd>(columns: usize) -> bool {
    let most = match F::LARGEST {
        31 => V::STRAIGHT / 2,
        _ => V::STRAIGHT,
    };
    columns <= most && F::MIXED <= 2
}

/// Whether multiplying codes as they come takes longer than reading them.
#[inline(always)]
const fn is_busy<F: Format>(columns: usize) -> bool {
    columns == 8 && !matches!(F::DTYPE, DType::Q8_0)
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

/// Sums of some columns.
#[repr(C, align(64))]
pub(super) struct Results<const N: usize>([Sum; N]);

/// Room for slabs of columns.
#[repr(C, align(64))]
struct Tile<const C: usize>([[u8; 2 * SLAB]; C]);

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
            [a] => few::<F, V, 1>(panel, &[a]),
            [a, b] if F::DTYPE.block_len() == SLAB || is_straight::<F, V>(2) => {
                few::<F, V, 2>(panel, &[a, b]);
            }
            _ if is_straight::<F, V>(columns.len()) => {
                // What is computed twice is stored twice in the same place.
                let last = columns.len() - 1;
                if last < 4 {
                    few::<F, V, 4>(panel, &from_fn(|c| columns[c.min(last)]));
                } else {
                    few::<F, V, 8>(panel, &from_fn(|c| columns[c.min(last)]));
                }
            }
            _ => {
                const { assert!(COLUMNS.is_multiple_of(C)) };
                for columns in columns.chunks(equal_part(columns.len(), COLUMNS, C)) {
                    many::<F, V, R, C>(panel, columns);
                }
            }
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn few<F: Format, V: Simd, const C: usize>(panel: &Panel, columns: &[Column; C]) {
    let Reading { ahead, streams } = panel.reading;
    let panels = panel.rows.div_ceil(PANEL);
    // Each stream has panels that lie one after the other.
    let run = panels.div_ceil(streams.clamp(1, STREAMS));
    for first in 0..run {
        let mut results = [const { Results([[[0.0; LANES]; 2]; C]) }; STREAMS];
        let rows = |stream: usize| (stream * run + first) * PANEL;
        let count = (first..panels).step_by(run).len();
        // SAFETY: the caller's contract: there are so many panels and columns.
        unsafe {
            for part in PanelSlab::all::<F>(panel, 0) {
                let x = columns.map(|c| c.x.wrapping_add(part.number * panel.slabs));
                for half in (0..PANEL).step_by(V::LANES) {
                    for (stream, results) in results.iter_mut().enumerate().take(count) {
                        let results = results.0.as_mut_ptr();
                        let place = |c: usize| results.add(c).cast::<f32>().add(half);
                        let mut direct = Direct::<V, C>::new(x, ahead);
                        for c in 0..C {
                            direct.sums[c] = first_sums::<F, V>(place(c));
                        }
                        let part = part.of_row(panel, rows(stream));
                        part.unpack::<F, V, _>(half, &mut direct);
                        for c in 0..C {
                            store_sums::<F, V>(direct.sums[c], x[c], place(c));
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

/// Most panels that few columns are multiplied with one among the other.
const STREAMS: usize = 4;

/// What sums of a slab begin with: those of the slabs before, which are at `from`, if they are not added in the end.
///
/// # Safety
/// They must be there, and the instructions.
#[inline(always)]
unsafe fn first_sums<F: Format, V: Simd>(from: *const f32) -> V::Floats {
    // SAFETY: the caller's contract.
    unsafe {
        if is_wide::<F>() {
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
        if is_wide::<F>() {
            let scale = V::splat_float(x.add(SLAB).cast::<f32>().read());
            sums = V::mul_add(sums, scale, V::load_floats(to));
        }
        V::store_floats(sums, to);
    }
}

/// Most groups whose codes come one among the other.
const MOST_MIXED: usize = 8;

/// Multiplies rows of a register with columns while they are unpacked.
struct Direct<V: Simd, const C: usize> {
    /// The columns' slabs.
    x: [*const u8; C],
    /// Products of codes, for each group whose codes come now; two sums where that is one, so that none is waited for.
    whole: [[[V::Sum; 2]; C]; MOST_MIXED],
    /// Without the column's scale if there is one for the slab.
    sums: [V::Floats; C],
    /// How many bytes before they come weights are asked for.
    ahead: usize,
}

impl<V: Simd, const C: usize> Direct<V, C> {
    #[inline(always)]
    unsafe fn new(x: [*const u8; C], ahead: usize) -> Self {
        // SAFETY: the instructions are there, by the caller's contract.
        unsafe {
            Direct {
                x,
                whole: [[[V::start(V::splat(0)); 2]; C]; MOST_MIXED],
                sums: [V::splat_float(0.0); C],
                ahead,
            }
        }
    }

    /// Which sums a group has.
    #[inline(always)]
    fn place<F: Format>(group: usize) -> usize {
        const { assert!(F::MIXED <= MOST_MIXED) };
        group % F::MIXED
    }
}

impl<F: Format, V: Simd, const C: usize> Sink<F, V> for Direct<V, C> {
    // Measured: what the compiler makes of plain halves of bytes and one column is better.
    const EVENLY: bool = if C == 1 {
        F::LARGEST != 15
    } else {
        is_straight::<F, V>(C)
    };
    #[inline(always)]
    fn ahead(&self) -> usize {
        self.ahead
    }

    // Where multipliers are the limit, addresses with an index take another instruction each time; where adders have room left, loops are
    // faster.
    const UNROLLED: bool = is_busy::<F>(C) && !V::CROSSED;

    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: V::Words) {
        let place = Self::place::<F>(i / (F::GROUP / 4));
        let chain = if is_split::<F>(C) { i / 4 % 2 } else { 0 };
        for c in 0..C {
            // SAFETY: columns have as many elements as there are codes.
            unsafe {
                let x = self.x[c].add(4 * i).cast::<i32>().read_unaligned();
                let whole = &mut self.whole[place][c][chain];
                // With a group's first codes, the sum starts.
                if C > 1 && is_offset::<F, V>() && i.is_multiple_of(F::GROUP / 4) {
                    let start = self.x[c].add(F::COLUMNS.sums_at() + i / (F::GROUP / 4) * 4);
                    *whole = V::start(V::splat(start.cast::<i32>().read()));
                }
                V::dot(whole, codes, V::splat(x), F::FULL);
                if room(F::LARGEST) < F::GROUP / 4 {
                    V::carry(whole);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: V::Floats) {
        let place = Self::place::<F>(group);
        for c in 0..C {
            // SAFETY: as in `codes`.
            unsafe {
                let chains = &mut self.whole[place][c];
                if room(F::LARGEST) >= F::GROUP / 4 {
                    for chain in chains.iter_mut() {
                        V::carry(chain);
                    }
                }
                let mut whole = V::total(chains[0]);
                if is_split::<F>(C) {
                    whole = V::add(whole, V::total(chains[1]));
                }
                *chains = [V::start(V::splat(0)); 2];
                if C == 1 && is_offset::<F, V>() {
                    // An addition, since the compiler then leaves requests for memory where they are.
                    let start = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                    whole = V::add(whole, V::splat(start.cast::<i32>().read()));
                }
                let sum = &mut self.sums[c];
                if is_wide::<F>() {
                    *sum = V::mul_add(V::floats(whole), scales, *sum);
                } else {
                    let product = scaled::<F, V>(whole, scales);
                    let scale = self.x[c].add(SLAB + 4 * group).cast::<f32>().read();
                    *sum = V::mul_add(product, V::splat_float(scale), *sum);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats) {
        for c in 0..C {
            // SAFETY: as in `codes`.
            unsafe {
                let sum = self.x[c].add(F::COLUMNS.sums_at() + 4 * group);
                let sum = V::splat_float(sum.cast::<f32>().read());
                self.sums[c] = V::mul_add(minimums, sum, self.sums[c]);
            }
        }
    }
}

/// # Safety
/// As [`multiply`], with at most [`COLUMNS`] columns.
#[inline(always)]
unsafe fn many<F: Format, V: Simd, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let mut slab = MaybeUninit::<Slab>::uninit();
    let mut results = MaybeUninit::<Results<COLUMNS>>::uninit();
    let (slab, results) = (slab.as_mut_ptr(), results.as_mut_ptr().cast::<Sum>());
    let beside = are_side_by_side(columns, column_spec::<F, V>().slab_bytes());
    for row in (0..panel.rows).step_by(PANEL) {
        // SAFETY: the caller's contract: there are so many panels and columns, and there is room for all sums.
        unsafe {
            results.write_bytes(0, COLUMNS.min(columns.len() + 1));
            for part in PanelSlab::all::<F>(panel, row) {
                for first in (0..PANEL).step_by(V::LANES) {
                    part.unpack::<F, V, _>(first, &mut Store::new(slab, first));
                }
                for first in (0..PANEL).step_by(R * V::LANES) {
                    let strip = Strip {
                        slab,
                        beside,
                        first,
                        weights: part.end::<F>(),
                        spread: columns.len() >= ASKING * C,
                        at: part.number * panel.slabs,
                        next: panel.slabs,
                        groups: part.len / F::GROUP,
                    };
                    strip.all::<F, V, R, C>(columns, results);
                }
            }
            store_all(panel, row, columns, results);
        }
    }
}

/// Whether slabs of so many bytes lie side by side: those of each column behind those of the one before. Then one address
/// with constant offsets serves for some of them.
#[inline(always)]
pub(super) fn are_side_by_side(columns: &[Column], bytes: usize) -> bool {
    columns
        .windows(2)
        .all(|pair| pair[1].x == pair[0].x.wrapping_add(bytes))
}

/// The slabs of so many bytes that begin at byte `at` of columns, one behind the other: where they are, if columns lie
/// [side by side](are_side_by_side), otherwise in `copy`.
///
/// # Safety
/// The slabs must be there, and room for as many at `copy`.
#[inline(always)]
pub(super) unsafe fn side_by_side(
    columns: &[Column],
    beside: bool,
    at: usize,
    bytes: usize,
    copy: *mut u8,
) -> *const u8 {
    if beside {
        return columns[0].x.wrapping_add(at);
    }
    for (c, column) in columns.iter().enumerate() {
        let x = column.x.wrapping_add(at);
        // SAFETY: the caller's contract.
        unsafe { copy.add(c * bytes).copy_from_nonoverlapping(x, bytes) };
    }
    copy
}

/// Rows of an unpacked slab and its place in columns.
struct Strip {
    slab: *const Slab,
    /// Whether columns' slabs lie [side by side](are_side_by_side).
    beside: bool,
    /// The first row.
    first: usize,
    /// Where the next slab of weights lies.
    weights: *const u8,
    /// Whether it is asked for with the first [`ASKING`] tiles of columns, not with the first one.
    spread: bool,
    /// Where the slab begins in a column, in bytes.
    at: usize,
    /// Where the next one begins, seen from there.
    next: usize,
    groups: usize,
}

impl Strip {
    /// Multiplies `R` registers of rows with all columns.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn all<F: Format, V: Simd, const R: usize, const C: usize>(
        &self,
        columns: &[Column],
        results: *mut Sum,
    ) {
        let (full, rest) = columns.as_chunks::<C>();
        let mut copy = MaybeUninit::<Tile<C>>::uninit();
        let copy = copy.as_mut_ptr().cast::<u8>();
        // What comes behind so many columns is not in the first-level cache.
        let next = |count: usize| match columns.get(count) {
            Some(next) => next.x.wrapping_add(self.at),
            None => columns[0].x.wrapping_add(self.at + self.next),
        };
        let bytes = column_spec::<F, V>().slab_bytes();
        // SAFETY: the caller's contract; a copy has room for so many columns.
        unsafe {
            for (i, tile) in full.iter().enumerate() {
                let x = side_by_side(tile, self.beside, self.at, bytes, copy);
                let next = next(C * (i + 1));
                self.run::<F, V, R, C>(x, next, results.add(C * i), i);
            }
            if rest.is_empty() {
                return;
            }
            // An odd last column is multiplied twice: for each number of columns there would be as much code again.
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
                0 => self.run::<F, V, R, 2>(x, next, results, i),
                1 if C > 4 => self.run::<F, V, R, 4>(x, next, results, i),
                _ => self.run::<F, V, R, C>(x, next, results, i),
            }
        }
    }

    /// Multiplies rows with the columns whose slabs are at `x`, one behind the other, and adds the products to `results`.
    /// Meanwhile asks for as many slabs from `next` on and, if this is one of the first tiles of columns, for the weights that
    /// come next.
    ///
    /// # Safety
    /// The slab must be unpacked, the columns and their results be there, and the instructions.
    #[inline(always)]
    unsafe fn run<F: Format, V: Simd, const R: usize, const C: usize>(
        &self,
        x: *const u8,
        next: *const u8,
        results: *mut Sum,
        tile: usize,
    ) {
        // Lines of the next slab of weights for each group.
        let lines = (F::DTYPE.block_bytes() * PANEL * F::GROUP).div_ceil(F::DTYPE.block_len() * 64);
        let ask = |first: usize, count: usize| {
            for line in first * count..(first + 1) * count {
                // SAFETY: the instructions are there, by the caller's contract.
                unsafe { V::prefetch(self.weights.wrapping_add(line * 64)) }
            }
        };
        // SAFETY: the caller's contract.
        unsafe {
            let zero = V::splat_float(0.0);
            let row = |r: usize| self.first + r * V::LANES;
            let x = from_fn(|c| x.wrapping_add(c * column_spec::<F, V>().slab_bytes()));
            let result = |c: usize, r: usize| results.add(c).cast::<f32>().add(row(r));
            let mut sums = [[zero; R]; C];
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = first_sums::<F, V>(result(c, r));
                }
            }
            let (sums_at, starts_at) = (F::COLUMNS.sums_at(), F::COLUMNS.starts_at());
            for group in 0..self.groups {
                let step = C * column_spec::<F, V>().slab_bytes() / (SLAB / F::GROUP);
                for line in 0..step.div_ceil(64) {
                    V::prefetch(next.wrapping_add(group * step + line * 64));
                }
                let step = C * size_of::<Sum>() / (SLAB / F::GROUP);
                for line in 0..step.div_ceil(64) {
                    let at = C * size_of::<Sum>() + group * step + line * 64;
                    V::prefetch(results.cast::<u8>().wrapping_add(at));
                }
                if self.first == 0 && self.spread {
                    if tile < ASKING {
                        ask(tile * self.groups + group, lines.div_ceil(ASKING));
                    }
                } else if self.first == 0 && tile == 0 {
                    ask(group, lines);
                }
                let mut whole = [[V::start(V::splat(0)); R]; C];
                if is_crossed::<F, V>() {
                    for c in 0..C {
                        let start = x[c].add(starts_at + 4 * group).cast::<i32>().read();
                        for r in 0..R {
                            let starts = (&raw const (*self.slab).starts[group][row(r)]).cast();
                            whole[c][r] = V::start(V::add(V::load(starts), V::splat(start)));
                        }
                    }
                } else if is_offset::<F, V>() {
                    for c in 0..C {
                        let start = x[c].add(sums_at + 4 * group).cast::<i32>().read();
                        whole[c] = [V::start(V::splat(start)); R];
                    }
                }
                if is_crossed::<F, V>() {
                    self.crossed::<F, V, R, C>(group, x, &mut whole);
                } else if V::PAIRS {
                    self.pairs::<F, V, R, C>(group, x, &mut whole);
                } else {
                    self.products::<F, V, R, C>(group, x, &mut whole);
                }
                let mut scales = [zero; R];
                for r in 0..R {
                    scales[r] = V::load_floats(&raw const (*self.slab).scales[group][row(r)]);
                }
                for c in 0..C {
                    for r in 0..R {
                        let (sum, whole) = (&mut sums[c][r], V::total(whole[c][r]));
                        if is_wide::<F>() {
                            V::accumulate(sum, V::floats(whole), scales[r]);
                        } else {
                            let product = scaled::<F, V>(whole, scales[r]);
                            let scale = x[c].add(SLAB + 4 * group).cast::<f32>().read();
                            V::accumulate(sum, product, V::splat_float(scale));
                        }
                    }
                }
                if let Sums::Minus = F::SUMS {
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
                    store_sums::<F, V>(sums[c][r], x[c], result(c, r));
                }
            }
        }
    }

    /// Adds the products of a group to sums; `x` are the columns' slabs.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn products<F: Format, V: Simd, const R: usize, const C: usize>(
        &self,
        group: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        let steps = F::GROUP / 4;
        for i in 0..steps {
            let at = group * steps + i;
            let is_last = i + 1 == steps;
            // SAFETY: the caller's contract.
            unsafe {
                let mut w = [V::splat(0); R];
                for r in 0..R {
                    w[r] = self.codes::<V>(at, r);
                }
                for c in 0..C {
                    let x = x[c].add(4 * at).cast::<i32>().read_unaligned();
                    let x = V::splat(x);
                    for r in 0..R {
                        V::dot(&mut sums[c][r], w[r], x, F::FULL);
                        if is_last
                            || room(F::LARGEST) < steps && (i + 1).is_multiple_of(room(F::LARGEST))
                        {
                            V::carry(&mut sums[c][r]);
                        }
                    }
                }
            }
        }
    }

    /// [`products`](Strip::products), half of them [crossed](self).
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn crossed<F: Format, V: Simd, const R: usize, const C: usize>(
        &self,
        group: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        const { assert!(CROSSED == 2) };
        let at = group * WORDS;
        // Without a loop, in which addresses take more instructions, and some of either kind in turn, since they wait for different units.
        // SAFETY: the caller's contract.
        unsafe {
            self.pair::<V, R, C>(at, x, sums);
            self.word::<V, R, C>(at + 4, x, sums);
            self.word::<V, R, C>(at + 5, x, sums);
            self.pair::<V, R, C>(at + 1, x, sums);
            self.word::<V, R, C>(at + 6, x, sums);
            self.word::<V, R, C>(at + 7, x, sums);
        }
    }

    /// Adds the crossed products of word `at` and the one that it is crossed with.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn pair<V: Simd, const R: usize, const C: usize>(
        &self,
        at: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut w = [[V::splat(0); 2]; R];
            for r in 0..R {
                w[r] = [self.codes::<V>(at, r), self.codes::<V>(at + CROSSED, r)];
            }
            for c in 0..C {
                let x = |at: usize| V::splat(x[c].add(4 * at).cast::<i32>().read_unaligned());
                let (first, second) = (x(at), x(at + CROSSED));
                for r in 0..R {
                    let (a, b) = (V::add_bytes(w[r][0], second), V::add_bytes(w[r][1], first));
                    V::dot_here(&mut sums[c][r], a, b);
                }
            }
        }
    }

    /// Adds the products of word `at`.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn word<V: Simd, const R: usize, const C: usize>(
        &self,
        at: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut w = [V::splat(0); R];
            for r in 0..R {
                w[r] = self.codes::<V>(at, r);
            }
            for c in 0..C {
                let x = V::splat(x[c].add(4 * at).cast::<i32>().read_unaligned());
                for r in 0..R {
                    V::dot_here(&mut sums[c][r], w[r], x);
                }
            }
        }
    }

    /// [`products`](Strip::products), of two columns at a time as long as there are two.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn pairs<F: Format, V: Simd, const R: usize, const C: usize>(
        &self,
        group: usize,
        x: [*const u8; C],
        sums: &mut [[V::Sum; R]; C],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            for c in (1..C).step_by(2) {
                for r in 0..R {
                    [sums[c - 1][r], sums[c][r]] = V::mix([sums[c - 1][r], sums[c][r]]);
                }
            }
            for i in (0..F::GROUP / 4).step_by(2) {
                let at = group * (F::GROUP / 4) + i;
                let mut w = [[V::splat(0); 2]; R];
                for r in 0..R {
                    w[r] = [self.codes::<V>(at, r), self.codes::<V>(at + 1, r)];
                }
                for c in (1..C).step_by(2) {
                    let codes = [x[c - 1], x[c]].map(|x| x.wrapping_add(4 * at));
                    for r in 0..R {
                        let pair = [sums[c - 1][r], sums[c][r]];
                        let pair = V::dot_pairs(pair, w[r], codes, F::FULL);
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
                self.products::<F, V, R, 1>(group, [x[C - 1]], last);
            }
        }
    }

    /// Four codes of each row of register `r`.
    ///
    /// # Safety
    /// As [`run`](Strip::run).
    #[inline(always)]
    unsafe fn codes<V: Simd>(&self, at: usize, r: usize) -> V::Words {
        let row = self.first + r * V::LANES;
        // SAFETY: the caller's contract.
        unsafe { V::load((&raw const (*self.slab).codes[at][row]).cast()) }
    }
}
