//! The formats whose codes index a table: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::legacy::join_nibbles;
use crate::quantize::Quantize;
use crate::search::{
    NEGLIGIBLE, error_weights, first_max_abs, max_abs, nearest, reciprocal, squares, sum_of_squares,
};
use crate::tables::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half, ue4m3, ue4m3_half};

/// Midpoints between neighbours of [`IQ4_NL_VALUES`].
const IQ4_NL_MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        midpoints[i] = (IQ4_NL_VALUES[i] as f32 + IQ4_NL_VALUES[i + 1] as f32) / 2.0;
        i += 1;
    }
    midpoints
};

/// Returns the code of the value nearest to `x`. Of two equally near ones, returns the higher.
#[inline]
fn iq4_nl_code(x: f32) -> u8 {
    let mut above = 0;
    for midpoint in IQ4_NL_MIDPOINTS {
        above += u8::from(x < midpoint);
    }
    15 - above
}

/// Splits bytes of two codes, halved, and scales the values of the codes.
#[inline]
fn decode_table<const N: usize>(table: &[i8; 16], d: f32, qs: &[u8], out: &mut [f32; N]) {
    let (low, high) = out.split_at_mut(N / 2);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(qs) {
        *low = d * f32::from(table[usize::from(q & 15)]);
        *high = d * f32::from(table[usize::from(q >> 4)]);
    }
}

/// Returns `Σ w x t` and `Σ w t²` with weights `w`, where `t` is the table's value nearest to `x
/// inverse`.
#[inline]
fn iq4_nl_projection(x: &[f32; 32], weights: &[f32; 32], inverse: f32) -> (f32, f32) {
    let (mut xt, mut tt) = (0.0, 0.0);
    let codes = x.map(|v| iq4_nl_code(inverse * v));
    for ((v, w), code) in x.iter().zip(weights).zip(codes) {
        let t = f32::from(IQ4_NL_VALUES[usize::from(code)]);
        xt += w * t * v;
        tt += w * t * t;
    }
    (xt, tt)
}

/// Number of scales on either side of the first one that a search tries.
const TRIES: i8 = 7;

/// Returns the scale that fits a group best in least squares. Tries the scale that maps the largest
/// magnitude to the table's first value, with the given sign, and those that map it to
/// `-tries..=tries` around that value.
fn iq4_nl_scale(x: &[f32; 32], weights: &[f32; 32], first: f32, tries: Option<i8>) -> f32 {
    let max = first_max_abs(x);
    if max.abs() < NEGLIGIBLE {
        return 0.0;
    }
    let (xt, tt) = iq4_nl_projection(x, weights, 1.0 / (max / first));
    let mut scale = if tt > 0.0 { xt / tt } else { 0.0 };
    let mut gain = scale * xt;
    for shift in tries.into_iter().flat_map(|tries| -tries..=tries) {
        let inverse = (f32::from(shift) + f32::from(IQ4_NL_VALUES[0])) / max;
        let (xt, tt) = iq4_nl_projection(x, weights, inverse);
        if tt > 0.0 && xt * xt > gain * tt {
            scale = xt / tt;
            gain = scale * xt;
        }
    }
    scale
}

impl Decode for BlockIq4Nl {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        decode_table(&IQ4_NL_VALUES, self.d.to_f32(), &self.qs, out);
    }
}

impl Encode for BlockIq4Nl {
    /// Encodes fast, like ggml when it fills a cache. Files are [quantized](Quantize::quantize)
    /// with more effort.
    ///
    /// A negligible block (all magnitudes below 1e-15) gets the codes nearest to zero, where ggml's
    /// are left over from the previous block.
    fn encode(x: &[f32; 32]) -> Self {
        let first = f32::from(IQ4_NL_VALUES[0]);
        let inverse = 1.0 / (first_max_abs(x) / first);
        let scale = iq4_nl_scale(x, &squares(x), first, None);
        let inverse = if scale != 0.0 { inverse } else { 0.0 };
        BlockIq4Nl {
            d: f32_to_f16(scale),
            qs: join_nibbles(&x.map(|v| iq4_nl_code(inverse * v))),
        }
    }
}

impl BlockIq4Nl {
    /// Searches over 16 scales, which is slower but has a smaller loss.
    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Self {
        let scale = iq4_nl_scale(x, weights, -f32::from(IQ4_NL_VALUES[0]), Some(TRIES));
        let inverse = reciprocal(scale);
        BlockIq4Nl {
            d: f32_to_f16(scale),
            qs: join_nibbles(&x.map(|v| iq4_nl_code(inverse * v))),
        }
    }
}

impl Quantize for BlockIq4Nl {
    fn quantize(x: &[f32; 32], importance: Option<&[f32; 32]>, _: f32) -> Self {
        match importance {
            Some(importance) => {
                let mean_square = 2.0 / 32.0 * sum_of_squares(x);
                Self::fit(x, &error_weights(x, importance, mean_square))
            }
            None => Self::fit(x, &squares(x)),
        }
    }
}

impl Decode for BlockIq4Xs {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let groups = out.as_chunks_mut::<32>().0.iter_mut();
        let packed = self.qs.as_chunks::<16>().0.iter();
        for ((out, qs), scale) in groups.zip(packed).zip(self.unpacked_scales()) {
            decode_table(&IQ4_NL_VALUES, d * f32::from(scale), qs, out);
        }
    }
}

