//! BPE of the text between white space; the white space is dropped.

use crate::bpe::Bpe;

/// A BPE tokenizer of this kind.
#[derive(Debug)]
pub(crate) struct Whitespace {
    pub(crate) bpe: Box<Bpe>,
    /// True to convert text to lower case first.
    pub(crate) lowercase: bool,
}

impl Whitespace {
    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let mut lower = String::new();
        for word in text.split_whitespace() {
            if self.lowercase {
                lower.clear();
                lower.extend(word.chars().flat_map(char::to_lowercase));
                self.bpe.tokenize(&lower, output);
            } else {
                self.bpe.tokenize(word, output);
            }
        }
    }
}
