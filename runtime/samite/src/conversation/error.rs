//! Why there is no answer.

use crate::{chat, llm};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConversationError {
    /// The model, its context or a device; also when cancelled.
    #[error(transparent)]
    Model(#[from] llm::Error),
    /// The template cannot be used, or refuses the messages.
    #[error(transparent)]
    Template(#[from] chat::TemplateError),
    /// What answers keep to cannot be enforced.
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] crate::grammar::GrammarError),
    /// A tool was called after an answer had called tools this often in a row.
    #[error(
        "the model went on calling tools after {0} rounds: raise max_rounds, or look at what they answer"
    )]
    TooManyRounds(usize),
    /// Tools, and something that answers keep to.
    #[error("answers cannot keep to a grammar while there are tools: a call is not part of it")]
    ToolsAndGrammar,
    /// A call was asked for, and what calls of this format keep to is not known.
    #[error(
        "a model whose calls have the format {0} cannot be made to call a tool: leave that to it"
    )]
    NoCalls(&'static str),
    /// An answer that is no value of the wanted type.
    #[error("the answer is no {wanted}: {why}: {text}")]
    NotTyped {
        /// The name of the type.
        wanted: &'static str,
        /// What is wrong with it.
        why: String,
        /// The answer.
        text: String,
    },
    /// The thread of an [`AsyncConversation`](super::AsyncConversation) ended.
    #[cfg(feature = "async")]
    #[error("the conversation's thread has ended")]
    Gone,
}

impl ConversationError {
    /// Whether the answer was stopped by its context's token.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Model(error) if error.is_cancelled())
    }
}
