//! Contexts: a model at work, with its KV cache, its graphs and its memory.

use crate::adapter::{self, ScaledAdapter};
use crate::arch::{Blocks, GraphInputs, GraphShape};
use crate::assign::assign;
use crate::batch::{Batch, BatchToken};
use crate::error::{Error, Result, try_filled, try_resize};
use crate::graphs::{Built, GraphCache};
use crate::hparams::Hyperparameters;
use crate::kv::{Cells, KvCache};
use crate::model::Model;
use half::f16;
use samite_core::{CancelToken, DType};
use samite_sched::{Fallback, Options, Plan, Scheduler};
use std::ops::RangeBounds;
use std::sync::Arc;

/// Longest context that is chosen without being asked for.
const DEFAULT_CONTEXT: usize = 4096;

/// How a [`Context`] is set up.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Cells of the KV cache, for all sequences together; `None` for the model's own context, at most 4096.
    pub n_ctx: Option<usize>,
    /// Most tokens of one [`Context::decode`].
    pub n_batch: usize,
    /// Most tokens of one graph.
    pub n_ubatch: usize,
    /// Number of sequences.
    pub n_seq: usize,
    /// Most rows of logits of one graph; `None` for one for each sequence, at least 16. Perplexity is faster with
    /// `n_ubatch`, at the cost of memory.
    pub n_logits: Option<usize>,
    /// Types of cached keys and values.
    pub kv_types: [DType; 2],
    /// Attention as one operation. Without, it is done in several steps; values must be F32, F16 or BF16 then.
    pub flash: bool,
    /// Adapters of the model, each with the share in which it counts.
    pub adapters: Vec<ScaledAdapter>,
    /// Pipeline copies, see [`Options::copies`].
    pub copies: usize,
    /// Whether devices take over operations on weights in host memory, see [`Options::offload`].
    pub offload: bool,
    /// About operations that land on a slower device.
    pub fallback: Fallback,
    /// Stops decoding. A decode that was stopped leaves the cache as it was before.
    pub cancel: CancelToken,
}

impl Default for ContextOptions {
    fn default() -> Self {
        ContextOptions {
            n_ctx: None,
            n_batch: 2048,
            n_ubatch: 512,
            n_seq: 1,
            n_logits: None,
            kv_types: [DType::F16, DType::F16],
            flash: true,
            adapters: Vec::new(),
            copies: 1,
            offload: true,
            fallback: Fallback::default(),
            cancel: CancelToken::new(),
        }
    }
}

/// Numbers that follow from options and model.
pub(crate) struct Sizes {
    pub n_cells: usize,
    pub n_ubatch: usize,
    pub n_logits: usize,
}

impl ContextOptions {
    /// Fills in what is not said, and limits what cannot occur.
    pub(crate) fn sizes(&self, hparams: &Hyperparameters) -> Result<Sizes> {
        let n_cells = self
            .n_ctx
            .unwrap_or(hparams.n_ctx_train.min(DEFAULT_CONTEXT));
        for (name, value) in [
            ("n_ctx", n_cells),
            ("n_batch", self.n_batch),
            ("n_ubatch", self.n_ubatch),
            ("n_seq", self.n_seq),
            ("n_logits", self.n_logits.unwrap_or(1)),
        ] {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(Error::invalid(format!(
                    "{name} is {value}, must be 1 to 2147483647"
                )));
            }
        }
        let n_ubatch = self.n_ubatch.min(self.n_batch).min(n_cells);
        let n_logits = self.n_logits.unwrap_or(self.n_seq.max(16)).min(n_ubatch);
        Ok(Sizes {
            n_cells,
            n_ubatch,
            n_logits,
        })
    }

    /// How the scheduler of a context decides.
    pub(crate) fn scheduler(&self) -> Options {
        Options {
            copies: self.copies.max(1),
            offload: self.offload,
            fallback: self.fallback,
            // And one for moving keys. The graphs that are given up by the context are those whose plans go.
            cached_plans: GraphCache::SIZE + 1,
        }
    }
}

/// Bytes in one kind of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Name of the memory, such as `host`.
    pub memory: String,
    /// Weights of the model and its adapters, shared by all contexts; mapped files included.
    pub weights: usize,
    /// The KV cache.
    pub kv: usize,
    /// Intermediate results.
    pub compute: usize,
}

