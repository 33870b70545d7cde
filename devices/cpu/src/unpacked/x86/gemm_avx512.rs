//! Products of quantized rows with many columns: rows are unpacked once for all columns.
//!
//! [`ROWS`] rows are unpacked to unsigned bytes, 256 elements at a time, and transposed so that a
//! register holds four elements of each of 16 rows. Four codes of a column are then broadcast and
//! multiplied with all rows at once, so no sum crosses a register. Codes are made unsigned by an
//! offset, like a format's own.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::decode::{Block32, GroupedBlock};
use super::{Blocks32, ColumnParts, GroupedBlocks, parts};
use crate::activations::int8_blocks::Int8Blocks;
use crate::product::{Column, Panel};
use std::arch::x86_64::*;

/// Number of rows that are unpacked together: two registers with a number per row.
const ROWS: usize = 32;

/// Number of groups of 32 elements that are unpacked together.
const GROUPS: usize = 8;

/// Unpacked rows.
#[repr(C, align(64))]
pub(crate) struct Unpacked {
    /// 32 codes, by group and row.
    codes: [[[u8; 32]; ROWS]; GROUPS],
    /// Four codes, by group, four elements, and row.
    turned: [[[[u8; 4]; ROWS]; 8]; GROUPS],
    /// Scales by half group and row.
    scales: [[f32; ROWS]; 2 * GROUPS],
    /// Offsets by half group and row.
    offsets: [[f32; ROWS]; 2 * GROUPS],
}

/// Formats that can be unpacked.
pub(crate) trait DecodeGroups {
    /// True if each half of a group has its own scale.
    const HALVES: bool;

    /// Unpacks `groups` groups, starting with group `first`, of the row at `row`, as row number
    /// `to`.
    ///
    /// # Safety
    /// The groups must exist as whole blocks, and AVX2 and F16C must be available.
    unsafe fn unpack(row: *const u8, first: usize, groups: usize, to: usize, out: &mut Unpacked);
}

/// Stores a group. Signed codes become unsigned ones with an offset.
#[inline(always)]
unsafe fn put<const SIGNED: bool>(
    out: &mut Unpacked,
    group: usize,
    to: usize,
    codes: __m256i,
    halves: [(f32, f32); 2],
) {
    // SAFETY: callers have AVX2, and 32 bytes.
    unsafe {
        let codes = if SIGNED {
            _mm256_xor_si256(codes, _mm256_set1_epi8(-128))
        } else {
            codes
        };
        _mm256_store_si256(out.codes[group][to].as_mut_ptr().cast(), codes);
    }
    for (half, (scale, offset)) in halves.into_iter().enumerate() {
        out.scales[2 * group + half][to] = scale;
        out.offsets[2 * group + half][to] = if SIGNED {
            offset - 128.0 * scale
        } else {
            offset
        };
    }
}

impl<T: Block32> DecodeGroups for Blocks32<T> {
    const HALVES: bool = false;

    #[inline(always)]
    unsafe fn unpack(row: *const u8, first: usize, groups: usize, to: usize, out: &mut Unpacked) {
        for group in 0..groups {
            // SAFETY: the row has `groups` groups from group `first` on, and each is one block,
            // aligned as `Operand::resolve` checked. `to` is below the rows of `out`.
            unsafe {
                let block = (*row.cast::<T>().add(first + group)).codes();
                let half = (block.scale, block.offset);
                if T::SIGNED {
                    put::<true>(out, group, to, block.codes, [half; 2]);
                } else {
                    put::<false>(out, group, to, block.codes, [half; 2]);
                }
            }
        }
    }
}

impl<T: GroupedBlock> DecodeGroups for GroupedBlocks<T> {
    const HALVES: bool = T::HALVES;

    #[inline(always)]
    unsafe fn unpack(row: *const u8, first: usize, groups: usize, to: usize, out: &mut Unpacked) {
        for at in (0..groups).step_by(T::GROUPS) {
            // SAFETY: the row has whole blocks from group `first` on, with `groups` groups, at most
            // those of `out`; `group` is below the groups of a block. `to` is below the rows of
            // `out`.
            unsafe {
                let block = &*row.cast::<T>().add((first + at) / T::GROUPS);
                let unpacked = block.unpack();
                for group in 0..T::GROUPS {
                    let codes = block.codes(&unpacked, group);
                    let halves = T::halves(&unpacked, group);
                    if T::SIGNED {
                        put::<true>(out, at + group, to, codes, halves);
                    } else {
                        put::<false>(out, at + group, to, codes, halves);
                    }
                }
            }
        }
    }
}

