//! Unigram language models, as in T5: choose the sequence of tokens with the highest sum of scores.
//!
//! Text is normalized first: by a character map in the file, and by replacing white space with `▁`.
//! This is not lossless.

use crate::error::VocabError;
use crate::gemma;
use crate::spm::{ESCAPED_SPACE, character_length};
use crate::trie::Trie;
use crate::vocab::{TokenAttributes, Vocab, VocabData};
use crate::word_cache::WordCache;

mod charsmap;

use charsmap::Charsmap;

/// Difference between the lowest score of a token and the score of text that no token covers.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Marks text that no token covers.
const UNKNOWN: u32 = u32::MAX;

/// The part of a unigram tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Ugm {
    trie: Trie,
    /// Texts that the normalizer does not change.
    user_defined: Trie,
    charsmap: Option<Charsmap>,
    scores: Vec<f64>,
    unknown_score: f64,
    unknown: Option<u32>,
    /// Last bytes before a `▁` inside tokens.
    before_space: Box<[bool; 256]>,
    space_before: bool,
    space_behind: bool,
    merge_spaces: bool,
}

/// Best tokenization of a text up to a position.
#[derive(Debug, Clone, Copy)]
struct Best {
    score: f64,
    token: u32,
    /// Start of its last token.
    start: u32,
}

impl Ugm {
    pub(crate) fn new(vocab: &Vocab, data: &VocabData) -> Result<Self, VocabError> {
        let is = |id: u32, flags: TokenAttributes| {
            let token = vocab.tokens.get(id as usize);
            token.is_some_and(|token| token.attributes.intersects(flags))
        };
        let text = TokenAttributes::NORMAL
            .union(TokenAttributes::USER_DEFINED)
            .union(TokenAttributes::UNUSED);
        let tokens = || {
            (0..)
                .zip(&vocab.tokens)
                .map(|(id, token)| (&*token.text, id))
        };
        let scores = (0..).zip(&vocab.tokens).map(|(id, token)| {
            if is(id, TokenAttributes::USER_DEFINED) {
                0.0
            } else {
                f64::from(token.score)
            }
        });
        let normal = vocab.tokens.iter();
        let lowest = normal
            .filter(|token| token.attributes.intersects(TokenAttributes::NORMAL))
            .map(|token| token.score)
            .fold(f32::MAX, f32::min);
        let mut before_space = Box::new([false; 256]);
        for (text, _) in tokens().filter(|&(_, id)| is(id, text)) {
            gemma::bytes_before_spaces(text, &mut before_space);
        }
        let prefix = data.add_space_prefix.unwrap_or(false);
        let suffix = data.treat_whitespace_as_suffix.unwrap_or(false);
        Ok(Self {
            trie: Trie::new(tokens().filter(|&(_, id)| is(id, text))),
            user_defined: Trie::new(
                tokens().filter(|&(_, id)| is(id, TokenAttributes::USER_DEFINED)),
            ),
            charsmap: match data.precompiled_charsmap.as_deref() {
                None | Some([]) => None,
                Some(bytes) => Some(Charsmap::new(bytes)?),
            },
            scores: scores.collect(),
            unknown_score: f64::from(lowest - UNKNOWN_PENALTY),
            unknown: vocab.special.unk,
            before_space,
            space_before: prefix && !suffix,
            space_behind: prefix && suffix,
            merge_spaces: data.remove_extra_whitespaces.unwrap_or(false),
        })
    }

    /// Returns whether a space is added before a text.
    pub(crate) fn adds_space(&self) -> bool {
        self.space_before || self.merge_spaces
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let normalized = self.normalize(text);
        let mut cache = WordCache::new(normalized.len());
        let mut best = Vec::new();
        let before = output.len();
        gemma::words(&normalized, &self.before_space, |range| {
            let word = &normalized[range];
            cache.tokens_of(word, output, |output| {
                self.tokenize_word(word, &mut best, output)
            });
        });
        // Adjacent pieces without a token form one unknown text.
        let mut kept = before;
        for index in before..output.len() {
            let token = output[index];
            if token != UNKNOWN || kept == before || output[kept - 1] != UNKNOWN {
                output[kept] = token;
                kept += 1;
            }
        }
        output.truncate(kept);
        match self.unknown {
            Some(unknown) => output[before..]
                .iter_mut()
                .filter(|token| **token == UNKNOWN)
                .for_each(|token| *token = unknown),
            None => {
                let found = output.split_off(before);
                output.extend(found.into_iter().filter(|&token| token != UNKNOWN));
            }
        }
    }

    fn tokenize_word(&self, word: &[u8], best: &mut Vec<Best>, output: &mut Vec<u32>) {
        let nothing = Best {
            score: f64::NEG_INFINITY,
            token: UNKNOWN,
            start: 0,
        };
        best.clear();
        best.resize(word.len() + 1, nothing);
        best[0].score = 0.0;
        let mut start = 0;
        while start < word.len() {
            let character = character_length(word[start]).min(word.len() - start);
            let here = best[start].score;
            let mut covered = false;
            let mut offer = |token: u32, length: usize, score: f64| {
                let there = &mut best[start + length];
                if here + score > there.score {
                    *there = Best {
                        score: here + score,
                        token,
                        start: start as u32,
                    };
                }
            };
            self.trie.prefixes(&word[start..], |token, length| {
                covered |= length == character;
                offer(token, length, self.scores[token as usize]);
            });
            if !covered {
                offer(UNKNOWN, character, self.unknown_score);
            }
            start += character;
        }
        let first = output.len();
        let mut end = word.len();
        while end > 0 {
            let last = best[end];
            output.push(last.token);
            end = last.start as usize;
        }
        output[first..].reverse();
    }

    /// Normalizes a text to the form of the tokens.
    fn normalize(&self, text: &str) -> Vec<u8> {
        let space = ESCAPED_SPACE.as_bytes();
        let bytes = text.as_bytes();
        let mut normalized = Vec::with_capacity(bytes.len() + bytes.len() / 4);
        let mut begun = false;
        let mut in_word = false;
        let mut at = 0;
        while at < bytes.len() {
            let (piece, length) = self.normalize_prefix(&bytes[at..]);
            for &byte in piece {
                if byte == b' ' {
                    in_word = false;
                    if !self.merge_spaces {
                        normalized.extend_from_slice(space);
                    }
                    continue;
                }
                if !in_word {
                    in_word = true;
                    if self.merge_spaces || self.space_before && !begun {
                        normalized.extend_from_slice(space);
                        begun = true;
                    }
                }
                normalized.push(byte);
            }
            at += length;
        }
        if self.space_behind {
            normalized.extend_from_slice(space);
        }
        normalized
    }

    /// Returns the normalized form of a prefix of the text, and the length of that prefix.
    fn normalize_prefix<'a>(&'a self, text: &'a [u8]) -> (&'a [u8], usize) {
        if let Some((_, length)) = self.user_defined.longest(text) {
            return (&text[..length], length);
        }
        if let Some(found) = self.charsmap.as_ref().and_then(|map| map.longest(text)) {
            return found;
        }
        let length = character_length(text[0]).min(text.len());
        (&text[..length], length)
    }
}
