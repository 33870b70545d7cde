//! Kullback-Leibler divergence of a model from a base model, on the base model's text.

use super::{Observer, Perplexity, Scored, measure};
use crate::context::Context;
use crate::error::{Error, Result, try_reserve};
use crate::log_probs::{LogProbsReader, LogProbsRow, MAX_RANGE};
use std::io::Read;

/// A mean with its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Mean of the samples.
    pub value: f64,
    /// Standard error of the mean; 0 for a single sample.
    pub error: f64,
}

/// Mean and variance of samples, by Welford's method.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: f64,
    mean: f64,
    /// Sum of squared differences from the mean.
    squares: f64,
}

impl Moments {
    fn add(&mut self, sample: f64) {
        self.count += 1.0;
        let before = sample - self.mean;
        self.mean += before / self.count;
        self.squares += before * (sample - self.mean);
    }

    fn estimate(&self) -> Estimate {
        let pairs = self.count * (self.count - 1.0);
        let error = if pairs > 0.0 {
            (self.squares / pairs).sqrt()
        } else {
            0.0
        };
        Estimate {
            value: self.mean,
            error,
        }
    }
}

/// Samples with their mean and percentiles.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    /// Mean of the samples.
    pub mean: Estimate,
    /// Samples in ascending order.
    samples: Vec<f32>,
}

impl Distribution {
    fn new(mean: Estimate, mut samples: Vec<f32>) -> Self {
        samples.sort_unstable_by(f32::total_cmp);
        Distribution { mean, samples }
    }

    /// Returns the value that `percent` of the samples do not exceed, interpolated between samples.
    ///
    /// 0 is the minimum, 50 the median, and 100 the maximum.
    pub fn percentile(&self, percent: f64) -> f64 {
        let last = self.samples.len().saturating_sub(1);
        let at = (percent / 100.0).clamp(0.0, 1.0) * last as f64;
        let below = at.floor() as usize;
        let [low, high] = [below, (below + 1).min(last)]
            .map(|index| f64::from(self.samples.get(index).copied().unwrap_or_default()));
        low + (at - at.floor()) * (high - low)
    }
}

/// Difference between the predictions of a model and those of a base model.
///
/// "The model" is the one under test, and Δp is the probability that it gives to the token which
/// follows in the text, minus the probability that the base model gives to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KlDivergence {
    /// Perplexity of the model.
    pub perplexity: Perplexity,
    /// Perplexity of the base model; a lower bound if tokens are clipped.
    pub base_perplexity: Estimate,
    /// Number of scored tokens that the base model finds less likely than its file can express.
    pub clipped_tokens: usize,
    /// Logarithm of the model's perplexity divided by the base model's.
    pub log_ratio: Estimate,
    /// Kullback-Leibler divergence at each scored token, in nats.
    pub divergence: Distribution,
    /// Mean of Δp.
    pub delta_p: Estimate,
    /// Root mean square of Δp.
    pub delta_p_rms: Estimate,
    /// Smallest Δp.
    pub min_delta_p: f64,
    /// Largest Δp.
    pub max_delta_p: f64,
    /// Fraction of scored tokens for which both models find the same token most likely.
    pub same_top: Estimate,
}

/// Comparison of two predictions of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RowComparison {
    /// Kullback-Leibler divergence, in nats.
    divergence: f64,
    /// Sum of the base model's probabilities that the divergence covers.
    total: f64,
    /// Negative log-likelihood by the base model, in nats.
    base_nats: f64,
    /// True if both models find the same token most likely.
    is_same_top: bool,
    /// True if the base model may find the token less likely than its row says.
    is_clipped: bool,
}

impl RowComparison {
    /// Compares logits with a row of the base model.
    ///
    /// As in llama.cpp, the divergence ignores tokens below a probability of `exp(-16)`, which a
    /// row does not resolve. Rounding can give several tokens the highest code: each of them counts
    /// as the base model's most likely one.
    fn new(scored: &Scored<'_>, base: &LogProbsRow<'_>) -> Self {
        let smallest = -f64::from(MAX_RANGE);
        let offset = f64::from(scored.max) + scored.log_sum_exp;
        let (mut divergence, mut total) = (0.0, 0.0);
        for (&code, &logit) in base.codes.iter().zip(scored.logits) {
            let log_base = base.log_prob(code);
            if log_base > smallest {
                let p = log_base.exp();
                total += p;
                divergence += p * (log_base - (f64::from(logit) - offset));
            }
        }
        // A row with clipped tokens has the largest range, apart from the rounding of its scale.
        let is_full = base.log_prob(u16::MAX) - base.log_prob(0) > f64::from(MAX_RANGE) - 1e-3;
        let code = |token: usize| base.codes.get(token).copied().unwrap_or_default();
        let top = scored.logits.iter().position(|&logit| logit == scored.max);
        let top_code = base.codes.iter().copied().max();
        RowComparison {
            divergence,
            total,
            base_nats: -base.log_prob(code(scored.next as usize)),
            is_same_top: top.map(code) == top_code,
            is_clipped: is_full && code(scored.next as usize) == 0,
        }
    }

