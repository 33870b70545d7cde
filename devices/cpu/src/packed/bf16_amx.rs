//! Products of packed rows with many columns on AMX. Its instructions multiply BF16 tiles, 16
//! columns with 16 rows, 32 elements of each, and accumulate in f32, so nothing else is needed
//! between the first element and the last.
//!
//! BF16 has 8 significant bits. An F16 number with its 11 bits is exactly the sum of two BF16
//! numbers: its upper bits and the remainder. For rows of floats, columns are also split into two
//! planes, which keeps 16 bits of each element. The product of two remainders is below the kept
//! precision, so F16 rows take three products of planes, and BF16 rows two.
//!
//! Quantized rows and their columns are rounded to BF16, one plane each. This is closer to the
//! exact product than columns of 8 bits with a common scale, and it needs no sums of groups.
//! Unpacking is worthwhile from a few dozen columns.
//!
//! See chapter 18 of Intel's [Software Developer's Manual](https://www.intel.com/sdm), volume 1.

use super::amx_tiles::{Configuration, TILE, are_regular};
use super::decode::{Format, PanelSlab, Scheme, Slab};
use super::formats::for_format;
use super::int8::{Level, avx512_vnni};
use super::{LANES, PANEL, Sum, store_all};
use crate::activations::SLAB;
use crate::activations::bf16::{Bf16Slabs, MAX_PLANES, PLANE_BYTES, STEP, stride, upper};
use crate::activations::int8::Sums;
use crate::detect::Avx512;
use crate::product::{Column, Panel, PanelFn};
use crate::simd::float::{Bf16, Element, F16};
use samite_core::DType;
use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Bytes of a tile.
const TILE_BYTES: usize = 1024;

/// Number of columns that are multiplied with the same rows.
const COLUMNS: usize = 512;

/// Number of panels that are processed together. Their sums, and a slab of all columns, stay in the
/// L2 cache.
const PANELS: usize = 16;

/// Number of rows that a worker multiplies at a time.
pub(crate) const ROWS: usize = PANELS * PANEL;

/// Bytes of scratch memory that products need for each worker.
pub(crate) const WORKER_BYTES: usize = size_of::<Bf16Scratch>();

/// Returns the upper halves of the lanes of `a` and `b` as pairs.
#[inline(always)]
unsafe fn pairs(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: callers are compiled for AVX-512.
    unsafe { _mm512_or_si512(_mm512_srli_epi32::<16>(a), _mm512_and_si512(b, upper())) }
}

/// Packed rows that are split or rounded to BF16.
trait Bf16Rows {
    /// Number of planes of rows.
    const PLANES: usize;
    /// Number of planes of columns, at least as many.
    const COLUMN_PLANES: usize;
    /// Returns the bytes of a slab of a panel.
    fn slab_bytes() -> usize;

    /// Unpacks a slab of `len` elements of a panel to tiles, padded with zeros to a multiple of 32
    /// elements.
    ///
    /// # Safety
    /// `len` elements, at most a slab's, of a panel's rows must be readable at `weights`. `slab`
    /// and the tiles of `PLANES` planes must be writable, in disjoint memory. The instructions must
    /// be available.
    unsafe fn unpack(weights: *const u8, len: usize, slab: *mut Slab, tiles: Tiles);
}

/// Destination of the tiles of a slab of weights: for each 32 elements and each plane, the tiles of
/// both halves of the panel.
#[derive(Clone, Copy)]
struct Tiles {
    at: *mut u8,
    planes: usize,
}

impl Tiles {
    /// Stores elements `2 * pair` and `2 * pair + 1` of all rows of one half.
    ///
    /// # Safety
    /// AVX-512 must be available. `pair` must be below `SLAB / 2` and `plane` below `planes`. Tiles
    /// for these must be writable at `at`, aligned to 64.
    #[inline(always)]
    unsafe fn store(self, half: usize, pair: usize, plane: usize, pairs: __m512i) {
        let tile = (pair / (STEP / 2) * self.planes + plane) * 2 + half;
        let at = tile * TILE_BYTES + pair % (STEP / 2) * 64;
        // SAFETY: `pair` is below `SLAB / 2` and `plane` below `planes`, so there is room for the
        // tile. Tiles are aligned to 64 and rows of a tile have 64 bytes, so the store is aligned.
        unsafe { _mm512_store_si512(self.at.add(at).cast(), pairs) }
    }
}

/// Rows of F16 or BF16.
struct Floats<E>(PhantomData<E>);

