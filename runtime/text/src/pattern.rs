//! Small regular expressions that split text, matched in linear time.
//!
//! Models define their words by regular expressions for a backtracking engine. This module parses
//! the few constructs that they use ([`parse`]) and compiles them to one deterministic automaton
//! over classes of characters ([`automaton`]). A step consists of two table lookups, for any
//! expression. The states of the automaton are the backtracking engine's alternatives in order, so
//! both agree on every match.
//!
//! # The subset
//!
//! Characters, `\r \n \t` and escaped punctuation; classes `[..]`, `[^..]` with ranges and
//! `&&[..]`; `\s \S \d \p{..}`; groups `(..)`, `(?:..)`, `(?i:..)`; `|`; `? * + {n} {n,m}`; `(?=x)`
//! and `(?!x)` for one character or class `x`, and `$` for the end of the text.

use std::collections::HashSet;

mod automaton;
mod parse;
mod set;

use automaton::{Automaton, DEAD, MATCH, START};

/// Number of bytes after which the state of an attempt is recorded.
const CHECKPOINT: usize = 64;

/// A compiled expression.
#[derive(Debug)]
pub(crate) struct Pattern {
    automaton: Automaton,
}

/// Positions and states that led to no match. Expressions may read far ahead of their match, for
/// example over all white space in search of a line break. If they repeated that from each
/// position, time would be quadratic in the length of the text.
#[derive(Debug, Default)]
struct DeadEnds {
    known: HashSet<(usize, u32)>,
    /// Positions and states of the current attempt.
    passed: Vec<(usize, u32)>,
}

impl Pattern {
    /// Compiles an expression.
    ///
    /// # Panics
    /// Panics if the expression is not in the subset. Expressions are this crate's own, and a test
    /// compiles all of them.
    pub(crate) fn new(expression: &str) -> Self {
        let tree = parse::parse(expression)
            .unwrap_or_else(|error| panic!("the pattern {expression:?}: {error}"));
        Self {
            automaton: Automaton::new(&tree),
        }
    }

