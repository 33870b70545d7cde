//! UTF-8 that arrives in pieces.

use std::borrow::Cow;
use std::str;

/// Converts a stream of bytes to text: characters are returned as soon as they are complete.
///
/// Over the whole stream, the results of [`push`](Self::push) and [`flush`](Self::flush) equal
/// [`String::from_utf8_lossy`] of all bytes together, wherever the pieces were split: each invalid
/// sequence becomes one U+FFFD.
///
/// ```
/// let mut stream = samite_text::Utf8Stream::new();
/// assert_eq!(stream.push(b"caf\xC3"), "caf");
/// assert_eq!(stream.push(b"\xA9!"), "é!");
/// assert_eq!(stream.flush(), "");
/// ```
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// Start of a character: at most three bytes.
    tail: Vec<u8>,
}

impl Utf8Stream {
    /// Creates an empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Processes the next bytes and returns the characters that are complete now. Borrows from
    /// `bytes` if possible.
    pub fn push<'a>(&mut self, bytes: &'a [u8]) -> Cow<'a, str> {
        if !self.tail.is_empty() {
            let mut joined = std::mem::take(&mut self.tail);
            joined.extend_from_slice(bytes);
            return Cow::Owned(self.decode(&joined).into_owned());
        }
        self.decode(bytes)
    }

    /// Ends the stream: an incomplete character becomes U+FFFD. The stream can be reused.
    pub fn flush(&mut self) -> &'static str {
        let incomplete = !self.tail.is_empty();
        self.tail.clear();
        if incomplete { "\u{FFFD}" } else { "" }
    }

    /// Returns whether bytes are held back because a character is incomplete.
    pub fn is_incomplete(&self) -> bool {
        !self.tail.is_empty()
    }

    fn decode<'a>(&mut self, mut bytes: &'a [u8]) -> Cow<'a, str> {
        let mut text = Cow::Borrowed("");
        loop {
            let error = match str::from_utf8(bytes) {
                Ok(valid) => {
                    text += valid;
                    return text;
                }
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            text += str::from_utf8(valid).unwrap_or_default();
            let Some(invalid) = error.error_len() else {
                self.tail.extend_from_slice(rest);
                return text;
            };
            text += "\u{FFFD}";
            bytes = &rest[invalid..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through_stream<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> String {
        let mut stream = Utf8Stream::new();
        let mut text = String::new();
        for piece in pieces {
            text += &stream.push(piece);
        }
        text += stream.flush();
        text
    }

    #[test]
    fn valid_text_is_borrowed() {
        assert!(matches!(
            Utf8Stream::new().push("aé漢".as_bytes()),
            Cow::Borrowed("aé漢")
        ));
    }

    #[test]
    fn incomplete_bytes_are_held_no_longer_than_needed() {
        let mut stream = Utf8Stream::new();
        for byte in &"🦀".as_bytes()[..3] {
            assert_eq!(stream.push(&[*byte]), "");
            assert!(stream.is_incomplete());
        }
        assert_eq!(stream.push(b"x"), "\u{FFFD}x");
        assert!(!stream.is_incomplete());
    }

    /// Bytes that are often almost UTF-8.
    fn almost_utf8() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<u8>().prop_map(|byte| vec![byte]),
            (0x80..0xF8u8).prop_map(|byte| vec![byte]),
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn every_two_way_split_matches_lossy_decoding(bytes in almost_utf8()) {
            let whole = String::from_utf8_lossy(&bytes);
            for at in 0..=bytes.len() {
                let (left, right) = bytes.split_at(at);
                prop_assert_eq!(&through_stream([left, right].into_iter()), &whole);
            }
        }

        #[test]
        fn every_chunk_size_matches_lossy_decoding(bytes in almost_utf8(),
            size in 1..6usize) {
            prop_assert_eq!(through_stream(bytes.chunks(size)), String::from_utf8_lossy(&bytes));
        }
    }
}
