//! PLaMo 2's tokenizer: of all ways to write a text in tokens, the one whose scores add up best.

use crate::error::VocabError;
use crate::trie::Trie;
use crate::vocab::{KEY_TOKENS, TokenAttributes, Vocab};

/// What a character costs that no token covers.
const UNKNOWN: i64 = 10_000_000;

/// Tokens that cost so much are never taken.
const NEVER: i64 = 20_000_000;

/// Cost of what cannot be written.
const IMPOSSIBLE: i64 = 1 << 60;

/// No token: the character's bytes stand there.
const BYTES: u32 = u32::MAX;

/// The part of a PLaMo 2 tokenizer that the vocabulary does not hold.
#[derive(Debug)]
pub(crate) struct Plamo2 {
    trie: Trie,
    bytes: Box<[u32; 256]>,
    /// What each token costs: its score, negative, in ten-thousandths.
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
        // What steers the model is no text.
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

    /// Tokenizes one stretch of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        let bytes = text.as_bytes();
        // For each place, what the text from there on costs, and the token and length that it begins with.
        let mut costs = vec![IMPOSSIBLE; bytes.len() + 1];
        costs[bytes.len()] = 0;
        let mut first = vec![(BYTES, 0); bytes.len()];
        for (start, c) in text.char_indices().rev() {
            let mut best = (IMPOSSIBLE, BYTES, c.len_utf8());
            self.trie.prefixes(&bytes[start..], |token, length| {
                let cost = costs[start + length].saturating_add(self.costs[token as usize]);
                // Of equals, the longest.
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
