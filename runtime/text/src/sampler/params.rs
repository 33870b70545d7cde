//! The parameters of a chain: those of its stages, and their order.

use super::error::SamplerError;
use super::rng::Generator;
use super::stage::Stage;

/// Sampling parameters. The defaults are llama.cpp's; each stage can be disabled.
///
/// ```
/// use samite_text::{Sampler, SamplerParams};
///
/// let params = SamplerParams { temperature: 0.7, top_k: 2, seed: 1, ..SamplerParams::default() };
/// let token = Sampler::new(params)?.sample(&[0.5, 1.0, -2.0, 1.5])?;
/// assert!([1, 3].contains(&token), "one of the two most probable tokens");
/// # Ok::<_, samite_text::SamplerError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// Seed of the random generator: the same seed results in the same choices. Default 0.
    pub seed: u64,
    /// Random generator. Default [`Generator::Xoshiro`].
    pub generator: Generator,
    /// Stages in order; a missing one is disabled. Default [`Stage::DEFAULT`].
    pub stages: Vec<Stage>,
    /// Divisor of the logits: between 0 and 1 sharpens the distribution, above 1 flattens it; 0
    /// always takes the most probable token. Default 0.8.
    pub temperature: f32,
    /// Maximum deviation of the temperature, which depends on the entropy of the distribution; 0
    /// disables it. Default 0.
    pub dynatemp_range: f32,
    /// Exponent of the entropy, relative to the maximum entropy, which determines the temperature
    /// within the range. Default 1.
    pub dynatemp_exponent: f32,
    /// Number of the most probable tokens to keep; 0 keeps all. Default 40.
    pub top_k: usize,
    /// Total probability of the most probable tokens to keep; 1 keeps all. Default 0.95.
    pub top_p: f32,
    /// Minimum fraction of the highest probability; 0 keeps all tokens. Default 0.05.
    pub min_p: f32,
    /// Total probability of the tokens to keep whose surprise is closest to the expected one; 1
    /// keeps all. Default 1.
    pub typical_p: f32,
    /// Maximum distance of a logit below the best, in standard deviations; 0 or less keeps all
    /// tokens. Default -1.
    pub top_n_sigma: f32,
    /// Probability with which the most probable tokens are removed (see `xtc_threshold`); 0 is
    /// never. Default 0.
    pub xtc_probability: f32,
    /// Probability threshold of XTC: of the tokens that reach it, only the least probable is kept;
    /// above 0.5, none is removed. Default 0.1.
    pub xtc_threshold: f32,
    /// Minimum number of tokens that top-p, min-p, typical-p and XTC keep. Default 0.
    pub min_keep: usize,
    /// Repeat penalty: divides positive logits of recent tokens, and multiplies negative ones; 1
    /// disables it. Default 1.
    pub repeat_penalty: f32,
    /// Penalty that is subtracted from the logit of a token for each recent occurrence; 0 disables
    /// it. Default 0.
    pub frequency_penalty: f32,
    /// Penalty that is subtracted from the logit of a recent token; 0 disables it. Default 0.
    pub presence_penalty: f32,
    /// Number of recent tokens; 0 disables the penalties. Default 64.
    pub last_n: usize,
    /// Factor of the DRY penalty: this times `dry_base` to the power of the excess length is
    /// subtracted from the logit of a token that would continue a repetition; 0 disables it.
    /// Default 0.
    pub dry_multiplier: f32,
    /// Base of the DRY penalty, see `dry_multiplier`; below 1 disables it. Default 1.75.
    pub dry_base: f32,
    /// Minimum length of repetitions with a DRY penalty. Default 2.
    pub dry_allowed_length: usize,
    /// Number of recent tokens in which DRY searches for repetitions; 0 disables it. Default 64.
    pub dry_last_n: usize,
    /// Texts that interrupt a repetition. They need a [vocabulary](crate::Sampler::set_vocabulary).
    /// Default line end, `:`, `"`, `*`.
    pub dry_breakers: Vec<String>,
    /// Version of mirostat (1 or 2); 0 disables it. It draws so that the surprise of the text stays
    /// close to a target; of the other stages, only temperature and logit biases remain. Default 0.
    pub mirostat: u8,
    /// Target surprise of mirostat, in bits. Default 5.
    pub mirostat_tau: f32,
    /// Learning rate of mirostat. Default 0.1.
    pub mirostat_eta: f32,
    /// Target probability of adaptive-p; below 0 disables it. Default -1.
    pub adaptive_target: f32,
    /// Decay of earlier probabilities in adaptive-p, per token. Default 0.9.
    pub adaptive_decay: f32,
    /// Biases that are added to the logits of tokens; minus infinity bans a token. If a token
    /// occurs twice, both biases apply. Default none.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplerParams {
    fn default() -> Self {
        Self {
            seed: 0,
            generator: Generator::default(),
            stages: Stage::DEFAULT.to_vec(),
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            min_keep: 0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            last_n: 64,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_last_n: 64,
            dry_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            logit_bias: Vec::new(),
        }
    }
}

