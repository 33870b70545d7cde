//! Parses the answers of models into content, reasoning and tool calls.
//!
//! One state machine parses streams and whole answers. It holds back only text that may start a
//! mark or a call, and never retracts an event. It reports a call once its name is known and its
//! arguments begin, and then streams the arguments. Text that looks like a call but is not one is
//! content: nothing that a model writes is an error, and only marks and the white space around them
//! are dropped.

#[cfg(feature = "grammar")]
mod call_grammar;
mod channels;
mod format;
mod head;
mod json;
mod literal;
mod machine;
mod marks;
mod write;

#[cfg(feature = "grammar")]
pub use call_grammar::CallGrammar;
pub use format::{
    Calls, Channels, FORMATS, Format, HERMES, Ids, JsonCalls, LiteralCalls, NamedCalls, PLAIN,
    TaggedCalls,
};
pub use json::CallKeys;
pub use literal::Style;

use crate::message::{Content, Message, Tool, ToolCall};
use channels::ChannelMachine;
use machine::Machine;
use serde_json::Value;
use std::collections::BTreeMap;

/// An event of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEvent {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// Start of a tool call. Calls are sequential: the following events belong to this call.
    ToolCallStart {
        /// Index of the call in this answer.
        index: usize,
        /// ID of the call.
        id: String,
        /// Name of the tool.
        name: String,
    },
    /// More of the arguments, in JSON.
    ToolArguments {
        /// Index of the call.
        index: usize,
        /// Text to append.
        text: String,
    },
    /// End of a call.
    ToolCallEnd {
        /// Index of the call.
        index: usize,
        /// True if the arguments are a complete JSON object.
        is_complete: bool,
    },
}

/// Treatment of reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Reasoning stays in the content, with its marks.
    None,
    /// Reasoning is reported separately.
    #[default]
    Auto,
    /// Reasoning is reported separately.
    Deepseek,
    /// Reasoning is reported separately and also stays in the content.
    DeepseekLegacy,
}

impl ReasoningFormat {
    /// Names, in the order of the variants.
    pub const NAMES: [&'static str; 4] = ["none", "auto", "deepseek", "deepseek-legacy"];

    /// Returns the format with this name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::None, Self::Auto, Self::Deepseek, Self::DeepseekLegacy];
        Self::NAMES
            .iter()
            .position(|known| *known == name)
            .map(|at| all[at])
    }
}

/// Options of an answer parser.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// Tools that may be called. Without any, nothing is a call.
    pub tools: Vec<Tool>,
    /// Treatment of reasoning.
    pub reasoning: ReasoningFormat,
    /// Seed of the IDs of calls. Use a different one for each answer.
    pub seed: u64,
}

/// Parses an answer while it is generated.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    machine: Kind,
    sink: Sink,
}

#[derive(Clone, Debug)]
enum Kind {
    Plain(Machine),
    Channels(Box<ChannelMachine>),
}

impl AnswerParser {
    /// Creates a parser for answers in this format. They continue `generation_prompt`, the end of
    /// the prompt that belongs to the answer (see [`Prompt`](crate::Prompt)).
    pub fn new(format: &'static Format, options: &AnswerOptions, generation_prompt: &str) -> Self {
        let sink = Sink::new(format.ids, options);
        let has_tools = !options.tools.is_empty();
        let machine = match format.calls {
            Calls::Channels(channels) => {
                let machine = ChannelMachine::new(channels, has_tools, generation_prompt);
                Kind::Channels(Box::new(machine))
            }
            _ => Kind::Plain(Machine::new(format, has_tools, generation_prompt)),
        };
        Self { machine, sink }
    }

