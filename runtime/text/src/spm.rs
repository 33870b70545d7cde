//! SentencePiece-style tokenizing: adjacent symbols merge in the order of the scores of the
//! results.
//!
//! The algorithm merges the best pair of the whole text. Where no token contains two adjacent
//! characters, nothing merges across, so the text splits into words with independent tokens. Most
//! words occur repeatedly.

use std::cmp::Ordering;

use crate::error::TokenizeError;
use crate::merge::Merger;
use crate::vocab::Vocab;
use crate::word_cache::WordCache;

/// Replacement for a space inside a token.
pub(crate) const ESCAPED_SPACE: &str = "\u{2581}";

const NO_TOKEN: u32 = u32::MAX;

/// A score as a priority. The vocabulary contains no NaN and no negative zero.
#[derive(Debug, PartialEq)]
struct Score(f32);

impl Eq for Score {}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The part of a SentencePiece-style tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Spm {
    /// Token of each byte that no other token covers.
    bytes: Box<[Option<u32>; 256]>,
    longest_token: usize,
    joints: Joints,
}

/// Pairs of characters that are adjacent inside tokens: a set of hashes, so it may contain other
/// pairs as well.
#[derive(Debug)]
struct Joints(Box<[u64; Joints::WORDS]>);

impl Joints {
    const BITS: u32 = 18;
    const WORDS: usize = 1 << (Self::BITS - 6);

    fn new(vocab: &Vocab) -> Self {
        let mut joints = Self(Box::new([0; Self::WORDS]));
        for token in &vocab.tokens {
            // Bytes that are not text never equal a part of a text.
            let mut last = None;
            for character in str::from_utf8(&token.text).unwrap_or_default().chars() {
                if let Some(last) = last.replace(character) {
                    let (word, bit) = Self::place(last, character);
                    joints.0[word] |= bit;
                }
            }
        }
        joints
    }

    fn place(left: char, right: char) -> (usize, u64) {
        let pair = u64::from(u32::from(left)) << 32 | u64::from(u32::from(right));
        let hash = pair.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - Self::BITS);
        ((hash >> 6) as usize, 1 << (hash & 63))
    }

    /// Splits a text where no token contains both adjacent characters.
    fn words<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let mut characters = rest.char_indices();
            let (_, mut last) = characters.next()?;
            let end = characters.find_map(|(at, character)| {
                let (word, bit) = Self::place(std::mem::replace(&mut last, character), character);
                (self.0[word] & bit == 0).then_some(at)
            });
            let (word, others) = rest.split_at(end.unwrap_or(rest.len()));
            rest = others;
            Some(word)
        })
    }
}

impl Spm {
    pub(crate) fn new(vocab: &Vocab) -> Self {
        let mut bytes = Box::new([None; 256]);
        for (byte, token) in (0..=u8::MAX).zip(bytes.iter_mut()) {
            *token = vocab
                .byte_token(byte)
                .or_else(|| vocab.find(&[byte]))
                .or(vocab.special.unk);
        }
        let longest_token = vocab
            .tokens
            .iter()
            .map(|token| token.text.len())
            .max()
            .unwrap_or(0);
        Self {
            bytes,
            longest_token,
            joints: Joints::new(vocab),
        }
    }

    /// Returns the token of a single byte.
    pub(crate) fn byte_token(&self, byte: u8) -> Option<u32> {
        self.bytes[usize::from(byte)]
    }

    /// Tokenizes a section of text, with a space before it if `space_prefix` is set.
    pub(crate) fn tokenize(
        &self,
        vocab: &Vocab,
        text: &str,
        space_prefix: bool,
        output: &mut Vec<u32>,
    ) -> Result<(), TokenizeError> {
        let escaped = escape(text, space_prefix)?;
        let mut merger = Merger::new();
        let mut cache = WordCache::new(escaped.len());
        for word in self.joints.words(&escaped) {
            cache.tokens_of(word.as_bytes(), output, |output| {
                self.merge(vocab, word.as_bytes(), &mut merger, output);
            });
        }
        Ok(())
    }

    /// Tokenizes a word by merging.
    fn merge(&self, vocab: &Vocab, word: &[u8], merger: &mut Merger<Score>, output: &mut Vec<u32>) {
        merger.clear();
        let mut start = 0;
        while start < word.len() {
            let end = start + character_length(word[start]);
            let token = vocab.find(&word[start..end]).unwrap_or(NO_TOKEN);
            merger.push(start as u32, (end - start) as u32, token);
            start = end;
        }
        merger.run(|left, right| {
            if (left.length + right.length) as usize > self.longest_token {
                return None;
            }
            let token = vocab.find(&word[left.start as usize..right.end() as usize])?;
            Some((Score(vocab.tokens[token as usize].score), token))
        });
        for symbol in merger.remaining() {
            if symbol.id == NO_TOKEN {
                let bytes = &word[symbol.start as usize..symbol.end() as usize];
                output.extend(bytes.iter().filter_map(|&byte| self.byte_token(byte)));
            } else {
                output.push(symbol.id);
            }
        }
    }
}

/// Replaces each space in a text by `▁`, and adds one before it if `space_prefix` is set.
pub(crate) fn escape(text: &str, space_prefix: bool) -> Result<String, TokenizeError> {
    let spaces = text.bytes().filter(|&byte| byte == b' ').count() + usize::from(space_prefix);
    let length = text
        .len()
        .saturating_add(spaces.saturating_mul(ESCAPED_SPACE.len()));
    let limit = u32::MAX as usize - 1;
    if length > limit {
        return Err(TokenizeError::TextTooLong { length, limit });
    }
    let mut escaped = String::with_capacity(length);
    if space_prefix {
        escaped.push_str(ESCAPED_SPACE);
    }
    for (index, word) in text.split(' ').enumerate() {
        if index > 0 {
            escaped.push_str(ESCAPED_SPACE);
        }
        escaped.push_str(word);
    }
    Ok(escaped)
}

/// Returns the number of bytes of the character that starts with `first`, in valid UTF-8.
pub(crate) fn character_length(first: u8) -> usize {
    match first {
        0..0xC0 => 1,
        0xC0..0xE0 => 2,
        0xE0..0xF0 => 3,
        0xF0.. => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocab::{TokenizerModel, VocabData};
    use proptest::prelude::*;

    proptest! {
        /// The reference algorithm works on the whole text.
        #[test]
        fn merging_by_words_matches_merging_the_whole_text(
            tokens in proptest::collection::btree_set("[ab▁é]{1,4}", 1..30),
            scores in proptest::collection::vec(-3i8..0, 31),
            text in "[ab ▁éx]{0,200}",
            times in 1usize..20,
        ) {
            let text = text.repeat(times);
            let mut data = VocabData::new(
                TokenizerModel::Llama,
                std::iter::once("<unk>")
                    .chain(tokens.iter().map(String::as_str))
                    .map(|token| token.as_bytes().to_vec())
                    .collect(),
            );
            data.scores = Some(
                scores[..tokens.len() + 1]
                    .iter()
                    .map(|&score| score.into())
                    .collect(),
            );
            let vocab = Vocab::new(&data).unwrap();
            let spm = Spm::new(&vocab);
            let (mut by_words, mut whole) = (Vec::new(), Vec::new());
            spm.tokenize(&vocab, &text, true, &mut by_words).unwrap();
            spm.merge(
                &vocab,
                escape(&text, true).unwrap().as_bytes(),
                &mut Merger::new(),
                &mut whole,
            );
            prop_assert_eq!(by_words, whole);
        }
    }
}
