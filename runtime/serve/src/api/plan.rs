//! Placement and memory of the model.

use samite_llm::{Context, Result};
use serde_json::{Value, json};

/// Returns the plan of one token for the web page: devices, splits, and bytes by memory. For a
/// draft model, also its bytes.
///
/// # Errors
/// Returns an error if a device cannot plan.
pub fn plan(context: &Context, draft: Option<&Context>) -> Result<Value> {
    let plan = context.plan(1)?;
    let devices = plan.devices().iter().map(|device| {
        json!({
            "name": device.name(),
            "kind": device.kind(),
            "description": device.description(),
            "memory": device.memory(),
        })
    });
    let splits = plan.to_json()["splits"]
        .as_array()
        .map_or_else(Vec::new, |splits| {
            let count = |value: &Value| value.as_array().map_or(0, Vec::len);
            let split = |split: &Value| {
                json!({
                    "device": split["device"],
                    "operations": count(&split["nodes"]),
                    "copies": count(&split["copies"]),
                })
            };
            splits.iter().map(split).collect()
        });
    let mut told = json!({
        "devices": devices.collect::<Vec<_>>(),
        "splits": splits,
        "memory": memory(context),
    });
    if let Some(draft) = draft {
        let file = draft.model().path().file_name().unwrap_or_default();
        told["draft"] = json!({"model": file.to_string_lossy(), "memory": memory(draft)});
    }
    Ok(told)
}

fn memory(context: &Context) -> Value {
    let rows = context.memory();
    let rows = rows.iter().map(|row| {
        json!({"memory": row.memory, "weights": row.weights, "kv": row.kv, "compute": row.compute})
    });
    rows.collect()
}
