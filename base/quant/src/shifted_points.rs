//! Choosing points for the formats whose elements are -1, 0 or 1 plus or minus an eighth: IQ1.
//!
//! Without a grid, the best choice for a group is found exactly by trying all splits of the sorted
//! elements into -1, 0 and 1, and both shifts. Then the nearest points of the grid replace the
//! result.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::neighbours::{self, LANES, Lanes, NearbyPoints};
use crate::quantize::Quantize;
use crate::search::{greater, max_abs, nearest};

/// Values of the codes of a point's coordinates if an eighth is added.
const RAISED: [f32; 3] = [-0.875, 0.125, 1.125];

/// Values of the codes of a point's coordinates if an eighth is subtracted.
const LOWERED: [f32; 3] = [-1.125, -0.125, 0.875];

fn values(is_lowered: bool) -> [f32; 3] {
    if is_lowered { LOWERED } else { RAISED }
}

/// Rounding of the elements of a group without a grid. In ascending order they have the codes 0, 1
/// and 2.
struct TernaryRounding<const G: usize> {
    /// Number of elements with code 0.
    zeros: usize,
    /// Number of elements with code 0 or 1.
    below_twos: usize,
    /// True for each eight elements that are lowered.
    lowered: [bool; G],
    /// May be negative.
    scale: f32,
}

/// Points of a group.
#[derive(Clone, Copy)]
struct GroupFit<const G: usize> {
    scale: f32,
    points: [u16; G],
    lowered: [bool; G],
}

impl<const G: usize> GroupFit<G> {
    /// Fit of a group without significant elements.
    const NONE: Self = GroupFit {
        scale: 0.0,
        points: [0; G],
        lowered: [false; G],
    };

    /// Chooses the points of a group. `split` gets the elements' indices in ascending order of
    /// their values.
    #[inline(always)]
    fn new(
        x: &[[f32; 8]; G],
        weights: &[[f32; 8]; G],
        negligible: f32,
        split: impl Fn(&[f32], &[f32], &[usize]) -> Option<TernaryRounding<G>>,
    ) -> Self {
        let x_flat = x.as_flattened();
        if max_abs(x_flat) < negligible {
            return Self::NONE;
        }
        let mut order = [0; 32];
        let order = &mut order[..8 * G];
        sort(x_flat, order);
        let Some(split) = split(x_flat, weights.as_flattened(), order) else {
            return Self::NONE;
        };
        let mut codes = [[0usize; 8]; G];
        for (place, &i) in order.iter().enumerate() {
            codes[i / 8][i % 8] =
                usize::from(place >= split.zeros) + usize::from(place >= split.below_twos);
        }
        let mut fit = GroupFit {
            scale: split.scale,
            points: [0; G],
            lowered: split.lowered,
        };
        if fit.scale < 0.0 {
            fit.scale = -fit.scale;
            codes = codes.map(|codes| codes.map(|code| 2 - code));
            fit.lowered = fit.lowered.map(|lowered| !lowered);
        }
        let grid = &*neighbours::IQ1;
        let mut is_exact = true;
        for i in 0..G {
            let key = codes[i].iter().rev().fold(0, |key, code| 3 * key + code);
            fit.points[i] = match grid.at(key) {
                NearbyPoints::Exact(point) => point,
                NearbyPoints::Around(around) => {
                    is_exact = false;
                    let values = values(fit.lowered[i]);
                    let losses = grid.losses(&x[i], &weights[i], &values, &[fit.scale; LANES]);
                    grid.best(around, &losses)[0]
                }
            };
        }
        if !is_exact {
            let (xq, qq) = fit.sums((0.0, 0.0), 1.0, x, weights);
            if xq > 0.0 && qq > 0.0 {
                fit.scale = xq / qq;
            }
        }
        fit
    }

    /// Adds `Σ w q x` and `Σ w q²` to `sums`, for elements `q` times `factor`. Their quotient is
    /// the best scale of everything added.
    fn sums(
        &self,
        sums: (f32, f32),
        factor: f32,
        x: &[[f32; 8]; G],
        weights: &[[f32; 8]; G],
    ) -> (f32, f32) {
        let (mut xq, mut qq) = sums;
        for i in 0..G {
            let values = values(self.lowered[i]).map(|value| value * factor);
            for (j, code) in neighbours::IQ1
                .codes(self.points[i])
                .into_iter()
                .enumerate()
            {
                let q = values[usize::from(code)];
                xq += weights[i][j] * q * x[i][j];
                qq += weights[i][j] * q * q;
            }
        }
        (xq, qq)
    }
}

/// Writes the indices of the elements in ascending order. Of equal elements, the first comes first.
fn sort(x: &[f32], order: &mut [usize]) {
    let mut keys = [0; 32];
    let keys = &mut keys[..x.len()];
    for (i, (key, x)) in keys.iter_mut().zip(x).enumerate() {
        // Both zeros are equal. Negative numbers are smaller the larger they are without their
        // sign.
        let bits = (x + 0.0).to_bits();
        let ordered = if bits >> 31 == 1 {
            !bits
        } else {
            bits | 1 << 31
        };
        *key = u64::from(ordered) << 32 | i as u64;
    }
    keys.sort_unstable();
    for (i, key) in order.iter_mut().zip(keys) {
        *i = (*key as u32 % 32) as usize;
    }
}

