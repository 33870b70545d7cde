//! Ollama's API.

use crate::answer::{Choice, Update};
use crate::api::{embeddings, native};
use crate::app::App;
use crate::chat;
use crate::context::RequestContext;
use crate::entry::{Entry, Status};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, image_part, kind};
use crate::hub::Hub;
use crate::ids;
use crate::job::{ChatExtras, Job};
use crate::sampling::MAX_PROBABILITIES;
use crate::stream::{Frames, ResponseEncoder, json_lines, json_response};
use axum::response::Response;
use samite_chat::{AnswerCall, AnswerEvent as Parsed};
use samite_llm::FIRST_IMAGE_ID;
use samite_llm::quantize::Mixture;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Version of Ollama whose API this is. Clients refuse to talk to older ones than they know: Codex
/// wants 0.13.4.
const VERSION: &str = "0.14.0";

pub fn version() -> Value {
    json!({"version": VERSION})
}

/// Returns the current time in RFC 3339 format.
fn time_now() -> String {
    time_at(ids::since_epoch())
}

fn time_at(since: Duration) -> String {
    let now = samite_chat::DateTime::new(since.as_secs().cast_signed(), 0);
    format!(
        "{}.{:06}Z",
        now.format("%Y-%m-%dT%H:%M:%S"),
        since.subsec_micros()
    )
}

fn details(app: &App) -> Value {
    let family = app.model.architecture().name;
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": human_count(app.model.n_params()),
        "quantization_level": quantization(app),
    })
}

/// Returns the name of the mixture of types in the model's file.
fn quantization(app: &App) -> &'static str {
    let number = app.model.metadata().get::<u32>("general.file_type");
    let mixture = number.ok().flatten().and_then(Mixture::of_file_type);
    mixture.map_or("unknown", |mixture| mixture.name())
}

/// Returns a number of parameters as Ollama shows it.
fn human_count(count: u64) -> String {
    let count = count as f64;
    if count < 1e9 {
        format!("{:.2}M", count / 1e6)
    } else {
        format!("{:.1}B", count / 1e9)
    }
}

/// Returns a digest that a model keeps while the server runs.
fn digest(id: &str) -> String {
    blake3::hash(id.as_bytes()).to_hex().to_string()
}

/// Returns the time when a file was changed, or the current time if it is unknown.
fn modified(path: &Path) -> String {
    let time = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    let since = time
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or_else(time_now, time_at)
}

fn entry(app: &App) -> Map<String, Value> {
    let id = app.model_id();
    let members = [
        ("name", json!(id)),
        ("model", json!(id)),
        ("modified_at", modified(app.model.path()).into()),
        ("size", app.model.file_bytes().into()),
        ("digest", digest(&id).into()),
        ("details", details(app)),
    ];
    members
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect()
}

/// Downloads a model. Streams the progress unless the request refuses a stream.
pub async fn pull(hub: &Arc<Hub>, body: &Value) -> Result<Response> {
    let fields = Fields::new(body)?;
    let name = fields.text(&["model", "name"])?;
    let name = name.ok_or_else(|| ApiError::field("model", "is missing"))?;
    let is_stream = fields.boolean(&["stream"], true)?;
    if hub.find_named(name).is_ok() {
        return Ok(json_response(200, &json!({"status": "success"})));
    }
    let mut state = hub.download(name, true)?;
    if !is_stream {
        let ended = state.wait_for(|state| state.end.is_some()).await;
        let end = ended.ok().and_then(|state| state.end.clone());
        return match end.unwrap_or_else(|| Err("the download was lost".to_owned())) {
            Ok(()) => Ok(json_response(200, &json!({"status": "success"}))),
            Err(error) => Err(ApiError::new(500, error)),
        };
    }
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut told = json!({"status": "pulling manifest"});
        while sender.send(format!("{told}\n").into()).await.is_ok() {
            if told["status"] == "success" || !told["error"].is_null() {
                return;
            }
            let is_lost = state.changed().await.is_err();
            let now = state.borrow_and_update();
            told = match (&now.end, now.files.last()) {
                (Some(Ok(())), _) => json!({"status": "success"}),
                (Some(Err(error)), _) => json!({"error": error}),
                _ if is_lost => json!({"error": "the download was lost"}),
                (None, Some(file)) => {
                    let mut told = json!({
                        "status": format!("pulling {}", file.file),
                        "total": file.total,
                        "completed": file.done,
                    });
                    if let Some(hash) = &file.sha256 {
                        told["digest"] = format!("sha256:{hash}").into();
                    }
                    told
                }
                (None, None) => continue,
            };
        }
    });
    Ok(json_lines(receiver))
}

