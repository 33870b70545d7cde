//! Constants that several formats and their kernels share.

/// What the sixteen codes of IQ4_NL and IQ4_XS stand for, before the scale.
pub const IQ4_NL_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// What the sixteen E2M1 codes of MXFP4 stand for, doubled to be whole: go with [`e8m0_half`].
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of the E8M0 scale `e`: `2^(e - 128)`, which makes up for the doubling of [`MXFP4_VALUES`].
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
    fn tables_have_the_symmetries_of_their_formats() {
        assert!(IQ4_NL_VALUES.is_sorted());
        for code in 0..8 {
            assert_eq!(MXFP4_VALUES[code], -MXFP4_VALUES[code + 8]);
        }
    }
}
