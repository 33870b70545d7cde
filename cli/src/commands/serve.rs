//! `samite serve`: serves models over HTTP.

#[cfg(feature = "kv-events")]
mod kv_events;
mod kv_transfer;
#[cfg(feature = "hub")]
mod library;
mod llama_log;
mod source;

use llama_log::MemoryLog;
use source::ModelSource;

use super::chat::{STORIES, reasoning_format};
use super::embed::PoolingArg;
use super::rpc_server::is_loopback;
use crate::args::{ModelArgs, number, number_or_all, sequence_count};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files;
use crate::images::{self, EncoderArgs};
use crate::model_name::ModelName;
use crate::sampling::SamplingArgs;
use crate::setup::ModelSetup;
use crate::shown::{escaped, say};
use crate::{interrupt, log};
use clap::{ArgAction, Args};
use samite::CancelToken;
use samite::chat::ReasoningFormat;
#[cfg(feature = "hub")]
use samite::hub::{WebClient, WebHosts};
use samite::llm::arch::spec::{Pooling, Spec};
use samite::llm::{Context, ContextOptions, Model, Normalization, fit_to};
use samite::requests::{Drafter, Engine, EngineOptions, Handle, drive, drive_sleeping};
#[cfg(feature = "hub")]
use samite::serve::ImageFetcher;
use samite::serve::{Embedder, Hub, HubLimits, ServeOptions, TlsFiles, serve};
use samite::text::{Sampler, SamplerParams};
use samite::vision::{EncoderPlan, Error as EncoderError, SharedEncoder, VisionSpec};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Flags of `samite serve`.
#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "llama-server's flags and environment variables (LLAMA_ARG_…) also work. \
docs/serve.md describes the APIs.

Examples:
  samite serve
  samite serve model.gguf -c 16384 --parallel 8 --port 8000
  samite serve -m small.gguf -m large.gguf
  samite serve -hf owner/name --api-key-file keys.txt --host 0.0.0.0"
)]
pub struct ServeArgs {
    /// List the GPUs and their memory as llama-server does, and exit
    #[arg(long)]
    list_devices: bool,

    #[command(flatten)]
    name: ModelName,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,

    #[command(flatten)]
    encoder: EncoderArgs,

    #[command(flatten)]
    models: ModelsArgs,

    #[command(flatten)]
    http: HttpArgs,

    #[command(flatten)]
    requests: RequestArgs,

    #[command(flatten)]
    kv_transfer: kv_transfer::TransferArgs,

    #[cfg(feature = "kv-events")]
    #[command(flatten)]
    kv_events: kv_events::EventArgs,

    #[command(flatten)]
    talk: TalkArgs,

    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Flags for several models.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several models")]
struct ModelsArgs {
    /// Folder of GGUF files to serve, each under its name; a model is loaded when a request names
    /// it
    #[arg(long, value_name = "FOLDER")]
    models_dir: Option<PathBuf>,
    /// Also serve downloaded models (see samite pull), and let administrators download and delete
    /// models: POST and DELETE /models, and ollama's pull
    #[cfg(feature = "hub")]
    #[arg(long)]
    models_cache: bool,
    /// Further model files, from repeated -m
    #[arg(long, value_name = "FILE", hide = true)]
    also_model: Vec<PathBuf>,
    /// Maximum number of models in memory at a time; 0 for as many as fit
    #[arg(long, value_name = "N", default_value = "4")]
    models_max: usize,
    /// Maximum planned memory of all loaded models in MiB [default: nine tenths of the free memory
    /// at startup]
    #[arg(long, value_name = "MIB")]
    models_memory: Option<u64>,
    /// Load a model only on POST /models/load
    #[arg(long, overrides_with = "models_autoload")]
    no_models_autoload: bool,
    /// Load a model when a request names it (default)
    #[arg(long, overrides_with = "no_models_autoload")]
    models_autoload: bool,
}

impl ModelsArgs {
    /// Returns whether downloaded models are served.
    fn has_cache(&self) -> bool {
        #[cfg(feature = "hub")]
        return self.models_cache;
        #[cfg(not(feature = "hub"))]
        false
    }

