//! Character sets.

/// Sorted, non-adjacent ranges of code points, without surrogates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CharSet(Vec<(u32, u32)>);

const LAST: u32 = char::MAX as u32;
const SURROGATES: (u32, u32) = (0xD800, 0xDFFF);

impl CharSet {
    /// Returns the characters in these ranges, or all others.
    pub fn new(mut ranges: Vec<(u32, u32)>, is_negated: bool) -> Self {
        if is_negated {
            ranges.push(SURROGATES);
        }
        ranges.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::new();
        for (first, last) in ranges {
            match joined.last_mut() {
                Some(range) if first <= range.1.saturating_add(1) => range.1 = range.1.max(last),
                _ => joined.push((first, last)),
            }
        }
        if is_negated {
            let mut next = 0;
            let mut others = Vec::new();
            for (first, last) in joined {
                if next < first {
                    others.push((next, first - 1));
                }
                next = last + 1;
            }
            if next <= LAST {
                others.push((next, LAST));
            }
            joined = others;
        }
        CharSet(joined)
    }

    /// Returns the set of all characters.
    pub fn any() -> Self {
        CharSet::new(Vec::new(), true)
    }

    /// Returns the set of one character.
    pub fn one(character: char) -> Self {
        CharSet(vec![(character.into(), character.into())])
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the sets intersect.
    pub fn meets(&self, other: &Self) -> bool {
        let (mut a, mut b) = (0, 0);
        while let (Some(x), Some(y)) = (self.0.get(a), other.0.get(b)) {
            if x.1 < y.0 {
                a += 1;
            } else if y.1 < x.0 {
                b += 1;
            } else {
                return true;
            }
        }
        false
    }

    /// Returns the first bytes of the characters in UTF-8.
    pub fn first_bytes(&self) -> Bytes {
        let mut bytes = Bytes::default();
        let first_byte = |code: u32| {
            let mut buffer = [0; 4];
            // At the edge of the surrogates, the neighbour has the same first byte.
            let character = char::from_u32(code).unwrap_or('\u{D7FF}');
            character.encode_utf8(&mut buffer);
            buffer[0]
        };
        for &(first, last) in &self.0 {
            for byte in first_byte(first)..=first_byte(last) {
                bytes.insert(byte);
            }
        }
        bytes
    }
}

/// A set of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes([u64; 4]);

impl Bytes {
    pub fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte / 64)] |= 1 << (byte % 64);
    }

    pub fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    /// Adds all of `other`; returns whether any was new.
    pub fn add(&mut self, other: &Self) -> bool {
        let before = *self;
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
        *self != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn character_ranges_are_merged_and_negated() {
        let set = CharSet::new(vec![(98, 99), (97, 97), (200, 300), (250, 260)], false);
        assert_eq!(set.ranges(), [(97, 99), (200, 300)]);
        let others = CharSet::new(vec![(0, 96), (100, LAST)], true);
        assert_eq!(others.ranges(), [(97, 99)]);
        assert_eq!(CharSet::any().ranges(), [(0, 0xD7FF), (0xE000, LAST)]);
        assert!(CharSet::new(vec![(0, LAST)], true).is_empty());
        assert!(set.meets(&others) && !set.meets(&CharSet::one('d')));
    }

    #[test]
    fn first_bytes_match_utf8() {
        for (range, expected) in [
            ((0x41, 0x43), 0x41..=0x43),
            ((0x7f, 0x80), 0x7f..=0xc2),
            ((0xE000, LAST), 0xEE..=0xF4),
            ((0x400, 0x4ff), 0xD0..=0xD3),
        ] {
            let mut bytes = Bytes::default();
            expected.for_each(|byte| bytes.insert(byte));
            assert_eq!(
                CharSet::new(vec![range], false).first_bytes(),
                bytes,
                "{range:?}"
            );
        }
    }
}
