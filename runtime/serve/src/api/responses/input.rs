//! Input items of the Responses API as messages of chat completions.

use super::tools::{ClientTools, SEARCH, arguments_for};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, TextItems, kind};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

const PARTS: TextItems = TextItems {
    words: "parts",
    texts: &[
        "input_text",
        "text",
        "output_text",
        "summary_text",
        "reasoning_text",
        "refusal",
    ],
    image: "input_image",
    image_url: |part| Ok(part.text(&["image_url"])?.map(str::to_owned)),
    members: &["text", "refusal"],
};

/// Messages of a conversation.
#[derive(Default)]
pub struct Messages {
    pub list: Vec<Value>,
    /// Field that each message came from.
    pub places: Vec<String>,
    system: Vec<String>,
    /// Reasoning whose message has not come yet.
    thoughts: String,
}

/// Returns reasoning in the form in which clients send it back. Some drop items without it.
pub fn encrypted_content(reasoning: &str) -> String {
    STANDARD.encode(reasoning)
}

/// Returns the reasoning of an item. Other servers' encrypted reasoning is left out.
fn reasoning(item: &Fields<'_>, place: &str) -> Result<String> {
    if let Some((name, content)) = item.get(&["content"])
        && content.as_array().is_none_or(|parts| !parts.is_empty())
    {
        return PARTS.read(&format!("{place}.{name}"), content);
    }
    let encrypted = item.text(&["encrypted_content"])?.unwrap_or_default();
    let bytes = STANDARD.decode(encrypted).unwrap_or_default();
    Ok(String::from_utf8(bytes).unwrap_or_default())
}

impl Messages {
    /// Translates an input. Adds the tools that its items declare. `find` returns the item with an
    /// identifier.
    pub fn read(
        fields: &Fields<'_>,
        tools: &mut ClientTools,
        find: impl Fn(&str) -> Result<Option<Value>>,
    ) -> Result<Self> {
        let Some((name, input)) = fields.get(&["input"]) else {
            return Err(ApiError::field("input", "is missing"));
        };
        let mut messages = Messages::default();
        if let Some(instructions) = fields.text(&["instructions"])? {
            messages.system.push(instructions.to_owned());
        }
        match input {
            Value::String(text) => {
                messages.push("input", json!({"role": "user", "content": text}));
            }
            Value::Array(items) => {
                // Calls may come before the item that declares their tool.
                for (i, item) in items.iter().enumerate() {
                    declared(&format!("input[{i}]"), item, tools)?;
                }
                for (i, item) in items.iter().enumerate() {
                    let place = format!("input[{i}]");
                    let found = referred(&place, item, &find)?;
                    let item = Fields::from_value(&place, found.as_ref().unwrap_or(item))?;
                    messages.add(&place, &item, tools)?;
                }
            }
            other => {
                let message = format!("must be a string or a list, and is {}", kind(other));
                return Err(ApiError::field(name, message));
            }
        }
        if !messages.system.is_empty() {
            let system = json!({"role": "system", "content": messages.system.join("\n\n")});
            messages.list.insert(0, system);
            messages.places.insert(0, "instructions".to_owned());
        }
        Ok(messages)
    }

    fn push(&mut self, place: &str, message: Value) {
        self.list.push(message);
        self.places.push(place.to_owned());
    }

    /// Adds a message of the assistant, with the reasoning before it.
    fn push_assistant(&mut self, place: &str, mut message: Value) {
        if !self.thoughts.is_empty() {
            message["reasoning_content"] = std::mem::take(&mut self.thoughts).into();
        }
        self.push(place, message);
    }

