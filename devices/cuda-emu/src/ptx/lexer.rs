//! Tokens of PTX text.

use super::ParseError;

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A name, directive or mnemonic with its modifiers: `%r1`, `.reg`, `ld.global.u32`.
    Word,
    /// A literal number.
    Number,
    /// A quoted string.
    Text,
    /// A single character.
    Sign(u8),
}

/// A token, as a range of the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PtxToken {
    pub(crate) kind: TokenKind,
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) line: u32,
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn is_word(c: u8) -> bool {
    is_word_start(c) || c.is_ascii_digit()
}

/// Returns the end of the word that starts at `at`. Single colons end a word, because they follow
/// labels; double ones belong to it, as in `shared::cta`.
fn word_end(bytes: &[u8], mut at: usize) -> usize {
    while let Some(&c) = bytes.get(at) {
        if is_word(c) {
            at += 1;
        } else if c == b':'
            && bytes.get(at + 1) == Some(&b':')
            && bytes.get(at + 2).is_some_and(|&c| is_word(c))
        {
            at += 2;
        } else {
            break;
        }
    }
    at
}

/// Splits `text` into tokens, without comments.
pub(crate) fn tokenize(text: &str) -> Result<Vec<PtxToken>, ParseError> {
    let bytes = text.as_bytes();
    if u32::try_from(bytes.len()).is_err() {
        return Err(ParseError::new(0, "the text has more than 4 GiB".into()));
    }
    let mut tokens = Vec::with_capacity(bytes.len() / 5);
    let (mut at, mut line) = (0, 1u32);
    while let Some(&c) = bytes.get(at) {
        if c == b'\n' {
            line += 1;
            at += 1;
        } else if c.is_ascii_whitespace() {
            at += 1;
        } else if bytes[at..].starts_with(b"//") {
            at = bytes[at..]
                .iter()
                .position(|&c| c == b'\n')
                .map_or(bytes.len(), |n| at + n);
        } else if bytes[at..].starts_with(b"/*") {
            let Some(length) = bytes[at + 2..].windows(2).position(|w| w == b"*/") else {
                return Err(ParseError::new(line, "a comment has no end".into()));
            };
            let end = at + 2 + length + 2;
            line += bytes[at..end].iter().filter(|&&c| c == b'\n').count() as u32;
            at = end;
        } else {
            let start = at;
            let kind = if is_word_start(c) {
                at = word_end(bytes, at);
                TokenKind::Word
            } else if c.is_ascii_digit() {
                while bytes
                    .get(at)
                    .is_some_and(|&c| c.is_ascii_alphanumeric() || c == b'.')
                {
                    at += 1;
                }
                TokenKind::Number
            } else if c == b'"' {
                let Some(length) = bytes[at + 1..].iter().position(|&c| c == b'"') else {
                    return Err(ParseError::new(line, "a string has no end".into()));
                };
                at += length + 2;
                TokenKind::Text
            } else if c.is_ascii() {
                at += 1;
                TokenKind::Sign(c)
            } else {
                return Err(ParseError::new(line, "a character is not ASCII".into()));
            };
            tokens.push(PtxToken {
                kind,
                start: start as u32,
                end: at as u32,
                line,
            });
        }
    }
    Ok(tokens)
}

/// Bits of a literal number, with the way in which it was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Literal {
    /// An integer.
    Integer(u64),
    /// The bits of an f32: `0f3F800000`.
    Single(u32),
    /// The bits of an f64: `0d3FF0000000000000`, or a decimal fraction.
    Double(u64),
}

/// Parses a number.
pub(crate) fn parse_number(word: &str) -> Option<Literal> {
    let lower = word.to_ascii_lowercase();
    if let Some(digits) = lower.strip_prefix("0f") {
        return (digits.len() == 8)
            .then(|| u32::from_str_radix(digits, 16).ok().map(Literal::Single))?;
    }
    if let Some(digits) = lower.strip_prefix("0d") {
        return (digits.len() == 16)
            .then(|| u64::from_str_radix(digits, 16).ok().map(Literal::Double))?;
    }
    let digits = lower.strip_suffix('u').unwrap_or(&lower);
    if let Some(hex) = digits.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok().map(Literal::Integer);
    }
    if let Some(binary) = digits.strip_prefix("0b") {
        return u64::from_str_radix(binary, 2).ok().map(Literal::Integer);
    }
    if digits.contains('.') {
        return digits
            .parse::<f64>()
            .ok()
            .map(|v| Literal::Double(v.to_bits()));
    }
    if digits.len() > 1 && digits.starts_with('0') {
        return u64::from_str_radix(digits, 8).ok().map(Literal::Integer);
    }
    digits.parse::<u64>().ok().map(Literal::Integer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_scopes_are_told_apart() {
        let text = "L: ld.shared::cta.b32 %r<4>, 0f3F800000; // rest\n/* a\nb */ x";
        let tokens = tokenize(text).unwrap();
        let words: Vec<&str> = tokens
            .iter()
            .map(|t| &text[t.start as usize..t.end as usize])
            .collect();
        let expected = [
            "L",
            ":",
            "ld.shared::cta.b32",
            "%r",
            "<",
            "4",
            ">",
            ",",
            "0f3F800000",
            ";",
            "x",
        ];
        assert_eq!(words, expected);
        assert_eq!(tokens.last().map(|t| t.line), Some(3));
    }

    #[test]
    fn numbers() {
        assert_eq!(parse_number("0x1F"), Some(Literal::Integer(31)));
        assert_eq!(
            parse_number("0f3F800000"),
            Some(Literal::Single(0x3f80_0000))
        );
        assert_eq!(parse_number("0f3F8"), None);
        assert_eq!(parse_number("12U"), Some(Literal::Integer(12)));
        assert_eq!(parse_number("010"), Some(Literal::Integer(8)));
        assert_eq!(parse_number("1x"), None);
    }
}
