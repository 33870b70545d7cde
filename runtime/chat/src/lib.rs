//! Conversations with language models: a conversation becomes the prompt that a model knows, and its answer becomes text, thoughts and calls of tools.
//!
//! This crate knows text and no models: a loader hands it templates and a tokenizer, and what it gives goes to a session. It has no global state,
//! prints nothing, asks no clock, and never panics on what comes from outside.
//!
//! # From messages to a prompt
//!
//! [`Message`], [`Tool`] and their parts are those of OpenAI's interface, with `serde`. [`ChatTemplate`] takes a model's templates
//! ([`Sources`]) or one of the [builtin](BUILTIN) ones, probes what they can show ([`Capabilities`]), changes what they cannot, and
//! makes a [`Prompt`]. A [`Template`] is a program from a file, so it has [`Limits`]; what it writes is what Python's jinja2 writes.
//!
//! A prompt consists of [`Piece`]s with and without special tokens: what users, tools and the model wrote goes through a [`Guard`], and
//! never becomes a control token, however texts meet.
//!
//! # From an answer to a message
//!
//! A [`Format`] says as data how a model writes thoughts and calls. An [`AnswerParser`] reads an answer as it comes and tells of it in
//! [`Event`]s, which stay true; [`Answer`] is the sum of them. However an answer is cut, the sum is the same. What looks like a call and
//! is none is content.
//!
//! ```
//! use samite_chat::*;
//!
//! let sources = Sources { default: Some("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>".into()), ..Sources::default() };
//! let chat = ChatTemplate::choose(&sources, None)?;
//! let options = PromptOptions::new(DateTime::new(0, 0));
//! let prompt = chat.prompt(&[Message::user("Hello!")], &options, &Guard::new([]))?;
//! assert_eq!(prompt.text(), "<user>Hello!<assistant>");
//!
//! let mut parser = AnswerParser::new(chat.format(false), &AnswerOptions::default(), &prompt.generation_prompt);
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
//! | file | what |
//! |---|---|
//! | `message.rs` | messages, tools, calls |
//! | `template.rs` | a compiled template and its limits; `python.rs` has what templates take for granted of Python, `builtin.rs` the formats by name |
//! | `capabilities.rs`, `prompt.rs` | what a template can show; from messages to a prompt |
//! | `guard.rs` | what users write stays text |
//! | `answer.rs` | events and their sum; `format.rs` says what a format is, and `table.rs` has all of them; `machine.rs` and `channels.rs` read answers, `head.rs` the heads of calls; `call_grammar.rs` is what calls keep to (feature `grammar`) |
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