fn weights(x: &[f32; 256], importance: Option<&[f32; 256]>) -> [f32; 256] {
    let floor = 2.0 * x.iter().fold(0.0, |sum, v| sum + v * v) / 256.0;
    match importance {
        Some(importance) => std::array::from_fn(|i| importance[i] * (floor + x[i] * x[i]).sqrt()),
        None => x.map(|v| v * v),
    }
}

/// Returns the code of a scale relative to the largest: three bits.
fn scale_code(scale: f32, inverse: f32) -> u8 {
    nearest(0.5 * (inverse * scale - 1.0)).clamp(0, 7) as u8
}

/// Returns the best split of 32 elements with one shift.
fn split_whole(x: &[f32], weights: &[f32], order: &[usize]) -> Option<TernaryRounding<4>> {
    /// Sums, followed by room for a vector that starts at the last one.
    const PADDED: usize = 33 + LANES - 1;
    let (mut sum_x, mut sum_w) = ([f32::NAN; PADDED], [f32::NAN; PADDED]);
    (sum_x[0], sum_w[0]) = (0.0, 0.0);
    for (place, &i) in order.iter().take(32).enumerate() {
        sum_x[place + 1] = sum_x[place] + weights[i] * x[i];
        sum_w[place + 1] = sum_w[place] + weights[i];
    }
    let shifts = [RAISED, LOWERED];
    // Contributions of the elements with code 0 and of those with code 2 to both sums. No number is
    // greater than NaN, so entries outside the sums are never the best.
    let low =
        shifts.map(|[low, ..]| (sum_x.map(|sum| sum * low), sum_w.map(|sum| sum * low * low)));
    let high = shifts.map(|[.., high]| {
        (
            sum_x.map(|sum| (sum_x[32] - sum) * high),
            sum_w.map(|sum| (sum_w[32] - sum) * high * high),
        )
    });

    let mut best = None;
    let mut gain = -f32::MAX;
    for zeros in 0..=32 {
        let ends = (zeros..=32).step_by(LANES);
        for below_twos in ends {
            let lanes = |sums: &[f32; PADDED]| -> Lanes {
                std::array::from_fn(|lane| sums[below_twos + lane])
            };
            let mut xq = [[0.0; LANES]; 2];
            let mut qq = [[0.0; LANES]; 2];
            let (x, w) = (lanes(&sum_x), lanes(&sum_w));
            for shift in 0..2 {
                let (high_x, high_w) = (lanes(&high[shift].0), lanes(&high[shift].1));
                for lane in 0..LANES {
                    let middle = shifts[shift][1];
                    xq[shift][lane] =
                        low[shift].0[zeros] + (x[lane] - sum_x[zeros]) * middle + high_x[lane];
                    qq[shift][lane] = low[shift].1[zeros]
                        + (w[lane] - sum_w[zeros]) * middle * middle
                        + high_w[lane];
                }
            }
            let is_better = |gain: f32, xq: f32, qq: f32| (qq > 0.0) & (xq * xq > gain * qq);
            // Lanes that do not exceed the best so far cannot exceed the best of these either.
            let mut any = false;
            for lane in 0..LANES {
                any |= is_better(gain, xq[0][lane], qq[0][lane])
                    | is_better(gain, xq[1][lane], qq[1][lane]);
            }
            if !any {
                continue;
            }
            for lane in 0..LANES {
                for shift in 0..2 {
                    let (xq, qq) = (xq[shift][lane], qq[shift][lane]);
                    if is_better(gain, xq, qq) {
                        let scale = xq / qq;
                        gain = scale * xq;
                        best = Some(TernaryRounding {
                            zeros,
                            below_twos: below_twos + lane,
                            lowered: [shift == 1; 4],
                            scale,
                        });
                    }
                }
            }
        }
    }
    best
}

