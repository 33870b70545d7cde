//! Compiled grammars of recent requests: agents send the same tools with every turn.

use crate::app::lock;
use samite_grammar::{Grammar, GrammarConstraint};
use std::collections::VecDeque;
use std::sync::Mutex;

/// A grammar of an owner. No owner can find out what another one compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrammarKey(u64, blake3::Hash);

impl GrammarKey {
    pub fn new(owner: u64, grammar: &Grammar) -> Self {
        GrammarKey(owner, blake3::hash(format!("{grammar:?}").as_bytes()))
    }
}

/// The most recently used grammars of a model, with the last one at the end.
#[derive(Debug, Default)]
pub struct CompiledGrammars(Mutex<VecDeque<(GrammarKey, GrammarConstraint)>>);

impl CompiledGrammars {
    const MAX_GRAMMARS: usize = 8;

    /// Returns the constraint of a grammar, at the start of a text.
    pub fn find(&self, key: GrammarKey) -> Option<GrammarConstraint> {
        let mut grammars = lock(&self.0);
        let at = grammars.iter().position(|(known, _)| *known == key)?;
        let found = grammars.remove(at)?;
        let constraint = found.1.separate();
        grammars.push_back(found);
        Some(constraint)
    }

    /// Adds a constraint at the start of a text.
    pub fn add(&self, key: GrammarKey, constraint: &GrammarConstraint) {
        let constraint = constraint.separate();
        let mut grammars = lock(&self.0);
        if grammars.len() == Self::MAX_GRAMMARS {
            grammars.pop_front();
        }
        grammars.push_back((key, constraint));
    }
}
