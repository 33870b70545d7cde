//! Drafts: possible next tokens, which are computed together with the tokens before them.

use super::{Active, Engine, text_before_image};
use crate::draft::{self, AcceptanceRate, BatchLoad};
use crate::drafter::{DraftRequest, Drafter};
use samite_llm::{Error, Result};

/// A planned draft of a request.
#[derive(Clone, Copy, Debug)]
struct Planned {
    id: u64,
    length: usize,
    acceptance_rate: AcceptanceRate,
    /// True if the text itself provides the draft; otherwise the draft model does.
    is_guessed: bool,
    /// Seconds for each token.
    each: f64,
}

impl Engine {
    /// Maximum number of tokens that the draft model may lack of a text to draft for it
    /// immediately.
    const NEAR: usize = 16;
    /// Number of tokens of a text that the draft model prefills in one step.
    const READS: usize = 256;
    /// Expected length of an answer, for requests without a limit.
    const ANSWER: usize = 256;
    /// Minimum ratio of the time that drafts save to the time that the draft model's prefill takes.
    const MIN_RETURN: f64 = 2.0;

    /// Sets a draft model, which drafts if the text itself provides no guess.
    /// [`EngineOptions::draft`](crate::EngineOptions::draft) is the longest draft.
    ///
    /// # Errors
    /// Returns an error if the engine's model has recurrent states or windows, so that tokens
    /// cannot be removed, or if the drafter has too few sequences.
    pub fn set_drafter(&mut self, drafter: Drafter) -> Result<()> {
        let invalid = |message: &str| Err(Error::InvalidArgument(message.into()));
        if !self.context.kv_cache().can_truncate() {
            return invalid(
                "this model keeps a state, or layers of it look through a window: drafted tokens could not be taken back, so it takes no draft model",
            );
        }
        let options = drafter.context().options();
        let rows = options.n_logits.unwrap_or(options.n_seq);
        if options.n_seq < self.context.options().n_seq || rows < self.options.slots {
            return invalid(
                "the draft model's context has fewer sequences (n_seq), or rows of logits (n_logits), than the engine needs",
            );
        }
        self.drafter = Some(drafter);
        Ok(())
    }

    /// Returns the draft model.
    pub fn drafter(&self) -> Option<&Drafter> {
        self.drafter.as_ref()
    }

    /// Returns the maximum length of a request's draft if there is room for `room` tokens.
    fn most_drafted(&self, active: &Active, room: usize) -> usize {
        let running = &active.running;
        let to_write = running.request.max_tokens.unwrap_or(usize::MAX);
        let most = [
            self.options.draft,
            room,
            // The last token is output without being computed.
            to_write.saturating_sub(running.counts.generated + 1),
            self.limits.context.saturating_sub(running.tokens.len() + 1),
        ];
        most.into_iter().min().unwrap_or(0)
    }

