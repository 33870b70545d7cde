//! Converts arguments that are not JSON to JSON while they arrive: those of Gemma 4, and Python
//! calls.

use super::marks::{Begins, Found, begins, find};
use serde_json::Value;

/// Language of the literals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// `{city:<|"|>Bern<|"|>,days:2}`
    Gemma,
    /// `(city="Bern", days=2)`
    Python,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// The call itself, or an object of Gemma.
    Named {
        close: char,
    },
    Dict,
    List {
        close: char,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    ItemOrEnd,
    Value,
    CommaOrEnd,
    /// In a string with this closing quote.
    Text(&'static str),
}

/// Progress of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConversionProgress {
    /// Converted so far; more text is needed.
    More,
    /// End of the arguments.
    End,
    /// The next text is not a literal.
    Broken,
}

const GEMMA_QUOTE: &str = "<|\"|>";
/// Longest name or number.
const MAX_WORD_LEN: usize = 1024;
const DEEPEST: usize = 256;

/// Converts literals to JSON.
#[derive(Clone, Debug)]
pub(super) struct Literals {
    style: Style,
    levels: Vec<Level>,
    expect: Expect,
    needs_comma: bool,
}

impl Literals {
    /// Starts after the bracket that opens the arguments. The caller has written "{" for it.
    pub(super) fn new(style: Style) -> Self {
        let close = if style == Style::Gemma { '}' } else { ')' };
        Self {
            style,
            levels: vec![Level::Named { close }],
            expect: Expect::ItemOrEnd,
            needs_comma: false,
        }
    }

    /// Converts as much of `text` as possible and appends it to `json`. Returns the number of bytes
    /// consumed.
    pub(super) fn turn(
        &mut self,
        text: &str,
        is_end: bool,
        json: &mut String,
    ) -> (usize, ConversionProgress) {
        let mut at = 0;
        loop {
            let before = at;
            match self.step(&text[at..], is_end, json) {
                Ok(length) => at += length,
                Err(turned) => return (at, turned),
            }
            if self.levels.is_empty() {
                return (at, ConversionProgress::End);
            }
            if at == before && at == text.len() {
                return (at, ConversionProgress::More);
            }
        }
    }

    fn step(
        &mut self,
        text: &str,
        is_end: bool,
        json: &mut String,
    ) -> Result<usize, ConversionProgress> {
        if let Expect::Text(quote) = self.expect {
            return self.text(text, quote, is_end, json);
        }
        let space = text.len() - text.trim_start().len();
        if space > 0 {
            return Ok(space);
        }
        let Some(first) = text.chars().next() else {
            return Err(ConversionProgress::More);
        };
        let Some(&level) = self.levels.last() else {
            return Err(ConversionProgress::End);
        };
        let close = match level {
            Level::Named { close } | Level::List { close } => close,
            Level::Dict => '}',
        };
        match self.expect {
            Expect::CommaOrEnd if first == ',' => {
                self.expect = Expect::ItemOrEnd;
                self.needs_comma = true;
                Ok(1)
            }
            Expect::CommaOrEnd | Expect::ItemOrEnd if first == close => {
                json.push(if matches!(level, Level::List { .. }) {
                    ']'
                } else {
                    '}'
                });
                self.levels.pop();
                self.needs_comma = false;
                self.expect = Expect::CommaOrEnd;
                Ok(1)
            }
            Expect::CommaOrEnd => Err(ConversionProgress::Broken),
            Expect::ItemOrEnd if !matches!(level, Level::List { .. }) => {
                let (key, length) = self.key(text, level)?;
                self.comma(json);
                json.push_str(&Value::from(key).to_string());
                json.push_str(": ");
                self.expect = Expect::Value;
                Ok(length)
            }
            _ => self.value(text, is_end, json),
        }
    }

    fn comma(&mut self, json: &mut String) {
        if std::mem::take(&mut self.needs_comma) {
            json.push_str(", ");
        }
    }