/// Lists all models. For models that are not loaded, little more than the name is known.
pub fn tags(hub: &Hub) -> Value {
    let models = hub.entries().into_iter().map(|model| match model.status() {
        Status::Loaded(app) => Value::Object(entry(&app)),
        _ => {
            let bytes = std::fs::metadata(&model.path).map_or(0, |metadata| metadata.len());
            json!({
                "name": model.id(),
                "model": model.id(),
                "modified_at": modified(&model.path),
                "size": bytes,
                "digest": digest(model.id()),
                "details": {"format": "gguf"},
            })
        }
    });
    json!({"models": models.collect::<Vec<_>>()})
}

/// Lists the loaded models.
pub fn ps(hub: &Hub) -> Value {
    let models = hub.entries().into_iter().filter_map(|model| {
        let Status::Loaded(app) = model.status() else {
            return None;
        };
        let mut shown = entry(&app);
        let end = model.leaves_in().map_or_else(
            || "2318-01-01T00:00:00Z".to_owned(),
            |stays| time_at(ids::since_epoch() + stays),
        );
        shown.insert("expires_at".to_owned(), end.into());
        shown.insert("size_vram".to_owned(), 0.into());
        let limits = app.handle.as_ref().map(|handle| handle.limits());
        let context = limits.map_or(0, |limits| limits.context);
        shown.insert("context_length".to_owned(), context.into());
        Some(Value::Object(shown))
    });
    json!({"models": models.collect::<Vec<_>>()})
}

/// Time that an idle model stays loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelLifetime {
    /// Until another model needs the memory.
    Always,
    For(Duration),
    /// Until the request is answered.
    Leaves,
}

impl ModelLifetime {
    pub fn time(self) -> Option<Duration> {
        match self {
            ModelLifetime::Always => None,
            ModelLifetime::For(time) => Some(time),
            ModelLifetime::Leaves => Some(Duration::ZERO),
        }
    }
}

/// Limit of `keep_alive`. A model with a longer time stays loaded forever, because no date can
/// express the end.
const A_CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Parses `keep_alive`: seconds, or a text such as "10m" or "1h30m". A negative time means until
/// another model needs the memory.
pub fn keep_alive(body: &Value) -> Result<Option<ModelLifetime>> {
    let seconds = match &body["keep_alive"] {
        Value::Null => return Ok(None),
        Value::Number(number) => number.as_f64(),
        Value::String(text) => duration(text.trim()),
        _ => None,
    };
    match seconds {
        Some(seconds) if seconds < 0.0 => Ok(Some(ModelLifetime::Always)),
        Some(0.0) => Ok(Some(ModelLifetime::Leaves)),
        Some(seconds) if seconds.is_finite() => {
            let time = Duration::try_from_secs_f64(seconds).ok();
            let time = time.filter(|time| *time < A_CENTURY);
            Ok(Some(time.map_or(ModelLifetime::Always, ModelLifetime::For)))
        }
        _ => Err(ApiError::field(
            "keep_alive",
            "must be a number of seconds, or a time such as \"10m\"",
        )),
    }
}

/// Returns the seconds of a text such as "1h30m", "90" or "-1".
fn duration(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Some(seconds);
    }
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        sum += number
            * match &rest[..letters] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = &rest[letters..];
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// Returns whether a request has no prompt and no messages.
pub fn is_empty(body: &Value, is_chat: bool) -> bool {
    match &body[if is_chat { "messages" } else { "prompt" }] {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

/// Returns the response to a request that only loads or unloads a model.
fn done(id: &str, is_chat: bool, reason: &str) -> Value {
    let mut value = json!({"model": id, "created_at": time_now()});
    if is_chat {
        value["message"] = json!({"role": "assistant", "content": ""})
    } else {
        value["response"] = "".into()
    }
    value["done"] = true.into();
    value["done_reason"] = reason.into();
    value
}

/// Returns the response to a request that unloads a model.
pub fn unloaded(model: &Entry, is_chat: bool) -> Value {
    done(model.id(), is_chat, "unload")
}

pub fn show(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    fields.text(&["model", "name"])?;
    let spec = app.model.spec();
    let family = app.model.architecture().name;
    let with_tools = app.template.capabilities(true);
    let mut capabilities = Vec::new();
    if app.handle.is_some() {
        capabilities.push("completion");
    }
    if with_tools.tools {
        capabilities.push("tools");
    }
    if app.template.source(false).contains("think") {
        capabilities.push("thinking");
    }
    if app.embedder.is_some() {
        capabilities.push("embedding");
    }
    if app.encoder.is_some() {
        capabilities.push("vision");
    }
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), family.into());
    info.insert(
        "general.parameter_count".to_owned(),
        app.model.n_params().into(),
    );
    info.insert(format!("{family}.context_length"), spec.n_ctx_train.into());
    info.insert(format!("{family}.embedding_length"), spec.n_embd.into());
    info.insert(format!("{family}.block_count"), spec.layers.len().into());
    Ok(json!({
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": app.template.source(false),
        "details": details(app),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": modified(app.model.path()),
    }))
}