impl<E: Element> Bf16Rows for Floats<E> {
    // All nonzero bits of a BF16 are upper ones.
    const PLANES: usize = if E::UPPER_ONLY { 1 } else { 2 };
    const COLUMN_PLANES: usize = 2;

    fn slab_bytes() -> usize {
        SLAB * PANEL * E::BYTES
    }

    #[inline(always)]
    unsafe fn unpack(weights: *const u8, len: usize, _slab: *mut Slab, tiles: Tiles) {
        // SAFETY: each half has `len` elements of `LANES` rows, and those below `len` are read: 16
        // lanes, as many as `LANES`. Pairs are below `SLAB / 2`, and tiles have room for as many in
        // `PLANES` planes. Callers are compiled for AVX-512.
        unsafe {
            for half in 0..2 {
                let weights = weights.add(half * len * LANES * E::BYTES);
                for pair in 0..len.next_multiple_of(STEP) / 2 {
                    let load = |i: usize| {
                        if i < len {
                            E::load::<__m512>(weights, i * LANES)
                        } else {
                            _mm512_setzero_ps()
                        }
                    };
                    let (a, b) = (load(2 * pair), load(2 * pair + 1));
                    let bits = _mm512_castps_si512;
                    tiles.store(half, pair, 0, pairs(bits(a), bits(b)));
                    if Self::PLANES == 2 {
                        let rest = |x: __m512| {
                            let high = _mm512_and_si512(bits(x), upper());
                            bits(_mm512_sub_ps(x, _mm512_castsi512_ps(high)))
                        };
                        tiles.store(half, pair, 1, pairs(rest(a), rest(b)));
                    }
                }
            }
        }
    }
}

/// Quantized rows.
struct Quantized<F>(PhantomData<F>);

impl<F: Format> Bf16Rows for Quantized<F> {
    const PLANES: usize = 1;
    const COLUMN_PLANES: usize = 1;

    fn slab_bytes() -> usize {
        SLAB / F::BLOCK * F::DTYPE.block_bytes() * PANEL
    }

    #[inline(always)]
    unsafe fn unpack(weights: *const u8, len: usize, slab: *mut Slab, tiles: Tiles) {
        let offset = match F::SUMS {
            Sums::Offset(offset) => offset as f32,
            Sums::Minus => 0.0,
        };
        // SAFETY: the slab has `len` elements, a multiple of a block, as the caller guarantees, and
        // `slab` and `tiles` are different memory, with room for all rows of a panel. Callers are
        // compiled for the features of `decode` and `round`.
        unsafe {
            avx512_vnni::Instructions::decode::<F>(&PanelSlab::new(weights, len), slab);
            round::<<F::Scheme as Scheme>::Wide>(slab, len, offset, tiles);
        }
    }
}

/// Rounds the decoded elements of a slab. Codes have an offset if they have no minimums.
///
/// # Safety
/// As [`Bf16Rows::unpack`]; the slab must be decoded.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn round<S: Scheme>(slab: *const Slab, len: usize, offset: f32, tiles: Tiles) {
    // SAFETY: `len` is at most `SLAB`, so that groups and words of codes are inside the slab, which
    // is aligned to 64, and so is each half of 16 rows. Pairs up to `2 * i + 1` are below `SLAB /
    // 2`, and tiles have room for as many.
    unsafe {
        for half in 0..2 {
            for group in 0..len / S::GROUP {
                let scale = _mm512_load_ps((&raw const (*slab).scales[group][half * LANES]).cast());
                // With a code in the upper bits of its mantissa, a number is 1 + code / 256.
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(256.0));
                let start = if S::MINIMUMS {
                    let minimum = (&raw const (*slab).minimums[group][half * LANES]).cast();
                    _mm512_add_ps(factor, _mm512_load_ps(minimum))
                } else {
                    _mm512_mul_ps(scale, _mm512_set1_ps(256.0 + offset))
                };
                for i in 0..S::GROUP / 4 {
                    let i = group * S::GROUP / 4 + i;
                    let codes =
                        _mm512_load_si512((&raw const (*slab).codes[i][half * LANES]).cast());
                    let number = |shifted| {
                        // (shifted & mask) | one
                        let x = _mm512_ternarylogic_epi32::<0xea>(
                            shifted,
                            _mm512_set1_epi32(0xff << 15),
                            _mm512_set1_epi32(0x3f80_0000),
                        );
                        let x = _mm512_fmsub_ps(_mm512_castsi512_ps(x), factor, start);
                        // Rounds half up in magnitude.
                        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))
                    };
                    let numbers = [
                        number(_mm512_slli_epi32::<15>(codes)),
                        number(_mm512_slli_epi32::<7>(codes)),
                        number(_mm512_srli_epi32::<1>(codes)),
                        number(_mm512_srli_epi32::<9>(codes)),
                    ];
                    tiles.store(half, 2 * i, 0, pairs(numbers[0], numbers[1]));
                    tiles.store(half, 2 * i + 1, 0, pairs(numbers[2], numbers[3]));
                }
            }
        }
    }
}