    /// Returns whether the base model's row is a distribution, within its precision.
    fn is_normalized(&self, n_vocab: usize) -> bool {
        // Half a code is 0.012 % of a probability, and each ignored token is below exp(-16).
        let tolerance = 1e-3 + n_vocab as f64 * (-f64::from(MAX_RANGE)).exp();
        (self.total - 1.0).abs() <= tolerance
    }
}

/// Sums over all scored tokens.
#[derive(Debug, Default)]
struct DivergenceSums {
    base_nats: Moments,
    clipped_tokens: usize,
    /// Differences of negative log-likelihoods.
    log_ratio: Moments,
    divergence: Moments,
    divergences: Vec<f32>,
    delta_p: Moments,
    delta_p_squared: Moments,
    /// Minimum and maximum.
    delta_p_range: Option<[f64; 2]>,
    same_top: Moments,
}

impl DivergenceSums {
    fn add(&mut self, nats: f64, comparison: &RowComparison) {
        self.divergences.push(comparison.divergence as f32);
        self.divergence.add(comparison.divergence);
        self.base_nats.add(comparison.base_nats);
        self.clipped_tokens += usize::from(comparison.is_clipped);
        self.log_ratio.add(nats - comparison.base_nats);
        let delta = (-nats).exp() - (-comparison.base_nats).exp();
        self.delta_p.add(delta);
        self.delta_p_squared.add(delta * delta);
        let [min, max] = self.delta_p_range.unwrap_or([delta; 2]);
        self.delta_p_range = Some([min.min(delta), max.max(delta)]);
        self.same_top
            .add(f64::from(u8::from(comparison.is_same_top)));
    }

    fn finish(self, perplexity: Perplexity) -> KlDivergence {
        let nats = self.base_nats.estimate();
        let base = nats.value.exp();
        let squared = self.delta_p_squared.estimate();
        let rms = squared.value.sqrt();
        let [min_delta_p, max_delta_p] = self.delta_p_range.unwrap_or_default();
        KlDivergence {
            perplexity,
            base_perplexity: Estimate {
                value: base,
                error: base * nats.error,
            },
            clipped_tokens: self.clipped_tokens,
            log_ratio: self.log_ratio.estimate(),
            divergence: Distribution::new(self.divergence.estimate(), self.divergences),
            delta_p: self.delta_p.estimate(),
            delta_p_rms: Estimate {
                value: rms,
                error: if rms > 0.0 {
                    squared.error / (2.0 * rms)
                } else {
                    0.0
                },
            },
            min_delta_p,
            max_delta_p,
            same_top: self.same_top.estimate(),
        }
    }
}

/// Compares each scored token with a file, and reports chunks.
struct Comparer<R, F> {
    base: LogProbsReader<R>,
    sums: DivergenceSums,
    on_chunk: F,
}

impl<R: Read, F: FnMut(&Perplexity, Estimate)> Observer for Comparer<R, F> {
    fn on_scored(&mut self, scored: &Scored<'_>) -> Result<()> {
        let comparison = RowComparison::new(scored, &self.base.next_row()?);
        if !comparison.is_normalized(scored.logits.len()) {
            return Err(self.base.not_normalized(comparison.total));
        }
        if !comparison.divergence.is_finite() {
            return Err(Error::model(format!(
                "the divergence at position {} of a chunk is {}: the model gives the probability \
                 0 to a token that the base model expects; is it damaged?",
                scored.position, comparison.divergence
            )));
        }
        self.sums.add(scored.nats, &comparison);
        Ok(())
    }

    fn on_chunk(&mut self, so_far: &Perplexity) -> Result<()> {
        (self.on_chunk)(so_far, self.sums.divergence.estimate());
        Ok(())
    }
}