    /// Returns the files besides that of `-m`.
    fn files(&self) -> CommandResult<Vec<PathBuf>> {
        let mut files = self.also_model.clone();
        if let Some(folder) = &self.models_dir {
            let found = source::folder(folder).map_err(|error| {
                CommandError::usage(format_args!("--models-dir: {}: {error}", folder.display()))
            })?;
            if found.is_empty() {
                return Err(CommandError::usage(format_args!(
                    "--models-dir: there is no GGUF file in {}",
                    folder.display()
                )));
            }
            files.extend(found);
        }
        Ok(files)
    }
}

/// Flags for addresses and access.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct HttpArgs {
    /// Addresses to listen on, separated by `,`; 0.0.0.0 accepts connections from other machines
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 for any free port
    #[arg(long, value_name = "PORT", default_value = "8080")]
    port: u16,
    /// API keys, separated by `,`; each request must have one of them
    #[arg(long, value_name = "KEYS")]
    api_key: Option<String>,
    /// File of API keys, one per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Keys that may also load and unload models, set adapters, and read metrics and all slots,
    /// separated by `,`. Without any, a single API key may
    #[arg(long, value_name = "KEYS")]
    admin_key: Option<String>,
    /// File of admin keys, one per line
    #[arg(long, value_name = "FILE")]
    admin_key_file: Option<PathBuf>,
    /// Share cached prefixes among keys; response times can then reveal that another key sent the
    /// same prompt
    #[arg(long)]
    share_prefixes: bool,
    /// Fetch images from the http and https URLs of requests, of at most 10 MiB, within 10 seconds:
    /// from public hosts, or also from those of private networks
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "public|all", value_parser = web_hosts)]
    fetch_images: Option<WebHosts>,
    /// Host names of this server, separated by `,`. Without keys, requests must be for one of them,
    /// a private name such as gpu.local, or an address
    #[arg(
        long,
        value_name = "NAMES",
        default_value = "",
        hide_default_value = true
    )]
    allowed_hosts: String,
    /// PEM file with the TLS certificate and its chain; enables HTTPS
    #[arg(long, value_name = "FILE", requires = "ssl_key_file")]
    ssl_cert_file: Option<PathBuf>,
    /// PEM file with the private key of the certificate
    #[arg(long, value_name = "FILE", requires = "ssl_cert_file")]
    ssl_key_file: Option<PathBuf>,
    /// Origins whose pages may read responses, separated by `,`: `*` for all, `localhost` for those
    /// of this machine
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        hide_default_value = true
    )]
    cors_origins: String,
    /// Names of the model, separated by `,` [also: -a]
    #[arg(
        short = 'a',
        long,
        value_name = "NAMES",
        default_value = "",
        hide_default_value = true
    )]
    alias: String,
    /// Tags of the model in the list of models, separated by `,`
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    tags: String,
    /// Prefix of all paths, such as /model
    #[arg(long, value_name = "PATH", default_value = "")]
    api_prefix: String,
    /// Disable the /slots endpoint
    #[arg(long, overrides_with = "slots")]
    no_slots: bool,
    /// Enable the /slots endpoint (default)
    #[arg(long, overrides_with = "no_slots")]
    slots: bool,
    /// Enable the /metrics endpoint
    #[arg(long)]
    metrics: bool,
    /// Prefix before the colon in the names of metrics that are not llama.cpp's, such as vllm for
    /// tools that monitor vLLM
    #[arg(long, value_name = "NAME", default_value = "samite", value_parser = metrics_name)]
    metrics_names: String,
    /// Allow changing settings with POST /props
    #[arg(long)]
    props: bool,
    /// Disable the web UI [also: --no-webui]
    #[arg(long, alias = "no-webui")]
    no_ui: bool,
    /// Folder for saved slots
    #[arg(long, value_name = "FOLDER")]
    slot_save_path: Option<PathBuf>,
    /// Maximum size of a request body in MiB
    #[arg(long, value_name = "MIB", default_value = "64",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    body_limit: u32,
    /// Seconds to receive the headers of a request once they have started to arrive
    #[arg(long, value_name = "N", default_value = "10",
        value_parser = clap::value_parser!(u32).range(1..))]
    header_timeout: u32,
    /// Maximum number of connections; beyond it, connections that wait for their clients are closed
    /// [default: limited by the number of open files, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    connections: Option<u32>,
    /// Seconds before closing a connection whose client does not read its response
    #[arg(
        long,
        value_name = "N",
        default_value = "60",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    write_timeout: u32,
    /// MiB of memory for all requests together, excluding the context; one request may use half of
    /// it, and one of several keys three quarters [default: a quarter of the free memory, at most
    /// 4096]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=1 << 24))]
    request_memory: Option<u32>,
    /// Seconds between keep-alive comments in an idle stream; -1 for none
    #[arg(
        long,
        value_name = "N",
        default_value = "15",
        allow_negative_numbers = true
    )]
    sse_ping_interval: i64,
    /// Seconds to finish requests in flight when the server is stopped
    #[arg(long, value_name = "N", default_value = "30")]
    drain: u32,
}

