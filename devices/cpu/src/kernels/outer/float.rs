//! Sums of outer products: a matrix product in which neither operand is summed across a register.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use crate::detect::Isa;
use crate::detect::choose;
use crate::simd::float::{Bf16, Element, F16, F32, Vector};
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::PortableVector;
use samite_core::DType;

/// Number of terms that are added in registers before the sums go back to memory. This part of the
/// rows stays in the cache while columns change.
const TERMS: usize = 256;

/// Maximum number of columns of a tile.
const MAX_COLUMNS: usize = 12;

/// `out[j][i] = sum of rows[k][i] * factor[j][k]` over `terms` rows, optionally added to `out`.
#[derive(Clone, Copy)]
pub(crate) struct Outer {
    /// First byte of the first row.
    pub rows: *const u8,
    /// Distance of rows in bytes.
    pub row_stride: usize,
    /// Elements of a row.
    pub len: usize,
    /// Number of rows.
    pub terms: usize,
    /// The factor of the first row for the first column.
    pub factors: *const f32,
    /// Distance in bytes of factors of the same row for adjacent columns.
    pub column_stride: usize,
    /// Distance in bytes of factors of the same column for adjacent rows.
    pub term_stride: usize,
    /// Sums of the first column, as long as a row.
    pub out: *mut f32,
    /// Distance of columns of sums in bytes.
    pub out_stride: usize,
    /// Number of columns.
    pub columns: usize,
    /// True if sums are added to the contents of `out`.
    pub add: bool,
}

/// Computes all sums.
///
/// # Safety
/// All addresses must be valid for the stated data, and the instruction set must be available.
pub(crate) type OuterFn = unsafe fn(&Outer);

/// Sums and terms of a tile.
#[derive(Clone, Copy)]
struct Tile {
    /// First element.
    at: usize,
    column: usize,
    first: usize,
    end: usize,
}

impl Outer {
    #[inline(always)]
    fn sums(&self, tile: Tile, column: usize) -> *mut f32 {
        let row = (tile.column + column) * self.out_stride;
        self.out.wrapping_byte_add(row).wrapping_add(tile.at)
    }

    #[inline(always)]
    fn factor(&self, tile: Tile, column: usize) -> *const f32 {
        let column = (tile.column + column) * self.column_stride;
        let term = tile.first * self.term_stride;
        self.factors.wrapping_byte_add(column + term)
    }
}

/// Number of columns whose factors are addressed from one pointer.
const TRIPLE: usize = 3;

/// Computes `R` registers of `C` columns.
#[inline(always)]
unsafe fn tile<V: Vector, E: Element, const R: usize, const C: usize>(outer: &Outer, tile: Tile) {
    // SAFETY: elements `at..at + R * LANES`, `C` columns and the terms exist, by the contract of
    // `OuterFn` and the loops below.
    unsafe {
        let mut sums = [[V::splat(0.0); R]; C];
        if outer.add || tile.first > 0 {
            for c in 0..C {
                for r in 0..R {
                    sums[c][r] = V::load(outer.sums(tile, c).add(r * V::LANES));
                }
            }
        }
        // Three columns per address: there are too few registers for the addresses of all.
        let mut factors = [outer.factor(tile, 0); MAX_COLUMNS / TRIPLE];
        for group in 0..C.div_ceil(TRIPLE) {
            factors[group] = outer.factor(tile, group * TRIPLE);
        }
        let mut row = outer.rows.wrapping_add(tile.first * outer.row_stride);
        for _ in tile.first..tile.end {
            let mut values = [V::splat(0.0); R];
            for r in 0..R {
                values[r] = E::load::<V>(row, tile.at + r * V::LANES);
            }
            for c in 0..C {
                let column = c % TRIPLE * outer.column_stride;
                let factor = V::splat(*factors[c / TRIPLE].wrapping_byte_add(column));
                for r in 0..R {
                    sums[c][r] = values[r].mul_add(factor, sums[c][r]);
                }
            }
            row = row.wrapping_add(outer.row_stride);
            for group in 0..C.div_ceil(TRIPLE) {
                factors[group] = factors[group].wrapping_byte_add(outer.term_stride);
            }
        }
        for c in 0..C {
            for r in 0..R {
                sums[c][r].store(outer.sums(tile, c).add(r * V::LANES));
            }
        }
    }
}

/// Computes the last elements of a row, fewer than a register holds, of one column.
#[inline(always)]
unsafe fn rest<V: Vector, E: Element>(outer: &Outer, tile: Tile) {
    let count = outer.len - tile.at;
    // SAFETY: `count` elements from `at`, the column and the terms exist, by the contract of
    // `OuterFn` and the loops below.
    unsafe {
        let to = outer.sums(tile, 0);
        let mut sum = V::splat(0.0);
        if outer.add || tile.first > 0 {
            sum = V::load_part(to, count);
        }
        let factors = outer.factor(tile, 0);
        for term in tile.first..tile.end {
            let row = outer.rows.wrapping_add(term * outer.row_stride);
            let shift = (term - tile.first) * outer.term_stride;
            let factor = V::splat(*factors.wrapping_byte_add(shift));
            sum = E::load_part::<V>(row, tile.at, count).mul_add(factor, sum);
        }
        sum.store_part(to, count);
    }
}

