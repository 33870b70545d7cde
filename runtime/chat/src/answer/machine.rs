//! The machine that reads answers with marks in them.

use super::format::{Calls, Format, Ids, JsonCalls, LiteralCalls, NamedCalls, TaggedCalls};
use super::json::{Header, Scanned, Scanner, Stop, header, tail};
use super::literal::{Literals, Turned, push_escaped};
use super::marks::{Begins, Found, begins, find};
use super::{ArgumentKind, Sink};
use serde_json::Value;

/// Most bytes that are held back to see whether they begin a call.
const MOST_HELD: usize = 64 << 10;
/// Longest name of a tool or an argument.
const LONGEST_NAME: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct Machine {
    format: &'static Format,
    has_tools: bool,
    /// What is not told of yet.
    buffer: String,
    state: State,
    /// Nothing was said since the beginning or since the last thoughts or calls.
    is_fresh: bool,
    /// White space that comes next belongs to the mark before it.
    skips_space: bool,
    /// That mark was one of thoughts.
    is_thought_space: bool,
    /// So many bytes at the beginning of the buffer are the prompt's.
    borrowed: usize,
    /// An object at the beginning turned out to be no call.
    is_no_bare_call: bool,
}

#[derive(Clone, Debug)]
enum State {
    Text,
    /// Within thoughts that end so.
    Thought(&'static str),
    /// The buffer begins with a mark of so many bytes, white space before it included, that may open a call.
    Opening {
        lead: usize,
        in_list: bool,
    },
    Json {
        scanner: Scanner,
        depth: usize,
        in_list: bool,
    },
    /// Behind arguments in JSON.
    Tail {
        depth: usize,
        in_list: bool,
    },
    /// Between arguments.
    Between {
        name: String,
        is_first: bool,
    },
    Value(TagValue),
    Literal(Literals, bool),
    /// Behind a call.
    Behind {
        in_list: bool,
    },
}

#[derive(Clone, Debug)]
struct TagValue {
    tool: String,
    kind: ArgumentKind,
    close: String,
    /// Whether some of it was told of.
    is_begun: bool,
    /// So many bytes of the buffer have no end in them.
    seen: usize,
}

/// What may be found in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Thought(&'static str),
    ThoughtEnd,
    Hidden,
    Call,
}

/// What a step did.
enum Step {
    /// Something; there may be more to do.
    Done,
    /// Nothing, before more text comes.
    More,
}

impl Machine {
    pub(super) fn new(format: &'static Format, has_tools: bool, prompt: &str) -> Self {
        let mut machine = Self {
            format,
            has_tools,
            buffer: String::new(),
            state: State::Text,
            is_fresh: true,
            skips_space: false,
            is_thought_space: false,
            borrowed: 0,
            is_no_bare_call: false,
        };
        machine.begin(prompt);
        machine
    }

    /// The prompt may have begun thoughts or a call, or text that is gone on with.
    fn begin(&mut self, prompt: &str) {
        let last = |mark: &'static str| prompt.rfind(mark).map(|at| at + mark.len());
        let opened = self
            .format
            .thoughts
            .iter()
            .filter_map(|(open, close)| last(open).map(|at| (at, *close)))
            .max();
        let closed = self
            .format
            .thoughts
            .iter()
            .filter_map(|(_, close)| last(close))
            .max();
        match (opened, closed) {
            (Some((opened, close)), closed) if closed.is_none_or(|closed| closed < opened) => {
                self.state = State::Thought(close);
                self.skips_space = prompt[opened..].trim().is_empty();
            }
            (_, Some(closed)) => {
                self.is_fresh = prompt[closed..].trim().is_empty();
                self.skips_space = self.is_fresh;
            }
            _ => {}
        }
        // The mark of a call at the end is read with what follows.
        let open = self
            .call_marks()
            .into_iter()
            .filter(|mark| prompt.ends_with(mark))
            .max_by_key(|mark| mark.len());
        if let (Some(open), State::Text) = (open, &self.state) {
            self.buffer.push_str(open);
            self.borrowed = open.len();
        }
    }

