//! Infill: tokens that fill a gap in a text, or end it.

use super::candidates::Candidates;
use super::error::SamplerError;
use crate::tokenizer::Tokenizer;

/// Every two candidates are compared, so no more than the likeliest are looked at.
const MOST: usize = 1024;
/// The least probability of a text token at first.
const LEAST: f32 = 0.2;

impl Candidates {
    /// Keeps tokens that end the text if they are likely enough beside the others. Otherwise keeps tokens of text with at least the probability 0.2,
    /// where a token that begins another one's text shares its probability, then those that are above the average; and if there are none, the
    /// token that ends a turn or text.
    ///
    /// # Errors
    /// [`SamplerError::NoCandidate`] if there is none.
    pub fn infill(&mut self, vocabulary: &Tokenizer) -> Result<(), SamplerError> {
        self.top_k(MOST);
        self.softmax()?;
        let is_end = |id| vocabulary.is_eog(id);
        let (mut end, mut text) = (0.0, 0.0);
        for candidate in self.as_slice() {
            match is_end(candidate.id) {
                true => end += candidate.probability,
                false => text += candidate.probability,
            }
        }
        if 3.0 * end * self.as_slice().len() as f32 > text {
            self.retain(|candidate| is_end(candidate.id));
            return Ok(());
        }
        self.merge_prefixes(|id| vocabulary.token_to_piece(id, false).unwrap_or_default());
        let likeliest = self.as_slice()[0];
        let mut of_text = 0;
        self.retain(|candidate| {
            let is_text = !is_end(candidate.id);
            let is_kept = !is_text || candidate.probability >= LEAST;
            of_text += usize::from(is_text && is_kept);
            is_kept
        });
        if of_text == 0 {
            let end = vocabulary.eot().or(vocabulary.eos());
            self.keep_token(end.unwrap_or(likeliest.id));
            return Ok(());
        }
        let sum: f32 = self.as_slice().iter().map(|kept| kept.probability).sum();
        let least = 1.0 / (of_text + 1) as f32;
        self.retain(|candidate| is_end(candidate.id) || candidate.probability / sum >= least);
        Ok(())
    }

    /// Where one token's text begins with another's, the likelier of the two gets both probabilities, and the other one none.
    fn merge_prefixes<'v>(&mut self, piece: impl Fn(u32) -> &'v [u8]) {
        let items = self.items_mut();
        let is_out = |logit: f32| logit == f32::NEG_INFINITY;
        for short in 0..items.len() {
            for long in 0..items.len() {
                if is_out(items[short].logit) {
                    break;
                }
                if short == long || is_out(items[long].logit) {
                    continue;
                }
                let prefix = piece(items[short].id);
                if prefix.is_empty() || !piece(items[long].id).starts_with(prefix) {
                    continue;
                }
                let (to, from) = match items[long].probability > items[short].probability {
                    true => (long, short),
                    false => (short, long),
                };
                items[to].probability += items[from].probability;
                items[from].probability = 0.0;
                items[from].logit = f32::NEG_INFINITY;
            }
        }
    }
}
