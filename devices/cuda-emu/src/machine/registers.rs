//! Registers of a warp, as vectors over its lanes.

use crate::ptx::instruction::Register;

/// Number of lanes of a warp.
pub(crate) const LANES: usize = 32;

/// A value of up to 32 bits in each lane. The upper bits of 16-bit registers are arbitrary.
pub(crate) type LaneValues = [u32; LANES];

/// A value of 64 bits in each lane.
pub(crate) type Wide = [u64; LANES];

/// Bit of each lane within a mask.
const BITS: LaneValues = {
    let mut bits = [0; LANES];
    let mut i = 0;
    while i < LANES {
        bits[i] = 1 << i;
        i += 1;
    }
    bits
};

/// Registers of a warp.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    pub(crate) r32: Vec<LaneValues>,
    pub(crate) r64: Vec<Wide>,
    /// Masks of lanes.
    pub(crate) predicates: Vec<u32>,
}

impl Registers {
    pub(crate) fn get32(&self, register: Register) -> &LaneValues {
        &self.r32[usize::from(register)]
    }

    pub(crate) fn get64(&self, register: Register) -> &Wide {
        &self.r64[usize::from(register)]
    }

    pub(crate) fn predicate(&self, register: Register) -> u32 {
        self.predicates[usize::from(register)]
    }

    /// Sets the lanes of `mask`.
    #[inline(always)]
    pub(crate) fn set32(&mut self, register: Register, mask: u32, value: &LaneValues) {
        let to = &mut self.r32[usize::from(register)];
        if mask == u32::MAX {
            *to = *value;
            return;
        }
        for i in 0..LANES {
            to[i] = if mask & BITS[i] == 0 { to[i] } else { value[i] };
        }
    }

    /// Sets the lanes of `mask`.
    #[inline(always)]
    pub(crate) fn set64(&mut self, register: Register, mask: u32, value: &Wide) {
        let to = &mut self.r64[usize::from(register)];
        if mask == u32::MAX {
            *to = *value;
            return;
        }
        for i in 0..LANES {
            to[i] = if mask & BITS[i] == 0 { to[i] } else { value[i] };
        }
    }

    /// Sets the lanes of `mask`.
    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, register: Register, mask: u32, value: u32) {
        let to = &mut self.predicates[usize::from(register)];
        *to = (*to & !mask) | (value & mask);
    }
}

/// Collects a condition of each lane into a mask.
#[inline(always)]
pub(crate) fn collect(condition: impl Fn(usize) -> bool) -> u32 {
    let mut bits = [0; LANES];
    for i in 0..LANES {
        bits[i] = if condition(i) { BITS[i] } else { 0 };
    }
    bits.iter().fold(0, |all, bit| all | bit)
}

/// Iterates over the lanes of a mask.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
        rest &= rest - 1;
        Some(lane)
    })
}

/// Type of a lane's value.
pub(crate) trait LaneWord: Copy {
    /// Bits of a register.
    type Word: Copy + Default;

    fn get(registers: &Registers, register: Register) -> &[Self::Word; LANES];
    fn set(registers: &mut Registers, register: Register, mask: u32, value: &[Self::Word; LANES]);
    fn from_word(word: Self::Word) -> Self;
    fn into_word(self) -> Self::Word;
}

macro_rules! lane {
    ($(
        $ty:ty, $word:ty, $get:ident, $set:ident, |$w:ident| $from:expr, |$v:ident| $into:expr;
    )*) => {$(
        impl LaneWord for $ty {
            type Word = $word;

            #[inline(always)]
            fn get(registers: &Registers, register: Register) -> &[$word; LANES] {
                registers.$get(register)
            }

            #[inline(always)]
            fn set(all: &mut Registers, register: Register, mask: u32, value: &[$word; LANES]) {
                all.$set(register, mask, value);
            }

            #[inline(always)]
            fn from_word($w: $word) -> Self {
                $from
            }

            #[inline(always)]
            fn into_word(self) -> $word {
                let $v = self;
                $into
            }
        }
    )*};
}

lane! {
    u16, u32, get32, set32, |w| w as u16, |v| u32::from(v);
    i16, u32, get32, set32, |w| w as i16, |v| u32::from(v as u16);
    u32, u32, get32, set32, |w| w, |v| v;
    i32, u32, get32, set32, |w| w as i32, |v| v as u32;
    f32, u32, get32, set32, |w| f32::from_bits(w), |v| v.to_bits();
    u64, u64, get64, set64, |w| w, |v| v;
    i64, u64, get64, set64, |w| w as i64, |v| v as u64;
    f64, u64, get64, set64, |w| f64::from_bits(w), |v| v.to_bits();
}
