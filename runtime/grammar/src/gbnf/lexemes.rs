//! Selection of the parts of a grammar that become lexemes for the engine.
//!
//! The engine parses text in two stages: a lexer finds lexemes, each a regular expression, and a
//! parser applies rules to them. The lexer is greedy and never backtracks, unlike GBNF: `[a-z]+
//! "z"` derives `az`, but a lexeme `[a-z]+` would consume the `z`. Single characters as lexemes are
//! always correct, but slow. Therefore the largest regular parts become lexemes first. A lexeme
//! that could run on into the text that follows another one is split, until none is left.

use super::charset::Bytes;
use super::check::recursive;
use super::lark::expression;
use super::nfa::Nfa;
use super::{Gbnf, GbnfNode, Kind};
use std::collections::BTreeMap;

/// Maximum nesting depth of a lexeme, including referenced rules.
const DEEPEST: usize = 60;
/// Maximum number of characters in a lexeme, each counted as often as it can be repeated.
const MAX_CHARACTERS: u64 = 10_000;
/// Total number of steps for comparing automata.
const BUDGET: usize = 5_000_000;

/// Lexemes of a grammar.
pub struct Lexemes {
    /// Lexeme index of each node that is a lexeme.
    of_node: Vec<Option<usize>>,
    pub all: Vec<Lexeme>,
}

/// A lexeme.
pub struct Lexeme {
    pub expression: String,
    pub automaton: Nfa,
    nodes: Vec<usize>,
    /// First bytes of the text that can follow it.
    behind: Bytes,
}

impl Lexemes {
    /// Returns the index of a node's lexeme, if it is one.
    pub fn index_of(&self, node: &GbnfNode) -> Option<usize> {
        self.of_node[node.id]
    }
}

/// Depth and size of a part; `None` if it is not regular.
type Extent = Option<(usize, u64)>;

pub fn choose(grammar: &Gbnf) -> Lexemes {
    let is_recursive = recursive(grammar);
    let mut rules = vec![Extent::None; grammar.rules.len()];
    let mut has_extent = is_recursive.clone();
    let mut divided = vec![false; grammar.nodes];
    // Visit rules after the rules that they refer to.
    let mut todo: Vec<usize> = (0..grammar.rules.len()).collect();
    while let Some(rule) = todo.pop() {
        if has_extent[rule] {
            continue;
        }
        let mut missing = Vec::new();
        needed(&grammar.rules[rule].body, &has_extent, &mut missing);
        if missing.is_empty() {
            rules[rule] = extent(&grammar.rules[rule].body, &rules);
            has_extent[rule] = true;
        } else {
            todo.push(rule);
            todo.extend(missing);
        }
    }
    let mut budget = BUDGET;
    loop {
        let mut lexemes = Lexemes {
            of_node: vec![None; grammar.nodes],
            all: Vec::new(),
        };
        Collector {
            grammar,
            rules: &rules,
            divided: &mut divided,
            lexemes: &mut lexemes,
            by_expression: BTreeMap::new(),
            seen: vec![false; grammar.rules.len()],
        }
        .collect();
        find_behind(grammar, &mut lexemes);
        let mut is_right = true;
        let mut divide = |lexeme: &Lexeme| {
            for &node in &lexeme.nodes {
                is_right &= std::mem::replace(&mut divided[node], true);
            }
        };
        // A lexeme that nothing follows may safely be greedy.
        for a in lexemes.all.iter().filter(|a| a.behind != Bytes::default()) {
            for b in &lexemes.all {
                if budget == 0 {
                    break;
                }
                budget -= 1;
                let meet = a.automaton.first_bytes.meets(&b.automaton.first_bytes);
                if meet && a.automaton.runs_into(&b.automaton, &a.behind, &mut budget) {
                    divide(b);
                }
            }
        }
        if budget == 0 {
            lexemes.all.iter().for_each(&mut divide);
        }
        if is_right {
            return lexemes;
        }
    }
}

/// Collects the rules of unknown extent that a node refers to.
fn needed(node: &GbnfNode, has_extent: &[bool], missing: &mut Vec<usize>) {
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => {}
        Kind::Rule(rule) if has_extent[*rule] => {}
        Kind::Rule(rule) => missing.push(*rule),
        Kind::Repeat { node, .. } => needed(node, has_extent, missing),
        Kind::Sequence(nodes) | Kind::Choice(nodes) => {
            nodes
                .iter()
                .for_each(|node| needed(node, has_extent, missing));
        }
    }
}

fn extent(node: &GbnfNode, rules: &[Extent]) -> Extent {
    let (depth, size) = match &node.kind {
        Kind::Chars(_) => (0, 1),
        Kind::Token { .. } => return None,
        Kind::Rule(rule) => rules[*rule]?,
        Kind::Sequence(nodes) | Kind::Choice(nodes) => {
            let (mut deepest, mut sum) = (0, 0u64);
            for node in nodes {
                let (depth, size) = extent(node, rules)?;
                deepest = deepest.max(depth);
                sum = sum.saturating_add(size);
            }
            (deepest, sum)
        }
        Kind::Repeat { node, least, most } => {
            let (depth, size) = extent(node, rules)?;
            let times = most.map_or(least + 1, |most| most);
            (depth, size.saturating_mul(u64::from(times)))
        }
    };
    (depth < DEEPEST && size <= MAX_CHARACTERS).then_some((depth + 1, size))
}

