//! Which models there are.

use crate::app::App;
use serde_json::{Value, json};

/// The list for OpenAI's clients, and for others that read `models`.
pub fn list(app: &App) -> Value {
    let model = &app.model;
    let id = app.model_id();
    let spec = model.spec();
    let vocab_type = model
        .metadata()
        .get::<&str>("tokenizer.ggml.model")
        .ok()
        .flatten();
    let meta = json!({
        "vocab_type": vocab_type,
        "n_vocab": spec.n_vocab,
        "n_ctx_train": spec.n_ctx_train,
        "n_ctx": app.handle.as_ref().map(|handle| handle.limits().context),
        "n_embd": spec.n_embd,
        "n_params": model.n_params(),
        "size": model.file_bytes(),
    });
    let mut capabilities = vec!["completion"];
    if app.options.embeddings {
        capabilities.push("embedding");
    }
    json!({
        "models": [{
            "name": id,
            "model": id,
            "modified_at": "",
            "size": model.file_bytes().to_string(),
            "digest": "",
            "type": "model",
            "description": "",
            "tags": app.options.tags,
            "capabilities": capabilities,
            "parameters": "",
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": model.architecture().name,
                "families": [model.architecture().name],
                "parameter_size": "",
                "quantization_level": "",
            },
        }],
        "object": "list",
        "data": [{
            "id": id,
            "aliases": app.options.aliases,
            "tags": app.options.tags,
            "object": "model",
            "created": app.started,
            "owned_by": "samite",
            "meta": meta,
        }],
    })
}
