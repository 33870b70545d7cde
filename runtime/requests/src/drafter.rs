//! A smaller draft model that predicts the next tokens of texts.
//!
//! It has its own context, in which sequences have the same numbers as in the engine's. Its cache
//! of a text may be any prefix of it, followed by drafted tokens that were not accepted. Each draft
//! first removes wrong tokens and computes missing ones. The engine therefore only has to report
//! that sequences end or are copied.

use crate::draft::StepCosts;
use crate::prefix_cache::common;
use samite_core::environment::Clock;
use samite_llm::{Batch, Context, Error, Model, Result};
use std::sync::Arc;

/// A model that drafts for another one.
#[derive(Debug)]
pub struct Drafter {
    context: Context,
    /// Tokens in the cache, by sequence.
    texts: Vec<Vec<u32>>,
    batch: Batch,
    costs: StepCosts,
    clock: Arc<dyn Clock>,
    /// Minimum probability: a less probable token ends a draft.
    least: f32,
    /// Number of drafted tokens.
    drafted: u64,
}

/// A requested draft: `count` tokens after the `tokens` of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRequest<'a> {
    pub sequence: usize,
    pub tokens: &'a [u32],
    pub count: usize,
}

impl Drafter {
    /// Maximum difference between the sizes of the two vocabularies. Vocabularies are padded to
    /// round numbers.
    const MAX_MORE: usize = 128;

    /// Creates a drafter for `model` in `context`, and removes all sequences of the context. The
    /// context needs as many sequences as the engine's context, a row of logits for each of them,
    /// and as many cells. A token with a probability below `least` ends a draft.
    ///
    /// # Errors
    /// Returns an error if the vocabulary does not match that of `model`, or if tokens of its texts
    /// cannot be removed individually.
    pub fn new(mut context: Context, model: &Model, least: f32) -> Result<Self> {
        check_vocabularies(context.model(), model)?;
        if context.model().spec().is_bidirectional() || !context.kv_cache().can_truncate() {
            return Err(wrong(
                context.model(),
                "it keeps a state, or layers of it look through a window, so that tokens that do not come true cannot be taken back: choose a model with whole attention in all layers",
            ));
        }
        context.clear()?;
        let mut drafter = Drafter {
            texts: vec![Vec::new(); context.options().n_seq],
            batch: Batch::new(),
            costs: StepCosts::new(),
            clock: Arc::clone(&context.options().environment.clock),
            least,
            drafted: 0,
            context,
        };
        drafter.measure()?;
        Ok(drafter)
    }

    /// Measures the time of a token. The first step is not representative.
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

    /// Returns the context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the number of drafted tokens.
    pub fn drafted(&self) -> u64 {
        self.drafted
    }

    /// Returns the maximum number of tokens that it prefills at once.
    fn at_once(&self) -> usize {
        let options = self.context.options();
        options.n_ubatch.min(options.n_batch)
    }

    /// Returns the number of tokens that it would have to prefill first, besides the last one.
    pub(crate) fn behind(&self, sequence: usize, tokens: &[u32]) -> usize {
        let known = self
            .texts
            .get(sequence)
            .map_or(0, |text| common(text, tokens));
        tokens.len().saturating_sub(known + 1)
    }

    /// Returns whether all tokens of a text are in its vocabulary.
    pub(crate) fn knows(&self, tokens: &[u32]) -> bool {
        let count = self.context.model().spec().n_vocab;
        tokens.iter().all(|&token| (token as usize) < count)
    }

    /// Returns the seconds of a step with this number of tokens, if they were measured.
    pub(crate) fn seconds(&self, tokens: usize) -> Option<f64> {
        self.costs.for_tokens(tokens)
    }

    /// Removes a sequence.
    pub(crate) fn forget(&mut self, sequence: usize) {
        let Some(text) = self.texts.get_mut(sequence).filter(|text| !text.is_empty()) else {
            return;
        };
        text.clear();
        if let Err(error) = self.context.kv_cache_mut().remove(sequence, ..) {
            tracing::warn!(%error, sequence, "a text of the draft model cannot be forgotten");
        }
    }

    /// Copies the first `count` tokens of a sequence to another one.
    pub(crate) fn copy(&mut self, from: usize, to: usize, count: usize) {
        self.forget(to);
        let Some(text) = self.texts.get(from) else {
            return;
        };
        let text = text[..count.min(text.len())].to_vec();
        let end = i32::try_from(text.len()).unwrap_or(i32::MAX);
        match self.context.kv_cache_mut().copy(from, to, 0..end) {
            Ok(()) => self.texts[to] = text,
            Err(error) => {
                tracing::warn!(%error, "a text of the draft model cannot be copied");
            }
        }
    }

    /// Removes tokens of a sequence that differ from `tokens`, and tokens after the first `most`.
    /// Returns the number of remaining tokens.
    fn cut(&mut self, sequence: usize, tokens: &[u32], most: usize) -> Result<usize> {
        let known = common(&self.texts[sequence], tokens).min(most);
        if known < self.texts[sequence].len() {
            let end = i32::try_from(known).unwrap_or(i32::MAX);
            self.texts[sequence].truncate(known);
            self.context.kv_cache_mut().remove(sequence, end..)?;
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

    /// Removes everything after a failure: the cache and the texts may be inconsistent.
    fn give_up(&mut self) {
        self.texts.iter_mut().for_each(Vec::clear);
        if let Err(error) = self.context.clear() {
            // If a device is lost, for example, at least the cells no longer count as used.
            tracing::warn!(%error, "the draft model's context cannot be cleared");
            for sequence in 0..self.texts.len() {
                if let Err(error) = self.context.kv_cache_mut().remove(sequence, ..) {
                    tracing::warn!(%error, sequence,
                        "a text of the draft model cannot be forgotten");
                }
            }
        }
    }

    /// Prefills a part of a text that it lacks, except its last token: at most `most` tokens, and
    /// as many as it computes at once.
    ///
    /// # Errors
    /// Returns an error if its context is full, or if a device fails. All its texts are removed
    /// then.
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

    /// Drafts the next tokens of texts: the requested number for each, or fewer. The cache must
    /// lack only a few tokens of the texts.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read).
    pub(crate) fn draft(&mut self, wanted: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>> {
        let result = self.try_draft(wanted);
        if result.is_err() {
            self.give_up();
        }
        result
    }

    fn try_draft(&mut self, wanted: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>> {
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

/// Returns the most probable token, if its probability is at least `least`.
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
    if counts[0].abs_diff(counts[1]) > Drafter::MAX_MORE {
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
    // The last tokens of the shorter vocabulary may be padding, and have a meaning in the longer
    // one.
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
