//! The OpenAPI description of the server.

use crate::error::{ApiError, Result};
use crate::options::ServeOptions;
use serde_json::{Value, json};

/// Returns the description, with this server's version, prefix and prediction path.
pub fn description(options: &ServeOptions) -> Result<Value> {
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
