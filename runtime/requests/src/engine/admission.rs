//! Admission: assigns slots to requests, and finds cached prefixes of their prompts.

use super::{Active, Engine};
use crate::disk::DiskTexts;
use crate::event::{CacheMiss, FailureKind, MissCause, Started};
use crate::prefix_cache::{CachedPrefix, Found, Place, common};
use crate::running::Running;
use crate::view::count_owners;
use samite_llm::{CacheKind, Result};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

impl Engine {
    /// Minimum common prefix with a prompt that is being computed for which a request waits instead
    /// of computing it again.
    const WORTH_WAITING: usize = 32;

    /// Assigns slots to waiting requests.
    pub(super) fn admit(&mut self, now: Instant) {
        self.make_slots(now);
        loop {
            if let Some((at, slot)) = self.next_to_admit() {
                let running = self.queue.remove(at);
                self.start(running, slot, now);
            } else if !self.preempt_for_another_owner() {
                return;
            }
        }
    }

    /// Preempts a request of an owner that has at least two slots more than the owner of the next
    /// request. Returns false if there is none.
    fn preempt_for_another_owner(&mut self) -> bool {
        if self.active.len() < self.options.slots {
            return false;
        }
        let slots = self.slots_of_owners();
        let held = |owner: u64| slots.get(&owner).copied().unwrap_or(0);
        let most = slots.values().max().copied().unwrap_or(0);
        // This runs in each step while requests wait: sort the queue only if that can matter.
        let has_fewer = |running: &Running| held(running.request.owner) + 2 <= most;
        if !self.queue.iter().any(has_fewer) {
            return false;
        }
        let can_start = |&at: &usize| {
            let running = &self.queue[at];
            running.request.slot.is_none()
                && !running.event_queue.is_full()
                && !running.awaits_rows()
                && !self.is_computed_by_another(running)
        };
        let Some(next) = self.turns().into_iter().find(can_start) else {
            return false;
        };
        let next = &self.queue[next].request;
        let own = held(next.owner);
        let active = self.active.iter().enumerate();
        let others = active.filter(|(_, active)| {
            let request = &active.running.request;
            request.priority <= next.priority && held(request.owner) >= own + 2
        });
        let rank = |(_, active): &(usize, &Active)| {
            let running = &active.running;
            let count = held(running.request.owner);
            (running.request.priority, Reverse((count, running.id)))
        };
        let Some((at, _)) = others.min_by_key(rank) else {
            return false;
        };
        self.preempt(at);
        true
    }

    /// Counts the slots of each owner that has one.
    fn slots_of_owners(&self) -> BTreeMap<u64, usize> {
        let active = self.active.iter();
        count_owners(active.map(|active| active.running.request.owner))
    }

    /// Returns the index in the queue of the request that gets a slot next, and the slot.
    fn next_to_admit(&self) -> Option<(usize, usize)> {
        if self.active.len() >= self.options.slots {
            return None;
        }
        for at in self.turns() {
            let running = &self.queue[at];
            // A request that could not continue anyway does not block others.
            let can_go_on = !running.event_queue.is_full() && !running.awaits_rows();
            let slot = self.slot_for(running).filter(|_| can_go_on);
            let Some(slot) = slot else { continue };
            if !self.fits(running) {
                // Later requests do not overtake it.
                return None;
            }
            if !self.is_computed_by_another(running) {
                return Some((at, slot));
            }
        }
        None
    }

    /// Returns the indices of the queue in the order in which they get slots. Among requests with
    /// the same priority, the one whose owner has fewer slots comes first, then the one whose owner
    /// got a slot less recently.
    fn turns(&self) -> Vec<usize> {
        let slots = self.slots_of_owners();
        let mut turns: Vec<usize> = (0..self.queue.len()).collect();
        // The queue is sorted by priority and age, and the sort is stable.
        turns.sort_by_key(|&at| {
            let request = &self.queue[at].request;
            let slots = slots.get(&request.owner).copied().unwrap_or(0);
            let served = self.served.get(&request.owner).copied().unwrap_or(0);
            (Reverse(request.priority), slots, served)
        });
        turns
    }

