//! Rare branches, taken on purpose.

use std::fmt::Debug;

/// Says whether code takes a branch that nothing demands.
///
/// Some branches are right at any time but seldom needed: to forget a plan, to read a file in tiny pieces. Code offers them here by name,
/// so that a simulation takes them often, in every state that the program can be in. (FoundationDB's name for it is *buggify*.)
pub trait Chance: Send + Sync + Debug {
    /// Whether to take `branch` now.
    fn takes(&self, branch: &str) -> bool;
}

/// Takes no branch that nothing demands.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoChance;

impl Chance for NoChance {
    fn takes(&self, _branch: &str) -> bool {
        false
    }
}
