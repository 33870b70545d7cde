//! Conversations of all APIs, in OpenAI's format: from messages to a prompt, and the parser of the
//! answer.

use crate::app::App;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, PLACE, kind};
use crate::form::{Form, check_schema};
use crate::ids;
use crate::images::{PromptImages, PromptTokens};
use crate::job::{ChatExtras, Job, Parsing, reasoning_format};
use crate::reasoning_budget::ReasoningLimit;
use samite_chat::{
    AnswerOptions, AnswerParser, Content, ContentPart, DateTime, Format, Message, MessageRole,
    Prompt, PromptOptions, Tool,
};
use samite_grammar::{Grammar, GrammarPart};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// A validated conversation.
pub struct Conversation {
    pub messages: Vec<Message>,
    pub images: PromptImages,
    pub options: PromptOptions,
    /// Tools that may be called, and are not part of the prompt: a message describes them.
    pub deferred: Vec<Tool>,
    /// True if the answer must call a tool.
    pub must_call: bool,
    /// True if one answer may have several calls.
    pub is_parallel: bool,
}

/// Bytes of memory that the grammar of a tool takes, besides its schema.
const TOOL: usize = 256 << 10;

/// Maximum number of messages and of tools in a conversation.
pub const MOST: usize = 16_384;

/// Removes members without a value, which count as missing.
fn remove_nulls(value: Option<&mut Value>) {
    if let Some(Value::Object(members)) = value {
        members.retain(|_, member| !member.is_null());
    }
}

/// Reads the function of a tool or of a call.
fn function<'a>(fields: &Fields<'a>, place: &str) -> Result<Fields<'a>> {
    let missing = || ApiError::field(format!("{place}.function"), "is missing");
    let function = fields.fields("function")?.ok_or_else(missing)?;
    function.required_text("name")?;
    Ok(function)
}

/// Reads the URL of an image: `{"image_url": {"url": …}}`, or the URL itself.
fn image_url<'a>(place: &str, part: &Fields<'a>) -> Result<&'a str> {
    match part.get(&["image_url"]) {
        Some((name, Value::Object(_))) => {
            let image = part.fields(name)?;
            let url = image.map(|image| image.required_text("url")).transpose()?;
            Ok(url.unwrap_or_default())
        }
        Some((_, Value::String(url))) => Ok(url),
        _ => Err(ApiError::field(
            format!("{place}.image_url"),
            "must be an object with \"url\"",
        )),
    }
}

/// Reads a list of texts and images as texts, in which a marker stands for each image. `role` is
/// that of the message.
fn parts(
    context: &RequestContext,
    images: &mut PromptImages,
    role: &str,
    place: &str,
    parts: &[Value],
) -> Result<Value> {
    /// Takes the place of an image in the result of a tool. An error would end the session of an
    /// agent.
    const NOTE: &str = "[an image that this model cannot see]";
    let is_result = role == "tool";
    let mut read = |(i, part)| {
        let place = format!("{place}[{i}]");
        let part = Fields::from_value(&place, part)?;
        match part.text(&["type"])?.unwrap_or("text") {
            "text" | "input_text" | "output_text" => Ok(part.required_text("text")?.to_owned()),
            "image_url" | "input_image" | "image" if is_result && context.encoder.is_none() => {
                Ok(NOTE.to_owned())
            }
            "image_url" | "input_image" | "image" => {
                if context.encoder.is_none() {
                    let own = part.text(&[PLACE])?.map(str::to_owned);
                    return Err(ApiError::image(own.unwrap_or(place)));
                }
                let url = image_url(&place, &part)?;
                let own = part.text(&[PLACE])?.map(str::to_owned);
                let place = own.unwrap_or_else(|| format!("{place}.image_url"));
                images.add(context, &place, url)?;
                Ok(images.marker().to_owned())
            }
            "input_audio" | "audio" => Err(ApiError::field(
                place,
                "audio input is not supported by this model",
            )),
            other => Err(ApiError::field(
                format!("{place}.type"),
                format!("unsupported content[].type \"{other}\": use text"),
            )),
        }
    };
    let texts: Vec<String> = parts
        .iter()
        .enumerate()
        .map(&mut read)
        .collect::<Result<_>>()?;
    // Most templates show the result of a tool as one text.
    if is_result {
        return Ok(texts.join("\n").into());
    }
    let texts = texts.into_iter();
    Ok(texts
        .map(|text| json!({"type": "text", "text": text}))
        .collect())
}