/// The work that a request asks for.
pub enum RequestedWork {
    /// Only to load the model.
    Nothing(Value),
    Text(Box<Job>, OllamaEncoder),
}

/// Options that keep their names: Ollama's, and further ones of llama-server's samplers.
const OPTIONS: [&str; 29] = [
    "adaptive_decay",
    "adaptive_target",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "dynatemp_range",
    "frequency_penalty",
    "ignore_eos",
    "min_keep",
    "min_p",
    "mirostat",
    "mirostat_eta",
    "mirostat_tau",
    "presence_penalty",
    "repeat_last_n",
    "repeat_penalty",
    "samplers",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
];

/// Moves the fields in `options`, and fields with other names here, to the names that the other
/// APIs use.
fn common(fields: &Fields<'_>, request: &mut Map<String, Value>) -> Result<()> {
    if let Some(options) = fields.fields("options")? {
        for (name, value) in options.object() {
            let name = match name.as_str() {
                "num_predict" => "n_predict",
                "num_keep" => "n_keep",
                other if OPTIONS.contains(&other) => other,
                // Ignore runtime options such as `num_ctx` and unknown options, as Ollama does.
                _ => continue,
            };
            // -2 means to fill the context, so there is no limit.
            let value = match value.as_i64() {
                Some(..-1) if name == "n_predict" => json!(-1),
                _ => value.clone(),
            };
            request.insert(name.to_owned(), value);
        }
    }
    match fields.get(&["format"]) {
        None => {}
        Some((_, Value::String(text))) if text.is_empty() => {}
        Some((_, Value::String(text))) if text == "json" => {
            request.insert("json_schema".to_owned(), json!({"type": "object"}));
        }
        Some((_, schema @ Value::Object(_))) => {
            request.insert("json_schema".to_owned(), schema.clone());
        }
        Some((name, other)) => {
            return Err(ApiError::field(
                name,
                format!("must be \"json\" or a schema, and is {}", kind(other)),
            ));
        }
    }
    match fields.get(&["think"]) {
        None => {}
        Some((_, Value::Bool(is_on))) => {
            request.insert("enable_thinking".to_owned(), (*is_on).into());
        }
        Some((_, Value::String(level))) => {
            request.insert("enable_thinking".to_owned(), true.into());
            request.insert("reasoning_effort".to_owned(), level.as_str().into());
        }
        Some((name, other)) => {
            return Err(ApiError::field(
                name,
                format!("must be true, false or a level, and is {}", kind(other)),
            ));
        }
    }
    let count = fields.count(&["top_logprobs"], MAX_PROBABILITIES)?;
    if fields.boolean(&["logprobs"], false)? {
        request.insert("logprobs".to_owned(), true.into());
        chat::member(request, "top_logprobs", count.map(Value::from));
    }
    let is_stream = fields.boolean(&["stream"], true)?;
    request.insert("stream".to_owned(), is_stream.into());
    Ok(())
}

/// Returns the text of a field after the images of `images`, as parts in OpenAI's format, or `None`
/// if there are no images. `prefix` comes before names of fields.
fn content_with_images(
    context: &RequestContext,
    fields: &Fields<'_>,
    prefix: &str,
    text: &str,
) -> Result<Option<Value>> {
    let images = fields.list("images")?.unwrap_or_default();
    if images.is_empty() {
        return Ok(None);
    }
    if context.encoder.is_none() {
        return Err(ApiError::image(format!("{prefix}images")));
    }
    let images = images.iter().enumerate().map(|(i, image)| {
        let place = format!("{prefix}images[{i}]");
        let image = image.as_str().ok_or_else(|| {
            let message = format!("must be an image in base64, and is {}", kind(image));
            ApiError::field(&place, message)
        })?;
        Ok(image_part(image, &place))
    });
    let text = fields.text(&[text])?.filter(|text| !text.is_empty());
    let text = text.map(|text| Ok(json!({"type": "text", "text": text})));
    Ok(Some(images.chain(text).collect::<Result<_>>()?))
}

