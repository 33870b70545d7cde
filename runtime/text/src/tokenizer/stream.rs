//! Tokenizes a text that arrives in pieces and does not have to be in memory as a whole.

use super::Tokenizer;
use crate::error::TokenizeError;
use crate::model::Model;
use crate::spm::ESCAPED_SPACE;
use crate::vocab::TokenAttributes;

/// Number of bytes that are collected before some of them are tokenized.
const PIECE: usize = 64 << 10;

/// Maximum length of a text without a possible split point, in bytes, for example a line without
/// spaces.
const MAX_PIECE_LEN: usize = 8 << 20;

/// Converts a text in pieces to the tokens that [`Tokenizer::tokenize`] returns for the whole. It
/// keeps only text whose tokens may still change: about 64 KiB of ordinary text.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    cuts: Cuts,
    add_special: bool,
    parse_special: bool,
    begun: bool,
    after_special: bool,
    pending: String,
    /// Number of first bytes of `pending` without a split point.
    searched: usize,
    piece: usize,
}

impl Tokenizer {
    /// Starts to tokenize a text in pieces; the flags are those of [`tokenize`](Self::tokenize).
    pub fn stream(&self, add_special: bool, parse_special: bool) -> TokenStream<'_> {
        TokenStream {
            tokenizer: self,
            cuts: Cuts::new(self),
            add_special,
            parse_special,
            begun: false,
            after_special: true,
            pending: String::new(),
            searched: 0,
            piece: PIECE,
        }
    }
}

impl TokenStream<'_> {
    /// Processes the next piece, and adds the tokens that are certain now to `output`.
    ///
    /// # Errors
    /// Returns [`TokenizeError::TextTooLong`] if the text has no split point for 8 MiB.
    pub fn push(&mut self, text: &str, output: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.begin(output);
        self.pending.push_str(text);
        if self.pending.len() < self.piece {
            return Ok(());
        }
        if let Some(cut) = self.cuts.last(self.pending.as_bytes(), self.searched) {
            self.part(cut, output)?;
        }
        self.searched = self.pending.len();
        if self.searched > MAX_PIECE_LEN {
            return Err(TokenizeError::TextTooLong {
                length: self.searched,
                limit: MAX_PIECE_LEN,
            });
        }
        Ok(())
    }

    /// Ends the text, and adds the remaining tokens to `output`.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::tokenize`].
    pub fn finish(mut self, output: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.begin(output);
        self.part(self.pending.len(), output)?;
        if self.add_special {
            self.tokenizer.end(output);
        }
        Ok(())
    }

    fn begin(&mut self, output: &mut Vec<u32>) {
        if !self.begun && self.add_special {
            self.tokenizer.begin(output);
        }
        self.begun = true;
    }

    /// Tokenizes the first `end` bytes of the pending text.
    fn part(&mut self, end: usize, output: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.tokenizer.tokenize_part(
            &self.pending[..end],
            self.parse_special,
            &mut self.after_special,
            output,
        )?;
        self.pending.drain(..end);
        Ok(())
    }
}

/// Points where a text can be split without changing its tokens.
///
/// Nearly every pre-tokenizer splits between a line break and the letter or digit that starts the
/// next line, and before a space between two letters. If the vocabulary has tokens that span such a
/// point, it is not used.
#[derive(Debug)]
struct Cuts {
    /// Bytes that follow a line break inside a token.
    after_break: Box<[bool; 256]>,
    /// Bytes that precede a space inside a token.
    before_space: Box<[bool; 256]>,
    between_lines: bool,
    between_words: bool,
}

