//! OpenAI's Responses API.

use crate::answer::{Choice, Update};
use crate::api::{native, tokens};
use crate::chat;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, TextItems, kind};
use crate::ids;
use crate::job::Job;
use crate::stream::{Frames, ResponseEncoder};
use samite_chat::AnswerEvent as Parsed;
use serde_json::{Map, Value, json};

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
    members: &["text", "refusal"],
};

/// Translates the items of an input to messages. Returns the field that each message came from.
fn messages(fields: &Fields<'_>) -> Result<(Vec<Value>, Vec<String>)> {
    let Some((name, input)) = fields.get(&["input"]) else {
        return Err(ApiError::field("input", "is missing"));
    };
    let mut system = Vec::new();
    if let Some(instructions) = fields.text(&["instructions"])? {
        system.push(instructions.to_owned());
    }
    let mut messages: Vec<Value> = Vec::new();
    let mut places = Vec::new();
    let items = match input {
        Value::String(text) => {
            messages.push(json!({"role": "user", "content": text}));
            places.push("input".to_owned());
            &[][..]
        }
        Value::Array(items) => items,
        other => {
            return Err(ApiError::field(
                name,
                format!("must be a string or a list, and is {}", kind(other)),
            ));
        }
    };
    let mut thoughts = String::new();
    for (i, item) in items.iter().enumerate() {
        let place = format!("input[{i}]");
        let item = Fields::from_value(&place, item)?;
        let content = |name: &str| {
            let found = item.get(&[name]).map_or(&Value::Null, |(_, value)| value);
            PARTS.read(&format!("{place}.{name}"), found)
        };
        match item.text(&["type"])?.unwrap_or("message") {
            "message" => {
                let role = item.text(&["role"])?;
                let role =
                    role.ok_or_else(|| ApiError::field(format!("{place}.role"), "is missing"))?;
                let said = content("content")?;
                match role {
                    // All leading system texts form one system message.
                    "system" | "developer" if messages.is_empty() => system.push(said),
                    _ => {
                        let mut message = json!({"role": role, "content": said});
                        if role == "assistant" && !thoughts.is_empty() {
                            message["reasoning_content"] = std::mem::take(&mut thoughts).into();
                        }
                        messages.push(message);
                    }
                }
            }
            "function_call" => {
                let name = item.text(&["name"])?;
                let name =
                    name.ok_or_else(|| ApiError::field(format!("{place}.name"), "is missing"))?;
                let call = json!({
                    "id": item.text(&["call_id", "id"])?.unwrap_or_default(),
                    "type": "function",
                    "function": {"name": name,
                        "arguments": item.text(&["arguments"])?.unwrap_or("{}")},
                });
                // Calls of one answer form one message.
                match messages.last_mut() {
                    Some(last) if last["role"] == "assistant" => {
                        match last["tool_calls"].as_array_mut() {
                            Some(calls) => calls.push(call),
                            None => last["tool_calls"] = json!([call]),
                        }
                    }
                    _ => messages
                        .push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
                }
            }
            "function_call_output" => messages.push(json!({
                "role": "tool",
                "tool_call_id": item.text(&["call_id"])?.unwrap_or_default(),
                "content": content("output")?,
            })),
            "reasoning" => thoughts = content("content")?,
            // Clients send back all items, including those of OpenAI's own services.
            other => tracing::warn!("{place}: items of type {other:?} are left out"),
        }
        places.resize(messages.len(), place);
    }
    if !system.is_empty() {
        messages.insert(0, json!({"role": "system", "content": system.join("\n\n")}));
        places.insert(0, "instructions".to_owned());
    }
    Ok((messages, places))
}

/// A request in the format of chat completions.
struct Translated {
    request: Value,
    /// Field that each message came from.
    places: Vec<String>,
    /// Index of each function in the client's list, which also has other tools.
    tools: Vec<usize>,
}

