//! Products of F32, F16 and BF16 rows with F32 columns.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use crate::detect::{Isa, choose};
use crate::product::{Column, Panel, PanelFn};
use crate::simd::float::{Bf16, Element, F16, F32, Vector};
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::PortableVector;
use samite_core::DType;

/// Multiplies `R` rows with `C` columns.
#[inline(always)]
unsafe fn tile<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    row: usize,
    columns: &[Column],
) {
    // SAFETY: rows `row..row + R` and `C` columns exist, by the contract of `PanelFn` and the loops
    // in `panel`.
    unsafe {
        let mut weights = [panel.weights; R];
        for r in 0..R {
            weights[r] = panel.weights.wrapping_add((row + r) * panel.stride);
        }
        let mut x = [std::ptr::null::<f32>(); C];
        for c in 0..C {
            x[c] = columns.get_unchecked(c).x.cast();
        }
        let mut sums = [[V::splat(0.0); R]; C];
        let mut i = 0;
        while i + V::LANES <= panel.k {
            let mut w = [V::splat(0.0); R];
            for r in 0..R {
                w[r] = E::load::<V>(weights[r], i);
            }
            for c in 0..C {
                let x = V::load(x[c].add(i));
                for r in 0..R {
                    sums[c][r] = w[r].mul_add(x, sums[c][r]);
                }
            }
            i += V::LANES;
        }
        if i < panel.k {
            let rest = panel.k - i;
            for c in 0..C {
                let x = V::load_part(x[c].add(i), rest);
                for r in 0..R {
                    let w = E::load_part::<V>(weights[r], i, rest);
                    sums[c][r] = w.mul_add(x, sums[c][r]);
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                *columns.get_unchecked(c).out.add(panel.first + row + r) = sums[c][r].sum();
            }
        }
    }
}

/// Multiplies all rows with `C` columns, `R` rows at a time.
#[inline(always)]
unsafe fn strip<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let mut row = 0;
    // SAFETY: a tile starts only where `R` rows, or one, are left in the panel, and there are `C`
    // columns.
    unsafe {
        while row + R <= panel.rows {
            tile::<V, E, R, C>(panel, row, columns);
            row += R;
        }
        while row < panel.rows {
            tile::<V, E, 1, C>(panel, row, columns);
            row += 1;
        }
    }
}

/// Multiplies all rows with all columns, `R` rows and `C` columns at a time.
#[inline(always)]
unsafe fn panel<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let (groups, mut rest) = columns.as_chunks::<C>();
    // SAFETY: each strip gets as many columns as its constant says; the panel is as `PanelFn`
    // requires.
    unsafe {
        for group in groups {
            strip::<V, E, R, C>(panel, group);
        }
        while rest.len() >= 2 {
            strip::<V, E, 4, 2>(panel, &rest[..2]);
            rest = &rest[2..];
        }
        if !rest.is_empty() {
            strip::<V, E, 4, 1>(panel, rest);
        }
    }
}

/// Compiles the generic functions for one instruction set.
macro_rules! compile {
    ($name:ident, $vector:ty, $rows:literal x $columns:literal $(, $features:literal)?) => {
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub unsafe fn product<E: Element>(rows: &Panel, columns: &[Column]) {
                // SAFETY: `panel` requires the same of rows and columns; the features above are
                // those of the vector type, and only a detected instruction set leads here.
                unsafe { panel::<$vector, E, $rows, $columns>(rows, columns) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, PortableVector, 2 x 2);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, 2 x 4, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, std::arch::x86_64::__m512, 4 x 5,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t, 4 x 4);

/// Returns the product for weights of `dtype`: F32, F16 or BF16. Columns are F32.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    choose!(isa, dtype, product)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::numbers;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn float_products_match_plain_loops(
            rows in 1usize..12, columns in 1usize..12, k in 0usize..150, seed: u32,
        ) {
            let x = numbers(seed, columns * k);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let mut weights = vec![0; rows * k * dtype.block_bytes()];
                samite_quant::encode_row(dtype, &numbers(!seed, rows * k), &mut weights).unwrap();
                let mut decoded = vec![0.0; rows * k];
                samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
                for isa in Isa::all() {
                    let mut out = vec![f32::NAN; rows * columns];
                    let panel = Panel {
                        weights: weights.as_ptr(),
                        stride: k * dtype.block_bytes(),
                        rows,
                        k,
                        first: 0,
                        slabs: 0,
                        past_caches: false,
                        reading: crate::product::AccessPattern::DEFAULT,
                        scratch: std::ptr::null_mut(),
                    };
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: x[c * k..].as_ptr().cast(),
                            out: out[c * rows..].as_mut_ptr(),
                        })
                        .collect();
                    // SAFETY: everything has the stated size, and `isa` was detected.
                    unsafe { product(isa, dtype).unwrap()(&panel, &places) };
                    for c in 0..columns {
                        for r in 0..rows {
                            let pairs = decoded[r * k..][..k].iter().zip(&x[c * k..]);
                            let expected: f64 = pairs.map(|(a, b)| f64::from(a * b)).sum();
                            let got = f64::from(out[c * rows + r]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }
                }
            }
        }
    }
}
