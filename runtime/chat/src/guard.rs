//! Prevents user input from becoming control tokens.
//!
//! A template renders one text that does not record who wrote which part. So before rendering, the
//! guard puts each text of a special token in user and tool input between two marks. The marks are
//! Unicode noncharacters, which are reserved for internal use. After rendering, text between marks
//! is tokenized as plain text. The guard also marks a prefix of such a text at the end of an input,
//! and a suffix at its start, because the adjacent text may be another user's.

use aho_corasick::{AhoCorasick, MatchKind};
use samite_text::{TokenAttributes, Tokenizer};
use serde_json::Value;

/// Marks that start and end plain text. Unicode guarantees that these code points will never be
/// characters.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptPiece {
    /// Text of the part.
    pub text: String,
    /// True if special tokens are recognized in it.
    pub parse_special: bool,
}

/// Texts that must not become tokens.
#[derive(Clone, Debug)]
pub struct Guard {
    /// Matcher of the texts. `None` if there are too many: then all input is plain text.
    whole: Option<AhoCorasick>,
    /// The texts, sorted.
    texts: Vec<String>,
    /// The texts reversed, sorted.
    backwards: Vec<String>,
    /// Number of characters of the longest text.
    longest: usize,
}

impl Guard {
    /// Creates a guard for these texts.
    pub fn new(texts: impl IntoIterator<Item = String>) -> Self {
        let mut texts: Vec<String> = texts.into_iter().filter(|text| text.len() > 1).collect();
        texts.sort_unstable();
        texts.dedup();
        let mut backwards: Vec<String> = texts
            .iter()
            .map(|text| text.chars().rev().collect())
            .collect();
        backwards.sort_unstable();
        let whole = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts);
        let longest = texts.iter().map(|text| text.chars().count()).max();
        Self {
            whole: whole.ok(),
            texts,
            backwards,
            longest: longest.unwrap_or(0),
        }
    }

    /// Creates a guard for all control tokens of a vocabulary. Of the user-defined tokens, which
    /// are always recognized, it includes those that the template itself writes.
    pub fn for_template(tokenizer: &Tokenizer, template: &str) -> Self {
        let control = TokenAttributes::CONTROL.union(TokenAttributes::UNKNOWN);
        let ids = 0..tokenizer.vocab_size() as u32;
        Self::new(ids.filter_map(|id| {
            let attributes = tokenizer.attributes(id).ok()?;
            let is_control = attributes.intersects(control);
            if !is_control && !attributes.intersects(TokenAttributes::USER_DEFINED) {
                return None;
            }
            let text = std::str::from_utf8(tokenizer.token_to_piece(id, true).ok()?).ok()?;
            (is_control || template.contains(text.trim())).then(|| text.to_owned())
        }))
    }

    /// Marks the guarded texts in `text`. Texts for which `is_free` returns true are not marked.
    pub(crate) fn mark(&self, text: &str, is_free: impl Fn(&str) -> bool) -> String {
        let text = &text.replace(MARKS, "\u{fffd}");
        let Some(whole) = &self.whole else {
            return format!("{}{text}{}", MARKS[0], MARKS[1]);
        };
        let start = text.len() - text.trim_start().len();
        let head = self.longest_start(text[start..].chars(), &self.backwards);
        let end = text.trim_end().len();
        let tail = self.longest_start(text[..end].chars().rev(), &self.texts);
        let mut guarded: Vec<(usize, usize)> = whole
            .find_iter(text.as_str())
            .filter(|found| !is_free(&text[found.range()]))
            .map(|found| (found.start(), found.end()))
            .collect();
        guarded.extend(
            [(start, start + head), (end - tail, end)]
                .into_iter()
                .filter(|(start, end)| start < end),
        );
        guarded.sort_unstable();
        let mut result = String::with_capacity(text.len() + 8 * guarded.len());
        let mut done = 0;
        for (start, end) in guarded {
            if end <= done {
                continue;
            }
            // An overlapping match extends the previous one.
            if start < done {
                result.pop();
            } else {
                result.push_str(&text[done..start]);
                result.push(MARKS[0]);
            }
            result.push_str(&text[start.max(done)..end]);
            result.push(MARKS[1]);
            done = end;
        }
        result.push_str(&text[done..]);
        result
    }

    /// Marks all texts of a value, including names.
    pub(crate) fn mark_all(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.mark(text, |_| false),
            Value::Array(items) => items.iter_mut().for_each(|item| self.mark_all(item)),
            Value::Object(map) => {
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(name, mut value)| {
                        self.mark_all(&mut value);
                        (self.mark(&name, |_| false), value)
                    })
                    .collect();
            }
            _ => {}
        }
    }

    /// Returns the length in bytes of the longest prefix of `text` that, reversed, is a proper
    /// prefix of an entry of `sorted`.
    fn longest_start(&self, text: impl Iterator<Item = char>, sorted: &[String]) -> usize {
        let mut turned = String::new();
        let mut found = 0;
        for c in text.take(self.longest) {
            turned.insert(0, c);
            let at = sorted.partition_point(|text| text.as_str() < turned.as_str());
            // The first entry that starts with it may be equal to it.
            let mut next = sorted[at..].iter().take(2);
            if next.any(|text| text.len() > turned.len() && text.starts_with(&turned)) {
                found = turned.len();
            }
        }
        found
    }
}

