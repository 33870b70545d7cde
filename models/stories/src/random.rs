//! Random choices: the same for the same seed on every machine, now and later.

/// A small generator of random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator of text number `index` of a seed.
    pub fn new(seed: u64, index: u64) -> Self {
        let mut mixed = Random(seed);
        Random(mixed.bits() ^ index.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit.max(1) as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of some choices.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// One of some choices, but not `other`.
    pub fn other_than<T: Copy + PartialEq>(&mut self, choices: &[T], other: T) -> T {
        loop {
            let choice = self.of(choices);
            if choice != other {
                return choice;
            }
        }
    }
}

/// One of several sentences; names in braces are variables.
macro_rules! pick {
    ($random:expr; $($text:literal),+ $(,)?) => {{
        let options: &[&dyn Fn() -> String] = &[$(&|| format!($text)),+];
        let number = $random.below(options.len());
        options[number]()
    }};
}
pub(crate) use pick;
