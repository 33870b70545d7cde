//! Lists of models.

use crate::app::App;
use crate::entry::{Entry, Status};
use crate::error::Result;
use crate::hub::Hub;
use serde_json::{Value, json};

/// Returns the list in OpenAI's format, and in the format for clients that read `models`.
pub fn list(hub: &Hub) -> Value {
    let (mut shown_all, mut data) = (Vec::new(), Vec::new());
    for entry in &hub.entries() {
        match entry.status() {
            Status::Loaded(app) => {
                shown_all.push(shown(&app));
                data.push(loaded(hub, entry, &app));
                let adapters = 0..app.options.adapters.len();
                data.extend(adapters.filter_map(|number| adapter(hub, &app, number)));
            }
            status => {
                shown_all.push(json!({"name": entry.id(), "model": entry.id(), "type": "model"}));
                data.push(unloaded(hub, entry, &status));
            }
        }
    }
    for (name, progress) in hub.downloads.progress() {
        shown_all.push(json!({"name": name, "model": name, "type": "model"}));
        data.push(json!({
            "id": name,
            "object": "model",
            "created": hub.started,
            "owned_by": "samite",
            "status": {"value": "downloading", "progress": progress},
            "meta": null,
        }));
    }
    json!({"models": shown_all, "object": "list", "data": data})
}

/// Returns one model of the list.
///
/// # Errors
/// Returns an error if no model has this name.
pub fn one(hub: &Hub, name: &str) -> Result<Value> {
    for entry in &hub.entries() {
        if let Status::Loaded(app) = entry.status()
            && let Some(number) = app.adapter_named(name)
            && let Some(told) = adapter(hub, &app, number)
        {
            return Ok(told);
        }
    }
    let entry = hub.find_named(name)?;
    Ok(match entry.status() {
        Status::Loaded(app) => loaded(hub, &entry, &app),
        status => unloaded(hub, &entry, &status),
    })
}

fn unloaded(hub: &Hub, entry: &Entry, status: &Status) -> Value {
    let mut told = json!({"value": "unloaded"});
    match status {
        Status::Unloaded(Some(failure)) => {
            told["failed"] = true.into();
            told["error"] = failure.as_str().into();
        }
        Status::Loading => told["value"] = "loading".into(),
        _ => {}
    }
    json!({
        "id": entry.id(),
        "aliases": entry.names,
        "tags": hub.options.tags,
        "object": "model",
        "created": hub.started,
        "owned_by": "samite",
        "status": told,
        "meta": null,
    })
}

fn loaded(hub: &Hub, entry: &Entry, app: &App) -> Value {
    let model = &app.model;
    let spec = model.spec();
    let vocab_type = model
        .metadata()
        .get::<&str>("tokenizer.ggml.model")
        .ok()
        .flatten();
    let is_sleeping = app
        .handle
        .as_ref()
        .is_some_and(|handle| handle.view().is_sleeping);
    json!({
        "id": app.model_id(),
        "aliases": if app.options.aliases.is_empty() { &entry.names } else { &app.options.aliases },
        "tags": app.options.tags,
        "object": "model",
        "created": hub.started,
        "owned_by": "samite",
        "root": app.model_id(),
        "max_model_len": app.handle.as_ref().map(|handle| handle.limits().context),
        "status": {"value": if is_sleeping { "sleeping" } else { "loaded" }},
        "meta": {
            "vocab_type": vocab_type,
            "n_vocab": spec.n_vocab,
            "n_ctx_train": spec.n_ctx_train,
            "n_ctx": app.handle.as_ref().map(|handle| handle.limits().context),
            "n_embd": spec.n_embd,
            "n_params": model.n_params(),
            "size": model.file_bytes(),
        },
    })
}

/// Returns an adapter as a model in vLLM's format: requests can name it instead of the model.
fn adapter(hub: &Hub, app: &App, number: usize) -> Option<Value> {
    let name = app.adapter_name(number)?;
    // Skip an adapter whose name refers to another one.
    (app.adapter_named(name) == Some(number)).then(|| {
        json!({
            "id": name,
            "object": "model",
            "created": hub.started,
            "owned_by": "samite",
            "parent": app.model_id(),
        })
    })
}

/// Returns a model in the format for clients other than OpenAI's.
fn shown(app: &App) -> Value {
    let id = app.model_id();
    let family = app.model.architecture().name;
    let mut capabilities = vec!["completion"];
    if app.options.embeddings {
        capabilities.push("embedding");
    }
    if app.encoder.is_some() {
        capabilities.push("multimodal");
    }
    json!({
        "name": id,
        "model": id,
        "modified_at": "",
        "size": app.model.file_bytes().to_string(),
        "digest": "",
        "type": "model",
        "description": "",
        "tags": app.options.tags,
        "capabilities": capabilities,
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    })
}
