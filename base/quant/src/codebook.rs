//! The formats whose blocks name points of a grid: IQ1, IQ2 and IQ3.

use crate::blocks::*;
use crate::grids::*;
use half::f16;

/// A block of 256 elements, each a whole number times the scale of its 16 neighbours.
///
/// The numbers are exact, and so are their products with the scales: decoding does nothing else.
pub trait Codebook: Block<Elements = [f32; 256]> {
    /// The largest magnitude of a code.
    const LARGEST: i8;

    /// What all scales are multiplied with.
    fn d(&self) -> f16;

    /// The scale of group `i` of 16 elements, if `d` is the number that [`d`](Codebook::d) stands for. `i` is below 16.
    fn scale(&self, d: f32, i: usize) -> f32;

    /// The scales of the 16 groups of 16 elements.
    #[inline(always)]
    fn scales(&self, d: f32) -> [f32; 16] {
        std::array::from_fn(|i| self.scale(d, i))
    }

    /// The codes of 32 elements, without their signs: those of eight neighbours are the bytes of one number, first element
    /// lowest. `part` is below 8.
    fn points(&self, part: usize) -> [u64; 4];

    /// Which of 32 elements are negative: bit `i` is that of element `i`. `part` is below 8.
    fn signs(&self, part: usize) -> u32;

    /// The codes of 32 elements. `part` is below 8.
    #[inline(always)]
    fn codes(&self, part: usize) -> [i8; 32] {
        let points: [i8; 32] = bytemuck::cast(self.points(part));
        let signs = self.signs(part);
        std::array::from_fn(|i| match signs >> i & 1 {
            0 => points[i],
            _ => -points[i],
        })
    }
}

/// Writes all elements of a block.
#[inline]
fn decode<B: Codebook>(block: &B, out: &mut [f32; 256]) {
    let scales = block.scales(block.d().to_f32());
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (i, (out, code)) in out.iter_mut().zip(block.codes(part)).enumerate() {
            *out = scales[2 * part + i / 16] * f32::from(code);
        }
    }
}

macro_rules! decoded {
    ($($block:ident)*) => {$(
        impl Decode for $block {
            #[inline]
            fn decode(&self, out: &mut [f32; 256]) {
                decode(self, out);
            }
        }
    )*};
}
decoded!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S);

/// Four points of eight coordinates by their numbers.
#[inline(always)]
fn of_eight<const N: usize>(grid: &[[i8; 8]; N], number: impl Fn(usize) -> usize) -> [u64; 4] {
    // Numbers have no more bits than there are points: the remainder only says so.
    std::array::from_fn(|i| bytemuck::cast(grid[number(i) % N]))
}

/// Eight points of four coordinates by their numbers.
#[inline(always)]
fn of_four<const N: usize>(grid: &[[i8; 4]; N], number: impl Fn(usize) -> usize) -> [u64; 4] {
    let point = |i: usize| u64::from(bytemuck::cast::<[i8; 4], u32>(grid[number(i) % N]));
    std::array::from_fn(|i| point(2 * i) | point(2 * i + 1) << 32)
}

/// Four times eight signs of which seven are stored.
#[inline(always)]
fn signs_of_sevens(stored: u32) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| {
        even_signs((stored >> (7 * i)) as u8 & 127)
    }))
}

/// Half of `code` is between two whole numbers, so that no scale is zero.
#[inline(always)]
fn half_more(code: u8) -> f32 {
    0.5 + f32::from(code)
}

impl Codebook for BlockIq2Xxs {
    const LARGEST: i8 = 43;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        0.25 * d * half_more(self.qs[i / 2][7] >> 4)
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        of_eight(&IQ2_XXS_GRID, |i| self.qs[part][i].into())
    }

    #[inline(always)]
    fn signs(&self, part: usize) -> u32 {
        let [.., a, b, c, d] = self.qs[part];
        signs_of_sevens(u32::from_le_bytes([a, b, c, d]))
    }
}

/// Of sixteen scales in eight bytes, number `i`.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

impl Codebook for BlockIq2Xs {
    const LARGEST: i8 = 43;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        0.25 * d * half_more(nibble(&self.scales, i))
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        of_eight(&IQ2_XS_GRID, |i| usize::from(self.qs[4 * part + i] & 511))
    }

    #[inline(always)]
    fn signs(&self, part: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| {
            even_signs((self.qs[4 * part + i] >> 9) as u8)
        }))
    }
}