fn message(
    context: &RequestContext,
    images: &mut PromptImages,
    place: &str,
    value: &Value,
) -> Result<Message> {
    let fields = Fields::from_value(place, value)?;
    let of = |name: &str| format!("{place}.{name}");
    let role = fields.required_text("role")?;
    let mut message = value.clone();
    match fields.get(&["content"]) {
        None | Some((_, Value::String(_))) => {}
        Some((name, Value::Array(list))) => {
            message[name] = parts(context, images, role, &of(name), list)?;
        }
        Some((_, other)) => {
            return Err(ApiError::field(
                of("content"),
                format!(
                    "must be a string or a list of parts, and is {}",
                    kind(other)
                ),
            ));
        }
    }
    if role == "user" && !fields.has("content") {
        return Err(ApiError::field(of("content"), "is missing"));
    }
    for name in [
        "reasoning_content",
        "reasoning",
        "thinking",
        "tool_call_id",
        "name",
    ] {
        fields.text(&[name])?;
    }
    let calls = fields.list("tool_calls")?.unwrap_or_default();
    for (i, call) in calls.iter().enumerate() {
        let place = of(&format!("tool_calls[{i}]"));
        let call = Fields::from_value(&place, call)?;
        call.text(&["id"])?;
        call.text(&["type"])?;
        function(&call, &place)?;
        remove_nulls(message["tool_calls"].get_mut(i));
    }
    serde_json::from_value(message).map_err(|error| ApiError::field(place, error))
}

/// Tools of a request, after its `tool_choice`.
struct Tools {
    shown: Vec<Tool>,
    deferred: Vec<Tool>,
    must_call: bool,
    /// True if the request names the function to call. OpenAI calls it once.
    is_named: bool,
}

/// Shows all deferred functions, for requests in which nothing would find them.
pub fn show_deferred(functions: &mut [Value]) {
    for function in functions {
        function["defer_loading"] = false.into();
    }
}

/// Reads `tools` and `tool_choice`.
fn tools(fields: &Fields<'_>) -> Result<Tools> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > MOST {
        return Err(ApiError::field("tools", format!("{MOST} are allowed")));
    }
    let mut tools: Vec<Tool> = Vec::new();
    let mut deferred = Vec::new();
    for (i, tool) in list.iter().enumerate() {
        let place = format!("tools[{i}]");
        let fields = Fields::from_value(&place, tool)?;
        // Other types belong to services of the APIs' vendors.
        if fields
            .text(&["type"])?
            .is_some_and(|kind| kind != "function")
        {
            return Err(ApiError::field(
                format!("{place}.type"),
                "must be \"function\"",
            ));
        }
        let is_deferred = fields.boolean(&["defer_loading"], false)?;
        let function = function(&fields, &place)?;
        function.text(&["description"])?;
        function.boolean(&["strict"], false)?;
        if let Some((name, schema)) = function.get(&["parameters"]) {
            check_schema(&format!("{place}.function.{name}"), schema)?;
        }
        let mut tool = tool.clone();
        remove_nulls(Some(&mut tool));
        remove_nulls(tool.get_mut("function"));
        let tool = serde_json::from_value(tool).map_err(|error| ApiError::field(&place, error))?;
        if is_deferred {
            deferred.push(tool);
        } else {
            tools.push(tool);
        }
    }
    let mut is_named = false;
    let must_call = match fields.get(&["tool_choice"]) {
        None => false,
        Some((name, Value::String(choice))) => match choice.as_str() {
            "auto" => false,
            "none" => {
                tools.clear();
                deferred.clear();
                false
            }
            "required" => true,
            other => {
                return Err(ApiError::field(
                    name,
                    format!("must be none, auto, required or an object, and is \"{other}\""),
                ));
            }
        },
        Some((name, choice)) => {
            let choice = Fields::from_value(name, choice)?;
            if choice.text(&["type"])? == Some("allowed_tools") {
                let (names, must_call) = allowed(&choice)?;
                for list in [&mut tools, &mut deferred] {
                    list.retain(|tool: &Tool| names.contains(&tool.function.name));
                }
                must_call
            } else {
                is_named = true;
                let wanted = match choice.fields("function")? {
                    Some(function) => function.text(&["name"])?,
                    None => choice.text(&["name"])?,
                };
                let wanted = wanted
                    .ok_or_else(|| ApiError::field("tool_choice.function.name", "is missing"))?;
                for list in [&mut tools, &mut deferred] {
                    list.retain(|tool: &Tool| tool.function.name == wanted);
                }
                if tools.is_empty() && deferred.is_empty() {
                    return Err(ApiError::field(
                        "tool_choice",
                        format!("there is no tool \"{wanted}\""),
                    ));
                }
                true
            }
        }
    };
    // Templates choose another format with tools, so the deferred ones are shown if there are no
    // others.
    if tools.is_empty() {
        tools.append(&mut deferred);
    }
    if must_call && tools.is_empty() {
        return Err(ApiError::field(
            "tool_choice",
            "there are no \"tools\" to call",
        ));
    }
    Ok(Tools {
        shown: tools,
        deferred,
        must_call,
        is_named,
    })
}

