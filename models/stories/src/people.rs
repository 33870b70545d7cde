//! Characters of a story.

use crate::random::Random;
use crate::words::{BOYS, GIRLS, TRAITS};

/// A child, with the pronouns that match the name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Child {
    pub name: &'static str,
    /// `she` or `he`.
    pub they: &'static str,
    /// `She` or `He`.
    pub capital: &'static str,
    /// `her` or `him`.
    pub them: &'static str,
    /// `her` or `his`.
    pub their: &'static str,
    /// `girl` or `boy`.
    pub kind: &'static str,
    pub nature: &'static str,
}

impl Child {
    /// Creates a child whose name differs from `taken`.
    pub fn new(random: &mut Random, taken: &'static str) -> Self {
        let girl = random.one_in(2);
        let name = random.other_than(if girl { GIRLS } else { BOYS }, taken);
        let nature = random.of(TRAITS);
        if girl {
            Child {
                name,
                they: "she",
                capital: "She",
                them: "her",
                their: "her",
                kind: "girl",
                nature,
            }
        } else {
            Child {
                name,
                they: "he",
                capital: "He",
                them: "him",
                their: "his",
                kind: "boy",
                nature,
            }
        }
    }
}

/// An adult: the name that the child uses, and the role that the story mentions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elder {
    /// `Mom`.
    pub name: &'static str,
    /// `mom`, as in `her mom`.
    pub role: &'static str,
    /// `She` or `He`.
    pub capital: &'static str,
}

impl Elder {
    pub fn new(random: &mut Random) -> Self {
        let of = |name, role, capital| Elder {
            name,
            role,
            capital,
        };
        match random.below(4) {
            0 => of("Mom", "mom", "She"),
            1 => of("Dad", "dad", "He"),
            2 => of("Grandma", "grandma", "She"),
            _ => of("Grandpa", "grandpa", "He"),
        }
    }
}
