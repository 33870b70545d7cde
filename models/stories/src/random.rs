//! Random choices that depend on the seed alone, on every machine and in every version.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// A small random number generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(SplitMix64);

impl Random {
    /// Creates the generator of story number `index` of a seed.
    pub fn new(seed: u64, index: u64) -> Self {
        let mixed = SplitMix64::seed_from_u64(seed).next_u64();
        let own = mixed ^ index.wrapping_mul(0xd134_2543_de82_ef95);
        Random(SplitMix64::seed_from_u64(own))
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit.max(1) as u64) as usize
    }

    /// Returns true with probability 1/`n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Chooses one of several values.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Chooses one of several values other than `other`.
    pub fn other_than<T: Copy + PartialEq>(&mut self, choices: &[T], other: T) -> T {
        loop {
            let choice = self.of(choices);
            if choice != other {
                return choice;
            }
        }
    }
}

/// Chooses one of several sentences; names in braces are variables.
macro_rules! pick {
    ($random:expr; $($text:literal),+ $(,)?) => {{
        let options: &[&dyn Fn() -> String] = &[$(&|| format!($text)),+];
        let number = $random.below(options.len());
        options[number]()
    }};
}
pub(crate) use pick;

#[cfg(test)]
mod tests {
    use super::Random;

    /// The model was trained on the stories of a seed, so they must not change.
    #[test]
    fn random_choices_are_stable_across_versions() {
        let mut random = Random::new(1, 2);
        assert_eq!(
            [(); 5].map(|()| random.below(1000)),
            [297, 61, 696, 710, 776]
        );
    }
}
