//! F32, F16, BF16, F8 and F64 rows and numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Elements converted at a time through an aligned buffer on the stack.
const CHUNK: usize = 256;

/// Returns the nearest f16, ties to even. Too large numbers become infinite, and every NaN the
/// quiet NaN of the same sign.
///
/// Has no branches, so that loops over it are vectorised.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> f16 {
    let sign = x.to_bits() & 0x8000_0000;
    let magnitude = x.to_bits() ^ sign;
    // The exponent's bias is 127 here and 15 there. Adds just below half of the last place, plus
    // the last bit that stays: a tie rounds up if that bit is odd.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    // Numbers below the smallest normal one are rounded to the last place of an f16, whose bits are
    // multiples of it.
    let small = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < 113 << 23 { small } else { normal };
    let infinite = if magnitude > 0x7f80_0000 {
        0x7e00
    } else {
        0x7c00
    };
    let is_too_large = magnitude >= 65_520.0_f32.to_bits();
    let bits = if is_too_large { infinite } else { finite };
    f16::from_bits((bits | sign >> 16) as u16)
}

/// Returns the bits of the nearest bf16, ties to even. Too large numbers become infinite, and a NaN
/// a quiet NaN.
#[inline]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else {
        // Adds just below half of the last place, plus the last bit that stays: a tie rounds up if
        // that bit is odd.
        ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
    }
}

/// Number of each code: a sign, four bits of exponent with bias 7, and three bits of mantissa, as
/// the OCP 8-bit floating point specification defines E4M3.
const F8_E4M3: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (sign, magnitude) = ((code as u32 & 0x80) << 24, code as u32 & 0x7f);
        let magnitude = match magnitude {
            0..8 => magnitude as f32 / 512.0,
            0x7f => f32::NAN,
            _ => f32::from_bits((magnitude << 20) + (120 << 23)),
        };
        numbers[code] = f32::from_bits(magnitude.to_bits() | sign);
        code += 1;
    }
    numbers
};

/// Returns the number with this E4M3 code.
#[inline]
pub fn f8_e4m3_to_f32(code: u8) -> f32 {
    F8_E4M3[usize::from(code)]
}

/// Returns the code of the nearest E4M3 number, ties to even. Too large numbers become the largest
/// one, 448, and every NaN the code 0x7f.
#[inline]
pub fn f32_to_f8_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs().min(448.0);
    let code = if magnitude < f32::powi(2.0, -6) {
        // The last place of the sum is that of the numbers below the smallest normal one, 2^-9.
        (magnitude + 16_384.0)
            .to_bits()
            .wrapping_sub(16_384.0_f32.to_bits())
    } else {
        let bits = magnitude.to_bits();
        // Adds just below half of the last place, plus the last bit that stays.
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    sign | code as u8
}

pub(crate) fn decode_f8_e4m3(bytes: &[u8], out: &mut [f32]) {
    for (code, out) in bytes.iter().zip(out) {
        *out = f8_e4m3_to_f32(*code);
    }
}

pub(crate) fn encode_f8_e4m3(src: &[f32], out: &mut [u8]) {
    for (x, code) in src.iter().zip(out) {
        *code = f32_to_f8_e4m3(*x);
    }
}

pub(crate) fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes);
}

pub(crate) fn encode_f32(src: &[f32], out: &mut [u8]) {
    out.copy_from_slice(bytemuck::cast_slice(src));
}

pub(crate) fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    let mut buffer = [f16::ZERO; CHUNK];
    for (bytes, out) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
        let buffer = &mut buffer[..out.len()];
        bytemuck::cast_slice_mut::<f16, u8>(buffer).copy_from_slice(bytes);
        buffer.convert_to_f32_slice(out);
    }
}

pub(crate) fn encode_f16(src: &[f32], out: &mut [u8]) {
    let mut buffer = [f16::ZERO; CHUNK];
    for (src, out) in src.chunks(CHUNK).zip(out.chunks_mut(2 * CHUNK)) {
        let buffer = &mut buffer[..src.len()];
        buffer.convert_from_f32_slice(src);
        if src.iter().fold(false, |any, x| any | x.is_nan()) {
            for (h, x) in buffer.iter_mut().zip(src).filter(|(_, x)| x.is_nan()) {
                *h = f32_to_f16(*x);
            }
        }
        out.copy_from_slice(bytemuck::cast_slice(buffer));
    }
}

pub(crate) fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

pub(crate) fn encode_bf16(src: &[f32], out: &mut [u8]) {
    for (x, out) in src.iter().zip(out.as_chunks_mut::<2>().0) {
        *out = f32_to_bf16(*x).to_le_bytes();
    }
}

