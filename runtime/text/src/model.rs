//! The kinds of tokenizers, behind one interface.

use crate::bpe::{self, Bpe, Encoding};
use crate::error::{TokenizeError, VocabError};
use crate::gemma::Gemma;
use crate::hybrid_dna::{self, HybridDna};
use crate::plamo2::Plamo2;
use crate::pretokenize::{self, PreTokenizer, Settings};
use crate::rwkv::{self, Rwkv};
use crate::spm::{ESCAPED_SPACE, Spm};
use crate::ugm::Ugm;
use crate::vocab::{Token, TokenizerModel, Vocab, VocabData};
use crate::whitespace::Whitespace;
use crate::wpm::Wpm;

/// A tokenizer of some kind, which does not handle special tokens.
#[derive(Debug)]
pub(crate) enum Model {
    Spm(Spm),
    Bpe(Box<Bpe>),
    Gemma(Gemma),
    HybridDna(HybridDna),
    Whitespace(Whitespace),
    Wpm(Box<Wpm>),
    Ugm(Box<Ugm>),
    Rwkv(Rwkv),
    Plamo2(Plamo2),
}

/// Defaults of a kind of tokenizer for what it adds to a text.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SpecialTokenDefaults {
    pub add_bos: bool,
    pub add_eos: bool,
    pub add_sep: bool,
    /// True to add BOS regardless of the file.
    pub always_bos: bool,
    pub always_sep: bool,
    pub add_space_prefix: bool,
}

impl Model {
    pub(crate) fn new(
        vocab: &Vocab,
        data: &VocabData,
    ) -> Result<(Self, SpecialTokenDefaults), VocabError> {
        let habits = SpecialTokenDefaults::default();
        let pre = data.pre.as_deref().filter(|name| !name.is_empty());
        Ok(match data.model {
            TokenizerModel::Llama => {
                let habits = SpecialTokenDefaults {
                    add_bos: true,
                    add_space_prefix: data.add_space_prefix.unwrap_or(true),
                    ..habits
                };
                (Self::Spm(Spm::new(vocab)), habits)
            }
            TokenizerModel::Gpt2 => {
                let settings = pretokenize::settings(pre)?;
                let bpe = Box::new(Bpe::new(vocab, data, settings)?);
                match settings.encoding {
                    Encoding::Escaped => (Self::Gemma(Gemma { bpe }), of_bpe(settings)),
                    Encoding::Bytes | Encoding::Plain => (Self::Bpe(bpe), of_bpe(settings)),
                }
            }
            TokenizerModel::Gemma4 => {
                let settings = pretokenize::settings(Some("gemma4"))?;
                let bpe = Box::new(Bpe::new(vocab, data, settings)?);
                (Self::Gemma(Gemma { bpe }), of_bpe(settings))
            }
            TokenizerModel::HybridDna => {
                let settings = pretokenize::settings(pre)?;
                let bpe = Box::new(Bpe::new(vocab, data, settings)?);
                (
                    Self::HybridDna(HybridDna::new(bpe, vocab)),
                    of_bpe(settings),
                )
            }
            TokenizerModel::Whitespace => {
                let settings = pretokenize::settings(pre.or(Some("whitespace")))?;
                let bpe = Box::new(Bpe::new(vocab, data, settings)?);
                let lowercase = data.lowercase.unwrap_or(false);
                (
                    Self::Whitespace(Whitespace { bpe, lowercase }),
                    of_bpe(settings),
                )
            }
            TokenizerModel::Bert => {
                let habits = SpecialTokenDefaults {
                    add_bos: true,
                    always_bos: true,
                    add_sep: true,
                    always_sep: true,
                    add_space_prefix: true,
                    ..habits
                };
                (Self::Wpm(Box::new(Wpm::new(vocab, data))), habits)
            }
            TokenizerModel::T5 => {
                let ugm = Ugm::new(vocab, data)?;
                let habits = SpecialTokenDefaults {
                    add_eos: true,
                    add_space_prefix: ugm.adds_space(),
                    ..habits
                };
                (Self::Ugm(Box::new(ugm)), habits)
            }
            TokenizerModel::Rwkv => (Self::Rwkv(Rwkv::new(vocab)), habits),
            TokenizerModel::Plamo2 => (Self::Plamo2(Plamo2::new(vocab)?), habits),
        })
    }