    pub(super) fn run(&mut self, text: &str, is_end: bool, sink: &mut Sink) {
        self.buffer.push_str(text);
        while let Step::Done = self.step(is_end, sink) {}
        if is_end {
            sink.end();
        }
    }

    fn step(&mut self, is_end: bool, sink: &mut Sink) -> Step {
        if self.skips_space {
            let space = self.buffer.len() - self.buffer.trim_start().len();
            if self.is_thought_space {
                sink.thought_mark(&self.buffer[..space]);
            }
            self.buffer.drain(..space);
            if self.buffer.is_empty() {
                return Step::More;
            }
            self.skips_space = false;
        }
        if self.buffer.is_empty() && !is_end {
            return Step::More;
        }
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.text(is_end, sink),
            State::Thought(close) => self.thought(close, is_end, sink),
            State::Opening { lead, in_list } => self.opening(lead, in_list, is_end, sink),
            State::Json {
                scanner,
                depth,
                in_list,
            } => self.json(scanner, depth, in_list, sink),
            State::Tail { depth, in_list } => self.tail(depth, in_list, is_end),
            State::Between { name, is_first } => self.between(name, is_first, is_end, sink),
            State::Value(value) => self.value(value, is_end, sink),
            State::Literal(literals, in_list) => self.literal(literals, in_list, is_end, sink),
            State::Behind { in_list } => self.behind(in_list, is_end),
        }
    }

    /// Stays as it is until more comes.
    fn wait(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::Done
    }

    /// Marks that may open a call.
    fn call_marks(&self) -> Vec<&'static str> {
        let mut marks = Vec::new();
        if self.has_tools {
            let section =
                |section: Option<(&'static str, &'static str)>| section.map(|(open, _)| open);
            match &self.format.calls {
                Calls::None | Calls::Channels(_) => {}
                Calls::Json(calls) => marks.extend(calls.open),
                Calls::Named(calls) => {
                    marks.extend(section(calls.section).into_iter().chain([calls.open]))
                }
                Calls::Tagged(calls) => {
                    marks.extend(section(calls.section).into_iter().chain([calls.open]))
                }
                Calls::Literal(calls) => marks.push(calls.open),
            }
        }
        marks.retain(|mark| !mark.is_empty());
        marks
    }

    fn text(&mut self, is_end: bool, sink: &mut Sink) -> Step {
        let mut marks: Vec<(&'static str, Mark)> = Vec::new();
        for (open, close) in self.format.thoughts {
            marks.push((open, Mark::Thought(close)));
            marks.push((close, Mark::ThoughtEnd));
        }
        marks.extend(self.call_marks().into_iter().map(|mark| (mark, Mark::Call)));
        marks.extend(self.format.hidden.iter().map(|mark| (*mark, Mark::Hidden)));
        let trimmed = self.buffer.trim_start();
        if self.is_fresh
            && !self.is_no_bare_call
            && self.has_tools
            && trimmed.starts_with(['{', '['])
        {
            if matches!(
                self.format.calls,
                Calls::Json(JsonCalls { is_bare: true, .. })
            ) {
                let lead = self.buffer.len() - trimmed.len();
                return self.go(State::Opening {
                    lead,
                    in_list: false,
                });
            }
        }
        match find(&self.buffer, marks.iter().map(|mark| mark.0), is_end) {
            Found::None { until } => {
                // White space may belong to a mark that follows.
                let until = if is_end {
                    until
                } else {
                    self.buffer[..until].trim_end().len()
                };
                if until == 0 {
                    return Step::More;
                }
                self.say(until, sink);
                Step::Done
            }
            Found::Mark { at, number } => {
                let (mark, kind) = marks[number];
                let before = self.buffer[..at].trim_end().len();
                let is_fresh = self.is_fresh && before == 0;
                match kind {
                    Mark::ThoughtEnd if !is_fresh && self.format.hidden.contains(&mark) => {
                        self.say(at, sink);
                        self.buffer.drain(..mark.len());
                    }
                    Mark::Thought(_) | Mark::ThoughtEnd if !is_fresh => {
                        self.say(at + mark.len(), sink)
                    }
                    Mark::Thought(close) => {
                        sink.thought_mark(&self.buffer[..at + mark.len()]);
                        self.buffer.drain(..at + mark.len());
                        self.skips_space = true;
                        self.is_thought_space = true;
                        self.state = State::Thought(close);
                    }
                    Mark::ThoughtEnd => {
                        sink.thought_mark(&self.buffer[..at + mark.len()]);
                        self.buffer.drain(..at + mark.len());
                        self.skips_space = true;
                        self.is_thought_space = true;
                    }
                    Mark::Hidden => {
                        // White space before the first word belongs to the mark.
                        self.say(if is_fresh { 0 } else { at }, sink);
                        let at = if is_fresh { at } else { 0 };
                        self.buffer.drain(..at + mark.len());
                    }
                    Mark::Call => {
                        self.say(before, sink);
                        self.state = State::Opening {
                            lead: at - before + mark.len(),
                            in_list: false,
                        };
                    }
                }
                Step::Done
            }
        }
    }

    /// The first bytes of the buffer are content.
    fn say(&mut self, length: usize, sink: &mut Sink) {
        let own = std::mem::take(&mut self.borrowed).min(length);
        let text = &self.buffer[own..length];
        if !text.trim().is_empty() {
            self.is_fresh = false;
        }
        sink.content(text);
        self.buffer.drain(..length);
    }

    fn thought(&mut self, close: &'static str, is_end: bool, sink: &mut Sink) -> Step {
        match find(&self.buffer, [close].into_iter(), is_end) {
            Found::Mark { at, .. } => {
                let text = self.buffer[..at].trim_end().len();
                sink.thought(&self.buffer[..text]);
                sink.thought_mark(&self.buffer[text..at + close.len()]);
                self.buffer.drain(..at + close.len());
                self.skips_space = true;
                self.is_thought_space = true;
                self.is_fresh = true;
                self.go(State::Text)
            }
            Found::None { until } => {
                let until = if is_end {
                    until
                } else {
                    self.buffer[..until].trim_end().len()
                };
                if until == 0 {
                    return self.wait(State::Thought(close));
                }
                sink.thought(&self.buffer[..until]);
                self.buffer.drain(..until);
                self.go(State::Thought(close))
            }
        }
    }

    /// What seemed to open a call opens none.
    fn no_call(&mut self, lead: usize, sink: &mut Sink) -> Step {
        self.is_no_bare_call = true;
        self.say(lead, sink);
        self.is_fresh = false;
        self.go(State::Text)
    }

    fn opening(&mut self, lead: usize, in_list: bool, is_end: bool, sink: &mut Sink) -> Step {
        let all = self.buffer.len() - lead;
        let held = self.buffer.floor_char_boundary(lead + all.min(MOST_HELD));
        let is_too_long = all >= MOST_HELD;
        let mark = self.buffer[..lead].trim_start();
        let rest = &self.buffer[lead..held];
        let is_last = is_end && !is_too_long;
        let opened = match &self.format.calls {
            Calls::Json(calls) => open_json(calls, rest, in_list),
            Calls::Named(calls) => open_named(calls, self.format.ids, mark, rest, is_last),
            Calls::Tagged(calls) => open_tagged(calls, mark, rest, is_last),
            Calls::Literal(calls) => open_literal(calls, rest, in_list, is_last),
            Calls::None | Calls::Channels(_) => Err(Stop::Broken),
        };
        if opened.is_ok() {
            self.borrowed = 0;
        }
        match opened {
            Err(Stop::More) if !is_end && !is_too_long => {
                self.wait(State::Opening { lead, in_list })
            }
            Err(_) => self.no_call(lead, sink),
            Ok(Opened::Text { length }) => {
                self.buffer.drain(..lead + length);
                self.is_fresh = true;
                self.go(State::Text)
            }
            Ok(Opened::Whole {
                name,
                id,
                arguments,
                length,
                in_list,
            }) => {
                self.buffer.drain(..lead + length);
                sink.start(&name, id);
                sink.arguments(&arguments);
                sink.end();
                self.go(State::Behind { in_list })
            }
            Ok(Opened::Call {
                name,
                id,
                length,
                arguments,
            }) => {
                self.buffer.drain(..lead + length);
                sink.start(&name, id);
                let state = match arguments {
                    Arguments::Json { depth, in_list } => State::Json {
                        scanner: Scanner::default(),
                        depth,
                        in_list,
                    },
                    Arguments::Tags => State::Between {
                        name,
                        is_first: true,
                    },
                    Arguments::Literals { in_list } => {
                        let Calls::Literal(calls) = &self.format.calls else {
                            return self.go(State::Text);
                        };
                        sink.arguments("{");
                        State::Literal(Literals::new(calls.style), in_list)
                    }
                };
                self.go(state)
            }
        }
    }

    fn json(&mut self, mut scanner: Scanner, depth: usize, in_list: bool, sink: &mut Sink) -> Step {
        let scanned = scanner.scan(&self.buffer);
        let end = match scanned {
            Scanned::All => self.buffer.len(),
            Scanned::End(at) | Scanned::Wrong(at) => at,
        };
        sink.arguments(&self.buffer[..end]);
        self.buffer.drain(..end);
        match scanned {
            Scanned::All => self.wait(State::Json {
                scanner,
                depth,
                in_list,
            }),
            Scanned::End(_) => {
                sink.end();
                self.go(State::Tail { depth, in_list })
            }
            Scanned::Wrong(_) => {
                sink.end();
                self.is_fresh = false;
                self.go(State::Text)
            }
        }
    }

    fn tail(&mut self, depth: usize, in_list: bool, is_end: bool) -> Step {
        let held = self.buffer.floor_char_boundary(MOST_HELD);
        match tail(&self.buffer[..held], depth) {
            Ok(end) => {
                self.buffer.drain(..end);
                self.go(State::Behind { in_list })
            }
            Err(Stop::More) if !is_end && self.buffer.len() < MOST_HELD => {
                self.wait(State::Tail { depth, in_list })
            }
            Err(_) => {
                // What is missing is not missed; what is there instead is text.
                self.go(State::Behind { in_list })
            }
        }
    }

    fn between(&mut self, name: String, is_first: bool, is_end: bool, sink: &mut Sink) -> Step {
        let Calls::Tagged(calls) = &self.format.calls else {
            return self.go(State::Text);
        };
        let trimmed = self.buffer.trim_start();
        let space = self.buffer.len() - trimmed.len();
        // What comes next: another argument, the end of the call, or of all of them.
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
                    // One too many.
                    let length = space + end.len();
                    self.buffer.drain(..length);
                    return self.go(State::Between { name, is_first });
                }
                Begins::Yes => {
                    let is_own = i == 0;
                    let length = space + if is_own { end.len() } else { 0 };
                    self.buffer.drain(..length);
                    sink.arguments(if is_first { "{}" } else { "}" });
                    sink.end();
                    return self.go(State::Behind { in_list: false });
                }
            }
        }
        let held = trimmed.floor_char_boundary(MOST_HELD);
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
                    is_begun: false,
                    seen: 0,
                }))
            }
            Err(Stop::More) if !is_end && trimmed.len() < MOST_HELD => {
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

    fn value(&mut self, mut value: TagValue, is_end: bool, sink: &mut Sink) -> Step {
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
                let text = if value.is_begun {
                    text
                } else {
                    text.strip_prefix('\n').unwrap_or(text)
                };
                let text = text.strip_suffix('\n').unwrap_or(text);
                if streams {
                    end_text(text, &mut value, sink);
                } else {
                    sink.arguments(&whole_value(text, value.kind, calls.has_cdata));
                }
                self.buffer.drain(..at + value.close.len());
                self.go(State::Between {
                    name: value.tool,
                    is_first: false,
                })
            }
            Found::None { until } if streams => {
                // A newline at both ends belongs to the marks.
                let mut text = &self.buffer[..until];
                if !is_end {
                    text = text.strip_suffix('\n').unwrap_or(text);
                }
                let end = text.len();
                if end == 0 {
                    return self.wait(State::Value(value));
                }
                let begin = if value.is_begun {
                    0
                } else {
                    usize::from(text.starts_with('\n'))
                };
                if !value.is_begun {
                    sink.arguments("\"");
                    value.is_begun = true;
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
                sink.arguments(&whole_value(
                    text.trim_matches('\n'),
                    value.kind,
                    calls.has_cdata,
                ));
                self.go(State::Text)
            }
            Found::None { until } => {
                value.seen += until;
                self.wait(State::Value(value))
            }
        }
    }

    fn literal(
        &mut self,
        mut literals: Literals,
        in_list: bool,
        is_end: bool,
        sink: &mut Sink,
    ) -> Step {
        let mut json = String::new();
        let (length, turned) = literals.turn(&self.buffer, is_end, &mut json);
        sink.arguments(&json);
        self.buffer.drain(..length);
        match turned {
            Turned::More if is_end => {
                // The rest of a word that has no end.
                let rest = self.buffer.len();
                let mut json = String::new();
                push_escaped(&mut json, &self.buffer);
                sink.arguments(&json);
                self.buffer.drain(..rest);
                self.go(State::Text)
            }
            Turned::More => self.wait(State::Literal(literals, in_list)),
            Turned::End => {
                sink.end();
                self.go(State::Behind { in_list })
            }
            Turned::Broken => {
                sink.end();
                self.is_fresh = false;
                self.go(State::Text)
            }
        }
    }

    /// Behind a call: another one, the end of a list, closing marks.
    fn behind(&mut self, in_list: bool, is_end: bool) -> Step {
        self.is_fresh = true;
        let trimmed = self.buffer.trim_start();
        let space = self.buffer.len() - trimmed.len();
        if trimmed.is_empty() {
            self.buffer.drain(..space);
            return if is_end {
                self.go(State::Text)
            } else {
                self.wait(State::Behind { in_list })
            };
        }
        let mut opens: Vec<&str> = Vec::new();
        let mut closes: Vec<&str> = Vec::new();
        match &self.format.calls {
            Calls::Json(calls) => {
                closes.extend(calls.close);
                if !calls.separator.is_empty() {
                    opens.push(calls.separator);
                }
                if in_list {
                    opens.push(",");
                    closes.push("]");
                } else {
                    // Objects one behind the other.
                    opens.push("{");
                }
            }
            Calls::Named(calls) => {
                opens.push(calls.open);
                closes.extend(calls.close);
                closes.extend(calls.section.map(|section| section.1));
            }
            Calls::Tagged(calls) => {
                opens.push(calls.open);
                closes.push(calls.close);
                closes.extend(calls.section.map(|section| section.1));
            }
            Calls::Literal(calls) => {
                closes.push(calls.close);
                if in_list {
                    opens.push(",");
                    closes.push("]");
                }
            }
            Calls::None | Calls::Channels(_) => {}
        }
        closes.retain(|mark| !mark.is_empty());
        opens.retain(|mark| !mark.is_empty());
        let mut may_be = false;
        let mut longest: Option<(&str, bool)> = None;
        for (mark, is_open) in closes
            .iter()
            .map(|mark| (*mark, false))
            .chain(opens.iter().map(|mark| (*mark, true)))
        {
            match begins(trimmed, mark.trim_start(), is_end) {
                Begins::Yes
                    if longest.is_none_or(|longest| longest.0.len() < mark.trim_start().len()) =>
                {
                    longest = Some((mark.trim_start(), is_open));
                }
                Begins::Perhaps => may_be = true,
                _ => {}
            }
        }
        if may_be {
            return self.wait(State::Behind { in_list });
        }
        match longest {
            Some(("{", true)) => self.go(State::Opening {
                lead: space,
                in_list,
            }),
            Some((mark, true)) => self.go(State::Opening {
                lead: space + mark.len(),
                in_list,
            }),
            Some((mark, false)) => {
                let is_list_end = mark == "]" && in_list;
                self.buffer.drain(..space + mark.len());
                self.go(State::Behind {
                    in_list: in_list && !is_list_end,
                })
            }
            None => {
                self.buffer.drain(..space);
                self.go(State::Text)
            }
        }
    }
}