impl Cuts {
    fn new(tokenizer: &Tokenizer) -> Self {
        let model = &tokenizer.model;
        let all = model.can_be_cut();
        let pre = model.pre_tokenizer();
        let mut cuts = Cuts {
            after_break: Box::new([false; 256]),
            before_space: Box::new(model.before_space().copied().unwrap_or([false; 256])),
            between_lines: all && pre.is_none_or(|pre| pre.cuts(".\na", 2)),
            between_words: all && pre.is_none_or(|pre| pre.cuts("a b", 1)),
        };
        for (id, token) in (0..).zip(&tokenizer.vocab.tokens) {
            let attributes = token.attributes;
            // A token that strips adjacent spaces would lose them at a split.
            let strips = TokenAttributes::RIGHT_STRIP.union(TokenAttributes::LEFT_STRIP);
            cuts.between_words &= !attributes.intersects(strips);
            cuts.between_lines &= !attributes.intersects(TokenAttributes::LEFT_STRIP);
            let text = match model {
                Model::Rwkv(_) if attributes.intersects(TokenAttributes::NORMAL) => {
                    tokenizer.pieces.get(id)
                }
                _ => &token.text,
            };
            for (at, &byte) in text.iter().enumerate().skip(1) {
                let before = text[at - 1];
                if before == b'\n' {
                    cuts.after_break[usize::from(byte)] = true;
                }
                if byte == b' ' || text[at..].starts_with(ESCAPED_SPACE.as_bytes()) {
                    cuts.before_space[usize::from(before)] = true;
                }
            }
        }
        cuts
    }

    /// Returns the last split point of `text`, after its first `searched` bytes.
    fn last(&self, text: &[u8], searched: usize) -> Option<usize> {
        let first = searched.saturating_sub(1).max(2);
        (first..text.len().saturating_sub(1))
            .rev()
            .find(|&at| self.is_cut(text, at))
    }

