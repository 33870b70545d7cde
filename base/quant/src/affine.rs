//! The 256-element formats whose groups have a scale and a minimum: Q2_K, Q4_K, Q5_K.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::quantize::Quantize;
use crate::search::{
    AffineSearch, LANES, Lanes, Loss, error_weights, fit_positive, largest, nearest, sum_of_squares,
};
use half::f16;

/// Groups of one super-block with quantized scales and minima, and the codes that were fitted
/// before that quantization.
struct Groups<const GROUPS: usize> {
    d: f16,
    dmin: f16,
    scales: [u8; GROUPS],
    minima: [u8; GROUPS],
    codes: [u8; 256],
}

impl<const GROUPS: usize> Groups<GROUPS> {
    /// Returns the codes, up to `limit`, chosen again for the scales and minima that a block
    /// decodes to.
    fn codes_for<const N: usize>(
        &self,
        x: &[f32; 256],
        (scales, minima): ([u8; GROUPS], [u8; GROUPS]),
        limit: i32,
    ) -> [u8; 256] {
        let mut codes = self.codes;
        let groups = x.as_chunks::<N>().0.iter();
        let parts = groups.zip(codes.as_chunks_mut::<N>().0);
        for ((x, codes), (scale, minimum)) in parts.zip(scales.iter().zip(minima)) {
            let scale = self.d.to_f32() * f32::from(*scale);
            if scale != 0.0 {
                let minimum = self.dmin.to_f32() * f32::from(minimum);
                *codes = x.map(|v| nearest((v + minimum) / scale).clamp(0, limit) as u8);
            }
        }
        codes
    }
}

/// Fits every group of `N` elements, and quantizes the fitted scales and minima with `quantize`,
/// which gets the sums of the groups' weights.
fn fit_groups<const GROUPS: usize, const N: usize>(
    x: &[f32; 256],
    search: AffineSearch,
    weights: impl Fn(usize, &[f32; N]) -> [f32; N],
    quantize: impl Fn(&[f32; GROUPS], &[f32; GROUPS]) -> (f32, [u8; GROUPS]),
) -> Groups<GROUPS> {
    let mut codes = [0; 256];
    let (mut scales, mut minima) = ([0.0; GROUPS], [0.0; GROUPS]);
    let mut sums = [0.0; GROUPS];
    let (groups, _) = x.as_chunks::<N>();
    for first in (0..GROUPS).step_by(LANES) {
        let lanes = |groups: &[[f32; N]]| -> [Lanes; N] {
            std::array::from_fn(|i| std::array::from_fn(|j| groups[j][i]))
        };
        let groups = &groups[first..first + LANES];
        let weights: [[f32; N]; LANES] = std::array::from_fn(|j| weights(first + j, &groups[j]));
        for (sum, weights) in sums[first..].iter_mut().zip(&weights) {
            *sum = weights.iter().fold(0.0, |sum, w| sum + w);
        }
        let fit = search.fit(&lanes(groups), &lanes(&weights));
        scales[first..first + LANES].copy_from_slice(&fit.scale);
        minima[first..first + LANES].copy_from_slice(&fit.minimum);
        for (j, codes) in codes[first * N..]
            .chunks_exact_mut(N)
            .take(LANES)
            .enumerate()
        {
            for (code, fitted) in codes.iter_mut().zip(&fit.codes) {
                *code = fitted[j] as u8;
            }
        }
    }

    let (d, scales) = quantize(&scales, &sums);
    let (dmin, minima) = quantize(&minima, &sums);
    Groups {
        d: f32_to_f16(d),
        dmin: f32_to_f16(dmin),
        scales,
        minima,
        codes,
    }
}

