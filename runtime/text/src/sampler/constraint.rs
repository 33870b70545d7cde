//! Constraints on a text, token by token.

use std::fmt;

/// A constraint cannot continue: a token is not allowed, or its engine reached a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConstraintError {
    /// Description of the problem.
    pub message: String,
}

/// Restricts the tokens that may come next in a text, for example by a grammar. A
/// [`Sampler`](crate::Sampler) draws first and then checks its choice. It needs the whole
/// [`mask`](Self::mask) only if the choice is rejected.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// Returns whether `token` may come next.
    ///
    /// # Errors
    /// Returns an error if the engine cannot decide.
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError>;

    /// Returns the tokens that may come next, as bits: token `id` is bit `id % 32` of word `id /
    /// 32`. Missing words are 0.
    ///
    /// # Errors
    /// Returns an error if the engine cannot decide.
    fn mask(&mut self) -> Result<&[u32], ConstraintError>;

    /// Adds a token of the text.
    ///
    /// # Errors
    /// Returns an error if it is not allowed.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Returns whether the text may end here.
    fn is_complete(&mut self) -> bool;

    /// Returns whether the text must end here, because nothing can follow.
    fn is_finished(&self) -> bool;

    /// Resets to the start of the text.
    ///
    /// # Errors
    /// Returns an error if the engine cannot be reset.
    fn reset(&mut self) -> Result<(), ConstraintError>;

    /// Returns an independent copy with the same state.
    fn clone_box(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.clone_box()
    }
}
