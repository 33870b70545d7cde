//! Decoding of the IQ1, IQ2 and IQ3 types with AVX2: a table maps four numbers to eight codes each,
//! and bits hold the signs.

use super::decode::{GroupedBlock, grouped_signed, number, spread_bits, two_scales};
use samite_quant::Codebook;
use samite_quant::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs,
};
use std::arch::x86_64::*;

/// Returns the codes of a group.
#[inline(always)]
unsafe fn codes<B: Codebook>(block: &B, group: usize) -> __m256i {
    // SAFETY: callers are compiled for AVX2; only registers are used.
    unsafe {
        let [a, b, c, d] = block.points(group).map(|points| points as i64);
        let points = _mm256_set_epi64x(d, c, b, a);
        let marked = spread_bits(block.marks(group));
        if B::SIGNS {
            _mm256_sub_epi8(_mm256_xor_si256(points, marked), marked)
        } else {
            _mm256_sub_epi8(points, _mm256_and_si256(marked, _mm256_set1_epi8(2)))
        }
    }
}

macro_rules! grids {
    ($($block:ident)*) => {
        grouped_signed! {$(
            $block, 16 scales: |b| b.scales(number(b.d()));
            |group| codes(b, group);
        )*}
    };
}
grids!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S);
