//! Anthropic's Messages API.

use crate::answer::{Choice, Update};
use crate::chat;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, TextItems, image_part};
use crate::form::check_schema;
use crate::ids;
use crate::job::Job;
use crate::stream::{Frames, ResponseEncoder};
use samite_chat::AnswerEvent as Parsed;
use samite_requests::Finish;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const BLOCKS: TextItems = TextItems {
    words: "blocks",
    texts: &["text"],
    image: "image",
    image_url,
    members: &["text"],
};

/// Reads the URL of an image: that of its source, or one with the base64 of its source.
fn image_url(block: &Fields<'_>) -> Result<Option<String>> {
    let Some(source) = block.fields("source")? else {
        return Ok(None);
    };
    if let Some(url) = source.text(&["url"])? {
        return Ok(Some(url.to_owned()));
    }
    let kind = source.text(&["media_type"])?.unwrap_or("image/png");
    let data = source.text(&["data"])?;
    Ok(data.map(|data| format!("data:{kind};base64,{data}")))
}

/// Signature of thinking. There is nothing to sign, but some clients send thinking without a
/// signature back as text.
const SIGNATURE: &str = "unsigned";

/// Translates one of Anthropic's messages to OpenAI's format.
fn messages(
    place: &str,
    message: &Value,
    tools: &mut Declarations,
    out: &mut Vec<Value>,
) -> Result<()> {
    let fields = Fields::from_value(place, message)?;
    let role = fields.required_text("role")?;
    if !["user", "assistant", "system"].contains(&role) {
        return Err(ApiError::field(
            format!("{place}.role"),
            format!("must be user or assistant, and is \"{role}\""),
        ));
    }
    let Some((_, content)) = fields.get(&["content"]) else {
        return Err(ApiError::field(format!("{place}.content"), "is missing"));
    };
    let Value::Array(blocks) = content else {
        out.push(
            json!({"role": role, "content": BLOCKS.read(&format!("{place}.content"), content)?}),
        );
        return Ok(());
    };
    let (mut parts, mut calls, mut results) = (Vec::new(), Vec::new(), Vec::new());
    let mut thoughts = String::new();
    for (i, block) in blocks.iter().enumerate() {
        let place = format!("{place}.content[{i}]");
        let block = Fields::from_value(&place, block)?;
        match block.text(&["type"])?.unwrap_or("text") {
            "text" => {
                let text = block.required_text("text")?;
                parts.push(json!({"type": "text", "text": text}));
            }
            "thinking" => thoughts.push_str(block.text(&["thinking"])?.unwrap_or_default()),
            "redacted_thinking" => {}
            "image" => {
                let url = image_url(&block)?.unwrap_or_default();
                parts.push(image_part(&url, &place));
            }
            "tool_use" => {
                let name = block.required_text("name")?;
                let input = block
                    .get(&["input"])
                    .map_or_else(|| json!({}), |(_, v)| v.clone());
                calls.push(json!({
                    "id": block.text(&["id"])?.unwrap_or_default(),
                    "type": "function",
                    "function": {"name": name, "arguments": input.to_string()},
                }));
            }
            "tool_result" => {
                let content = block.value("content");
                let place = format!("{place}.content");
                let found = |kind: &str, item: &Fields<'_>| {
                    (kind == "tool_reference").then(|| tools.take(item))
                };
                results.push(json!({
                    "role": "tool",
                    "tool_call_id": block.text(&["tool_use_id"])?.unwrap_or_default(),
                    "content": BLOCKS.read_content(&place, content, found)?,
                }));
            }
            other => {
                return Err(ApiError::field(
                    place,
                    format!("blocks of type \"{other}\" are not supported here"),
                ));
            }
        }
    }
    // Results belong to the preceding calls, so they come before the text.
    out.extend(results);
    if !parts.is_empty() || !calls.is_empty() || !thoughts.is_empty() {
        let mut message = Map::new();
        message.insert("role".to_owned(), role.into());
        let only_text = match parts.as_slice() {
            [] => Some(json!("")),
            // An image has no text.
            [one] => one.get("text").cloned(),
            _ => None,
        };
        message.insert(
            "content".to_owned(),
            only_text.unwrap_or_else(|| parts.into()),
        );
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        if !thoughts.is_empty() {
            message.insert("reasoning_content".to_owned(), thoughts.into());
        }
        out.push(message.into());
    }
    Ok(())
}

