//! How a server is set up.

use samite_chat::ReasoningFormat;
use samite_llm::{Adapter, Model, ScaledAdapter};
use samite_text::SamplerParams;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;

/// Files of a certificate, as PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate, and those that vouch for it.
    pub certificate: PathBuf,
    /// The key of the first one.
    pub key: PathBuf,
}

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Addresses to listen at.
    pub hosts: Vec<String>,
    /// The port; 0 for a free one.
    pub port: u16,
    /// Keys, one of which each request must have; without any, requests need no key. Of several keys,
    /// none sees requests of another one.
    pub api_keys: Vec<String>,
    /// Keys that may also load and unload models, change what all requests share, and see all
    /// slots. Without any, a single key may.
    pub admin_keys: Vec<String>,
    /// True if requests of different keys share cached prefixes.
    pub shares_prefixes: bool,
    /// Names of the server in requests, besides [`hosts`](Self::hosts) and private names. With keys,
    /// any name will do.
    pub allowed_hosts: Vec<String>,
    /// Most bytes that requests hold together, beside the KV cache. One of them holds at most half.
    pub request_memory: usize,
    /// Names of the model; the first one is its id. Without any, that of its file.
    pub aliases: Vec<String>,
    /// Words about the model, which `/v1/models` has.
    pub tags: Vec<String>,
    /// Origins whose pages may read answers: `*` for all, `localhost` for those of this machine.
    pub cors_origins: Vec<String>,
    /// Whether `GET /slots` answers.
    pub slots: bool,
    /// Whether `GET /metrics` answers.
    pub metrics: bool,
    /// What stands before the colon in the names of metrics that llama.cpp has not, such as `samite` or `vllm`.
    pub metrics_names: String,
    /// Whether `POST /props` answers.
    pub props: bool,
    /// Whether there is a page to talk on.
    pub page: bool,
    /// Whether the model is the program's own, which only tells stories.
    pub is_embedded: bool,
    /// What `GET /plan` tells: see [`plan`](crate::plan).
    pub plan: Value,
    /// Folder of saved slots; none is saved without.
    pub slot_save_path: Option<PathBuf>,
    /// How tokens are chosen, where a request says nothing.
    pub sampling: SamplerParams,
    /// The seed, unless each request has its own.
    pub seed: Option<u64>,
    /// Most tokens that are written, where a request says nothing.
    pub max_tokens: Option<usize>,
    /// Tokens that stay when a text is as long as its context; `None` ends it there.
    pub shift: Option<usize>,
    /// Whether the beginnings of prompts are reused.
    pub cache_prompt: bool,
    /// What becomes of thoughts.
    pub reasoning: ReasoningFormat,
    /// Whether the model thinks; `None` leaves it to its template.
    pub thinking: Option<bool>,
    /// Most tokens of reasoning of an answer; `None` for any number.
    pub reasoning_budget: Option<usize>,
    /// The chat template: a name or a text; `None` for the model's own.
    pub template: Option<String>,
    /// Names that templates see.
    pub template_kwargs: Map<String, Value>,
    /// Whether the last message of the assistant is the beginning of the answer.
    pub prefill: bool,
    /// Adapters that requests can ask for, with the shares that they have otherwise.
    pub adapters: Vec<(Arc<Adapter>, f32)>,
    /// Control vectors, which change the model in any case.
    pub control: Vec<ScaledAdapter>,
    /// Whether answers tell how they came about.
    pub verbose: bool,
    /// Files of a certificate, with which connections are encrypted.
    pub tls: Option<TlsFiles>,
    /// A prefix of all paths, with a `/` before it and none behind.
    pub prefix: String,
    /// Most bytes of a body.
    pub body_limit: usize,
    /// Seconds that the head of a request may take to come once it began; a connection is closed then.
    pub head_seconds: u64,
    /// Most connections at a time; `None` for as many as open files allow, up to 4096.
    pub connections: Option<usize>,
    /// Seconds after which a connection is closed whose client does not read.
    pub write_seconds: u64,
    /// Seconds between comments in a quiet stream; 0 for none.
    pub ping_seconds: u64,
    /// Whether `/v1/embeddings` answers.
    pub embeddings: bool,
    /// Whether `/v1/rerank` answers.
    pub reranking: bool,
    /// How long requests may take once the server is told to end, in seconds.
    pub drain_seconds: u64,
    /// Whether the path of Vertex AI answers, too.
    pub predict_path: Option<String>,
}

impl ServeOptions {
    /// What clients call the model: its first alias, or else its file's name.
    pub fn model_id(&self, model: &Model) -> String {
        let file = model.path().file_name();
        let file = file.map(|name| name.to_string_lossy().into_owned());
        let alias = self.aliases.first().cloned();
        alias.or(file).unwrap_or_else(|| model.name().to_owned())
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
            predict_path: None,
        }
    }
}
