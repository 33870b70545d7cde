//! The random generator.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// Xoshiro256++ by Blackman and Vigna, seeded by SplitMix64: small, fast and the same on every machine.
///
/// Only the generator is a library's. How its bits become numbers is fixed here, because a seed stands for a text, and for
/// the order of a training's data, in later versions too.
///
/// ```
/// let draws = |seed| { let mut rng = samite_text::Rng::new(seed); [rng.next_u64(), rng.next_u64()] };
/// assert_eq!(draws(1), draws(1));
/// assert_ne!(draws(1), draws(2));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng {
    generator: Xoshiro256PlusPlus,
    drawn: u64,
}

impl Rng {
    /// The generator for a seed.
    pub fn new(seed: u64) -> Self {
        Rng {
            generator: Xoshiro256PlusPlus::seed_from_u64(seed),
            drawn: 0,
        }
    }

    /// How many numbers it gave.
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.drawn += 1;
        self.generator.next_u64()
    }

    /// A number below `end`, which is small beside 2^64; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }

    /// A number from 0 up to, not including, 1: 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the authors' C programs, `splitmix64.c` for the state.
    #[test]
    fn a_seed_gives_the_same_numbers_in_every_version() {
        let mut rng = Rng::new(1234567);
        let drawn = [(); 3].map(|()| rng.next_u64());
        assert_eq!(
            drawn,
            [
                437095814655224680,
                8127161015984454572,
                18128670339019551454
            ]
        );
        assert_eq!(Rng::new(42).uniform(), 0.8143051451229099);
    }

    #[test]
    fn random_numbers_are_below_the_end() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 5];
        (0..200).for_each(|_| seen[rng.below(5)] = true);
        assert_eq!(seen, [true; 5]);
    }

    #[test]
    fn uniform_numbers() {
        let mut rng = Rng::new(42);
        let draws: Vec<f64> = (0..10_000).map(|_| rng.uniform()).collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }
}