/// Computes `R` registers of all columns.
#[inline(always)]
unsafe fn strip<V: Vector, E: Element, const R: usize, const C: usize>(
    outer: &Outer,
    mut place: Tile,
) {
    // SAFETY: a tile gets at most as many columns as are left. Its elements exist, as `place` came
    // from the loops below.
    unsafe {
        place.column = 0;
        while place.column + C <= outer.columns {
            tile::<V, E, R, C>(outer, place);
            place.column += C;
        }
        while place.column + 2 <= outer.columns {
            tile::<V, E, R, 2>(outer, place);
            place.column += 2;
        }
        if place.column < outer.columns {
            tile::<V, E, R, 1>(outer, place);
        }
    }
}

/// Computes all sums in tiles of `R` registers of `C` columns. The rest of the rows is narrower, so
/// it uses `NARROW` columns: to hide their latency, enough independent multiply-adds must be in
/// flight for each unit.
#[inline(always)]
unsafe fn outer<V: Vector, E: Element, const R: usize, const C: usize, const NARROW: usize>(
    outer: &Outer,
) {
    const { assert!(C <= MAX_COLUMNS && NARROW <= MAX_COLUMNS) };
    let mut first = 0;
    loop {
        let end = (first + TERMS).min(outer.terms);
        let mut place = Tile {
            at: 0,
            column: 0,
            first,
            end,
        };
        // SAFETY: a strip starts only where all its elements are left, and the last one takes the
        // rest. Columns and terms exist, by the contract of `OuterFn`.
        unsafe {
            while place.at + R * V::LANES <= outer.len {
                strip::<V, E, R, C>(outer, place);
                place.at += R * V::LANES;
            }
            while place.at + V::LANES <= outer.len {
                strip::<V, E, 1, NARROW>(outer, place);
                place.at += V::LANES;
            }
            if place.at < outer.len {
                for column in 0..outer.columns {
                    rest::<V, E>(outer, Tile { column, ..place });
                }
            }
        }
        first = end;
        // Without terms, the sums are zeros.
        if first == outer.terms {
            return;
        }
    }
}

/// Compiles the generic function for one instruction set.
macro_rules! compile {
    ($name:ident, $vector:ty, $registers:literal x $columns:literal,
        $narrow:literal $(, $features:literal)?) => {
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub unsafe fn sums<E: Element>(work: &Outer) {
                // SAFETY: `outer` has the same requirements. The features above are those of the
                // vector type, and only a detected instruction set leads here.
                unsafe { outer::<$vector, E, $registers, $columns, $narrow>(work) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, PortableVector, 1 x 4, 4);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, 2 x 6, 12, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, std::arch::x86_64::__m512, 4 x 6, 12,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t, 4 x 6, 12);

/// Returns the function for rows of `dtype`: F32, F16 or BF16.
pub(crate) fn sums(isa: Isa, dtype: DType) -> Option<OuterFn> {
    choose!(isa, dtype, sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::numbers;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn outer_product_sums_match_plain_loops(
            len in 1usize..150, terms in 0usize..300, columns in 1usize..30, across: bool,
            add: bool, seed: u32,
        ) {
            let factors = numbers(seed, columns * terms);
            let (column_stride, term_stride) = if across {
                (4 * terms, 4)
            } else {
                (4, 4 * columns)
            };
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let mut rows = vec![0; terms * len * dtype.block_bytes()];
                samite_quant::encode_row(dtype, &numbers(!seed, terms * len), &mut rows).unwrap();
                let mut decoded = vec![0.0; terms * len];
                samite_quant::decode_row(dtype, &rows, &mut decoded).unwrap();
                for isa in Isa::all() {
                    let before = if add { 0.25 } else { f32::NAN };
                    let mut out = vec![before; len * columns];
                    let work = Outer {
                        rows: rows.as_ptr(),
                        row_stride: len * dtype.block_bytes(),
                        len,
                        terms,
                        factors: factors.as_ptr(),
                        column_stride,
                        term_stride,
                        out: out.as_mut_ptr(),
                        out_stride: 4 * len,
                        columns,
                        add,
                    };
                    // SAFETY: everything has the stated size, and `isa` was detected.
                    unsafe { sums(isa, dtype).unwrap()(&work) };
                    for j in 0..columns {
                        for i in 0..len {
                            let expected: f64 = (0..terms)
                                .map(|k| {
                                    let factor = factors[(j * column_stride + k * term_stride) / 4];
                                    f64::from(decoded[k * len + i] * factor)
                                })
                                .sum::<f64>()
                                + if add { 0.25 } else { 0.0 };
                            let got = f64::from(out[j * len + i]);
                            prop_assert!((got - expected).abs() < 1e-4, "{got} {expected} {isa:?}");
                        }
                    }
                }
            }
        }
    }
}
