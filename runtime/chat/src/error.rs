//! Errors of templates and rendering.

/// The reason why a template renders no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template does not parse.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// Line number, from 1.
        line: usize,
        /// Problem at this line.
        message: String,
    },
    /// The template rejects the conversation with `raise_exception`.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// Rendering takes too long, nests too deeply or writes too much.
    #[error("the chat template costs too much: {0}")]
    Limit(String),
    /// Rendering this conversation fails.
    #[error("chat template, line {line}: cannot be rendered with this conversation: {message}")]
    Render {
        /// Line number, from 1.
        line: usize,
        /// Problem at this line.
        message: String,
    },
    /// No template has this name.
    #[error(
        "no chat template is named \"{name}\": give one of {known}, a template's text, or --chat-template-file"
    )]
    UnknownName {
        /// Name that was not found.
        name: String,
        /// Known names.
        known: String,
    },
    /// The conversation is invalid for any template.
    #[error("{place}: {message}")]
    Conversation {
        /// Path of the invalid part, such as `messages[2].content`.
        place: String,
        /// Problem with it.
        message: String,
    },
}
