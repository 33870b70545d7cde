//! The random generator.

use rand_mt::Mt;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// Kind of random generator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Generator {
    /// Xoshiro256++: see [`Rng`].
    #[default]
    Xoshiro,
    /// The 32-bit Mersenne twister, with C++'s conversion to numbers from 0 to 1. This is
    /// llama.cpp's generator, with the same draws for a seed. Only 32 bits of the seed are used.
    Mersenne,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Xoshiro(Xoshiro256PlusPlus),
    Mersenne(Box<Mt>),
}

/// Xoshiro256++ by Blackman and Vigna, seeded by SplitMix64: small, fast, and the same on every
/// machine.
///
/// Only the generator comes from a library. The conversion of its bits to numbers is fixed here,
/// because a seed must result in the same text, and the same order of training data, in later
/// versions.
///
/// ```
/// use samite_text::Rng;
///
/// assert_eq!(Rng::new(1).next_u64(), Rng::new(1).next_u64());
/// assert_ne!(Rng::new(1).next_u64(), Rng::new(2).next_u64());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng {
    state: State,
    drawn: u64,
}

impl Rng {
    /// Maximum number of draws that are repeated to resume a saved state; they take less than a
    /// second.
    pub(super) const MAX_REPLAYED: u64 = 1 << 28;

    /// Creates the generator for a seed.
    pub fn new(seed: u64) -> Self {
        Self::with_generator(Generator::Xoshiro, seed)
    }

    /// Creates a generator of this kind for a seed.
    pub fn with_generator(generator: Generator, seed: u64) -> Self {
        Rng {
            state: match generator {
                Generator::Xoshiro => State::Xoshiro(Xoshiro256PlusPlus::seed_from_u64(seed)),
                Generator::Mersenne => State::Mersenne(Box::new(Mt::new(seed as u32))),
            },
            drawn: 0,
        }
    }

    /// Returns the number of draws.
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.drawn += 1;
        match &mut self.state {
            State::Xoshiro(generator) => generator.next_u64(),
            State::Mersenne(generator) => {
                let low = u64::from(generator.next_u32());
                u64::from(generator.next_u32()) << 32 | low
            }
        }
    }

    /// Returns a number below `end`, which should be small compared to 2^64. Returns 0 if `end` is
    /// 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }

    /// Returns a number from 0 to 1, excluding 1: 53 random bits, or C++'s `generate_canonical`.
    pub fn uniform(&mut self) -> f64 {
        const BELOW_ONE: f64 = 1.0 - f64::EPSILON / 2.0;
        let bits = self.next_u64();
        if let State::Mersenne(_) = self.state {
            // The sum of both halves is rounded once, and the quotient is exact.
            return (bits as f64 / 2.0f64.powi(64)).min(BELOW_ONE);
        }
        (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a number from 0 to 1, excluding 1, to compare with a probability. The Mersenne
    /// twister uses 32 bits for it, like C++'s `generate_canonical<float>`.
    pub fn uniform_single(&mut self) -> f64 {
        const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;
        match &mut self.state {
            State::Xoshiro(_) => self.uniform(),
            State::Mersenne(generator) => {
                self.drawn += 1;
                (generator.next_u32() as f32 / 2.0f32.powi(32))
                    .min(BELOW_ONE)
                    .into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed by the authors' C programs, with `splitmix64.c` for the state.
    #[test]
    fn random_numbers_of_a_seed_are_stable_across_versions() {
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

    /// Computed by a C++ program: `std::mt19937 rng(SEED); std::uniform_real_distribution<double>
    /// dist(0.0, 1.0);`
    #[test]
    fn the_mersenne_twister_draws_as_in_cpp() {
        let draws = |seed| {
            let mut rng = Rng::with_generator(Generator::Mersenne, seed);
            [(); 3].map(|()| rng.uniform())
        };
        assert_eq!(
            draws(42),
            [
                0.796_542_984_287_846,
                0.18343478789336848,
                0.779_690_997_612_661_3
            ]
        );
        assert_eq!(
            draws(5489),
            [
                0.1354770042967805,
                0.8350085899945795,
                0.968_867_771_124_231_4
            ]
        );
        // The C++ standard specifies the 10000th number of the default seed.
        let mut rng = Rng::with_generator(Generator::Mersenne, 5489);
        let last = (0..5000).map(|_| rng.next_u64()).last();
        assert_eq!(last.map(|bits| bits >> 32), Some(4123659995));
    }

    #[test]
    fn random_numbers_are_below_the_end() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 5];
        (0..200).for_each(|_| seen[rng.below(5)] = true);
        assert_eq!(seen, [true; 5]);
    }

    #[test]
    fn uniform_numbers_cover_the_unit_interval() {
        let mut rng = Rng::new(42);
        let draws: Vec<f64> = (0..10_000).map(|_| rng.uniform()).collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }
}