/// Fits groups with weights that depend only on the elements. The largest scale and the largest
/// minimum get the code `top`.
fn encode_groups<const GROUPS: usize, const N: usize>(
    x: &[f32; 256],
    search: AffineSearch,
    top: u8,
    weights: impl Fn(&[f32; N]) -> [f32; N],
) -> Groups<GROUPS> {
    fit_groups(
        x,
        search,
        |_, x| weights(x),
        |numbers, _| {
            let max = largest(numbers);
            let inverse = if max > 0.0 { f32::from(top) / max } else { 0.0 };
            let codes = numbers.map(|v| nearest(inverse * v).clamp(0, i32::from(top)) as u8);
            (max / f32::from(top), codes)
        },
    )
}

/// Fits groups, and their scales and minima up to `top`, with weights from the columns' importance
/// and `mean_square`.
fn quantize_groups<const GROUPS: usize, const N: usize>(
    x: &[f32; 256],
    importance: &[f32; 256],
    mean_square: f32,
    limit: u8,
    top: u8,
) -> Groups<GROUPS> {
    let importance = importance.as_chunks::<N>().0;
    fit_groups(
        x,
        AffineSearch::for_importance(limit),
        |j, x| error_weights(x, &importance[j], mean_square),
        |numbers, weights| fit_positive(numbers, weights, top),
    )
}

/// Returns weights that grow with the magnitude of elements. A zero weighs as much as the group's
/// typical element.
fn magnitude_weights(x: &[f32; 32]) -> [f32; 32] {
    let mut squares = 0.0;
    for v in x {
        squares += v * v;
    }
    let typical = (squares / 32.0).sqrt();
    x.map(|v| typical + v.abs())
}

/// Packs two-bit codes, four per byte, in the order of [`BlockQ2K::qs`].
pub(crate) fn join_two_bits(codes: &[u8; 256]) -> [u8; 64] {
    std::array::from_fn(|i| {
        let at = |k: usize| codes[128 * (i / 32) + 32 * k + i % 32] & 3;
        at(0) | (at(1) << 2) | (at(2) << 4) | (at(3) << 6)
    })
}

/// Packs the low four bits of codes, two per byte, halved in runs of 32 bytes, in the order of
/// [`BlockQ4K::qs`].
fn join_low_bits(codes: &[u8; 256]) -> [u8; 128] {
    std::array::from_fn(|i| {
        let at = 64 * (i / 32) + i % 32;
        (codes[at] & 15) | (codes[at + 32] << 4)
    })
}

impl Decode for BlockQ2K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (j, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(self.scales[j] & 15);
            let minimum = dmin * f32::from(self.scales[j] >> 4);
            // Eight groups per half: two for each pair of bits.
            let shift = 2 * (j % 8 / 2);
            let qs = &self.qs[32 * (j / 8) + 16 * (j % 2)..][..16];
            for (out, q) in out.iter_mut().zip(qs) {
                *out = scale * f32::from((q >> shift) & 3) - minimum;
            }
        }
    }
}

impl BlockQ2K {
    fn from_groups(x: &[f32; 256], groups: Groups<16>) -> Self {
        let scales = std::array::from_fn(|j| groups.scales[j] | (groups.minima[j] << 4));
        let decoded = (scales.map(|s| s & 15), scales.map(|s| s >> 4));
        BlockQ2K {
            scales,
            qs: join_two_bits(&groups.codes_for::<16>(x, decoded, 3)),
            d: groups.d,
            dmin: groups.dmin,
        }
    }
}

impl Encode for BlockQ2K {
    fn encode(x: &[f32; 256]) -> Self {
        let search = AffineSearch {
            limit: 3,
            start: -0.5,
            stride: 0.1,
            steps: 15,
            loss: Loss::Absolute,
        };
        Self::from_groups(
            x,
            encode_groups::<16, 16>(x, search, 15, |x| x.map(f32::abs)),
        )
    }
}

impl Quantize for BlockQ2K {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let mean_square = sum_of_squares(x) / 256.0;
        Self::from_groups(
            x,
            quantize_groups::<16, 16>(x, importance, mean_square, 3, 15),
        )
    }
}

