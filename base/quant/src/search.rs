//! Common functions of the encoders: extremes, rounding, and searches for the scale with the
//! smallest loss.
//!
//! Every sum runs in element order and every product is rounded as written, because the encoded
//! bytes depend on it.

/// Magnitudes below this count as zero: a group of such elements gets scale 0.
pub(crate) const NEGLIGIBLE: f32 = 1e-15;

/// Returns the largest magnitude, ignoring NaN.
#[inline]
pub(crate) fn max_abs(x: &[f32]) -> f32 {
    // Eight independent maxima make one vector, and a maximum does not depend on the order.
    let mut lanes = [0.0f32; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = greater(v.abs(), *lane);
        }
    }
    rest.iter()
        .map(|v| v.abs())
        .chain(lanes)
        .fold(0.0, |max, v| greater(v, max))
}

/// Returns the largest number, at least 0.
#[inline]
pub(crate) fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |max, &v| greater(v, max))
}

/// Returns `v` if it is greater than `max`, otherwise `max`. Unlike with `f32::max`, the order
/// decides between +0 and -0.
#[inline]
pub(crate) fn greater(v: f32, max: f32) -> f32 {
    if v > max { v } else { max }
}

/// Returns the first of the elements with the largest magnitude, with its sign, or 0 if all are 0.
#[inline]
pub(crate) fn first_max_abs(x: &[f32]) -> f32 {
    let (min, max) = extremes(x, 0.0, 0.0);
    if max > -min {
        max
    } else if -min > max {
        min
    } else if max == 0.0 {
        0.0
    } else {
        x.iter().copied().find(|v| v.abs() == max).unwrap_or(0.0)
    }
}

/// Returns the smallest and the largest element. Of equal ones (+0 and -0) the first counts.
#[inline]
pub(crate) fn min_and_max(x: &[f32; 32]) -> (f32, f32) {
    let (min, max) = extremes(x, f32::MAX, f32::MIN);
    let first = |extreme: f32| match extreme {
        0.0 => x.iter().copied().find(|&v| v == 0.0).unwrap_or(extreme),
        _ => extreme,
    };
    (first(min), first(max))
}

/// Returns the smallest and the largest of the elements and of `min` and `max`, ignoring NaN.
#[inline]
fn extremes(x: &[f32], min: f32, max: f32) -> (f32, f32) {
    let lesser = |v: f32, min: f32| if v < min { v } else { min };
    // Independent lanes make vectors, as in `max_abs`.
    let (mut mins, mut maxs) = ([min; 8], [max; 8]);
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for ((min, max), &v) in mins.iter_mut().zip(&mut maxs).zip(chunk) {
            *min = lesser(v, *min);
            *max = greater(v, *max);
        }
    }
    rest.iter()
        .map(|&v| (v, v))
        .chain(mins.into_iter().zip(maxs))
        .fold((min, max), |(min, max), (low, high)| {
            (lesser(low, min), greater(high, max))
        })
}

/// Returns `1 / d`, and 0 for 0.
#[inline]
pub(crate) fn reciprocal(d: f32) -> f32 {
    if d != 0.0 { 1.0 / d } else { 0.0 }
}

/// Rounds down to a byte. Returns 0 for NaN or values out of range, which occur only for elements
/// that are not finite, or for scales so small that their reciprocal is infinite.
#[inline]
pub(crate) fn truncate_code(x: f32) -> u8 {
    let x = if (0.0..256.0).contains(&x) { x } else { 0.0 };
    let code = nearest(x);
    (code - i32::from(code as f32 > x)) as u8
}

/// Rounds to nearest, ties away from zero, -127 to 127. Returns 0 like [`truncate_code`].
#[inline]
pub(crate) fn round_code(x: f32) -> i8 {
    // `f32::round` is a library call on plain x86-64. Here the difference is exact, and shows if a
    // tie went to the even neighbour towards zero.
    let x = if x.abs() < 127.5 { x } else { 0.0 };
    let even = nearest(x);
    let rest = x - even as f32;
    let up = (rest == 0.5) & (x > 0.0);
    let down = (rest == -0.5) & (x < 0.0);
    (even + i32::from(up) - i32::from(down)) as i8
}