    /// Calls `emit` for each match in `text`, from left to right, and for the text between matches.
    /// Joined, the pieces are the original text.
    pub(crate) fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        let mut barren = DeadEnds::default();
        let (mut start, mut position) = (0, 0);
        while position < text.len() {
            match self.match_at(text, position, &mut barren) {
                Some(end) => {
                    if start < position {
                        emit(&text[start..position]);
                    }
                    emit(&text[position..end]);
                    (start, position) = (end, end);
                }
                None => position = self.next_candidate(text, position),
            }
        }
        if start < text.len() {
            emit(&text[start..]);
        }
    }

    /// Returns the next position after `position` where a match may start.
    fn next_candidate(&self, text: &str, position: usize) -> usize {
        let bytes = text.as_bytes();
        let mut next = position + self.automaton.step(START, bytes, position).1;
        while next < text.len() {
            let (state, width) = self.automaton.step(START, bytes, next);
            if state & !MATCH != DEAD {
                break;
            }
            next += width;
        }
        next
    }

    /// Returns the end of the match that starts at `position`. An empty match does not count.
    #[inline]
    fn match_at(&self, text: &str, position: usize, barren: &mut DeadEnds) -> Option<usize> {
        let bytes = text.as_bytes();
        let mut state = START;
        let mut at = position;
        let mut end = None;
        'attempt: loop {
            let checkpoint = at - at % CHECKPOINT + CHECKPOINT;
            let limit = checkpoint.min(bytes.len());
            while at < limit {
                let (next, width) = self.automaton.step(state, bytes, at);
                if next & MATCH != 0 {
                    end = Some(at);
                }
                state = next & !MATCH;
                if state == DEAD {
                    break 'attempt;
                }
                at += width;
            }
            if at >= bytes.len() {
                if self.automaton.matches_at_end(state) {
                    end = Some(at);
                }
                break;
            }
            if end.is_some_and(|end| end + CHECKPOINT > at) {
                barren.passed.clear();
            }
            if barren.known.contains(&(at, state)) {
                break;
            }
            barren.passed.push((at, state));
        }
        if !barren.passed.is_empty() {
            let behind = end.unwrap_or(position);
            let passed = barren.passed.drain(..).filter(|&(at, _)| at > behind);
            barren.known.extend(passed);
        }
        end.filter(|&end| end > position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn split(expression: &str, text: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        Pattern::new(expression).split(text, &mut |piece| pieces.push(piece.to_owned()));
        pieces
    }

    /// Splits with a backtracking engine. Returns `None` if it exceeds its limits.
    fn by_backtracking(expression: &fancy_regex::Regex, text: &str) -> Option<Vec<String>> {
        let mut pieces = Vec::new();
        let mut start = 0;
        for found in expression.find_iter(text) {
            let found = found.ok()?;
            if found.start() == found.end() {
                continue;
            }
            if start < found.start() {
                pieces.push(text[start..found.start()].to_owned());
            }
            pieces.push(found.as_str().to_owned());
            start = found.end();
        }
        if start < text.len() {
            pieces.push(text[start..].to_owned());
        }
        Some(pieces)
    }

    #[test]
    fn the_first_matching_alternative_wins() {
        assert_eq!(split("a|ab", "abab"), ["a", "b", "a", "b"]);
        assert_eq!(split("ab|a", "aba"), ["ab", "a"]);
        assert_eq!(split("(?:a|ab)(?:c|bcd)", "abcd"), ["abcd"]);
        assert_eq!(split("a{2,3}", "aaaaaaa"), ["aaa", "aaa", "a"]);
        assert_eq!(split("a{2}b?", "aaab"), ["aa", "ab"]);
        assert_eq!(split("x(?!y)", "xyxxz"), ["xy", "x", "x", "z"]);
        assert_eq!(split("x(?=y)", "xyxxz"), ["x", "yxxz"]);
        assert_eq!(split(r"\s+$", "a  b  "), ["a  b", "  "]);
        assert_eq!(
            split("(?i:'s|k)", "'S'\u{17F}K\u{212A}"),
            ["'S", "'\u{17F}", "K", "\u{212A}"]
        );
        assert_eq!(split("a*", "baab"), ["b", "aa", "b"]);
    }

    #[test]
    fn unsupported_expressions_are_refused() {
        for bad in [
            "(",
            "a)",
            "[a",
            "[b-a]",
            "a{3,2}",
            "a{",
            "*",
            "a**",
            r"\p{Greek}",
            r"\q",
            "(?<=a)",
            "(?=ab)",
            "(?=a*)",
            "a*?",
            "[]",
            r"\p{L",
            "a{9999}",
            "\\",
            "(?i",
            "[a&&b]",
        ] {
            assert!(parse::parse(bad).is_err(), "{bad}");
        }
        let deep = "(".repeat(10_000);
        assert!(parse::parse(&deep).is_err());
    }

    /// Tests each character of every plane, alone and after another one.
    #[test]
    fn character_classes_match_unicode() {
        let classes = [
            r"\s",
            r"\S",
            r"\d",
            r"\p{L}",
            r"\p{Lu}",
            r"\p{Ll}",
            r"\p{Lt}",
            r"\p{Lm}",
            r"\p{Lo}",
            r"\p{M}",
            r"\p{N}",
            r"\p{P}",
            r"\p{S}",
            r"\p{Han}",
            r"[^\s\p{L}\p{N}]",
            r"[\p{L}&&[^\p{Han}]]",
        ];
        for class in classes {
            let pattern = Pattern::new(class);
            let regex = fancy_regex::Regex::new(class).unwrap();
            let mut buffer = [0; 4];
            for c in '\0'..=char::MAX {
                let text = &*c.encode_utf8(&mut buffer);
                let found = pattern.match_at(text, 0, &mut DeadEnds::default());
                assert_eq!(
                    found.is_some(),
                    regex.is_match(text).unwrap(),
                    "{class} {c:?}"
                );
            }
        }
    }

    /// Linear time takes well under a second; quadratic time for half a megabyte takes hours.
    const LINEAR: Duration = Duration::from_secs(100);

    #[test]
    fn lookahead_takes_linear_time() {
        let blank = " ".repeat(1 << 19);
        let cases = [
            (r"\s+$", format!("{blank}x")),
            (r"\s*[\r\n]+|\s{2}(?!\S)|\s", format!("{blank}x")),
            (r"\s*[\r\n]+|\s{2}(?!\S)|\s", blank.clone()),
            (r"[a ]*b|a", "a".repeat(1 << 19)),
            (r"(?:a{5})*b|a", "a".repeat(1 << 19)),
        ];
        for (expression, text) in cases {
            let started = Instant::now();
            let mut length = 0;
            Pattern::new(expression).split(&text, &mut |piece| length += piece.len());
            assert_eq!(length, text.len());
            assert!(
                started.elapsed() < LINEAR,
                "{expression}: {:?}",
                started.elapsed()
            );
        }
    }

    /// Expressions over few letters, so that they interact.
    fn expression() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            Just("a".to_owned()),
            Just("b".to_owned()),
            Just("[ab]".to_owned()),
            Just("[^a]".to_owned()),
            Just(r"\s".to_owned()),
            Just(r"c(?!\S)".to_owned()),
            Just("c(?=a)".to_owned()),
            Just("é".to_owned()),
        ];
        leaf.prop_recursive(4, 16, 3, |inner| {
            prop_oneof![
                (
                    inner.clone(),
                    prop_oneof!["[?*+]", Just("{2}".to_owned()), Just("{1,3}".to_owned())]
                )
                    .prop_map(|(inner, count)| format!("(?:{inner}){count}")),
                prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat()),
                prop::collection::vec(inner, 1..4)
                    .prop_map(|parts| format!("(?:{})", parts.join("|"))),
            ]
        })
    }

    proptest! {
        /// Long enough that lookahead is recorded.
        #[test]
        fn lookahead_matches_a_backtracking_engine(
            expression in expression(),
            runs in prop::collection::vec(("(a|ab|b|bc|a )", 1usize..200), 1..5),
        ) {
            let text: String = runs.iter().map(|(unit, count)| unit.repeat(*count)).collect();
            let regex = fancy_regex::Regex::new(&expression).unwrap();
            prop_assume!(!regex.is_match("").unwrap());
            let expected = by_backtracking(&regex, &text);
            prop_assume!(expected.is_some());
            prop_assert_eq!(Some(split(&expression, &text)), expected);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn matches_equal_those_of_a_backtracking_engine(expression in expression(),
            text in "[abc é]{0,80}") {
            // Engines differ in where they continue after an empty match.
            let regex = fancy_regex::Regex::new(&expression).unwrap();
            prop_assume!(!regex.is_match("").unwrap());
            let expected = by_backtracking(&regex, &text);
            prop_assume!(expected.is_some());
            prop_assert_eq!(Some(split(&expression, &text)), expected);
        }
    }
}
