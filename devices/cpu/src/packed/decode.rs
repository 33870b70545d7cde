//! Common parts of decoding packed weights to bytes: addressing rows, prefetching, and placing
//! codes and scales. [`formats`](crate::packed::formats) has the differences between types.

use super::layout::BlockField;
use super::{LANES, PANEL};
use crate::activations::SLAB;
use crate::activations::int8::{ColumnSpec, Sums};
use crate::product::Panel;
use crate::simd::int8::Simd;
use samite_core::DType;
use std::marker::PhantomData;

/// Prefetch distance of weights in bytes.
const AHEAD: usize = 4096;

/// A part of the rows of a panel, unpacked: codes as bytes, four of each row next to each other,
/// and scales and minimums of each group of elements.
#[repr(C, align(64))]
pub(crate) struct Slab {
    pub codes: [[[u8; 4]; PANEL]; SLAB / 4],
    pub scales: [[f32; PANEL]; SLAB / 16],
    pub minimums: [[f32; PANEL]; SLAB / 16],
}

/// Writer for the rows of a register in a slab.
#[derive(Clone, Copy)]
pub(crate) struct SlabWriter {
    slab: *mut Slab,
    row: usize,
}

impl SlabWriter {
    /// Creates a writer for rows from `row` of the panel.
    ///
    /// # Safety
    /// `slab` must be writable while this is used, and have as many rows from `row` as a register.
    #[inline(always)]
    pub unsafe fn new(slab: *mut Slab, row: usize) -> Self {
        SlabWriter { slab, row }
    }
}

/// Destination of unpacked weights. The first codes of a group come before its others, codes before
/// their scale, scales before minimums. Groups of different blocks come one after the other.
pub(crate) trait Sink<F: Format, V: Simd> {
    /// Returns the prefetch distance of weights in bytes.
    #[inline(always)]
    fn ahead(&self) -> usize {
        AHEAD
    }

    /// True to prefetch exactly where requested, instead of letting the compiler move requests.
    const EVENLY: bool = false;
    /// True to unpack whole slabs of small blocks without a loop.
    const UNROLLED: bool = false;

    /// Takes the codes of elements `4 * i..4 * i + 4` of the slab. Codes have an offset so that
    /// none is negative, unless they need [all bits](Format::FULL) and the instruction set supports
    /// [signed](Simd::SIGNED) ones.
    ///
    /// # Safety
    /// The slab must have these elements, and the instruction set must be available.
    unsafe fn codes(&mut self, i: usize, codes: V::Words);

    /// Takes the scales of a group of the slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn scale(&mut self, group: usize, scales: V::Floats);

    /// Takes the values that are subtracted from the products of scales and codes of a group of the
    /// slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats);
}

impl<F: Format, V: Simd> Sink<F, V> for SlabWriter {
    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: V::Words) {
        // SAFETY: word `i` is one of the `SLAB / 4` of the slab, as the caller guarantees, and
        // `V::LANES` rows from `self.row` are inside the panel. `new` got a writable slab. The
        // instructions of `V` are available.
        unsafe {
            V::store(codes, (&raw mut (*self.slab).codes[i][self.row]).cast());
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: V::Floats) {
        // SAFETY: the slab, which is writable, has this group, as the caller guarantees, and rows
        // as in `codes`.
        unsafe { V::store_floats(scales, &raw mut (*self.slab).scales[group][self.row]) }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats) {
        // SAFETY: the slab, which is writable, has this group, as the caller guarantees, and
        // `V::LANES` rows from `self.row` on are inside the panel.
        unsafe { V::store_floats(minimums, &raw mut (*self.slab).minimums[group][self.row]) }
    }
}

/// A type of packed weights.
pub(crate) trait Format: Sized {
    const DTYPE: DType;
    /// Elements of a block.
    const BLOCK: usize = 32;
    /// Fields of a block, in panel order.
    const FIELDS: &[BlockField];
    /// Scheme that multiplies groups of codes once they are bytes.
    type Scheme: Scheme;
    /// Number of groups whose codes are interleaved, starting at a multiple of it.
    const MIXED: usize = 1;
    /// Form of the sums of columns.
    const SUMS: Sums;
    /// Maximum code, if none is negative.
    const LARGEST: usize;

    /// Number of elements that are summed before their scale is applied. Several groups may share a
    /// scale.
    const GROUP: usize = Self::Scheme::GROUP;

    /// True if codes need all eight bits. Then their offset is 128.
    const FULL: bool = Self::Scheme::FULL;

