//! The stages of a sampler at run time, with their state.

use super::adaptive::AdaptiveP;
use super::candidates::Candidates;
use super::dry::{Breakers, Dry, DryParams};
use super::error::SamplerError;
use super::mirostat::Mirostat;
use super::params::SamplerParams;
use super::penalties::Penalties;
use super::rng::{Generator, Rng};
use super::stage::Stage;
use crate::tokenizer::Tokenizer;

/// An enabled stage.
#[derive(Debug, Clone)]
enum Step {
    Penalties(Penalties),
    Dry(Dry),
    TopNSigma(f32),
    TopK(usize),
    TypicalP(f32),
    TopP(f32),
    MinP(f32),
    Xtc {
        chance: f32,
        threshold: f32,
        /// Generator of this stage, as in llama.cpp. `None` to use the chain's.
        own: Option<Rng>,
    },
    Temperature {
        value: f32,
        range: f32,
        exponent: f32,
    },
    Infill,
}

impl Step {
    /// Creates the step of a stage, unless it is disabled.
    fn new(stage: Stage, params: &SamplerParams) -> Option<Self> {
        let step = match stage {
            Stage::Penalties => Step::Penalties(Penalties::new(
                params.last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )),
            Stage::Dry => Step::Dry(Dry::new(
                DryParams {
                    multiplier: params.dry_multiplier,
                    base: params.dry_base,
                    allowed_length: params.dry_allowed_length,
                    last_n: params.dry_last_n,
                },
                Breakers::default(),
            )),
            Stage::TopNSigma => Step::TopNSigma(params.top_n_sigma),
            Stage::TopK => Step::TopK(params.top_k),
            Stage::TypicalP => Step::TypicalP(params.typical_p),
            Stage::TopP => Step::TopP(params.top_p),
            Stage::MinP => Step::MinP(params.min_p),
            Stage::Xtc => Step::Xtc {
                chance: params.xtc_probability,
                threshold: params.xtc_threshold,
                own: match params.generator {
                    Generator::Xoshiro => None,
                    Generator::Mersenne => {
                        Some(Rng::with_generator(Generator::Mersenne, params.seed))
                    }
                },
            },
            Stage::Temperature => Step::Temperature {
                value: params.temperature,
                range: params.dynatemp_range,
                exponent: params.dynatemp_exponent,
            },
            Stage::Infill => Step::Infill,
            Stage::AdaptiveP => return None,
        };
        let is_on = match step {
            Step::Penalties(_) => {
                params.last_n > 0
                    && (params.repeat_penalty != 1.0
                        || params.frequency_penalty != 0.0
                        || params.presence_penalty != 0.0)
            }
            Step::Dry(_) => {
                params.dry_multiplier > 0.0 && params.dry_base >= 1.0 && params.dry_last_n > 0
            }
            Step::TopNSigma(n) => n > 0.0,
            Step::TopK(k) => k > 0,
            Step::TypicalP(p) | Step::TopP(p) => p < 1.0,
            Step::MinP(p) => p > 0.0,
            Step::Xtc {
                chance, threshold, ..
            } => chance > 0.0 && threshold <= 0.5,
            Step::Temperature { value, range, .. } => value != 1.0 || range > 0.0,
            Step::Infill => true,
        };
        is_on.then_some(step)
    }

    fn changes_logits(&self) -> bool {
        matches!(self, Step::Penalties(_) | Step::Dry(_))
    }

    fn is_greedy(&self) -> bool {
        matches!(self, Step::Temperature { value, range, .. } if *value <= 0.0 && *range <= 0.0)
    }

    /// Returns whether the step changes neither the logits nor the most probable candidate.
    fn keeps_top_tokens(&self) -> bool {
        matches!(
            self,
            Step::TopNSigma(_) | Step::TopK(_) | Step::TopP(_) | Step::MinP(_)
        )
    }

