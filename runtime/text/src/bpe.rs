//! Byte-level BPE: bytes of a word merge into tokens in the order of a merge list.
//!
//! Vocabularies of this kind write each byte as a printable character (GPT-2's table). That
//! encoding is undone once, at construction; tokenizing works on plain bytes and on pairs of
//! numbers.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::error::VocabError;
use crate::merge::Merger;
use crate::pretokenize::{PreTokenizer, PreTokenizerSettings};
use crate::vocab::{Vocab, VocabData, check_count};

/// Working memory of [`Bpe::tokenize`].
type Words = Merger<Reverse<u32>>;

#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: u32,
    merged: u32,
}

/// The part of a byte-level BPE tokenizer that the vocabulary does not hold.
#[derive(Debug)]
pub(crate) struct Bpe {
    kind: PreTokenizer,
    /// Whole words that are tokens, as bytes, where merges are ignored for them.
    words: Option<HashMap<Box<[u8]>, u32>>,
    /// The symbol of each byte. Symbols below `tokens` are token ids; the others occur only inside
    /// merges.
    symbols: Box<[u32; 256]>,
    /// Which token stands for each byte of a symbol that is not a token.
    bytes: Box<[Option<u32>; 256]>,
    merges: HashMap<(u32, u32), Merge>,
    tokens: u32,
}

impl Bpe {
    pub(crate) fn new(
        vocab: &Vocab,
        data: &VocabData,
        settings: PreTokenizerSettings,
    ) -> Result<Self, VocabError> {
        let list = data.merges.as_ref().ok_or(VocabError::MissingMerges)?;
        check_count("tokenizer.ggml.merges", list.len())?;
        let tokens = vocab.tokens.len() as u32;

        let mut symbol_of: HashMap<Box<[u8]>, u32> = HashMap::with_capacity(vocab.tokens.len());
        for (id, token) in (0..).zip(&vocab.tokens) {
            if let Some(bytes) = decode(&token.text) {
                symbol_of.insert(bytes, id);
            }
        }
        let words = settings.ignore_merges.then(|| symbol_of.clone());
        let mut bytes = Box::new([None; 256]);
        for (byte, token) in (0..=u8::MAX).zip(bytes.iter_mut()) {
            *token = symbol_of
                .get([byte].as_slice())
                .copied()
                .or(vocab.special.unk);
        }

        // A merge may go through texts that are not tokens; they get numbers behind the tokens'.
        // There are at most three new ones for each of fewer than 2^31 merges, but they are counted
        // in 64 bits to be sure.
        let mut next = u64::from(tokens);
        let mut symbol = |text: Box<[u8]>| {
            *symbol_of.entry(text).or_insert_with(|| {
                let id = u32::try_from(next).unwrap_or(u32::MAX);
                next += 1;
                id
            })
        };
        let mut symbols = Box::new([0; 256]);
        for (byte, id) in (0..=u8::MAX).zip(symbols.iter_mut()) {
            *id = symbol([byte].into());
        }
        let mut merges = HashMap::with_capacity(list.len());
        for (rank, merge) in (0..).zip(list) {
            // What is not a pair of byte-level texts can never apply, and is skipped as llama.cpp
            // does.
            let Some((left, right)) = split_pair(merge) else {
                continue;
            };
            let (Some(left), Some(right)) = (decode(left), decode(right)) else {
                continue;
            };
            let merged = symbol([&*left, &*right].concat().into());
            let pair = (symbol(left), symbol(right));
            merges.entry(pair).or_insert(Merge { rank, merged });
        }
        if next > u64::from(u32::MAX) {
            return Err(VocabError::TooMany {
                key: "tokenizer.ggml.merges",
                count: list.len(),
                limit: u32::MAX as usize / 3,
            });
        }
        Ok(Self {
            kind: settings.kind,
            words,
            symbols,
            bytes,
            merges,
            tokens,
        })
    }

    /// Tokenizes one stretch of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let mut merger = Words::new();
        self.kind.split(text, &mut |word| {
            self.tokenize_word(word.as_bytes(), &mut merger, output)
        });
    }

    fn tokenize_word(&self, word: &[u8], merger: &mut Words, output: &mut Vec<u32>) {
        if let Some(&token) = self.words.as_ref().and_then(|words| words.get(word)) {
            output.push(token);
            return;
        }
        merger.clear();
        for (start, &byte) in (0..).zip(word) {
            merger.push(start, 1, self.symbols[usize::from(byte)]);
        }
        merger.run(|left, right| {
            let merge = self.merges.get(&(left.id, right.id))?;
            Some((Reverse(merge.rank), merge.merged))
        });
        for symbol in merger.remaining() {
            if symbol.id < self.tokens {
                output.push(symbol.id);
            } else {
                let bytes = &word[symbol.start as usize..symbol.end() as usize];
                output.extend(
                    bytes
                        .iter()
                        .filter_map(|&byte| self.bytes[usize::from(byte)]),
                );
            }
        }
    }
}

/// The two halves of a merge. The space between them is not the first character: that one belongs
/// to the left half.
fn split_pair(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = 1 + merge.get(1..)?.iter().position(|&byte| byte == b' ')?;
    let (left, right) = (&merge[..space], &merge[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// The byte that a character of GPT-2's table stands for. Printable Latin-1 stands for itself; the
/// other 68 bytes, in order, are the characters from U+0100 on.
fn byte_of_character(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The bytes that a stored text stands for; none if it holds a character outside the table.
fn decode(text: &[u8]) -> Option<Box<[u8]>> {
    std::str::from_utf8(text)
        .ok()?
        .chars()
        .map(byte_of_character)
        .collect()
}

/// The bytes that a stored text stands for, with characters outside the table kept as they are.
pub(crate) fn decode_lossy(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        for c in chunk.valid().chars() {
            match byte_of_character(c) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        bytes.extend_from_slice(chunk.invalid());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_table_is_a_bijection() {
        let mut seen = [false; 256];
        for byte in ('\0'..='\u{FFFF}').filter_map(byte_of_character) {
            assert!(!std::mem::replace(&mut seen[usize::from(byte)], true));
        }
        assert_eq!(seen, [true; 256]);
        // Known points: the space, the newline, delete, the soft hyphen.
        for (c, byte) in [
            ('Ġ', b' '),
            ('Ċ', b'\n'),
            ('ġ', 0x7F),
            ('Ń', 0xAD),
            ('ł', 0xA0),
            ('A', b'A'),
        ] {
            assert_eq!(byte_of_character(c), Some(byte));
        }
    }

    #[test]
    fn decoding() {
        assert_eq!(
            decode("Ġé".as_bytes()).as_deref(),
            Some([b' ', 0xE9].as_slice())
        );
        assert_eq!(decode("a b".as_bytes()), None);
        assert_eq!(decode(&[0xFF]), None);
        assert_eq!(decode_lossy(b"a b\xFF"), b"a b\xFF");
        assert_eq!(decode_lossy("Ġ漢".as_bytes()), " 漢".as_bytes());
    }

    #[test]
    fn pairs() {
        assert_eq!(
            split_pair(b"a bc"),
            Some((b"a".as_slice(), b"bc".as_slice()))
        );
        assert_eq!(split_pair(b"  b"), Some((b" ".as_slice(), b"b".as_slice())));
        for bad in ["", " ", "ab", "a ", " ab"] {
            assert_eq!(split_pair(bad.as_bytes()), None, "{bad:?}");
        }
    }
}
