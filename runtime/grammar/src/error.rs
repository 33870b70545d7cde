//! Errors of grammars.

/// The result of anything here that can fail.
pub type Result<T, E = GrammarError> = std::result::Result<T, E>;

/// A grammar that cannot be read, contradicts itself, or asks for what cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// GBNF that is wrong.
    #[error("line {line}, column {column}{}: {message}", in_rule(.rule))]
    Gbnf {
        /// Counted from 1.
        line: usize,
        /// In characters, counted from 1.
        column: usize,
        /// The rule in which it is, if it has a name yet.
        rule: Option<String>,
        /// What is wrong.
        message: String,
    },
    /// A part of a JSON schema that is wrong or cannot be enforced.
    #[error("{pointer}: {message}")]
    Schema {
        /// Where, as a JSON pointer in a fragment: `#/properties/name`.
        pointer: String,
        /// What is wrong.
        message: String,
    },
    /// A regular expression that is wrong or cannot be enforced.
    #[error("the regular expression: {0}")]
    Regex(String),
    /// A trigger that is wrong.
    #[error("trigger '{trigger}': {message}")]
    Trigger {
        /// Its word or expression.
        trigger: String,
        /// What is wrong.
        message: String,
    },
    /// A vocabulary that cannot be used.
    #[error("the vocabulary: {0}")]
    Vocabulary(String),
    /// A limit was reached.
    #[error("{0}")]
    TooLarge(String),
}

fn in_rule(rule: &Option<String>) -> String {
    rule.as_ref()
        .map_or(String::new(), |rule| format!(", in rule '{rule}'"))
}
