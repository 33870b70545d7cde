//! The vocabulary: as passed by a loader, and validated.

use std::fmt;
use std::str::FromStr;

use foldhash::{HashMap, HashMapExt};

use crate::error::VocabError;

mod special;

pub(crate) const KEY_TOKENS: &str = "tokenizer.ggml.tokens";
const KEY_SCORES: &str = "tokenizer.ggml.scores";
const KEY_TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const KEY_BOS: &str = "tokenizer.ggml.bos_token_id";
const KEY_EOS: &str = "tokenizer.ggml.eos_token_id";
const KEY_SEP: &str = "tokenizer.ggml.seperator_token_id";

/// Maximum length of a token's text, in bytes. Real vocabularies stay below a thousand.
const MAX_TOKEN_LEN: usize = 1 << 16;

/// Kind of tokenizer of a vocabulary (`tokenizer.ggml.model`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenizerModel {
    /// `"llama"`: SentencePiece style, merges by score, byte fallback.
    Llama,
    /// `"gpt2"`: byte-level BPE, merges by rank.
    Gpt2,
    /// `"gemma4"`: BPE on plain text, with `▁` for a space, byte fallback.
    Gemma4,
    /// `"bert"`: WordPiece.
    Bert,
    /// `"t5"`: a unigram language model.
    T5,
    /// `"rwkv"`: repeated longest match.
    Rwkv,
    /// `"plamo2"`: the tokens with the best sum of scores.
    Plamo2,
    /// `"hybriddna"`: byte-level BPE, with DNA in groups of six bases.
    HybridDna,
    /// `"whitespace"`: BPE of the text between white space.
    Whitespace,
}

impl TokenizerModel {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Llama,
        Self::Gpt2,
        Self::Gemma4,
        Self::Bert,
        Self::T5,
        Self::Rwkv,
        Self::Plamo2,
        Self::HybridDna,
        Self::Whitespace,
    ];

    /// Names in GGUF files, in the order of the variants.
    pub const NAMES: [&'static str; 9] = [
        "llama",
        "gpt2",
        "gemma4",
        "bert",
        "t5",
        "rwkv",
        "plamo2",
        "hybriddna",
        "whitespace",
    ];

    /// Returns the model with this name, or an error that lists the supported names.
    pub fn from_name(name: &str) -> Result<Self, VocabError> {
        let known = Self::ALL.into_iter().find(|model| model.name() == name);
        known.ok_or_else(|| VocabError::UnknownModel {
            name: name.to_owned(),
            supported: Self::NAMES.join(", "),
        })
    }

    /// Returns the name in GGUF files.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl FromStr for TokenizerModel {
    type Err = VocabError;

    fn from_str(name: &str) -> Result<Self, VocabError> {
        Self::from_name(name)
    }
}