/// Rounds to nearest, ties to even, for magnitudes up to 2^22. For others, returns some number
/// below that.
#[inline]
pub(crate) fn nearest(x: f32) -> i32 {
    // Adding 1.5 * 2^23 leaves the rounded number, plus 2^22, in the low 23 bits.
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// Returns the codes of `x` at scale `1 / inverse`, `-limit` to `limit - 1`.
#[inline]
fn signed_codes<const N: usize>(x: &[f32; N], inverse: f32, limit: i32) -> [i32; N] {
    x.map(|v| nearest(inverse * v).clamp(-limit, limit - 1))
}

/// Returns `Σ w x q` and `Σ w q²` with weights `w`. Their quotient is the best scale for the given
/// codes.
#[inline]
fn projection<const N: usize>(x: &[f32; N], weights: &[f32; N], codes: &[i32; N]) -> (f32, f32) {
    let (mut xq, mut qq) = (0.0, 0.0);
    for ((&v, &w), &q) in x.iter().zip(weights).zip(codes) {
        let q = q as f32;
        xq += w * v * q;
        qq += w * q * q;
    }
    (xq, qq)
}

/// Returns the squares of `x`, used as weights if nothing else is known.
#[inline]
pub(crate) fn squares<const N: usize>(x: &[f32; N]) -> [f32; N] {
    x.map(|v| v * v)
}

/// Returns `Σ x²`.
#[inline]
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |sum, v| sum + v * v)
}

/// Returns the weights of elements whose columns' importance is known. A large element weighs more,
/// and none less than one of the magnitude of `mean_square`.
#[inline]
pub(crate) fn error_weights<const N: usize>(
    x: &[f32; N],
    importance: &[f32; N],
    mean_square: f32,
) -> [f32; N] {
    std::array::from_fn(|i| importance[i] * (mean_square + x[i] * x[i]).sqrt())
}

/// Finds scale and codes for `x ≈ scale q`, `q` from `-limit` to `limit - 1`. Tries 19 scales
/// around the one that maps the largest magnitude to `-limit`, and fits the scale to the codes of
/// each. `limit` is added to the returned codes. A negligible group has scale 0 and codes 0.
pub(crate) fn fit_symmetric<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    limit: i32,
) -> (f32, [u8; N]) {
    let max = first_max_abs(x);
    if max.abs() < NEGLIGIBLE {
        return (0.0, [0; N]);
    }
    // The scales are tried in parallel lanes, because each of their sums runs in element order. One
    // more makes whole vectors.
    const TRIES: usize = 19;
    const LENGTH: usize = TRIES + 1;
    let mut inverses = [-limit as f32 / max; LENGTH];
    for (inverse, step) in inverses[1..]
        .iter_mut()
        .zip((-9..=9).filter(|&step| step != 0))
    {
        *inverse = -(limit as f32 + 0.1 * step as f32) / max;
    }
    let mut xq = [0.0; LENGTH];
    let mut qq = [0.0; LENGTH];
    for (&v, &w) in x.iter().zip(weights) {
        for t in 0..LENGTH {
            let q = (nearest(inverses[t] * v) as f32).clamp(-limit as f32, (limit - 1) as f32);
            xq[t] += w * v * q;
            qq[t] += w * q * q;
        }
    }
    let mut best = 0;
    let mut scale = if qq[0] != 0.0 { xq[0] / qq[0] } else { 0.0 };
    let mut gain = scale * xq[0];
    for t in 1..TRIES {
        if qq[t] > 0.0 && xq[t] * xq[t] > gain * qq[t] {
            best = t;
            scale = xq[t] / qq[t];
            gain = scale * xq[t];
        }
    }
    let codes = signed_codes(x, inverses[best], limit);
    (scale, codes.map(|q| (q + limit) as u8))
}

/// Finds scale and codes like [`fit_symmetric`] with the squares of `x` as weights. Starts from the
/// scale that maps the largest magnitude to `-limit` and then [descends](descend).
pub(crate) fn descend_symmetric<const N: usize>(x: &[f32; N], limit: i32) -> (f32, [u8; N]) {
    let max = first_max_abs(x);
    if max.abs() < NEGLIGIBLE {
        return (0.0, [0; N]);
    }
    let codes = signed_codes(x, -limit as f32 / max, limit);
    let better = |v: f32, xq: f32, qq: f32| {
        (xq > 0.0).then(|| nearest(v * qq / xq).clamp(-limit, limit - 1))
    };
    let (scale, codes) = descend(x, &squares(x), codes, better, |q| q);
    (scale, codes.map(|q| (q + limit) as u8))
}

