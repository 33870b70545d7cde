//! Answers of models, parsed back: what is said, what was thought, which tools are called.
//!
//! One machine reads streams and whole answers. It holds back only what may be the beginning of a mark or of a call, and what it told of stays
//! told. A call is told of when its name is known and its arguments begin; then these come as the model writes them. What looks like a
//! call and is none is content: nothing that a model writes is an error, and nothing of it is lost but marks and the white space around them.

#[cfg(feature = "grammar")]
mod call_grammar;
mod channels;
mod format;
mod head;
mod json;
mod literal;
mod machine;
mod marks;

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

/// What comes of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Content(String),
    /// It calls a tool. Calls come one after the other, and what follows belongs to this one.
    ToolCallStart {
        /// The number of the call in this answer.
        index: usize,
        /// Its id.
        id: String,
        /// Which tool.
        name: String,
    },
    /// More of the arguments, in JSON.
    ToolArguments {
        /// Of this call.
        index: usize,
        /// The text.
        text: String,
    },
    /// The call ends.
    ToolCallEnd {
        /// This one.
        index: usize,
        /// Whether the arguments are an object of JSON, with an end.
        is_complete: bool,
    },
}

/// What becomes of thoughts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// They stay in the content, with their marks.
    None,
    /// They are told of apart.
    #[default]
    Auto,
    /// They are told of apart.
    Deepseek,
    /// They are told of apart, and stay in the content, too.
    DeepseekLegacy,
}

impl ReasoningFormat {
    /// The names in the order of the variants.
    pub const NAMES: [&'static str; 4] = ["none", "auto", "deepseek", "deepseek-legacy"];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::None, Self::Auto, Self::Deepseek, Self::DeepseekLegacy];
        Self::NAMES
            .iter()
            .position(|known| *known == name)
            .map(|at| all[at])
    }
}

/// How answers are parsed.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// The tools that may be called. Without any, nothing is a call.
    pub tools: Vec<Tool>,
    /// What becomes of thoughts.
    pub reasoning: ReasoningFormat,
    /// What the ids of calls are made from: another number for each answer.
    pub seed: u64,
}

/// Reads an answer as it comes.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    machine: Kind,
    sink: Sink,
}

#[derive(Clone, Debug)]
enum Kind {
    Plain(Machine),
    Channels(ChannelMachine),
}

impl AnswerParser {
    /// A parser of answers in this format, which go on with `generation_prompt`: the end of the prompt that belongs to the answer (see
    /// [`Prompt`](crate::Prompt)).
    pub fn new(format: &'static Format, options: &AnswerOptions, generation_prompt: &str) -> Self {
        let sink = Sink::new(format.ids, options);
        let has_tools = !options.tools.is_empty();
        let machine = match format.calls {
            Calls::Channels(channels) => {
                Kind::Channels(ChannelMachine::new(channels, has_tools, generation_prompt))
            }
            _ => Kind::Plain(Machine::new(format, has_tools, generation_prompt)),
        };
        Self { machine, sink }
    }

    /// Goes on with the text that comes next.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        self.run(text, false)
    }

    /// Nothing comes any more.
    pub fn finish(&mut self) -> Vec<Event> {
        self.run("", true)
    }

    /// Ends an answer that a limit cut. An incomplete mark and an incomplete call without its name
    /// are left out.
    pub fn cut(&mut self) -> Vec<Event> {
        let held = match &self.machine {
            Kind::Plain(machine) => machine.held(),
            Kind::Channels(machine) => machine.held(),
        };
        if held.trim().is_empty() {
            return self.finish();
        }
        self.sink.end();
        std::mem::take(&mut self.sink.events)
    }

    /// What the model writes before it says something: the end of thoughts that the prompt began, or of the header of what is said. A grammar
    /// for what is said begins behind it.
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

    fn run(&mut self, text: &str, is_end: bool) -> Vec<Event> {
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
    /// What is said.
    pub content: String,
    /// What was thought.
    pub reasoning: String,
    /// Calls: id, name, arguments, and whether these are complete.
    pub calls: Vec<AnswerCall>,
}

/// A call in a whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerCall {
    /// Its id.
    pub id: String,
    /// Which tool.
    pub name: String,
    /// Its arguments, in JSON.
    pub arguments: String,
    /// Whether they are an object of JSON, with an end.
    pub is_complete: bool,
}

impl Answer {
    /// Parses an answer that is all there.
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

    /// Adds what came next.
    pub fn add(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Reasoning(text) => self.reasoning += &text,
                Event::Content(text) => self.content += &text,
                Event::ToolCallStart { id, name, .. } => {
                    self.calls.push(AnswerCall {
                        id,
                        name,
                        ..AnswerCall::default()
                    });
                }
                Event::ToolArguments { index, text } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                Event::ToolCallEnd { index, is_complete } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.is_complete = is_complete;
                    }
                }
            }
        }
    }

    /// The message that goes into the conversation.
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

/// What kind of value an argument has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentKind {
    Text,
    Json,
    Unknown,
}

/// Where a machine tells what it found.
#[derive(Clone, Debug)]
struct Sink {
    events: Vec<Event>,
    reasoning: ReasoningFormat,
    ids: Ids,
    seed: u64,
    /// By tool and argument, whether it is a text.
    arguments: BTreeMap<String, BTreeMap<String, ArgumentKind>>,
    calls: usize,
    /// The arguments of the call that is being told of.
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
            Some(Event::Content(last)) => last.push_str(text),
            _ => self.events.push(Event::Content(text.to_owned())),
        }
    }

    /// What the model thinks.
    fn thought(&mut self, text: &str) {
        if self.reasoning != ReasoningFormat::None {
            match self.events.last_mut() {
                _ if text.is_empty() => {}
                Some(Event::Reasoning(last)) => last.push_str(text),
                _ => self.events.push(Event::Reasoning(text.to_owned())),
            }
        }
        self.thought_mark(text);
    }

    /// A mark of thoughts, or white space around it, which only those see who want thoughts in the content.
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
        self.events.push(Event::ToolCallStart {
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
            Some(Event::ToolArguments { index, text }) if *index == number => text.push_str(more),
            _ => self.events.push(Event::ToolArguments {
                index: number,
                text: more.to_owned(),
            }),
        }
    }

    fn end(&mut self) {
        if let Some(text) = self.text.take() {
            let is_complete = serde_json::from_str::<serde_json::Map<String, Value>>(&text).is_ok();
            self.events.push(Event::ToolCallEnd {
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
            // splitmix64
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

/// What a schema says of a value: whether it is a text for sure, or surely none.
fn argument_kind(schema: &Value) -> ArgumentKind {
    let is_text = |name: &Value| name.as_str() == Some("string");
    match schema.get("type") {
        Some(name @ Value::String(_)) => {
            if is_text(name) {
                ArgumentKind::Text
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
