//! State machine for answers of messages with headers: the "harmony" format of gpt-oss.
//!
//! `<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary
//! to=functions.f <|constrain|>json<|message|>{}<|call|>`

use super::Sink;
use super::format::Channels;
use super::head::is_name;
use super::machine::Machine;
use super::marks::{Found, find};

/// Longest header.
const MAX_HEADER_LEN: usize = 512;

#[derive(Clone, Debug)]
pub(super) struct ChannelMachine {
    channels: Channels,
    has_tools: bool,
    buffer: String,
    state: State,
    /// True if the text of a message begins here, perhaps after a space.
    skips_space: bool,
    /// Parser of the content, which may contain calls.
    inner: Option<Machine>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between messages. Right after the prompt, a header may continue without a mark.
    Outside {
        may_go_on: bool,
    },
    Body(Body),
}

/// Meaning of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HeaderMeaning {
    Content,
    Thought,
    Call(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Content,
    Thought,
    Arguments,
    /// Arguments that the inner format reads.
    Wrapped,
}

impl ChannelMachine {
    pub(super) fn new(channels: Channels, has_tools: bool, prompt: &str) -> Self {
        let mut machine = Self {
            channels,
            has_tools,
            buffer: String::new(),
            state: State::Outside { may_go_on: true },
            skips_space: channels.is_spaced && prompt.ends_with(channels.message),
            inner: None,
        };
        // The prompt may end within a header or a message.
        machine.renew();
        let last = |mark: &str| prompt.rfind(mark);
        let start = channels.starts.iter().filter_map(|mark| last(mark)).max();
        if let Some(message) = last(channels.message) {
            let ended = channels.ends.iter().filter_map(|mark| last(mark)).max();
            if ended.is_none_or(|ended| ended < message) {
                let header = &prompt[start.filter(|start| *start < message).unwrap_or(0)..message];
                let is_thought = channels.thoughts.iter().any(|word| header.contains(word));
                machine.state = State::Body(if is_thought {
                    Body::Thought
                } else {
                    Body::Content
                });
            }
        } else if let Some(channel) =
            start.filter(|&start| prompt[start..].starts_with("<|channel|>"))
        {
            machine.buffer.push_str(&prompt[channel..]);
        }
        machine
    }

