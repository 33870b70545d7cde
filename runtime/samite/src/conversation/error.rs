//! Errors of conversations.

use crate::{chat, llm};

/// Reason why a conversation has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConversationError {
    /// Failure of the model, its context or a device, or cancellation.
    #[error(transparent)]
    Model(#[from] llm::Error),
    /// The template cannot be used or rejects the messages.
    #[error(transparent)]
    Template(#[from] chat::TemplateError),
    /// The grammar or schema for answers cannot be enforced.
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] crate::grammar::GrammarError),
    /// An image of a message cannot be read.
    #[error("{0}")]
    Image(String),
    /// A message has an image, and the conversation has no image encoder.
    #[error(
        "a message has an image, and the conversation has no image encoder: set one with set_image_encoder"
    )]
    NoEncoder,
    /// The model called tools in this many consecutive rounds.
    #[error(
        "the model went on calling tools after {0} rounds: raise max_rounds, or look at what they answer"
    )]
    TooManyRounds(usize),
    /// Both tools and a grammar are set.
    #[error("answers cannot keep to a grammar while there are tools: a call is not part of it")]
    ToolsAndGrammar,
    /// A tool call is required, but this format has no known grammar.
    #[error(
        "a model whose calls have the format {0} cannot be made to call a tool: leave that to it"
    )]
    NoCalls(&'static str),
    /// The answer is not a value of the requested type.
    #[error("the answer is no {wanted}: {why}: {text}")]
    NotTyped {
        /// Name of the type.
        wanted: &'static str,
        /// Reason why the answer does not match.
        why: String,
        /// Text of the answer.
        text: String,
    },
    /// The thread of an [`AsyncConversation`](super::AsyncConversation) ended.
    #[cfg(feature = "async")]
    #[error("the conversation's thread has ended")]
    Gone,
}

impl ConversationError {
    /// Returns whether the answer was cancelled through its context's token.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Model(error) if error.is_cancelled())
    }
}
