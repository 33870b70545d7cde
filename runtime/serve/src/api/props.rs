//! Properties of the server, its adapters, and its metrics.

use crate::api::openai_chat::FINGERPRINT;
use crate::app::App;
use crate::error::Result;
use crate::hub::Hub;
use crate::images::MARKER;
use crate::job;
use crate::settings;
use serde_json::{Value, json};

pub fn props(app: &App) -> Result<Value> {
    let limits = app.handle.as_ref().map(|handle| handle.limits());
    let capabilities = app.template.capabilities(false);
    let with_tools = app.template.capabilities(true);
    let tokenizer = &app.tokenizer;
    let text = |token: Option<u32>| token.map_or(String::new(), |token| app.text_of(&[token]));
    Ok(json!({
        "default_generation_settings": {
            "params": settings::default_settings(app)?,
            "n_ctx": limits.map_or(0, |limits| limits.context),
        },
        "total_slots": limits.map_or(1, |limits| limits.slots),
        "model_alias": app.model_id(),
        "model_path": app.model.path().display().to_string(),
        "modalities": {"vision": app.encoder.is_some(), "audio": false},
        "media_marker": MARKER,
        "endpoint_slots": app.options.slots,
        "endpoint_props": app.options.props,
        "endpoint_metrics": app.options.metrics,
        "webui": app.options.page,
        "is_sleeping": app.handle.as_ref().is_some_and(|handle| handle.view().is_sleeping),
        "is_embedded": app.options.is_embedded,
        "chat_template": app.template.source(false),
        "chat_template_caps": {
            "supports_system_role": capabilities.system_role,
            "supports_string_content": capabilities.text_content,
            "supports_typed_content": capabilities.typed_content,
            "supports_tools": with_tools.tools,
            "supports_tool_calls": with_tools.tool_calls,
            "supports_parallel_tool_calls": with_tools.parallel_calls,
            "supports_object_arguments": with_tools.object_arguments,
            "supports_preserve_reasoning": with_tools.reasoning,
        },
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "build_info": concat!("samite ", env!("CARGO_PKG_VERSION")),
        "devices": app.model.devices().iter().map(|device| device.name().to_owned()).collect::<Vec<_>>(),
    }))
}

/// Returns the properties of a server of several models.
pub fn router(hub: &Hub) -> Value {
    let count = match hub.limits.models {
        // llama-server's spelling of no limit.
        usize::MAX => 0,
        count => count,
    };
    json!({
        "role": "router",
        "max_instances": count,
        "models_autoload": hub.limits.loads,
        "model_alias": "samite",
        "model_path": "",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "modalities": {"vision": false, "audio": false},
        "webui": hub.options.page,
        "build_info": FINGERPRINT,
    })
}

pub fn adapters(app: &App) -> Value {
    let shares = app.shares();
    let adapters = app.options.adapters.iter().zip(shares).enumerate();
    let adapters = adapters.map(|(id, ((adapter, _), scale))| {
        json!({
            "id": id,
            "path": adapter.path().display().to_string(),
            "scale": scale,
            "task_name": "",
            "prompt_prefix": "",
        })
    });
    adapters.collect()
}

/// Sets the default scales of adapters, for requests that set none.
pub fn set_adapters(app: &App, body: &Value) -> Result<Value> {
    let shares = job::shares(app, "body", body)?;
    let adapters = app.adapters(&shares);
    app.handle()?
        .call(move |engine| engine.set_default_adapters(&adapters));
    app.set_shares(shares);
    Ok(json!({"success": true}))
}