/// Splits rendered text at the marks.
pub(crate) fn pieces(text: &str) -> Vec<PromptPiece> {
    let mut pieces: Vec<PromptPiece> = Vec::new();
    let mut parse_special = true;
    let mut start = 0;
    let mut add = |text: &str, parse_special: bool| match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(last) if last.parse_special == parse_special => last.text.push_str(text),
        _ => pieces.push(PromptPiece {
            text: text.to_owned(),
            parse_special,
        }),
    };
    for (at, mark) in text.match_indices(MARKS) {
        add(&text[start..at], parse_special);
        start = at + mark.len();
        parse_special = mark.starts_with(MARKS[1]);
    }
    add(&text[start..], parse_special);
    pieces
}

/// Removes the marks from a text.
pub(crate) fn unmarked(text: &str) -> String {
    text.replace(MARKS, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        Guard::new(["<|im_start|>", "<|im_end|>", "<s>", "[INST]"].map(str::to_owned))
    }

    fn shown(text: &str) -> String {
        guard()
            .mark(text, |_| false)
            .replace(MARKS[0], "{")
            .replace(MARKS[1], "}")
    }

    #[test]
    fn marks_split_a_text_into_non_empty_pieces() {
        let [begin, end] = MARKS;
        let cut = |text: &str| {
            let pieces = pieces(text).into_iter();
            let pieces = pieces.map(|piece| (piece.text, piece.parse_special));
            pieces.collect::<Vec<_>>()
        };
        let piece = |text: &str, is_special| (text.to_owned(), is_special);
        assert_eq!(cut(""), []);
        assert_eq!(cut(&format!("{begin}{end}")), []);
        let text = format!("a{begin}b{end}{begin}c{end}d");
        assert_eq!(
            cut(&text),
            [piece("a", true), piece("bc", false), piece("d", true)]
        );
        assert_eq!(cut(&format!("{begin}{end}a")), [piece("a", true)]);
    }

    #[test]
    fn special_tokens_and_partial_ones_at_the_ends_are_marked() {
        for (text, expected) in [
            ("hello", "hello"),
            ("", ""),
            ("a<|im_start|>b<s>", "a{<|im_start|>}b{<s>}"),
            ("a<|im_sta", "a{<|im_sta}"),
            ("a <|im_ \n", "a {<|im_} \n"),
            ("start|> a", "{start|>} a"),
            ("  |> a <", "  {|>} a {<}"),
            ("<|im_start|>|><|", "{<|im_start|>}|>{<|}"),
            ("[INST", "{[INST}"),
            ("NST] [[INST]]", "{NST]} [{[INST]}]"),
            ("x\u{fdd1}<s>\u{fdd0}", "x\u{fffd}{<s>}\u{fffd}"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn text_pieces_are_split_at_marks() {
        let text = format!("<s>{}<s>", guard().mark("a<s>", |_| false));
        let pieces = pieces(&text);
        let shown: Vec<(&str, bool)> = pieces
            .iter()
            .map(|piece| (piece.text.as_str(), piece.parse_special))
            .collect();
        assert_eq!(shown, [("<s>a", true), ("<s>", false), ("<s>", true)]);
    }
}