/// Flags for concurrency and caching.
#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
struct RequestArgs {
    /// Number of slots, which are requests computed at the same time [default: 4] [also: -np]
    #[arg(long, value_name = "N", value_parser = slot_count)]
    parallel: Option<usize>,
    /// Let a request use the whole context instead of its share; the default without --parallel
    /// [also: -kvu]
    #[arg(long, overrides_with = "no_kv_unified")]
    kv_unified: bool,
    /// Limit each request to its share of the context [also: -no-kvu]
    #[arg(long, overrides_with = "kv_unified")]
    no_kv_unified: bool,
    /// Maximum number of requests of a key that wait for a slot; more are rejected with status 503
    #[arg(long, value_name = "N", default_value = "1024")]
    queue: usize,
    /// Maximum number of cached prefixes [default: twice --parallel]
    #[arg(long, value_name = "N", value_parser = sequence_count)]
    cached_prefixes: Option<usize>,
    /// MiB of host memory for preempted requests; beyond it, they are recomputed [also: -cram]
    #[arg(
        long,
        value_name = "MIB",
        default_value = "8192",
        allow_negative_numbers = true
    )]
    cache_ram: i64,
    /// Folder to store cached prefixes in, so that they survive a restart
    #[arg(long, value_name = "FOLDER")]
    cache_disk: Option<PathBuf>,
    /// Maximum size of --cache-disk in MiB; the least recently used prefixes are evicted first
    #[arg(
        long,
        value_name = "MIB",
        default_value = "16384",
        requires = "cache_disk"
    )]
    cache_disk_limit: u64,
    /// Do not use the prefix cache unless a request asks for it
    #[arg(long, overrides_with = "cache_prompt")]
    no_cache_prompt: bool,
    /// Use the prefix cache (default)
    #[arg(long, overrides_with = "no_cache_prompt")]
    cache_prompt: bool,
    /// Maximum number of tokens per step: decode first, then prompts in turns [also: -b]
    #[arg(short = 'b', long, value_name = "N", default_value = "2048", value_parser = batch)]
    batch_size: usize,
    /// Maximum number of tokens per response if the request sets none [also: -n, --predict]
    #[arg(short = 'n', long, visible_alias = "predict", value_name = "N|all",
        value_parser = number_or_all, allow_negative_numbers = true)]
    n_predict: Option<usize>,
    /// Maximum draft length in tokens, by prompt lookup or a draft model; drafts are used where
    /// that is faster and do not change the text [default: 16 with a draft model, otherwise 0]
    #[arg(long, visible_alias = "draft-max", value_name = "N", value_parser = draft)]
    draft: Option<usize>,
    /// Draft model for speculative decoding: a smaller model with the same vocabulary [also: -md]
    #[arg(long, value_name = "FILE")]
    model_draft: Option<PathBuf>,
    /// Minimum probability of a drafted token; a less probable one ends the draft
    #[arg(long, value_name = "SHARE", default_value = "0.75", value_parser = share)]
    draft_p_min: f32,
    /// Make a request's logits, and thus its tokens, independent of other requests: compute
    /// requests one at a time and reuse nothing
    #[arg(long, conflicts_with_all = ["parallel", "cached_prefixes", "cache_disk", "draft",
        "model_draft", "context_shift"])]
    deterministic: bool,
    /// Continue when a text fills its context, by discarding some of its tokens
    #[arg(long, overrides_with = "no_context_shift")]
    context_shift: bool,
    /// End a text when it fills its context (default)
    #[arg(long, overrides_with = "context_shift")]
    no_context_shift: bool,
    /// Number of first tokens that --context-shift keeps
    #[arg(
        long,
        visible_alias = "keep",
        value_name = "N",
        default_value = "0",
        allow_negative_numbers = true
    )]
    n_keep: i64,
    /// Free the context's memory after N seconds without a request; -1 for never
    #[arg(
        long,
        value_name = "N",
        default_value = "-1",
        allow_negative_numbers = true
    )]
    sleep_idle_seconds: i64,
    /// Enable embeddings [also: --embedding]
    #[arg(long, alias = "embedding")]
    embeddings: bool,
    /// Rank documents with a reranking model [also: --rerank]
    #[arg(long, alias = "rerank")]
    reranking: bool,
    /// Pooling of embeddings [default: as the model file says]
    #[arg(long, value_enum)]
    pooling: Option<PoolingArg>,
    /// Normalization of embeddings, as for `samite embed`
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    embd_normalize: Option<i32>,
}

