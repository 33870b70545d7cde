//! Samplers: they choose the next token.

mod adaptive;
mod candidates;
mod chain;
mod constraint;
mod dry;
mod error;
mod infill;
mod log_probabilities;
mod mirostat;
mod params;
mod penalties;
mod rng;
mod sigma;
mod stage;
mod temperature;
mod xtc;

pub use adaptive::AdaptiveP;
pub use candidates::{Candidate, Candidates};
pub use constraint::{Constraint, ConstraintError};
pub use dry::{Breakers, Dry, DryParams};
pub use error::SamplerError;
pub use log_probabilities::LogProbabilities;
pub use mirostat::Mirostat;
pub use params::SamplerParams;
pub use penalties::Penalties;
pub use rng::{Generator, Rng};
pub use stage::Stage;

use crate::tokenizer::Tokenizer;
use chain::{Chain, Need};
use std::sync::Arc;

/// Chooses tokens from logits, one after another, by a chain of [stages](Stage): llama.cpp's, and in its order unless
/// [`SamplerParams::stages`] says another one. Logit bias comes first, the draw last.
///
/// Tell it every token of the text by [`accept`](Self::accept), those of the prompt by [`accept_prompt`](Self::accept_prompt): penalties
/// go by them.
///
/// ```
/// use samite_text::{Sampler, SamplerParams};
///
/// let mut sampler = Sampler::new(SamplerParams { top_k: 2, seed: 7, ..Default::default() })?;
/// let token = sampler.sample(&[0.1, 3.0, 2.9, -1.0])?;
/// sampler.accept(token)?;
/// assert!(token == 1 || token == 2);
/// # Ok::<(), samite_text::SamplerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    chain: Chain,
    /// That of the generator.
    seed: u64,
    rng: Rng,
    candidates: Candidates,
    suppressed: Vec<u32>,
    vocabulary: Option<Arc<Tokenizer>>,
    constraint: Option<Box<dyn Constraint>>,
    /// The tokens whose logits change; kept for its memory, as the next one.
    changed: Vec<u32>,
    masked: Vec<f32>,
    /// Whether the constraint refused the last choice.
    was_refused: bool,
    /// True if the constraint refused a choice from top-k logits. The next
    /// [`sample`](Self::sample) then chooses among the allowed tokens only.
    is_choice_due: bool,
}

/// What a [`Sampler`] knows beyond the text.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerState {
    /// The seed.
    pub seed: u64,
    /// How many random numbers were drawn since.
    pub drawn: u64,
    /// State of mirostat (one number) or adaptive-p (two), then the count of numbers drawn by each
    /// XTC stage with its own generator.
    pub draw: Vec<f64>,
}

impl Sampler {
    /// A sampler at the beginning of a text.
    ///
    /// # Errors
    /// A parameter outside its range.
    pub fn new(params: SamplerParams) -> Result<Self, SamplerError> {
        params.validate()?;
        Ok(Self {
            chain: Chain::new(&params),
            seed: params.seed,
            rng: Rng::of(params.generator, params.seed),
            candidates: Candidates::new(),
            suppressed: Vec::new(),
            vocabulary: None,
            constraint: None,
            changed: Vec::new(),
            masked: Vec::new(),
            was_refused: false,
            is_choice_due: false,
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

    /// Takes note of which texts the tokens stand for. What the vocabulary rules out is [suppressed](Self::suppress); stages that look at texts need it:
    /// infill, and the breakers of DRY.
    pub fn set_vocabulary(&mut self, vocabulary: &Arc<Tokenizer>) {
        self.suppress(vocabulary.suppressed());
        let is_same = |old: &Arc<Tokenizer>| Arc::ptr_eq(old, vocabulary);
        if self.vocabulary.as_ref().is_some_and(is_same) {
            return;
        }
        if self.chain.needs_breakers() {
            let breakers = Breakers::new(&self.params.dry_breakers, vocabulary);
            self.chain.set_breakers(&breakers);
        }
        self.vocabulary = Some(Arc::clone(vocabulary));
    }

    /// What the text keeps to from now on, from its beginning; `None` for nothing.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.constraint = constraint;
    }

    /// What the text keeps to.
    pub fn constraint(&self) -> Option<&dyn Constraint> {
        self.constraint.as_deref()
    }

    /// Whether the text must end: nothing can follow by the constraint.
    pub fn is_finished(&self) -> bool {
        self.constraint().is_some_and(Constraint::is_finished)
    }

    /// Chooses a token; `logits[id]` belongs to token `id`. Does not [`accept`](Self::accept) it.
    ///
    /// With a [constraint](Self::set_constraint), a choice that it refuses is made anew among the tokens that it allows.
    ///
    /// # Errors
    /// [`SamplerError::NoCandidate`] if the logits and biases leave nothing,
    /// [`SamplerError::NothingAllowed`] if the constraint does, [`SamplerError::LogitBiasToken`],
    /// [`SamplerError::NeedsVocabulary`], [`SamplerError::Constraint`]. The sampler can be used on.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        if !std::mem::take(&mut self.is_choice_due) {
            let token = self.choose(logits)?;
            if self.is_allowed(token)? {
                return Ok(token);
            }
        }
        let mask = match &mut self.constraint {
            Some(constraint) => constraint.mask()?,
            // It was taken away after it refused a choice.
            None => return self.choose(logits),
        };
        let mut masked = std::mem::take(&mut self.masked);
        mask_logits(logits, mask, &mut masked);
        let token = self.choose(&masked);
        self.masked = masked;
        token.map_err(|error| match error {
            SamplerError::NoCandidate { .. } => SamplerError::NothingAllowed,
            error => error,
        })
    }