    /// Creates drafts for decoding requests, where they are worthwhile.
    pub(super) fn make_drafts(&mut self, decoding: &[u64]) {
        if self.options.draft == 0 || !self.context.kv_cache().can_truncate() || decoding.is_empty()
        {
            return;
        }
        // The time of a step without drafts must be known.
        if !self.plain.has(decoding.len()) {
            return;
        }
        let start = self.clock.now();
        let rows = self.context.options().n_logits.unwrap_or(usize::MAX);
        let room = [
            self.context.kv_cache().cells().free(),
            self.options.budget,
            rows,
        ];
        let room = room.into_iter().min().unwrap_or(0);
        let mut room = room.saturating_sub(decoding.len());
        let is_allowed = self.draft_budget.allows();
        let mut load = BatchLoad {
            tokens: decoding.len() - 1,
            expected: (decoding.len() - 1) as f64,
            seconds: 0.0,
        };
        let each = self.seconds_each(decoding.len());
        let mut planned: Vec<Planned> = Vec::new();
        let mut is_read = false;
        for &id in decoding {
            let Some(at) = self.find(id) else { continue };
            let most = self.most_drafted(&self.active[at], room);
            if most == 0 {
                continue;
            }
            let running = &self.active[at].running;
            let guessed = text_before_image(draft::guess(&running.tokens, most));
            let is_guessed = !guessed.is_empty();
            let acceptance_rate = if is_guessed {
                running.acceptance_rate
            } else {
                running
                    .model_acceptance_rate
                    .unwrap_or(self.model_acceptance_rate)
            };
            let most = if is_guessed { guessed.len() } else { most };
            let each = if is_guessed { Some(0.0) } else { each };
            let Some(each) = each else { continue };
            if !is_guessed && !self.is_near(at) {
                let gain = self.gain(&acceptance_rate, load, most, each);
                is_read = is_read || self.read_for_drafts(at, gain, decoding.len());
                continue;
            }
            let length = self.costs.best_length(&acceptance_rate, load, most, each);
            let length = if is_allowed { length } else { 0 };
            if length == 0 {
                self.decay(at, is_guessed);
                continue;
            }
            load.tokens += length;
            load.expected += acceptance_rate.expected(length);
            load.seconds += each * length as f64;
            room -= length;
            planned.push(Planned {
                id,
                length,
                acceptance_rate,
                is_guessed,
                each,
            });
        }
        self.shorten(&mut planned, decoding.len());
        for plan in &planned {
            let Some(at) = self.find(plan.id) else {
                continue;
            };
            if plan.length == 0 {
                self.decay(at, plan.is_guessed);
                continue;
            }
            let running = &mut self.active[at].running;
            running.is_drafted_by_model = !plan.is_guessed;
            if plan.is_guessed {
                running.draft =
                    text_before_image(draft::guess(&running.tokens, plan.length)).to_vec();
            }
        }
        planned.retain(|plan| !plan.is_guessed && plan.length > 0);
        self.ask(&planned);
        if is_read || !planned.is_empty() {
            let time = self.clock.now().saturating_duration_since(start);
            self.draft_time = Some(time);
        }
    }

    /// Records that a request could have had a draft.
    fn decay(&mut self, at: usize, is_guessed: bool) {
        let running = &mut self.active[at].running;
        if is_guessed {
            running.acceptance_rate.decay()
        } else {
            self.model_acceptance_rate.decay();
            running
                .model_acceptance_rate
                .get_or_insert(self.model_acceptance_rate)
                .decay();
        }
    }

    /// Shortens drafts, the longest first, until none of the `writers` decoding requests waits for
    /// the drafts of others.
    fn shorten(&self, planned: &mut [Planned], writers: usize) {
        let Some(plain) = self.plain.for_tokens(writers) else {
            return;
        };
        loop {
            let tokens: usize = planned.iter().map(|plan| plan.length).sum();
            let times = planned.iter().map(|plan| plan.each * plan.length as f64);
            let seconds: f64 = times.sum();
            let expected = planned
                .iter()
                .map(|plan| plan.acceptance_rate.expected(plan.length));
            let least = if planned.len() < writers {
                0.0
            } else {
                expected.fold(f64::INFINITY, f64::min)
            };
            let step = writers + tokens;
            if self.costs.slows_no_request(step, seconds, least, plain) {
                return;
            }
            let longest = planned.iter_mut().max_by_key(|plan| plan.length);
            match longest.filter(|plan| plan.length > 0) {
                Some(plan) => plan.length = draft::shorter(plan.length),
                None => return,
            }
        }
    }

    /// Returns the draft model's seconds per token if it drafts for `count` requests, or `None`
    /// without a draft model.
    fn seconds_each(&self, count: usize) -> Option<f64> {
        let drafter = self.drafter.as_ref()?;
        // Without measurements, assume times in proportion to the number of weights.
        let share = || {
            let [draft, model] = [drafter.context(), &self.context].map(|c| c.model().n_params());
            let step = self.plain.for_tokens(count)?;
            Some(step * draft as f64 / (model as f64).max(1.0))
        };
        let step = drafter.seconds(count).or_else(share)?;
        Some(step / count.max(1) as f64)
    }

    /// Returns whether the draft model lacks only a few tokens of a text.
    fn is_near(&self, at: usize) -> bool {
        let active = &self.active[at];
        let tokens = &active.running.tokens;
        self.drafter.as_ref().is_some_and(|drafter| {
            drafter.behind(active.sequence, tokens) <= Self::NEAR && drafter.knows(tokens)
        })
    }

