//! Products of packed rows with many columns on AMX, whose instructions multiply tiles: 16 columns
//! with 16 rows, 32 elements of each, at once.
//!
//! The multipliers are so fast that the rest has to keep up: AVX-512 scales and sums products while
//! the next tiles are multiplied. Codes are signed here, so sums of columns are needed only for
//! minimums.
//!
//! The instructions are inline assembly, because the compiler does not have intrinsics for them
//! yet. See chapter 18 of Intel's [Software Developer's Manual](https://www.intel.com/sdm),
//! volume 1.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::avx512_vnni;
use crate::activations::SLAB;
use crate::activations::int8::{ColumnSpec, Sums};
use crate::packed::amx_tiles::{Configuration, TILE, are_regular};
use crate::packed::decode::{Format, PanelSlab, Scheme, Sink, Slab, SlabWriter, column_layout};
use crate::packed::{LANES, PANEL, Sum, store_all};
use crate::product::{Column, Panel};
use crate::simd::avx512::Zmm;
use crate::simd::prefetch;
use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Minimum number of columns for which tiles are faster, even if partly unused.
const WORTH_TILES: usize = 12;

/// Number of columns that are multiplied with one slab.
const COLUMNS: usize = 128;

/// Number of groups that a tile of columns is multiplied with before their products are summed.
const PART: usize = 4;

/// Products of the codes of a tile of columns with a part of a panel.
#[repr(C, align(64))]
struct Products([[[[i32; LANES]; 2]; PART]; TILE]);

/// Working memory besides weights and columns.
#[repr(C, align(64))]
struct Int8Scratch {
    slab: Slab,
    /// Products of two tiles: one is computed while the other is summed.
    products: [Products; 2],
    /// Codes of columns that are not contiguous.
    gathered: [[u8; PART * 32]; TILE],
    /// Sums of the parts of a slab, if they are multiplied with the column's scale in the end.
    parts: [Sum; COLUMNS],
    results: [Sum; COLUMNS],
}

/// Multiplies whole panels.
///
/// # Safety
/// As [`PanelFn`](crate::product::PanelFn), with panels as in
/// [`PackedProduct`](crate::packed::PackedProduct). AMX must be available and permitted.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn multiply<F: Format>(panel: &Panel, columns: &[Column]) {
    // SAFETY: AMX is available and permitted, so tiles may be configured. Panels and columns
    // satisfy `PanelFn`, and `memory` has room for each part of `COLUMNS` columns.
    unsafe {
        if columns.len() < WORTH_TILES {
            return super::multiply::<F, avx512_vnni::Instructions>(panel, columns);
        }
        let mut memory = MaybeUninit::<Int8Scratch>::uninit();
        let memory = memory.as_mut_ptr();
        // Rows of a tile after the last column must be initialised.
        (&raw mut (*memory).gathered).write_bytes(0, 1);
        // Other code in this thread may rely on its own configuration: ggml sets one once per
        // thread.
        let before = Configuration::current();
        Configuration::new(F::GROUP).set();
        for columns in columns.chunks(COLUMNS) {
            for row in (0..panel.rows).step_by(PANEL) {
                panels::<F>(panel, row, columns, memory);
            }
        }
        before.set();
    }
}

/// Multiplies the panel that starts at row `row` with at most [`COLUMNS`] columns.
///
/// # Safety
/// As [`multiply`], with tiles configured.
#[inline(always)]
unsafe fn panels<F: Format>(
    panel: &Panel,
    row: usize,
    columns: &[Column],
    memory: *mut Int8Scratch,
) {
    // SAFETY: `columns` are at most `COLUMNS`, for which `memory` has results and parts. Parts of
    // the panel at `row` have at most `SLAB` elements, for which its slab has room. Columns have
    // slab `number` at `number * panel.slabs`, and tiles are configured.
    unsafe {
        let results = (&raw mut (*memory).results).cast::<Sum>();
        results.write_bytes(0, columns.len());
        for slab in PanelSlab::all::<F>(panel, row) {
            decode::<F>(&slab, &raw mut (*memory).slab);
            let groups = slab.len / F::GROUP;
            all_groups::<SchemeOf<F>>(memory, slab.number * panel.slabs, groups, columns);
        }
        store_all(panel, row, columns, results);
    }
}

