//! Parses arguments that come one by one, each between marks.

use super::{MAX_HELD, Machine, State, Step, TagValue};
use crate::answer::format::{Calls, TaggedCalls};
use crate::answer::head::key_head;
use crate::answer::json::Stop;
use crate::answer::literal::{ConversionProgress, Literals, Style, push_escaped};
use crate::answer::marks::{Begins, Found, begins, find};
use crate::answer::{ArgumentKind, Sink};
use serde_json::Value;

impl Machine {
    pub(super) fn between(
        &mut self,
        name: String,
        is_first: bool,
        is_end: bool,
        sink: &mut Sink,
    ) -> Step {
        let Calls::Tagged(calls) = &self.format.calls else {
            return self.go(State::Text);
        };
        let trimmed = self.buffer.trim_start();
        let space = self.buffer.len() - trimmed.len();
        // Next comes another argument, the end of the call, or the end of all calls.
        let section_close = calls.section.map_or("", |(_, close)| close);
        let ends = [calls.close, section_close, calls.value_close];
        let mut waits = trimmed.is_empty() && !is_end;
        for (i, end) in ends.into_iter().enumerate() {
            if end.is_empty() {
                continue;
            }
            match begins(trimmed, end, is_end) {
                Begins::Perhaps => waits = true,
                Begins::No => {}
                Begins::Yes if i == 2 => {
                    // An extra closing mark.
                    let length = space + end.len();
                    self.buffer.drain(..length);
                    return self.go(State::Between { name, is_first });
                }
                Begins::Yes => {
                    // `State::Behind` reads the marks.
                    sink.arguments(if is_first { "{}" } else { "}" });
                    sink.end();
                    return self.go(State::Behind { in_list: false });
                }
            }
        }
        let held = trimmed.floor_char_boundary(MAX_HELD);
        match key_head(calls, &trimmed[..held], is_end) {
            Ok((key, head, length)) => {
                sink.arguments(if is_first { "{" } else { ", " });
                sink.arguments(&Value::from(key.as_str()).to_string());
                sink.arguments(": ");
                let kind = match calls.is_text {
                    Some(word) if head.contains(word) => ArgumentKind::Text,
                    Some(_) => ArgumentKind::Json,
                    None => sink.kind(&name, &key),
                };
                let close = calls.value_close.replace("{}", &key);
                self.buffer.drain(..space + length);
                self.go(State::Value(TagValue {
                    tool: name,
                    kind,
                    close,
                    has_started: false,
                    seen: 0,
                }))
            }
            Err(Stop::More) if !is_end && trimmed.len() < MAX_HELD => {
                self.wait(State::Between { name, is_first })
            }
            Err(_) if waits => self.wait(State::Between { name, is_first }),
            Err(_) => {
                sink.end();
                self.is_fresh = false;
                self.go(State::Text)
            }
        }
    }

    pub(super) fn value(&mut self, mut value: TagValue, is_end: bool, sink: &mut Sink) -> Step {
        let Calls::Tagged(calls) = &self.format.calls else {
            return self.go(State::Text);
        };
        let streams = value.kind == ArgumentKind::Text && !calls.has_cdata;
        let seen = value.seen;
        match find(
            &self.buffer[seen..],
            [value.close.as_str()].into_iter(),
            is_end,
        ) {
            Found::Mark { at, .. } => {
                let at = seen + at;
                let text = &self.buffer[..at];
                let text = if value.has_started {
                    text
                } else {
                    text.strip_prefix('\n').unwrap_or(text)
                };
                let text = text.strip_suffix('\n').unwrap_or(text);
                if streams {
                    end_text(text, &mut value, sink);
                } else {
                    sink.arguments(&whole_value(text, value.kind, calls));
                }
                self.buffer.drain(..at + value.close.len());
                self.go(State::Between {
                    name: value.tool,
                    is_first: false,
                })
            }
            Found::None { until } if streams => {
                // A newline at either end belongs to the marks.
                let mut text = &self.buffer[..until];
                if !is_end {
                    text = text.strip_suffix('\n').unwrap_or(text);
                }
                let end = text.len();
                if end == 0 {
                    return self.wait(State::Value(value));
                }
                let begin = if value.has_started {
                    0
                } else {
                    usize::from(text.starts_with('\n'))
                };
                if !value.has_started {
                    sink.arguments("\"");
                    value.has_started = true;
                }
                let mut json = String::new();
                push_escaped(&mut json, &text[begin..]);
                sink.arguments(&json);
                self.buffer.drain(..end);
                if is_end {
                    self.go(State::Text)
                } else {
                    self.go(State::Value(value))
                }
            }
            Found::None { .. } if is_end => {
                let text = std::mem::take(&mut self.buffer);
                sink.arguments(&whole_value(text.trim_matches('\n'), value.kind, calls));
                self.go(State::Text)
            }
            Found::None { until } => {
                value.seen += until;
                self.wait(State::Value(value))
            }
        }
    }
}

