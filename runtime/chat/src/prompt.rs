//! Turns a conversation into a prompt: selects the template, prepares its input, and splits its
//! output.

use crate::answer::{Calls, Format, HERMES};
use crate::capabilities::{Capabilities, DEFAULT_LANGUAGE, LANGUAGES};
use crate::error::TemplateError;
use crate::guard::{Guard, PromptPiece, pieces, unmarked};
use crate::message::{Content, ContentPart, Message, MessageRole, Tool};
use crate::template::{BUILTIN, DateTime, Template};
use samite_text::{TokenizeError, Tokenizer};
use serde_json::{Map, Value, json};

/// Chat templates in a model's file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Value of `tokenizer.chat_template`.
    pub default: Option<String>,
    /// Values of `tokenizer.chat_template.NAME`, by name.
    pub named: Vec<(String, String)>,
    /// Text of the BOS token.
    pub bos: String,
    /// Text of the EOS token.
    pub eos: String,
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Variant,
    /// Template for conversations with tools.
    tool_use: Option<Variant>,
    bos: String,
    eos: String,
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Variant {
    template: Template,
    capabilities: Capabilities,
}

impl Variant {
    fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        let template = Template::new(source)?;
        let capabilities = Capabilities::probe(&template, bos, eos);
        Ok(Self {
            template,
            capabilities,
        })
    }
}

/// Options of a prompt.
#[derive(Clone, Debug)]
pub struct PromptOptions {
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// True if the prompt ends where the model's answer starts.
    pub add_generation_prompt: bool,
    /// True if the answer continues the last message, if that is the model's.
    pub continue_last: bool,
    /// True if the model must reason before it answers, false if it must not; `None` for the
    /// template's default.
    pub enable_thinking: Option<bool>,
    /// Amount of reasoning: "low", "medium", "high".
    pub reasoning_effort: Option<String>,
    /// Extra variables for the template.
    pub kwargs: Map<String, Value>,
    /// Current time.
    pub now: DateTime,
}

impl PromptOptions {
    /// Returns the default options.
    pub fn new(now: DateTime) -> Self {
        Self {
            tools: Vec::new(),
            add_generation_prompt: true,
            continue_last: false,
            enable_thinking: None,
            reasoning_effort: None,
            kwargs: Map::new(),
            now,
        }
    }
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Text, in pieces with and without special tokens.
    pub pieces: Vec<PromptPiece>,
    /// End of the prompt that belongs to the model's answer. An
    /// [`AnswerParser`](crate::AnswerParser) reads it first.
    pub generation_prompt: String,
}

impl Prompt {
    /// Creates a prompt of a text whose special tokens are parsed.
    pub fn from_text(text: String) -> Self {
        Prompt {
            pieces: vec![PromptPiece {
                text,
                parse_special: true,
            }],
            generation_prompt: String::new(),
        }
    }

    /// Returns the whole text.
    pub fn text(&self) -> String {
        self.pieces
            .iter()
            .map(|piece| piece.text.as_str())
            .collect()
    }

    /// Returns the tokens. Adds a BOS token if the vocabulary requires one and the text has none.
    ///
    /// # Errors
    /// Returns an error if the text is too long.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizeError> {
        let pieces = self.pieces.iter();
        let parts = pieces.map(|piece| (piece.text.as_str(), piece.parse_special));
        tokens_of(tokenizer, parts, tokenizer.adds_bos())
    }

    /// Returns the tokens before, between and after the tiles of images. In the text, `marker`
    /// stands for an image. `images` are the texts before, between and after the tiles of each
    /// image, whose special tokens are parsed.
    ///
    /// # Errors
    /// Returns an error if the text is too long.
    pub fn tokens_around_images(
        &self,
        tokenizer: &Tokenizer,
        marker: &str,
        images: &[&[String]],
    ) -> Result<Vec<Vec<u32>>, TokenizeError> {
        let mut parts: Vec<Vec<(&str, bool)>> = vec![Vec::new()];
        // A marker without an image has no texts.
        let unknown = [String::new(), String::new()];
        let mut images = images.iter();
        for piece in &self.pieces {
            for (index, text) in piece.text.split(marker).enumerate() {
                if index > 0 {
                    let texts = images.next().copied().unwrap_or(&unknown);
                    for (place, text) in texts.iter().enumerate() {
                        if place > 0 {
                            parts.push(Vec::new());
                        }
                        let part = parts.last_mut();
                        part.into_iter().for_each(|part| part.push((text, true)));
                    }
                }
                let text = (text, piece.parse_special);
                parts
                    .last_mut()
                    .into_iter()
                    .for_each(|part| part.push(text));
            }
        }
        let parts = parts.into_iter().enumerate();
        parts
            .map(|(index, part)| {
                tokens_of(
                    tokenizer,
                    part.into_iter(),
                    index == 0 && tokenizer.adds_bos(),
                )
            })
            .collect()
    }
}