/// The scheme that the products of a format are compiled for.
type SchemeOf<F> = <<F as Format>::Scheme as Scheme>::Wide;

/// Decodes a slab to signed codes.
///
/// # Safety
/// As [`PanelSlab::decode`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn decode<F: Format>(part: &PanelSlab, slab: *mut Slab) {
    for first in (0..PANEL).step_by(LANES) {
        // SAFETY: `first` is 0 or `LANES`, from which a register of rows is inside the panel and
        // the slab, which is writable. The features above are those of the registers.
        unsafe { part.unpack::<F, Zmm<true>, _>(first, &mut Signed(SlabWriter::new(slab, first))) }
    }
}

/// Multiplies all groups of a decoded slab with all columns, whose slabs start at byte `at`.
///
/// # Safety
/// `groups` groups of the slab in `memory` must be decoded. `columns`, at most [`COLUMNS`], must
/// have a slab at byte `at`. Tiles must be configured for the scheme, and the instructions must be
/// available.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn all_groups<S: Scheme>(
    memory: *mut Int8Scratch,
    at: usize,
    groups: usize,
    columns: &[Column],
) {
    for first in (0..groups).step_by(PART) {
        let part = GroupBlock::<S> {
            memory,
            at,
            first,
            groups,
            scheme: PhantomData,
        };
        // SAFETY: `first` is below `groups`, and each arm takes as many groups as are left from
        // there, at most `PART`. The slab is decoded, columns have a slab at byte `at`, and the
        // instructions are available.
        unsafe {
            match groups - first {
                1 => part.all::<1>(columns),
                2 => part.all::<2>(columns),
                3 => part.all::<3>(columns),
                _ => part.all::<PART>(columns),
            }
        }
    }
}

/// Returns the layout of a column's slab.
const fn layout<S: Scheme>() -> ColumnSpec {
    column_layout::<S>()
}

/// Sink wrapper that makes codes signed.
struct Signed(SlabWriter);

impl<F: Format> Sink<F, Zmm<true>> for Signed {
    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: __m512i) {
        // SAFETY: the subtraction touches registers only, and the slab of the writer has word `i`,
        // as the caller guarantees.
        unsafe {
            let codes = match F::SUMS {
                Sums::Offset(offset) => _mm512_sub_epi8(codes, _mm512_set1_epi8(offset as i8)),
                Sums::Minus => codes,
            };
            Sink::<F, Zmm<true>>::codes(&mut self.0, i, codes);
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: __m512) {
        // SAFETY: the slab of the writer has group `group`, as the caller guarantees. Nothing else
        // is done here.
        unsafe { Sink::<F, Zmm<true>>::scale(&mut self.0, group, scales) }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: __m512) {
        // SAFETY: the slab of the writer has group `group`, as the caller guarantees. Nothing else
        // is done here.
        unsafe { Sink::<F, Zmm<true>>::minimum(&mut self.0, group, minimums) }
    }
}

/// Up to [`PART`] groups of a slab.
struct GroupBlock<S> {
    memory: *mut Int8Scratch,
    /// Offset of the slab in a column, in bytes.
    at: usize,
    /// The first group in the slab.
    first: usize,
    /// Number of groups of the slab.
    groups: usize,
    scheme: PhantomData<S>,
}