/// Flags for chat templates and reasoning.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
struct TalkArgs {
    /// Chat template: a name (docs/chat-templates.md has the list) or the text of a template
    /// [default: the model's own]
    #[arg(long, value_name = "NAME|TEXT")]
    chat_template: Option<String>,
    /// File with the chat template
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Variables for the chat template, as a JSON object
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<String>,
    /// Format in which reasoning is separated from the answer
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = reasoning_format)]
    reasoning_format: ReasoningFormat,
    /// Enable reasoning before the answer: on, off, or auto for the chat template's default [also:
    /// -rea]
    #[arg(long, value_name = "on|off|auto", default_value = "auto")]
    reasoning: String,
    /// Most reasoning tokens per answer; 0 for none, -1 for no limit
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true,
        value_parser = clap::value_parser!(i64).range(-1..=i64::from(i32::MAX)))]
    reasoning_budget: i64,
    /// Treat a last assistant message as complete instead of as the start of the response
    #[arg(long, overrides_with = "prefill_assistant")]
    no_prefill_assistant: bool,
    /// Treat a last assistant message as the start of the response (default)
    #[arg(long, overrides_with = "no_prefill_assistant", action = ArgAction::SetTrue)]
    prefill_assistant: bool,
}

impl HttpArgs {
    /// Returns the first address that other machines can reach without a key.
    fn open_host(&self) -> Option<String> {
        let is_keyed = self.api_key.is_some()
            || self.api_key_file.is_some()
            || self.admin_key.is_some()
            || self.admin_key_file.is_some();
        let mut hosts = list(&self.host).into_iter();
        hosts.find(|host| !is_keyed && !is_loopback(host))
    }
}

#[cfg(feature = "hub")]
fn web_hosts(text: &str) -> Result<WebHosts, String> {
    match text {
        "public" => Ok(WebHosts::Public),
        "all" => Ok(WebHosts::All),
        _ => Err("must be public or all".to_owned()),
    }
}

#[cfg(feature = "hub")]
fn image_fetcher(hosts: WebHosts) -> ImageFetcher {
    const MAX_BYTES: usize = 10 << 20;
    let client = WebClient::new(hosts, MAX_BYTES as u64);
    ImageFetcher::new(MAX_BYTES, move |url| client.fetch(url))
}

fn metrics_name(text: &str) -> Result<String, String> {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    if !text.is_empty() && text.chars().all(is_letter) {
        Ok(text.to_owned())
    } else {
        Err("must be letters".to_owned())
    }
}

fn slot_count(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(4),
        text => number(text, 1, 256),
    }
}

impl RequestArgs {
    /// Returns the maximum number of tokens of a draft.
    fn most_drafted(&self) -> usize {
        self.draft.unwrap_or(match self.model_draft {
            Some(_) => 16,
            None => 0,
        })
    }
}