struct Collector<'c> {
    grammar: &'c Gbnf,
    rules: &'c [Extent],
    divided: &'c mut [bool],
    lexemes: &'c mut Lexemes,
    by_expression: BTreeMap<String, usize>,
    seen: Vec<bool>,
}

impl Collector<'_> {
    fn collect(mut self) {
        let grammar = self.grammar;
        let mut todo = vec![grammar.root];
        while let Some(rule) = todo.pop() {
            if !std::mem::replace(&mut self.seen[rule], true) {
                self.node(&grammar.rules[rule].body, &mut todo);
            }
        }
    }

    fn node(&mut self, node: &GbnfNode, todo: &mut Vec<usize>) {
        let is_whole = !self.divided[node.id] || matches!(node.kind, Kind::Chars(_));
        if is_whole && extent(node, self.rules).is_some() {
            match Nfa::new(self.grammar, node) {
                Some(automaton) => return self.lexeme(node, automaton),
                None => self.divided[node.id] = true,
            }
        }
        match &node.kind {
            Kind::Chars(_) | Kind::Token { .. } => {}
            Kind::Rule(rule) => todo.push(*rule),
            Kind::Repeat { node, .. } => self.node(node, todo),
            Kind::Sequence(nodes) | Kind::Choice(nodes) => {
                nodes.iter().for_each(|node| self.node(node, todo));
            }
        }
    }

    fn lexeme(&mut self, node: &GbnfNode, automaton: Nfa) {
        let expression = expression(self.grammar, node);
        let all = &mut self.lexemes.all;
        let number = *self
            .by_expression
            .entry(expression)
            .or_insert_with_key(|expression| {
                all.push(Lexeme {
                    expression: expression.clone(),
                    automaton,
                    nodes: Vec::new(),
                    behind: Bytes::default(),
                });
                all.len() - 1
            });
        all[number].nodes.push(node.id);
        self.lexemes.of_node[node.id] = Some(number);
    }
}

/// First bytes of a part, and whether it can be empty.
type FirstBytes = (Bytes, bool);

/// Computes what can follow each lexeme.
fn find_behind(grammar: &Gbnf, lexemes: &mut Lexemes) {
    let mut first = vec![FirstBytes::default(); grammar.rules.len()];
    loop {
        let mut is_new = false;
        for (number, rule) in grammar.rules.iter().enumerate() {
            let (bytes, is_nullable) = beginning(&rule.body, lexemes, &first);
            is_new |= first[number].0.add(&bytes) | (is_nullable && !first[number].1);
            first[number].1 |= is_nullable;
        }
        if !is_new {
            break;
        }
    }
    let mut behind_rule = vec![Bytes::default(); grammar.rules.len()];
    loop {
        let mut is_new = false;
        for (number, rule) in grammar.rules.iter().enumerate() {
            let after = behind_rule[number];
            is_new |= behind(&rule.body, after, lexemes, &first, &mut behind_rule);
        }
        if !is_new {
            return;
        }
    }
}

fn beginning(node: &GbnfNode, lexemes: &Lexemes, first: &[FirstBytes]) -> FirstBytes {
    if let Some(lexeme) = lexemes.index_of(node) {
        let automaton = &lexemes.all[lexeme].automaton;
        return (automaton.first_bytes, automaton.is_nullable);
    }
    match &node.kind {
        // No text begins with a token, and rules without lexemes are unreachable.
        Kind::Chars(_) | Kind::Token { .. } => FirstBytes::default(),
        Kind::Rule(rule) => first[*rule],
        Kind::Repeat { node, least, .. } => {
            let (bytes, is_nullable) = beginning(node, lexemes, first);
            (bytes, is_nullable || *least == 0)
        }
        Kind::Choice(options) => {
            let mut all = FirstBytes::default();
            for option in options {
                let (bytes, is_nullable) = beginning(option, lexemes, first);
                all.0.add(&bytes);
                all.1 |= is_nullable;
            }
            all
        }
        Kind::Sequence(items) => {
            let mut all = (Bytes::default(), true);
            for item in items {
                let (bytes, is_nullable) = beginning(item, lexemes, first);
                all.0.add(&bytes);
                all.1 &= is_nullable;
                if !is_nullable {
                    break;
                }
            }
            all
        }
    }
}

/// Records what follows the lexemes and rules in a node if `after` follows the node. Returns
/// whether anything was new.
fn behind(
    node: &GbnfNode,
    mut after: Bytes,
    lexemes: &mut Lexemes,
    first: &[FirstBytes],
    behind_rule: &mut [Bytes],
) -> bool {
    if let Some(lexeme) = lexemes.index_of(node) {
        return lexemes.all[lexeme].behind.add(&after);
    }
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => false,
        Kind::Rule(rule) => behind_rule[*rule].add(&after),
        Kind::Repeat { node, most, .. } => {
            if most.is_none_or(|most| most > 1) {
                after.add(&beginning(node, lexemes, first).0);
            }
            behind(node, after, lexemes, first, behind_rule)
        }
        Kind::Choice(options) => options.iter().fold(false, |is_new, option| {
            behind(option, after, lexemes, first, behind_rule) | is_new
        }),
        Kind::Sequence(items) => items.iter().rev().fold(false, |is_new, item| {
            let is_newer = behind(item, after, lexemes, first, behind_rule);
            let (bytes, is_nullable) = beginning(item, lexemes, first);
            if is_nullable {
                after.add(&bytes);
            } else {
                after = bytes
            }
            is_newer | is_new
        }),
    }
}
