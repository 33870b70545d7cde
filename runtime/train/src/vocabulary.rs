//! Training a tokenizer: byte pair encoding ([Sennrich et al.
//! 2016](https://arxiv.org/abs/1508.07909)) in the form of a SentencePiece vocabulary with byte
//! fallback.

use crate::error::{Error, Result};
use samite_gguf::{Metadata, StringArray};
use samite_text::{Tokenizer, TokenizerModel, VocabData};
use std::collections::BTreeMap;

/// Replacement for a space.
const SPACE: char = '\u{2581}';

/// Number of special tokens and bytes, which come first.
const FIXED: usize = 3 + 256;

/// Kinds of tokens, with the numbers in files.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// A vocabulary: pieces of words, the more frequent ones first.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary {
    tokens: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<i32>,
}

impl Vocabulary {
    /// Trains a vocabulary of `size` tokens on `text`: first all letters, then repeatedly the most
    /// frequent pair of adjacent tokens within words. The result is deterministic.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if `size` is too small for the letters of the text, or if the text
    /// has too few pairs.
    pub fn train(text: &str, size: usize) -> Result<Self> {
        let words = count_words(text);
        let mut letters: BTreeMap<char, u64> = BTreeMap::new();
        for (word, count) in &words {
            for letter in word.chars() {
                *letters.entry(letter).or_default() += count;
            }
        }
        let least = FIXED + letters.len();
        if size < least {
            return Err(Error::config(format!(
                "model.vocabulary is {size}; special tokens, bytes and the letters of the data are {least}"
            )));
        }
        let mut pieces: Vec<String> = letters.keys().map(char::to_string).collect();
        let numbers: BTreeMap<char, usize> =
            letters.keys().enumerate().map(|(i, &c)| (c, i)).collect();
        let mut split: Vec<(Vec<usize>, u64)> = words
            .iter()
            .map(|(word, &count)| (word.chars().map(|c| numbers[&c]).collect(), count))
            .collect();
        while pieces.len() < size - FIXED {
            let mut pairs: BTreeMap<(usize, usize), u64> = BTreeMap::new();
            for (word, count) in &split {
                for pair in word.windows(2) {
                    *pairs.entry((pair[0], pair[1])).or_default() += count;
                }
            }
            // Among equally frequent pairs, the one with earlier tokens applies, so that the result
            // is deterministic.
            let best = pairs
                .into_iter()
                .max_by_key(|&(pair, count)| (count, std::cmp::Reverse(pair)));
            let Some(((a, b), _)) = best else {
                return Err(Error::config(format!(
                    "model.vocabulary is {size}; the data has only enough different words for {}",
                    FIXED + pieces.len()
                )));
            };
            let joined = pieces.len();
            pieces.push(format!("{}{}", pieces[a], pieces[b]));
            for (word, _) in &mut split {
                join(word, (a, b), joined);
            }
        }
        Ok(Self::from_pieces(pieces, letters.len()))
    }

    fn from_pieces(pieces: Vec<String>, letters: usize) -> Self {
        let special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)];
        let mut tokens: Vec<String> = special.iter().map(|(text, _)| (*text).into()).collect();
        let mut kinds: Vec<i32> = special.iter().map(|(_, kind)| *kind).collect();
        for byte in 0..=255u8 {
            tokens.push(format!("<0x{byte:02X}>"));
            kinds.push(BYTE);
        }
        let mut scores = vec![0.0; FIXED];
        for (rank, piece) in pieces.into_iter().enumerate() {
            // Letters get the lowest score, because pairs merge in the order of their scores.
            let score = if rank < letters {
                -1e6
            } else {
                -((rank - letters) as f32)
            };
            tokens.push(piece);
            kinds.push(NORMAL);
            scores.push(score);
        }
        Vocabulary {
            tokens,
            scores,
            kinds,
        }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are no tokens, which does not happen.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the tokenizer of this vocabulary.
    ///
    /// # Errors
    /// Returns an error if the tokenizer rejects the vocabulary, which would be a bug.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let model = TokenizerModel::from_name("llama")?;
        let tokens = self.tokens.iter().map(|t| t.clone().into_bytes()).collect();
        let data = VocabData {
            scores: Some(self.scores.clone()),
            token_types: Some(self.kinds.clone()),
            bos_id: Some(1),
            eos_id: Some(2),
            unk_id: Some(0),
            ..VocabData::new(model, tokens)
        };
        Ok(Tokenizer::new(data)?)
    }

    /// Writes the vocabulary to a model's metadata.
    ///
    /// # Errors
    /// Returns an error if a key cannot be set.
    pub fn write(&self, metadata: &mut Metadata) -> Result<()> {
        let tokens: StringArray = self.tokens.iter().cloned().collect();
        metadata.set("tokenizer.ggml.model", "llama")?;
        metadata.set("tokenizer.ggml.tokens", tokens)?;
        metadata.set("tokenizer.ggml.scores", self.scores.clone())?;
        metadata.set("tokenizer.ggml.token_type", self.kinds.clone())?;
        metadata.set("tokenizer.ggml.bos_token_id", 1u32)?;
        metadata.set("tokenizer.ggml.eos_token_id", 2u32)?;
        metadata.set("tokenizer.ggml.unknown_token_id", 0u32)?;
        Ok(())
    }
}

