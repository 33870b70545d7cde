//! Log-probabilities of the model.

use super::candidates::Candidates;

/// Log-probability of a token, before any stage changes the logits, and the most probable tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbabilities {
    /// Log-probability of the token; minus infinity if it is impossible.
    pub token: f32,
    /// Most probable tokens in descending order, each with its log-probability.
    pub top: Vec<(u32, f32)>,
}

impl LogProbabilities {
    /// Computes the log-probabilities of `token` and of the `count` most probable tokens. Returns
    /// `None` if there are no logits above minus infinity, or if the token has no logit.
    ///
    /// ```
    /// use samite_text::LogProbabilities;
    ///
    /// let logits = [0.25f32, 0.5, 0.25].map(f32::ln);
    /// let found = LogProbabilities::new(&logits, 2, 1).unwrap();
    /// assert!((found.token - 0.25f32.ln()).abs() < 1e-6);
    /// assert_eq!(found.top[0].0, 1);
    /// ```
    pub fn new(logits: &[f32], token: u32, count: usize) -> Option<Self> {
        let mut top = Candidates::new();
        if count == 0 || !top.load_top(logits, count) {
            top.load(logits).ok()?;
        }
        // The most probable token is needed even if `count` is 0.
        top.top_k(count.max(1));
        let max = f64::from(top.as_slice().first()?.logit);
        let sum: f64 = logits
            .iter()
            .filter(|logit| !logit.is_nan())
            .map(|logit| libm::exp(f64::from(logit.min(f32::MAX)) - max))
            .sum();
        let all = max + libm::log(sum);
        let of = |logit: f32| (f64::from(logit.min(f32::MAX)) - all) as f32;
        let logit = *logits.get(token as usize)?;
        Some(LogProbabilities {
            token: if logit.is_nan() {
                f32::NEG_INFINITY
            } else {
                of(logit)
            },
            top: top
                .as_slice()
                .iter()
                .take(count)
                .map(|candidate| (candidate.id, of(candidate.logit)))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_for_large_and_small_vocabularies() {
        for count in [3, 5000] {
            let logits: Vec<f32> = (0..count).map(|id| (id % 7) as f32).collect();
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let found = LogProbabilities::new(&logits, 1, 2).unwrap();
            assert!((f64::from(found.token) - (1.0 - sum.ln())).abs() < 1e-5);
            assert_eq!(found.top.len(), 2);
            let best = if count == 3 { 2 } else { 6 };
            assert_eq!(found.top[0].0, best);
            assert!((f64::from(found.top[0].1) - (f64::from(best) - sum.ln())).abs() < 1e-5);
            assert_eq!(LogProbabilities::new(&logits, 1, 0).unwrap().top, []);
        }
    }

    #[test]
    fn nan_logits_have_probability_zero() {
        let logits = [f32::NAN, 1.0, f32::NEG_INFINITY];
        let found = LogProbabilities::new(&logits, 0, 3).unwrap();
        assert_eq!(found.token, f32::NEG_INFINITY);
        assert_eq!(found.top[0], (1, 0.0));
        assert_eq!(LogProbabilities::new(&logits, 3, 1), None);
        assert_eq!(LogProbabilities::new(&[f32::NAN], 0, 1), None);
    }
}
