//! Translates a grammar into the engine's language: Lark, with lexemes as terminals.

use super::lexemes::Lexemes;
use super::parse::error;
use super::{Gbnf, GbnfNode, Kind, TokenName};
use crate::error::Result;
use samite_text::Tokenizer;
use std::fmt::Write;

/// Maximum nesting depth, through rules: the engine's compiler recurses as deep.
const DEEPEST: usize = 300;

/// Traverses the grammar like the engine's compiler.
fn check_depth(
    grammar: &Gbnf,
    lexemes: &Lexemes,
    rule: usize,
    node: &GbnfNode,
    depth: usize,
    seen: &mut [bool],
) -> Result<()> {
    if depth > DEEPEST {
        let message = format!("rules and groups are more than {DEEPEST} deep in each other");
        return Err(error(node.place, Some(grammar.name(rule)), message));
    }
    if lexemes.index_of(node).is_some() {
        return Ok(());
    }
    match &node.kind {
        Kind::Chars(_) | Kind::Token { .. } => Ok(()),
        Kind::Rule(rule) if std::mem::replace(&mut seen[*rule], true) => Ok(()),
        Kind::Rule(rule) => {
            let body = &grammar.rules[*rule].body;
            check_depth(grammar, lexemes, *rule, body, depth + 1, seen)
        }
        Kind::Repeat { node, .. } => check_depth(grammar, lexemes, rule, node, depth + 1, seen),
        Kind::Sequence(nodes) | Kind::Choice(nodes) => nodes
            .iter()
            .try_for_each(|node| check_depth(grammar, lexemes, rule, node, depth + 1, seen)),
    }
}

/// Prints the whole grammar. Without a vocabulary, all tokens become token 0.
pub fn print(grammar: &Gbnf, lexemes: &Lexemes, vocabulary: Option<&Tokenizer>) -> Result<String> {
    let (root, mut seen) = (grammar.root, vec![false; grammar.rules.len()]);
    seen[root] = true;
    check_depth(
        grammar,
        lexemes,
        root,
        &grammar.rules[root].body,
        0,
        &mut seen,
    )?;
    let mut printer = Printer {
        grammar,
        lexemes,
        vocabulary,
        rule: grammar.root,
        todo: vec![grammar.root],
        text: format!("start: r{}\n", grammar.root),
    };
    let mut is_printed = vec![false; grammar.rules.len()];
    while let Some(rule) = printer.todo.pop() {
        if std::mem::replace(&mut is_printed[rule], true) {
            continue;
        }
        printer.rule = rule;
        let _ = write!(printer.text, "r{rule}: ");
        printer.node(&grammar.rules[rule].body)?;
        printer.text.push('\n');
    }
    let mut text = printer.text;
    for (number, lexeme) in lexemes.all.iter().enumerate() {
        let not_empty = if lexeme.automaton.is_nullable {
            r" & /(?s:.)+/"
        } else {
            ""
        };
        let _ = writeln!(text, "T{number}: /{}/{not_empty}", lexeme.expression);
    }
    Ok(text)
}

struct Printer<'g> {
    grammar: &'g Gbnf,
    lexemes: &'g Lexemes,
    vocabulary: Option<&'g Tokenizer>,
    rule: usize,
    todo: Vec<usize>,
    text: String,
}

impl Printer<'_> {
    fn node(&mut self, node: &GbnfNode) -> Result<()> {
        if let Some(number) = self.lexemes.index_of(node) {
            let lexeme = &self.lexemes.all[number];
            let _ = match (lexeme.expression.as_str(), lexeme.automaton.is_nullable) {
                ("", _) => write!(self.text, "\"\""),
                (_, true) => write!(self.text, "(T{number})?"),
                (_, false) => write!(self.text, "T{number}"),
            };
            return Ok(());
        }
        match &node.kind {
            // Always a lexeme.
            Kind::Chars(_) => {}
            Kind::Rule(rule) => {
                let _ = write!(self.text, "r{rule}");
                self.todo.push(*rule);
            }
            Kind::Sequence(items) => self.list(items, " ")?,
            Kind::Choice(options) => self.list(options, " | ")?,
            Kind::Repeat { node, least, most } => {
                self.text.push('(');
                self.node(node)?;
                self.text.push(')');
                self.text.push_str(&repeats(*least, *most));
            }
            Kind::Token { token, is_negated } => {
                let id = self.token(token, node)?;
                let sign = if *is_negated { "^" } else { "" };
                let _ = write!(self.text, "<[{sign}{id}]>");
            }
        }
        Ok(())
    }

    fn list(&mut self, nodes: &[GbnfNode], between: &str) -> Result<()> {
        if nodes.is_empty() {
            self.text.push_str("\"\"");
            return Ok(());
        }
        self.text.push('(');
        for (index, node) in nodes.iter().enumerate() {
            if index > 0 {
                self.text.push_str(between);
            }
            self.node(node)?;
        }
        self.text.push(')');
        Ok(())
    }

    fn token(&self, token: &TokenName, node: &GbnfNode) -> Result<u32> {
        let Some(vocabulary) = self.vocabulary else {
            return Ok(0);
        };
        let count = vocabulary.vocab_size();
        let (found, message) = match token {
            TokenName::Id(id) => {
                let found = Some(*id).filter(|id| (*id as usize) < count);
                (
                    found,
                    format!("there is no token {id}: the vocabulary has {count}"),
                )
            }
            TokenName::Text(text) => {
                let tokens = vocabulary.tokenize(text, false, true).unwrap_or_default();
                let only = match *tokens {
                    [token] => Some(token),
                    _ => None,
                };
                let message = format!("'{text}' is {} tokens of the vocabulary", tokens.len());
                (vocabulary.find(text).or(only), message)
            }
        };
        found.ok_or_else(|| error(node.place, Some(self.grammar.name(self.rule)), message))
    }
}

fn repeats(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// Returns the regular expression of a node, with references replaced by their rules.
pub fn expression(grammar: &Gbnf, node: &GbnfNode) -> String {
    let mut text = String::new();
    write_expression(grammar, node, &mut text);
    text
}

fn write_expression(grammar: &Gbnf, node: &GbnfNode, text: &mut String) {
    match &node.kind {
        Kind::Chars(set) => {
            let ranges = set.ranges();
            let one = matches!(ranges, [(first, last)] if first == last);
            text.push_str(if one { "" } else { "[" });
            for (first, last) in ranges {
                let _ = if first == last {
                    write!(text, r"\x{{{first:X}}}")
                } else {
                    write!(text, r"\x{{{first:X}}}-\x{{{last:X}}}")
                };
            }
            text.push_str(if one { "" } else { "]" });
        }
        // Never part of an expression.
        Kind::Token { .. } => {}
        Kind::Rule(rule) => write_expression(grammar, &grammar.rules[*rule].body, text),
        Kind::Sequence(items) => {
            for item in items {
                write_expression(grammar, item, text);
            }
        }
        Kind::Choice(options) => {
            text.push_str("(?:");
            for (index, option) in options.iter().enumerate() {
                text.push_str(if index > 0 { "|" } else { "" });
                write_expression(grammar, option, text);
            }
            text.push(')');
        }
        Kind::Repeat { node, least, most } => {
            text.push_str("(?:");
            write_expression(grammar, node, text);
            text.push(')');
            text.push_str(&repeats(*least, *most));
        }
    }
}