/// Declarations of tools by name. They stand in the conversation where a search found them instead
/// of in the list of tools, so that the prefix before them stays the same.
struct Declarations(BTreeMap<String, Value>);

impl Declarations {
    fn new(functions: &[Value]) -> Self {
        let functions = functions.iter().map(|tool| &tool["function"]);
        let named = functions.filter_map(|f| Some((f["name"].as_str()?.to_owned(), f.clone())));
        Declarations(named.collect())
    }

    /// Returns the declaration that a result refers to. Later references get the name only.
    fn take(&mut self, reference: &Fields<'_>) -> String {
        let name = reference.value("tool_name");
        let declared = name.as_str().and_then(|name| self.0.remove(name));
        declared.as_ref().unwrap_or(name).to_string()
    }
}

/// Removes the first line of a system prompt if it is a stamp that some clients change with every
/// request: it would defeat the prefix cache.
fn without_stamp(system: String) -> String {
    const STAMP: &str = "x-anthropic-billing-header:";
    match system.strip_prefix(STAMP) {
        Some(rest) => rest
            .split_once('\n')
            .map_or("", |(_, rest)| rest)
            .to_owned(),
        None => system,
    }
}

/// Returns the tools of a request in OpenAI's format.
fn functions(fields: &Fields<'_>) -> Result<Vec<Value>> {
    let mut functions = Vec::new();
    let mut has_foreign_search = false;
    let tools = fields.list("tools")?.unwrap_or_default();
    for (i, tool) in tools.iter().enumerate() {
        let place = format!("tools[{i}]");
        let tool = Fields::from_value(&place, tool)?;
        let name = tool.required_text("name")?;
        let kind = tool.text(&["type"])?.unwrap_or_default();
        let Some((_, schema)) = tool.get(&["input_schema"]) else {
            // A tool that Anthropic's servers run.
            has_foreign_search |= kind.starts_with("tool_search_tool");
            continue;
        };
        check_schema(&format!("{place}.input_schema"), schema)?;
        functions.push(json!({
            "type": "function",
            "function": {
                "name": name,
                "description": tool.text(&["description"])?.unwrap_or_default(),
                "parameters": schema,
            },
            "defer_loading": tool.boolean(&["defer_loading"], false)?,
        }));
    }
    if has_foreign_search {
        chat::show_deferred(&mut functions);
    }
    Ok(functions)
}

