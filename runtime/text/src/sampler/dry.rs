//! DRY ("don't repeat yourself"): penalizes tokens that would continue a repetition.

use super::candidates::Candidates;
use crate::tokenizer::Tokenizer;
use std::collections::VecDeque;

/// Maximum number of characters in a breaker.
const BREAKER_CHARACTERS: usize = 40;
/// Maximum number of tokens in a breaker after its first one.
const TAIL_TOKENS: usize = 20;
/// Logarithm of the largest number, so that no penalty becomes infinite.
const MAX_EXPONENT: f32 = 88.72;

/// Parameters of DRY; see [`SamplerParams`](crate::SamplerParams).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DryParams {
    /// Factor of the penalty.
    pub multiplier: f32,
    /// Base of the power, whose exponent is the length.
    pub base: f32,
    /// Repetitions shorter than this have no penalty.
    pub allowed_length: usize,
    /// Number of recent tokens to search.
    pub last_n: usize,
}

/// Lowers the logits of tokens that continue a repetition.
#[derive(Debug, Clone)]
pub struct Dry {
    params: DryParams,
    breakers: Breakers,
    last: VecDeque<u32>,
    /// True if `penalties` is outdated.
    is_stale: bool,
    repeats: Vec<usize>,
    penalties: Vec<(u32, f32)>,
}

impl Dry {
    /// Creates the stage for the start of a text.
    pub fn new(params: DryParams, breakers: Breakers) -> Self {
        Dry {
            params,
            breakers,
            last: VecDeque::new(),
            is_stale: false,
            repeats: Vec::new(),
            penalties: Vec::new(),
        }
    }

    /// Replaces the breakers.
    pub fn set_breakers(&mut self, breakers: Breakers) {
        self.breakers = breakers;
        self.is_stale = true;
    }

    /// Adds a token.
    pub fn accept(&mut self, token: u32) {
        if self.last.len() >= self.params.last_n {
            self.last.pop_front();
        }
        self.last.push_back(token);
        self.is_stale = true;
    }

    /// Returns the tokens whose logits are lowered, each with its penalty, in ascending order.
    pub fn penalties(&mut self) -> &[(u32, f32)] {
        if std::mem::take(&mut self.is_stale) {
            self.find();
        }
        &self.penalties
    }

    /// Lowers the logits.
    pub fn apply(&mut self, candidates: &mut Candidates) {
        for &(token, penalty) in self.penalties() {
            candidates.change_logit(token, |logit| logit - penalty);
        }
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        self.last.clear();
        self.penalties.clear();
        self.is_stale = false;
    }

    fn find(&mut self) {
        self.penalties.clear();
        let DryParams {
            multiplier,
            base,
            allowed_length,
            ..
        } = self.params;
        let count = self.last.len();
        let longest = self.since_breaker();
        if count <= allowed_length || longest < allowed_length {
            return;
        }
        self.count_repeats();
        let largest = if base > 1.000001 {
            (MAX_EXPONENT / libm::logf(base)) as usize
        } else {
            usize::MAX
        };
        for (back, &length) in self.repeats.iter().enumerate().skip(1) {
            let length = length.min(longest);
            let token = self.last[count - back];
            if length >= allowed_length && !self.breakers.is_breaker(token) {
                let power = (length - allowed_length).min(largest);
                let penalty = multiplier * libm::pow(f64::from(base), power as f64) as f32;
                self.penalties.push((token, penalty));
            }
        }
        // The largest of several penalties of one token.
        self.penalties
            .sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
        self.penalties.dedup_by_key(|penalty| penalty.0);
    }

    /// Returns the number of tokens after the last breaker.
    fn since_breaker(&self) -> usize {
        let count = self.last.len();
        for back in 0..count {
            let head = count - 1 - back;
            let is_next = |tail: &[u32]| {
                tail.len() <= back
                    && tail
                        .iter()
                        .eq(self.last.range(head + 1..head + 1 + tail.len()))
            };
            let tails = self.breakers.tails(self.last[head]);
            if let Some(longest) = tails.filter(|tail| is_next(tail)).map(<[u32]>::len).max() {
                return back - longest;
            }
        }
        count
    }

    /// Computes `repeats[n]`: the length of the common suffix of the text and the text without its
    /// last `n` tokens. This is the Z algorithm, starting from the end.
    fn count_repeats(&mut self) {
        let count = self.last.len();
        let from_end = |n: usize| self.last[count - 1 - n];
        self.repeats.clear();
        self.repeats.resize(count, 0);
        let (mut start, mut end) = (0, 0);
        for n in 1..count {
            let mut length = if n < end {
                self.repeats[n - start].min(end - n)
            } else {
                0
            };
            while n + length < count && from_end(length) == from_end(n + length) {
                length += 1;
            }
            self.repeats[n] = length;
            if n + length > end {
                (start, end) = (n, n + length);
            }
        }
    }
}

/// Sequences of tokens that interrupt a repetition: a first token, and those that follow it.
#[derive(Debug, Clone, Default)]
pub struct Breakers(Vec<(u32, Vec<u32>)>);

impl Breakers {
    /// Finds all tokenizations of `texts`: a token that contains the text, or a token that ends
    /// with a prefix of it, followed by the tokens of the rest.
    pub fn new(texts: &[String], vocabulary: &Tokenizer) -> Self {
        let mut all = Vec::new();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let cut = text.char_indices().nth(BREAKER_CHARACTERS);
            let text = &text[..cut.map_or(text.len(), |(at, _)| at)];
            // The tokens of the rest after each character.
            let rests: Vec<(usize, Vec<u32>)> = text
                .char_indices()
                .skip(1)
                .map(|(at, _)| {
                    let rest = vocabulary.tokenize(&text[at..], false, false);
                    let mut rest = rest.unwrap_or_default();
                    rest.truncate(TAIL_TOKENS);
                    (at, rest)
                })
                .collect();
            let text = text.as_bytes();
            for id in 0..vocabulary.vocab_size() as u32 {
                let piece = vocabulary.token_to_piece(id, true).unwrap_or_default();
                if piece.windows(text.len()).any(|part| part == text) {
                    all.push((id, Vec::new()));
                    continue;
                }
                for (at, rest) in &rests {
                    if piece.ends_with(&text[..*at]) {
                        all.push((id, rest.clone()));
                    }
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        Breakers(all)
    }

    /// Returns the token sequences that form a breaker after `head`.
    fn tails(&self, head: u32) -> impl Iterator<Item = &[u32]> {
        let first = self.0.partition_point(|entry| entry.0 < head);
        let of_head = self.0[first..]
            .iter()
            .take_while(move |entry| entry.0 == head);
        of_head.map(|entry| &*entry.1)
    }

    fn is_breaker(&self, token: u32) -> bool {
        self.tails(token).any(<[u32]>::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetition_lengths_match_the_definition() {
        let mut rng = crate::Rng::new(3);
        for _ in 0..2000 {
            let params = DryParams {
                multiplier: 1.0,
                base: 2.0,
                allowed_length: 1,
                last_n: 20,
            };
            let mut dry = Dry::new(params, Breakers::default());
            let tokens: Vec<u32> = (0..20).map(|_| rng.below(3) as u32).collect();
            tokens.iter().for_each(|&token| dry.accept(token));
            dry.count_repeats();
            for n in 1..20 {
                let (all, part) = (tokens.iter().rev(), tokens[..20 - n].iter().rev());
                let expected = all.zip(part).take_while(|(a, b)| a == b).count();
                assert_eq!(dry.repeats[n], expected, "{tokens:?} {n}");
            }
        }
    }
}
