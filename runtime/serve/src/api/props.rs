//! What a server is, its adapters, and its metrics.

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::job;
use serde_json::{Value, json};
use std::fmt::Write;

pub fn props(app: &App) -> Result<Value> {
    let limits = app.handle.as_ref().map(|handle| handle.limits());
    let capabilities = app.template.capabilities(false);
    let with_tools = app.template.capabilities(true);
    let tokenizer = &app.tokenizer;
    let text = |token: Option<u32>| token.map_or(String::new(), |token| app.text_of(&[token]));
    Ok(json!({
        "default_generation_settings": {
            "params": job::default_settings(app)?,
            "n_ctx": limits.map_or(0, |limits| limits.context),
        },
        "total_slots": limits.map_or(1, |limits| limits.slots),
        "model_alias": app.model_id(),
        "model_path": app.model.path().display().to_string(),
        "modalities": {"vision": false, "audio": false},
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

/// Has requests that say nothing get these shares of adapters.
pub fn set_adapters(app: &App, body: &Value) -> Result<Value> {
    let shares = job::shares(app, "body", body)?;
    let adapters = app.adapters(&shares);
    app.handle()?
        .call(move |engine| engine.set_default_adapters(&adapters));
    app.set_shares(shares);
    Ok(json!({"success": true}))
}

/// Prometheus' text.
pub fn metrics(app: &App) -> Result<String> {
    let view = match &app.handle {
        Some(handle) => handle.view(),
        None => std::sync::Arc::default(),
    };
    let embedded = app
        .embedder
        .as_ref()
        .map_or((0, 0), |embedder| embedder.totals());
    let totals = &view.totals;
    let busy = view
        .slots
        .iter()
        .filter(|slot| slot.request.is_some())
        .count();
    let rate = |tokens: u64, seconds: f64| {
        if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        }
    };
    let (reading, writing) = (
        totals.prompt_time.as_secs_f64(),
        totals.writing_time.as_secs_f64(),
    );
    // Rates are those since the last time that somebody asked.
    let before = app.last_scrape(*totals);
    let lately = |now: std::time::Duration, then: std::time::Duration| {
        now.saturating_sub(then).as_secs_f64()
    };
    let read_lately = totals.prompt_tokens.saturating_sub(before.prompt_tokens);
    let wrote_lately = totals.written_tokens.saturating_sub(before.written_tokens);
    let reading_lately = lately(totals.prompt_time, before.prompt_time);
    let writing_lately = lately(totals.writing_time, before.writing_time);
    let per_step = if totals.steps == 0 {
        0.0
    } else {
        totals.busy_slots as f64 / totals.steps as f64
    };
    let used = if view.cells == 0 {
        0.0
    } else {
        view.used_cells as f64 / view.cells as f64
    };
    let counters: [(&str, &str, f64); 16] = [
        (
            "llamacpp:prompt_tokens_total",
            "Tokens of prompts that were computed.",
            (totals.prompt_tokens + embedded.0) as f64,
        ),
        (
            "llamacpp:prompt_tokens_cached_total",
            "Tokens of prompts that were known.",
            totals.cached_tokens as f64,
        ),
        (
            "llamacpp:prompt_seconds_total",
            "Time of steps that computed prompts.",
            reading,
        ),
        (
            "llamacpp:tokens_predicted_total",
            "Tokens that were written.",
            totals.written_tokens as f64,
        ),
        (
            "llamacpp:tokens_predicted_seconds_total",
            "Time of steps that wrote tokens only.",
            writing,
        ),
        (
            "llamacpp:n_decode_total",
            "Steps.",
            (totals.steps + embedded.1) as f64,
        ),
        (
            "llamacpp:n_tokens_max",
            "The longest text.",
            totals.longest as f64,
        ),
        (
            "llamacpp:spec_decode_num_draft_tokens_total",
            "Tokens that were drafted.",
            totals.drafted_tokens as f64,
        ),
        (
            "llamacpp:spec_decode_num_accepted_tokens_total",
            "Drafted tokens that were taken.",
            totals.accepted_tokens as f64,
        ),
        (
            "llamacpp:spec_decode_num_drafts_total",
            "Drafts.",
            totals.drafts as f64,
        ),
        (
            "samite:requests_finished_total",
            "Requests that were answered.",
            totals.finished as f64,
        ),
        (
            "samite:requests_failed_total",
            "Requests that failed.",
            totals.failed as f64,
        ),
        (
            "samite:requests_cancelled_total",
            "Requests that were cancelled, or whose reader left.",
            totals.cancelled as f64,
        ),
        (
            "samite:preemptions_total",
            "How often a request made room for others.",
            totals.preempted as f64,
        ),
        (
            "samite:prefix_evictions_total",
            "Kept texts that were given up.",
            totals.evicted as f64,
        ),
        (
            "samite:prefix_cache_queries_total",
            "Tokens of prompts that were looked for.",
            totals.asked_tokens as f64,
        ),
    ];
    let gauges: [(&str, &str, f64); 9] = [
        (
            "llamacpp:prompt_tokens_seconds",
            "Tokens of prompts per second.",
            rate(read_lately, reading_lately),
        ),
        (
            "llamacpp:predicted_tokens_seconds",
            "Tokens written per second.",
            rate(wrote_lately, writing_lately),
        ),
        (
            "llamacpp:requests_processing",
            "Requests that have a slot.",
            busy as f64,
        ),
        (
            "llamacpp:requests_deferred",
            "Requests that wait for a slot.",
            view.queued as f64,
        ),
        (
            "llamacpp:n_busy_slots_per_decode",
            "Slots at work in a step, on average.",
            per_step,
        ),
        (
            "samite:num_requests_running",
            "Requests that have a slot.",
            busy as f64,
        ),
        (
            "samite:num_requests_waiting",
            "Requests that wait for a slot.",
            view.queued as f64,
        ),
        (
            "samite:kv_cache_usage_perc",
            "The part of the cache that is used, kept texts included.",
            used,
        ),
        (
            "samite:prefixes_kept",
            "Texts that are kept.",
            view.kept as f64,
        ),
    ];
    let mut text = String::new();
    for (list, kind) in [(&counters[..], "counter"), (&gauges[..], "gauge")] {
        for (name, help, value) in list {
            writeln!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
            )
            .map_err(|error| ApiError::new(500, error.to_string()))?;
        }
    }
    Ok(text)
}
