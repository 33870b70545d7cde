//! Planning and running one batch.

use super::{Active, Engine};
use crate::event::FailureKind;
use crate::request::Shift;
use crate::running::overlap;
use samite_llm::{Error, Finish};
use std::time::Instant;

/// A batch slice: some tokens of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchSlice {
    /// Id of the request.
    pub(super) id: u64,
    pub(super) count: usize,
    /// Index in the batch of the slice's first token.
    first: usize,
    /// Index in the batch of the slice's last token, if that is the last token of the request.
    /// Drafted tokens follow it.
    row: Option<usize>,
}

impl Engine {
    /// Interval in tokens at which another prefix is cached.
    const STATE_EVERY: usize = 4096;

    /// Maximum number of prompt tokens in a batch that need logits, which bounds their memory.
    const MAX_SCORED: usize = 64;

    pub(super) fn find(&self, id: u64) -> Option<usize> {
        self.active
            .iter()
            .position(|active| active.running.id == id)
    }

    /// Plans the tokens of a batch: first those to decode, then parts of prompts in turn.
    pub(super) fn plan_batch(&mut self) -> Vec<BatchSlice> {
        self.batch.clear();
        self.blocks_for_batch = 0;
        let can_go_on = |active: &&Active| active.paused.is_none();
        let decoding = self
            .active
            .iter()
            .filter(can_go_on)
            .filter(|active| active.is_decoding());
        let mut decoding: Vec<u64> = decoding.map(|active| active.running.id).collect();
        // If more requests decode than fit into a step, they take turns, and prompts get one token
        // of each step.
        if decoding.len() >= self.options.budget {
            let some_read = self
                .active
                .iter()
                .filter(can_go_on)
                .any(Active::is_in_prefill);
            let for_prompts = usize::from(some_read && self.options.budget > 1);
            let turn = self.totals.steps as usize % decoding.len();
            decoding.rotate_left(turn);
            decoding.truncate(self.options.budget - for_prompts);
        }
        // Each of them needs a cell; the most recent requests are preempted if there are too few.
        while self.room_for(decoding.len()) < decoding.len() {
            let Some(youngest) = self.youngest().filter(|_| self.active.len() > 1) else {
                break;
            };
            let id = self.active[youngest].running.id;
            self.preempt(youngest);
            decoding.retain(|&other| other != id);
        }
        let mut planned: Vec<BatchSlice> = Vec::new();
        let nobody_reads = !self
            .active
            .iter()
            .filter(can_go_on)
            .any(Active::is_in_prefill);
        if nobody_reads {
            self.make_drafts(&decoding);
        }
        for &id in &decoding {
            self.add_slice(&mut planned, id, 1);
            self.add_draft(id);
        }
        let prefill = self
            .active
            .iter()
            .filter(can_go_on)
            .filter(|active| active.is_in_prefill());
        let mut prefill: Vec<u64> = prefill.map(|active| active.running.id).collect();
        if prefill.is_empty() {
            return planned;
        }
        self.turn %= prefill.len();
        prefill.rotate_left(self.turn);
        self.turn += 1;
        let mut budget = self.options.budget.saturating_sub(planned.len());
        let places: Vec<usize> = prefill.iter().filter_map(|&id| self.find(id)).collect();
        let wanted: usize = places.iter().map(|&at| self.active[at].pending()).sum();
        // An image may have to be computed at once.
        let parts = places.iter().map(|&at| self.next_part(at, 1));
        let (least, longest) = parts.fold((usize::MAX, 0), |(least, longest), part| {
            (part.min(least), part.max(longest))
        });
        let wanted = match wanted.min(budget) {
            wanted if longest > 1 => wanted.max(longest),
            wanted => wanted,
        };
        let used = planned.len();
        let mut room = self.room_for(used + wanted).saturating_sub(used);
        if room < least && planned.is_empty() {
            // No request could continue: the most recent one is preempted.
            if let Some(youngest) = self.youngest().filter(|_| self.active.len() > 1) {
                let id = self.active[youngest].running.id;
                self.preempt(youngest);
                prefill.retain(|&other| other != id);
                room = self.room_for(wanted);
            }
        }
        let mut left = prefill.len();
        let mut scored_left = Self::MAX_SCORED;
        for id in prefill {
            let Some(at) = self.find(id) else { continue };
            let share = budget.min(room).div_ceil(left.max(1));
            let count = self.active[at].pending().min(share);
            let count = self.as_first_computed(at, self.until_checkpoint(at, count));
            let (count, scored) = self.limit_scored(at, count, scored_left);
            scored_left -= scored;
            left -= 1;
            let count = self.fit_to_images(at, count, room).unwrap_or(0);
            if count > 0 {
                self.add_slice(&mut planned, id, count);
                budget = budget.saturating_sub(count);
                room -= count;
            }
        }
        planned
    }

