//! Products of attention for few queries: queries with a block of keys, weighted sums of values,
//! and conversion of blocks to F32.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::kv_types::{BlockRows, Stored};
use crate::detect::Isa;
use crate::detect::{choose, compiled};
use crate::product::Column;
use crate::simd::float::{Bf16, F16, F32, Vector};
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::PortableVector;
use crate::simd::prefetch_here;
use samite_core::DType;
use samite_quant::blocks::{BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};

/// Maximum number of keys of a block. The same rows of the next block are prefetched while a block
/// is multiplied.
pub(crate) const BLOCK: usize = 64;

/// A block of keys or values.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    /// First byte of the first row.
    pub first: *const u8,
    /// Distance of rows in bytes.
    pub stride: usize,
    /// Number of rows, at most [`BLOCK`].
    pub count: usize,
    /// Elements of a row.
    pub len: usize,
}

impl Rows {
    #[inline(always)]
    fn row(&self, row: usize) -> *const u8 {
        self.first.wrapping_add(row * self.stride)
    }
}

/// A function of each row and each column.
///
/// # Safety
/// All addresses must be valid for the stated data, and the instruction set must be available.
pub(crate) type RowsFn = unsafe fn(&Rows, &[Column]);

/// Stores each column's product with each row. Results have room for [`BLOCK`] numbers. Those after
/// the last row are undefined.
#[inline(always)]
unsafe fn products<V: Vector, E: Stored>(rows: &Rows, columns: &[Column]) {
    let (fours, rest) = columns.as_chunks::<4>();
    let (pairs, rest) = rest.as_chunks::<2>();
    let mut ahead = BLOCK * rows.stride;
    // SAFETY: rows and columns satisfy `RowsFn`, and each strip gets as many columns as its
    // constant says. The addresses `ahead` are only prefetched.
    unsafe {
        for four in fours {
            strip::<V, E, 4, 4, 2>(rows, four, ahead);
            ahead = 0;
        }
        for pair in pairs {
            strip::<V, E, 4, 2, 1>(rows, pair, ahead);
            ahead = 0;
        }
        if let [column] = rest {
            strip::<V, E, 8, 1, 1>(rows, &[*column], ahead);
        }
    }
}

/// Multiplies all rows with `C` columns, `R` rows at a time, in `8 * G` sums. Prefetches at a
/// distance of `ahead` bytes.
#[inline(always)]
unsafe fn strip<V: Vector, E: Stored, const R: usize, const C: usize, const G: usize>(
    rows: &Rows,
    columns: &[Column; C],
    ahead: usize,
) {
    const { assert!(R * C == 8 * G && 8 % R == 0) };
    for row in (0..rows.count).step_by(R) {
        // SAFETY: each row that is read is below `count`, and elements end at `rows.len`, which
        // columns also have. Results have room for `BLOCK` numbers, a multiple of `R`, so the `R`
        // from `row` fit even if fewer rows are left.
        unsafe {
            let mut w = [std::ptr::null(); R];
            for r in 0..R {
                w[r] = rows.row((row + r).min(rows.count - 1));
            }
            let mut x = [std::ptr::null::<f32>(); C];
            for c in 0..C {
                x[c] = columns[c].x.cast();
            }
            // The sum of row r and column c is number c * R + r.
            let mut sums = [[V::splat(0.0); 8]; G];
            let mut i = 0;
            while i + V::LANES <= rows.len {
                let mut values = [V::splat(0.0); R];
                for r in 0..R {
                    // Prefetches one line for as many loads as it takes to read it.
                    if (i / V::LANES + r).is_multiple_of(E::LINE / V::LANES) {
                        prefetch_here(w[r].wrapping_add(E::line(i) + ahead));
                    }
                    values[r] = E::load::<V>(w[r], i);
                }
                for c in 0..C {
                    let x = V::load(x[c].add(i));
                    for r in 0..R {
                        let sum = &mut sums[(c * R + r) / 8][(c * R + r) % 8];
                        *sum = values[r].mul_add(x, *sum);
                    }
                }
                i += V::LANES;
            }
            if const { E::HAS_PARTS } && i < rows.len {
                let rest = rows.len - i;
                let mut values = [V::splat(0.0); R];
                for r in 0..R {
                    values[r] = E::load_part::<V>(w[r], i, rest);
                }
                for c in 0..C {
                    let x = V::load_part(x[c].add(i), rest);
                    for r in 0..R {
                        let sum = &mut sums[(c * R + r) / 8][(c * R + r) % 8];
                        *sum = values[r].mul_add(x, *sum);
                    }
                }
            }
            for g in 0..G {
                let sums = V::sums(&sums[g]);
                for (i, sums) in sums.as_chunks::<R>().0.iter().enumerate() {
                    let out = columns[g * 8 / R + i].out.add(row);
                    out.cast::<[f32; R]>().write_unaligned(*sums);
                }
            }
        }
    }
}

