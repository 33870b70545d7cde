//! Products of packed F16 and BF16 rows with many columns by AMX, whose instructions multiply tiles of BF16: 16 columns
//! with 16 rows, 32 elements of each, and add to sums in f32.
//!
//! BF16 has 8 significant bits. A number of F16 with its 11 bits is the sum of two of them, exactly: its upper bits and
//! the rest. Columns are split into planes like that too, which keeps 16 bits of each element. The product of the two
//! rests is below what is kept, so three products of planes make one of F16 rows, and two one of BF16 rows.
//!
//! See chapter 18 of Intel's [Software Developer's Manual](https://www.intel.com/sdm), volume 1.

use super::activations::SLAB;
use super::tiles::Configuration;
use super::{LANES, PANEL, Sum};
use crate::detect::{Bf16Tiles, Isa};
use crate::simd::float::{Column, Panel, PanelFn};
use crate::simd::{Bf16, Element, F16, Vector};
use samite_core::DType;
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Columns of a tile.
const TILE: usize = 16;

/// Elements of a tile of rows or columns.
const STEP: usize = 32;

/// Columns that are multiplied with one slab. Their sums and their part of the slab stay in the second-level cache.
const COLUMNS: usize = 512;

/// Bytes of a plane of a slab of one column.
const PLANE: usize = SLAB * 2;

/// Elements that are unpacked at a time: those of a panel stay in the first-level cache while columns pass by.
const PART: usize = 256;

/// Panels whose sums are made while one slab of columns is in the second-level cache.
const PANELS: usize = 8;

/// Bytes of scratch memory that [`product`] needs for each worker.
pub(crate) const WORKER_BYTES: usize = size_of::<Memory>();

/// Rows that a worker multiplies at a time.
pub(crate) const ROWS: usize = PANELS * PANEL;

/// Distance of columns in bytes: not a power of two, which would crowd a few sets of a cache.
const STRIDE: usize = 2 * PLANE + 64;

/// Columns from which on tiles are faster, though not all of their places are used.
pub(super) const WORTH_PLANES: usize = 8;

/// How columns lie in memory: the first slabs of all of them, then the second ones, and so on. A slab has the elements'
/// upper bits as BF16, then the rests as BF16; behind the last element come zeros up to a multiple of 32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    token: Bf16Tiles,
    /// Bytes of all columns.
    pub bytes: usize,
    /// Distance in bytes of the slabs of a column.
    pub slabs: usize,
}

impl Planes {
    /// For `columns` columns of `k` elements; `None` if the size overflows.
    pub fn new(token: Bf16Tiles, k: usize, columns: usize) -> Option<Self> {
        let slabs = columns.checked_mul(STRIDE)?;
        let bytes = k.div_ceil(SLAB).checked_mul(slabs)?;
        Some(Planes {
            token,
            bytes,
            slabs,
        })
    }

    /// Distance in bytes of columns.
    pub fn stride(&self) -> usize {
        STRIDE
    }

    /// Splits elements of a column from element `start` on, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be the place of one of the columns that `self` describes, writable and aligned to 64; columns have
    /// these elements.
    pub unsafe fn split(&self, x: &[f32], start: usize, out: *mut u8) {
        let _ = self.token;
        for (i, x) in x.chunks(SLAB).enumerate() {
            let slab = out.wrapping_add((start / SLAB + i) * self.slabs);
            // SAFETY: the token proves that the instructions are there; the rest is the caller's contract.
            unsafe { split(x, slab) };
        }
    }
}