impl BlockIq4Xs {
    fn fit(x: &[f32; 256], weights: impl Fn(usize, &[f32; 32]) -> [f32; 32]) -> Self {
        let first = -f32::from(IQ4_NL_VALUES[0]);
        let groups = x.as_chunks::<32>().0;
        let fitted: [f32; 8] = std::array::from_fn(|j| {
            let x = &groups[j];
            iq4_nl_scale(x, &weights(j, x), first, Some(TRIES))
        });
        let d = -first_max_abs(&fitted) / 32.0;
        let inverse = reciprocal(d);
        let mut block = BlockIq4Xs {
            d: f32_to_f16(d),
            scales_h: 0,
            scales_l: [0; 4],
            qs: [0; 128],
        };
        let packed = block.qs.as_chunks_mut::<16>().0.iter_mut();
        for (j, (x, qs)) in groups.iter().zip(packed).enumerate() {
            let scale = nearest(inverse * fitted[j]).clamp(-32, 31);
            let group_inverse = reciprocal(d * scale as f32);
            *qs = join_nibbles(&x.map(|v| iq4_nl_code(group_inverse * v)));
            let code = (scale + 32) as u8;
            block.scales_l[j / 2] |= (code & 15) << (4 * (j % 2));
            block.scales_h |= u16::from(code >> 4) << (2 * j);
        }
        block
    }
}

impl Encode for BlockIq4Xs {
    fn encode(x: &[f32; 256]) -> Self {
        Self::fit(x, |_, x| squares(x))
    }
}

impl Quantize for BlockIq4Xs {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let Some(importance) = importance else {
            return Self::encode(x);
        };
        let importance = importance.as_chunks::<32>().0;
        let mean_square = 2.0 / 256.0 * sum_of_squares(x);
        Self::fit(x, |j, x| error_weights(x, &importance[j], mean_square))
    }
}

/// Returns the codes of [`MXFP4_VALUES`] whose value times `d` is nearest. Of equally near ones,
/// returns the lowest. `N` is a multiple of 8.
#[inline]
fn e2m1_codes<const N: usize>(x: &[f32; N], d: f32) -> [u8; N] {
    let mut codes = [0; N];
    let eights = x.as_chunks::<8>().0.iter();
    for (x, codes) in eights.zip(codes.as_chunks_mut::<8>().0) {
        let mut chosen = [0u32; 8];
        let mut least = x.map(|v| v.abs());
        for (code, value) in (0..).zip(MXFP4_VALUES).skip(1) {
            let value = f32::from(value) * d;
            // Selects instead of branching, so that this is vectorised.
            for j in 0..8 {
                let error = (value - x[j]).abs();
                let nearer = error < least[j];
                least[j] = if nearer { error } else { least[j] };
                chosen[j] = if nearer { code } else { chosen[j] };
            }
        }
        *codes = chosen.map(|code| code as u8);
    }
    codes
}

impl Decode for BlockMxfp4 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        decode_table(&MXFP4_VALUES, e8m0_half(self.e), &self.qs, out);
    }
}

impl Encode for BlockMxfp4 {
    /// Encodes with the power of two that puts the largest magnitude between 4 and 8 as the scale.
    /// Values above 6 saturate.
    ///
    /// A block whose magnitudes are all below 2^-125 gets the smallest scale, where ggml's is the
    /// result of an undefined conversion.
    fn encode(x: &[f32; 32]) -> Self {
        let max = max_abs(x);
        let e = if max > 0.0 {
            (max.log2().floor() - 2.0 + 127.0) as u8
        } else {
            0
        };
        let codes = e2m1_codes(x, e8m0_half(e));
        BlockMxfp4 {
            e,
            qs: join_nibbles(&codes),
        }
    }
}

impl Decode for BlockNvfp4 {
    #[inline]
    fn decode(&self, out: &mut [f32; 64]) {
        let groups = out.as_chunks_mut::<16>().0.iter_mut();
        let packed = self.qs.as_chunks::<8>().0.iter();
        for ((out, qs), d) in groups.zip(packed).zip(self.d.map(ue4m3_half)) {
            decode_table(&MXFP4_VALUES, d, qs, out);
        }
    }
}

impl Encode for BlockNvfp4 {
    /// Encodes with the scale of each group nearest to the one that makes its largest magnitude 6,
    /// the largest number of E2M1.
    fn encode(x: &[f32; 64]) -> Self {
        let mut block = BlockNvfp4 {
            d: [0; 4],
            qs: [0; 32],
        };
        let packed = block.qs.as_chunks_mut::<8>().0.iter_mut();
        let groups = x.as_chunks::<16>().0.iter();
        for ((x, qs), d) in groups.zip(packed).zip(&mut block.d) {
            *d = ue4m3(max_abs(x) / 6.0);
            let codes = e2m1_codes(x, ue4m3_half(*d));
            *qs = std::array::from_fn(|i| codes[i] | codes[i + 8] << 4);
        }
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn iq4_nl_codes_are_nearest(x in -150.0f32..150.0) {
            let distance = |code: u8| (x - f32::from(IQ4_NL_VALUES[usize::from(code)])).abs();
            let chosen = iq4_nl_code(x);
            prop_assert!((0..16).all(|code| distance(chosen) <= distance(code)));
        }

        #[test]
        fn the_scale_search_never_increases_the_loss(x in prop::array::uniform32(-1.0f32..1.0)) {
            // Compares with the plain scale by the exact decoded values.
            let loss = |block: BlockIq4Nl| {
                let mut out = [0.0; 32];
                block.decode(&mut out);
                x.iter()
                    .zip(out)
                    .map(|(v, o)| f64::from(v * v * (v - o) * (v - o)))
                    .sum::<f64>()
            };
            prop_assert!(
                loss(BlockIq4Nl::quantize(&x, None, 0.0))
                    <= loss(BlockIq4Nl::encode(&x)) * 1.02 + 1e-9
            );
        }
    }
}
