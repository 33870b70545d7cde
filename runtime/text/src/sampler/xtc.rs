//! XTC ("exclude top choices"): sometimes the likeliest tokens are left out.

use super::candidates::Candidates;
use super::error::SamplerError;
use super::rng::Rng;

impl Candidates {
    /// With probability `chance`, drops all candidates with at least the probability `threshold`
    /// but the least likely of them, unless fewer than `min_keep` would be left. Takes one number
    /// from `rng` for two candidates or more. If it acts, the likeliest is first afterwards.
    ///
    /// # Errors
    /// [`SamplerError::NoCandidate`] if there is none.
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
