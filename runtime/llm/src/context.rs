//! Contexts: a model at work, with its KV cache, its graphs and its memory.

mod adapters;
mod compare;
mod likeliest;
mod longest;
mod lost;
mod memory;
mod micro_batches;
mod options;
mod plan;
mod scrub;
mod staging;
mod watch;

pub use memory::MemoryUse;
pub use options::ContextOptions;
pub(crate) use options::{Sizes, takes_means};
pub use plan::{ContextPlan, Shortage};
pub(crate) use plan::{compute_by_device, compute_bytes};
pub use watch::{NodeNames, Seen, Watcher};

use crate::adapter::{self, Adapter, ScaledAdapter};
use crate::arch::spec::Pooling;
use crate::arch::{GraphInputs, GraphShape, Input, Output};
use crate::batch::{Batch, BatchToken};
use crate::context::likeliest::Likeliest;
use crate::error::{Error, Result, try_resize};
use crate::graphs::{GraphCache, GraphSource};
use crate::kv::{Cells, KvCache, Rotation};
use crate::model::Model;
use adapters::SequenceAdapters;
use memory::MemoryReport;
use micro_batches::{MicroBatches, Room};
use samite_sched::{Plan, Scheduler};
use staging::{Staging, check_filled};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeBounds, RangeInclusive};
use std::sync::Arc;

/// A model at work on some sequences.
///
/// After creation, all memory that is needed is there (but for moving keys, which takes a little when it happens). Decoding the
/// same number of tokens again and again builds no graph, makes no plan and allocates nothing.
pub struct Context {
    model: Arc<Model>,
    options: ContextOptions,
    sizes: Sizes,
    cache: KvCache,
    scheduler: Scheduler,
    graphs: GraphCache,
    /// The graph that the scheduler has loaded.
    loaded: Option<GraphShape>,
    staging: Staging,
    /// Rows of logits or embeddings.
    values: Vec<f32>,
    /// Elements of such a row.
    width: usize,
    /// Rows of embeddings beside those of logits.
    embeddings: Vec<f32>,
    /// Elements of such a row; 0 if there are none.
    embedding_width: usize,
    /// By token of the last batch: its row.
    rows: Vec<Option<usize>>,
    /// The sequences of the last batch, each with its row, if they have embeddings as a whole.
    pooled: Vec<(u32, usize)>,
    watcher: Option<Watcher>,
    likeliest: Likeliest,
    adapters: SequenceAdapters,
    /// Why nothing can be decoded any more.
    lost: Option<Error>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("model", &self.model.name())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Creates a context and takes all the memory that it needs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that make no sense; if a device has not enough memory, or none can run
    /// an operation.
    pub fn new(model: Arc<Model>, options: ContextOptions) -> Result<Self> {
        if !model.weights().have_data() {
            return Err(Error::invalid(format!(
                "{}: the model was opened without its weights, for plans only: load it",
                model.path().display()
            )));
        }
        let sizes = plan::check(&model, &options)?;
        let n_ubatch = sizes.n_ubatch;
        let kv = model.plan_kv(&sizes, &options)?;
        let cache = KvCache::new(&kv, model.devices(), model.spec(), &sizes)?;
        let devices = model.devices().iter().cloned().collect();
        let scheduler = Scheduler::new(devices, options.scheduler())?;
        let mut context = Context {
            sizes,
            cache,
            scheduler,
            graphs: GraphCache::new(options.n_seq),
            loaded: None,
            staging: Staging::new(&sizes, model.spec().n_embd)?,
            values: Vec::new(),
            width: 0,
            embeddings: Vec::new(),
            embedding_width: 0,
            rows: Vec::new(),
            pooled: Vec::new(),
            watcher: None,
            likeliest: Likeliest::default(),
            adapters: SequenceAdapters::new(options.n_seq),
            lost: None,
            options: ContextOptions {
                n_ubatch,
                ..options
            },
            model,
        };
        context.size_results()?;
        context.reserve_all()?;
        for used in context.memory() {
            tracing::info!(
                memory = used.memory,
                weights = used.weights,
                cache = used.kv,
                compute = used.compute,
                "bytes in use"
            );
        }
        Ok(context)
    }

