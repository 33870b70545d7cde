//! Columns of activations, rounded to 8 bits for products with packed weights.
//!
//! Codes of weights are unsigned in products; what has to be subtracted from them is taken into account here, once for
//! all rows: the sum of a group's codes times the offset is where an accumulator starts.

use super::SLAB;
use crate::activations::slabs::Slabs;
use crate::detect::{Isa, vectorized};
use crate::simd::math::{ROUND, round};
use std::array::from_fn;

/// The largest code. That of -128 has no counterpart, which signs are moved to on some processors.
const LARGEST: f32 = 127.0;

/// What a type of weights needs to know about columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ColumnSpec {
    /// Elements that share a scale of the column: 32 or 256.
    pub scaled: usize,
    /// Elements that are summed up before a scale of the weights is applied: 16, 32 or 128, and 32 where as many share one of the
    /// column.
    pub group: usize,
    /// True if [`Sums::Offset`] starts with the bits of [`ROUND`], so that sums of products that start
    /// with it are the bits of numbers.
    pub bits: bool,
    /// How groups are summed up.
    pub sums: Sums,
}

/// What is stored for the sum of the codes of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sums {
    /// The sum times minus the offset of the weights' codes, as i32.
    Offset(i32),
    /// Minus the sum, as f32, for weights with minimums; times the column's scale if each group has one.
    Minus,
}

impl ColumnSpec {
    /// Offset of the sums in a slab: behind its codes and scales.
    #[inline(always)]
    pub const fn sums_at(&self) -> usize {
        SLAB + SLAB / self.scaled * 4
    }

    /// Bytes of a slab: whole cache lines.
    #[inline(always)]
    pub const fn slab_bytes(&self) -> usize {
        (self.sums_at() + SLAB / self.group * 4).next_multiple_of(64)
    }
}

/// Columns of slabs that have their codes, then scales (f32) and sums of groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Int8Slabs {
    isa: Isa,
    spec: ColumnSpec,
    pub slabs: Slabs,
}

impl Int8Slabs {
    /// For `columns` columns of `k` elements; `None` if the size overflows.
    pub fn new(isa: Isa, spec: ColumnSpec, k: usize, columns: usize) -> Option<Self> {
        let slabs = Slabs::new(SLAB, spec.slab_bytes(), k, columns)?;
        Some(Int8Slabs { isa, spec, slabs })
    }

    /// Quantizes elements of a column from element `start` on, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be the place of one of the columns that `self` describes, writable and aligned to 4; columns have
    /// these elements.
    pub unsafe fn quantize(&self, x: &[f32], start: usize, out: *mut u8) {
        for (x, slab) in self.slabs.pieces(x, start, out) {
            // SAFETY: the column at `out` has all these elements, so each piece has a slab there that is writable and aligned, as
            // `quantize` asks.
            unsafe { quantize(self.isa, &self.spec, x, slab) };
        }
    }
}

vectorized! {
    /// Quantizes the elements of a slab.
    ///
    /// # Safety
    /// The slab must have `spec.slab_bytes()` that are writable and nobody else's, be aligned to 4, and `x` at most
    /// [`SLAB`] elements.
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
        // SAFETY: the slab has `slab_bytes()`, which count the codes, scales and sums of 256 elements even where the column ends
        // before; each arm has the constants of the spec that made that number.
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
    /// Quantizes the elements of a slab; `SCALED` of them share a scale, and `GROUP` of them are summed up.
    ///
    /// # Safety
    /// The slab must have [`slab_bytes`](ColumnSpec::slab_bytes) that are writable and nobody else's, and be aligned to 4.
    /// `SCALED` and `GROUP` must be those of `self`.
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
            // Of whole words of codes, which compilers make vectors of; they would sum up those of a single group one by one.
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

/// Byte `i` of a word, with its sign.
#[inline(always)]
fn byte(word: i32, i: usize) -> i32 {
    word << (24 - 8 * i) >> 24
}
