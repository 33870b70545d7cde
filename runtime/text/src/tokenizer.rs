//! Converts text to tokens and back.

use crate::error::{TokenizeError, VocabError};
use crate::model::Model;
use crate::vocab::{KEY_TOKENS, TokenAttributes, Vocab, VocabData, byte_of, check_count};

mod partition;
mod stream;

use partition::{Fragment, SpecialMatcher};
pub use stream::TokenStream;

/// Maximum length of a text that is tokenized in one piece, in bytes.
const MAX_TEXT_LEN: usize = 1 << 31;

/// Attributes of tokens that are shown only on request.
const HIDDEN: TokenAttributes = TokenAttributes::UNKNOWN.union(TokenAttributes::CONTROL);

/// Converts text to tokens and tokens to bytes, for one vocabulary.
///
/// Immutable once built: any number of threads can share one.
///
/// ```
/// use samite_text::{Tokenizer, TokenizerModel, VocabData};
///
/// let texts = ["<unk>", "<s>", "</s>", "yes", "no"];
/// let texts = texts.map(|text| text.as_bytes().to_vec()).to_vec();
/// let mut data = VocabData::new(TokenizerModel::Llama, texts);
/// data.token_types = Some(vec![2, 3, 3, 1, 1]);
/// let tokenizer = Tokenizer::new(data)?;
/// assert_eq!(tokenizer.find("yes"), Some(3));
/// assert_eq!(tokenizer.detokenize(&[3, 4])?, b"yesno");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
    special: SpecialMatcher,
    pieces: Pieces,
    add_bos: bool,
    add_eos: bool,
    add_sep: bool,
    /// True if a separator ends every text.
    ends_with_sep: bool,
    add_space_prefix: bool,
    newline: Option<u32>,
}

impl Tokenizer {
    /// Validates a vocabulary and prepares it for use.
    ///
    /// # Errors
    /// Returns an error that names the GGUF key for every problem of a vocabulary, see
    /// [`VocabError`].
    pub fn new(data: VocabData) -> Result<Self, VocabError> {
        let vocab = Vocab::new(&data)?;
        let (model, habits) = Model::new(&vocab, &data)?;
        let pieces = Pieces::new(&vocab, &model)?;
        let add_bos = habits.always_bos || data.add_bos.unwrap_or(habits.add_bos);
        let newline = model.newline(&vocab);
        Ok(Self {
            model,
            special: SpecialMatcher::new(&vocab),
            pieces,
            add_bos: add_bos && vocab.special.bos.is_some(),
            add_eos: data.add_eos.unwrap_or(habits.add_eos) && vocab.special.eos.is_some(),
            add_sep: habits.always_sep || data.add_sep.unwrap_or(habits.add_sep),
            ends_with_sep: habits.always_sep,
            add_space_prefix: habits.add_space_prefix,
            newline: newline.or(vocab.special.pad),
            vocab,
        })
    }

    /// Tokenizes `text`.
    ///
    /// `add_special` adds the BOS and EOS tokens that the vocabulary requires. `parse_special`
    /// recognizes control tokens such as `<|im_start|>` in the text; do not set it for text that
    /// users wrote. User-defined tokens are always recognized.
    ///
    /// A byte that no token covers becomes the unknown token. If the vocabulary has none, the byte
    /// is omitted.
    ///
    /// # Errors
    /// Returns [`TokenizeError::TextTooLong`] if the text has more than 2^31 bytes, or if escaping
    /// would result in more than 2^32 bytes.
    pub fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizeError> {
        check_length(text.len())?;
        let mut output = Vec::new();
        if add_special {
            self.begin(&mut output);
        }
        self.tokenize_part(text, parse_special, &mut true, &mut output)?;
        if add_special {
            self.end(&mut output);
        }
        Ok(output)
    }

