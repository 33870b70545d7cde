//! Floating-point numbers as cards compute them.
//!
//! Rounded operations are exact. Approximate ones (`ex2.approx`, `sin.approx`, and so on) are
//! computed in f64 and rounded, which is at least as accurate as a card.

use crate::ptx::instruction::{Rounding, Type, flag};

/// Format of a binary floating-point number: bits of the fraction, and bits of the exponent.
#[derive(Clone, Copy)]
struct FloatFormat {
    fraction: i32,
    exponent: i32,
}

const F16: FloatFormat = FloatFormat {
    fraction: 10,
    exponent: 5,
};
const BF16: FloatFormat = FloatFormat {
    fraction: 7,
    exponent: 8,
};
const F32: FloatFormat = FloatFormat {
    fraction: 23,
    exponent: 8,
};

/// Rounds an f64 to a narrower format.
fn round_to(value: f64, format: FloatFormat, rounding: Rounding) -> u32 {
    let bits = value.to_bits();
    let sign = ((bits >> 63) as u32) << (format.fraction + format.exponent);
    let infinity = ((1u32 << format.exponent) - 1) << format.fraction;
    if value.is_nan() {
        // Cards have one NaN.
        return (1u32 << (format.fraction + format.exponent)) - 1;
    }
    if value.is_infinite() {
        return sign | infinity;
    }
    let bias = (1 << (format.exponent - 1)) - 1;
    let exponent = ((bits >> 52) & 0x7ff) as i32 - 1023 + bias;
    if exponent < -format.fraction - 2 {
        // Less than half of the least number; f64's subnormals are among them.
        let is_away = value != 0.0
            && (rounding == Rounding::Up && sign == 0 || rounding == Rounding::Down && sign != 0);
        return sign | u32::from(is_away);
    }
    let mantissa = (bits & ((1 << 52) - 1)) | (1 << 52);
    // Subnormals have no hidden bit and a fixed exponent.
    let shift = 52 - format.fraction + (1 - exponent).max(0);
    let (kept, rest) = if shift < 64 {
        (mantissa >> shift, mantissa & ((1u64 << shift) - 1))
    } else {
        (0, mantissa)
    };
    let half = 1u64 << (shift - 1).min(63);
    let is_up = match rounding {
        Rounding::Nearest => rest > half || rest == half && kept & 1 == 1,
        Rounding::NearestAway => rest >= half,
        Rounding::Zero => false,
        Rounding::Up => rest != 0 && sign == 0,
        Rounding::Down => rest != 0 && sign != 0,
    };
    let kept = kept + u64::from(is_up);
    let exponent = if exponent > 0 {
        (exponent - 1) as u64
    } else {
        0
    };
    let magnitude = (exponent << format.fraction) + kept;
    if magnitude >= u64::from(infinity) {
        let stays_finite = match rounding {
            Rounding::Zero => true,
            Rounding::Up => sign != 0,
            Rounding::Down => sign == 0,
            _ => false,
        };
        return sign | (infinity - u32::from(stays_finite));
    }
    sign | magnitude as u32
}

/// Converts to f16.
pub(crate) fn to_f16(value: f64, rounding: Rounding) -> u16 {
    round_to(value, F16, rounding) as u16
}

/// Converts to bf16.
pub(crate) fn to_bf16(value: f64, rounding: Rounding) -> u16 {
    round_to(value, BF16, rounding) as u16
}

/// Converts to f32.
pub(crate) fn to_f32(value: f64, rounding: Rounding) -> f32 {
    match rounding {
        Rounding::Nearest => value as f32,
        other => f32::from_bits(round_to(value, F32, other)),
    }
}

/// Converts f16 to f32.
pub(crate) fn from_f16(half: u16) -> f32 {
    let sign = u32::from(half >> 15) << 31;
    let exponent = u32::from(half >> 10) & 31;
    let fraction = u32::from(half & 0x3ff);
    let magnitude = match exponent {
        // 2^-24 times an integer is exact.
        0 => return f32::from_bits((fraction as f32 * 5.960_464_5e-8).to_bits() | sign),
        31 => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + 112) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

/// Converts bf16 to f32.
pub(crate) fn from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Rounds to tf32, which has f32's exponent and 10 bits of fraction.
pub(crate) fn to_tf32(value: f32, rounding: Rounding) -> u32 {
    let bits = value.to_bits();
    if !value.is_finite() {
        return bits;
    }
    let rest = bits & 0x1fff;
    let is_up = match rounding {
        Rounding::NearestAway => rest >= 0x1000,
        Rounding::Zero => false,
        _ => rest > 0x1000 || rest == 0x1000 && bits & 0x2000 != 0,
    };
    (bits & !0x1fff) + if is_up { 0x2000 } else { 0 }
}

/// Returns the f64 value of a half type's bits.
pub(crate) fn half_value(bits: u16, ty: Type) -> f64 {
    match ty {
        Type::F16 | Type::F16x2 => f64::from(from_f16(bits)),
        _ => f64::from(from_bf16(bits)),
    }
}

/// Rounds to a half type.
pub(crate) fn half_bits(value: f64, ty: Type) -> u16 {
    match ty {
        Type::F16 | Type::F16x2 => to_f16(value, Rounding::Nearest),
        _ => to_bf16(value, Rounding::Nearest),
    }
}

/// Adds so that a second rounding, to at most 50 bits, gives the correctly rounded sum.
///
/// An inexact sum gets an odd last bit ("rounding to odd").
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    let virtual_b = sum - a;
    let error = (a - (sum - virtual_b)) + (b - virtual_b);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let is_further = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if is_further {
        sum.to_bits() + 1
    } else {
        sum.to_bits() - 1
    })
}