    /// Has rows of the right width, and memory for those of a micro-batch.
    fn size_results(&mut self) -> Result<()> {
        let spec = self.model.spec();
        (self.width, self.embedding_width) = match self.options.output {
            Output::Logits => (spec.n_vocab, 0),
            Output::Embeddings(pooling) => (spec.embedding_width(pooling), 0),
            Output::Both => (spec.n_vocab, spec.embedding_width(Pooling::None)),
        };
        let n_rows = match self.sizes.means {
            true => self.options.n_seq,
            false => self.sizes.n_logits,
        };
        self.size_rows(n_rows)
    }

    fn size_rows(&mut self, n_rows: usize) -> Result<()> {
        let needed = n_rows.checked_mul(self.width);
        try_resize(&mut self.values, 0.0, needed, "results")?;
        let needed = n_rows.checked_mul(self.embedding_width);
        try_resize(&mut self.embeddings, 0.0, needed, "results")
    }

    /// Computes something else of tokens from the next batch on, or [more rows](ContextOptions::n_logits) at once. What is in the cache stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the model does not give that; if there is not enough memory. Then the output is that from before.
    pub fn set_output(&mut self, output: Output, n_logits: Option<usize>) -> Result<()> {
        let before = (self.options.output, self.options.n_logits, self.sizes);
        if (output, n_logits) == (before.0, before.1) {
            return Ok(());
        }
        if self.adapters.any() {
            self.check_mixing(output)?;
        }
        let options = ContextOptions {
            output,
            n_logits,
            n_ctx: Some(self.sizes.n_cells),
            ..self.options.clone()
        };
        let sizes = plan::check(&self.model, &options)?;
        let staging = Staging::new(&sizes, self.model.spec().n_embd)?;
        (self.options.output, self.options.n_logits, self.sizes) = (output, n_logits, sizes);
        let before_staging = std::mem::replace(&mut self.staging, staging);
        self.forget_results();
        self.graphs.clear();
        self.loaded = None;
        self.size_results()
            .and_then(|()| self.reserve_all())
            .inspect_err(|_| {
                (self.options.output, self.options.n_logits, self.sizes) = before;
                self.staging = before_staging;
                // What was there needs no more memory.
                let _ = self.size_results();
            })
    }

    /// Takes the memory for the largest graph and for single tokens.
    fn reserve_all(&mut self) -> Result<()> {
        self.likeliest = Likeliest::default();
        let mixed = Some(self.adapters.all()).filter(|_| self.adapters.any());
        for all in [None, mixed]
            .into_iter()
            .take(1 + usize::from(mixed.is_some()))
        {
            for shape in self.sizes.reserved() {
                let shape = GraphShape {
                    mixed: all,
                    ..shape
                };
                let built = self.source().build(shape)?;
                self.scheduler.reserve(&built.graph, &built.assignments)?;
            }
        }
        Ok(())
    }

    fn source(&self) -> GraphSource<'_> {
        let KvCache {
            layers, choices, ..
        } = &self.cache;
        self.model.graph_source(
            layers,
            choices,
            &self.options,
            self.adapters.known(),
            &self.sizes,
        )
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Has other adapters, or the same ones in other shares, change the model from the next token on, for all sequences without
    /// [adapters of their own](Self::set_sequence_adapters). What is in the cache stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an adapter of another model or a share that is no number; if there is not enough memory.
    /// Then the adapters are those from before.
    pub fn set_adapters(&mut self, adapters: Vec<ScaledAdapter>) -> Result<()> {
        adapter::check(&self.model, &adapters)?;
        if self.adapters.any() {
            self.adapters.learn(&adapters, &[])?;
        }
        self.graphs.clear();
        self.loaded = None;
        let before = std::mem::replace(&mut self.options.adapters, adapters);
        self.reserve_all().inspect_err(|_| {
            self.options.adapters = before;
        })
    }