    /// Reads a name and the text between it and its value.
    fn key(&self, text: &str, level: Level) -> Result<(String, usize), ConversionProgress> {
        let separator = if level == Level::Dict || self.style == Style::Gemma {
            ':'
        } else {
            '='
        };
        for quote in [GEMMA_QUOTE, "\"", "'"] {
            match begins(text, quote, false) {
                Begins::No => continue,
                Begins::Perhaps => return Err(ConversionProgress::More),
                Begins::Yes => {}
            }
            let inner = &text[quote.len()..];
            let Some(end) = inner.find(quote) else {
                return Err(if text.len() > MAX_WORD_LEN {
                    ConversionProgress::Broken
                } else {
                    ConversionProgress::More
                });
            };
            let rest = &inner[end + quote.len()..];
            let behind = rest.trim_start();
            return match behind.chars().next() {
                None => Err(ConversionProgress::More),
                Some(c) if c == separator && end <= MAX_WORD_LEN => {
                    Ok((inner[..end].to_owned(), text.len() - behind.len() + 1))
                }
                Some(_) => Err(ConversionProgress::Broken),
            };
        }
        let is_name = |c: char| c.is_alphanumeric() || "_-.$/".contains(c);
        let end = text.find(|c: char| !is_name(c) && c != ' ');
        match end {
            None if text.len() > MAX_WORD_LEN => Err(ConversionProgress::Broken),
            None => Err(ConversionProgress::More),
            Some(end)
                if end > 0
                    && end <= MAX_WORD_LEN
                    && text[end..].starts_with(separator)
                    && level != Level::Dict =>
            {
                Ok((text[..end].trim_end().to_owned(), end + 1))
            }
            Some(_) => Err(ConversionProgress::Broken),
        }
    }

    fn value(
        &mut self,
        text: &str,
        is_end: bool,
        json: &mut String,
    ) -> Result<usize, ConversionProgress> {
        for quote in [GEMMA_QUOTE, "\"", "'"] {
            match begins(text, quote, is_end) {
                Begins::No => {}
                Begins::Perhaps => return Err(ConversionProgress::More),
                Begins::Yes => {
                    self.comma(json);
                    json.push('"');
                    self.expect = Expect::Text(quote);
                    return Ok(quote.len());
                }
            }
        }
        let opened = match (text.as_bytes().first(), self.style) {
            (Some(b'{'), Style::Gemma) => Some((Level::Named { close: '}' }, '{')),
            (Some(b'{'), Style::Python) => Some((Level::Dict, '{')),
            (Some(b'['), _) => Some((Level::List { close: ']' }, '[')),
            (Some(b'('), Style::Python) => Some((Level::List { close: ')' }, '[')),
            _ => None,
        };
        if let Some((level, bracket)) = opened {
            if self.levels.len() == DEEPEST {
                return Err(ConversionProgress::Broken);
            }
            self.comma(json);
            json.push(bracket);
            self.levels.push(level);
            self.expect = Expect::ItemOrEnd;
            return Ok(1);
        }
        let end = text.find([',', '}', ']', ')', '\n']);
        let end = match end {
            Some(end) if end <= MAX_WORD_LEN => end,
            None if text.len() <= MAX_WORD_LEN => return Err(ConversionProgress::More),
            _ => return Err(ConversionProgress::Broken),
        };
        let word = text[..end].trim_end();
        let word = match word {
            "True" | "true" => "true".to_owned(),
            "False" | "false" => "false".to_owned(),
            "None" | "null" | "none" => "null".to_owned(),
            "" => return Err(ConversionProgress::Broken),
            word if serde_json::from_str::<serde_json::Number>(word).is_ok() => word.to_owned(),
            word if self.style == Style::Gemma => Value::from(word).to_string(),
            _ => return Err(ConversionProgress::Broken),
        };
        self.comma(json);
        json.push_str(&word);
        self.expect = Expect::CommaOrEnd;
        Ok(end)
    }

    /// Continues a string.
    fn text(
        &mut self,
        text: &str,
        quote: &'static str,
        is_end: bool,
        json: &mut String,
    ) -> Result<usize, ConversionProgress> {
        if quote == GEMMA_QUOTE {
            return match find(text, [quote].into_iter(), is_end) {
                Found::Mark { at, .. } => {
                    push_escaped(json, &text[..at]);
                    json.push('"');
                    self.expect = Expect::CommaOrEnd;
                    Ok(at + quote.len())
                }
                Found::None { until: 0 } => Err(ConversionProgress::More),
                Found::None { until } => {
                    push_escaped(json, &text[..until]);
                    Ok(until)
                }
            };
        }
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            if text[at..].starts_with(quote) {
                json.push('"');
                self.expect = Expect::CommaOrEnd;
                return Ok(at + quote.len());
            }
            if c != '\\' {
                push_escaped(json, &text[at..at + c.len_utf8()]);
                at += c.len_utf8();
                continue;
            }
            match escape(&text[at..]) {
                Some((c, length)) => {
                    push_escaped(json, c.encode_utf8(&mut [0; 4]));
                    at += length;
                }
                None if is_end => {
                    push_escaped(json, &text[at..]);
                    return Ok(text.len());
                }
                None => break,
            }
        }
        if at == 0 {
            Err(ConversionProgress::More)
        } else {
            Ok(at)
        }
    }
}