/// Finds scale and codes for `x ≈ scale q`, `q` from 0 to `limit`. Starts from the best of 9 scales
/// around the one that maps the largest number to `limit`, and then [descends](descend). A
/// negligible group has scale 0 and codes 0.
///
/// A scale that was fitted with few nonzero weights can be negative because of rounding. Its code
/// then wraps around to a byte, as in ggml.
pub(crate) fn fit_positive<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    limit: u8,
) -> (f32, [u8; N]) {
    let max = largest(x);
    if max < NEGLIGIBLE {
        return (0.0, [0; N]);
    }
    let wrap = |q: i32| i32::from(q as u8);
    let code_at = |inverse: f32, v: f32| nearest(inverse * v).min(i32::from(limit));
    let loss = |scale: f32, v: f32, w: f32, q: i32| {
        let difference = v - scale * q as f32;
        w * difference * difference
    };
    let mut best = f32::from(limit) / max;
    let mut least = 0.0;
    for (&v, &w) in x.iter().zip(weights) {
        least += loss(1.0 / best, v, w, wrap(code_at(best, v)));
    }
    // Several at a time, one in each lane of a vector.
    for steps in [[-4, -3, -2, -1], [1, 2, 3, 4]] {
        let inverses = steps.map(|step| (0.1 * step as f32 + f32::from(limit)) / max);
        let scales = inverses.map(|inverse| 1.0 / inverse);
        let mut losses = [0.0; 4];
        for (&v, &w) in x.iter().zip(weights) {
            for lane in 0..4 {
                losses[lane] += loss(scales[lane], v, w, code_at(inverses[lane], v));
            }
        }
        for (loss, inverse) in losses.into_iter().zip(inverses) {
            if loss < least {
                (best, least) = (inverse, loss);
            }
        }
    }
    let codes = x.map(|v| code_at(best, v));
    let better = |v: f32, xq: f32, qq: f32| {
        (xq > 0.0 && qq > 0.0).then(|| nearest(v * qq / xq).min(i32::from(limit)))
    };
    let (scale, codes) = descend(x, weights, codes, better, wrap);
    (scale, codes.map(|q| q as u8))
}