    /// Tokenizes a section of text without special tokens. `space_prefix` is set if a space belongs
    /// before it.
    pub(crate) fn tokenize(
        &self,
        vocab: &Vocab,
        text: &str,
        space_prefix: bool,
        output: &mut Vec<u32>,
    ) -> Result<(), TokenizeError> {
        match self {
            Self::Spm(spm) => return spm.tokenize(vocab, text, space_prefix, output),
            Self::Gemma(gemma) => return gemma.tokenize(text, output),
            Self::Bpe(bpe) => bpe.tokenize(text, output),
            Self::HybridDna(dna) => dna.tokenize(vocab, text, output),
            Self::Whitespace(whitespace) => whitespace.tokenize(text, output),
            Self::Wpm(wpm) => wpm.tokenize(text, output),
            Self::Ugm(ugm) => ugm.tokenize(text, output),
            Self::Rwkv(rwkv) => rwkv.tokenize(vocab.special.unk, text, output),
            Self::Plamo2(plamo2) => plamo2.tokenize(text, output),
        }
        Ok(())
    }

    /// Appends the bytes of an ordinary token.
    pub(crate) fn decode(&self, token: &Token, bytes: &mut Vec<u8>) {
        match self {
            Self::Spm(_) | Self::Gemma(_) | Self::Wpm(_) | Self::Ugm(_) => {
                unescape(&token.text, bytes)
            }
            Self::Bpe(bpe) if bpe.is_plain() => bytes.extend_from_slice(&token.text),
            Self::Bpe(_) => bytes.extend(bpe::decode_lossy(&token.text)),
            Self::HybridDna(_) => {
                let marker = hybrid_dna::MARKER.as_bytes();
                let text = token.text.strip_suffix(marker).unwrap_or(&token.text);
                bytes.extend(bpe::decode_lossy(text));
            }
            Self::Rwkv(_) => bytes.extend(rwkv::unescape(&token.text)),
            Self::Whitespace(_) | Self::Plamo2(_) => bytes.extend_from_slice(&token.text),
        }
    }

    /// Returns the token of a newline.
    pub(crate) fn newline(&self, vocab: &Vocab) -> Option<u32> {
        match self {
            Self::Spm(spm) => spm.byte_token(b'\n'),
            Self::Wpm(_) => None,
            _ => {
                let mut tokens = Vec::new();
                self.tokenize(vocab, "\n", false, &mut tokens).ok()?;
                tokens.first().copied()
            }
        }
    }

    /// Returns the pre-tokenizer, if this kind has one and never merges across its boundaries.
    pub(crate) fn pre_tokenizer(&self) -> Option<&PreTokenizer> {
        match self {
            Self::Bpe(bpe) => Some(bpe.pre_tokenizer()),
            Self::Gemma(_) | Self::HybridDna(_) | Self::Whitespace(_) => None,
            Self::Spm(_) | Self::Wpm(_) | Self::Ugm(_) | Self::Rwkv(_) | Self::Plamo2(_) => None,
        }
    }

    /// Returns whether a text can be split where no token crosses the boundary, and results in the
    /// tokens of its parts.
    pub(crate) fn can_be_cut(&self) -> bool {
        // White space at the edges of a part, and DNA, depend on more than the boundary.
        !matches!(self, Self::Ugm(_) | Self::HybridDna(_))
    }

    /// Returns the bytes before a `▁` inside merged texts, even if these are not tokens.
    pub(crate) fn before_space(&self) -> Option<&[bool; 256]> {
        match self {
            Self::Gemma(gemma) => Some(gemma.bpe.before_space()),
            _ => None,
        }
    }
}

fn of_bpe(settings: Settings) -> SpecialTokenDefaults {
    SpecialTokenDefaults {
        add_bos: settings.add_bos,
        always_bos: settings.always_bos,
        add_sep: settings.add_sep,
        ..SpecialTokenDefaults::default()
    }
}

/// Appends `text` with its escaped spaces converted to spaces.
fn unescape(mut text: &[u8], bytes: &mut Vec<u8>) {
    while let Some(&byte) = text.first() {
        if let Some(rest) = text.strip_prefix(ESCAPED_SPACE.as_bytes()) {
            bytes.push(b' ');
            text = rest;
        } else {
            bytes.push(byte);
            text = &text[1..];
        }
    }
}