    /// If a request waits for a slot or for cells of active requests, preempts requests that have
    /// been paused for long, and those that wait for the rows of an image.
    fn make_slots(&mut self, now: Instant) {
        let free = self.options.slots - self.active.len();
        let mut waiting = self
            .queue
            .iter()
            .filter(|one| !one.event_queue.is_full() && !one.awaits_rows())
            .peekable();
        let is_stuck = waiting.peek().is_some_and(|first| !self.fits(first));
        let mut wanted = waiting
            .count()
            .saturating_sub(free)
            .max(usize::from(is_stuck));
        let mut at = 0;
        while wanted > 0 && at < self.active.len() {
            let since = self.active[at].paused;
            let is_long =
                since.is_some_and(|since| now.saturating_duration_since(since) >= Self::MAX_PAUSE);
            let waits = self.active[at].awaits_image && self.active[at].running.awaits_rows();
            if is_long || waits && !self.options.deterministic {
                self.preempt(at);
                wanted -= 1;
            } else {
                at += 1;
            }
        }
    }

    /// Returns a free slot: the requested one, or the one whose last text has the longest common
    /// prefix with the prompt.
    fn slot_for(&self, running: &Running) -> Option<usize> {
        let free = |slot: &usize| !self.is_busy(*slot);
        if let Some(slot) = running.request.slot {
            return Some(slot).filter(free);
        }
        let likeness = |slot: &usize| {
            // A text with another salt must not be detectable, not even by the number of the slot.
            let is_left = |text: &&CachedPrefix| text.slot == *slot && text.key == running.key;
            let left = self.kept.iter().filter(is_left);
            let alike = left.map(|text| common(&text.tokens, &running.tokens));
            alike.max().unwrap_or(0)
        };
        let slots = (0..self.options.slots).filter(free);
        slots.max_by_key(|slot| (likeness(slot), Reverse(*slot)))
    }

    /// Returns whether there are cells for all its tokens, in addition to those of active requests.
    fn fits(&self, running: &Running) -> bool {
        let used: usize = self
            .active
            .iter()
            .map(|active| active.running.tokens.len())
            .sum();
        let room = self.context.n_ctx().saturating_sub(used);
        self.active.is_empty() || running.tokens.len() < room
    }

    /// Returns whether another request is computing a large part of this one's prefix.
    fn is_computed_by_another(&self, running: &Running) -> bool {
        let is_pinned = running.request.slot.is_some();
        if !running.request.cache.reuse
            || self.context.kv_cache().kind() == CacheKind::States
            || is_pinned
        {
            return false;
        }
        let others = self.active.iter().filter(|other| {
            other.running.key == running.key
                && other.paused.is_none()
                && !other.is_decoding()
                && other.pending() > 1
        });
        let most = running.tokens.len().saturating_sub(1);
        others.into_iter().any(|other| {
            let same = common(&other.running.tokens, &running.tokens).min(most);
            let same = running.images.reusable(same);
            same > other.decoded && same >= Self::WORTH_WAITING
        })
    }

    /// Records that an owner got a slot.
    fn note_served(&mut self, owner: u64) {
        /// Maximum number of remembered owners; the least recently served one is removed first.
        const OWNERS: usize = 4096;
        let count = self.served.values().max().map_or(1, |last| last + 1);
        self.served.insert(owner, count);
        if self.served.len() > OWNERS
            && let Some((&oldest, _)) = self.served.iter().min_by_key(|(_, count)| **count)
        {
            self.served.remove(&oldest);
        }
    }

    fn start(&mut self, mut running: Running, slot: usize, now: Instant) {
        match self.place(&mut running, slot) {
            Ok((sequence, decoded, miss)) => {
                let is_first = running.started.is_none();
                running.start(
                    Started {
                        slot,
                        prompt: running.n_prompt,
                        cached: decoded,
                        miss,
                    },
                    now,
                );
                if is_first {
                    self.totals.asked_tokens += running.n_prompt as u64;
                    self.totals.cached_tokens += decoded as u64;
                }
                self.note_served(running.request.owner);
                self.last[slot] = (running.request.owner, running.request.tag);
                self.active.push(Active {
                    running,
                    slot,
                    sequence,
                    decoded,
                    paused: None,
                    awaits_image: false,
                });
            }
            Err(error) => {
                self.totals.failed += 1;
                self.forget_swapped(&mut running);
                running.fail(FailureKind::Device, error.to_string(), now);
                self.ended.push(running.event_queue);
            }
        }
    }

