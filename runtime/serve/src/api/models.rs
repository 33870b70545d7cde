//! Which models there are.

use crate::app::App;
use crate::entry::{Entry, Status};
use crate::error::Result;
use crate::hub::Hub;
use serde_json::{Value, json};

/// The list for OpenAI's clients, and for others that read `models`.
pub fn list(hub: &Hub) -> Value {
    let entries = hub.entries().iter();
    let (mut shown_all, mut data) = (Vec::new(), Vec::new());
    for entry in entries {
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
    json!({"models": shown_all, "object": "list", "data": data})
}

/// A model of the list.
///
/// # Errors
/// If there is none of this name.
pub fn one(hub: &Hub, name: &str) -> Result<Value> {
    for entry in hub.entries() {
        if let Status::Loaded(app) = entry.status()
            && let Some(number) = app.adapter_named(name)
            && let Some(told) = adapter(hub, &app, number)
        {
            return Ok(told);
        }
    }
    let entry = &hub.entries()[hub.find_named(name)?];
    Ok(match entry.status() {
        Status::Loaded(app) => loaded(hub, entry, &app),
        status => unloaded(hub, entry, &status),
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
        "aliases": match app.options.aliases.is_empty() {
            true => &entry.names,
            false => &app.options.aliases,
        },
        "tags": app.options.tags,
        "object": "model",
        "created": hub.started,
        "owned_by": "samite",
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

/// An adapter, which requests can name in the place of the model, in vLLM's form.
fn adapter(hub: &Hub, app: &App, number: usize) -> Option<Value> {
    let name = app.adapter_name(number)?;
    // What is named so is another.
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

/// A model as others than OpenAI's clients read it.
fn shown(app: &App) -> Value {
    let id = app.model_id();
    let family = app.model.architecture().name;
    let mut capabilities = vec!["completion"];
    if app.options.embeddings {
        capabilities.push("embedding");
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