/// Working memory besides weights and columns.
#[repr(C, align(64))]
struct Bf16Scratch {
    slab: Slab,
    /// A slab of each panel.
    tiles: [[u8; MAX_PLANES * PLANE_BYTES * PANEL]; PANELS],
    /// Columns of a tile, if they are not at equal distances.
    gathered: [[[u8; stride(MAX_PLANES)]; TILE]; 2],
    results: [[Sum; COLUMNS]; PANELS],
}

/// Returns the product for packed rows of `k` elements of `dtype` with `columns` columns, `each` at
/// a time, and the form of columns that it needs. Returns `None` if there is none, or none that is
/// worthwhile.
pub(crate) fn product(
    token: Avx512,
    dtype: DType,
    k: usize,
    columns: usize,
    each: usize,
) -> Option<(PanelFn, Bf16Slabs)> {
    fn of<R: Bf16Rows>() -> (PanelFn, usize, usize) {
        let worth = match R::COLUMN_PLANES {
            1 => WORTH_ROUNDING,
            columns => WORTH_SPLITTING * (R::PLANES + columns - 1),
        };
        (multiply::<R>, R::COLUMN_PLANES, worth)
    }
    let (function, planes, worth) = match dtype {
        DType::F16 => of::<Floats<F16>>(),
        DType::BF16 => of::<Floats<Bf16>>(),
        _ => for_format!(dtype, F => of::<Quantized<F>>())?,
    };
    let tiles = token.tiles()?.bf16().filter(|_| each >= worth && k > 0)?;
    Some((function, Bf16Slabs::new(tiles, planes, k, columns)?))
}

/// Minimum number of columns for each product of planes for which rows of floats are split.
const WORTH_SPLITTING: usize = 8;

/// Minimum number of columns for which quantized rows are rounded.
const WORTH_ROUNDING: usize = 64;

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`], with panels as in [`PackedProduct`](super::PackedProduct) and [`WORKER_BYTES`]
/// of scratch memory, aligned to 64, that only this thread uses. AMX must be available and
/// permitted.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<R: Bf16Rows>(panel: &Panel, columns: &[Column]) {
    let memory = panel.scratch.cast::<Bf16Scratch>();
    // SAFETY: AMX is available and permitted. `scratch` is a `Bf16Scratch`, aligned to 64, that
    // only this thread uses. Parts have at most `COLUMNS` columns and `ROWS` rows, for which it has
    // room. Panels and columns satisfy `PanelFn`.
    unsafe {
        // Other code in this thread may rely on its own configuration: ggml sets one once per
        // thread.
        let before = Configuration::current();
        Configuration::whole().set();
        for columns in columns.chunks(COLUMNS) {
            for row in (0..panel.rows).step_by(ROWS) {
                panels::<R>(panel, row, ROWS.min(panel.rows - row), columns, memory);
            }
        }
        before.set();
    }
}

/// Multiplies at most [`PANELS`] panels, which have `rows` rows starting with row `row`, with at
/// most [`COLUMNS`] columns.
///
/// # Safety
/// As [`multiply`], with tiles configured.
#[inline(always)]
unsafe fn panels<R: Bf16Rows>(
    panel: &Panel,
    row: usize,
    rows: usize,
    columns: &[Column],
    memory: *mut Bf16Scratch,
) {
    let count = rows.div_ceil(PANEL);
    // SAFETY: `count` is at most `PANELS`, and `memory` has tiles for each; panels of `row..row +
    // rows` exist. Slab `first / SLAB` of each has `len` elements; `slab` and tiles are different
    // fields. Tiles are configured.
    unsafe {
        let (slab, tiles) = (&raw mut (*memory).slab, &raw mut (*memory).tiles);
        let tiles = |number: usize| (&raw mut (*tiles)[number]).cast::<u8>();
        for first in (0..panel.k).step_by(SLAB) {
            let len = SLAB.min(panel.k - first);
            for number in 0..count {
                let weights = panel
                    .weights
                    .wrapping_add((row / PANEL + number) * panel.stride)
                    .wrapping_add(first / SLAB * R::slab_bytes());
                let to = Tiles {
                    at: tiles(number),
                    planes: R::PLANES,
                };
                R::unpack(weights, len, slab, to);
            }
            let part = [row, count, first];
            match const { (R::PLANES, R::COLUMN_PLANES) } {
                (1, 1) => multiply_slab::<1, 1>(panel, part, columns, memory),
                (1, _) => multiply_slab::<1, 2>(panel, part, columns, memory),
                _ => multiply_slab::<2, 2>(panel, part, columns, memory),
            }
        }
    }
}

