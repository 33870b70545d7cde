//! BPE: symbols of a word merge into tokens in the order of a merge list.
//!
//! GPT-2-style vocabularies write each byte as a printable character. This encoding is decoded
//! once, at construction, and tokenizing works on plain bytes and pairs of numbers. Other
//! vocabularies store plain text: their symbols are characters, and characters without a token fall
//! back to byte tokens such as `<0x0A>`.

use std::cmp::Reverse;

use foldhash::{HashMap, HashMapExt};

use crate::error::VocabError;
use crate::merge::Merger;
use crate::pretokenize::{PreTokenizer, Settings};
use crate::vocab::{Vocab, VocabData, check_count};
use crate::word_cache::WordCache;

const KEY_MERGES: &str = "tokenizer.ggml.merges";

/// No symbol: it does not merge with others, and its bytes are output.
const NONE: u32 = u32::MAX;

/// Maximum number of symbols of a word for which the best pair is found by a linear search.
const SHORT: usize = 48;

/// Maximum length of tokens that can be reached in a vocabulary without merges.
const MAX_LEN_WITHOUT_MERGES: usize = 1 << 8;

/// Encoding of text in a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Each byte is a character of GPT-2's table.
    Bytes,
    /// Plain text.
    Plain,
    /// Plain text, with `▁` for a space.
    Escaped,
}

#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: u32,
    merged: u32,
}

/// The part of a BPE tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Bpe {
    words: PreTokenizer,
    /// Words that are tokens as a whole, if the vocabulary ignores merges for them.
    whole: Option<HashMap<Box<[u8]>, u32>>,
    /// Symbol of each byte, or of each ASCII character. Symbols below `tokens` are token ids; the
    /// others occur only in merges.
    symbols: Box<[u32; 256]>,
    /// Symbols of other characters, if symbols are characters.
    characters: Option<HashMap<char, u32>>,
    /// Token of each byte, for symbols that are not tokens.
    bytes: Box<[Option<u32>; 256]>,
    /// Token for a whole symbol, if one of its bytes has no token.
    unknown: Option<u32>,
    merges: HashMap<(u32, u32), Merge>,
    tokens: u32,
    /// Last bytes before a `▁` inside merged texts.
    before_space: Box<[bool; 256]>,
}

