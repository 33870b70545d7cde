//! Random blocks for types that are only decoded. Any bits are a valid block of these types.

use crate::decode_row;
use half::f16;
use samite_core::{DType, Error, Result};

/// Fills `row` with blocks of random codes whose elements have the root mean square `size`. Tests
/// and synthetic models use them instead of encoded numbers. `next` returns random bits.
///
/// # Errors
/// [`Error::InvalidArgument`] if `dtype` is not one of the IQ1, IQ2 and IQ3 types, [`Error::Shape`]
/// if `row` is not a whole number of blocks.
pub fn random_row(
    dtype: DType,
    size: f32,
    mut next: impl FnMut() -> u64,
    row: &mut [u8],
) -> Result<()> {
    let set_scale: fn(&mut [u8], f16) = match dtype {
        DType::IQ1_M => scale_between_scales,
        DType::IQ1_S
        | DType::IQ2_XXS
        | DType::IQ2_XS
        | DType::IQ2_S
        | DType::IQ3_XXS
        | DType::IQ3_S => scale_in_front,
        _ => {
            return Err(Error::invalid(format!(
                "blocks of {dtype} are encoded, not made by chance"
            )));
        }
    };
    if !row.len().is_multiple_of(dtype.block_bytes()) {
        return Err(Error::shape(format!(
            "{} bytes are not a whole number of {dtype} blocks of {}",
            row.len(),
            dtype.block_bytes()
        )));
    }
    let mut elements = [0.0; 256];
    for block in row.chunks_exact_mut(dtype.block_bytes()) {
        for bytes in block.chunks_mut(8) {
            bytes.copy_from_slice(&next().to_le_bytes()[..bytes.len()]);
        }
        set_scale(block, f16::ONE);
        decode_row(dtype, block, &mut elements)?;
        let squares: f32 = elements.iter().map(|x| x * x).sum();
        set_scale(block, f16::from_f32(size / (squares / 256.0).sqrt()));
    }
    Ok(())
}

fn scale_in_front(block: &mut [u8], d: f16) {
    block[..2].copy_from_slice(&d.to_le_bytes());
}

/// Stores `d` in a [`BlockIq1M`](crate::blocks::BlockIq1M).
fn scale_between_scales(block: &mut [u8], d: f16) {
    for i in 0..4 {
        let high = &mut block[49 + 2 * i];
        *high = *high & 15 | ((d.to_bits() >> (4 * i) & 15) as u8) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_blocks_have_the_requested_magnitude() {
        for dtype in DType::all().filter(|&dtype| crate::can_decode(dtype)) {
            let mut state = 1u64;
            let next = || {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                state ^ state >> 32
            };
            let mut row = vec![0; 3 * dtype.block_bytes()];
            let made = random_row(dtype, 0.02, next, &mut row);
            assert_eq!(
                made.is_err(),
                crate::can_encode(dtype) || dtype == DType::F64
            );
            if made.is_err() {
                continue;
            }
            let mut elements = vec![0.0; 768];
            decode_row(dtype, &row, &mut elements).unwrap();
            for block in elements.chunks(256) {
                let mean = block.iter().map(|x| x * x).sum::<f32>() / 256.0;
                assert!((mean.sqrt() - 0.02).abs() < 1e-4, "{dtype}: {mean}");
            }
            assert!(random_row(dtype, 0.02, || 0, &mut row[1..]).is_err());
        }
    }
}