    fn apply(
        &mut self,
        candidates: &mut Candidates,
        min_keep: usize,
        vocabulary: Option<&Tokenizer>,
        rng: &mut Rng,
    ) -> Result<(), SamplerError> {
        match self {
            Step::Penalties(penalties) => penalties.apply(candidates),
            Step::Dry(dry) => dry.apply(candidates),
            Step::TopNSigma(n) => candidates.top_n_sigma(*n),
            Step::TopK(k) => candidates.top_k(*k),
            Step::TypicalP(p) => candidates.typical_p(*p, min_keep)?,
            Step::TopP(p) => candidates.top_p(*p, min_keep)?,
            Step::MinP(p) => candidates.min_p(*p, min_keep),
            Step::Xtc {
                chance,
                threshold,
                own,
            } => {
                let rng = own.as_mut().unwrap_or(rng);
                candidates.xtc(*chance, *threshold, min_keep, rng)?
            }
            Step::Temperature {
                value,
                range,
                exponent,
            } => candidates.dynamic_temperature(*value, *range, *exponent)?,
            Step::Infill => {
                let stage = Stage::Infill.name();
                let vocabulary = vocabulary.ok_or(SamplerError::NeedsVocabulary { stage })?;
                candidates.infill(vocabulary)?;
            }
        }
        Ok(())
    }
}

/// Method for drawing one of the remaining candidates.
#[derive(Debug, Clone)]
enum Draw {
    ByProbability,
    Mirostat(Mirostat),
    AdaptiveP(AdaptiveP),
}

/// Candidates that the stages need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CandidateNeed {
    All,
    /// The top-k, and the tokens whose logits change before.
    Top(usize),
    /// The most probable candidate, and the tokens whose logits change before.
    Best,
}

/// All stages, and the draw.
#[derive(Debug, Clone)]
pub(super) struct Chain {
    steps: Vec<Step>,
    /// Minimum number of candidates that probability-based stages keep.
    min_keep: usize,
    draw: Draw,
}

impl Chain {
    pub fn new(params: &SamplerParams) -> Self {
        let stages: &[Stage] = match params.mirostat {
            0 => &params.stages,
            _ => &[Stage::Temperature],
        };
        let steps = stages
            .iter()
            .filter_map(|stage| Step::new(*stage, params))
            .collect();
        let draw = match params.mirostat {
            0 if params.adaptive_target >= 0.0 => Draw::AdaptiveP(AdaptiveP::new(
                params.adaptive_target,
                params.adaptive_decay,
            )),
            0 => Draw::ByProbability,
            version => Draw::Mirostat(Mirostat::new(
                version,
                params.mirostat_tau,
                params.mirostat_eta,
            )),
        };
        let mut chain = Chain {
            steps,
            min_keep: params.min_keep,
            draw,
        };
        chain.leave_out_needless();
        chain
    }

    /// Removes steps that have no effect if the most probable token is taken: those that do not
    /// change which one it is, and all later ones.
    fn leave_out_needless(&mut self) {
        let Some(taken) = self.steps.iter().position(Step::is_greedy) else {
            return;
        };
        let changing = self.changing();
        if self.steps[changing..taken]
            .iter()
            .all(Step::keeps_top_tokens)
        {
            self.steps.drain(changing..taken);
            self.steps.truncate(changing + 1);
        }
    }

    /// Returns the number of first steps that only change logits.
    fn changing(&self) -> usize {
        let steps = self.steps.iter();
        steps.take_while(|step| step.changes_logits()).count()
    }

    /// Returns what the steps need. `changed` gets the tokens whose logits change before most
    /// others are removed.
    pub fn need(&mut self, changed: &mut Vec<u32>) -> CandidateNeed {
        let changing = self.changing();
        for step in &mut self.steps[..changing] {
            match step {
                Step::Penalties(penalties) => changed.extend(penalties.tokens()),
                Step::Dry(dry) => changed.extend(dry.penalties().iter().map(|entry| entry.0)),
                _ => {}
            }
        }
        match self.steps.get(changing) {
            Some(Step::TopK(k)) => CandidateNeed::Top(*k),
            Some(step) if step.is_greedy() => CandidateNeed::Best,
            _ => CandidateNeed::All,
        }
    }