/// Multiplies a slab of `count` panels, starting with element `first` and row `row`, with the given
/// numbers of planes of rows and columns.
///
/// # Safety
/// As [`panels`]; the slab must be unpacked to tiles.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_slab<const ROWS: usize, const COLUMNS: usize>(
    panel: &Panel,
    [row, count, first]: [usize; 3],
    columns: &[Column],
    memory: *mut Bf16Scratch,
) {
    let len = SLAB.min(panel.k - first);
    let pass = SlabPass {
        steps: len.div_ceil(STEP),
        is_first: first == 0,
    };
    let is_last = first + len == panel.k;
    for (i, columns) in columns.chunks(2 * TILE).enumerate() {
        let at = first / SLAB * panel.slabs;
        // SAFETY: `memory` has tiles and `COLUMNS` sums of each of `count` panels, and `i * 2 *
        // TILE` columns come before these; sums of whole tiles fit, as their number divides
        // `COLUMNS`. Columns have the slab at byte `at`, and results have room for the rows that
        // exist.
        unsafe {
            let group = Group::new(columns, at, COLUMNS, &raw mut (*memory).gathered);
            for number in 0..count {
                let tiles = (&raw const (*memory).tiles[number]).cast::<u8>();
                let sums = (&raw mut (*memory).results[number]).cast::<Sum>();
                let sums = sums.add(i * 2 * TILE);
                group.multiply::<ROWS, COLUMNS>(tiles, pass, sums);
                if is_last {
                    // Results are written to memory while the next tiles are multiplied.
                    store_all(panel, row + number * PANEL, columns, sums);
                }
            }
        }
    }
}

/// One pass over the tiles of a slab.
#[derive(Clone, Copy)]
struct SlabPass {
    /// Number of tiles, one after the other.
    steps: usize,
    /// True if there are no earlier sums.
    is_first: bool,
}

/// A slab of one or two tiles of columns.
struct Group {
    tiles: usize,
    /// Addresses of the tiles.
    at: [*const u8; 2],
    /// Distance of columns in bytes.
    stride: usize,
}

impl Group {
    /// Returns the slab at byte `slab` of at most two tiles of columns with `planes` planes.
    /// Columns that are not at equal distances are copied to `gathered`.
    ///
    /// # Safety
    /// The columns must have this slab.
    #[inline(always)]
    unsafe fn new(
        columns: &[Column],
        slab: usize,
        planes: usize,
        gathered: *mut [[[u8; stride(MAX_PLANES)]; TILE]; 2],
    ) -> Self {
        let (mut at, stride) = ([std::ptr::null(); 2], stride(planes));
        for (i, tile) in columns.chunks(TILE).take(2).enumerate() {
            if are_regular(tile, stride) {
                at[i] = tile[0].x.wrapping_add(slab);
                continue;
            }
            // SAFETY: columns have a whole slab, and there is room for a tile. Data after the last
            // column only affects sums that are not read.
            unsafe {
                let to = (&raw mut (*gathered)[i]).cast::<u8>();
                for c in 0..TILE {
                    let to = to.add(c * stride);
                    match tile.get(c) {
                        Some(column) => {
                            let from = column.x.wrapping_add(slab);
                            to.copy_from_nonoverlapping(from, planes * PLANE_BYTES);
                        }
                        None => to.write_bytes(0, planes * PLANE_BYTES),
                    }
                }
                at[i] = to;
            }
        }
        Group {
            tiles: columns.len().div_ceil(TILE),
            at,
            stride,
        }
    }

    /// Multiplies with the tiles of a panel, with the given numbers of planes of rows and columns,
    /// and adds the products to `sums`, or initialises `sums` with them.
    ///
    /// # Safety
    /// `steps` tiles of each plane of rows must be readable at `rows`, and columns must have as
    /// many steps. `sums` must be those of whole tiles of columns, writable and disjoint. Tiles
    /// must be configured as [`whole`](Configuration::whole).
    #[inline(always)]
    unsafe fn multiply<const ROWS: usize, const COLUMNS: usize>(
        &self,
        rows: *const u8,
        pass: SlabPass,
        sums: *mut Sum,
    ) {
        // SAFETY: `at` has `tiles` tiles of columns, one or two. The caller guarantees rows, sums
        // and the configuration.
        unsafe {
            match self.tiles {
                1 => self.multiply_tiles::<ROWS, COLUMNS, 1>(rows, pass, sums.cast()),
                _ => self.multiply_tiles::<ROWS, COLUMNS, 2>(rows, pass, sums.cast()),
            }
        }
    }

