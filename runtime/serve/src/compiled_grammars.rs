//! Compiled grammars of recent requests: agents send the same tools with every turn.

use crate::app::lock;
use samite_grammar::{Grammar, GrammarConstraint};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// A grammar of an owner. Owners share nothing, so that none can measure what another one compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrammarKey {
    owner: u64,
    /// Hash of the grammar, or `None` if it is too large to be kept.
    hash: Option<blake3::Hash>,
}

impl GrammarKey {
    /// Maximum number of bytes in the description of a grammar that is kept.
    const MAX_BYTES: usize = 1 << 20;

    pub fn new(owner: u64, grammar: &Grammar) -> Self {
        let text = format!("{grammar:?}");
        let hash = (text.len() <= Self::MAX_BYTES).then(|| blake3::hash(text.as_bytes()));
        GrammarKey { owner, hash }
    }
}

/// The most recently used grammars of a model, with the last one at the end.
#[derive(Debug, Default)]
pub struct CompiledGrammars(Mutex<VecDeque<(GrammarKey, Arc<GrammarConstraint>)>>);

impl CompiledGrammars {
    /// Maximum number of grammars of an owner.
    const MAX_GRAMMARS: usize = 4;

    /// Returns the constraint of a grammar, at the start of a text.
    pub fn find(&self, key: GrammarKey) -> Option<GrammarConstraint> {
        key.hash?;
        let constraint = {
            let mut grammars = lock(&self.0);
            let at = grammars.iter().position(|(known, _)| *known == key)?;
            let found = grammars.remove(at)?;
            let constraint = Arc::clone(&found.1);
            grammars.push_back(found);
            constraint
        };
        Some(constraint.separate())
    }

    /// Adds a constraint at the start of a text.
    pub fn add(&self, key: GrammarKey, constraint: &GrammarConstraint) {
        if key.hash.is_none() {
            return;
        }
        let constraint = Arc::new(constraint.separate());
        let mut grammars = lock(&self.0);
        grammars.retain(|(known, _)| *known != key);
        let is_own = |(known, _): &(GrammarKey, _)| known.owner == key.owner;
        if grammars.iter().filter(|grammar| is_own(grammar)).count() == Self::MAX_GRAMMARS
            && let Some(oldest) = grammars.iter().position(is_own)
        {
            grammars.remove(oldest);
        }
        grammars.push_back((key, constraint));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_grammar::GrammarPart;

    #[test]
    fn keys_tell_owners_and_grammars_apart() {
        let grammar = |text: &str| Grammar::regex(text).unwrap();
        let key = GrammarKey::new(1, &grammar("a+"));
        assert_eq!(key, GrammarKey::new(1, &grammar("a+")));
        assert_ne!(key, GrammarKey::new(2, &grammar("a+")));
        assert_ne!(key, GrammarKey::new(1, &grammar("a*")));
        let large = Grammar::parts(GrammarPart::text("a".repeat(GrammarKey::MAX_BYTES)));
        assert_eq!(GrammarKey::new(1, &large).hash, None);
    }
}
