//! GBNF parser.

use super::charset::CharSet;
use super::{Gbnf, GbnfNode, Kind, Rule, SourcePosition, TokenName};
use crate::error::{GrammarError, Result};
use std::collections::{BTreeMap, BTreeSet};

const MAX_BYTES: usize = 1 << 20;
const MAX_RULES: usize = 2000;
/// Maximum repeat count.
const MAX_REPEATS: u32 = 2000;
/// Maximum nesting depth of groups.
const DEEPEST: usize = 50;

pub(super) fn parse(text: &str) -> Result<Gbnf> {
    if text.len() > MAX_BYTES {
        return Err(GrammarError::TooLarge(format!(
            "the grammar has {} bytes; {MAX_BYTES} are allowed",
            text.len()
        )));
    }
    let mut parser = Parser {
        rest: text,
        place: SourcePosition { line: 1, column: 1 },
        rule: None,
        names: BTreeMap::new(),
        rules: Vec::new(),
        nodes: 0,
    };
    parser.grammar()
}

struct Parser<'t> {
    rest: &'t str,
    place: SourcePosition,
    /// Rule being parsed.
    rule: Option<&'t str>,
    /// Rule numbers by name.
    names: BTreeMap<&'t str, usize>,
    /// For each number: the name, where and in which rule it was first used, and the body once it
    /// has been parsed.
    rules: Vec<(&'t str, SourcePosition, Option<&'t str>, Option<GbnfNode>)>,
    nodes: usize,
}

impl<'t> Parser<'t> {
    fn grammar(&mut self) -> Result<Gbnf> {
        self.skip_space(true)?;
        while !self.rest.is_empty() {
            self.rule()?;
        }
        self.rule = None;
        let Some(&root) = self.names.get("root") else {
            return Err(self.error("there is no rule 'root', with which a text begins"));
        };
        let mut rules = Vec::new();
        for (name, place, rule, body) in std::mem::take(&mut self.rules) {
            let Some(body) = body else {
                self.rule = rule;
                self.place = place;
                return Err(self.error(format!("there is no rule '{name}'")));
            };
            let name = name.to_owned();
            rules.push(Rule { name, body });
        }
        Ok(Gbnf {
            rules,
            root,
            nodes: self.nodes,
        })
    }

    fn rule(&mut self) -> Result<()> {
        let start = self.place;
        self.rule = None;
        let name = self.name();
        if name.is_empty() {
            return Err(self.error(format!(
                "{} where a rule's name was expected",
                self.next_shown()
            )));
        }
        self.rule = Some(name);
        self.skip_space(false)?;
        if !self.eat("::=") {
            return Err(self.error(format!(
                "{} where '::=' was expected behind the name",
                self.next_shown()
            )));
        }
        let number = self.number_of(name, start);
        if self.rules.len() > MAX_RULES {
            return Err(self.error(format!("more than {MAX_RULES} rules")));
        }
        if self.rules[number].3.is_some() {
            self.place = start;
            return Err(self.error("the rule is there already"));
        }
        self.skip_space(true)?;
        let body = self.choice(0)?;
        self.rules[number].3 = Some(body);
        match self.peek() {
            None | Some('\n' | '\r') => self.skip_space(true),
            Some(')') => Err(self.error("')' without '('")),
            Some(_) => Err(self.error(format!(
                "{} where the rule's end was expected",
                self.next_shown()
            ))),
        }
    }

    /// Parses alternatives inside `depth` groups.
    fn choice(&mut self, depth: usize) -> Result<GbnfNode> {
        let place = self.place;
        let mut options = vec![self.sequence(depth)?];
        while self.eat("|") {
            self.skip_space(true)?;
            options.push(self.sequence(depth)?);
        }
        let mut options = distinct(options);
        Ok(match options.len() {
            1 => options.remove(0),
            _ => self.node(place, Kind::Choice(options)),
        })
    }

