//! Contexts: a model with its KV cache, graphs and memory, ready to decode.

mod adapters;
mod compare;
mod device_top_k;
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
pub(crate) use options::{Sizes, pools_by_mean};
pub use plan::{ContextPlan, Shortage};
pub(crate) use plan::{compute_by_device, compute_bytes};
pub use watch::{NodeNames, WatchedResult, Watcher};

use crate::adapter::{self, Adapter, ScaledAdapter};
use crate::arch::spec::Pooling;
use crate::arch::{GraphInputs, GraphShape, Input, Output};
use crate::batch::{Batch, BatchToken};
use crate::context::device_top_k::DeviceTopK;
use crate::error::{Error, Result, try_resize};
use crate::graphs::{GraphCache, GraphSource};
use crate::kv::{KvCache, Rotation};
use crate::model::Model;
use adapters::SequenceAdapters;
use memory::MemoryReport;
use micro_batches::{MicroBatches, Room};
use samite_sched::{Plan, Scheduler};
use staging::{Staging, check_filled};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A model that decodes some sequences.
///
/// Creation allocates all memory that decoding needs. Only key shifts allocate a little when they
/// happen. Repeatedly decoding the same number of tokens builds no graph, makes no plan and
/// allocates nothing.
///
/// ```no_run
/// use samite_llm::{Batch, Context, ContextOptions};
/// # fn decode(model: std::sync::Arc<samite_llm::Model>) -> samite_llm::Result<()> {
///
/// let mut context = Context::new(model, ContextOptions::default())?;
/// // Three tokens of sequence 0, from position 0 on. The last one has logits.
/// context.decode(&Batch::sequence(&[1, 2, 3], 0, 0))?;
/// let logits = context.logits(2).unwrap();
/// // The sequence goes on at position 3, and a copy of it at another token.
/// context.kv_cache_mut().copy(0, 1, ..)?;
/// context.decode(&Batch::sequence(&[4], 3, 0))?;
/// context.decode(&Batch::sequence(&[5], 3, 1))?;
/// # Ok(())
/// # }
/// ```
pub struct Context {
    model: Arc<Model>,
    options: ContextOptions,
    sizes: Sizes,
    cache: KvCache,
    scheduler: Scheduler,
    graphs: GraphCache,
    /// Graph that the scheduler has loaded.
    loaded: Option<GraphShape>,
    staging: Staging,
    /// Rows of logits or embeddings.
    values: Vec<f32>,
    /// Elements of such a row.
    width: usize,
    /// Rows of embeddings in addition to logits.
    embeddings: Vec<f32>,
    /// Elements of such a row; 0 if there are none.
    embedding_width: usize,
    /// Row of each token of the last batch.
    rows: Vec<Option<usize>>,
    /// Sequences of the last batch with their rows, if embeddings are pooled.
    pooled: Vec<(u32, usize)>,
    watcher: Option<Watcher>,
    device_top_k: DeviceTopK,
    adapters: SequenceAdapters,
    /// Reason why the context can no longer decode.
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
    /// Creates a context and allocates all memory that it needs.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the options are invalid. Also fails if a device does
    /// not have enough memory, or if none supports an operation.
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
            staging: Staging::new(&sizes, model.spec())?,
            values: Vec::new(),
            width: 0,
            embeddings: Vec::new(),
            embedding_width: 0,
            rows: Vec::new(),
            pooled: Vec::new(),
            watcher: None,
            device_top_k: DeviceTopK::default(),
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

    /// Sets the width of result rows, and allocates those of a micro-batch.
    fn size_results(&mut self) -> Result<()> {
        let spec = self.model.spec();
        (self.width, self.embedding_width) = match self.options.output {
            Output::Logits => (spec.n_vocab, 0),
            Output::Embeddings(pooling) => (spec.embedding_width(pooling), 0),
            Output::Both => (spec.n_vocab, spec.embedding_width(Pooling::None)),
        };
        let n_rows = if self.sizes.means {
            self.options.n_seq
        } else {
            self.sizes.n_logits
        };
        self.size_rows(n_rows)
    }

    fn size_rows(&mut self, n_rows: usize) -> Result<()> {
        let needed = n_rows.checked_mul(self.width);
        try_resize(&mut self.values, 0.0, needed, "results")?;
        let needed = n_rows.checked_mul(self.embedding_width);
        try_resize(&mut self.embeddings, 0.0, needed, "results")
    }

