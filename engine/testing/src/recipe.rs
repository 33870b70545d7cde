//! Input data, generated from seeds.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};
use samite_core::{DType, Layout, Result};
use samite_quant::{can_encode, decode_row, encode_row, random_row};

/// Random number generator with the same sequence on every machine.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Returns a generator with its own sequence for each seed.
    pub fn new(seed: u64) -> Self {
        Rng(SplitMix64::seed_from_u64(seed))
    }

    /// Returns a generator seeded by a text.
    pub fn from_name(name: &str) -> Self {
        // FNV-1a.
        Rng::new(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        }))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number less than `limit`, or 0 if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % (limit.max(1) as u64)) as usize
    }

    /// Returns a number from `min` (inclusive) to `max` (exclusive).
    pub fn uniform(&mut self, min: f32, max: f32) -> f32 {
        min + (max - min) * ((self.bits() >> 40) as f32 / (1u64 << 24) as f32)
    }

    /// Returns true once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns one of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns 0 to `n - 1` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<_> = (0..n).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

/// Content of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recipe {
    /// Evenly distributed numbers, or integers if the type is one.
    Uniform {
        /// Minimum.
        min: f32,
        /// Exclusive maximum.
        max: f32,
    },
    /// Integers below `limit`, some of them equal.
    Ids {
        /// Exclusive maximum.
        limit: usize,
    },
    /// Distinct integers below `limit` in each row, repeated if the row is longer.
    DistinctIds {
        /// Exclusive maximum.
        limit: usize,
    },
    /// [`DistinctIds`](Self::DistinctIds), a third of them replaced by -1.
    SkippedIds {
        /// Exclusive maximum.
        limit: usize,
    },
    /// An attention mask: minus infinity for a third of all elements and small numbers elsewhere.
    /// The first element of each row is finite.
    Mask,
    /// Keys or values of a cache: rows of numbers from -1 to 1, with NaN in spoilt cells.
    SpoiltRows {
        /// Number of cells.
        cells: usize,
    },
    /// Numbers from -1 to 1, with NaN for the spoilt cells of each row.
    SpoiltElements,
    /// A [`Mask`](Self::Mask) that also hides spoilt cells. The last token sees all
    /// cells.
    SpoiltMask {
        /// Number of tokens.
        tokens: usize,
    },
    /// Positions 0, 3, 6, … after a start.
    Positions {
        /// First position.
        start: usize,
    },
    /// Distinct values in random order in each row, so that sorting them has one result.
    Distinct,
    /// Few distinct values, so that many are equal.
    Ties,
    /// All bytes zero.
    Zeros,
}

/// Returns whether a failed request left NaN in a cell of a cache.
pub fn is_spoilt(cell: usize) -> bool {
    cell % 5 == 3
}

impl Recipe {
    /// Numbers from -1 to 1.
    pub const UNIT: Recipe = Recipe::Uniform {
        min: -1.0,
        max: 1.0,
    };

    /// Returns the bytes of a contiguous tensor.
    ///
    /// # Errors
    /// If numbers cannot be encoded in the layout's type.
    pub fn bytes(&self, layout: &Layout, rng: &mut Rng) -> Result<Vec<u8>> {
        let n0 = layout.shape()[0];
        let mut bytes = Vec::with_capacity(layout.bytes());
        for number in 0..layout.rows() {
            if let Recipe::SpoiltRows { cells } = *self
                && is_spoilt(number % cells)
            {
                // NaN as a float of any size, and blocks with such a scale.
                let end = bytes.len() + layout.row_bytes();
                bytes.resize(end, 0xff);
                continue;
            }
            let row = self.row(number, n0, rng);
            encode(layout.dtype(), &row, rng, &mut bytes)?;
        }
        Ok(bytes)
    }

