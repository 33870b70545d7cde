//! Decoding of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 with AVX2.

use super::decode::{Block32, Codes, block32, fifth_bits, halves, number};
use samite_quant::blocks::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
use std::arch::x86_64::*;

block32! {
    BlockQ4_0, signed false: |b| (halves(&b.qs), number(b.d), |d: f32| -8.0 * d);
    BlockQ4_1, signed false: |b| (halves(&b.qs), number(b.d), |_| number(b.m));
    BlockQ5_0, signed false: |b| (_mm256_or_si256(halves(&b.qs), fifth_bits(b.qh)), number(b.d),
        |d: f32| -16.0 * d);
    BlockQ5_1, signed false: |b| (_mm256_or_si256(halves(&b.qs), fifth_bits(b.qh)), number(b.d),
        |_| number(b.m));
    BlockQ8_0, signed true: |b| (_mm256_loadu_si256(b.qs.as_ptr().cast()), number(b.d), |_| 0.0);
}
