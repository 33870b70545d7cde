//! Automata of parts of a grammar that are regular, to find out whether they can be lexemes.

use super::charset::{Bytes, CharSet};
use super::{Gbnf, Kind, Node};

/// Larger parts are no lexemes.
const MOST_POSITIONS: usize = 20_000;
/// Most edges between them.
const MOST_EDGES: usize = 2_000_000;

/// Glushkov's automaton: each state but the first is a place of the expression where a character stands.
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

/// The ends of a part: how it begins, how it ends, and whether it can be empty.
#[derive(Clone, Default)]
struct Ends {
    first: Vec<u32>,
    last: Vec<u32>,
    is_nullable: bool,
}

impl Nfa {
    /// The automaton of a node, in which references stand for what they refer to. `None` if it is too large.
    pub fn new(grammar: &Gbnf, node: &Node) -> Option<Self> {
        let mut builder = Builder {
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

    /// Whether a text of `self`, at whose end the lexeme is to stop if one of the bytes `behind` follows, can go on in `other` with one of these
    /// bytes: the engine would go on. Also true if it takes more than `budget` steps to tell.
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

struct Builder<'g> {
    grammar: &'g Gbnf,
    nfa: Nfa,
    edges: usize,
}

impl Builder<'_> {
    fn part(&mut self, node: &Node) -> Option<Ends> {
        match &node.kind {
            Kind::Chars(set) => {
                let position = self.nfa.sets.len() as u32;
                if self.nfa.sets.len() >= MOST_POSITIONS {
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
                        // Each of the rest only if the one before it was there, so that there is one way for each number.
                        let mut rest = empty();
                        for _ in *least..*most {
                            let before = self.part(node)?;
                            // `before` stands in front of what there is already.
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
        (self.edges <= MOST_EDGES).then_some(())
    }
}

fn empty() -> Ends {
    Ends {
        is_nullable: true,
        ..Ends::default()
    }
}
