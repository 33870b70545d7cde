//! What decoding of packed weights to bytes has in common: where rows are, when their memory is asked for, and where codes and scales
//! go. What is different between types is in [`formats`](crate::packed::formats).

use super::layout::Field;
use super::{LANES, PANEL};
use crate::activations::SLAB;
use crate::activations::int8::{ColumnSpec, Sums};
use crate::product::Panel;
use crate::simd::int8::Simd;
use samite_core::DType;
use std::marker::PhantomData;

/// How many bytes before they are unpacked weights are asked for.
const AHEAD: usize = 4096;

/// A part of the rows of a panel, unpacked: codes as bytes, four of each row next to each other, and scales and minimums
/// of each group of elements.
#[repr(C, align(64))]
pub(crate) struct Slab {
    pub codes: [[[u8; 4]; PANEL]; SLAB / 4],
    pub scales: [[f32; PANEL]; SLAB / 16],
    pub minimums: [[f32; PANEL]; SLAB / 16],
}

/// Where the rows of a register are in a slab.
#[derive(Clone, Copy)]
pub(crate) struct SlabWriter {
    slab: *mut Slab,
    row: usize,
}

impl SlabWriter {
    /// For rows from `row` of the panel on.
    ///
    /// # Safety
    /// `slab` must be writable as long as this is used; there are as many rows as a register has.
    #[inline(always)]
    pub unsafe fn new(slab: *mut Slab, row: usize) -> Self {
        SlabWriter { slab, row }
    }
}

/// Where unpacked weights go. The first codes of a group come before its others, codes before their scale, scales before
/// minimums; groups of different blocks come one after the other.
pub(crate) trait Sink<F: Format, V: Simd> {
    /// How many bytes before they come weights should be asked for.
    #[inline(always)]
    fn ahead(&self) -> usize {
        AHEAD
    }

    /// Whether they should be asked for exactly where they come, not where the compiler likes to.
    const EVENLY: bool = false;
    /// Whether whole slabs of small blocks are unpacked without a loop.
    const UNROLLED: bool = false;

    /// Takes the codes of elements `4 * i..4 * i + 4` of the slab: offset so that none is negative, except where they
    /// need [all bits](Format::FULL) and the instruction set takes [signed](Simd::SIGNED) ones.
    ///
    /// # Safety
    /// The slab must have these elements, and the instruction set must be there.
    unsafe fn codes(&mut self, i: usize, codes: V::Words);

    /// Takes the scales of a group of the slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn scale(&mut self, group: usize, scales: V::Floats);

    /// Takes what is subtracted from the products of scales and codes of a group of the slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats);
}

impl<F: Format, V: Simd> Sink<F, V> for SlabWriter {
    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: V::Words) {
        // SAFETY: word `i` is one of the `SLAB / 4` of the slab, as the caller says, and `V::LANES` rows from `self.row` on are
        // inside of the panel; `new` was given a writable slab. The instructions of `V` are there.
        unsafe {
            V::store(codes, (&raw mut (*self.slab).codes[i][self.row]).cast());
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: V::Floats) {
        // SAFETY: the slab, which is writable, has this group, as the caller says, and rows as in `codes`.
        unsafe { V::store_floats(scales, &raw mut (*self.slab).scales[group][self.row]) }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: V::Floats) {
        // SAFETY: the slab, which is writable, has this group, as the caller says, and `V::LANES` rows from `self.row` on are
        // inside of the panel.
        unsafe { V::store_floats(minimums, &raw mut (*self.slab).minimums[group][self.row]) }
    }
}

/// A type of packed weights.
pub(crate) trait Format: Sized {
    const DTYPE: DType;
    /// Elements of a block.
    const BLOCK: usize = 32;
    /// The fields of a block in the order in which a panel has them.
    const FIELDS: &[Field];
    /// How groups of codes are multiplied once they are bytes.
    type Scheme: Scheme;
    /// Groups whose codes come one among the other: so many from a multiple of that on.
    const MIXED: usize = 1;
    /// What has to be done about sums of columns.
    const SUMS: Sums;
    /// The largest code, if none is negative.
    const LARGEST: usize;

    /// Elements that are summed up before their scale is applied, which may be that of others, too.
    const GROUP: usize = Self::Scheme::GROUP;

    /// Whether codes need all eight bits; then their offset is 128.
    const FULL: bool = Self::Scheme::FULL;

    /// What columns must be.
    const COLUMNS: ColumnSpec = {
        let minimums = matches!(Self::SUMS, Sums::Minus);
        assert!(Self::Scheme::MINIMUMS == minimums && Self::Scheme::LARGEST >= Self::LARGEST);
        assert!(Self::FULL == (Self::LARGEST > 127));
        ColumnSpec {
            sums: Self::SUMS,
            ..column_layout::<Self::Scheme>()
        }
    };

