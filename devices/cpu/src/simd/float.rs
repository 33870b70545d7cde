//! Products of F32, F16 and BF16 rows with F32 columns, and sums of weighted rows.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

#[cfg(not(target_arch = "aarch64"))]
use super::generic::Lanes;
use super::{Bf16, Element, F16, F32, Vector};
use crate::detect::Isa;
use samite_core::DType;

/// Rows of weights.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// First byte of the first row.
    pub weights: *const u8,
    /// Distance of rows in bytes.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub k: usize,
    /// Where the first row's product goes in each column's results.
    pub first: usize,
    /// Distance in bytes of the slabs of a column, if columns are in slabs.
    pub slabs: usize,
    /// Whether results should go past the caches, where the product can do that.
    pub past_caches: bool,
    /// Memory for this thread alone, if the product needs such.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub scratch: *mut u8,
}

/// A column that all rows of a panel are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    /// The column, in the form that the product needs.
    pub x: *const u8,
    /// Where the products go: that of the panel's first row to `out + first`.
    pub out: *mut f32,
}

/// Multiplies rows with columns.
///
/// # Safety
/// All addresses must be valid for what they are said to hold, and the instruction set must be there.
pub(crate) type PanelFn = unsafe fn(&Panel, &[Column]);

/// `R` rows times `C` columns.
#[inline(always)]
unsafe fn tile<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    row: usize,
    columns: &[Column],
) {
    // SAFETY: rows `row..row + R` and `C` columns exist, by the contract of `PanelFn` and the loops in `panel`.
    unsafe {
        let weights: [*const u8; R] =
            std::array::from_fn(|r| panel.weights.wrapping_add((row + r) * panel.stride));
        let x: [*const f32; C] = std::array::from_fn(|c| columns.get_unchecked(c).x.cast());
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

/// All rows times `C` columns, `R` rows at a time.
#[inline(always)]
unsafe fn strip<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let mut row = 0;
    // SAFETY: as in `tile`.
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

/// All rows times all columns, `R` rows and `C` columns at a time.
#[inline(always)]
unsafe fn panel<V: Vector, E: Element, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
) {
    let (groups, mut rest) = columns.as_chunks::<C>();
    // SAFETY: as in `tile`.
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

/// Adds rows of weights, each times a factor, to sums.
#[derive(Clone, Copy)]
pub(crate) struct Weighted {
    /// First byte of the first row.
    pub rows: *const u8,
    /// Distance of rows in bytes.
    pub stride: usize,
    /// Number of rows, and of factors.
    pub count: usize,
    /// Elements of a row.
    pub len: usize,
}

/// For each column: adds the sum of all rows, each times the column's factor for it (`x`), to `out`. Rows whose factors
/// are all 0 are not read: they may hold anything, NaN too.
///
/// # Safety
/// As [`PanelFn`].
pub(crate) type WeightedFn = unsafe fn(&Weighted, &[Column]);

/// `D` registers of the sums of `C` columns at a time.
#[inline(always)]
unsafe fn weighted_tile<V: Vector, E: Element, const D: usize, const C: usize>(
    rows: &Weighted,
    at: usize,
    columns: &[Column],
) {
    // SAFETY: elements `at..at + D * LANES` and `C` columns exist, by the contract and the loops below.
    unsafe {
        let mut sums = [[V::splat(0.0); D]; C];
        for c in 0..C {
            for d in 0..D {
                sums[c][d] = V::load(columns.get_unchecked(c).out.add(at + d * V::LANES));
            }
        }
        for row in 0..rows.count {
            let mut factors = [0.0; C];
            for c in 0..C {
                factors[c] = *columns.get_unchecked(c).x.cast::<f32>().add(row);
            }
            if factors.iter().all(|&factor| factor == 0.0) {
                continue;
            }
            let from = rows.rows.wrapping_add(row * rows.stride);
            let mut values = [V::splat(0.0); D];
            for d in 0..D {
                values[d] = E::load::<V>(from, at + d * V::LANES);
            }
            for c in 0..C {
                let factor = V::splat(factors[c]);
                for d in 0..D {
                    sums[c][d] = values[d].mul_add(factor, sums[c][d]);
                }
            }
        }
        for c in 0..C {
            for d in 0..D {
                sums[c][d].store(columns.get_unchecked(c).out.add(at + d * V::LANES));
            }
        }
    }
}

#[inline(always)]
unsafe fn weighted_columns<V: Vector, E: Element, const C: usize>(
    rows: &Weighted,
    columns: &[Column],
) {
    let mut at = 0;
    // SAFETY: as in `weighted_tile`.
    unsafe {
        while at + 4 * V::LANES <= rows.len {
            weighted_tile::<V, E, 4, C>(rows, at, columns);
            at += 4 * V::LANES;
        }
        while at + V::LANES <= rows.len {
            weighted_tile::<V, E, 1, C>(rows, at, columns);
            at += V::LANES;
        }
        if at == rows.len {
            return;
        }
        let rest = rows.len - at;
        for column in columns {
            let mut sum = V::load_part(column.out.add(at), rest);
            for row in 0..rows.count {
                let from = rows.rows.wrapping_add(row * rows.stride);
                let factor = *column.x.cast::<f32>().add(row);
                if factor != 0.0 {
                    sum = E::load_part::<V>(from, at, rest).mul_add(V::splat(factor), sum);
                }
            }
            sum.store_part(column.out.add(at), rest);
        }
    }
}

#[inline(always)]
unsafe fn weighted<V: Vector, E: Element>(rows: &Weighted, columns: &[Column]) {
    let (pairs, rest) = columns.as_chunks::<2>();
    // SAFETY: as in `weighted_tile`.
    unsafe {
        for pair in pairs {
            weighted_columns::<V, E, 2>(rows, pair);
        }
        if !rest.is_empty() {
            weighted_columns::<V, E, 1>(rows, rest);
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
                // SAFETY: the caller's contract.
                unsafe { panel::<$vector, E, $rows, $columns>(rows, columns) }
            }

            $(#[target_feature(enable = $features)])?
            pub unsafe fn weighted_rows<E: Element>(rows: &Weighted, columns: &[Column]) {
                // SAFETY: the caller's contract.
                unsafe { weighted::<$vector, E>(rows, columns) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, Lanes, 2 x 2);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, 2 x 4, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, std::arch::x86_64::__m512, 4 x 5, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t, 4 x 4);

/// Chooses one of the compiled functions.
macro_rules! choose {
    ($isa:expr, $dtype:expr, $function:ident) => {{
        #[cfg(target_arch = "aarch64")]
        use neon as base;
        #[cfg(not(target_arch = "aarch64"))]
        use portable as base;
        match ($isa, $dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512(_), DType::F32) => Some(avx512::$function::<F32> as _),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512(_), DType::F16) => Some(avx512::$function::<F16> as _),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512(_), DType::BF16) => Some(avx512::$function::<Bf16> as _),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2(_), DType::F32) => Some(avx2::$function::<F32> as _),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2(_), DType::F16) => Some(avx2::$function::<F16> as _),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2(_), DType::BF16) => Some(avx2::$function::<Bf16> as _),
            (_, DType::F32) => Some(base::$function::<F32> as _),
            (_, DType::F16) => Some(base::$function::<F16> as _),
            (_, DType::BF16) => Some(base::$function::<Bf16> as _),
            _ => None,
        }
    }};
}