impl Bpe {
    pub(crate) fn new(
        vocab: &Vocab,
        data: &VocabData,
        settings: Settings,
    ) -> Result<Self, VocabError> {
        let tokens = vocab.tokens.len() as u32;
        let is_bytes = settings.encoding == Encoding::Bytes;
        let decoded = |text: &[u8]| -> Option<Box<[u8]>> {
            if is_bytes {
                decode(text)
            } else {
                std::str::from_utf8(text).is_ok().then(|| text.into())
            }
        };

        let mut symbol_of: HashMap<Box<[u8]>, u32> = HashMap::with_capacity(vocab.tokens.len());
        for (id, token) in (0..).zip(&vocab.tokens) {
            if let Some(bytes) = decoded(&token.text) {
                symbol_of.insert(bytes, id);
            }
        }
        let whole = settings.ignore_merges.then(|| symbol_of.clone());
        let mut bytes = Box::new([None; 256]);
        for (byte, token) in (0..=u8::MAX).zip(bytes.iter_mut()) {
            let found = if is_bytes {
                symbol_of.get([byte].as_slice()).copied()
            } else {
                vocab.byte_token(byte)
            };
            *token = if is_bytes {
                found.or(vocab.special.unk)
            } else {
                found
            };
        }

        let mut merges = HashMap::new();
        match &data.merges {
            None if settings.merges_optional => by_rank_of_tokens(&symbol_of, &mut merges),
            None => return Err(VocabError::MissingMerges),
            Some(list) => {
                check_count(KEY_MERGES, list.len())?;
                merges.reserve(list.len());
                // Merges may produce intermediate texts that are not tokens; these get numbers
                // after the tokens. There are at most three new ones for each of fewer than 2^31
                // merges; 64 bits are used to be safe.
                let mut next = u64::from(tokens);
                let mut symbol = |text: Box<[u8]>| {
                    *symbol_of.entry(text).or_insert_with(|| {
                        let id = u32::try_from(next).unwrap_or(NONE);
                        next += 1;
                        id
                    })
                };
                for (rank, merge) in (0..).zip(list) {
                    let Some((left, right)) = split_pair(merge) else {
                        continue;
                    };
                    let (Some(left), Some(right)) = (decoded(left), decoded(right)) else {
                        continue;
                    };
                    let merged = symbol([&*left, &*right].concat().into());
                    let pair = (symbol(left), symbol(right));
                    merges.entry(pair).or_insert(Merge { rank, merged });
                }
                if next >= u64::from(NONE) {
                    return Err(VocabError::TooMany {
                        key: KEY_MERGES,
                        count: list.len(),
                        limit: u32::MAX as usize / 3,
                    });
                }
            }
        }

        let mut symbols = Box::new([NONE; 256]);
        for (byte, symbol) in (0..=u8::MAX).zip(symbols.iter_mut()) {
            if is_bytes || byte.is_ascii() {
                *symbol = symbol_of.get([byte].as_slice()).copied().unwrap_or(NONE);
            }
        }
        let characters = (!is_bytes).then(|| {
            let texts = symbol_of.iter();
            texts
                .filter_map(|(text, &symbol)| {
                    let mut characters = std::str::from_utf8(text).ok()?.chars();
                    let only = characters.next()?;
                    characters.next().is_none().then_some((only, symbol))
                })
                .collect()
        });
        let mut before_space = Box::new([false; 256]);
        if settings.encoding == Encoding::Escaped {
            for text in symbol_of.keys() {
                crate::gemma::bytes_before_spaces(text, &mut before_space);
            }
        }
        Ok(Self {
            words: PreTokenizer::new(settings),
            whole,
            symbols,
            characters,
            bytes,
            unknown: vocab.special.unk.filter(|_| !is_bytes),
            merges,
            tokens,
            before_space,
        })
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        let mut cache = WordCache::new(text.len());
        self.words.split(text, &mut |word| {
            let bytes = word.as_bytes();
            cache.tokens_of(bytes, output, |output| {
                self.tokenize_word(word, &mut scratch, output)
            });
        });
    }

    /// Tokenizes a section of text whose words are split further: before spaces that never merge
    /// with what precedes them.
    pub(crate) fn tokenize_escaped(&self, text: &str, output: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        let mut cache = WordCache::new(text.len());
        self.words.split(text, &mut |word| {
            crate::gemma::words(word.as_bytes(), &self.before_space, |range| {
                let word = &word[range];
                cache.tokens_of(word.as_bytes(), output, |output| {
                    self.tokenize_word(word, &mut scratch, output)
                });
            });
        });
    }

    /// Returns whether tokens are stored as plain text, without a mark for spaces.
    pub(crate) fn is_plain(&self) -> bool {
        self.characters.is_some()
    }

    pub(crate) fn pre_tokenizer(&self) -> &PreTokenizer {
        &self.words
    }

    pub(crate) fn before_space(&self) -> &[bool; 256] {
        &self.before_space
    }

    fn tokenize_word(&self, word: &str, scratch: &mut Scratch, output: &mut Vec<u32>) {
        let bytes = word.as_bytes();
        if let Some(&token) = self.whole.as_ref().and_then(|whole| whole.get(bytes)) {
            output.push(token);
            return;
        }
        let parts = &mut scratch.parts;
        parts.clear();
        match &self.characters {
            None => parts.extend((0..).zip(bytes).map(|(start, &byte)| BpeSymbol {
                start,
                symbol: self.symbols[usize::from(byte)],
                ..BpeSymbol::default()
            })),
            Some(characters) => parts.extend(word.char_indices().map(|(start, c)| BpeSymbol {
                start: start as u32,
                symbol: if c.is_ascii() {
                    self.symbols[c as usize]
                } else {
                    characters.get(&c).copied().unwrap_or(NONE)
                },
                ..BpeSymbol::default()
            })),
        }
        if parts.len() <= SHORT {
            self.merge_short(parts);
            for (index, part) in parts.iter().enumerate() {
                let end = parts
                    .get(index + 1)
                    .map_or(bytes.len(), |next| next.start as usize);
                self.push(part.symbol, &bytes[part.start as usize..end], output);
            }
            return;
        }
        let merger = &mut scratch.merger;
        merger.clear();
        for (index, part) in parts.iter().enumerate() {
            let end = parts
                .get(index + 1)
                .map_or(bytes.len() as u32, |next| next.start);
            merger.push(part.start, end - part.start, part.symbol);
        }
        merger.run(|left, right| {
            let merge = self.merges.get(&(left.id, right.id))?;
            Some((Reverse(merge.rank), merge.merged))
        });
        for symbol in merger.remaining() {
            let bytes = &bytes[symbol.start as usize..symbol.end() as usize];
            self.push(symbol.id, bytes, output);
        }
    }

