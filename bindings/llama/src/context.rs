//! Contexts: creation, queries and changes. Each has a lock, which serializes threads that share
//! it.

use crate::abort::Abort;
use crate::entry::{Failure, Outcome, alias, export};
use crate::handles::{Handles, fresh};
use crate::layout::{AbortCallback, ContextParams, Flag, MAX_SEQUENCES, Opaque, Sampler};
use crate::log::{self, Level};
use crate::model::{LlamaModel, model};
use crate::names::now_us;
use crate::perf::Times;
use crate::results::Results;
use crate::watch::watcher;
use samite_core::DType;
use samite_llm::arch::Output;
use samite_llm::arch::spec::Pooling;
use samite_llm::{Context as Engine, ContextOptions, ScaledAdapter};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A caller's context. Its memory has the same handle.
pub struct Context {
    /// Model of the context.
    pub model: Arc<LlamaModel>,
    /// Number of cells in its cache.
    pub n_ctx: u32,
    /// Maximum number of tokens in one sequence.
    pub n_ctx_seq: u32,
    /// Maximum number of tokens in a batch.
    pub n_batch: u32,
    n_ubatch: u32,
    n_seq_max: u32,
    pooling: Option<Pooling>,
    abort: Arc<Abort>,
    tokens: OnceLock<Vec<i32>>,
    state: Mutex<ContextState>,
}

/// Mutable state of a context.
pub struct ContextState {
    engine: Option<Engine>,
    /// True if embeddings are computed.
    pub embeddings: bool,
    threads: [i32; 2],
    /// Results of the last batch.
    pub results: Results,
    /// Timings.
    pub times: Times,
    adapters: Vec<ScaledAdapter>,
    directions: Option<ScaledAdapter>,
    /// Last requested state and its sequence, until something changes.
    pub saved: Option<(Option<i32>, Vec<u8>)>,
}

/// All contexts.
pub static CONTEXTS: Handles<Context> = Handles::new("context");

/// Returns the context of a handle.
///
/// # Errors
/// If the handle is not a context.
pub fn context<P>(handle: *const P) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle)
}

impl Context {
    /// Locks the context.
    pub fn lock(&self) -> MutexGuard<'_, ContextState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the width of embeddings that replace tokens, or 0 for a vocabulary-only model.
    pub fn width(&self) -> usize {
        self.model.spec().map_or(0, |spec| spec.n_embd)
    }

    /// Returns all token ids in order.
    pub fn all_tokens(&self) -> &[i32] {
        self.tokens.get_or_init(|| {
            let count = self.model.spec().map_or(0, |spec| spec.n_vocab);
            (0..i32::try_from(count).unwrap_or(0)).collect()
        })
    }

    /// Returns the output to compute for a token.
    pub fn output(&self, embeddings: bool) -> Output {
        let output = match (embeddings, self.pooling) {
            (false, _) => Output::Logits,
            (true, None) => Output::Both,
            (true, Some(pooling)) => Output::Embeddings(pooling),
        };
        match self.model.spec() {
            Some(spec) => output.resolve(spec),
            None => output,
        }
    }

    /// Clears an earlier abort before computation.
    pub fn begin(&self) {
        self.abort.begin();
    }

    /// Replaces the adapters of the model.
    ///
    /// # Errors
    /// See [`Engine::set_adapters`].
    pub fn set_adapters(&self, adapters: Vec<ScaledAdapter>) -> Outcome<()> {
        let mut state = self.lock();
        let directions = state.directions.clone();
        state.adapt(adapters, directions)
    }

    /// Replaces the control vector that is added to the output of layers.
    ///
    /// # Errors
    /// See [`Engine::set_adapters`].
    pub fn set_directions(&self, directions: Option<ScaledAdapter>) -> Outcome<()> {
        let mut state = self.lock();
        let adapters = state.adapters.clone();
        state.adapt(adapters, directions)
    }
}

impl ContextState {
    /// Returns the engine's context.
    ///
    /// # Errors
    /// If the model was loaded with its vocabulary only or for planning.
    pub fn engine(&mut self) -> Outcome<&mut Engine> {
        self.engine.as_mut().ok_or_else(|| {
            Failure::new("the context computes nothing: its model was loaded without weights")
        })
    }