    /// Has these adapters change the model for the tokens of `sequence` from the next one on, instead of those of the context; with `None`, those of the
    /// context do. Sequences with different ones can be in one batch, and none changes another's results. A token of several sequences is computed with
    /// the adapters of the first. What is in the cache stays as it is; what is copied from a sequence or restored does not bring adapters along.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an adapter of another model, a share that is no number, a sequence that does not exist, a context for embeddings of
    /// whole texts, or more than 64 different adapters at a time; if there is not enough memory. Then the adapters are those from before.
    pub fn set_sequence_adapters(
        &mut self,
        sequence: usize,
        adapters: Option<Vec<ScaledAdapter>>,
    ) -> Result<()> {
        self.cache.cells.check(sequence)?;
        let Some(own) = &adapters else {
            self.adapters.set(sequence, None);
            return Ok(());
        };
        adapter::check(&self.model, own)?;
        self.check_mixing(self.options.output)?;
        let (new, others_went) = self.adapters.learn(own, &self.options.adapters)?;
        if others_went {
            self.graphs.clear();
        }
        if new > 0 {
            // Reserving unloads what is loaded.
            self.loaded = None;
        }
        let before = self.adapters.of(sequence).map(<[_]>::to_vec);
        self.adapters.set(sequence, adapters);
        if new > 0
            && let Err(error) = self.reserve_all()
        {
            self.adapters.set(sequence, before);
            self.adapters.unlearn(new);
            return Err(error);
        }
        Ok(())
    }

    /// The adapters that the tokens of a sequence are computed with.
    pub fn adapters_of(&self, sequence: usize) -> &[ScaledAdapter] {
        let own = self.adapters.of(sequence);
        own.unwrap_or(&self.options.adapters)
    }

    /// Checks that each token's adapters are known where a graph needs them.
    fn check_mixing(&self, output: Output) -> Result<()> {
        match output {
            Output::Logits | Output::Both => Ok(()),
            Output::Embeddings(_) => Err(Error::invalid(
                "sequences cannot have adapters of their own where embeddings are computed: set those of the context",
            )),
        }
    }

    /// The options, with `n_ubatch` limited to what can occur.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    /// Has micro-batches of a single token use other [numbers of threads](ContextOptions::threads) from now on, and those of several tokens,
    /// [`threads_batch`](ContextOptions::threads_batch). 0 counts as 1.
    pub fn set_threads(&mut self, threads: Option<usize>, threads_batch: Option<usize>) {
        self.options.threads = threads;
        self.options.threads_batch = threads_batch;
    }

    /// Cells of the KV cache.
    pub fn n_ctx(&self) -> usize {
        self.cache.cells.len()
    }

    /// Which cells hold what.
    pub fn cells(&self) -> &Cells {
        &self.cache.cells
    }

    /// The positions of `sequence` that all layers still have, as far as they have them one by one; of a model that keeps states, the last one alone. `None`
    /// for an empty sequence, or none.
    pub fn positions(&self, sequence: usize) -> Option<RangeInclusive<i32>> {
        let last = self.cache.cells.last_position(sequence)?;
        if self.cache.states.is_some() {
            return Some(last..=last);
        }
        let window = self.cache.window.as_ref().map(|window| &window.cells);
        let first = window.unwrap_or(&self.cache.cells).first_position(sequence);
        Some(first?..=last)
    }

    /// The scheduler, for its counters and plans.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The scheduler, to trace it.
    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Has `watcher` see results of nodes from the next micro-batch on, or nobody. Returns who saw them before. After a stop by the watcher the cache is
    /// as it was before the batch.
    pub fn watch(&mut self, watcher: Option<Watcher>) -> Option<Watcher> {
        std::mem::replace(&mut self.watcher, watcher)
    }

