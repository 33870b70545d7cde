//! The random generator.

use rand_mt::Mt;
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
    generator: Generator,
    drawn: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Generator {
    Xoshiro(Xoshiro256PlusPlus),
    Twister(Box<Mt>),
}

impl Rng {
    /// The generator for a seed.
    pub fn new(seed: u64) -> Self {
        Rng {
            generator: Generator::Xoshiro(Xoshiro256PlusPlus::seed_from_u64(seed)),
            drawn: 0,
        }
    }

    /// The Mersenne Twister (MT19937), with the [uniform](Self::uniform) numbers that C++ makes of it: a seed stands for the numbers that it stands for in
    /// llama.cpp.
    pub fn twister(seed: u32) -> Self {
        Rng {
            generator: Generator::Twister(Box::new(Mt::new(seed))),
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
        match &mut self.generator {
            Generator::Xoshiro(generator) => generator.next_u64(),
            // The first number is the lower half, as in C++.
            Generator::Twister(generator) => {
                let low = u64::from(generator.next_u32());
                low | u64::from(generator.next_u32()) << 32
            }
        }
    }

    /// A number below `end`, which is small beside 2^64; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }

    /// A number from 0 up to, not including, 1: 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        let bits = self.next_u64();
        match self.generator {
            Generator::Xoshiro(_) => (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64),
            // All 64 bits, rounded.
            Generator::Twister(_) => (bits as f64 * 2f64.powi(-64)).min(1.0 - f64::EPSILON / 2.0),
        }
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

    /// By `std::mt19937` and `std::uniform_real_distribution<double>` of libstdc++ 12.
    #[test]
    fn the_twister_gives_the_numbers_of_cpp() {
        let mut rng = Rng::twister(1234);
        let drawn = [(); 3].map(|()| rng.uniform());
        assert_eq!(
            drawn,
            [
                0.49766366630595166,
                0.81783844288953322,
                0.61211189358442275
            ]
        );
        // The standard says the 10000th number of its usual seed.
        let mut rng = Rng::twister(5489);
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
    fn uniform_numbers() {
        let mut rng = Rng::new(42);
        let draws: Vec<f64> = (0..10_000).map(|_| rng.uniform()).collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }
}
