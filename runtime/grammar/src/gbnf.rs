//! GBNF, llama.cpp's form of grammars: read, checked, and translated for the engine.

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

/// A grammar that is sound.
#[derive(Clone, Debug)]
pub struct Gbnf {
    rules: Vec<Rule>,
    root: usize,
    /// Number of nodes: their numbers are below.
    nodes: usize,
}

#[derive(Clone, Debug)]
struct Rule {
    name: String,
    body: Node,
}

/// A part of a rule.
#[derive(Clone, Debug)]
struct Node {
    /// Of all nodes of the grammar, the only one with this number.
    id: usize,
    place: Place,
    kind: Kind,
}

/// Numbers and places do not count: equal nodes derive the same texts.
impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl Eq for Node {}

impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Node {
    fn cmp(&self, other: &Self) -> Ordering {
        self.kind.cmp(&other.kind)
    }
}

/// Where something stands in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    line: usize,
    column: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// One character of a set.
    Chars(CharSet),
    /// One after another; nothing if there are none.
    Sequence(Vec<Node>),
    /// One of these.
    Choice(Vec<Node>),
    Repeat {
        node: Box<Node>,
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
    /// Reads and checks a grammar.
    ///
    /// # Errors
    /// [`GrammarError::Gbnf`](crate::GrammarError::Gbnf) with the place of what is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let grammar = parse::parse(text)?;
        check::check(&grammar)?;
        Ok(grammar)
    }

    /// The grammar in the engine's language.
    ///
    /// # Errors
    /// Tokens that the vocabulary does not have.
    pub(crate) fn to_lark(&self, vocabulary: Option<&Tokenizer>) -> Result<String> {
        lark::print(self, &lexemes::choose(self), vocabulary)
    }

    fn name(&self, rule: usize) -> &str {
        &self.rules[rule].name
    }
}
