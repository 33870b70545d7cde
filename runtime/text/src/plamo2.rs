//! PLaMo 2's tokenizer, which chooses the sequence of tokens with the best sum of scores.

use crate::error::VocabError;
use crate::trie::Trie;
use crate::vocab::{KEY_TOKENS, TokenAttributes, Vocab};

/// Cost of a character that no token covers.
const UNKNOWN: i64 = 10_000_000;

/// Cost from which on tokens are never used.
const NEVER: i64 = 20_000_000;

/// Cost of text that cannot be tokenized.
const IMPOSSIBLE: i64 = 1 << 60;

/// No token: the character is written as bytes.
const BYTES: u32 = u32::MAX;

/// The part of a PLaMo 2 tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Plamo2 {
    trie: Trie,
    bytes: Box<[u32; 256]>,
    /// Cost of each token: its negated score, in ten-thousandths.
    costs: Vec<i64>,
}

impl Plamo2 {
    pub(crate) fn new(vocab: &Vocab) -> Result<Self, VocabError> {
        let mut bytes = Box::new([0; 256]);
        for (byte, token) in (0..=u8::MAX).zip(bytes.iter_mut()) {
            *token = vocab.byte_token(byte).ok_or(VocabError::MissingByte {
                key: KEY_TOKENS,
                byte,
            })?;
        }
        let costs: Vec<i64> = vocab
            .tokens
            .iter()
            .map(|token| match f64::from(token.score) {
                score if score.is_finite() => -(score * 1e4).round() as i64,
                _ => NEVER,
            })
            .collect();
        // Tokens that control the model have no text.
        let no_text = TokenAttributes::BYTE
            .union(TokenAttributes::CONTROL)
            .union(TokenAttributes::UNKNOWN);
        let texts = (0..).zip(&vocab.tokens).filter(|(id, token)| {
            !token.attributes.intersects(no_text) && costs[*id as usize] < NEVER
        });
        Ok(Self {
            trie: Trie::new(texts.map(|(id, token)| (&*token.text, id))),
            bytes,
            costs,
        })
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        let bytes = text.as_bytes();
        // For each position, the cost of the text after it, and its first token with its length.
        let mut costs = vec![IMPOSSIBLE; bytes.len() + 1];
        costs[bytes.len()] = 0;
        let mut first = vec![(BYTES, 0); bytes.len()];
        for (start, c) in text.char_indices().rev() {
            let mut best = (IMPOSSIBLE, BYTES, c.len_utf8());
            self.trie.prefixes(&bytes[start..], |token, length| {
                let cost = costs[start + length].saturating_add(self.costs[token as usize]);
                // The longest of equally good tokens.
                if cost < IMPOSSIBLE && cost <= best.0 {
                    best = (cost, token, length);
                }
            });
            let unknown = costs[start + c.len_utf8()].saturating_add(UNKNOWN);
            if unknown < best.0 {
                best = (unknown, BYTES, c.len_utf8());
            }
            costs[start] = best.0;
            first[start] = (best.1, best.2);
        }
        let mut at = 0;
        while at < bytes.len() {
            let (token, length) = first[at];
            if token == BYTES {
                let bytes = bytes[at..at + length].iter();
                output.extend(bytes.map(|&byte| self.bytes[usize::from(byte)]));
            } else {
                output.push(token);
            }
            at += length;
        }
    }
}
