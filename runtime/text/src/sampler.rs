//! Samplers, which choose the next token.

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
use chain::{CandidateNeed, Chain};
use std::sync::Arc;

/// Samples tokens from logits with a chain of [stages](Stage). The stages are llama.cpp's, in its
/// order unless [`SamplerParams::stages`] specifies another one. Logit biases come first, and the
/// draw last.
///
/// The caller must pass every token of the text to [`accept`](Self::accept), and those of the
/// prompt to [`accept_prompt`](Self::accept_prompt), because penalties depend on them.
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
    /// Seed of the generator.
    seed: u64,
    rng: Rng,
    candidates: Candidates,
    suppressed: Vec<u32>,
    vocabulary: Option<Arc<Tokenizer>>,
    constraint: Option<Box<dyn Constraint>>,
    /// Tokens whose logits change. Kept to reuse its memory, like `masked`.
    changed: Vec<u32>,
    masked: Vec<f32>,
    /// True if the constraint rejected the last choice.
    was_refused: bool,
    /// True if the constraint rejected a choice from top-k logits. The next
    /// [`sample`](Self::sample) then chooses among the allowed tokens only.
    is_choice_due: bool,
}

/// State of a [`Sampler`] that does not derive from the text.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerState {
    /// Seed of the generator.
    pub seed: u64,
    /// Number of random numbers drawn since the seed.
    pub drawn: u64,
    /// State of mirostat (one number) or adaptive-p (two), then the count of numbers drawn by each
    /// XTC stage with its own generator.
    pub draw: Vec<f64>,
}

