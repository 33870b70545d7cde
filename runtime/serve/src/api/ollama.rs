//! ollama's interface.

use crate::answer::{Choice, Update};
use crate::api::{embeddings, native};
use crate::app::App;
use crate::chance;
use crate::chat;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, kind};
use crate::job::{ChatExtras, Job};
use crate::stream::{Frames, Teller};
use samite_chat::Event as Parsed;
use serde_json::{Map, Value, json};

/// The version whose interface this is.
const VERSION: &str = "0.12.0";

pub fn version() -> Value {
    json!({"version": VERSION})
}

/// The time of day, as RFC 3339 has it.
fn time() -> String {
    let since = chance::since_epoch();
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
        "parameter_size": format!("{:.1}B", app.model.n_params() as f64 / 1e9),
        "quantization_level": "unknown",
    })
}

fn digest(app: &App) -> String {
    let name = app.model_id();
    let text = format!("{name} {} {}", app.model.file_bytes(), app.model.n_params());
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

fn entry(app: &App) -> Map<String, Value> {
    let id = app.model_id();
    let members = [
        ("name", json!(id)),
        ("model", json!(id)),
        ("modified_at", json!(time())),
        ("size", app.model.file_bytes().into()),
        ("digest", digest(app).into()),
        ("details", details(app)),
    ];
    members
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect()
}

pub fn tags(app: &App) -> Value {
    json!({"models": [entry(app)]})
}

pub fn ps(app: &App) -> Value {
    let mut entry = entry(app);
    entry.insert("expires_at".to_owned(), "2318-01-01T00:00:00Z".into());
    entry.insert("size_vram".to_owned(), 0.into());
    let context = app
        .handle
        .as_ref()
        .map_or(0, |handle| handle.limits().context);
    entry.insert("context_length".to_owned(), context.into());
    json!({"models": [entry]})
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
        "modified_at": time(),
    }))
}

/// What was asked for.
pub enum Asked {
    /// Only that the model is there.
    Nothing(Value),
    Text(Box<Job>, OllamaTeller),
}

