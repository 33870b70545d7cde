//! Grammars that start at a trigger.

use crate::constraint::GrammarConstraint;
use crate::error::{GrammarError, Result};
use fancy_regex::Regex;
use samite_text::{Constraint, ConstraintError};
use std::sync::Arc;

/// Maximum length of the text searched for triggers; only the end of a longer text is searched.
const MAX_BYTES: usize = 1 << 18;

/// Event that starts the grammar.
#[derive(Clone, Debug)]
pub enum Trigger {
    /// A token. It is part of the grammar's text.
    Token(u32),
    /// A word anywhere in the text. It is part of the grammar's text.
    Word(String),
    /// A word anywhere in the text. The grammar's text begins after it.
    After(String),
    /// An expression that matches anywhere in the text. The grammar's text begins with its first
    /// non-empty group, or else with the match.
    Pattern(String),
    /// Like `Pattern`, but matches the whole text.
    FullPattern(String),
}

/// A constraint that allows everything until a trigger occurs and then enforces a grammar.
#[derive(Clone, Debug)]
pub struct Lazy {
    inner: GrammarConstraint,
    tokens: Vec<u32>,
    /// Trigger words; the flag is set if the grammar begins after the word.
    words: Vec<(String, bool)>,
    patterns: Vec<Regex>,
    all: Vec<u32>,
    /// Mask without the tokens that would start the grammar and break it at once.
    some: Vec<u32>,
    /// True if the current text has such tokens.
    has_refused: bool,
    text: Vec<u8>,
    /// Tokens of `text`, each with its end.
    ends: Vec<(u32, usize)>,
    /// True if the start of the first token was dropped.
    is_cut: bool,
    is_triggered: bool,
    is_asleep: bool,
    /// Text that ends the sleep.
    wakes_at: Option<String>,
    is_ended: bool,
}

impl Lazy {
    /// Enforces `inner` from the first of `triggers` on.
    ///
    /// # Errors
    /// [`GrammarError::Trigger`] for an invalid expression, an empty word, or an empty list of
    /// triggers.
    pub fn new(inner: GrammarConstraint, triggers: &[Trigger]) -> Result<Self> {
        let wrong = |trigger: &str, message: String| GrammarError::Trigger {
            trigger: trigger.to_owned(),
            message,
        };
        let pattern = |text: &str, expression: &str| {
            Regex::new(expression).map_err(|error| wrong(text, error.to_string()))
        };
        let (mut tokens, mut words, mut patterns) = (Vec::new(), Vec::new(), Vec::new());
        for trigger in triggers {
            match trigger {
                Trigger::Token(token) => tokens.push(*token),
                Trigger::Word(word) | Trigger::After(word) if word.is_empty() => {
                    return Err(wrong(word, "the word is empty".to_owned()));
                }
                Trigger::Word(word) => words.push((word.clone(), false)),
                Trigger::After(word) => words.push((word.clone(), true)),
                Trigger::Pattern(text) => patterns.push(pattern(text, text)?),
                Trigger::FullPattern(text) => {
                    patterns.push(pattern(text, &format!("^(?:{text})$"))?);
                }
            }
        }
        if triggers.is_empty() {
            return Err(wrong(
                "",
                "there is none, so the grammar would never begin".to_owned(),
            ));
        }
        let count = inner.tokenizer().vocab_size();
        let mut all = vec![u32::MAX; count / 32];
        if !count.is_multiple_of(32) {
            all.push((1 << (count % 32)) - 1);
        }
        Ok(Lazy {
            inner,
            tokens,
            words,
            patterns,
            some: all.clone(),
            all,
            has_refused: false,
            text: Vec::new(),
            ends: Vec::new(),
            is_cut: false,
            is_triggered: false,
            is_asleep: false,
            wakes_at: None,
            is_ended: false,
        })
    }

    /// Returns whether the grammar has started.
    pub fn is_triggered(&self) -> bool {
        self.is_triggered
    }

    /// Suspends or resumes the search for triggers, for example inside of reasoning. Discards the
    /// text so far.
    pub fn set_asleep(&mut self, is_asleep: bool) {
        self.is_asleep = is_asleep;
        self.forget();
    }

    /// Sleeps until a text occurs, such as the end of reasoning that the prompt began.
    pub fn sleep_until(mut self, text: impl Into<String>) -> Self {
        let text = text.into();
        self.is_asleep = !text.is_empty();
        self.wakes_at = self.is_asleep.then_some(text);
        self
    }

    /// Returns whether the text ends the sleep. Discards text that the search no longer needs.
    fn wakes(&mut self) -> bool {
        let Some(end) = &self.wakes_at else {
            return false;
        };
        let found = self
            .text
            .windows(end.len())
            .position(|part| part == end.as_bytes());
        let kept = end.len() - 1;
        let dropped = match found {
            Some(at) => at + end.len(),
            None => self.text.len().saturating_sub(kept),
        };
        self.drop_first(dropped);
        found.is_some()
    }