/// The rest of a text that was told of in part.
fn end_text(text: &str, value: &mut TagValue, sink: &mut Sink) {
    let mut json = String::new();
    if !value.is_begun {
        json.push('"');
    }
    push_escaped(&mut json, text);
    json.push('"');
    sink.arguments(&json);
}

/// A value as JSON: as it is, if it is JSON and may be; otherwise as a text.
fn whole_value(text: &str, kind: ArgumentKind, has_cdata: bool) -> String {
    let inner = text
        .trim()
        .strip_prefix("<![CDATA[")
        .and_then(|text| text.strip_suffix("]]>"));
    let text = match inner {
        Some(inner) if has_cdata => inner,
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
    }
    Value::from(text).to_string()
}

/// What an opening mark opened.
enum Opened {
    Call {
        name: String,
        id: Option<String>,
        length: usize,
        arguments: Arguments,
    },
    Whole {
        name: String,
        id: Option<String>,
        arguments: String,
        length: usize,
        in_list: bool,
    },
    /// Text, behind a header.
    Text { length: usize },
}

enum Arguments {
    Json { depth: usize, in_list: bool },
    Tags,
    Literals { in_list: bool },
}

/// Bytes of white space.
fn space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// Behind `mark`, if the text begins with it.
fn behind<'a>(text: &'a str, mark: &str, is_end: bool) -> Result<&'a str, Stop> {
    match begins(text, mark, is_end) {
        Begins::Yes => Ok(&text[mark.len()..]),
        Begins::No => Err(Stop::Broken),
        Begins::Perhaps => Err(Stop::More),
    }
}