/// Reads a choice of several tools. Returns their names, and whether one must be called.
fn allowed(choice: &Fields<'_>) -> Result<(BTreeSet<String>, bool)> {
    let inner = choice.fields("allowed_tools")?;
    let choice = inner.as_ref().unwrap_or(choice);
    let mut names = BTreeSet::new();
    for (i, tool) in choice.list("tools")?.unwrap_or_default().iter().enumerate() {
        let tool = Fields::from_value(&format!("tool_choice.tools[{i}]"), tool)?;
        let name = match tool.fields("function")? {
            Some(function) => function.text(&["name"])?,
            None => tool.text(&["name"])?,
        };
        names.extend(name.map(str::to_owned));
    }
    let must_call = match choice.text(&["mode"])?.unwrap_or("auto") {
        "auto" => false,
        "required" => true,
        other => {
            return Err(ApiError::field(
                "tool_choice.mode",
                format!("must be auto or required, and is \"{other}\""),
            ));
        }
    };
    Ok((names, must_call))
}

impl Conversation {
    pub fn read(context: &RequestContext, fields: &Fields<'_>) -> Result<Self> {
        let app: &App = context;
        let Some(list) = fields.list("messages")? else {
            return Err(ApiError::field("messages", "is missing"));
        };
        if list.is_empty() {
            return Err(ApiError::field("messages", "is empty"));
        }
        if list.len() > MOST {
            return Err(ApiError::field("messages", format!("{MOST} are allowed")));
        }
        let mut images = PromptImages::new();
        let mut read = |(i, value)| {
            let place = format!("messages[{i}]");
            message(context, &mut images, &place, value)
        };
        let messages = list.iter().enumerate().map(&mut read);
        let mut messages: Vec<Message> = messages.collect::<Result<_>>()?;
        let Tools {
            shown: tools,
            deferred,
            must_call,
            is_named,
        } = tools(fields)?;
        let is_assistant = |message: &Message| message.role == MessageRole::Assistant;
        if let [.., before, last] = messages.as_slice()
            && is_assistant(before)
            && is_assistant(last)
        {
            return Err(ApiError::field(
                "messages",
                "the conversation cannot end with two messages of the assistant",
            ));
        }
        let continues = fields.boolean(&["continue_final_message"], false)?;
        let adds = fields.boolean(&["add_generation_prompt"], !continues)?;
        if continues && adds && fields.has("add_generation_prompt") {
            return Err(ApiError::field(
                "continue_final_message",
                "cannot be true together with \"add_generation_prompt\"",
            ));
        }
        let is_continued = messages.last().is_some_and(is_assistant);
        if let Some(last) = messages.last_mut().filter(|last| is_assistant(last)) {
            // A message to continue must be one text.
            if let Content::Parts(parts) = &last.content {
                let texts = parts.iter().map(|part| match part {
                    ContentPart::Text { text } => text.as_str(),
                    _ => "",
                });
                last.content = texts.collect::<Vec<_>>().join("\n\n").into();
            }
        }
        let mut kwargs = app.options.template_kwargs.clone();
        if let Some(own) = fields.fields("chat_template_kwargs")? {
            kwargs.extend(own.object().clone());
        }
        let thinking = match kwargs.get("enable_thinking") {
            None | Some(Value::Null) => app.options.thinking,
            Some(Value::Bool(value)) => Some(*value),
            Some(other) => {
                return Err(ApiError::field(
                    "chat_template_kwargs.enable_thinking",
                    format!("must be true or false, and is {}", kind(other)),
                ));
            }
        };
        // Templates treat an unset `enable_thinking` as false, so always set it.
        let thinking = fields.boolean(&["enable_thinking"], thinking.unwrap_or(true))?;
        kwargs.remove("enable_thinking");
        let effort = fields.text(&["reasoning_effort"])?.map(str::to_owned);
        Ok(Conversation {
            options: PromptOptions {
                tools,
                add_generation_prompt: adds || continues,
                continue_last: is_continued && (continues || app.options.prefill),
                enable_thinking: Some(thinking),
                reasoning_effort: effort,
                kwargs,
                ..PromptOptions::new(DateTime::new(ids::seconds().cast_signed(), 0))
            },
            messages,
            images,
            deferred,
            must_call,
            is_parallel: fields.boolean(&["parallel_tool_calls"], !is_named)?,
        })
    }