    fn add(&mut self, place: &str, item: &Fields<'_>, tools: &ClientTools) -> Result<()> {
        let kind = item.text(&["type"])?.unwrap_or("message");
        match kind {
            "message" => {
                let role = item.required_text("role")?;
                let (field, content) = (format!("{place}.content"), item.value("content"));
                if ["system", "developer"].contains(&role) && self.list.is_empty() {
                    // All leading system texts form one system message.
                    self.system.push(PARTS.read(&field, content)?);
                    return Ok(());
                }
                let said = PARTS.read_content(&field, content, |_, _| None)?;
                match role {
                    "assistant" => {
                        self.push_assistant(place, json!({"role": role, "content": said}));
                    }
                    _ => {
                        self.thoughts.clear();
                        self.push(place, json!({"role": role, "content": said}));
                    }
                }
            }
            "function_call" | "custom_tool_call" | "tool_search_call" => {
                let arguments = match kind {
                    "function_call" => item.text(&["arguments"])?.unwrap_or("{}").to_owned(),
                    "custom_tool_call" => arguments_for(item.text(&["input"])?.unwrap_or_default()),
                    _ if item.value("arguments").is_null() => "{}".to_owned(),
                    _ => item.value("arguments").to_string(),
                };
                let name = match kind {
                    "tool_search_call" => SEARCH,
                    _ => item.required_text("name")?,
                };
                let call = json!({
                    "id": item.text(&["call_id", "id"])?.unwrap_or_default(),
                    "type": "function",
                    "function": {
                        "name": tools.function_for(name, item.text(&["namespace"])?),
                        "arguments": arguments,
                    },
                });
                self.add_call(place, call);
            }
            "function_call_output" | "custom_tool_call_output" | "tool_search_output" => {
                self.thoughts.clear();
                let content = match kind {
                    "tool_search_output" => item.value("tools").to_string().into(),
                    _ => {
                        let place = format!("{place}.output");
                        PARTS.read_content(&place, item.value("output"), |_, _| None)?
                    }
                };
                self.push(
                    place,
                    json!({
                        "role": "tool",
                        "tool_call_id": item.text(&["call_id"])?.unwrap_or_default(),
                        "content": content,
                    }),
                );
            }
            "reasoning" => self.thoughts.push_str(&reasoning(item, place)?),
            "additional_tools" => {}
            // Clients send back all items, including those of OpenAI's own services.
            other => tracing::warn!("{place}: items of type {other:?} are left out"),
        }
        Ok(())
    }

    /// Adds a call. The calls of an answer and its text form one message.
    fn add_call(&mut self, place: &str, call: Value) {
        match self.list.last_mut() {
            Some(last) if last["role"] == "assistant" && self.thoughts.is_empty() => {
                match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                }
            }
            _ => {
                let message = json!({"role": "assistant", "content": "", "tool_calls": [call]});
                self.push_assistant(place, message);
            }
        }
    }
}

/// Returns the item that a reference names. Fails if it is not stored (any more).
fn referred(
    place: &str,
    item: &Value,
    find: impl Fn(&str) -> Result<Option<Value>>,
) -> Result<Option<Value>> {
    let item = Fields::from_value(place, item)?;
    let is_reference = match item.text(&["type"])? {
        Some(kind) => kind == "item_reference",
        None => item.has("id") && !item.has("role"),
    };
    if !is_reference {
        return Ok(None);
    }
    let id = item.text(&["id"])?.unwrap_or_default();
    let missing = || {
        let message = format!(
            "the item \"{id}\" is not stored: send the item itself, as clients do with \"store\": false"
        );
        ApiError::field(format!("{place}.id"), message)
    };
    find(id)?.map(Some).ok_or_else(missing)
}

