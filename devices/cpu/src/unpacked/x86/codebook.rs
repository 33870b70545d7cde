//! IQ4_NL, IQ4_XS and MXFP4, decoded by AVX2.

use super::decode::{Block32, Block256, Codes, block32, halves, look_up, number};
use samite_quant::blocks::{BlockIq4Nl, BlockIq4Xs, BlockMxfp4};
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half};
use std::arch::x86_64::*;

block32! {
    BlockIq4Nl, signed true: |b| (look_up(&IQ4_NL_VALUES, halves(&b.qs)), number(b.d), |_| 0.0);
    BlockMxfp4, signed true: |b| (look_up(&MXFP4_VALUES, halves(&b.qs)), e8m0_half(b.e), |_| 0.0);
}

impl Block256 for BlockIq4Xs {
    type Unpacked = [f32; 8];
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn unpack(&self) -> [f32; 8] {
        // SAFETY: only called where F16C is there.
        let d = unsafe { number(self.d) };
        self.unpacked_scales().map(|s| d * f32::from(s))
    }

    #[inline(always)]
    unsafe fn codes(&self, _: &[f32; 8], group: usize) -> __m256i {
        // SAFETY: only called where AVX2 is there, here and below; `group` is below 8.
        unsafe {
            look_up(
                &IQ4_NL_VALUES,
                halves(self.qs.get_unchecked(16 * group..16 * group + 16)),
            )
        }
    }

    #[inline(always)]
    unsafe fn scales(unpacked: &[f32; 8], group: usize) -> __m256 {
        // SAFETY: callers are compiled for AVX2; `group` is below 8.
        unsafe { _mm256_set1_ps(*unpacked.get_unchecked(group)) }
    }

    #[inline(always)]
    unsafe fn halves(unpacked: &[f32; 8], group: usize) -> [(f32, f32); 2] {
        [(unpacked[group], 0.0); 2]
    }

    #[inline(always)]
    unsafe fn offsets(_: &[f32; 8], _: *const f32, _: *const f32) -> __m256 {
        // SAFETY: callers are compiled for AVX2; no memory is read.
        unsafe { _mm256_setzero_ps() }
    }
}
