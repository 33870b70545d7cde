//! Answers to the questions of routers, in the formats of vLLM and SGLang.

use crate::api::{anthropic, native, responses, tokens};
use crate::app::App;
use crate::context::RequestContext;
use crate::error::Result;
use crate::fields::Fields;
use crate::ids;
use serde_json::{Value, json};

/// Returns the tokens of a prompt, by which a router finds servers that have it in their cache.
fn rendered(context: &RequestContext, prefix: &str, tokens: &[u32]) -> Result<Value> {
    /// Bytes of a token in JSON, as a value and as text.
    const TOKEN: usize = size_of::<Value>() + 8;
    let bytes = tokens.len().saturating_mul(TOKEN);
    context.account.charge("prompt", bytes)?;
    Ok(json!({"request_id": ids::id(prefix), "model": context.model_id(), "token_ids": tokens}))
}

/// Returns the tokens of a conversation.
pub fn render_chat(context: &RequestContext, body: &Value) -> Result<Value> {
    let tokens = tokens::of_conversation(context, body)?;
    rendered(context, "chatcmpl-", &tokens)
}

/// Returns the tokens of each prompt.
pub fn render_completion(context: &RequestContext, body: &Value) -> Result<Value> {
    let (prompts, _) = native::prompts(context, &Fields::new(body)?)?;
    let prompts = prompts.iter();
    prompts
        .map(|prompt| rendered(context, "cmpl-", &prompt.tokens))
        .collect()
}

/// Returns the tokens of a response's conversation.
pub fn render_response(context: &RequestContext, body: &Value) -> Result<Value> {
    let tokens = responses::tokens(context, body)?;
    rendered(context, "resp_", &tokens)
}

/// Returns the tokens of a message request.
pub fn render_message(context: &RequestContext, body: &Value) -> Result<Value> {
    let tokens = anthropic::tokens(context, body)?;
    rendered(context, "msg_", &tokens)
}

/// Describes the model, as SGLang does.
pub fn model_info(app: &App) -> Value {
    let id = app.model_id();
    json!({
        "model_path": id,
        "tokenizer_path": id,
        "is_generation": app.handle.is_some(),
        "model_type": app.model.architecture().name,
        "weight_version": "default",
    })
}

/// Describes the server, as SGLang does, and as vLLM's router expects it.
pub fn server_info(app: &App) -> Value {
    let id = app.model_id();
    let events = app.options.kv_events.as_ref();
    let limits = app.handle.as_ref().map(|handle| handle.limits());
    let cells = app.handle.as_ref().map(|handle| handle.view().cells);
    json!({
        "model_path": id,
        "model_id": id,
        "served_model_name": id,
        "instance_id": app.instance_id,
        "kv_block_size": events.map(|events| events.block_size),
        "version": env!("CARGO_PKG_VERSION"),
        "tp_size": 1,
        "dp_size": 1,
        "context_length": limits.map(|limits| limits.context),
        "max_running_requests": limits.map(|limits| limits.slots),
        "max_total_num_tokens": cells,
    })
}

/// Returns where the events of the cache are published, for each data-parallel rank, as vLLM does.
pub fn kv_event_sources(app: &App) -> Value {
    match &app.options.kv_events {
        None => json!({}),
        Some(events) => json!({"0": {
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay,
            "topic": events.topic,
        }}),
    }
}

/// Returns the number of requests that have a slot or wait for one, as vLLM does.
pub fn load(app: &App) -> Value {
    let count = app.handle.as_ref().map_or(0, |handle| {
        let view = handle.view();
        let running = view.slots.iter().filter(|slot| slot.request.is_some());
        running.count() + view.queued.values().sum::<usize>()
    });
    json!({"server_load": count})
}
