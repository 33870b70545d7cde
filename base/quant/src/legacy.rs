//! The 32-element formats with one f16 scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1.
//!
//! All arithmetic is single precision in a fixed order, because the codes depend on its rounding.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::quantize::Quantize;
use crate::search::{
    AffineSearch, Lanes, error_weights, first_max_abs, fit_symmetric, max_abs, min_and_max,
    reciprocal, round_code, truncate_code,
};

/// Splits bytes of two codes into the "halved" element order.
#[inline]
fn split_nibbles(qs: &[u8; 16]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 })
}

/// Inverts [`split_nibbles`]. Higher bits of the codes are dropped.
#[inline]
pub(crate) fn join_nibbles(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| (codes[i] & 15) | (codes[i + 16] << 4))
}

/// Returns codes of five bits from their low four bits and their highest.
#[inline]
fn split_five_bits(qs: &[u8; 16], qh: [u8; 4]) -> [u8; 32] {
    let high = u32::from_le_bytes(qh);
    let mut codes = split_nibbles(qs);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i) as u8 & 1) << 4;
    }
    codes
}

#[inline]
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let mut bits = 0;
    for (i, code) in codes.iter().enumerate() {
        bits |= u32::from((code >> 4) & 1) << i;
    }
    bits.to_le_bytes()
}

/// Returns scale and codes of `d (q - zero)`. The element of largest magnitude gets code 0, so that
/// the full code range is used, which has one more negative than positive step.
#[inline(always)]
fn encode_around<const ZERO: u8>(x: &[f32; 32]) -> (f32, [u8; 32]) {
    let d = first_max_abs(x) / -f32::from(ZERO);
    let inverse = reciprocal(d);
    let half_up = f32::from(ZERO) + 0.5;
    (
        d,
        x.map(|v| truncate_code(v * inverse + half_up).min(2 * ZERO - 1)),
    )
}

/// Returns scale, minimum and codes of `d q + m` with `q` from 0 to `top`.
#[inline(always)]
fn encode_above<const TOP: u8>(x: &[f32; 32]) -> (f32, f32, [u8; 32]) {
    let (min, max) = min_and_max(x);
    let d = (max - min) / f32::from(TOP);
    let inverse = reciprocal(d);
    (
        d,
        min,
        x.map(|v| truncate_code((v - min) * inverse + 0.5).min(TOP)),
    )
}

/// Does what [`encode_around`] does, with a search that uses the given weights.
fn fit_around<const ZERO: u8>(x: &[f32; 32], weights: &[f32; 32]) -> (f32, [u8; 32]) {
    fit_symmetric(x, weights, i32::from(ZERO))
}

/// Does what [`encode_above`] does for each of several blocks, with a search that uses the
/// importance of their elements.
fn fit_above<const TOP: u8, const L: usize>(
    x: &[[f32; 32]; L],
    importance: &[[f32; 32]; L],
    mean_square: f32,
) -> [(f32, f32, [u8; 32]); L] {
    let weights: [_; L] =
        std::array::from_fn(|j| error_weights(&x[j], &importance[j], mean_square));
    let lanes = |blocks: &[[f32; 32]; L]| -> [Lanes<L>; 32] {
        std::array::from_fn(|i| std::array::from_fn(|j| blocks[j][i]))
    };
    let fit = AffineSearch::for_importance(TOP).fit(&lanes(x), &lanes(&weights));
    std::array::from_fn(|j| {
        let codes = std::array::from_fn(|i| fit.codes[i][j] as u8);
        (fit.scale[j], -fit.minimum[j], codes)
    })
}

impl Decode for BlockQ4_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let d = self.d.to_f32();
        *out = split_nibbles(&self.qs).map(|q| f32::from(q as i8 - 8) * d);
    }
}

impl BlockQ4_0 {
    #[inline(always)]
    fn from_codes((d, codes): (f32, [u8; 32])) -> Self {
        BlockQ4_0 {
            d: f32_to_f16(d),
            qs: join_nibbles(&codes),
        }
    }
}

impl Encode for BlockQ4_0 {
    #[inline(always)]
    fn encode(x: &[f32; 32]) -> Self {
        Self::from_codes(encode_around::<8>(x))
    }
}

impl Quantize for BlockQ4_0 {
    fn quantize(x: &[f32; 32], importance: Option<&[f32; 32]>, mean_square: f32) -> Self {
        match importance {
            Some(importance) => Self::from_codes(fit_around::<8>(
                x,
                &error_weights(x, importance, mean_square),
            )),
            None => Self::encode(x),
        }
    }
}

impl Decode for BlockQ4_1 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *out = split_nibbles(&self.qs).map(|q| f32::from(q) * d + m);
    }
}

