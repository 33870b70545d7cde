//! What can be wrong with a template, or with what is written by one.

/// Why a template gives no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The text of the template is no template.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// The template itself refuses the conversation, by `raise_exception`.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// It takes too long, nests too deeply or writes too much.
    #[error("the chat template costs too much: {0}")]
    Limit(String),
    /// It fails with this conversation.
    #[error("chat template, line {line}: cannot be rendered with this conversation: {message}")]
    Render {
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// No template has this name.
    #[error(
        "no chat template is named \"{name}\": give one of {known}, a template's text, or --chat-template-file"
    )]
    UnknownName {
        /// The name.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// The conversation itself is not one that a template can be asked for.
    #[error("{place}: {message}")]
    Conversation {
        /// Which part, such as `messages[2].content`.
        place: String,
        /// What is wrong with it.
        message: String,
    },
}
