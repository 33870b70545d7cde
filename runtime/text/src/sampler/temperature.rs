//! Temperature, either fixed or dependent on the entropy.

use super::candidates::{Candidates, tamed};
use super::error::SamplerError;

impl Candidates {
    /// Divides the logits by `temperature`; 0 or less keeps only the most probable candidate.
    pub fn temperature(&mut self, temperature: f32) {
        if temperature <= 0.0 {
            if let Ok((best, _)) = self.best() {
                self.keep_only(best);
            }
            return;
        }
        for candidate in self.items_mut() {
            candidate.logit = tamed(candidate.logit / temperature);
        }
    }

    /// Divides the logits by a temperature at most `range` away from `temperature`: low if one
    /// candidate has all the probability, high if all have the same. Its position in the range is
    /// the entropy, relative to the maximum entropy, to the power of `exponent`.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn dynamic_temperature(
        &mut self,
        temperature: f32,
        range: f32,
        exponent: f32,
    ) -> Result<(), SamplerError> {
        if range <= 0.0 {
            self.temperature(temperature);
            return Ok(());
        }
        let count = self.as_slice().len();
        if count <= 1 {
            return Ok(());
        }
        self.softmax()?;
        let entropy: f64 = self
            .as_slice()
            .iter()
            .map(|candidate| f64::from(candidate.probability))
            .filter(|probability| *probability > 0.0)
            .map(|probability| -probability * libm::log(probability))
            .sum();
        let share = (entropy / libm::log(count as f64)).clamp(0.0, 1.0);
        let place = libm::pow(share, f64::from(exponent)) as f32;
        let (low, high) = ((temperature - range).max(0.0), temperature + range);
        self.temperature(low + (high - low) * place);
        Ok(())
    }
}