    /// # Safety
    /// As [`multiply`](Group::multiply), with `T` tiles of columns.
    #[inline(always)]
    unsafe fn multiply_tiles<const ROWS: usize, const COLUMNS: usize, const T: usize>(
        &self,
        rows: *const u8,
        pass: SlabPass,
        sums: *mut u8,
    ) {
        let more = sums.wrapping_add(TILE * size_of::<Sum>());
        // SAFETY: tiles are configured as 16 rows of 64 bytes. Rows have `steps` times `2 * ROWS`
        // tiles, and each plane of the `T` tiles of columns has `steps` times 64 bytes. The sums of
        // `T * TILE` columns exist, 128 bytes each, and no other memory is written.
        unsafe {
            if pass.is_first {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags, nomem)
                );
            } else {
                asm!(
                    "tileloadd tmm0, [{r} + {s}]",
                    "tileloadd tmm1, [{r} + {s} + 64]",
                    r = in(reg) sums, s = in(reg) size_of::<Sum>(),
                    options(nostack, preserves_flags, readonly),
                );
                if T == 2 {
                    asm!(
                        "tileloadd tmm2, [{r} + {s}]",
                        "tileloadd tmm3, [{r} + {s} + 64]",
                        r = in(reg) more, s = in(reg) size_of::<Sum>(),
                        options(nostack, preserves_flags, readonly),
                    );
                }
            }
            for step in 0..pass.steps {
                let columns = self.at.map(|at| at.wrapping_add(step * STEP * 2));
                let rows = rows.wrapping_add(step * ROWS * 2 * TILE_BYTES);
                self.load_columns::<T>(columns);
                if ROWS == 2 {
                    load_rows(rows.wrapping_add(2 * TILE_BYTES));
                    products::<T>();
                }
                load_rows(rows);
                products::<T>();
                if COLUMNS == 2 {
                    self.load_columns::<T>(columns.map(|at| at.wrapping_add(PLANE_BYTES)));
                    products::<T>();
                }
            }
            asm!(
                "tilestored [{r} + {s}], tmm0",
                "tilestored [{r} + {s} + 64], tmm1",
                r = in(reg) sums, s = in(reg) size_of::<Sum>(),
                options(nostack, preserves_flags),
            );
            if T == 2 {
                asm!(
                    "tilestored [{r} + {s}], tmm2",
                    "tilestored [{r} + {s} + 64], tmm3",
                    r = in(reg) more, s = in(reg) size_of::<Sum>(),
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Loads `T` tiles of columns.
    ///
    /// # Safety
    /// As [`multiply`](Group::multiply).
    #[inline(always)]
    unsafe fn load_columns<const T: usize>(&self, [first, second]: [*const u8; 2]) {
        // SAFETY: the 16 columns of each of `T` tiles are `stride` bytes apart, each with 64 bytes
        // from this step. Tiles 4 and 5 are configured with this size, and memory is only read.
        unsafe {
            asm!("tileloadd tmm4, [{x} + {s}]", x = in(reg) first, s = in(reg) self.stride,
                options(nostack, preserves_flags, readonly));
            if T == 2 {
                asm!("tileloadd tmm5, [{x} + {s}]", x = in(reg) second, s = in(reg) self.stride,
                    options(nostack, preserves_flags, readonly));
            }
        }
    }
}

/// Loads the tiles of both halves of a panel.
///
/// # Safety
/// They must exist, and tiles must be configured.
#[inline(always)]
unsafe fn load_rows(tiles: *const u8) {
    // SAFETY: two tiles of 1024 bytes lie at `tiles`, with rows of 64 bytes that are `s` apart.
    // Tiles 6 and 7 are configured with this size.
    unsafe {
        asm!(
            "tileloadd tmm6, [{w} + {s}]",
            "tileloadd tmm7, [{w} + {s} + 1024]",
            w = in(reg) tiles, s = in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Multiplies `T` tiles of columns with both tiles of rows.
///
/// # Safety
/// Tiles must be configured.
#[inline(always)]
unsafe fn products<const T: usize>() {
    // SAFETY: tiles are configured, and only tile registers are used.
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
