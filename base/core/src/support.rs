//! Answers to support queries, with the reason for a refusal.

use std::borrow::Cow;

/// Answer to a support query, with the reason for a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// Supported.
    Yes,
    /// Not supported, for this reason.
    No(Cow<'static, str>),
}

impl Support {
    /// Returns a refusal with its reason.
    pub fn no(reason: impl Into<Cow<'static, str>>) -> Self {
        Support::No(reason.into())
    }

    /// Returns whether the answer is yes.
    pub fn is_yes(&self) -> bool {
        matches!(self, Support::Yes)
    }

    /// Returns yes if `condition` holds, else no with `reason`.
    pub fn when(condition: bool, reason: impl Into<Cow<'static, str>>) -> Self {
        if condition {
            Support::Yes
        } else {
            Support::no(reason)
        }
    }

    /// Returns the first refusal of both.
    pub fn and(self, other: impl FnOnce() -> Support) -> Self {
        if self.is_yes() { other() } else { self }
    }
}
