//! Limits the digits of numbers in JSON. The engine has no limit for fractions and exponents.

/// Maximum digits in a row outside of strings. An F64 has 17 significant digits; zeros may precede
/// them.
const MAX_DIGITS: u32 = 40;
/// Assumed maximum digits of a token: a run that is shorter by as much needs no check of all
/// tokens. A longer token may exceed the bound once.
const MAX_TOKEN_DIGITS: u32 = 16;

/// State of a scanner of JSON that counts digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digits {
    /// Number of digits at the end of the text, outside of strings.
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

    /// Returns the state after `text`.
    pub fn behind(mut self, text: &[u8]) -> Self {
        text.iter().for_each(|byte| self.push(*byte));
        self
    }

    /// Returns true if a number is too long after `text`.
    pub fn overflow(mut self, text: &[u8]) -> bool {
        text.iter().any(|byte| {
            self.push(*byte);
            self.count > MAX_DIGITS
        })
    }

    /// Returns true if a number may be too long after the next token.
    pub fn may_overflow(self) -> bool {
        self.count + MAX_TOKEN_DIGITS > MAX_DIGITS
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
