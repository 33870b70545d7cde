//! State that all requests of a model share: the model, its template, the engine.

use crate::compiled_grammars::CompiledGrammars;
use crate::embedder::Embedder;
use crate::error::{ApiError, Result};
use crate::latency::Latencies;
use crate::options::ServeOptions;
use crate::reasoning_budget::ReasoningControls;
use crate::recent_items::RecentItems;
use crate::turns::{Turns, beside_engine};
use samite_chat::{ChatTemplate, Guard};
use samite_core::DeviceKind;
use samite_grammar::GrammarVocabulary;
use samite_llm::{Model, ScaledAdapter};
use samite_requests::{Handle, Totals};
use samite_text::Tokenizer;
use samite_vision::SharedEncoder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A served model.
pub struct App {
    pub(crate) options: ServeOptions,
    pub(crate) model: Arc<Model>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Engine that generates text. A model of embeddings has none.
    pub(crate) handle: Option<Handle>,
    pub(crate) embedder: Option<Embedder>,
    /// Encoder of images, if the model sees.
    pub(crate) encoder: Option<SharedEncoder>,
    pub(crate) template: ChatTemplate,
    words: [Words; 2],
    vocabulary: OnceLock<Result<GrammarVocabulary, String>>,
    /// Default scales of the adapters.
    shares: Mutex<Vec<f32>>,
    /// Settings of requests that have a slot, by tag.
    settings: Mutex<BTreeMap<u64, Weak<Value>>>,
    /// Totals of the engine at the last scrape of its metrics.
    scraped: Mutex<Totals>,
    next_tag: AtomicU64,
    pub(crate) latencies: Arc<Latencies>,
    /// Turns for compiling grammars: two requests at a time.
    pub(crate) compiling: Arc<Turns>,
    pub(crate) compiled_grammars: CompiledGrammars,
    /// Turns for fetching images from URLs.
    pub(crate) fetching: Arc<Turns>,
    /// Turns for decoding images.
    pub(crate) decoding: Arc<Turns>,
    /// Turns of requests for embeddings, and of their batches.
    pub(crate) embedding: Arc<Turns>,
    pub(crate) embedding_batch: Arc<Turns>,
    pub(crate) recent_items: Arc<RecentItems>,
    pub(crate) reasoning_controls: ReasoningControls,
    /// Identifies this server and its cache among others.
    pub(crate) instance_id: String,
    /// Seconds since 1970.
    pub(crate) started: u64,
}

/// Meaning of a template's control words for a vocabulary, for conversations without and with
/// tools.
struct Words {
    guard: Guard,
    shown: Vec<u32>,
}