/// Values of a graph's inputs, in buffers that are reused.
#[derive(Debug, Default)]
struct Staging {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    cells: Vec<i64>,
    mask: Vec<f16>,
    outputs: Vec<i32>,
}

/// A model at work on some sequences.
///
/// After creation, all memory that is needed is there (but for moving keys, which takes a little when it happens). Decoding the same number of tokens again and again builds no graph,
/// makes no plan and allocates nothing.
pub struct Context {
    model: Arc<Model>,
    options: ContextOptions,
    n_logits: usize,
    cache: KvCache,
    scheduler: Scheduler,
    graphs: GraphCache,
    /// The graph that the scheduler has loaded.
    loaded: Option<GraphShape>,
    staging: Staging,
    logits: Vec<f32>,
    /// By token of the last batch: its row of logits.
    rows: Vec<Option<usize>>,
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
        let hparams = model.hparams();
        let Sizes {
            n_cells,
            n_ubatch,
            n_logits,
        } = options.sizes(hparams)?;
        adapter::check(&model, &options.adapters)?;
        let v_type = options.kv_types[1];
        if !options.flash && v_type.is_quantized() {
            return Err(Error::invalid(format!(
                "V cache of type {v_type} needs flash attention: enable it, or choose f16"
            )));
        }
        if n_cells > hparams.n_ctx_train {
            tracing::warn!(
                n_ctx = n_cells,
                n_ctx_train = hparams.n_ctx_train,
                "the context is longer than the model was trained for"
            );
        }
        let cache = KvCache::new(&model, n_cells, options.n_seq, options.kv_types)?;
        let devices = model.devices().iter().cloned().collect();
        let scheduler = Scheduler::new(devices, options.scheduler())?;
        let mut staging = Staging::default();
        let largest_mask = n_ubatch.checked_mul(n_cells);
        staging.mask = try_filled(f16::NEG_INFINITY, largest_mask, "the attention mask")?;
        let logits = try_filled(0.0, n_logits.checked_mul(hparams.n_vocab), "logits")?;
        let mut context = Context {
            n_logits,
            cache,
            scheduler,
            graphs: GraphCache::new(options.n_seq),
            loaded: None,
            staging,
            logits,
            rows: Vec::new(),
            options: ContextOptions {
                n_ubatch,
                ..options
            },
            model,
        };
        context.reserve_all()?;
        Ok(context)
    }

    /// Takes the memory for the largest graph and for single tokens.
    fn reserve_all(&mut self) -> Result<()> {
        self.reserve(self.options.n_ubatch, self.n_logits)?;
        self.reserve(1, 1)
    }

    fn reserve(&mut self, n_tokens: usize, n_outputs: usize) -> Result<()> {
        let built = self.build(GraphShape {
            n_tokens,
            n_kv: self.cache.cells.len(),
            n_outputs,
        })?;
        Ok(self.scheduler.reserve(&built.graph, &built.assignments)?)
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Has other adapters, or the same ones in other shares, change the model from the next token on. What is in the cache
    /// stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an adapter of another model or a share that is no number; if there is not enough memory.
    /// Then the adapters are those from before.
    pub fn set_adapters(&mut self, adapters: Vec<ScaledAdapter>) -> Result<()> {
        adapter::check(&self.model, &adapters)?;
        self.graphs.clear();
        self.loaded = None;
        let before = std::mem::replace(&mut self.options.adapters, adapters);
        self.reserve_all().inspect_err(|_| {
            self.options.adapters = before;
        })
    }

    /// The options, with `n_ubatch` limited to what can occur.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    /// Cells of the KV cache.
    pub fn n_ctx(&self) -> usize {
        self.cache.cells.len()
    }

    /// Which cells hold what.
    pub fn cells(&self) -> &Cells {
        &self.cache.cells
    }

    /// The scheduler, for its counters and plans.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The scheduler, to trace it.
    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// The plan for a micro-batch of `n_tokens` at the end of a full cache, without running it.
    ///
    /// # Errors
    /// If it cannot be placed.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan> {
        let built = self.build(GraphShape {
            n_tokens,
            n_kv: self.cache.cells.len(),
            n_outputs: n_tokens.min(1),
        })?;
        Ok(self.scheduler.plan(&built.graph, &built.assignments)?)
    }

    /// What memory is used for, by kind of memory.
    pub fn memory(&self) -> Vec<MemoryUse> {
        let mut report: Vec<MemoryUse> = Vec::new();
        let mut add = |name: &str, bytes: usize, field: fn(&mut MemoryUse) -> &mut usize| {
            if bytes == 0 {
                return;
            }
            let at = report.iter().position(|row| row.memory == name);
            let at = at.unwrap_or_else(|| {
                report.push(MemoryUse {
                    memory: name.to_owned(),
                    ..MemoryUse::default()
                });
                report.len() - 1
            });
            *field(&mut report[at]) += bytes;
        };
        for (name, bytes) in self.model.weights().bytes() {
            add(name, bytes, |row| &mut row.weights);
        }
        for ScaledAdapter { adapter, .. } in &self.options.adapters {
            for (name, bytes) in adapter.bytes() {
                add(name, bytes, |row| &mut row.weights);
            }
        }
        for (name, bytes) in self.cache.bytes() {
            add(name, bytes, |row| &mut row.kv);
        }
        for (name, bytes) in self.scheduler.buffer_sizes() {
            add(&name, bytes, |row| &mut row.compute);
        }
        report
    }

    /// Removes the positions `range` from `sequence`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn remove(&mut self, sequence: usize, range: impl RangeBounds<i32>) -> Result<()> {
        self.cache.cells.remove(sequence, range)
    }

    /// Lets sequence `to` share the positions `range` of `from`, instead of whatever it has there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn copy(&mut self, from: usize, to: usize, range: impl RangeBounds<i32>) -> Result<()> {
        self.cache.cells.copy(from, to, range)
    }

    /// Removes every sequence but this one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such sequence.
    pub fn keep(&mut self, sequence: usize) -> Result<()> {
        self.cache.cells.keep(sequence)
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
        self.cache.cells.shift(sequence, range, delta)
    }

    /// Forgets all sequences.
    ///
    /// # Errors
    /// If a device fails.
    pub fn clear(&mut self) -> Result<()> {
        self.scheduler.synchronize()?;
        self.rows.clear();
        self.cache.clear()
    }

    /// Decodes a batch: stores its tokens in the cache and computes the logits that are wanted.
    ///
    /// # Errors
    /// [`Error::ContextFull`]; [`Error::InvalidArgument`] for a batch that is empty, too long, or has tokens, sequences or
    /// positions that cannot be; when cancelled; or what a device says. The cache is then as it was before.
    pub fn decode(&mut self, batch: &Batch) -> Result<()> {
        self.rows.clear();
        self.check(batch)?;
        self.options.cancel.check()?;
        if self.cache.cells.has_shifts() {
            self.apply_shifts()?;
        }
        let free = self.cache.cells.free();
        if batch.len() > free {
            return Err(Error::ContextFull {
                tokens: batch.len(),
                size: self.n_ctx(),
                free,
            });
        }
        let result = self.decode_all(batch);
        match &result {
            Ok(()) => self.cache.cells.commit(),
            Err(_) => {
                self.cache.cells.rollback();
                self.rows.clear();
            }
        }
        result
    }

    /// The logits after token number `index` of the last batch, if they were wanted.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        let n_vocab = self.model.hparams().n_vocab;
        let row = (*self.rows.get(index)?)?;
        self.logits.get(row * n_vocab..(row + 1) * n_vocab)
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let (n_vocab, cells) = (self.model.hparams().n_vocab, &self.cache.cells);
        if batch.is_empty() {
            return Err(Error::invalid("the batch is empty"));
        }
        if batch.len() > self.options.n_batch {
            return Err(Error::invalid(format!(
                "the batch has {} tokens, n_batch is {}: split it",
                batch.len(),
                self.options.n_batch
            )));
        }
        for (i, token) in batch.tokens().iter().enumerate() {
            let wrong =
                |what: String| Err(Error::invalid(format!("token {i} of the batch: {what}")));
            if token.id as usize >= n_vocab {
                return wrong(format!("id {}, the vocabulary has {n_vocab}", token.id));
            }
            let sequences = batch.sequences(token);
            if sequences.is_empty() {
                return wrong("belongs to no sequence".to_owned());
            }
            for &sequence in sequences {
                let n = cells.n_sequences();
                if sequence as usize >= n {
                    return wrong(format!("sequence {sequence}, the context has {n} (n_seq)"));
                }
                let before = last_before(batch, i, sequence)
                    .or_else(|| cells.last_position(sequence as usize));
                let least = before.map_or(0, |last| last.saturating_add(1));
                if token.position < least {
                    return wrong(format!(
                        "position {} of sequence {sequence}, must be at least {least}: earlier positions are in the cache or the batch already",
                        token.position
                    ));
                }
            }
        }
        Ok(())
    }

    fn decode_all(&mut self, batch: &Batch) -> Result<()> {
        let tokens = batch.tokens();
        let n_vocab = self.model.hparams().n_vocab;
        let wanted = tokens.iter().filter(|token| token.wants_logits).count();
        let needed = wanted.checked_mul(n_vocab);
        try_resize(&mut self.logits, 0.0, needed, "logits")?;
        let mut rows = 0;
        let mut start = 0;
        while start < tokens.len() {
            self.options.cancel.check()?;
            let end = self.micro_batch_end(tokens, start);
            let part = &tokens[start..end];
            let first_row = rows;
            for token in part {
                self.rows.push(token.wants_logits.then_some(rows));
                rows += usize::from(token.wants_logits);
            }
            self.run_part(batch, part, first_row..rows, tokens.len() - end)?;
            start = end;
        }
        Ok(())
    }

    /// Where the micro-batch that begins at `start` ends: limited in tokens and in rows of logits.
    fn micro_batch_end(&self, tokens: &[BatchToken], start: usize) -> usize {
        let most = tokens.len().min(start + self.options.n_ubatch);
        let mut outputs = 0;
        let too_many = tokens[start..most].iter().position(|token| {
            outputs += usize::from(token.wants_logits);
            outputs > self.n_logits
        });
        too_many.map_or(most, |at| start + at)
    }

    fn run_part(
        &mut self,
        batch: &Batch,
        part: &[BatchToken],
        rows: std::ops::Range<usize>,
        n_to_come: usize,
    ) -> Result<()> {
        let staging = &mut self.staging;
        staging.tokens.clear();
        staging.positions.clear();
        staging.cells.clear();
        staging.outputs.clear();
        for (i, token) in part.iter().enumerate() {
            let cell = self
                .cache
                .cells
                .take(token.position, batch.sequences(token));
            let cell = cell.ok_or(Error::ContextFull {
                tokens: part.len(),
                size: self.cache.cells.len(),
                free: 0,
            })?;
            // Ids, cells and rows are limited to i32 at creation.
            staging.tokens.push(token.id as i32);
            staging.positions.push(token.position);
            staging.cells.push(cell as i64);
            if token.wants_logits {
                staging.outputs.push(i as i32);
            }
        }
        let cells = &self.cache.cells;
        // Consecutive runs overlap only if their graphs are the same: all micro-batches look as far as the last one.
        let n_to_come = if self.options.copies > 1 {
            n_to_come
        } else {
            0
        };
        let end = cells.end().saturating_add(n_to_come);
        let n_kv = padded(end, cells.len(), cells.n_sequences());
        staging.mask.resize(part.len() * n_kv, f16::NEG_INFINITY);
        for (token, row) in part.iter().zip(staging.mask.chunks_exact_mut(n_kv)) {
            let sequence = batch.sequences(token).first().copied().unwrap_or(0);
            self.cache.cells.visible(sequence, token.position, row);
        }

        let shape = GraphShape {
            n_tokens: part.len(),
            n_kv,
            n_outputs: rows.len(),
        };
        let inputs = self.load(shape)?;
        let (scheduler, staging) = (&mut self.scheduler, &self.staging);
        scheduler.write(inputs.tokens, 0, bytemuck::cast_slice(&staging.tokens))?;
        scheduler.write(
            inputs.positions,
            0,
            bytemuck::cast_slice(&staging.positions),
        )?;
        scheduler.write(inputs.cells, 0, bytemuck::cast_slice(&staging.cells))?;
        if let Some(mask) = inputs.mask {
            scheduler.write(mask, 0, bytemuck::cast_slice(&staging.mask))?;
        }
        if let Some(outputs) = inputs.outputs {
            scheduler.write(outputs, 0, bytemuck::cast_slice(&staging.outputs))?;
        }
        scheduler.run(&self.options.cancel)?;
        if let Some(logits) = inputs.logits {
            let n_vocab = self.model.hparams().n_vocab;
            let out = &mut self.logits[rows.start * n_vocab..rows.end * n_vocab];
            scheduler.read(logits, 0, bytemuck::cast_slice_mut(out))?;
        }
        Ok(())
    }

    /// Makes the graph of this shape the one that runs.
    fn load(&mut self, shape: GraphShape) -> Result<GraphInputs> {
        if self.graphs.get(shape).is_none() {
            let built = self.build(shape)?;
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
        Ok(built.inputs)
    }

    fn build(&self, shape: GraphShape) -> Result<Built> {
        let model = &self.model;
        let layers = &self.cache.layers;
        let mut blocks = Blocks::new(
            model.hparams(),
            model.weights(),
            layers,
            &self.options.adapters,
            shape,
            self.options.flash,
        )?;
        model.architecture().build(&mut blocks)?;
        let (graph, inputs) = blocks.finish();
        let assignments = assign(&graph, model.devices(), model.weights(), layers, model.kv());
        Ok(Built {
            shape,
            graph,
            inputs,
            assignments,
        })
    }

    /// Rotates the keys of cells whose positions moved, some at a time. Between two runs it can be cancelled; within one
    /// not, because keys must not be rotated in some layers only.
    fn apply_shifts(&mut self) -> Result<()> {
        let count = self.options.n_ubatch;
        let hparams = self.model.hparams();
        let divisors = self.model.weights().get("rope_freqs.weight");
        let step = self.cache.shift_step(hparams, divisors, count)?;
        self.loaded = None;
        self.scheduler.load(&step.graph)?;
        let never = CancelToken::new();
        while self.cache.cells.has_shifts() {
            self.options.cancel.check()?;
            let pending = self.cache.cells.pending_shifts(count);
            // The last one repeats: it is read before anything is written, so that it comes out the same every time.
            let padded = |i: usize| pending[i.min(pending.len() - 1)];
            let read: Vec<i32> = (0..count).map(|i| padded(i).0 as i32).collect();
            let write: Vec<i64> = (0..count).map(|i| padded(i).0 as i64).collect();
            let distances: Vec<i32> = (0..count).map(|i| padded(i).1).collect();
            let scheduler = &mut self.scheduler;
            scheduler.write(step.read, 0, bytemuck::cast_slice(&read))?;
            scheduler.write(step.write, 0, bytemuck::cast_slice(&write))?;
            scheduler.write(step.distances, 0, bytemuck::cast_slice(&distances))?;
            let result = scheduler.run(&never).and_then(|()| scheduler.synchronize());
            if let Err(error) = result {
                // Nobody knows which layers were rotated.
                self.cache.clear()?;
                tracing::error!(%error, "moving cached keys failed; the cache was cleared");
                return Err(error.into());
            }
            self.cache.cells.shifted(&pending);
        }
        Ok(())
    }
}