/// Compares a model's predictions with those of a base model, on the first `max_chunks` chunks of
/// the base model's text.
///
/// Decodes the tokens like [`perplexity`](super::perplexity()). Calls `on_chunk` with the
/// perplexity and the mean divergence so far.
///
/// # Errors
/// Returns the errors of [`perplexity`](super::perplexity()) and [`LogProbsReader::next_row`].
/// Returns [`Error::Gguf`] if the vocabularies differ or a row is not a distribution.
pub fn kl_divergence<R: Read>(
    context: &mut Context,
    mut base: LogProbsReader<R>,
    max_chunks: Option<usize>,
    on_chunk: impl FnMut(&Perplexity, Estimate),
) -> Result<KlDivergence> {
    base.check_vocab(context.model().spec().n_vocab)?;
    let chunk = base.n_ctx();
    let mut tokens = base.take_tokens();
    tokens.truncate(max_chunks.unwrap_or(usize::MAX).saturating_mul(chunk));
    let mut sums = DivergenceSums::default();
    let rows = tokens.len() / chunk * (chunk - 1 - chunk / 2);
    try_reserve(&mut sums.divergences, rows, "divergences of tokens")?;
    let mut comparer = Comparer {
        base,
        sums,
        on_chunk,
    };
    let perplexity = measure(context, &tokens, chunk, false, &mut comparer)?;
    Ok(comparer.sums.finish(perplexity))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::LN_2;

    #[track_caller]
    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }

    /// Probabilities 1/2, 1/4 and 1/4.
    const BASE: LogProbsRow<'_> = LogProbsRow {
        scale: std::f32::consts::LN_2 / 65535.0,
        minimum: -2.0 * std::f32::consts::LN_2,
        codes: &[65535, 0, 0],
    };

    /// Logits of the probabilities 1/4, 1/4 and 1/2.
    fn logits() -> [f32; 3] {
        [1.0, 1.0, 1.0 + std::f32::consts::LN_2]
    }

    #[test]
    fn divergence_of_two_known_distributions() {
        let logits = logits();
        let of_next = |next| RowComparison::new(&Scored::new(&logits, 0, next), &BASE);
        let first = of_next(0);
        // 1/2 ln(2) + 1/4 ln(1) + 1/4 ln(1/2)
        close(first.divergence, LN_2 / 4.0);
        close(first.total, 1.0);
        close(first.base_nats, LN_2);
        assert!(!first.is_same_top && first.is_normalized(3));
        close(of_next(2).base_nats, 2.0 * LN_2);
    }

    #[test]
    fn statistics_of_two_known_tokens() {
        let logits = logits();
        let mut sums = DivergenceSums::default();
        for next in [0, 2] {
            let scored = Scored::new(&logits, 0, next);
            sums.add(scored.nats, &RowComparison::new(&scored, &BASE));
        }
        let result = sums.finish(Perplexity::default());
        // The base model assigns 1/2 and 1/4 to the tokens, and the model 1/4 and 1/2.
        close(result.base_perplexity.value, 8f64.sqrt());
        close(result.base_perplexity.error, 8f64.sqrt() * LN_2 / 2.0);
        close(result.log_ratio.value, 0.0);
        close(result.log_ratio.error, LN_2);
        close(result.divergence.mean.value, LN_2 / 4.0);
        close(result.divergence.mean.error, 0.0);
        close(result.delta_p.value, 0.0);
        close(result.delta_p.error, 0.25);
        close(result.delta_p_rms.value, 0.25);
        close(result.delta_p_rms.error, 0.0);
        close(result.min_delta_p, -0.25);
        close(result.max_delta_p, 0.25);
        close(result.same_top.value, 0.0);
    }

    #[test]
    fn any_of_several_equal_codes_counts_as_the_top() {
        let equal = LogProbsRow {
            codes: &[0, 65535, 65535],
            minimum: -(5f32.ln()),
            ..BASE
        };
        for (logits, expected) in [
            ([0.0, 1.0, 0.5], true),
            ([0.0, 0.5, 1.0], true),
            ([1.0, 0.5, 0.0], false),
        ] {
            let comparison = RowComparison::new(&Scored::new(&logits, 0, 0), &equal);
            assert_eq!(comparison.is_same_top, expected, "{logits:?}");
            assert!(comparison.is_normalized(3));
        }
    }

    #[test]
    fn tokens_below_the_range_of_a_file_are_counted() {
        let clipped = LogProbsRow {
            scale: MAX_RANGE / 65535.0,
            minimum: -MAX_RANGE,
            codes: &[65535, 0, 1],
        };
        let logits = [0.0, -30.0, -16.0];
        let of_next =
            |next, base| RowComparison::new(&Scored::new(&logits, 0, next), base).is_clipped;
        assert_eq!(
            [0, 1, 2].map(|next| of_next(next, &clipped)),
            [false, true, false]
        );
        assert_eq!([0, 1, 2].map(|next| of_next(next, &BASE)), [false; 3]);
    }

    #[test]
    fn unnormalized_rows_are_detected() {
        let logits = logits();
        for (minimum, is_normalized) in
            [(-1.386, true), (-1.4, false), (-1e30, false), (1e30, false)]
        {
            let base = LogProbsRow { minimum, ..BASE };
            let comparison = RowComparison::new(&Scored::new(&logits, 0, 0), &base);
            assert_eq!(comparison.is_normalized(3), is_normalized, "{minimum}");
        }
    }

    #[test]
    fn moments_are_mean_and_standard_error() {
        let mut moments = Moments::default();
        assert_eq!(moments.estimate(), Estimate::default());
        moments.add(1e6 + 1.0);
        assert_eq!(moments.estimate().error, 0.0);
        for sample in [2.0, 3.0, 4.0] {
            moments.add(1e6 + sample);
        }
        // The variance of 1, 2, 3 and 4 is 5/3, divided by 4.
        close(moments.estimate().value, 1e6 + 2.5);
        close(moments.estimate().error, (5f64 / 12.0).sqrt());
    }

    #[test]
    fn percentiles_are_interpolated() {
        let samples = vec![4.0, 1.0, 3.0, 2.0];
        let distribution = Distribution::new(Estimate::default(), samples);
        for (percent, expected) in [
            (0.0, 1.0),
            (10.0, 1.3),
            (50.0, 2.5),
            (99.0, 3.97),
            (100.0, 4.0),
            (1000.0, 4.0),
        ] {
            close(distribution.percentile(percent), expected);
        }
        assert_eq!(Distribution::default().percentile(50.0), 0.0);
    }
}
