//! WordPiece, as in BERT: text is normalized and split into words, and each word is split into the
//! longest tokens from the left.
//!
//! The normalizer is that of the models' own tokenizers. It removes control characters, separates
//! Chinese characters into words, and removes accents and capital letters if the vocabulary has
//! none. It is not lossless.

use unicode_general_category::{GeneralCategory, get_general_category};
use unicode_normalization::UnicodeNormalization;

use crate::spm::ESCAPED_SPACE;
use crate::trie::Trie;
use crate::vocab::{Vocab, VocabData};
use crate::word_cache::WordCache;

/// Maximum length of words, in characters; longer ones are unknown.
const MAX_WORD_LEN: usize = 100;

/// Chinese characters in BERT's definition.
const CHINESE: [(char, char); 8] = [
    ('\u{4E00}', '\u{9FFF}'),
    ('\u{3400}', '\u{4DBF}'),
    ('\u{20000}', '\u{2A6DF}'),
    ('\u{2A700}', '\u{2B73F}'),
    ('\u{2B740}', '\u{2B81F}'),
    // BERT's original code starts at 2B820; the tokenizers of the models start here.
    ('\u{2B920}', '\u{2CEAF}'),
    ('\u{F900}', '\u{FAFF}'),
    ('\u{2F800}', '\u{2FA1F}'),
];

/// Returns the text of a token that starts a word, after the `▁` that marks it. A single `▁` is the
/// character within a word.
fn begun(token: &[u8]) -> Option<&[u8]> {
    let rest = token.strip_prefix(ESCAPED_SPACE.as_bytes());
    rest.filter(|rest| !rest.is_empty())
}

/// The part of a WordPiece tokenizer that is not in the vocabulary.
#[derive(Debug)]
pub(crate) struct Wpm {
    /// Tokens that start a word, without the `▁` that marks them.
    begin: Trie,
    /// Tokens that continue a word.
    go_on: Trie,
    unknown: Option<u32>,
    lowercase: bool,
    strip_accents: bool,
}

impl Wpm {
    pub(crate) fn new(vocab: &Vocab, data: &VocabData) -> Self {
        let texts = || {
            let tokens = (0..).zip(&vocab.tokens);
            tokens.filter(|(_, token)| std::str::from_utf8(&token.text).is_ok())
        };
        let lowercase = data.lowercase.unwrap_or(true);
        Self {
            begin: Trie::new(texts().filter_map(|(id, token)| Some((begun(&token.text)?, id)))),
            go_on: Trie::new(
                texts()
                    .map(|(id, token)| (&*token.text, id))
                    .filter(|(text, _)| begun(text).is_none()),
            ),
            unknown: vocab.special.unk,
            lowercase,
            strip_accents: data.strip_accents.unwrap_or(lowercase),
        }
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, text: &str, output: &mut Vec<u32>) {
        let normalized = self.normalize(text);
        let mut cache = WordCache::new(normalized.len());
        for word in normalized.split(' ').filter(|word| !word.is_empty()) {
            cache.tokens_of(word.as_bytes(), output, |output| {
                self.tokenize_word(word, output)
            });
        }
    }

    fn tokenize_word(&self, word: &str, output: &mut Vec<u32>) {
        let before = output.len();
        let mut rest = word.as_bytes();
        let mut trie = &self.begin;
        let is_short = word.chars().nth(MAX_WORD_LEN).is_none();
        while is_short && !rest.is_empty() {
            let Some((token, length)) = trie.longest(rest) else {
                break;
            };
            output.push(token);
            rest = &rest[length..];
            trie = &self.go_on;
        }
        if !rest.is_empty() {
            output.truncate(before);
            output.extend(self.unknown);
        }
    }

    /// Returns the words of a text, separated by spaces.
    fn normalize(&self, text: &str) -> String {
        let mut normalized = String::with_capacity(text.len() + text.len() / 4);
        let spaced = text.chars().flat_map(|c| {
            let (before, c, behind) = match c {
                ' '..='~' => (None, Some(c), None),
                '\t' | '\n' | '\r' => (None, Some(' '), None),
                '\0' | '\u{FFFD}' => (None, None, None),
                _ if is_control(c) => (None, None, None),
                _ if c.is_whitespace() => (None, Some(' '), None),
                _ if is_chinese(c) => (Some(' '), Some(c), Some(' ')),
                _ => (None, Some(c), None),
            };
            before.into_iter().chain(c).chain(behind)
        });
        let mut push = |c: char| {
            if is_punctuation(c) {
                normalized.push(' ');
                normalized.push(c);
                normalized.push(' ');
            } else {
                normalized.push(c);
            }
        };
        let mut push_case = |c: char| match (self.lowercase, c.is_ascii()) {
            (false, _) => push(c),
            (true, true) => push(c.to_ascii_lowercase()),
            (true, false) => c.to_lowercase().for_each(&mut push),
        };
        match (self.strip_accents, text.is_ascii()) {
            (true, false) => spaced.nfd().filter(|&c| !is_accent(c)).for_each(push_case),
            _ => spaced.for_each(&mut push_case),
        }
        normalized
    }
}

/// Returns whether a character is a control, format or private-use character.
fn is_control(c: char) -> bool {
    use GeneralCategory as G;
    !c.is_ascii()
        && matches!(
            get_general_category(c),
            G::Control | G::Format | G::PrivateUse
        )
        || c.is_ascii_control()
}

fn is_accent(c: char) -> bool {
    !c.is_ascii() && get_general_category(c) == GeneralCategory::NonspacingMark
}

fn is_chinese(c: char) -> bool {
    CHINESE
        .iter()
        .any(|&(first, last)| (first..=last).contains(&c))
}

/// Returns whether a character is punctuation, which includes all ASCII symbols.
fn is_punctuation(c: char) -> bool {
    use GeneralCategory as G;
    if c.is_ascii() {
        return c.is_ascii_punctuation();
    }
    matches!(
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

#[cfg(test)]
mod tests {
    use crate::tokenizer::Tokenizer;
    use crate::vocab::{TokenizerModel, VocabData};

    /// In a file's encoding, `▁` within a word (`##▁`) looks like the start of a word without text.
    #[test]
    fn the_word_start_mark_is_also_a_character() {
        let texts = ["[UNK]", "▁▁", "▁", "▁a", "b"];
        let texts = texts.map(|text| text.as_bytes().to_vec()).to_vec();
        let tokenizer = Tokenizer::new(VocabData::new(TokenizerModel::Bert, texts)).unwrap();
        let tokens = |text| tokenizer.tokenize(text, false, false).unwrap();
        assert_eq!(tokens("▁▁ a▁b ▁"), [1, 2, 3, 2, 4, 1]);
    }
}