    /// Limits a part of a prompt to the next position where a prefix is cached, if texts cannot be
    /// cut.
    fn until_checkpoint(&self, at: usize, count: usize) -> usize {
        if self.context.kv_cache().can_truncate() {
            return count;
        }
        let active = &self.active[at];
        let next = self.next_checkpoint(active);
        match next.filter(|&mark| mark > active.decoded) {
            Some(mark) => count.min(mark - active.decoded),
            None => count,
        }
    }

    /// Limits a part of a prompt so that at most `left` of its tokens need logits. Returns its
    /// length, and the number of these tokens.
    fn limit_scored(&self, at: usize, count: usize, left: usize) -> (usize, usize) {
        let Active {
            running, decoded, ..
        } = &self.active[at];
        let unscored = running.unscored();
        if unscored.is_empty() {
            return (count, 0);
        }
        // Parts do not depend on what was sent before a preemption.
        let first = if self.options.deterministic {
            *decoded
        } else {
            unscored.start.max(*decoded)
        };
        let count = count.min(first - decoded + left);
        (count, (decoded + count).saturating_sub(first))
    }

    /// In deterministic mode, limits a part so that recomputed tokens have the same batches as
    /// before.
    fn as_first_computed(&self, at: usize, count: usize) -> usize {
        let Active {
            running, decoded, ..
        } = &self.active[at];
        match running.n_prompt.checked_sub(*decoded) {
            _ if !self.options.deterministic => count,
            None | Some(0) => count.min(1),
            Some(left) => count.min(left),
        }
    }

    /// Returns the next position where a prefix of the request is cached.
    fn next_checkpoint(&self, active: &Active) -> Option<usize> {
        let end = active.running.end_checkpoint();
        let regular = (active.decoded / Self::STATE_EVERY + 1) * Self::STATE_EVERY;
        let marks = [end, regular]
            .into_iter()
            .filter(|&mark| mark > active.decoded);
        marks.filter(|&mark| mark < active.running.n_prompt).min()
    }

    fn add_slice(&mut self, planned: &mut Vec<BatchSlice>, id: u64, count: usize) {
        let Some(at) = self.find(id) else { return };
        let active = &self.active[at];
        let tokens = count + active.running.draft.len();
        let cells = self.context.kv_cache().cells();
        self.blocks_for_batch += cells.blocks_for(Some(active.sequence), tokens);
        self.evict_for_blocks(self.blocks_for_batch);
        let before = self.batch.len();
        match self.fill_slice(at, count) {
            Ok(slice) => planned.push(slice),
            Err(error) => {
                self.batch.truncate(before);
                self.fail(at, FailureKind::Device, error.to_string());
            }
        }
    }

