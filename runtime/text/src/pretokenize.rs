//! Splits text into words before byte-level BPE.
//!
//! A pre-tokenizer is a list of passes, each over the pieces of the previous one ([`names`]
//! contains all of them). A pass splits off the matches of an expression and keeps the text between
//! them. The expressions are those of the models' own tokenizers, and are matched in linear time
//! ([`crate::pattern`]). Grouping digits from the right would need lookahead over all digits, so it
//! is a separate kind of pass.

use crate::error::VocabError;
use crate::pattern::Pattern;

mod names;
mod thousands;

pub(crate) use names::{Settings, settings};
use thousands::Thousands;

/// One pass over the text.
#[derive(Debug, Clone, Copy)]
enum Pass {
    /// Splits off the matches of the expression.
    Cut(&'static str),
    /// Groups digits from the right.
    Group(Thousands),
}

/// A compiled pass.
#[derive(Debug)]
enum Stage {
    Cut(Pattern),
    Group(Thousands),
}

/// Splits text into words (`tokenizer.ggml.pre`).
#[derive(Debug)]
pub struct PreTokenizer {
    stages: Vec<Stage>,
}

impl PreTokenizer {
    /// Returns the pre-tokenizer with this name. A file without the key, or with an empty one, gets
    /// `"default"`.
    ///
    /// # Errors
    /// Returns [`VocabError::UnknownPreTokenizer`], which lists the supported names.
    pub fn named(name: Option<&str>) -> Result<Self, VocabError> {
        settings(name).map(Self::new)
    }

    /// Returns all names, in the order of their families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        names::all()
    }

    pub(crate) fn new(settings: Settings) -> Self {
        let stages = settings.passes.iter().map(|pass| match *pass {
            Pass::Cut(expression) => Stage::Cut(Pattern::new(expression)),
            Pass::Group(thousands) => Stage::Group(thousands),
        });
        Self {
            stages: stages.collect(),
        }
    }

    /// Calls `emit` for each word of `text`, in order. Joined, the words are the original text.
    pub fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        split(&self.stages, text, emit);
    }

    /// Returns whether a text is always split before byte `at` of `example`, for all texts that are
    /// like it there.
    pub(crate) fn cuts(&self, example: &str, at: usize) -> bool {
        let (mut end, mut found) = (0, false);
        self.split(example, &mut |word| {
            end += word.len();
            found |= end == at;
        });
        found
    }
}

