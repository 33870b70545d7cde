//! Cutting text into words before byte-level BPE.
//!
//! Models define this by regular expressions with Unicode classes. Here each is a matcher written
//! out by hand: one pass over the characters, constant look-ahead except in runs of white space,
//! which are consumed as they are looked through. So the time is linear in the text, whatever the
//! text is.

use unicode_general_category::{GeneralCategory, get_general_category};

use crate::error::VocabError;

/// How text is cut into words (`tokenizer.ggml.pre`). Each variant stands for a family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PreTokenizer {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// Each number alone, then as [`Gpt2`](Self::Gpt2): `\p{N}`.
    Starcoder,
    /// Punctuation apart (`` [\p{P}$+<=>^~|`]+ ``), then as [`Gpt2`](Self::Gpt2), then digits by
    /// threes.
    Falcon,
    /// Files that name no pre-tokenizer: punctuation apart (`[\p{P}$+<=>^~|]+`), then as
    /// [`Gpt2`](Self::Gpt2), then numbers apart (`\p{N}+`), then digits by threes.
    Default,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    Llama3,
    /// As [`Llama3`](Self::Llama3), with each number alone.
    Qwen2,
    /// As [`Qwen2`](Self::Qwen2), with combining marks (`\p{M}`) as letters.
    Qwen35,
}

/// What follows from a pre-tokenizer's name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreTokenizerSettings {
    pub kind: PreTokenizer,
    /// A word that is a token is taken whole, without merging.
    pub ignore_merges: bool,
    pub add_bos: bool,
}

/// Name, kind, whether merges are ignored for whole words, whether a begin-of-text token is added
/// by default.
const NAMES: &[(&str, PreTokenizer, bool, bool)] = &[
    ("default", PreTokenizer::Default, false, false),
    ("llama3", PreTokenizer::Llama3, true, true),
    ("llama-v3", PreTokenizer::Llama3, true, true),
    ("llama-bpe", PreTokenizer::Llama3, true, true),
    ("falcon3", PreTokenizer::Llama3, true, true),
    ("falcon-h1", PreTokenizer::Llama3, true, true),
    ("pixtral", PreTokenizer::Llama3, true, true),
    ("midm-2.0", PreTokenizer::Llama3, true, true),
    ("lfm2", PreTokenizer::Llama3, true, true),
    ("jina-v5-nano", PreTokenizer::Llama3, true, true),
    ("dbrx", PreTokenizer::Llama3, false, false),
    ("smaug-bpe", PreTokenizer::Llama3, false, false),
    ("qwen2", PreTokenizer::Qwen2, false, false),
    ("deepseek-r1-qwen", PreTokenizer::Qwen2, false, false),
    ("kormo", PreTokenizer::Qwen2, false, false),
    ("f2llmv2", PreTokenizer::Qwen2, false, false),
    ("megrez", PreTokenizer::Qwen2, false, false),
    ("stablelm2", PreTokenizer::Qwen2, false, false),
    ("hunyuan", PreTokenizer::Qwen2, false, false),
    ("solar-open", PreTokenizer::Qwen2, false, false),
    ("grok-2", PreTokenizer::Qwen2, false, false),
    ("qwen35", PreTokenizer::Qwen35, false, false),
    ("gpt-2", PreTokenizer::Gpt2, false, false),
    ("phi-2", PreTokenizer::Gpt2, false, false),
    ("jina-es", PreTokenizer::Gpt2, false, false),
    ("jina-de", PreTokenizer::Gpt2, false, false),
    ("gigachat", PreTokenizer::Gpt2, false, false),
    ("a.x-4.0", PreTokenizer::Gpt2, false, false),
    ("mellum", PreTokenizer::Gpt2, false, false),
    ("exaone4", PreTokenizer::Gpt2, false, false),
    ("mpt", PreTokenizer::Gpt2, false, false),
    ("olmo", PreTokenizer::Gpt2, false, false),
    ("jais", PreTokenizer::Gpt2, false, false),
    ("trillion", PreTokenizer::Gpt2, false, false),
    ("granite-docling", PreTokenizer::Gpt2, false, false),
    ("starcoder", PreTokenizer::Starcoder, false, false),
    ("refact", PreTokenizer::Starcoder, false, false),
    ("command-r", PreTokenizer::Starcoder, false, false),
    ("smollm", PreTokenizer::Starcoder, false, false),
    ("codeshell", PreTokenizer::Starcoder, false, false),
    ("exaone", PreTokenizer::Starcoder, false, false),
    ("minerva-7b", PreTokenizer::Starcoder, false, false),
    ("mellum2", PreTokenizer::Starcoder, false, false),
    ("falcon", PreTokenizer::Falcon, false, false),
];

