//! Constants that several formats and their kernels share.

/// Values of the sixteen codes of IQ4_NL and IQ4_XS, before the scale.
pub const IQ4_NL_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Values of the sixteen E2M1 codes of MXFP4, doubled to be integers. Used with [`e8m0_half`].
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns half of the E8M0 scale `e`: `2^(e - 128)`, which compensates for the doubling of
/// [`MXFP4_VALUES`].
///
/// 255, which the specification calls NaN, is a power of two like the others, as in ggml.
#[inline]
pub fn e8m0_half(e: u8) -> f32 {
    // Below 2 the result is subnormal: 2^-128 and 2^-127.
    f32::from_bits(match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => (u32::from(e) - 1) << 23,
    })
}

/// Returns half of the UE4M3 scale `x`, which compensates for the doubling of [`MXFP4_VALUES`]:
/// four bits of exponent over three of mantissa.
///
/// 127, which means NaN, is 0, as in ggml. Otherwise the highest bit is ignored.
#[inline(always)]
pub fn ue4m3_half(x: u8) -> f32 {
    static ALL: [f32; 256] = {
        let mut all = [0.0; 256];
        let mut x = 0;
        while x < 256 {
            let (exponent, mantissa) = (x as u32 >> 3 & 15, x as u32 & 7);
            all[x] = match exponent {
                _ if x == 127 => 0.0,
                // Subnormal: mantissa / 2^9, halved.
                0 => mantissa as f32 * (1.0 / 1024.0),
                _ => f32::from_bits((exponent + 127 - 8) << 23 | mantissa << 20),
            };
            x += 1;
        }
        all
    };
    ALL[usize::from(x)]
}

/// Returns the UE4M3 scale nearest to `x`, ties upward. As in ggml, everything not above 0 becomes
/// 0, and everything that rounds to 256 or more becomes 448, the largest.
pub(crate) fn ue4m3(x: f32) -> u8 {
    if x.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater) {
        return 0;
    }
    if x < 1.0 / 64.0 {
        // Subnormal: at most 7, even if 8, the first normal number, is nearer.
        return ((x * 512.0 + 0.5) as u8).min(7);
    }
    // Bits of exponent and mantissa are adjacent in both formats, so a mantissa that is rounded up
    // past 7 increments the exponent.
    let rounded = ((x.min(448.0).to_bits() + (1 << 19)) >> 20) - ((127 - 7) << 3);
    if rounded < 15 << 3 {
        rounded as u8
    } else {
        0x7e
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_scales_are_powers_of_two() {
        for e in 0..=u8::MAX {
            let power = f64::from_bits((u64::from(e) + 1023 - 128) << 52);
            assert_eq!(f64::from(e8m0_half(e)), power, "e = {e}");
        }
    }

    #[test]
    fn eight_bit_scales_round_trip() {
        for x in (1..15 << 3).chain([0x7e]) {
            assert_eq!(ue4m3(2.0 * ue4m3_half(x)), x);
            assert!(ue4m3_half(x) > ue4m3_half(x - 1));
        }
        assert_eq!((ue4m3_half(0x7e), ue4m3_half(0x7f)), (224.0, 0.0));
        assert_eq!(
            [f32::NAN, -1.0, 1e-4, f32::INFINITY].map(ue4m3),
            [0, 0, 0, 0x7e]
        );
    }

    #[test]
    fn tables_have_the_symmetries_of_their_formats() {
        assert!(IQ4_NL_VALUES.is_sorted());
        for code in 0..8 {
            assert_eq!(MXFP4_VALUES[code], -MXFP4_VALUES[code + 8]);
        }
    }
}
