//! Columns of activations as F32, copied to slabs.

use crate::activations::slabs::Slabs;

/// Elements of rows that are multiplied at a time. Together with the same elements of some columns,
/// they fit into the L1 cache.
pub(crate) const ELEMENTS: usize = 128;

/// Minimum number of columns for which copying them to slabs is faster.
const WORTH_SLABS: usize = 17;

/// Returns the slabs to which columns of `k` elements should be copied, if about `each` columns are
/// multiplied with one matrix. Returns `None` if they should stay in place. In place, their
/// distance is often a multiple of the page size, so that columns that are multiplied together
/// evict each other from the cache.
pub(crate) fn slabs(k: usize, columns: usize, each: usize) -> Option<Slabs> {
    let slabs = Slabs::new(ELEMENTS, ELEMENTS * size_of::<f32>(), k, columns)?;
    (each >= WORTH_SLABS).then_some(slabs)
}

/// Copies elements of a column, from element `start`, a multiple of [`ELEMENTS`].
///
/// # Safety
/// `out` must be one of the columns that `slabs` describes, writable and aligned to 4. The column
/// must have these elements.
pub(crate) unsafe fn copy(slabs: Slabs, x: &[f32], start: usize, out: *mut u8) {
    for (x, slab) in slabs.pieces(x, start, out) {
        // SAFETY: the column at `out` has all these elements, so each piece has its slab, aligned
        // to 4. `x` is borrowed, so the writable column does not overlap it.
        unsafe {
            slab.cast::<f32>()
                .copy_from_nonoverlapping(x.as_ptr(), x.len())
        };
    }
}