fn tokens_of<'a>(
    tokenizer: &Tokenizer,
    parts: impl Iterator<Item = (&'a str, bool)>,
    add_bos: bool,
) -> Result<Vec<u32>, TokenizeError> {
    let mut tokens = tokenizer.tokenize_parts(parts, add_bos)?;
    // The text continues, so it has no EOS token.
    if add_bos && tokenizer.adds_eos() {
        tokens.pop();
    }
    Ok(tokens)
}

/// Introduction of tools, for models whose template does not support them.
const TOOLS_EXPLAINED: &str = "You may call these functions:\n";
/// Text after the tools.
const CALLS_EXPLAINED: &str = "\nTo call one, write nothing but <tool_call>{\"name\": its \
    name, \"arguments\": {its arguments}}</tool_call>, once for each call.";

impl ChatTemplate {
    /// Selects the template of a model, or another one. `wanted` is the name of one of the model's
    /// templates or of a [builtin one](BUILTIN), or a template's text. A model without a template
    /// gets "chatml", with a warning.
    ///
    /// # Errors
    /// Returns an error if no such template exists or it does not compile.
    pub fn choose(sources: &Sources, wanted: Option<&str>) -> Result<Self, TemplateError> {
        let (bos, eos) = (sources.bos.as_str(), sources.eos.as_str());
        let named = |name: &str| {
            let own = sources
                .named
                .iter()
                .map(|(name, source)| (name.as_str(), source.as_str()));
            own.chain(BUILTIN.iter().copied())
                .find(|named| named.0 == name)
                .map(|named| named.1)
        };
        let mut warnings = Vec::new();
        let source = match wanted {
            // Names contain no spaces.
            Some(text) if text.contains("{{") || text.contains("{%") || text.contains(' ') => text,
            Some("default") if sources.default.is_some() => {
                sources.default.as_deref().unwrap_or_default()
            }
            Some(name) => named(name).ok_or_else(|| {
                let own = sources.named.iter().map(|(name, _)| name.as_str());
                let known: Vec<&str> = own.chain(BUILTIN.iter().map(|named| named.0)).collect();
                TemplateError::UnknownName {
                    name: name.to_owned(),
                    known: known.join(", "),
                }
            })?,
            None => match (&sources.default, named("chatml")) {
                (Some(source), _) => source,
                (None, chatml) => {
                    warnings.push("the model has no chat template: \"chatml\" is used, which it may not know (choose one with --chat-template)".to_owned());
                    chatml.unwrap_or_default()
                }
            },
        };
        let tool_use = sources
            .named
            .iter()
            .find(|(name, _)| wanted.is_none() && name == "tool_use");
        let tool_use = match tool_use.map(|(_, source)| Variant::new(source, bos, eos)) {
            None => None,
            Some(Ok(variant)) => Some(variant),
            Some(Err(error)) => {
                warnings.push(format!(
                    "the chat template \"tool_use\" of the model is left out: {error}"
                ));
                None
            }
        };
        let default = Variant::new(source, bos, eos)?;
        Ok(Self {
            default,
            tool_use,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            warnings,
        })
    }

    /// Returns warnings about the selection, for the user.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the text of the template for a conversation with or without tools.
    pub fn source(&self, has_tools: bool) -> &str {
        self.variant(has_tools).template.source()
    }