    /// Changes the results, or the [number of rows](ContextOptions::n_logits) of one graph, from
    /// the next batch on. The cache does not change.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the model does not support the output. Also fails if
    /// there is not enough memory. After an error, the output is unchanged.
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
        let staging = Staging::new(&sizes, self.model.spec())?;
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
                // The previous sizes need no more memory.
                let _ = self.size_results();
            })
    }

    /// Reserves memory for the largest graph and for single tokens.
    fn reserve_all(&mut self) -> Result<()> {
        self.device_top_k = DeviceTopK::default();
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

    /// Returns the model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Replaces the adapters, or their scales, from the next token on. This affects all sequences
    /// without [their own adapters](Self::set_sequence_adapters). The cache does not change.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if an adapter belongs to another model or a scale is not
    /// a number. Also fails if there is not enough memory. After an error, the adapters are
    /// unchanged.
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

    /// Sets the adapters for the tokens of `sequence` from the next one on, instead of those of the
    /// context. `None` restores those of the context.
    ///
    /// Sequences with different adapters can be in one batch, and do not affect each other's
    /// results. A token of several sequences uses the adapters of the first one. The cache does not
    /// change. Copies and restored states of a sequence do not inherit its adapters.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if an adapter belongs to another model, a scale is not a
    /// number, the sequence does not exist, the context computes embeddings of whole texts, or
    /// there are more than 64 different adapters at a time. Also fails if there is not enough
    /// memory. After an error, the adapters are unchanged.
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
            // Reserving memory unloads the loaded graph.
            self.loaded = None;
        }
        let before = self.adapters.for_sequence(sequence).map(<[_]>::to_vec);
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

    /// Returns the adapters that apply to the tokens of a sequence.
    pub fn adapters_of(&self, sequence: usize) -> &[ScaledAdapter] {
        let own = self.adapters.for_sequence(sequence);
        own.unwrap_or(&self.options.adapters)
    }

    /// Checks that graphs with this output can use different adapters for each token.
    fn check_mixing(&self, output: Output) -> Result<()> {
        match output {
            Output::Logits | Output::Both => Ok(()),
            Output::Embeddings(_) => Err(Error::invalid(
                "sequences cannot have adapters of their own where embeddings are computed: set those of the context",
            )),
        }
    }

    /// Returns the options, with `n_ubatch` limited to what can occur.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    /// Sets the [number of threads](ContextOptions::threads) for micro-batches of a single token,
    /// and [`threads_batch`](ContextOptions::threads_batch) for those of several tokens. 0 counts
    /// as 1.
    pub fn set_threads(&mut self, threads: Option<usize>, threads_batch: Option<usize>) {
        self.options.threads = threads;
        self.options.threads_batch = threads_batch;
    }

    /// Returns the number of cells in the KV cache.
    pub fn n_ctx(&self) -> usize {
        self.cache.cells.len()
    }

    /// Returns the KV cache.
    pub fn kv_cache(&self) -> &KvCache {
        &self.cache
    }

    /// Returns the KV cache, to remove, copy and shift what sequences have in it.
    pub fn kv_cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// Returns the scheduler, for its counters and plans.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the scheduler, to trace it.
    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Sets the watcher that observes the results of nodes from the next micro-batch on, or removes
    /// it. Returns the previous one. If the watcher stops a decode, the cache is as it was before
    /// the batch.
    pub fn watch(&mut self, watcher: Option<Watcher>) -> Option<Watcher> {
        std::mem::replace(&mut self.watcher, watcher)
    }

    /// Returns the plan for a micro-batch of `n_tokens` at the end of a full cache, without running
    /// it.
    ///
    /// # Errors
    /// Returns an error if the graph cannot be placed.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan> {
        let shape = self.sizes.at_the_end(n_tokens);
        self.source().plan(self.scheduler.options(), shape)
    }

    /// Returns the memory usage, by kind of memory.
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

    /// Removes all sequences.
    ///
    /// # Errors
    /// Returns an error if a device fails.
    pub fn clear(&mut self) -> Result<()> {
        self.scheduler.synchronize()?;
        self.forget_results();
        self.cache.clear()
    }

    /// Decodes a batch: stores its tokens in the cache and computes the requested logits.
    ///
    /// # Errors
    /// Returns [`Error::ContextFull`] if the cache has no room. Returns [`Error::InvalidArgument`]
    /// for a batch that is empty or too long, or has invalid tokens, sequences or positions. Also
    /// fails if decoding is cancelled or stopped by a watcher, or if a device fails. After an
    /// error, the cache is as it was before, unless cached keys were being
    /// [shifted](KvCache::shift): then it is empty.
    pub fn decode(&mut self, batch: &Batch) -> Result<()> {
        self.begin(batch)?;
        // A later failure would be reported by the next batch although this one counts as decoded.
        let result = self
            .decode_all(batch)
            .and_then(|()| Ok(self.scheduler.synchronize()?));
        self.end(result)
    }

    fn forget_results(&mut self) {
        self.device_top_k.forget();
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
        batch.check(spec.n_vocab, spec.input_width(), n_batch, &self.cache.cells)?;
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

    /// Commits or rolls back a batch.
    fn end(&mut self, result: Result<()>) -> Result<()> {
        match &result {
            Ok(()) => {
                self.cache.commit();
            }
            Err(_) => {
                // Other devices may still be running, and fail as well; only one failure is
                // reported.
                if let Err(error) = self.scheduler.synchronize() {
                    tracing::debug!(%error, "after a failed batch");
                }
                self.cache.rollback();
                self.forget_results();
            }
        }
        result
    }

    /// Returns the logits after the token at `index` of the last batch. Returns `None` if they were
    /// not requested, or if only the [top-k](Self::set_device_top_k) were read.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        match self.options.output {
            _ if self.device_top_k.are_found() => None,
            Output::Logits | Output::Both => self.value((*self.rows.get(index)?)?),
            Output::Embeddings(_) => None,
        }
    }

    /// Returns the embedding of the token at `index` of the last batch, if it was requested and
    /// embeddings are not pooled.
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

    /// Returns the embedding, or the scores, of the tokens of `sequence` in the last batch, if
    /// embeddings are pooled.
    pub fn pooled(&self, sequence: u32) -> Option<&[f32]> {
        let mut pooled = self.pooled.iter();
        pooled.find_map(|&(known, row)| (known == sequence).then(|| self.value(row))?)
    }

    /// Returns whether the context computes means over all tokens of a sequence, which must be in
    /// one micro-batch.
    pub fn pools_by_mean(&self) -> bool {
        self.sizes.means
    }

    fn value(&self, row: usize) -> Option<&[f32]> {
        self.values.get(row * self.width..(row + 1) * self.width)
    }

    fn decode_all(&mut self, batch: &Batch) -> Result<()> {
        let batch = &*self.prepared(batch)?;
        if self.sizes.is_bidirectional && batch.n_wanted() == 0 {
            // Nothing is cached.
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

    /// Returns whether embeddings are pooled.
    fn is_pooled(&self) -> bool {
        !matches!(
            self.options.output,
            Output::Logits | Output::Both | Output::Embeddings(Pooling::None)
        )
    }

    /// Returns the sequences of a batch, each with the token that provides its embedding.
    fn picks(&self, batch: &Batch) -> Vec<(u32, usize)> {
        let is_last = match self.options.output {
            Output::Embeddings(Pooling::Rank) => !self.sizes.is_bidirectional,
            output => output == Output::Embeddings(Pooling::Last),
        };
        let ends = batch.ends().into_iter();
        ends.map(|(sequence, ends)| (sequence, ends[usize::from(is_last)]))
            .collect()
    }

    /// Returns the batch with the requests that pooling needs, after checking that it can be
    /// computed.
    fn prepared<'a>(&self, batch: &'a Batch) -> Result<Cow<'a, Batch>> {
        if self.sizes.means || self.sizes.is_bidirectional && self.sizes.by_sequence {
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
        if self.sizes.is_bidirectional {
            self.check_whole(&batch)?;
        }
        let n_ubatch = self.sizes.n_ubatch;
        let is_too_long = |token: &BatchToken| {
            let length = token.last_attended - token.position;
            usize::try_from(length).is_ok_and(|length| length >= n_ubatch)
        };
        if batch.tokens().iter().any(is_too_long) {
            return Err(Error::invalid(format!(
                "an image's tokens attend to each other and are computed at once; there is room for {n_ubatch}: raise n_ubatch (--ubatch-size)"
            )));
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

    /// Checks that a batch for bidirectional attention can be computed at once.
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

    /// Decodes like [`decode_parts`](Self::decode_parts), but with a row for each sequence.
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
            // Sequences start in the order of micro-batches, and each is in one of them.
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
        if self.sizes.by_sequence {
            parts.alike(batch)
        } else {
            parts
        }
    }

    /// Prepares a micro-batch for running, and returns its shape.
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
            n_top_k: match self.watcher {
                None if wanted > 0 && wanted == batch.n_wanted() => self.device_top_k.count(),
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
        if let Some(tensors) = inputs.device_top_k.filter(|_| !rows.is_empty()) {
            let scheduler = &mut self.scheduler;
            return self.device_top_k.read(scheduler, tensors, rows.len());
        }
        // Reading waits for the run, so results that are not requested are not read.
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

    /// Loads the graph of this shape for the next run.
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

    /// Waits until the memory of the cache matches its cells.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.apply_shifts()?;
        Ok(self.scheduler.synchronize()?)
    }

    /// Rotates the keys of cells whose positions changed.
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
