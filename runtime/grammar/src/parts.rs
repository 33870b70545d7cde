//! Grammars composed of texts and schemas.

use crate::error::{GrammarError, Result};
use crate::schema::{bound_integers, check_numbers, prepare};
use samite_text::{TokenAttributes, Tokenizer};
use serde_json::{Value, json};
use std::fmt::Write;

/// A part of a composed grammar.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarPart {
    /// A fixed text. A control token's name in it stands for that token.
    Text(String),
    /// A match of a regular expression, which must not be empty.
    Regex(String),
    /// JSON that conforms to a schema. Ignores parts of the schema that cannot be enforced.
    Json(Value),
    /// Any text up to and including the first occurrence of this one.
    Through(String),
    /// One of these.
    OneOf(Vec<GrammarPart>),
    /// All of these, in order.
    Sequence(Vec<GrammarPart>),
    /// A repeated part.
    Repeat {
        /// Repeated part.
        part: Box<GrammarPart>,
        /// Minimum count.
        least: u32,
        /// Maximum count; `None` for no limit.
        most: Option<u32>,
    },
}

impl GrammarPart {
    /// Returns a part for a fixed text.
    pub fn text(text: impl Into<String>) -> Self {
        GrammarPart::Text(text.into())
    }

    /// Returns a part for JSON that conforms to a schema. The whole schema is enforced.
    ///
    /// # Errors
    /// Fails like [`Grammar::json_schema`](crate::Grammar::json_schema).
    pub fn json_schema(text: &str) -> Result<Self> {
        Ok(GrammarPart::Json(prepare(text)?))
    }

    /// Returns true if all text except literals and expressions is JSON. Free text would confuse
    /// the scanner of JSON strings.
    pub(crate) fn is_json(&self) -> bool {
        self.any(&|part| matches!(part, GrammarPart::Json(_)))
            && !self.any(&|part| matches!(part, GrammarPart::Through(_)))
    }

    /// Returns true if `is_such` holds for this part or one within it.
    fn any(&self, is_such: &impl Fn(&GrammarPart) -> bool) -> bool {
        is_such(self)
            || match self {
                GrammarPart::Text(_)
                | GrammarPart::Regex(_)
                | GrammarPart::Json(_)
                | GrammarPart::Through(_) => false,
                GrammarPart::OneOf(parts) | GrammarPart::Sequence(parts) => {
                    parts.iter().any(|part| part.any(is_such))
                }
                GrammarPart::Repeat { part, .. } => part.any(is_such),
            }
    }

    /// Makes a part optional.
    pub fn optional(part: GrammarPart) -> Self {
        GrammarPart::Repeat {
            part: Box::new(part),
            least: 0,
            most: Some(1),
        }
    }
}

/// Maximum nesting depth: the engine's compiler recurses as deep.
const DEEPEST: usize = 100;

/// Translates a part into the engine's language, with a vocabulary's [`control_tokens`].
pub(crate) fn to_lark<'p>(part: &'p GrammarPart, controls: &'p [(String, u32)]) -> Result<String> {
    let mut printer = PartPrinter {
        controls,
        rules: Vec::new(),
        text: String::new(),
        lexemes: Vec::new(),
    };
    printer.part(part, 0)?;
    let mut grammar = format!("start: {}\n", printer.text);
    for (number, (_, body)) in printer.rules.iter().enumerate() {
        let _ = writeln!(grammar, "r{number}: {body}");
    }
    for (number, expression) in printer.lexemes.iter().enumerate() {
        let _ = writeln!(grammar, "T{number}: /{expression}/");
    }
    Ok(grammar)
}

/// Returns the names and numbers of control tokens, longest names first.
pub(crate) fn control_tokens(vocabulary: &Tokenizer) -> Vec<(String, u32)> {
    let name = |id: u32| {
        let attributes = vocabulary.attributes(id).ok()?;
        let is_control = attributes.intersects(TokenAttributes::CONTROL) || vocabulary.is_eog(id);
        let text = vocabulary.token_to_piece(id, true).ok()?;
        let text = std::str::from_utf8(text).ok()?;
        (is_control && !text.is_empty()).then(|| (text.to_owned(), id))
    };
    let count = vocabulary.vocab_size() as u32;
    let mut all: Vec<(String, u32)> = (0..count).filter_map(name).collect();
    all.sort_by_key(|(name, id)| (std::cmp::Reverse(name.len()), *id));
    all
}

struct PartPrinter<'p> {
    controls: &'p [(String, u32)],
    /// Parts that may occur more than once, each with its text.
    rules: Vec<(&'p GrammarPart, String)>,
    text: String,
    lexemes: Vec<String>,
}

