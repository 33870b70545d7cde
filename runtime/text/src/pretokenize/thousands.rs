//! Groups digits by three from the right: 1234567 becomes 1, 234, 567.
//!
//! As expressions, these would look ahead to the end of the digits from each of them.

use unicode_general_category::{GeneralCategory, get_general_category};

/// Kind of digits to group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thousands {
    /// All numbers, separated from the surrounding text.
    All,
    /// Digits at the end of a word, separated from the surrounding text: `\d{1,3}(?=(?:\d{3})*\b)`.
    AtWordEnds,
    /// Digits, with the text before them attached to the first group: `(?=(\d{3})+(?!\d))`.
    Inside,
}

impl Thousands {
    pub(super) fn split<'t>(self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        let mut start = 0;
        let mut characters = text.char_indices().peekable();
        let mut digits = Vec::new();
        while let Some((at, c)) = characters.next() {
            if !self.groups(c) {
                continue;
            }
            digits.clear();
            digits.push(at);
            while let Some((at, _)) = characters.next_if(|&(_, c)| self.groups(c)) {
                digits.push(at);
            }
            let end = characters.peek().map_or(text.len(), |next| next.0);
            if self == Self::AtWordEnds && characters.peek().is_some_and(|next| is_word(next.1)) {
                continue;
            }
            let lead = digits.len() % 3;
            let mut cut = |at: usize| {
                if start < at {
                    emit(&text[start..at]);
                    start = at;
                }
            };
            if self != Self::Inside {
                cut(digits[0]);
            }
            digits.iter().skip(lead).step_by(3).for_each(|&at| cut(at));
            if self != Self::Inside {
                cut(end);
            }
        }
        if start < text.len() {
            emit(&text[start..]);
        }
    }

    fn groups(self, c: char) -> bool {
        use GeneralCategory as G;
        match get_general_category(c) {
            G::DecimalNumber => true,
            G::LetterNumber | G::OtherNumber => self == Self::All,
            _ => false,
        }
    }
}

/// Returns whether a character is in `\w` of the engine of the models' tokenizers, except digits.
/// That class contains the fractions and powers of Latin-1.
fn is_word(c: char) -> bool {
    use GeneralCategory as G;
    match get_general_category(c) {
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark | G::ConnectorPunctuation => true,
        G::OtherNumber => c <= '\u{FF}' || c.is_alphabetic(),
        _ => c.is_alphabetic(),
    }
}