    /// The plan for a micro-batch of `n_tokens` at the end of a full cache, without running it.
    ///
    /// # Errors
    /// If it cannot be placed.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan> {
        let shape = self.sizes.at_the_end(n_tokens);
        self.source().plan(self.scheduler.options(), shape)
    }

    /// What memory is used for, by kind of memory.
    pub fn memory(&self) -> Vec<MemoryUse> {
        let mut report = MemoryReport::default();
        report.add(self.model.weights().bytes(), MemoryReport::WEIGHTS);
        let of_all = self.options.adapters.iter().map(|scaled| &scaled.adapter);
        let is_own = |adapter: &&Arc<Adapter>| {
            let mut of_all = self.options.adapters.iter();
            !of_all.any(|scaled| Arc::ptr_eq(&scaled.adapter, adapter))
        };
        let own = self.adapters.known().iter().filter(is_own);
        for adapter in of_all.chain(own) {
            report.add(adapter.bytes(), MemoryReport::WEIGHTS);
        }
        report.add(self.cache.bytes(), MemoryReport::KV);
        report.add(self.scheduler.buffer_sizes(), MemoryReport::COMPUTE);
        report.finish()
    }

    /// Removes the positions `range` from `sequence`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn remove(&mut self, sequence: usize, range: impl RangeBounds<i32>) -> Result<()> {
        let leaves_some = self.cache.states.is_some() && !self.is_whole(sequence, &range);
        if leaves_some {
            let last = self.cache.cells.last_position(sequence);
            if !last.is_some_and(|last| (0..=last).any(|position| range.contains(&position))) {
                return Ok(());
            }
            let mark = self.marked(sequence);
            let from_mark = |mark: i32| {
                let starts = range.contains(&mark) && !range.contains(&(mark - 1));
                starts && last.is_some_and(|last| range.contains(&last))
            };
            if !mark.is_some_and(from_mark) {
                return Err(Error::invalid(format!(
                    "sequence {sequence}: this model keeps a state, from which single tokens cannot be removed; remove the whole sequence, or what came since it was marked"
                )));
            }
        }
        let range = (range.start_bound().cloned(), range.end_bound().cloned());
        self.cache
            .edit(sequence, |cells| cells.remove(sequence, range))?;
        match &mut self.cache.states {
            Some(states) if leaves_some => states.go_back(sequence),
            Some(states) => states.forget(sequence),
            None => {}
        }
        Ok(())
    }

    /// Whether `range` is all that a sequence has.
    fn is_whole(&self, sequence: usize, range: &impl RangeBounds<i32>) -> bool {
        let last = self.cache.cells.last_position(sequence);
        last.is_none_or(|last| range.contains(&0) && range.contains(&last))
    }

    /// Whether the positions of a sequence can be removed one by one, and moved.
    pub fn can_forget(&self) -> bool {
        self.model.spec().can_shift()
    }

    /// Whether the last tokens of a sequence can always be removed again: the model has neither states nor windows.
    pub fn can_take_back(&self) -> bool {
        self.cache.states.is_none() && self.cache.window.is_none()
    }

    /// Whether the model keeps a state of what came, from which nothing can be removed but what follows a [mark](Self::mark).
    pub fn keeps_states(&self) -> bool {
        self.cache.states.is_some()
    }

    /// Whether the end of `sequence` can be removed, from `position` on, and another one follow there.
    pub fn can_cut(&self, sequence: usize, position: i32) -> bool {
        let last = self.cache.cells.last_position(sequence);
        let is_whole = position <= 0 || last.is_none_or(|last| position > last);
        let is_free = self.cache.states.is_none() || self.marked(sequence) == Some(position);
        is_whole || is_free && self.cache.can_go_on(sequence, position)
    }

    /// Marks the end of `sequence`, instead of an earlier place: what follows can be removed, also where the model keeps a state. That costs nothing; where
    /// no state is kept, it does nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn mark(&mut self, sequence: usize) -> Result<()> {
        self.cache.cells.check(sequence)?;
        let next = self
            .cache
            .cells
            .last_position(sequence)
            .map_or(0, |last| last + 1);
        if let Some(states) = &mut self.cache.states {
            states.set_mark(sequence, next);
        }
        Ok(())
    }

    /// The position that follows the [mark](Self::mark) of `sequence`.
    pub fn marked(&self, sequence: usize) -> Option<i32> {
        self.cache.states.as_ref()?.mark(sequence)
    }

    /// Removes the positions `range` from `sequence`, and moves what follows to where it began.
    ///
    /// # Errors
    /// As [`shift`](Self::shift). Nothing is changed then.
    pub fn cut_out(&mut self, sequence: usize, range: Range<i32>) -> Result<()> {
        self.check_shift()?;
        let length = range.end.saturating_sub(range.start);
        self.cache.edit(sequence, |cells| {
            cells.remove(sequence, range.clone())?;
            cells.shift(sequence, range.end.., -length)
        })
    }

    /// Lets sequence `to` share the positions `range` of `from`, instead of whatever it has there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn copy(&mut self, from: usize, to: usize, range: impl RangeBounds<i32>) -> Result<()> {
        if self.cache.states.is_none() {
            let range = (range.start_bound().cloned(), range.end_bound().cloned());
            return self.cache.edit(to, |cells| cells.copy(from, to, range));
        }
        if !self.is_whole(from, &range) {
            return Err(Error::invalid(format!(
                "sequence {from}: this model keeps a state, of which no part can be copied; copy the whole sequence"
            )));
        }
        self.cache.edit(to, |cells| {
            cells.remove(to, ..)?;
            cells.copy(from, to, ..)
        })?;
        if let Some(states) = &mut self.cache.states {
            states.share(from, to);
        }
        Ok(())
    }

    /// Removes every sequence but this one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn keep(&mut self, sequence: usize) -> Result<()> {
        for cells in self.cache.both() {
            cells.keep(sequence)?;
        }
        if let Some(states) = &mut self.cache.states {
            let others = (0..self.cache.cells.n_sequences()).filter(|&other| other != sequence);
            others.for_each(|other| states.forget(other));
        }
        Ok(())
    }

    /// Moves the positions `range` of `sequence` by `delta`; see [`Cells::shift`].
    ///
    /// # Errors
    /// As [`Cells::shift`].
    pub fn shift(
        &mut self,
        sequence: usize,
        range: impl RangeBounds<i32>,
        delta: i32,
    ) -> Result<()> {
        self.check_shift()?;
        let range = (range.start_bound().cloned(), range.end_bound().cloned());
        self.cache
            .edit(sequence, |cells| cells.shift(sequence, range, delta))
    }

    fn check_shift(&self) -> Result<()> {
        if self.sizes.sees_later {
            return Err(Error::invalid(
                "nothing is kept of this model's tokens: there is nothing to move",
            ));
        }
        match self.model.spec().can_shift() {
            true => Ok(()),
            false => Err(Error::invalid(
                "what this model keeps depends on positions: they cannot be moved",
            )),
        }
    }

    /// Forgets all sequences.
    ///
    /// # Errors
    /// If a device fails.
    pub fn clear(&mut self) -> Result<()> {
        self.scheduler.synchronize()?;
        self.forget_results();
        self.cache.clear()
    }

    /// Decodes a batch: stores its tokens in the cache and computes the logits that are wanted.
    ///
    /// # Errors
    /// [`Error::ContextFull`]; [`Error::InvalidArgument`] for a batch that is empty, too long, or has tokens, sequences or
    /// positions that cannot be; when cancelled, or stopped by a watcher; or what a device says. The cache is then as it was before, unless cached keys
    /// were being [moved](Context::shift): it is empty then.
    pub fn decode(&mut self, batch: &Batch) -> Result<()> {
        self.begin(batch)?;
        // What failed later would be taken for a failure of the next batch, when this one counts as decoded.
        let result = self
            .decode_all(batch)
            .and_then(|()| Ok(self.scheduler.synchronize()?));
        self.end(result)
    }

    fn forget_results(&mut self) {
        self.likeliest.forget();
        self.rows.clear();
        self.pooled.clear();
    }

    /// Checks that `batch` can be decoded.
    fn begin(&mut self, batch: &Batch) -> Result<()> {
        self.forget_results();
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let spec = self.model.spec();
        let n_batch = self.options.n_batch;
        batch.check(spec.n_vocab, spec.n_embd, n_batch, &self.cache.cells)?;
        if let Some(count) = spec.embedding.positions {
            let beyond = |token: &&BatchToken| token.position as usize >= count;
            if let Some(token) = batch.tokens().iter().find(beyond) {
                return Err(Error::invalid(format!(
                    "position {}: the model has learned positions 0 to {} only: take a shorter text",
                    token.position,
                    count - 1
                )));
            }
        }
        self.options.cancel.check()?;
        self.apply_shifts()?;
        let free = self.cache.cells.free();
        if batch.len() > free {
            return Err(Error::ContextFull {
                tokens: batch.len(),
                size: self.n_ctx(),
                free,
            });
        }
        if let Some(window) = &mut self.cache.window {
            window.make_room(batch.len());
        }
        Ok(())
    }

    /// Takes note of what a batch came to.
    fn end(&mut self, result: Result<()>) -> Result<()> {
        match &result {
            Ok(()) => {
                self.cache.commit();
            }
            Err(_) => {
                // Other devices may still be at work, and fail as well: one failure is told.
                if let Err(error) = self.scheduler.synchronize() {
                    tracing::debug!(%error, "after a failed batch");
                }
                self.cache.rollback();
                self.forget_results();
            }
        }
        result
    }

    /// The logits after token number `index` of the last batch, if they were wanted, and not only the [likeliest tokens](Self::set_likeliest) were read.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        match self.options.output {
            _ if self.likeliest.are_found() => None,
            Output::Logits | Output::Both => self.value((*self.rows.get(index)?)?),
            Output::Embeddings(_) => None,
        }
    }

    /// The embedding of token number `index` of the last batch, if it was wanted and there is one of each token.
    pub fn embedding(&self, index: usize) -> Option<&[f32]> {
        match self.options.output {
            Output::Embeddings(Pooling::None) => self.value((*self.rows.get(index)?)?),
            Output::Both => {
                let (row, width) = ((*self.rows.get(index)?)?, self.embedding_width);
                self.embeddings.get(row * width..(row + 1) * width)
            }
            _ => None,
        }
    }

    /// The embedding of what the last batch had of `sequence`, or its scores, if there are such of whole sequences.
    pub fn pooled(&self, sequence: u32) -> Option<&[f32]> {
        let mut pooled = self.pooled.iter();
        pooled.find_map(|&(known, row)| (known == sequence).then(|| self.value(row))?)
    }

    /// Whether it computes means over all tokens of a sequence, which must be in one micro-batch.
    pub fn takes_means(&self) -> bool {
        self.sizes.means
    }

    fn value(&self, row: usize) -> Option<&[f32]> {
        self.values.get(row * self.width..(row + 1) * self.width)
    }

    fn decode_all(&mut self, batch: &Batch) -> Result<()> {
        let batch = &*self.prepared(batch)?;
        if self.sizes.sees_later && batch.n_wanted() == 0 {
            // Nothing is kept of tokens.
            self.rows.resize(batch.len(), None);
            return Ok(());
        }
        if self.sizes.means {
            return self.decode_means(batch);
        }
        self.decode_parts(batch)?;
        if self.is_pooled() {
            let rows = self
                .picks(batch)
                .into_iter()
                .filter_map(|(sequence, token)| {
                    let row = *self.rows.get(token)?;
                    Some((sequence, row?))
                });
            self.pooled = rows.collect();
        }
        Ok(())
    }

    /// Whether there are embeddings of whole sequences.
    fn is_pooled(&self) -> bool {
        !matches!(
            self.options.output,
            Output::Logits | Output::Both | Output::Embeddings(Pooling::None)
        )
    }

    /// The sequences of a batch, each with the token whose embedding becomes its own.
    fn picks(&self, batch: &Batch) -> Vec<(u32, usize)> {
        let is_last = match self.options.output {
            Output::Embeddings(Pooling::Rank) => !self.sizes.sees_later,
            output => output == Output::Embeddings(Pooling::Last),
        };
        let ends = batch.ends().into_iter();
        ends.map(|(sequence, ends)| (sequence, ends[usize::from(is_last)]))
            .collect()
    }

    /// A batch whose tokens are wanted as far as the embeddings of whole sequences need them, once it is known that it can be computed.
    fn prepared<'a>(&self, batch: &'a Batch) -> Result<Cow<'a, Batch>> {
        if self.sizes.means || self.sizes.sees_later && self.sizes.by_sequence {
            self.check_sequences(batch)?;
        }
        let batch = if self.sizes.means {
            Cow::Owned(batch.wanting(|_| true))
        } else if self.is_pooled() {
            let picks = self.picks(batch).into_iter();
            let picked: BTreeSet<usize> = picks.map(|(_, token)| token).collect();
            Cow::Owned(batch.wanting(|index| picked.contains(&index)))
        } else {
            Cow::Borrowed(batch)
        };
        if self.sizes.sees_later {
            self.check_whole(&batch)?;
        }
        Ok(batch)
    }

    /// Checks that each sequence of a batch is in one micro-batch.
    fn check_sequences(&self, batch: &Batch) -> Result<()> {
        let mut parts = BTreeMap::new();
        for (number, (part, _)) in self.micro_batches(batch).enumerate() {
            for &sequence in part.iter().flat_map(|token| batch.sequences(token)) {
                if *parts.entry(sequence).or_insert(number) != number {
                    return Err(Error::invalid(format!(
                        "sequence {sequence}: its tokens are needed together, and do not come together in one micro-batch of {}: raise n_ubatch (--ubatch-size), put fewer sequences into a batch, or its tokens one after the other",
                        self.sizes.n_ubatch
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks that a batch of tokens that look at later ones can be computed at once.
    fn check_whole(&self, batch: &Batch) -> Result<()> {
        let Sizes {
            n_ubatch, n_logits, ..
        } = self.sizes;
        if batch.len() > n_ubatch {
            return Err(Error::invalid(format!(
                "the batch has {} tokens, which look at later ones and are computed at once; there is room for {n_ubatch}: raise n_batch (--batch-size) and n_ctx (--ctx-size), or take a shorter text",
                batch.len()
            )));
        }
        let wanted = batch.n_wanted();
        if wanted > n_logits {
            return Err(Error::invalid(format!(
                "the batch wants {wanted} rows of logits, which are computed at once; there is room for {n_logits}: raise n_logits"
            )));
        }
        Ok(())
    }

    fn decode_parts(&mut self, batch: &Batch) -> Result<()> {
        self.size_rows(batch.n_wanted())?;
        let mut rows = 0;
        for (part, room) in self.micro_batches(batch) {
            self.options.cancel.check()?;
            let first_row = rows;
            for token in part {
                self.rows.push(token.wants_logits.then_some(rows));
                rows += usize::from(token.wants_logits);
            }
            self.run_part(batch, part, first_row..rows, room)?;
        }
        Ok(())
    }

    /// As [`decode_parts`](Self::decode_parts), with a row for each sequence.
    fn decode_means(&mut self, batch: &Batch) -> Result<()> {
        let sequences = batch.ends();
        self.size_rows(sequences.len())?;
        let mut first = 0;
        for (part, room) in self.micro_batches(batch) {
            self.options.cancel.check()?;
            let is_here = |sequence: u32| {
                let mut part = part.iter();
                part.any(|token| batch.sequences(token).contains(&sequence))
            };
            // Sequences begin in the order of micro-batches, and each is in one of them.
            let end = (first..sequences.len()).find(|&at| !is_here(sequences[at].0));
            let end = end.unwrap_or(sequences.len());
            self.run_part(batch, part, first..end, room)?;
            first = end;
        }
        let rows = sequences.iter().enumerate();
        self.pooled = rows.map(|(row, &(sequence, _))| (sequence, row)).collect();
        Ok(())
    }

    /// With pipeline copies, runs of micro-batches overlap.
    fn micro_batches<'a>(&self, batch: &'a Batch) -> MicroBatches<'a> {
        let (n_ubatch, n_logits) = (self.options.n_ubatch, self.sizes.n_logits);
        let parts = MicroBatches::new(batch.tokens(), n_ubatch, n_logits, self.options.copies > 1);
        match self.sizes.by_sequence {
            true => parts.alike(batch),
            false => parts,
        }
    }

    /// Makes a micro-batch ready to run, and returns its shape.
    fn load_part(
        &mut self,
        batch: &Batch,
        part: &[BatchToken],
        room: Room,
    ) -> Result<(GraphShape, Arc<GraphInputs>)> {
        let shape = self.staging.place(batch, part, &mut self.cache, room)?;
        let wanted = part.iter().filter(|token| token.wants_logits).count();
        let shape = GraphShape {
            mixed: self.adapters.mixed(batch, part, &self.options.adapters),
            n_likeliest: match self.watcher {
                None if wanted > 0 && wanted == batch.n_wanted() => self.likeliest.count(),
                _ => 0,
            },
            ..shape
        };
        let inputs = self.load(shape)?;
        for (input, id) in &inputs.list {
            let bytes = match *input {
                Input::Shares { adapter, factor } => {
                    let shares = part.iter().map(|token| {
                        let sequence = batch.sequences(token).first().copied();
                        let context = &self.options.adapters;
                        self.adapters.share(adapter, factor, sequence, context)
                    });
                    self.staging.floats(shares)
                }
                _ => self.staging.fill(input, shape, batch, part, &self.cache)?,
            };
            let tensor = self.scheduler.current_plan()?.graph().tensor(*id);
            check_filled(&tensor.name, tensor.layout.bytes(), bytes.len())?;
            self.scheduler.write(*id, 0, bytes)?;
        }
        self.scheduler.set_threads(match part.len() {
            1 => self.options.threads,
            _ => self.options.threads_batch,
        });
        Ok((shape, inputs))
    }

    fn run_part(
        &mut self,
        batch: &Batch,
        part: &[BatchToken],
        rows: Range<usize>,
        room: Room,
    ) -> Result<()> {
        let (shape, inputs) = self.load_part(batch, part, room)?;
        let cancel = &self.options.cancel;
        match &mut self.watcher {
            Some(watcher) if let Some(built) = self.graphs.get(shape) => {
                watcher.run(&mut self.scheduler, &built.graph, cancel)?;
            }
            _ => self.scheduler.run(cancel)?,
        }
        if let Some(tensors) = inputs.likeliest.filter(|_| !rows.is_empty()) {
            let scheduler = &mut self.scheduler;
            return self.likeliest.read(scheduler, tensors, rows.len());
        }
        // Reading waits for the run, so nothing is read that nobody wants.
        if let Some(result) = inputs.result.filter(|_| !rows.is_empty()) {
            let out = &mut self.values[rows.start * self.width..rows.end * self.width];
            self.scheduler
                .read(result, 0, bytemuck::cast_slice_mut(out))?;
        }
        if let Some(result) = inputs.embeddings.filter(|_| !rows.is_empty()) {
            let width = self.embedding_width;
            let out = &mut self.embeddings[rows.start * width..rows.end * width];
            self.scheduler
                .read(result, 0, bytemuck::cast_slice_mut(out))?;
        }
        Ok(())
    }

    /// Makes the graph of this shape the one that runs.
    fn load(&mut self, shape: GraphShape) -> Result<Arc<GraphInputs>> {
        if self.graphs.get(shape).is_none() {
            let built = self.source().build(shape)?;
            if let Some(gone) = self.graphs.insert(built) {
                self.scheduler.unload(&gone.graph, &gone.assignments)?;
            }
        }
        let built = self.graphs.get(shape);
        let built = built.ok_or_else(|| Error::invalid("a graph is not there"))?;
        if self.loaded != Some(shape) {
            self.loaded = None;
            let cancel = &self.options.cancel;
            self.scheduler
                .load_with(&built.graph, &built.assignments, cancel)?;
            self.loaded = Some(shape);
        }
        Ok(Arc::clone(&built.inputs))
    }

    pub(crate) fn cache(&self) -> &KvCache {
        &self.cache
    }

    pub(crate) fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// Waits until what is kept is what cells say.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.apply_shifts()?;
        Ok(self.scheduler.synchronize()?)
    }

    /// Rotates the keys of cells whose positions moved.
    fn apply_shifts(&mut self) -> Result<()> {
        if !self.cache.both().any(|cells| cells.has_shifts()) {
            return Ok(());
        }
        self.loaded = None;
        let rotation = Rotation {
            spec: self.model.spec(),
            weights: self.model.weights(),
            n_ctx: self.sizes.n_cells,
            count: self.options.n_ubatch,
        };
        rotation.apply(&mut self.cache, &mut self.scheduler, &self.options.cancel)
    }
}