/// A name and what follows the mark that ends it.
fn name_before<'a>(text: &'a str, end: &str, is_end: bool) -> Result<(&'a str, &'a str), Stop> {
    match find(text, [end].into_iter(), is_end) {
        Found::Mark { at, .. } if is_name(text[..at].trim()) => {
            Ok((text[..at].trim(), &text[at + end.len()..]))
        }
        Found::None { until } if until <= LONGEST_NAME && !is_end => {
            if is_name(text[..until].trim()) || text[..until].trim().is_empty() {
                Err(Stop::More)
            } else {
                Err(Stop::Broken)
            }
        }
        _ => Err(Stop::Broken),
    }
}

/// Whether it may be the name of a tool.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= LONGEST_NAME
        && name
            .chars()
            .all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

fn open_json(calls: &JsonCalls, text: &str, in_list: bool) -> Result<Opened, Stop> {
    let mut at = space(text);
    let mut in_list = in_list;
    if !in_list && text[at..].starts_with('[') {
        in_list = true;
        at += 1;
        at += space(&text[at..]);
    }
    if text[at..].is_empty() {
        return Err(Stop::More);
    }
    match header(&text[at..], &calls.keys) {
        Header::More => Err(Stop::More),
        Header::Broken => Err(Stop::Broken),
        Header::Arguments {
            name,
            id,
            at: begin,
            depth,
        } => Ok(Opened::Call {
            name,
            id,
            length: at + begin,
            arguments: Arguments::Json { depth, in_list },
        }),
        Header::Whole {
            name,
            id,
            arguments,
            end,
        } => Ok(Opened::Whole {
            name,
            id,
            arguments,
            length: at + end,
            in_list,
        }),
    }
}