    /// Tokenizes a text that consists of parts. The flag of each part states whether special
    /// tokens, including user-defined ones, are recognized in it. The text between two special
    /// tokens is tokenized as a whole, even across parts.
    ///
    /// `add_special` is like in [`tokenize`](Self::tokenize), but a text that starts with the BOS
    /// token gets no second one.
    ///
    /// # Errors
    /// Fails like [`tokenize`](Self::tokenize).
    pub fn tokenize_parts<'a>(
        &self,
        parts: impl IntoIterator<Item = (&'a str, bool)>,
        add_special: bool,
    ) -> Result<Vec<u32>, TokenizeError> {
        let mut output = Vec::new();
        let mut text = String::new();
        let mut length = 0usize;
        let mut after_special = true;
        for (part, parse_special) in parts {
            length = length.saturating_add(part.len());
            check_length(length)?;
            let fragments = if parse_special {
                self.special.partition(part, true)
            } else {
                vec![Fragment::Text(part)]
            };
            for fragment in fragments {
                match fragment {
                    Fragment::Text(part) => text.push_str(part),
                    Fragment::Token(id) => {
                        self.tokenize_between(&mut text, after_special, &mut output)?;
                        output.push(id);
                        after_special = true;
                    }
                }
            }
        }
        self.tokenize_between(&mut text, after_special, &mut output)?;
        if add_special {
            let bos = self.vocab.special.bos.filter(|_| self.add_bos);
            if bos.is_some() && output.first().copied() != bos {
                output.splice(..0, bos);
            }
            self.end(&mut output);
        }
        Ok(output)
    }

    /// Tokenizes and clears the text between two special tokens.
    fn tokenize_between(
        &self,
        text: &mut String,
        after_special: bool,
        output: &mut Vec<u32>,
    ) -> Result<(), TokenizeError> {
        if !text.is_empty() {
            let space = self.add_space_prefix && after_special;
            self.model.tokenize(&self.vocab, text, space, output)?;
            text.clear();
        }
        Ok(())
    }

    /// Adds the BOS token, if the vocabulary requires it.
    fn begin(&self, output: &mut Vec<u32>) {
        if self.add_bos {
            output.extend(self.vocab.special.bos);
        }
    }

    /// Adds the token at the end of a text, if the vocabulary requires it.
    fn end(&self, output: &mut Vec<u32>) {
        if self.ends_with_sep {
            output.extend(self.vocab.special.sep);
        } else if self.add_eos {
            output.extend(self.vocab.special.eos);
        }
    }

    /// Tokenizes a part of a text. `after_special` is true if the part is at the start or follows a
    /// special token, and is updated for the next part.
    fn tokenize_part(
        &self,
        text: &str,
        parse_special: bool,
        after_special: &mut bool,
        output: &mut Vec<u32>,
    ) -> Result<(), TokenizeError> {
        for fragment in self.special.partition(text, parse_special) {
            match fragment {
                Fragment::Token(id) => output.push(id),
                Fragment::Text(part) => {
                    let space = self.add_space_prefix && *after_special;
                    self.model.tokenize(&self.vocab, part, space, output)?;
                }
            }
            *after_special = matches!(fragment, Fragment::Token(_));
        }
        Ok(())
    }