    /// Returns whether `text` can be split before byte `at`.
    fn is_cut(&self, text: &[u8], at: usize) -> bool {
        let (before, byte) = (text[at - 1], text[at]);
        let between_lines = self.between_lines
            && before == b'\n'
            && byte.is_ascii_alphanumeric()
            && text[at - 2].is_ascii_graphic()
            && !self.after_break[usize::from(byte)];
        let between_words = self.between_words
            && byte == b' '
            && before.is_ascii_alphabetic()
            && text[at + 1].is_ascii_alphabetic()
            && !self.before_space[usize::from(before)];
        between_lines || between_words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pretokenize::PreTokenizer;
    use crate::vocab::{TokenizerModel, VocabData};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// Creates a vocabulary with tokens that span line breaks and spaces.
    fn data(model: TokenizerModel, plain: &[&str], special: &[&str]) -> VocabData {
        let bytes = (0..=255u8).map(|byte| match model {
            TokenizerModel::Gpt2 => character_of_byte(byte).to_string(),
            _ => format!("<0x{byte:02X}>"),
        });
        let texts: Vec<String> = bytes
            .chain(plain.iter().chain(special).map(|&text| text.to_owned()))
            .collect();
        let mut data = VocabData::new(
            model,
            texts.iter().map(|text| text.as_bytes().to_vec()).collect(),
        );
        let kind = |i: usize| match i {
            _ if i < 256 && model != TokenizerModel::Gpt2 => 6,
            _ if i < 256 + plain.len() => 1,
            _ => 4,
        };
        data.token_types = Some((0..texts.len()).map(kind).collect());
        data.scores = Some((0..texts.len()).map(|i| -(i as f32)).collect());
        data.pre = Some("llama-bpe".into());
        data.merges = Some(vec![b"a b".to_vec(), "\u{120} a".into(), b"ab c".to_vec()]);
        data
    }

    fn tokenizer(model: TokenizerModel, plain: &[&str], special: &[&str]) -> Tokenizer {
        Tokenizer::new(data(model, plain, special)).unwrap()
    }

    /// GPT-2's table.
    fn character_of_byte(byte: u8) -> char {
        let printable = |b: u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        if printable(byte) {
            return char::from(byte);
        }
        let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
        char::from_u32(0x100 + rank).unwrap()
    }

    fn streamed(tokenizer: &Tokenizer, pieces: &[String]) -> (Vec<u32>, usize) {
        let mut stream = tokenizer.stream(true, true);
        stream.piece = 1;
        let (mut output, mut most) = (Vec::new(), 0);
        for piece in pieces {
            stream.push(piece, &mut output).unwrap();
            most = most.max(stream.pending.len());
        }
        stream.finish(&mut output).unwrap();
        (output, most)
    }

    fn tokenizers() -> [Tokenizer; 3] {
        let letters = [
            "a",
            "b",
            "c",
            "ab",
            "bc",
            "abc",
            "\u{2581}",
            "\u{2581}a",
            "\u{2581}ab",
        ];
        let across = ["a\u{2581}", "a\u{2581}b", "\n", "\nb", "c\nb"];
        let plain: Vec<_> = letters.iter().chain(&across).copied().collect();
        [
            tokenizer(TokenizerModel::Llama, &letters, &["<s>", "b c"]),
            tokenizer(TokenizerModel::Llama, &plain, &["<s>", "s\nc"]),
            tokenizer(
                TokenizerModel::Gpt2,
                &["ab", "\u{120}a", "abc"],
                &["<s>", "c a", "a\nb"],
            ),
        ]
    }

    /// Returns every pre-tokenizer, and the kinds without one.
    fn all() -> Vec<(String, Tokenizer)> {
        let mut all = Vec::new();
        for name in PreTokenizer::names() {
            let plain = ["ab", "\u{120}a", "abc", "b\u{120}", "\u{10A}c"];
            let mut data = data(TokenizerModel::Gpt2, &plain, &["<s>"]);
            data.pre = Some(name.to_owned());
            // Merges that span the boundaries of most pre-tokenizers.
            let across = ["b \u{120}", "\u{10A} c"].map(|merge| merge.as_bytes().to_vec());
            data.merges.get_or_insert_default().extend(across);
            all.push((name.to_owned(), Tokenizer::new(data).unwrap()));
        }
        let words = [
            "a",
            "b",
            "c",
            "ab",
            "\u{2581}",
            "\u{2581}a",
            "\u{2581}ab",
            "\u{2581}1",
        ];
        let across = [
            "a",
            "b",
            "c",
            "\u{2581}",
            "a\u{2581}",
            "a b",
            "c\nb",
            "1\\nb",
        ];
        let others = TokenizerModel::ALL
            .into_iter()
            .filter(|&model| model != TokenizerModel::Gpt2);
        for model in others {
            for plain in [&words, &across] {
                let mut data = data(model, plain, &["<s>"]);
                data.pre = None;
                let merges = ["a b", "\u{2581} a", "\u{2581} ab", "b \u{2581}"];
                let merges = &merges[..if plain == &words { 3 } else { 4 }];
                data.merges = Some(
                    merges
                        .iter()
                        .map(|merge| merge.as_bytes().to_vec())
                        .collect(),
                );
                data.add_space_prefix = Some(plain == &words);
                all.push((format!("{model} {plain:?}"), Tokenizer::new(data).unwrap()));
            }
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn streamed_tokens_match_the_whole_text_for_every_kind(
            pieces in prop::collection::vec("([abcA1 \n]|<s>|a b|c\nb|12345|é|漢|\\.|\t| \
                '|'s){0,6}", 0..16),
        ) {
            static ALL: LazyLock<Vec<(String, Tokenizer)>> = LazyLock::new(all);
            for (name, tokenizer) in ALL.iter() {
                let whole = tokenizer.tokenize(&pieces.concat(), true, true).unwrap();
                prop_assert_eq!(streamed(tokenizer, &pieces).0, whole, "{}", name);
            }
        }

        #[test]
        fn streamed_tokens_match_the_whole_text(pieces in prop::collection::vec("([abc \n]|<s>|a \
            b|c\nb|1|é|\\.){0,6}", 0..12)) {
            for tokenizer in tokenizers() {
                let whole = tokenizer.tokenize(&pieces.concat(), true, true).unwrap();
                prop_assert_eq!(streamed(&tokenizer, &pieces).0, whole);
            }
        }
    }

    #[test]
    fn ordinary_text_is_not_buffered() {
        let words = vec!["a bc ab ".to_owned(); 1000];
        let lines = vec!["1.\n2.\n".to_owned(); 1000];
        for tokenizer in tokenizers() {
            assert!(streamed(&tokenizer, &words).1 < 40);
            assert!(streamed(&tokenizer, &lines).1 < 40);
        }
        // A text that cannot be split results in an error eventually.
        let tokenizer = &tokenizers()[0];
        let mut stream = tokenizer.stream(true, true);
        let mut output = Vec::new();
        let zeros = "\0".repeat(1 << 20);
        let error = (0..100).find_map(|_| stream.push(&zeros, &mut output).err());
        assert!(matches!(error, Some(TokenizeError::TextTooLong { .. })));
    }
}
