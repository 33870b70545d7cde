//! Grammars of tool calls: names are those of the tools, and arguments match their schemas.

use super::format::{Calls, Format, Ids, JsonCalls, NamedCalls, TaggedCalls};
use super::{ArgumentKind, argument_kind};
use crate::message::Tool;
use samite_grammar::{Grammar, Part, Trigger};
use serde_json::{Map, Value};

/// A grammar of tool calls.
#[derive(Clone, Debug)]
pub struct CallGrammar {
    /// One or more calls, from the first mark on.
    pub grammar: Grammar,
    /// Texts that start a call, for answers that may also have content.
    pub triggers: Vec<Trigger>,
}

impl Format {
    /// Returns the grammar of calls of these tools. If `is_parallel`, one answer may have several
    /// calls. Returns `None` if there are no tools, or if the format has no grammar here: formats
    /// whose arguments are literals of another language, and those whose calls are messages with
    /// headers.
    ///
    /// Requirements of a schema that cannot be enforced are left out.
    pub fn call_grammar(&self, tools: &[Tool], is_parallel: bool) -> Option<CallGrammar> {
        if tools.is_empty() {
            return None;
        }
        let many = Many { is_parallel };
        let (part, triggers) = match &self.calls {
            Calls::Json(calls) => self.json_calls(calls, tools, many),
            Calls::Named(calls) if calls.text_name.is_none() => {
                named_calls(calls, self.ids, tools, many)
            }
            Calls::Tagged(calls) => tagged_calls(calls, tools, many),
            _ => return None,
        };
        let hidden = Part::Repeat {
            part: Box::new(Part::Sequence(vec![words(self.hidden), space()])),
            least: 0,
            most: Some(self.hidden.len() as u32),
        };
        let parts = vec![space(), part, space(), hidden];
        Some(CallGrammar {
            grammar: Grammar::parts(Part::Sequence(parts)),
            triggers,
        })
    }

    fn json_calls(&self, calls: &JsonCalls, tools: &[Tool], many: Many) -> (Part, Vec<Trigger>) {
        let objects = tools.iter().map(|tool| object(calls, self.ids, tool));
        let object = Part::OneOf(objects.collect());
        let comma = Part::Sequence(vec![space(), Part::text(","), space()]);
        let list = Part::Sequence(vec![
            Part::text("["),
            space(),
            many.repeat(object.clone(), comma),
            space(),
            Part::text("]"),
        ]);
        // Several calls without a list are between marks, or have a separator.
        let objects = match (calls.separator, calls.close) {
            ("", []) => Part::OneOf(vec![object, list]),
            ("", _) => Part::OneOf(vec![many.repeat(object, Part::text("\n")), list]),
            (separator, _) => {
                let between = Part::Sequence(vec![space(), Part::text(separator), space()]);
                many.repeat(object, between)
            }
        };
        let mut call = vec![objects];
        if !calls.open.is_empty() {
            let open = words(calls.open);
            let open = if calls.is_bare {
                Part::optional(open)
            } else {
                open
            };
            call.splice(0..0, [open, space()]);
        }
        if !calls.close.is_empty() {
            let close = Part::Sequence(vec![space(), words(calls.close)]);
            // Some closing marks end the answer and are not part of it.
            let is_end = calls.close.iter().all(|mark| self.hidden.contains(mark));
            call.push(if is_end { Part::optional(close) } else { close });
        }
        let call = match calls.separator {
            "" => many.repeat(Part::Sequence(call), space()),
            _ => Part::Sequence(call),
        };
        let mut triggers: Vec<Trigger> = calls.open.iter().map(|mark| word(mark)).collect();
        if calls.is_bare {
            let names = calls.keys.name.join("|");
            triggers.push(Trigger::Pattern(format!(
                r#"^\s*(\{{\s*"(?:{names})"\s*:)"#
            )));
        }
        (call, triggers)
    }
}

/// Number of calls that an answer may have.
#[derive(Clone, Copy)]
struct Many {
    is_parallel: bool,
}

