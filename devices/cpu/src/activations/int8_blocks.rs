//! Activation columns quantized to 8 bits in blocks of 32, for weights in the file's layout.
//!
//! A column is quantized once for all rows, and each block has an f32 scale ([`Int8Blocks`]).
//! Scaled sums of its codes are stored with it. A row whose codes have an offset or a minimum is
//! multiplied as if it had none, and the product of the offset with the sum is added.

use crate::detect::vectorized;

/// Layout of a column that was quantized to 8 bits: codes, scales, scaled sums of each 32 codes,
/// scaled sums of each 16 codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Int8Blocks {
    /// Offset of the scales: one f32 for each 32 elements.
    pub scales: usize,
    /// Offset of the sums of 32 codes times their scale.
    pub sums: usize,
    /// Offset of the sums of 16 codes times their scale.
    pub half_sums: usize,
    /// Size in bytes.
    pub bytes: usize,
}

vectorized! {
    /// Quantizes elements of a column, from element `start`, a multiple of 32.
    ///
    /// # Safety
    /// As [`Int8Blocks::quantize`].
    pub unsafe fn quantize(int8: &Int8Blocks, x: &[f32], start: usize, out: *mut u8) {
        // SAFETY: both functions have the same requirements.
        unsafe { int8.quantize(x, start, out) }
    }
}

impl Int8Blocks {
    /// Describes columns of `k` elements, a multiple of 32.
    pub fn new(k: usize) -> Option<Self> {
        let blocks = k / 32;
        let scales = k.checked_next_multiple_of(64)?;
        let sums = scales.checked_add(blocks * 4)?;
        let half_sums = sums.checked_add(blocks * 4)?;
        let bytes = half_sums
            .checked_add(blocks * 8)?
            .checked_next_multiple_of(64)?;
        Some(Int8Blocks {
            scales,
            sums,
            half_sums,
            bytes,
        })
    }

    /// Quantizes elements of a column, from element `start`, a multiple of 32, with the
    /// instructions of the caller.
    ///
    /// # Safety
    /// `self.bytes` must be writable at `out`, which is aligned to 4. Elements `start..start +
    /// x.len()` must be inside the column, and no other code may use their places.
    #[inline(always)]
    pub unsafe fn quantize(&self, x: &[f32], start: usize, out: *mut u8) {
        let (first, blocks) = (start / 32, x.len() / 32);
        // SAFETY: the codes are at `start` and the numbers of their blocks at `first` of each part.
        // `new` placed the parts one after the other, starting at multiples of 4, each with room
        // for all blocks. These slices are therefore in the column, aligned and disjoint. `x` is
        // borrowed, so it is elsewhere.
        let (codes, scales, sums, half_sums) = unsafe {
            let floats = |offset| out.add(offset).cast::<f32>();
            let halves = floats(self.half_sums).cast::<[f32; 2]>();
            (
                std::slice::from_raw_parts_mut(out.add(start).cast::<i8>(), x.len()),
                std::slice::from_raw_parts_mut(floats(self.scales).add(first), blocks),
                std::slice::from_raw_parts_mut(floats(self.sums).add(first), blocks),
                std::slice::from_raw_parts_mut(halves.add(first), blocks),
            )
        };
        let blocks = x
            .as_chunks::<32>()
            .0
            .iter()
            .zip(codes.as_chunks_mut::<32>().0);
        let places = scales.iter_mut().zip(sums).zip(half_sums);
        for ((x, codes), ((scale, sum), halves)) in blocks.zip(places) {
            (*scale, *halves) = quantize_block(x, codes);
            *sum = halves[0] + halves[1];
        }
    }
}

/// Quantizes a block, and returns the scale and the scaled sums of both halves.
#[inline(always)]
fn quantize_block(x: &[f32; 32], codes: &mut [i8; 32]) -> (f32, [f32; 2]) {
    // Adding it to a number rounds to an integer and leaves the code in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = [0.0f32; 8];
    for x in x.as_chunks::<8>().0 {
        for (largest, x) in largest.iter_mut().zip(x) {
            let magnitude = x.abs();
            *largest = if magnitude > *largest {
                magnitude
            } else {
                *largest
            };
        }
    }
    let largest = largest.into_iter().fold(0.0, f32::max);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let rounded: [f32; 32] = std::array::from_fn(|i| x[i] * inverse + ROUND);
    let whole: [i32; 32] = std::array::from_fn(|i| (rounded[i].to_bits() as i32) << 24 >> 24);
    for (code, whole) in codes.iter_mut().zip(&whole) {
        *code = *whole as i8;
    }
    let (low, high) = whole.split_at(16);
    let sum = |codes: &[i32]| codes.iter().sum::<i32>() as f32 * scale;
    (scale, [sum(low), sum(high)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Isa;
    use crate::harness::numbers;

    #[test]
    fn quantized_columns_decode_within_the_error_bound() {
        for isa in Isa::all() {
            let mut x = numbers(3, 96);
            x[32..64].fill(0.0);
            let int8 = Int8Blocks::new(x.len()).unwrap();
            let mut out = vec![0u64; int8.bytes / 8];
            // SAFETY: the memory is large enough and aligned.
            unsafe { quantize(isa, &int8, &x, 0, out.as_mut_ptr().cast()) };
            let bytes: &[u8] = bytemuck::cast_slice(&out);
            let floats =
                |at: usize, n: usize| bytemuck::cast_slice::<u8, f32>(&bytes[at..][..4 * n]);
            let (scales, sums) = (floats(int8.scales, 3), floats(int8.sums, 3));
            let halves = floats(int8.half_sums, 6);
            for (block, x) in x.chunks(32).enumerate() {
                let codes = &bytes[32 * block..][..32];
                let decoded: Vec<f32> = codes
                    .iter()
                    .map(|&c| f32::from(c as i8) * scales[block])
                    .collect();
                for (x, decoded) in x.iter().zip(&decoded) {
                    assert!((x - decoded).abs() <= scales[block] * 0.5001);
                }
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(sums[block], decoded.iter().sum()));
                assert!(near(halves[2 * block], decoded[..16].iter().sum()));
                assert!(near(halves[2 * block + 1], decoded[16..].iter().sum()));
            }
        }
    }
}
