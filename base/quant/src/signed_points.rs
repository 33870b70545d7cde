//! Choosing points for the formats whose elements have a sign and a point's coordinate each: IQ2
//! and IQ3.
//!
//! Several scales are tried for a group of elements. With each scale the magnitudes are rounded to
//! codes. These may be a point of the grid, or have points near them. Then the one with the
//! smallest weighted loss is used. The scale with the greatest gain in weighted least squares wins,
//! with its points. Values of codes are odd here, as almost all in the grids are: `2 code + 1`.

use crate::blocks::*;
use crate::float::f32_to_f16;
use crate::neighbours::{self, LANES, Lanes, NearbyPoints, Neighbours, PLACES};
use crate::quantize::Quantize;
use crate::search::{NEGLIGIBLE, fit_positive, greater, nearest};
use half::f16;

/// Search for a format's points.
struct Search {
    /// Term that is added to the square of an element for its weight, as a multiple of the block's
    /// mean square.
    floor: f32,
    /// Factor of that term without importance.
    evenly: f32,
    /// True if the number of negative elements of each eight is made even, because an eighth sign
    /// is not stored.
    signs_are_even: bool,
    /// Groups whose elements are all below this are skipped.
    negligible: f32,
    /// Start of the search for scales.
    first: First,
    /// Number of further scales on either side of the first.
    tries: u8,
    /// Difference of the value of the largest element from scale to scale.
    step: f32,
    /// Points that are chosen again with the best scale.
    again: PointSubset,
    /// Final factor of the scale of the scales, which reduces losses.
    correction: f32,
}

/// The first scale.
enum First {
    /// The scale with which the largest element has the largest value.
    Largest,
    /// A scale that fits elements without a grid, in groups of 32.
    Fitted,
}

/// Some points of a group.
enum PointSubset {
    All,
    /// All points, if one of them is not exactly the rounded elements.
    AllOrNone,
    /// The points that are not exactly the rounded elements.
    Inexact,
}

/// The points of a block of `S` groups of `G` points.
struct Chosen<const G: usize, const S: usize> {
    d: f16,
    /// Codes of the scales.
    scales: [u8; S],
    points: [[u16; G]; S],
    /// A bit for each negative element of eight.
    signs: [u8; 32],
}

/// `Σ w x q` and `Σ w q²` for each of several scales. Their quotient is the best scale for the
/// points.
#[derive(Clone, Copy)]
struct ScaleFitSums {
    xq: Lanes,
    qq: Lanes,
}

impl ScaleFitSums {
    const ZERO: ScaleFitSums = ScaleFitSums {
        xq: [0.0; LANES],
        qq: [0.0; LANES],
    };

    /// Adds the coordinates of a point for each scale.
    #[inline(always)]
    fn add<const D: usize, const V: usize>(
        &mut self,
        neighbours: &Neighbours<D, V>,
        points: [u16; LANES],
        x: &[f32; D],
        weights: &[f32; D],
    ) {
        let codes = points.map(|point| neighbours.codes(point));
        for i in 0..D {
            let wx = weights[i] * x[i];
            let values = codes.map(|codes| f32::from(2 * codes[i] + 1));
            for (lane, q) in values.into_iter().enumerate() {
                self.xq[lane] += wx * q;
                self.qq[lane] += weights[i] * q * q;
            }
        }
    }
}

