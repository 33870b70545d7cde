//! Grid points near the values that a group of elements would have without the grid.
//!
//! Coordinates are represented by codes: the index of their value among the values of the grid's
//! coordinates. The codes of all coordinates are the digits of a key, the first one lowest. For
//! each possible key, [`Neighbours`] has the points whose codes are nearest: as many as ggml
//! considers, in ggml's order, because the first of two equally good points is used.

use crate::grids::*;
use std::sync::LazyLock;

/// Number of scales that are tried together: one in each lane of a vector.
pub(crate) const LANES: usize = 4;

/// A number for each scale.
pub(crate) type Lanes = [f32; LANES];

/// Result of [`Neighbours::losses`].
pub(crate) type Losses = [Lanes; PLACES];

/// Number of pairs of a coordinate and a code. No grid has more, and a power of two bounds an index
/// without a branch.
pub(crate) const PLACES: usize = 32;

/// Points near every key of a grid, whose points have `D` coordinates with `V` codes.
pub(crate) struct Neighbours<const D: usize, const V: usize> {
    /// For each coordinate of each point, the index of its code: `V` indices for each coordinate,
    /// in order.
    points: Vec<[u8; D]>,
    /// Start of the points of each key in `near`, and the length of `near`.
    starts: Vec<u32>,
    /// Numbers of points.
    near: Vec<u16>,
}

/// Flag in [`Neighbours::near`] for the only point of a key, which is the key's exact point.
const EXACT: u16 = 1 << 15;

/// Points near a key.
pub(crate) enum NearbyPoints<'a> {
    /// Number of the point with exactly the key's codes.
    Exact(u16),
    /// Numbers of the nearest points, if there is no exact one. Never empty.
    Around(&'a [u16]),
}

/// Points near the keys of each grid. Lists are built on first use.
pub(crate) static IQ1: LazyLock<Neighbours<8, 3>> =
    LazyLock::new(|| Neighbours::new(&IQ1_GRID, &IQ1_VALUES, 3));
pub(crate) static IQ2_XXS: LazyLock<Neighbours<8, 3>> =
    LazyLock::new(|| Neighbours::new(&IQ2_XXS_GRID, &IQ2_VALUES, 2));
pub(crate) static IQ2_XS: LazyLock<Neighbours<8, 3>> =
    LazyLock::new(|| Neighbours::new(&IQ2_XS_GRID, &IQ2_VALUES, 2));
pub(crate) static IQ2_S: LazyLock<Neighbours<8, 3>> =
    LazyLock::new(|| Neighbours::new(&IQ2_S_GRID, &IQ2_VALUES, 1));
pub(crate) static IQ3_XXS: LazyLock<Neighbours<4, 8>> =
    LazyLock::new(|| Neighbours::new(&IQ3_XXS_GRID, &IQ3_XXS_VALUES, 2));
pub(crate) static IQ3_S: LazyLock<Neighbours<4, 8>> =
    LazyLock::new(|| Neighbours::new(&IQ3_S_GRID, &IQ3_S_VALUES, 3));

impl<const D: usize, const V: usize> Neighbours<D, V> {
    /// Finds the points near every key: those at the `shells` smallest occurring distances, nearest
    /// first, and at equal distance the lowest number first.
    fn new(grid: &[[i8; D]], values: &[i8; V], shells: usize) -> Self {
        let code = |value: i8| values.iter().position(|&v| v == value).unwrap_or(0);
        let half_keys = V.pow(D as u32 / 2);
        let half_key = |half: &[i8]| half.iter().rev().fold(0, |key, &v| key * V + code(v));
        let halves: Vec<[usize; 2]> = grid
            .iter()
            .map(|point| [half_key(&point[..D / 2]), half_key(&point[D / 2..])])
            .collect();

        // Squared distances between any two halves. Those of whole points are sums of two of these.
        let distances: Vec<u8> = (0..half_keys * half_keys)
            .map(|pair| {
                let (mut a, mut b) = (pair / half_keys, pair % half_keys);
                let mut sum = 0;
                for _ in 0..D / 2 {
                    sum += (a % V).abs_diff(b % V).pow(2);
                    (a, b) = (a / V, b / V);
                }
                sum as u8 // at most 2 * 7^2 or 4 * 2^2
            })
            .collect();
        let from_half = |half: usize| &distances[half * half_keys..][..half_keys];

        let (mut starts, mut near) = (vec![0], Vec::new());
        let mut distance = vec![0u8; grid.len()];
        let mut nearest = Vec::new();
        for key in 0..half_keys * half_keys {
            let (low, high) = (from_half(key % half_keys), from_half(key / half_keys));
            // A bit for each occurring distance. Points farther than the last bit are in no list.
            let mut seen = 0u64;
            for (distance, half) in distance.iter_mut().zip(&halves) {
                *distance = low[half[0]] + high[half[1]];
                seen |= 1 << (*distance).min(63);
            }
            let exact = seen & 1 == 1;
            for _ in 1..if exact { 1 } else { shells } {
                seen &= seen.wrapping_sub(1);
            }
            let radius = seen.trailing_zeros() as u8;
            nearest.clear();
            for (point, &distance) in (0u16..).zip(&distance) {
                if distance <= radius {
                    nearest.push((distance, point));
                }
            }
            nearest.sort_unstable();
            let flag = if exact { EXACT } else { 0 };
            near.extend(nearest.iter().map(|(_, point)| point | flag));
            starts.push(near.len() as u32);
        }
        near.shrink_to_fit();

        let place = |point: &[i8; D], i: usize| (i * V + code(point[i])) as u8;
        Neighbours {
            points: grid
                .iter()
                .map(|point| std::array::from_fn(|i| place(point, i)))
                .collect(),
            starts,
            near,
        }
    }