    /// Parses the next text.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.run(text, false)
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        self.run("", true)
    }

    /// Ends an answer that a limit cut off. Drops an incomplete mark, and an incomplete call
    /// without its name.
    pub fn cut(&mut self) -> Vec<AnswerEvent> {
        let held = match &self.machine {
            Kind::Plain(machine) => machine.held(),
            Kind::Channels(machine) => machine.held(),
        };
        if held.trim().is_empty() {
            if let Kind::Channels(machine) = &mut self.machine {
                machine.cut();
            }
            return self.finish();
        }
        self.sink.end();
        std::mem::take(&mut self.sink.events)
    }

    /// Returns the text that the model writes before its content: the end of reasoning that the
    /// prompt started, or of the content's header. A grammar for the content starts after it.
    pub fn before_content(&self) -> Option<&'static str> {
        match &self.machine {
            Kind::Plain(machine) => machine.thought_end(),
            Kind::Channels(machine) => machine.before_content(),
        }
    }

    /// Returns the mark that ends reasoning, if the text so far ends in reasoning.
    pub fn reasoning_end(&self) -> Option<&'static str> {
        match &self.machine {
            Kind::Plain(machine) => machine.thought_end(),
            Kind::Channels(machine) => machine.reasoning_end(),
        }
    }

    fn run(&mut self, text: &str, is_end: bool) -> Vec<AnswerEvent> {
        match &mut self.machine {
            Kind::Plain(machine) => machine.run(text, is_end, &mut self.sink),
            Kind::Channels(machine) => machine.run(text, is_end, &mut self.sink),
        }
        std::mem::take(&mut self.sink.events)
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Content for the user.
    pub content: String,
    /// Reasoning.
    pub reasoning: String,
    /// Tool calls.
    pub calls: Vec<AnswerCall>,
}

/// A call in a whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerCall {
    /// ID of the call.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments, in JSON.
    pub arguments: String,
    /// True if the arguments are a complete JSON object.
    pub is_complete: bool,
}

impl Answer {
    /// Parses a complete answer.
    pub fn parse(
        format: &'static Format,
        options: &AnswerOptions,
        generation_prompt: &str,
        text: &str,
    ) -> Self {
        let mut parser = AnswerParser::new(format, options, generation_prompt);
        let mut answer = Self::default();
        answer.add(parser.push(text));
        answer.add(parser.finish());
        answer
    }

    /// Adds the next events.
    pub fn add(&mut self, events: Vec<AnswerEvent>) {
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => self.reasoning += &text,
                AnswerEvent::Content(text) => self.content += &text,
                AnswerEvent::ToolCallStart { id, name, .. } => {
                    self.calls.push(AnswerCall {
                        id,
                        name,
                        ..AnswerCall::default()
                    });
                }
                AnswerEvent::ToolArguments { index, text } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                AnswerEvent::ToolCallEnd { index, is_complete } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.is_complete = is_complete;
                    }
                }
            }
        }
    }

    /// Returns the answer as a message of the conversation.
    pub fn into_message(self) -> Message {
        let calls = self
            .calls
            .into_iter()
            .map(|call| ToolCall::new(call.id, call.name, call.arguments));
        let tool_calls: Vec<ToolCall> = calls.collect();
        let content = if self.content.is_empty() && !tool_calls.is_empty() {
            Content::None
        } else {
            self.content.into()
        };
        let reasoning_content = Some(self.reasoning).filter(|text| !text.is_empty());
        Message {
            reasoning_content,
            tool_calls,
            ..Message::assistant(content)
        }
    }
}

/// Type of an argument's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentKind {
    Text,
    /// A list of texts.
    Texts,
    /// Another list.
    List,
    Json,
    Unknown,
}

/// Collects the events of a machine.
#[derive(Clone, Debug)]
struct Sink {
    events: Vec<AnswerEvent>,
    reasoning: ReasoningFormat,
    ids: Ids,
    seed: u64,
    /// Types of arguments, by tool and name.
    arguments: BTreeMap<String, BTreeMap<String, ArgumentKind>>,
    calls: usize,
    /// Arguments of the call in progress.
    text: Option<String>,
}