/// Translates Ollama's messages to OpenAI's format. In Ollama's, arguments of calls are objects and
/// results name their tool.
fn messages(context: &RequestContext, fields: &Fields<'_>) -> Result<Vec<Value>> {
    let list = fields.list("messages")?.unwrap_or_default();
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut count = 0;
    let mut messages = Vec::new();
    for (i, message) in list.iter().enumerate() {
        let place = format!("messages[{i}]");
        let read = Fields::from_value(&place, message)?;
        let mut message = read.object().clone();
        message.remove("images");
        if let Some(content) = content_with_images(context, &read, &format!("{place}."), "content")?
        {
            message.insert("content".to_owned(), content);
        }
        if let Some(made) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            for (j, call) in made.iter_mut().enumerate() {
                let place = format!("messages[{i}].tool_calls[{j}]");
                let id = Fields::from_value(&place, call)?.text(&["id"])?;
                let has_id = id.is_some_and(|id| !id.is_empty());
                let name = call["function"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                if !has_id {
                    call["id"] = format!("call_{count:08}").into();
                    count += 1;
                }
                calls.push((name, call["id"].as_str().unwrap_or_default().to_owned()));
            }
        }
        if let Some(name) = read.text(&["tool_name"])? {
            message.remove("tool_name");
            message.insert("name".to_owned(), name.into());
            if let Some(at) = calls.iter().position(|(known, _)| known == name) {
                let (_, id) = calls.remove(at);
                message.insert("tool_call_id".to_owned(), id.into());
            }
        }
        messages.push(message.into());
    }
    Ok(messages)
}

pub fn job(context: &RequestContext, body: &Value, is_chat: bool) -> Result<RequestedWork> {
    read(context, body, is_chat).map_err(|error| error.renamed("json_schema", "format"))
}

fn read(context: &RequestContext, body: &Value, is_chat: bool) -> Result<RequestedWork> {
    let fields = Fields::new(body)?;
    fields.text(&["model"])?;
    let mut has_context = false;
    let mut request = Map::new();
    common(&fields, &mut request)?;
    let mut job = if is_chat {
        let messages = messages(context, &fields)?;
        if messages.is_empty() {
            return Ok(RequestedWork::Nothing(done(
                &context.model_id(),
                true,
                "load",
            )));
        }
        request.insert("messages".to_owned(), messages.into());
        if let Some(tools) = fields.list("tools")? {
            request.insert("tools".to_owned(), tools.into());
        }
        chat::job(context, &request.into())?
    } else {
        let prompt = fields.text(&["prompt"])?.unwrap_or_default();
        if prompt.is_empty() {
            return Ok(RequestedWork::Nothing(done(
                &context.model_id(),
                false,
                "load",
            )));
        }
        let with_images = content_with_images(context, &fields, "", "prompt")?;
        if fields
            .text(&["template"])?
            .is_some_and(|text| !text.is_empty())
        {
            return Err(ApiError::field(
                "template",
                "templates of requests are not supported: write the whole prompt, with \"raw\": true",
            ));
        }
        let suffix = fields.text(&["suffix"])?.filter(|text| !text.is_empty());
        let is_raw = suffix.is_some() || fields.boolean(&["raw"], false)?;
        if is_raw && with_images.is_some() {
            let message = "are not supported with \"raw\" or \"suffix\": leave these out";
            return Err(ApiError::field("images", message));
        }
        if let Some(suffix) = suffix {
            request.insert("input_prefix".to_owned(), prompt.into());
            request.insert("input_suffix".to_owned(), suffix.into());
            native::infill(context, &request.into())?.0
        } else if fields.boolean(&["raw"], false)? {
            request.insert("prompt".to_owned(), prompt.into());
            let request = request.into();
            let read = Fields::new(&request)?;
            let (prompts, _) = native::prompts(context, &read)?;
            Job::new(context, &read, prompts, ChatExtras::default())?
        } else {
            let system = fields.text(&["system"])?;
            let system = system.map(|text| json!({"role": "system", "content": text}));
            let content = with_images.unwrap_or_else(|| prompt.into());
            let user = json!({"role": "user", "content": content});
            let messages: Vec<Value> = system.into_iter().chain([user]).collect();
            request.insert("messages".to_owned(), messages.into());
            has_context = true;
            chat::job(context, &request.into())?
        }
    };
    if has_context {
        let before = earlier_tokens(context, &fields)?;
        for request in &mut job.requests {
            let first = request.prompt.first().copied();
            let starts_with_bos = first.is_some() && first == context.tokenizer.bos();
            let replaced = usize::from(starts_with_bos && !before.is_empty());
            request.prompt.splice(..replaced, before.clone());
        }
    }
    let encoder = OllamaEncoder {
        model: body["model"]
            .as_str()
            .map_or_else(|| job.model.clone(), str::to_owned),
        is_chat,
        has_context,
        started: std::time::Instant::now(),
        call: None,
        waiting: Vec::new(),
    };
    Ok(RequestedWork::Text(Box::new(job), encoder))
}