pub(crate) fn decode_f64(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks::<8>().0.iter().zip(out) {
        *out = f64::from_le_bytes(*bytes) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Step between tested numbers. Miri is slow, so it tests fewer.
    const SPARSER: usize = if cfg!(miri) { 1_009 } else { 1 };

    #[test]
    fn f16_rows_agree_with_single_numbers_at_any_alignment() {
        let all: Vec<u16> = (0..=u16::MAX).step_by(SPARSER).collect();
        let shifted: Vec<u8> = [0]
            .into_iter()
            .chain(all.iter().copied().flat_map(u16::to_le_bytes))
            .collect();
        let mut out = vec![0.0; all.len()];
        decode_f16(&shifted[1..], &mut out);
        let mut back = vec![0; 2 * all.len()];
        encode_f16(&out, &mut back);
        for ((bits, x), back) in all.iter().zip(&out).zip(back.as_chunks().0) {
            let h = f16::from_bits(*bits);
            assert_eq!(x.to_bits(), h.to_f32().to_bits(), "{bits:#06x}");
            let encoded = u16::from_le_bytes(*back);
            assert_eq!(encoded, f32_to_f16(*x).to_bits(), "{bits:#06x}");
            if h.is_nan() {
                assert_eq!(encoded & 0x7fff, 0x7e00);
            } else {
                assert_eq!(encoded, *bits);
            }
        }
    }

    #[test]
    fn f16_conversion_rounds_to_nearest() {
        let check = |bits: u32| {
            let x = f32::from_bits(bits);
            let expected = if x.is_nan() {
                f16::from_bits((bits >> 16) as u16 & 0x8000 | 0x7e00)
            } else {
                f16::from_f32(x)
            };
            assert_eq!(f32_to_f16(x).to_bits(), expected.to_bits(), "{bits:#010x}");
        };
        // The neighbours of each number and the middle between two of them, and some of all other
        // numbers.
        let halves = (0..=u16::MAX)
            .step_by(SPARSER)
            .map(|bits| f16::from_bits(bits).to_f32().to_bits());
        for bits in halves.flat_map(|bits| [bits, bits ^ 0x1000, bits & !0x1fff]) {
            (0..3).for_each(|i| check(bits.wrapping_add(i).wrapping_sub(1)));
        }
        for i in 0..=24 {
            let tie = f32::powi(2.0, -i) * f32::powi(2.0, -25);
            (0..3).for_each(|i| check(tie.to_bits() + i - 1));
        }
        (0..=u32::MAX).step_by(4_001 * SPARSER).for_each(check);
    }

    /// Computes the number of a code from the definition.
    fn e4m3(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code < 128 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_f8_code_is_decoded_and_encoded() {
        for code in 0..=u8::MAX {
            let (got, expected) = (f8_e4m3_to_f32(code), e4m3(code));
            if expected.is_nan() {
                assert!(got.is_nan() && code & 0x7f == 0x7f);
                assert_eq!(f32_to_f8_e4m3(got), 0x7f);
                continue;
            }
            assert_eq!(f64::from(got).to_bits(), expected.to_bits(), "{code:#04x}");
            assert_eq!(f32_to_f8_e4m3(got), code);
        }
        assert_eq!((e4m3(0x7e), e4m3(0x01)), (448.0, 0.001_953_125));
    }

    #[test]
    fn f8_conversion_rounds_to_nearest_even_and_saturates() {
        for code in 0..0x7e_u8 {
            let middle = ((e4m3(code) + e4m3(code + 1)) / 2.0) as f32;
            let even = code + (code & 1);
            for (x, expected) in [
                (middle.next_down(), code),
                (middle, even),
                (middle.next_up(), code + 1),
            ] {
                assert_eq!(f32_to_f8_e4m3(x), expected, "{x:e}");
                assert_eq!(f32_to_f8_e4m3(-x), expected | 0x80, "{x:e}");
            }
        }
        for x in [448.0, 460.0, 464.1, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!([x, -x].map(f32_to_f8_e4m3), [0x7e, 0xfe], "{x:e}");
        }
        assert_eq!(
            [0.0, -0.0, 1e-40, -1e-40].map(f32_to_f8_e4m3),
            [0, 0x80, 0, 0x80]
        );
        assert_eq!([f32::NAN, -f32::NAN].map(f32_to_f8_e4m3), [0x7f; 2]);
    }

    #[test]
    fn bf16_rounds_to_even_and_keeps_nan() {
        for (x, expected) in [
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
            (0x7f7f_ffff, 0x7f80),
            (0xff80_0001, 0xffc0),
            (0x7f80_0000, 0x7f80),
            (0x8000_0001, 0x8000),
        ] {
            assert_eq!(f32_to_bf16(f32::from_bits(x)), expected, "{x:#010x}");
        }
    }
}