    /// Returns true if the constraint allows `token`.
    fn is_allowed(&mut self, token: u32) -> Result<bool, SamplerError> {
        let is_allowed = match &mut self.constraint {
            Some(constraint) => constraint.allows(token)?,
            None => true,
        };
        self.was_refused = !is_allowed;
        Ok(is_allowed)
    }

    /// How many of the likeliest tokens are enough to [choose from](Self::sample_likeliest), with the result of [`sample`](Self::sample); `None` if all
    /// logits are needed.
    pub fn enough(&mut self) -> Option<usize> {
        if !self.params.logit_bias.is_empty() {
            return None;
        }
        let count = self.chain.likeliest()?;
        // None of these is chosen, even if they are all among the likeliest.
        count.checked_add(self.suppressed.len())
    }

    /// As [`sample`](Self::sample), of a vocabulary of `count` tokens, if only the logits of the [`enough`](Self::enough) likeliest are known; of a single
    /// one, it may be any number. `None` if not all of these are numbers, or the constraint refuses the
    /// choice; then [`sample`](Self::sample) must follow with all logits.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn sample_likeliest(
        &mut self,
        likeliest: &[(u32, f32)],
        count: usize,
    ) -> Result<Option<u32>, SamplerError> {
        let is_enough = self
            .enough()
            .is_some_and(|enough| likeliest.len() >= enough && enough > 0);
        if !is_enough || !likeliest.iter().all(|(_, logit)| logit.is_finite()) {
            return Ok(None);
        }
        let candidates = likeliest.iter().map(|&(id, logit)| Candidate {
            id,
            logit,
            probability: 0.0,
        });
        self.candidates.set(candidates, false);
        for &token in &self.suppressed {
            self.candidates.change_logit(token, |_| f32::NEG_INFINITY);
        }
        let vocabulary = self.vocabulary.as_deref();
        let (candidates, rng) = (&mut self.candidates, &mut self.rng);
        let token = self.chain.choose(candidates, count, vocabulary, rng)?;
        self.is_choice_due = !self.is_allowed(token)?;
        Ok((!self.is_choice_due).then_some(token))
    }

    /// Whether it is worth while to [`prepare`](Self::prepare): the constraint refused the last choice, and likely refuses the next one, too.
    pub fn needs_preparation(&self) -> bool {
        self.was_refused && !self.is_finished()
    }

    /// Works out which tokens the constraint allows next: what [`sample`](Self::sample) would do, in a thread of its own while the model computes. Errors come
    /// when it samples.
    pub fn prepare(&mut self) {
        if let Some(constraint) = &mut self.constraint {
            let _ = constraint.mask();
        }
    }

    /// As [`sample`](Self::sample), without the constraint.
    fn choose(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let mut wrong = self.params.logit_bias.iter();
        if let Some(&(token, _)) = wrong.find(|(token, _)| *token as usize >= logits.len()) {
            return Err(SamplerError::LogitBiasToken {
                token,
                count: logits.len(),
            });
        }
        let needs_breakers = !self.params.dry_breakers.is_empty() && self.chain.needs_breakers();
        if self.vocabulary.is_none() && needs_breakers {
            let stage = Stage::Dry.name();
            return Err(SamplerError::NeedsVocabulary { stage });
        }
        self.load(logits)?;
        for &(token, bias) in &self.params.logit_bias {
            self.candidates.change_logit(token, |logit| logit + bias);
        }
        for &token in &self.suppressed {
            self.candidates.change_logit(token, |_| f32::NEG_INFINITY);
        }
        let vocabulary = self.vocabulary.as_deref();
        let (candidates, rng) = (&mut self.candidates, &mut self.rng);
        self.chain.choose(candidates, logits.len(), vocabulary, rng)
    }

    /// Loads all candidates that can be chosen. Of a large vocabulary, these are few.
    fn load(&mut self, logits: &[f32]) -> Result<(), SamplerError> {
        let Self {
            params,
            chain,
            candidates,
            suppressed,
            changed,
            ..
        } = self;
        changed.clear();
        let need = chain.need(changed);
        changed.extend(params.logit_bias.iter().map(|bias| bias.0));
        changed.extend_from_slice(suppressed);
        changed.sort_unstable();
        changed.dedup();
        // Whatever becomes of those that change, the likeliest of the others are loaded.
        let loaded = changed.len() <= MOST_CHANGED
            && match need {
                Need::All => false,
                Need::Best if changed.is_empty() => candidates.load_best(logits),
                Need::Best => candidates.load_top(logits, 1 + changed.len()),
                Need::Top(k) => candidates.load_top(logits, k.saturating_add(changed.len())),
            };
        match loaded {
            true => candidates.add(changed, logits),
            false => candidates.load(logits)?,
        }
        Ok(())
    }

    /// What the last [`sample`](Self::sample) drew from: the tokens left, with their probabilities.
    pub fn candidates(&self) -> &Candidates {
        &self.candidates
    }

    /// Takes note of a token of the text, behind the prompt.
    ///
    /// # Errors
    /// If the constraint does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), SamplerError> {
        self.chain.accept(token);
        match &mut self.constraint {
            Some(constraint) => Ok(constraint.accept(token)?),
            None => Ok(()),
        }
    }

    /// Takes note of the prompt, which no constraint holds for.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.chain.accept(token));
    }

    /// What the sampler knows beyond the text, to [go on](Self::resume) later.
    pub fn state(&self) -> SamplerState {
        SamplerState {
            seed: self.seed,
            drawn: self.rng.drawn(),
            draw: self.chain.state(),
        }
    }

    /// Goes on where another sampler stopped: `text` are all tokens that it saw, of which the last `constrained` came behind the prompt.
    ///
    /// # Errors
    /// [`SamplerError::State`] if it cannot be a sampler's state; if the constraint does not allow these tokens. Then it is to be
    /// [reset](Self::reset).
    pub fn resume(
        &mut self,
        state: &SamplerState,
        text: &[u32],
        constrained: usize,
    ) -> Result<(), SamplerError> {
        let is_sound = state.draw.iter().all(|value| value.is_finite());
        if state.drawn > Rng::MAX_REPLAYED || !is_sound || constrained > text.len() {
            return Err(SamplerError::State);
        }
        self.begin(state.seed)?;
        for _ in 0..state.drawn {
            self.rng.next_u64();
        }
        let (prompt, rest) = text.split_at(text.len() - constrained);
        self.accept_prompt(prompt);
        rest.iter().try_for_each(|&token| self.accept(token))?;
        self.chain.set_state(&state.draw)
    }

    /// Back to the beginning: no token seen, the generator at its seed.
    ///
    /// # Errors
    /// If the constraint cannot begin anew.
    pub fn reset(&mut self) -> Result<(), SamplerError> {
        self.begin(self.params.seed)
    }

    fn begin(&mut self, seed: u64) -> Result<(), SamplerError> {
        self.chain.reset(seed);
        self.was_refused = false;
        self.is_choice_due = false;
        self.seed = seed;
        self.rng = Rng::of(self.params.generator, seed);
        match &mut self.constraint {
            Some(constraint) => Ok(constraint.reset()?),
            None => Ok(()),
        }
    }
}

