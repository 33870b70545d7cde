//! Scalar functions without branches, so that loops over them are vectorised.

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts. The first has few digits, so that its product with a small integer is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this, `e^x` is subnormal. Products with subnormals take hundreds of times as long.
const LEAST: f32 = -87.336;

/// Returns `e^x` within 2 units in the last place. Infinity and 0 outside the range of normal
/// numbers.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let (p, n) = exp_parts::<false>(if x > 89.0 { 89.0 } else { x });
    // 2^n in two factors, as n may be outside the exponent's range.
    let half = n >> 1;
    let power = p * power_of_two(half) * power_of_two(n - half);
    if x < LEAST { 0.0 } else { power }
}

/// Does what [`exp`] does for numbers up to 88, as in softmax: a quarter faster. A product and a
/// sum are one instruction if `FUSED`.
#[inline(always)]
pub(crate) fn bounded_exp<const FUSED: bool>(x: f32) -> f32 {
    let (p, n) = exp_parts::<FUSED>(x);
    if x < LEAST { 0.0 } else { p * power_of_two(n) }
}

/// Returns a number near 1 and a power of two whose product is `e^x`. For `x` below [`LEAST`], uses
/// [`LEAST`] instead.
#[inline(always)]
fn exp_parts<const FUSED: bool>(x: f32) -> (f32, i32) {
    // Comparisons instead of `max`, so that NaN stays NaN.
    let x = if x < LEAST { LEAST } else { x };
    let rounded = mul_add::<FUSED>(x, LOG2_E, ROUND);
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let whole = rounded - ROUND;
    let r = mul_add::<FUSED>(whole, -LN2_HIGH, x);
    let r = mul_add::<FUSED>(whole, -LN2_LOW, r);
    let mut p = 1.0 / 5040.0;
    p = mul_add::<FUSED>(p, r, 1.0 / 720.0);
    p = mul_add::<FUSED>(p, r, 1.0 / 120.0);
    p = mul_add::<FUSED>(p, r, 1.0 / 24.0);
    p = mul_add::<FUSED>(p, r, 1.0 / 6.0);
    p = mul_add::<FUSED>(p, r, 0.5);
    (mul_add::<FUSED>(p, r * r, r) + 1.0, n)
}

/// Returns `a * b + c`. Without the instruction, rounding once would take a function call.
#[inline(always)]
fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let far = 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    // Near 0 the difference above loses digits, but this series does not.
    let s = x * x;
    let near =
        x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))));
    if x.abs() < 0.3 { near } else { far }
}

/// Computes GELU with tanh: `(1 + tanh(u)) / 2` is `sigmoid(2 u)`, which keeps its digits for
/// negative `u`.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    const SQRT_8_OVER_PI: f32 = 1.595_769_2;
    x * sigmoid(SQRT_8_OVER_PI * x * (1.0 + 0.044_715 * x * x))
}

#[inline(always)]
pub(crate) fn gelu_quick(x: f32) -> f32 {
    x * sigmoid(1.702 * x)
}

/// Computes GELU with the error function: `x (1 + erf(x / sqrt 2)) / 2`.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    0.5 * x * complementary_error(-x * std::f32::consts::FRAC_1_SQRT_2)
}

/// Returns `1 - erf(x)` with a relative error of about 1e-6: the Chebyshev fit of *Numerical
/// Recipes*, section 6.2.
#[inline(always)]
fn complementary_error(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.170_872_77;
    p = p * t - 0.822_152_23;
    p = p * t + 1.488_515_9;
    p = p * t - 1.135_204;
    p = p * t + 0.278_868_07;
    p = p * t - 0.186_288_06;
    p = p * t + 0.096_784_18;
    p = p * t + 0.374_091_96;
    p = p * t + 1.000_023_7;
    p = p * t - 1.265_512_2;
    let tail = t * exp(p - z * z);
    if x < 0.0 { 2.0 - tail } else { tail }
}