/// A range in words, and as a test.
type Range = (&'static str, fn(f32) -> bool);
const SHARE: Range = ("between 0 and 1", |value| (0.0..=1.0).contains(&value));
const FINITE: Range = ("a finite number", f32::is_finite);
const POSITIVE: Range = ("a positive finite number", |value| {
    value > 0.0 && value.is_finite()
});
const NOT_NEGATIVE: Range = ("0 or a positive finite number", |value| {
    value >= 0.0 && value.is_finite()
});

impl SamplerParams {
    /// Returns parameters that always take the most probable token, without penalties.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Checks each parameter.
    ///
    /// # Errors
    /// Returns an error that names the first parameter outside its range.
    pub fn validate(&self) -> Result<(), SamplerError> {
        let checks: [(&'static str, f32, Range); 18] = [
            ("temperature", self.temperature, NOT_NEGATIVE),
            ("dynatemp_range", self.dynatemp_range, NOT_NEGATIVE),
            ("dynatemp_exponent", self.dynatemp_exponent, NOT_NEGATIVE),
            ("top_p", self.top_p, SHARE),
            ("min_p", self.min_p, SHARE),
            ("typical_p", self.typical_p, SHARE),
            ("top_n_sigma", self.top_n_sigma, FINITE),
            ("xtc_probability", self.xtc_probability, SHARE),
            ("xtc_threshold", self.xtc_threshold, SHARE),
            ("repeat_penalty", self.repeat_penalty, POSITIVE),
            ("frequency_penalty", self.frequency_penalty, FINITE),
            ("presence_penalty", self.presence_penalty, FINITE),
            ("dry_multiplier", self.dry_multiplier, NOT_NEGATIVE),
            ("dry_base", self.dry_base, NOT_NEGATIVE),
            (
                "mirostat",
                f32::from(self.mirostat),
                ("0, 1 or 2", |value| value <= 2.0),
            ),
            ("mirostat_tau", self.mirostat_tau, NOT_NEGATIVE),
            ("mirostat_eta", self.mirostat_eta, NOT_NEGATIVE),
            (
                "adaptive_target",
                self.adaptive_target,
                ("at most 1, or negative for none", |value| value <= 1.0),
            ),
        ];
        let decay: (&'static str, f32, Range) = (
            "adaptive_decay",
            self.adaptive_decay,
            ("between 0 and 0.99", |value| (0.0..=0.99).contains(&value)),
        );
        for (parameter, value, (expected, holds)) in checks.into_iter().chain([decay]) {
            if !holds(value) {
                return Err(SamplerError::Parameter {
                    parameter,
                    value,
                    expected,
                });
            }
        }
        let wrong_bias = |&&(_, bias): &&(u32, f32)| bias.is_nan() || bias == f32::INFINITY;
        match self.logit_bias.iter().find(wrong_bias) {
            Some(&(token, value)) => Err(SamplerError::LogitBias { token, value }),
            None => Ok(()),
        }
    }
}