/// Returns the character of a Python escape, and the length of the escape. A backslash that starts
/// no escape stands for itself. Returns `None` if the escape is incomplete.
fn escape(text: &str) -> Option<(char, usize)> {
    let kind = text[1..].chars().next()?;
    let digits = match kind {
        'n' => return Some(('\n', 2)),
        't' => return Some(('\t', 2)),
        'r' => return Some(('\r', 2)),
        'b' => return Some(('\u{8}', 2)),
        'f' => return Some(('\u{c}', 2)),
        '\\' | '\'' | '"' => return Some((kind, 2)),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return Some(('\\', 1)),
    };
    let end = 2 + digits;
    let have = text
        .as_bytes()
        .iter()
        .skip(2)
        .take(digits)
        .take_while(|byte| byte.is_ascii_hexdigit())
        .count();
    if have < digits {
        return if text.len() < end && 2 + have == text.len() {
            None
        } else {
            Some(('\\', 1))
        };
    }
    let number = u32::from_str_radix(&text[2..end], 16).ok();
    match number {
        // High surrogate: the low one must follow.
        Some(high @ 0xd800..0xdc00) if kind == 'u' => {
            let rest = &text[end..];
            let low = rest
                .strip_prefix("\\u")
                .and_then(|rest| rest.get(..4))
                .and_then(|low| u32::from_str_radix(low, 16).ok());
            match low {
                Some(low @ 0xdc00..0xe000) => {
                    let number = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                    Some((char::from_u32(number).unwrap_or('\u{fffd}'), end + 6))
                }
                None if rest.len() < 6
                    && "\\uffff".len() > rest.len()
                    && (rest.is_empty()
                        || "\\u".starts_with(rest)
                        || rest.starts_with("\\u")
                            && rest[2..].bytes().all(|b| b.is_ascii_hexdigit())) =>
                {
                    None
                }
                _ => Some(('\u{fffd}', end)),
            }
        }
        number => Some((number.and_then(char::from_u32).unwrap_or('\u{fffd}'), end)),
    }
}

/// Appends a text, escaped for a JSON string.
pub(super) fn push_escaped(json: &mut String, text: &str) {
    let quoted = Value::from(text).to_string();
    json.push_str(&quoted[1..quoted.len() - 1]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(style: Style, text: &str) -> (String, usize, ConversionProgress) {
        let mut json = "{".to_owned();
        let (at, turned) = Literals::new(style).turn(text, true, &mut json);
        // The result must not depend on where the text is cut.
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let mut literals = Literals::new(style);
            let mut other = "{".to_owned();
            let (mut done, mut result) = literals.turn(&text[..cut], false, &mut other);
            if result == ConversionProgress::More {
                let (more, end) = literals.turn(&text[done..], true, &mut other);
                done += more;
                result = end;
            }
            assert_eq!(
                (&other, done, result),
                (&json, at, turned),
                "{text} cut at {cut}"
            );
        }
        (json, at, turned)
    }

    #[test]
    fn literals_are_converted_to_json() {
        for (style, text, expected) in [
            (Style::Gemma, "}", "{}"),
            (
                Style::Gemma,
                "city:<|\"|>a \"b\"\n<|\"|>,n:-1.5,t:true,o:{x:[1,<|\"|>y<|\"|>],z:None},w:word}",
                r#"{"city": "a \"b\"\n", "n": -1.5, "t": true, "o": {"x": [1, "y"], "z": null}, "w": "word"}"#,
            ),
            (Style::Python, ")", "{}"),
            (
                Style::Python,
                "a='x', b=\"y'\", c=[1, 2.5,], d={'k': True, \"l\": None}, e=(1, False))",
                r#"{"a": "x", "b": "y'", "c": [1, 2.5], "d": {"k": true, "l": null}, "e": [1, false]}"#,
            ),
            (
                Style::Python,
                r"a='\n\x41\u00e9\'\q\\ \ud83d\ude00'  )",
                "{\"a\": \"\\nAé'\\\\q\\\\ 😀\"}",
            ),
        ] {
            let (json, at, end) = turned(style, text);
            assert_eq!(
                (json.as_str(), at, end),
                (expected, text.len(), ConversionProgress::End)
            );
            assert!(serde_json::from_str::<Value>(&json).is_ok());
        }
        for (style, broken) in [
            (Style::Python, "a=x)"),
            (Style::Python, "1)"),
            (Style::Gemma, "a}"),
            (Style::Python, "a=[1})"),
        ] {
            assert!(
                turned(style, broken).2 != ConversionProgress::End,
                "{broken}"
            );
        }
    }
}
