//! A grammar applied to a text.

use crate::digits::Digits;
use crate::vocabulary::{GrammarVocabulary, text_of};
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use samite_text::{Constraint, ConstraintError, Tokenizer};
use std::fmt;
use std::sync::Arc;

/// State of a grammar after a text. Clones are independent.
#[derive(Clone)]
pub struct GrammarConstraint {
    vocabulary: GrammarVocabulary,
    beginning: Matcher,
    matcher: Matcher,
    mask: SimpleVob,
    /// True if `mask` belongs to the current text.
    is_masked: bool,
    is_finished: bool,
    /// True if the text ends where only white space could follow.
    ends_before_space: bool,
    /// For texts with JSON: the digit state before each token and after the last one.
    digits: Option<Vec<Digits>>,
    accepted: usize,
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarConstraint")
            .field("accepted", &self.accepted)
            .field("is_finished", &self.is_finished)
            .finish_non_exhaustive()
    }
}

impl GrammarConstraint {
    pub(crate) fn new(
        vocabulary: &GrammarVocabulary,
        matcher: Matcher,
        ends_before_space: bool,
        has_json: bool,
    ) -> Self {
        GrammarConstraint {
            vocabulary: vocabulary.clone(),
            beginning: matcher.deep_clone(),
            matcher,
            mask: SimpleVob::new(),
            is_masked: false,
            is_finished: false,
            ends_before_space,
            digits: has_json.then(|| vec![Digits::default()]),
            accepted: 0,
        }
    }

    /// Returns the constraint at the start of a text. Unlike a clone, it shares no tables that grow
    /// with use.
    pub fn separate(&self) -> Self {
        let is_at_start = self.accepted == 0;
        // The tables of a matcher whose mask was computed have what the first mask needs.
        let beginning = if is_at_start {
            self.matcher.deep_clone()
        } else {
            self.beginning.deep_clone()
        };
        GrammarConstraint {
            vocabulary: self.vocabulary.clone(),
            matcher: beginning.clone(),
            beginning,
            mask: self.mask.clone(),
            is_masked: self.is_masked && is_at_start,
            is_finished: false,
            ends_before_space: self.ends_before_space,
            digits: self.digits.as_ref().map(|_| vec![Digits::default()]),
            accepted: 0,
        }
    }

    /// Returns the number of accepted tokens.
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Rolls back the last `count` tokens.
    ///
    /// # Errors
    /// If fewer tokens were accepted.
    pub fn rollback(&mut self, count: usize) -> Result<(), ConstraintError> {
        if count > self.accepted {
            return Err(ConstraintError {
                message: format!(
                    "{count} tokens to take back, but {} were accepted",
                    self.accepted
                ),
            });
        }
        self.matcher.rollback(count).map_err(engine_error)?;
        self.accepted -= count;
        if let Some(digits) = &mut self.digits {
            digits.truncate(self.accepted + 1);
        }
        self.is_masked = false;
        self.is_finished = false;
        Ok(())
    }

    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.vocabulary.tokenizer()
    }

    /// Accepts text that need not consist of whole tokens.
    pub(crate) fn accept_text(&mut self, text: &[u8]) -> Result<(), ConstraintError> {
        let environment = self.vocabulary.shared().factory.tok_env();
        let tokens = environment.tok_trie().greedy_tokenize(text);
        if environment.tok_trie().decode_raw(&tokens) != text {
            return Err(ConstraintError {
                message: format!(
                    "no tokens stand for the text {:?}",
                    String::from_utf8_lossy(text)
                ),
            });
        }
        tokens.iter().try_for_each(|&token| self.accept(token))
    }

    /// Accepts a token, or its text where the grammar requires that.
    pub(crate) fn accept_token_or_text(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.allows(token)? {
            return self.accept(token);
        }
        let tokenizer = Arc::clone(self.tokenizer());
        self.accept_text(tokenizer.token_to_piece(token, true).unwrap_or_default())
    }

    /// Returns the engine's representative of a token: one with the same text, unless the grammar
    /// names this token by its number.
    fn canonical(&mut self, token: u32) -> Result<u32, ConstraintError> {
        match self.vocabulary.shared().twins.get(&token).copied() {
            Some(twin) if !self.is_valid(token)? => Ok(twin),
            _ => Ok(token),
        }
    }

    fn is_valid(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let count = self.matcher.validate_tokens(&[token]);
        Ok(count.map_err(engine_error)? > 0)
    }

    fn is_end(&self, token: u32) -> bool {
        self.vocabulary.tokenizer().is_eog(token)
    }

    fn is_in_vocabulary(&self, token: u32) -> bool {
        (token as usize) < self.vocabulary.tokenizer().vocab_size()
    }

    fn last_digits(&self) -> Option<Digits> {
        self.digits.as_ref()?.last().copied()
    }

    /// Removes tokens that would make a number too long from the mask, unless no others are in it.
    fn end_numbers(&mut self) {
        let Some(last) = self.last_digits().filter(|last| last.may_overflow()) else {
            return;
        };
        let mut mask = self.mask.clone();
        for token in 0..self.vocabulary.tokenizer().vocab_size() as u32 {
            let text = text_of(self.vocabulary.tokenizer(), token);
            if mask.is_allowed(token) && last.overflow(text) {
                mask.disallow_token(token);
            }
        }
        if mask.as_slice().iter().any(|word| *word != 0) {
            self.mask = mask;
        }
    }

    /// Returns whether only white space may follow.
    fn only_space_follows(&mut self) -> Result<bool, ConstraintError> {
        let tokenizer = Arc::clone(self.vocabulary.tokenizer());
        let words = self.mask()?;
        let tokens = words.iter().enumerate().filter(|(_, word)| **word != 0);
        let mut tokens = tokens.flat_map(|(index, word)| {
            (0..32)
                .filter(move |bit| word >> bit & 1 != 0)
                .map(move |bit| index as u32 * 32 + bit)
        });
        Ok(tokens.all(|token| {
            let text = text_of(&tokenizer, token);
            text.iter().all(u8::is_ascii_whitespace)
        }))
    }
}