/// Reads the tokens of the text so far, which an earlier response of `/api/generate` returned.
fn earlier_tokens(app: &App, fields: &Fields<'_>) -> Result<Vec<u32>> {
    let list = fields.list("context")?.unwrap_or_default();
    let count = app.tokenizer.vocab_size();
    let tokens = list.iter().map(|token| {
        let id = token.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.filter(|&id| (id as usize) < count);
        id.ok_or_else(|| ApiError::field("context", format!("token {token} does not exist")))
    });
    tokens.collect()
}

/// Computes embeddings of several texts.
pub fn embed(context: &RequestContext, body: &Value) -> Result<Value> {
    let start = std::time::Instant::now();
    let fields = Fields::new(body)?;
    let mut request = Map::new();
    let truncates = fields.boolean(&["truncate"], true)?;
    for name in ["input", "dimensions"] {
        chat::member(
            &mut request,
            name,
            fields.get(&[name]).map(|(_, value)| value.clone()),
        );
    }
    let found = embeddings::openai_or_cut(context, &request.into(), truncates)?;
    let list = found["data"].as_array().cloned().unwrap_or_default();
    let list: Vec<Value> = list
        .into_iter()
        .map(|mut entry| entry["embedding"].take())
        .collect();
    Ok(json!({
        "model": context.model_id(),
        "embeddings": list,
        "total_duration": nanoseconds(start.elapsed()),
        "load_duration": 0,
        "prompt_eval_count": found["usage"]["prompt_tokens"],
    }))
}

