//! The 256-element formats without a minimum: Q3_K, Q6_K, and Q8_K for activations.

use crate::affine::join_two_bits;
use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::quantize::Quantize;
use crate::search::{
    NEGLIGIBLE, descend_symmetric, error_weights, first_max_abs, fit_symmetric, nearest, squares,
    sum_of_squares,
};
use bytemuck::Zeroable;
use half::f16;

/// Returns the group scale of largest magnitude, and the reciprocal of the scale that maps it to
/// `-limit`. Returns `None` if that magnitude is below `negligible` or 0.
fn inverse_scale_of_scales(scales: &[f32; 16], limit: f32, negligible: f32) -> Option<f32> {
    let max = first_max_abs(scales);
    (max != 0.0 && max.abs() >= negligible).then(|| -limit / max)
}

/// Chooses the codes of every group again for the scale that it decodes with. `limit` is added to
/// them.
fn choose_codes(x: &[f32; 256], d: f16, scales: &[i8; 16], limit: i32, codes: &mut [u8; 256]) {
    let groups = x.as_chunks::<16>().0.iter();
    for ((x, codes), &scale) in groups.zip(codes.as_chunks_mut::<16>().0).zip(scales) {
        let d = d.to_f32() * f32::from(scale);
        if d != 0.0 {
            *codes = x.map(|v| (nearest(v / d).clamp(-limit, limit - 1) + limit) as u8);
        }
    }
}

/// Fits scale and codes of every group with `fit`.
fn fit_groups(
    x: &[f32; 256],
    mut fit: impl FnMut(usize, &[f32; 16]) -> (f32, [u8; 16]),
) -> ([f32; 16], [u8; 256]) {
    let mut scales = [0.0; 16];
    let mut codes = [0; 256];
    let groups = x.as_chunks::<16>().0.iter();
    for (j, (x, codes)) in groups.zip(codes.as_chunks_mut::<16>().0).enumerate() {
        (scales[j], *codes) = fit(j, x);
    }
    (scales, codes)
}

impl Decode for BlockQ3K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let scales = self.unpacked_scales();
        for (j, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[j]);
            let shift = 2 * (j % 8 / 2);
            let qs = &self.qs[32 * (j / 8) + 16 * (j % 2)..][..16];
            let high = &self.hmask[16 * (j % 2)..][..16];
            for ((out, q), high) in out.iter_mut().zip(qs).zip(high) {
                let code = ((q >> shift) & 3) | (((high >> (j / 2)) & 1) << 2);
                *out = scale * f32::from(code as i8 - 4);
            }
        }
    }
}

impl BlockQ3K {
    /// Returns the block with these scales, to which 32 is added, and with codes for them. `codes`
    /// are used for groups whose scale is 0.
    fn from_codes(x: &[f32; 256], d: f32, scales: &[u8; 16], mut codes: [u8; 256]) -> Self {
        let mut block = BlockQ3K::zeroed();
        block.d = f32_to_f16(d);
        for (j, scale) in scales.iter().enumerate() {
            block.scales[j % 8] |= (scale & 15) << (4 * (j / 8));
            block.scales[8 + j % 4] |= (scale >> 4) << (2 * (j / 4));
        }
        let scales = block.unpacked_scales();
        choose_codes(x, block.d, &scales, 4, &mut codes);
        for (i, code) in codes.iter().enumerate() {
            block.hmask[i % 32] |= (code >> 2) << (i / 32);
        }
        block.qs = join_two_bits(&codes);
        block
    }
}

impl Encode for BlockQ3K {
    fn encode(x: &[f32; 256]) -> Self {
        let (fitted, codes) = fit_groups(x, |_, x| descend_symmetric(x, 4));
        match inverse_scale_of_scales(&fitted, 32.0, 0.0) {
            Some(inverse) => {
                let scales =
                    fitted.map(|scale| (nearest(inverse * scale).clamp(-32, 31) + 32) as u8);
                Self::from_codes(x, 1.0 / inverse, &scales, codes)
            }
            None => Self::from_codes(x, 0.0, &[0; 16], codes),
        }
    }
}

