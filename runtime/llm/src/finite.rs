//! Finds numbers in caches that are not finite.

use crate::error::{Result, try_filled};
use samite_core::DType;

/// Returns whether all elements of rows of `width` elements are finite: neither NaN nor infinite.
pub(crate) fn are_finite(dtype: DType, width: usize, bytes: &[u8]) -> Result<bool> {
    // Floats are ordered like their bits without the sign. Compilers vectorize a maximum, but not a
    // search.
    let is_below = |largest: u32, infinity: u32| largest < infinity;
    Ok(match dtype {
        DType::F32 => bytes.chunks(4096).all(|chunk| {
            let magnitudes = chunk.as_chunks().0.iter();
            let magnitudes = magnitudes.map(|&x| u32::from_le_bytes(x) & 0x7fff_ffff);
            is_below(magnitudes.fold(0, u32::max), f32::INFINITY.to_bits())
        }),
        DType::F16 | DType::BF16 => {
            let infinity = match dtype {
                DType::F16 => half::f16::INFINITY.to_bits(),
                _ => half::bf16::INFINITY.to_bits(),
            };
            bytes.chunks(4096).all(|chunk| {
                let magnitudes = chunk.as_chunks().0.iter();
                let magnitudes = magnitudes.map(|&x| u16::from_le_bytes(x) & 0x7fff);
                is_below(magnitudes.fold(0, u16::max).into(), infinity.into())
            })
        }
        _ => {
            let mut row = try_filled(0.0_f32, Some(width), "a row of the cache")?;
            for stored in bytes.chunks_exact(dtype.row_bytes(width)?.max(1)) {
                samite_quant::decode_row(dtype, stored, &mut row)?;
                if !row.iter().all(|x| x.is_finite()) {
                    return Ok(false);
                }
            }
            true
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_non_finite_number_is_found_in_every_type() {
        let types = DType::all().filter(|&dtype| samite_quant::can_encode(dtype));
        for dtype in types.filter(|dtype| !dtype.is_integer() && *dtype != DType::F64) {
            let width = 2 * dtype.block_len().max(16);
            let row_bytes = dtype.row_bytes(width).unwrap();
            let numbers: Vec<f32> = (0..3 * width).map(|i| (i as f32).sin()).collect();
            let mut bytes = vec![0; 3 * row_bytes];
            samite_quant::encode_row(dtype, &numbers, &mut bytes).unwrap();
            assert!(are_finite(dtype, width, &bytes).unwrap(), "{dtype}");
            // Sets all bits of a block, so its scale is NaN if it has one.
            bytes[row_bytes..][..dtype.block_bytes()].fill(0xff);
            let mut row = vec![0.0_f32; width];
            samite_quant::decode_row(dtype, &bytes[row_bytes..2 * row_bytes], &mut row).unwrap();
            let has_nan = row.iter().any(|x| !x.is_finite());
            assert_eq!(
                are_finite(dtype, width, &bytes).unwrap(),
                !has_nan,
                "{dtype}"
            );
            let of_caches = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];
            assert!(has_nan || !of_caches.contains(&dtype), "{dtype}");
        }
        for bits in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            assert!(!are_finite(DType::F32, 1, &bits.to_le_bytes()).unwrap());
        }
        assert!(are_finite(DType::F32, 1, &f32::MAX.to_le_bytes()).unwrap());
        assert!(are_finite(DType::F16, 1, &half::f16::MIN.to_le_bytes()).unwrap());
    }
}