/// Returns, for each scale, the best point for eight or four elements, and whether it is exactly
/// the rounded elements.
#[inline(always)]
fn choose_points<const D: usize, const V: usize>(
    neighbours: &Neighbours<D, V>,
    x: &[f32; D],
    loss_weights: &[f32; D],
    scales: &Lanes,
    inverses: &Lanes,
) -> ([u16; LANES], [bool; LANES]) {
    let mut keys = [0; LANES];
    for &x in x.iter().rev() {
        for (key, inverse) in keys.iter_mut().zip(inverses) {
            let code = nearest(0.5 * (inverse * x - 1.0)).clamp(0, V as i32 - 1);
            *key = *key * V as i32 + code;
        }
    }
    let near = keys.map(|key| neighbours.at(key as usize));
    let exact = std::array::from_fn(|lane| matches!(near[lane], NearbyPoints::Exact(_)));
    let losses = match exact {
        [true, true, true, true] => [[0.0; LANES]; PLACES],
        _ => {
            let values = std::array::from_fn(|code| (2 * code + 1) as f32);
            neighbours.losses(x, loss_weights, &values, scales)
        }
    };
    let mut points = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        // Scales that are close to each other usually give the same key.
        let same = keys[lane..].iter().take_while(|&&key| key == keys[lane]);
        let run = lane..lane + same.count();
        match near[lane] {
            NearbyPoints::Exact(point) => points[run.clone()].fill(point),
            NearbyPoints::Around(around) => {
                let best = neighbours.best(around, &losses);
                points[run.clone()].copy_from_slice(&best[run.clone()]);
            }
        }
        lane = run.end;
    }
    (points, exact)
}

impl Search {
    /// Chooses the points of a block.
    fn choose<const D: usize, const V: usize, const G: usize, const S: usize>(
        &self,
        neighbours: &Neighbours<D, V>,
        x: &[f32; 256],
        importance: Option<&[f32; 256]>,
    ) -> Chosen<G, S> {
        let weights = self.weights(x, importance);
        let (magnitudes, mut signs) = self.split_signs(x, &weights);
        let mut points = [[0; G]; S];
        let mut scales = [0.0; S];
        let mut max = 0.0;
        let groups = magnitudes.as_chunks::<D>().0.as_chunks::<G>().0;
        let weights = weights.as_chunks::<D>().0.as_chunks::<G>().0;
        let signs_of_groups = signs.chunks_exact_mut(D * G / 8);
        for (i, ((x, weights), signs)) in
            groups.iter().zip(weights).zip(signs_of_groups).enumerate()
        {
            let Some((scale, of_group)) = self.fit(neighbours, x, weights) else {
                signs.fill(0);
                continue;
            };
            if scale < 0.0 {
                // The element whose sign was flipped outweighs the others.
                signs.iter_mut().for_each(|signs| *signs = !*signs);
            }
            points[i] = of_group;
            scales[i] = scale.abs();
            max = greater(scales[i], max);
        }
        let d = max / 31.0;
        let inverse = 1.0 / d;
        Chosen {
            d: f32_to_f16(d * self.correction),
            scales: scales.map(|scale| match max {
                0.0 => 0,
                _ => nearest(0.5 * (inverse * scale - 1.0)).clamp(0, 15) as u8,
            }),
            points,
            signs,
        }
    }

    fn weights(&self, x: &[f32; 256], importance: Option<&[f32; 256]>) -> [f32; 256] {
        let squares = x.iter().fold(0.0, |sum, v| sum + v * v);
        let floor = self.floor * squares / 256.0;
        match importance {
            Some(importance) => {
                std::array::from_fn(|i| importance[i] * (floor + x[i] * x[i]).sqrt())
            }
            None => x.map(|v| self.evenly * floor + v * v),
        }
    }

    /// Returns the magnitudes of the elements, and a bit for each negative one. If signs have to be
    /// even, the least important element of eight gets the other sign, and a negative magnitude in
    /// return.
    fn split_signs(&self, x: &[f32; 256], weights: &[f32; 256]) -> ([f32; 256], [u8; 32]) {
        let (mut magnitudes, mut signs) = (*x, [0u8; 32]);
        let eights = magnitudes.as_chunks_mut::<8>().0.iter_mut();
        for ((x, weights), signs) in eights.zip(weights.as_chunks::<8>().0).zip(&mut signs) {
            for (i, x) in x.iter_mut().enumerate() {
                let is_negative = *x < 0.0;
                *signs |= u8::from(is_negative) << i;
                *x = if is_negative { -*x } else { *x };
            }
            if self.signs_are_even && signs.count_ones() % 2 == 1 {
                let (mut least, mut at) = (f32::INFINITY, 0);
                for i in 0..8 {
                    let matters = weights[i] * x[i] * x[i];
                    if matters < least {
                        (least, at) = (matters, i);
                    }
                }
                x[at] = -x[at];
                *signs ^= 1 << at;
            }
        }
        (magnitudes, signs)
    }