impl<'p> PartPrinter<'p> {
    /// Emits a part as a rule; further occurrences only refer to it.
    fn rule(&mut self, part: &'p GrammarPart, depth: usize) -> Result<()> {
        let number = match self.rules.iter().position(|(known, _)| *known == part) {
            Some(number) => number,
            None => {
                let number = self.rules.len();
                self.rules.push((part, String::new()));
                let outside = std::mem::take(&mut self.text);
                self.body(part, depth)?;
                self.rules[number].1 = std::mem::replace(&mut self.text, outside);
                number
            }
        };
        let _ = write!(self.text, "r{number}");
        Ok(())
    }

    fn part(&mut self, part: &'p GrammarPart, depth: usize) -> Result<()> {
        match part {
            GrammarPart::Json(_) | GrammarPart::OneOf(_) => self.rule(part, depth),
            _ => self.body(part, depth),
        }
    }

    fn body(&mut self, part: &'p GrammarPart, depth: usize) -> Result<()> {
        if depth > DEEPEST {
            let message = format!("parts are more than {DEEPEST} deep in each other");
            return Err(GrammarError::TooLarge(message));
        }
        match part {
            GrammarPart::Text(text) => self.literal(text),
            GrammarPart::Regex(expression) => self.lexeme(&escaped(expression)),
            GrammarPart::Json(schema) => {
                let schema = lenient(schema);
                check_numbers(&schema, "#")?;
                let _ = write!(self.text, "%json {schema}");
            }
            GrammarPart::Through(end) => self.through(end),
            GrammarPart::OneOf(parts) => self.list(parts, " | ", depth)?,
            GrammarPart::Sequence(parts) => self.list(parts, " ", depth)?,
            GrammarPart::Repeat { most: Some(0), .. } => self.literal(""),
            GrammarPart::Repeat { part, least, most } => {
                self.text.push('(');
                self.part(part, depth + 1)?;
                let most = most.map(|most| most.to_string()).unwrap_or_default();
                let _ = write!(self.text, "){{{least},{most}}}");
            }
        }
        Ok(())
    }

    fn list(&mut self, parts: &'p [GrammarPart], between: &str, depth: usize) -> Result<()> {
        if parts.is_empty() {
            self.text.push_str("\"\"");
            return Ok(());
        }
        self.text.push('(');
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                self.text.push_str(between);
            }
            self.part(part, depth + 1)?;
        }
        self.text.push(')');
        Ok(())
    }

    /// Emits a text, split at the names of control tokens.
    fn literal(&mut self, text: &str) {
        let mut pieces = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let found = self.controls.iter().filter_map(|(name, id)| {
                let at = rest.find(name.as_str())?;
                Some((at, name.len(), *id))
            });
            // At the same position, the longest name comes first.
            let (plain, token) = match found.min_by_key(|(at, ..)| *at) {
                Some((at, length, id)) => {
                    let plain = &rest[..at];
                    rest = &rest[at + length..];
                    (plain, Some(id))
                }
                None => (std::mem::take(&mut rest), None),
            };
            if !plain.is_empty() {
                pieces.push(Value::from(plain).to_string());
            }
            pieces.extend(token.map(|id| format!("<[{id}]>")));
        }
        if pieces.is_empty() {
            pieces.push("\"\"".to_owned());
        }
        let _ = write!(self.text, "({})", pieces.join(" "));
    }

    fn through(&mut self, end: &str) {
        if self.controls.iter().any(|(name, _)| end.starts_with(name)) {
            // Text never contains a control token, so the first occurrence ends it.
            self.text.push('(');
            self.lexeme("(?s:.)+");
            self.text.push_str("? ");
            self.literal(end);
            self.text.push(')');
            return;
        }
        let end: String = end
            .chars()
            .map(|c| format!(r"\x{{{:X}}}", c as u32))
            .collect();
        self.lexeme(&format!("(?s:.)*{end}/ & ~/(?s:.)*{end}(?s:.)+"));
    }

    fn lexeme(&mut self, expression: &str) {
        let known = self.lexemes.iter().position(|known| known == expression);
        let number = known.unwrap_or_else(|| {
            self.lexemes.push(expression.to_owned());
            self.lexemes.len() - 1
        });
        let _ = write!(self.text, "T{number}");
    }
}

/// Escapes an expression for use between slashes.
fn escaped(expression: &str) -> String {
    expression.replace('/', r"\x{2F}").replace('\n', r"\n")
}

/// Marks a schema as lenient: the engine ignores what it cannot enforce.
fn lenient(schema: &Value) -> Value {
    match schema {
        Value::Object(keywords) => {
            let mut keywords = keywords.clone();
            keywords.insert(
                "x-guidance".to_owned(),
                json!({"lenient": true, "whitespace_pattern": crate::schema::WHITE_SPACE}),
            );
            let mut schema = Value::Object(keywords);
            bound_integers(&mut schema);
            schema
        }
        // `true`, or an invalid schema: allow anything.
        _ => json!({}),
    }
}
