//! Whether a device supports something, and why not.

use std::borrow::Cow;

/// Whether a device can do something, and why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// It can.
    Yes,
    /// It cannot, for this reason.
    No(Cow<'static, str>),
}

impl Support {
    /// A refusal with its reason.
    pub fn no(reason: impl Into<Cow<'static, str>>) -> Self {
        Support::No(reason.into())
    }

    /// Whether the answer is yes.
    pub fn is_yes(&self) -> bool {
        matches!(self, Support::Yes)
    }

    /// Yes if `condition` holds, else no for `reason`.
    pub fn when(condition: bool, reason: impl Into<Cow<'static, str>>) -> Self {
        if condition {
            Support::Yes
        } else {
            Support::no(reason)
        }
    }

    /// The first refusal of both.
    pub fn and(self, other: impl FnOnce() -> Support) -> Self {
        if self.is_yes() { other() } else { self }
    }
}
