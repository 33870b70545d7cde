//! BPE on plain text, as in Gemma 4: a space becomes `▁`, and merges cover whole lines.
//!
//! Text is not split into words before merging, so a line would be one long word. But hardly any
//! token continues from a letter into a space. Where no token does, nothing can merge, and a line
//! can be split there without changing its tokens.

use std::ops::Range;

use crate::bpe::Bpe;
use crate::error::TokenizeError;
use crate::spm::{ESCAPED_SPACE, escape};

/// A BPE tokenizer of this kind.
#[derive(Debug)]
pub(crate) struct Gemma {
    pub(crate) bpe: Box<Bpe>,
}

impl Gemma {
    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.bpe.tokenize_escaped(&escape(text, false)?, output);
        Ok(())
    }
}

/// Marks the bytes that precede a `▁` inside a text.
pub(crate) fn bytes_before_spaces(text: &[u8], marked: &mut [bool; 256]) {
    let space = ESCAPED_SPACE.as_bytes();
    for (at, window) in text.windows(space.len()).enumerate().skip(1) {
        let before = text[at - 1];
        if window == space && !text[..at].ends_with(space) {
            marked[usize::from(before)] = true;
        }
    }
}

/// Splits `text` before each run of `▁` that follows an unmarked byte, and calls `emit` with the
/// ranges.
pub(crate) fn words(text: &[u8], marked: &[bool; 256], mut emit: impl FnMut(Range<usize>)) {
    let space = ESCAPED_SPACE.as_bytes();
    let (mut start, mut at) = (0, 0);
    let mut in_spaces = true;
    while at < text.len() {
        let is_space = text[at] == space[0] && text[at..].starts_with(space);
        if is_space && !in_spaces && !marked[usize::from(text[at - 1])] {
            emit(start..at);
            start = at;
        }
        in_spaces = is_space;
        at += if is_space { space.len() } else { 1 };
    }
    if start < text.len() {
        emit(start..text.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_split_before_spaces_that_no_token_crosses() {
        let mut marked = [false; 256];
        bytes_before_spaces("b\u{2581}a\u{2581}\u{2581}".as_bytes(), &mut marked);
        bytes_before_spaces("\u{2581}\u{2581}c".as_bytes(), &mut marked);
        let marks: Vec<u8> = (0..=255)
            .filter(|&byte| marked[usize::from(byte)])
            .collect();
        assert_eq!(marks, b"ab");
        let text = "\u{2581}c\u{2581}\u{2581}b\u{2581}c\u{2581}";
        let mut pieces = Vec::new();
        words(text.as_bytes(), &marked, |range| pieces.push(&text[range]));
        assert_eq!(
            pieces,
            ["\u{2581}c", "\u{2581}\u{2581}b\u{2581}c", "\u{2581}"]
        );
    }
}