impl Codebook for BlockIq2S {
    const LARGEST: i8 = 43;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        0.25 * d * half_more(nibble(&self.scales, i))
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        let high = usize::from(self.qh[part]);
        of_eight(&IQ2_S_GRID, |i| {
            usize::from(self.qs[4 * part + i]) | (high >> (2 * i) & 3) << 8
        })
    }

    #[inline(always)]
    fn signs(&self, part: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.signs[4 * part + i]))
    }
}

impl Codebook for BlockIq3Xxs {
    const LARGEST: i8 = 62;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        0.5 * d * half_more(self.signs[i / 2][3] >> 4)
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        of_four(&IQ3_XXS_GRID, |i| self.qs[8 * part + i].into())
    }

    #[inline(always)]
    fn signs(&self, part: usize) -> u32 {
        signs_of_sevens(u32::from_le_bytes(self.signs[part]))
    }
}

impl Codebook for BlockIq3S {
    const LARGEST: i8 = 15;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        d * f32::from(2 * nibble(&self.scales, i / 2) + 1)
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        let high = usize::from(self.qh[part]);
        of_four(&IQ3_S_GRID, |i| {
            usize::from(self.qs[8 * part + i]) | (high >> i & 1) << 8
        })
    }

    #[inline(always)]
    fn signs(&self, part: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.signs[4 * part + i]))
    }
}

/// Points times 8, plus or minus 1: `low` and `high` are the bits of their numbers, `minus` whether 1 is subtracted.
#[inline(always)]
fn ternary(
    low: &[u8; 4],
    high: impl Fn(usize) -> usize,
    minus: impl Fn(usize) -> bool,
) -> [u64; 4] {
    let points = of_eight(&IQ1_GRID, |i| usize::from(low[i]) | high(i) << 8);
    std::array::from_fn(|i| {
        let eighth = if minus(i) { -1 } else { 1 };
        let points: [i8; 8] = bytemuck::cast(points[i]);
        bytemuck::cast(points.map(|x| x + eighth))
    })
}

impl Codebook for BlockIq1S {
    const LARGEST: i8 = 9;

    #[inline(always)]
    fn d(&self) -> f16 {
        self.d
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        0.125 * d * f32::from(2 * (self.qh[i / 2] >> 12 & 7) + 1)
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        let bits = usize::from(self.qh[part]);
        let low = self.qs.as_chunks().0;
        ternary(&low[part], |i| bits >> (3 * i) & 7, |_| bits >> 15 == 1)
    }

    #[inline(always)]
    fn signs(&self, _: usize) -> u32 {
        0
    }
}

impl Codebook for BlockIq1M {
    const LARGEST: i8 = 9;

    #[inline(always)]
    fn d(&self) -> f16 {
        // Four bits above each four scales.
        let bits = (0..4).fold(0, |bits, i| {
            bits | u16::from_le_bytes(self.scales[i]) >> 12 << (4 * i)
        });
        f16::from_bits(bits)
    }

    #[inline(always)]
    fn scale(&self, d: f32, i: usize) -> f32 {
        let word = u16::from_le_bytes(self.scales[i / 4]);
        0.125 * d * f32::from(2 * (word >> (3 * (i % 4)) & 7) + 1)
    }

    #[inline(always)]
    fn points(&self, part: usize) -> [u64; 4] {
        let bits = |i: usize| usize::from(nibble(&self.qh, 4 * part + i));
        let low = self.qs.as_chunks().0;
        ternary(&low[part], |i| bits(i) & 7, |i| bits(i) >> 3 == 1)
    }

    #[inline(always)]
    fn signs(&self, _: usize) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn within_limits<B: Codebook>(bytes: &[u8]) {
        let block: B = bytemuck::pod_read_unaligned(&bytes[..size_of::<B>()]);
        let codes = (0..8).flat_map(|part| block.codes(part));
        // Kernels rely on both.
        assert!(
            codes
                .into_iter()
                .all(|code| code != 0 && code.unsigned_abs() <= B::LARGEST as u8)
        );
    }

    proptest! {
        #[test]
        fn codes_are_within_their_limits(bytes in prop::collection::vec(any::<u8>(), 110)) {
            within_limits::<BlockIq1S>(&bytes);
            within_limits::<BlockIq1M>(&bytes);
            within_limits::<BlockIq2Xxs>(&bytes);
            within_limits::<BlockIq2Xs>(&bytes);
            within_limits::<BlockIq2S>(&bytes);
            within_limits::<BlockIq3Xxs>(&bytes);
            within_limits::<BlockIq3S>(&bytes);
        }
    }
}