    fn adapt(
        &mut self,
        adapters: Vec<ScaledAdapter>,
        directions: Option<ScaledAdapter>,
    ) -> Outcome<()> {
        let same = |a: &ScaledAdapter, b: &ScaledAdapter| {
            Arc::ptr_eq(&a.adapter, &b.adapter) && a.share == b.share
        };
        let all: Vec<ScaledAdapter> = adapters.iter().chain(&directions).cloned().collect();
        let before: Vec<&ScaledAdapter> = self.adapters.iter().chain(&self.directions).collect();
        let is_same = before.len() == all.len() && before.iter().zip(&all).all(|(a, b)| same(a, b));
        if !is_same {
            self.engine()?.set_adapters(all)?;
        }
        self.saved = None;
        self.adapters = adapters;
        self.directions = directions;
        Ok(())
    }
}

fn pooling_of(number: c_int, model: &LlamaModel) -> Outcome<Option<Pooling>> {
    let none = |pooling: Pooling| (pooling != Pooling::None).then_some(pooling);
    match number {
        -1 => Ok(model.spec().and_then(|spec| spec.pooling).and_then(none)),
        number => {
            let known = usize::try_from(number)
                .ok()
                .and_then(|number| Pooling::ALL.get(number));
            let known = known.ok_or_else(|| {
                Failure::new(format!("pooling_type is {number}, must be -1 to 4"))
            })?;
            Ok(none(*known))
        }
    }
}

/// Returns the type with ggml's number.
pub fn dtype(name: &str, number: c_int) -> Outcome<DType> {
    let dtype = u32::try_from(number).ok().and_then(DType::from_id);
    dtype.ok_or_else(|| Failure::new(format!("{name} is {number}, which is no type")))
}

/// Rounds up to a multiple of 256.
fn padded(number: u32) -> Outcome<u32> {
    number
        .checked_next_multiple_of(256)
        .ok_or_else(|| Failure::new(format!("n_ctx is {number}, which is too large")))
}

/// Converts a thread count, where numbers below one mean one.
fn threads(number: i32) -> Option<usize> {
    Some(usize::try_from(number).unwrap_or(1).max(1))
}

/// Logs parameters that have no effect.
fn tell_of(params: &ContextParams, model: &LlamaModel) {
    let tell = |what: &str| log::line(Level::Warn, &format!("llama_init_from_model: {what}"));
    let layers = model.spec().into_iter().flat_map(|spec| &spec.layers);
    let mut rotations = layers.filter_map(|layer| layer.attention()?.rotation.as_ref());
    let own = rotations.next().map(|rotation| &rotation.rope);
    let is_other =
        |wanted: f32, own: Option<f32>| wanted != 0.0 && own.is_some_and(|own| own != wanted);
    // YaRN parameters only matter if YaRN is requested.
    let is_rope_changed = params.rope_scaling_type != -1
        || is_other(params.rope_freq_base, own.map(|rope| rope.freq_base))
        || is_other(params.rope_freq_scale, own.map(|rope| rope.freq_scale))
        || params.yarn_ext_factor > 0.0
        || params.yarn_orig_ctx != 0;
    if is_rope_changed {
        tell(
            "other rotations than the model's (rope_*, yarn_*) are not supported: the model's are used",
        );
    }
    if params.ctx_type != 0 {
        tell("contexts that predict further tokens (MTP) are not supported");
    }
    if params.n_samplers > 0 {
        tell("samplers on devices are not supported: they are applied on the host");
    }
}