/// PTX `min` and `max`: a number wins over NaN, and -0 is less than +0.
#[inline(always)]
pub(crate) fn min_f32(a: f32, b: f32, flags: u8) -> f32 {
    if a.is_nan() || b.is_nan() {
        return nan_of(a, b, flags);
    }
    if a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// See [`min_f32`].
#[inline(always)]
pub(crate) fn max_f32(a: f32, b: f32, flags: u8) -> f32 {
    if a.is_nan() || b.is_nan() {
        return nan_of(a, b, flags);
    }
    if a > b || (a == b && a.is_sign_positive()) {
        a
    } else {
        b
    }
}

fn nan_of(a: f32, b: f32, flags: u8) -> f32 {
    if flags & flag::NAN != 0 || (a.is_nan() && b.is_nan()) {
        f32::from_bits(0x7fff_ffff)
    } else if a.is_nan() {
        b
    } else {
        a
    }
}

/// See [`min_f32`].
pub(crate) fn min_f64(a: f64, b: f64, flags: u8) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (false, false) if a < b || (a == b && a.is_sign_negative()) => a,
        (false, false) => b,
        (true, false) if flags & flag::NAN == 0 => b,
        (false, true) if flags & flag::NAN == 0 => a,
        _ => f64::NAN,
    }
}

/// See [`min_f32`].
pub(crate) fn max_f64(a: f64, b: f64, flags: u8) -> f64 {
    -min_f64(-a, -b, flags)
}

/// Replaces a subnormal number by zero of its sign.
#[inline(always)]
pub(crate) fn flush(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 {
        bits & 0x8000_0000
    } else {
        bits
    }
}

/// Clamps to 0..=1. NaN becomes 0.
#[inline(always)]
pub(crate) fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_trip() {
        for bits in 0..=u16::MAX {
            let value = from_f16(bits);
            if value.is_nan() {
                assert_eq!(to_f16(f64::from(value), Rounding::Nearest), 0x7fff);
            } else {
                assert_eq!(to_f16(f64::from(value), Rounding::Nearest), bits);
                assert_eq!(to_f16(f64::from(value), Rounding::Up), bits);
            }
            let value = from_bf16(bits);
            if !value.is_nan() {
                assert_eq!(to_bf16(f64::from(value), Rounding::Nearest), bits);
            }
        }
    }

    #[test]
    fn roundings_pick_neighbours() {
        let between = 1.0 + 1.0 / 2048.0;
        assert_eq!(to_f16(between, Rounding::Nearest), 0x3c00);
        assert_eq!(to_f16(between, Rounding::Up), 0x3c01);
        assert_eq!(to_f16(between + 1e-9, Rounding::Nearest), 0x3c01);
        assert_eq!(to_f16(-between, Rounding::Down), 0xbc01);
        assert_eq!(to_f16(65520.0, Rounding::Nearest), 0x7c00);
        assert_eq!(to_f16(65519.9, Rounding::Nearest), 0x7bff);
        assert_eq!(to_f16(1e9, Rounding::Zero), 0x7bff);
        assert_eq!(to_f16(2f64.powi(-25), Rounding::Nearest), 0);
        assert_eq!(to_f16(2f64.powi(-25) * 1.001, Rounding::Nearest), 1);
        assert_eq!(to_f16(1e-300, Rounding::Up), 1);
        assert_eq!(to_f32(0.1, Rounding::Zero), f32::from_bits(0x3dcc_cccc));
        for n in 0..10_000u32 {
            let value = f64::from_bits(0x3690_0000_0000_0000 + (u64::from(n) << 40) * 97);
            assert_eq!(
                round_to(value, F32, Rounding::Nearest),
                (value as f32).to_bits()
            );
        }
    }

    #[test]
    fn odd_sums_round_once() {
        // The tie of bf16 is broken by a number far below f64's precision.
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(to_bf16(add_odd(tie, 1e-30), Rounding::Nearest), 0x3f81);
        assert_eq!(to_bf16(add_odd(tie, -1e-30), Rounding::Nearest), 0x3f80);
        assert_eq!(to_bf16(add_odd(tie, 0.0), Rounding::Nearest), 0x3f80);
    }

    #[test]
    fn extremes_prefer_numbers() {
        assert_eq!(min_f32(f32::NAN, 1.0, 0), 1.0);
        assert!(min_f32(f32::NAN, 1.0, flag::NAN).is_nan());
        assert_eq!(max_f32(-0.0, 0.0, 0).to_bits(), 0);
        assert_eq!(min_f32(0.0, -0.0, 0).to_bits(), 0x8000_0000);
    }
}