    /// Returns the scale of a group and its points, or none for a group without significant
    /// elements.
    fn fit<const D: usize, const V: usize, const G: usize>(
        &self,
        neighbours: &Neighbours<D, V>,
        x: &[[f32; D]; G],
        weights: &[[f32; D]; G],
    ) -> Option<(f32, [u16; G])> {
        let (x_flat, weights_flat) = (x.as_flattened(), weights.as_flattened());
        let largest = x_flat.iter().fold(x_flat[0], |max, &v| greater(v, max));
        if largest < self.negligible {
            return None;
        }
        let top = (2 * V - 1) as f32;
        let (mut scale, largest) = match self.first {
            First::Largest => (largest / top, largest),
            First::Fitted => {
                let groups_of_32 = x_flat.first_chunk::<32>().zip(weights_flat.first_chunk());
                let fit = groups_of_32.map(|(x, weights)| fit_positive(x, weights, V as u8 + 1));
                let scale = fit.map_or(0.0, |(scale, _)| scale);
                (scale, scale * V as f32)
            }
        };
        if largest <= 0.0 {
            return None;
        }
        let loss_weights = weights.map(|weights| weights.map(f32::sqrt));
        let mut points = [0; G];
        let mut exact = [!matches!(self.again, PointSubset::AllOrNone); G];

        let mut gain = 0.0;
        let tries = i16::from(self.tries);
        for first in (-tries..=tries).step_by(LANES) {
            // The last scale may be tried again, which changes nothing.
            let step = |lane: usize| f32::from((first + lane as i16).min(tries));
            let inverses = std::array::from_fn(|lane| (top + step(lane) * self.step) / largest);
            let scales = inverses.map(|inverse| 1.0 / inverse);
            let mut sums = ScaleFitSums::ZERO;
            let tried: [_; G] = std::array::from_fn(|i| {
                let (points, exact) =
                    choose_points(neighbours, &x[i], &loss_weights[i], &scales, &inverses);
                sums.add(neighbours, points, &x[i], &weights[i]);
                (points, exact)
            });
            for lane in 0..LANES {
                let (xq, qq) = (sums.xq[lane], sums.qq[lane]);
                if qq > 0.0 && xq * xq > gain * qq {
                    scale = xq / qq;
                    gain = scale * xq;
                    points = std::array::from_fn(|i| tried[i].0[lane]);
                    exact = std::array::from_fn(|i| tried[i].1[lane]);
                }
            }
        }

        let is_exact = exact == [true; G];
        let again = match self.again {
            PointSubset::All => [true; G],
            PointSubset::AllOrNone => [!is_exact; G],
            PointSubset::Inexact => exact.map(|exact| !exact),
        };
        if scale > 0.0 && again.contains(&true) {
            let (scales, inverses) = ([scale; LANES], [1.0 / scale; LANES]);
            let mut sums = ScaleFitSums::ZERO;
            for i in 0..G {
                if again[i] {
                    let (chosen, _) =
                        choose_points(neighbours, &x[i], &loss_weights[i], &scales, &inverses);
                    points[i] = chosen[0];
                }
                sums.add(neighbours, [points[i]; LANES], &x[i], &weights[i]);
            }
            if sums.qq[0] > 0.0 {
                scale = sums.xq[0] / sums.qq[0];
            }
        }
        Some((scale, points))
    }
}

/// Returns four sets of signs of eight elements, seven stored of each, and the scale's code above
/// them.
fn join_signs(signs: &[u8; 4], scale: u8) -> u32 {
    (0..4).fold(u32::from(scale) << 28, |bits, i| {
        bits | u32::from(signs[i] & 127) << (7 * i)
    })
}

fn join_halves<const N: usize>(codes: &[u8]) -> [u8; N] {
    std::array::from_fn(|i| codes[2 * i] | codes[2 * i + 1] << 4)
}

