//! What all requests share: the model, its template, the engine.

use crate::embedder::Embedder;
use crate::error::{ApiError, Result};
use crate::latency::Latencies;
use crate::options::ServeOptions;
use crate::turns::Turns;
use samite_chat::{ChatTemplate, Guard};
use samite_core::DeviceKind;
use samite_grammar::GrammarVocabulary;
use samite_llm::{Model, ScaledAdapter};
use samite_requests::{Handle, Totals};
use samite_text::Tokenizer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A server's state.
pub struct App {
    pub(crate) options: ServeOptions,
    pub(crate) model: Arc<Model>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// What writes; a model of embeddings has none.
    pub(crate) handle: Option<Handle>,
    pub(crate) embedder: Option<Embedder>,
    pub(crate) template: ChatTemplate,
    words: [Words; 2],
    vocabulary: OnceLock<Result<GrammarVocabulary, String>>,
    /// The shares of the adapters that requests without own wishes get.
    shares: Mutex<Vec<f32>>,
    /// Settings of requests that have a slot, by tag.
    settings: Mutex<BTreeMap<u64, Weak<Value>>>,
    /// The engine's sums when its metrics were asked for last.
    scraped: Mutex<Totals>,
    next_tag: AtomicU64,
    pub(crate) latencies: Arc<Latencies>,
    /// Grammars are compiled for two requests at a time.
    pub(crate) compiling: Arc<Turns>,
    /// Turns of requests for embeddings, and of their batches.
    pub(crate) embedding: Arc<Turns>,
    pub(crate) embedding_batch: Arc<Turns>,
    /// Seconds since 1970.
    pub(crate) started: u64,
}

/// What a template's words mean for a vocabulary, for conversations without and with tools.
struct Words {
    guard: Guard,
    shown: Vec<u32>,
}

/// Locks, also after a panic of another thread.
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
    /// A server of `model`. Without a `handle` it writes nothing, without an `embedder` it computes no embeddings.
    ///
    /// # Errors
    /// If the model has no vocabulary, or its chat template, or the one that the options name, cannot be used.
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
            template,
            words,
            vocabulary: OnceLock::new(),
            settings: Mutex::default(),
            scraped: Mutex::default(),
            next_tag: AtomicU64::new(1),
            latencies: Arc::default(),
            compiling: Turns::new("grammars", 2, 16),
            embedding: Turns::new("embeddings", 8, 1024),
            embedding_batch: Turns::new("embeddings", 1, 1024),
            started: crate::chance::seconds(),
            options,
        })
    }

    /// How it is set up.
    pub fn options(&self) -> &ServeOptions {
        &self.options
    }

    pub(crate) fn guard(&self, has_tools: bool) -> &Guard {
        &self.words[usize::from(has_tools)].guard
    }

    pub(crate) fn shown(&self, has_tools: bool) -> &[u32] {
        &self.words[usize::from(has_tools)].shown
    }

    /// The engine.
    pub(crate) fn handle(&self) -> Result<&Handle> {
        self.handle.as_ref().ok_or_else(|| {
            ApiError::not_supported(
                "this server computes embeddings only: start it without --embedding to have it write text",
            )
        })
    }

    /// The vocabulary as grammars need it; made when the first one comes.
    pub(crate) fn vocabulary(&self) -> Result<&GrammarVocabulary> {
        let made = self.vocabulary.get_or_init(|| {
            GrammarVocabulary::new(&self.tokenizer).map_err(|error| error.to_string())
        });
        made.as_ref()
            .map_err(|error| ApiError::new(500, error.clone()))
    }

    /// Returns the bytes of memory of the host that are free, as far as a device says.
    pub fn free_memory(&self) -> u64 {
        let devices = self.model.devices().iter();
        let hosts = devices.filter(|device| device.kind() == DeviceKind::Cpu);
        let free = hosts.filter_map(|device| device.memory().free).max();
        free.map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// The model's id.
    pub fn model_id(&self) -> String {
        self.options.model_id(&self.model)
    }

    /// The adapters in these shares, and what changes the model in any case.
    pub(crate) fn adapters(&self, shares: &[f32]) -> Vec<ScaledAdapter> {
        let adapters = self.options.adapters.iter().zip(shares);
        let used = adapters.filter(|(_, share)| **share != 0.0);
        let used = used.map(|((adapter, _), share)| ScaledAdapter {
            adapter: Arc::clone(adapter),
            share: *share,
        });
        used.chain(self.options.control.iter().cloned()).collect()
    }

    /// What an adapter is called as a model: as its file, without `.gguf`.
    pub(crate) fn adapter_name(&self, number: usize) -> Option<&str> {
        let (adapter, _) = self.options.adapters.get(number)?;
        adapter.path().file_stem()?.to_str()
    }

    /// The number of the adapter that is named in the place of the model.
    pub(crate) fn adapter_named(&self, name: &str) -> Option<usize> {
        if name == self.model_id() {
            return None;
        }
        (0..self.options.adapters.len()).find(|&number| self.adapter_name(number) == Some(name))
    }

    /// The shares that requests without own wishes get.
    pub(crate) fn shares(&self) -> Vec<f32> {
        lock(&self.shares).clone()
    }

    pub(crate) fn set_shares(&self, shares: Vec<f32>) {
        *lock(&self.shares) = shares;
    }

    /// A number that a request is known by, with its settings, as long as somebody has them.
    pub(crate) fn tag(&self, settings: &Arc<Value>) -> u64 {
        let tag = self.next_tag.fetch_add(1, Ordering::Relaxed);
        let mut known = lock(&self.settings);
        known.insert(tag, Arc::downgrade(settings));
        // Now and then, those of requests that are gone.
        if tag.is_multiple_of(64) {
            known.retain(|_, settings| settings.strong_count() > 0);
        }
        tag
    }

    /// The settings of a request, without what is long, if it is not gone.
    pub(crate) fn settings(&self, tag: u64) -> Option<Value> {
        const MOST_BYTES: usize = 1 << 16;
        let settings = lock(&self.settings).get(&tag)?.upgrade()?;
        let mut settings = Value::clone(&settings);
        if settings.to_string().len() > MOST_BYTES {
            for name in ["grammar", "logit_bias", "stop", "dry_sequence_breakers"] {
                settings[name] = Value::Null;
            }
        }
        Some(settings)
    }

    /// The sums of the last time, instead of which these are remembered.
    pub(crate) fn last_scrape(&self, totals: Totals) -> Totals {
        std::mem::replace(&mut *lock(&self.scraped), totals)
    }

    /// The text of tokens, with the names of control tokens.
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

    /// Whether a text is longer than any prompt can be.
    pub(crate) fn check_length(&self, field: &str, text: &str) -> Result<()> {
        let context = self
            .handle
            .as_ref()
            .map_or(1 << 20, |handle| handle.limits().context);
        // No token stands for so many bytes on average.
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