/// Translates a request to OpenAI's format.
fn translated(body: &Value, needs_limit: bool) -> Result<Value> {
    let fields = Fields::new(body)?;
    let tools = functions(&fields)?;
    let mut declarations = Declarations::new(&tools);
    let mut out = Vec::new();
    if let Some((name, system)) = fields.get(&["system"]) {
        out.push(json!({"role": "system", "content": without_stamp(BLOCKS.read(name, system)?)}));
    }
    let list = fields.list("messages")?;
    let list = list.ok_or_else(|| ApiError::field("messages", "is missing"))?;
    for (i, message) in list.iter().enumerate() {
        messages(
            &format!("messages[{i}]"),
            message,
            &mut declarations,
            &mut out,
        )?;
    }
    let mut request = fields.object().clone();
    for name in [
        "system",
        "messages",
        "tools",
        "tool_choice",
        "stop_sequences",
        "thinking",
        "output_config",
        "output_format",
        "metadata",
        // A response is a single message.
        "n",
        "n_cmpl",
        "max_tokens",
    ] {
        request.remove(name);
    }
    request.insert("messages".to_owned(), out.into());
    if needs_limit {
        let limit = fields
            .count(&["max_tokens"], i32::MAX as usize)?
            .unwrap_or(4096);
        request.insert("max_tokens".to_owned(), limit.into());
    }
    if fields.has("stop_sequences") {
        request.insert(
            "stop".to_owned(),
            json!(fields.texts("stop_sequences", 64)?),
        );
    }
    if fields.has("tools") {
        request.insert("tools".to_owned(), tools.into());
    }
    if let Some(choice) = fields.fields("tool_choice")? {
        let wanted = match choice.text(&["type"])?.unwrap_or("auto") {
            "any" => json!("required"),
            "tool" => {
                let name = choice.required_text("name")?;
                json!({"type": "function", "function": {"name": name}})
            }
            known @ ("auto" | "none") => json!(known),
            other => {
                return Err(ApiError::field(
                    "tool_choice.type",
                    format!("must be auto, any, tool or none, and is \"{other}\""),
                ));
            }
        };
        request.insert("tool_choice".to_owned(), wanted);
        let is_parallel = !choice.boolean(&["disable_parallel_tool_use"], false)?;
        request.insert("parallel_tool_calls".to_owned(), is_parallel.into());
    }
    let config = fields.fields("output_config")?;
    if let Some(config) = &config
        && let Some(effort) = config.text(&["effort"])?
    {
        request.insert("reasoning_effort".to_owned(), effort.into());
    }
    // The older name of the format is a field of its own.
    let format = config.as_ref().and_then(|config| config.get(&["format"]));
    if let Some((_, format)) = format.or_else(|| fields.get(&["output_format"])) {
        request.insert("response_format".to_owned(), format.clone());
    }
    if let Some(thinking) = fields.fields("thinking")? {
        let is_on = match thinking.text(&["type"])?.unwrap_or("enabled") {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            other => {
                return Err(ApiError::field(
                    "thinking.type",
                    format!("must be enabled or disabled, and is \"{other}\""),
                ));
            }
        };
        request.insert("enable_thinking".to_owned(), is_on.into());
        let budget = thinking.count(&["budget_tokens"], i32::MAX as usize)?;
        if let Some(budget) = budget.filter(|_| is_on) {
            request.insert("reasoning_budget_tokens".to_owned(), budget.into());
        }
    }
    Ok(request.into())
}

/// Creates the job of a message request.
pub fn job(context: &RequestContext, body: &Value) -> Result<(Job, MessageEncoder)> {
    let job = chat::job(context, &translated(body, true)?)?;
    let encoder = MessageEncoder {
        id: ids::id("msg_"),
        model: job.model.clone(),
        stops: job.stops.clone(),
        blocks: 0,
        open: None,
    };
    Ok((job, encoder))
}

/// Returns the tokens of a conversation.
pub fn tokens(context: &RequestContext, body: &Value) -> Result<Vec<u32>> {
    crate::api::tokens::of_conversation(context, &translated(body, false)?)
}

/// Counts the tokens of a conversation.
pub fn count(context: &RequestContext, body: &Value) -> Result<Value> {
    Ok(json!({"input_tokens": tokens(context, body)?.len()}))
}

/// The content block that is being sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call,
}

/// Sends an answer in the format of messages.
pub struct MessageEncoder {
    id: String,
    model: String,
    stops: Vec<String>,
    /// Number of blocks so far.
    blocks: usize,
    open: Option<Block>,
}

impl MessageEncoder {
    fn stop_reason(&self, choice: &Choice) -> (&'static str, Value) {
        match choice.reason {
            _ if choice.is_cut() => ("max_tokens", Value::Null),
            _ if !choice.answer.calls.is_empty() => ("tool_use", Value::Null),
            Some(Finish::StopString(number)) => (
                "stop_sequence",
                self.stops
                    .get(number)
                    .map_or(Value::Null, |stop| stop.clone().into()),
            ),
            _ => ("end_turn", Value::Null),
        }
    }