/// For each column, adds the sum of all rows, each times the column's factor for it (`x`), to
/// `out`. Rows whose factors are all 0 are skipped, whatever they contain, even NaN.
#[inline(always)]
unsafe fn weighted<V: Vector, E: Stored>(rows: &Rows, columns: &[Column]) {
    let mut used = [0; BLOCK];
    let used = &mut used[..rows.count];
    for column in columns {
        // SAFETY: a column has an F32 factor for each of `count` rows, with the size and alignment
        // of a `u32`, and factors are not written to here.
        let factors = unsafe { std::slice::from_raw_parts(column.x.cast::<u32>(), rows.count) };
        // All bits except the sign.
        used.iter_mut()
            .zip(factors)
            .for_each(|(any, bits)| *any |= bits << 1);
    }
    // Without branches, so that the comparison is vectorised.
    let unused = used.iter().fold(0, |any, &bits| any | u32::from(bits == 0));
    let used = if unused == 0 { None } else { Some(&*used) };
    let (fours, rest) = columns.as_chunks::<4>();
    let (pairs, rest) = rest.as_chunks::<2>();
    let mut ahead = BLOCK * rows.stride;
    // SAFETY: rows and columns satisfy `RowsFn`, and `used` has a number for each row. The
    // addresses `ahead` are only prefetched.
    unsafe {
        for four in fours {
            weighted_columns::<V, E, 4>(rows, four, used, ahead);
            ahead = 0;
        }
        for pair in pairs {
            weighted_columns::<V, E, 2>(rows, pair, used, ahead);
            ahead = 0;
        }
        if let [column] = rest {
            weighted_columns::<V, E, 1>(rows, &[*column], used, ahead);
        }
    }
}

#[inline(always)]
unsafe fn weighted_columns<V: Vector, E: Stored, const C: usize>(
    rows: &Rows,
    columns: &[Column; C],
    used: Option<&[u32]>,
    ahead: usize,
) {
    let mut at = 0;
    // SAFETY: a tile starts only where all its elements are left, and the last one takes the rest.
    // Rows and columns satisfy `RowsFn`.
    unsafe {
        while at + 4 * V::LANES <= rows.len {
            weighted_tile::<V, E, 4, C, true>(rows, at, columns, used, ahead);
            at += 4 * V::LANES;
        }
        while at + V::LANES <= rows.len {
            weighted_tile::<V, E, 1, C, true>(rows, at, columns, used, ahead);
            at += V::LANES;
        }
        if const { E::HAS_PARTS } && at < rows.len {
            weighted_tile::<V, E, 1, C, false>(rows, at, columns, used, ahead);
        }
    }
}

