//! Decoding of TQ1_0 and TQ2_0 with AVX2.

use super::decode::{Affine, GroupedBlock, grouped_affine, number, two_bits};
use samite_quant::blocks::{BlockTq1_0, BlockTq2_0};
use std::arch::x86_64::*;

grouped_affine! {
    BlockTq2_0: |b| Affine::ternary(number(b.d));
    |group| two_bits(&b.qs, group)
}

impl GroupedBlock for BlockTq1_0 {
    /// All codes, since bytes have digits of several groups, and the values of TQ2_0.
    type Unpacked = ([u8; 256], Affine);

    #[inline(always)]
    unsafe fn unpack(&self) -> Self::Unpacked {
        // SAFETY: called only if AVX2 and F16C are available, here and below.
        (self.codes(), Affine::ternary(unsafe { number(self.d) }))
    }

    #[inline(always)]
    unsafe fn codes(&self, (codes, _): &Self::Unpacked, group: usize) -> __m256i {
        // SAFETY: callers are compiled for AVX2; `group` is below 8, and there are 8 times 32
        // codes.
        unsafe { _mm256_loadu_si256(codes.as_chunks::<32>().0.as_ptr().add(group).cast()) }
    }

    #[inline(always)]
    unsafe fn scales((_, affine): &Self::Unpacked, group: usize) -> __m256 {
        // SAFETY: `scales` of the inner type requires the same group and instructions.
        unsafe { BlockTq2_0::scales(affine, group) }
    }

    #[inline(always)]
    unsafe fn halves((_, affine): &Self::Unpacked, group: usize) -> [(f32, f32); 2] {
        // SAFETY: `halves` of the inner type requires the same group and instructions.
        unsafe { BlockTq2_0::halves(affine, group) }
    }

    #[inline(always)]
    unsafe fn offsets(
        (_, affine): &Self::Unpacked,
        sums: *const f32,
        half_sums: *const f32,
    ) -> __m256 {
        // SAFETY: `offsets` of the inner type requires the same sums and instructions.
        unsafe { BlockTq2_0::offsets(affine, sums, half_sums) }
    }
}