/// Counts the words, each with the space before it. Characters that are not letters form separate
/// words.
fn count_words(text: &str) -> BTreeMap<String, u64> {
    let mut words = BTreeMap::new();
    for line in text.lines() {
        let mut word = String::new();
        let finish = |word: &mut String, words: &mut BTreeMap<String, u64>| {
            if !word.is_empty() {
                *words.entry(std::mem::take(word)).or_default() += 1;
            }
        };
        // Add a space before the first word, as tokenizers do.
        for letter in std::iter::once(' ').chain(line.chars()) {
            let in_word = letter.is_alphanumeric() || letter == '\'';
            let after_word = word.chars().any(|c| c != SPACE);
            let after_mark = after_word
                && !word
                    .chars()
                    .last()
                    .is_some_and(|c| c.is_alphanumeric() || c == '\'');
            if letter == ' ' || !in_word && after_word || after_mark {
                finish(&mut word, &mut words);
            }
            word.push(if letter == ' ' { SPACE } else { letter });
        }
        finish(&mut word, &mut words);
    }
    words
}

/// Replaces each occurrence of a pair in a word by the token `joined`.
fn join(word: &mut Vec<usize>, (a, b): (usize, usize), joined: usize) {
    let (mut from, mut to) = (0, 0);
    while from < word.len() {
        if word[from] == a && word.get(from + 1) == Some(&b) {
            word[to] = joined;
            from += 2;
        } else {
            word[to] = word[from];
            from += 1;
        }
        to += 1;
    }
    word.truncate(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "The cat sat. \"The cat,\" said Tom, \"can't sit!\"\nThe dog sat on the cat.";

    #[test]
    fn words_include_their_space_and_punctuation_is_separate() {
        let words = count_words("a cat's, \"no\"");
        let all: Vec<_> = words.keys().map(String::as_str).collect();
        assert_eq!(all, ["\"", ",", "no", "▁\"", "▁a", "▁cat's"]);
    }

    #[test]
    fn frequent_words_become_tokens_and_text_round_trips() {
        let letters = Vocabulary::train(TEXT, 400).unwrap_err().to_string();
        assert!(letters.contains("only enough"), "{letters}");
        let vocabulary = Vocabulary::train(TEXT, 300).unwrap();
        assert_eq!(vocabulary.len(), 300);
        assert_eq!(vocabulary, Vocabulary::train(TEXT, 300).unwrap());
        let tokenizer = vocabulary.tokenizer().unwrap();
        for (text, tokens) in [("The cat", 2), ("the cat sat", 4)] {
            let ids = tokenizer.tokenize(text, false, false).unwrap();
            assert!(ids.len() <= tokens, "{text}: {ids:?}");
        }
        for text in [TEXT.lines().next().unwrap(), "Zebra ÄÖ 🦓"] {
            let ids = tokenizer.tokenize(text, false, false).unwrap();
            assert_eq!(tokenizer.detokenize(&ids).unwrap(), text.as_bytes());
        }
        let small = Vocabulary::train(TEXT, 260).unwrap_err().to_string();
        assert!(small.contains("model.vocabulary is 260"), "{small}");
    }

    #[test]
    fn pairs_are_joined_from_left_to_right() {
        let mut word = vec![1, 1, 1, 2, 1, 1];
        join(&mut word, (1, 1), 9);
        assert_eq!(word, [9, 1, 2, 9]);
    }
}