/// Base of the other searches.
const IQ2: Search = Search {
    floor: 1.0,
    evenly: 0.25,
    signs_are_even: true,
    negligible: NEGLIGIBLE,
    first: First::Largest,
    tries: 9,
    step: 0.1,
    again: PointSubset::Inexact,
    correction: 1.0,
};

const IQ3: Search = Search {
    floor: 2.0,
    evenly: 0.0,
    step: 0.2,
    ..IQ2
};

impl Quantize for BlockIq2Xxs {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        const SEARCH: Search = Search {
            first: First::Fitted,
            tries: 6,
            again: PointSubset::All,
            ..IQ2
        };
        let chosen: Chosen<4, 8> = SEARCH.choose(&neighbours::IQ2_XXS, x, importance);
        let signs = chosen.signs.as_chunks().0;
        BlockIq2Xxs {
            d: chosen.d,
            qs: std::array::from_fn(|i| {
                let [a, b, c, d] = chosen.points[i].map(|point| point as u8);
                let [e, f, g, h] = join_signs(&signs[i], chosen.scales[i]).to_le_bytes();
                [a, b, c, d, e, f, g, h]
            }),
        }
    }
}

impl Quantize for BlockIq2Xs {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        let chosen: Chosen<2, 16> = IQ2.choose(&neighbours::IQ2_XS, x, importance);
        let points = chosen.points.as_flattened();
        BlockIq2Xs {
            d: chosen.d,
            qs: std::array::from_fn(|i| points[i] | u16::from(chosen.signs[i] & 127) << 9),
            scales: join_halves(&chosen.scales),
        }
    }
}

impl Quantize for BlockIq2S {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        const SEARCH: Search = Search {
            floor: 2.0,
            signs_are_even: false,
            negligible: 1e-8,
            correction: 0.9875,
            ..IQ2
        };
        let chosen: Chosen<2, 16> = SEARCH.choose(&neighbours::IQ2_S, x, importance);
        let points = chosen.points.as_flattened();
        BlockIq2S {
            d: chosen.d,
            qs: std::array::from_fn(|i| points[i] as u8),
            signs: chosen.signs,
            qh: std::array::from_fn(|i| {
                (0..4).fold(0, |bits, j| {
                    bits | (points[4 * i + j] >> 8 << (2 * j)) as u8
                })
            }),
            scales: join_halves(&chosen.scales),
        }
    }
}

impl Quantize for BlockIq3Xxs {
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        const SEARCH: Search = Search {
            negligible: 1e-8,
            tries: 15,
            correction: 1.0125,
            ..IQ3
        };
        let chosen: Chosen<8, 8> = SEARCH.choose(&neighbours::IQ3_XXS, x, importance);
        let points = chosen.points.as_flattened();
        let signs = chosen.signs.as_chunks().0;
        BlockIq3Xxs {
            d: chosen.d,
            qs: std::array::from_fn(|i| points[i] as u8),
            signs: std::array::from_fn(|i| join_signs(&signs[i], chosen.scales[i]).to_le_bytes()),
        }
    }
}

impl Quantize for BlockIq3S {
    /// Quantizes a block. Unlike this code, ggml misplaces points and signs after a group of 32
    /// zeros in a block with other groups, so that it decodes to something else.
    fn quantize(x: &[f32; 256], importance: Option<&[f32; 256]>, _: f32) -> Self {
        const SEARCH: Search = Search {
            signs_are_even: false,
            negligible: f32::from_bits(1), // only zeros
            again: PointSubset::AllOrNone,
            correction: 1.033,
            ..IQ3
        };
        let chosen: Chosen<8, 8> = SEARCH.choose(&neighbours::IQ3_S, x, importance);
        let low = chosen.points.map(|points| points.map(|point| point as u8));
        BlockIq3S {
            d: chosen.d,
            qs: bytemuck::cast(low),
            qh: chosen
                .points
                .map(|points| (0..8).fold(0, |bits, i| bits | (points[i] >> 8 << i) as u8)),
            signs: chosen.signs,
            scales: join_halves(&chosen.scales),
        }
    }
}