    /// Converts a sequence of tokens to bytes, without control tokens: the inverse of
    /// [`tokenize`](Self::tokenize).
    ///
    /// Removes the space that tokenizing adds before the text. Keeps spaces before punctuation:
    /// unlike llama.cpp, which "cleans them up" for some vocabularies, this is lossless.
    ///
    /// # Errors
    /// Returns [`TokenizeError::UnknownToken`] if an id is outside the vocabulary.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<Vec<u8>, TokenizeError> {
        let mut bytes = Vec::new();
        let mut remove_space = self.add_space_prefix;
        for &id in tokens {
            let mut piece = self.token_to_piece(id, false)?;
            if remove_space && !piece.is_empty() {
                piece = piece.strip_prefix(b" ").unwrap_or(piece);
                remove_space = false;
            }
            bytes.extend_from_slice(piece);
        }
        Ok(bytes)
    }

    /// Returns the bytes of one token, which may be part of a character. Control and unknown tokens
    /// have no bytes unless `special` requests their names.
    ///
    /// # Errors
    /// Returns [`TokenizeError::UnknownToken`] if the id is outside the vocabulary.
    pub fn token_to_piece(&self, id: u32, special: bool) -> Result<&[u8], TokenizeError> {
        let hidden = self.attributes(id)?.intersects(HIDDEN);
        Ok(if hidden && !special {
            &[]
        } else {
            self.pieces.get(id)
        })
    }

    /// Returns the attributes of a token.
    ///
    /// # Errors
    /// Returns [`TokenizeError::UnknownToken`] if the id is outside the vocabulary.
    pub fn attributes(&self, id: u32) -> Result<TokenAttributes, TokenizeError> {
        let token = self.vocab.tokens.get(id as usize);
        token
            .map(|token| token.attributes)
            .ok_or(TokenizeError::UnknownToken {
                id,
                tokens: self.vocab_size(),
            })
    }

    /// Returns the token with exactly this text, as written in the vocabulary: `▁the`, `Ġthe`,
    /// `<|im_end|>`.
    pub fn find(&self, text: impl AsRef<[u8]>) -> Option<u32> {
        self.vocab.find(text.as_ref())
    }

    /// Returns the number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab.tokens.len()
    }

    /// Returns whether a token ends a generation: end of text, of turn or of message, by role or by
    /// a well-known name.
    pub fn is_eog(&self, id: u32) -> bool {
        self.vocab.end_of_generation.binary_search(&id).is_ok()
    }

    /// Returns all tokens that end a generation, ascending.
    pub fn eog_tokens(&self) -> &[u32] {
        &self.vocab.end_of_generation
    }

    /// Returns the BOS token.
    pub fn bos(&self) -> Option<u32> {
        self.vocab.special.bos
    }

    /// Returns the EOS token.
    pub fn eos(&self) -> Option<u32> {
        self.vocab.special.eos
    }

    /// Returns the end-of-turn token.
    pub fn eot(&self) -> Option<u32> {
        self.vocab.special.eot
    }

    /// Returns the end-of-message token.
    pub fn eom(&self) -> Option<u32> {
        self.vocab.special.eom
    }

    /// Returns the unknown token, for text that no token covers.
    pub fn unk(&self) -> Option<u32> {
        self.vocab.special.unk
    }

    /// Returns the separator token.
    pub fn sep(&self) -> Option<u32> {
        self.vocab.special.sep
    }

    /// Returns the padding token.
    pub fn pad(&self) -> Option<u32> {
        self.vocab.special.pad
    }

    /// Returns the mask token.
    pub fn mask(&self) -> Option<u32> {
        self.vocab.special.mask
    }

    /// Returns the token of a newline, or else the padding token.
    pub fn newline(&self) -> Option<u32> {
        self.newline
    }

    /// Returns whether `add_special` adds the BOS token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Returns whether `add_special` adds the EOS token.
    pub fn adds_eos(&self) -> bool {
        self.add_eos && !self.ends_with_sep
    }

    /// Returns whether a separator belongs between two texts. Only `"bert"` adds one after every
    /// text.
    pub fn adds_sep(&self) -> bool {
        self.add_sep
    }

    /// Returns the tokens that must never be generated, ascending.
    pub fn suppressed(&self) -> &[u32] {
        &self.vocab.suppressed
    }

    /// Returns the fill-in-the-middle tokens: those before the prefix, the suffix, and the middle.
    pub fn fill_in(&self) -> [Option<u32>; 3] {
        let special = &self.vocab.special;
        [special.fim_prefix, special.fim_suffix, special.fim_middle]
    }
}

fn check_length(length: usize) -> Result<(), TokenizeError> {
    let limit = MAX_TEXT_LEN;
    if length > limit {
        Err(TokenizeError::TextTooLong { length, limit })
    } else {
        Ok(())
    }
}

