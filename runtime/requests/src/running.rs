//! A request with its tokens, its sampler, and the events for its reader.

use crate::draft::AcceptanceRate;
use crate::event::{
    Counts, Event, Failed, FailureKind, Finished, Probabilities, PromptProgress, Started, Token,
};
use crate::event_queue::EventQueue;
use crate::prefix_cache::Key;
use crate::request::{Prepared, ProbabilityKind, Request};
use samite_llm::{Context, Error, Finish, Images, SavedSequence, TEMPLATE_TAIL, TextGenerator};
use samite_text::{LogProbabilities, Sampler, Tokenizer};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Returns the overlap of two ranges.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// A request, from its submission to its end.
#[derive(Debug)]
pub(crate) struct Running {
    pub id: u64,
    pub request: Request,
    /// Number of the set of adapters, and salt.
    pub key: Key,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    pub n_prompt: usize,
    pub images: Images,
    /// True for each image whose rows were requested.
    pub is_requested: Vec<bool>,
    /// Number of prompt tokens whose log-probabilities were sent, or that have none.
    n_scored: usize,
    pub counts: Counts,
    pub submitted: Instant,
    /// Time when it got its first slot.
    pub started: Option<Instant>,
    /// Time when its first token was generated.
    pub first_token: Option<Instant>,
    pub event_queue: EventQueue,
    /// Saved cache, if the request was preempted.
    pub swapped: Option<SavedSequence>,
    pub is_cancelled: bool,
    /// Drafted tokens that are computed in this step, and not yet accepted.
    pub draft: Vec<u32>,
    /// True if the draft model provided the draft.
    pub is_drafted_by_model: bool,
    /// Acceptance rate of guesses from the text itself.
    pub acceptance_rate: AcceptanceRate,
    /// Acceptance rate of the draft model, once it was used.
    pub model_acceptance_rate: Option<AcceptanceRate>,
    sampler: Sampler,
    generator: TextGenerator,
}

impl Running {
    pub fn new(
        id: u64,
        prepared: Prepared,
        key: Key,
        event_queue: EventQueue,
        now: Instant,
    ) -> Self {
        let Prepared {
            request,
            images,
            sampler,
            stop,
        } = prepared;
        Running {
            id,
            key,
            tokens: request.prompt.clone(),
            n_prompt: request.prompt.len(),
            is_requested: vec![false; images.iter().count()],
            images,
            n_scored: 1,
            counts: Counts {
                prompt: request.prompt.len(),
                ..Counts::default()
            },
            submitted: now,
            started: None,
            first_token: None,
            event_queue,
            swapped: None,
            is_cancelled: false,
            draft: Vec::new(),
            is_drafted_by_model: false,
            acceptance_rate: AcceptanceRate::default(),
            model_acceptance_rate: None,
            sampler,
            generator: TextGenerator::new(
                stop,
                request.shown.clone(),
                request.ignore_end,
                request.max_tokens,
            ),
            request,
        }
    }

    /// Returns whether its reader was dropped, or whether it was cancelled.
    pub fn is_unwanted(&self) -> bool {
        self.is_cancelled || self.event_queue.is_closed()
    }

    /// Returns the place shortly before the end of the prompt where a state is cached: a later
    /// prompt may differ from here on.
    pub fn end_checkpoint(&self) -> usize {
        let end = self.n_prompt.saturating_sub(TEMPLATE_TAIL);
        self.images.reusable(end)
    }

    /// Returns whether the rows of an image were requested, and are not computed yet.
    pub fn awaits_rows(&self) -> bool {
        let mut images = self.images.iter().zip(&self.is_requested);
        images.any(|(one, requested)| *requested && one.image.computed_rows().is_none())
    }

    /// Returns its deadline.
    pub fn deadline(&self) -> Option<Instant> {
        let whole = self
            .request
            .deadline
            .and_then(|time| self.submitted.checked_add(time));
        let first = self.first_token.zip(self.request.decode_time);
        let decoding = first.and_then(|(first, time)| first.checked_add(time));
        [whole, decoding].into_iter().flatten().min()
    }

    /// Records that it got a slot, and sends an event the first time.
    pub fn start(&mut self, started: Started, now: Instant) {
        if self.started.is_some() {
            return;
        }
        self.started = Some(now);
        self.counts.cached = started.cached;
        self.counts.waiting = now.saturating_duration_since(self.submitted);
        self.event_queue.send(Event::Started(started));
        self.progress(started.cached, now);
    }

