//! Sets of characters.

use std::sync::LazyLock;

use unicode_general_category::{GeneralCategory, get_general_category};

const LAST: u32 = char::MAX as u32;

/// Inclusive ranges of code points, ascending and not adjacent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct CharSet {
    ranges: Vec<(u32, u32)>,
}

/// Runs of code points with one category.
static CATEGORIES: LazyLock<Vec<(u32, u32, GeneralCategory)>> = LazyLock::new(|| {
    let mut runs: Vec<(u32, u32, GeneralCategory)> = Vec::new();
    for c in '\0'..=char::MAX {
        let category = get_general_category(c);
        match runs.last_mut() {
            Some(run) if run.2 == category => run.1 = u32::from(c),
            _ => runs.push((u32::from(c), u32::from(c), category)),
        }
    }
    runs
});

/// The Han script.
const HAN: &[(u32, u32)] = &[
    (0x2E80, 0x2E99),
    (0x2E9B, 0x2EF3),
    (0x2F00, 0x2FD5),
    (0x3005, 0x3005),
    (0x3007, 0x3007),
    (0x3021, 0x3029),
    (0x3038, 0x303B),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFA6D),
    (0xFA70, 0xFAD9),
    (0x16FE2, 0x16FE3),
    (0x16FF0, 0x16FF1),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B739),
    (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1),
    (0x2CEB0, 0x2EBE0),
    (0x2EBF0, 0x2EE5D),
    (0x2F800, 0x2FA1D),
    (0x30000, 0x3134A),
    (0x31350, 0x323AF),
];

impl CharSet {
    pub(super) fn from_ranges(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match joined.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => {
                    before.1 = before.1.max(last)
                }
                _ => joined.push((first, last)),
            }
        }
        Self { ranges: joined }
    }

    pub(super) fn one(c: char) -> Self {
        Self {
            ranges: vec![(u32::from(c), u32::from(c))],
        }
    }

    /// Returns the set of `\s`.
    pub(super) fn white_space() -> Self {
        let ranges = ('\0'..='\u{3000}').filter(|c| c.is_whitespace());
        Self::from_ranges(ranges.map(|c| (u32::from(c), u32::from(c))).collect())
    }

    /// Returns the set of `\p{name}`, or `None` for a name that no expression here uses.
    pub(super) fn property(name: &str) -> Option<Self> {
        use GeneralCategory as G;
        let categories: &[G] = match name {
            "Lu" => &[G::UppercaseLetter],
            "Ll" => &[G::LowercaseLetter],
            "Lt" => &[G::TitlecaseLetter],
            "Lm" => &[G::ModifierLetter],
            "Lo" => &[G::OtherLetter],
            "L" => &[
                G::UppercaseLetter,
                G::LowercaseLetter,
                G::TitlecaseLetter,
                G::ModifierLetter,
                G::OtherLetter,
            ],
            "M" => &[G::NonspacingMark, G::SpacingMark, G::EnclosingMark],
            "Nd" => &[G::DecimalNumber],
            "N" => &[G::DecimalNumber, G::LetterNumber, G::OtherNumber],
            "P" => &[
                G::ConnectorPunctuation,
                G::DashPunctuation,
                G::OpenPunctuation,
                G::ClosePunctuation,
                G::InitialPunctuation,
                G::FinalPunctuation,
                G::OtherPunctuation,
            ],
            "S" => &[
                G::MathSymbol,
                G::CurrencySymbol,
                G::ModifierSymbol,
                G::OtherSymbol,
            ],
            "Han" => return Some(Self::from_ranges(HAN.to_vec())),
            _ => return None,
        };
        let runs = CATEGORIES.iter().filter(|run| categories.contains(&run.2));
        Some(Self::from_ranges(
            runs.map(|&(first, last, _)| (first, last)).collect(),
        ))
    }

    #[must_use]
    pub(super) fn union(mut self, other: Self) -> Self {
        self.ranges.extend(other.ranges);
        Self::from_ranges(self.ranges)
    }

    #[must_use]
    pub(super) fn complement(&self) -> Self {
        let mut ranges = Vec::with_capacity(self.ranges.len() + 1);
        let mut next = 0;
        for &(first, last) in &self.ranges {
            if next < first {
                ranges.push((next, first - 1));
            }
            next = last + 1;
        }
        if next <= LAST {
            ranges.push((next, LAST));
        }
        Self { ranges }
    }

    #[must_use]
    pub(super) fn intersection(&self, other: &Self) -> Self {
        self.complement().union(other.complement()).complement()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }
}