/// Locks a mutex, even if another thread panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl App {
    /// Creates a served model. Without a `handle` it cannot generate text, and without an
    /// `embedder` it cannot compute embeddings.
    ///
    /// # Errors
    /// Returns an error if the model has no vocabulary, or if its chat template or the one in the
    /// options is invalid.
    pub fn new(
        options: ServeOptions,
        model: Arc<Model>,
        handle: Option<Handle>,
        embedder: Option<Embedder>,
    ) -> Result<Self, String> {
        let tokenizer = Arc::clone(model.tokenizer().map_err(|error| error.to_string())?);
        let template = ChatTemplate::choose(&model.chat_sources(), options.template.as_deref())
            .map_err(|error| error.to_string())?;
        for warning in template.warnings() {
            tracing::warn!("{warning}");
        }
        let words = [false, true].map(|has_tools| Words {
            guard: Guard::for_template(&tokenizer, template.source(has_tools)),
            shown: template.format(has_tools).shown_tokens(&tokenizer),
        });
        Ok(App {
            shares: Mutex::new(options.adapters.iter().map(|(_, share)| *share).collect()),
            model,
            tokenizer,
            handle,
            embedder,
            encoder: None,
            template,
            words,
            vocabulary: OnceLock::new(),
            settings: Mutex::default(),
            scraped: Mutex::default(),
            next_tag: AtomicU64::new(1),
            latencies: Arc::default(),
            compiled_grammars: CompiledGrammars::default(),
            compiling: Turns::new("grammars", 2, 16),
            fetching: Turns::new("images", 8, 32),
            decoding: Turns::new("images", beside_engine(), 32),
            embedding: Turns::new("embeddings", 8, 1024),
            embedding_batch: Turns::new("embeddings", 1, 1024),
            recent_items: Arc::default(),
            reasoning_controls: ReasoningControls::default(),
            instance_id: crate::ids::id("samite-"),
            started: crate::ids::seconds(),
            options,
        })
    }

    /// Adds an encoder of images, which must be [for the model](SharedEncoder::check). The engine's
    /// context must have [room for images](samite_llm::ContextOptions::images).
    pub fn with_encoder(mut self, encoder: SharedEncoder) -> Self {
        self.encoder = Some(encoder);
        self
    }

    /// Returns the options.
    pub fn options(&self) -> &ServeOptions {
        &self.options
    }

    pub(crate) fn guard(&self, has_tools: bool) -> &Guard {
        &self.words[usize::from(has_tools)].guard
    }

    pub(crate) fn shown(&self, has_tools: bool) -> &[u32] {
        &self.words[usize::from(has_tools)].shown
    }

    /// Returns the engine.
    pub(crate) fn handle(&self) -> Result<&Handle> {
        self.handle.as_ref().ok_or_else(|| {
            ApiError::not_supported(
                "this server computes embeddings only: start it without --embedding to have it write text",
            )
        })
    }

    /// Returns the vocabulary for grammars. The first grammar builds it.
    pub(crate) fn vocabulary(&self) -> Result<&GrammarVocabulary> {
        let made = self.vocabulary.get_or_init(|| {
            GrammarVocabulary::new(&self.tokenizer).map_err(|error| error.to_string())
        });
        made.as_ref()
            .map_err(|error| ApiError::new(500, error.clone()))
    }

    /// Returns the bytes of free host memory, as reported by a device.
    pub fn free_memory(&self) -> u64 {
        let devices = self.model.devices().iter();
        let hosts = devices.filter(|device| device.kind() == DeviceKind::Cpu);
        let free = hosts.filter_map(|device| device.memory().free).max();
        free.map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// Returns the model's ID.
    pub fn model_id(&self) -> String {
        self.options.model_id(&self.model)
    }

    /// Returns the adapters with these scales, and the control vectors, which always apply.
    pub(crate) fn adapters(&self, shares: &[f32]) -> Vec<ScaledAdapter> {
        let adapters = self.options.adapters.iter().zip(shares);
        let used = adapters.filter(|(_, share)| **share != 0.0);
        let used = used.map(|((adapter, _), share)| ScaledAdapter {
            adapter: Arc::clone(adapter),
            share: *share,
        });
        used.chain(self.options.control.iter().cloned()).collect()
    }

    /// Returns the model name of an adapter: its file name without `.gguf`.
    pub(crate) fn adapter_name(&self, number: usize) -> Option<&str> {
        let (adapter, _) = self.options.adapters.get(number)?;
        adapter.path().file_stem()?.to_str()
    }

    /// Returns the index of the adapter that is called `name`, for requests that name it instead of
    /// the model.
    pub(crate) fn adapter_named(&self, name: &str) -> Option<usize> {
        if name == self.model_id() {
            return None;
        }
        (0..self.options.adapters.len()).find(|&number| self.adapter_name(number) == Some(name))
    }

    /// Returns the default scales of the adapters.
    pub(crate) fn shares(&self) -> Vec<f32> {
        lock(&self.shares).clone()
    }

    pub(crate) fn set_shares(&self, shares: Vec<f32>) {
        *lock(&self.shares) = shares;
    }

    /// Returns a tag under which the settings of a request can be found as long as they exist.
    pub(crate) fn tag(&self, settings: &Arc<Value>) -> u64 {
        let tag = self.next_tag.fetch_add(1, Ordering::Relaxed);
        let mut known = lock(&self.settings);
        known.insert(tag, Arc::downgrade(settings));
        // Drop the settings of finished requests now and then.
        if tag.is_multiple_of(64) {
            known.retain(|_, settings| settings.strong_count() > 0);
        }
        tag
    }

    /// Returns the settings of a running request, without long values.
    pub(crate) fn settings(&self, tag: u64) -> Option<Value> {
        const MAX_BYTES: usize = 1 << 16;
        let settings = lock(&self.settings).get(&tag)?.upgrade()?;
        let mut settings = Value::clone(&settings);
        if settings.to_string().len() > MAX_BYTES {
            for name in ["grammar", "logit_bias", "stop", "dry_sequence_breakers"] {
                settings[name] = Value::Null;
            }
        }
        Some(settings)
    }

    /// Stores the totals of this scrape and returns those of the last one.
    pub(crate) fn last_scrape(&self, totals: Totals) -> Totals {
        std::mem::replace(&mut *lock(&self.scraped), totals)
    }

    /// Returns the text of tokens, including the names of control tokens.
    pub(crate) fn text_of(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            bytes.extend_from_slice(
                self.tokenizer
                    .token_to_piece(token, true)
                    .unwrap_or_default(),
            );
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Fails if a text is longer than any prompt can be.
    pub(crate) fn check_length(&self, field: &str, text: &str) -> Result<()> {
        let context = self
            .handle
            .as_ref()
            .map_or(1 << 20, |handle| handle.limits().context);
        // No token averages as many bytes.
        let most = context.saturating_mul(256).max(1 << 20);
        if text.len() > most {
            return Err(ApiError::field(
                field,
                format!(
                    "{} bytes; {most} are more than any prompt here can have",
                    text.len()
                ),
            ));
        }
        Ok(())
    }
}
