//! The engine: requests in, events out, one step after the other.

mod admission;
mod batch;
mod drafts;
mod images;
mod isolation;
mod room;
mod saved;

use crate::blocks::{BlockObserver, Blocks};
use crate::disk::DiskTexts;
use crate::draft::{AcceptanceRate, DraftBudget, StepCosts};
use crate::drafter::Drafter;
use crate::event::FailureKind;
use crate::event_queue::{EngineWaker, EventQueue, Reader, event_queue};
use crate::image_thread::RequestRows;
use crate::prefix_cache::{Key, PrefixCache};
use crate::request::{Limits, Prepared, Refusal, Request};
use crate::running::Running;
use crate::view::{SlotView, Totals, View, count_owners};
use samite_core::environment::Clock;
use samite_llm::{
    Batch, Context, Error, FIRST_IMAGE_ID, Finish, Result, SavedSequence, ScaledAdapter,
};
use samite_text::Tokenizer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Number of requests that are computed at the same time.
    pub slots: usize,
    /// Maximum number of tokens in one text, including its prompt; `None` for the whole context.
    pub context: Option<usize>,
    /// Maximum number of cached prefixes; 0 counts as 1.
    pub kept: usize,
    /// Maximum number of waiting requests per owner.
    pub queue: usize,
    /// Maximum number of tokens in one step: first those to decode, then prompts in fair turns.
    /// Limited to the tokens of one graph.
    pub budget: usize,
    /// Bytes of host memory for preempted requests. Beyond this, preempted requests are computed
    /// again.
    pub swap_bytes: usize,
    /// Maximum number of drafted tokens, from the text itself or from a [draft
    /// model](Engine::set_drafter). 0 disables drafts. Measurements decide the actual number.
    /// Drafts do not change the text. Models with recurrent states or windows do not support them.
    pub draft: usize,
    /// True for deterministic results: a request's numbers depend only on the request, bit by bit,
    /// if the device itself is deterministic. The engine then computes one request at a time, in an
    /// empty cache, in parts that only depend on the request's length. There is one slot, nothing
    /// is reused or drafted, and a preempted request is computed again. This includes texts that
    /// were shifted because they were full, as long as their readers keep up.
    pub deterministic: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            slots: 4,
            context: None,
            kept: 8,
            queue: 1024,
            budget: 512,
            swap_bytes: 1 << 30,
            draft: 0,
            deterministic: false,
        }
    }
}

impl EngineOptions {
    /// Returns the number of sequences that the engine's context needs, see
    /// [`ContextOptions::n_seq`](samite_llm::ContextOptions::n_seq).
    pub fn n_seq(&self) -> usize {
        self.slots.saturating_add(self.kept.max(1))
    }
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There may be more to do.
    Worked,
    /// There is nothing to do until a request arrives, a reader makes room, or this time is
    /// reached.
    Idle(Option<Instant>),
}

/// An active request, which has a slot.
#[derive(Debug)]
struct Active {
    running: Running,
    slot: usize,
    sequence: usize,
    /// Number of its tokens in the cache.
    decoded: usize,
    /// Time when it was paused because its reader is too far behind.
    paused: Option<Instant>,
    /// True if its next token is that of an image whose rows are being computed.
    awaits_image: bool,
}

impl Active {
    /// Returns the number of tokens that are not in the cache yet.
    fn pending(&self) -> usize {
        self.running.tokens.len() - self.decoded
    }

    fn is_decoding(&self) -> bool {
        self.running.counts.generated > 0 && self.pending() == 1
    }

    /// Returns whether a part of the prompt has to be computed, or tokens that were lost in a
    /// preemption.
    fn is_in_prefill(&self) -> bool {
        !self.is_decoding() && self.pending() > 0
    }
}