/// Reports the rest of a text after a part of it.
fn end_text(text: &str, value: &mut TagValue, sink: &mut Sink) {
    let mut json = String::new();
    if !value.has_started {
        json.push('"');
    }
    push_escaped(&mut json, text);
    json.push('"');
    sink.arguments(&json);
}

/// Returns a value as JSON: unchanged if it is JSON and may be, otherwise as a string. Templates
/// that print Python's values teach models to write those as well.
fn whole_value(text: &str, kind: ArgumentKind, calls: &TaggedCalls) -> String {
    let inner = text
        .trim()
        .strip_prefix("<![CDATA[")
        .and_then(|text| text.strip_suffix("]]>"));
    let text = match inner {
        Some(inner) if calls.has_cdata => inner,
        _ => text,
    };
    if kind != ArgumentKind::Text {
        let trimmed = text.trim();
        let python = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        if serde_json::from_str::<serde::de::IgnoredAny>(python).is_ok() {
            return python.to_owned();
        }
        if let Some(value) = python_value(trimmed).or_else(|| nested(trimmed, kind, calls)) {
            return value.to_string();
        }
    }
    Value::from(text).to_string()
}

/// Parses a list or dictionary in Python's notation.
fn python_value(text: &str) -> Option<Value> {
    if !text.starts_with(['[', '{']) {
        return None;
    }
    let mut json = "{".to_owned();
    // The value is the only item of a list, which is the only argument of a call.
    let call = format!("list=[{text}])");
    let (length, progress) = Literals::new(Style::Python).turn(&call, true, &mut json);
    let is_whole = progress == ConversionProgress::End && length == call.len();
    let arguments: Value = serde_json::from_str(&json).ok().filter(|_| is_whole)?;
    match arguments["list"].as_array()?.as_slice() {
        [value] => Some(value.clone()),
        _ => None,
    }
}

/// Parses a value whose parts stand between named marks: a list of `item`, or an object.
fn nested(text: &str, kind: ArgumentKind, calls: &TaggedCalls) -> Option<Value> {
    if !calls.value_close.contains("{}") {
        return None;
    }
    if text.is_empty() {
        let is_list = matches!(kind, ArgumentKind::Texts | ArgumentKind::List);
        return is_list.then(|| Value::Array(Vec::new()));
    }
    let mut parts = NestedParts {
        calls,
        rest: text,
        has_texts: kind == ArgumentKind::Texts,
    };
    let value = parts.members(0)?;
    parts.rest.is_empty().then_some(value)
}

/// Parser of values between named marks, which reads a text once.
struct NestedParts<'t> {
    calls: &'t TaggedCalls,
    rest: &'t str,
    /// True if the parts are texts, even those that read like JSON.
    has_texts: bool,
}

impl<'t> NestedParts<'t> {
    const MAX_DEPTH: usize = 64;
    const MAX_NAME: usize = 256;

    /// Consumes the opening mark of a part, and returns its name.
    fn open(&mut self) -> Option<&'t str> {
        let after = self.rest.strip_prefix(self.calls.key_open)?;
        let head = &after[..after.floor_char_boundary(Self::MAX_NAME)];
        let (name, _) = head.split_once(self.calls.key_end)?;
        let is_name = !name.is_empty() && !name.starts_with('/');
        self.rest = &after[name.len() + self.calls.key_end.len()..];
        is_name.then_some(name)
    }

    /// Parses parts up to a mark that opens none, or to the end.
    fn members(&mut self, depth: usize) -> Option<Value> {
        if depth == Self::MAX_DEPTH {
            return None;
        }
        let mut members = Vec::new();
        loop {
            self.rest = self.rest.trim_start();
            let before = self.rest;
            let Some(name) = self.open() else {
                self.rest = before;
                break;
            };
            let close = self.calls.value_close.replace("{}", name);
            let begin = self.rest;
            self.rest = begin.trim_start();
            let has_parts = self.rest.starts_with(self.calls.key_open) && self.open().is_some();
            let value = if has_parts {
                self.rest = begin;
                let value = self.members(depth + 1)?;
                self.rest = self.rest.strip_prefix(close.as_str())?;
                value
            } else {
                let end = begin.find(&close)?;
                let inner = begin[..end].trim();
                self.rest = &begin[end + close.len()..];
                let json = serde_json::from_str(inner).ok().filter(|_| !self.has_texts);
                json.unwrap_or_else(|| Value::from(inner))
            };
            members.push((name, value));
        }
        if members.is_empty() {
            return None;
        }
        let is_list = members.iter().all(|(name, _)| *name == "item");
        let members = members.into_iter();
        Some(if is_list {
            members.map(|(_, value)| value).collect()
        } else {
            let members = members.map(|(name, value)| (name.to_owned(), value));
            Value::Object(members.collect())
        })
    }
}
