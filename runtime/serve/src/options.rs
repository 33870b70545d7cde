//! Options of a server.

use crate::images::ImageFetcher;
use crate::kv_transfer::KvTransferOptions;
use samite_chat::ReasoningFormat;
use samite_llm::{Adapter, Model, ScaledAdapter};
use samite_text::SamplerParams;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;

/// Certificate files in PEM format.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate chain, with the server's certificate first.
    pub certificate: PathBuf,
    /// Private key of the server's certificate.
    pub key: PathBuf,
}

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Addresses to listen on.
    pub hosts: Vec<String>,
    /// Port; 0 for a free one.
    pub port: u16,
    /// API keys. Each request must have one; without any, requests need no key. No key sees
    /// requests of another.
    pub api_keys: Vec<String>,
    /// Keys that may also load and unload models, change shared settings, and see all slots.
    /// Without any, a single API key may do so.
    pub admin_keys: Vec<String>,
    /// True if requests of different keys share cached prefixes.
    pub shares_prefixes: bool,
    /// Names of the server in requests, besides [`hosts`](Self::hosts) and private names. If keys
    /// are set, any name is allowed.
    pub allowed_hosts: Vec<String>,
    /// Maximum bytes that requests hold together, besides the KV cache. One of them holds at most
    /// half.
    pub request_memory: usize,
    /// Names of the model; the first one is its ID. The default is the file name.
    pub aliases: Vec<String>,
    /// Descriptions of the model in `/v1/models`.
    pub tags: Vec<String>,
    /// Origins whose pages may read responses: `*` for all, `localhost` for those of this machine.
    pub cors_origins: Vec<String>,
    /// True if `GET /slots` is enabled.
    pub slots: bool,
    /// True if `GET /metrics` is enabled.
    pub metrics: bool,
    /// Where the events of the KV cache are published, if they are.
    pub kv_events: Option<KvEventSource>,
    /// Transfers of KV caches between servers, if they are enabled.
    pub kv_transfer: Option<KvTransferOptions>,
    /// Prefix before the colon in names of metrics that llama.cpp does not have, such as `samite`
    /// or `vllm`.
    pub metrics_names: String,
    /// True if `POST /props` is enabled.
    pub props: bool,
    /// True if the chat page is enabled.
    pub page: bool,
    /// True if the model is the program's built-in one, which only tells stories.
    pub is_embedded: bool,
    /// Response of `GET /plan`: see [`plan`](crate::plan).
    pub plan: Value,
    /// Folder of saved slots. Without one, slots cannot be saved.
    pub slot_save_path: Option<PathBuf>,
    /// Default sampling parameters.
    pub sampling: SamplerParams,
    /// Seed of all requests, unless each request gets its own.
    pub seed: Option<u64>,
    /// Default maximum number of tokens to generate.
    pub max_tokens: Option<usize>,
    /// Number of tokens to keep when the context is full and shifts; `None` to end the text there.
    pub shift: Option<usize>,
    /// True if requests reuse cached prefixes.
    pub cache_prompt: bool,
    /// Treatment of reasoning in responses.
    pub reasoning: ReasoningFormat,
    /// True if the model must reason, false if it must not; `None` for the template's default.
    pub thinking: Option<bool>,
    /// Maximum reasoning tokens of an answer; `None` for no limit.
    pub reasoning_budget: Option<usize>,
    /// Chat template: a name or a text; `None` for the model's own.
    pub template: Option<String>,
    /// Extra variables for the template.
    pub template_kwargs: Map<String, Value>,
    /// True if a final message of the assistant is a prefill: the answer continues it.
    pub prefill: bool,
    /// Adapters that requests can use, with their default scales.
    pub adapters: Vec<(Arc<Adapter>, f32)>,
    /// Control vectors. They always apply.
    pub control: Vec<ScaledAdapter>,
    /// True if responses have debug information.
    pub verbose: bool,
    /// Certificate files for TLS.
    pub tls: Option<TlsFiles>,
    /// Prefix of all paths: starts with `/` and does not end with one.
    pub prefix: String,
    /// Maximum bytes of a body.
    pub body_limit: usize,
    /// Seconds for the head of a request to arrive after its first byte. Later, the connection is
    /// closed.
    pub head_seconds: u64,
    /// Maximum number of connections; `None` for as many as the limit of open files allows, up to
    /// 4096.
    pub connections: Option<usize>,
    /// Seconds after which the server closes a connection whose client does not read.
    pub write_seconds: u64,
    /// Seconds between comments in a quiet stream; 0 for none.
    pub ping_seconds: u64,
    /// True if `/v1/embeddings` is enabled.
    pub embeddings: bool,
    /// True if `/v1/rerank` is enabled.
    pub reranking: bool,
    /// Seconds that requests in flight may take once the server is stopping.
    pub drain_seconds: u64,
    /// Fetches images from the URLs of requests, if that is allowed.
    pub image_fetcher: Option<ImageFetcher>,
    /// Path of the Vertex AI prediction API, if it is enabled.
    pub predict_path: Option<String>,
}

/// Where a server publishes the events of its KV cache over ZeroMQ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSource {
    /// Address for subscribers, such as `tcp://0.0.0.0:5557`.
    pub endpoint: String,
    /// Address for requests to replay missed messages.
    pub replay: Option<String>,
    /// First part of each message.
    pub topic: String,
    /// Number of tokens in a block.
    pub block_size: usize,
}

impl ServeOptions {
    /// Returns the model's ID: its first alias, or its file name.
    pub fn model_id(&self, model: &Model) -> String {
        let file = model.path().file_name();
        let file = file.map(|name| name.to_string_lossy().into_owned());
        let alias = self.aliases.first().cloned();
        alias.or(file).unwrap_or_else(|| model.name().to_owned())
    }

    /// Returns the names of a server's only model: its aliases, or else `id`.
    pub fn names(&self, id: String) -> Vec<String> {
        if self.aliases.is_empty() {
            vec![id]
        } else {
            self.aliases.clone()
        }
    }
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            hosts: vec!["127.0.0.1".to_owned()],
            port: 8080,
            api_keys: Vec::new(),
            admin_keys: Vec::new(),
            shares_prefixes: false,
            allowed_hosts: Vec::new(),
            request_memory: 1 << 30,
            aliases: Vec::new(),
            tags: Vec::new(),
            cors_origins: Vec::new(),
            slots: true,
            metrics: false,
            kv_events: None,
            kv_transfer: None,
            metrics_names: "samite".to_owned(),
            props: false,
            page: true,
            is_embedded: false,
            plan: Value::Null,
            slot_save_path: None,
            sampling: SamplerParams::default(),
            seed: None,
            max_tokens: None,
            shift: None,
            cache_prompt: true,
            reasoning: ReasoningFormat::default(),
            thinking: None,
            reasoning_budget: None,
            template: None,
            template_kwargs: Map::new(),
            prefill: true,
            adapters: Vec::new(),
            control: Vec::new(),
            verbose: false,
            tls: None,
            prefix: String::new(),
            body_limit: 64 << 20,
            head_seconds: 10,
            connections: None,
            write_seconds: 60,
            ping_seconds: 15,
            embeddings: false,
            reranking: false,
            drain_seconds: 30,
            image_fetcher: None,
            predict_path: None,
        }
    }
}