    /// Adds the next `count` tokens of a request to the batch.
    pub(super) fn fill_slice(&mut self, at: usize, count: usize) -> Result<BatchSlice, Error> {
        let active = &self.active[at];
        let end = active.decoded + count;
        let first = self.batch.len();
        let unscored = active.running.unscored();
        let is_last = end == active.running.tokens.len();
        // Without flash attention, cells that are not finite corrupt other sequences, so the step
        // that writes them must detect them.
        let wants_row =
            is_last && active.running.request.max_tokens != Some(0) || !self.skips_hidden_cells();
        for place in active.decoded..end {
            let wants = wants_row && place + 1 == end || unscored.contains(&place);
            let (token, sequence) = (active.running.tokens[place], active.sequence as u32);
            let images = &active.running.images;
            images.add_to(&mut self.batch, place, token, sequence, wants)?;
        }
        Ok(BatchSlice {
            id: active.running.id,
            count,
            first,
            row: is_last.then(|| self.batch.len() - 1),
        })
    }

    /// Computes the batch, and processes the tokens that follow.
    pub(super) fn run_batch(&mut self, planned: Vec<BatchSlice>) {
        let start = self.clock.now();
        match self.decode(&planned) {
            Ok(()) => {}
            Err(Error::NotFinite { .. }) => {
                self.draft_time = None;
                return self.isolate(planned);
            }
            Err(error) => return self.batch_failed(&planned, &error),
        }
        let computed = self.batch.len();
        let read = planned.iter().filter(|part| {
            let at = self.find(part.id);
            at.is_some_and(|at| !self.active[at].is_decoding())
        });
        let read: usize = read.map(|part| part.count).sum();
        let (writers, written_before) = (planned.len(), self.totals.generated_tokens);
        self.totals.steps += 1;
        self.totals.busy_slots += self.active.len() as u64;
        self.totals.prompt_tokens += read as u64;
        self.finish_slices(planned);
        let time = self.clock.now().saturating_duration_since(start);
        let drafting = self.draft_time.take();
        match read {
            0 => {
                let whole = time + drafting.unwrap_or_default();
                self.totals.decode_time += whole;
                self.costs.learn(computed, time);
                if computed == writers && drafting.is_none() {
                    self.plain.learn(writers, time);
                    self.draft_budget.earn(time);
                } else if let Some(step) = self.plain.for_tokens(writers) {
                    let generated = self.totals.generated_tokens - written_before;
                    let without = step * generated as f64 / writers.max(1) as f64;
                    self.draft_budget.settle(whole, without);
                }
            }
            _ => self.totals.prompt_time += time,
        }
        tracing::trace!(computed, read, "step");
    }

    /// Computes the batch.
    pub(super) fn decode(&mut self, planned: &[BatchSlice]) -> Result<(), Error> {
        let device_top_k = self.device_top_k(planned);
        self.context.set_device_top_k(device_top_k)?;
        self.context.decode_finite(&self.batch)
    }

    /// Records which tokens were computed, and processes the tokens that follow.
    pub(super) fn finish_slices(&mut self, planned: Vec<BatchSlice>) {
        for part in &planned {
            if let Some(at) = self.find(part.id) {
                self.active[at].decoded += part.count;
                self.cache_state(at);
            }
        }
        for part in planned {
            self.finish_slice(part);
        }
    }

    /// Returns the k whose top-k suffices for all requests that sample after this batch, or `None`
    /// if a request needs all logits. It is a power of two, to limit the number of different
    /// graphs.
    fn device_top_k(&mut self, planned: &[BatchSlice]) -> Option<usize> {
        let mut most = 0;
        for part in planned {
            let at = self.find(part.id)?;
            let Active {
                running, decoded, ..
            } = &mut self.active[at];
            let places = *decoded..*decoded + part.count;
            if !overlap(&running.unscored(), &places).is_empty() {
                return None;
            }
            if part.row.is_some() && running.request.max_tokens != Some(0) {
                most = running.required_top_k()?.max(most);
            }
        }
        (most > 0).then(|| most.next_power_of_two())
    }

