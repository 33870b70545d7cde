//! What a chain does: the numbers of its stages, and their order.

use super::error::SamplerError;
use super::rng::Generator;
use super::stage::Stage;

/// How to choose tokens. The defaults are llama.cpp's; each stage can be switched off.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// Starts the random generator: the same seed gives the same choices. Default 0.
    pub seed: u64,
    /// Which generator draws. Default [`Generator::Xoshiro`].
    pub generator: Generator,
    /// The stages, in their order; one that is missing is off. Default [`Stage::DEFAULT`].
    pub stages: Vec<Stage>,
    /// Logits are divided by it: above 0 and below 1 sharpens, above 1 flattens; 0 always takes the
    /// likeliest token. Default 0.8.
    pub temperature: f32,
    /// The temperature moves by so much up and down, with how undecided the model is; 0 keeps it. Default 0.
    pub dynatemp_range: f32,
    /// The share of the greatest entropy, to this power, says where in the range the temperature is. Default 1.
    pub dynatemp_exponent: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all. Default 40.
    pub top_k: usize,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all. Default 0.95.
    pub top_p: f32,
    /// Keep tokens with at least this share of the likeliest token's probability; 0 keeps all.
    /// Default 0.05.
    pub min_p: f32,
    /// Keep the tokens whose surprise is closest to the expected one, up to this probability
    /// together; 1 keeps all. Default 1.
    pub typical_p: f32,
    /// Keep tokens whose logit is at most so many standard deviations below the best; 0 and less keep all. Default -1.
    pub top_n_sigma: f32,
    /// How often the likeliest tokens are dropped (see `xtc_threshold`), as a probability; 0 is never. Default 0.
    pub xtc_probability: f32,
    /// Of the tokens with at least this probability, only the least likely is kept; above 0.5, none is dropped. Default 0.1.
    pub xtc_threshold: f32,
    /// Top-p, min-p, typical-p and XTC leave at least so many tokens. Default 0.
    pub min_keep: usize,
    /// Divides positive logits of tokens seen lately, and multiplies negative ones; 1 is off.
    /// Default 1.
    pub repeat_penalty: f32,
    /// Subtracted from the logit of a token for each time it was seen lately; 0 is off. Default 0.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that was seen lately; 0 is off. Default 0.
    pub presence_penalty: f32,
    /// How many of the last tokens "lately" means; 0 switches the penalties off. Default 64.
    pub last_n: usize,
    /// Subtracted, times `dry_base` to the power of the length above what is allowed, from the logit of a token that would go on repeating;
    /// 0 is off. Default 0.
    pub dry_multiplier: f32,
    /// See `dry_multiplier`; below 1 is off. Default 1.75.
    pub dry_base: f32,
    /// Repetitions shorter than this are free. Default 2.
    pub dry_allowed_length: usize,
    /// In how many of the last tokens repetitions are looked for; 0 is off. Default 64.
    pub dry_last_n: usize,
    /// Texts at which a repetition begins anew. They need a [vocabulary](crate::Sampler::set_vocabulary). Default line end, `:`, `"`, `*`.
    pub dry_breakers: Vec<String>,
    /// Mirostat: 1 or 2 for its versions, 0 is off. It draws so that the text keeps a surprise; of the other stages, only temperature
    /// and logit bias remain. Default 0.
    pub mirostat: u8,
    /// The surprise that mirostat keeps, in bits. Default 5.
    pub mirostat_tau: f32,
    /// How fast mirostat corrects itself. Default 0.1.
    pub mirostat_eta: f32,
    /// Tokens are drawn that had about this probability; below 0 is off. Default -1.
    pub adaptive_target: f32,
    /// How much of the probabilities drawn so far still counts at the next token. Default 0.9.
    pub adaptive_decay: f32,
    /// Added to the logits of these tokens; minus infinity bans a token. If a token is named twice,
    /// both count. Default none.
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
    /// Always the likeliest token, without any penalty.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Checks each parameter.
    ///
    /// # Errors
    /// The first parameter outside its range, by name.
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