impl fmt::Display for TokenizerModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A vocabulary as stored in a file, not validated. Each field names its GGUF key. A missing value
/// is `None`, and [`Tokenizer::new`](crate::Tokenizer::new) fills in llama.cpp's defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabData {
    /// `tokenizer.ggml.model`.
    pub model: TokenizerModel,
    /// `tokenizer.ggml.pre`: pre-tokenizer that splits text into words. Only byte-level BPE uses
    /// it; `None` is `"default"`.
    pub pre: Option<String>,
    /// `general.name`. Phi-3 models strip white space after special tokens, and ModernBERT before
    /// its mask token; they are recognized only by their names.
    pub model_name: Option<String>,
    /// `general.architecture`. Some encoders strip white space before their mask token.
    pub architecture: Option<String>,
    /// `tokenizer.ggml.tokens`: the tokens' texts as stored, at most 64 KiB each.
    pub tokens: Vec<Vec<u8>>,
    /// `tokenizer.ggml.scores`: one for each token; `None` is 0 for all.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`: one for each token, see [`TokenAttributes`]; `None` is "normal"
    /// for all.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`: pairs separated by a space, best first. Byte-level BPE requires
    /// them.
    pub merges: Option<Vec<Vec<u8>>>,
    /// `tokenizer.ggml.bos_token_id`: begin of text. `"llama"` defaults to 1.
    pub bos_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: end of text. `"llama"` defaults to 2.
    pub eos_id: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: end of turn. Found by its text if missing.
    pub eot_id: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: end of message. Found by its text if missing.
    pub eom_id: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`: token for text that no token covers. `"llama"` defaults
    /// to 0.
    pub unk_id: Option<u32>,
    /// `tokenizer.ggml.seperator_token_id` (the format's spelling).
    pub sep_id: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad_id: Option<u32>,
    /// `tokenizer.ggml.mask_token_id`.
    pub mask_id: Option<u32>,
    /// `tokenizer.ggml.fim_pre_token_id`, in old files `prefix_token_id`: token before the prefix
    /// in fill-in-the-middle prompts. Found by its text if missing, like the next two.
    pub fim_prefix_id: Option<u32>,
    /// `tokenizer.ggml.fim_suf_token_id`, in old files `suffix_token_id`: token before the suffix.
    pub fim_suffix_id: Option<u32>,
    /// `tokenizer.ggml.fim_mid_token_id`, in old files `middle_token_id`: token before the middle.
    pub fim_middle_id: Option<u32>,
    /// `tokenizer.ggml.fim_pad_token_id`: fill-in-the-middle padding; ends generation. Found by its
    /// text if missing.
    pub fim_pad_id: Option<u32>,
    /// `tokenizer.ggml.fim_rep_token_id`: repository name; ends generation. Found by its text if
    /// missing.
    pub fim_rep_id: Option<u32>,
    /// `tokenizer.ggml.fim_sep_token_id`: file separator; ends generation. Found by its text if
    /// missing.
    pub fim_sep_id: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`. Defaults to true for `"llama"` and for some pre-tokenizers;
    /// always true for `"bert"` and `"gemma4"`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`. Defaults to true for `"t5"`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`. `"bert"` always adds one. Others expect one between two
    /// texts: see [`Tokenizer::adds_sep`](crate::Tokenizer::adds_sep).
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`. Defaults to true for `"llama"`; `"t5"` uses it as well.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`, for `"t5"`: runs of white space count as one.
    /// Defaults to false.
    pub remove_extra_whitespaces: Option<bool>,
    /// For `"t5"`: the space of `add_space_prefix` goes after the text. Current files have no key
    /// for it. Defaults to false.
    pub treat_whitespace_as_suffix: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`, for `"t5"`: the character map.
    pub precompiled_charsmap: Option<Vec<u8>>,
    /// `tokenizer.ggml.normalizer.lowercase`, for `"bert"` (true if missing) and `"whitespace"`
    /// (false).
    pub lowercase: Option<bool>,
    /// `tokenizer.ggml.normalizer.strip_accents`, for `"bert"`. Defaults to `lowercase`.
    pub strip_accents: Option<bool>,
    /// `tokenizer.ggml.suppress_tokens`: tokens that must never be generated. Ids outside the
    /// vocabulary are ignored.
    pub suppress_tokens: Vec<i32>,
}

impl VocabData {
    /// Creates a vocabulary with these tokens and no other values.
    pub fn new(model: TokenizerModel, tokens: Vec<Vec<u8>>) -> Self {
        Self {
            model,
            tokens,
            pre: None,
            model_name: None,
            architecture: None,
            scores: None,
            token_types: None,
            merges: None,
            bos_id: None,
            eos_id: None,
            eot_id: None,
            eom_id: None,
            unk_id: None,
            sep_id: None,
            pad_id: None,
            mask_id: None,
            fim_prefix_id: None,
            fim_suffix_id: None,
            fim_middle_id: None,
            fim_pad_id: None,
            fim_rep_id: None,
            fim_sep_id: None,
            add_bos: None,
            add_eos: None,
            add_sep: None,
            add_space_prefix: None,
            remove_extra_whitespaces: None,
            treat_whitespace_as_suffix: None,
            precompiled_charsmap: None,
            lowercase: None,
            strip_accents: None,
            suppress_tokens: Vec::new(),
        }
    }

    /// Returns the maximum memory in bytes that a vocabulary and its
    /// [`Tokenizer`](crate::Tokenizer) need together during construction, for these numbers of
    /// tokens and merges, whose texts have `bytes` bytes in total. Construction allocates in pieces
    /// of a few bytes, and a failed allocation aborts the process. A loader that may reach a limit
    /// therefore first allocates this much at once.
    pub fn memory_needed(
        model: TokenizerModel,
        tokens: usize,
        merges: usize,
        bytes: usize,
    ) -> usize {
        // Measured, see `tests/memory.rs`: texts are stored several times, for some kinds in byte
        // tries.
        let for_each_byte = match model {
            TokenizerModel::Bert
            | TokenizerModel::T5
            | TokenizerModel::Rwkv
            | TokenizerModel::Plamo2 => 96,
            _ => 8,
        };
        [(tokens, 400), (merges, 300), (bytes, for_each_byte)]
            .into_iter()
            .fold(512 << 10, |sum: usize, (count, each)| {
                sum.saturating_add(count.saturating_mul(each))
            })
    }
}

/// Attributes of a token: a set of flags, from `tokenizer.ggml.token_type` and from well-known
/// token texts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TokenAttributes(u8);

impl TokenAttributes {
    /// Ordinary text (type 1).
    pub const NORMAL: Self = Self(1);
    /// Placeholder for text that no token covers (type 2).
    pub const UNKNOWN: Self = Self(1 << 1);
    /// Token that controls the model and has no text, such as `<s>` or `<|im_end|>` (type 3).
    pub const CONTROL: Self = Self(1 << 2);
    /// Text that is always one token, regardless of its context (type 4).
    pub const USER_DEFINED: Self = Self(1 << 3);
    /// Reserved entry of the vocabulary (type 5).
    pub const UNUSED: Self = Self(1 << 4);
    /// One byte, written `<0xHH>` (type 6).
    pub const BYTE: Self = Self(1 << 5);
    /// Tokenizing strips white space after the token.
    pub const RIGHT_STRIP: Self = Self(1 << 6);
    /// Tokenizing strips white space before the token.
    pub const LEFT_STRIP: Self = Self(1 << 7);

    fn from_type(token_type: i32) -> Self {
        match token_type {
            1 => Self::NORMAL,
            2 => Self::UNKNOWN,
            3 => Self::CONTROL,
            4 => Self::USER_DEFINED,
            5 => Self::UNUSED,
            6 => Self::BYTE,
            _ => Self::default(),
        }
    }

    /// Returns whether any of `flags` is set.
    pub fn intersects(self, flags: Self) -> bool {
        self.0 & flags.0 != 0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn union(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }
}

impl fmt::Debug for TokenAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 8] = [
            "NORMAL",
            "UNKNOWN",
            "CONTROL",
            "USER_DEFINED",
            "UNUSED",
            "BYTE",
            "RIGHT_STRIP",
            "LEFT_STRIP",
        ];
        f.debug_set()
            .entries(
                NAMES
                    .iter()
                    .enumerate()
                    .filter(|(bit, _)| self.0 & (1 << bit) != 0)
                    .map(|(_, name)| name),
            )
            .finish()
    }
}

#[derive(Debug)]
pub(crate) struct Token {
    /// Text as stored in the file, including escaped spaces and byte-level characters.
    pub text: Box<[u8]>,
    pub score: f32,
    pub attributes: TokenAttributes,
}

/// Ids of tokens with a role.
#[derive(Debug, Default)]
pub(crate) struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unk: Option<u32>,
    pub sep: Option<u32>,
    pub pad: Option<u32>,
    pub mask: Option<u32>,
    pub fim_prefix: Option<u32>,
    pub fim_suffix: Option<u32>,
    pub fim_middle: Option<u32>,
}

/// A validated vocabulary.
#[derive(Debug)]
pub(crate) struct Vocab {
    pub tokens: Vec<Token>,
    by_text: HashMap<Box<[u8]>, u32>,
    pub special: SpecialIds,
    /// Tokens that end a generation, ascending.
    pub end_of_generation: Vec<u32>,
    /// Tokens that must never be generated, ascending.
    pub suppressed: Vec<u32>,
}

impl Vocab {
    pub(crate) fn new(data: &VocabData) -> Result<Self, VocabError> {
        let count = data.tokens.len();
        if count == 0 {
            return Err(VocabError::Empty);
        }
        check_count(KEY_TOKENS, count)?;
        check_covers(KEY_SCORES, data.scores.as_ref().map(Vec::len), count)?;
        check_covers(
            KEY_TOKEN_TYPE,
            data.token_types.as_ref().map(Vec::len),
            count,
        )?;
        let special = special_ids(data)?;

        let mut tokens = Vec::with_capacity(count);
        let mut by_text = HashMap::with_capacity(count);
        for (index, stored) in data.tokens.iter().enumerate() {
            let text: Box<[u8]> = if stored.is_empty() {
                format!("[EMPTY_{index}]").into_bytes().into()
            } else {
                stored.as_slice().into()
            };
            if text.len() > MAX_TOKEN_LEN {
                return Err(VocabError::TokenTooLong {
                    index,
                    length: text.len(),
                    limit: MAX_TOKEN_LEN,
                });
            }
            let score = data.scores.as_ref().map_or(0.0, |scores| scores[index]);
            if score.is_nan() {
                return Err(VocabError::ScoreNotANumber { index });
            }
            let attributes = data
                .token_types
                .as_ref()
                .map_or(TokenAttributes::NORMAL, |types| {
                    TokenAttributes::from_type(types[index])
                });
            if attributes == TokenAttributes::BYTE && byte_of(&text).is_none() {
                return Err(VocabError::ByteToken {
                    index,
                    text: display(&text),
                });
            }
            if let Some(first) = by_text.insert(text.clone(), index as u32) {
                return Err(VocabError::DuplicateToken {
                    first,
                    second: index,
                    text: display(&text),
                });
            }
            // Adding zero converts -0.0 to 0.0, so that equal scores compare as equal.
            tokens.push(Token {
                text,
                score: score + 0.0,
                attributes,
            });
        }
        let mut vocab = Self {
            tokens,
            by_text,
            special,
            end_of_generation: Vec::new(),
            suppressed: suppressed(data),
        };
        vocab.assign_roles(data);
        Ok(vocab)
    }

    /// Returns the token with exactly this stored text.
    pub(crate) fn find(&self, text: &[u8]) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// Returns the token `<0xHH>` of a byte.
    pub(crate) fn byte_token(&self, byte: u8) -> Option<u32> {
        self.find(format!("<0x{byte:02X}>").as_bytes())
    }
}

fn suppressed(data: &VocabData) -> Vec<u32> {
    let ids = data.suppress_tokens.iter();
    let mut ids: Vec<u32> = ids
        .filter_map(|&id| u32::try_from(id).ok())
        .filter(|&id| (id as usize) < data.tokens.len())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Returns the default special ids for files without them: those of the first models of each kind.
fn default_ids(model: TokenizerModel) -> SpecialIds {
    let none = SpecialIds::default();
    match model {
        TokenizerModel::Llama => SpecialIds {
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            ..none
        },
        TokenizerModel::Bert => SpecialIds {
            bos: Some(101),
            sep: Some(102),
            unk: Some(100),
            pad: Some(0),
            mask: Some(103),
            ..none
        },
        TokenizerModel::T5 => SpecialIds {
            eos: Some(1),
            unk: Some(2),
            pad: Some(0),
            ..none
        },
        TokenizerModel::Plamo2 => SpecialIds {
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            pad: Some(3),
            ..none
        },
        TokenizerModel::Gpt2
        | TokenizerModel::Gemma4
        | TokenizerModel::Rwkv
        | TokenizerModel::HybridDna
        | TokenizerModel::Whitespace => none,
    }
}

fn special_ids(data: &VocabData) -> Result<SpecialIds, VocabError> {
    let tokens = data.tokens.len();
    let checked = |key: &'static str, id: Option<u32>| match id {
        Some(id) if id as usize >= tokens => Err(VocabError::IdOutOfRange { key, id, tokens }),
        _ => Ok(id),
    };
    let defaults = default_ids(data.model);
    let default = |id: Option<u32>| id.filter(|&id| (id as usize) < tokens);
    for (key, id) in [
        ("tokenizer.ggml.fim_pad_token_id", data.fim_pad_id),
        ("tokenizer.ggml.fim_rep_token_id", data.fim_rep_id),
        ("tokenizer.ggml.fim_sep_token_id", data.fim_sep_id),
    ] {
        checked(key, id)?;
    }
    let id = |key, id, or: Option<u32>| Ok(checked(key, id)?.or_else(|| default(or)));
    let special = SpecialIds {
        bos: id(KEY_BOS, data.bos_id, defaults.bos)?,
        eos: id(KEY_EOS, data.eos_id, defaults.eos)?,
        eot: checked("tokenizer.ggml.eot_token_id", data.eot_id)?,
        eom: checked("tokenizer.ggml.eom_token_id", data.eom_id)?,
        unk: id("tokenizer.ggml.unknown_token_id", data.unk_id, defaults.unk)?,
        sep: id(KEY_SEP, data.sep_id, defaults.sep)?,
        pad: id("tokenizer.ggml.padding_token_id", data.pad_id, defaults.pad)?,
        mask: id("tokenizer.ggml.mask_token_id", data.mask_id, defaults.mask)?,
        fim_prefix: checked("tokenizer.ggml.fim_pre_token_id", data.fim_prefix_id)?,
        fim_suffix: checked("tokenizer.ggml.fim_suf_token_id", data.fim_suffix_id)?,
        fim_middle: checked("tokenizer.ggml.fim_mid_token_id", data.fim_middle_id)?,
    };
    for (flag, value, id_key, id) in [
        (
            "tokenizer.ggml.add_bos_token",
            data.add_bos,
            KEY_BOS,
            special.bos,
        ),
        (
            "tokenizer.ggml.add_eos_token",
            data.add_eos,
            KEY_EOS,
            special.eos,
        ),
    ] {
        if value == Some(true) && id.is_none() {
            return Err(VocabError::MissingSpecialToken { flag, id_key });
        }
    }
    Ok(special)
}

/// Ids and ranks are limited to 31 bits, as in ggml.
pub(crate) fn check_count(key: &'static str, count: usize) -> Result<(), VocabError> {
    let limit = i32::MAX as usize;
    if count > limit {
        Err(VocabError::TooMany { key, count, limit })
    } else {
        Ok(())
    }
}

fn check_covers(key: &'static str, length: Option<usize>, tokens: usize) -> Result<(), VocabError> {
    match length {
        Some(length) if length < tokens => Err(VocabError::TooShort {
            key,
            length,
            tokens,
        }),
        _ => Ok(()),
    }
}

/// Returns the byte of a `<0xHH>` token.
pub(crate) fn byte_of(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    let &[high, low] = digits else { return None };
    let value = |digit: u8| char::from(digit).to_digit(16);
    u8::try_from(value(high)? * 16 + value(low)?).ok()
}

/// Shortens a token's text for a message.
fn display(text: &[u8]) -> String {
    let mut shown: String = String::from_utf8_lossy(&text[..text.len().min(64)])
        .escape_debug()
        .collect();
    if text.len() > 64 {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(tokens: &[&str]) -> VocabData {
        VocabData::new(
            TokenizerModel::Llama,
            tokens
                .iter()
                .map(|token| token.as_bytes().to_vec())
                .collect(),
        )
    }

    /// Fails to build a vocabulary; the message must name `key`.
    fn refused(data: &VocabData, key: &str) -> VocabError {
        let error = Vocab::new(data).expect_err("must be refused");
        assert!(
            error.to_string().contains(key),
            "'{error}' does not name {key}"
        );
        error
    }

    #[test]
    fn model_names() {
        for name in TokenizerModel::NAMES {
            assert_eq!(TokenizerModel::from_name(name).unwrap().name(), name);
        }
        let message = TokenizerModel::from_name("abacus").unwrap_err().to_string();
        assert_eq!(
            message,
            "tokenizer.ggml.model: tokenizer 'abacus' is not supported; supported are: llama, gpt2, gemma4, bert, t5, rwkv, plamo2, hybriddna, whitespace"
        );
    }

    #[test]
    fn an_empty_vocabulary_is_refused() {
        assert_eq!(
            refused(&data(&[]), "tokenizer.ggml.tokens"),
            VocabError::Empty
        );
    }

    #[test]
    fn short_arrays_are_refused_and_long_ones_accepted() {
        let mut short = data(&["a", "b"]);
        short.scores = Some(vec![0.0]);
        refused(&short, "tokenizer.ggml.scores");
        short.scores = Some(vec![0.0; 3]);
        assert!(Vocab::new(&short).is_ok());
        short.token_types = Some(vec![1]);
        refused(&short, "tokenizer.ggml.token_type");
    }

    #[test]
    fn nan_scores_are_refused() {
        let mut nan = data(&["a", "b"]);
        nan.scores = Some(vec![0.0, f32::NAN]);
        refused(&nan, "tokenizer.ggml.scores[1]");
    }

    #[test]
    fn special_ids_must_be_tokens() {
        type Set = fn(&mut VocabData);
        let cases: [(&str, Set); 11] = [
            ("tokenizer.ggml.bos_token_id", |d| d.bos_id = Some(2)),
            ("tokenizer.ggml.eos_token_id", |d| d.eos_id = Some(2)),
            ("tokenizer.ggml.eot_token_id", |d| d.eot_id = Some(u32::MAX)),
            ("tokenizer.ggml.eom_token_id", |d| d.eom_id = Some(2)),
            ("tokenizer.ggml.unknown_token_id", |d| d.unk_id = Some(2)),
            ("tokenizer.ggml.seperator_token_id", |d| d.sep_id = Some(2)),
            ("tokenizer.ggml.padding_token_id", |d| d.pad_id = Some(2)),
            ("tokenizer.ggml.mask_token_id", |d| d.mask_id = Some(2)),
            ("tokenizer.ggml.fim_pad_token_id", |d| {
                d.fim_pad_id = Some(2)
            }),
            ("tokenizer.ggml.fim_rep_token_id", |d| {
                d.fim_rep_id = Some(2)
            }),
            ("tokenizer.ggml.fim_sep_token_id", |d| {
                d.fim_sep_id = Some(2)
            }),
        ];
        for (key, set) in cases {
            let mut bad = data(&["a", "b"]);
            set(&mut bad);
            refused(&bad, key);
        }
        // Nonexistent default tokens are not an error of the file.
        let vocab = Vocab::new(&data(&["a", "b"])).unwrap();
        assert_eq!(
            (vocab.special.unk, vocab.special.bos, vocab.special.eos),
            (Some(0), Some(1), None)
        );
    }

    #[test]
    fn flags_need_their_tokens() {
        let mut bad = data(&["a", "b"]);
        bad.add_eos = Some(true);
        refused(&bad, "tokenizer.ggml.eos_token_id");
        bad.add_eos = None;
        bad.model = TokenizerModel::Gpt2;
        bad.add_bos = Some(true);
        refused(&bad, "tokenizer.ggml.bos_token_id");
    }

    #[test]
    fn byte_tokens_must_be_bytes() {
        for text in [
            "<0x-1>", "<0xZZ>", "<0x>", "<0x1>", "<0x100>", "<0x+1>", "0x41", "<0x41",
        ] {
            let mut bad = data(&["a", text]);
            bad.token_types = Some(vec![1, 6]);
            refused(&bad, "tokenizer.ggml.token_type");
        }
        for (text, byte) in [("<0x00>", 0), ("<0xfF>", 255), ("<0x0A>", 10)] {
            assert_eq!(byte_of(text.as_bytes()), Some(byte));
        }
    }

    #[test]
    fn duplicates_are_refused() {
        refused(&data(&["a", "b", "a"]), "tokenizer.ggml.tokens[2]");
        // Empty texts get their own names.
        assert!(Vocab::new(&data(&["", "", "a"])).is_ok());
    }

    #[test]
    fn long_tokens_are_refused() {
        let mut long = data(&["a"]);
        long.tokens.push(vec![b'x'; MAX_TOKEN_LEN]);
        assert!(Vocab::new(&long).is_ok());
        long.tokens[1].push(b'x');
        refused(&long, "tokenizer.ggml.tokens[1]");
    }

    #[test]
    fn counts_are_limited() {
        assert!(check_count(KEY_TOKENS, i32::MAX as usize).is_ok());
        assert!(check_count(KEY_TOKENS, i32::MAX as usize + 1).is_err());
    }
}
