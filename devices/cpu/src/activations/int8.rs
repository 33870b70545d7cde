//! Activation columns rounded to 8 bits, for products with packed weights.
//!
//! Codes of weights are unsigned in products, so their offset must be subtracted. This is done
//! here, once for all rows: accumulators start with the offset times the sum of a group's codes.

use super::SLAB;
use crate::activations::slabs::Slabs;
use crate::detect::{Isa, vectorized};
use crate::simd::math::{ROUND, round};
use std::array::from_fn;

/// Maximum code. The code -128 has no positive counterpart, which some processors need because they
/// move signs to the other operand.
const LARGEST: f32 = 127.0;

/// Requirements of a weight type for its columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ColumnSpec {
    /// Number of elements that share a scale of the column: 32 or 256.
    pub scaled: usize,
    /// Number of elements that are summed before a scale of the weights is applied: 16, 32 or 128.
    /// It is 32 if the column has a scale for each 32.
    pub group: usize,
    /// True if [`Sums::Offset`] starts with the bits of [`ROUND`], so that sums that start with it
    /// are the bits of floats.
    pub bits: bool,
    /// Form of the sums of groups.
    pub sums: Sums,
}

/// Value that is stored for the sum of a group's codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sums {
    /// The sum times the negated offset of the weights' codes, as i32.
    Offset(i32),
    /// The negated sum, as f32, for weights with minimums. Multiplied with the column's scale if
    /// each group has one.
    Minus,
}

impl ColumnSpec {
    /// Returns the offset of the sums in a slab, after its codes and scales.
    #[inline(always)]
    pub const fn sums_at(&self) -> usize {
        SLAB + SLAB / self.scaled * 4
    }

    /// Returns the bytes of a slab, a multiple of the cache line size.
    #[inline(always)]
    pub const fn slab_bytes(&self) -> usize {
        (self.sums_at() + SLAB / self.group * 4).next_multiple_of(64)
    }
}

/// Columns of slabs with codes, then scales (f32), then sums of groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Int8Slabs {
    isa: Isa,
    spec: ColumnSpec,
    pub slabs: Slabs,
}

impl Int8Slabs {
    /// Describes `columns` columns of `k` elements. Returns `None` if the size overflows.
    pub fn new(isa: Isa, spec: ColumnSpec, k: usize, columns: usize) -> Option<Self> {
        let slabs = Slabs::new(SLAB, spec.slab_bytes(), k, columns)?;
        Some(Int8Slabs { isa, spec, slabs })
    }

    /// Quantizes elements of a column, from element `start`, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be one of the columns that `self` describes, writable and aligned to 4. The
    /// column must have these elements.
    pub unsafe fn quantize(&self, x: &[f32], start: usize, out: *mut u8) {
        for (x, slab) in self.slabs.pieces(x, start, out) {
            // SAFETY: the column at `out` has all these elements, so each piece has a writable and
            // aligned slab there, as `quantize` requires.
            unsafe { quantize(self.isa, &self.spec, x, slab) };
        }
    }
}

vectorized! {
    /// Quantizes the elements of a slab.
    ///
    /// # Safety
    /// The slab must have `spec.slab_bytes()` writable bytes that no other code uses, and be
    /// aligned to 4. `x` must have at most [`SLAB`] elements.
    unsafe fn quantize(spec: &ColumnSpec, x: &[f32], slab: *mut u8) {
        let padded;
        let x = match x.as_array() {
            Some(x) => x,
            None => {
                let mut whole = [0.0; SLAB];
                whole[..x.len()].copy_from_slice(x);
                padded = whole;
                &padded
            }
        };
        // SAFETY: the slab has `slab_bytes()`, which count the codes, scales and sums of 256
        // elements even if the column ends earlier. Each arm has the constants of the spec.
        unsafe {
            match (spec.scaled, spec.group) {
                (32, _) => spec.quantize::<32, 32>(x, slab),
                (_, 16) => spec.quantize::<SLAB, 16>(x, slab),
                (_, 128) => spec.quantize::<SLAB, 128>(x, slab),
                _ => spec.quantize::<SLAB, 32>(x, slab),
            }
        }
    }
}

impl ColumnSpec {
    /// Quantizes the elements of a slab. `SCALED` elements share a scale, and `GROUP` elements are
    /// summed.
    ///
    /// # Safety
    /// The slab must have [`slab_bytes`](ColumnSpec::slab_bytes) writable bytes that no other code
    /// uses, and be aligned to 4. `SCALED` and `GROUP` must be those of `self`.
    #[inline(always)]
    unsafe fn quantize<const SCALED: usize, const GROUP: usize>(
        &self,
        x: &[f32; SLAB],
        slab: *mut u8,
    ) {
        let (scales, sums) = (slab.wrapping_add(SLAB), slab.wrapping_add(self.sums_at()));
        // SAFETY: a slab has room for the codes, scales and sums.
        unsafe {
            let codes = &mut *slab.cast::<[i8; SLAB]>();
            let parts = codes.as_chunks_mut::<SCALED>().0.iter_mut();
            let mut group_scales = [1.0; SLAB / 32];
            for (part, (codes, x)) in parts.zip(x.as_chunks::<SCALED>().0).enumerate() {
                let scale = round(x, LARGEST, codes, |bits| bits as i8);
                scales.cast::<f32>().add(part).write(scale);
                if SCALED == GROUP {
                    group_scales[part] = scale;
                }
            }
            let start = if self.bits {
                ROUND.to_bits().cast_signed()
            } else {
                0
            };
            // Sums whole words of codes, which compilers vectorise. They would sum the codes of a
            // single group one by one.
            let words: [i32; SLAB / 4] = from_fn(|i| {
                let [a, b, c, d] = codes.as_chunks().0[i];
                i32::from_le_bytes([a, b, c, d].map(|code: i8| code as u8))
            });
            let word_sums = words.map(|word| (0..4).map(|i| byte(word, i)).sum::<i32>());
            for (g, word_sums) in word_sums.chunks_exact(GROUP / 4).enumerate() {
                let sum: i32 = word_sums.iter().sum();
                let sum = match self.sums {
                    Sums::Offset(offset) => start - offset * sum,
                    Sums::Minus if SCALED == GROUP => {
                        (-(sum as f32) * group_scales[g]).to_bits().cast_signed()
                    }
                    Sums::Minus => (-(sum as f32)).to_bits().cast_signed(),
                };
                sums.cast::<i32>().add(g).write(sum);
            }
        }
    }
}

/// Returns byte `i` of a word, sign-extended.
#[inline(always)]
fn byte(word: i32, i: usize) -> i32 {
    word << (24 - 8 * i) >> 24
}