    /// Returns the capabilities of the template for a conversation with or without tools.
    pub fn capabilities(&self, has_tools: bool) -> Capabilities {
        self.variant(has_tools).capabilities
    }

    /// Returns the compiled template for a conversation with or without tools.
    pub fn template(&self, has_tools: bool) -> &Template {
        &self.variant(has_tools).template
    }

    /// Returns the format of the model's answers. If the template does not support tools, the
    /// prompt explains them in the format of Hermes.
    pub fn format(&self, has_tools: bool) -> &'static Format {
        let variant = self.variant(has_tools);
        match Format::of_template(variant.template.source()) {
            format
                if matches!(format.calls, Calls::None)
                    && has_tools
                    && !variant.capabilities.tools =>
            {
                &HERMES
            }
            format => format,
        }
    }

    fn variant(&self, has_tools: bool) -> &Variant {
        self.tool_use
            .as_ref()
            .filter(|_| has_tools)
            .unwrap_or(&self.default)
    }

    /// Renders the prompt of a conversation. Texts that `guard` guards do not become tokens in
    /// parts that users, tools or the model wrote.
    ///
    /// # Errors
    /// Returns an error if the template rejects the conversation, fails or costs too much, or if it
    /// cannot show a message.
    pub fn prompt(
        &self,
        messages: &[Message],
        options: &PromptOptions,
        guard: &Guard,
    ) -> Result<Prompt, TemplateError> {
        let variant = self.variant(!options.tools.is_empty());
        let (messages, begun) = match messages.split_last() {
            Some((last, before))
                if options.continue_last
                    && last.role == MessageRole::Assistant
                    && last.tool_calls.is_empty() =>
            {
                let text = last.content.text().unwrap_or_default();
                (before, guard.mark(&text, is_thought))
            }
            _ => (messages, String::new()),
        };
        let messages = fix_up(messages, options, variant.capabilities)?;
        let format = self.format(!options.tools.is_empty());
        let mut shown = Vec::with_capacity(messages.len());
        for (i, message) in messages.iter().enumerate() {
            shown.push(show(message, variant.capabilities, format, guard).map_err(
                |(place, message)| TemplateError::Conversation {
                    place: format!("messages[{i}]{place}"),
                    message,
                },
            )?);
        }
        if variant.capabilities.needs_languages {
            for message in &mut shown {
                add_languages(message, &options.kwargs);
            }
        }
        let mut context = Map::new();
        context.insert("messages".to_owned(), Value::Array(shown));
        if !options.tools.is_empty() && variant.capabilities.tools {
            let mut tools = serde_json::to_value(&options.tools).unwrap_or_default();
            for tool in tools.as_array_mut().into_iter().flatten() {
                guard.mark_all(&mut tool["function"]);
            }
            let functions = serde_json::to_string_pretty(&tools).unwrap_or_default();
            context.insert("functions".to_owned(), functions.into());
            context.insert("tools".to_owned(), tools);
        } else {
            // One template concatenates this variable without a check that it exists.
            context.insert("functions".to_owned(), "[]".into());
        }
        let text = |text: &str| Value::from(text);
        context.insert("bos_token".to_owned(), text(&self.bos));
        context.insert("eos_token".to_owned(), text(&self.eos));
        context.insert(
            "date_string".to_owned(),
            text(&options.now.format("%d %b %Y")),
        );
        context.insert(
            "datetime".to_owned(),
            text(&options.now.format("%b %d %Y %H:%M:%S GMT")),
        );
        if let Some(enable) = options.enable_thinking {
            context.insert("enable_thinking".to_owned(), enable.into());
        }
        if let Some(effort) = &options.reasoning_effort {
            context.insert("reasoning_effort".to_owned(), text(effort));
        }
        context.extend(options.kwargs.clone());
        let mut render = |add_generation_prompt: bool| {
            context.insert(
                "add_generation_prompt".to_owned(),
                add_generation_prompt.into(),
            );
            let value = Value::Object(std::mem::take(&mut context));
            let result = variant.template.render(&value, options.now);
            if let Value::Object(names) = value {
                context = names;
            }
            result
        };
        let without = render(false);
        if !options.add_generation_prompt && begun.is_empty() {
            return Ok(Prompt {
                pieces: pieces(&without?),
                generation_prompt: String::new(),
            });
        }
        let mut with = render(true)?;
        // Some templates reject a conversation that ends with a user message.
        let common = without.map_or(with.len(), |without| {
            let same = with
                .bytes()
                .zip(without.bytes())
                .take_while(|(a, b)| a == b)
                .count();
            with.floor_char_boundary(same)
        });
        let generation_prompt = unmarked(&with[common..]);
        with.push_str(&begun);
        Ok(Prompt {
            pieces: pieces(&with),
            generation_prompt: generation_prompt + &unmarked(&begun),
        })
    }
}

