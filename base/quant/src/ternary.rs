//! The 256-element formats of three values: TQ1_0 and TQ2_0.

use crate::affine::join_two_bits;
use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::search::{max_abs, reciprocal, round_code};

const POWERS_OF_3: [u8; 5] = [1, 3, 9, 27, 81];

/// Returns the scale, and every element as 0, 1 or 2.
fn trits(x: &[f32; 256]) -> (f32, [u8; 256]) {
    let d = max_abs(x);
    let inverse = reciprocal(d);
    (d, x.map(|v| (round_code(v * inverse) + 1) as u8))
}

/// Packs five trits, the first most significant, as a fraction of 256, rounded up so that
/// [`trit_of`] recovers them exactly.
fn pack_trits(trits: [u8; 5]) -> u8 {
    let number = trits
        .iter()
        .fold(0u16, |number, &t| 3 * number + u16::from(t));
    (number * 256).div_ceil(243) as u8
}

/// Returns trit `k` of a byte: shifts the first `k` trits out at the top, then takes the next.
#[inline(always)]
fn trit_of(byte: u8, k: usize) -> u8 {
    let rest = u16::from(byte.wrapping_mul(POWERS_OF_3[k]));
    ((rest * 3) >> 8) as u8
}

impl BlockTq1_0 {
    /// Returns the code of each element: 0 to 2.
    #[inline(always)]
    pub fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        let mut fill = |start: usize, bytes: &[u8], trits: usize| {
            let places = codes[start..].chunks_exact_mut(bytes.len()).take(trits);
            for (k, codes) in places.enumerate() {
                for (code, &byte) in codes.iter_mut().zip(bytes) {
                    *code = trit_of(byte, k);
                }
            }
        };
        fill(0, &self.qs[..32], 5);
        fill(160, &self.qs[32..], 5);
        fill(240, &self.qh, 4);
        codes
    }
}

impl Decode for BlockTq1_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (out, code) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(code as i8 - 1) * d;
        }
    }
}

impl Encode for BlockTq1_0 {
    fn encode(x: &[f32; 256]) -> Self {
        let (d, trits) = trits(x);
        let wide = |i: usize| std::array::from_fn(|k| trits[32 * k + i]);
        let narrow = |i: usize| std::array::from_fn(|k| trits[160 + 16 * k + i]);
        let last =
            |i: usize| std::array::from_fn(|k| if k < 4 { trits[240 + 4 * k + i] } else { 0 });
        BlockTq1_0 {
            qs: std::array::from_fn(|i| pack_trits(if i < 32 { wide(i) } else { narrow(i - 32) })),
            qh: std::array::from_fn(|i| pack_trits(last(i))),
            d: f32_to_f16(d),
        }
    }
}

impl Decode for BlockTq2_0 {
    #[inline]
    fn decode(&self, out: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let halves = out.as_chunks_mut::<128>().0.iter_mut();
        for (out, qs) in halves.zip(self.qs.as_chunks::<32>().0) {
            for (k, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (out, q) in out.iter_mut().zip(qs) {
                    *out = f32::from(((q >> (2 * k)) & 3) as i8 - 1) * d;
                }
            }
        }
    }
}

impl Encode for BlockTq2_0 {
    fn encode(x: &[f32; 256]) -> Self {
        let (d, trits) = trits(x);
        BlockTq2_0 {
            qs: join_two_bits(&trits),
            d: f32_to_f16(d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_of_trits_survives() {
        for number in 0..243u32 {
            let trits: [u8; 5] =
                std::array::from_fn(|k| (number / 3u32.pow(4 - k as u32) % 3) as u8);
            let byte = pack_trits(trits);
            for (k, &t) in trits.iter().enumerate() {
                assert_eq!(trit_of(byte, k), t, "{number}, trit {k}");
            }
        }
    }
}