/// Moves what `options` says, and what has another name here, to where other interfaces have it.
fn common(fields: &Fields<'_>, request: &mut Map<String, Value>) -> Result<()> {
    if let Some(options) = fields.fields("options")? {
        for (name, value) in options.object() {
            let name = match name.as_str() {
                "num_predict" => "n_predict",
                "num_keep" => "n_keep",
                // Those of ollama's own machinery: the context and the threads are those of the server.
                "num_ctx" | "num_batch" | "num_gpu" | "main_gpu" | "num_thread" | "use_mmap"
                | "numa" | "penalize_newline" | "tfs_z" | "low_vram" | "f16_kv" | "vocab_only"
                | "use_mlock" => continue,
                // An answer is one message.
                "n" | "n_cmpl" => continue,
                other => other,
            };
            // -2 is to fill the context: no limit does.
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
    let is_stream = fields.boolean(&["stream"], true)?;
    request.insert("stream".to_owned(), is_stream.into());
    Ok(())
}

/// ollama's messages as OpenAI's: calls have objects as arguments, and results name their tool.
fn messages(fields: &Fields<'_>) -> Result<Vec<Value>> {
    let list = fields.list("messages")?.unwrap_or_default();
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut count = 0;
    let mut messages = Vec::new();
    for (i, message) in list.iter().enumerate() {
        let place = format!("messages[{i}]");
        let read = Fields::of(&place, message)?;
        if read
            .list("images")?
            .is_some_and(|images| !images.is_empty())
        {
            return Err(ApiError::image(format!("{place}.images")));
        }
        let mut message = read.object().clone();
        if let Some(made) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            for (j, call) in made.iter_mut().enumerate() {
                if !call.is_object() {
                    let place = format!("messages[{i}].tool_calls[{j}]");
                    let message = format!("must be an object, and is {}", kind(call));
                    return Err(ApiError::field(place, message));
                }
                let name = call["function"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                if call
                    .get("id")
                    .and_then(Value::as_str)
                    .is_none_or(str::is_empty)
                {
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

pub fn job(app: &App, body: &Value, is_chat: bool) -> Result<Asked> {
    let fields = Fields::new(body)?;
    fields.text(&["model"])?;
    let teller = |job: &Job| OllamaTeller {
        model: body["model"]
            .as_str()
            .map_or_else(|| job.model.clone(), str::to_owned),
        is_chat,
        started: std::time::Instant::now(),
        call: None,
    };
    let loaded = |key: &str, empty: Value| {
        json!({
            "model": app.model_id(),
            "created_at": time(),
            key: empty,
            "done": true,
            "done_reason": match body["keep_alive"] == json!(0) {
                true => "unload",
                false => "load",
            },
        })
    };
    let mut request = Map::new();
    common(&fields, &mut request)?;
    let job = if is_chat {
        let messages = messages(&fields)?;
        if messages.is_empty() {
            let empty = json!({"role": "assistant", "content": ""});
            return Ok(Asked::Nothing(loaded("message", empty)));
        }
        request.insert("messages".to_owned(), messages.into());
        if let Some(tools) = fields.list("tools")? {
            request.insert("tools".to_owned(), tools.into());
        }
        chat::job(app, &request.into())?
    } else {
        let prompt = fields.text(&["prompt"])?.unwrap_or_default();
        if prompt.is_empty() {
            return Ok(Asked::Nothing(loaded("response", json!(""))));
        }
        if fields
            .list("images")?
            .is_some_and(|images| !images.is_empty())
        {
            return Err(ApiError::image("images"));
        }
        if let Some(suffix) = fields.text(&["suffix"])?.filter(|text| !text.is_empty()) {
            request.insert("input_prefix".to_owned(), prompt.into());
            request.insert("input_suffix".to_owned(), suffix.into());
            native::infill(app, &request.into())?.0
        } else if fields.boolean(&["raw"], false)? {
            request.insert("prompt".to_owned(), prompt.into());
            let request = request.into();
            let read = Fields::new(&request)?;
            let (prompts, _) = native::prompts(app, &read)?;
            Job::new(app, &read, prompts, ChatExtras::default())?
        } else {
            let system = fields.text(&["system"])?;
            let system = system.map(|text| json!({"role": "system", "content": text}));
            let user = json!({"role": "user", "content": prompt});
            let messages: Vec<Value> = system.into_iter().chain([user]).collect();
            request.insert("messages".to_owned(), messages.into());
            chat::job(app, &request.into())?
        }
    };
    let teller = teller(&job);
    Ok(Asked::Text(Box::new(job), teller))
}

/// Embeddings of several texts.
pub fn embed(app: &App, body: &Value) -> Result<Value> {
    let start = std::time::Instant::now();
    let fields = Fields::new(body)?;
    let mut request = Map::new();
    for name in ["input", "dimensions"] {
        chat::member(
            &mut request,
            name,
            fields.get(&[name]).map(|(_, value)| value.clone()),
        );
    }
    let found = embeddings::openai(app, &request.into())?;
    let list = found["data"].as_array().cloned().unwrap_or_default();
    let list: Vec<Value> = list
        .into_iter()
        .map(|mut entry| entry["embedding"].take())
        .collect();
    Ok(json!({
        "model": app.model_id(),
        "embeddings": list,
        "total_duration": nanoseconds(start.elapsed()),
        "load_duration": 0,
        "prompt_eval_count": found["usage"]["prompt_tokens"],
    }))
}

/// The embedding of one text.
pub fn embeddings(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let prompt = fields.text(&["prompt"])?;
    let prompt = prompt.ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let mut found = embeddings::openai(app, &json!({"input": prompt}))?;
    Ok(json!({"embedding": found["data"][0]["embedding"].take()}))
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Tells an answer as ollama does.
pub struct OllamaTeller {
    model: String,
    is_chat: bool,
    started: std::time::Instant,
    /// The call that is being written: ollama tells of whole ones.
    call: Option<(String, String)>,
}

impl OllamaTeller {
    fn line(&self, content: &str, thinking: &str, calls: &[Value], is_done: bool) -> Value {
        let mut line = json!({"model": self.model, "created_at": time()});
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
        line["prompt_eval_duration"] = nanoseconds(choice.counts.reading).into();
        line["eval_count"] = choice.counts.written.into();
        line["eval_duration"] = nanoseconds(choice.counts.writing).into();
        line
    }
}

/// A call whose arguments are an object, as far as the model wrote one.
fn call(name: &str, arguments: &str) -> Value {
    let read = serde_json::from_str::<Map<String, Value>>(arguments);
    let arguments = read.map_or_else(|_| json!({"arguments": arguments}), Value::Object);
    json!({"function": {"name": name, "arguments": arguments}})
}

impl Teller for OllamaTeller {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        match update {
            Update::Token { text, .. } | Update::Rest(text)
                if !choice.is_parsed() && !text.is_empty() =>
            {
                out.line(&self.line(text, "", &[], false));
            }
            Update::Parsed(Parsed::Content(text)) => out.line(&self.line(text, "", &[], false)),
            Update::Parsed(Parsed::Reasoning(text)) => out.line(&self.line("", text, &[], false)),
            Update::Parsed(Parsed::ToolCallStart { name, .. }) => {
                self.call = Some((name.clone(), String::new()));
            }
            Update::Parsed(Parsed::ToolArguments { text, .. }) => {
                if let Some((_, arguments)) = &mut self.call {
                    arguments.push_str(text);
                }
            }
            Update::Parsed(Parsed::ToolCallEnd { .. }) => {
                if let Some((name, arguments)) = self.call.take() {
                    out.line(&self.line("", "", &[call(&name, &arguments)], false));
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
        let calls = choice.answer.calls.iter();
        let calls: Vec<Value> = calls
            .map(|made| call(&made.name, &made.arguments))
            .collect();
        let content = match choice.is_parsed() {
            true => &choice.answer.content,
            false => &choice.text,
        };
        let line = self.line(content, &choice.answer.reasoning, &calls, true);
        self.finish(line, choice)
    }

    fn is_lines(&self) -> bool {
        true
    }
}
