//! Fault injection: rare branches, taken on purpose.

use std::fmt::Debug;

/// Decides whether code takes an optional branch.
///
/// Some branches are always correct but rarely taken, such as forgetting a plan or reading a file
/// in tiny pieces. Code offers them here by name, so that a simulation takes them often, in every
/// state of the program. (FoundationDB calls this *buggify*.)
pub trait Buggify: Send + Sync + Debug {
    /// Returns whether to take `branch` now.
    fn fires(&self, branch: &str) -> bool;
}

/// Takes no optional branch.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBuggify;

impl Buggify for NoBuggify {
    fn fires(&self, _branch: &str) -> bool {
        false
    }
}