    /// Merges the parts of a short word: always the leftmost pair with the lowest rank.
    fn merge_short(&self, parts: &mut Vec<BpeSymbol>) {
        let merge = |parts: &[BpeSymbol], left: usize| {
            let pair = (parts[left].symbol, parts.get(left + 1)?.symbol);
            self.merges.get(&pair)
        };
        let unable = Merge {
            rank: NONE,
            merged: NONE,
        };
        for left in 0..parts.len() {
            let found = merge(parts, left).unwrap_or(&unable);
            (parts[left].rank, parts[left].merged) = (found.rank, found.merged);
        }
        loop {
            let mut best = 0;
            let mut rank = NONE;
            for (index, part) in parts.iter().enumerate() {
                if part.rank < rank {
                    (best, rank) = (index, part.rank);
                }
            }
            if rank == NONE {
                return;
            }
            parts[best].symbol = parts[best].merged;
            parts.remove(best + 1);
            for left in [best, best.wrapping_sub(1)] {
                if left < parts.len() {
                    let found = merge(parts, left).unwrap_or(&unable);
                    (parts[left].rank, parts[left].merged) = (found.rank, found.merged);
                }
            }
        }
    }

    fn push(&self, symbol: u32, bytes: &[u8], output: &mut Vec<u32>) {
        let token = |&byte: &u8| self.bytes[usize::from(byte)];
        if symbol < self.tokens {
            output.push(symbol);
        } else if self.unknown.is_some() && !bytes.iter().all(|byte| token(byte).is_some()) {
            output.extend(self.unknown);
        } else {
            output.extend(bytes.iter().filter_map(token));
        }
    }
}

/// Temporary buffers for tokenizing a text.
#[derive(Debug, Default)]
struct Scratch {
    parts: Vec<BpeSymbol>,
    merger: Merger<Reverse<u32>>,
}

/// A symbol of a word, and the result of its merge with the next symbol.
#[derive(Debug, Clone, Copy, Default)]
struct BpeSymbol {
    start: u32,
    symbol: u32,
    rank: u32,
    merged: u32,
}

/// Derives merges from the ranks of tokens, like tiktoken: any two symbols that form a token merge,
/// the token with the lowest rank first.
fn by_rank_of_tokens(symbol_of: &HashMap<Box<[u8]>, u32>, merges: &mut HashMap<(u32, u32), Merge>) {
    for (text, &id) in symbol_of {
        if text.len() > MAX_LEN_WITHOUT_MERGES {
            continue;
        }
        for middle in 1..text.len() {
            let (left, right) = text.split_at(middle);
            if let (Some(&left), Some(&right)) = (symbol_of.get(left), symbol_of.get(right)) {
                let merge = Merge {
                    rank: id,
                    merged: id,
                };
                merges.insert((left, right), merge);
            }
        }
    }
}

/// Splits a merge into its two halves. The separating space is not the first character, which
/// belongs to the left half.
fn split_pair(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = 1 + merge.get(1..)?.iter().position(|&byte| byte == b' ')?;
    let (left, right) = (&merge[..space], &merge[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// Returns the byte of a character of GPT-2's table. Printable Latin-1 characters represent
/// themselves; the other 68 bytes are represented, in order, by the characters from U+0100 on.
fn byte_of_character(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Decodes a stored text to bytes. Returns `None` if it contains a character outside the table.
fn decode(text: &[u8]) -> Option<Box<[u8]>> {
    std::str::from_utf8(text)
        .ok()?
        .chars()
        .map(byte_of_character)
        .collect()
}

/// Decodes a stored text to bytes, and keeps characters outside the table unchanged.
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
    fn byte_level_decoding() {
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