    /// Renders the prompt with the model's template.
    pub fn prompt(&self, app: &App) -> Result<Prompt> {
        let has_tools = !self.options.tools.is_empty();
        Ok(app
            .template
            .prompt(&self.messages, &self.options, app.guard(has_tools))?)
    }

    /// Returns the prompt and its tokens.
    pub fn tokens(&self, context: &RequestContext) -> Result<(Prompt, PromptTokens)> {
        let prompt = self.prompt(context)?;
        context.check_length("messages", &prompt.text())?;
        let tokens = self.images.tokens(context, "messages", &prompt)?;
        Ok((prompt, tokens))
    }
}

/// Returns the form of an answer that may call tools.
fn calls(conversation: &Conversation, tools: &[Tool], format: &Format) -> Result<Option<Form>> {
    match format.call_grammar(tools, conversation.is_parallel) {
        Some(calls) => Ok(Some(Form::Calls {
            grammar: calls.grammar,
            triggers: if conversation.must_call {
                Vec::new()
            } else {
                calls.triggers
            },
        })),
        None if conversation.must_call => Err(ApiError::field(
            "tool_choice",
            format!(
                "a call cannot be demanded of a model that calls tools as \"{}\" does: use auto",
                format.name
            ),
        )),
        None => Ok(None),
    }
}

/// Returns the tools. A schema that cannot be enforced becomes `{"type": "object"}`.
fn enforceable(context: &RequestContext, tools: &[Tool]) -> Result<Vec<Tool>> {
    let _turn = context.compiling.begin_blocking(context.caller.owner)?;
    let mut tools = tools.to_vec();
    for tool in &mut tools {
        let schema = GrammarPart::Json(tool.function.parameters.clone());
        if let Err(error) = Grammar::parts(schema).check() {
            let name = &tool.function.name;
            tracing::warn!("the parameters of tool {name:?} are not enforced: {error}");
            tool.function.parameters = json!({"type": "object"});
        }
    }
    Ok(tools)
}

/// Rejects `echo` in APIs that do not support it.
pub fn no_echo(fields: &Fields<'_>) -> Result<()> {
    if fields.boolean(&["echo"], false)? {
        Err(ApiError::field("echo", "POST /v1/completions has it only"))
    } else {
        Ok(())
    }
}

/// Creates the job of a conversation in OpenAI's format.
pub fn job(context: &RequestContext, body: &Value) -> Result<Job> {
    let fields = Fields::new(body)?;
    no_echo(&fields)?;
    let conversation = Conversation::read(context, &fields)?;
    let reasoning = reasoning_format(context, &fields)?;
    let (prompt, tokens) = conversation.tokens(context)?;
    let tools = &[&conversation.options.tools[..], &conversation.deferred].concat();
    let has_tools = !tools.is_empty();
    let format = context.template.format(has_tools);
    let options = AnswerOptions {
        tools: tools.clone(),
        reasoning,
        seed: ids::number(),
    };
    let memory = tools.len().saturating_mul(TOOL);
    context.account.charge("tools", memory)?;
    let form = calls(&conversation, tools, format)?;
    let parser = AnswerParser::new(format, &options, &prompt.generation_prompt);
    let extras = ChatExtras {
        before_content: parser.before_content(),
        shown: context.shown(has_tools).to_vec(),
        form,
        reasoning_limit: ReasoningLimit::read(context, &fields)?,
        parsing: Some(Parsing {
            format,
            options,
            generation_prompt: prompt.generation_prompt,
        }),
    };
    let job = |tokens: PromptTokens, extras| Job::new(context, &fields, vec![tokens], extras);
    if !has_tools {
        return job(tokens, extras);
    }
    match job(tokens.clone(), extras.clone()) {
        Err(error) if error.is_about("tools") => {
            let form = calls(&conversation, &enforceable(context, tools)?, format)?;
            job(tokens, ChatExtras { form, ..extras })
        }
        job => job,
    }
}

/// Inserts a member into an object if it has a value.
pub fn member(object: &mut Map<String, Value>, name: &str, value: Option<Value>) {
    if let Some(value) = value {
        object.insert(name.to_owned(), value);
    }
}