impl Sampler {
    /// Creates a sampler for the start of a text.
    ///
    /// # Errors
    /// Returns an error if a parameter is outside its range.
    pub fn new(params: SamplerParams) -> Result<Self, SamplerError> {
        params.validate()?;
        Ok(Self {
            chain: Chain::new(&params),
            seed: params.seed,
            rng: Rng::with_generator(params.generator, params.seed),
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

    /// Returns the parameters.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// Excludes these tokens from now on, instead of those of an earlier call. These are the tokens
    /// that a [vocabulary](crate::Tokenizer::suppressed) rules out.
    pub fn suppress(&mut self, tokens: &[u32]) {
        self.suppressed.clear();
        self.suppressed.extend_from_slice(tokens);
    }

    /// Sets the vocabulary. Its excluded tokens are [suppressed](Self::suppress). Stages that
    /// depend on the texts of tokens need it: infill, and the breakers of DRY.
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

    /// Sets the constraint on the text, which starts now, or removes it.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.constraint = constraint;
    }

    /// Returns the constraint.
    pub fn constraint(&self) -> Option<&dyn Constraint> {
        self.constraint.as_deref()
    }

    /// Returns whether the text must end, because the constraint allows no continuation.
    pub fn is_finished(&self) -> bool {
        self.constraint().is_some_and(Constraint::is_finished)
    }

    /// Samples a token; `logits[id]` belongs to token `id`. Does not [`accept`](Self::accept) it.
    ///
    /// If the [constraint](Self::set_constraint) rejects the choice, samples again among the tokens
    /// that it allows.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if the logits and biases exclude all tokens,
    /// [`SamplerError::NothingAllowed`] if the constraint does, [`SamplerError::LogitBiasToken`],
    /// [`SamplerError::NeedsVocabulary`], or [`SamplerError::Constraint`]. The sampler remains
    /// usable.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        if !std::mem::take(&mut self.is_choice_due) {
            let token = self.choose(logits)?;
            if self.is_allowed(token)? {
                return Ok(token);
            }
        }
        let mask = match &mut self.constraint {
            Some(constraint) => constraint.mask()?,
            // It was removed after it rejected a choice.
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

    /// Returns whether the constraint allows `token`.
    fn is_allowed(&mut self, token: u32) -> Result<bool, SamplerError> {
        let is_allowed = match &mut self.constraint {
            Some(constraint) => constraint.allows(token)?,
            None => true,
        };
        self.was_refused = !is_allowed;
        Ok(is_allowed)
    }

    /// Returns the k whose top-k suffices to [sample](Self::sample_top_k) with the result of
    /// [`sample`](Self::sample), or `None` if all logits are needed.
    pub fn required_top_k(&mut self) -> Option<usize> {
        if !self.params.logit_bias.is_empty() {
            return None;
        }
        let count = self.chain.device_top_k()?;
        // None of these can be chosen, even if all are in the top-k.
        count.checked_add(self.suppressed.len())
    }

    /// Samples like [`sample`](Self::sample) from a vocabulary of `count` tokens, with only the
    /// logits of the top-k, where k is [`required_top_k`](Self::required_top_k). If k is 1, its
    /// logit may be any number. Returns `None` if not all logits are numbers, or if the constraint
    /// rejects the choice; then the caller must call [`sample`](Self::sample) with all logits.
    ///
    /// # Errors
    /// Fails like [`sample`](Self::sample).
    pub fn sample_top_k(
        &mut self,
        top_tokens: &[(u32, f32)],
        count: usize,
    ) -> Result<Option<u32>, SamplerError> {
        let is_enough = self
            .required_top_k()
            .is_some_and(|required_top_k| top_tokens.len() >= required_top_k && required_top_k > 0);
        if !is_enough || !top_tokens.iter().all(|(_, logit)| logit.is_finite()) {
            return Ok(None);
        }
        let candidates = top_tokens.iter().map(|&(id, logit)| Candidate {
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

    /// Returns whether [`prepare`](Self::prepare) is worthwhile: the constraint rejected the last
    /// choice, and will probably reject the next one as well.
    pub fn needs_preparation(&self) -> bool {
        self.was_refused && !self.is_finished()
    }

    /// Computes which tokens the constraint allows next. [`sample`](Self::sample) would do the
    /// same; this allows doing it on another thread while the model computes. Errors are reported
    /// when it samples.
    pub fn prepare(&mut self) {
        if let Some(constraint) = &mut self.constraint {
            let _ = constraint.mask();
        }
    }

    /// Samples like [`sample`](Self::sample), without the constraint.
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

    /// Loads all candidates that can be chosen. These are few of a large vocabulary.
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
        // Whatever happens to the changed ones, the most probable of the others are loaded.
        let loaded = changed.len() <= MAX_CHANGED
            && match need {
                CandidateNeed::All => false,
                CandidateNeed::Best if changed.is_empty() => candidates.load_best(logits),
                CandidateNeed::Best => candidates.load_top(logits, 1 + changed.len()),
                CandidateNeed::Top(k) => {
                    candidates.load_top(logits, k.saturating_add(changed.len()))
                }
            };
        if loaded {
            candidates.add(changed, logits)
        } else {
            candidates.load(logits)?
        }
        Ok(())
    }

    /// Returns the candidates that the last [`sample`](Self::sample) drew from, with their
    /// probabilities.
    pub fn candidates(&self) -> &Candidates {
        &self.candidates
    }

    /// Adds a token to the text, after the prompt.
    ///
    /// # Errors
    /// Returns an error if the constraint does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), SamplerError> {
        self.chain.accept(token);
        match &mut self.constraint {
            Some(constraint) => Ok(constraint.accept(token)?),
            None => Ok(()),
        }
    }

    /// Adds the tokens of the prompt, to which the constraint does not apply.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.chain.accept(token));
    }

    /// Returns the state that does not derive from the text, to [resume](Self::resume) later.
    pub fn state(&self) -> SamplerState {
        SamplerState {
            seed: self.seed,
            drawn: self.rng.drawn(),
            draw: self.chain.state(),
        }
    }

    /// Resumes the state of another sampler. `text` contains all tokens that it saw, and the last
    /// `constrained` of these came after the prompt.
    ///
    /// # Errors
    /// Returns [`SamplerError::State`] if the state is invalid. Also fails if the constraint does
    /// not allow these tokens. After an error, the caller must [reset](Self::reset) the sampler.
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

    /// Resets the sampler to the start: no tokens, and the generator at its seed.
    ///
    /// # Errors
    /// Returns an error if the constraint cannot be reset.
    pub fn reset(&mut self) -> Result<(), SamplerError> {
        self.begin(self.params.seed)
    }

    fn begin(&mut self, seed: u64) -> Result<(), SamplerError> {
        self.chain.reset(seed);
        self.was_refused = false;
        self.is_choice_due = false;
        self.seed = seed;
        self.rng = Rng::with_generator(self.params.generator, seed);
        match &mut self.constraint {
            Some(constraint) => Ok(constraint.reset()?),
            None => Ok(()),
        }
    }
}

/// Maximum number of changed logits for which not all logits are loaded.
const MAX_CHANGED: usize = 512;

/// Copies the logits of the tokens whose bit is set, and writes minus infinity for the others.
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
    struct AllowOnly(Vec<u32>);

    impl Constraint for AllowOnly {
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
    fn greedy_takes_the_first_of_equal_maxima() {
        let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, f32::NAN]), Ok(1));
        assert_eq!(sampler.candidates().as_slice().len(), 1);
    }

    #[test]
    fn some_parameters_require_all_logits() {
        let all = |change: fn(&mut SamplerParams)| {
            let mut params = SamplerParams::default();
            change(&mut params);
            Sampler::new(params).unwrap().required_top_k()
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
        assert_eq!(sampler.required_top_k(), Some(1));
        assert_eq!(sampler.sample_top_k(&[(7, 0.0)], 9), Ok(Some(7)));
        assert_eq!(sampler.sample_top_k(&[(0, f32::NAN)], 9), Ok(None));
        assert_eq!(sampler.sample_top_k(&[], 9), Ok(None));
    }

    #[test]
    fn typical_p_can_exclude_the_most_likely_token() {
        let choose = |typical_p| {
            let params = SamplerParams {
                typical_p,
                ..SamplerParams::greedy()
            };
            let logits = [0.2f32, 0.4, 0.2, 0.2].map(f32::ln);
            Sampler::new(params).unwrap().sample(&logits).unwrap()
        };
        // The expected surprise is 1.33. That of the most probable token, 0.92, is further away
        // than those of the others, 1.61.
        assert_eq!(choose(1.0), 1);
        assert_ne!(choose(0.1), 1);
    }

    #[test]
    fn suppressed_tokens_are_never_sampled() {
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
    fn penalties_change_the_sampled_token() {
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
    fn the_seed_determines_the_draws() {
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
        // Quadratic time in the vocabulary would take minutes for each token.
        assert!(
            started.elapsed().as_secs_f32() < 100.0,
            "{:?}",
            started.elapsed()
        );
    }

    proptest! {
        #[test]
        fn sampling_from_the_top_k_matches_all_logits(
            logits in prop::collection::vec(prop_oneof![-3.0..3.0f32,
                (-2..3i32).prop_map(|x| x as f32)], 8..900),
            temperature in prop_oneof![Just(0.0f32), 0.5..2.0f32],
            (top_k, top_p, min_p) in (1..20usize, 0.5..=1.0f32, 0.0..=0.2f32),
            suppressed in prop::collection::vec(0..8u32, 0..3),
            allowed in prop::option::of(prop::collection::vec(any::<u32>(), 29)),
            seed: u64,
        ) {
            let params = SamplerParams {
                seed,
                temperature,
                top_k,
                top_p,
                min_p,
                ..Default::default()
            };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.suppress(&suppressed);
            let is_free = allowed.is_none();
            let constraint = |mask| Box::new(AllowOnly(mask)) as Box<dyn Constraint>;
            sampler.set_constraint(allowed.map(constraint));
            let required_top_k = sampler.required_top_k().unwrap();
            let most = if temperature == 0.0 { 1 } else { top_k };
            prop_assert_eq!(required_top_k, most + suppressed.len());
            let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            order.truncate(required_top_k);
            if required_top_k == 1 {
                order[0].1 = 0.0;
            }
            let mut other = sampler.clone();
            for _ in 0..4 {
                let expected = sampler.sample(&logits);
                let found = other.sample_top_k(&order, logits.len());
                match found {
                    Ok(None) => {
                        prop_assert!(!is_free || order.len() < required_top_k);
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
            (top_k, top_p, min_p, typical_p) in (0..60usize, 0.0..=1.0f32, 0.0..=1.0f32,
                0.0..=1.0f32),
            (repeat_penalty, frequency_penalty) in (1e-30..1e30f32, -1e38..1e38f32),
            seed: u64,
        ) {
            let params = SamplerParams {
                seed,
                temperature,
                top_k,
                top_p,
                min_p,
                typical_p,
                repeat_penalty,
                frequency_penalty,
                ..Default::default()
            };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.accept_prompt(&[0, 1_000_000]);
            match sampler.sample(&logits) {
                Ok(token) => {
                    let logit = logits[token as usize];
                    prop_assert!(!logit.is_nan() && logit != f32::NEG_INFINITY);
                    let sum: f32 = sampler
                        .candidates()
                        .as_slice()
                        .iter()
                        .map(|candidate| candidate.probability)
                        .sum();
                    prop_assert!((sum - 1.0).abs() < 1e-4, "probabilities sum to {}", sum);
                }
                Err(_) => prop_assert!(
                    logits
                        .iter()
                        .skip(1)
                        .all(|logit| logit.is_nan() || *logit == f32::NEG_INFINITY)
                ),
            }
        }

        /// Sampling equals running each stage over the whole vocabulary.
        #[test]
        fn partial_loading_matches_full_vocabulary_sampling(
            logits in prop_oneof![
                prop::collection::vec(logit(), 0..100),
                prop::collection::vec(logit(), 1000..5000),
                prop::collection::vec(prop_oneof![9 => Just(f32::NEG_INFINITY), 1 => logit()],
                    1000..5000),
            ],
            limit in prop_oneof![Just(f32::INFINITY), -5.0..5.0f32, Just(0.0f32)],
            temperature in prop_oneof![Just(0.0f32), 0.1..3.0f32],
            top_k in prop_oneof![0..3usize, 3..200usize],
            typical_p in prop_oneof![Just(1.0f32), 0.0..=1.0f32],
            (top_p, min_p) in (0.0..=1.0f32, 0.0..=1.0f32),
            seed: u64,
        ) {
            let logits: Vec<f32> = logits
                .into_iter()
                .map(|x| if x > limit { limit } else { x })
                .collect();
            check(
                &logits,
                SamplerParams {
                    seed,
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    typical_p,
                    ..Default::default()
                },
            );
        }
    }

    /// Any numbers and NaN, with many duplicates.
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

    /// Does the same as [`Sampler::sample`] to all candidates, without biases and penalties.
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

    /// A sampler draws the same token twice, from selected candidates as from all.
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
    fn large_sorted_and_constant_vocabularies_are_sampled() {
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
