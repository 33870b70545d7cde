//! Columns of activations, rounded to 8 bits for products with packed weights.
//!
//! Codes of weights are unsigned in products; what has to be subtracted from them is taken into account here, once for
//! all rows: the sum of a group's codes times the offset is where an accumulator starts.

use crate::detect::Avx512;

/// What a type of weights needs to know about columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnSpec {
    /// Elements that share a scale of the column: 32 or 256.
    pub scaled: usize,
    /// Elements that share a scale of the weights: 16 or 32.
    pub group: usize,
    /// How groups are summed up.
    pub sums: Sums,
}

/// What is stored for the sum of the codes of a group.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Sums {
    /// The sum times minus the offset of the weights' codes, as i32.
    Offset(i32),
    /// Minus the sum, times the column's scale if that is one for each 32 elements, as f32: for weights with minimums.
    Minus,
}

/// Elements of a slab: what is multiplied at a time.
pub(crate) const SLAB: usize = 256;

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

/// How columns lie in memory: the first slabs of all of them, then the second ones, and so on. A slab has its codes, then
/// scales (f32) and sums of groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activations {
    token: Avx512,
    spec: ColumnSpec,
    /// Bytes of all columns.
    pub bytes: usize,
    /// Distance in bytes of the slabs of a column.
    pub slabs: usize,
}

impl Activations {
    /// For `columns` columns of `k` elements; `None` if the size overflows.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn new(token: Avx512, spec: ColumnSpec, k: usize, columns: usize) -> Option<Self> {
        let slabs = columns.checked_mul(spec.slab_bytes())?;
        let bytes = k.div_ceil(SLAB).checked_mul(slabs)?;
        Some(Activations {
            token,
            spec,
            bytes,
            slabs,
        })
    }

    /// Distance in bytes of columns.
    pub fn stride(&self) -> usize {
        self.spec.slab_bytes()
    }

    /// Quantizes elements of a column from element `start` on, a multiple of 256.
    ///
    /// # Safety
    /// `out` must be the place of one of the columns that `self` describes, writable and aligned to 4; columns have
    /// these elements.
    pub unsafe fn quantize(&self, x: &[f32], start: usize, out: *mut u8) {
        let _ = self.token;
        let spec = &self.spec;
        for (i, x) in x.chunks(SLAB).enumerate() {
            let slab = out.wrapping_add((start / SLAB + i) * self.slabs);
            let (scales, sums) = (slab.wrapping_add(SLAB), slab.wrapping_add(spec.sums_at()));
            for (part, x) in x.chunks(spec.scaled).enumerate() {
                let at = part * spec.scaled;
                // SAFETY: the token proves that the instructions are there; the rest is the caller's contract.
                unsafe {
                    let codes = slab.add(at).cast::<i8>();
                    let scale = round(x, codes);
                    *scales.cast::<f32>().add(part) = scale;
                    for g in 0..x.len() / spec.group {
                        let sum = sum(codes.add(g * spec.group), spec.group);
                        *sums.cast::<i32>().add(at / spec.group + g) = match spec.sums {
                            Sums::Offset(offset) => -offset * sum,
                            Sums::Minus => {
                                let scale = if spec.scaled == 32 { scale } else { 1.0 };
                                (-(sum as f32) * scale).to_bits() as i32
                            }
                        };
                    }
                }
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn round(_x: &[f32], _codes: *mut i8) -> f32 {
    unreachable!("there is no token without the processor")
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn sum(_codes: *const i8, _count: usize) -> i32 {
    unreachable!("there is no token without the processor")
}

#[cfg(target_arch = "x86_64")]
use x86::{round, sum};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Rounds numbers, a multiple of 16, to codes; the scale.
    ///
    /// # Safety
    /// There must be room for as many codes, and the instructions must be there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn round(x: &[f32], codes: *mut i8) -> f32 {
        // SAFETY: all addresses are inside of what the caller gave.
        unsafe {
            let mut largest = _mm512_setzero_ps();
            for x in x.as_chunks::<16>().0 {
                largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x.as_ptr())));
            }
            let largest = _mm512_reduce_max_ps(largest);
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let inverse = _mm512_set1_ps(inverse);
            for (i, x) in x.as_chunks::<16>().0.iter().enumerate() {
                let x = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), inverse);
                let whole = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
                _mm_storeu_si128(codes.add(16 * i).cast(), whole);
            }
            largest / 127.0
        }
    }

    /// The sum of codes, a multiple of 16.
    ///
    /// # Safety
    /// There must be as many codes, and the instructions must be there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn sum(codes: *const i8, count: usize) -> i32 {
        // SAFETY: all addresses are inside of what the caller gave.
        unsafe {
            let mut sums = _mm_setzero_si128();
            for i in (0..count).step_by(16) {
                let codes = _mm_loadu_si128(codes.add(i).cast());
                sums = _mm_dpbusd_epi32(sums, _mm_set1_epi8(1), codes);
            }
            let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
            let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums));
            _mm_cvtsi128_si32(sums)
        }
    }
}
