//! What a text must keep to, token by token.

use std::fmt;

/// A constraint cannot go on: a token that it does not allow, or a limit of its engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConstraintError {
    /// What is wrong.
    pub message: String,
}

/// Says which tokens may come next in a text: a grammar, for example. A [`Sampler`](crate::Sampler) draws first and asks then, and
/// wants the whole [`mask`](Self::mask) only if its choice is refused.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// Whether `token` may come next.
    ///
    /// # Errors
    /// If the engine cannot tell.
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError>;

    /// The tokens that may come next, as bits: token `id` is bit `id % 32` of word `id / 32`. Words that are missing are 0.
    ///
    /// # Errors
    /// If the engine cannot tell.
    fn mask(&mut self) -> Result<&[u32], ConstraintError>;

    /// Takes note of a token of the text.
    ///
    /// # Errors
    /// If it is not allowed.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether the text may end here.
    fn is_complete(&mut self) -> bool;

    /// Whether the text must end here: nothing can follow.
    fn is_finished(&self) -> bool;

    /// Back to the beginning of the text.
    ///
    /// # Errors
    /// If the engine cannot begin anew.
    fn reset(&mut self) -> Result<(), ConstraintError>;

    /// Another one in the same state, which goes its own way.
    fn clone_box(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.clone_box()
    }
}