/// Splits up to a slab of elements.
///
/// # Safety
/// There must be room for a slab, and the instructions must be there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split(x: &[f32], slab: *mut u8) {
    for i in (0..x.len().next_multiple_of(STEP)).step_by(LANES) {
        // SAFETY: lanes behind the end are not read; a slab has room for a whole step.
        unsafe {
            let from = x.as_ptr().wrapping_add(i);
            let x = match x.len().saturating_sub(i) {
                count if count < LANES => __m512::load_part(from, count),
                _ => __m512::load(from),
            };
            let high = _mm512_and_si512(_mm512_castps_si512(x), upper());
            // What is not finite has no rest.
            let finite = !_mm512_fpclass_ps_mask::<NOT_FINITE>(x);
            let rest = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(high));
            // Rounded, half up in magnitude; it is far from the largest number.
            let rest = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
            let to = slab.add(2 * i);
            let narrow = |x| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x));
            _mm256_storeu_si256(to.cast(), narrow(high));
            _mm256_storeu_si256(to.add(PLANE).cast(), narrow(rest));
        }
    }
}

/// Quiet and signalling NaN, and both infinities, for `vfpclassps`.
const NOT_FINITE: i32 = 0x01 | 0x08 | 0x10 | 0x80;

/// The bits of an f32 that are those of a BF16.
#[inline(always)]
fn upper() -> __m512i {
    // SAFETY: callers are compiled for AVX-512.
    unsafe { _mm512_set1_epi32(0xffff_0000_u32 as i32) }
}

/// Weights that are sums of [`PLANES`](Split::PLANES) numbers of BF16.
trait Split: Element {
    const PLANES: usize;
}

impl Split for F16 {
    const PLANES: usize = 2;
}

impl Split for Bf16 {
    const PLANES: usize = 1;
}

/// One plane of a slab of weights: for each half of the rows and each pair of elements, the pairs of all rows.
#[repr(C, align(64))]
struct Pairs([[[u32; LANES]; PART / 2]; 2]);

/// What is needed besides weights and columns.
#[repr(C, align(64))]
struct Memory {
    /// Upper bits, and rests.
    planes: [Pairs; 2],
    /// A tile's columns, if they do not lie at equal distances.
    gathered: [[[u8; STRIDE]; TILE]; 2],
    results: [[Sum; COLUMNS]; PANELS],
}

/// The product for packed rows of `dtype`, F16 or BF16, with columns in [`Planes`].
pub(super) fn product(isa: Isa, dtype: DType) -> Option<(PanelFn, Bf16Tiles)> {
    let Isa::Avx512(token) = isa else {
        return None;
    };
    let function: PanelFn = match dtype {
        DType::F16 => multiply::<F16>,
        DType::BF16 => multiply::<Bf16>,
        _ => return None,
    };
    Some((function, token.tiles()?.bf16()?))
}

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as [`PackedProduct`](super::PackedProduct) says; AMX must be there and permitted.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn multiply<E: Split>(panel: &Panel, columns: &[Column]) {
    let memory = panel.scratch.cast::<Memory>();
    // SAFETY: the caller's contract: there are so many panels and columns, and there is room for all sums.
    unsafe {
        // Other code in this thread may rely on a configuration of its own: ggml sets one once for each thread.
        let before = Configuration::current();
        Configuration::whole().set();
        for columns in columns.chunks(COLUMNS) {
            for row in (0..panel.rows).step_by(ROWS) {
                panels::<E>(panel, row, ROWS.min(panel.rows - row), columns, memory);
            }
        }
        before.set();
    }
}

