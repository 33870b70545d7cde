//! Limits reasoning: by a number of tokens, or when the client ends it.

use crate::app::{App, lock};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use samite_chat::AnswerParser;
use samite_text::{Constraint, ConstraintError, Tokenizer, Utf8Stream};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Reads the maximum number of reasoning tokens of an answer; `None` for no limit.
fn max_tokens(app: &App, fields: &Fields<'_>) -> Result<Option<usize>> {
    let names = [
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
        "reasoning_budget",
    ];
    let budget = fields.integer(&names, -1, i64::from(i32::MAX))?;
    // A request cannot exceed the server's limit.
    let own = budget.and_then(|tokens| usize::try_from(tokens).ok());
    Ok(own.into_iter().chain(app.options.reasoning_budget).min())
}

/// Limit for the reasoning of an answer.
#[derive(Clone, Debug, Default)]
pub struct ReasoningLimit {
    /// Maximum number of tokens.
    pub tokens: Option<usize>,
    /// True once the client ends the reasoning. `None` if the client cannot.
    pub stop: Option<Arc<AtomicBool>>,
}

impl ReasoningLimit {
    /// Reads the limit of a request. The field names are llama-server's.
    pub fn read(app: &App, fields: &Fields<'_>) -> Result<Self> {
        Ok(ReasoningLimit {
            tokens: max_tokens(app, fields)?,
            stop: fields
                .boolean(&["reasoning_control"], false)?
                .then(Arc::default),
        })
    }

    /// Returns whether nothing limits the reasoning.
    pub fn is_none(&self) -> bool {
        self.tokens.is_none() && self.stop.is_none()
    }
}

/// The running answers whose reasoning a client can end, by owner and ID.
#[derive(Debug, Default)]
pub struct ReasoningControls(Mutex<BTreeMap<(u64, String), Weak<AtomicBool>>>);

impl ReasoningControls {
    /// Adds an answer. It can be controlled until `stop` is dropped.
    pub fn add(&self, owner: u64, id: &str, stop: &Arc<AtomicBool>) {
        let mut controls = lock(&self.0);
        controls.retain(|_, stop| stop.strong_count() > 0);
        controls.insert((owner, id.to_owned()), Arc::downgrade(stop));
    }

    /// Ends the reasoning of an answer. Returns whether the answer exists.
    pub fn stop(&self, owner: u64, id: &str) -> bool {
        let stop = lock(&self.0).get(&(owner, id.to_owned())).cloned();
        let stop = stop.and_then(|stop| stop.upgrade());
        if let Some(stop) = &stop {
            stop.store(true, Ordering::Relaxed);
        }
        stop.is_some()
    }
}

/// A constraint that limits the reasoning tokens of an answer. At the limit, it allows only the
/// mark that ends reasoning. Otherwise it allows the tokens of another constraint.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    inner: Option<Box<dyn Constraint>>,
    tokenizer: Arc<Tokenizer>,
    /// Control tokens that are part of the answer's text.
    shown: Vec<u32>,
    limit: ReasoningLimit,
    begin: AnswerProgress,
    now: AnswerProgress,
    /// Mask of all tokens, and mask of the next token of the closing mark.
    all: Vec<u32>,
    one: Vec<u32>,
}

/// State of an answer.
#[derive(Clone, Debug)]
struct AnswerProgress {
    parser: AnswerParser,
    text: Utf8Stream,
    /// Reasoning tokens so far.
    used: usize,
    /// Rest of the closing mark, with the next token last.
    closing: Vec<u32>,
    is_ended: bool,
}