fn share(text: &str) -> Result<f32, String> {
    let share = text.parse::<f32>().ok();
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

fn draft(text: &str) -> Result<usize, String> {
    number(text, 0, 16)
}

fn batch(text: &str) -> Result<usize, String> {
    number(text, 1, 1 << 20)
}

pub fn run(mut args: ServeArgs) -> CommandResult {
    args.name.apply(&mut args.model)?;
    let mut setup = ModelSetup::new(&args.model)?;
    if args.list_devices {
        return llama_log::list_devices(&setup.devices);
    }
    llama_log::system(&setup.devices, &args.cpu)?;
    if args.requests.model_draft.is_some() || args.requests.embeddings {
        setup.shares_memory = true;
    }
    let stop = interrupt::token();
    let files = args.models.files()?;
    let is_single = files.is_empty() && !args.models.has_cache();
    let options = args.options(is_single && setup.file.is_embedded())?;
    Sampler::new(args.sampling.params(SamplerParams::default())?).map_err(CommandError::usage)?;
    let args = Arc::new(args);
    let hub = if is_single {
        let source = ModelSource::new(&args, setup, options);
        source.check_address_space()?;
        let loaded = source.loaded(&stop)?;
        let mut options = loaded.app.options().clone();
        options.request_memory = args.request_memory(loaded.app.free_memory());
        let models = vec![source.served(loaded.app.model_id())];
        let hub = Hub::new(options, models, HubLimits::default(), true);
        let hub = hub.map_err(CommandError::usage)?;
        hub.put_first(loaded);
        hub
    } else {
        several(&args, &setup, &options, files)?
    };
    if let Some(host) = args.http.open_host() {
        say(format_args!(
            "warning: {}: other machines can use this server without a key; set --api-key or \
             --api-key-file",
            escaped(&host)
        ));
    }
    let hub = Arc::new(hub);
    let prefix = hub.prefix().to_owned();
    let scheme = if args.http.ssl_cert_file.is_some() {
        "https"
    } else {
        "http"
    };
    let name = match hub.count() {
        1 => hub.first_name().to_owned(),
        count => format!("{count} models"),
    };
    let served = serve(Arc::clone(&hub), &stop, |addresses| {
        for address in addresses {
            say(format_args!(
                "{} {} served at {scheme}://{address}{prefix}{}",
                escaped(&name),
                if hub.count() == 1 { "is" } else { "are" },
                if prefix.is_empty() { "" } else { "/" },
            ));
        }
    });
    hub.end();
    served.map_err(CommandError::error)?;
    match stop.is_cancelled() && interrupt::exit_code() == interrupt::INTERRUPTED {
        // Ctrl-C is the usual way to end a server in a terminal.
        true => Err(CommandError::Interrupted),
        false => Ok(()),
    }
}

/// Creates a hub of several models. Models named by their files must fit into memory; those of a
/// folder and downloaded ones are checked when they are requested.
fn several(
    args: &Arc<ServeArgs>,
    setup: &ModelSetup,
    options: &ServeOptions,
    files: Vec<PathBuf>,
) -> CommandResult<Hub> {
    if !options.aliases.is_empty() {
        return Err(CommandError::usage(
            "--alias: several models have the names of their files or repositories",
        ));
    }
    if args.encoder.path().is_some() {
        return Err(CommandError::usage(
            "--mmproj: an image encoder belongs to one model, and several are served",
        ));
    }
    #[cfg(feature = "kv-events")]
    args.kv_events.check_several()?;
    let mut models = Vec::new();
    if let Some(path) = setup.path()? {
        let model = setup.with_file(path.to_owned());
        let source = ModelSource::new(args, model, options.clone());
        models.push(source.served_file(path));
    }
    let named = models.len() + args.models.also_model.len();
    for path in files {
        let model = setup.with_file(path.clone());
        models.push(ModelSource::new(args, model, options.clone()).served_file(&path));
    }
    let free = setup.free_memory(&args.cpu)?;
    let server_options = ServeOptions {
        request_memory: args.request_memory(free),
        ..options.clone()
    };
    let limits = HubLimits {
        models: match args.models.models_max {
            0 => usize::MAX,
            count => count,
        },
        bytes: match args.models.models_memory {
            Some(mib) => mib << 20,
            None => free,
        },
        loads: !args.models.no_models_autoload,
    };
    let hub = Hub::new(server_options, models, limits, false).map_err(CommandError::usage)?;
    #[cfg(feature = "hub")]
    let hub = if args.models.models_cache {
        let library = library::CachedModels::new(args, setup, options)?;
        hub.with_library(library).map_err(CommandError::error)?
    } else {
        hub
    };
    hub.check(named).map_err(CommandError::error)?;
    Ok(hub)
}

impl ServeArgs {
    /// Returns the options that do not depend on a loaded model.
    fn options(&self, is_embedded: bool) -> CommandResult<ServeOptions> {
        let http = &self.http;
        let api_keys = keys("api", http.api_key.as_deref(), http.api_key_file.as_deref())?;
        let admin_keys = keys(
            "admin",
            http.admin_key.as_deref(),
            http.admin_key_file.as_deref(),
        )?;
        let is_apart = api_keys.len() + admin_keys.len() > 1 && !http.share_prefixes;
        if is_apart && self.requests.cache_disk.is_some() {
            say(format_args!(
                "warning: --cache-disk keeps nothing for several keys; set --share-prefixes if \
                 they may share what is cached"
            ));
        }
        let mut aliases = list(&self.http.alias);
        let mut tags = list(&self.http.tags);
        for list in [&mut aliases, &mut tags] {
            list.sort();
            list.dedup();
        }
        let template = match &self.talk.chat_template_file {
            Some(path) => Some(files::read_flag(path, "--chat-template-file")?),
            None => self.talk.chat_template.clone(),
        };
        let stories = is_embedded.then(|| STORIES.to_owned());
        let kwargs = match &self.talk.chat_template_kwargs {
            None => serde_json::Map::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| {
                CommandError::usage(format_args!(
                    "--chat-template-kwargs: not an object of JSON: {error}"
                ))
            })?,
        };
        let thinking = match self.talk.reasoning.as_str() {
            "on" => Some(true),
            "off" => Some(false),
            "auto" => (self.talk.reasoning_budget == 0).then_some(false),
            other => {
                return Err(CommandError::usage(format_args!(
                    "--reasoning: must be on, off or auto, and is '{other}'"
                )));
            }
        };
        if let Some(folder) = &self.http.slot_save_path
            && !folder.is_dir()
        {
            return Err(CommandError::usage(format_args!(
                "--slot-save-path: {} is no folder",
                folder.display()
            )));
        }
        Ok(ServeOptions {
            hosts: list(&self.http.host),
            port: self.http.port,
            api_keys,
            admin_keys,
            shares_prefixes: self.http.share_prefixes,
            allowed_hosts: list(&self.http.allowed_hosts),
            aliases,
            tags,
            cors_origins: list(&self.http.cors_origins),
            slots: !self.http.no_slots,
            metrics: self.http.metrics,
            metrics_names: self.http.metrics_names.clone(),
            kv_transfer: self.kv_transfer.options()?,
            props: self.http.props,
            page: !self.http.no_ui,
            is_embedded,
            slot_save_path: self.http.slot_save_path.clone(),
            max_tokens: self.requests.n_predict.filter(|&count| count != usize::MAX),
            shift: self
                .requests
                .context_shift
                .then(|| usize::try_from(self.requests.n_keep).unwrap_or(usize::MAX)),
            cache_prompt: !self.requests.no_cache_prompt,
            reasoning: self.talk.reasoning_format,
            thinking,
            reasoning_budget: usize::try_from(self.talk.reasoning_budget).ok(),
            template: template.or(stories),
            template_kwargs: kwargs,
            prefill: !self.talk.no_prefill_assistant,
            verbose: log::is_verbose(),
            tls: self
                .http
                .ssl_cert_file
                .clone()
                .zip(self.http.ssl_key_file.clone())
                .map(|(certificate, key)| TlsFiles { certificate, key }),
            prefix: match self.http.api_prefix.trim_matches('/') {
                "" => String::new(),
                prefix => format!("/{prefix}"),
            },
            body_limit: (self.http.body_limit as usize) << 20,
            head_seconds: u64::from(self.http.header_timeout),
            connections: self.http.connections.map(|count| count as usize),
            write_seconds: u64::from(self.http.write_timeout),
            ping_seconds: u64::try_from(self.http.sse_ping_interval).unwrap_or(0),
            drain_seconds: u64::from(self.http.drain),
            #[cfg(feature = "hub")]
            image_fetcher: http.fetch_images.map(image_fetcher),
            predict_path: predict_path(),
            ..ServeOptions::default()
        })
    }

    /// Returns the bytes that requests may hold if `free` bytes of memory are free.
    fn request_memory(&self, free: u64) -> usize {
        let bytes = match self.http.request_memory {
            Some(mib) => u64::from(mib) << 20,
            None => (free / 4).clamp(16 << 20, 4 << 30),
        };
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Returns the options of contexts. Signals do not interrupt them, because requests in flight
    /// are finished.
    fn context_options(&self, setup: &ModelSetup) -> ContextOptions {
        let mut options = setup.context_options(&CancelToken::new());
        self.cpu.apply(&mut options);
        options
    }

    fn engine_options(&self) -> EngineOptions {
        let requests = &self.requests;
        let slots = requests
            .parallel
            .unwrap_or(if requests.deterministic { 1 } else { 4 });
        EngineOptions {
            slots,
            context: None,
            kept: requests.cached_prefixes.unwrap_or(slots * 2),
            queue: requests.queue,
            budget: requests.batch_size,
            swap_bytes: usize::try_from(requests.cache_ram).map_or(usize::MAX, |mib| mib << 20),
            draft: requests.most_drafted(),
            deterministic: requests.deterministic,
        }
    }

    /// Returns the options of the context of an engine, for images by an encoder.
    fn writing_context(
        &self,
        setup: &ModelSetup,
        engine: &EngineOptions,
        encoder: Option<&VisionSpec>,
    ) -> ContextOptions {
        let mut context = self.context_options(setup);
        context.n_batch = engine.budget;
        context.n_seq = engine.n_seq();
        context.n_logits = Some((engine.slots * (1 + engine.draft)).clamp(16, 256));
        if let Some(encoder) = encoder {
            images::fit(encoder, &mut context);
            // An image that is computed at once does not wait until others have decoded.
            context.n_batch = context.n_batch.max(context.n_ubatch + engine.slots);
        }
        context
    }

    /// Plans the image encoder, if its projector is supported.
    fn plan_encoder(&self, setup: &ModelSetup) -> CommandResult<Option<EncoderPlan>> {
        match self.encoder.plan(setup, &self.cpu)? {
            Err(EncoderError::Unsupported(_)) => Ok(None),
            plan => plan.map_err(CommandError::error),
        }
    }

    /// Loads the image encoder. One whose projector is not supported is left out with a warning,
    /// because programs that start the server name it with every model that has one.
    fn load_encoder(
        &self,
        setup: &ModelSetup,
        model: &Arc<Model>,
    ) -> CommandResult<Option<SharedEncoder>> {
        let threads = self.context_options(setup).threads_batch;
        match self.encoder.load(model, threads) {
            Err(error @ EncoderError::Unsupported(_)) => {
                say(format_args!(
                    "warning: --mmproj: {error}; the model is served without images"
                ));
                Ok(None)
            }
            encoder => encoder.map_err(CommandError::error),
        }
    }

    /// Starts the engine on a separate thread.
    fn engine(
        &self,
        setup: &ModelSetup,
        model: &Arc<Model>,
        options: &mut ServeOptions,
        encoder: Option<&SharedEncoder>,
        disk_name: Option<&str>,
        memory: &mut MemoryLog,
    ) -> CommandResult<(Handle, JoinHandle<()>)> {
        let requests = &self.requests;
        let mut engine = self.engine_options();
        let slots = engine.slots;
        let is_unified =
            requests.kv_unified || requests.parallel.is_none() && !requests.no_kv_unified;
        let seen = encoder.map(SharedEncoder::spec);
        let context = self.writing_context(setup, &engine, seen);
        let context = setup.context(Arc::clone(model), context)?;
        let again = context.options().clone();
        let cells = context.n_ctx();
        if !is_unified {
            let share = (context.n_ctx() / slots).max(1);
            engine.context = Some(share);
            let usual = ContextOptions::DEFAULT_CONTEXT;
            if share < model.spec().n_ctx_train.min(usual) {
                tracing::warn!(
                    "a request may have {share} tokens: the context of {} is divided among --parallel {slots}; --ctx-size makes it larger, --kv-unified has requests share it",
                    context.n_ctx()
                );
            }
        }
        let adapters = &context.options().adapters;
        let (named, control) = adapters.split_at(setup.adapters.n_loras().min(adapters.len()));
        let named = named
            .iter()
            .map(|scaled| (Arc::clone(&scaled.adapter), scaled.share));
        options.adapters = named.collect();
        options.control = control.to_vec();
        let engine_options = engine;
        let disk = requests.cache_disk.as_ref().map(|folder| match disk_name {
            Some(name) => folder.join(name),
            None => folder.clone(),
        });
        let disk_bytes = requests.cache_disk_limit.saturating_mul(1 << 20);
        let draft = match &requests.model_draft {
            None => None,
            Some(path) => {
                let draft = setup.load_beside(path, model, &again.cancel);
                let draft = draft.map_err(draft_failure)?;
                Some((draft, draft_context(&again, cells, &engine_options)))
            }
        };
        let least = requests.draft_p_min;
        #[cfg(feature = "kv-events")]
        let publisher = self.kv_events.publisher(requests.deterministic)?;
        #[cfg(feature = "kv-events")]
        {
            options.kv_events = publisher.as_deref().map(kv_events::source);
        }
        let begin = move |context: Context| {
            let drafter = match &draft {
                Some((draft, options)) => {
                    let draft = Context::new(Arc::clone(draft), options.clone())?;
                    Some(Drafter::new(draft, context.model(), least)?)
                }
                None => None,
            };
            let mut engine = Engine::new(context, engine_options.clone())?;
            if let Some(drafter) = drafter {
                engine.set_drafter(drafter)?;
            }
            if let Some(folder) = &disk {
                engine.cache_on_disk(folder, disk_bytes)?;
            }
            #[cfg(feature = "kv-events")]
            if let Some(publisher) = &publisher {
                engine.observe_blocks(publisher.block_size(), publisher.observer());
            }
            Ok::<_, samite::llm::Error>(engine)
        };
        let engine = begin(context)?;
        let drafting = engine.drafter().map(Drafter::context);
        memory.add_model(engine.context());
        if let Some(context) = drafting {
            memory.add_model(context);
        }
        options.plan = samite::serve::plan(engine.context(), drafting)?;
        let driven = match u64::try_from(requests.sleep_idle_seconds) {
            Err(_) | Ok(0) => drive(engine),
            Ok(seconds) => {
                let model = Arc::clone(model);
                drive_sleeping(engine, Duration::from_secs(seconds), move || {
                    begin(Context::new(Arc::clone(&model), again.clone())?)
                })
            }
        };
        driven.map_err(|error| CommandError::error(format_args!("no thread: {error}")))
    }

    /// Returns the pooling of embeddings, and the options of the context that computes them.
    fn embedding_context(&self, setup: &ModelSetup, spec: &Spec) -> (Pooling, ContextOptions) {
        const LONGEST: usize = 8192;
        let pooling = match (self.requests.reranking, self.requests.pooling) {
            (true, _) => Pooling::Rank,
            (false, Some(pooling)) => pooling.pooling(),
            (false, None) => spec.pooling.unwrap_or(match spec.head.output {
                // A generative model has seen the whole text at the last token.
                Some(_) => Pooling::Last,
                None => Pooling::None,
            }),
        };
        let mut options = self.context_options(setup);
        let longest = options.n_ctx.unwrap_or(spec.n_ctx_train.min(LONGEST));
        let mut lengths = vec![1; 16];
        lengths[0] = longest;
        fit_to(&mut options, spec, pooling, &lengths);
        (pooling, options)
    }

    /// Creates the embedder.
    fn embedder(
        &self,
        setup: &ModelSetup,
        model: &Arc<Model>,
        memory: &mut MemoryLog,
    ) -> CommandResult<Embedder> {
        let (pooling, options) = self.embedding_context(setup, model.spec());
        let context = setup.context(Arc::clone(model), options)?;
        memory.add_context(&context);
        let normalization = match (self.requests.embd_normalize, pooling) {
            (Some(number), _) => Normalization::from_number(number).ok_or_else(|| {
                CommandError::usage("--embd-normalize: must be a whole number of at least -1")
            })?,
            (None, Pooling::Rank) => Normalization::None,
            (None, _) => Normalization::Norm(2),
        };
        Ok(Embedder::new(context, normalization))
    }
}

/// Returns the options of a draft model's context. The model's context has `cells` cells.
fn draft_context(beside: &ContextOptions, cells: usize, engine: &EngineOptions) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(cells.saturating_add(engine.n_seq() * engine.draft)),
        n_batch: beside.n_batch.min(beside.n_ubatch),
        n_logits: Some(engine.slots.max(16)),
        adapters: Vec::new(),
        ..beside.clone()
    }
}