/// Multiplies at most [`PANELS`] panels from row `row` on, in which there are `rows` rows, with at most [`COLUMNS`]
/// columns.
///
/// # Safety
/// As [`multiply`], with tiles configured.
#[inline(always)]
unsafe fn panels<E: Split>(
    panel: &Panel,
    row: usize,
    rows: usize,
    columns: &[Column],
    memory: *mut Memory,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let results = |number: usize| (&raw mut (*memory).results[number]).cast::<Sum>();
        for number in 0..rows.div_ceil(PANEL) {
            results(number).write_bytes(0, columns.len().next_multiple_of(TILE));
        }
        for first in (0..panel.k).step_by(SLAB) {
            let len = SLAB.min(panel.k - first);
            for number in 0..rows.div_ceil(PANEL) {
                let weights = panel
                    .weights
                    .wrapping_add((row / PANEL + number) * panel.stride + first * PANEL * 2);
                for part in (0..len).step_by(PART) {
                    let count = PART.min(len - part);
                    unpack::<E>(weights, len, part..part + count, memory);
                    let slab = Slab {
                        memory,
                        at: first / SLAB * panel.slabs + part * 2,
                        steps: count.div_ceil(STEP),
                    };
                    for (i, tiles) in columns.chunks(2 * TILE).enumerate() {
                        let results = results(number).add(i * 2 * TILE);
                        if tiles.len() > TILE {
                            slab.multiply::<E, 2>(tiles, results);
                        } else {
                            slab.multiply::<E, 1>(tiles, results);
                        }
                    }
                }
            }
        }
        for (c, column) in columns.iter().enumerate() {
            for number in 0..rows.div_ceil(PANEL) {
                let first = number * PANEL;
                let out = column.out.add(panel.first + row + first);
                let sums = results(number).add(c).cast();
                out.copy_from_nonoverlapping(sums, PANEL.min(rows - first));
            }
        }
    }
}

/// Splits elements `part` of a slab of `len` elements of each row into planes, with zeros up to a whole number of steps.
///
/// # Safety
/// The slab must be there, and the instructions.
#[inline(always)]
unsafe fn unpack<E: Split>(
    weights: *const u8,
    len: usize,
    part: Range<usize>,
    memory: *mut Memory,
) {
    // SAFETY: the caller's contract.
    unsafe {
        for half in 0..2 {
            let weights = weights.add(half * len * LANES * 2);
            for pair in 0..part.len().next_multiple_of(STEP) / 2 {
                let element = |i: usize| {
                    if i < len {
                        E::load::<__m512>(weights, i * LANES)
                    } else {
                        _mm512_setzero_ps()
                    }
                };
                let numbers = [0, 1].map(|i| element(part.start + 2 * pair + i));
                let join = |[a, b]: [__m512; 2]| {
                    let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(a));
                    let high = _mm512_and_si512(_mm512_castps_si512(b), upper());
                    _mm512_or_si512(low, high)
                };
                let to = |plane: usize| (&raw mut (*memory).planes[plane].0[half][pair]).cast();
                _mm512_store_si512(to(0), join(numbers));
                if E::PLANES == 2 {
                    let rests = numbers.map(|x| {
                        let high = _mm512_and_si512(_mm512_castps_si512(x), upper());
                        _mm512_sub_ps(x, _mm512_castsi512_ps(high))
                    });
                    _mm512_store_si512(to(1), join(rests));
                }
            }
        }
    }
}

/// An unpacked slab, and its place in columns.
struct Slab {
    memory: *mut Memory,
    /// Where the slab begins in a column, in bytes.
    at: usize,
    /// Tiles that it is long.
    steps: usize,
}