/// Creates a context.
fn make(handle: *mut Opaque, params: &ContextParams) -> Outcome<*mut Opaque> {
    let model = model(handle)?;
    let n_seq_max = params.n_seq_max.max(1);
    if n_seq_max as usize > MAX_SEQUENCES {
        return Err(Failure::new(format!(
            "n_seq_max is {n_seq_max}, must be 1 to {MAX_SEQUENCES}"
        )));
    }
    tell_of(params, &model);
    if params.ctx_type != 0 {
        return Err(Failure::unsupported("a context of this type"));
    }
    let trained = model
        .number("context_length")
        .and_then(|number| u32::try_from(number).ok());
    let mut n_ctx = padded(match params.n_ctx {
        0 => trained.unwrap_or(512),
        n_ctx => n_ctx,
    })?;
    let mut n_ctx_seq = n_ctx;
    if !params.kv_unified.is_on() {
        n_ctx_seq = padded(n_ctx / n_seq_max)?.max(256);
        let all = n_ctx_seq.checked_mul(n_seq_max);
        n_ctx = all.ok_or_else(|| Failure::new("n_ctx is too large"))?;
    }
    let is_bidirectional = model.spec().is_some_and(|spec| spec.is_bidirectional());
    let n_batch = if is_bidirectional {
        params.n_batch
    } else {
        params.n_batch.min(n_ctx)
    };
    let n_batch = n_batch.max(1);
    let n_ubatch = match params.n_ubatch {
        0 => n_batch,
        n_ubatch => n_ubatch.min(n_batch),
    };
    let pooling = pooling_of(params.pooling_type, &model)?;
    let abort = Arc::new(Abort::new(
        params.abort_callback,
        params.abort_callback_data,
    ));
    let mut context = Context {
        n_ctx,
        n_ctx_seq,
        n_batch,
        n_ubatch,
        n_seq_max,
        pooling,
        abort,
        tokens: OnceLock::new(),
        state: Mutex::new(ContextState {
            engine: None,
            embeddings: params.embeddings.is_on(),
            threads: [params.n_threads, params.n_threads_batch],
            results: Results::default(),
            times: Times::new(now_us(), model.load_us),
            adapters: Vec::new(),
            directions: None,
            saved: None,
        }),
        model,
    };
    let engine = match &context.model.engine {
        Some(engine) if engine.weights().have_data() => Some(Arc::clone(engine)),
        _ => None,
    };
    if let Some(engine) = engine {
        let spec = engine.spec();
        let wants = params.attention_type;
        if wants == 1 && !spec.is_bidirectional() || wants == 0 && spec.is_bidirectional() {
            log::line(
                Level::Warn,
                "llama_init_from_model: attention_type is the model's own; another one is not supported",
            );
        }
        // With a unified cache, callers may use any sequence, and embedding users do.
        let is_free = params.kv_unified.is_on() && params.embeddings.is_on() && !spec.has_state();
        let options = ContextOptions {
            n_ctx: Some(n_ctx as usize),
            n_batch: n_batch as usize,
            n_ubatch: n_ubatch as usize,
            n_seq: if is_free {
                MAX_SEQUENCES
            } else {
                n_seq_max as usize
            },
            output: context.output(params.embeddings.is_on()),
            kv_types: [
                dtype("type_k", params.type_k)?,
                dtype("type_v", params.type_v)?,
            ],
            flash: params.flash_attn_type != 0,
            full_windows: params.swa_full.is_on(),
            threads: threads(params.n_threads),
            threads_batch: threads(params.n_threads_batch),
            offload: params.op_offload.is_on(),
            cancel: context.abort.token(),
            ..ContextOptions::default()
        };
        let mut made = Engine::new(engine, options)?;
        made.watch(watcher(params.cb_eval, params.cb_eval_user_data));
        let state = context
            .state
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        state.engine = Some(made);
    }
    Ok(CONTEXTS.insert(fresh(), context))
}

