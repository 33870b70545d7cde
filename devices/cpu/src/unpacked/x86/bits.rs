//! Decoding of Q1_0 and Q2_0 with AVX2.

use super::decode::{GroupedBlock, grouped_signed, number, spread_bits, two_scales};
use samite_quant::blocks::{BlockQ1_0, BlockQ2_0};
use std::arch::x86_64::*;

grouped_signed! {
    BlockQ1_0, 4 scales: |b| [number(b.d); 4];
    |group| {
        // All bits set (-1) if the bit is not set, otherwise 1.
        let bits = b.qs.as_ptr().add(4 * group).cast::<u32>().read_unaligned();
        _mm256_or_si256(spread_bits(!bits), _mm256_set1_epi8(1))
    };

    BlockQ2_0, 2 scales: |b| [number(b.d); 2];
    |group| {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(b.qs.as_ptr().add(8 * group).cast()));
        // Splits each byte into halves in two words, and then each half into two bytes.
        let halves = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
        let halves = _mm256_and_si256(halves, _mm256_set1_epi32(0x000f_000f));
        let codes = _mm256_or_si256(halves, _mm256_slli_epi32(halves, 6));
        let codes = _mm256_and_si256(codes, _mm256_set1_epi8(3));
        _mm256_sub_epi8(codes, _mm256_set1_epi8(1))
    };
}