impl BlockQ4_1 {
    #[inline(always)]
    fn from_codes((d, m, codes): (f32, f32, [u8; 32])) -> Self {
        BlockQ4_1 {
            d: f32_to_f16(d),
            m: f32_to_f16(m),
            qs: join_nibbles(&codes),
        }
    }
}

impl Encode for BlockQ4_1 {
    #[inline(always)]
    fn encode(x: &[f32; 32]) -> Self {
        Self::from_codes(encode_above::<15>(x))
    }
}

impl Quantize for BlockQ4_1 {
    fn quantize(x: &[f32; 32], importance: Option<&[f32; 32]>, mean_square: f32) -> Self {
        match importance {
            Some(importance) => Self::quantize_several(&[*x], &[*importance], mean_square)[0],
            None => Self::encode(x),
        }
    }

    fn quantize_several<const L: usize>(
        x: &[[f32; 32]; L],
        importance: &[[f32; 32]; L],
        mean_square: f32,
    ) -> [Self; L] {
        fit_above::<15, L>(x, importance, mean_square).map(Self::from_codes)
    }
}

impl Decode for BlockQ5_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let d = self.d.to_f32();
        *out = split_five_bits(&self.qs, self.qh).map(|q| f32::from(q as i8 - 16) * d);
    }
}

impl BlockQ5_0 {
    #[inline(always)]
    fn from_codes((d, codes): (f32, [u8; 32])) -> Self {
        BlockQ5_0 {
            d: f32_to_f16(d),
            qh: fifth_bits(&codes),
            qs: join_nibbles(&codes),
        }
    }
}

impl Encode for BlockQ5_0 {
    #[inline(always)]
    fn encode(x: &[f32; 32]) -> Self {
        Self::from_codes(encode_around::<16>(x))
    }
}

impl Quantize for BlockQ5_0 {
    fn quantize(x: &[f32; 32], importance: Option<&[f32; 32]>, mean_square: f32) -> Self {
        match importance {
            Some(importance) => Self::from_codes(fit_around::<16>(
                x,
                &error_weights(x, importance, mean_square),
            )),
            None => Self::encode(x),
        }
    }
}

impl Decode for BlockQ5_1 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *out = split_five_bits(&self.qs, self.qh).map(|q| f32::from(q) * d + m);
    }
}

impl BlockQ5_1 {
    #[inline(always)]
    fn from_codes((d, m, codes): (f32, f32, [u8; 32])) -> Self {
        BlockQ5_1 {
            d: f32_to_f16(d),
            m: f32_to_f16(m),
            qh: fifth_bits(&codes),
            qs: join_nibbles(&codes),
        }
    }
}

impl Encode for BlockQ5_1 {
    #[inline(always)]
    fn encode(x: &[f32; 32]) -> Self {
        Self::from_codes(encode_above::<31>(x))
    }
}

impl Quantize for BlockQ5_1 {
    fn quantize(x: &[f32; 32], importance: Option<&[f32; 32]>, mean_square: f32) -> Self {
        match importance {
            Some(importance) => Self::quantize_several(&[*x], &[*importance], mean_square)[0],
            None => Self::encode(x),
        }
    }

    fn quantize_several<const L: usize>(
        x: &[[f32; 32]; L],
        importance: &[[f32; 32]; L],
        mean_square: f32,
    ) -> [Self; L] {
        fit_above::<31, L>(x, importance, mean_square).map(Self::from_codes)
    }
}

/// Returns scale and codes of `d q` with `q` from -127 to 127.
#[inline]
fn encode_bytes(x: &[f32; 32]) -> (f32, [i8; 32]) {
    let d = max_abs(x) / 127.0;
    let inverse = reciprocal(d);
    (d, x.map(|v| round_code(v * inverse)))
}

impl Decode for BlockQ8_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let d = self.d.to_f32();
        *out = self.qs.map(|q| f32::from(q) * d);
    }
}

impl Encode for BlockQ8_0 {
    #[inline]
    fn encode(x: &[f32; 32]) -> Self {
        let (d, qs) = encode_bytes(x);
        BlockQ8_0 {
            d: f32_to_f16(d),
            qs,
        }
    }
}

impl Decode for BlockQ8_1 {
    #[inline]
    fn decode(&self, out: &mut [f32; 32]) {
        let d = self.d.to_f32();
        *out = self.qs.map(|q| f32::from(q) * d);
    }
}

impl Encode for BlockQ8_1 {
    #[inline]
    fn encode(x: &[f32; 32]) -> Self {
        let (d, qs) = encode_bytes(x);
        let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
        BlockQ8_1 {
            d: f32_to_f16(d),
            // The sum uses the scale before its rounding to f16.
            s: f32_to_f16(sum as f32 * d),
            qs,
        }
    }
}
