//! GBNF, llama.cpp's grammar format: parsed, checked, and translated for the engine.

mod charset;
mod check;
mod lark;
mod lexemes;
mod nfa;
mod parse;

use crate::error::Result;
use charset::CharSet;
use samite_text::Tokenizer;
use std::cmp::Ordering;

/// A validated grammar.
#[derive(Clone, Debug)]
pub struct Gbnf {
    rules: Vec<Rule>,
    root: usize,
    /// Number of nodes; node ids are smaller.
    nodes: usize,
}

#[derive(Clone, Debug)]
struct Rule {
    name: String,
    body: GbnfNode,
}

/// A part of a rule.
#[derive(Clone, Debug)]
struct GbnfNode {
    /// Unique id in the grammar.
    id: usize,
    place: SourcePosition,
    kind: Kind,
}

/// Ignores ids and places: equal nodes derive the same texts.
impl PartialEq for GbnfNode {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl Eq for GbnfNode {}

impl PartialOrd for GbnfNode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for GbnfNode {
    fn cmp(&self, other: &Self) -> Ordering {
        self.kind.cmp(&other.kind)
    }
}

/// Position in the source text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SourcePosition {
    line: usize,
    column: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// One character of a set.
    Chars(CharSet),
    /// One after another; derives the empty text if empty.
    Sequence(Vec<GbnfNode>),
    /// One of these.
    Choice(Vec<GbnfNode>),
    Repeat {
        node: Box<GbnfNode>,
        least: u32,
        /// `None` for no limit.
        most: Option<u32>,
    },
    Rule(usize),
    Token {
        token: TokenName,
        is_negated: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TokenName {
    Id(u32),
    Text(String),
}

impl Gbnf {
    /// Parses and checks a grammar.
    ///
    /// # Errors
    /// [`GrammarError::Gbnf`](crate::GrammarError::Gbnf) with the position of the problem.
    pub fn parse(text: &str) -> Result<Self> {
        let grammar = parse::parse(text)?;
        check::check(&grammar)?;
        Ok(grammar)
    }

    /// Returns the grammar in the engine's language.
    ///
    /// # Errors
    /// If it names tokens that are not in the vocabulary.
    pub(crate) fn to_lark(&self, vocabulary: Option<&Tokenizer>) -> Result<String> {
        lark::print(self, &lexemes::choose(self), vocabulary)
    }

    fn name(&self, rule: usize) -> &str {
        &self.rules[rule].name
    }
}
