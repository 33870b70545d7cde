//! The formats whose blocks index points of a grid: IQ1, IQ2 and IQ3.

use crate::blocks::*;
use crate::grids::*;
use half::f16;

/// A block of 256 elements, each an integer times the scale of its group of 16.
///
/// The integers are exact, and so are their products with the scales, so decoding is exact.
pub trait Codebook: Block<Elements = [f32; 256]> {
    /// True if [marked](Codebook::marks) elements have their point's code negated. Otherwise it is
    /// reduced by two.
    const SIGNS: bool = true;

    /// Returns the factor of all scales.
    fn d(&self) -> f16;

    /// Returns the scale of group `i` of 16 elements. `d` is the value of [`d`](Codebook::d). `i`
    /// is below 16.
    fn scale(&self, d: f32, i: usize) -> f32;

    /// Returns the scales of the 16 groups of 16 elements.
    #[inline(always)]
    fn scales(&self, d: f32) -> [f32; 16] {
        let mut scales = [0.0; 16];
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = self.scale(d, i);
        }
        scales
    }

    /// Returns the codes of 32 elements as if none were marked. The codes of eight consecutive
    /// elements are the bytes of one number, first element lowest. `part` is below 8.
    fn points(&self, part: usize) -> [u64; 4];

    /// Returns the marks of 32 elements: bit `i` belongs to element `i`. `part` is below 8.
    fn marks(&self, part: usize) -> u32;

    /// Returns the codes of 32 elements. `part` is below 8.
    #[inline(always)]
    fn codes(&self, part: usize) -> [i8; 32] {
        let points: [i8; 32] = bytemuck::cast(self.points(part));
        let marks = self.marks(part);
        std::array::from_fn(|i| match marks >> i & 1 {
            0 => points[i],
            _ if Self::SIGNS => -points[i],
            _ => points[i] - 2,
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

/// Returns four points of eight coordinates by their numbers.
#[inline(always)]
fn of_eight<const N: usize>(grid: &[[i8; 8]; N], number: impl Fn(usize) -> usize) -> [u64; 4] {
    // Numbers have no more bits than the grid needs. The remainder only makes this obvious to the
    // compiler.
    let point = |i: usize| bytemuck::cast(grid[number(i) % N]);
    [point(0), point(1), point(2), point(3)]
}

/// Returns eight points of four coordinates by their numbers.
#[inline(always)]
fn of_four<const N: usize>(grid: &[[i8; 4]; N], number: impl Fn(usize) -> usize) -> [u64; 4] {
    // As an array: pairs that are combined as numbers become slow vector code.
    let mut points = [0u32; 8];
    for (i, point) in points.iter_mut().enumerate() {
        *point = bytemuck::cast(grid[number(i) % N]);
    }
    bytemuck::cast(points)
}

/// Returns four times eight signs. Seven of each eight are stored, in the low 28 bits, and the
/// eighth makes the number of negative ones even.
#[inline(always)]
fn even_signs(stored: u32) -> u32 {
    static OF_SEVEN: [u8; 128] = {
        let mut all = [0; 128];
        let mut stored = 0u8;
        while stored < 128 {
            all[stored as usize] = stored | (stored.count_ones() as u8 & 1) << 7;
            stored += 1;
        }
        all
    };
    let signs = |i: u32| OF_SEVEN[(stored >> (7 * i) & 127) as usize];
    u32::from_le_bytes([signs(0), signs(1), signs(2), signs(3)])
}

/// Returns the code plus a half, so that no scale is zero.
#[inline(always)]
fn half_more(code: u8) -> f32 {
    0.5 + f32::from(code)
}

impl Codebook for BlockIq2Xxs {
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
    fn marks(&self, part: usize) -> u32 {
        let [.., a, b, c, d] = self.qs[part];
        even_signs(u32::from_le_bytes([a, b, c, d]))
    }
}

/// Returns number `i` of sixteen scales in eight bytes.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

impl Codebook for BlockIq2Xs {
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
    fn marks(&self, part: usize) -> u32 {
        let stored = |i: usize| u32::from(self.qs[4 * part + i] >> 9) << (7 * i);
        even_signs(stored(0) | stored(1) | stored(2) | stored(3))
    }
}

impl Codebook for BlockIq2S {
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
    fn marks(&self, part: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.signs[4 * part + i]))
    }
}

impl Codebook for BlockIq3Xxs {
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
    fn marks(&self, part: usize) -> u32 {
        even_signs(u32::from_le_bytes(self.signs[part]))
    }
}

impl Codebook for BlockIq3S {
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
    fn marks(&self, part: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.signs[4 * part + i]))
    }
}

impl Codebook for BlockIq1S {
    const SIGNS: bool = false;

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
        of_eight(&IQ1_GRID, |i| {
            usize::from(self.qs[4 * part + i]) | (bits >> (3 * i) & 7) << 8
        })
    }

    #[inline(always)]
    fn marks(&self, part: usize) -> u32 {
        u32::from(self.qh[part] >> 15).wrapping_neg()
    }
}

impl Codebook for BlockIq1M {
    const SIGNS: bool = false;

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
        of_eight(&IQ1_GRID, |i| {
            usize::from(self.qs[4 * part + i]) | (bits(i) & 7) << 8
        })
    }

    #[inline(always)]
    fn marks(&self, part: usize) -> u32 {
        // One bit for each eight elements.
        let mark = |i: usize| u32::from(nibble(&self.qh, 4 * part + i) >> 3) << (8 * i);
        (mark(0) | mark(1) | mark(2) | mark(3)) * 255
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn within_limits<B: Codebook>(bytes: &[u8], largest: u8) {
        let block: B = bytemuck::pod_read_unaligned(&bytes[..size_of::<B>()]);
        let codes = (0..8).flat_map(|part| block.codes(part));
        // Kernels rely on both.
        assert!(
            codes
                .into_iter()
                .all(|code| code != 0 && code.unsigned_abs() <= largest)
        );
    }

    #[test]
    fn sign_groups_have_even_parity() {
        for stored in 0..1 << 14 {
            let signs = even_signs(stored | stored << 14).to_le_bytes();
            for (i, signs) in signs.into_iter().enumerate() {
                assert_eq!(u32::from(signs & 127), stored >> (7 * (i % 2)) & 127);
                assert_eq!(signs.count_ones() % 2, 0);
            }
        }
    }

    proptest! {
        #[test]
        fn codes_are_within_their_limits(bytes in prop::collection::vec(any::<u8>(), 110)) {
            within_limits::<BlockIq1S>(&bytes, 9);
            within_limits::<BlockIq1M>(&bytes, 9);
            within_limits::<BlockIq2Xxs>(&bytes, 43);
            within_limits::<BlockIq2Xs>(&bytes, 43);
            within_limits::<BlockIq2S>(&bytes, 43);
            within_limits::<BlockIq3Xxs>(&bytes, 62);
            within_limits::<BlockIq3S>(&bytes, 15);
        }
    }
}