fn open_named(
    calls: &NamedCalls,
    ids: Ids,
    mark: &str,
    text: &str,
    is_end: bool,
) -> Result<Opened, Stop> {
    let mut rest = text;
    if calls.section.is_some_and(|section| mark == section.0) {
        rest = behind(rest.trim_start(), calls.open, is_end)?;
    }
    let mut id = None;
    if let Some(end) = calls.id_end {
        let (text, behind) = name_before(rest, end, is_end)?;
        id = Some(text.trim().to_owned());
        rest = behind;
    }
    let (name, behind_name) = match calls.id_open {
        None => name_before(rest, calls.middle, is_end)?,
        Some(id_open) => match find(rest, [id_open, calls.middle].into_iter(), is_end) {
            Found::None { until } if !is_end && is_name(rest[..until].trim()) => {
                return Err(Stop::More);
            }
            Found::Mark { at, number: 0 } => {
                let (text, behind) =
                    name_before(&rest[at + id_open.len()..], calls.middle, is_end)?;
                id = Some(text.trim().to_owned());
                (&rest[..at], behind)
            }
            _ => name_before(rest, calls.middle, is_end)?,
        },
    };
    let name = name.trim();
    if !is_name(name) {
        return Err(Stop::Broken);
    }
    if calls.text_name == Some(name) {
        return Ok(Opened::Text {
            length: text.len() - behind_name.len(),
        });
    }
    let mut arguments = behind_name.trim_start();
    if !calls.fence.is_empty() {
        match begins(arguments, calls.fence.trim(), is_end) {
            Begins::Yes => arguments = arguments[calls.fence.trim().len()..].trim_start(),
            Begins::Perhaps => return Err(Stop::More),
            Begins::No => {}
        }
    }
    match arguments.as_bytes().first() {
        None => return Err(Stop::More),
        Some(b'{') => {}
        Some(_) => return Err(Stop::Broken),
    }
    let mut name = name.to_owned();
    if ids == Ids::Text {
        id = Some(name.clone());
        let plain = name.strip_prefix("functions.").unwrap_or(&name);
        let plain = plain.rsplit_once(':').map_or(plain, |(name, _)| name);
        name = plain.to_owned();
    }
    let length = text.len() - arguments.len();
    Ok(Opened::Call {
        name,
        id,
        length,
        arguments: Arguments::Json {
            depth: 0,
            in_list: false,
        },
    })
}

