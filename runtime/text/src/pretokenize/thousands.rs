//! Digits in groups of three from the right: 1234567 as 1, 234, 567.
//!
//! As expressions these look ahead to the end of the digits from each of them.

use unicode_general_category::{GeneralCategory, get_general_category};

/// Which digits are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thousands {
    /// All numbers, apart from what surrounds them.
    All,
    /// Digits at whose end a word ends, apart from what surrounds them: `\d{1,3}(?=(?:\d{3})*\b)`.
    AtWordEnds,
    /// Digits, with what lies before them left at the first group: `(?=(\d{3})+(?!\d))`.
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

/// What `\w` is, but for digits, in the engine of the models' tokenizers. Of fractions and powers it has those of Latin-1.
fn is_word(c: char) -> bool {
    use GeneralCategory as G;
    match get_general_category(c) {
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark | G::ConnectorPunctuation => true,
        G::OtherNumber => c <= '\u{FF}' || c.is_alphabetic(),
        _ => c.is_alphabetic(),
    }
}
