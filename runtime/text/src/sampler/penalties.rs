//! Penalties, which make recent tokens less probable.

use super::candidates::Candidates;
use std::collections::{HashMap, VecDeque};

/// Number of occurrences of each recent token.
type TokenCounts = HashMap<u32, u32>;

/// Lowers the logits of recent tokens.
#[derive(Debug, Clone)]
pub struct Penalties {
    last_n: usize,
    repeat: f32,
    frequency: f32,
    presence: f32,
    last: VecDeque<u32>,
    counts: TokenCounts,
}

impl Penalties {
    /// Creates penalties over the last `last_n` tokens; see [`SamplerParams`](crate::SamplerParams)
    /// for the other parameters.
    pub fn new(last_n: usize, repeat: f32, frequency: f32, presence: f32) -> Self {
        Self {
            last_n,
            repeat,
            frequency,
            presence,
            last: VecDeque::new(),
            counts: TokenCounts::new(),
        }
    }

    /// Adds a token.
    pub fn accept(&mut self, token: u32) {
        if self.last_n == 0 {
            return;
        }
        if self.last.len() >= self.last_n
            && let Some(oldest) = self.last.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.last.push_back(token);
        *self.counts.entry(token).or_insert(0) += 1;
    }

    /// Returns the tokens whose logits are lowered, in no particular order.
    pub(super) fn tokens(&self) -> impl Iterator<Item = u32> {
        self.counts.keys().copied()
    }

    /// Returns whether [`apply`](Self::apply) leaves all logits unchanged.
    fn change_nothing(&self) -> bool {
        let off = self.repeat == 1.0 && self.frequency == 0.0 && self.presence == 0.0;
        off || self.counts.is_empty()
    }

    /// Lowers the logits of recent tokens. The repeat penalty divides positive logits and
    /// multiplies negative ones, so both become lower.
    pub fn apply(&self, candidates: &mut Candidates) {
        if self.change_nothing() {
            return;
        }
        for (&token, &count) in &self.counts {
            let subtracted = count as f32 * self.frequency + self.presence;
            candidates.change_logit(token, |logit| {
                let repeated = if logit <= 0.0 {
                    logit * self.repeat
                } else {
                    logit / self.repeat
                };
                repeated - subtracted
            });
        }
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        self.last.clear();
        self.counts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns probabilities by token after penalties, starting from equal ones.
    fn penalized(last: &[u32], (repeat, frequency, presence): (f32, f32, f32)) -> Vec<f32> {
        let mut penalties = Penalties::new(last.len(), repeat, frequency, presence);
        for &token in last {
            penalties.accept(token);
        }
        let mut candidates = Candidates::new();
        candidates.load(&[0.2f32.ln(); 5]).unwrap();
        penalties.apply(&mut candidates);
        candidates.softmax().unwrap();
        candidates
            .as_slice()
            .iter()
            .map(|candidate| candidate.probability)
            .collect()
    }

    /// The table of llama.cpp's own test.
    #[test]
    fn llama_cpp_table() {
        let repeat = (50.0, 0.0, 0.0);
        let alpha = (1.0, 5.0, 5.0);
        let cases = [
            (vec![0], repeat, [0.0, 0.25, 0.25, 0.25, 0.25]),
            (vec![0, 1, 2], repeat, [0.0, 0.0, 0.0, 0.5, 0.5]),
            (vec![0, 1, 2, 0, 0], repeat, [0.0, 0.0, 0.0, 0.5, 0.5]),
            (
                vec![0],
                alpha,
                [0.000011, 0.249997, 0.249997, 0.249997, 0.249997],
            ),
            (
                vec![0, 1, 2],
                alpha,
                [0.000023, 0.000023, 0.000023, 0.499966, 0.499966],
            ),
            (
                vec![0, 1, 2, 0, 0],
                alpha,
                [0.000000, 0.000023, 0.000023, 0.499977, 0.499977],
            ),
        ];
        for (last, penalties, expected) in cases {
            let actual = penalized(&last, penalties);
            for (a, e) in actual.iter().zip(expected) {
                assert!(
                    (a - e).abs() < 1e-5,
                    "{last:?} {penalties:?}: {actual:?}, expected {expected:?}"
                );
            }
        }
    }

    #[test]
    fn only_the_last_tokens_count() {
        let mut penalties = Penalties::new(2, 1.0, 1.0, 0.0);
        for token in [0, 0, 1, 2] {
            penalties.accept(token);
        }
        assert_eq!(penalties.counts, TokenCounts::from([(1, 1), (2, 1)]));
        let mut off = Penalties::new(0, 2.0, 1.0, 1.0);
        off.accept(0);
        assert!(off.counts.is_empty());
    }
}