fn open_tagged(calls: &TaggedCalls, mark: &str, text: &str, is_end: bool) -> Result<Opened, Stop> {
    let mut rest = text;
    if calls.section.is_some_and(|section| mark == section.0) && !calls.open.is_empty() {
        rest = behind(rest.trim_start(), calls.open, is_end)?;
    }
    let (name, mut rest) = if calls.name_end.is_empty() {
        // Up to the first argument or to the end.
        let ends = [
            calls.key_open,
            calls.section.map_or("", |section| section.1),
            "\n",
        ];
        let leading = space(rest);
        match find(&rest[leading..], ends.into_iter(), is_end) {
            Found::Mark { at, .. } => (&rest[leading..leading + at], &rest[leading + at..]),
            Found::None { until }
                if is_name(rest[leading..leading + until].trim()) || until == 0 =>
            {
                return Err(Stop::More);
            }
            Found::None { .. } => return Err(Stop::Broken),
        }
    } else {
        name_before(rest, calls.name_end, is_end)?
    };
    let name = name.trim();
    if !is_name(name) {
        return Err(Stop::Broken);
    }
    if !calls.head_end.is_empty() {
        rest = name_head(rest, calls.head_end, is_end)?.1;
    }
    if calls.name_end.is_empty() {
        // A name alone is not enough: that text may stand anywhere.
        let next = rest.trim_start();
        let ends = [
            calls.key_open,
            calls.section.map_or("", |section| section.1),
        ];
        let found = ends.map(|end| begins(next, end, is_end));
        if !found.contains(&Begins::Yes) {
            return Err(if found.contains(&Begins::Perhaps) {
                Stop::More
            } else {
                Stop::Broken
            });
        }
    }
    let length = text.len() - rest.len();
    Ok(Opened::Call {
        name: name.to_owned(),
        id: None,
        length,
        arguments: Arguments::Tags,
    })
}