/// Adds the tools that an item declares.
fn declared(place: &str, item: &Value, tools: &mut ClientTools) -> Result<()> {
    let item = Fields::from_value(place, item)?;
    let is_deferred = match item.text(&["type"])? {
        Some("additional_tools") => false,
        Some("tool_search_output") => true,
        _ => return Ok(()),
    };
    let list = item.list("tools")?.unwrap_or_default();
    tools.add(&format!("{place}.tools"), list, is_deferred)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(body: &Value) -> (Vec<Value>, Vec<String>) {
        let mut tools = ClientTools::default();
        let read = Messages::read(&Fields::new(body).unwrap(), &mut tools, |_| Ok(None)).unwrap();
        (read.list, read.places)
    }

    #[test]
    fn items_of_one_answer_become_one_message() {
        let reasoning = |text: &str| {
            json!({"type": "reasoning", "id": "rs_1", "summary": [],
            "encrypted_content": encrypted_content(text)})
        };
        let (list, places) = messages(&json!({
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Look."},
                reasoning("Häh?"),
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "a\"b"},
                {"type": "function_call_output", "call_id": "1", "output": [
                    {"type": "input_text", "text": "a cat"},
                    {"type": "input_image", "image_url": "data:image/png;base64,"},
                ]},
                {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}],
                    "encrypted_content": "AAAA"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]},
                {"type": "function_call", "call_id": "3", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "3", "output": "a dog"},
                // Reasoning without an answer, and that of another server.
                reasoning("lost"),
                {"role": "user", "content": "Go on."},
                {"type": "reasoning", "encrypted_content": "gAAAAAB\u{ff}"},
                {"role": "assistant", "content": "Yes."},
            ],
        }));
        let call = |id: &str, name: &str, arguments: &str| {
            json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}})
        };
        let expected = [
            json!({"role": "system", "content": "Be brief.\n\nBe kind."}),
            json!({"role": "user", "content": "Look."}),
            json!({"role": "assistant", "content": "", "reasoning_content": "Häh?", "tool_calls":
                [call("1", "look", "{}"), call("2", "patch", r#"{"input":"a\"b"}"#)]}),
            json!({"role": "tool", "tool_call_id": "1", "content": [
                {"type": "text", "text": "a cat"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,"},
                    "samite_place": "input[5].output[1]"},
            ]}),
            json!({"role": "tool", "tool_call_id": "2", "content": "done"}),
            json!({"role": "assistant", "content": "A cat.", "reasoning_content": "Hm.",
                "tool_calls": [call("3", "look", "{}")]}),
            json!({"role": "tool", "tool_call_id": "3", "content": "a dog"}),
            json!({"role": "user", "content": "Go on."}),
            json!({"role": "assistant", "content": "Yes."}),
        ];
        assert_eq!(list, expected);
        assert_eq!(places.len(), list.len());
        assert_eq!(
            (&places[0][..], &places[2][..], &places[8][..]),
            ("instructions", "input[3]", "input[14]")
        );
    }

    #[test]
    fn found_tools_can_be_called_from_then_on() {
        let mut tools = ClientTools::default();
        let found = json!([{"type": "namespace", "name": "mail", "tools": [
            {"type": "function", "name": "send"}]}]);
        let body = json!({"input": [
            {"role": "user", "content": "Send it."},
            {"type": "tool_search_call", "call_id": "1", "arguments": {"query": "mail"}},
            {"type": "tool_search_output", "call_id": "1", "tools": found},
            {"type": "function_call", "call_id": "2", "name": "send", "namespace": "mail"},
            {"type": "additional_tools", "tools": [{"type": "custom", "name": "exec"}]},
        ]});
        let read = Messages::read(&Fields::new(&body).unwrap(), &mut tools, |_| Ok(None)).unwrap();
        let call = &read.list[1]["tool_calls"][0]["function"];
        assert_eq!(
            call,
            &json!({"name": "tool_search", "arguments": r#"{"query":"mail"}"#})
        );
        assert_eq!(read.list[2]["content"], found.to_string());
        assert_eq!(read.list[3]["tool_calls"][0]["function"]["name"], "send");
        let functions = tools.take_functions();
        let deferred = functions.iter().map(|tool| tool["defer_loading"].clone());
        assert_eq!(deferred.collect::<Vec<_>>(), [json!(true), json!(false)]);
    }
}
