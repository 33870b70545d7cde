//! Grammars of tool calls: names are those of the tools, and arguments match their schemas.

use super::format::{Calls, Format, Ids, JsonCalls, NamedCalls, TaggedCalls};
use super::{ArgumentKind, argument_kind};
use crate::message::Tool;
use samite_grammar::{Grammar, GrammarPart, Trigger, close_objects};
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
        let many = CallCount { is_parallel };
        let (part, triggers) = match &self.calls {
            Calls::Json(calls) => self.json_calls(calls, tools, many),
            Calls::Named(calls) if calls.text_name.is_none() => {
                named_calls(calls, self.ids, tools, many)
            }
            Calls::Tagged(calls) => tagged_calls(calls, tools, many),
            _ => return None,
        };
        let hidden = GrammarPart::Repeat {
            part: Box::new(GrammarPart::Sequence(vec![words(self.hidden), space()])),
            least: 0,
            most: Some(self.hidden.len() as u32),
        };
        let parts = vec![space(), part, space(), hidden];
        Some(CallGrammar {
            grammar: Grammar::parts(GrammarPart::Sequence(parts)),
            triggers,
        })
    }

    fn json_calls(
        &self,
        calls: &JsonCalls,
        tools: &[Tool],
        many: CallCount,
    ) -> (GrammarPart, Vec<Trigger>) {
        let objects = tools.iter().map(|tool| object(calls, self.ids, tool));
        let object = GrammarPart::OneOf(objects.collect());
        let comma = GrammarPart::Sequence(vec![space(), GrammarPart::text(","), space()]);
        let list = GrammarPart::Sequence(vec![
            GrammarPart::text("["),
            space(),
            many.repeat(object.clone(), comma),
            space(),
            GrammarPart::text("]"),
        ]);
        // Several calls without a list are between marks, or have a separator.
        let objects = match (calls.separator, calls.close) {
            ("", []) => GrammarPart::OneOf(vec![object, list]),
            ("", _) => GrammarPart::OneOf(vec![many.repeat(object, GrammarPart::text("\n")), list]),
            (separator, _) => {
                let between =
                    GrammarPart::Sequence(vec![space(), GrammarPart::text(separator), space()]);
                many.repeat(object, between)
            }
        };
        let mut call = vec![objects];
        if !calls.open.is_empty() {
            let open = words(calls.open);
            let open = if calls.is_bare {
                GrammarPart::optional(open)
            } else {
                open
            };
            call.splice(0..0, [open, space()]);
        }
        if !calls.close.is_empty() {
            let close = GrammarPart::Sequence(vec![space(), words(calls.close)]);
            // Some closing marks end the answer and are not part of it.
            let is_end = calls.close.iter().all(|mark| self.hidden.contains(mark));
            call.push(if is_end {
                GrammarPart::optional(close)
            } else {
                close
            });
        }
        let call = match calls.separator {
            "" => many.repeat(GrammarPart::Sequence(call), space()),
            _ => GrammarPart::Sequence(call),
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
struct CallCount {
    is_parallel: bool,
}

impl CallCount {
    /// Returns one call or more, with `between` them.
    fn repeat(self, call: GrammarPart, between: GrammarPart) -> GrammarPart {
        if !self.is_parallel {
            return call;
        }
        let further = GrammarPart::Sequence(vec![between, call.clone()]);
        let further = GrammarPart::Repeat {
            part: Box::new(further),
            least: 0,
            most: None,
        };
        GrammarPart::Sequence(vec![call, further])
    }
}

fn space() -> GrammarPart {
    GrammarPart::optional(GrammarPart::Regex(r"[ \t\r\n]{1,8}".to_owned()))
}

fn words(words: &[&str]) -> GrammarPart {
    GrammarPart::OneOf(words.iter().map(|word| GrammarPart::text(*word)).collect())
}

fn quoted(text: &str) -> GrammarPart {
    GrammarPart::Text(Value::from(text).to_string())
}

fn arguments(tool: &Tool) -> GrammarPart {
    let mut parameters = tool.function.parameters.clone();
    close_objects(&mut parameters);
    GrammarPart::Json(parameters)
}

fn id(ids: Ids) -> GrammarPart {
    let expression = match ids {
        Ids::Nine => "[A-Za-z0-9]{9}",
        Ids::Made | Ids::Text => "[A-Za-z0-9_-]{1,40}",
    };
    GrammarPart::Regex(expression.to_owned())
}

fn section(marks: Option<(&str, &str)>, inside: GrammarPart) -> GrammarPart {
    match marks {
        Some((open, close)) => GrammarPart::Sequence(vec![
            GrammarPart::text(open),
            space(),
            inside,
            space(),
            GrammarPart::text(close),
        ]),
        None => inside,
    }
}

/// Returns the JSON object of a call.
fn object(calls: &JsonCalls, ids: Ids, tool: &Tool) -> GrammarPart {
    let keys = &calls.keys;
    let key = |names: &[&str]| {
        let names = names.iter().map(|name| quoted(name));
        let colon = GrammarPart::Sequence(vec![space(), GrammarPart::text(":"), space()]);
        GrammarPart::Sequence(vec![GrammarPart::OneOf(names.collect()), colon])
    };
    let comma = || GrammarPart::Sequence(vec![space(), GrammarPart::text(","), space()]);
    let mut parts = vec![GrammarPart::text("{"), space()];
    if keys.name_is_key {
        parts.push(key(&[&tool.function.name]));
        parts.push(arguments(tool));
    } else {
        // Models repeat IDs across answers. If the format does not need an ID, only the name that
        // Cohere's models use is allowed.
        let needs_id = ids != Ids::Made || keys.id_is_last;
        let is_allowed = |name: &&&str| needs_id || **name == "tool_call_id";
        let id_names: Vec<&str> = keys.id.iter().filter(is_allowed).copied().collect();
        let has_id = !id_names.is_empty();
        let id = GrammarPart::Sequence(vec![
            key(&id_names),
            GrammarPart::text("\""),
            id(ids),
            GrammarPart::text("\""),
        ]);
        if has_id && !keys.id_is_last {
            let first = GrammarPart::Sequence(vec![id.clone(), comma()]);
            parts.push(GrammarPart::optional(first));
        }
        parts.extend([key(keys.name), quoted(&tool.function.name), comma()]);
        parts.extend([key(keys.arguments), arguments(tool)]);
        if has_id && keys.id_is_last {
            parts.push(GrammarPart::optional(GrammarPart::Sequence(vec![
                comma(),
                id,
            ])));
        }
    }
    parts.extend([space(), GrammarPart::text("}")]);
    GrammarPart::Sequence(parts)
}

fn named_calls(
    calls: &NamedCalls,
    ids: Ids,
    tools: &[Tool],
    many: CallCount,
) -> (GrammarPart, Vec<Trigger>) {
    let call = |tool: &Tool| {
        let mut parts = vec![GrammarPart::text(calls.open)];
        if let Some(end) = calls.id_end {
            parts.extend([id(ids), GrammarPart::text(end)]);
        }
        match ids {
            // The name is part of the ID.
            Ids::Text => parts.extend([
                GrammarPart::optional(GrammarPart::text("functions.")),
                GrammarPart::text(tool.function.name.as_str()),
                GrammarPart::text(":"),
                GrammarPart::Regex("[0-9]{1,3}".to_owned()),
            ]),
            _ => parts.push(GrammarPart::text(tool.function.name.as_str())),
        }
        if let Some(open) = calls.id_open {
            let id = GrammarPart::Sequence(vec![GrammarPart::text(open), id(ids)]);
            parts.push(GrammarPart::optional(id));
        }
        parts.extend([
            GrammarPart::text(calls.middle),
            GrammarPart::text(calls.fence),
        ]);
        parts.push(arguments(tool));
        if !calls.close.is_empty() {
            parts.push(words(calls.close));
        }
        GrammarPart::Sequence(parts)
    };
    let call = GrammarPart::OneOf(tools.iter().map(call).collect());
    let trigger = calls.section.map_or(calls.open, |(open, _)| open);
    (
        section(calls.section, many.repeat(call, space())),
        vec![word(trigger)],
    )
}

fn tagged_calls(
    calls: &TaggedCalls,
    tools: &[Tool],
    many: CallCount,
) -> (GrammarPart, Vec<Trigger>) {
    let call = |tool: &Tool| {
        let mut parts = vec![
            GrammarPart::text(calls.open),
            GrammarPart::text(tool.function.name.as_str()),
            GrammarPart::text(calls.name_end),
        ];
        if !calls.head_end.is_empty() {
            let index = GrammarPart::Regex(r#" index="[0-9]{1,3}""#.to_owned());
            parts.push(GrammarPart::optional(index));
            parts.push(GrammarPart::text(calls.head_end));
        }
        let mut parameters = tool.function.parameters.clone();
        close_objects(&mut parameters);
        let schema = parameters.as_object();
        let properties = schema.and_then(|schema| schema.get("properties")?.as_object());
        let required = schema.and_then(|schema| schema.get("required")?.as_array());
        for (name, property) in properties.into_iter().flatten() {
            let is_required = required.is_some_and(|names| names.iter().any(|known| known == name));
            let argument =
                GrammarPart::Sequence(vec![space(), argument(calls, name, property, schema)]);
            parts.push(if is_required {
                argument
            } else {
                GrammarPart::optional(argument)
            });
        }
        parts.extend([space(), GrammarPart::text(calls.close)]);
        GrammarPart::Sequence(parts)
    };
    let call = GrammarPart::OneOf(tools.iter().map(call).collect());
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
) -> GrammarPart {
    let close = calls.value_close.replace("{}", name);
    let mut parts = vec![
        GrammarPart::text(calls.key_open),
        GrammarPart::text(name),
        GrammarPart::text(calls.key_end),
    ];
    // A schema without these keywords also allows texts. With them, only JSON is certain to match
    // it.
    let says_more = ["$ref", "type", "anyOf", "oneOf", "allOf", "enum", "const"]
        .iter()
        .any(|word| property.get(word).is_some());
    let is_text = match argument_kind(property) {
        ArgumentKind::Text => true,
        ArgumentKind::Json | ArgumentKind::List | ArgumentKind::Texts => false,
        ArgumentKind::Unknown => !says_more,
    };
    if let Some(mark) = calls.is_text {
        parts.push(GrammarPart::text(" "));
        parts.push(match (is_text, mark.split_once('=')) {
            (false, Some(("type", _))) => {
                GrammarPart::Regex("type=\"(number|integer|boolean|object|array|null)\"".to_owned())
            }
            (false, Some((key, _))) => GrammarPart::Text(format!("{key}=\"false\"")),
            _ => GrammarPart::text(mark),
        });
    }
    parts.push(GrammarPart::text(calls.key_head_end));
    if !calls.value_open.is_empty() {
        parts.extend([space(), GrammarPart::text(calls.value_open)]);
    }
    let choices = property.get("enum").and_then(Value::as_array);
    match (is_text, choices) {
        (true, Some(choices)) if choices.iter().all(Value::is_string) => {
            let texts = choices
                .iter()
                .filter_map(Value::as_str)
                .map(GrammarPart::text);
            // All white space but one newline is part of the text.
            let line_end = || GrammarPart::optional(GrammarPart::text("\n"));
            parts.extend([line_end(), GrammarPart::OneOf(texts.collect()), line_end()]);
            parts.push(GrammarPart::Text(close));
        }
        (true, _) => parts.push(GrammarPart::Through(close)),
        (false, _) => {
            let mut property = property.clone();
            // References resolve against the schema of all arguments.
            for word in ["$defs", "definitions"] {
                let definitions = schema.and_then(|schema| schema.get(word));
                if let (Value::Object(keywords), Some(definitions)) = (&mut property, definitions) {
                    keywords.insert(word.to_owned(), definitions.clone());
                }
            }
            parts.extend([
                space(),
                GrammarPart::Json(property),
                space(),
                GrammarPart::Text(close),
            ]);
        }
    }
    GrammarPart::Sequence(parts)
}

fn word(mark: &str) -> Trigger {
    Trigger::Word(mark.to_owned())
}