fn split<'t>(stages: &[Stage], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let Some((stage, rest)) = stages.split_first() else {
        return emit(text);
    };
    let mut next = |piece: &'t str| split(rest, piece, emit);
    let emit: &mut dyn FnMut(&'t str) = &mut next;
    match stage {
        Stage::Cut(pattern) => pattern.split(text, emit),
        Stage::Group(thousands) => thousands.split(text, emit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fancy_regex::Regex;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn split(name: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        let pre = PreTokenizer::named(Some(name)).unwrap();
        pre.split(text, &mut |word| words.push(word.to_owned()));
        words
    }

    #[test]
    fn gpt2_words() {
        let text = "He's 12 cats,  and\n\n x'LL!  ";
        let words = [
            "He", "'s", " 12", " cats", ",", " ", " and", "\n\n", " x", "'", "LL", "!", "  ",
        ];
        assert_eq!(split("gpt-2", text), words);
        assert_eq!(split("gpt-2", " "), [" "]);
        assert_eq!(split("gpt-2", "\n a"), ["\n", " a"]);
        assert!(split("gpt-2", "").is_empty());
    }

    #[test]
    fn llama3_words() {
        let text = "He'S 12345 (cats),\n\n  and \n  \n  x\t!";
        let words = [
            "He", "'S", " ", "123", "45", " (", "cats", "),\n\n", " ", " and", " \n  \n", " ",
            " x", "\t", "!",
        ];
        assert_eq!(split("llama3", text), words);
        let text = "\u{3000}字\u{FF11}２３４";
        assert_eq!(split("llama3", text), ["\u{3000}字", "１２３", "４"]);
        assert_eq!(split("llama3", "a "), ["a", " "]);
    }

    #[test]
    fn combining_marks_and_capitals_split_words() {
        // A combining acute accent ends a word for Qwen2 and not for Qwen3.5.
        assert_eq!(split("qwen2", "e\u{301}te"), ["e", "\u{301}te"]);
        assert_eq!(split("qwen35", "e\u{301}te"), ["e\u{301}te"]);
        // Capital letters of any script start words.
        assert_eq!(
            split("gpt-4o", "helloWorldÉtatЖизнь"),
            ["hello", "World", "État", "Жизнь"]
        );
        assert_eq!(split("tekken", "HTTPServer's"), ["HTTPServer", "'s"]);
        assert_eq!(split("gpt-4o", "HTTPServer's"), ["HTTPServer's"]);
        assert_eq!(
            split("kimi-k2", "ab漢字cd々e"),
            ["ab", "漢字", "cd", "々", "e"]
        );
    }

    #[test]
    fn passes_apply_in_sequence() {
        assert_eq!(split("starcoder", "a 12 b"), ["a", " ", "1", "2", " b"]);
        assert_eq!(split("falcon", "a=`1234"), ["a", "=`", "123", "4"]);
        assert_eq!(
            split("default", "a=` 1234½"),
            ["a", "=", "`", " ", "123", "4½"]
        );
        assert_eq!(
            split("deepseek-v3", "x1234漢かな!ab"),
            ["x", "123", "4", "漢かな", "!ab"]
        );
        assert_eq!(
            split("exaone-moe", "the old cat. 1"),
            ["the old cat", ".", " ", "1"]
        );
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        assert_eq!(split("tiny_aya", "1234567"), ["1", "234", "567"]);
        assert_eq!(split("tiny_aya", "1234x"), ["123", "4", "x"]);
        assert_eq!(split("afmoe", "a1234b"), ["a", "1", "234", "b"]);
        assert_eq!(split("superbpe", "1234567"), ["1", "234", "567"]);
    }

    #[test]
    fn names() {
        let default = settings(None).unwrap();
        assert!(std::ptr::eq(
            default.passes,
            settings(Some("")).unwrap().passes
        ));
        let llama = settings(Some("llama-bpe")).unwrap();
        assert!(llama.ignore_merges && llama.add_bos && !llama.add_sep);
        assert!(settings(Some("roberta-bpe")).unwrap().add_sep);
        let message = settings(Some("dodo")).unwrap_err().to_string();
        assert!(
            message.starts_with("tokenizer.ggml.pre: pre-tokenizer 'dodo' is not supported"),
            "{message}"
        );
        assert!(message.contains("qwen2, deepseek-r1-qwen"), "{message}");
        for (index, name) in PreTokenizer::names().enumerate() {
            assert_eq!(
                PreTokenizer::names().position(|other| other == name),
                Some(index)
            );
        }
    }

    /// Linear time takes well under a second; quadratic time for a quarter of a megabyte takes
    /// hours.
    const LINEAR: Duration = Duration::from_secs(100);

    /// Texts that make naive matchers slow.
    #[test]
    fn hostile_texts_take_linear_time() {
        let units = [
            "a",
            "A",
            "aA",
            " ",
            "\n",
            " \n",
            "\r\n ",
            "漢",
            "\u{301}",
            "9",
            "9a",
            "½",
            "'",
            "'l",
            "!",
            "a ",
            "IMGIMG",
            "<sentinel:",
            "\0",
        ];
        for name in PreTokenizer::names() {
            let pre = PreTokenizer::named(Some(name)).unwrap();
            for unit in units {
                for end in ["", "x", "!"] {
                    let text = unit.repeat((1 << 18) / unit.len()) + end;
                    let started = Instant::now();
                    let mut length = 0;
                    pre.split(&text, &mut |word| length += word.len());
                    assert_eq!(length, text.len());
                    assert!(
                        started.elapsed() < LINEAR,
                        "{name} {unit:?}: {:?}",
                        started.elapsed()
                    );
                }
            }
        }
    }

    fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            "[a-z]{1,4}",
            "[A-Z]{1,3}",
            "[ \t\r\n]{1,4}",
            "[0-9]{1,7}",
            "['’](s|t|re|ve|m|ll|d|S|RE|ſ)",
            "\\PC{1,3}",
            "\\p{M}{1,2}",
            "[一-龥ぁ-んァ-ン가-힣々〇]{1,3}",
            "[\\p{Lu}\\p{Lt}\\p{Ll}\\p{Lm}]{1,3}",
            "[!-/:-@\\[-`{-~]{1,3}",
            "[½²Ⅷ٣४１_]{1,2}",
            any::<String>(),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    /// Splits with a backtracking engine at the matches of `expression`.
    fn by_backtracking(expression: &Regex, texts: Vec<String>) -> Vec<String> {
        let mut pieces = Vec::new();
        for text in texts {
            let mut start = 0;
            for found in expression.find_iter(&text) {
                let found = found.unwrap();
                for end in [found.start(), found.end()] {
                    if start < end {
                        pieces.push(text[start..end].to_owned());
                        start = end;
                    }
                }
            }
            pieces.extend((start < text.len()).then(|| text[start..].to_owned()));
        }
        pieces
    }

    /// Returns the expression in the models' tokenizers. `\w` of their engine, which `\b` uses, is
    /// spelled out.
    fn as_expression(pass: &Pass) -> &'static str {
        match *pass {
            Pass::Cut(expression) => expression,
            Pass::Group(Thousands::All) => r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            Pass::Group(Thousands::AtWordEnds) => {
                r"\d{1,3}(?=(?:\d{3})*(?![\p{Alphabetic}\p{M}\p{Nd}\p{Pc}²³¹¼-¾]))"
            }
            Pass::Group(Thousands::Inside) => r"(?=(\d{3})+(?!\d))",
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn words_match_a_backtracking_engine(texts in prop::collection::vec(text(), 16)) {
            for family in names::families() {
                let regexes: Vec<Regex> = family
                    .passes
                    .iter()
                    .map(|pass| Regex::new(as_expression(pass)).unwrap())
                    .collect();
                let pre = PreTokenizer::new(family);
                for text in &texts {
                    let mut words = Vec::new();
                    pre.split(text, &mut |word| words.push(word.to_owned()));
                    let expected = regexes.iter().fold(vec![text.clone()], |pieces, regex| {
                        by_backtracking(regex, pieces)
                    });
                    let expected: Vec<String> = expected
                        .into_iter()
                        .filter(|word| !word.is_empty())
                        .collect();
                    prop_assert_eq!(words, expected, "{:?}", family.passes);
                }
            }
        }
    }
}
