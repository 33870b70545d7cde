//! Infill: keeps tokens that fill a gap in a text, or end it.

use super::candidates::Candidates;
use super::error::SamplerError;
use crate::tokenizer::Tokenizer;

/// Maximum number of candidates, because every two of them are compared.
const MOST: usize = 1024;
/// Minimum probability of a text token in the first step.
const LEAST: f32 = 0.2;

impl Candidates {
    /// Keeps only end-of-generation tokens if they are probable enough in comparison with the
    /// others. Otherwise keeps text tokens with a probability of at least 0.2, after merging the
    /// probabilities of tokens whose texts are prefixes of others. Of these, it keeps the ones
    /// above the average. If none are left, it keeps the end-of-turn or end-of-text token.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn infill(&mut self, vocabulary: &Tokenizer) -> Result<(), SamplerError> {
        self.top_k(MOST);
        self.softmax()?;
        let is_end = |id| vocabulary.is_eog(id);
        let (mut end, mut text) = (0.0, 0.0);
        for candidate in self.as_slice() {
            if is_end(candidate.id) {
                end += candidate.probability
            } else {
                text += candidate.probability
            }
        }
        if 3.0 * end * self.as_slice().len() as f32 > text {
            self.retain(|candidate| is_end(candidate.id));
            return Ok(());
        }
        self.merge_prefixes(|id| vocabulary.token_to_piece(id, false).unwrap_or_default());
        let top_tokens = self.as_slice()[0];
        let mut of_text = 0;
        self.retain(|candidate| {
            let is_text = !is_end(candidate.id);
            let is_kept = !is_text || candidate.probability >= LEAST;
            of_text += usize::from(is_text && is_kept);
            is_kept
        });
        if of_text == 0 {
            let end = vocabulary.eot().or(vocabulary.eos());
            self.keep_token(end.unwrap_or(top_tokens.id));
            return Ok(());
        }
        let sum: f32 = self.as_slice().iter().map(|kept| kept.probability).sum();
        let least = 1.0 / (of_text + 1) as f32;
        self.retain(|candidate| is_end(candidate.id) || candidate.probability / sum >= least);
        Ok(())
    }

    /// If the text of one token is a prefix of another's, assigns both probabilities to the more
    /// probable one, and none to the other.
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
                let (to, from) = if items[long].probability > items[short].probability {
                    (long, short)
                } else {
                    (short, long)
                };
                items[to].probability += items[from].probability;
                items[from].probability = 0.0;
                items[from].logit = f32::NEG_INFINITY;
            }
        }
    }
}