    /// Drops the start of the text.
    fn drop_first(&mut self, dropped: usize) {
        if dropped == 0 {
            return;
        }
        self.is_cut = self.ends.iter().all(|(_, end)| *end != dropped);
        self.text.drain(..dropped);
        self.ends.retain(|(_, end)| *end > dropped);
        self.ends.iter_mut().for_each(|(_, end)| *end -= dropped);
    }

    fn forget(&mut self) {
        self.text.clear();
        self.ends.clear();
        self.is_cut = false;
    }

    /// Returns where the grammar's text begins, if the text contains a trigger.
    fn trigger(&self, new_from: usize) -> Option<usize> {
        let words = self.words.iter().filter_map(|(word, is_before)| {
            let from = new_from.saturating_sub(word.len() - 1);
            let found = self.text[from..].windows(word.len());
            let at = found.into_iter().position(|part| part == word.as_bytes())?;
            Some(from + at + if *is_before { word.len() } else { 0 })
        });
        let mut places: Vec<usize> = words.collect();
        if !self.patterns.is_empty() {
            // Replacements have the same length in bytes, so that positions agree.
            let mut view = String::with_capacity(self.text.len());
            for chunk in self.text.utf8_chunks() {
                view.push_str(chunk.valid());
                view.extend(chunk.invalid().iter().map(|_| '\u{1A}'));
            }
            for pattern in &self.patterns {
                // An expression that exceeds its limits counts as not matching.
                if let Ok(Some(found)) = pattern.captures(&view) {
                    let group = found
                        .iter()
                        .skip(1)
                        .flatten()
                        .find(|group| !group.as_str().is_empty());
                    places.extend(group.or_else(|| found.get(0)).map(|found| found.start()));
                }
            }
        }
        places.into_iter().min()
    }

    /// Returns whether a token is a trigger whose part in the grammar's text breaks the grammar.
    fn breaks(&mut self, token: u32) -> bool {
        if self.is_asleep || self.tokens.contains(&token) {
            return false;
        }
        let length = self.text.len();
        let tokenizer = self.inner.tokenizer();
        let piece = tokenizer.token_to_piece(token, true);
        self.text.extend_from_slice(piece.unwrap_or_default());
        let is_trigger = self.trigger(length).is_some();
        self.text.truncate(length);
        is_trigger && self.clone().accept(token).is_err()
    }

    /// Starts the grammar with the text after `start`.
    fn begin(&mut self, start: usize) -> Result<(), ConstraintError> {
        self.is_triggered = true;
        let text = std::mem::take(&mut self.text);
        let mut from = 0;
        for (token, end) in std::mem::take(&mut self.ends) {
            if end > start {
                if from < start || (from == 0 && self.is_cut) {
                    self.inner.accept_text(&text[start.max(from)..end])?;
                } else {
                    self.inner.accept_token_or_text(token)?;
                }
            }
            from = end;
        }
        Ok(())
    }
}

impl Constraint for Lazy {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        if self.is_triggered {
            return self.inner.allows(token);
        }
        let breaks = self.breaks(token);
        self.has_refused |= breaks;
        Ok(!breaks && (token as usize) < self.inner.tokenizer().vocab_size())
    }

    fn mask(&mut self) -> Result<&[u32], ConstraintError> {
        if self.is_triggered {
            return self.inner.mask();
        }
        // Most texts do not need a check of each token.
        if !self.has_refused {
            return Ok(&self.all);
        }
        for token in 0..self.inner.tokenizer().vocab_size() as u32 {
            let bit = 1 << (token % 32);
            if self.breaks(token) {
                self.some[token as usize / 32] &= !bit
            } else {
                self.some[token as usize / 32] |= bit
            }
        }
        Ok(&self.some)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.is_triggered {
            return self.inner.accept(token);
        }
        self.has_refused = false;
        if self.inner.tokenizer().is_eog(token) {
            self.is_ended = true;
            return Ok(());
        }
        if self.is_asleep && self.wakes_at.is_none() {
            return Ok(());
        }
        if !self.is_asleep && self.tokens.contains(&token) {
            self.is_triggered = true;
            self.forget();
            return self.inner.accept_token_or_text(token);
        }
        let mut new_from = self.text.len();
        let tokenizer = Arc::clone(self.inner.tokenizer());
        let piece = tokenizer.token_to_piece(token, true);
        self.text.extend_from_slice(piece.unwrap_or_default());
        self.ends.push((token, self.text.len()));
        if self.is_asleep {
            if !self.wakes() {
                return Ok(());
            }
            self.is_asleep = false;
            new_from = 0;
        }
        if let Some(start) = self.trigger(new_from) {
            return self.begin(start);
        }
        if self.text.len() > MAX_BYTES {
            self.drop_first(self.text.len() - MAX_BYTES / 2);
        }
        Ok(())
    }

    fn is_complete(&mut self) -> bool {
        !self.is_triggered || self.inner.is_complete()
    }

    fn is_finished(&self) -> bool {
        self.is_ended || (self.is_triggered && self.inner.is_finished())
    }

    fn reset(&mut self) -> Result<(), ConstraintError> {
        self.forget();
        self.is_triggered = false;
        self.is_asleep = self.wakes_at.is_some();
        self.is_ended = false;
        self.inner.reset()
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
