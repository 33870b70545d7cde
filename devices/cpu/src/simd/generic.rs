//! Registers of 8 numbers for processors without their own vector code here: arrays, which
//! compilers keep in the available registers.

use super::float::Vector;
use half::f16;

const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct PortableVector([f32; LANES]);

impl Vector for PortableVector {
    const LANES: usize = LANES;
    const WIDENS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        PortableVector([x; LANES])
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        PortableVector([widened(x.to_bits()); LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `LANES` numbers are readable at `from`, as the trait requires; the read needs no
        // alignment.
        PortableVector(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; LANES];
        // SAFETY: `count` numbers are readable at `from`, fewer than `lanes`, a new array, has.
        unsafe { std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count) };
        PortableVector(lanes)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: `LANES` numbers of two bytes are readable at `from`, as the trait requires; the
        // read needs no alignment.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        PortableVector(bits.map(widened))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: `LANES` numbers of two bytes are readable at `from`, as the trait requires; the
        // read needs no alignment.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        PortableVector(bits.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: `LANES` bytes are readable at `from`, as the trait requires.
        PortableVector(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: `LANES` bytes are readable at `from`, as the trait requires.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        PortableVector(std::array::from_fn(|i| {
            (u32::from(bytes[i] >> shift & 15) | (fifth >> i & 1) << 4) as f32
        }))
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        // SAFETY: `LANES` bytes are readable at `from`, as the trait requires.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        PortableVector(bytes.map(|byte| values[usize::from(byte >> shift & 15)]))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `LANES` numbers are writable at `to`, as the trait requires; the write needs no
        // alignment.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: `count` numbers are writable at `to`, fewer than `self`, a copy elsewhere, has.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, count) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        PortableVector(std::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

/// Returns the half-precision number with these bits.
#[inline(always)]
fn widened(bits: u16) -> f32 {
    let magnitude = u32::from(bits) & 0x7fff;
    // The exponent's bias is 15 there and 127 here. This is also correct for subnormal numbers.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let infinite = if magnitude > 0x7bff { 0x7f80_0000 } else { 0 };
    let sign = (u32::from(bits) & 0x8000) << 16;
    f32::from_bits(scaled.to_bits() | infinite | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_half_precision_numbers_are_widened() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (widened(bits), half::f16::from_bits(bits).to_f32());
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{bits:#06x}: {got} instead of {expected}");
        }
    }
}
