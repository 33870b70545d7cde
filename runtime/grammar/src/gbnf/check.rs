//! Semantic checks of a grammar: it must derive finite texts and must not be too large.

use super::parse::error;
use super::{Gbnf, GbnfNode, Kind, SourcePosition};
use crate::error::Result;

/// Maximum number of characters, tokens and references, each counted as often as it can be
/// repeated.
const MAX_SYMBOLS: u64 = 500_000;

pub(super) fn check(grammar: &Gbnf) -> Result<()> {
    check_size(grammar)?;
    check_left_recursion(grammar)?;
    check_ends(grammar)
}

/// Computes the least fixpoint of `holds` over the rules' bodies, starting from false for every
/// rule.
pub(super) fn fixpoint(
    grammar: &Gbnf,
    holds: impl Fn(&GbnfNode, &dyn Fn(usize) -> bool) -> bool,
) -> Vec<bool> {
    let mut found = vec![false; grammar.rules.len()];
    loop {
        let mut is_new = false;
        for (number, rule) in grammar.rules.iter().enumerate() {
            if !found[number] && holds(&rule.body, &|rule| found[rule]) {
                found[number] = true;
                is_new = true;
            }
        }
        if !is_new {
            return found;
        }
    }
}

/// Returns whether a node derives the empty text.
pub(super) fn is_nullable(node: &GbnfNode, of_rule: &dyn Fn(usize) -> bool) -> bool {
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => false,
        Kind::Sequence(items) => items.iter().all(|item| is_nullable(item, of_rule)),
        Kind::Choice(options) => options.iter().any(|option| is_nullable(option, of_rule)),
        Kind::Repeat { node, least, .. } => *least == 0 || is_nullable(node, of_rule),
        Kind::Rule(rule) => of_rule(*rule),
    }
}

/// Returns whether a node derives any finite text.
fn has_end(node: &GbnfNode, of_rule: &dyn Fn(usize) -> bool) -> bool {
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => true,
        Kind::Sequence(items) => items.iter().all(|item| has_end(item, of_rule)),
        Kind::Choice(options) => options.iter().any(|option| has_end(option, of_rule)),
        Kind::Repeat { node, least, .. } => *least == 0 || has_end(node, of_rule),
        Kind::Rule(rule) => of_rule(*rule),
    }
}

fn check_ends(grammar: &Gbnf) -> Result<()> {
    let ends = fixpoint(grammar, has_end);
    // A rule that refers to a rule without an end has none either, but is not the culprit.
    let rules = grammar
        .rules
        .iter()
        .zip(ends.iter().zip(recursive(grammar)));
    match rules
        .into_iter()
        .find(|(_, (ends, comes_back))| !**ends && *comes_back)
    {
        None => Ok(()),
        Some((rule, _)) => Err(error(
            rule.body.place,
            Some(&rule.name),
            "no text can end here: each alternative needs the rule again",
        )),
    }
}

fn check_size(grammar: &Gbnf) -> Result<()> {
    fn size(node: &GbnfNode) -> u64 {
        match &node.kind {
            Kind::Chars(_) | Kind::Token { .. } | Kind::Rule(_) => 1,
            Kind::Sequence(nodes) | Kind::Choice(nodes) => nodes
                .iter()
                .fold(1, |sum, node| size(node).saturating_add(sum)),
            Kind::Repeat { node, least, most } => {
                size(node).saturating_mul(u64::from(most.unwrap_or(*least).max(1)))
            }
        }
    }
    let mut all: u64 = 0;
    for rule in &grammar.rules {
        all = all.saturating_add(size(&rule.body));
        if all > MAX_SYMBOLS {
            let message = format!("with all repeats, there are more than {MAX_SYMBOLS} symbols");
            return Err(error(rule.body.place, Some(&rule.name), message));
        }
    }
    Ok(())
}

/// Collects the rules with which a node can begin.
fn beginnings(node: &GbnfNode, nullable: &[bool], found: &mut Vec<(usize, SourcePosition)>) {
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => {}
        Kind::Rule(rule) => found.push((*rule, node.place)),
        Kind::Choice(options) => {
            for option in options {
                beginnings(option, nullable, found);
            }
        }
        Kind::Repeat { node, .. } => beginnings(node, nullable, found),
        Kind::Sequence(items) => {
            for item in items {
                beginnings(item, nullable, found);
                if !is_nullable(item, &|rule| nullable[rule]) {
                    break;
                }
            }
        }
    }
}

fn check_left_recursion(grammar: &Gbnf) -> Result<()> {
    let nullable = fixpoint(grammar, is_nullable);
    let next: Vec<Vec<(usize, SourcePosition)>> = grammar
        .rules
        .iter()
        .map(|rule| {
            let mut found = Vec::new();
            beginnings(&rule.body, &nullable, &mut found);
            found
        })
        .collect();
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        OnPath,
        Done,
    }
    let mut states = vec![State::New; grammar.rules.len()];
    for first in 0..grammar.rules.len() {
        // Rules on the current path, each with the number of its first rules already followed.
        let mut path = vec![(first, 0)];
        if states[first] != State::New {
            continue;
        }
        states[first] = State::OnPath;
        while let Some((rule, followed)) = path.last_mut() {
            let rule = *rule;
            let Some(&(begun, place)) = next[rule].get(*followed) else {
                states[rule] = State::Done;
                path.pop();
                continue;
            };
            *followed += 1;
            match states[begun] {
                State::Done => {}
                State::New => {
                    states[begun] = State::OnPath;
                    path.push((begun, 0));
                }
                State::OnPath => {
                    let on_path = path.iter().map(|entry| entry.0);
                    let circle = on_path.skip_while(|rule| *rule != begun).chain([begun]);
                    let names: Vec<_> = circle.map(|rule| grammar.name(rule)).collect();
                    let message = format!(
                        "left recursion: {}; repeat with '*' or '+', or put something before",
                        names.join(" begins with ")
                    );
                    return Err(error(place, Some(grammar.name(rule)), message));
                }
            }
        }
    }
    Ok(())
}

/// Returns for each rule whether it is recursive.
pub(super) fn recursive(grammar: &Gbnf) -> Vec<bool> {
    fn used(node: &GbnfNode, found: &mut Vec<usize>) {
        match &node.kind {
            Kind::Chars(_) | Kind::Token { .. } => {}
            Kind::Rule(rule) => found.push(*rule),
            Kind::Sequence(nodes) | Kind::Choice(nodes) => {
                nodes.iter().for_each(|node| used(node, found));
            }
            Kind::Repeat { node, .. } => used(node, found),
        }
    }
    let uses: Vec<Vec<usize>> = grammar
        .rules
        .iter()
        .map(|rule| {
            let mut found = Vec::new();
            used(&rule.body, &mut found);
            found.sort_unstable();
            found.dedup();
            found
        })
        .collect();
    let comes_back = |rule: usize| {
        let mut seen = vec![false; uses.len()];
        let mut todo = uses[rule].clone();
        while let Some(next) = todo.pop() {
            if !std::mem::replace(&mut seen[next], true) {
                todo.extend(&uses[next]);
            }
        }
        seen[rule]
    };
    (0..uses.len()).map(comes_back).collect()
}
