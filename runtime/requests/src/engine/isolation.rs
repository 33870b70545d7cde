//! Prevents a request whose numbers are not finite from corrupting other requests.
//!
//! If a batch results in logits that are NaN or infinite, the context rolls the batch back. The
//! engine then computes its requests one by one. Each gets the same tokens as it would alone, and
//! only requests that fail alone fail.

use super::Engine;
use super::batch::BatchSlice;
use crate::event::FailureKind;
use crate::prefix_cache::{CachedPrefix, common};
use crate::running::Running;
use samite_llm::Error;

impl Engine {
    /// Returns whether attention skips cells that a token does not see. Otherwise it multiplies
    /// their values by 0, and 0 times NaN is NaN.
    pub(super) fn skips_hidden_cells(&self) -> bool {
        self.context.options().flash
    }

    /// Computes the slices of a batch whose logits were not finite one by one.
    pub(super) fn isolate(&mut self, planned: Vec<BatchSlice>) {
        tracing::warn!(
            requests = planned.len(),
            "logits are not finite: these requests are computed one by one"
        );
        let mut is_searched = self.skips_hidden_cells();
        for part in planned {
            let mut result = self.decode_alone(part);
            if let Err(Error::NotFinite { .. }) = result
                && !is_searched
            {
                // Cells of another sequence, or free cells, may have corrupted it.
                is_searched = true;
                self.remove_spoilt(part.id);
                result = self.decode_alone(part);
            }
            match result {
                Ok(Some(part)) => self.finish_slices(vec![part]),
                Ok(None) => {}
                Err(error @ Error::NotFinite { .. }) => self.fail_spoilt(part.id, &error),
                Err(error) => self.batch_failed(&[part], &error),
            }
        }
    }

    /// Computes a slice of a request alone, without a draft. Returns it as part of its own batch,
    /// or `None` if the request has ended.
    fn decode_alone(&mut self, part: BatchSlice) -> Result<Option<BatchSlice>, Error> {
        let Some(at) = self.find(part.id) else {
            return Ok(None);
        };
        self.active[at].running.draft.clear();
        self.batch.clear();
        let part = self.fill_slice(at, part.count)?;
        let is_in_prefill = !self.active[at].is_decoding();
        self.decode(&[part])?;
        self.totals.steps += 1;
        self.totals.busy_slots += 1;
        if is_in_prefill {
            self.totals.prompt_tokens += part.count as u64;
        }
        Ok(Some(part))
    }

    /// Removes all numbers that are not finite from the cache, except those of request `spared`.
    fn remove_spoilt(&mut self, spared: u64) {
        self.remove_spoilt_texts(|_| true);
        let active = self.active.iter();
        let active = active.filter(|active| active.running.id != spared && active.decoded > 0);
        let active: Vec<_> = active
            .map(|active| (active.running.id, active.sequence))
            .collect();
        for (id, sequence) in active {
            if self.is_spoilt(sequence) {
                self.fail_spoilt(id, &Error::NotFinite { token: 0 });
            }
        }
        if let Err(error) = self.context.scrub_free_cells() {
            tracing::warn!(%error, "free cells cannot be overwritten");
        }
    }

    /// Removes the chosen cached prefixes that are not finite.
    fn remove_spoilt_texts(&mut self, is_chosen: impl Fn(&CachedPrefix) -> bool) {
        let chosen = self.kept.iter().filter(|text| is_chosen(text));
        let chosen: Vec<usize> = chosen.map(|text| text.sequence).collect();
        let spoilt = chosen
            .into_iter()
            .filter(|&sequence| self.is_spoilt(sequence));
        let spoilt: Vec<usize> = spoilt.collect();
        let gone = self.kept.remove_if(|text| spoilt.contains(&text.sequence));
        gone.into_iter().for_each(|sequence| self.scrub(sequence));
    }

    fn is_spoilt(&mut self, sequence: usize) -> bool {
        match self.context.is_finite(sequence) {
            Ok(is_finite) => !is_finite,
            Err(error) => {
                tracing::warn!(%error, "a text cannot be read, and counts as spoilt");
                true
            }
        }
    }

    /// Fails a request because of its own numbers, and removes all of it. Also removes cached
    /// prefixes that it may have continued, if they are not finite.
    fn fail_spoilt(&mut self, id: u64, error: &Error) {
        let Some(at) = self.find(id) else { return };
        let mut active = self.active.remove(at);
        let now = self.clock.now();
        self.totals.failed += 1;
        let running = &mut active.running;
        running.fail(FailureKind::Sampling, error.to_string(), now);
        self.scrub(active.sequence);
        let Running {
            key,
            tokens,
            event_queue,
            ..
        } = active.running;
        self.ended.push(event_queue);
        self.remove_spoilt_texts(|text| text.key == key && common(&text.tokens, &tokens) > 0);
    }
}