fn supported_names() -> String {
    let names: Vec<&str> = NAMES.iter().map(|entry| entry.0).collect();
    names.join(", ")
}

/// The settings for `tokenizer.ggml.pre`. A file without the key, or with an empty one, gets the
/// default.
pub(crate) fn settings(name: Option<&str>) -> Result<PreTokenizerSettings, VocabError> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or("default");
    let &(_, kind, ignore_merges, add_bos) = NAMES
        .iter()
        .find(|entry| entry.0 == name)
        .ok_or_else(|| VocabError::UnknownPreTokenizer {
            name: name.to_owned(),
            supported: supported_names(),
        })?;
    Ok(PreTokenizerSettings {
        kind,
        ignore_merges,
        add_bos,
    })
}

impl PreTokenizer {
    /// Calls `emit` for each word of `text`, in order; joined, the words are the text again.
    pub fn split(self, text: &str, emit: &mut dyn FnMut(&str)) {
        match self {
            Self::Gpt2 => words(text, gpt2_word, emit),
            Self::Starcoder => {
                isolate_each(text, is_number, &mut |part| words(part, gpt2_word, emit))
            }
            Self::Falcon => isolate_runs(
                text,
                |c| c == '`' || is_punctuation_or_operator(c),
                &mut |part| {
                    words(part, gpt2_word, &mut |word| digits_by_threes(word, emit));
                },
            ),
            Self::Default => isolate_runs(text, is_punctuation_or_operator, &mut |part| {
                words(part, gpt2_word, &mut |word| {
                    isolate_runs(word, is_number, &mut |piece| digits_by_threes(piece, emit));
                });
            }),
            Self::Llama3 => words(text, |text, pos| modern_word(text, pos, 3, false), emit),
            Self::Qwen2 => words(text, |text, pos| modern_word(text, pos, 1, false), emit),
            Self::Qwen35 => words(text, |text, pos| modern_word(text, pos, 1, true), emit),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Mark,
    Space,
    Other,
}

fn class(c: char) -> Class {
    if c.is_ascii() {
        return match c {
            'a'..='z' | 'A'..='Z' => Class::Letter,
            '0'..='9' => Class::Number,
            ' ' | '\t'..='\r' => Class::Space,
            _ => Class::Other,
        };
    }
    use GeneralCategory as G;
    match get_general_category(c) {
        G::UppercaseLetter
        | G::LowercaseLetter
        | G::TitlecaseLetter
        | G::ModifierLetter
        | G::OtherLetter => Class::Letter,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => Class::Number,
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => Class::Mark,
        _ if c.is_whitespace() => Class::Space,
        _ => Class::Other,
    }
}

fn is_number(c: char) -> bool {
    class(c) == Class::Number
}

fn is_punctuation_or_operator(c: char) -> bool {
    use GeneralCategory as G;
    matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|')
        || matches!(
            get_general_category(c),
            G::ConnectorPunctuation
                | G::DashPunctuation
                | G::OpenPunctuation
                | G::ClosePunctuation
                | G::InitialPunctuation
                | G::FinalPunctuation
                | G::OtherPunctuation
        )
}

/// The character at `position`, none at the end.
fn at(text: &str, position: usize) -> Option<char> {
    text[position..].chars().next()
}

/// Where the run of characters that satisfy `belongs` ends.
fn run_end(text: &str, start: usize, belongs: impl Fn(char) -> bool) -> usize {
    text[start..]
        .find(|c| !belongs(c))
        .map_or(text.len(), |length| start + length)
}

/// Emits one word after another; `word_end` gives the end of the word at a position, behind that
/// position.
fn words(text: &str, word_end: impl Fn(&str, usize) -> usize, emit: &mut dyn FnMut(&str)) {
    let mut start = 0;
    while start < text.len() {
        let end = word_end(text, start);
        emit(&text[start..end]);
        start = end;
    }
}

fn gpt2_word(text: &str, start: usize) -> usize {
    if let Some(end) = contraction_end(text, start, false) {
        return end;
    }
    let body = start + usize::from(text.as_bytes()[start] == b' ');
    match at(text, body).map(class) {
        Some(Class::Letter) => run_end(text, body, |c| class(c) == Class::Letter),
        Some(Class::Number) => run_end(text, body, is_number),
        Some(Class::Mark | Class::Other) => run_end(text, body, |c| {
            matches!(class(c), Class::Mark | Class::Other)
        }),
        Some(Class::Space) | None => space_end(text, start),
    }
}

/// The pattern of llama-3 and of what came after it, with up to `digits` numbers in a word.
fn modern_word(text: &str, start: usize, digits: usize, marks_are_letters: bool) -> usize {
    if let Some(end) = contraction_end(text, start, true) {
        return end;
    }
    let is_letter = |c: char| match class(c) {
        Class::Letter => true,
        Class::Mark => marks_are_letters,
        _ => false,
    };
    let is_other = |c: char| match class(c) {
        Class::Other => true,
        Class::Mark => !marks_are_letters,
        _ => false,
    };
    let Some(first) = at(text, start) else {
        return text.len();
    };
    let second = start + first.len_utf8();
    if is_number(first) {
        let numbers = text[start..]
            .chars()
            .take(digits)
            .take_while(|&c| is_number(c));
        return start + numbers.map(char::len_utf8).sum::<usize>();
    }
    if is_letter(first)
        || (!matches!(first, '\r' | '\n') && at(text, second).is_some_and(is_letter))
    {
        return run_end(text, second, is_letter);
    }
    let body = if first == ' ' { second } else { start };
    if at(text, body).is_some_and(is_other) {
        let end = run_end(text, body, is_other);
        return run_end(text, end, |c| matches!(c, '\r' | '\n'));
    }
    let end = run_end(text, start, |c| class(c) == Class::Space);
    match text[start..end].rfind(['\r', '\n']) {
        Some(newline) => start + newline + 1,
        None => space_end(text, start),
    }
}

/// The end of `'s`, `'re` and so on, if one starts here.
fn contraction_end(text: &str, start: usize, ignore_case: bool) -> Option<usize> {
    let bytes = text.as_bytes().get(start..)?;
    if bytes.first() != Some(&b'\'') {
        return None;
    }
    let letter = |index: usize| {
        bytes.get(index).map(|byte| {
            if ignore_case {
                byte.to_ascii_lowercase()
            } else {
                *byte
            }
        })
    };
    match (letter(1)?, letter(2)) {
        (b's' | b't' | b'm' | b'd', _) => Some(start + 2),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(start + 3),
        _ => None,
    }
}

/// The end of a run of white space: its last character is left to the word that follows, if one
/// does and if others are left.
fn space_end(text: &str, start: usize) -> usize {
    let end = run_end(text, start, |c| class(c) == Class::Space);
    let last = text[start..end]
        .char_indices()
        .next_back()
        .map_or(0, |(offset, _)| offset);
    if end == text.len() || last == 0 {
        end
    } else {
        start + last
    }
}

/// Emits runs of characters that satisfy `belongs`, and what lies between them.
fn isolate_runs(text: &str, belongs: impl Fn(char) -> bool, emit: &mut dyn FnMut(&str)) {
    let run = |text: &str, start: usize| {
        let inside = at(text, start).is_some_and(&belongs);
        run_end(text, start, |c| belongs(c) == inside)
    };
    words(text, run, emit);
}

/// Emits each character that satisfies `belongs` alone, and what lies between them.
fn isolate_each(text: &str, belongs: impl Fn(char) -> bool, emit: &mut dyn FnMut(&str)) {
    let part = |text: &str, start: usize| match at(text, start) {
        Some(c) if belongs(c) => start + c.len_utf8(),
        _ => run_end(text, start, |c| !belongs(c)),
    };
    words(text, part, emit);
}

/// Emits each three ASCII digits in a row alone, and what lies between them.
fn digits_by_threes(text: &str, emit: &mut dyn FnMut(&str)) {
    let bytes = text.as_bytes();
    let (mut start, mut position) = (0, 0);
    while let Some(three) = bytes.get(position..position + 3) {
        if three.iter().all(u8::is_ascii_digit) {
            if start < position {
                emit(&text[start..position]);
            }
            emit(&text[position..position + 3]);
            position += 3;
            start = position;
        } else {
            position += 1;
        }
    }
    if start < text.len() {
        emit(&text[start..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [PreTokenizer; 7] = [
        PreTokenizer::Gpt2,
        PreTokenizer::Starcoder,
        PreTokenizer::Falcon,
        PreTokenizer::Default,
        PreTokenizer::Llama3,
        PreTokenizer::Qwen2,
        PreTokenizer::Qwen35,
    ];

    fn split(kind: PreTokenizer, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        kind.split(text, &mut |word| words.push(word.to_owned()));
        words
    }

    #[test]
    fn gpt2_words() {
        let text = "He's 12 cats,  and\n\n x'LL!  ";
        let words = [
            "He", "'s", " 12", " cats", ",", " ", " and", "\n\n", " x", "'", "LL", "!", "  ",
        ];
        assert_eq!(split(PreTokenizer::Gpt2, text), words);
        assert_eq!(split(PreTokenizer::Gpt2, " "), [" "]);
        assert_eq!(split(PreTokenizer::Gpt2, "\n a"), ["\n", " a"]);
    }

    #[test]
    fn llama3_words() {
        let text = "He'S 12345 (cats),\n\n  and \n  \n  x\t!";
        let words = [
            "He", "'S", " ", "123", "45", " (", "cats", "),\n\n", " ", " and", " \n  \n", " ",
            " x", "\t", "!",
        ];
        assert_eq!(split(PreTokenizer::Llama3, text), words);
        assert_eq!(
            split(PreTokenizer::Llama3, "\u{3000}字\u{FF11}２３４"),
            ["\u{3000}字", "１２３", "４"]
        );
        assert_eq!(split(PreTokenizer::Llama3, "a "), ["a", " "]);
    }

    #[test]
    fn qwen_words() {
        assert_eq!(
            split(PreTokenizer::Qwen2, "x 123"),
            ["x", " ", "1", "2", "3"]
        );
        // A combining acute accent ends a word for Qwen2 and not for Qwen3.5.
        assert_eq!(split(PreTokenizer::Qwen2, "e\u{301}te"), ["e", "\u{301}te"]);
        assert_eq!(split(PreTokenizer::Qwen35, "e\u{301}te"), ["e\u{301}te"]);
        assert_eq!(
            split(PreTokenizer::Qwen2, " \u{301}\u{301}\n"),
            [" \u{301}\u{301}\n"]
        );
    }

    #[test]
    fn chained_splits() {
        assert_eq!(
            split(PreTokenizer::Starcoder, "a 12 b"),
            ["a", " ", "1", "2", " b"]
        );
        assert_eq!(
            split(PreTokenizer::Falcon, "a=`1234"),
            ["a", "=`", "123", "4"]
        );
        assert_eq!(
            split(PreTokenizer::Default, "a=` 1234½"),
            ["a", "=", "`", " ", "123", "4½"]
        );
    }

    #[test]
    fn names() {
        assert_eq!(settings(None).unwrap().kind, PreTokenizer::Default);
        assert_eq!(settings(Some("")).unwrap().kind, PreTokenizer::Default);
        let llama = settings(Some("llama-bpe")).unwrap();
        assert!(llama.kind == PreTokenizer::Llama3 && llama.ignore_merges && llama.add_bos);
        let message = settings(Some("dodo")).unwrap_err().to_string();
        assert!(
            message.starts_with("tokenizer.ggml.pre: pre-tokenizer 'dodo' is not supported"),
            "{message}"
        );
        assert!(message.contains("qwen2, deepseek-r1-qwen"), "{message}");
    }

    proptest! {
        #[test]
        fn words_are_not_empty_and_join_to_the_text(text in "([ a-zA-Z0-9'\r\n\t.]|\\PC|\\s|\\p{M}){0,40}") {
            for kind in ALL {
                let words = split(kind, &text);
                prop_assert!(words.iter().all(|word| !word.is_empty()));
                prop_assert_eq!(words.concat(), text.as_str());
            }
        }
    }
}