    /// Requirements for columns.
    const COLUMNS: ColumnSpec = {
        let minimums = matches!(Self::SUMS, Sums::Minus);
        assert!(Self::Scheme::MINIMUMS == minimums && Self::Scheme::LARGEST >= Self::LARGEST);
        assert!(Self::FULL == (Self::LARGEST > 127));
        ColumnSpec {
            sums: Self::SUMS,
            ..column_layout::<Self::Scheme>()
        }
    };

    /// Unpacks block number `i` of a slab of `blocks` blocks.
    ///
    /// # Safety
    /// All `blocks` blocks of the rows of a register must be readable at `rows`, `i` must be below
    /// `blocks`, and the instruction set must be available. `to` must accept the codes and groups
    /// of all elements of the slab.
    unsafe fn unpack<V: Simd>(
        rows: FieldRows,
        blocks: usize,
        i: usize,
        to: &mut impl Sink<Self, V>,
    );
}

/// Properties of a format that products need once its codes are bytes. Formats with the same scheme
/// share their micro-kernels.
pub(crate) trait Scheme {
    /// Number of elements that are summed before their scale is applied.
    const GROUP: usize;
    /// Sharing of scales among a column's elements.
    type Scales: ColumnScales;
    /// True if groups have minimums. Otherwise codes have an offset.
    const MINIMUMS: bool;
    /// True if codes need all eight bits. Then their offset is 128.
    const FULL: bool;
    /// Upper bound of the codes.
    const LARGEST: usize;
    /// Scheme with sums of 32 bits from the start, so that the size of codes does not matter.
    type Wide: Scheme;

    /// True if a slab of a column has one scale, false if each group has one.
    const SLAB_SCALE: bool = Self::Scales::SLAB;
}

/// Sharing of scales among a column's elements: the same as ggml uses with the same type of
/// weights.
///
/// Real activations have outliers. One scale for 256 elements where ggml has one for 32 costs as
/// much accuracy as a coarser quantization of the weights, although it looks harmless on random
/// numbers.
pub(crate) trait ColumnScales {
    /// True if the elements of a slab share a scale, false if those of a group do.
    const SLAB: bool;
    /// True if sums of products are the bits of floats to which [`ROUND`](crate::simd::math::ROUND)
    /// was added, which saves converting them. Scales of weights must be exact when multiplied with
    /// it, and stay finite.
    const BITS: bool;
}

/// One scale for the elements of a slab, for types with blocks of 256 elements.
pub(crate) struct PerSlab;
/// One scale for the 32 elements of a group, for types with blocks of 32 elements.
pub(crate) struct PerGroup;
/// [`PerGroup`] for weights whose scales use the whole range of exponents.
pub(crate) struct PerGroupWide;

impl ColumnScales for PerSlab {
    const SLAB: bool = true;
    const BITS: bool = false;
}

impl ColumnScales for PerGroup {
    const SLAB: bool = false;
    const BITS: bool = true;
}

impl ColumnScales for PerGroupWide {
    const SLAB: bool = false;
    const BITS: bool = false;
}

/// A [`Scheme`] with the given constants.
pub(crate) struct Groups<
    const GROUP: usize,
    Scales,
    const MINIMUMS: bool,
    const FULL: bool,
    const LARGEST: usize,
>(PhantomData<Scales>);

impl<
    const GROUP: usize,
    Scales: ColumnScales,
    const MINIMUMS: bool,
    const FULL: bool,
    const LARGEST: usize,
> Scheme for Groups<GROUP, Scales, MINIMUMS, FULL, LARGEST>
{
    const GROUP: usize = GROUP;
    type Scales = Scales;
    const MINIMUMS: bool = MINIMUMS;
    const FULL: bool = FULL;
    const LARGEST: usize = LARGEST;
    type Wide = Groups<GROUP, Scales, MINIMUMS, FULL, 255>;
}

/// Groups of 32 signed codes of eight bits.
pub(crate) type Bytes<Scales> = Groups<32, Scales, false, true, 255>;
/// Groups of `GROUP` codes up to `LARGEST` with an offset.
pub(crate) type WithOffset<const GROUP: usize, const LARGEST: usize, Scales> =
    Groups<GROUP, Scales, false, false, LARGEST>;
/// Groups of `GROUP` codes up to `LARGEST` with minimums.
pub(crate) type WithMinimums<const GROUP: usize, const LARGEST: usize, Scales> =
    Groups<GROUP, Scales, true, false, LARGEST>;

/// Returns the layout of a column's slab.
pub(crate) const fn column_layout<S: Scheme>() -> ColumnSpec {
    assert!(S::SLAB_SCALE || S::GROUP == 32);
    ColumnSpec {
        scaled: if S::SLAB_SCALE { SLAB } else { S::GROUP },
        group: S::GROUP,
        sums: if S::MINIMUMS {
            Sums::Minus
        } else {
            Sums::Offset(0)
        },
        bits: S::Scales::BITS,
    }
}

