//! The end of products of packed rows: sums of a panel are stored, past the caches where they are of no more use there.

use super::{LANES, PANEL};
use crate::product::{Column, Panel};

/// Sums of one column for the rows of a panel.
pub(crate) type Sum = [[f32; LANES]; 2];

/// Stores the sums of all columns for the rows of the panel that begins at row `row`. Where results go past the caches, whoever
/// calls a product must call [`all_stored`] afterwards.
///
/// # Safety
/// `row` must be below `panel.rows`. There must be sums of as many columns at `results`, and room for the results of the rows that
/// exist at `first + row` of each column's `out`, in other memory.
#[inline(always)]
pub(crate) unsafe fn store_all(panel: &Panel, row: usize, columns: &[Column], results: *const Sum) {
    let rows = PANEL.min(panel.rows - row);
    for (c, column) in columns.iter().enumerate() {
        let out = column.out.wrapping_add(panel.first + row);
        // SAFETY: there are sums of column `c`, which is below the number of columns, and its results have room for the `rows`
        // rows that exist. Results are memory of the caller's columns, sums of the product, so neither overlaps the other.
        unsafe { store(results.add(c).cast(), out, rows, panel.past_caches) };
    }
}

/// Stores one column's results for `rows` rows of a panel, as [`store_all`].
///
/// # Safety
/// A panel's results must be readable at `from`, and those of `rows` rows, at most a panel's, be writable at `out`, elsewhere.
#[inline(always)]
pub(crate) unsafe fn store(from: *const f32, out: *mut f32, rows: usize, past_caches: bool) {
    // SAFETY: there is room for `rows` numbers at `out`, a whole panel of them in the first two cases, and as many are read at
    // `from`. `stream` writes past the caches to multiples of 64, which the address was found to be.
    unsafe {
        if past_caches && rows == PANEL && out.addr().is_multiple_of(64) {
            stream(from, out);
        } else if rows == PANEL {
            // Without calling a function that copies any number of them.
            out.copy_from_nonoverlapping(from, PANEL);
        } else {
            out.copy_from_nonoverlapping(from, rows);
        }
    }
}

/// Copies the sums of a panel to whole lines. While weights stream through the caches, a result's line is in none: to
/// read it first, and to write it back when it is displaced, costs more time than products of as many bytes of weights.
///
/// # Safety
/// The sums of a panel must be readable at `sums`, and as many numbers be writable at `out`, elsewhere, aligned to a line.
#[inline(always)]
unsafe fn stream(sums: *const f32, out: *mut f32) {
    // SAFETY: `PANEL` numbers are readable at `sums` and writable at `out`, which is other memory. `_mm_stream_ps` needs 16
    // bytes of alignment, which a multiple of 64 has; both instructions are part of every x86-64.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        for i in (0..PANEL).step_by(4) {
            use std::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
            _mm_stream_ps(out.add(i), _mm_loadu_ps(sums.add(i)));
        }
        #[cfg(not(target_arch = "x86_64"))]
        out.copy_from_nonoverlapping(sums, PANEL);
    }
}

/// Whether results of a matrix of so many bytes with so many columns should go past the caches: not where neither displaces
/// much.
pub(crate) fn past_caches(weights: usize, rows: usize, columns: usize) -> bool {
    const MANY_COLUMNS: usize = 64;
    if columns < MANY_COLUMNS {
        weights > 256 << 10
    } else {
        rows.saturating_mul(columns) > (2 << 20) / 4
    }
}

/// Makes what products stored past the caches visible to other threads before anything that is written later.
#[inline(always)]
pub(crate) fn all_stored() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
