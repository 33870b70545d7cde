//! Medians, ratios of medians, and their confidence intervals.

use samite::text::Rng;

/// Number of bootstrap resamples.
const RESAMPLES: usize = 4000;

/// Returns the median of sorted numbers, or NaN if there are none.
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Returns the median of numbers in any order, or NaN if there are none.
pub fn median_of(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = numbers.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    median(&sorted)
}

/// A ratio with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Returns the median of ratios, computed on logarithms so that a ratio and its inverse have the
/// same weight. The interval spans the 2.5th to the 97.5th percentile of bootstrap medians. Returns
/// `None` without ratios.
pub fn ratio(ratios: &[f64]) -> Option<Ratio> {
    if ratios.is_empty() {
        return None;
    }
    let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    let mut random = Rng::new(1);
    let mut resample = vec![0.0; logs.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            resample.fill_with(|| logs[random.below(logs.len())]);
            resample.sort_by(f64::total_cmp);
            median(&resample)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let percentile = |share: f64| medians[(share * (RESAMPLES - 1) as f64).round() as usize].exp();
    Some(Ratio {
        median: median_of(logs).exp(),
        low: percentile(0.025),
        high: percentile(0.975),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median_of([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median_of([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median_of([]).is_nan());
    }

    #[test]
    fn ratios_have_confidence_intervals() {
        assert_eq!(ratio(&[]), None);
        let one = ratio(&[2.0]).unwrap();
        assert!((one.median - 2.0).abs() < 1e-12 && (one.high - one.low).abs() < 1e-12);
        // A ratio and its inverse cancel out.
        let even = ratio(&[4.0, 0.25]).unwrap();
        assert!((even.median - 1.0).abs() < 1e-12);
        assert!((even.low - 0.25).abs() < 1e-12 && (even.high - 4.0).abs() < 1e-12);
        // One outlier of twelve moves neither the median nor the interval much.
        let mut ratios = vec![1.9, 2.0, 2.1, 1.95, 2.05, 2.0, 1.98, 2.02, 2.0, 1.97, 2.03];
        ratios.push(40.0);
        let found = ratio(&ratios).unwrap();
        assert!((found.median - 2.0).abs() < 0.02, "{found:?}");
        assert!(found.low > 1.9 && found.high < 2.1, "{found:?}");
    }
}