    /// Returns the header of content for the user, unless it has been read.
    pub(super) fn before_content(&self) -> Option<&'static str> {
        (self.state != State::Body(Body::Content)).then_some(self.channels.to_user)
    }

    pub(super) fn reasoning_end(&self) -> Option<&'static str> {
        let end = self.channels.ends.first().copied();
        end.filter(|_| self.state == State::Body(Body::Thought))
    }

    /// Starts another message.
    fn renew(&mut self) {
        let inner = self.channels.inner;
        self.inner = inner.map(|format| Machine::new(format, self.has_tools, ""));
    }

    /// Returns the text that may be part of a mark or call.
    pub(super) fn held(&self) -> &str {
        match &self.inner {
            Some(inner) if self.buffer.is_empty() => inner.held(),
            _ => &self.buffer,
        }
    }

    /// Notes that a limit cut the answer, so that its end completes no call.
    pub(super) fn cut(&mut self) {
        if self.state == State::Body(Body::Wrapped) {
            self.state = State::Body(Body::Content);
        }
    }

    pub(super) fn run(&mut self, text: &str, is_end: bool, sink: &mut Sink) {
        self.buffer.push_str(text);
        while self.step(is_end, sink) {}
        if is_end {
            self.end_inner(sink);
            sink.end();
        }
    }

    /// Ends the text for the parser of the content, and a call that its header wraps.
    fn end_inner(&mut self, sink: &mut Sink) {
        let Some(inner) = &mut self.inner else {
            return;
        };
        if self.state == State::Body(Body::Wrapped)
            && let Some([.., close]) = self.channels.wrapper
        {
            inner.run(close, false, sink);
        }
        inner.run("", true, sink);
    }

    fn step(&mut self, is_end: bool, sink: &mut Sink) -> bool {
        if self.buffer.is_empty() {
            return false;
        }
        match self.state {
            State::Outside { may_go_on } => self.outside(may_go_on, is_end, sink),
            State::Body(body) => self.body(body, is_end, sink),
        }
    }

    fn outside(&mut self, may_go_on: bool, is_end: bool, sink: &mut Sink) -> bool {
        let starts = self.channels.starts;
        if may_go_on {
            // ` to=functions.f<|channel|>commentary json<|message|>`
            let begin = self.buffer.trim_start();
            if !is_end && begin.len() < 3 && "to=".starts_with(begin) {
                return false;
            }
            if begin.starts_with("to=") {
                return self.header(0, is_end, sink);
            }
        }
        match find(
            &self.buffer,
            starts
                .iter()
                .copied()
                .chain(self.channels.ends.iter().copied()),
            is_end,
        ) {
            Found::Mark { at: 0, number } if number >= starts.len() => {
                self.buffer
                    .drain(..self.channels.ends[number - starts.len()].len());
                true
            }
            Found::Mark { at: 0, number } => self.header(starts[number].len(), is_end, sink),
            Found::Mark { at, .. } => {
                self.between(at, true, sink);
                true
            }
            Found::None { until } => self.between(until, is_end, sink),
        }
    }

    /// Handles text between messages, which is malformed. Drops white space before a mark and at
    /// the end.
    fn between(&mut self, length: usize, is_all: bool, sink: &mut Sink) -> bool {
        let text = self.buffer[..length].trim_end().len();
        if text > 0 {
            sink.content(&self.buffer[..text]);
            self.state = State::Outside { may_go_on: false };
            self.buffer.drain(..text);
        } else if is_all {
            self.buffer.drain(..length);
        }
        text > 0 || is_all && length > 0
    }

    /// Reads a header whose first mark has `mark` bytes.
    fn header(&mut self, mark: usize, is_end: bool, sink: &mut Sink) -> bool {
        let held = self.buffer.floor_char_boundary(MAX_HEADER_LEN);
        let rest = &self.buffer[mark..held];
        // An end mark or a second start mark shows that this is not a header.
        let marks = [self.channels.message]
            .into_iter()
            .chain(self.channels.ends.iter().copied());
        let is_last = is_end || held < self.buffer.len();
        match find(rest, marks, is_last) {
            Found::Mark { at, number: 0 }
                if let Some(meaning) = self.meaning(&rest[..at], sink) =>
            {
                self.buffer.drain(..mark + at + self.channels.message.len());
                let body = match meaning {
                    HeaderMeaning::Call(name) => match (&mut self.inner, self.channels.wrapper) {
                        (Some(inner), Some([before, after, _])) => {
                            inner.run(&[before, &name, after].concat(), false, sink);
                            Body::Wrapped
                        }
                        _ => {
                            sink.start(&name, None);
                            Body::Arguments
                        }
                    },
                    HeaderMeaning::Thought => Body::Thought,
                    HeaderMeaning::Content => Body::Content,
                };
                self.state = State::Body(body);
                self.skips_space = self.channels.is_spaced;
                true
            }
            Found::None { .. } if !is_last && self.buffer.len() < MAX_HEADER_LEN => false,
            _ => {
                let length = mark.max(self.buffer.chars().next().map_or(0, char::len_utf8));
                sink.content(&self.buffer[..length]);
                self.buffer.drain(..length);
                self.state = State::Outside { may_go_on: false };
                true
            }
        }
    }

    /// Returns the meaning of a header, or `None` if some of it is unknown.
    fn meaning(&self, header: &str, sink: &Sink) -> Option<HeaderMeaning> {
        let header = self
            .channels
            .marks
            .iter()
            .fold(header.to_owned(), |header, mark| header.replace(mark, " "));
        let mut meaning = HeaderMeaning::Content;
        for word in header.split_whitespace() {
            if self.channels.thoughts.contains(&word) {
                if meaning == HeaderMeaning::Content {
                    meaning = HeaderMeaning::Thought;
                }
            } else if let Some(recipient) = word
                .strip_prefix("to=")
                .filter(|recipient| !self.channels.words.contains(recipient))
            {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                if !self.has_tools || !is_name(name) || matches!(meaning, HeaderMeaning::Call(_)) {
                    return None;
                }
                let is_wrapped = self.channels.wrapper.is_some();
                if self.channels.inner.is_none() || is_wrapped {
                    meaning = HeaderMeaning::Call(name.to_owned());
                } else if !sink.arguments.contains_key(name) {
                    return None;
                }
            } else if !self
                .channels
                .words
                .contains(&word.strip_prefix("to=").unwrap_or(word))
            {
                return None;
            }
        }
        Some(meaning)
    }

    fn body(&mut self, body: Body, is_end: bool, sink: &mut Sink) -> bool {
        if std::mem::take(&mut self.skips_space) && self.buffer.starts_with(' ') {
            self.buffer.remove(0);
            return true;
        }
        // A message without an end mark ends where the next one starts.
        let ends = self.channels.ends;
        let marks = ends.iter().copied().chain([self.channels.starts[0]]);
        match find(&self.buffer, marks, is_end) {
            Found::Mark { at, number } => {
                self.tell(body, at, sink);
                self.end_inner(sink);
                self.renew();
                sink.end();
                if let Some(end) = ends.get(number) {
                    self.buffer.drain(..end.len());
                }
                self.state = State::Outside { may_go_on: false };
                true
            }
            Found::None { until } => {
                self.tell(body, until, sink);
                until > 0
            }
        }
    }

    fn tell(&mut self, body: Body, length: usize, sink: &mut Sink) {
        let text = &self.buffer[..length];
        match body {
            Body::Content if self.channels.wrapper.is_some() => sink.content(text),
            Body::Content | Body::Wrapped => match &mut self.inner {
                Some(inner) => inner.run(text, false, sink),
                None => sink.content(text),
            },
            Body::Thought => sink.thought(text),
            Body::Arguments => sink.arguments(text),
        }
        self.buffer.drain(..length);
    }
}