impl Decode for BlockQ4K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, minima) = self.scales_and_minima();
        let runs = out.as_chunks_mut::<64>().0.iter_mut();
        for (j, (out, qs)) in runs.zip(self.qs.as_chunks::<32>().0).enumerate() {
            let scale = [2 * j, 2 * j + 1].map(|j| d * f32::from(scales[j]));
            let minimum = [2 * j, 2 * j + 1].map(|j| dmin * f32::from(minima[j]));
            let (low, high) = out.split_at_mut(32);
            for ((low, high), q) in low.iter_mut().zip(high).zip(qs) {
                *low = scale[0] * f32::from(q & 15) - minimum[0];
                *high = scale[1] * f32::from(q >> 4) - minimum[1];
            }
        }
    }
}

impl BlockQ4K {
    fn from_groups(x: &[f32; 256], groups: Groups<8>) -> Self {
        let mut block = BlockQ4K {
            d: groups.d,
            dmin: groups.dmin,
            scales: pack_scales_and_minima(&groups.scales, &groups.minima),
            qs: [0; 128],
        };
        block.qs = join_low_bits(&groups.codes_for::<32>(x, block.scales_and_minima(), 15));
        block
    }
}

impl Encode for BlockQ4K {
    fn encode(x: &[f32; 256]) -> Self {
        let search = AffineSearch {
            limit: 15,
            start: -1.0,
            stride: 0.1,
            steps: 20,
            loss: Loss::Squared,
        };
        Self::from_groups(x, encode_groups::<8, 32>(x, search, 63, magnitude_weights))
    }
}

impl Quantize for BlockQ4K {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let mean_square = 2.0 * sum_of_squares(x) / 256.0;
        Self::from_groups(
            x,
            quantize_groups::<8, 32>(x, importance, mean_square, 15, 63),
        )
    }
}

impl Decode for BlockQ5K {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, minima) = self.scales_and_minima();
        let runs = out.as_chunks_mut::<64>().0.iter_mut();
        for (j, (out, qs)) in runs.zip(self.qs.as_chunks::<32>().0).enumerate() {
            let scale = [2 * j, 2 * j + 1].map(|j| d * f32::from(scales[j]));
            let minimum = [2 * j, 2 * j + 1].map(|j| dmin * f32::from(minima[j]));
            let (low, high) = out.split_at_mut(32);
            for (((low, high), q), bits) in low.iter_mut().zip(high).zip(qs).zip(&self.qh) {
                let bits = bits >> (2 * j);
                *low = scale[0] * f32::from((q & 15) | ((bits & 1) << 4)) - minimum[0];
                *high = scale[1] * f32::from((q >> 4) | ((bits & 2) << 3)) - minimum[1];
            }
        }
    }
}

impl BlockQ5K {
    fn from_groups(x: &[f32; 256], groups: Groups<8>) -> Self {
        // Only a code that wrapped around is above the top.
        let top = |codes: [u8; 8]| codes.map(|code| code.min(63));
        let mut block = BlockQ5K {
            d: groups.d,
            dmin: groups.dmin,
            scales: pack_scales_and_minima(&top(groups.scales), &top(groups.minima)),
            qh: [0; 32],
            qs: [0; 128],
        };
        let codes = groups.codes_for::<32>(x, block.scales_and_minima(), 31);
        for (i, code) in codes.iter().enumerate() {
            block.qh[i % 32] |= (code >> 4) << (i / 32);
        }
        block.qs = join_low_bits(&codes);
        block
    }
}

impl Encode for BlockQ5K {
    fn encode(x: &[f32; 256]) -> Self {
        let search = AffineSearch {
            limit: 31,
            start: -0.5,
            stride: 0.1,
            steps: 15,
            loss: Loss::Squared,
        };
        Self::from_groups(x, encode_groups::<8, 32>(x, search, 63, magnitude_weights))
    }
}

impl Quantize for BlockQ5K {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let mean_square = 2.0 * sum_of_squares(x) / 256.0;
        Self::from_groups(
            x,
            quantize_groups::<8, 32>(x, importance, mean_square, 31, 63),
        )
    }
}
