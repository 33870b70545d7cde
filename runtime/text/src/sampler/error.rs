//! Errors of samplers.

use super::constraint::ConstraintError;

/// Invalid parameters of a sampler, or logits without a candidate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A parameter is outside its range.
    #[error("{parameter} is {value}, must be {expected}")]
    Parameter {
        /// Field of [`SamplerParams`](crate::SamplerParams).
        parameter: &'static str,
        /// Value of the parameter.
        value: f32,
        /// Allowed range, in words.
        expected: &'static str,
    },
    /// The stage does not exist.
    #[error("'{name}' is no sampler; there are {known}")]
    UnknownStage {
        /// Name or letter from the caller.
        name: String,
        /// Existing stages.
        known: String,
    },
    /// A stage depends on the texts of tokens, but the sampler has no vocabulary.
    #[error("the sampler {stage} needs a vocabulary")]
    NeedsVocabulary {
        /// Name of the stage.
        stage: &'static str,
    },
    /// A bias is NaN or plus infinity.
    #[error("logit_bias for token {token} is {value}, must be a number or -inf")]
    LogitBias {
        /// Token of the bias.
        token: u32,
        /// Value of the bias.
        value: f32,
    },
    /// A bias names a token without a logit.
    #[error("logit_bias names token {token}, but there are logits for {count} tokens only")]
    LogitBiasToken {
        /// Token of the bias.
        token: u32,
        /// Number of logits.
        count: usize,
    },
    /// No candidate is left: there are no logits, or all are NaN or minus infinity.
    #[error("no token can be chosen: all {count} logits are NaN or -inf")]
    NoCandidate {
        /// Number of logits.
        count: usize,
    },
    /// The state to resume is not a valid state of a sampler.
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
