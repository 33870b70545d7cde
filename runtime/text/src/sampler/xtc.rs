//! XTC ("exclude top choices"): sometimes removes the most probable tokens.

use super::candidates::Candidates;
use super::error::SamplerError;
use super::rng::Rng;

impl Candidates {
    /// With probability `chance`, removes all candidates that reach the probability `threshold`
    /// except the least probable of them, unless fewer than `min_keep` would be left. Takes one
    /// number from `rng` if there are two candidates or more. If it removes candidates, the most
    /// probable one is first afterwards.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn xtc(
        &mut self,
        chance: f32,
        threshold: f32,
        min_keep: usize,
        rng: &mut Rng,
    ) -> Result<(), SamplerError> {
        let is_on = chance > 0.0 && threshold <= 0.5 && self.as_slice().len() >= 2;
        if !is_on || rng.uniform_single() > f64::from(chance) {
            return Ok(());
        }
        self.softmax()?;
        self.sort_first(self.as_slice().len());
        let likely = self
            .as_slice()
            .iter()
            .filter(|candidate| candidate.probability >= threshold)
            .count();
        let dropped = likely.saturating_sub(1);
        if self.as_slice().len() - dropped >= min_keep {
            self.drop_first(dropped);
        }
        Ok(())
    }
}