/// Changes one code at a time to the best one for the scale that fits all other codes, while that
/// improves the fit. Returns the scale that fits the codes. `better` is the best code for an
/// element, given the sums of the others' [`projection`], or `None` if these determine no scale.
/// `kept` maps a code to its stored form.
#[inline]
fn descend<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    codes: [i32; N],
    better: impl Fn(f32, f32, f32) -> Option<i32>,
    kept: impl Fn(i32) -> i32,
) -> (f32, [i32; N]) {
    let (mut xq, mut qq) = projection(x, weights, &codes);
    let mut codes = codes.map(&kept);
    for _ in 0..5 {
        let mut changed = false;
        for ((&v, &w), code) in x.iter().zip(weights).zip(&mut codes) {
            let q = *code as f32;
            let (others_xq, others_qq) = (xq - w * v * q, qq - w * q * q);
            let Some(better) = better(v, others_xq, others_qq) else {
                continue;
            };
            if better == *code {
                continue;
            }
            let q = better as f32;
            let new_xq = others_xq + w * v * q;
            let new_qq = others_qq + w * q * q;
            if new_qq > 0.0 && new_xq * new_xq * qq > xq * xq * new_qq {
                *code = kept(better);
                (xq, qq) = (new_xq, new_qq);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    (if qq > 0.0 { xq / qq } else { 0.0 }, codes)
}

/// Measure of loss in [`AffineSearch::fit`].
#[derive(Clone, Copy)]
pub(crate) enum Loss {
    Absolute,
    Squared,
}

/// Best number of groups for an [`AffineSearch`] at a time: one in each lane of a vector, so that
/// sums run in element order and still use the whole vector.
pub(crate) const LANES: usize = 8;

/// A number for each group.
pub(crate) type Lanes<const L: usize = LANES> = [f32; L];

/// A search for `x ≈ scale q - minimum` with `q` from 0 to `limit`.
#[derive(Clone, Copy)]
pub(crate) struct AffineSearch {
    /// Maximum code.
    pub limit: u8,
    /// Offset of the first scale, which maps the range of `x` to `limit + start` steps.
    pub start: f32,
    /// Increment of the number of steps from scale to scale.
    pub stride: f32,
    /// Number of further scales.
    pub steps: u8,
    /// Loss to minimise.
    pub loss: Loss,
}

/// Result of [`AffineSearch::fit`]. Codes are integers.
pub(crate) struct AffineFit<const N: usize, const L: usize> {
    pub scale: Lanes<L>,
    /// The minimum, which is subtracted. Never negative.
    pub minimum: Lanes<L>,
    pub codes: [Lanes<L>; N],
}

impl AffineSearch {
    /// Returns the search that ggml uses if the importance of columns is known.
    pub(crate) fn for_importance(limit: u8) -> Self {
        AffineSearch {
            limit,
            start: -0.9,
            stride: 0.05,
            steps: 36,
            loss: Loss::Squared,
        }
    }

    /// Tries the scales, solves weighted least squares for scale and minimum with the codes of
    /// each, and keeps the best. Element `i` of group `j` is `x[i][j]`. Groups are independent.
    pub(crate) fn fit<const N: usize, const L: usize>(
        &self,
        x: &[Lanes<L>; N],
        weights: &[Lanes<L>; N],
    ) -> AffineFit<N, L> {
        let (mut min, mut max) = (x[0], x[0]);
        // A sum that starts at -0 equals the sum of the terms alone, even in its sign.
        let (mut sum_w, mut sum_wx) = ([-0.0; L], [-0.0; L]);
        for (v, w) in x.iter().zip(weights) {
            for j in 0..L {
                min[j] = if v[j] < min[j] { v[j] } else { min[j] };
                max[j] = greater(v[j], max[j]);
                sum_w[j] += w[j];
                sum_wx[j] += w[j] * v[j];
            }
        }
        // Zero must be within the range, because minima are stored without a sign.
        let min = min.map(|v| if v > 0.0 { 0.0 } else { v });

        let limit = f32::from(self.limit);
        let mut best = AffineFit {
            scale: [0.0; L],
            minimum: min.map(|v| -v),
            codes: [[0.0; L]; N],
        };
        let mut inverse = [0.0; L];
        for j in 0..L {
            inverse[j] = limit / (max[j] - min[j]);
            best.scale[j] = 1.0 / inverse[j];
        }
        for (q, v) in best.codes.iter_mut().zip(x) {
            *q = self.codes(v, &inverse, &min);
        }
        let mut least = self.total_loss(x, weights, &best);

        let mut tried = AffineFit {
            scale: [0.0; L],
            minimum: [0.0; L],
            codes: [[0.0; L]; N],
        };
        for step in 0..=self.steps {
            // The lower end of the range moves with the best minimum so far.
            let low = best.minimum.map(|v| -v);
            for j in 0..L {
                inverse[j] =
                    (self.start + self.stride * f32::from(step) + limit) / (max[j] - low[j]);
            }
            let mut sum_wq = [0.0; L];
            let mut sum_wqq = [0.0; L];
            let mut sum_wqx = [0.0; L];
            for ((v, w), q) in x.iter().zip(weights).zip(&mut tried.codes) {
                // In the same loop as the sums: in a separate loop, the compiler would take four
                // elements at a time instead of four groups.
                *q = self.codes(v, &inverse, &low);
                let wq: Lanes<L> = std::array::from_fn(|j| w[j] * q[j]);
                add(&mut sum_wq, &wq);
                add(&mut sum_wqq, &std::array::from_fn(|j| wq[j] * q[j]));
            }
            // In a separate loop from the other sums: together, the compiler would make vectors of
            // two kinds of terms.
            for ((v, w), q) in x.iter().zip(weights).zip(&tried.codes) {
                add(&mut sum_wqx, &std::array::from_fn(|j| w[j] * q[j] * v[j]));
            }
            let mut solvable = [false; L];
            for j in 0..L {
                let determinant = sum_w[j] * sum_wqq[j] - sum_wq[j] * sum_wq[j];
                let scale = (sum_w[j] * sum_wqx[j] - sum_wx[j] * sum_wq[j]) / determinant;
                let offset = (sum_wqq[j] * sum_wx[j] - sum_wq[j] * sum_wqx[j]) / determinant;
                let capped = offset > 0.0;
                tried.scale[j] = if capped {
                    sum_wqx[j] / sum_wqq[j]
                } else {
                    scale
                };
                // The subtracted value is +0 if it is the stored minimum.
                tried.minimum[j] = if capped { -0.0 } else { -offset };
                solvable[j] = determinant > 0.0;
            }
            let loss = self.total_loss(x, weights, &tried);
            let mut better = [false; L];
            for j in 0..L {
                better[j] = solvable[j] && loss[j] < least[j];
            }
            if better.contains(&true) {
                best.take(&tried, &better);
                take_lanes(&mut least, &loss, &better);
            }
        }

        // A group of equal elements is its minimum: the division above had no divisor.
        for j in (0..L).filter(|&j| max[j] == min[j]) {
            best.scale[j] = 0.0;
            best.minimum[j] = -min[j];
            best.codes.iter_mut().for_each(|q| q[j] = 0.0);
        }
        best
    }

    /// Returns the codes of one element of each group.
    #[inline(always)]
    fn codes<const L: usize>(&self, v: &Lanes<L>, inverse: &Lanes<L>, min: &Lanes<L>) -> Lanes<L> {
        let limit = f32::from(self.limit);
        let mut codes = [0.0; L];
        for j in 0..L {
            let code = greater(nearest(inverse[j] * (v[j] - min[j])) as f32, 0.0);
            codes[j] = if code < limit { code } else { limit };
        }
        codes
    }

    #[inline]
    fn total_loss<const N: usize, const L: usize>(
        &self,
        x: &[Lanes<L>; N],
        weights: &[Lanes<L>; N],
        fit: &AffineFit<N, L>,
    ) -> Lanes<L> {
        let mut total = [0.0; L];
        for ((v, w), q) in x.iter().zip(weights).zip(&fit.codes) {
            for j in 0..L {
                let difference = fit.scale[j] * q[j] - fit.minimum[j] - v[j];
                total[j] += w[j]
                    * match self.loss {
                        Loss::Absolute => difference.abs(),
                        Loss::Squared => difference * difference,
                    };
            }
        }
        total
    }
}

impl<const N: usize, const L: usize> AffineFit<N, L> {
    /// Takes the selected groups from `other`.
    fn take(&mut self, other: &Self, chosen: &[bool; L]) {
        take_lanes(&mut self.scale, &other.scale, chosen);
        take_lanes(&mut self.minimum, &other.minimum, chosen);
        for (q, other) in self.codes.iter_mut().zip(&other.codes) {
            take_lanes(q, other, chosen);
        }
    }
}

#[inline]
fn add<const L: usize>(sums: &mut Lanes<L>, terms: &Lanes<L>) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term;
    }
}

#[inline]
fn take_lanes<const L: usize>(to: &mut Lanes<L>, from: &Lanes<L>, chosen: &[bool; L]) {
    for ((to, from), chosen) in to.iter_mut().zip(from).zip(chosen) {
        *to = if *chosen { *from } else { *to };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn roundings_agree_with_the_standard_library(x in -127.0f32..127.0) {
            prop_assert_eq!(f32::from(round_code(x)), x.round());
            prop_assert_eq!(nearest(x) as f32, x.round_ties_even());
            let tie = x.trunc() + 0.5;
            prop_assert_eq!(f32::from(round_code(tie)), tie.round());
            prop_assert_eq!(nearest(tie) as f32, tie.round_ties_even());
        }

        #[test]
        fn extremes_agree_with_plain_loops(x in prop::array::uniform32(-2i8..3)) {
            let x = x.map(|v| if v == 0 { -0.0 } else { f32::from(v) });
            let (mut largest, mut min, mut max) = (0.0f32, x[0], x[0]);
            for v in x {
                if v.abs() > largest.abs() {
                    largest = v;
                }
                min = min.min(v);
                max = max.max(v);
            }
            prop_assert_eq!(first_max_abs(&x).to_bits(), largest.to_bits());
            prop_assert_eq!(max_abs(&x), largest.abs());
            prop_assert_eq!(min_and_max(&x), (min, max));
        }
    }

    #[test]
    fn rounding_nan_and_huge_values_gives_zero() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            assert_eq!(round_code(x), 0);
            assert_eq!(truncate_code(x), 0);
        }
    }

    #[test]
    fn searches_find_exact_scales() {
        let codes: [i32; 16] = std::array::from_fn(|i| i as i32 * 4 - 32 + i32::from(i == 15) * 3);
        let x = codes.map(|q| q as f32 * 0.25);
        let (scale, found) = fit_symmetric(&x, &squares(&x), 32);
        assert!((scale - 0.25).abs() < 1e-6, "{scale}");
        assert_eq!(found.map(|q| i32::from(q) - 32), codes);

        let affine = AffineSearch {
            limit: 15,
            start: -1.0,
            stride: 0.1,
            steps: 20,
            loss: Loss::Squared,
        };
        // Lane 7 is constant; the others are ramps that end at different heights.
        let x: [Lanes; 16] = std::array::from_fn(|i| {
            std::array::from_fn(|j| {
                if j == 7 {
                    -2.5
                } else {
                    i as f32 * (0.5 + j as f32) - 3.0
                }
            })
        });
        let fit = affine.fit(&x, &[[1.0; LANES]; 16]);
        for j in 0..7 {
            assert!(
                (fit.scale[j] - 0.5 - j as f32).abs() < 1e-5,
                "lane {j}: {}",
                fit.scale[j]
            );
            assert!(
                (fit.minimum[j] - 3.0).abs() < 1e-4,
                "lane {j}: {}",
                fit.minimum[j]
            );
            assert!((0..16).all(|i| fit.codes[i][j] == i as f32), "lane {j}");
        }
        assert_eq!(
            (fit.scale[7], fit.minimum[7], fit.codes[9][7]),
            (0.0, 2.5, 0.0)
        );
    }
}
