//! Storing the sums of a panel, with non-temporal stores if caches do not need them.

use super::{LANES, PANEL};
use crate::product::{Column, Panel};

/// Sums of one column for the rows of a panel.
pub(crate) type Sum = [[f32; LANES]; 2];

/// Stores the sums of all columns for the rows of the panel that starts at row `row`. If results
/// bypass the caches, the caller of a product must call [`all_stored`] afterwards.
///
/// # Safety
/// `row` must be below `panel.rows`. `results` must have sums of all columns. Each column's `out`
/// must have room, in other memory, for the results of the rows that exist at `first + row`.
#[inline(always)]
pub(crate) unsafe fn store_all(panel: &Panel, row: usize, columns: &[Column], results: *const Sum) {
    let rows = PANEL.min(panel.rows - row);
    for (c, column) in columns.iter().enumerate() {
        let out = column.out.wrapping_add(panel.first + row);
        // SAFETY: column `c` is below the number of columns and has sums, and its results have room
        // for the `rows` rows that exist. Results belong to the caller's columns, sums to the
        // product, so they do not overlap.
        unsafe { store(results.add(c).cast(), out, rows, panel.past_caches) };
    }
}

/// Stores one column's results for `rows` rows of a panel, like [`store_all`].
///
/// # Safety
/// A panel's results must be readable at `from`. Room for `rows` rows, at most a panel's, must be
/// writable at `out`, elsewhere.
#[inline(always)]
pub(crate) unsafe fn store(from: *const f32, out: *mut f32, rows: usize, past_caches: bool) {
    // SAFETY: there is room for `rows` numbers at `out`, a whole panel of them in the first two
    // cases, and as many are read at `from`. `stream` writes to multiples of 64, which the address
    // was checked to be.
    unsafe {
        if past_caches && rows == PANEL && out.addr().is_multiple_of(64) {
            stream(from, out);
        } else if rows == PANEL {
            // Avoids the call of a function that copies any number.
            out.copy_from_nonoverlapping(from, PANEL);
        } else {
            out.copy_from_nonoverlapping(from, rows);
        }
    }
}

/// Copies the sums of a panel to whole lines with non-temporal stores. While weights stream through
/// the caches, a result's line is in none of them. Reading it first and writing it back on eviction
/// would cost more time than products of as many bytes of weights.
///
/// # Safety
/// The sums of a panel must be readable at `sums`. As many numbers must be writable at `out`,
/// elsewhere, aligned to a line.
#[inline(always)]
unsafe fn stream(sums: *const f32, out: *mut f32) {
    // SAFETY: `PANEL` numbers are readable at `sums` and writable at `out`, which is other memory.
    // `_mm_stream_ps` needs 16 bytes of alignment, which a multiple of 64 has. Both instructions
    // are part of every x86-64.
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

/// Returns whether results of a matrix of `weights` bytes with `columns` columns should bypass the
/// caches. False if neither would evict much.
pub(crate) fn past_caches(weights: usize, rows: usize, columns: usize) -> bool {
    const MANY_COLUMNS: usize = 64;
    if columns < MANY_COLUMNS {
        weights > 256 << 10
    } else {
        rows.saturating_mul(columns) > (2 << 20) / 4
    }
}

/// Makes non-temporal stores visible to other threads before all later writes.
#[inline(always)]
pub(crate) fn all_stored() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