impl Slab {
    /// Multiplies with `T` tiles of columns and adds the products to `results`.
    ///
    /// # Safety
    /// The slab must be unpacked, the columns and their results, whole tiles, be there, and the instructions.
    #[inline(always)]
    unsafe fn multiply<E: Split, const T: usize>(&self, columns: &[Column], results: *mut Sum) {
        // SAFETY: the caller's contract.
        unsafe {
            let (first, second) = columns.split_at(TILE.min(columns.len()));
            let (x0, stride0) = self.columns_of(first, 0);
            let (x1, stride1) = if T == 2 {
                self.columns_of(second, 1)
            } else {
                (x0, stride0)
            };
            let results = results.cast::<u8>();
            let second = results.wrapping_add(TILE * size_of::<Sum>());
            asm!(
                "tileloadd tmm0, [{r} + {s}]",
                "tileloadd tmm1, [{r} + {s} + 64]",
                r = in(reg) results, s = in(reg) size_of::<Sum>(),
                options(nostack, preserves_flags, readonly),
            );
            if T == 2 {
                asm!(
                    "tileloadd tmm2, [{r} + {s}]",
                    "tileloadd tmm3, [{r} + {s} + 64]",
                    r = in(reg) second, s = in(reg) size_of::<Sum>(),
                    options(nostack, preserves_flags, readonly),
                );
            }
            for step in 0..self.steps {
                let at = step * STEP * 2;
                let [high, rest] = [0, 1].map(|plane| {
                    (&raw const (*self.memory).planes[plane].0[0][step * STEP / 2]).cast::<u8>()
                });
                load_columns::<T>(x0.add(at), stride0, x1.add(at), stride1);
                if E::PLANES == 2 {
                    load_weights(rest);
                    multiply_tiles::<T>();
                }
                load_weights(high);
                multiply_tiles::<T>();
                load_columns::<T>(x0.add(at + PLANE), stride0, x1.add(at + PLANE), stride1);
                multiply_tiles::<T>();
            }
            asm!(
                "tilestored [{r} + {s}], tmm0",
                "tilestored [{r} + {s} + 64], tmm1",
                r = in(reg) results, s = in(reg) size_of::<Sum>(),
                options(nostack, preserves_flags),
            );
            if T == 2 {
                asm!(
                    "tilestored [{r} + {s}], tmm2",
                    "tilestored [{r} + {s} + 64], tmm3",
                    r = in(reg) second, s = in(reg) size_of::<Sum>(),
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Where the slab of a tile of columns begins, and the distance of columns.
    #[inline(always)]
    unsafe fn columns_of(&self, tile: &[Column], place: usize) -> (*const u8, usize) {
        let is_regular = tile.len() == TILE
            && tile
                .windows(2)
                .all(|pair| pair[1].x == pair[0].x.wrapping_add(STRIDE));
        if is_regular {
            return (tile[0].x.wrapping_add(self.at), STRIDE);
        }
        // SAFETY: columns have that many elements, and there is room for a tile. What lies behind the last column makes
        // sums that nobody reads.
        unsafe {
            let gathered = &raw mut (*self.memory).gathered[place];
            for c in 0..TILE {
                let to = (&raw mut (*gathered)[c]).cast::<u8>();
                match tile.get(c) {
                    Some(column) => {
                        to.copy_from_nonoverlapping(column.x.wrapping_add(self.at), 2 * PLANE);
                    }
                    None => to.write_bytes(0, 2 * PLANE),
                }
            }
            (gathered.cast(), STRIDE)
        }
    }
}

/// Loads `T` tiles of columns.
///
/// # Safety
/// They must be there, and tiles be configured.
#[inline(always)]
unsafe fn load_columns<const T: usize>(
    x0: *const u8,
    stride0: usize,
    x1: *const u8,
    stride1: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("tileloadd tmm4, [{x} + {s}]", x = in(reg) x0, s = in(reg) stride0,
            options(nostack, preserves_flags, readonly));
        if T == 2 {
            asm!("tileloadd tmm5, [{x} + {s}]", x = in(reg) x1, s = in(reg) stride1,
                options(nostack, preserves_flags, readonly));
        }
    }
}

/// Loads the tiles of both halves of a panel.
///
/// # Safety
/// As [`load_columns`].
#[inline(always)]
unsafe fn load_weights(pairs: *const u8) {
    let half = PART / 2 * LANES * 4;
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "tileloadd tmm6, [{w} + {s}]",
            "tileloadd tmm7, [{other} + {s}]",
            w = in(reg) pairs, other = in(reg) pairs.wrapping_add(half), s = in(reg) LANES * 4,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Multiplies `T` tiles of columns with both of weights.
///
/// # Safety
/// Tiles must be configured.
#[inline(always)]
unsafe fn multiply_tiles<const T: usize>() {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            options(nostack, preserves_flags, nomem),
        );
        if T == 2 {
            asm!(
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}