/// Many requests in one context.
#[derive(Debug)]
pub struct Engine {
    context: Context,
    tokenizer: Arc<Tokenizer>,
    clock: Arc<dyn Clock>,
    options: EngineOptions,
    limits: Limits,
    /// Waiting requests, in the order in which they get a slot.
    queue: Vec<Running>,
    /// Event queues of requests that ended in this step.
    ended: Vec<EventQueue>,
    active: Vec<Active>,
    kept: PrefixCache,
    disk: Option<DiskTexts>,
    blocks: Option<Blocks>,
    request_rows: Option<Box<dyn RequestRows>>,
    free_sequences: Vec<usize>,
    /// All sets of adapters that were requested. The first one consists of the context's initial
    /// adapters.
    adapters: Vec<Vec<ScaledAdapter>>,
    /// Identity of each set in saved sequences, once it was needed.
    fingerprints: Vec<Option<u64>>,
    /// Set of requests that specify no adapters.
    default_adapters: usize,
    batch: Batch,
    /// Number of free blocks of cells that the planned part of the batch needs.
    blocks_for_batch: usize,
    /// Costs of steps.
    costs: StepCosts,
    /// Costs of steps without drafts, by the number of decoding requests.
    plain: StepCosts,
    /// Draft budget.
    draft_budget: DraftBudget,
    drafter: Option<Drafter>,
    /// Acceptance rate of the draft model, over all requests.
    model_acceptance_rate: AcceptanceRate,
    /// Time that the draft model took for this step.
    draft_time: Option<Duration>,
    /// Index of the request whose prefill comes first.
    turn: usize,
    next_id: u64,
    is_closing: bool,
    /// A device is lost, with all data on it.
    is_lost: bool,
    swapped_bytes: usize,
    /// By owner: the time when it last got a slot, as a count.
    served: BTreeMap<u64, u64>,
    /// Owner and tag of the last request, by slot.
    last: Vec<(u64, u64)>,
    totals: Totals,
}

/// Returns the tokens before the first image.
fn text_before_image(tokens: &[u32]) -> &[u32] {
    let image = tokens.iter().position(|&token| token >= FIRST_IMAGE_ID);
    &tokens[..image.unwrap_or(tokens.len())]
}

impl Engine {
    /// Creates an engine in `context`, and removes all its sequences. The context must have
    /// [`EngineOptions::n_seq`] sequences.
    ///
    /// # Errors
    /// Returns an error if the context is too small, if the model does not generate text token by
    /// token, or if a device fails.
    pub fn new(mut context: Context, mut options: EngineOptions) -> Result<Self> {
        options.slots = options.slots.max(1);
        options.kept = options.kept.max(1);
        if options.deterministic {
            (options.slots, options.kept, options.draft) = (1, 1, 0);
        }
        let invalid = |message: &str| Error::InvalidArgument(message.into());
        if context.model().spec().is_bidirectional() {
            return Err(invalid(
                "this model's tokens look at later ones: it cannot write text token by token",
            ));
        }
        if context.options().n_seq < options.n_seq() {
            return Err(invalid(
                "the context has fewer sequences (n_seq) than the engine needs",
            ));
        }
        // More tokens than one graph computes at once would only delay decoding requests, unless
        // graphs overlap.
        let at_once = match context.options().copies {
            0 | 1 => context.options().n_ubatch,
            _ => context.options().n_batch,
        };
        options.budget = options.budget.min(at_once).max(1);
        context.clear()?;
        let n_ctx = context.n_ctx();
        let limits = Limits {
            context: options.context.unwrap_or(n_ctx).min(n_ctx),
            slots: options.slots,
            queue: options.queue,
            vocabulary: context.model().spec().n_vocab,
            can_shift: context.kv_cache().can_shift(),
            image: if context.options().images {
                // Drafts are made only while no prompt is computed.
                let free = context.options().n_batch.saturating_sub(options.slots);
                free.min(context.options().n_ubatch).max(1)
            } else {
                0
            },
        };
        let clock = Arc::clone(&context.options().environment.clock);
        Ok(Engine {
            tokenizer: Arc::clone(context.model().tokenizer()?),
            clock,
            limits,
            queue: Vec::new(),
            ended: Vec::new(),
            active: Vec::new(),
            kept: PrefixCache::default(),
            disk: None,
            blocks: None,
            request_rows: None,
            free_sequences: (0..options.n_seq()).rev().collect(),
            adapters: vec![context.options().adapters.clone()],
            default_adapters: 0,
            fingerprints: vec![None],
            batch: Batch::new(),
            blocks_for_batch: 0,
            costs: StepCosts::new(),
            plain: StepCosts::new(),
            draft_budget: DraftBudget::default(),
            drafter: None,
            model_acceptance_rate: AcceptanceRate::default(),
            draft_time: None,
            turn: 0,
            next_id: 1,
            is_closing: false,
            is_lost: false,
            swapped_bytes: 0,
            served: BTreeMap::new(),
            last: vec![(0, 0); options.slots],
            totals: Totals::default(),
            context,
            options,
        })
    }