    fn usage(choice: &Choice) -> Value {
        json!({
            "cache_read_input_tokens": choice.counts.cached,
            "cache_creation_input_tokens": 0,
            "input_tokens": choice.counts.prompt - choice.counts.cached,
            "output_tokens": choice.counts.generated,
        })
    }

    fn close(&mut self, out: &mut Frames) {
        if let Some(block) = self.open.take() {
            let index = self.blocks - 1;
            if block == Block::Thinking {
                self.delta(
                    &json!({"type": "signature_delta", "signature": SIGNATURE}),
                    out,
                );
            }
            out.event(
                "content_block_stop",
                &json!({"type": "content_block_stop", "index": index}),
            );
        }
    }

    fn open(&mut self, block: Block, content: &Value, out: &mut Frames) {
        if self.open == Some(block) && block != Block::Call {
            return;
        }
        self.close(out);
        self.open = Some(block);
        self.blocks += 1;
        out.event(
            "content_block_start",
            &json!({"type": "content_block_start", "index": self.blocks - 1,
                "content_block": content}),
        );
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        let index = self.blocks.saturating_sub(1);
        out.event(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
        );
    }
}

impl ResponseEncoder for MessageEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        match update {
            Update::Started(_) => {
                let message = json!({
                    "id": self.id,
                    "type": "message",
                    "role": "assistant",
                    "content": [],
                    "model": self.model,
                    "stop_reason": null,
                    "stop_sequence": null,
                    "usage": Self::usage(choice),
                });
                out.event(
                    "message_start",
                    &json!({"type": "message_start", "message": message}),
                );
            }
            Update::Parsed(Parsed::Content(text)) => {
                self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            Update::Parsed(Parsed::Reasoning(text)) => {
                self.open(
                    Block::Thinking,
                    &json!({"type": "thinking", "thinking": "", "signature": ""}),
                    out,
                );
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Update::Parsed(Parsed::ToolCallStart { id, name, .. }) => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Call, &block, out);
            }
            Update::Parsed(Parsed::ToolArguments { text, .. }) => {
                self.delta(
                    &json!({"type": "input_json_delta", "partial_json": text}),
                    out,
                );
            }
            Update::Finished => {
                if self.blocks == 0 {
                    self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                }
                self.close(out);
                let (reason, sequence) = self.stop_reason(choice);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                let message =
                    json!({"type": "message_delta", "delta": delta, "usage": Self::usage(choice)});
                out.event("message_delta", &message);
                out.event("message_stop", &json!({"type": "message_stop"}));
            }
            _ => {}
        }
    }

    fn end(&mut self, _choices: &[Choice], _out: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.event("error", &error.anthropic());
    }

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let Some(choice) = choices.first() else {
            return Value::Null;
        };
        let answer = &choice.answer;
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            content.push(
                json!({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}),
            );
        }
        if !answer.content.is_empty() || choice.calls().next().is_none() {
            content.push(json!({"type": "text", "text": answer.content}));
        }
        for call in choice.calls() {
            // Arguments that are not a JSON object are passed on as text.
            let input = serde_json::from_str::<Map<String, Value>>(&call.arguments);
            let input = input.map_or_else(|_| json!({"arguments": call.arguments}), Value::Object);
            content.push(
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}),
            );
        }
        let (reason, sequence) = self.stop_reason(choice);
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": Self::usage(choice),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_calls_and_results_become_separate_messages() {
        let body = json!({
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a cat"},
                ]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": "a dog"},
                    {"type": "text", "text": "Well?"},
                ]},
            ],
        });
        let function = json!({"name": "look", "arguments": "{\"at\":1}"});
        let expected = json!([
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "t1", "type": "function", "function": function},
            ]},
            {"role": "tool", "tool_call_id": "t1", "content": "a cat"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "t2", "content": "a dog"},
            {"role": "user", "content": "Well?"},
        ]);
        assert_eq!(translated(&body, true).unwrap()["messages"], expected);
    }
}
