//! A smaller model that says what texts go on with.
//!
//! It has a context of its own, in which a sequence has the same number as in the engine's. What it has of a text may be any beginning of it, and tokens
//! that did not come true: whatever it has wrong is removed when it is asked, and what it lacks is computed. So nothing has to be told to it but that
//! sequences end, and what is copied.

use crate::draft::Costs;
use crate::kept::common;
use samite_core::environment::Clock;
use samite_llm::{Batch, Context, Error, Model, Result};
use std::sync::Arc;

/// A model that drafts for another one.
#[derive(Debug)]
pub struct Drafter {
    context: Context,
    /// By sequence: the tokens in the cache.
    texts: Vec<Vec<u32>>,
    batch: Batch,
    costs: Costs,
    clock: Arc<dyn Clock>,
    /// Tokens of it with a smaller probability end a draft.
    least: f32,
    /// Tokens that it drafted.
    drafted: u64,
}

/// A draft that is wanted: of a sequence with these tokens, so many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub sequence: usize,
    pub tokens: &'a [u32],
    pub count: usize,
}

impl Drafter {
    /// How many tokens the vocabularies of two models may differ by at the end: both are filled up there to a round number.
    const MOST_MORE: usize = 128;

    /// A drafter in `context`, whose sequences are forgotten, for a `model`. It needs as many sequences as the engine's context has, a row of logits for each
    /// of them, and as many cells. Tokens that it finds less probable than `least` end a draft.
    ///
    /// # Errors
    /// If its vocabulary is not that of `model`, or tokens cannot be removed from its texts one by one.
    pub fn new(mut context: Context, model: &Model, least: f32) -> Result<Self> {
        check_vocabularies(context.model(), model)?;
        if context.model().spec().sees_later() || !context.can_take_back() {
            return Err(wrong(
                context.model(),
                "it keeps a state, or layers of it look through a window, so that tokens that do not come true cannot be taken back: choose a model with whole attention in all layers",
            ));
        }
        context.clear()?;
        let mut drafter = Drafter {
            texts: vec![Vec::new(); context.options().n_seq],
            batch: Batch::new(),
            costs: Costs::new(),
            clock: Arc::clone(&context.options().environment.clock),
            least,
            drafted: 0,
            context,
        };
        drafter.measure()?;
        Ok(drafter)
    }

    /// Finds out what a token takes. The first step is not the rule.
    fn measure(&mut self) -> Result<()> {
        for tokens in [[0; 1].as_slice(), &[0; 2], &[0; 3], &[0; 4]] {
            self.batch.clear();
            self.cut(0, tokens, tokens.len() - 1)?;
            self.add(0, &tokens[tokens.len() - 1..], true);
            match tokens.len() {
                1 => self.context.decode(&self.batch)?,
                _ => self.decode()?,
            }
        }
        self.forget(0);
        Ok(())
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// How many tokens it has drafted.
    pub fn drafted(&self) -> u64 {
        self.drafted
    }

    /// Most tokens that it reads at once.
    fn at_once(&self) -> usize {
        let options = self.context.options();
        options.n_ubatch.min(options.n_batch)
    }

    /// How many tokens of a text it would have to read first, beside the last one.
    pub(crate) fn behind(&self, sequence: usize, tokens: &[u32]) -> usize {
        let known = self
            .texts
            .get(sequence)
            .map_or(0, |text| common(text, tokens));
        tokens.len().saturating_sub(known + 1)
    }

    /// Whether it knows all tokens of a text.
    pub(crate) fn knows(&self, tokens: &[u32]) -> bool {
        let count = self.context.model().spec().n_vocab;
        tokens.iter().all(|&token| (token as usize) < count)
    }

    /// Seconds that a step of it with so many tokens takes, as far as it was measured.
    pub(crate) fn seconds(&self, tokens: usize) -> Option<f64> {
        self.costs.of(tokens)
    }

    /// A sequence ends.
    pub(crate) fn forget(&mut self, sequence: usize) {
        let Some(text) = self.texts.get_mut(sequence).filter(|text| !text.is_empty()) else {
            return;
        };
        text.clear();
        if let Err(error) = self.context.remove(sequence, ..) {
            tracing::warn!(%error, sequence, "a text of the draft model cannot be forgotten");
        }
    }

    /// A sequence begins with the first `count` tokens of another one.
    pub(crate) fn copy(&mut self, from: usize, to: usize, count: usize) {
        self.forget(to);
        let Some(text) = self.texts.get(from) else {
            return;
        };
        let text = text[..count.min(text.len())].to_vec();
        let end = i32::try_from(text.len()).unwrap_or(i32::MAX);
        match self.context.copy(from, to, 0..end) {
            Ok(()) => self.texts[to] = text,
            Err(error) => {
                tracing::warn!(%error, "a text of the draft model cannot be copied");
            }
        }
    }

    /// Removes what does not come true of a sequence, and what comes after so many tokens.
    fn cut(&mut self, sequence: usize, tokens: &[u32], most: usize) -> Result<usize> {
        let known = common(&self.texts[sequence], tokens).min(most);
        if known < self.texts[sequence].len() {
            let end = i32::try_from(known).unwrap_or(i32::MAX);
            self.texts[sequence].truncate(known);
            self.context.remove(sequence, end..)?;
        }
        Ok(known)
    }

    fn decode(&mut self) -> Result<()> {
        let start = self.clock.now();
        self.context.decode(&self.batch)?;
        let time = self.clock.now().saturating_duration_since(start);
        self.costs.learn(self.batch.len(), time);
        Ok(())
    }

    fn add(&mut self, sequence: usize, tokens: &[u32], wants_last: bool) {
        let from = self.texts[sequence].len();
        for (number, &token) in tokens.iter().enumerate() {
            let position = i32::try_from(from + number).unwrap_or(i32::MAX);
            let wants = wants_last && number + 1 == tokens.len();
            self.batch.add(token, position, &[sequence as u32], wants);
        }
        self.texts[sequence].extend_from_slice(tokens);
    }

    /// Forgets everything after a failure: the cache and the texts may not agree any more.
    fn give_up(&mut self) {
        self.texts.iter_mut().for_each(Vec::clear);
        if let Err(error) = self.context.clear() {
            // A device is lost, say: what is there is at least not counted any more.
            tracing::warn!(%error, "the draft model's context cannot be cleared");
            for sequence in 0..self.texts.len() {
                if let Err(error) = self.context.remove(sequence, ..) {
                    tracing::warn!(%error, sequence, "a text of the draft model cannot be forgotten");
                }
            }
        }
    }

    /// Reads a part of what it lacks of a text, but its last token: at most `most` tokens, and as many as it reads at once.
    ///
    /// # Errors
    /// If its context is full, or a device fails. It has forgotten everything then.
    pub(crate) fn read(&mut self, sequence: usize, tokens: &[u32], most: usize) -> Result<()> {
        let read = |drafter: &mut Self| {
            let end = tokens.len().saturating_sub(1);
            let known = drafter.cut(sequence, tokens, end)?;
            let most = most.min(drafter.at_once()).max(1);
            let part = &tokens[known..end.min(known + most)];
            if part.is_empty() {
                return Ok(());
            }
            drafter.batch.clear();
            drafter.add(sequence, part, false);
            drafter.decode()
        };
        let result = read(self);
        if result.is_err() {
            self.give_up();
        }
        result
    }

    /// What texts go on with: for each that is wanted so many tokens, or fewer. The texts must lack few tokens only.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn draft(&mut self, wanted: &[Wanted<'_>]) -> Result<Vec<Vec<u32>>> {
        let result = self.try_draft(wanted);
        if result.is_err() {
            self.give_up();
        }
        result
    }

