//! The formats of one or two bits with only a scale: Q1_0 and Q2_0.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::search::{max_abs, reciprocal, round_code};

impl Decode for BlockQ1_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 128]) {
        let d = self.d.to_f32();
        for (out, bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(self.qs) {
            *out = std::array::from_fn(|i| if bits >> i & 1 == 1 { d } else { -d });
        }
    }
}

impl Encode for BlockQ1_0 {
    /// Encodes with the mean magnitude as the scale.
    fn encode(x: &[f32; 128]) -> Self {
        let sum = x.iter().fold(0.0, |sum, v| sum + v.abs());
        let eights = x.as_chunks::<8>().0;
        BlockQ1_0 {
            d: f32_to_f16(sum / 128.0),
            qs: std::array::from_fn(|j| {
                (0..8).fold(0, |bits, i| bits | u8::from(eights[j][i] >= 0.0) << i)
            }),
        }
    }
}

impl Decode for BlockQ2_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 64]) {
        let d = self.d.to_f32();
        for (out, codes) in out.as_chunks_mut::<4>().0.iter_mut().zip(self.qs) {
            *out = std::array::from_fn(|i| f32::from((codes >> (2 * i) & 3) as i8 - 1) * d);
        }
    }
}

impl Encode for BlockQ2_0 {
    /// Encodes with the largest magnitude as the scale, so that the code for twice the scale is
    /// never used.
    fn encode(x: &[f32; 64]) -> Self {
        let d = max_abs(x);
        let inverse = reciprocal(d);
        let codes = x.map(|v| (round_code(v * inverse) + 1).clamp(0, 3) as u8);
        let fours = codes.as_chunks::<4>().0;
        BlockQ2_0 {
            d: f32_to_f16(d),
            qs: std::array::from_fn(|j| (0..4).fold(0, |byte, i| byte | fours[j][i] << (2 * i))),
        }
    }
}