    /// Also caches texts in files in this folder, up to `most_bytes`. A later engine with the same
    /// model can use them, for requests with the same adapters. Texts of requests with a salt are
    /// not written.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created or read, or if a device fails.
    pub fn cache_on_disk(&mut self, folder: &Path, most_bytes: u64) -> Result<()> {
        let [model, _] = self.context.saved_identity()?;
        let texts = DiskTexts::open(folder, model, most_bytes).map_err(|error| {
            Error::InvalidArgument(format!("{}: {error}", folder.display()).into())
        })?;
        self.disk = Some(texts);
        Ok(())
    }

    /// Reports after each step which blocks of `size` tokens were added to the cache and which were
    /// removed. Dropping the engine reports that all are removed. Texts of requests with a salt or
    /// their own adapters are not reported, because other requests cannot reuse them. The same
    /// applies to shifted texts.
    pub fn observe_blocks(&mut self, size: usize, observer: BlockObserver) {
        self.blocks = Some(Blocks::new(size, observer));
    }

    fn report_blocks(&mut self) {
        let Some(blocks) = &mut self.blocks else {
            return;
        };
        let common = (self.default_adapters, 0);
        let active = self.active.iter().filter_map(|active| {
            let Running {
                tokens,
                key,
                counts,
                ..
            } = &active.running;
            let is_reported = *key == common && !counts.truncated;
            is_reported.then(|| (active.sequence, &tokens[..active.decoded]))
        });
        let kept = self.kept.iter().filter(|text| text.key == common);
        let texts = active.chain(kept.map(|text| (text.sequence, &text.tokens[..])));
        // Others do not know the IDs of images.
        blocks.update(texts.map(|(sequence, tokens)| (sequence, text_before_image(tokens))));
    }

    /// Writes the cache of a sequence to disk, if it is worth a file.
    fn write_to_disk(&mut self, sequence: usize, tokens: &[u32], key: Key) {
        let (set, salt) = key;
        if self.disk.is_none() || salt != 0 {
            return;
        }
        let adapters = match self.fingerprint(set) {
            Ok(adapters) => adapters,
            Err(error) => {
                tracing::warn!(%error, "a text cannot be kept on disk");
                return;
            }
        };
        let can_cut = self.context.kv_cache().can_truncate();
        let Some(disk) = self.disk.as_mut() else {
            return;
        };
        if !disk.wants(tokens, adapters, can_cut) {
            return;
        }
        match self.context.save(sequence) {
            Ok(mut saved) if saved.len() == tokens.len() => {
                saved.tokens = tokens.to_vec();
                disk.write(&saved, can_cut);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "a text cannot be kept on disk"),
        }
    }

    /// Returns the limits of a request.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the tokenizer of the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns whether there are neither active nor waiting requests.
    pub fn is_quiet(&self) -> bool {
        self.queue.is_empty() && self.active.is_empty()
    }

    /// Submits a request. `wake_engine` is called when its reader makes room or is dropped.
    ///
    /// # Errors
    /// Returns the reason why it is rejected.
    pub fn submit(
        &mut self,
        request: Request,
        wake_engine: EngineWaker,
    ) -> Result<(u64, Reader), Refusal> {
        let prepared = Prepared::new(request, &self.limits, &self.tokenizer)?;
        self.submit_prepared(prepared, wake_engine)
    }

    /// Submits a request that was checked before, like [`submit`](Self::submit).
    ///
    /// # Errors
    /// Returns an error if too many requests wait, or if the engine is closing.
    pub fn submit_prepared(
        &mut self,
        prepared: Prepared,
        wake_engine: EngineWaker,
    ) -> Result<(u64, Reader), Refusal> {
        let (event_queue, reader) = event_queue(prepared.request.event_queue, wake_engine);
        let id = self.enqueue(prepared, event_queue)?;
        Ok((id, reader))
    }

    pub(crate) fn enqueue(
        &mut self,
        prepared: Prepared,
        event_queue: crate::event_queue::EventQueue,
    ) -> Result<u64, Refusal> {
        if self.is_closing {
            return Err(Refusal::Closing);
        }
        let owner = prepared.request.owner;
        let waiting = self.queue.iter();
        let waiting = waiting.filter(|one| one.request.owner == owner).count();
        if waiting >= self.options.queue {
            return Err(Refusal::QueueFull(waiting));
        }
        let adapters = match &prepared.request.adapters {
            None => self.default_adapters,
            Some(wanted) => self.adapter_set(wanted),
        };
        let id = self.next_id;
        self.next_id += 1;
        let key = (adapters, prepared.request.cache.salt);
        let running = Running::new(id, prepared, key, event_queue, self.clock.now());
        self.enqueue_running(running);
        Ok(id)
    }

