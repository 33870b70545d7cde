//! Writes calls as a model does, for a conversation whose template does not show them.

use super::format::{Calls, Format, JsonCalls, LiteralCalls};
use super::literal::Style;
use crate::message::ToolCall;
use serde_json::{Map, Value};

impl Format {
    /// Returns calls in the format of the model, or in Hermes' format if the templates of such
    /// models show calls. `guard` marks what the caller chose, which is between the format's marks.
    pub(crate) fn write_calls(&self, calls: &[ToolCall], guard: impl Fn(&str) -> String) -> String {
        let written = match &self.calls {
            // A list without an end.
            Calls::Json(JsonCalls {
                open: [open, ..],
                close: [],
                ..
            }) => {
                let objects: Vec<String> = calls.iter().map(object).collect();
                let list = guard(&format!("[{}]", objects.join(", ")));
                Some(format!("{open}{list}"))
            }
            Calls::Literal(LiteralCalls {
                open,
                close,
                style: Style::Python,
                is_list: true,
                ..
            }) => {
                let calls: Option<Vec<String>> = calls.iter().map(python_call).collect();
                let list = calls.map(|calls| guard(&format!("[{}]", calls.join(", "))));
                list.map(|list| format!("{open}{list}{close}"))
            }
            _ => None,
        };
        written.unwrap_or_else(|| {
            let tagged = calls.iter().map(|call| {
                let call = guard(&object(call));
                format!("<tool_call>{call}</tool_call>")
            });
            tagged.collect()
        })
    }
}

fn object(call: &ToolCall) -> String {
    let name = Value::from(call.function.name.as_str());
    let arguments = match call.function.arguments.trim() {
        "" => "{}",
        arguments => arguments,
    };
    format!("{{\"name\": {name}, \"arguments\": {arguments}}}")
}

/// Returns a call with keyword arguments, or `None` if its arguments are not an object.
fn python_call(call: &ToolCall) -> Option<String> {
    let arguments = match call.function.arguments.trim() {
        "" => Map::new(),
        arguments => serde_json::from_str(arguments).ok()?,
    };
    let arguments = arguments
        .iter()
        .map(|(name, value)| format!("{name}={}", python(value)));
    let arguments: Vec<String> = arguments.collect();
    Some(format!("{}({})", call.function.name, arguments.join(", ")))
}

/// Returns a value as a literal of Python.
fn python(value: &Value) -> String {
    let joined = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(list) => format!("[{}]", joined(list.iter().map(python).collect())),
        Value::Object(members) => {
            let members = members
                .iter()
                .map(|(name, value)| format!("{}: {}", Value::from(name.as_str()), python(value)));
            format!("{{{}}}", joined(members.collect()))
        }
        Value::Number(_) | Value::String(_) => value.to_string(),
    }
}