impl Many {
    /// Returns one call or more, with `between` them.
    fn repeat(self, call: Part, between: Part) -> Part {
        if !self.is_parallel {
            return call;
        }
        let further = Part::Sequence(vec![between, call.clone()]);
        let further = Part::Repeat {
            part: Box::new(further),
            least: 0,
            most: None,
        };
        Part::Sequence(vec![call, further])
    }
}

fn space() -> Part {
    Part::optional(Part::Regex(r"[ \t\r\n]{1,8}".to_owned()))
}

fn words(words: &[&str]) -> Part {
    Part::OneOf(words.iter().map(|word| Part::text(*word)).collect())
}

fn quoted(text: &str) -> Part {
    Part::Text(Value::from(text).to_string())
}

fn arguments(tool: &Tool) -> Part {
    Part::Json(tool.function.parameters.clone())
}

fn id(ids: Ids) -> Part {
    let expression = match ids {
        Ids::Nine => "[A-Za-z0-9]{9}",
        Ids::Made | Ids::Text => "[A-Za-z0-9_-]{1,40}",
    };
    Part::Regex(expression.to_owned())
}

fn section(marks: Option<(&str, &str)>, inside: Part) -> Part {
    match marks {
        Some((open, close)) => Part::Sequence(vec![
            Part::text(open),
            space(),
            inside,
            space(),
            Part::text(close),
        ]),
        None => inside,
    }
}

/// Returns the JSON object of a call.
fn object(calls: &JsonCalls, ids: Ids, tool: &Tool) -> Part {
    let keys = &calls.keys;
    let key = |names: &[&str]| {
        let names = names.iter().map(|name| quoted(name));
        let colon = Part::Sequence(vec![space(), Part::text(":"), space()]);
        Part::Sequence(vec![Part::OneOf(names.collect()), colon])
    };
    let comma = || Part::Sequence(vec![space(), Part::text(","), space()]);
    let mut parts = vec![Part::text("{"), space()];
    if keys.name_is_key {
        parts.push(key(&[&tool.function.name]));
        parts.push(arguments(tool));
    } else {
        let id = Part::Sequence(vec![
            key(keys.id),
            Part::text("\""),
            id(ids),
            Part::text("\""),
        ]);
        if !keys.id_is_last {
            let first = Part::Sequence(vec![id.clone(), comma()]);
            parts.push(Part::optional(first));
        }
        parts.extend([key(keys.name), quoted(&tool.function.name), comma()]);
        parts.extend([key(keys.arguments), arguments(tool)]);
        if keys.id_is_last {
            parts.push(Part::optional(Part::Sequence(vec![comma(), id])));
        }
    }
    parts.extend([space(), Part::text("}")]);
    Part::Sequence(parts)
}

fn named_calls(calls: &NamedCalls, ids: Ids, tools: &[Tool], many: Many) -> (Part, Vec<Trigger>) {
    let call = |tool: &Tool| {
        let mut parts = vec![Part::text(calls.open)];
        if let Some(end) = calls.id_end {
            parts.extend([id(ids), Part::text(end)]);
        }
        match ids {
            // The name is part of the ID.
            Ids::Text => parts.extend([
                Part::optional(Part::text("functions.")),
                Part::text(tool.function.name.as_str()),
                Part::text(":"),
                Part::Regex("[0-9]{1,3}".to_owned()),
            ]),
            _ => parts.push(Part::text(tool.function.name.as_str())),
        }
        if let Some(open) = calls.id_open {
            let id = Part::Sequence(vec![Part::text(open), id(ids)]);
            parts.push(Part::optional(id));
        }
        parts.extend([Part::text(calls.middle), Part::text(calls.fence)]);
        parts.push(arguments(tool));
        if !calls.close.is_empty() {
            parts.push(words(calls.close));
        }
        Part::Sequence(parts)
    };
    let call = Part::OneOf(tools.iter().map(call).collect());
    let trigger = calls.section.map_or(calls.open, |(open, _)| open);
    (
        section(calls.section, many.repeat(call, space())),
        vec![word(trigger)],
    )
}