    fn row(&self, number: usize, n0: usize, rng: &mut Rng) -> Vec<f64> {
        match *self {
            Recipe::SpoiltRows { .. } => Recipe::UNIT.row(number, n0, rng),
            Recipe::SpoiltElements => {
                let mut row = Recipe::UNIT.row(number, n0, rng);
                let spoilt = (0..n0).filter(|&cell| is_spoilt(cell));
                spoilt.for_each(|cell| row[cell] = f64::NAN);
                row
            }
            Recipe::SpoiltMask { tokens } if number % tokens + 1 == tokens => vec![0.0; n0],
            Recipe::SpoiltMask { .. } => {
                let mut row = Recipe::Mask.row(number, n0, rng);
                let spoilt = (0..n0).filter(|&cell| is_spoilt(cell));
                spoilt.for_each(|cell| row[cell] = f64::NEG_INFINITY);
                row
            }
            Recipe::Uniform { min, max } => (0..n0).map(|_| rng.uniform(min, max).into()).collect(),
            Recipe::Ids { limit } => (0..n0).map(|_| rng.below(limit) as f64).collect(),
            Recipe::DistinctIds { limit } => {
                let all = rng.permutation(limit);
                all.iter().cycle().take(n0).map(|&i| i as f64).collect()
            }
            Recipe::SkippedIds { limit } => {
                let mut row = Recipe::DistinctIds { limit }.row(number, n0, rng);
                let skipped = row.iter_mut().filter(|_| rng.one_in(3));
                skipped.for_each(|id| *id = -1.0);
                row
            }
            Recipe::Mask => (0..n0)
                .map(|i| {
                    if i > 0 && rng.one_in(3) {
                        f64::NEG_INFINITY
                    } else {
                        rng.uniform(-1.0, 1.0).into()
                    }
                })
                .collect(),
            Recipe::Positions { start } => (0..n0).map(|i| (start + 3 * i) as f64).collect(),
            Recipe::Distinct => {
                let order = rng.permutation(n0);
                order
                    .into_iter()
                    .map(|i| i as f64 - n0 as f64 / 2.0)
                    .collect()
            }
            Recipe::Ties => (0..n0).map(|_| rng.below(5) as f64 - 2.0).collect(),
            Recipe::Zeros => vec![0.0; n0],
        }
    }
}

fn encode(dtype: DType, row: &[f64], rng: &mut Rng, out: &mut Vec<u8>) -> Result<()> {
    match dtype {
        DType::I8 => out.extend(row.iter().flat_map(|&v| (v as i8).to_le_bytes())),
        DType::I16 => out.extend(row.iter().flat_map(|&v| (v as i16).to_le_bytes())),
        DType::I32 => out.extend(row.iter().flat_map(|&v| (v as i32).to_le_bytes())),
        DType::I64 => out.extend(row.iter().flat_map(|&v| (v as i64).to_le_bytes())),
        DType::F64 => out.extend(row.iter().flat_map(|v| v.to_le_bytes())),
        _ => {
            let row: Vec<f32> = row.iter().map(|&v| v as f32).collect();
            let at = out.len();
            out.resize(at + dtype.row_bytes(row.len())?, 0);
            if can_encode(dtype) {
                encode_row(dtype, &row, &mut out[at..])?;
            } else {
                let blocks = out[at..].chunks_exact_mut(dtype.block_bytes());
                for (x, block) in row.chunks_exact(dtype.block_len()).zip(blocks) {
                    resemble(dtype, x, rng, block)?;
                }
            }
        }
    }
    Ok(())
}

/// Writes a block of a type that cannot be encoded: of several random ones, the one that best
/// matches `x`, so that numbers of one sign do not all cancel out.
fn resemble(dtype: DType, x: &[f32], rng: &mut Rng, out: &mut [u8]) -> Result<()> {
    let squares: f32 = x.iter().map(|v| v * v).sum();
    let size = (squares / x.len() as f32).sqrt();
    let (mut block, mut elements) = (out.to_vec(), vec![0.0; x.len()]);
    let mut most = f32::NEG_INFINITY;
    for _ in 0..64 {
        random_row(dtype, size, || rng.bits(), &mut block)?;
        decode_row(dtype, &block, &mut elements)?;
        let product = x.iter().zip(&elements).map(|(a, b)| a * b).sum();
        if product > most {
            most = product;
            out.copy_from_slice(&block);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_depends_only_on_the_seed() {
        let layout = Layout::contiguous(DType::Q4_0, [64, 3, 1, 1]).unwrap();
        let make = |name| {
            Recipe::UNIT
                .bytes(&layout, &mut Rng::from_name(name))
                .unwrap()
        };
        assert_eq!(make("a"), make("a"));
        assert_ne!(make("a"), make("b"));
        assert_eq!(make("a").len(), layout.bytes());
    }

    #[test]
    fn random_blocks_have_the_magnitude_of_their_recipe() {
        let positive = Recipe::Uniform { min: 0.2, max: 1.0 };
        let layout = Layout::contiguous(DType::IQ1_M, [256, 50, 1, 1]).unwrap();
        let bytes = positive.bytes(&layout, &mut Rng::new(3)).unwrap();
        let mut elements = vec![0.0; 256 * 50];
        decode_row(DType::IQ1_M, &bytes, &mut elements).unwrap();
        for block in elements.chunks(256) {
            let (sum, squares) = block
                .iter()
                .fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
            assert!(
                sum > 10.0 && (squares - 110.0).abs() < 30.0,
                "{sum}, {squares}"
            );
        }
    }

    #[test]
    fn random_numbers_stay_in_their_range() {
        let mut rng = Rng::new(7);
        let all: Vec<_> = (0..10_000).map(|_| rng.uniform(-2.0, 3.0)).collect();
        assert!(all.iter().all(|x| (-2.0..3.0).contains(x)));
        assert!(all.iter().any(|x| *x < -1.9) && all.iter().any(|x| *x > 2.9));
        let mut order = rng.permutation(50);
        assert_ne!(order, (0..50).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }
}