/// The part of a panel in a slab.
pub(crate) struct PanelSlab {
    at: *const u8,
    /// Number of the slab.
    pub number: usize,
    /// Number of elements of each row.
    pub len: usize,
}

impl PanelSlab {
    /// Returns the first `len` elements of the panel at `at`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn new(at: *const u8, len: usize) -> Self {
        PanelSlab { at, number: 0, len }
    }

    /// Iterates over all parts of the panel that starts at row `row`.
    #[inline(always)]
    pub fn all<F: Format>(panel: &Panel, row: usize) -> impl Iterator<Item = Self> {
        let (weights, k) = (panel.weights, panel.k);
        let at = weights.wrapping_add(row / PANEL * panel.stride);
        let bytes = SLAB / F::BLOCK * F::DTYPE.block_bytes() * PANEL;
        (0..k.div_ceil(SLAB)).map(move |number| PanelSlab {
            at: at.wrapping_add(number * bytes),
            number,
            len: SLAB.min(k - number * SLAB),
        })
    }

    /// Returns the same part of the panel that starts at row `row`, if `self` belongs to the first
    /// panel.
    #[inline(always)]
    pub fn of_row(&self, panel: &Panel, row: usize) -> Self {
        PanelSlab {
            at: self.at.wrapping_add(row / PANEL * panel.stride),
            ..*self
        }
    }

    /// Returns the address of the next part.
    #[inline(always)]
    pub fn end<F: Format>(&self) -> *const u8 {
        let blocks = self.len / F::BLOCK;
        self.at
            .wrapping_add(blocks * F::DTYPE.block_bytes() * PANEL)
    }

    /// Unpacks all rows to a slab.
    ///
    /// # Safety
    /// This part of the panel must be readable, `slab` must be writable and disjoint, and the
    /// instruction set must be available.
    #[inline(always)]
    pub unsafe fn decode<F: Format, V: Simd>(&self, slab: *mut Slab) {
        for first in (0..PANEL).step_by(V::LANES) {
            // SAFETY: `first + V::LANES` is at most `PANEL`, as `LANES` of registers divide it. The
            // part has these rows, and the slab, which is writable, has room for each. The
            // instructions of `V` are available.
            unsafe { self.unpack::<F, V, _>(first, &mut SlabWriter::new(slab, first)) }
        }
    }

    /// Unpacks the rows of a register, starting with row `row` of the panel.
    ///
    /// # Safety
    /// This part of the panel must be readable, `row` must be a multiple of the rows of a register
    /// and below `PANEL`, and the instruction set must be available. `to` must accept the codes and
    /// groups of all elements of the slab.
    #[inline(always)]
    pub unsafe fn unpack<F: Format, V: Simd, S: Sink<F, V>>(&self, row: usize, to: &mut S) {
        let blocks = self.len / F::BLOCK;
        let half = row / LANES * blocks * F::DTYPE.block_bytes() * LANES;
        let rows = FieldRows {
            ahead: to.ahead(),
            evenly: S::EVENLY,
            ..FieldRows::new(self.at.wrapping_add(half), row % LANES)
        };
        // SAFETY: `rows` lies in this part of the panel, which exists and has `blocks` blocks of
        // each row.
        unsafe { decode::<F, V, S>(rows, blocks, to) }
    }
}

/// Evaluates an expression for 0 to 7 without a loop. In a loop, sums of several groups would not
/// stay in registers.
macro_rules! eight_times {
    ($i:ident => $body:expr) => { eight_times!($i => $body; 0 1 2 3 4 5 6 7) };
    ($i:ident => $body:expr; $($number:literal)*) => {$({
        let $i = $number;
        $body;
    })*};
}
pub(crate) use eight_times;

/// Unpacks rows of all `blocks` blocks of a slab.
///
/// # Safety
/// As [`Format::unpack`].
#[inline(always)]
pub(crate) unsafe fn decode<F: Format, V: Simd, S: Sink<F, V>>(
    rows: FieldRows,
    blocks: usize,
    to: &mut S,
) {
    const WHOLE: usize = 8;
    // SAFETY: `i` is below `blocks`, and this part of the panel has that many of each row. If
    // blocks are unrolled, `blocks` is `WHOLE`. The instructions are available, and `to` accepts
    // all elements of the slab.
    unsafe {
        if S::UNROLLED && F::BLOCK * WHOLE == SLAB && blocks == WHOLE {
            eight_times!(i => F::unpack::<V>(rows.second(i % 2 == 1), WHOLE, i, to));
        } else {
            // Next to code without a loop, a loop over two blocks made the compiler keep that
            // code's addresses in memory.
            let pairs = !S::UNROLLED && F::BLOCK < SLAB;
            for i in (0..blocks).step_by(if pairs { 2 } else { 1 }) {
                F::unpack::<V>(rows, blocks, i, to);
                if pairs && i + 1 < blocks {
                    F::unpack::<V>(rows.second(true), blocks, i + 1, to);
                }
            }
        }
    }
}