fn tagged_calls(calls: &TaggedCalls, tools: &[Tool], many: Many) -> (Part, Vec<Trigger>) {
    let call = |tool: &Tool| {
        let mut parts = vec![
            Part::text(calls.open),
            Part::text(tool.function.name.as_str()),
            Part::text(calls.name_end),
        ];
        if !calls.head_end.is_empty() {
            let index = Part::Regex(r#" index="[0-9]{1,3}""#.to_owned());
            parts.push(Part::optional(index));
            parts.push(Part::text(calls.head_end));
        }
        let schema = tool.function.parameters.as_object();
        let properties = schema.and_then(|schema| schema.get("properties")?.as_object());
        let required = schema.and_then(|schema| schema.get("required")?.as_array());
        for (name, property) in properties.into_iter().flatten() {
            let is_required = required.is_some_and(|names| names.iter().any(|known| known == name));
            let argument = Part::Sequence(vec![space(), argument(calls, name, property, schema)]);
            parts.push(if is_required {
                argument
            } else {
                Part::optional(argument)
            });
        }
        parts.extend([space(), Part::text(calls.close)]);
        Part::Sequence(parts)
    };
    let call = Part::OneOf(tools.iter().map(call).collect());
    // Some formats put each call into a section, others all calls into one.
    let part = match calls.section {
        Some(_) if calls.close.is_empty() => many.repeat(section(calls.section, call), space()),
        Some(_) => many.repeat(section(calls.section, many.repeat(call, space())), space()),
        None => many.repeat(call, space()),
    };
    let trigger = calls.section.map_or(calls.open, |(open, _)| open);
    (part, vec![word(trigger)])
}

/// Returns one argument between its marks.
fn argument(
    calls: &TaggedCalls,
    name: &str,
    property: &Value,
    schema: Option<&Map<String, Value>>,
) -> Part {
    let close = calls.value_close.replace("{}", name);
    let mut parts = vec![
        Part::text(calls.key_open),
        Part::text(name),
        Part::text(calls.key_end),
    ];
    // A schema without these keywords also allows texts. With them, only JSON is certain to match
    // it.
    let says_more = ["$ref", "type", "anyOf", "oneOf", "allOf", "enum", "const"]
        .iter()
        .any(|word| property.get(word).is_some());
    let is_text = match argument_kind(property) {
        ArgumentKind::Text => true,
        ArgumentKind::Json => false,
        ArgumentKind::Unknown => !says_more,
    };
    if let Some(mark) = calls.is_text {
        parts.push(Part::text(" "));
        parts.push(match (is_text, mark.split_once('=')) {
            (false, Some(("type", _))) => {
                Part::Regex("type=\"(number|integer|boolean|object|array|null)\"".to_owned())
            }
            (false, Some((key, _))) => Part::Text(format!("{key}=\"false\"")),
            _ => Part::text(mark),
        });
    }
    parts.push(Part::text(calls.key_head_end));
    if !calls.value_open.is_empty() {
        parts.extend([space(), Part::text(calls.value_open)]);
    }
    let choices = property.get("enum").and_then(Value::as_array);
    match (is_text, choices) {
        (true, Some(choices)) if choices.iter().all(Value::is_string) => {
            let texts = choices.iter().filter_map(Value::as_str).map(Part::text);
            // All white space but one newline is part of the text.
            let line_end = || Part::optional(Part::text("\n"));
            parts.extend([line_end(), Part::OneOf(texts.collect()), line_end()]);
            parts.push(Part::Text(close));
        }
        (true, _) => parts.push(Part::Through(close)),
        (false, _) => {
            let mut property = property.clone();
            // References resolve against the schema of all arguments.
            for word in ["$defs", "definitions"] {
                let definitions = schema.and_then(|schema| schema.get(word));
                if let (Value::Object(keywords), Some(definitions)) = (&mut property, definitions) {
                    keywords.insert(word.to_owned(), definitions.clone());
                }
            }
            parts.extend([space(), Part::Json(property), space(), Part::Text(close)]);
        }
    }
    Part::Sequence(parts)
}

fn word(mark: &str) -> Trigger {
    Trigger::Word(mark.to_owned())
}
