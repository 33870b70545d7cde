//! An end to the digits of JSON's numbers, for which the engine has no bound.

/// Most digits in a row outside of strings. An F64 has 17 digits that matter, and zeros may stand
/// before them.
const MOST_DIGITS: u32 = 40;
/// Tokens with more digits than this are not expected: a shorter run needs no look at all tokens.
const MOST_IN_TOKEN: u32 = 16;

/// What the end of a text means in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digits {
    /// Digits at the end of the text, outside of strings.
    count: u32,
    is_string: bool,
    is_escaped: bool,
}

impl Digits {
    fn push(&mut self, byte: u8) {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' => self.is_escaped = self.is_string,
            b'"' => self.is_string = !self.is_string,
            _ => {}
        }
        let is_digit = byte.is_ascii_digit() && !self.is_string;
        self.count = if is_digit { self.count + 1 } else { 0 };
    }

    /// The state behind a further text.
    pub fn behind(mut self, text: &[u8]) -> Self {
        text.iter().for_each(|byte| self.push(*byte));
        self
    }

    /// Whether a further text makes a number too long.
    pub fn overflow(mut self, text: &[u8]) -> bool {
        text.iter().any(|byte| {
            self.push(*byte);
            self.count > MOST_DIGITS
        })
    }

    /// Whether a further token may make a number too long.
    pub fn may_overflow(self) -> bool {
        self.count + MOST_IN_TOKEN > MOST_DIGITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_outside_of_strings_are_counted() {
        let count = |text: &str| Digits::default().behind(text.as_bytes()).count;
        assert_eq!(count("{\"a\": [-12.345"), 3);
        assert_eq!(count("{\"a\": \"12345"), 0);
        assert_eq!(count(r#"{"a\"": 12"#), 2);
        assert_eq!(count(r#"{"a\\": 1e34"#), 2);
        assert_eq!(count(r#""\\\"9"#), 0);
        assert_eq!(count("12]"), 0);
        let digits = Digits::default().behind(&[b'3'; 40]);
        assert!(digits.may_overflow() && digits.overflow(b"3, 4") && !digits.overflow(b", 3"));
        assert!(!Digits::default().behind(&[b'3'; 24]).may_overflow());
    }
}