impl<S: Scheme> GroupBlock<S> {
    /// Multiplies `N` groups with all columns.
    ///
    /// # Safety
    /// As [`all_groups`], with `N` groups from `first` on.
    #[inline(always)]
    unsafe fn all<const N: usize>(&self, columns: &[Column]) {
        // SAFETY: `N` groups from `first` are in the decoded slab. `columns` are at most `COLUMNS`,
        // for which there are results and parts. A tile's products are stored one step after they
        // are computed, and summed before the second tile after them overwrites them. Tiles are
        // configured, and the instructions are available.
        unsafe {
            let weights = Weights::<N>::load::<S>(&raw const (*self.memory).slab, self.first);
            // Three things overlap: a tile of columns is multiplied with one group in each step,
            // the products of the previous step are stored, and some columns of the previous tile
            // are summed.
            let steps = columns.len().div_ceil(TILE) * N;
            let (mut codes, mut stride) = (std::ptr::null(), 0);
            for step in 0..steps + N + 1 {
                if step > 0 && step <= steps {
                    self.store(step - 1, (step - 1) % N, (step - 1) / N);
                }
                if step < steps {
                    let (number, group) = (step / N, step % N);
                    let tile = &columns[number * TILE..];
                    let (tile, next) = tile.split_at(TILE.min(tile.len()));
                    if group == 0 {
                        (codes, stride) = self.codes_of(tile);
                    }
                    self.multiply(codes, stride, step, group);
                    for column in next.iter().skip(group * (TILE / N)).take(TILE / N) {
                        self.ask_for(column);
                    }
                }
                if let Some(done) = step.checked_sub(N + 1) {
                    let (number, part) = (done / N, done % N);
                    let last = if part == N - 1 {
                        TILE
                    } else {
                        TILE / N * (part + 1)
                    };
                    for c in TILE / N * part..last {
                        let c = number * TILE + c;
                        if let Some(column) = columns.get(c) {
                            self.sum_up(&weights, column, c);
                        }
                    }
                }
            }
        }
    }

    /// Prefetches the parts of a column that are needed.
    #[inline(always)]
    fn ask_for(&self, column: &Column) {
        let codes = column.x.wrapping_add(self.at + self.first * S::GROUP);
        prefetch(codes);
        prefetch(codes.wrapping_add(64));
    }

    /// Returns the address of the codes of a tile of columns, and the distance of columns.
    #[inline(always)]
    unsafe fn codes_of(&self, tile: &[Column]) -> (*const u8, usize) {
        let stride = layout::<S>().slab_bytes();
        let at = self.at + self.first * S::GROUP;
        if are_regular(tile, stride) {
            return (tile[0].x.wrapping_add(at), stride);
        }
        // SAFETY: columns have a slab at byte `self.at`. `PART * GROUP` bytes are read from
        // `first * GROUP`. `first` is a multiple of `PART`, so they end inside the slab's `SLAB`
        // codes. `gathered` has `TILE` rows of `PART * 32` bytes, and groups have at most 32
        // elements. It is other memory.
        unsafe {
            let gathered = &raw mut (*self.memory).gathered;
            for (to, column) in (*gathered).iter_mut().zip(tile) {
                // A slab's scales follow its codes, so a whole part can be read.
                to.as_mut_ptr()
                    .copy_from_nonoverlapping(column.x.wrapping_add(at), PART * S::GROUP);
            }
            (gathered.cast(), PART * 32)
        }
    }

    /// Multiplies the codes of a tile of columns with those of a group.
    #[inline(always)]
    unsafe fn multiply(&self, x: *const u8, stride: usize, step: usize, group: usize) {
        // SAFETY: tiles are configured for 16 columns of `S::GROUP` bytes, `stride` apart at `x`,
        // and for `S::GROUP / 4` rows of weights, 128 bytes apart: those of group `first + group`,
        // which the slab has.
        unsafe {
            let weights = (&raw const (*self.memory).slab.codes)
                .cast::<u8>()
                .add((self.first + group) * S::GROUP * PANEL);
            let x = x.add(group * S::GROUP);
            // Alternates between two sets of tiles: one is stored while the other is computed.
            if step.is_multiple_of(2) {
                multiply_tile!("tmm0", "tmm1", "tmm4", x, stride, weights);
            } else {
                multiply_tile!("tmm2", "tmm3", "tmm5", x, stride, weights);
            }
        }
    }