impl Quantize for BlockQ3K {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let importance = importance.as_chunks::<16>().0;
        let mean_square = 2.0 * sum_of_squares(x) / 256.0;
        let mut sums = [0.0; 16];
        let (fitted, codes) = fit_groups(x, |j, x| {
            let weights = error_weights(x, &importance[j], mean_square);
            sums[j] = weights.iter().fold(0.0, |sum, w| sum + w);
            fit_symmetric(x, &weights, 4)
        });
        let (d, scales) = fit_symmetric(&fitted, &sums, 32);
        Self::from_codes(x, d, &scales, codes)
    }
}

impl Decode for BlockQ6K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let scales = self.scales.map(|s| d * f32::from(s));
        let halves = out.as_chunks_mut::<128>().0.iter_mut();
        let packed = self
            .ql
            .as_chunks::<64>()
            .0
            .iter()
            .zip(self.qh.as_chunks::<32>().0);
        for (half, (out, (ql, qh))) in halves.zip(packed).enumerate() {
            // Four quarters of 32: two in the low and two in the high halves of the bytes of `ql`.
            for (quarter, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let low_shift = 4 * (quarter / 2);
                let high_shift = 2 * quarter;
                let scales = &scales[8 * half + 2 * quarter..][..2];
                let ql = &ql[32 * (quarter % 2)..][..32];
                for (i, (out, (ql, qh))) in out.iter_mut().zip(ql.iter().zip(qh)).enumerate() {
                    let code = ((ql >> low_shift) & 15) | (((qh >> high_shift) & 3) << 4);
                    *out = scales[i / 16] * f32::from(code as i8 - 32);
                }
            }
        }
    }
}

impl BlockQ6K {
    /// Returns the block of groups that were fitted with these scales and codes.
    fn from_codes(x: &[f32; 256], (fitted, mut codes): ([f32; 16], [u8; 256])) -> Self {
        let Some(inverse) = inverse_scale_of_scales(&fitted, 128.0, NEGLIGIBLE) else {
            return BlockQ6K::zeroed();
        };
        let d = f32_to_f16(1.0 / inverse);
        let scales = fitted.map(|scale| nearest(inverse * scale).clamp(-128, 127) as i8);
        choose_codes(x, d, &scales, 32, &mut codes);
        let high = codes.map(|code| code >> 4);
        BlockQ6K {
            ql: std::array::from_fn(|i| {
                let at = 128 * (i / 64) + i % 64;
                (codes[at] & 15) | (codes[at + 64] << 4)
            }),
            qh: join_two_bits(&high),
            scales,
            d,
        }
    }
}

impl Encode for BlockQ6K {
    fn encode(x: &[f32; 256]) -> Self {
        Self::from_codes(x, fit_groups(x, |_, x| fit_symmetric(x, &squares(x), 32)))
    }
}

impl Quantize for BlockQ6K {
    /// Quantizes with the importance as the weight: large elements weigh no more than others.
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let importance = importance.as_chunks::<16>().0;
        Self::from_codes(
            x,
            fit_groups(x, |j, x| fit_symmetric(x, &importance[j], 32)),
        )
    }
}

impl Decode for BlockQ8K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        for (out, &q) in out.iter_mut().zip(&self.qs) {
            *out = self.d * f32::from(q);
        }
    }
}

impl Encode for BlockQ8K {
    /// Encodes a block. A block of zeros has sums of zero, which ggml does not write.
    fn encode(x: &[f32; 256]) -> Self {
        let max = first_max_abs(x);
        if max == 0.0 {
            return BlockQ8K::zeroed();
        }
        let inverse = -127.0 / max;
        let qs = x.map(|v| nearest(inverse * v).min(127) as i8);
        let mut bsums = [0; 16];
        for (sum, qs) in bsums.iter_mut().zip(qs.as_chunks::<16>().0) {
            *sum = qs.iter().map(|&q| i16::from(q)).sum();
        }
        BlockQ8K {
            d: 1.0 / inverse,
            qs,
            bsums,
        }
    }
}