    /// Returns a sequence for a request, with its longest cached prefix.
    fn place(
        &mut self,
        running: &mut Running,
        slot: usize,
    ) -> Result<(usize, usize, Option<CacheMiss>)> {
        let set = running.key.0;
        if self.options.deterministic {
            // The cells of a text are allocated as if it were the first one, and all other cells
            // are in their initial state.
            self.clear_prefix_cache();
            self.context.clear()?;
        }
        if let Some(saved) = running.swapped.take() {
            self.swapped_bytes = self.swapped_bytes.saturating_sub(saved.bytes());
            self.room_for_text(saved.len());
            let sequence = self.sequence(None, set)?;
            match self.context.restore(sequence, &saved) {
                Ok(()) => return Ok((sequence, saved.len(), None)),
                Err(error) => {
                    tracing::warn!(%error, "a text that was swapped out is computed again");
                    self.free(sequence);
                }
            }
        }
        if !running.request.cache.reuse || self.options.deterministic {
            let off = CacheMiss {
                at_token: 0,
                cause: MissCause::Off,
            };
            return Ok((self.sequence(None, set)?, 0, Some(off)));
        }
        let at_work = self
            .active
            .iter()
            .filter(|other| other.running.key == running.key);
        let is_pinned = running.request.slot.is_some();
        let at_work = at_work.filter(|other| !other.running.counts.truncated && !is_pinned);
        let at_work = at_work.map(|other| (other.sequence, &other.running.tokens[..other.decoded]));
        let (found, miss) = self.kept.find(
            &self.context,
            (&running.tokens, &running.images),
            running.key,
            running.request.slot,
            at_work,
        );
        let known = found.map_or(0, |found| found.common);
        self.kept.note_request(running.key, &running.tokens);
        let (placed, miss) = self.place_from_disk(running, known, miss, slot)?;
        let (sequence, common) = match (placed, found) {
            (Some(placed), _) => placed,
            (None, None) => (self.sequence(None, set)?, 0),
            (None, Some(Found { place, common })) => {
                let sequence = match place {
                    Place::Cached(number) => self.go_on_from(number, common, set)?,
                    Place::Running(other) => {
                        let sequence = self.sequence(None, set)?;
                        self.share(other, sequence, common)?;
                        sequence
                    }
                };
                (sequence, common)
            }
        };
        let is_all = common + 1 >= running.tokens.len();
        let miss = (!is_all).then_some(CacheMiss {
            at_token: common,
            cause: miss.cause,
        });
        Ok((sequence, common, miss))
    }

    /// Returns a sequence with the longest common prefix of the request and a text on disk, if that
    /// is much longer than `known` tokens. Also returns the cache miss of the longest prefix in
    /// memory or on disk, where `miss` is the one in memory.
    fn place_from_disk(
        &mut self,
        running: &Running,
        known: usize,
        miss: CacheMiss,
        slot: usize,
    ) -> Result<(Option<(usize, usize)>, CacheMiss)> {
        let can_cut = self.context.kv_cache().can_truncate();
        let (set, salt) = running.key;
        if self.disk.is_none() || salt != 0 || running.request.slot.is_some() {
            return Ok((None, miss));
        }
        let adapters = self.fingerprint(set)?;
        let Some(disk) = self.disk.as_mut() else {
            return Ok((None, miss));
        };
        let cannot = MissCause::uncuttable(self.context.kv_cache().kind());
        let on_disk = disk.miss(&running.tokens, adapters, (!can_cut).then_some(cannot));
        // At the same position, the miss in memory is more informative than its copy on disk.
        let miss = if on_disk.at_token > miss.at_token {
            on_disk
        } else {
            miss
        };
        // The last token of a prompt is always computed.
        let wanted = &running.tokens[..running.tokens.len() - 1];
        let Some((number, same)) = disk.longest(wanted, adapters, can_cut) else {
            return Ok((None, miss));
        };
        let common = running.images.reusable(same);
        if common < known + DiskTexts::LEAST || (common < same && !can_cut) {
            return Ok((None, miss));
        }
        let Some(saved) = disk.read(number) else {
            return Ok((None, miss));
        };
        self.room_for_text(saved.len());
        if self.context.kv_cache().cells().free() < saved.len() {
            return Ok((None, miss));
        }
        let sequence = self.sequence(None, set)?;
        let restored = self.context.restore(sequence, &saved).and_then(|()| {
            let end = i32::try_from(common).unwrap_or(i32::MAX);
            if common < saved.len() {
                self.context.kv_cache_mut().remove(sequence, end..)
            } else {
                Ok(())
            }
        });
        if let Err(error) = restored {
            tracing::warn!(%error, "a text on disk cannot be used");
            self.free(sequence);
            if let Some(disk) = &mut self.disk {
                disk.forget(&saved.tokens);
            }
            return Ok((None, miss));
        }
        if can_cut {
            return Ok((Some((sequence, common)), miss));
        }
        // A text that cannot be cut stays cached for the next request with the same prefix.
        while self.kept.len() >= self.options.kept && self.evict_cheapest(None) {}
        let freed = self
            .kept
            .add(sequence, saved.tokens, running.key, slot, false);
        freed.into_iter().for_each(|sequence| self.free(sequence));
        let sequence = self.go_on_from(self.kept.len() - 1, common, set)?;
        Ok((Some((sequence, common)), miss))
    }

