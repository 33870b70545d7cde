//! Columns of activations as F32, copied to slabs.

use crate::activations::slabs::Slabs;

/// Elements of rows that are multiplied at a time: with as many of some columns, they fit into the first-level cache.
pub(crate) const ELEMENTS: usize = 128;

/// From so many columns on, copying them to slabs pays.
const WORTH_SLABS: usize = 17;

/// The slabs that columns of `k` elements should be copied to, of which about `each` are multiplied with one matrix; `None` if
/// they should stay where they are. There, their distance often is a multiple of the page size, and those that are multiplied
/// together displace each other from the cache.
pub(crate) fn slabs(k: usize, columns: usize, each: usize) -> Option<Slabs> {
    let slabs = Slabs::new(ELEMENTS, ELEMENTS * size_of::<f32>(), k, columns)?;
    (each >= WORTH_SLABS).then_some(slabs)
}

/// Copies elements of a column from element `start` on, a multiple of [`ELEMENTS`].
///
/// # Safety
/// `out` must be the place of one of the columns that `slabs` describes, writable and aligned to 4; columns have these
/// elements.
pub(crate) unsafe fn copy(slabs: Slabs, x: &[f32], start: usize, out: *mut u8) {
    for (x, slab) in slabs.pieces(x, start, out) {
        // SAFETY: the column at `out` has all these elements, so each piece has its slab, aligned to 4; `x` is borrowed, so the
        // writable column is elsewhere.
        unsafe {
            slab.cast::<f32>()
                .copy_from_nonoverlapping(x.as_ptr(), x.len())
        };
    }
}