    /// Unpacks block number `i` of a slab of so many blocks.
    ///
    /// # Safety
    /// All `blocks` blocks of the rows of a register must be readable at `rows`, `i` be below `blocks`, and the instruction set be
    /// there. `to` must take the codes and groups of all elements of the slab.
    unsafe fn unpack<V: Simd>(rows: Rows, blocks: usize, i: usize, to: &mut impl Sink<Self, V>);
}

/// What products need to know about a format once its codes are bytes. Formats with the same scheme share their micro-kernels.
pub(crate) trait Scheme {
    /// Elements that are summed up before their scale is applied.
    const GROUP: usize;
    /// The elements of a column that share a scale.
    type Scales: ColumnScales;
    /// Whether groups have minimums. Otherwise, codes have an offset.
    const MINIMUMS: bool;
    /// Whether codes need all eight bits; then their offset is 128.
    const FULL: bool;
    /// The largest code, or more.
    const LARGEST: usize;
    /// The same where sums have 32 bits from the start, so that it does not matter how large codes are.
    type Wide: Scheme;

    /// True if a slab of a column has one scale, false if each group has one.
    const SLAB_SCALE: bool = Self::Scales::SLAB;
}

/// The elements of a column that share a scale: the same as in ggml beside the same type of weights.
///
/// Real activations have outliers. One scale for 256 elements where ggml has one for 32 costs as much
/// accuracy as a step of quantization of the weights, although it looks harmless on random numbers.
pub(crate) trait ColumnScales {
    /// True if the elements of a slab share a scale, false if those of a group do.
    const SLAB: bool;
    /// True if sums of products are the bits of numbers that [`ROUND`](crate::simd::math::ROUND) was
    /// added to, which saves converting them. Scales of weights must be exact when multiplied with
    /// it, and stay finite.
    const BITS: bool;
}

/// One scale for the elements of a slab: beside types with blocks of 256 elements.
pub(crate) struct PerSlab;
/// One scale for the 32 elements of a group: beside types with blocks of 32 elements.
pub(crate) struct PerGroup;
/// [`PerGroup`] beside weights whose scales use the whole range of exponents.
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

/// A [`Scheme`] of its constants.
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

/// Where the parts of a column's slab are.
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

/// The part of a panel that lies in a slab.
pub(crate) struct PanelSlab {
    at: *const u8,
    /// Number of the slab.
    pub number: usize,
    /// Number of elements of each row.
    pub len: usize,
}

impl PanelSlab {
    /// The first `len` elements of the panel at `at`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn new(at: *const u8, len: usize) -> Self {
        PanelSlab { at, number: 0, len }
    }

    /// All parts of the panel that begins at row `row`.
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

    /// The same part of the panel that begins at row `row`, if this is one of the first panel's.
    #[inline(always)]
    pub fn of_row(&self, panel: &Panel, row: usize) -> Self {
        PanelSlab {
            at: self.at.wrapping_add(row / PANEL * panel.stride),
            ..*self
        }
    }

    /// Where the next one begins.
    #[inline(always)]
    pub fn end<F: Format>(&self) -> *const u8 {
        let blocks = self.len / F::BLOCK;
        self.at
            .wrapping_add(blocks * F::DTYPE.block_bytes() * PANEL)
    }

    /// Unpacks all rows to a slab.
    ///
    /// # Safety
    /// This part of the panel must be readable, `slab` be writable and other memory, and the instruction set be there.
    #[inline(always)]
    pub unsafe fn decode<F: Format, V: Simd>(&self, slab: *mut Slab) {
        for first in (0..PANEL).step_by(V::LANES) {
            // SAFETY: `first + V::LANES` is at most `PANEL`, as `LANES` of registers divide it: the part has these rows, and
            // the slab, which is writable, a place for each. The instructions of `V` are there.
            unsafe { self.unpack::<F, V, _>(first, &mut SlabWriter::new(slab, first)) }
        }
    }

    /// Unpacks the rows of a register, from row `row` of the panel on.
    ///
    /// # Safety
    /// This part of the panel must be readable, `row` be a multiple of the rows of a register and below `PANEL`, and the instruction
    /// set be there. `to` must take the codes and groups of all elements of the slab.
    #[inline(always)]
    pub unsafe fn unpack<F: Format, V: Simd, S: Sink<F, V>>(&self, row: usize, to: &mut S) {
        let blocks = self.len / F::BLOCK;
        let half = row / LANES * blocks * F::DTYPE.block_bytes() * LANES;
        let rows = Rows {
            ahead: to.ahead(),
            evenly: S::EVENLY,
            ..Rows::new(self.at.wrapping_add(half), row % LANES)
        };
        // SAFETY: `rows` lies in this part of the panel, which is there and has `blocks` blocks of each row.
        unsafe { decode::<F, V, S>(rows, blocks, to) }
    }
}

/// Something for 0 to 7 without a loop, in which sums of several groups would not stay in registers.
macro_rules! eight_times {
    ($i:ident => $body:expr) => { eight_times!($i => $body; 0 1 2 3 4 5 6 7) };
    ($i:ident => $body:expr; $($number:literal)*) => {$({
        let $i = $number;
        $body;
    })*};
}
pub(crate) use eight_times;

