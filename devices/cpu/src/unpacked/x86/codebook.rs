//! Decoding of IQ4_NL, IQ4_XS, MXFP4 and NVFP4 with AVX2.

use super::decode::{
    Block32, Codes, GroupedBlock, block32, grouped_signed, halves, look_up, number, two_scales,
};
use samite_quant::blocks::{BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockNvfp4};
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half, ue4m3_half};
use std::arch::x86_64::*;

block32! {
    BlockIq4Nl, signed true: |b| (look_up(&IQ4_NL_VALUES, halves(&b.qs)), number(b.d), |_| 0.0);
    BlockMxfp4, signed true: |b| (look_up(&MXFP4_VALUES, halves(&b.qs)), e8m0_half(b.e), |_| 0.0);
}

grouped_signed! {
    BlockIq4Xs, 8 scales: |b| {
        let d = number(b.d);
        b.unpacked_scales().map(|s| d * f32::from(s))
    };
    |group| look_up(&IQ4_NL_VALUES, halves(b.qs.get_unchecked(16 * group..16 * group + 16)));

    BlockNvfp4, 4 scales: |b| b.d.map(ue4m3_half);
    |group| {
        // Both halves of the group have eight bytes, whose low halves are the first eight codes.
        let both = _mm_loadu_si128(b.qs.as_ptr().add(16 * group).cast());
        let low = _mm_and_si128(both, _mm_set1_epi8(15));
        let high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15));
        let codes = _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
        look_up(&MXFP4_VALUES, codes)
    };
}