impl Constraint for GrammarConstraint {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        if !self.is_in_vocabulary(token) {
            return Ok(false);
        }
        if self.is_end(token) {
            return Ok(self.is_complete());
        }
        if self.is_finished {
            return Ok(false);
        }
        if let Some(last) = self.last_digits().filter(|last| last.may_overflow())
            && last.overflow(text_of(self.vocabulary.tokenizer(), token))
        {
            self.mask()?;
            return Ok(self.mask.is_allowed(token));
        }
        let token = self.canonical(token)?;
        self.is_valid(token)
    }

    fn mask(&mut self) -> Result<&[u32], ConstraintError> {
        if !self.is_masked {
            self.mask = self.matcher.compute_mask_or_eos().map_err(engine_error)?;
            // The engine has a single end token and a single token for each text.
            let is_complete = self.is_complete();
            for &end in self.vocabulary.tokenizer().eog_tokens() {
                self.mask.set(end as usize, is_complete);
            }
            for (&token, &twin) in &self.vocabulary.shared().twins {
                if self.mask.is_allowed(twin) {
                    self.mask.allow_token(token);
                }
            }
            self.end_numbers();
            self.is_masked = true;
        }
        Ok(self.mask.as_slice())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if !self.allows(token)? {
            return Err(ConstraintError {
                message: if self.is_end(token) {
                    "the text ends where the grammar does not let it end".to_owned()
                } else {
                    format!("the grammar does not allow token {token} here")
                },
            });
        }
        self.accepted += 1;
        self.is_masked = false;
        if let (Some(last), Some(digits)) = (self.last_digits(), &mut self.digits) {
            let text = text_of(self.vocabulary.tokenizer(), token);
            digits.push(last.behind(text));
        }
        if self.is_end(token) {
            self.is_finished = true;
            return Ok(());
        }
        let token = self.canonical(token)?;
        self.matcher.consume_token(token).map_err(engine_error)?;
        self.is_finished = self.matcher.is_stopped();
        if self.ends_before_space && !self.is_finished && self.is_complete() {
            self.is_finished = self.only_space_follows()?;
        }
        Ok(())
    }

    fn is_complete(&mut self) -> bool {
        self.is_finished || self.matcher.is_accepting().unwrap_or(false)
    }

    fn is_finished(&self) -> bool {
        self.is_finished
    }

    fn reset(&mut self) -> Result<(), ConstraintError> {
        self.matcher = self.beginning.clone();
        self.accepted = 0;
        if let Some(digits) = &mut self.digits {
            digits.truncate(1);
        }
        self.is_masked = false;
        self.is_finished = false;
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn engine_error(error: impl fmt::Display) -> ConstraintError {
    let message = error.to_string();
    let message = message.lines().next().unwrap_or_default();
    ConstraintError {
        message: format!("the grammar cannot be followed: {message}"),
    }
}
