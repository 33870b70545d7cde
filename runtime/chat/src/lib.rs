//! Conversations with language models: a conversation becomes the prompt that a model knows, and its answer becomes text, thoughts and calls.
#![forbid(unsafe_code)]

mod answer;
mod capabilities;
mod error;
mod guard;
mod message;
mod prompt;
mod template;

pub use answer::{
    Answer, AnswerCall, AnswerOptions, AnswerParser, CallKeys, Calls, Channels, Event, FORMATS,
    Format, HERMES, Ids, JsonCalls, LiteralCalls, NamedCalls, PLAIN, ReasoningFormat, Style,
    TaggedCalls,
};
pub use capabilities::Capabilities;
pub use error::TemplateError;
pub use guard::{Guard, Piece};
pub use message::{Content, Function, FunctionCall, Message, Part, Role, Tool, ToolCall};
pub use prompt::{ChatTemplate, Prompt, PromptOptions, Sources};
pub use template::{BUILTIN, DateTime, Limits, Template};