/// Computes the embedding of one text.
pub fn embeddings(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let prompt = fields.required_text("prompt")?;
    let mut found = embeddings::openai_or_cut(context, &json!({"input": prompt}), true)?;
    Ok(json!({"embedding": found["data"][0]["embedding"].take()}))
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Sends an answer in Ollama's format.
pub struct OllamaEncoder {
    model: String,
    is_chat: bool,
    /// True if the last line has the tokens of the text, for the `context` of the next request.
    has_context: bool,
    started: std::time::Instant,
    /// Call that is being generated. Ollama sends only whole calls.
    call: Option<AnswerCall>,
    /// Log-probabilities of tokens whose text has not been sent yet.
    waiting: Vec<Value>,
}

impl OllamaEncoder {
    fn line(&mut self, content: &str, thinking: &str, calls: &[Value], is_done: bool) -> Value {
        let mut line = json!({"model": self.model, "created_at": time_now()});
        if self.is_chat {
            let mut message = json!({"role": "assistant", "content": content});
            if !thinking.is_empty() {
                message["thinking"] = thinking.into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            line["message"] = message;
        } else {
            line["response"] = content.into();
            if !thinking.is_empty() {
                line["thinking"] = thinking.into();
            }
        }
        if !self.waiting.is_empty() {
            line["logprobs"] = std::mem::take(&mut self.waiting).into();
        }
        line["done"] = is_done.into();
        line
    }

    fn finish(&self, mut line: Value, choice: &Choice) -> Value {
        line["done_reason"] = match choice.finish_reason() {
            "length" => "length",
            _ => "stop",
        }
        .into();
        line["total_duration"] = nanoseconds(self.started.elapsed()).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = choice.counts.prompt.into();
        line["prompt_eval_duration"] = nanoseconds(choice.counts.prefill).into();
        line["eval_count"] = choice.counts.generated.into();
        line["eval_duration"] = nanoseconds(choice.counts.decoding).into();
        let has_images = || choice.prompt.iter().any(|&token| token >= FIRST_IMAGE_ID);
        // A context has no images, and their IDs mean nothing without them.
        if self.has_context && !has_images() {
            let generated = choice.tokens.iter().map(|token| token.id);
            let text = choice.prompt.iter().copied().chain(generated);
            line["context"] = text.collect();
        }
        line
    }
}

/// Returns a call of an answer. Its arguments are an object if the model wrote one.
fn call(index: usize, made: &AnswerCall) -> Value {
    let read = serde_json::from_str::<Map<String, Value>>(&made.arguments);
    let arguments = read.map_or_else(|_| json!({"arguments": made.arguments}), Value::Object);
    json!({
        "id": made.id,
        "function": {"index": index, "name": made.name, "arguments": arguments},
    })
}

impl ResponseEncoder for OllamaEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        if let Update::Token { token, .. } = update {
            self.waiting.extend(choice.probabilities(token, false));
        }
        match update {
            Update::Token { text, .. } | Update::Rest(text)
                if !choice.is_parsed() && !text.is_empty() =>
            {
                let line = self.line(text, "", &[], false);
                out.line(&line);
            }
            Update::Parsed(Parsed::Content(text)) => {
                let line = self.line(text, "", &[], false);
                out.line(&line);
            }
            Update::Parsed(Parsed::Reasoning(text)) => {
                let line = self.line("", text, &[], false);
                out.line(&line);
            }
            Update::Parsed(Parsed::ToolCallStart { id, name, .. }) => {
                self.call = Some(AnswerCall {
                    id: id.clone(),
                    name: name.clone(),
                    ..AnswerCall::default()
                });
            }
            Update::Parsed(Parsed::ToolArguments { text, .. }) => {
                if let Some(call) = &mut self.call {
                    call.arguments.push_str(text);
                }
            }
            Update::Parsed(Parsed::ToolCallEnd { index, is_complete }) => {
                if let Some(made) = self.call.take()
                    && (*is_complete || !choice.is_cut())
                {
                    let line = self.line("", "", &[call(*index, &made)], false);
                    out.line(&line);
                }
            }
            Update::Finished => {
                let line = self.line("", "", &[], true);
                out.line(&self.finish(line, choice));
            }
            _ => {}
        }
    }

    fn end(&mut self, _choices: &[Choice], _out: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.line(&error.ollama());
    }

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let Some(choice) = choices.first() else {
            return Value::Null;
        };
        let calls: Vec<Value> = choice
            .calls()
            .enumerate()
            .map(|(index, made)| call(index, made))
            .collect();
        let content = if choice.is_parsed() {
            &choice.answer.content
        } else {
            &choice.text
        };
        let tokens = choice.tokens.iter();
        let found = tokens.filter_map(|token| choice.probabilities(token, false));
        self.waiting = found.collect();
        let line = self.line(content, &choice.answer.reasoning, &calls, true);
        self.finish(line, choice)
    }

    fn is_lines(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_values_are_parsed() {
        let read = |value: Value| keep_alive(&json!({"keep_alive": value}));
        let seconds = |count: f64| Ok(Some(ModelLifetime::For(Duration::from_secs_f64(count))));
        assert_eq!(read(json!(null)), Ok(None));
        assert_eq!(read(json!(0)), Ok(Some(ModelLifetime::Leaves)));
        assert_eq!(read(json!("0s")), Ok(Some(ModelLifetime::Leaves)));
        assert_eq!(read(json!(-1)), Ok(Some(ModelLifetime::Always)));
        assert_eq!(read(json!("-1m")), Ok(Some(ModelLifetime::Always)));
        assert_eq!(read(json!(2.5)), seconds(2.5));
        assert_eq!(read(json!("1h30m")), seconds(5400.0));
        assert_eq!(read(json!("300ms")), seconds(0.3));
        assert_eq!(read(json!(1e300)), Ok(Some(ModelLifetime::Always)));
        assert_eq!(
            read(json!(18_446_744_073_709_549_568u64)),
            Ok(Some(ModelLifetime::Always))
        );
        assert_eq!(read(json!("99999999h")), Ok(Some(ModelLifetime::Always)));
        for value in [
            json!("soon"),
            json!(""),
            json!("5x"),
            json!([]),
            json!("1.2.3s"),
            json!("NaN"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert!(error.message.starts_with("\"keep_alive\""), "{value}");
        }
    }
}