    /// Inserts a request into the queue by priority and age.
    fn enqueue_running(&mut self, running: Running) {
        let rank = |one: &Running| (std::cmp::Reverse(one.request.priority), one.id);
        let at = self
            .queue
            .partition_point(|other| rank(other) < rank(&running));
        self.queue.insert(at, running);
    }

    /// Cancels a request, if it has not ended.
    pub fn cancel(&mut self, id: u64) {
        let queued = self.queue.iter_mut();
        let active = self.active.iter_mut().map(|active| &mut active.running);
        for running in queued.chain(active).filter(|running| running.id == id) {
            running.is_cancelled = true;
        }
    }

    /// Stops accepting requests. The existing ones are answered.
    pub fn close(&mut self) {
        self.is_closing = true;
    }

    /// Returns whether a device is lost, so that nothing can be computed any more.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Ends all requests.
    pub fn end_all(&mut self) {
        self.fail_all(FailureKind::Closing, "the server ends");
    }

    /// Fails all requests for this reason.
    pub(crate) fn fail_all(&mut self, kind: FailureKind, why: &str) {
        self.is_closing = true;
        let now = self.clock.now();
        for mut running in std::mem::take(&mut self.queue) {
            self.forget_swapped(&mut running);
            running.fail(kind, why, now);
        }
        while let Some(mut active) = self.active.pop() {
            active.running.fail(kind, why, now);
            self.leave(active, false);
        }
        self.ended.clear();
    }

    /// Returns the number of a set of adapters.
    fn adapter_set(&mut self, wanted: &[ScaledAdapter]) -> usize {
        let is_same = |known: &Vec<ScaledAdapter>| {
            known.len() == wanted.len()
                && known.iter().zip(wanted).all(|(a, b)| {
                    Arc::ptr_eq(&a.adapter, &b.adapter) && a.share.to_bits() == b.share.to_bits()
                })
        };
        if let Some(at) = self.adapters.iter().position(is_same) {
            return at;
        }
        let active = self.active.iter().map(|active| active.running.key.0);
        let mut used: Vec<usize> = self
            .queue
            .iter()
            .map(|one| one.key.0)
            .chain(active)
            .collect();
        used.extend([0, self.default_adapters]);
        let unused = (0..self.adapters.len()).find(|number| !used.contains(number));
        match unused.filter(|_| self.adapters.len() >= Self::MAX_SETS) {
            // Prefixes that were computed with the previous set of this number are useless now.
            Some(number) => {
                let gone = self.kept.forget_adapters(number);
                gone.into_iter().for_each(|sequence| self.free(sequence));
                self.adapters[number] = wanted.to_vec();
                self.fingerprints[number] = None;
                number
            }
            None => {
                self.adapters.push(wanted.to_vec());
                self.fingerprints.push(None);
                self.adapters.len() - 1
            }
        }
    }

    /// Returns the identity of a set of adapters in saved sequences.
    fn fingerprint(&mut self, set: usize) -> Result<u64> {
        if let Some(known) = self.fingerprints[set] {
            return Ok(known);
        }
        let [_, adapters] = self.context.identity_with(&self.adapters[set])?;
        self.fingerprints[set] = Some(adapters);
        Ok(adapters)
    }

    /// Returns the set of adapters that a sequence was saved with, if requests have used it.
    fn set_of(&mut self, saved: &SavedSequence) -> Result<Option<usize>> {
        let [_, adapters] = saved.identity();
        // The set of requests that specify no adapters comes first.
        let sets = std::iter::once(self.default_adapters).chain(0..self.adapters.len());
        for set in sets {
            if self.fingerprint(set)? == adapters {
                return Ok(Some(set));
            }
        }
        Ok(None)
    }

    /// Sets the adapters of a sequence to a set.
    fn adapt(&mut self, sequence: usize, set: usize) -> Result<()> {
        let own = (set > 0).then(|| self.adapters[set].clone());
        self.context.set_sequence_adapters(sequence, own)
    }

    /// Returns the number of known adapter sets.
    pub fn n_adapter_sets(&self) -> usize {
        self.adapters.len()
    }

