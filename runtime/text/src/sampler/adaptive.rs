//! Adaptive-p: draws tokens whose probability is close to a target.

use super::candidates::Candidates;
use super::error::SamplerError;
use super::rng::Rng;

/// Logit of a token exactly at the target.
const PEAK: f32 = 5.0;
/// Steepness with which logits fall away from it.
const SHARPNESS: f32 = 10.0;
/// Scale of the distance from the target.
const WIDTH: f32 = 0.3;

/// The draw of adaptive-p, with the history of drawn probabilities.
#[derive(Debug, Clone)]
pub struct AdaptiveP {
    target: f32,
    decay: f32,
    /// Sum of the probabilities drawn so far, with decaying weights, and the sum of the weights.
    sum: f32,
    weight: f32,
    /// Token of the last draw, with its probability.
    drawn: Option<(u32, f32)>,
    probabilities: Vec<f32>,
}

impl AdaptiveP {
    /// Creates the draw; see [`SamplerParams`](crate::SamplerParams).
    pub fn new(target: f32, decay: f32) -> Self {
        let weight = 1.0 / (1.0 - decay);
        AdaptiveP {
            target,
            decay,
            sum: target * weight,
            weight,
            drawn: None,
            probabilities: Vec::new(),
        }
    }

    /// Draws a token.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn draw(
        &mut self,
        candidates: &mut Candidates,
        rng: &mut Rng,
    ) -> Result<u32, SamplerError> {
        candidates.softmax()?;
        let target = (2.0 * self.target - self.sum / self.weight).clamp(0.0, 1.0);
        self.probabilities.clear();
        for candidate in candidates.items_mut() {
            self.probabilities.push(candidate.probability);
            if candidate.logit > f32::NEG_INFINITY {
                let distance = (candidate.probability - target).abs() / WIDTH;
                candidate.logit = PEAK - SHARPNESS * distance * distance / (1.0 + distance);
            }
        }
        let place = candidates.draw_place_of_several(rng)?;
        let token = candidates.as_slice()[place].id;
        self.drawn = Some((token, self.probabilities[place]));
        Ok(token)
    }

    /// Adds a token of the text, which has an effect if it is the one drawn last.
    pub fn accept(&mut self, token: u32) {
        if let Some((drawn, probability)) = self.drawn.take()
            && drawn == token
        {
            self.sum = probability + self.decay * self.sum;
            self.weight = 1.0 + self.decay * self.weight;
        }
    }

    /// Returns the state.
    pub(super) fn state(&self) -> [f64; 2] {
        [self.sum.into(), self.weight.into()]
    }

    /// Reads its state from the front of `state`. Returns the rest.
    pub(super) fn set_state<'a>(&mut self, state: &'a [f64]) -> &'a [f64] {
        let [sum, weight, rest @ ..] = state else {
            return state;
        };
        (self.sum, self.weight) = (*sum as f32, *weight as f32);
        rest
    }

    /// Resets the draw.
    pub fn reset(&mut self) {
        let probabilities = std::mem::take(&mut self.probabilities);
        *self = AdaptiveP {
            probabilities,
            ..AdaptiveP::new(self.target, self.decay)
        };
    }
}