fn draft_failure(error: CommandError) -> CommandError {
    CommandError::error(format_args!("--model-draft: {}", error.text()))
}

/// Returns the keys of `--api-key` and `--api-key-file`, or of the flags for another kind of key.
fn keys(kind: &str, flag: Option<&str>, file: Option<&Path>) -> CommandResult<Vec<String>> {
    let mut keys = list(flag.unwrap_or_default());
    if let Some(path) = file {
        let text = files::read_flag(path, &format!("--{kind}-key-file"))?;
        keys.extend(text.lines().map(|line| line.trim().to_owned()));
    }
    keys.retain(|key| !key.is_empty());
    if keys.is_empty() && (flag.is_some() || file.is_some()) {
        return Err(CommandError::usage(format_args!(
            "--{kind}-key, --{kind}-key-file: there is no key"
        )));
    }
    Ok(keys)
}

/// Splits a list at commas.
fn list(text: &str) -> Vec<String> {
    let parts = text.split(',').map(str::trim);
    parts
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Returns the path of Vertex AI's predictions, if the program runs there.
fn predict_path() -> Option<String> {
    let mode = std::env::var("AIP_MODE").ok()?;
    let path = std::env::var("AIP_PREDICT_ROUTE").ok();
    (mode == "PREDICTION").then(|| path.unwrap_or_else(|| "/predict".to_owned()))
}
