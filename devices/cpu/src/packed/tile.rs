//! Tiles of columns: division of columns, and their addresses.

use super::Sum;
use crate::product::Column;

/// Maximum number of tiles of columns that prefetch the next slab of weights. All at once, the
/// requests would delay columns.
pub(crate) const ASKING: usize = 8;

/// Sums of some columns.
#[repr(C, align(64))]
pub(crate) struct Results<const N: usize>(pub [Sum; N]);

/// Returns the number of columns, at most `most`, that are multiplied with the same rows: whole
/// tiles, in parts as equal as possible.
#[inline(always)]
pub(crate) fn equal_part(columns: usize, most: usize, tile: usize) -> usize {
    let parts = columns.div_ceil(most).max(1);
    columns.div_ceil(parts).next_multiple_of(tile).max(1)
}

/// Returns whether slabs of `bytes` bytes are adjacent, in column order. Then one address with
/// constant offsets suffices for several of them.
#[inline(always)]
pub(crate) fn are_side_by_side(columns: &[Column], bytes: usize) -> bool {
    columns
        .windows(2)
        .all(|pair| pair[1].x == pair[0].x.wrapping_add(bytes))
}

/// Returns the slabs of `bytes` bytes that start at byte `at` of columns, one after the other: in
/// place if columns are [adjacent](are_side_by_side), otherwise in `copy`.
///
/// # Safety
/// There must be a column, and each must have `bytes` bytes from byte `at`. `copy`, in other
/// memory, must have room for as many slabs.
#[inline(always)]
pub(crate) unsafe fn side_by_side(
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
        // SAFETY: the slab exists, and `copy`, which is other memory, has room for one for each
        // column.
        unsafe { copy.add(c * bytes).copy_from_nonoverlapping(x, bytes) };
    }
    copy
}