/// Computes `D` registers of the sums of `C` columns, or the last register, which is not `WHOLE`.
#[inline(always)]
unsafe fn weighted_tile<V: Vector, E: Stored, const D: usize, const C: usize, const WHOLE: bool>(
    rows: &Rows,
    at: usize,
    columns: &[Column; C],
    used: Option<&[u32]>,
    ahead: usize,
) {
    let rest = rows.len - at;
    // SAFETY: elements `at..at + D * LANES`, or those left, and the columns exist, by the contract
    // and the loops above.
    unsafe {
        let mut x = [std::ptr::null::<f32>(); C];
        let mut out = [std::ptr::null_mut::<f32>(); C];
        for c in 0..C {
            (x[c], out[c]) = (columns[c].x.cast(), columns[c].out.add(at));
        }
        let mut sums = [[V::splat(0.0); D]; C];
        for c in 0..C {
            for d in 0..D {
                let out = out[c].add(d * V::LANES);
                sums[c][d] = if WHOLE {
                    V::load(out)
                } else {
                    V::load_part(out, rest)
                };
            }
        }
        for row in 0..rows.count {
            if used.is_some_and(|used| used[row] == 0) {
                continue;
            }
            let from = rows.row(row);
            let mut values = [V::splat(0.0); D];
            for d in 0..D {
                let i = at + d * V::LANES;
                if i.is_multiple_of(E::LINE) {
                    prefetch_here(from.wrapping_add(E::line(i) + ahead));
                }
                values[d] = if WHOLE {
                    E::load::<V>(from, i)
                } else {
                    E::load_part::<V>(from, i, rest)
                };
            }
            for c in 0..C {
                let factor = V::splat(*x[c].add(row));
                for d in 0..D {
                    sums[c][d] = values[d].mul_add(factor, sums[c][d]);
                }
            }
        }
        for c in 0..C {
            for d in 0..D {
                let out = out[c].add(d * V::LANES);
                if WHOLE {
                    sums[c][d].store(out);
                } else {
                    sums[c][d].store_part(out, rest);
                }
            }
        }
    }
}

/// Writes the elements of all rows as F32, row after row.
#[inline(always)]
unsafe fn decode<V: Vector, E: Stored>(rows: &Rows, out: *mut f32) {
    let whole = rows.len - rows.len % V::LANES;
    for row in 0..rows.count {
        let (from, to) = (rows.row(row), out.wrapping_add(row * rows.len));
        // SAFETY: `i` and the part after it end at `rows.len`, and `row` is below `rows.count`.
        // Those elements are readable, and `out` has room for them.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                E::load::<V>(from, i).store(to.add(i));
            }
            if const { E::HAS_PARTS } && whole < rows.len {
                let count = rows.len - whole;
                E::load_part::<V>(from, whole, count).store_part(to.add(whole), count);
            }
        }
    }
}

