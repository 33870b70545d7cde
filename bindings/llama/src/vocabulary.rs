//! Vocabularies, tokenization and detokenization.

use crate::entry::{Failure, Outcome, alias, array, array_mut, export};
use crate::layout::{Flag, Opaque, TOKEN_NULL};
use crate::model::{LlamaModel, model};
use samite_text::{TokenAttributes, Tokenizer, TokenizerModel, VocabData};
use std::ffi::{CString, c_char, c_int};
use std::sync::Arc;

/// A vocabulary.
pub struct Vocabulary {
    /// Tokenizer of the vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    kind: c_int,
    texts: Vec<CString>,
    scores: Option<Vec<f32>>,
    suppressed: Vec<i32>,
    /// Infill tokens for padding, repository names and file separators.
    fill_in: [Option<u32>; 3],
    adds_space: bool,
}

/// Returns llama.cpp's number of a vocabulary type.
fn kind(model: TokenizerModel) -> c_int {
    match model {
        TokenizerModel::Llama => 1,
        TokenizerModel::Gpt2
        | TokenizerModel::Gemma4
        | TokenizerModel::HybridDna
        | TokenizerModel::Whitespace => 2,
        TokenizerModel::Bert => 3,
        TokenizerModel::T5 => 4,
        TokenizerModel::Rwkv => 5,
        TokenizerModel::Plamo2 => 6,
    }
}

impl Vocabulary {
    /// Creates a vocabulary from a file's data and its tokenizer.
    pub fn new(data: &VocabData, tokenizer: Arc<Tokenizer>) -> Self {
        let texts = data.tokens.iter().map(|text| {
            let text = text.iter().copied().filter(|&byte| byte != 0).collect();
            CString::new::<Vec<u8>>(text).unwrap_or_default()
        });
        let kind = kind(data.model);
        Vocabulary {
            kind,
            texts: texts.collect(),
            scores: data.scores.clone(),
            suppressed: tokenizer.suppressed().iter().map(|&id| id as i32).collect(),
            fill_in: [data.fim_pad_id, data.fim_rep_id, data.fim_sep_id],
            adds_space: data.add_space_prefix.unwrap_or(matches!(
                data.model,
                TokenizerModel::Llama | TokenizerModel::T5
            )),
            tokenizer,
        }
    }

    /// Validates a token id.
    ///
    /// # Errors
    /// If the token does not exist.
    pub fn token(&self, token: i32) -> Outcome<u32> {
        let count = self.tokenizer.vocab_size();
        let known = u32::try_from(token).ok();
        known.filter(|&id| (id as usize) < count).ok_or_else(|| {
            Failure::new(format!(
                "token {token}: the vocabulary has 0 to {}",
                count.saturating_sub(1)
            ))
        })
    }

    /// Returns a token's text.
    fn piece(&self, token: i32, special: bool) -> Outcome<&[u8]> {
        Ok(self.tokenizer.token_to_piece(self.token(token)?, special)?)
    }
}

fn special(handle: *const Opaque, token: impl Fn(&Vocabulary) -> Option<u32>) -> Outcome<i32> {
    let model = model(handle)?;
    let found = model.vocabulary.as_ref().and_then(token);
    Ok(found.map_or(TOKEN_NULL, |id| id as i32))
}

fn of_tokenizer<T: Default>(handle: *const Opaque, ask: impl Fn(&Tokenizer) -> T) -> Outcome<T> {
    let model = model(handle)?;
    let vocabulary = model.vocabulary.as_ref();
    Ok(vocabulary.map_or_else(T::default, |vocabulary| ask(&vocabulary.tokenizer)))
}

/// Calls `ask` for a vocabulary and one of its tokens.
fn of_token<T>(
    handle: *const Opaque,
    token: i32,
    ask: impl Fn(&Vocabulary, u32) -> T,
) -> Outcome<T> {
    let model: Arc<LlamaModel> = model(handle)?;
    let vocabulary = model.vocabulary()?;
    Ok(ask(vocabulary, vocabulary.token(token)?))
}