/// Concatenated bytes of all tokens.
#[derive(Debug)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    fn new(vocab: &Vocab, model: &Model) -> Result<Self, VocabError> {
        let shown = HIDDEN.union(TokenAttributes::USER_DEFINED);
        let mut pieces = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(vocab.tokens.len()),
        };
        for token in &vocab.tokens {
            if token.attributes.intersects(shown) {
                pieces.bytes.extend_from_slice(&token.text);
            } else if token.attributes.intersects(TokenAttributes::NORMAL) {
                model.decode(token, &mut pieces.bytes);
            } else if token.attributes.intersects(TokenAttributes::BYTE) {
                pieces.bytes.extend(byte_of(&token.text));
            }
            check_count(KEY_TOKENS, pieces.bytes.len())?;
            pieces.ends.push(pieces.bytes.len() as u32);
        }
        Ok(pieces)
    }

    /// Returns the bytes of a token of the vocabulary.
    fn get(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..self.ends[index] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocab::TokenizerModel;

    fn spm(tokens: &[(&str, f32, i32)]) -> VocabData {
        let texts = tokens
            .iter()
            .map(|token| token.0.as_bytes().to_vec())
            .collect();
        let mut data = VocabData::new(TokenizerModel::Llama, texts);
        data.scores = Some(tokens.iter().map(|token| token.1).collect());
        data.token_types = Some(tokens.iter().map(|token| token.2).collect());
        data
    }

    #[test]
    fn text_parts_tokenize_as_one_text() {
        let tokenizer = Tokenizer::new(small_spm()).unwrap();
        for text in ["ab<tool>b", "a</s>bb", "", "<s>ab", "b<tool><tool>a"] {
            let whole = tokenizer.tokenize(text, false, true).unwrap();
            for cut in 0..=text.len() {
                // A special token that is split does not count as one.
                if [&text[..cut], &text[cut..]].iter().any(|part| {
                    part.contains(['<', '>'])
                        && part.matches('<').count() != part.matches('>').count()
                }) {
                    continue;
                }
                let parts = [(&text[..cut], true), (&text[cut..], true)];
                assert_eq!(tokenizer.tokenize_parts(parts, false).unwrap(), whole);
            }
        }
        let tool = tokenizer.find("<tool>").unwrap();
        let parts = |parse| {
            tokenizer
                .tokenize_parts([("a<tool>", true), ("<tool>b</s>", parse)], true)
                .unwrap()
        };
        assert_eq!(parts(true)[0], 1);
        assert_eq!(
            parts(true)
                .iter()
                .filter(|&&id| id == tool || id == 2)
                .count(),
            3
        );
        assert_eq!(
            parts(false)
                .iter()
                .filter(|&&id| id == tool || id == 2)
                .count(),
            1
        );
        let begun = tokenizer.tokenize_parts([("<s>a", true)], true).unwrap();
        assert_eq!(begun, tokenizer.tokenize("a", true, true).unwrap());
    }

    fn small_spm() -> VocabData {
        spm(&[
            ("<unk>", 0.0, 2),
            ("<s>", 0.0, 3),
            ("</s>", 0.0, 3),
            ("<0x0A>", 0.0, 6),
            ("<0xC3>", 0.0, 6),
            ("▁", -9.0, 1),
            ("a", -8.0, 1),
            ("b", -7.0, 1),
            ("ab", -2.0, 1),
            ("▁a", -1.0, 1),
            ("bb", -1.0, 1),
            ("<tool>", 0.0, 4),
        ])
    }

    #[test]
    fn merges_are_ordered_by_score() {
        let tokenizer = Tokenizer::new(small_spm()).unwrap();
        let tokenize = |text| tokenizer.tokenize(text, false, false).unwrap();
        assert_eq!(tokenize("ab"), [9, 7]);
        assert_eq!(tokenize("aabb"), [9, 6, 10]);
        assert_eq!(tokenize(""), [0u32; 0]);
        // The newline has a byte token; of the bytes C3 A9, only the first has one.
        assert_eq!(tokenize("\né"), [5, 3, 4, 0]);
    }

    #[test]
    fn special_tokens_and_flags() {
        let mut data = small_spm();
        data.add_eos = Some(true);
        let tokenizer = Tokenizer::new(data).unwrap();
        assert_eq!(tokenizer.tokenize("a", true, false).unwrap(), [1, 9, 2]);
        assert_eq!(tokenizer.tokenize("", true, false).unwrap(), [1, 2]);
        assert_eq!(
            tokenizer.tokenize("a</s>b", false, true).unwrap(),
            [9, 2, 5, 7]
        );
        // Users' text never contains control tokens; user-defined tokens are always recognized, and
        // a space prefix follows them.
        assert_eq!(
            tokenizer.tokenize("</s>", false, false).unwrap(),
            [5, 0, 0, 0, 0]
        );
        assert_eq!(
            tokenizer.tokenize("a<tool>b", false, false).unwrap(),
            [9, 11, 5, 7]
        );
        assert_eq!(
            (tokenizer.bos(), tokenizer.eos(), tokenizer.newline()),
            (Some(1), Some(2), Some(3))
        );
        assert!(tokenizer.is_eog(2) && !tokenizer.is_eog(1) && !tokenizer.is_eog(u32::MAX));
    }

    #[test]
    fn pieces() {
        let tokenizer = Tokenizer::new(small_spm()).unwrap();
        assert_eq!(tokenizer.token_to_piece(9, false).unwrap(), b" a");
        assert_eq!(tokenizer.token_to_piece(3, false).unwrap(), b"\n");
        assert_eq!(tokenizer.token_to_piece(2, false).unwrap(), b"");
        assert_eq!(tokenizer.token_to_piece(2, true).unwrap(), b"</s>");
        assert_eq!(
            tokenizer.detokenize(&[1, 9, 7, 5, 11]).unwrap(),
            b"ab <tool>"
        );
        let error = tokenizer.detokenize(&[12]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "token id 12 is outside the vocabulary of 12 tokens"
        );
    }

    #[test]
    fn without_a_space_prefix_nothing_is_removed() {
        let mut data = small_spm();
        data.add_space_prefix = Some(false);
        let tokenizer = Tokenizer::new(data).unwrap();
        let tokens = tokenizer.tokenize(" ab", false, false).unwrap();
        assert_eq!(tokenizer.detokenize(&tokens).unwrap(), b" ab");
        assert_eq!(tokenizer.tokenize("a", false, false).unwrap(), [6]);
    }

    #[test]
    fn text_outside_the_vocabulary_yields_no_tokens() {
        let mut data = spm(&[("x", 0.0, 1)]);
        data.unk_id = Some(0);
        assert_eq!(
            Tokenizer::new(data)
                .unwrap()
                .tokenize("b", false, false)
                .unwrap(),
            [0; 4]
        );
        let mut data = VocabData::new(TokenizerModel::Gpt2, vec![b"x".to_vec()]);
        data.merges = Some(Vec::new());
        assert_eq!(
            Tokenizer::new(data)
                .unwrap()
                .tokenize("bxb", true, true)
                .unwrap(),
            [0]
        );
    }

    fn bpe(tokens: &[&str], merges: &[&str]) -> VocabData {
        let bytes = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| text.as_bytes().to_vec())
                .collect::<Vec<_>>()
        };
        let mut data = VocabData::new(TokenizerModel::Gpt2, bytes(tokens));
        data.merges = Some(bytes(merges));
        data.pre = Some("gpt-2".to_owned());
        data
    }

    #[test]
    fn bpe_needs_merges_and_a_known_pre_tokenizer() {
        let mut data = bpe(&["a"], &[]);
        data.pre = Some("dodo".to_owned());
        assert!(matches!(
            Tokenizer::new(data.clone()),
            Err(VocabError::UnknownPreTokenizer { .. })
        ));
        data.pre = None;
        data.merges = None;
        let error = Tokenizer::new(data).unwrap_err();
        assert!(
            error.to_string().starts_with("tokenizer.ggml.merges"),
            "{error}"
        );
    }

    #[test]
    fn merges_follow_rank_and_may_pass_through_non_tokens() {
        let tokens = ["a", "b", "c", "abc", "bc"];
        let tokenize = |merges: &[&str], text| {
            let tokenizer = Tokenizer::new(bpe(&tokens, merges)).unwrap();
            tokenizer.tokenize(text, false, false).unwrap()
        };
        // "ab" is not a token, but leads to one; otherwise its bytes are output.
        assert_eq!(tokenize(&["a b", "ab c"], "abc"), [3]);
        assert_eq!(tokenize(&["a b", "ab c"], "abb"), [0, 1, 1]);
        assert_eq!(tokenize(&["b c", "a b"], "abc"), [0, 4]);
        // Invalid pairs of byte-level texts are skipped, as in llama.cpp.
        assert_eq!(
            tokenize(&["", "bc", "b ", " c", "b\u{4E00} c", "b c"], "bc"),
            [4]
        );
        // The first of two identical merges applies.
        assert_eq!(tokenize(&["b c", "a b", "b c"], "abc"), [0, 4]);
    }

    #[test]
    fn whole_words_may_ignore_merges() {
        let mut data = bpe(&["a", "b", "c", "ab", "abc"], &["a b"]);
        assert_eq!(
            Tokenizer::new(data.clone())
                .unwrap()
                .tokenize("abc", false, false)
                .unwrap(),
            [3, 2]
        );
        data.pre = Some("llama-bpe".to_owned());
        data.bos_id = Some(2);
        let tokenizer = Tokenizer::new(data).unwrap();
        assert_eq!(tokenizer.tokenize("abc", true, false).unwrap(), [2, 4]);
        assert!(tokenizer.adds_bos() && !tokenizer.adds_eos());
    }

    #[test]
    fn white_space_after_special_tokens_is_stripped() {
        let mut data = small_spm();
        data.model_name = Some("phi3".to_owned());
        let tokenizer = Tokenizer::new(data).unwrap();
        assert_eq!(
            tokenizer.tokenize("a<tool> \n b", false, false).unwrap(),
            [9, 11, 5, 7]
        );
        assert_eq!(tokenizer.tokenize("<tool>\n", false, false).unwrap(), [11]);
    }

    #[test]
    fn length_is_limited() {
        assert!(check_length(MAX_TEXT_LEN).is_ok());
        let error = check_length(MAX_TEXT_LEN + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the text has 2147483649 bytes without a place to cut it, at most 2147483648 can be tokenized at once"
        );
    }
}