/// Unpacks rows of all blocks of a slab, of which there are so many.
///
/// # Safety
/// As [`Format::unpack`].
#[inline(always)]
pub(crate) unsafe fn decode<F: Format, V: Simd, S: Sink<F, V>>(
    rows: Rows,
    blocks: usize,
    to: &mut S,
) {
    const WHOLE: usize = 8;
    // SAFETY: `i` is below `blocks`, which this part of the panel has of each row; where blocks are unrolled, `blocks` is
    // `WHOLE`. The instructions are there, and `to` takes all elements of the slab.
    unsafe {
        if S::UNROLLED && F::BLOCK * WHOLE == SLAB && blocks == WHOLE {
            eight_times!(i => F::unpack::<V>(rows.second(i % 2 == 1), WHOLE, i, to));
        } else {
            // Beside code without a loop, one of two blocks made the compiler keep that code's addresses in memory.
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
pub(crate) struct Rows {
    at: *const u8,
    /// The first row in the half.
    first: usize,
    /// How many bytes before they are needed they are asked for, and whether [evenly](Sink::EVENLY).
    ahead: usize,
    evenly: bool,
    /// Whether the block that is unpacked is the second of two: a line that both share is asked for once.
    second: bool,
}

/// Where a block of each row of a half will be, some time ahead; for the second of two that share a line, where the first one will be.
///
/// Lines are asked for in the order of memory, one after the other while another block is unpacked, whatever the order is in
/// which fields are loaded: that is what processors' own prefetching goes on with. A line that parts of a block share may be asked
/// for by both.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    at: *const u8,
    /// The block's own lines.
    first: usize,
    lines: usize,
    evenly: bool,
}

impl Ahead {
    /// Asks for a line, if the block has so many.
    #[inline(always)]
    pub unsafe fn ask<V: Simd>(self, line: usize) {
        if line >= self.lines {
            return;
        }
        let at = self.at.wrapping_add((self.first + line) * 64);
        // SAFETY: asking for a line is allowed at any address; the caller has the instruction.
        unsafe {
            if self.evenly {
                V::prefetch_here(at);
            } else {
                V::prefetch(at);
            }
        }
    }

    /// Asks for the lines of step `i` of int8, which share so many lines from line `first` on.
    #[inline(always)]
    pub unsafe fn ask_eighth<V: Simd>(self, first: usize, lines: usize, i: usize) {
        for line in i * lines / 8..(i + 1) * lines / 8 {
            // SAFETY: `ask` takes any line, and the caller has the instruction.
            unsafe { self.ask::<V>(first + line) }
        }
    }
}

impl Rows {
    /// Rows from row `first` of half a panel on.
    #[inline(always)]
    pub fn new(at: *const u8, first: usize) -> Self {
        Rows {
            at,
            first,
            ahead: AHEAD,
            evenly: false,
            second: false,
        }
    }

    /// The same rows, where the block that is unpacked is the second of two, or is not.
    #[inline(always)]
    fn second(self, second: bool) -> Self {
        Rows { second, ..self }
    }

    /// What has to be asked for while block `i` is unpacked, of rows that begin with the half, not with a field in it.
    #[inline(always)]
    pub fn ahead<F: Format>(self, i: usize) -> Ahead {
        let bytes = F::DTYPE.block_bytes() * LANES;
        let number = usize::from(self.second);
        let first = (number * bytes).div_ceil(64);
        Ahead {
            at: self.at.wrapping_add((i - number) * bytes + self.ahead),
            first,
            lines: ((number + 1) * bytes).div_ceil(64) - first,
            evenly: self.evenly,
        }
    }

    /// The same rows in what lies behind so many bytes of each row.
    #[inline(always)]
    pub fn behind(self, bytes: usize) -> Self {
        Rows {
            at: self.at.wrapping_add(bytes * LANES),
            ..self
        }
    }

    /// Where unit number `i` of the rows is; a row's unit has so many bytes.
    #[inline(always)]
    pub fn unit(self, i: usize, bytes: usize) -> *const u8 {
        self.at.wrapping_add((i * LANES + self.first) * bytes)
    }

    /// Four bytes of each row.
    #[inline(always)]
    pub unsafe fn words<V: Simd>(self, i: usize) -> V::Words {
        // SAFETY: unit `i` of these rows is inside of the block, so as many units as `V` has lanes follow: rows lie side by side,
        // `LANES` in a half.
        unsafe { V::load(self.unit(i, 4)) }
    }

    /// A half-precision number of each row.
    #[inline(always)]
    pub unsafe fn halves<V: Simd>(self, i: usize) -> V::Floats {
        // SAFETY: unit `i` of these rows is inside of the block, so two bytes of each of as many rows as `V` has lanes follow:
        // rows lie side by side, `LANES` in a half.
        unsafe { V::load_f16(self.unit(i, 2)) }
    }
}
