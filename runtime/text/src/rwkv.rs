//! RWKV's tokenizer, which repeatedly takes the longest token that is a prefix of the text.

use crate::trie::Trie;
use crate::vocab::{TokenAttributes, Vocab};

/// The part of an RWKV tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Rwkv {
    trie: Trie,
}

impl Rwkv {
    pub(crate) fn new(vocab: &Vocab) -> Self {
        let texts: Vec<Vec<u8>> = vocab
            .tokens
            .iter()
            .map(|token| {
                if token.attributes.intersects(TokenAttributes::CONTROL) {
                    Vec::new()
                } else {
                    unescape(&token.text)
                }
            })
            .collect();
        Self {
            trie: Trie::new(texts.iter().map(Vec::as_slice).zip(0..)),
        }
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, unknown: Option<u32>, text: &str, output: &mut Vec<u32>) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let length = match self.trie.longest(rest) {
                Some((token, length)) => {
                    output.push(token);
                    length
                }
                None => {
                    output.extend(unknown);
                    1
                }
            };
            rest = &rest[length..];
        }
    }
}

/// Decodes a token, which is written like a literal: `\t`, `\n`, `\r`, `\xHH`, and a backslash
/// before any other character.
pub(crate) fn unescape(text: &[u8]) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|&byte| char::from(byte).to_digit(16));
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(&byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(b't') => bytes.push(b'\t'),
            Some(b'n') => bytes.push(b'\n'),
            Some(b'r') => bytes.push(b'\r'),
            Some(b'x') => {
                let high = digit(rest.next()).unwrap_or(0);
                let low = digit(rest.next()).unwrap_or(0);
                bytes.push((high * 16 + low) as u8);
            }
            Some(&other) => bytes.push(other),
            None => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals() {
        assert_eq!(unescape(br"a\t\n\r\\\'\x00\xfF"), b"a\t\n\r\\'\x00\xFF");
        assert_eq!(unescape("é".as_bytes()), "é".as_bytes());
        // Incomplete escapes do not panic.
        assert_eq!(unescape(br"\"), b"");
        assert_eq!(unescape(br"\x"), b"\0");
        assert_eq!(unescape(br"\x4"), b"@");
    }
}