impl ReasoningBudget {
    /// Limits an answer that `parser` reads from its first token on.
    pub fn new(
        inner: Option<Box<dyn Constraint>>,
        tokenizer: &Arc<Tokenizer>,
        shown: Vec<u32>,
        parser: AnswerParser,
        limit: ReasoningLimit,
    ) -> Result<Self> {
        let words = tokenizer.vocab_size().div_ceil(32);
        let begin = AnswerProgress {
            parser,
            text: Utf8Stream::new(),
            used: 0,
            closing: Vec::new(),
            is_ended: false,
        };
        let mut budget = ReasoningBudget {
            inner,
            tokenizer: Arc::clone(tokenizer),
            shown,
            limit,
            now: begin.clone(),
            begin,
            all: vec![u32::MAX; words],
            one: vec![0; words],
        };
        budget
            .close_if_used_up()
            .map_err(|error| ApiError::field("reasoning_budget_tokens", error))?;
        budget.begin = budget.now.clone();
        Ok(budget)
    }

    /// Starts to close the reasoning if it has reached its limit.
    fn close_if_used_up(&mut self) -> std::result::Result<(), ConstraintError> {
        let now = &mut self.now;
        let is_used_up = self.limit.tokens.is_some_and(|most| now.used >= most);
        let stop = self.limit.stop.as_ref();
        let is_stopped = stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let is_due = (is_used_up || is_stopped) && now.closing.is_empty();
        // Do not split a character.
        if !is_due || now.text.is_incomplete() {
            return Ok(());
        }
        if let Some(mark) = now.parser.reasoning_end() {
            let tokens = self.tokenizer.tokenize(mark, false, true);
            let mut tokens = tokens.map_err(|error| ConstraintError {
                message: error.to_string(),
            })?;
            // The client's grammar may not allow the mark here. Then try again after the next
            // token.
            if let Some(inner) = &self.inner {
                let mut probe = inner.clone();
                for &token in &tokens {
                    if !probe.allows(token)? {
                        return Ok(());
                    }
                    probe.accept(token)?;
                }
            }
            tokens.reverse();
            now.closing = tokens;
        }
        Ok(())
    }
}

impl Constraint for ReasoningBudget {
    fn allows(&mut self, token: u32) -> std::result::Result<bool, ConstraintError> {
        match (self.now.closing.last(), &mut self.inner) {
            (Some(next), _) => Ok(token == *next),
            (None, Some(inner)) => inner.allows(token),
            (None, None) => Ok((token as usize) < self.tokenizer.vocab_size()),
        }
    }

    fn mask(&mut self) -> std::result::Result<&[u32], ConstraintError> {
        match (self.now.closing.last(), &mut self.inner) {
            (Some(next), _) => {
                self.one.fill(0);
                self.one[*next as usize / 32] = 1 << (next % 32);
                Ok(&self.one)
            }
            (None, Some(inner)) => inner.mask(),
            (None, None) => Ok(&self.all),
        }
    }

    fn accept(&mut self, token: u32) -> std::result::Result<(), ConstraintError> {
        let now = &mut self.now;
        if let Some(next) = now.closing.pop()
            && next != token
        {
            return Err(ConstraintError {
                message: format!("token {token} does not end the reasoning"),
            });
        }
        now.is_ended = self.tokenizer.is_eog(token);
        if let Some(inner) = &mut self.inner {
            inner.accept(token)?;
        }
        if now.is_ended {
            return Ok(());
        }
        now.used += usize::from(now.parser.reasoning_end().is_some());
        let is_shown = self.shown.contains(&token);
        let piece = self.tokenizer.token_to_piece(token, is_shown);
        let text = now.text.push(piece.unwrap_or_default());
        now.parser.push(&text);
        self.close_if_used_up()
    }

    fn is_complete(&mut self) -> bool {
        let inner = self.inner.as_mut();
        self.now.closing.is_empty() && inner.is_none_or(|inner| inner.is_complete())
    }

    fn is_finished(&self) -> bool {
        match &self.inner {
            Some(inner) => inner.is_finished(),
            None => self.now.is_ended,
        }
    }

    fn reset(&mut self) -> std::result::Result<(), ConstraintError> {
        self.now = self.begin.clone();
        match &mut self.inner {
            Some(inner) => inner.reset(),
            None => Ok(()),
        }
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