fn translated(body: &Value) -> Result<Translated> {
    let fields = Fields::new(body)?;
    for name in ["previous_response_id", "conversation"] {
        if fields.has(name) {
            return Err(ApiError::field(
                name,
                "nothing is stored here: send the whole conversation as \"input\"",
            ));
        }
    }
    let mut request = fields.object().clone();
    for name in [
        "input",
        "instructions",
        "tools",
        "text",
        "reasoning",
        "max_output_tokens",
        "metadata",
        // A response is a single message.
        "n",
        "n_cmpl",
        "store",
        "include",
        "truncation",
    ] {
        request.remove(name);
    }
    let (messages, places) = messages(&fields)?;
    request.insert("messages".to_owned(), messages.into());
    if let Some(limit) = fields.count(&["max_output_tokens"], i32::MAX as usize)? {
        request.insert("max_tokens".to_owned(), limit.into());
    }
    if let Some(reasoning) = fields.fields("reasoning")?
        && let Some(effort) = reasoning.text(&["effort"])?
    {
        request.insert("reasoning_effort".to_owned(), effort.into());
    }
    if let Some(text) = fields.fields("text")?
        && let Some(format) = text.fields("format")?
    {
        request.insert(
            "response_format".to_owned(),
            Value::Object(format.object().clone()),
        );
    }
    let mut functions = Vec::new();
    let mut tools = Vec::new();
    for (i, tool) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let tool = Fields::from_value(&format!("tools[{i}]"), tool)?;
        // Other tools are services of OpenAI's, which clients list anyway.
        if tool.text(&["type"])? != Some("function") {
            continue;
        }
        let mut function = Map::new();
        for name in ["name", "description", "parameters", "strict"] {
            chat::member(
                &mut function,
                name,
                tool.get(&[name]).map(|(_, value)| value.clone()),
            );
        }
        functions.push(json!({"type": "function", "function": function}));
        tools.push(i);
    }
    if functions.is_empty() {
        request.remove("tool_choice");
    } else {
        request.insert("tools".to_owned(), functions.into());
    }
    Ok(Translated {
        request: request.into(),
        places,
        tools,
    })
}

impl Translated {
    /// Translates an error about a field to the client's name of the field.
    fn placed(&self, error: ApiError) -> ApiError {
        let param = error.more.get("param").and_then(Value::as_str);
        match param.and_then(|param| Some((param.to_owned(), self.origin(param)?))) {
            Some((param, origin)) => error.renamed(&param, &origin),
            None => error,
        }
    }

    /// Returns the client's name of a field, if it differs.
    fn origin(&self, param: &str) -> Option<String> {
        let element = |list: &str| {
            let (number, rest) = param.strip_prefix(list)?.split_once(']')?;
            Some((number.parse::<usize>().ok()?, rest))
        };
        if let Some((number, rest)) = element("messages[") {
            let place = self.places.get(number)?;
            // One message holds the calls of several items.
            let rest = if rest.starts_with(".tool_calls") {
                ""
            } else {
                rest
            };
            return Some(format!("{place}{rest}"));
        }
        if let Some((number, rest)) = element("tools[") {
            let rest = rest.replacen(".function", "", 1);
            return Some(format!("tools[{}]{rest}", self.tools.get(number)?));
        }
        if let Some(rest) = param.strip_prefix("response_format") {
            return Some(format!("text.format{rest}"));
        }
        let known = match param {
            "messages" => "input",
            "max_tokens" => "max_output_tokens",
            "reasoning_effort" => "reasoning.effort",
            _ => return None,
        };
        Some(known.to_owned())
    }
}

pub fn job(context: &RequestContext, body: &Value) -> Result<(Job, ResponsesEncoder)> {
    let translated = translated(body)?;
    let job = chat::job(context, &translated.request).map_err(|error| translated.placed(error))?;
    let encoder = ResponsesEncoder {
        id: ids::id("resp_"),
        message: ids::id("msg_"),
        thought: ids::id("rs_"),
        created: ids::seconds(),
        job: Job {
            requests: Vec::new(),
            ..job.clone()
        },
        sequence: 0,
        open: None,
        done: Vec::new(),
    };
    Ok((job, encoder))
}

