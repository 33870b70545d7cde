//! Top-n-sigma: keeps candidates close to the best logit, in standard deviations.

use super::candidates::Candidates;

impl Candidates {
    /// Keeps the candidates whose logit is at most `n` standard deviations of all logits below the
    /// best. Logits of minus infinity are ignored. 0 or less keeps all.
    pub fn top_n_sigma(&mut self, n: f32) {
        let Ok((_, max)) = self.best() else { return };
        if n <= 0.0 {
            return;
        }
        // Distances from the best logit instead of logits, so that no large sums of squares are
        // subtracted from each other.
        let below = |logit: f32| f64::from(max) - f64::from(logit);
        let (mut count, mut sum) = (0u32, 0.0);
        for candidate in self.as_slice() {
            if candidate.logit > f32::NEG_INFINITY {
                count += 1;
                sum += below(candidate.logit);
            }
        }
        let mean = sum / f64::from(count);
        let squares: f64 = self
            .as_slice()
            .iter()
            .filter(|candidate| candidate.logit > f32::NEG_INFINITY)
            .map(|candidate| (below(candidate.logit) - mean) * (below(candidate.logit) - mean))
            .sum();
        let limit = f64::from(n) * libm::sqrt(squares / f64::from(count));
        self.retain(|candidate| below(candidate.logit) <= limit);
    }
}