export! {
    /// Creates a context for a model.
    fn llama_init_from_model(handle: *mut Opaque, params: ContextParams) -> *mut Opaque,
        or std::ptr::null_mut(); {
        make(handle, &params)
    }

    /// Returns the default parameters.
    fn llama_context_default_params() -> ContextParams, or ContextParams::DEFAULT; {
        Ok(ContextParams::DEFAULT)
    }

    /// Frees a context. Calls that use it in other threads finish first.
    fn llama_free(handle: *mut Opaque), or (); {
        CONTEXTS.remove(handle).map(drop)
    }

    /// Returns the number of cache cells.
    fn llama_n_ctx(handle: *const Opaque) -> u32, or 0; {
        Ok(context(handle)?.n_ctx)
    }

    /// Returns the maximum number of tokens in one sequence.
    fn llama_n_ctx_seq(handle: *const Opaque) -> u32, or 0; {
        Ok(context(handle)?.n_ctx_seq)
    }

    /// Returns the maximum number of tokens in a batch.
    fn llama_n_batch(handle: *const Opaque) -> u32, or 0; {
        Ok(context(handle)?.n_batch)
    }

    /// Returns the maximum number of tokens in a micro-batch.
    fn llama_n_ubatch(handle: *const Opaque) -> u32, or 0; {
        Ok(context(handle)?.n_ubatch)
    }

    /// Returns the maximum number of sequences.
    fn llama_n_seq_max(handle: *const Opaque) -> u32, or 0; {
        Ok(context(handle)?.n_seq_max)
    }

    /// Returns how many earlier states are kept for a sequence: none.
    fn llama_n_rs_seq(handle: *const Opaque) -> u32, or 0; {
        context(handle).map(|_| 0)
    }

    /// Returns the model.
    fn llama_get_model(handle: *const Opaque) -> *const Opaque, or std::ptr::null(); {
        Ok(std::ptr::without_provenance(context(handle)?.model.handle))
    }

    /// Returns the memory.
    fn llama_get_memory(handle: *const Opaque) -> *mut Opaque, or std::ptr::null_mut(); {
        context(handle)?;
        Ok(handle.cast_mut())
    }

    /// Returns the pooling type.
    fn llama_pooling_type(handle: *const Opaque) -> c_int, or -1; {
        Ok(match context(handle)?.pooling {
            None | Some(Pooling::None) => 0,
            Some(pooling) => Pooling::ALL
                .iter()
                .position(|known| *known == pooling)
                .map_or(-1, |number| number as c_int),
        })
    }

    /// Sets the thread counts for a single token and for several.
    fn llama_set_n_threads(handle: *mut Opaque, n_threads: i32, n_threads_batch: i32), or (); {
        let context = context(handle)?;
        let mut state = context.lock();
        state.threads = [n_threads, n_threads_batch];
        if let Some(engine) = &mut state.engine {
            engine.set_threads(threads(n_threads), threads(n_threads_batch));
        }
        Ok(())
    }

    /// Returns the thread count for a single token.
    fn llama_n_threads(handle: *mut Opaque) -> i32, or 0; {
        Ok(context(handle)?.lock().threads[0])
    }

    /// Returns the thread count for several tokens.
    fn llama_n_threads_batch(handle: *mut Opaque) -> i32, or 0; {
        Ok(context(handle)?.lock().threads[1])
    }

    /// Enables or disables embeddings.
    fn llama_set_embeddings(handle: *mut Opaque, embeddings: Flag), or (); {
        context(handle)?.lock().embeddings = embeddings.is_on();
        Ok(())
    }

    /// Sets causal or bidirectional attention: only the model's own setting is supported.
    fn llama_set_causal_attn(handle: *mut Opaque, causal: Flag), or (); {
        let context = context(handle)?;
        let is_bidirectional = context.model.spec().is_some_and(|spec| spec.is_bidirectional());
        if causal.is_on() == is_bidirectional {
            Err(Failure::unsupported("another attention than the model's"))
        } else {
            Ok(())
        }
    }

    /// Returns whether attention is causal.
    fn llama_get_causal_attn(handle: *const Opaque) -> bool, or true; {
        Ok(!context(handle)?.model.spec().is_some_and(|spec| spec.is_bidirectional()))
    }

    /// Enables or disables warmup, which has no effect.
    fn llama_set_warmup(handle: *mut Opaque, _warmup: Flag), or (); {
        context(handle).map(drop)
    }

    /// Sets the abort callback.
    fn llama_set_abort_callback(handle: *mut Opaque, callback: AbortCallback, data: *mut c_void),
        or (); {
        context(handle)?.abort.set(callback, data);
        Ok(())
    }

    /// Waits for computation to finish. Calls are synchronous, so it only waits for other threads.
    fn llama_synchronize(handle: *mut Opaque), or (); {
        let context = context(handle)?;
        drop(context.lock());
        Ok(())
    }

    /// Attaches the caller's thread pools: ignored, because the library has its own threads.
    fn llama_attach_threadpool(handle: *mut Opaque, _pool: *mut c_void, _pool_batch: *mut c_void),
        or (); {
        context(handle).map(drop)
    }

    /// See the previous function.
    fn llama_detach_threadpool(handle: *mut Opaque), or (); {
        context(handle).map(drop)
    }

    /// Attaches a sampler to the device: not supported, so it must be applied on the host.
    fn llama_set_sampler(handle: *mut Opaque, _sequence: i32, sampler: *mut Sampler) -> bool,
        or false; {
        context(handle)?;
        if sampler.is_null() {
            Ok(false)
        } else {
            Err(Failure::unsupported("samplers on devices; apply it on the host"))
        }
    }
}

alias! {
    fn llama_new_context_with_model(handle: *mut Opaque,
        params: ContextParams) -> *mut Opaque = llama_init_from_model;
}
