//! Conversations.
#![forbid(unsafe_code)]

mod error;
mod template;

pub use error::TemplateError;
pub use template::{BUILTIN, DateTime, Limits, Template};
mod message;
pub use message::{Content, Function, FunctionCall, Message, Part, Role, Tool, ToolCall};