    /// Returns the fraction of the time that drafts with this acceptance rate would save.
    fn gain(
        &self,
        acceptance_rate: &AcceptanceRate,
        load: BatchLoad,
        most: usize,
        each: f64,
    ) -> f64 {
        let length = self.costs.best_length(acceptance_rate, load, most, each);
        let rate = |length: usize| self.costs.rate(acceptance_rate, load, length, each);
        1.0 - rate(0) / rate(length).max(f64::MIN_POSITIVE)
    }

    /// Lets the draft model prefill a part of a text if that is worthwhile. `gain` is the fraction
    /// of the time that drafts would save.
    fn read_for_drafts(&mut self, at: usize, gain: f64, writers: usize) -> bool {
        let active = &self.active[at];
        let (sequence, running) = (active.sequence, &active.running);
        let Some(drafter) = self.drafter.as_mut().filter(|_| gain > 0.0) else {
            return false;
        };
        if !drafter.knows(&running.tokens) {
            return false;
        }
        let behind = drafter.behind(sequence, &running.tokens);
        let to_write = running.request.max_tokens;
        let to_write = to_write.map_or(Self::ANSWER, |most| most - running.counts.generated);
        let step = self.plain.for_tokens(writers).unwrap_or(0.0);
        let saved = gain * step * to_write as f64 / writers.max(1) as f64;
        let part = behind.min(Self::READS);
        let prefill = drafter.seconds(part).unwrap_or(step);
        let all = prefill * behind as f64 / part.max(1) as f64;
        if saved < Self::MIN_RETURN * all || !self.draft_budget.affords(prefill) {
            return false;
        }
        if let Err(error) = drafter.read(sequence, &running.tokens, part) {
            tracing::warn!(%error, "the draft model cannot read");
        }
        true
    }

    /// Requests drafts from the draft model.
    fn ask(&mut self, asked: &[Planned]) {
        let Some(drafter) = self.drafter.as_mut().filter(|_| !asked.is_empty()) else {
            return;
        };
        let places: Vec<usize> = asked
            .iter()
            .filter_map(|one| {
                let mut active = self.active.iter();
                active.position(|active| active.running.id == one.id)
            })
            .collect();
        let wanted: Vec<DraftRequest<'_>> = asked
            .iter()
            .zip(&places)
            .map(|(one, &at)| DraftRequest {
                sequence: self.active[at].sequence,
                tokens: &self.active[at].running.tokens,
                count: one.length,
            })
            .collect();
        match drafter.draft(&wanted) {
            Ok(drafts) => {
                let count = self.limits.vocabulary;
                for (at, mut draft) in places.into_iter().zip(drafts) {
                    let known = draft.iter().take_while(|&&token| (token as usize) < count);
                    draft.truncate(known.count());
                    self.active[at].running.draft = draft;
                }
            }
            Err(error) => tracing::warn!(%error, "the draft model cannot draft"),
        }
    }

    /// Adds a request's draft to the batch, after its last token.
    pub(super) fn add_draft(&mut self, id: u64) {
        let Some(at) = self.find(id) else { return };
        let sequence = self.active[at].sequence as u32;
        let running = &self.active[at].running;
        for (place, &token) in (running.tokens.len()..).zip(&running.draft) {
            let added = running
                .images
                .add_to(&mut self.batch, place, token, sequence, true);
            debug_assert!(added.is_ok(), "no image follows the text");
        }
    }

    /// Removes drafted tokens that were not accepted.
    pub(super) fn settle_draft(&mut self, at: usize, drafted: usize, accepted: usize) {
        let active = &mut self.active[at];
        let running = &mut active.running;
        if running.is_drafted_by_model {
            let own = running
                .model_acceptance_rate
                .get_or_insert(self.model_acceptance_rate);
            own.learn(drafted, accepted);
            self.model_acceptance_rate.learn(drafted, accepted);
        } else {
            running.acceptance_rate.learn(drafted, accepted)
        }
        running.counts.drafted += drafted;
        running.counts.accepted += accepted;
        self.totals.drafts += 1;
        self.totals.drafted_tokens += drafted as u64;
        self.totals.accepted_tokens += accepted as u64;
        if accepted < drafted {
            let end = i32::try_from(active.decoded).unwrap_or(i32::MAX);
            if let Err(error) = self.context.kv_cache_mut().remove(active.sequence, end..) {
                tracing::error!(%error, "drafted tokens cannot be taken back");
            }
        }
    }
}
