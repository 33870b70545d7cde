//! Errors of grammars.

/// Result of a grammar operation.
pub type Result<T, E = GrammarError> = std::result::Result<T, E>;

/// A grammar that cannot be parsed, contradicts itself, or contains something that cannot be
/// enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Invalid GBNF.
    #[error("line {line}, column {column}{}: {message}", in_rule(.rule))]
    Gbnf {
        /// Line, counted from 1.
        line: usize,
        /// Column in characters, counted from 1.
        column: usize,
        /// Enclosing rule, if it already has a name.
        rule: Option<String>,
        /// Description of the problem.
        message: String,
    },
    /// A part of a JSON schema that is invalid or cannot be enforced.
    #[error("{pointer}: {message}")]
    Schema {
        /// Location, as a JSON pointer in a fragment: `#/properties/name`.
        pointer: String,
        /// Description of the problem.
        message: String,
    },
    /// A regular expression that is invalid or cannot be enforced.
    #[error("the regular expression: {0}")]
    Regex(String),
    /// An invalid trigger.
    #[error("trigger '{trigger}': {message}")]
    Trigger {
        /// Word or expression of the trigger.
        trigger: String,
        /// Description of the problem.
        message: String,
    },
    /// A vocabulary that cannot be used.
    #[error("the vocabulary: {0}")]
    Vocabulary(String),
    /// A limit was exceeded.
    #[error("{0}")]
    TooLarge(String),
}

fn in_rule(rule: &Option<String>) -> String {
    rule.as_ref()
        .map_or(String::new(), |rule| format!(", in rule '{rule}'"))
}