/// Returns whether a text may contain marks of reasoning. Templates look for these in the model's
/// messages to remove reasoning.
fn is_thought(text: &str) -> bool {
    text.to_ascii_lowercase().contains("think")
}

/// Rewrites the parts of a conversation that the template does not support.
fn fix_up(
    messages: &[Message],
    options: &PromptOptions,
    can: Capabilities,
) -> Result<Vec<Message>, TemplateError> {
    let mut result: Vec<Message> = Vec::with_capacity(messages.len());
    let needs_tools_explained = !options.tools.is_empty() && !can.tools;
    // All leading system messages become one.
    let leading = messages
        .iter()
        .take_while(|message| matches!(message.role, MessageRole::System | MessageRole::Developer))
        .count();
    let (system, rest) = messages.split_at(leading);
    match system {
        [one] if !needs_tools_explained => result.push(Message {
            role: MessageRole::System,
            ..one.clone()
        }),
        [] if !needs_tools_explained => {}
        _ => {
            let mut texts = Vec::new();
            for (i, message) in system.iter().enumerate() {
                texts.push(
                    message
                        .content
                        .text()
                        .ok_or_else(|| TemplateError::Conversation {
                            place: format!("messages[{i}].content"),
                            message: "a message of the system has texts only".to_owned(),
                        })?,
                );
            }
            if needs_tools_explained {
                let tools = options
                    .tools
                    .iter()
                    .map(|tool| serde_json::to_string(&tool.function).unwrap_or_default());
                let tools: Vec<String> = tools.collect();
                texts.push(format!(
                    "{TOOLS_EXPLAINED}{}{CALLS_EXPLAINED}",
                    tools.join("\n")
                ));
            }
            result.push(Message::system(texts.join("\n\n")));
        }
    }
    let mut merged: Option<String> = None;
    if let Some(system) = result.pop_if(|_| !can.system_role) {
        merged = Some(system.content.text().unwrap_or_default());
    }
    // IDs of the last calls. Their results follow in the same order.
    let mut calls: Vec<String> = Vec::new();
    let mut results_from = 0;
    for message in rest {
        let mut message = message.clone();
        match message.role {
            MessageRole::Developer => message.role = MessageRole::System,
            MessageRole::Assistant => {
                calls = message
                    .tool_calls
                    .iter()
                    .map(|call| call.id.clone())
                    .collect();
            }
            _ => {}
        }
        if message.role == MessageRole::System && !can.system_role {
            let text = message.content.text().unwrap_or_default();
            merged = Some(merged.map_or_else(|| text.clone(), |before| before + "\n\n" + &text));
            continue;
        }
        if message.role == MessageRole::Tool && !can.tool_results {
            let text = message.content.text().unwrap_or_default();
            message = Message::user(format!("<tool_response>\n{text}\n</tool_response>"));
        }
        if let Some(text) = merged.take() {
            if message.role == MessageRole::User {
                message.content = match message.content {
                    Content::Parts(mut parts) => {
                        parts.insert(
                            0,
                            ContentPart::Text {
                                text: text + "\n\n",
                            },
                        );
                        Content::Parts(parts)
                    }
                    other => Content::Text(text + "\n\n" + &other.text().unwrap_or_default()),
                };
            } else {
                result.push(Message::user(text));
            }
        }
        if message.role == MessageRole::Tool {
            result.push(message);
            result[results_from..].sort_by_key(|result| {
                let id = result.tool_call_id.as_deref();
                calls
                    .iter()
                    .position(|call| Some(call.as_str()) == id)
                    .unwrap_or(usize::MAX)
            });
        } else {
            result.push(message);
            results_from = result.len();
        }
    }
    result.extend(merged.map(Message::user));
    Ok(result)
}