    /// Returns the k whose top-k the steps need, if no earlier step depends on other tokens.
    pub fn device_top_k(&self) -> Option<usize> {
        match self.steps.first() {
            Some(Step::TopK(k)) => Some(*k),
            Some(step) if step.is_greedy() => Some(1),
            _ => None,
        }
    }

    /// Runs all stages on `candidates` and draws one of the remaining ones. `count` is the size of
    /// the vocabulary.
    pub fn choose(
        &mut self,
        candidates: &mut Candidates,
        count: usize,
        vocabulary: Option<&Tokenizer>,
        rng: &mut Rng,
    ) -> Result<u32, SamplerError> {
        for step in &mut self.steps {
            step.apply(candidates, self.min_keep, vocabulary, rng)?;
        }
        match &mut self.draw {
            Draw::ByProbability => candidates.draw(rng),
            Draw::Mirostat(mirostat) => mirostat.draw(candidates, count, rng),
            Draw::AdaptiveP(adaptive) => adaptive.draw(candidates, rng),
        }
    }

    /// Returns whether an enabled stage uses breakers.
    pub fn needs_breakers(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Dry(_)))
    }

    pub fn set_breakers(&mut self, breakers: &Breakers) {
        for step in &mut self.steps {
            if let Step::Dry(dry) = step {
                dry.set_breakers(breakers.clone());
            }
        }
    }

    /// Adds a token of the text.
    pub fn accept(&mut self, token: u32) {
        for step in &mut self.steps {
            match step {
                Step::Penalties(penalties) => penalties.accept(token),
                Step::Dry(dry) => dry.accept(token),
                _ => {}
            }
        }
        match &mut self.draw {
            Draw::ByProbability => {}
            Draw::Mirostat(mirostat) => mirostat.accept(token),
            Draw::AdaptiveP(adaptive) => adaptive.accept(token),
        }
    }

    /// Returns the state that does not derive from the tokens: the draw's numbers, then the number
    /// of draws from each generator of a step.
    pub fn state(&self) -> Vec<f64> {
        let mut state = match &self.draw {
            Draw::ByProbability => Vec::new(),
            Draw::Mirostat(mirostat) => mirostat.state().to_vec(),
            Draw::AdaptiveP(adaptive) => adaptive.state().to_vec(),
        };
        state.extend(self.steps.iter().filter_map(|step| match step {
            Step::Xtc { own: Some(rng), .. } => Some(rng.drawn() as f64),
            _ => None,
        }));
        state
    }

    /// Restores the [state](Self::state) of another chain with the same stages. Missing numbers
    /// keep their values after [`reset`](Self::reset).
    ///
    /// # Errors
    /// Returns [`SamplerError::State`] if a count is not a whole number or exceeds the limit.
    pub fn set_state(&mut self, state: &[f64]) -> Result<(), SamplerError> {
        let counts = match &mut self.draw {
            Draw::ByProbability => state,
            Draw::Mirostat(mirostat) => mirostat.set_state(state),
            Draw::AdaptiveP(adaptive) => adaptive.set_state(state),
        };
        let generators = self.steps.iter_mut().filter_map(|step| match step {
            Step::Xtc { own, .. } => own.as_mut(),
            _ => None,
        });
        for (rng, &count) in generators.zip(counts) {
            if count.fract() != 0.0 || !(0.0..=Rng::MAX_REPLAYED as f64).contains(&count) {
                return Err(SamplerError::State);
            }
            for _ in 0..count as u64 {
                rng.uniform_single();
            }
        }
        Ok(())
    }

    /// Resets all steps and the draw. Generators of steps start at `seed`.
    pub fn reset(&mut self, seed: u64) {
        for step in &mut self.steps {
            match step {
                Step::Penalties(penalties) => penalties.reset(),
                Step::Dry(dry) => dry.reset(),
                Step::Xtc { own: Some(rng), .. } => {
                    *rng = Rng::with_generator(Generator::Mersenne, seed)
                }
                _ => {}
            }
        }
        match &mut self.draw {
            Draw::ByProbability => {}
            Draw::Mirostat(mirostat) => mirostat.reset(),
            Draw::AdaptiveP(adaptive) => adaptive.reset(),
        }
    }
}
