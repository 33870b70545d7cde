//! Exponential and logarithm from exactly defined operations.
//!
//! The standard library leaves these two to the platform, where the last bit differs from machine
//! to machine; a draw near a boundary would then differ too.

const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// e to the power of `x`, for `x` not above 0; relative error below 1e-14. Minus infinity gives 0.
pub(super) fn exp_of_negative(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    // x = k ln 2 + r with r within half of ln 2, where the series converges quickly.
    let k = (x * std::f64::consts::LOG2_E).round();
    let r = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    let mut series = 1.0;
    for divisor in (1..=13).rev() {
        series = 1.0 + series * r / f64::from(divisor);
    }
    let power_of_two = f64::from_bits(((1023 + k as i64) as u64) << 52);
    series * power_of_two
}

/// The natural logarithm of a normal `x` above 0; relative error below 1e-13.
pub(super) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)), with an argument below 0.172.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let mut series = 0.0;
    for index in (0..10).rev() {
        series = series * square + 1.0 / f64::from(2 * index + 1);
    }
    let k = exponent as f64;
    k * LN_2_HIGH + (2.0 * t * series + k * LN_2_LOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential() {
        for step in 0..70_000 {
            let x = -f64::from(step) * 0.01;
            let (ours, theirs) = (exp_of_negative(x), x.exp());
            assert!(
                (ours - theirs).abs() <= 1e-14 * theirs,
                "{x}: {ours} {theirs}"
            );
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(f64::NEG_INFINITY), 0.0);
    }

    #[test]
    fn logarithm() {
        for step in 1..50_000 {
            let x = f64::from(step) * 0.000_37;
            let (ours, theirs) = (ln(x), x.ln());
            assert!(
                (ours - theirs).abs() <= 1e-13 * theirs.abs() + 1e-16,
                "{x}: {ours} {theirs}"
            );
        }
        assert_eq!(ln(1.0), 0.0);
        assert!((ln(1e-300) - 1e-300f64.ln()).abs() < 1e-12);
    }
}