/// Returns the best split of 16 elements, with separate shifts for both halves.
fn split_halves(x: &[f32], weights: &[f32], order: &[usize]) -> Option<TernaryRounding<2>> {
    const PADDED: usize = 17 + LANES - 1;
    let (mut sum_x, mut sum_w) = ([[f32::NAN; PADDED]; 2], [[f32::NAN; PADDED]; 2]);
    for half in 0..2 {
        (sum_x[half][0], sum_w[half][0]) = (0.0, 0.0);
        for (place, &i) in order.iter().take(16).enumerate() {
            let is_here = i / 8 == half;
            let (before_x, before_w) = (sum_x[half][place], sum_w[half][place]);
            sum_x[half][place + 1] = if is_here {
                before_x + weights[i] * x[i]
            } else {
                before_x
            };
            sum_w[half][place + 1] = if is_here {
                before_w + weights[i]
            } else {
                before_w
            };
        }
    }
    // Values are one apart, so the sum with them is that with all elements as the last value, minus
    // one for each boundary that an element is below. These are the distances of their squares.
    let shifts = [RAISED, LOWERED];
    let steps = shifts.map(|[a, b, c]| [a * a - b * b, b * b - c * c]);
    let mut best = None;
    let mut gain = -f32::MAX;
    for zeros in 0..=16 {
        for below_twos in (zeros..=16).step_by(LANES) {
            // Sums by half and shift.
            let mut xq_of = [[[0.0; LANES]; 2]; 2];
            let mut qq_of = [[[0.0; LANES]; 2]; 2];
            for half in 0..2 {
                let (sums_x, sums_w) = (&sum_x[half], &sum_w[half]);
                for shift in 0..2 {
                    let [_, _, top] = shifts[shift];
                    let [first, second] = steps[shift];
                    for lane in 0..LANES {
                        let end = below_twos + lane;
                        xq_of[half][shift][lane] = sums_x[16] * top - (sums_x[zeros] + sums_x[end]);
                        qq_of[half][shift][lane] =
                            sums_w[16] * top * top + sums_w[zeros] * first + sums_w[end] * second;
                    }
                }
            }
            let is_better = |gain: f32, xq: f32, qq: f32| (qq > 0.0) & (xq * xq > gain * qq);
            let mut xq = [[0.0; LANES]; 4];
            let mut qq = [[0.0; LANES]; 4];
            let mut any = false;
            for shifts in 0..4 {
                for lane in 0..LANES {
                    xq[shifts][lane] = xq_of[0][shifts / 2][lane] + xq_of[1][shifts % 2][lane];
                    qq[shifts][lane] = qq_of[0][shifts / 2][lane] + qq_of[1][shifts % 2][lane];
                    any |= is_better(gain, xq[shifts][lane], qq[shifts][lane]);
                }
            }
            if !any {
                continue;
            }
            for lane in 0..LANES {
                for shifts in 0..4 {
                    let (xq, qq) = (xq[shifts][lane], qq[shifts][lane]);
                    if is_better(gain, xq, qq) {
                        let scale = xq / qq;
                        gain = scale * xq;
                        best = Some(TernaryRounding {
                            zeros,
                            below_twos: below_twos + lane,
                            lowered: [shifts / 2 == 1, shifts % 2 == 1],
                            scale,
                        });
                    }
                }
            }
        }
    }
    best
}

impl Quantize for BlockIq1S {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let weights = weights(x, importance);
        let mut fits = [GroupFit::<4>::NONE; 8];
        let groups = x.as_chunks::<8>().0.as_chunks::<4>().0;
        let weights = weights.as_chunks::<8>().0.as_chunks::<4>().0;
        for ((fit, x), weights) in fits.iter_mut().zip(groups).zip(weights) {
            *fit = GroupFit::new(x, weights, 1e-12, split_whole);
        }
        let max = fits.iter().fold(0.0, |max, fit| greater(fit.scale, max));
        let d = max / 15.0;
        let qh = fits.map(|fit| {
            let high = (0..4).fold(0, |bits, i| bits | fit.points[i] >> 8 << (3 * i));
            match max {
                0.0 => high,
                _ => {
                    let scale = u16::from(scale_code(fit.scale, 1.0 / d));
                    high | scale << 12 | u16::from(fit.lowered[0]) << 15
                }
            }
        });
        BlockIq1S {
            d: f32_to_f16(d * 1.125), // reduces losses
            qs: std::array::from_fn(|i| fits[i / 4].points[i % 4] as u8),
            qh,
        }
    }
}

impl Quantize for BlockIq1M {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let weights = weights(x, importance);
        let mut fits = [GroupFit::<2>::NONE; 16];
        let groups = x.as_chunks::<8>().0.as_chunks::<2>().0;
        let weights = weights.as_chunks::<8>().0.as_chunks::<2>().0;
        for ((fit, x), weights) in fits.iter_mut().zip(groups).zip(weights) {
            *fit = GroupFit::new(x, weights, 1e-7, split_halves);
        }
        let max = fits.iter().fold(0.0, |max, fit| greater(fit.scale, max));
        let mut words = [0u16; 4];
        if max != 0.0 {
            let mut d = max / 15.0;
            let inverse = 1.0 / d;
            let mut sums = (0.0, 0.0);
            for (i, (fit, (x, weights))) in fits.iter().zip(groups.iter().zip(weights)).enumerate()
            {
                let scale = scale_code(fit.scale, inverse);
                words[i / 4] |= u16::from(scale) << (3 * (i % 4));
                sums = fit.sums(sums, f32::from(2 * scale + 1), x, weights);
            }
            if sums.1 > 0.0 {
                d = sums.0 / sums.1;
            }
            let d = f32_to_f16(d * 1.1125).to_bits(); // reduces losses
            for (i, word) in words.iter_mut().enumerate() {
                *word |= (d >> (4 * i) & 15) << 12;
            }
        }
        BlockIq1M {
            qs: std::array::from_fn(|i| fits[i / 2].points[i % 2] as u8),
            qh: fits.map(|fit| {
                let half = |i: usize| (fit.points[i] >> 8) as u8 | u8::from(fit.lowered[i]) << 3;
                half(0) | half(1) << 4
            }),
            scales: words.map(u16::to_le_bytes),
        }
    }
}