    /// Stores the products of a tile of columns with a group.
    #[inline(always)]
    unsafe fn store(&self, step: usize, group: usize, number: usize) {
        // SAFETY: `group` is below `PART`, so that products of 16 columns with 32 rows fit, each
        // column `PART * PANEL * 4` bytes after the one before, as `Products` has them. `number %
        // 2` is one of two.
        unsafe {
            let products = (&raw mut (*self.memory).products[number % 2])
                .cast::<u8>()
                .add(group * PANEL * 4);
            if step.is_multiple_of(2) {
                store_tile!("tmm0", "tmm1", products);
            } else {
                store_tile!("tmm2", "tmm3", products);
            }
        }
    }

    /// Adds the products of column number `c` to its sums.
    #[inline(always)]
    unsafe fn sum_up<const N: usize>(&self, weights: &Weights<N>, column: &Column, c: usize) {
        // SAFETY: `c` is below the number of columns, at most `COLUMNS`; the products of its tile
        // are stored. The column has a slab at byte `at`, whose scales and sums are aligned to 4.
        // Sums and products of half a panel are 64 bytes in memory that is aligned to 64.
        unsafe {
            let x = column.x.add(self.at);
            let products = &raw const (*self.memory).products[c / TILE % 2].0[c % TILE];
            let result = |half: usize| (&raw mut (*self.memory).results[c][half]).cast::<f32>();
            let part = |half: usize| (&raw mut (*self.memory).parts[c][half]).cast::<f32>();
            let mut sums = if !S::SLAB_SCALE {
                [_mm512_load_ps(result(0)), _mm512_load_ps(result(1))]
            } else if self.first > 0 {
                [_mm512_load_ps(part(0)), _mm512_load_ps(part(1))]
            } else {
                [_mm512_setzero_ps(); 2]
            };
            for group in 0..N {
                let at = 4 * (self.first + group);
                let scale = if S::SLAB_SCALE {
                    _mm512_setzero_ps()
                } else {
                    _mm512_set1_ps(x.add(SLAB + at).cast::<f32>().read())
                };
                for half in 0..2 {
                    let product = (&raw const (*products)[group][half]).cast();
                    let product = _mm512_cvtepi32_ps(_mm512_load_si512(product));
                    let scales = weights.scales[group][half];
                    sums[half] = if S::SLAB_SCALE {
                        _mm512_fmadd_ps(product, scales, sums[half])
                    } else {
                        _mm512_fmadd_ps(_mm512_mul_ps(product, scales), scale, sums[half])
                    };
                }
                if S::MINIMUMS {
                    let sum = x.add(layout::<S>().sums_at() + at).cast::<f32>().read();
                    for half in 0..2 {
                        let minimums = weights.minimums[group][half];
                        sums[half] = _mm512_fmadd_ps(minimums, _mm512_set1_ps(sum), sums[half]);
                    }
                }
            }
            if S::SLAB_SCALE && self.first + N < self.groups {
                for half in 0..2 {
                    _mm512_store_ps(part(half), sums[half]);
                }
                return;
            }
            for half in 0..2 {
                if S::SLAB_SCALE {
                    let scale = _mm512_set1_ps(x.add(SLAB).cast::<f32>().read());
                    let sum = _mm512_load_ps(result(half));
                    sums[half] = _mm512_fmadd_ps(sums[half], scale, sum);
                }
                _mm512_store_ps(result(half), sums[half]);
            }
        }
    }
}

/// Scales and minimums of `N` groups.
struct Weights<const N: usize> {
    scales: [[__m512; 2]; N],
    minimums: [[__m512; 2]; N],
}

