//! Automata of regular parts of a grammar, used to decide whether they can be lexemes.

use super::charset::{Bytes, CharSet};
use super::{Gbnf, GbnfNode, Kind};

/// Maximum number of positions; larger parts do not become lexemes.
const MAX_POSITIONS: usize = 20_000;
/// Maximum number of edges.
const MAX_EDGES: usize = 2_000_000;

/// Glushkov automaton: each state but the first is a position of a character in the expression.
#[derive(Clone, Debug, Default)]
pub struct Nfa {
    sets: Vec<CharSet>,
    bytes: Vec<Bytes>,
    first: Vec<u32>,
    follow: Vec<Vec<u32>>,
    is_last: Vec<bool>,
    pub is_nullable: bool,
    pub first_bytes: Bytes,
}

/// First and last positions of a part, and whether it can be empty.
#[derive(Clone, Default)]
struct Ends {
    first: Vec<u32>,
    last: Vec<u32>,
    is_nullable: bool,
}

impl Nfa {
    /// Builds the automaton of a node, with references replaced by their rules. Returns `None` if
    /// it is too large.
    pub fn new(grammar: &Gbnf, node: &GbnfNode) -> Option<Self> {
        let mut builder = NfaBuilder {
            grammar,
            nfa: Nfa::default(),
            edges: 0,
        };
        let ends = builder.part(node)?;
        let mut nfa = builder.nfa;
        for &last in &ends.last {
            nfa.is_last[last as usize] = true;
        }
        for &first in &ends.first {
            nfa.first_bytes.add(&nfa.bytes[first as usize]);
        }
        nfa.first = ends.first;
        nfa.is_nullable = ends.is_nullable;
        Some(nfa)
    }

    /// Returns whether a text of `self`, where the lexeme should stop before one of the bytes
    /// `behind`, can continue in `other` with one of these bytes, so that the engine would read on.
    /// Also returns true if the comparison takes more than `budget` steps.
    pub fn runs_into(&self, other: &Nfa, behind: &Bytes, budget: &mut usize) -> bool {
        let mut seen = std::collections::BTreeSet::new();
        let mut todo: Vec<(u32, u32)> = Vec::new();
        let mut meet = |from: &[u32],
                        to: &[u32],
                        todo: &mut Vec<(u32, u32)>,
                        budget: &mut usize| {
            for &a in from {
                for &b in to {
                    *budget = budget.saturating_sub(1);
                    if self.sets[a as usize].meets(&other.sets[b as usize]) && seen.insert((a, b)) {
                        todo.push((a, b));
                    }
                }
            }
        };
        meet(&self.first, &other.first, &mut todo, budget);
        while let Some((a, b)) = todo.pop() {
            if *budget == 0 {
                return true;
            }
            let (a, b) = (a as usize, b as usize);
            let goes_on = |next: &u32| other.bytes[*next as usize].meets(behind);
            if self.is_last[a] && other.follow[b].iter().any(goes_on) {
                return true;
            }
            meet(&self.follow[a], &other.follow[b], &mut todo, budget);
        }
        false
    }
}

struct NfaBuilder<'g> {
    grammar: &'g Gbnf,
    nfa: Nfa,
    edges: usize,
}

impl NfaBuilder<'_> {
    fn part(&mut self, node: &GbnfNode) -> Option<Ends> {
        match &node.kind {
            Kind::Chars(set) => {
                let position = self.nfa.sets.len() as u32;
                if self.nfa.sets.len() >= MAX_POSITIONS {
                    return None;
                }
                self.nfa.sets.push(set.clone());
                self.nfa.bytes.push(set.first_bytes());
                self.nfa.follow.push(Vec::new());
                self.nfa.is_last.push(false);
                Some(Ends {
                    first: vec![position],
                    last: vec![position],
                    is_nullable: false,
                })
            }
            Kind::Token { .. } => None,
            Kind::Rule(rule) => {
                let grammar = self.grammar;
                self.part(&grammar.rules[*rule].body)
            }
            Kind::Choice(options) => {
                let mut all = Ends::default();
                for option in options {
                    let ends = self.part(option)?;
                    all.first.extend(ends.first);
                    all.last.extend(ends.last);
                    all.is_nullable |= ends.is_nullable;
                }
                Some(all)
            }
            Kind::Sequence(items) => {
                let mut all = empty();
                for item in items {
                    let ends = self.part(item)?;
                    all = self.join(all, ends)?;
                }
                Some(all)
            }
            Kind::Repeat { node, least, most } => {
                let mut all = empty();
                for _ in 0..*least {
                    let ends = self.part(node)?;
                    all = self.join(all, ends)?;
                }
                match most {
                    None => {
                        let mut again = self.part(node)?;
                        self.link(&again.last, &again.first)?;
                        again.is_nullable = true;
                        self.join(all, again)
                    }
                    Some(most) => {
                        // Nest the optional repeats, so that each count has exactly one derivation.
                        let mut rest = empty();
                        for _ in *least..*most {
                            let before = self.part(node)?;
                            // `before` precedes the positions added so far.
                            rest = self.join(before, rest)?;
                            rest.is_nullable = true;
                        }
                        self.join(all, rest)
                    }
                }
            }
        }
    }

    fn join(&mut self, a: Ends, b: Ends) -> Option<Ends> {
        self.link(&a.last, &b.first)?;
        let mut first = a.first;
        if a.is_nullable {
            first.extend(&b.first);
        }
        let mut last = b.last;
        if b.is_nullable {
            last.extend(&a.last);
        }
        Some(Ends {
            first,
            last,
            is_nullable: a.is_nullable && b.is_nullable,
        })
    }

    fn link(&mut self, from: &[u32], to: &[u32]) -> Option<()> {
        self.edges += from.len() * to.len();
        for &position in from {
            self.nfa.follow[position as usize].extend(to);
        }
        (self.edges <= MAX_EDGES).then_some(())
    }
}

fn empty() -> Ends {
    Ends {
        is_nullable: true,
        ..Ends::default()
    }
}
