//! Columns in slabs of the number of elements that products process at a time.

use crate::product::Column;

/// Layout of columns in memory: the first slabs of all columns, then the second ones, and so on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slabs {
    /// Elements of a slab.
    len: usize,
    /// Bytes of a slab, and so the distance of columns.
    pub slab_bytes: usize,
    /// Number of slabs of a column.
    count: usize,
    /// Distance in bytes of the slabs of a column.
    pub distance: usize,
}

impl Slabs {
    /// Describes `columns` columns of `k` elements in slabs of `len` elements and `slab_bytes`
    /// bytes. Returns `None` if the size overflows.
    pub fn new(len: usize, slab_bytes: usize, k: usize, columns: usize) -> Option<Self> {
        let (count, distance) = (k.div_ceil(len), columns.checked_mul(slab_bytes)?);
        distance.checked_mul(count)?;
        Some(Slabs {
            len,
            slab_bytes,
            count,
            distance,
        })
    }

    /// Returns the bytes of a column.
    pub fn column_bytes(&self) -> usize {
        self.slab_bytes * self.count
    }

    /// Returns the bytes of all columns.
    pub fn total(&self) -> usize {
        self.distance * self.count
    }

    /// Splits elements from element `start`, the first of a slab, into slabs, and returns each with
    /// its place in the column.
    #[inline(always)]
    pub fn pieces(
        self,
        x: &[f32],
        start: usize,
        column: *mut u8,
    ) -> impl Iterator<Item = (&[f32], *mut u8)> {
        let first = start / self.len;
        let at = move |i| column.wrapping_add((first + i) * self.distance);
        x.chunks(self.len).enumerate().map(move |(i, x)| (x, at(i)))
    }

    /// Copies columns to `to`, in adjacent slabs again. Returns the distance of a column's slabs
    /// there.
    ///
    /// # Safety
    /// The columns must exist, and `to` must have room for them.
    pub unsafe fn gather(&self, columns: &[Column], to: *mut u8) -> usize {
        let distance = columns.len() * self.slab_bytes;
        for slab in 0..self.count {
            for (c, column) in columns.iter().enumerate() {
                let from = column.x.wrapping_add(slab * self.distance);
                let to = to.wrapping_add(slab * distance + c * self.slab_bytes);
                // SAFETY: slab `slab` of column `c` is below both counts, so it exists in the
                // columns and in `to`, which is other memory.
                unsafe { to.copy_from_nonoverlapping(from, self.slab_bytes) };
            }
        }
        distance
    }
}
