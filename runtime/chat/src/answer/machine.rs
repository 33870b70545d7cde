//! State machine for answers with marks.

mod tagged;

use super::format::{Calls, Format, JsonCalls};
use super::head::{Arguments, Opened, open_json, open_literal, open_named, open_tagged, space};
use super::json::{Scanned, Scanner, Stop, tail};
use super::literal::{ConversionProgress, Literals, push_escaped};
use super::marks::{Begins, Found, begins, find};
use super::{ArgumentKind, Sink};

/// Maximum bytes to hold back while undecided whether they start a call.
const MAX_HELD: usize = 64 << 10;

#[derive(Clone, Debug)]
pub(super) struct Machine {
    format: &'static Format,
    has_tools: bool,
    /// Text that has not been reported yet.
    buffer: String,
    state: State,
    /// True if there was no content since the start or since the last reasoning or call.
    is_fresh: bool,
    /// True if the next white space belongs to the mark before it.
    skips_space: bool,
    /// True if that mark was one of reasoning.
    is_thought_space: bool,
    /// Number of bytes at the start of the buffer that belong to the prompt.
    borrowed: usize,
    /// True if an object at the start turned out not to be a call.
    is_no_bare_call: bool,
}

#[derive(Clone, Debug)]
enum State {
    Text,
    /// In reasoning, with its closing mark.
    Thought(&'static str),
    /// At a mark that may open a call. `lead` is its length in the buffer, including white space
    /// before it.
    Opening {
        lead: usize,
        in_list: bool,
    },
    Json {
        scanner: Scanner,
        depth: usize,
        in_list: bool,
    },
    /// After arguments in JSON.
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
    /// After a call.
    Behind {
        in_list: bool,
    },
}

#[derive(Clone, Debug)]
struct TagValue {
    tool: String,
    kind: ArgumentKind,
    close: String,
    /// True if part of it has been reported.
    has_started: bool,
    /// Number of bytes of the buffer that are known not to contain the end.
    seen: usize,
}

/// A mark in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Thought(&'static str),
    ThoughtEnd,
    Hidden,
    Call,
}

/// Result of a step.
enum Step {
    /// Progress; there may be more to do.
    Done,
    /// No progress until more text arrives.
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

    /// Returns the start of trailing white space, which may belong to a mark that follows.
    fn before_space(&self, until: usize, is_end: bool) -> usize {
        if is_end {
            until
        } else {
            self.buffer[..until].trim_end().len()
        }
    }

    /// Returns the text that may be part of a mark or call.
    pub(super) fn held(&self) -> &str {
        &self.buffer
    }

    /// Returns the closing mark of the current reasoning.
    pub(super) fn thought_end(&self) -> Option<&'static str> {
        match self.state {
            State::Thought(close) => Some(close),
            _ => None,
        }
    }

    /// Sets the state at the end of the prompt, which may have started reasoning, a call or
    /// content.
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
        // A mark of a call at the end is parsed together with the text that follows.
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

    /// Stays in `state` until more text arrives.
    fn wait(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::Done
    }

    /// Returns the marks that may open a call.
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
        let is_bare = matches!(
            self.format.calls,
            Calls::Json(JsonCalls { is_bare: true, .. })
        );
        let may_be_bare = is_bare && self.has_tools && self.is_fresh && !self.is_no_bare_call;
        if may_be_bare && trimmed.starts_with(['{', '[']) {
            let lead = self.buffer.len() - trimmed.len();
            return self.go(State::Opening {
                lead,
                in_list: false,
            });
        }
        match find(&self.buffer, marks.iter().map(|mark| mark.0), is_end) {
            Found::None { until } => {
                let until = self.before_space(until, is_end);
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

    /// Reports the first bytes of the buffer as content.
    fn say(&mut self, length: usize, sink: &mut Sink) {
        let own = self.borrowed.min(length);
        self.borrowed -= own;
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
                let until = self.before_space(until, is_end);
                if until == 0 {
                    return self.wait(State::Thought(close));
                }
                sink.thought(&self.buffer[..until]);
                self.buffer.drain(..until);
                self.go(State::Thought(close))
            }
        }
    }

    /// Handles a mark that turned out not to open a call.
    fn no_call(&mut self, lead: usize, sink: &mut Sink) -> Step {
        self.is_no_bare_call = true;
        self.say(lead, sink);
        self.is_fresh = false;
        self.go(State::Text)
    }

    fn opening(&mut self, lead: usize, in_list: bool, is_end: bool, sink: &mut Sink) -> Step {
        let all = self.buffer.len() - lead;
        let held = self.buffer.floor_char_boundary(lead + all.min(MAX_HELD));
        let is_too_long = all >= MAX_HELD;
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
        let held = self.buffer.floor_char_boundary(MAX_HELD);
        match tail(&self.buffer[..held], depth) {
            Ok(end) => {
                self.buffer.drain(..end);
                self.go(State::Behind { in_list })
            }
            Err(Stop::More) if !is_end && self.buffer.len() < MAX_HELD => {
                self.wait(State::Tail { depth, in_list })
            }
            Err(_) => {
                // A missing closing mark is ignored; other text in its place is content.
                self.go(State::Behind { in_list })
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
            ConversionProgress::More if is_end => {
                // The rest of an unfinished word.
                let rest = self.buffer.len();
                let mut json = String::new();
                push_escaped(&mut json, &self.buffer);
                sink.arguments(&json);
                self.buffer.drain(..rest);
                self.go(State::Text)
            }
            ConversionProgress::More => self.wait(State::Literal(literals, in_list)),
            ConversionProgress::End => {
                sink.end();
                self.go(State::Behind { in_list })
            }
            ConversionProgress::Broken => {
                sink.end();
                self.is_fresh = false;
                self.go(State::Text)
            }
        }
    }

    /// After a call: reads another call, the end of a list, or closing marks.
    fn behind(&mut self, in_list: bool, is_end: bool) -> Step {
        self.is_fresh = true;
        // White space belongs to the call.
        self.buffer.drain(..space(&self.buffer));
        let trimmed = self.buffer.as_str();
        if trimmed.is_empty() {
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
                    // Consecutive objects.
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
            Some(("{", true)) => self.go(State::Opening { lead: 0, in_list }),
            Some((mark, true)) => self.go(State::Opening {
                lead: mark.len(),
                in_list,
            }),
            Some((mark, false)) => {
                let is_list_end = mark == "]" && in_list;
                self.buffer.drain(..mark.len());
                self.go(State::Behind {
                    in_list: in_list && !is_list_end,
                })
            }
            None => self.go(State::Text),
        }
    }
}