    fn try_draft(&mut self, wanted: &[Wanted<'_>]) -> Result<Vec<Vec<u32>>> {
        let mut drafts = vec![Vec::new(); wanted.len()];
        self.batch.clear();
        let mut open: Vec<(usize, usize)> = Vec::new();
        for (number, one) in wanted.iter().enumerate() {
            if one.count == 0 || one.tokens.is_empty() {
                continue;
            }
            let known = self.cut(one.sequence, one.tokens, one.tokens.len() - 1)?;
            let lacks = &one.tokens[known..];
            if self.batch.len() + lacks.len() > self.at_once() {
                continue;
            }
            self.add(one.sequence, lacks, true);
            open.push((number, self.batch.len() - 1));
        }
        while !open.is_empty() {
            self.decode()?;
            let mut next = Vec::new();
            self.batch.clear();
            for (number, row) in std::mem::take(&mut open) {
                let one = wanted[number];
                let Some(token) = self.context.logits(row).and_then(|l| likely(l, self.least))
                else {
                    continue;
                };
                drafts[number].push(token);
                self.drafted += 1;
                if drafts[number].len() < one.count {
                    next.push((number, token));
                }
            }
            for (number, token) in next {
                self.add(wanted[number].sequence, &[token], true);
                open.push((number, self.batch.len() - 1));
            }
        }
        Ok(drafts)
    }
}

/// The likeliest token, if its probability is at least `least`.
fn likely(logits: &[f32], least: f32) -> Option<u32> {
    let numbered = logits.iter().copied().enumerate();
    let (token, top) = numbered.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let sum: f32 = logits.iter().map(|logit| (logit - top).exp()).sum();
    (1.0 / sum >= least).then(|| u32::try_from(token).unwrap_or(0))
}

fn wrong(model: &Model, message: impl std::fmt::Display) -> Error {
    let path = model.path().display();
    Error::InvalidArgument(format!("draft model {path}: {message}").into())
}

/// Checks that tokens of one model are tokens of the other.
fn check_vocabularies(draft: &Model, model: &Model) -> Result<()> {
    let (ours, theirs) = (model.tokenizer()?, draft.tokenizer()?);
    let wrong = |message: String| Err(wrong(draft, message));
    let counts = [model.spec().n_vocab, draft.spec().n_vocab];
    if counts[0].abs_diff(counts[1]) > Drafter::MOST_MORE {
        return wrong(format!(
            "its vocabulary has {} tokens, that of {} has {}: choose a smaller model of the same family",
            counts[1],
            model.path().display(),
            counts[0]
        ));
    }
    for (name, own, other) in [
        ("begins", ours.bos(), theirs.bos()),
        ("ends", ours.eos(), theirs.eos()),
    ] {
        if own != other {
            return wrong(format!(
                "the token that {name} a text is {other:?}, and {own:?} in {}: choose a smaller model of the same family",
                model.path().display()
            ));
        }
    }
    // The last of the shorter vocabulary may be there to fill it up, and mean something in the longer one.
    let count = ours.vocab_size().min(theirs.vocab_size());
    for id in 0..u32::try_from(count).unwrap_or(u32::MAX) {
        let pieces = [ours, theirs].map(|tokenizer| tokenizer.token_to_piece(id, true).ok());
        if pieces[0] != pieces[1] {
            let [own, other] =
                pieces.map(|piece| String::from_utf8_lossy(piece.unwrap_or_default()).into_owned());
            return wrong(format!(
                "its token {id} is {other:?}, and {own:?} in {}: choose a smaller model of the same family",
                model.path().display()
            ));
        }
    }
    Ok(())
}