    /// Returns an empty sequence with a set of adapters.
    pub(super) fn sequence(&mut self, spared: Option<usize>, set: usize) -> Result<usize> {
        if self.free_sequences.is_empty() {
            self.evict_cheapest(spared);
        }
        let sequence = self.free_sequences.pop().ok_or_else(|| {
            samite_llm::Error::InvalidArgument("no sequence of the context is free".into())
        })?;
        if let Err(error) = self.adapt(sequence, set) {
            self.free(sequence);
            return Err(error);
        }
        Ok(sequence)
    }

    /// Makes `to` share the first `common` tokens of `from`.
    pub(super) fn share(&mut self, from: usize, to: usize, common: usize) -> Result<()> {
        let end = i32::try_from(common).unwrap_or(i32::MAX);
        let shared = if self.context.kv_cache().kind() == CacheKind::States {
            self.context.kv_cache_mut().copy(from, to, ..)
        } else {
            self.context.kv_cache_mut().copy(from, to, 0..end)
        };
        match &shared {
            Ok(()) => {
                if let Some(drafter) = &mut self.drafter {
                    drafter.copy(from, to, common);
                }
            }
            Err(_) => self.free(to),
        }
        shared
    }

    /// Returns a sequence with the first `common` tokens of a cached text. The cached text stays
    /// unchanged if possible.
    fn go_on_from(&mut self, number: usize, common: usize, set: usize) -> Result<usize> {
        self.kept.touch(number);
        let Some((from, length)) = self.kept.get(number).map(|t| (t.sequence, t.tokens.len()))
        else {
            return self.sequence(None, set);
        };
        let has_recurrent_states = self.context.kv_cache().kind() == CacheKind::States;
        let can_cut = self.context.kv_cache().can_truncate();
        let is_whole = common == length;
        let is_alone = self.free_sequences.is_empty() && self.kept.len() == 1;
        // A text with a recurrent state can be cut only by removing the rest. A text that cannot be
        // cut stays for the next request with the same prefix.
        let takes_over = is_alone || (is_whole && can_cut) || (has_recurrent_states && !is_whole);
        let must_cut = has_recurrent_states && !is_whole;
        let takes_over = takes_over && (must_cut || !self.kept.is_held(number));
        if !takes_over {
            if self.free_sequences.is_empty() {
                self.evict_cheapest(Some(number));
            }
            if !self.free_sequences.is_empty() {
                let to = self.sequence(None, set)?;
                self.share(from, to, common)?;
                return Ok(to);
            }
        }
        self.kept.take(number);
        let end = i32::try_from(common).unwrap_or(i32::MAX);
        if !is_whole && let Err(error) = self.context.kv_cache_mut().remove(from, end..) {
            self.free(from);
            return Err(error);
        }
        Ok(from)
    }
}
