//! Mirostat: draws so that the surprise of the text stays close to a target.

use super::candidates::{Candidate, Candidates};
use super::error::SamplerError;
use super::rng::Rng;

/// Number of the most probable tokens from which version 1 estimates the decay of probabilities.
const ESTIMATED_FROM: usize = 100;

/// The draw of mirostat, with its state.
#[derive(Debug, Clone)]
pub struct Mirostat {
    version: u8,
    tau: f32,
    eta: f32,
    /// Current maximum surprise.
    mu: f64,
    /// Token of the last draw, with its surprise.
    drawn: Option<(u32, f64)>,
}

impl Mirostat {
    /// Creates the draw of version 1 or 2; see [`SamplerParams`](crate::SamplerParams) for the
    /// other parameters.
    pub fn new(version: u8, tau: f32, eta: f32) -> Self {
        Mirostat {
            version,
            tau,
            eta,
            mu: 2.0 * f64::from(tau),
            drawn: None,
        }
    }

    /// Draws a token from a vocabulary of `vocabulary` tokens.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn draw(
        &mut self,
        candidates: &mut Candidates,
        vocabulary: usize,
        rng: &mut Rng,
    ) -> Result<u32, SamplerError> {
        candidates.softmax()?;
        if self.version == 1 {
            candidates.sort_first(ESTIMATED_FROM.min(candidates.as_slice().len()));
            candidates.top_k(self.how_many(candidates.as_slice(), vocabulary));
        } else {
            let least = libm::exp2(-self.mu) as f32;
            candidates.retain_or_best(|candidate| candidate.probability >= least);
            candidates.sort_first(candidates.as_slice().len());
        }
        let place = candidates.draw_place_of_several(rng)?;
        let Candidate {
            id, probability, ..
        } = candidates.as_slice()[place];
        self.drawn = Some((id, -libm::log2(f64::from(probability))));
        Ok(id)
    }

    /// Returns the number of the most probable candidates within the maximum surprise, if
    /// probabilities follow Zipf's law.
    fn how_many(&self, top_tokens: &[Candidate], vocabulary: usize) -> usize {
        let (mut products, mut squares) = (0.0, 0.0);
        let top_tokens = &top_tokens[..ESTIMATED_FROM.min(top_tokens.len())];
        for (rank, pair) in top_tokens.windows(2).enumerate() {
            let rank = rank as f64;
            let distance = libm::log((rank + 2.0) / (rank + 1.0));
            let fall = libm::log(f64::from(pair[0].probability) / f64::from(pair[1].probability));
            if fall.is_finite() {
                products += distance * fall;
                squares += distance * distance;
            }
        }
        let s = products / squares;
        let epsilon = s - 1.0;
        let all = 1.0 - libm::pow(vocabulary as f64, -epsilon);
        let count = libm::pow(epsilon * libm::exp2(self.mu) / all, 1.0 / s);
        // NaN or infinite if there is one candidate, or if all are equal.
        if count.is_nan() {
            top_tokens.len().max(1)
        } else {
            (count as usize).max(1)
        }
    }

    /// Adds a token of the text. If it is the one drawn last, the maximum surprise changes.
    pub fn accept(&mut self, token: u32) {
        if let Some((drawn, surprise)) = self.drawn.take()
            && drawn == token
        {
            self.mu -= f64::from(self.eta) * (surprise - f64::from(self.tau));
        }
    }

    /// Returns the current maximum surprise.
    pub(super) fn state(&self) -> [f64; 1] {
        [self.mu]
    }

    /// Reads its state from the front of `state`. Returns the rest.
    pub(super) fn set_state<'a>(&mut self, state: &'a [f64]) -> &'a [f64] {
        let [mu, rest @ ..] = state else {
            return state;
        };
        self.mu = *mu;
        rest
    }

    /// Resets the draw.
    pub fn reset(&mut self) {
        *self = Mirostat::new(self.version, self.tau, self.eta);
    }
}