    /// Caches a prefix of the request at a mark, if texts cannot be cut: with its recurrent state,
    /// or the window's tokens.
    fn cache_state(&mut self, at: usize) {
        let active = &self.active[at];
        let (place, prompt) = (active.decoded, active.running.n_prompt);
        let end = active.running.end_checkpoint();
        let is_mark = place > 0 && (place == end || place.is_multiple_of(Self::STATE_EVERY));
        if self.context.kv_cache().can_truncate()
            || !is_mark
            || place >= prompt
            || !active.running.request.cache.keep
        {
            return;
        }
        let (sequence, key, slot) = (active.sequence, active.running.key, active.slot);
        let is_held = active.running.request.cache.hold && place == end;
        let tokens = active.running.tokens[..place].to_vec();
        if self
            .kept
            .iter()
            .any(|text| text.key == key && text.tokens == tokens)
        {
            return;
        }
        if self.kept.len() >= self.options.kept {
            if place == end && !self.kept.is_worth_a_place(place) {
                return;
            }
            self.evict_cheapest(None);
        }
        let Some(to) = self.free_sequences.pop() else {
            return;
        };
        let adapted = self.adapt(to, key.0);
        let copied = adapted.and_then(|()| self.context.kv_cache_mut().copy(sequence, to, ..));
        if let Err(error) = copied {
            tracing::warn!(%error, "a beginning cannot be kept");
            self.free(to);
            return;
        }
        self.write_to_disk(to, &tokens, key);
        let freed = self.kept.add(to, tokens, key, slot, false);
        if place != end {
            self.kept.depreciate_last();
        }
        if is_held {
            self.kept.hold_last();
        }
        freed.into_iter().for_each(|sequence| self.free(sequence));
    }

    /// Reports a computed slice, and samples the token after it. Samples further tokens as long as
    /// they equal the drafted ones.
    fn finish_slice(&mut self, part: BatchSlice) {
        let Some(at) = self.find(part.id) else { return };
        let now = self.clock.now();
        let active = &mut self.active[at];
        active
            .running
            .progress(active.decoded.min(active.running.n_prompt), now);
        let places = active.decoded - part.count..active.decoded;
        let scored = active.running.score(&mut self.context, places, part.first);
        if let Err(error) = scored {
            return self.end(at, Err(error.to_string()), now);
        }
        let Some(row) = part.row else { return };
        if active.running.request.max_tokens == Some(0) {
            return self.end(at, Ok(Finish::MaxTokens), now);
        }
        let draft = std::mem::take(&mut active.running.draft);
        let before = active.running.counts.generated;
        let mut accepted = 0;
        let result = loop {
            let running = &mut active.running;
            let generated = running
                .sample(&mut self.context, row + accepted)
                .and_then(|token| running.accept(token, &self.tokenizer, now));
            match generated {
                Err(error) => break Err(error.to_string()),
                Ok(Some(reason)) => break Ok(Some(reason)),
                Ok(None) => {}
            }
            if draft.get(accepted) != active.running.tokens.last() {
                break Ok(None);
            }
            accepted += 1;
            active.decoded += 1;
        };
        self.totals.generated_tokens += (active.running.counts.generated - before) as u64;
        if !draft.is_empty() {
            self.settle_draft(at, draft.len(), accepted);
        }
        match result {
            Err(error) => self.end(at, Err(error), now),
            Ok(Some(reason)) => self.end(at, Ok(reason), now),
            Ok(None) if self.active[at].running.tokens.len() >= self.limits.context => {
                self.context_is_full(at, now);
            }
            Ok(None) => {}
        }
    }

    fn context_is_full(&mut self, at: usize, now: Instant) {
        let shift = self.active[at].running.request.when_full;
        if !shift.is_some_and(|shift| self.shift_context(at, shift)) {
            self.end(at, Ok(Finish::ContextFull), now);
        }
    }

