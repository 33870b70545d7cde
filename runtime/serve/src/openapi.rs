//! The OpenAPI description of the server.

use crate::error::{ApiError, Result};
use crate::hub::Hub;
use crate::options::ServeOptions;
use crate::stream::json_text;
use axum::response::Response;
use serde_json::{Value, json};

/// Returns the description.
pub fn response(hub: &Hub) -> Result<Response> {
    if let Some(text) = hub.description.get() {
        return Ok(json_text(200, text.clone()));
    }
    let text = description(&hub.options)?.to_string();
    let text = hub.description.get_or_init(|| text.into());
    Ok(json_text(200, text.clone()))
}

/// Returns the description with this server's version, prefix and prediction path.
fn description(options: &ServeOptions) -> Result<Value> {
    let mut described: Value = serde_json::from_str(include_str!("openapi.json"))
        .map_err(|error| ApiError::new(500, error.to_string()))?;
    described["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    if !options.prefix.is_empty() {
        described["servers"] = json!([{"url": options.prefix}]);
    }
    if let Some(path) = &options.predict_path {
        described["paths"][path] = json!({"$ref": "#/components/pathItems/Predict"});
    }
    Ok(described)
}
