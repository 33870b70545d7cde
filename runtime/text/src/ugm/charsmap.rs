//! The character map in `tokenizer.ggml.precompiled_charsmap`, in SentencePiece's format.
//!
//! It consists of a length in bytes, a double array of that length, which is a trie of texts, and
//! the replacements, each terminated by a NUL. A unit of the double array contains a label (bits 0
//! to 7 and 31), a flag if its text ends there (bit 8), and the distance to its children (bits 10
//! to 30, times 256 if bit 9 is set). A unit for an end contains the position of the replacement.

use crate::error::VocabError;

const KEY: &str = "tokenizer.ggml.precompiled_charsmap";

/// Maximum length of a text. Texts of real maps are far shorter, but units of an invalid file may
/// form cycles.
const MAX_TEXT_LEN: usize = 256;

#[derive(Debug)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

impl Charsmap {
    /// Parses the map. Its contents are checked when they are used.
    pub(super) fn new(bytes: &[u8]) -> Result<Self, VocabError> {
        let bad = |what| VocabError::Charsmap { key: KEY, what };
        let (size, rest) = bytes
            .split_first_chunk()
            .ok_or(bad("is shorter than the length at its beginning"))?;
        let size = u32::from_le_bytes(*size) as usize;
        if !size.is_multiple_of(4) || size == 0 {
            return Err(bad("its double array has no whole number of units"));
        }
        let (units, replacements) = rest
            .split_at_checked(size)
            .ok_or(bad("its double array goes beyond its end"))?;
        if replacements.last() != Some(&0) {
            return Err(bad("its replacements do not end with a NUL"));
        }
        let (units, _) = units.as_chunks();
        Ok(Self {
            units: units.iter().map(|&unit| u32::from_le_bytes(unit)).collect(),
            replacements: replacements.to_vec(),
        })
    }

    /// Returns the replacement for the longest text of the map that is a prefix of `text`, and the
    /// length of that prefix.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(&[u8], usize)> {
        let children = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);
        let mut longest = None;
        let mut place = children(*self.units.first()?);
        for (index, &byte) in text.iter().take(MAX_TEXT_LEN).enumerate() {
            place ^= u32::from(byte);
            let Some(&unit) = self.units.get(place as usize) else {
                break;
            };
            if byte == 0 || unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            place ^= children(unit);
            if unit & (1 << 8) != 0 {
                let value = self.units.get(place as usize).map(|unit| unit & !(1 << 31));
                longest = value.map(|value| (value as usize, index + 1)).or(longest);
            }
        }
        let (start, length) = longest?;
        let replacement = self.replacements.get(start..)?;
        let end = replacement.iter().position(|&byte| byte == 0)?;
        Some((&replacement[..end], length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a map of "a" to "xy" and of "ab" to nothing.
    fn map() -> Vec<u8> {
        let mut units = vec![0u32; 512];
        // The root's children are at 256 ^ byte, those of "a" at 0 ^ byte, and the end of each text
        // is its child 0.
        units[0] = 256 << 10;
        let a = 256 ^ 0x61u32;
        let children_of_a = 128u32;
        units[a as usize] = 0x61 | 1 << 8 | (a ^ children_of_a) << 10;
        units[children_of_a as usize] = 1 << 31;
        let ab = children_of_a ^ 0x62;
        let children_of_ab = 64u32;
        units[ab as usize] = 0x62 | 1 << 8 | (ab ^ children_of_ab) << 10;
        units[children_of_ab as usize] = 1 << 31 | 2;
        let mut bytes = (units.len() as u32 * 4).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(b"xy\0");
        bytes
    }

    #[test]
    fn the_longest_text_is_replaced() {
        let map = Charsmap::new(&map()).unwrap();
        assert_eq!(map.longest(b"ac"), Some((b"xy".as_slice(), 1)));
        assert_eq!(map.longest(b"abc"), Some((b"".as_slice(), 2)));
        assert_eq!(map.longest(b"b"), None);
        assert_eq!(map.longest(b""), None);
    }

    #[test]
    fn damaged_maps_are_errors_or_replace_nothing() {
        let good = map();
        for bad in [
            &good[..3],
            &good[..100],
            &good[..good.len() - 1],
            &[2, 0, 0, 0, 1, 1, 0],
            &[0, 0, 0, 0, 0],
        ] {
            let error = Charsmap::new(bad).unwrap_err().to_string();
            assert!(error.starts_with(KEY), "{error}");
        }
        for at in 4..good.len() - 3 {
            for value in [0, 0x7F, 0xFF] {
                let mut bytes = good.clone();
                bytes[at] = value;
                let map = Charsmap::new(&bytes).unwrap();
                for text in [
                    b"a".as_slice(),
                    b"ab",
                    b"aaaaaaaaaaaaaaaaaaaa",
                    &[0xFF; 600],
                ] {
                    assert!(
                        map.longest(text)
                            .is_none_or(|(_, length)| length <= text.len())
                    );
                }
            }
        }
    }
}
