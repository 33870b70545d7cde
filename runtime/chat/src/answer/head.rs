//! Reads the head of a call after an opening mark, once enough of it has arrived.

use super::format::{Ids, JsonCalls, LiteralCalls, NamedCalls, TaggedCalls};
use super::json::{Header, Stop, header};
use super::literal::Style;
use super::marks::{Begins, Found, begins, find};

/// Longest name of a tool or an argument.
const MAX_NAME_LEN: usize = 256;

/// Result of an opening mark.
pub(super) enum Opened {
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
    /// Content after a header.
    Text { length: usize },
}

pub(super) enum Arguments {
    Json { depth: usize, in_list: bool },
    Tags,
    Literals { in_list: bool },
}

/// Returns the number of bytes of leading white space.
pub(super) fn space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// Returns the text after `mark`, if the text starts with it.
fn behind<'a>(text: &'a str, mark: &str, is_end: bool) -> Result<&'a str, Stop> {
    match begins(text, mark, is_end) {
        Begins::Yes => Ok(&text[mark.len()..]),
        Begins::No => Err(Stop::Broken),
        Begins::Perhaps => Err(Stop::More),
    }
}

/// Returns a name and the text after the mark that ends it.
fn name_before<'a>(text: &'a str, end: &str, is_end: bool) -> Result<(&'a str, &'a str), Stop> {
    match find(text, [end].into_iter(), is_end) {
        Found::Mark { at, .. } if is_name(text[..at].trim()) => {
            Ok((text[..at].trim(), &text[at + end.len()..]))
        }
        Found::None { until } if until <= MAX_NAME_LEN && !is_end => {
            if is_name(text[..until].trim()) || text[..until].trim().is_empty() {
                Err(Stop::More)
            } else {
                Err(Stop::Broken)
            }
        }
        _ => Err(Stop::Broken),
    }
}

/// Returns whether `name` can be the name of a tool.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_LEN
        && name
            .chars()
            .all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

pub(super) fn open_json(calls: &JsonCalls, text: &str, in_list: bool) -> Result<Opened, Stop> {
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

pub(super) fn open_named(
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

pub(super) fn open_tagged(
    calls: &TaggedCalls,
    mark: &str,
    text: &str,
    is_end: bool,
) -> Result<Opened, Stop> {
    let mut rest = text;
    if calls.section.is_some_and(|section| mark == section.0) && !calls.open.is_empty() {
        rest = behind(rest.trim_start(), calls.open, is_end)?;
    }
    let (name, mut rest) = if calls.name_end.is_empty() {
        // Up to the first argument or the end of the call.
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
        // The name alone is not enough, because that text may occur anywhere.
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

/// Reads the text between a name and the mark that ends its head, which may contain only known
/// words. Returns it and the text after the mark.
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
            if at <= MAX_NAME_LEN && text[..at].split_whitespace().all(is_known) =>
        {
            Ok((&text[..at], &text[at + end.len()..]))
        }
        Found::None { until } if until <= MAX_NAME_LEN && !is_end => Err(Stop::More),
        _ => Err(Stop::Broken),
    }
}

/// Returns the name of an argument, the flags in its head, and the start of its value.
pub(super) fn key_head(
    calls: &TaggedCalls,
    text: &str,
    is_end: bool,
) -> Result<(String, String, usize), Stop> {
    let rest = behind(text, calls.key_open, is_end)?;
    let (key, mut rest) = match find(rest, [calls.key_end].into_iter(), is_end) {
        Found::Mark { at, .. } if at <= MAX_NAME_LEN => {
            (rest[..at].trim(), &rest[at + calls.key_end.len()..])
        }
        Found::None { until } if until <= MAX_NAME_LEN && !is_end => return Err(Stop::More),
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

pub(super) fn open_literal(
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
    let bracket = if calls.style == Style::Gemma {
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