pub fn count(context: &RequestContext, body: &Value) -> Result<Value> {
    let translated = translated(body)?;
    let counted = tokens::count(context, &translated.request);
    let mut counted = counted.map_err(|error| translated.placed(error))?;
    counted["object"] = "response.input_tokens".into();
    Ok(counted)
}

/// The output item that is being sent.
enum Open {
    Message(String),
    Thought(String),
    Call {
        id: String,
        name: String,
        arguments: String,
    },
}

/// Sends an answer in the format of responses.
pub struct ResponsesEncoder {
    id: String,
    message: String,
    thought: String,
    created: u64,
    job: Job,
    sequence: usize,
    open: Option<Open>,
    done: Vec<Value>,
}

impl ResponsesEncoder {
    fn response(&self, status: &str, output: &[Value], usage: Option<&Choice>) -> Value {
        let usage = usage.map_or(Value::Null, |choice| {
            json!({
                "input_tokens": choice.counts.prompt,
                "output_tokens": choice.counts.generated,
                "total_tokens": choice.counts.prompt + choice.counts.generated,
                "input_tokens_details": {"cached_tokens": choice.counts.cached},
                "output_tokens_details": {"reasoning_tokens": choice.thought},
            })
        });
        let incomplete = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.job.model,
            "output": output,
            "parallel_tool_calls": true,
            "tool_choice": "auto",
            "tools": [],
            "error": null,
            "incomplete_details": incomplete,
            "usage": usage,
        })
    }

    fn send(&mut self, name: &str, mut value: Value, out: &mut Frames) {
        value["type"] = name.into();
        value["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.event(name, &value);
    }

    fn item(&self, open: &Open, status: &str) -> Value {
        match open {
            Open::Message(text) => message_item(&self.message, text, status),
            Open::Thought(text) => json!({
                "id": self.thought,
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": text}],
                "status": status,
            }),
            Open::Call {
                id,
                name,
                arguments,
            } => json!({
                "id": format!("fc_{id}"),
                "type": "function_call",
                "status": status,
                "call_id": id,
                "name": name,
                "arguments": arguments,
            }),
        }
    }

    fn begin(&mut self, open: Open, out: &mut Frames) {
        self.close("completed", out);
        let index = self.done.len();
        let mut item = self.item(&open, "in_progress");
        if matches!(open, Open::Message(_)) {
            item["content"] = json!([]);
        }
        self.send(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
            out,
        );
        if matches!(open, Open::Message(_)) {
            let part = json!({"type": "output_text", "text": "", "annotations": []});
            let added = json!({"item_id": self.message, "output_index": index, "content_index": 0,
                "part": part});
            self.send("response.content_part.added", added, out);
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = self.done.len();
        let item = self.item(&open, status);
        match &open {
            Open::Message(text) => {
                let id = self.message.clone();
                let done = json!({"item_id": id, "output_index": index, "content_index": 0,
                    "text": text, "logprobs": []});
                self.send("response.output_text.done", done, out);
                let part = json!({"type": "output_text", "text": text, "annotations": []});
                let done =
                    json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
                self.send("response.content_part.done", done, out);
            }
            Open::Thought(text) => {
                let done = json!({"item_id": self.thought, "output_index": index,
                    "content_index": 0, "text": text});
                self.send("response.reasoning_text.done", done, out);
            }
            Open::Call { id, arguments, .. } => {
                let done = json!({"item_id": format!("fc_{id}"), "output_index": index,
                    "arguments": arguments});
                self.send("response.function_call_arguments.done", done, out);
            }
        }
        self.send(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
            out,
        );
        self.done.push(item);
    }

    fn delta(&mut self, name: &str, mut value: Value, choice: &Choice, out: &mut Frames) {
        value["output_index"] = self.done.len().into();
        if self.job.timings_per_token {
            value["timings"] = choice.timings();
        }
        self.send(name, value, out);
    }
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    json!({
        "id": id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    })
}

fn status(choice: &Choice) -> &'static str {
    if choice.is_cut() {
        "incomplete"
    } else {
        "completed"
    }
}