impl<const N: usize> Weights<N> {
    #[inline(always)]
    unsafe fn load<S: Scheme>(slab: *const Slab, first: usize) -> Self {
        // SAFETY: the slab has `N` groups from `first` on, each with two halves of 16 scales and
        // minimums, aligned to 64.
        unsafe {
            let zero = _mm512_setzero_ps();
            let all = |from: *const [[f32; LANES]; 2]| {
                let mut all = [[zero; 2]; N];
                for (group, halves) in all.iter_mut().enumerate() {
                    for (half, lanes) in halves.iter_mut().enumerate() {
                        let from = &raw const (*from.add(first + group))[half];
                        *lanes = _mm512_load_ps(from.cast());
                    }
                }
                all
            };
            Weights {
                scales: all((&raw const (*slab).scales).cast()),
                minimums: if S::MINIMUMS {
                    all((&raw const (*slab).minimums).cast())
                } else {
                    [[zero; 2]; N]
                },
            }
        }
    }
}

/// Multiplies a tile of columns with the codes of a group for both halves of a panel.
macro_rules! multiply_tile {
    ($first:tt, $second:tt, $columns:tt, $x:expr, $stride:expr, $weights:expr) => {
        asm!(
            concat!("tileloadd ", $columns, ", [{x} + {stride}]"),
            "tileloadd tmm6, [{weights} + {weights_stride}]",
            "tileloadd tmm7, [{weights} + {weights_stride} + 64]",
            concat!("tilezero ", $first),
            concat!("tilezero ", $second),
            concat!("tdpbssd ", $first, ", ", $columns, ", tmm6"),
            concat!("tdpbssd ", $second, ", ", $columns, ", tmm7"),
            x = in(reg) $x,
            stride = in(reg) $stride,
            weights = in(reg) $weights,
            weights_stride = in(reg) 2 * 64usize,
            options(nostack, preserves_flags),
        )
    };
}
use multiply_tile;

/// Stores the products of a tile of columns with a group for both halves of a panel.
macro_rules! store_tile {
    ($first:tt, $second:tt, $products:expr) => {
        asm!(
            concat!("tilestored [{products} + {stride}], ", $first),
            concat!("tilestored [{products} + {stride} + 64], ", $second),
            products = in(reg) $products,
            stride = in(reg) PART * PANEL * 4,
            options(nostack, preserves_flags),
        )
    };
}
use store_tile;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Isa;
    use crate::packed::formats::Q8_0;

    #[test]
    fn foreign_tile_configurations_are_restored() {
        let Some(_tiles) = Isa::all().into_iter().find_map(|isa| match isa {
            Isa::Avx512(token) => token.tiles(),
            _ => None,
        }) else {
            return;
        };
        let mut out = [0.0f32; 32];
        let column = [[0u64; 8]; 8];
        let weights = [[0u64; 8]; 32 * 34 / 64];
        let columns = [Column {
            x: column.as_ptr().cast(),
            out: out.as_mut_ptr(),
        }; WORTH_TILES];
        let panel = Panel {
            weights: weights.as_ptr().cast(),
            stride: 0,
            rows: 32,
            k: 32,
            first: 0,
            slabs: 0,
            past_caches: false,
            reading: crate::product::AccessPattern::DEFAULT,
            scratch: std::ptr::null_mut(),
        };
        // SAFETY: AMX was detected, and everything has the required size.
        let [during, after] = unsafe {
            Configuration::new(16).set();
            multiply::<Q8_0>(&panel, &columns);
            let during = Configuration::current();
            Configuration {
                palette: 0,
                ..Configuration::new(0)
            }
            .set();
            multiply::<Q8_0>(&panel, &columns);
            [during, Configuration::current()]
        };
        assert_eq!(during.rows[6], 4);
        assert_eq!(during.row_bytes[4], 16);
        assert_eq!(after.palette, 0);
        assert_eq!(out, [0.0; 32]);
    }
}