/// Returns sine and cosine, to f32 precision for angles up to 2^31.
#[inline(always)]
pub(crate) fn sin_cos(angle: f64) -> (f32, f32) {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // Pi / 2 in two parts. The first has few enough digits that its multiples are exact.
    const HIGH: f64 = 1.570_796_310_901_641_8;
    const LOW: f64 = 1.589_325_477_352_819_6e-8;
    let rounded = angle * std::f64::consts::FRAC_2_PI + ROUND;
    let quadrant = rounded.to_bits() as u32;
    let whole = rounded - ROUND;
    let r = ((angle - whole * HIGH) - whole * LOW) as f32;
    let s = r * r;
    let sin = r + r * s * (-1.666_665_5e-1 + s * (8.332_161e-3 + s * -1.951_529_6e-4));
    let cos = 1.0 - 0.5 * s + s * s * (4.166_664_6e-2 + s * (-1.388_731_6e-3 + s * 2.443_315_7e-5));
    let (a, b) = if quadrant & 1 == 0 {
        (sin, cos)
    } else {
        (cos, sin)
    };
    let a = if quadrant & 2 == 0 { a } else { -a };
    let b = if quadrant.wrapping_add(1) & 2 == 0 {
        b
    } else {
        -b
    };
    (a, b)
}

/// Adding it to a number rounds to an integer and leaves its lowest bits in the lowest bits of the
/// sum.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Rounds numbers to integers of magnitude up to `most`, and passes them to `low` in the lowest
/// bits. Returns the scale. If a number is not finite, neither is the scale, and codes are
/// undefined. If the largest is below `most / f32::MAX`, all codes are zeros.
#[inline(always)]
pub(crate) fn round<const N: usize, T>(
    x: &[f32; N],
    most: f32,
    codes: &mut [T; N],
    low: impl Fn(u32) -> T,
) -> f32 {
    // The bits of magnitudes are ordered like the magnitudes, with infinity and NaN above.
    let magnitude = |x: &f32| x.abs().to_bits().cast_signed();
    let largest = x.iter().map(magnitude).fold(0, i32::max);
    let largest = f32::from_bits(largest.cast_unsigned());
    let inverse = if largest > 0.0 { most / largest } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        *code = low((x * inverse + ROUND).to_bits());
    }
    largest / most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f32, expected: f64, relative: f64, absolute: f64, what: &str) {
        let error = (f64::from(got) - expected).abs();
        assert!(
            error <= relative * expected.abs() + absolute,
            "{what}: {got} instead of {expected}"
        );
    }

    #[test]
    fn exponential() {
        for i in -8733..8870 {
            let x = i as f32 * 0.01;
            close(exp(x), f64::from(x).exp(), 4e-7, 0.0, &format!("exp({x})"));
        }
        assert!(exp(-87.33) >= f32::MIN_POSITIVE && exp(-87.34) == 0.0);
        for i in -8800..8800 {
            let x = i as f32 * 0.01;
            let (got, expected) = (bounded_exp::<false>(x), exp(x));
            assert_eq!(got, expected, "exp({x})");
        }
        assert!(bounded_exp::<false>(f32::NAN).is_nan());
        assert_eq!(bounded_exp::<false>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn hyperbolic_tangent_and_error_function() {
        for i in -1000..1000 {
            let x = i as f32 * 0.01;
            close(
                tanh(x),
                f64::from(x).tanh(),
                1e-6,
                0.0,
                &format!("tanh({x})"),
            );
        }
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_2),
            (1.0, 0.157_299_207_1),
            (-2.0, 1.995_322_265_0),
            (4.0, 1.541_725_790_0e-8),
        ] {
            let got = complementary_error(x);
            close(got, expected, 4e-6, 0.0, &format!("erfc({x})"));
        }
    }

    #[test]
    fn sine_and_cosine() {
        for i in 0..20_000 {
            for angle in [
                f64::from(i) * 0.01,
                f64::from(-i) * 997.1,
                f64::from(i) * 1e5,
            ] {
                let (sin, cos) = sin_cos(angle);
                close(sin, angle.sin(), 0.0, 3e-7, &format!("sin({angle})"));
                close(cos, angle.cos(), 0.0, 3e-7, &format!("cos({angle})"));
            }
        }
    }
}
