//! Conversations with language models: turns a conversation into a prompt in the model's format,
//! and its answer into content, reasoning and tool calls.
//!
//! This crate handles text, not models: a loader passes it templates and a tokenizer, and its
//! output goes to a session. It has no global state, prints nothing, reads no clock, and never
//! panics on external input.
//!
//! # From messages to a prompt
//!
//! [`Message`], [`Tool`] and their parts follow OpenAI's API and use `serde`. [`ChatTemplate`]
//! takes a model's templates ([`Sources`]) or one of the [builtin](BUILTIN) ones and probes what
//! they support ([`Capabilities`]). It rewrites what they do not support and makes a [`Prompt`]. A
//! [`Template`] is a program from a file, so it has [`Limits`]; its output is the same as that of
//! Python's jinja2.
//!
//! A prompt consists of [`PromptPiece`]s with and without special tokens. Text of users, tools and
//! the model goes through a [`Guard`] and never becomes a control token, even where texts meet.
//!
//! # From an answer to a message
//!
//! A [`Format`] describes as data how a model writes reasoning and calls. An [`AnswerParser`]
//! parses an answer while it is generated and emits [`AnswerEvent`]s, which it never retracts. An
//! [`Answer`] is their sum, which does not depend on how the text is split. Text that looks like a
//! call but is not one is content.
//!
//! ```
//! use samite_chat::*;
//!
//! let sources = Sources { default: Some("{% for m in messages %}<{{ m.role }}>{{ m.content }}{%
//! endfor %}<assistant>".into()), ..Sources::default() }; let chat = ChatTemplate::choose(&sources,
//! None)?; let options = PromptOptions::new(DateTime::new(0, 0)); let prompt =
//! chat.prompt(&[Message::user("Hello!")], &options, &Guard::new([]))?; assert_eq!(prompt.text(),
//! "<user>Hello!<assistant>");
//!
//! let format = chat.format(false);
//! let mut parser =
//!     AnswerParser::new(format, &AnswerOptions::default(), &prompt.generation_prompt);
//! let mut answer = Answer::default();
//! for piece in ["<thi", "nk>Hm.</think>H", "i!"] {
//!     answer.add(parser.push(piece));
//! }
//! answer.add(parser.finish());
//! assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Hi!"));
//! # Ok::<_, TemplateError>(())
//! ```
//!
//! # Files
//!
//! | file | content |
//! |---|---|
//! | `message.rs` | messages, tools, calls |
//! | `template.rs` | a compiled template and its limits |
//! | `template/python.rs` | Python features that templates rely on |
//! | `template/builtin.rs` | templates by name |
//! | `capabilities.rs`, `prompt.rs` | what a template supports; from messages to a prompt |
//! | `guard.rs` | keeps user input from becoming control tokens |
//! | `answer.rs` | events and their sum |
//! | `answer/format.rs`, `format/table.rs` | definition and list of answer formats |
//! | `answer/machine.rs`, `answer/channels.rs` | parsers of answers |
//! | `answer/head.rs` | parses the heads of calls |
//! | `answer/call_grammar.rs` | grammars of calls (feature `grammar`) |
#![forbid(unsafe_code)]

mod answer;
mod capabilities;
mod error;
mod guard;
mod message;
mod prompt;
mod template;

#[cfg(feature = "grammar")]
pub use answer::CallGrammar;
pub use answer::{
    Answer, AnswerCall, AnswerEvent, AnswerOptions, AnswerParser, CallKeys, Calls, Channels,
    FORMATS, Format, HERMES, Ids, JsonCalls, LiteralCalls, NamedCalls, PLAIN, ReasoningFormat,
    Style, TaggedCalls,
};
pub use capabilities::Capabilities;
pub use error::TemplateError;
pub use guard::{Guard, PromptPiece};
pub use message::{
    Content, ContentPart, Function, FunctionCall, Message, MessageRole, Tool, ToolCall,
};
pub use prompt::{ChatTemplate, Prompt, PromptOptions, Sources};
pub use template::{BUILTIN, DateTime, Limits, Template};