/// The last position of `sequence` among the tokens of `batch` before number `index`. Batches are usually
/// consecutive, so the nearest token is looked at first.
fn last_before(batch: &Batch, index: usize, sequence: u32) -> Option<i32> {
    let before = batch.tokens()[..index].iter().rev();
    before
        .filter(|token| batch.sequences(token).contains(&sequence))
        .map(|token| token.position)
        .next()
}

/// How many cells attention looks at if `end` are in use: in steps, so that graphs stay the same for many tokens. Several
/// sequences take as many cells at a time.
fn padded(end: usize, n_cells: usize, n_sequences: usize) -> usize {
    let step = if n_cells <= 512 {
        (32 * n_sequences).min(256)
    } else {
        256
    };
    end.next_multiple_of(step).min(n_cells)
}

#[cfg(test)]
mod tests {
    use super::padded;

    #[test]
    fn attention_looks_at_more_cells_in_steps() {
        assert_eq!((padded(1, 256, 1), padded(33, 256, 1)), (32, 64));
        assert_eq!((padded(8, 512, 8), padded(257, 512, 8)), (256, 512));
        assert_eq!((padded(8, 512, 2), padded(65, 512, 2)), (64, 128));
        assert_eq!((padded(300, 310, 1), padded(1, 4096, 1)), (310, 256));
    }
}