    /// Removes a part of a text that fills its context, and returns whether that made room.
    fn shift_context(&mut self, at: usize, shift: Shift) -> bool {
        let active = &self.active[at];
        let (sequence, decoded) = (active.sequence, active.decoded);
        let keep = shift.keep.min(decoded);
        let rest = decoded - keep;
        let discard = shift.discard.filter(|&count| count > 0);
        let discard = discard.unwrap_or(rest / 2).min(rest.saturating_sub(1));
        let (Ok(from), Ok(to)) = (i32::try_from(keep), i32::try_from(keep + discard)) else {
            return false;
        };
        if discard == 0 {
            return false;
        }
        let cut = self.context.kv_cache_mut().cut_out(sequence, from..to);
        // Shared cells cannot be shifted.
        let cut = cut.or_else(|_| {
            self.unshare(sequence)?;
            self.context.kv_cache_mut().cut_out(sequence, from..to)
        });
        let is_lost = cut.is_err();
        if let Err(error) = cut.or_else(|error| {
            tracing::warn!(%error, "what is left of a full context is computed again");
            self.context.kv_cache_mut().remove(sequence, ..)
        }) {
            tracing::warn!(%error, "nothing can be forgotten of a full context");
            return false;
        }
        let active = &mut self.active[at];
        active.running.tokens.drain(keep..keep + discard);
        active.decoded = if is_lost { 0 } else { decoded - discard };
        active.running.counts.truncated = true;
        true
    }

    /// Gives a sequence its own copy of shared cells. Cached prefixes are evicted if necessary.
    fn unshare(&mut self, sequence: usize) -> Result<(), Error> {
        let saved = self.context.save(sequence)?;
        loop {
            match self.context.restore(sequence, &saved) {
                Err(Error::ContextFull { .. }) if self.evict_oldest() => {}
                result => return result,
            }
        }
    }

    /// Ends a request with an answer or a failure.
    fn end(&mut self, at: usize, result: Result<Finish, String>, now: Instant) {
        let mut active = self.active.remove(at);
        let tokens = active.running.tokens.len() as u64;
        self.totals.longest = self.totals.longest.max(tokens);
        let has_answer = result.is_ok();
        match result {
            Ok(reason) => {
                self.totals.finished += 1;
                active.running.finish(reason, now);
            }
            Err(message) => {
                self.totals.failed += 1;
                active.running.fail(FailureKind::Sampling, message, now);
            }
        }
        // A failed request leaves nothing in the cache.
        self.leave(active, has_answer);
    }

    /// Fails an active request, which leaves nothing in the cache.
    pub(super) fn fail(&mut self, at: usize, kind: FailureKind, message: String) {
        let mut active = self.active.remove(at);
        self.totals.failed += 1;
        active.running.fail(kind, message, self.clock.now());
        self.leave(active, false);
    }

    /// Fails the requests of a batch after a device failed or the batch was cancelled, and removes
    /// prefixes that the context lost.
    pub(super) fn batch_failed(&mut self, planned: &[BatchSlice], error: &Error) {
        tracing::error!(%error, requests = planned.len(), "a batch failed");
        self.is_lost |= error.is_lost();
        let kind = if error.is_cancelled() {
            FailureKind::Closing
        } else {
            FailureKind::Device
        };
        for part in planned {
            if let Some(at) = self.find(part.id) {
                self.fail(at, kind, error.to_string());
            }
        }
        let cells = self.context.kv_cache().cells();
        let length = |sequence: usize| cells.next_position(sequence) as usize;
        let lost = self
            .kept
            .remove_if(|text| length(text.sequence) != text.tokens.len());
        lost.into_iter().for_each(|sequence| self.free(sequence));
        for active in &mut self.active {
            let there = self
                .context
                .kv_cache()
                .cells()
                .next_position(active.sequence);
            // Lost tokens are computed again.
            active.decoded = active.decoded.min(there as usize);
        }
    }
}