    /// Maximum number of known adapter sets, in addition to those in use.
    const MAX_SETS: usize = 32;

    /// Sets the adapters of requests that specify none.
    pub fn set_default_adapters(&mut self, adapters: &[ScaledAdapter]) {
        self.default_adapters = self.adapter_set(adapters);
    }

    /// Does the available work, for the time of one batch.
    pub fn step(&mut self) -> Step {
        self.step_then(|_| ())
    }

    /// Does a step like [`step`](Self::step), and calls `show` before readers get the events of
    /// ends: so a client that has its answer sees counts that include it.
    pub(crate) fn step_then(&mut self, show: impl FnOnce(&Self)) -> Step {
        let step = self.work();
        self.report_blocks();
        show(self);
        self.ended.clear();
        step
    }

    fn work(&mut self) -> Step {
        let now = self.clock.now();
        self.end_unwanted(now);
        self.note_pauses(now);
        self.admit(now);
        let planned = self.plan_batch();
        if planned.is_empty() {
            // A request that waits for an image only now yields its slot to others.
            let preempted = self.totals.preempted;
            self.admit(now);
            return if self.totals.preempted > preempted || self.has_room_for_more() {
                Step::Worked
            } else {
                Step::Idle(self.next_deadline())
            };
        }
        self.run_batch(planned);
        Step::Worked
    }

    /// Ends requests that were cancelled, whose reader was dropped, or whose deadline has passed.
    fn end_unwanted(&mut self, now: Instant) {
        let is_over = |running: &Running| running.deadline().is_some_and(|end| end <= now);
        let mut at = 0;
        while let Some(running) = self.queue.get(at) {
            if !running.is_unwanted() && !is_over(running) {
                at += 1;
                continue;
            }
            let mut running = self.queue.remove(at);
            self.forget_swapped(&mut running);
            self.tell_end(&mut running, now);
            self.ended.push(running.event_queue);
        }
        let mut at = 0;
        while let Some(active) = self.active.get(at) {
            if !active.running.is_unwanted() && !is_over(&active.running) {
                at += 1;
                continue;
            }
            let mut active = self.active.remove(at);
            self.tell_end(&mut active.running, now);
            self.leave(active, true);
        }
    }

    fn tell_end(&mut self, running: &mut Running, now: Instant) {
        if running.is_unwanted() {
            self.totals.cancelled += 1;
            running.fail(FailureKind::Cancelled, "the request was cancelled", now);
        } else {
            self.totals.finished += 1;
            running.finish(Finish::Deadline, now);
        }
    }

    fn note_pauses(&mut self, now: Instant) {
        for active in &mut self.active {
            active.paused = if active.running.event_queue.is_full() {
                Some(active.paused.unwrap_or(now))
            } else {
                None
            };
        }
    }

    /// Returns the next time when a request's deadline passes, or when a paused request yields its
    /// slot.
    fn next_deadline(&self) -> Option<Instant> {
        let queued = self.queue.iter().filter_map(Running::deadline);
        let active = self.active.iter();
        let active = active.filter_map(|active| active.running.deadline());
        let pauses = self.active.iter().filter_map(|active| active.paused);
        let pauses = pauses.filter(|_| !self.queue.is_empty());
        let pauses = pauses.filter_map(|since| since.checked_add(Self::MAX_PAUSE));
        queued.chain(active).chain(pauses).min()
    }

    /// Time after which a paused request yields its slot to a waiting one.
    const MAX_PAUSE: Duration = Duration::from_secs(1);

    /// Removes an active request. Its cached tokens are kept or removed. This is the only way out
    /// of a slot.
    fn leave(&mut self, active: Active, is_kept: bool) {
        let Active {
            running,
            slot,
            sequence,
            decoded,
            ..
        } = active;
        self.ended.push(running.event_queue);
        let is_whole = self.context.kv_cache().cells().next_position(sequence) as usize == decoded;
        let is_kept = is_kept
            && running.request.cache.keep
            && decoded > 0
            && is_whole
            && !running.counts.truncated;
        if !is_kept {
            self.free(sequence);
            return;
        }
        let mut tokens = running.tokens;
        tokens.truncate(decoded);
        self.write_to_disk(sequence, &tokens, running.key);
        let can_cut = self.context.kv_cache().can_truncate();
        let freed = self.kept.add(sequence, tokens, running.key, slot, can_cut);
        // Otherwise, the end of the prompt is held.
        if running.request.cache.hold && can_cut {
            self.kept.hold_last();
        }
        freed.into_iter().for_each(|sequence| self.free(sequence));
        while self.kept.len() > self.options.kept {
            self.evict_cheapest(None);
        }
    }