fn attributes(vocabulary: &Vocabulary, token: u32) -> c_int {
    const BITS: [(TokenAttributes, c_int); 8] = [
        (TokenAttributes::UNKNOWN, 1 << 0),
        (TokenAttributes::UNUSED, 1 << 1),
        (TokenAttributes::NORMAL, 1 << 2),
        (TokenAttributes::CONTROL, 1 << 3),
        (TokenAttributes::USER_DEFINED, 1 << 4),
        (TokenAttributes::BYTE, 1 << 5),
        (TokenAttributes::LEFT_STRIP, 1 << 7),
        (TokenAttributes::RIGHT_STRIP, 1 << 8),
    ];
    let Ok(own) = vocabulary.tokenizer.attributes(token) else {
        return 0;
    };
    let bits = BITS
        .iter()
        .filter(|(attribute, _)| own.intersects(*attribute));
    bits.fold(0, |sum, (_, bit)| sum | bit)
}

/// Writes bytes, or returns their number as a negative value if the buffer is too small.
///
/// # Safety
/// `buffer` is null or has `length` bytes.
unsafe fn write(bytes: &[u8], buffer: *mut c_char, length: i32) -> Outcome<i32> {
    let count = i32::try_from(bytes.len()).map_err(|_| Failure::new("the text is too long"))?;
    if length < count {
        return Ok(-count);
    }
    // SAFETY: the caller guarantees at least this length.
    let out = unsafe { array_mut("buffer", buffer.cast::<u8>(), bytes.len()) }?;
    out.copy_from_slice(bytes);
    Ok(count)
}

