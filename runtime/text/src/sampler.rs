//! Samplers: they choose the next token.

mod candidates;
mod error;
mod penalties;
mod rng;

pub use candidates::{Candidate, Candidates};
pub use error::SamplerError;
pub use penalties::Penalties;
pub use rng::Rng;

/// How to choose tokens. The defaults are llama.cpp's; each stage can be switched off.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// Starts the random generator: the same seed gives the same choices. Default 0.
    pub seed: u64,
    /// Logits are divided by it: above 0 and below 1 sharpens, above 1 flattens; 0 always takes the
    /// likeliest token. Default 0.8.
    pub temperature: f32,
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
    /// Divides positive logits of tokens seen lately, and multiplies negative ones; 1 is off.
    /// Default 1.
    pub repeat_penalty: f32,
    /// Subtracted from the logit of a token for each time it was seen lately; 0 is off. Default 0.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that was seen lately; 0 is off. Default 0.
    pub presence_penalty: f32,
    /// How many of the last tokens "lately" means; 0 switches the penalties off. Default 64.
    pub last_n: usize,
    /// Added to the logits of these tokens; minus infinity bans a token. If a token is named twice,
    /// both count. Default none.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplerParams {
    fn default() -> Self {
        Self {
            seed: 0,
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            last_n: 64,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplerParams {
    /// Always the likeliest token, without any penalty.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Whether no stage takes away the likeliest token before it is chosen.
    fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.typical_p >= 1.0
    }

    /// The stages behind bias and penalties, and the draw.
    fn draw_from(&self, candidates: &mut Candidates, rng: &mut Rng) -> Result<u32, SamplerError> {
        if self.is_greedy() {
            candidates.temperature(0.0);
        } else {
            candidates.top_k(self.top_k);
            candidates.typical_p(self.typical_p)?;
            candidates.top_p(self.top_p)?;
            candidates.min_p(self.min_p);
            candidates.temperature(self.temperature);
        }
        candidates.draw(rng)
    }

    /// Checks each parameter.
    ///
    /// # Errors
    /// The first parameter outside its range, by name.
    pub fn validate(&self) -> Result<(), SamplerError> {
        /// A range in words, and as a test.
        type Range = (&'static str, fn(f32) -> bool);
        const SHARE: Range = ("between 0 and 1", |value| (0.0..=1.0).contains(&value));
        const FINITE: Range = ("a finite number", f32::is_finite);
        let checks: [(&'static str, f32, Range); 7] = [
            (
                "temperature",
                self.temperature,
                ("0 or a positive finite number", |value| {
                    value >= 0.0 && value.is_finite()
                }),
            ),
            ("top_p", self.top_p, SHARE),
            ("min_p", self.min_p, SHARE),
            ("typical_p", self.typical_p, SHARE),
            (
                "repeat_penalty",
                self.repeat_penalty,
                ("a positive finite number", |value| {
                    value > 0.0 && value.is_finite()
                }),
            ),
            ("frequency_penalty", self.frequency_penalty, FINITE),
            ("presence_penalty", self.presence_penalty, FINITE),
        ];
        for (parameter, value, (expected, holds)) in checks {
            if !holds(value) {
                return Err(SamplerError::Parameter {
                    parameter,
                    value,
                    expected,
                });
            }
        }
        match self
            .logit_bias
            .iter()
            .find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY)
        {
            Some(&(token, value)) => Err(SamplerError::LogitBias { token, value }),
            None => Ok(()),
        }
    }
}

/// Chooses tokens from logits, one after another: llama.cpp's default chain, in its order. Logit
/// bias, penalties, top-k, typical-p, top-p, min-p, temperature, draw.
///
/// Tell it every token of the text by [`accept`](Self::accept), those of the prompt too: penalties
/// go by them.
///
/// ```
/// use samite_text::{Sampler, SamplerParams};
///
/// let mut sampler = Sampler::new(SamplerParams { top_k: 2, seed: 7, ..Default::default() })?;
/// let token = sampler.sample(&[0.1, 3.0, 2.9, -1.0])?;
/// sampler.accept(token);
/// assert!(token == 1 || token == 2);
/// # Ok::<(), samite_text::SamplerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    penalties: Penalties,
    rng: Rng,
    candidates: Candidates,
    suppressed: Vec<u32>,
}

impl Sampler {
    /// A sampler at the beginning of a text.
    ///
    /// # Errors
    /// A parameter outside its range.
    pub fn new(params: SamplerParams) -> Result<Self, SamplerError> {
        params.validate()?;
        let penalties = Penalties::new(
            params.last_n,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        );
        Ok(Self {
            penalties,
            rng: Rng::new(params.seed),
            candidates: Candidates::new(),
            suppressed: Vec::new(),
            params,
        })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// Never chooses these tokens from now on, instead of those of an earlier call: the ones that a
    /// [vocabulary](crate::Tokenizer::suppressed) rules out.
    pub fn suppress(&mut self, tokens: &[u32]) {
        self.suppressed.clear();
        self.suppressed.extend_from_slice(tokens);
    }

    /// Chooses a token; `logits[id]` belongs to token `id`. Does not [`accept`](Self::accept) it.
    ///
    /// # Errors
    /// [`SamplerError::NoCandidate`] if the logits and biases leave nothing,
    /// [`SamplerError::LogitBiasToken`]. The sampler can be used on.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let (params, candidates) = (&self.params, &mut self.candidates);
        // Few tokens of a large vocabulary matter where no logit changes.
        let unchanged = params.logit_bias.is_empty()
            && self.suppressed.is_empty()
            && self.penalties.change_nothing();
        let loaded = unchanged
            && if params.is_greedy() {
                candidates.load_best(logits)
            } else {
                candidates.load_top(logits, params.top_k)
            };
        if !loaded {
            candidates.load(logits)?;
        }
        for &(token, bias) in &params.logit_bias {
            if token as usize >= logits.len() {
                return Err(SamplerError::LogitBiasToken {
                    token,
                    count: logits.len(),
                });
            }
            candidates.change_logit(token, |logit| logit + bias);
        }
        for &token in &self.suppressed {
            candidates.change_logit(token, |_| f32::NEG_INFINITY);
        }
        self.penalties.apply(candidates);
        params.draw_from(candidates, &mut self.rng)
    }

    /// What the last [`sample`](Self::sample) drew from: the tokens left, with their probabilities.
    pub fn candidates(&self) -> &Candidates {
        &self.candidates
    }

    /// Takes note of a token of the text.
    pub fn accept(&mut self, token: u32) {
        self.penalties.accept(token);
    }

    /// Back to the beginning: no token seen, the generator at its seed.
    pub fn reset(&mut self) {
        self.penalties.reset();
        self.rng = Rng::new(self.params.seed);
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(SamplerParams::default().validate(), Ok(()));
        assert_eq!(SamplerParams::greedy().validate(), Ok(()));
    }

    #[test]
    fn errors_name_the_parameter() {
        type Set = fn(&mut SamplerParams, f32);
        let cases: [(&str, Set, &[f32]); 7] = [
            (
                "temperature",
                |p, v| p.temperature = v,
                &[-0.1, f32::NAN, f32::INFINITY],
            ),
            ("top_p", |p, v| p.top_p = v, &[-0.1, 1.1, f32::NAN]),
            ("min_p", |p, v| p.min_p = v, &[-0.1, 1.1, f32::NAN]),
            ("typical_p", |p, v| p.typical_p = v, &[-0.1, 1.1, f32::NAN]),
            (
                "repeat_penalty",
                |p, v| p.repeat_penalty = v,
                &[0.0, -1.0, f32::NAN, f32::INFINITY],
            ),
            (
                "frequency_penalty",
                |p, v| p.frequency_penalty = v,
                &[f32::NAN, f32::NEG_INFINITY],
            ),
            (
                "presence_penalty",
                |p, v| p.presence_penalty = v,
                &[f32::NAN, f32::INFINITY],
            ),
        ];
        for (name, set, values) in cases {
            for &value in values {
                let mut params = SamplerParams::default();
                set(&mut params, value);
                let message = Sampler::new(params).unwrap_err().to_string();
                assert!(
                    message.starts_with(&format!("{name} is {value}, must be ")),
                    "{message}"
                );
            }
        }
        for value in [f32::NAN, f32::INFINITY] {
            let params = SamplerParams {
                logit_bias: vec![(3, value)],
                ..Default::default()
            };
            assert!(matches!(
                Sampler::new(params),
                Err(SamplerError::LogitBias { token: 3, .. })
            ));
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, f32::NAN]), Ok(1));
        assert_eq!(sampler.candidates().as_slice().len(), 1);
    }

    #[test]
    fn the_likeliest_of_what_is_typical_is_not_always_the_likeliest() {
        let choose = |typical_p| {
            let params = SamplerParams {
                typical_p,
                ..SamplerParams::greedy()
            };
            let logits = [0.2f32, 0.4, 0.2, 0.2].map(f32::ln);
            Sampler::new(params).unwrap().sample(&logits).unwrap()
        };
        // The surprise expected is 1.33: that of the likeliest token, 0.92, is further away than those of the others, 1.61.
        assert_eq!(choose(1.0), 1);
        assert_ne!(choose(0.1), 1);
    }

    #[test]
    fn what_is_suppressed_is_never_chosen() {
        let params = SamplerParams {
            logit_bias: vec![(2, 9.0)],
            ..SamplerParams::greedy()
        };
        let mut sampler = Sampler::new(params).unwrap();
        sampler.suppress(&[2, 1, 70]);
        assert_eq!(sampler.sample(&[0.0, 1.0, 2.0]).unwrap(), 0);
        sampler.suppress(&[0]);
        assert_eq!(sampler.sample(&[9.0, 1.0, -9.0]).unwrap(), 1);
        sampler.suppress(&[]);
        assert_eq!(sampler.sample(&[0.0, 1.0, 2.0]).unwrap(), 2);
    }

    #[test]
    fn biases_ban_and_favour() {
        let logit_bias = vec![(1, f32::NEG_INFINITY), (0, 5.0)];
        let mut sampler = Sampler::new(SamplerParams {
            logit_bias,
            ..SamplerParams::greedy()
        })
        .unwrap();
        assert_eq!(sampler.sample(&[1.0, 9.0, 3.0]), Ok(0));
        assert_eq!(
            sampler.sample(&[1.0]),
            Err(SamplerError::LogitBiasToken { token: 1, count: 1 })
        );
        assert_eq!(
            sampler.sample(&[f32::NAN, 9.0]),
            Err(SamplerError::NoCandidate { count: 2 })
        );
    }

    #[test]
    fn unusable_logits_are_errors() {
        for params in [SamplerParams::default(), SamplerParams::greedy()] {
            let mut sampler = Sampler::new(params).unwrap();
            for logits in [[].as_slice(), &[f32::NAN; 3], &[f32::NEG_INFINITY; 3]] {
                assert_eq!(
                    sampler.sample(logits),
                    Err(SamplerError::NoCandidate {
                        count: logits.len()
                    })
                );
            }
            assert_eq!(sampler.sample(&[f32::NAN, 1.0, f32::NEG_INFINITY]), Ok(1));
            assert_eq!(sampler.sample(&[0.0, f32::INFINITY, 5.0]), Ok(1));
        }
    }

    #[test]
    fn penalties_reach_the_choice() {
        let mut sampler = Sampler::new(SamplerParams {
            presence_penalty: 1.0,
            ..SamplerParams::greedy()
        })
        .unwrap();
        assert_eq!(sampler.sample(&[2.0, 1.5]), Ok(0));
        sampler.accept(0);
        assert_eq!(sampler.sample(&[2.0, 1.5]), Ok(1));
        sampler.reset();
        assert_eq!(sampler.sample(&[2.0, 1.5]), Ok(0));
    }

    #[test]
    fn the_seed_decides() {
        let logits: Vec<f32> = (0..100).map(|id| (id % 7) as f32 * 0.3).collect();
        let draws = |seed| {
            let mut sampler = Sampler::new(SamplerParams {
                seed,
                ..Default::default()
            })
            .unwrap();
            let first: Vec<u32> = (0..20).map(|_| sampler.sample(&logits).unwrap()).collect();
            sampler.reset();
            let second: Vec<u32> = (0..20).map(|_| sampler.sample(&logits).unwrap()).collect();
            assert_eq!(first, second);
            first
        };
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn a_large_vocabulary_is_fast() {
        let logits: Vec<f32> = (0..150_000u32)
            .map(|id| (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6)
            .collect();
        let started = std::time::Instant::now();
        for top_k in [40, 0] {
            let mut sampler = Sampler::new(SamplerParams {
                top_k,
                ..Default::default()
            })
            .unwrap();
            for _ in 0..20 {
                sampler.sample(&logits).unwrap();
            }
        }
        assert!(
            started.elapsed().as_secs_f32() < 5.0,
            "{:?}",
            started.elapsed()
        );
    }

    proptest! {
        #[test]
        fn any_logits_give_a_token_or_an_error(
            logits in prop::collection::vec(prop_oneof![any::<f32>(), -5.0..5.0f32], 0..50),
            temperature in prop_oneof![Just(0.0f32), 1e-30..3.0f32],
            (top_k, top_p, min_p, typical_p) in (0..60usize, 0.0..=1.0f32, 0.0..=1.0f32, 0.0..=1.0f32),
            (repeat_penalty, frequency_penalty) in (1e-30..1e30f32, -1e38..1e38f32),
            seed: u64,
        ) {
            let params = SamplerParams {
                seed, temperature, top_k, top_p, min_p, typical_p, repeat_penalty, frequency_penalty, ..Default::default()
            };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.accept(0);
            sampler.accept(1_000_000);
            match sampler.sample(&logits) {
                Ok(token) => {
                    let logit = logits[token as usize];
                    prop_assert!(!logit.is_nan() && logit != f32::NEG_INFINITY);
                    let sum: f32 = sampler.candidates().as_slice().iter().map(|candidate| candidate.probability).sum();
                    prop_assert!((sum - 1.0).abs() < 1e-4, "probabilities sum to {}", sum);
                }
                Err(_) => prop_assert!(logits.iter().skip(1).all(|logit| logit.is_nan() || *logit == f32::NEG_INFINITY)),
            }
        }

        /// As if each stage ran over the whole vocabulary.
        #[test]
        fn what_cannot_be_chosen_need_not_be_loaded(
            logits in prop_oneof![
                prop::collection::vec(logit(), 0..100),
                prop::collection::vec(logit(), 1000..5000),
                prop::collection::vec(prop_oneof![9 => Just(f32::NEG_INFINITY), 1 => logit()], 1000..5000),
            ],
            limit in prop_oneof![Just(f32::INFINITY), -5.0..5.0f32, Just(0.0f32)],
            temperature in prop_oneof![Just(0.0f32), 0.1..3.0f32],
            top_k in prop_oneof![0..3usize, 3..200usize],
            typical_p in prop_oneof![Just(1.0f32), 0.0..=1.0f32],
            (top_p, min_p) in (0.0..=1.0f32, 0.0..=1.0f32),
            seed: u64,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(|x| if x > limit { limit } else { x }).collect();
            check(&logits, SamplerParams { seed, temperature, top_k, top_p, min_p, typical_p, ..Default::default() });
        }
    }

    /// Any number and none, many of them equal.
    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            any::<u32>().prop_map(f32::from_bits),
            -5.0..5.0f32,
            (-5..5i32).prop_map(|x| x as f32),
            Just(-0.0),
            Just(f32::INFINITY),
            Just(f32::NEG_INFINITY),
            Just(f32::NAN),
        ]
    }

    /// What [`Sampler::sample`] does to all candidates, where there are no biases and penalties.
    fn from_all(
        logits: &[f32],
        params: &SamplerParams,
        all: &mut Candidates,
        rng: &mut Rng,
    ) -> Result<u32, SamplerError> {
        all.load(logits)?;
        params.draw_from(all, rng)
    }

    /// A sampler draws the same twice, from the same candidates, as from all.
    fn check(logits: &[f32], params: SamplerParams) {
        let (mut all, mut rng) = (Candidates::new(), Rng::new(params.seed));
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let bits = |candidates: &Candidates| -> Vec<_> {
            let bits = |c: &Candidate| (c.id, c.logit.to_bits(), c.probability.to_bits());
            candidates.as_slice().iter().map(bits).collect()
        };
        for _ in 0..2 {
            let expected = from_all(logits, &params, &mut all, &mut rng);
            assert_eq!(sampler.sample(logits), expected, "{params:?}");
            assert_eq!(bits(&sampler.candidates), bits(&all), "{params:?}");
            assert_eq!(sampler.rng, rng, "{params:?}");
        }
    }

    #[test]
    fn large_vocabularies_in_order_and_of_equals() {
        let rising: Vec<f32> = (0..5000).map(|id| id as f32 * 0.01).collect();
        let falling: Vec<f32> = rising.iter().map(|x| -x).collect();
        let zeros: Vec<f32> = (0..5000)
            .map(|id| if id % 3 == 1 { 0.0 } else { -0.0 })
            .collect();
        let mut banned = vec![f32::NEG_INFINITY; 5000];
        let equal = vec![1.0; 5000];
        let none = banned.clone();
        banned[4321] = -7.0;
        let huge: Vec<f32> = (0..5000)
            .map(|id| if id % 2 == 0 { f32::MAX } else { f32::INFINITY })
            .collect();
        for logits in [rising, falling, zeros, banned, equal, none, huge] {
            for top_k in [1, 2, 40, 64, 65, 156, 157, 4999, 5000, 0] {
                let params = SamplerParams {
                    top_k,
                    ..Default::default()
                };
                check(&logits, params);
            }
            check(&logits, SamplerParams::greedy());
        }
    }
}