    /// Sends the progress of prefill.
    pub fn progress(&mut self, processed: usize, now: Instant) {
        if self.request.reports_progress && self.counts.generated == 0 {
            let started = self.started.unwrap_or(now);
            self.event_queue.send(Event::Progress(PromptProgress {
                total: self.n_prompt,
                cached: self.counts.cached,
                processed,
                time: now.saturating_duration_since(started),
            }));
        }
    }

    /// Returns the tokens whose logits predict prompt tokens with log-probabilities to be sent.
    pub fn unscored(&self) -> Range<usize> {
        match self.request.prompt_logprobs {
            Some(_) => self.n_scored - 1..self.n_prompt - 1,
            None => 0..0,
        }
    }

    /// Sends the log-probabilities of the prompt tokens after those at `places`. The logits of the
    /// first one are at `index` of the last batch.
    pub fn score(
        &mut self,
        context: &mut Context,
        places: Range<usize>,
        index: usize,
    ) -> Result<(), Error> {
        let wanted = overlap(&self.unscored(), &places);
        let Some(count) = self.request.prompt_logprobs.filter(|_| !wanted.is_empty()) else {
            return Ok(());
        };
        let mut scores = Vec::with_capacity(wanted.len());
        for place in wanted {
            let logits = context.read_logits(index + place - places.start)?;
            let found = LogProbabilities::new(logits, self.tokens[place + 1], count);
            scores.push(found.ok_or(Error::NotFinite { token: place })?.into());
        }
        self.n_scored += scores.len();
        self.event_queue.send(Event::PromptLogprobs(scores));
        Ok(())
    }

    fn probabilities(&self, logits: &[f32], token: u32) -> Option<Probabilities> {
        match self.request.probabilities? {
            ProbabilityKind::Model(count) => {
                LogProbabilities::new(logits, token, count).map(Into::into)
            }
            ProbabilityKind::Drawn(count) => {
                let mut drawn: Vec<(u32, f32)> = self
                    .sampler
                    .candidates()
                    .as_slice()
                    .iter()
                    .map(|candidate| (candidate.id, candidate.probability))
                    .filter(|(_, probability)| *probability > 0.0)
                    .collect();
                drawn.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                let own = drawn.iter().find(|(id, _)| *id == token);
                let own = own.map_or(1.0, |(_, probability)| *probability);
                drawn.truncate(count);
                Some(Probabilities {
                    token: own,
                    top: drawn,
                })
            }
        }
    }

    /// Returns the k whose top-k suffices to sample, or `None` if it needs all logits.
    pub fn required_top_k(&mut self) -> Option<usize> {
        match self.request.probabilities {
            None => self.sampler.required_top_k(),
            Some(_) => None,
        }
    }

    /// Samples the token after the one at `index` of the last batch, with the requested
    /// probabilities.
    pub fn sample(
        &mut self,
        context: &mut Context,
        index: usize,
    ) -> Result<(u32, Option<Probabilities>), Error> {
        let token = TextGenerator::sample(context, &mut self.sampler, index)?;
        let probabilities = match self.request.probabilities {
            Some(_) => self.probabilities(context.read_logits(index)?, token),
            None => None,
        };
        Ok((token, probabilities))
    }

    /// Outputs a sampled token. Returns the reason if the text ends.
    pub fn accept(
        &mut self,
        (token, probabilities): (u32, Option<Probabilities>),
        tokenizer: &Tokenizer,
        now: Instant,
    ) -> Result<Option<Finish>, Error> {
        let step = self.generator.accept(&mut self.sampler, tokenizer, token)?;
        self.first_token.get_or_insert(now);
        self.tokens.push(token);
        self.counts.generated += 1;
        self.event_queue.send(Event::Token(Token {
            id: token,
            text: step.text,
            probabilities,
        }));
        Ok(step.finish)
    }

    fn count(&mut self, now: Instant) -> Counts {
        let since = |from: Option<Instant>, to: Instant| {
            from.map_or(Duration::ZERO, |from| to.saturating_duration_since(from))
        };
        self.counts.prefill = since(self.started, self.first_token.unwrap_or(now));
        self.counts.decoding = since(self.first_token, now);
        self.counts
    }

    /// Sends the event of its end.
    pub fn finish(&mut self, reason: Finish, now: Instant) {
        let counts = self.count(now);
        let rest = self.generator.finish();
        self.event_queue.send(Event::Finished(Finished {
            reason,
            rest,
            counts,
        }));
    }

    /// Sends the event of its failure.
    pub fn fail(&mut self, kind: FailureKind, message: impl Into<String>, now: Instant) {
        let counts = self.count(now);
        self.event_queue.send(Event::Failed(Failed {
            kind,
            message: message.into(),
            counts,
        }));
    }
}