/// With more changed logits than this, all are loaded.
const MOST_CHANGED: usize = 512;

/// Writes the logits of the tokens whose bit is set, and minus infinity for others.
fn mask_logits(logits: &[f32], mask: &[u32], masked: &mut Vec<f32>) {
    masked.clear();
    for (part, word) in logits.chunks(32).zip(mask) {
        match *word {
            0 => masked.resize(masked.len() + part.len(), f32::NEG_INFINITY),
            u32::MAX => masked.extend_from_slice(part),
            word => {
                masked.extend(
                    part.iter()
                        .enumerate()
                        .map(|(bit, logit)| match word >> bit & 1 {
                            0 => f32::NEG_INFINITY,
                            _ => *logit,
                        }),
                )
            }
        }
    }
    masked.resize(logits.len(), f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::Rng;
    use super::*;
    use proptest::prelude::*;

    /// Allows the tokens whose bits are set.
    #[derive(Debug, Clone)]
    struct Only(Vec<u32>);

    impl Constraint for Only {
        fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
            Ok(self.0[token as usize / 32] >> (token % 32) & 1 == 1)
        }

        fn mask(&mut self) -> Result<&[u32], ConstraintError> {
            Ok(&self.0)
        }

        fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
            Ok(())
        }

        fn is_complete(&mut self) -> bool {
            true
        }

        fn is_finished(&self) -> bool {
            false
        }

        fn reset(&mut self) -> Result<(), ConstraintError> {
            Ok(())
        }

        fn clone_box(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }

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
    fn what_looks_at_all_logits_needs_them() {
        let all = |change: fn(&mut SamplerParams)| {
            let mut params = SamplerParams::default();
            change(&mut params);
            Sampler::new(params).unwrap().enough()
        };
        assert_eq!(all(|_| {}), Some(40));
        assert_eq!(all(|params| params.repeat_penalty = 1.1), None);
        assert_eq!(all(|params| params.dry_multiplier = 0.5), None);
        assert_eq!(all(|params| params.logit_bias = vec![(3, 1.0)]), None);
        assert_eq!(all(|params| params.top_n_sigma = 1.0), None);
        assert_eq!(all(|params| params.top_k = 0), None);
        assert_eq!(
            all(|params| params.stages = vec![Stage::MinP, Stage::TopK]),
            None
        );
        let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
        assert_eq!(sampler.enough(), Some(1));
        assert_eq!(sampler.sample_likeliest(&[(7, 0.0)], 9), Ok(Some(7)));
        assert_eq!(sampler.sample_likeliest(&[(0, f32::NAN)], 9), Ok(None));
        assert_eq!(sampler.sample_likeliest(&[], 9), Ok(None));
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
        sampler.accept(0).unwrap();
        assert_eq!(sampler.sample(&[2.0, 1.5]), Ok(1));
        sampler.reset().unwrap();
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
            sampler.reset().unwrap();
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
        // A square of the vocabulary takes minutes for each token.
        assert!(
            started.elapsed().as_secs_f32() < 100.0,
            "{:?}",
            started.elapsed()
        );
    }

    proptest! {
        #[test]
        fn the_likeliest_are_enough(
            logits in prop::collection::vec(prop_oneof![-3.0..3.0f32, (-2..3i32).prop_map(|x| x as f32)], 8..900),
            temperature in prop_oneof![Just(0.0f32), 0.5..2.0f32],
            (top_k, top_p, min_p) in (1..20usize, 0.5..=1.0f32, 0.0..=0.2f32),
            suppressed in prop::collection::vec(0..8u32, 0..3),
            allowed in prop::option::of(prop::collection::vec(any::<u32>(), 29)),
            seed: u64,
        ) {
            let params = SamplerParams { seed, temperature, top_k, top_p, min_p, ..Default::default() };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.suppress(&suppressed);
            let is_free = allowed.is_none();
            sampler.set_constraint(allowed.map(|mask| Box::new(Only(mask)) as Box<dyn Constraint>));
            let enough = sampler.enough().unwrap();
            let most = if temperature == 0.0 { 1 } else { top_k };
            prop_assert_eq!(enough, most + suppressed.len());
            let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            order.truncate(enough);
            if enough == 1 {
                order[0].1 = 0.0;
            }
            let mut other = sampler.clone();
            for _ in 0..4 {
                let expected = sampler.sample(&logits);
                let found = other.sample_likeliest(&order, logits.len());
                match found {
                    Ok(None) => {
                        prop_assert!(!is_free || order.len() < enough);
                        prop_assert_eq!(other.sample(&logits), expected);
                    }
                    found => prop_assert_eq!(found, expected.map(Some)),
                }
            }
        }

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
            sampler.accept_prompt(&[0, 1_000_000]);
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
        if params.temperature == 0.0 && params.typical_p >= 1.0 {
            all.temperature(0.0);
        } else {
            all.top_k(params.top_k);
            all.typical_p(params.typical_p, 0)?;
            all.top_p(params.top_p, 0)?;
            all.min_p(params.min_p, 0);
            all.temperature(params.temperature);
        }
        all.draw(rng)
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
