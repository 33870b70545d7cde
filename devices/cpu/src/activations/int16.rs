//! Activation columns rounded to 16-bit integers, with a scale for each [`GROUP`] of them.

use super::SLAB;
use crate::activations::slabs::Slabs;
use crate::detect::{Isa, vectorized};
use crate::simd::int16::{self, GROUP, Terms};

/// Groups of a slab.
pub(crate) const GROUPS: usize = SLAB / GROUP;

/// Offset of a column's scales in a slab, after the numbers.
pub(crate) const SCALES_AT: usize = SLAB * size_of::<i16>();

/// Offset in a slab of the initial values of the sums of [crossed](crate::simd::int16) products.
pub(crate) const STARTS_AT: usize = SCALES_AT + GROUPS * size_of::<f32>();

/// Bytes of a slab of a column. A multiple of the cache line size.
pub(crate) const SLAB_BYTES: usize = (STARTS_AT + GROUPS * size_of::<i32>()).next_multiple_of(64);

/// Columns of slabs. Each slab has the numbers, padded with zeros to a multiple of 32, then scales
/// (f32), and for crossed products the initial values of their sums (i32).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Int16Slabs {
    pub isa: Isa,
    pub crossed: bool,
    pub slabs: Slabs,
}

impl Int16Slabs {
    /// Rounds elements of a column, from element `start`, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be one of the columns that `self` describes, writable and aligned to 4. The
    /// column must have these elements.
    pub unsafe fn round(&self, x: &[f32], start: usize, out: *mut u8) {
        for (x, slab) in self.slabs.pieces(x, start, out) {
            // SAFETY: the column at `out` has all these elements, so each piece has a writable and
            // aligned slab there, as `round` requires.
            unsafe { round(self.isa, x, slab, self.crossed) };
        }
    }
}

vectorized! {
    /// Rounds the elements of a slab.
    ///
    /// # Safety
    /// The slab must be writable and aligned to 4.
    unsafe fn round(x: &[f32], slab: *mut u8, crossed: bool) {
        let (whole, rest) = x.as_chunks::<GROUP>();
        let mut last = [0.0; GROUP];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        for (group, x) in whole.iter().chain(last).enumerate() {
            // SAFETY: a slab has room for the numbers and scales of all its elements.
            unsafe { int16::round_group(x, terms(slab), group, crossed) }
        }
    }
}

/// Returns the groups of a column's slab.
#[inline(always)]
pub(crate) fn terms(slab: *mut u8) -> Terms {
    Terms {
        pairs: slab.cast(),
        scales: slab.wrapping_add(SCALES_AT).cast(),
        starts: slab.wrapping_add(STARTS_AT).cast(),
        step: 1,
    }
}
