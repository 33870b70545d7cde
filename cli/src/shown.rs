//! Formats text for a terminal: escapes and shortens text from files.

pub use samite::counted;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::Write;

/// Writes a line to standard error in a single write, so that lines of several processes do not
/// mix. Ignores errors, because there is no place to report them.
pub fn say(line: impl Display) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Returns whether a character is not visible: control characters, escape sequences, and marks that
/// change the direction of text or hide it.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Returns a text with no effect on the terminal other than moving the cursor.
pub fn on_terminal(text: &str) -> String {
    let parts =
        text.split_inclusive(['\n', '\t'])
            .map(|part| match part.strip_suffix(['\n', '\t']) {
                Some(begin) => format!("{}{}", escaped(begin), &part[begin.len()..]),
                None => escaped(part).into_owned(),
            });
    parts.collect()
}

/// Returns `text` with invisible characters escaped.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unseen) {
        return text.into();
    }
    let mut result = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unseen(c) {
            result.extend(c.escape_default());
        } else {
            result.push(c);
        }
    }
    result.into()
}

/// Works like [`escaped`], but keeps line breaks.
pub fn escaped_lines(text: &str) -> String {
    let lines = text.split_inclusive('\n').map(|line| {
        let end = line.strip_suffix('\n');
        let line = escaped(end.unwrap_or(line));
        format!("{line}{}", if end.is_some() { "\n" } else { "" })
    });
    lines.collect()
}

/// Works like [`escaped`], and replaces the middle of a text longer than `most` characters.
pub fn shortened(text: &str, most: usize) -> String {
    // Of a huge text, escape only the part that may be shown.
    let near = |text: &str| text.chars().nth(4 * most + 8).is_none();
    if near(text) {
        let text = escaped(text);
        if text.chars().nth(most).is_none() {
            return text.into_owned();
        }
    }
    let (tail, head) = (most / 3, most - most / 3 - 1);
    let start: String = text.chars().take(most).collect();
    let mut end: Vec<char> = text.chars().rev().take(most).collect();
    end.reverse();
    let end = String::from_iter(end);
    let end = escaped(&end);
    let skipped = end.chars().count().saturating_sub(tail);
    let start = escaped(&start).chars().take(head).collect::<String>();
    let end: String = end.chars().skip(skipped).collect();
    format!("{start}…{end}")
}

/// Maximum characters of a message. Longer ones lose their middle.
const LONGEST: usize = 1000;

/// Returns a message as one line. It may contain names from files with any characters.
pub fn one_line(message: &str) -> String {
    let mut line = String::new();
    for part in message
        .lines()
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        match line.chars().last() {
            None => {}
            Some(':') => line.push(' '),
            Some(_) => line.push_str("; "),
        }
        line.push_str(part);
    }
    shortened(&line, LONGEST)
}

/// Breaks a line after commas into lines of at most `width` characters. All but the first are
/// indented.
pub fn wrapped(line: &str, width: usize) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for part in line.split_inclusive(", ") {
        let length = part.trim_end().chars().count();
        if column > 4 && column + length > width {
            text.truncate(text.trim_end().len());
            text.push_str("\n    ");
            column = 4;
        }
        text.push_str(part);
        column += part.chars().count();
    }
    text
}

/// Maximum width of tensor names in tables, so that lines have at most 80 columns.
pub const NAME_WIDTH: usize = 32;

/// Returns a number as JSON, or as a word if JSON has no such number. Python's `float` and
/// JavaScript's `Number` parse these words.
pub fn json_number(x: f64) -> serde_json::Value {
    match x {
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        x if x.is_nan() => "NaN".into(),
        x => x.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        assert_eq!(
            escaped("a\u{1b}[2J\u{9b}1m\u{202e}b\r"),
            "a\\u{1b}[2J\\u{9b}1m\\u{202e}b\\r"
        );
        assert_eq!(escaped("Zoë 日本 'x' \\"), "Zoë 日本 'x' \\");
        assert_eq!(escaped_lines("a\tb\n\nc"), "a\\tb\n\nc");
    }

    #[test]
    fn long_text_keeps_both_ends() {
        assert_eq!(shortened("short", 5), "short");
        assert_eq!(shortened("0123456789", 7), "0123…89");
        let long = format!("begin{}end", "x".repeat(100_000));
        let short = shortened(&long, 30);
        assert_eq!(short.chars().count(), 30);
        assert!(
            short.starts_with("begin") && short.ends_with("end"),
            "{short}"
        );
        assert_eq!(shortened(&"\u{1b}".repeat(9), 12), "\\u{1b}\\…{1b}");
    }

    #[test]
    fn lines_break_after_commas() {
        assert_eq!(wrapped("a, bc, def", 10), "a, bc, def");
        assert_eq!(wrapped("abc, def, ghi j", 9), "abc, def,\n    ghi j");
        assert_eq!(wrapped("abcdefghijk, lm", 8), "abcdefghijk,\n    lm");
    }

    #[test]
    fn messages_are_one_line() {
        assert_eq!(one_line("a file: it is bad"), "a file: it is bad");
        assert_eq!(one_line("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        let long = one_line(&format!("file: {}: is bad", "x".repeat(100_000)));
        assert!(long.len() < 1100 && long.starts_with("file: xxx"));
        assert!(long.ends_with("xxx: is bad"), "{long}");
        assert_eq!(one_line("missing:\n  <A>\n  <B>\n\n"), "missing: <A>; <B>");
    }
}