/// Rows of a register in a field of half a panel.
#[derive(Clone, Copy)]
pub(crate) struct FieldRows {
    at: *const u8,
    /// The first row in the half.
    first: usize,
    /// Prefetch distance in bytes.
    ahead: usize,
    /// True if requests are [even](Sink::EVENLY).
    evenly: bool,
    /// True if the current block is the second of a pair. A line that both share is prefetched
    /// once.
    second: bool,
}

/// Prefetcher for a later block of each row of a half. For the second block of a pair that shares a
/// line, it prefetches like the first one.
///
/// Lines are prefetched in memory order, one after the other while another block is unpacked,
/// whatever the order in which fields are loaded. The hardware prefetcher continues such a
/// sequence. A line that parts of a block share may be prefetched by both.
#[derive(Clone, Copy)]
pub(crate) struct Prefetcher {
    at: *const u8,
    /// Lines of the block itself.
    first: usize,
    lines: usize,
    evenly: bool,
}

impl Prefetcher {
    /// Prefetches a line, if the block has that many.
    #[inline(always)]
    pub unsafe fn ask<V: Simd>(self, line: usize) {
        if line >= self.lines {
            return;
        }
        let at = self.at.wrapping_add((self.first + line) * 64);
        // SAFETY: prefetching is allowed at any address, and the caller has the instruction.
        unsafe {
            if self.evenly {
                V::prefetch_here(at);
            } else {
                V::prefetch(at);
            }
        }
    }

    /// Prefetches the lines of step `i` of eight, which share `lines` lines starting with line
    /// `first`.
    #[inline(always)]
    pub unsafe fn ask_eighth<V: Simd>(self, first: usize, lines: usize, i: usize) {
        for line in i * lines / 8..(i + 1) * lines / 8 {
            // SAFETY: `ask` accepts any line, and the caller has the instruction.
            unsafe { self.ask::<V>(first + line) }
        }
    }
}

impl FieldRows {
    /// Returns rows from row `first` of half a panel.
    #[inline(always)]
    pub fn new(at: *const u8, first: usize) -> Self {
        FieldRows {
            at,
            first,
            ahead: AHEAD,
            evenly: false,
            second: false,
        }
    }

    /// Returns the same rows, with the current block marked as the second of a pair or not.
    #[inline(always)]
    fn second(self, second: bool) -> Self {
        FieldRows { second, ..self }
    }

    /// Returns the prefetcher for the unpacking of block `i`, for rows that start with the half and
    /// not with a field in it.
    #[inline(always)]
    pub fn ahead<F: Format>(self, i: usize) -> Prefetcher {
        let bytes = F::DTYPE.block_bytes() * LANES;
        let number = usize::from(self.second);
        let first = (number * bytes).div_ceil(64);
        Prefetcher {
            at: self.at.wrapping_add((i - number) * bytes + self.ahead),
            first,
            lines: ((number + 1) * bytes).div_ceil(64) - first,
            evenly: self.evenly,
        }
    }

    /// Returns the same rows, `bytes` bytes of each row later.
    #[inline(always)]
    pub fn behind(self, bytes: usize) -> Self {
        FieldRows {
            at: self.at.wrapping_add(bytes * LANES),
            ..self
        }
    }

    /// Returns the address of unit number `i` of the rows, where a row's unit has `bytes` bytes.
    #[inline(always)]
    pub fn unit(self, i: usize, bytes: usize) -> *const u8 {
        self.at.wrapping_add((i * LANES + self.first) * bytes)
    }

    /// Loads four bytes of each row.
    #[inline(always)]
    pub unsafe fn words<V: Simd>(self, i: usize) -> V::Words {
        // SAFETY: unit `i` of these rows is inside the block, followed by as many units as `V` has
        // lanes: rows are adjacent, `LANES` in a half.
        unsafe { V::load(self.unit(i, 4)) }
    }

    /// Loads a half-precision number of each row.
    #[inline(always)]
    pub unsafe fn halves<V: Simd>(self, i: usize) -> V::Floats {
        // SAFETY: unit `i` of these rows is inside the block, followed by two bytes of each of as
        // many rows as `V` has lanes: rows are adjacent, `LANES` in a half.
        unsafe { V::load_f16(self.unit(i, 2)) }
    }
}
