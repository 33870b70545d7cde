//! Latency histograms for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in seconds. The last bucket is unbounded.
pub const ENDS: [f64; 15] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// A lock-free histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; ENDS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = ENDS.iter().position(|&end| seconds <= end);
        self.counts[bucket.unwrap_or(ENDS.len())].fetch_add(1, Ordering::Relaxed);
        let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }

    /// Returns the cumulative count of each bucket, the total count, and the sum in seconds.
    pub fn sums(&self) -> ([u64; ENDS.len() + 1], f64) {
        let mut sum = 0;
        let counts = self.counts.each_ref().map(|count| {
            sum += count.load(Ordering::Relaxed);
            sum
        });
        (
            counts,
            self.microseconds.load(Ordering::Relaxed) as f64 / 1e6,
        )
    }
}

/// Latencies of answers.
#[derive(Debug, Default)]
pub struct Latencies {
    /// From a request to its first token.
    pub first_token: Histogram,
    /// From one token to the next.
    pub next_token: Histogram,
    /// From a request to the end of its answer.
    pub whole: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_buckets_are_cumulative() {
        let histogram = Histogram::default();
        for milliseconds in [0, 1, 3, 100, 400_000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let (counts, sum) = histogram.sums();
        assert_eq!((counts[0], counts[1], counts[5]), (2, 3, 4));
        assert_eq!((counts[14], counts[15]), (4, 5));
        assert!((sum - 400.104).abs() < 1e-9);
    }
}
