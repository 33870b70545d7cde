//! SentencePiece-style tokenizing: neighbours merge in the order of the scores of what they become.

use std::cmp::Ordering;

use crate::error::TokenizeError;
use crate::merge::Merger;
use crate::vocab::Vocab;

/// What stands for a space inside a token.
pub(crate) const ESCAPED_SPACE: &str = "\u{2581}";

const NO_TOKEN: u32 = u32::MAX;

/// A score as a priority. The vocabulary holds no NaN and no negative zero.
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

/// The part of a SentencePiece-style tokenizer that the vocabulary does not hold.
#[derive(Debug)]
pub(crate) struct Spm {
    /// Which token stands for each byte that no other token covers.
    bytes: Box<[Option<u32>; 256]>,
    longest_token: usize,
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
        }
    }

    /// Which token a lone byte becomes.
    pub(crate) fn byte_token(&self, byte: u8) -> Option<u32> {
        self.bytes[usize::from(byte)]
    }

    /// Tokenizes one stretch of text, with a space put before it if `space_prefix`.
    pub(crate) fn tokenize(
        &self,
        vocab: &Vocab,
        text: &str,
        space_prefix: bool,
        output: &mut Vec<u32>,
    ) -> Result<(), TokenizeError> {
        let escaped = escape(text, space_prefix)?;
        let escaped = escaped.as_bytes();

        let mut merger = Merger::new();
        let mut start = 0;
        while start < escaped.len() {
            let end = start + character_length(escaped[start]);
            let token = vocab.find(&escaped[start..end]).unwrap_or(NO_TOKEN);
            merger.push(start as u32, (end - start) as u32, token);
            start = end;
        }
        merger.run(|left, right| {
            if (left.length + right.length) as usize > self.longest_token {
                return None;
            }
            let token = vocab.find(&escaped[left.start as usize..right.end() as usize])?;
            Some((Score(vocab.tokens[token as usize].score), token))
        });
        for symbol in merger.remaining() {
            if symbol.id == NO_TOKEN {
                let bytes = &escaped[symbol.start as usize..symbol.end() as usize];
                output.extend(bytes.iter().filter_map(|&byte| self.byte_token(byte)));
            } else {
                output.push(symbol.id);
            }
        }
        Ok(())
    }
}

/// A text with `▁` for each space, and one before it if `space_prefix`.
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

/// Bytes of the character that starts with `first`, in valid UTF-8.
pub(crate) fn character_length(first: u8) -> usize {
    match first {
        0..0xC0 => 1,
        0xC0..0xE0 => 2,
        0xE0..0xF0 => 3,
        0xF0.. => 4,
    }
}
