//! Errors of samplers.

use super::constraint::ConstraintError;

/// Parameters that a sampler cannot work with, or logits that leave nothing to choose.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A parameter is outside its range.
    #[error("{parameter} is {value}, must be {expected}")]
    Parameter {
        /// The field of [`SamplerParams`](crate::SamplerParams).
        parameter: &'static str,
        /// The value given.
        value: f32,
        /// The range allowed, in words.
        expected: &'static str,
    },
    /// A stage that does not exist.
    #[error("'{name}' is no sampler; there are {known}")]
    UnknownStage {
        /// The name or letter given.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// A stage looks at the tokens' texts, and there is no vocabulary.
    #[error("the sampler {stage} needs a vocabulary")]
    NeedsVocabulary {
        /// The stage's name.
        stage: &'static str,
    },
    /// A bias that is not a number or infinitely large.
    #[error("logit_bias for token {token} is {value}, must be a number or -inf")]
    LogitBias {
        /// The token.
        token: u32,
        /// The value given.
        value: f32,
    },
    /// A bias for a token that the logits do not have.
    #[error("logit_bias names token {token}, but there are logits for {count} tokens only")]
    LogitBiasToken {
        /// The token.
        token: u32,
        /// How many logits there are.
        count: usize,
    },
    /// Nothing is left to choose from: there are no logits, or all are NaN or minus infinity.
    #[error("no token can be chosen: all {count} logits are NaN or -inf")]
    NoCandidate {
        /// How many logits there are.
        count: usize,
    },
    /// What is to be gone on from cannot be a sampler's state.
    #[error("this cannot be the state of a sampler")]
    State,
    /// The constraint allows no token that has a logit.
    #[error(
        "no token can be chosen: the grammar allows none of those that the model and the biases leave"
    )]
    NothingAllowed,
    /// The constraint failed.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
}