/// Transposes one group of 16 rows: eight registers of four elements each.
#[inline(always)]
unsafe fn turn(codes: &[[u8; 32]; ROWS], first: usize, out: &mut [[[u8; 4]; ROWS]; 8]) {
    // SAFETY: callers have AVX-512 F, and rows `first..first + 16` exist.
    unsafe {
        // Rows i and i + 8 are adjacent, so that both halves are transposed at once.
        let mut r = [_mm512_setzero_si512(); 8];
        for i in 0..8 {
            let low = _mm256_load_si256(codes[first + i].as_ptr().cast());
            let high = _mm256_load_si256(codes[first + i + 8].as_ptr().cast());
            r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
        let mut pairs = [_mm512_setzero_si512(); 8];
        for i in 0..4 {
            pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        // Four elements of rows 0 to 3, then of rows 4 to 7: elements 0, 1, 2, 3, with 4, 5, 6, 7
        // in the lanes above.
        let mut fours = [[_mm512_setzero_si512(); 4]; 2];
        for i in 0..2 {
            let (a, b) = (pairs[4 * i], pairs[4 * i + 1]);
            let (c, d) = (pairs[4 * i + 2], pairs[4 * i + 3]);
            fours[i] = [
                _mm512_unpacklo_epi64(a, c),
                _mm512_unpackhi_epi64(a, c),
                _mm512_unpacklo_epi64(b, d),
                _mm512_unpackhi_epi64(b, d),
            ];
        }
        let even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        let odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for i in 0..4 {
            let (a, b) = (fours[0][i], fours[1][i]);
            let mut at = |element: usize| out[element][first..].as_mut_ptr().cast();
            _mm512_store_si512(at(i), _mm512_permutex2var_epi64(a, even, b));
            _mm512_store_si512(at(i + 4), _mm512_permutex2var_epi64(a, odd, b));
        }
    }
}

/// Multiplies the unpacked part of the rows with `C` columns.
#[inline(always)]
unsafe fn tile<const HALVES: bool, const C: usize>(
    unpacked: &Unpacked,
    [first, groups]: [usize; 2],
    columns: &[Column],
    int8: &Int8Blocks,
    at: usize,
    masks: [__mmask16; 2],
) {
    // SAFETY: `columns` has at least `C` columns, with codes, scales and sums of groups
    // `first..first + groups`; `groups` is at most `GROUPS`, so `unpacked` has them. Results are
    // only read and written in lanes that `masks` shows, whose rows exist. Callers are compiled for
    // AVX-512 with VNNI.
    unsafe {
        let x: [ColumnParts; C] = std::array::from_fn(|c| parts(columns.get_unchecked(c), int8));
        let out: [*mut f32; C] = std::array::from_fn(|c| columns.get_unchecked(c).out.add(at));
        let mut sums = [[_mm512_setzero_ps(); 2]; C];
        if first > 0 {
            for c in 0..C {
                for h in 0..2 {
                    sums[c][h] = _mm512_maskz_loadu_ps(masks[h], out[c].wrapping_add(16 * h));
                }
            }
        }
        let (parts_of_group, fours) = if HALVES { (2, 4) } else { (1, 8) };
        for group in 0..groups {
            for part in 0..parts_of_group {
                let mut products = [[_mm512_setzero_si512(); 2]; C];
                for four in fours * part..fours * (part + 1) {
                    let rows = unpacked.turned.get_unchecked(group).get_unchecked(four);
                    let rows = rows.as_ptr().cast::<__m512i>();
                    let (low, high) = (*rows, *rows.add(1));
                    for c in 0..C {
                        let codes = x[c].codes.add((first + group) * 32 + four * 4);
                        let codes = _mm512_set1_epi32(codes.cast::<i32>().read_unaligned());
                        products[c][0] = _mm512_dpbusd_epi32(products[c][0], low, codes);
                        products[c][1] = _mm512_dpbusd_epi32(products[c][1], high, codes);
                    }
                }
                let half = 2 * group + part;
                let scales = unpacked.scales.get_unchecked(half).as_ptr();
                let offsets = unpacked.offsets.get_unchecked(half).as_ptr();
                for c in 0..C {
                    let scale = _mm512_set1_ps(*x[c].scales.add(first + group));
                    let sum = if HALVES {
                        *x[c].half_sums.add(2 * (first + group) + part)
                    } else {
                        *x[c].sums.add(first + group)
                    };
                    let sum = _mm512_set1_ps(sum);
                    for h in 0..2 {
                        let scale = _mm512_mul_ps(_mm512_load_ps(scales.add(16 * h)), scale);
                        let offset = _mm512_load_ps(offsets.add(16 * h));
                        let product = _mm512_cvtepi32_ps(products[c][h]);
                        sums[c][h] = _mm512_fmadd_ps(product, scale, sums[c][h]);
                        sums[c][h] = _mm512_fmadd_ps(offset, sum, sums[c][h]);
                    }
                }
            }
        }
        for c in 0..C {
            for h in 0..2 {
                _mm512_mask_storeu_ps(out[c].wrapping_add(16 * h), masks[h], sums[c][h]);
            }
        }
    }
}

/// Multiplies the decoded groups with all columns. All types share this code.
///
/// # Safety
/// The columns, the groups and all rows that are not masked must exist, and AVX-512 with VNNI must
/// be available.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<const HALVES: bool>(
    unpacked: &mut Unpacked,
    part: [usize; 2],
    columns: &[Column],
    int8: &Int8Blocks,
    at: usize,
    masks: [__mmask16; 2],
) {
    // SAFETY: `part` groups were decoded, so they may be transposed and multiplied. All columns are
    // covered. Results of masked rows are not touched.
    unsafe {
        for group in 0..part[1] {
            let Unpacked { codes, turned, .. } = unpacked;
            turn(&codes[group], 0, &mut turned[group]);
            turn(&codes[group], 16, &mut turned[group]);
        }
        let (sixes, rest) = columns.as_chunks::<6>();
        for six in sixes {
            tile::<HALVES, 6>(unpacked, part, six, int8, at, masks);
        }
        let (twos, rest) = rest.as_chunks::<2>();
        for two in twos {
            tile::<HALVES, 2>(unpacked, part, two, int8, at, masks);
        }
        if !rest.is_empty() {
            tile::<HALVES, 1>(unpacked, part, rest, int8, at, masks);
        }
    }
}

/// Multiplies rows with columns.
///
/// # Safety
/// As [`PanelFn`](crate::product::PanelFn), and AVX-512 with VNNI must be available.
#[inline(always)]
pub(crate) unsafe fn gemm<T: DecodeGroups>(panel: &Panel, columns: &[Column]) {
    if const { T::HALVES } {
        // SAFETY: `strips` requires the same panel, columns and instructions.
        unsafe { strips::<T, true>(panel, columns) }
    } else {
        // SAFETY: `strips` requires the same panel, columns and instructions.
        unsafe { strips::<T, false>(panel, columns) }
    }
}

#[inline(always)]
unsafe fn strips<T: DecodeGroups, const HALVES: bool>(panel: &Panel, columns: &[Column]) {
    let Some(int8) = Int8Blocks::new(panel.k) else {
        return; // such columns could not be allocated
    };
    let mut unpacked = Unpacked {
        codes: [[[0; 32]; ROWS]; GROUPS],
        turned: [[[[0; 4]; ROWS]; 8]; GROUPS],
        scales: [[0.0; ROWS]; 2 * GROUPS],
        offsets: [[0.0; ROWS]; 2 * GROUPS],
    };
    let all_groups = panel.k / 32;
    for row in (0..panel.rows).step_by(ROWS) {
        let rows = ROWS.min(panel.rows - row);
        let mask = |count: usize| ((1u32 << count.min(16)) - 1) as __mmask16;
        let masks = [mask(rows), mask(rows.saturating_sub(16))];
        for first in (0..all_groups).step_by(GROUPS) {
            let groups = GROUPS.min(all_groups - first);
            // SAFETY: rows, groups and columns exist. Old contents of rows after the last are
            // multiplied, but not stored.
            unsafe {
                for to in 0..rows {
                    let from = panel.weights.wrapping_add((row + to) * panel.stride);
                    T::unpack(from, first, groups, to, &mut unpacked);
                }
                let (part, at) = ([first, groups], panel.first + row);
                multiply::<HALVES>(&mut unpacked, part, columns, &int8, at, masks);
            }
        }
        if all_groups == 0 {
            for column in columns {
                // SAFETY: there is a result for each row.
                unsafe { column.out.add(panel.first + row).write_bytes(0, rows) };
            }
        }
    }
}