/// Compiles the generic functions for one instruction set.
macro_rules! compile {
    ($name:ident, $vector:ty $(, $features:literal)?) => {
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub unsafe fn products<E: Stored>(rows: &Rows, columns: &[Column]) {
                // SAFETY: rows and columns satisfy `RowsFn`. This function is compiled with the
                // instructions of its vectors, and `compiled` only returns it if they were
                // detected.
                unsafe { super::products::<$vector, E>(rows, columns) }
            }

            $(#[target_feature(enable = $features)])?
            pub unsafe fn weighted<E: Stored>(rows: &Rows, columns: &[Column]) {
                // SAFETY: rows and columns satisfy `RowsFn`. This function is compiled with the
                // instructions of its vectors, and `compiled` only returns it if they were
                // detected.
                unsafe { super::weighted::<$vector, E>(rows, columns) }
            }

            $(#[target_feature(enable = $features)])?
            pub unsafe fn decode<E: Stored>(rows: &Rows, out: *mut f32) {
                // SAFETY: rows exist and `out` has room for all of them, as `DecodeFn` requires.
                // This function is compiled with the instructions of its vectors, and `compiled`
                // only returns it if they were detected.
                unsafe { super::decode::<$vector, E>(rows, out) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, PortableVector);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(
    avx512,
    std::arch::x86_64::__m512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t);

/// Returns whether products load rows of `dtype` without conversion.
pub(crate) fn is_loaded(dtype: DType) -> bool {
    decode_of(Isa::Generic, dtype).is_some()
}

/// Types that rows are loaded from, in addition to those of [`choose`].
macro_rules! choose_stored {
    ($isa:expr, $dtype:expr, $function:ident) => {
        match $dtype {
            DType::Q8_0 => compiled!($isa, $function, BlockRows<BlockQ8_0>),
            DType::Q4_0 => compiled!($isa, $function, BlockRows<BlockQ4_0>),
            DType::Q4_1 => compiled!($isa, $function, BlockRows<BlockQ4_1>),
            DType::Q5_0 => compiled!($isa, $function, BlockRows<BlockQ5_0>),
            DType::Q5_1 => compiled!($isa, $function, BlockRows<BlockQ5_1>),
            DType::IQ4_NL => compiled!($isa, $function, BlockRows<BlockIq4Nl>),
            _ => choose!($isa, $dtype, $function),
        }
    };
}

/// Returns the function that stores the product of each column with each row of `dtype`, if rows
/// are loaded without conversion. Columns are F32. Their results have room for [`BLOCK`] numbers.
/// Those after the last row are undefined.
pub(crate) fn products_of(isa: Isa, dtype: DType) -> Option<RowsFn> {
    choose_stored!(isa, dtype, products)
}

/// Returns the function that adds, for each column, the sum of all rows of `dtype`, each times the
/// column's factor for it (`x`), to `out`. Rows whose factors are all 0 are skipped, whatever they
/// contain, even NaN.
pub(crate) fn weighted_sums_of(isa: Isa, dtype: DType) -> Option<RowsFn> {
    choose_stored!(isa, dtype, weighted)
}

/// Writes the elements of rows as F32, row after row.
///
/// # Safety
/// As [`RowsFn`].
pub(crate) type DecodeFn = unsafe fn(&Rows, *mut f32);

/// Returns the [`DecodeFn`] for rows of `dtype`, if they are loaded without conversion.
pub(crate) fn decode_of(isa: Isa, dtype: DType) -> Option<DecodeFn> {
    choose_stored!(isa, dtype, decode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::numbers;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn kv_kernels_match_plain_loops(
            count in 1..=BLOCK, columns in 1usize..9, len in 0usize..150, seed: u32,
            hidden in 0..2 * BLOCK,
        ) {
            let mut factors = numbers(seed ^ 7, columns * count);
            for dtype in DType::all().filter(|dtype| is_loaded(*dtype)) {
                let len = len - len % dtype.block_len();
                let queries = numbers(seed, columns * len);
                let stride = len / dtype.block_len() * dtype.block_bytes();
                let mut stored = vec![0; count * stride];
                samite_quant::encode_row(dtype, &numbers(!seed, count * len), &mut stored).unwrap();
                let mut decoded = vec![0.0; count * len];
                samite_quant::decode_row(dtype, &stored, &mut decoded).unwrap();
                let rows = Rows {
                    first: stored.as_ptr(),
                    stride,
                    count,
                    len,
                };
                for isa in Isa::all() {
                    let mut out = vec![f32::NAN; count * len];
                    // SAFETY: everything has the stated size, and `isa` was detected.
                    unsafe { decode_of(isa, dtype).unwrap()(&rows, out.as_mut_ptr()) };
                    prop_assert_eq!(&out, &decoded);

                    let mut out = vec![f32::NAN; columns * BLOCK];
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: queries[c * len..].as_ptr().cast(),
                            out: out[c * BLOCK..].as_mut_ptr(),
                        })
                        .collect();
                    // SAFETY: everything has the stated size, and `isa` was detected.
                    unsafe { products_of(isa, dtype).unwrap()(&rows, &places) };
                    for c in 0..columns {
                        for r in 0..count {
                            let pairs = decoded[r * len..].iter().zip(&queries[c * len..][..len]);
                            let expected: f64 = pairs.map(|(a, b)| f64::from(a * b)).sum();
                            let got = f64::from(out[c * BLOCK + r]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }
                }

                // A row for which no column has a factor may hold anything.
                if hidden < count {
                    (0..columns).for_each(|c| factors[c * count + hidden] = 0.0);
                    decoded[hidden * len..][..len].fill(0.0);
                    stored[hidden * rows.stride..][..rows.stride].fill(0xff);
                }
                for isa in Isa::all() {
                    let mut sums = vec![1.0; columns * len];
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: factors[c * count..].as_ptr().cast(),
                            out: sums[c * len..].as_mut_ptr(),
                        })
                        .collect();
                    // SAFETY: there are `count` rows of `stride` bytes, and for each column `count`
                    // factors and `len` sums; `isa` was detected.
                    unsafe { weighted_sums_of(isa, dtype).unwrap()(&rows, &places) };
                    for c in 0..columns {
                        for i in 0..len {
                            let terms = (0..count)
                                .map(|r| f64::from(factors[c * count + r] * decoded[r * len + i]));
                            let expected = 1.0 + terms.sum::<f64>();
                            let got = f64::from(sums[c * len + i]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }
                }
            }
        }
    }
}