/// What stands between a name and the mark that ends its head, and what follows. Only words that are known may stand there.
fn name_head<'a>(text: &'a str, end: &str, is_end: bool) -> Result<(&'a str, &'a str), Stop> {
    const WORDS: [&str; 9] = [
        "string=\"true\"",
        "string=\"false\"",
        "type=\"string\"",
        "type=\"number\"",
        "type=\"integer\"",
        "type=\"boolean\"",
        "type=\"null\"",
        "type=\"object\"",
        "type=\"array\"",
    ];
    let is_known = |word: &str| {
        let index = word
            .strip_prefix("index=\"")
            .and_then(|word| word.strip_suffix('"'));
        WORDS.contains(&word)
            || index.is_some_and(|index| index.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match find(text, [end].into_iter(), is_end) {
        Found::Mark { at, .. }
            if at <= LONGEST_NAME && text[..at].split_whitespace().all(is_known) =>
        {
            Ok((&text[..at], &text[at + end.len()..]))
        }
        Found::None { until } if until <= LONGEST_NAME && !is_end => Err(Stop::More),
        _ => Err(Stop::Broken),
    }
}

/// The name of an argument, what its head says, and where its value begins.
fn key_head(
    calls: &TaggedCalls,
    text: &str,
    is_end: bool,
) -> Result<(String, String, usize), Stop> {
    let rest = behind(text, calls.key_open, is_end)?;
    let (key, mut rest) = match find(rest, [calls.key_end].into_iter(), is_end) {
        Found::Mark { at, .. } if at <= LONGEST_NAME => {
            (rest[..at].trim(), &rest[at + calls.key_end.len()..])
        }
        Found::None { until } if until <= LONGEST_NAME && !is_end => return Err(Stop::More),
        _ => return Err(Stop::Broken),
    };
    if key.is_empty() || key.contains(['\n', '<', '>']) || key.starts_with('/') {
        return Err(Stop::Broken);
    }
    let mut head = "";
    if !calls.key_head_end.is_empty() {
        (head, rest) = name_head(rest, calls.key_head_end, is_end)?;
    }
    if !calls.value_open.is_empty() {
        rest = behind(rest.trim_start(), calls.value_open, is_end)?;
    }
    Ok((key.to_owned(), head.to_owned(), text.len() - rest.len()))
}

fn open_literal(
    calls: &LiteralCalls,
    text: &str,
    in_list: bool,
    is_end: bool,
) -> Result<Opened, Stop> {
    let mut rest = text.trim_start();
    let mut in_list = in_list;
    if calls.is_list && !in_list && rest.starts_with('[') {
        in_list = true;
        rest = rest[1..].trim_start();
    }
    if rest.is_empty() {
        return Err(Stop::More);
    }
    let rest = behind(rest, calls.name_open, is_end)?;
    let bracket = if calls.style == super::literal::Style::Gemma {
        "{"
    } else {
        "("
    };
    let (name, rest) = name_before(rest, bracket, is_end)?;
    if !is_name(name.trim()) {
        return Err(Stop::Broken);
    }
    let length = text.len() - rest.len();
    Ok(Opened::Call {
        name: name.trim().to_owned(),
        id: None,
        length,
        arguments: Arguments::Literals { in_list },
    })
}
