//! OpenAI's Responses API.

mod input;
mod tools;

use crate::answer::{Choice, TokenInfo, Update};
use crate::api::native;
use crate::chat::{self, Conversation};
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, json_len};
use crate::ids;
use crate::job::Job;
use crate::recent_items::RecentItems;
use crate::stream::{Frames, ResponseEncoder};
use input::{Messages, encrypted_content};
use samite_chat::AnswerEvent as Parsed;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tools::{ClientTools, ToolKind, input_of};

/// A request in the format of chat completions.
struct Translated {
    request: Value,
    /// Field that each message came from.
    places: Vec<String>,
    tools: ClientTools,
}

fn translated(context: &RequestContext, body: &Value) -> Result<Translated> {
    let fields = Fields::new(body)?;
    for name in ["previous_response_id", "conversation"] {
        if fields.has(name) {
            return Err(ApiError::field(
                name,
                "nothing is stored here: send the whole conversation as \"input\"",
            ));
        }
    }
    // A response repeats these fields.
    fields.boolean(&["background"], false)?;
    fields.fields("metadata")?;
    fields.text(&["truncation"])?;
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
    let mut tools = ClientTools::default();
    tools.add("tools", fields.list("tools")?.unwrap_or_default(), false)?;
    let find = |id: &str| {
        let found = context.recent_items.find(context.caller.owner, id);
        // A short identifier stands for a long item.
        let size = found.as_ref().map_or(0, json_len);
        context.account.charge("input", size.saturating_mul(4))?;
        Ok(found)
    };
    let messages = Messages::read(&fields, &mut tools, find)?;
    request.insert("messages".to_owned(), messages.list.into());
    fields.integer(&["max_tokens"], -1, i64::from(i32::MAX))?;
    if let Some(limit) = fields.count(&["max_output_tokens"], i32::MAX as usize)? {
        request.insert("max_tokens".to_owned(), limit.into());
    }
    let included = fields.list("include")?.unwrap_or_default();
    let includes = fields.has("top_logprobs") || included.iter().any(|name| name == LOGPROBS);
    if includes && !fields.has("logprobs") {
        request.insert("logprobs".to_owned(), true.into());
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
    if let Some((name, choice)) = fields.get(&["tool_choice"]) {
        request.insert(name.to_owned(), tools.choose(choice)?);
    }
    let functions = tools.take_functions();
    if !functions.is_empty() {
        request.insert("tools".to_owned(), functions.into());
    } else if request
        .get("tool_choice")
        .is_some_and(|choice| choice == "auto")
    {
        request.remove("tool_choice");
    }
    Ok(Translated {
        request: request.into(),
        places: messages.places,
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
            return Some(format!("{}{rest}", self.tools.place(number)?));
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

/// Value of `include` that asks for probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Returns the settings of a request that its response repeats, with OpenAI's defaults.
fn settings(context: &RequestContext, fields: &Fields<'_>) -> Result<Map<String, Value>> {
    let defaults = json!({
        "background": false,
        "instructions": null,
        "max_output_tokens": null,
        "metadata": {},
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null},
        "store": true,
        "temperature": null,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": null,
        "truncation": "disabled",
    });
    let Value::Object(mut settings) = defaults else {
        return Ok(Map::new());
    };
    for (name, value) in &mut settings {
        if let Some((_, own)) = fields.get(&[name.as_str()]) {
            // These settings, the response, and its text.
            let size = json_len(own).saturating_mul(4);
            context.account.charge(name, size)?;
            *value = own.clone();
        }
    }
    if let Some(Value::Object(text)) = settings.get_mut("text") {
        text.entry("format")
            .or_insert_with(|| json!({"type": "text"}));
    }
    Ok(settings)
}

pub fn job(context: &RequestContext, body: &Value) -> Result<(Job, ResponsesEncoder)> {
    let translated = translated(context, body)?;
    let fields = Fields::new(body)?;
    let store = fields.boolean(&["store"], true)?;
    let settings = settings(context, &fields)?;
    let job = chat::job(context, &translated.request);
    let mut job = job.map_err(|error| translated.placed(error))?;
    job.keeps_probabilities = true;
    let encoder = ResponsesEncoder {
        id: ids::id("resp_"),
        item: String::new(),
        created: ids::seconds(),
        job: Job {
            requests: Vec::new(),
            ..job.clone()
        },
        tools: translated.tools,
        settings,
        items: store.then(|| Arc::clone(&context.recent_items)),
        owner: context.caller.owner,
        waiting: Vec::new(),
        logprobs: Vec::new(),
        sequence: 0,
        open: None,
        done: Vec::new(),
    };
    Ok((job, encoder))
}

pub fn count(context: &RequestContext, body: &Value) -> Result<Value> {
    let tokens = tokens(context, body)?;
    Ok(json!({"input_tokens": tokens.len(), "object": "response.input_tokens"}))
}

/// Returns the tokens of a response's conversation.
pub fn tokens(context: &RequestContext, body: &Value) -> Result<Vec<u32>> {
    let translated = translated(context, body)?;
    let read = || {
        let conversation = Conversation::read(context, &Fields::new(&translated.request)?)?;
        Ok(conversation.tokens(context)?.1.tokens)
    };
    read().map_err(|error| translated.placed(error))
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
    /// Identifier of the output item that is being sent.
    item: String,
    created: u64,
    job: Job,
    tools: ClientTools,
    /// Settings of the request.
    settings: Map<String, Value>,
    /// Store of output items, unless `store` is false.
    items: Option<Arc<RecentItems>>,
    owner: u64,
    /// Tokens whose probabilities have not been sent yet.
    waiting: Vec<TokenInfo>,
    /// Probabilities of the tokens of the message so far.
    logprobs: Vec<Value>,
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
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.job.model,
            "output": output,
            "error": null,
            "incomplete_details": incomplete,
            "usage": usage,
        });
        // Clients take them from the last event.
        if !usage.is_null() {
            for (name, value) in &self.settings {
                response[name] = value.clone();
            }
        }
        response
    }

    fn send(&mut self, name: &str, mut value: Value, out: &mut Frames) {
        value["type"] = name.into();
        value["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.event(name, &value);
    }

    fn item(&self, open: &Open, status: &str) -> Value {
        match open {
            Open::Message(text) => message_item(&self.item, text, &self.logprobs, status),
            Open::Thought(text) => json!({
                "id": self.item,
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": text}],
                "encrypted_content": encrypted_content(text),
                "status": status,
            }),
            Open::Call {
                id,
                name,
                arguments,
            } => self.call_item(id, name, arguments, status),
        }
    }

    /// Returns the probabilities of tokens.
    fn logprobs_of(&self, choice: &Choice, tokens: &[TokenInfo]) -> Vec<Value> {
        let tokens = tokens.iter().filter(|token| !choice.is_end_token(token.id));
        let entries = tokens.map(|token| choice.probabilities(token, self.job.post_sampling));
        entries.flatten().collect()
    }

    fn store(&self, items: &[Value]) {
        if let Some(recent) = &self.items {
            recent.store(self.owner, items.iter().map(without_logprobs));
        }
    }

    /// Returns the kind of the tool with this function.
    fn kind_of(&self, function: &str) -> ToolKind {
        let tool = self.tools.tool_for(function);
        tool.map_or(ToolKind::Function, |tool| tool.kind)
    }

    fn call_item(&self, id: &str, function: &str, arguments: &str, status: &str) -> Value {
        let tool = self.tools.tool_for(function);
        let mut item = json!({"id": self.item, "status": status, "call_id": id});
        let kind = tool.map_or(ToolKind::Function, |tool| tool.kind);
        if kind != ToolKind::Search {
            item["name"] = tool.map_or(function, |tool| &tool.name).into();
        }
        if let Some(namespace) = tool.and_then(|tool| tool.namespace.as_deref()) {
            item["namespace"] = namespace.into();
        }
        match kind {
            ToolKind::Function => {
                item["type"] = "function_call".into();
                item["arguments"] = arguments.into();
            }
            ToolKind::Custom => {
                item["type"] = "custom_tool_call".into();
                item["input"] = input_of(arguments).into();
            }
            ToolKind::Search => {
                item["type"] = "tool_search_call".into();
                item["execution"] = "client".into();
                item["arguments"] = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
            }
        }
        item
    }

    /// Chooses the identifier of the next item. Those of calls are the model's, and may come again.
    fn name_item(&mut self, open: &Open) {
        self.item = ids::id(match open {
            Open::Message(_) => "msg_",
            Open::Thought(_) => "rs_",
            Open::Call { .. } => "fc_",
        });
    }

    fn begin(&mut self, open: Open, out: &mut Frames) {
        self.close("completed", out);
        self.name_item(&open);
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
            let added = json!({"item_id": self.item, "output_index": index, "content_index": 0,
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
                let id = self.item.clone();
                let logprobs = std::mem::take(&mut self.logprobs);
                let done = json!({"item_id": id, "output_index": index, "content_index": 0,
                    "text": text, "logprobs": logprobs});
                self.send("response.output_text.done", done, out);
                let part = json!({"type": "output_text", "text": text, "annotations": [],
                    "logprobs": logprobs});
                let done =
                    json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
                self.send("response.content_part.done", done, out);
            }
            Open::Thought(text) => {
                let done = json!({"item_id": self.item, "output_index": index,
                    "content_index": 0, "text": text});
                self.send("response.reasoning_text.done", done, out);
            }
            Open::Call {
                name, arguments, ..
            } => {
                let of_item = json!({"item_id": self.item, "output_index": index});
                let with = |name: &str, text: &str| {
                    let mut value = of_item.clone();
                    value[name] = text.into();
                    value
                };
                match self.kind_of(name) {
                    ToolKind::Function => {
                        let done = with("arguments", arguments);
                        self.send("response.function_call_arguments.done", done, out);
                    }
                    ToolKind::Custom => {
                        let input = input_of(arguments);
                        let name = "response.custom_tool_call_input.delta";
                        self.send(name, with("delta", &input), out);
                        let name = "response.custom_tool_call_input.done";
                        self.send(name, with("input", &input), out);
                    }
                    ToolKind::Search => {}
                }
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

/// Returns the last tokens that `text` consists of. Those before are part of marks.
fn tokens_of<'a>(choice: &Choice, tokens: &'a [TokenInfo], text: &str) -> &'a [TokenInfo] {
    let mut length = 0;
    let mut first = tokens.len();
    while first > 0 && length < text.len() {
        first -= 1;
        length += choice.piece(tokens[first].id).1.len();
    }
    &tokens[first..]
}

/// Returns an item without probabilities, which are large and of no use in an input.
fn without_logprobs(item: &Value) -> Value {
    let mut item = item.clone();
    for part in item["content"].as_array_mut().into_iter().flatten() {
        if let Value::Object(part) = part {
            part.remove("logprobs");
        }
    }
    item
}

fn message_item(id: &str, text: &str, logprobs: &[Value], status: &str) -> Value {
    json!({
        "id": id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [],
            "logprobs": logprobs}],
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
            Update::Token { token, .. } if token.probabilities.is_some() => {
                self.waiting.push(token.clone());
            }
            Update::Parsed(Parsed::Content(more)) => {
                if !matches!(self.open, Some(Open::Message(_))) {
                    self.begin(Open::Message(String::new()), out);
                }
                if let Some(Open::Message(text)) = &mut self.open {
                    text.push_str(more);
                }
                let waiting = std::mem::take(&mut self.waiting);
                let logprobs = self.logprobs_of(choice, tokens_of(choice, &waiting, more));
                let value = json!({"item_id": self.item, "content_index": 0, "delta": more,
                    "logprobs": logprobs});
                self.logprobs.extend(logprobs);
                self.delta("response.output_text.delta", value, choice, out);
            }
            Update::Parsed(Parsed::Reasoning(more)) => {
                self.waiting.clear();
                if !matches!(self.open, Some(Open::Thought(_))) {
                    self.begin(Open::Thought(String::new()), out);
                }
                if let Some(Open::Thought(text)) = &mut self.open {
                    text.push_str(more);
                }
                let value = json!({"item_id": self.item, "content_index": 0, "delta": more});
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
                self.waiting.clear();
                let Some(Open::Call {
                    name, arguments, ..
                }) = &mut self.open
                else {
                    return;
                };
                arguments.push_str(text);
                let value = json!({"item_id": self.item, "delta": text});
                // The input of a custom tool is known once its arguments are complete.
                let tool = self.tools.tool_for(name);
                if tool.is_none_or(|tool| tool.kind == ToolKind::Function) {
                    self.delta("response.function_call_arguments.delta", value, choice, out);
                }
            }
            Update::Finished => {
                if self.done.is_empty() && self.open.is_none() {
                    self.begin(Open::Message(String::new()), out);
                }
                let status = status(choice);
                self.close(status, out);
                self.store(&self.done);
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
        let code = error.openai_code();
        let value = json!({"code": code, "message": error.message, "param": null});
        self.send("error", value, out);
        // Some clients read one of them only.
        let mut response = self.response("failed", &self.done, None);
        response["error"] = json!({"code": code, "message": error.message});
        self.send("response.failed", json!({"response": response}), out);
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
        if answer.reasoning.is_empty() && answer.calls.is_empty() {
            self.logprobs = self.logprobs_of(choice, &choice.tokens);
        }
        let last = items.len() - 1;
        let items = items.iter().enumerate().map(|(number, item)| {
            // Only the last item can be cut off by a limit.
            let status = if number == last {
                status(choice)
            } else {
                "completed"
            };
            self.name_item(item);
            self.item(item, status)
        });
        let output: Vec<Value> = items.collect();
        self.store(&output);
        let mut whole = self.response(status(choice), &output, Some(choice));
        whole["timings"] = choice.timings();
        whole["cache_miss"] = choice.cache_miss();
        whole
    }
}
