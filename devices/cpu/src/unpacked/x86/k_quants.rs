//! Decoding of Q2_K, Q3_K, Q4_K, Q5_K and Q6_K with AVX2.

use super::decode::{
    Affine, GroupedBlock, ScalesOf16, affine, grouped_affine, grouped_of_16, number, offsets_of_16,
    run_of_halves, two_bits, two_scales,
};
use samite_quant::blocks::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};
use std::arch::x86_64::*;

grouped_affine! {
    BlockQ4K: |b| affine(number(b.d), number(b.dmin), b.scales_and_minima());
    |group| run_of_halves(&b.qs, group)
}

grouped_affine! {
    BlockQ5K: |b| affine(number(b.d), number(b.dmin), b.scales_and_minima());
    |group| {
        let bits = _mm256_loadu_si256(b.qh.as_ptr().cast());
        let bit = _mm256_set1_epi8((1u8 << group) as i8);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        let fifth = _mm256_and_si256(set, _mm256_set1_epi8(16));
        _mm256_or_si256(run_of_halves(&b.qs, group), fifth)
    }
}

grouped_of_16! {
    BlockQ6K: |b| (
        { let d = number(b.d); b.scales.map(|s| d * f32::from(s)) },
        { let d = -32.0 * number(b.d); b.scales.map(|s| d * f32::from(s)) }
    );
    |group| {
        // Quarters of each half: two in the low and two in the high halves of the bytes of `ql`.
        let (half, quarter) = (group / 4, group % 4);
        let ql = b.ql.as_ptr().add(64 * half + 32 * (quarter % 2));
        let ql = _mm256_loadu_si256(ql.cast());
        let low = if quarter < 2 { ql } else { _mm256_srli_epi16(ql, 4) };
        let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
        _mm256_or_si256(low, _mm256_slli_epi16(two_bits(&b.qh, group), 4))
    }
}

grouped_of_16! {
    BlockQ3K: |b| (
        { let d = number(b.d); b.unpacked_scales().map(|s| d * f32::from(s)) },
        { let d = -4.0 * number(b.d); b.unpacked_scales().map(|s| d * f32::from(s)) }
    );
    |group| {
        let bits = _mm256_loadu_si256(b.hmask.as_ptr().cast());
        let bit = _mm256_set1_epi8((1u8 << group) as i8);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        _mm256_or_si256(two_bits(&b.qs, group), _mm256_and_si256(set, _mm256_set1_epi8(4)))
    }
}

grouped_of_16! {
    BlockQ2K: |b| (
        { let d = number(b.d); b.scales.map(|s| d * f32::from(s & 15)) },
        { let d = -number(b.dmin); b.scales.map(|s| d * f32::from(s >> 4)) }
    );
    |group| two_bits(&b.qs, group)
}