    /// Returns the points near `key`, whose digits are below `V`.
    #[inline(always)]
    pub(crate) fn at(&self, key: usize) -> NearbyPoints<'_> {
        match self.near[self.starts[key] as usize..self.starts[key + 1] as usize] {
            [point] if point & EXACT != 0 => NearbyPoints::Exact(point & !EXACT),
            ref around => NearbyPoints::Around(around),
        }
    }

    /// Returns the codes of a point's coordinates.
    #[inline(always)]
    pub(crate) fn codes(&self, point: u16) -> [u8; D] {
        let places = &self.points[usize::from(point)];
        std::array::from_fn(|i| places[i] - (i * V) as u8)
    }

    /// Returns the weighted loss of each coordinate of `x` with each of its codes, whose scaled
    /// `values` are given. Used as a table for [`best`](Self::best).
    #[inline(always)]
    pub(crate) fn losses(
        &self,
        x: &[f32; D],
        weights: &[f32; D],
        values: &[f32; V],
        scales: &Lanes,
    ) -> Losses {
        let mut losses = [[0.0; LANES]; PLACES];
        for i in 0..D {
            for (losses, &value) in losses[i * V..].iter_mut().zip(values) {
                for (loss, scale) in losses.iter_mut().zip(scales) {
                    let difference = scale * value - x[i];
                    *loss = weights[i] * difference * difference;
                }
            }
        }
        losses
    }

    /// Returns, for each scale, the point with the smallest loss of those `around` a key. The first
    /// of them, if all losses are infinite.
    #[inline(always)]
    pub(crate) fn best(&self, around: &[u16], losses: &Losses) -> [u16; LANES] {
        let mut best = [u32::from(around[0]); LANES];
        let mut least = [f32::MAX; LANES];
        for &point in around {
            let mut sum = [0.0; LANES];
            for place in self.points[usize::from(point)] {
                let losses = &losses[usize::from(place) % PLACES];
                for (sum, loss) in sum.iter_mut().zip(losses) {
                    *sum += loss;
                }
            }
            for lane in 0..LANES {
                let less = sum[lane] < least[lane];
                least[lane] = if less { sum[lane] } else { least[lane] };
                best[lane] = if less { point.into() } else { best[lane] };
            }
        }
        best.map(|point| point as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_lists_against_sorted_points<const D: usize, const V: usize>(
        grid: &[[i8; D]],
        values: &[i8; V],
        shells: usize,
        made: &Neighbours<D, V>,
    ) {
        let code = |value: i8| values.iter().position(|&v| v == value).unwrap();
        let codes: Vec<[usize; D]> = grid.iter().map(|point| point.map(code)).collect();
        for key in (0..V.pow(D as u32)).step_by(7) {
            let of_key: [usize; D] = std::array::from_fn(|i| key / V.pow(i as u32) % V);
            let mut sorted: Vec<(usize, u16)> = (0..)
                .zip(&codes)
                .map(|(number, codes)| {
                    let apart = (0..D).map(|i| codes[i].abs_diff(of_key[i]).pow(2));
                    (apart.sum(), number)
                })
                .collect();
            sorted.sort();
            match made.at(key) {
                NearbyPoints::Exact(point) => {
                    assert_eq!(sorted[0], (0, point));
                    assert_eq!(made.codes(point).map(usize::from), of_key);
                }
                NearbyPoints::Around(around) => {
                    let mut distances: Vec<usize> = sorted.iter().map(|p| p.0).collect();
                    distances.dedup();
                    assert_ne!(distances[0], 0);
                    sorted.retain(|p| p.0 <= distances[shells - 1]);
                    assert!(around.iter().eq(sorted.iter().map(|p| &p.1)));
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "slow, and nothing but numbers")]
    fn neighbour_lists_hold_the_nearest_points() {
        check_lists_against_sorted_points(&IQ1_GRID, &IQ1_VALUES, 3, &IQ1);
        check_lists_against_sorted_points(&IQ2_XXS_GRID, &IQ2_VALUES, 2, &IQ2_XXS);
        check_lists_against_sorted_points(&IQ2_XS_GRID, &IQ2_VALUES, 2, &IQ2_XS);
        check_lists_against_sorted_points(&IQ2_S_GRID, &IQ2_VALUES, 1, &IQ2_S);
        check_lists_against_sorted_points(&IQ3_XXS_GRID, &IQ3_XXS_VALUES, 2, &IQ3_XXS);
        check_lists_against_sorted_points(&IQ3_S_GRID, &IQ3_S_VALUES, 3, &IQ3_S);
    }
}