export! {
    /// Returns the vocabulary type.
    fn llama_vocab_type(handle: *const Opaque) -> c_int, or 0; {
        Ok(model(handle)?.vocabulary.as_ref().map_or(0, |vocabulary| vocabulary.kind))
    }

    /// Returns the number of tokens, or of logits for a model without a vocabulary.
    fn llama_vocab_n_tokens(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let logits = || model.spec().map_or(0, |spec| spec.n_vocab as i32);
        let vocabulary = model.vocabulary.as_ref();
        Ok(vocabulary.map_or_else(logits, |vocabulary| vocabulary.tokenizer.vocab_size() as i32))
    }

    /// Returns a token's text as stored in the file.
    fn llama_vocab_get_text(handle: *const Opaque, token: i32) -> *const c_char,
        or std::ptr::null(); {
        of_token(handle, token, |vocabulary, id| {
            vocabulary.texts.get(id as usize).map_or(std::ptr::null(), |text| text.as_ptr())
        })
    }

    /// Returns a token's score.
    fn llama_vocab_get_score(handle: *const Opaque, token: i32) -> f32, or 0.0; {
        of_token(handle, token, |vocabulary, id| {
            let scores = vocabulary.scores.as_ref();
            scores.and_then(|scores| scores.get(id as usize)).copied().unwrap_or(0.0)
        })
    }

    /// Returns a token's attributes.
    fn llama_vocab_get_attr(handle: *const Opaque, token: i32) -> c_int, or 0; {
        of_token(handle, token, attributes)
    }

    /// Returns whether a token ends a text, turn or message.
    fn llama_vocab_is_eog(handle: *const Opaque, token: i32) -> bool, or false; {
        // Callers may pass the null token, which is not an error.
        if token == TOKEN_NULL {
            return model(handle).map(|_| false);
        }
        of_token(handle, token, |vocabulary, id| vocabulary.tokenizer.is_eog(id))
    }

    /// Returns whether a token is a control token.
    fn llama_vocab_is_control(handle: *const Opaque, token: i32) -> bool, or false; {
        of_token(handle, token, |vocabulary, id| {
            let attributes = vocabulary.tokenizer.attributes(id);
            attributes.is_ok_and(|own| own.intersects(TokenAttributes::CONTROL))
        })
    }

    /// Returns the BOS token.
    fn llama_vocab_bos(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.bos())
    }

    /// Returns the EOS token.
    fn llama_vocab_eos(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.eos())
    }

    /// Returns the end-of-turn token.
    fn llama_vocab_eot(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.eot())
    }

    /// Returns the separator token.
    fn llama_vocab_sep(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.sep())
    }

    /// Returns the newline token.
    fn llama_vocab_nl(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.newline())
    }

    /// Returns the padding token.
    fn llama_vocab_pad(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.pad())
    }

    /// Returns the mask token.
    fn llama_vocab_mask(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.mask())
    }

    /// Returns whether texts start with the BOS token.
    fn llama_vocab_get_add_bos(handle: *const Opaque) -> bool, or false; {
        of_tokenizer(handle, Tokenizer::adds_bos)
    }

    /// Returns whether texts end with the EOS token.
    fn llama_vocab_get_add_eos(handle: *const Opaque) -> bool, or false; {
        of_tokenizer(handle, Tokenizer::adds_eos)
    }

    /// Returns whether a separator comes between two texts.
    fn llama_vocab_get_add_sep(handle: *const Opaque) -> bool, or false; {
        of_tokenizer(handle, Tokenizer::adds_sep)
    }

    /// Returns tokens that must never be generated.
    fn llama_vocab_get_suppress_tokens(handle: *const Opaque, count: *mut i32) -> *const i32,
        or std::ptr::null(); {
        let model = model(handle)?;
        let tokens = model.vocabulary.as_ref().map_or(&[][..], |vocabulary| &vocabulary.suppressed);
        if !count.is_null() {
            // SAFETY: it is not null, and the caller upholds the header's contract.
            unsafe { count.write(tokens.len() as i32) };
        }
        Ok(match tokens { [] => std::ptr::null(), tokens => tokens.as_ptr() })
    }

    /// Returns the infill prefix token.
    fn llama_vocab_fim_pre(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.fill_in()[0])
    }

    /// Returns the infill suffix token.
    fn llama_vocab_fim_suf(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.fill_in()[1])
    }

    /// Returns the infill middle token.
    fn llama_vocab_fim_mid(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.tokenizer.fill_in()[2])
    }

    /// Returns the infill padding token.
    fn llama_vocab_fim_pad(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.fill_in[0])
    }

    /// Returns the infill repository token.
    fn llama_vocab_fim_rep(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.fill_in[1])
    }

    /// Returns the infill file separator token.
    fn llama_vocab_fim_sep(handle: *const Opaque) -> i32, or TOKEN_NULL; {
        special(handle, |vocabulary| vocabulary.fill_in[2])
    }

    /// Tokenizes a text. Returns the number of tokens as a negative value if the buffer is too
    /// small.
    fn llama_tokenize(
        handle: *const Opaque, text: *const c_char, length: i32, tokens: *mut i32, room: i32,
            add_special: Flag, parse_special: Flag
    ) -> i32, or i32::MIN; {
        let model = model(handle)?;
        let vocabulary = model.vocabulary()?;
        let length = usize::try_from(length)
            .map_err(|_| Failure::new("the length of the text is negative"))?;
        // SAFETY: the caller upholds the header's contract.
        let text = unsafe { array("text", text.cast::<u8>(), length) }?;
        let text = String::from_utf8_lossy(text);
        let found =
            vocabulary
                .tokenizer
                .tokenize(&text, add_special.is_on(), parse_special.is_on())?;
        let count =
            i32::try_from(found.len()).map_err(|_| Failure::new("the text has too many tokens"))?;
        if room < count {
            return Ok(-count);
        }
        // SAFETY: as above.
        let out = unsafe { array_mut("tokens", tokens, found.len()) }?;
        for (to, token) in out.iter_mut().zip(found) {
            *to = token as i32;
        }
        Ok(count)
    }

    /// Writes the text of a token, without up to `strip` leading spaces. Returns its size as a
    /// negative value if the buffer is too small.
    fn llama_token_to_piece(
        handle: *const Opaque, token: i32, buffer: *mut c_char, length: i32, strip: i32,
            special: Flag
    ) -> i32, or 0; {
        let model = model(handle)?;
        let mut piece = model.vocabulary()?.piece(token, special.is_on())?;
        for _ in 0..strip.max(0) {
            match piece.strip_prefix(b" ") {
                Some(rest) => piece = rest,
                None => break,
            }
        }
        // SAFETY: the caller upholds the header's contract.
        unsafe { write(piece, buffer, length) }
    }

    /// Writes the text of tokens. Returns its size as a negative value if the buffer is too small.
    fn llama_detokenize(
        handle: *const Opaque, tokens: *const i32, count: i32, buffer: *mut c_char, length: i32,
            remove_special: Flag, unparse_special: Flag
    ) -> i32, or 0; {
        let model = model(handle)?;
        let vocabulary = model.vocabulary()?;
        let count =
            usize::try_from(count).map_err(|_| Failure::new("the number of tokens is negative"))?;
        // SAFETY: the caller upholds the header's contract.
        let mut tokens = unsafe { array("tokens", tokens, count) }?;
        let tokenizer = &vocabulary.tokenizer;
        let is = |token: &i32, special: Option<u32>| special.is_some_and(|id| id as i32 == *token);
        let mut strip = vocabulary.adds_space;
        if remove_special.is_on() {
            if let [first, rest @ ..] = tokens
                && tokenizer.adds_bos()
                && is(first, tokenizer.bos())
            {
                tokens = rest;
                strip = false;
            }
            if let [rest @ .., last] = tokens
                && tokenizer.adds_eos()
                && is(last, tokenizer.eos())
            {
                tokens = rest;
            }
        }
        let mut text = Vec::new();
        for &token in tokens {
            let piece = vocabulary.piece(token, unparse_special.is_on())?;
            let stripped = piece
                .strip_prefix(b" ")
                .filter(|_| std::mem::take(&mut strip));
            strip = false;
            text.extend_from_slice(stripped.unwrap_or(piece));
        }
        // SAFETY: as above.
        unsafe { write(&text, buffer, length) }
    }
}

