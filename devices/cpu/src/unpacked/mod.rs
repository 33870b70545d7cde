//! Products of weights in the file's layout, row by row.
//!
//! - [`float`]: F32, F16 and BF16 rows with F32 columns.
//! - `x86`, `neon`: quantized rows with columns [quantized to 8
//!   bits](crate::activations::int8_blocks).
//!
//! The order in which an element is summed depends only on the shapes. Float products have one
//! order for all tiles, quantized ones have one for few columns and one for many. Results therefore
//! do not depend on the distribution of work over threads.

pub(crate) mod float;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::product;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::product;

/// Returns the product for weights of `dtype` with columns quantized to 8 bits, if there is one.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn product(
    _isa: crate::detect::Isa,
    _dtype: samite_core::DType,
) -> Option<crate::product::PanelFn> {
    None
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activations::int8_blocks::Int8Blocks;
    use crate::detect::Isa;
    use crate::harness::{numbers, weights};
    use crate::product::{Column, Panel};
    use samite_core::DType;

    #[test]
    fn products_agree_with_decoded_rows() {
        for dtype in DType::all() {
            for isa in Isa::all() {
                let Some(function) = product(isa, dtype) else {
                    continue;
                };
                for (rows, columns, blocks) in [
                    (1, 1, 1),
                    (9, 1, 3),
                    (3, 1, 2),
                    (5, 7, 3),
                    (2, 4, 1),
                    (33, 15, 2),
                    (16, 6, 1),
                ] {
                    // Also an odd number of blocks, if a type has small ones.
                    let small = dtype.block_len() < 256 && rows % 2 == 1;
                    let k = blocks * 256 + if small { dtype.block_len() } else { 0 };
                    let weights = weights(dtype, rows as u32 * 77, rows * k);
                    let mut decoded = vec![0.0; rows * k];
                    samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
                    let int8 = Int8Blocks::new(k).unwrap();
                    let x = numbers(5, columns * k);
                    let mut quantized = vec![0u64; columns * int8.bytes / 8];
                    let base = quantized.as_mut_ptr().cast::<u8>();
                    let mut rounded = vec![0.0; columns * k];
                    for c in 0..columns {
                        // SAFETY: there is memory for each column.
                        unsafe { int8.quantize(&x[c * k..][..k], 0, base.add(c * int8.bytes)) };
                        let bytes: &[u8] = &bytemuck::cast_slice(&quantized)[c * int8.bytes..];
                        let scales: &[f32] = bytemuck::cast_slice(&bytes[int8.scales..][..k / 8]);
                        for i in 0..k {
                            rounded[c * k + i] = f32::from(bytes[i] as i8) * scales[i / 32];
                        }
                    }
                    let mut out = vec![f32::NAN; rows * columns];
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: base.wrapping_add(c * int8.bytes),
                            out: out[c * rows..].as_mut_ptr(),
                        })
                        .collect();
                    let panel = Panel {
                        weights: weights.as_ptr(),
                        stride: weights.len() / rows,
                        rows,
                        k,
                        first: 0,
                        slabs: 0,
                        past_caches: false,
                        reading: crate::product::AccessPattern::DEFAULT,
                        scratch: std::ptr::null_mut(),
                    };
                    // SAFETY: everything has the stated size, and `isa` was detected.
                    unsafe { function(&panel, &places) };
                    for c in 0..columns {
                        for r in 0..rows {
                            let pairs = decoded[r * k..][..k].iter().zip(&rounded[c * k..]);
                            let expected: f64 =
                                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                            let got = f64::from(out[c * rows + r]);
                            assert!(
                                (got - expected).abs() < 1e-5 * k as f64,
                                "{dtype} {}: {got} instead of {expected}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}