    fn sequence(&mut self, depth: usize) -> Result<GbnfNode> {
        let start = self.place;
        let mut items: Vec<GbnfNode> = Vec::new();
        loop {
            let place = self.place;
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.advance();
                    self.node(place, Kind::Chars(CharSet::any()))
                }
                Some('(') => self.group(depth)?,
                Some('<' | '!') => self.token()?,
                Some('*' | '+' | '?' | '{') => {
                    let Some(last) = items.pop() else {
                        let message = format!("{} with nothing before it", self.next_shown());
                        return Err(self.error(message));
                    };
                    self.repeat(last)?
                }
                Some(c) if is_name(c) => {
                    let name = self.name();
                    let number = self.number_of(name, place);
                    self.node(place, Kind::Rule(number))
                }
                _ => break,
            };
            items.push(item);
            self.skip_space(depth > 0)?;
            if self.rest.starts_with("::=") {
                let message = "'::=' in the middle of a rule: a rule ends with its line, unless '|' or '(' is open";
                return Err(self.error(message));
            }
        }
        Ok(match items.len() {
            1 => items.remove(0),
            _ => self.node(start, Kind::Sequence(items)),
        })
    }

    fn group(&mut self, depth: usize) -> Result<GbnfNode> {
        let start = self.place;
        if depth >= DEEPEST {
            return Err(self.error(format!("more than {DEEPEST} groups in each other")));
        }
        self.advance();
        self.skip_space(true)?;
        let inner = self.choice(depth + 1)?;
        if !self.eat(")") {
            let found = self.next_shown();
            let SourcePosition { line, column } = start;
            return Err(self.error(format!(
                "{found} where ')' was expected, for the '(' at line {line}, column {column}"
            )));
        }
        Ok(inner)
    }

    fn literal(&mut self) -> Result<GbnfNode> {
        let start = self.place;
        self.advance();
        let mut characters = Vec::new();
        loop {
            let place = self.place;
            match self.peek() {
                None => {
                    self.place = start;
                    return Err(self.error("the text in quotes has no end"));
                }
                Some('"') => break,
                Some(_) => {
                    let character = self.character()?;
                    let kind = Kind::Chars(CharSet::one(character));
                    characters.push(self.node(place, kind));
                }
            }
        }
        self.advance();
        Ok(match characters.len() {
            1 => characters.remove(0),
            _ => self.node(start, Kind::Sequence(characters)),
        })
    }

    fn class(&mut self) -> Result<GbnfNode> {
        let start = self.place;
        self.advance();
        let is_negated = self.eat("^");
        let mut ranges = Vec::new();
        loop {
            let place = self.place;
            match self.peek() {
                None => {
                    self.place = start;
                    return Err(self.error("the characters in brackets have no end"));
                }
                Some(']') => break,
                Some(_) => {}
            }
            let first = self.character()?;
            let mut last = first;
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.advance();
                if self.rest.is_empty() {
                    continue;
                }
                last = self.character()?;
                if last < first {
                    self.place = place;
                    return Err(self.error(format!(
                        "the range from {first:?} to {last:?} is upside down"
                    )));
                }
            }
            ranges.push((u32::from(first), u32::from(last)));
        }
        self.advance();
        let set = CharSet::new(ranges, is_negated);
        if set.is_empty() {
            self.place = start;
            return Err(self.error("no character is in these brackets"));
        }
        Ok(self.node(start, Kind::Chars(set)))
    }

    /// Parses a possibly escaped character of a literal or class.
    fn character(&mut self) -> Result<char> {
        let place = self.place;
        let Some(first) = self.advance() else {
            return Err(self.error("the grammar ends in the middle of a character"));
        };
        if first != '\\' {
            return Ok(first);
        }
        let digits = match self.advance() {
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('n') => return Ok('\n'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-')) => return Ok(c),
            None => {
                self.place = place;
                return Err(self.error("the grammar ends behind '\\'"));
            }
            Some(other) => {
                self.place = place;
                let message = format!(
                    "'\\{}' is no escape; there \
                     are \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\xHH \\uHHHH \\UHHHHHHHH",
                    other.escape_debug()
                );
                return Err(self.error(message));
            }
        };
        let mut value: u32 = 0;
        for _ in 0..digits {
            let digit = self.peek().and_then(|c| c.to_digit(16));
            let Some(digit) = digit else {
                self.place = place;
                return Err(self.error(format!("the escape needs {digits} hexadecimal digits")));
            };
            value = value << 4 | digit;
            self.advance();
        }
        char::from_u32(value).ok_or_else(|| {
            self.place = place;
            self.error(format!("U+{value:04X} is no character"))
        })
    }

    fn token(&mut self) -> Result<GbnfNode> {
        let start = self.place;
        let is_negated = self.eat("!");
        if !self.eat("<") {
            return Err(self.error(format!(
                "{} where a token was expected behind '!', such as <[12]>",
                self.next_shown()
            )));
        }
        let end = self.rest.find(['>', '\n']);
        let Some(end) = end.filter(|end| self.rest[*end..].starts_with('>')) else {
            self.place = start;
            return Err(self.error("the token has no '>' on its line"));
        };
        let name = &self.rest[..end];
        let token = match name.strip_prefix('[') {
            None if name.is_empty() => {
                self.place = start;
                return Err(self.error("the token has no name"));
            }
            None => TokenName::Text(format!("<{name}>")),
            Some(number) => {
                let number = number.strip_suffix(']');
                let number = number.filter(|number| number.bytes().all(|b| b.is_ascii_digit()));
                match number.and_then(|number| number.parse().ok()) {
                    Some(id) => TokenName::Id(id),
                    None => {
                        self.place = start;
                        let message = format!("'<{name}>' is no token: write <[12]> for number 12");
                        return Err(self.error(message));
                    }
                }
            }
        };
        for _ in name.chars() {
            self.advance();
        }
        self.advance();
        Ok(self.node(start, Kind::Token { token, is_negated }))
    }

    fn repeat(&mut self, node: GbnfNode) -> Result<GbnfNode> {
        let place = self.place;
        let (least, most) = match self.advance() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            _ => {
                self.skip_space(false)?;
                let least = self.count()?;
                self.skip_space(false)?;
                let mut most = Some(least);
                if self.eat(",") {
                    self.skip_space(false)?;
                    most = match self.peek() {
                        Some('}') => None,
                        _ => Some(self.count()?),
                    };
                    self.skip_space(false)?;
                }
                if !self.eat("}") {
                    return Err(self.error(format!(
                        "{} where '}}' was expected behind the number of repeats",
                        self.next_shown()
                    )));
                }
                (least, most)
            }
        };
        if let Some(most) = most.filter(|most| *most < least) {
            self.place = place;
            return Err(self.error(format!("at least {least} repeats, but at most {most}")));
        }
        let node = Box::new(node);
        Ok(self.node(place, Kind::Repeat { node, least, most }))
    }

    fn count(&mut self) -> Result<u32> {
        let place = self.place;
        let digits = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, _) = self.rest.split_at(digits);
        if number.is_empty() {
            return Err(self.error(format!(
                "{} where a number of repeats was expected",
                self.next_shown()
            )));
        }
        match number.parse() {
            Ok(count) if count <= MAX_REPEATS => {
                for _ in 0..digits {
                    self.advance();
                }
                Ok(count)
            }
            _ => {
                self.place = place;
                Err(self.error(format!(
                    "{number} repeats; at most {MAX_REPEATS} are possible"
                )))
            }
        }
    }

    fn name(&mut self) -> &'t str {
        let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, _) = self.rest.split_at(end);
        for _ in 0..end {
            self.advance();
        }
        name
    }

    /// Returns the number of the rule with this name, which is used at `place`.
    fn number_of(&mut self, name: &'t str, place: SourcePosition) -> usize {
        let (rules, rule) = (&mut self.rules, self.rule);
        *self.names.entry(name).or_insert_with(|| {
            rules.push((name, place, rule, None));
            rules.len() - 1
        })
    }

    fn node(&mut self, place: SourcePosition, kind: Kind) -> GbnfNode {
        self.nodes += 1;
        GbnfNode {
            id: self.nodes - 1,
            place,
            kind,
        }
    }

    /// Skips white space and comments, optionally across lines.
    fn skip_space(&mut self, over_lines: bool) -> Result<()> {
        loop {
            match self.peek() {
                Some(' ' | '\t') => drop(self.advance()),
                Some('\n' | '\r') if over_lines => drop(self.advance()),
                Some('#') => {
                    while !matches!(self.peek(), None | Some('\n')) {
                        self.advance();
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn advance(&mut self) -> Option<char> {
        let mut characters = self.rest.chars();
        let character = characters.next()?;
        self.rest = characters.as_str();
        match character {
            '\n' => {
                self.place.line += 1;
                self.place.column = 1;
            }
            _ => self.place.column += 1,
        }
        Some(character)
    }

    /// Consumes `text`, which contains no line ends, if it comes next.
    fn eat(&mut self, text: &str) -> bool {
        let is_next = self.rest.starts_with(text);
        if is_next {
            for _ in text.chars() {
                self.advance();
            }
        }
        is_next
    }

    fn next_shown(&self) -> String {
        match self.peek() {
            None => "the grammar's end".to_owned(),
            Some('\n' | '\r') => "the line's end".to_owned(),
            Some(c) if c.is_control() => format!("'{}'", c.escape_debug()),
            Some(c) => format!("'{c}'"),
        }
    }

    fn error(&self, message: impl Into<String>) -> GrammarError {
        error(self.place, self.rule, message)
    }
}

/// Removes duplicate alternatives: they derive no further texts, but the engine would compile and
/// follow each of them.
fn distinct(mut options: Vec<GbnfNode>) -> Vec<GbnfNode> {
    let mut seen = BTreeSet::new();
    let is_new: Vec<bool> = options.iter().map(|option| seen.insert(option)).collect();
    let mut is_new = is_new.into_iter();
    options.retain(|_| is_new.next().unwrap_or_default());
    options
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-'
}

pub(super) fn error(
    place: SourcePosition,
    rule: Option<&str>,
    message: impl Into<String>,
) -> GrammarError {
    GrammarError::Gbnf {
        line: place.line,
        column: place.column,
        rule: rule.map(str::to_owned),
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use crate::gbnf::Gbnf;

    /// The cost of a grammar is that of its text in the engine's language.
    #[test]
    fn equal_alternatives_are_compiled_once() {
        for option in [
            "\"a\"",
            "(\"a\" | [b-c])+ x?",
            "x{2,3} <[7]> \"ab\"",
            "[^a] !<[7]>",
            "",
        ] {
            let in_lark = |count: usize| {
                let options = vec![option; count].join(" | ");
                let text = format!("root ::= (\"b\" | {options} | \"c\") x\nx ::= \"x\"");
                Gbnf::parse(&text).unwrap().to_lark(None).unwrap()
            };
            assert_eq!(in_lark(5000), in_lark(1), "{option}");
        }
        let different = Gbnf::parse("root ::= \"a\"{2} | \"a\"{3} | x | y\nx ::= .\ny ::= .");
        let different = different.unwrap().to_lark(None).unwrap();
        assert!(
            different.contains("{2,2}") && different.contains("{3,3}"),
            "{different}"
        );
    }
}