pub(crate) use choose;

/// The product for weights of `dtype`: F32, F16 or BF16. Columns are F32.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    choose!(isa, dtype, product)
}

/// The weighted sum of rows of `dtype`: F32, F16 or BF16.
pub(crate) fn weighted_rows(isa: Isa, dtype: DType) -> Option<WeightedFn> {
    choose!(isa, dtype, weighted_rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(seed: u32, count: usize) -> Vec<f32> {
        (0..count as u32)
            .map(|i| {
                let hash = (i ^ seed).wrapping_mul(0x9e37_79b9) >> 8;
                hash as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn products_and_sums_agree_with_plain_loops(
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
                        scratch: std::ptr::null_mut(),
                    };
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: x[c * k..].as_ptr().cast(),
                            out: out[c * rows..].as_mut_ptr(),
                        })
                        .collect();
                    // SAFETY: everything is as large as said, and `isa` was detected.
                    unsafe { product(isa, dtype).unwrap()(&panel, &places) };
                    for c in 0..columns {
                        for r in 0..rows {
                            let pairs = decoded[r * k..][..k].iter().zip(&x[c * k..]);
                            let expected: f64 = pairs.map(|(a, b)| f64::from(a * b)).sum();
                            let got = f64::from(out[c * rows + r]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }

                    // The same numbers as factors: sums over rows.
                    let factors = numbers(seed ^ 7, columns * rows);
                    let mut sums = vec![1.0; columns * k];
                    let weighted = Weighted {
                        rows: weights.as_ptr(),
                        stride: k * dtype.block_bytes(),
                        count: rows,
                        len: k,
                    };
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: factors[c * rows..].as_ptr().cast(),
                            out: sums[c * k..].as_mut_ptr(),
                        })
                        .collect();
                    // SAFETY: as above.
                    unsafe { weighted_rows(isa, dtype).unwrap()(&weighted, &places) };
                    for c in 0..columns {
                        for i in 0..k {
                            let terms = (0..rows).map(|r| f64::from(factors[c * rows + r] * decoded[r * k + i]));
                            let expected = 1.0 + terms.sum::<f64>();
                            let got = f64::from(sums[c * k + i]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }
                }
            }
        }
    }
}
