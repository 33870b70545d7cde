//! Tiles of columns: how columns are divided among them, and where they are.

use super::Sum;
use crate::product::Column;

/// With how many tiles of columns the next slab of weights is asked for, at most: all of it at once would keep columns waiting.
pub(crate) const ASKING: usize = 8;

/// Sums of some columns.
#[repr(C, align(64))]
pub(crate) struct Results<const N: usize>(pub [Sum; N]);

/// How many of so many columns are multiplied with the same rows, at most `most`: whole tiles, and as equal parts as these
/// allow.
#[inline(always)]
pub(crate) fn equal_part(columns: usize, most: usize, tile: usize) -> usize {
    let parts = columns.div_ceil(most).max(1);
    columns.div_ceil(parts).next_multiple_of(tile).max(1)
}

/// Whether slabs of so many bytes lie side by side: those of each column behind those of the one before. Then one address
/// with constant offsets serves for some of them.
#[inline(always)]
pub(crate) fn are_side_by_side(columns: &[Column], bytes: usize) -> bool {
    columns
        .windows(2)
        .all(|pair| pair[1].x == pair[0].x.wrapping_add(bytes))
}

/// The slabs of so many bytes that begin at byte `at` of columns, one behind the other: where they are, if columns lie
/// [side by side](are_side_by_side), otherwise in `copy`.
///
/// # Safety
/// There must be a column, each must have `bytes` bytes from byte `at` on, and `copy`, other memory, room for as many slabs.
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
        // SAFETY: the slab is there, and `copy`, which is other memory, has room for one for each column.
        unsafe { copy.add(c * bytes).copy_from_nonoverlapping(x, bytes) };
    }
    copy
}