/// Adds the languages in `kwargs` to the content of a user message, for templates that translate.
fn add_languages(message: &mut Value, kwargs: &Map<String, Value>) {
    if message["role"] != "user" {
        return;
    }
    let mut part = json!({"type": "text", "text": message["content"]});
    for name in LANGUAGES {
        let language = kwargs.get(name).cloned();
        part[name] = language.unwrap_or_else(|| DEFAULT_LANGUAGE.into());
    }
    message["content"] = json!([part]);
}

/// Converts a message to the value that templates see.
fn show(
    message: &Message,
    can: Capabilities,
    format: &Format,
    guard: &Guard,
) -> Result<Value, (String, String)> {
    let mut shown = Map::new();
    shown.insert("role".to_owned(), message.role.name().into());
    let mark = |text: &str| {
        let is_free = |found: &str| message.role == MessageRole::Assistant && is_thought(found);
        guard.mark(text, is_free)
    };
    let as_content = |text: String| {
        if can.text_content || !can.typed_content {
            Value::from(text)
        } else {
            json!([{"type": "text", "text": text}])
        }
    };
    let shows_calls = can.tool_calls || message.tool_calls.is_empty();
    let content = match &message.content {
        Content::Parts(parts) if can.typed_content && shows_calls => {
            let parts = parts.iter().map(|part| match part {
                ContentPart::Text { text } => json!({"type": "text", "text": mark(text)}),
                ContentPart::ImageUrl { .. } => json!({"type": "image"}),
                ContentPart::InputAudio { .. } => json!({"type": "audio"}),
            });
            Value::Array(parts.collect())
        }
        content if !shows_calls => {
            let text = content.text().unwrap_or_default();
            let mark = |text: &str| guard.mark(text, |_| false);
            let calls = format.write_calls(&message.tool_calls, mark);
            as_content(guard.mark(&text, is_thought) + &calls)
        }
        content => {
            let text = content.text().ok_or_else(|| {
                (
                    ".content".to_owned(),
                    "this model's chat template takes texts only, no pictures and no sound"
                        .to_owned(),
                )
            })?;
            as_content(mark(&text))
        }
    };
    shown.insert("content".to_owned(), content);
    if let Some(reasoning) = &message.reasoning_content {
        // Templates use one name or the other.
        let reasoning = guard.mark(reasoning, |_| false);
        if !can.reasoning {
            shown.insert("thinking".to_owned(), reasoning.clone().into());
        }
        shown.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !message.tool_calls.is_empty() && shows_calls {
        let calls = message.tool_calls.iter().map(|call| {
            let mut value = json!({"id": guard.mark(&call.id, |_| false), "type": "function",
                "function": {"name": guard.mark(&call.function.name, |_| false)}});
            value["function"]["arguments"] = arguments(&call.function.arguments, can, guard);
            value
        });
        shown.insert("tool_calls".to_owned(), Value::Array(calls.collect()));
    }
    for (name, value) in [
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ] {
        if let Some(value) = value {
            shown.insert(name.to_owned(), guard.mark(value, |_| false).into());
        }
    }
    Ok(Value::Object(shown))
}

/// Converts arguments to the form that the template supports. Arguments that are not an object stay
/// a text.
fn arguments(text: &str, can: Capabilities, guard: &Guard) -> Value {
    if can.object_arguments || !can.text_arguments {
        let text = if text.trim().is_empty() { "{}" } else { text };
        if let Ok(mut object @ Value::Object(_)) = serde_json::from_str(text) {
            guard.mark_all(&mut object);
            return object;
        }
    }
    guard.mark(text, |_| false).into()
}
