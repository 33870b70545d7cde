//! Slots: lists them, and saves, restores and erases their cached prompts.

use crate::access::Caller;
use crate::app::App;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use samite_llm::SavedSequence;
use samite_requests::Engine;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;
use tokio::sync::oneshot;

/// Lists all slots.
pub fn list(app: &App, caller: Caller) -> Result<Value> {
    let handle = app.handle()?;
    let context = handle.limits().context;
    let view = handle.view();
    let slots = view.slots.iter().enumerate().map(|(id, slot)| {
        let mut shown = json!({
            "id": id,
            "n_ctx": context,
            "speculative": false,
            "is_processing": slot.request.is_some(),
        });
        // Of other keys' requests, only the load is visible.
        if !caller.is_admin && slot.owner != caller.owner {
            return shown;
        }
        if let Some(request) = slot.request {
            let settings = app.settings(slot.tag);
            let limit = settings
                .as_ref()
                .and_then(|settings| settings["n_predict"].as_i64());
            let remaining = match limit {
                Some(limit) if limit >= 0 => limit - slot.generated as i64,
                _ => -1,
            };
            shown["id_task"] = request.into();
            shown["params"] = settings.unwrap_or_default();
            shown["n_prompt_tokens"] = slot.prompt.into();
            shown["n_prompt_tokens_cache"] = slot.cached.into();
            shown["n_prompt_tokens_processed"] = slot.computed.min(slot.prompt).into();
            shown["is_paused"] = slot.is_paused.into();
            shown["next_token"] = json!([{
                "has_next_token": true,
                "n_remain": remaining,
                "n_decoded": slot.generated,
            }]);
        }
        shown["n_cached"] = slot.computed.into();
        shown
    });
    Ok(slots.collect())
}

/// Runs `act` on the engine between two steps.
pub async fn on_engine<T: Send + 'static>(
    app: &App,
    act: impl FnOnce(&mut Engine) -> T + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    app.handle()?.call(move |engine| {
        let _ = sender.send(act(engine));
    });
    let gone = |_| ApiError::new(503, "the engine has ended");
    receiver.await.map_err(gone)
}

/// Returns a file name, and its path in the folder of saved slots.
fn path(context: &RequestContext, body: &Value) -> Result<(String, PathBuf)> {
    let fields = Fields::new(body)?;
    let folder = context.options.slot_save_path.as_ref().ok_or_else(|| {
        ApiError::not_supported(
            "this server does not save slots: start it with --slot-save-path FOLDER",
        )
    })?;
    let name = fields.required_text("filename")?;
    let is_plain = |c: char| !c.is_control() && !"/\\:*?\"<>|".contains(c);
    let is_name = !name.is_empty()
        && name.len() <= 200
        && name.chars().all(is_plain)
        && !name.starts_with('.')
        && !name.ends_with(['.', ' '])
        && !name.starts_with(' ');
    if !is_name {
        return Err(ApiError::field(
            "filename",
            "must be the plain name of a file, without a folder",
        ));
    }
    let folder = match context.caller.owner {
        0 => folder.clone(),
        owner => folder.join(format!("key-{owner:016x}")),
    };
    Ok((name.to_owned(), folder.join(name)))
}

/// Creates a folder that only this user can read, if it does not exist.
fn create_private_folder(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Saves, restores or erases the cached prompt of a slot.
pub async fn act(
    context: &RequestContext,
    slot: &str,
    action: &str,
    body: &Value,
) -> Result<Value> {
    let count = context.handle()?.limits().slots;
    let salt = context.salt();
    let slot: usize = slot
        .parse()
        .ok()
        .filter(|&slot| slot < count)
        .ok_or_else(|| {
            ApiError::field(
                "id_slot",
                format!("there is no such slot: there are {count}"),
            )
        })?;
    let start = Instant::now();
    let ms = || start.elapsed().as_secs_f64() * 1e3;
    let broken = |error: samite_llm::Error| ApiError::invalid(error.to_string());
    let busy = || ApiError::new(503, format!("slot {slot} is at work: try again later"));
    match action {
        "save" => {
            let (name, path) = path(context, body)?;
            let saved = on_engine(context, move |engine| {
                (!engine.is_busy(slot)).then(|| engine.save_slot(slot, salt))
            });
            let saved = saved.await?.ok_or_else(busy)?.map_err(broken)?;
            let Some(saved) = saved else {
                return Err(ApiError::field(
                    "id_slot",
                    format!("slot {slot} has nothing to save"),
                ));
            };
            let tokens = saved.len();
            let to = path.clone();
            let generated = tokio::task::spawn_blocking(move || {
                if let Some(folder) = to.parent() {
                    create_private_folder(folder)?;
                }
                saved.write(&to).map_err(std::io::Error::other)
            });
            let generated = generated.await;
            let generated = generated.map_err(|error| ApiError::new(500, error.to_string()))?;
            generated.map_err(|error| ApiError::new(500, error.to_string()))?;
            let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
            Ok(json!({
                "id_slot": slot,
                "filename": name,
                "n_saved": tokens,
                "n_written": bytes,
                "timings": {"save_ms": ms()},
            }))
        }
        "restore" => {
            let (name, path) = path(context, body)?;
            let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
            let from = path.clone();
            let read = tokio::task::spawn_blocking(move || SavedSequence::read(&from)).await;
            let read = read.map_err(|error| ApiError::new(500, error.to_string()))?;
            // Clients must not learn the path of the folder.
            let shown = |text: String| text.replace(&path.display().to_string(), &name);
            let saved = read.map_err(|error| ApiError::invalid(shown(error.to_string())))?;
            let restored = on_engine(context, move |engine| {
                (!engine.is_busy(slot)).then(|| engine.restore_slot(slot, salt, &saved))
            });
            let tokens = restored.await?.ok_or_else(busy)?.map_err(broken)?;
            Ok(json!({
                "id_slot": slot,
                "filename": name,
                "n_restored": tokens,
                "n_read": bytes,
                "timings": {"restore_ms": ms()},
            }))
        }
        "erase" => {
            let erased = on_engine(context, move |engine| {
                (!engine.is_busy(slot)).then(|| engine.erase_slot(slot, salt))
            });
            let tokens = erased.await?.ok_or_else(busy)?;
            Ok(json!({"id_slot": slot, "n_erased": tokens}))
        }
        other => Err(ApiError::field(
            "action",
            format!("must be save, restore or erase, and is \"{other}\""),
        )),
    }
}