alias! {
    fn llama_n_vocab(handle: *const Opaque) -> i32 = llama_vocab_n_tokens;
    fn llama_vocab_cls(handle: *const Opaque) -> i32 = llama_vocab_bos;
    fn llama_token_get_text(handle: *const Opaque,
        token: i32) -> *const c_char = llama_vocab_get_text;
    fn llama_token_get_score(handle: *const Opaque, token: i32) -> f32 = llama_vocab_get_score;
    fn llama_token_get_attr(handle: *const Opaque, token: i32) -> c_int = llama_vocab_get_attr;
    fn llama_token_is_eog(handle: *const Opaque, token: i32) -> bool = llama_vocab_is_eog;
    fn llama_token_is_control(handle: *const Opaque, token: i32) -> bool = llama_vocab_is_control;
    fn llama_token_bos(handle: *const Opaque) -> i32 = llama_vocab_bos;
    fn llama_token_eos(handle: *const Opaque) -> i32 = llama_vocab_eos;
    fn llama_token_eot(handle: *const Opaque) -> i32 = llama_vocab_eot;
    fn llama_token_cls(handle: *const Opaque) -> i32 = llama_vocab_bos;
    fn llama_token_sep(handle: *const Opaque) -> i32 = llama_vocab_sep;
    fn llama_token_nl(handle: *const Opaque) -> i32 = llama_vocab_nl;
    fn llama_token_pad(handle: *const Opaque) -> i32 = llama_vocab_pad;
    fn llama_add_bos_token(handle: *const Opaque) -> bool = llama_vocab_get_add_bos;
    fn llama_add_eos_token(handle: *const Opaque) -> bool = llama_vocab_get_add_eos;
    fn llama_token_fim_pre(handle: *const Opaque) -> i32 = llama_vocab_fim_pre;
    fn llama_token_fim_suf(handle: *const Opaque) -> i32 = llama_vocab_fim_suf;
    fn llama_token_fim_mid(handle: *const Opaque) -> i32 = llama_vocab_fim_mid;
    fn llama_token_fim_pad(handle: *const Opaque) -> i32 = llama_vocab_fim_pad;
    fn llama_token_fim_rep(handle: *const Opaque) -> i32 = llama_vocab_fim_rep;
    fn llama_token_fim_sep(handle: *const Opaque) -> i32 = llama_vocab_fim_sep;
}