impl Sink {
    fn new(ids: Ids, options: &AnswerOptions) -> Self {
        let arguments = options.tools.iter().map(|tool| {
            let properties = tool
                .function
                .parameters
                .get("properties")
                .and_then(Value::as_object);
            let kinds = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), argument_kind(schema)));
            (tool.function.name.clone(), kinds.collect())
        });
        Self {
            events: Vec::new(),
            reasoning: options.reasoning,
            ids,
            seed: options.seed,
            arguments: arguments.collect(),
            calls: 0,
            text: None,
        }
    }

    fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerEvent::Content(last)) => last.push_str(text),
            _ => self.events.push(AnswerEvent::Content(text.to_owned())),
        }
    }

    /// Reports reasoning.
    fn thought(&mut self, text: &str) {
        if self.reasoning != ReasoningFormat::None {
            match self.events.last_mut() {
                _ if text.is_empty() => {}
                Some(AnswerEvent::Reasoning(last)) => last.push_str(text),
                _ => self.events.push(AnswerEvent::Reasoning(text.to_owned())),
            }
        }
        self.thought_mark(text);
    }

    /// Reports a mark of reasoning, or white space around it. It is visible only if reasoning stays
    /// in the content.
    fn thought_mark(&mut self, text: &str) {
        if matches!(
            self.reasoning,
            ReasoningFormat::None | ReasoningFormat::DeepseekLegacy
        ) {
            self.content(text);
        }
    }

    fn start(&mut self, name: &str, id: Option<String>) {
        let index = self.calls;
        self.calls += 1;
        let id = id
            .filter(|id| !id.is_empty())
            .unwrap_or_else(|| self.made_id(index));
        self.text = Some(String::new());
        self.events.push(AnswerEvent::ToolCallStart {
            index,
            id,
            name: name.to_owned(),
        });
    }

    fn arguments(&mut self, more: &str) {
        let Some(text) = self.text.as_mut().filter(|_| !more.is_empty()) else {
            return;
        };
        text.push_str(more);
        let number = self.calls - 1;
        match self.events.last_mut() {
            Some(AnswerEvent::ToolArguments { index, text }) if *index == number => {
                text.push_str(more)
            }
            _ => self.events.push(AnswerEvent::ToolArguments {
                index: number,
                text: more.to_owned(),
            }),
        }
    }

    fn end(&mut self) {
        if let Some(text) = self.text.take() {
            let is_complete = serde_json::from_str::<serde_json::Map<String, Value>>(&text).is_ok();
            self.events.push(AnswerEvent::ToolCallEnd {
                index: self.calls - 1,
                is_complete,
            });
        }
    }

    fn kind(&self, tool: &str, argument: &str) -> ArgumentKind {
        let known = self
            .arguments
            .get(tool)
            .and_then(|arguments| arguments.get(argument));
        known.copied().unwrap_or(ArgumentKind::Unknown)
    }

    fn made_id(&self, index: usize) -> String {
        const LETTERS: &[u8; 62] =
            b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let (prefix, length) = if self.ids == Ids::Nine {
            ("", 9)
        } else {
            ("call_", 16)
        };
        let mut state = self.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let letters = (0..length).map(|_| {
            // SplitMix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^= mixed >> 31;
            char::from(LETTERS[(mixed % 62) as usize])
        });
        prefix.to_owned() + &letters.collect::<String>()
    }
}

/// Returns what a schema says about a value: certainly a text, certainly not one, or unknown.
fn argument_kind(schema: &Value) -> ArgumentKind {
    let is_text = |name: &Value| name.as_str() == Some("string");
    match schema.get("type") {
        Some(name @ Value::String(_)) => {
            if is_text(name) {
                ArgumentKind::Text
            } else if is_text(&schema["items"]["type"]) {
                ArgumentKind::Texts
            } else if name == "array" {
                ArgumentKind::List
            } else {
                ArgumentKind::Json
            }
        }
        Some(Value::Array(names)) if !names.iter().any(is_text) => ArgumentKind::Json,
        Some(_) => ArgumentKind::Unknown,
        None => match schema.get("enum").and_then(Value::as_array) {
            Some(values) if !values.is_empty() && values.iter().all(Value::is_string) => {
                ArgumentKind::Text
            }
            _ => ArgumentKind::Unknown,
        },
    }
}