    /// Removes a sequence.
    fn free(&mut self, sequence: usize) {
        if let Err(error) = self.context.kv_cache_mut().remove(sequence, ..) {
            tracing::error!(%error, sequence, "a sequence cannot be forgotten");
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.forget(sequence);
        }
        if let Err(error) = self.adapt(sequence, 0) {
            tracing::error!(%error, sequence, "its adapters cannot be forgotten");
        }
        self.free_sequences.push(sequence);
    }

    /// Removes a sequence, and writes zeros to the cells that no other sequence shares.
    fn scrub(&mut self, sequence: usize) {
        if let Err(error) = self.context.scrub(sequence) {
            tracing::warn!(%error, sequence, "what a failed request left cannot be overwritten");
        }
        self.free(sequence);
    }

    /// Evicts the least recently used prefix, for its cells.
    fn evict_oldest(&mut self) -> bool {
        let sequence = self.kept.evict_oldest();
        self.free_evicted(sequence)
    }

    /// Evicts the prefix that is needed least, for its sequence.
    fn evict_cheapest(&mut self, spared: Option<usize>) -> bool {
        let sequence = self.kept.evict_cheapest(spared);
        self.free_evicted(sequence)
    }

    fn free_evicted(&mut self, sequence: Option<usize>) -> bool {
        if let Some(sequence) = sequence {
            self.totals.evicted += 1;
            self.free(sequence);
        }
        sequence.is_some()
    }

    fn forget_swapped(&mut self, running: &mut Running) {
        if let Some(saved) = running.swapped.take() {
            self.swapped_bytes = self.swapped_bytes.saturating_sub(saved.bytes());
        }
    }

    /// Returns the externally visible state.
    pub fn view(&self) -> View {
        let mut slots = vec![SlotView::default(); self.options.slots];
        for (slot, &(owner, tag)) in slots.iter_mut().zip(&self.last) {
            slot.owner = owner;
            slot.tag = tag;
        }
        for text in self.kept.iter() {
            if let Some(slot) = slots.get_mut(text.slot) {
                slot.computed = slot.computed.max(text.tokens.len());
            }
        }
        for active in &self.active {
            let counts = &active.running.counts;
            slots[active.slot] = SlotView {
                request: Some(active.running.id),
                owner: active.running.request.owner,
                tag: active.running.request.tag,
                prompt: counts.prompt,
                cached: counts.cached,
                computed: active.decoded,
                generated: counts.generated,
                is_paused: active.paused.is_some(),
            };
        }
        let cells = self.context.kv_cache().cells();
        let at_work = self.active.iter().map(|active| active.running.key.0);
        View {
            slots,
            queued: count_owners(self.queue.iter().map(|waiting| waiting.request.owner)),
            adapters: [
                self.files_of_sets(at_work),
                self.files_of_sets(self.queue.iter().map(|waiting| waiting.key.0)),
            ],
            cells: cells.len(),
            used_cells: cells.used(),
            kept: self.kept.len(),
            swapped_bytes: self.swapped_bytes,
            is_sleeping: false,
            totals: self.totals,
        }
    }

    /// Returns the adapter files of some sets, each once.
    fn files_of_sets(&self, sets: impl Iterator<Item = usize>) -> Vec<PathBuf> {
        let sets: BTreeSet<usize> = sets.collect();
        let adapters = sets.iter().flat_map(|&set| &self.adapters[set]);
        let files: BTreeSet<&Path> = adapters.map(|one| one.adapter.path()).collect();
        files.into_iter().map(Path::to_path_buf).collect()
    }

    /// Continues with the totals of another engine.
    pub fn set_totals(&mut self, totals: Totals) {
        self.totals = totals;
    }

    /// Removes all cached prefixes.
    pub fn clear_prefix_cache(&mut self) {
        let all = self.kept.remove_if(|_| true);
        all.into_iter().for_each(|sequence| self.free(sequence));
    }

    /// Returns whether a slot has a request.
    pub fn is_busy(&self, slot: usize) -> bool {
        self.active.iter().any(|active| active.slot == slot)
    }
}