impl ResponseEncoder for ResponsesEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        match update {
            Update::Started(_) => {
                let response = self.response("in_progress", &[], None);
                self.send("response.created", json!({"response": response}), out);
                self.send("response.in_progress", json!({"response": response}), out);
            }
            Update::Progress(progress) => {
                let response = self.response("in_progress", &[], None);
                let told =
                    json!({"response": response, "prompt_progress": native::progress(progress)});
                self.send("response.in_progress", told, out);
            }
            Update::Parsed(Parsed::Content(more)) => {
                if !matches!(self.open, Some(Open::Message(_))) {
                    self.begin(Open::Message(String::new()), out);
                }
                if let Some(Open::Message(text)) = &mut self.open {
                    text.push_str(more);
                }
                let value = json!({"item_id": self.message, "content_index": 0, "delta": more,
                    "logprobs": []});
                self.delta("response.output_text.delta", value, choice, out);
            }
            Update::Parsed(Parsed::Reasoning(more)) => {
                if !matches!(self.open, Some(Open::Thought(_))) {
                    self.begin(Open::Thought(String::new()), out);
                }
                if let Some(Open::Thought(text)) = &mut self.open {
                    text.push_str(more);
                }
                let value = json!({"item_id": self.thought, "content_index": 0, "delta": more});
                self.delta("response.reasoning_text.delta", value, choice, out);
            }
            Update::Parsed(Parsed::ToolCallStart { id, name, .. }) => {
                let call = Open::Call {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: String::new(),
                };
                self.begin(call, out);
            }
            Update::Parsed(Parsed::ToolArguments { text, .. }) => {
                let Some(Open::Call { id, arguments, .. }) = &mut self.open else {
                    return;
                };
                arguments.push_str(text);
                let value = json!({"item_id": format!("fc_{id}"), "delta": text});
                self.delta("response.function_call_arguments.delta", value, choice, out);
            }
            Update::Finished => {
                if self.done.is_empty() && self.open.is_none() {
                    self.begin(Open::Message(String::new()), out);
                }
                let status = status(choice);
                self.close(status, out);
                let response = self.response(status, &self.done, Some(choice));
                let told = json!({"response": response, "timings": choice.timings(),
                    "cache_miss": choice.cache_miss()});
                self.send(&format!("response.{status}"), told, out);
            }
            _ => {}
        }
    }

    fn end(&mut self, _choices: &[Choice], _out: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        let value = json!({"code": error.kind, "message": error.message, "param": null});
        self.send("error", value, out);
    }

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let Some(choice) = choices.first() else {
            return Value::Null;
        };
        let answer = &choice.answer;
        let mut items = Vec::new();
        if !answer.reasoning.is_empty() {
            items.push(Open::Thought(answer.reasoning.clone()));
        }
        if !answer.content.is_empty() || items.is_empty() && answer.calls.is_empty() {
            items.push(Open::Message(answer.content.clone()));
        }
        items.extend(answer.calls.iter().map(|call| Open::Call {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments: call.arguments.clone(),
        }));
        let last = items.len() - 1;
        let items = items.iter().enumerate().map(|(number, item)| {
            // Only the last item can be cut off by a limit.
            let status = if number == last {
                status(choice)
            } else {
                "completed"
            };
            self.item(item, status)
        });
        let output: Vec<Value> = items.collect();
        let mut whole = self.response(status(choice), &output, Some(choice));
        whole["timings"] = choice.timings();
        whole["cache_miss"] = choice.cache_miss();
        whole
    }
}
