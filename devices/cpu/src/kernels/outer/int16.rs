//! [Sums of outer products](crate::kernels::outer::float) of [16-bit numbers](crate::simd::int16),
//! for attention.

// Loops over arrays of registers use indices because they must unroll completely.
#![allow(clippy::needless_range_loop)]

use crate::detect::{Isa, vectorized};
use crate::simd::float::F32;
use crate::simd::int16::{self, Int16Simd, Terms};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Ymm, avx512::Zmm};

pub(crate) use crate::simd::int16::GROUP;

/// The number of lanes of rows is a multiple of this.
pub(crate) const STEP: usize = 32;

/// Number of adjacent columns.
pub(crate) const BESIDE: usize = 64;

/// `out[j][i] = sum of rows[k][i] * factor[j][k]`.
pub(crate) struct Outer<'a> {
    /// Terms of each lane.
    pub rows: Rounded,
    pub lanes: usize,
    /// Number of groups of terms.
    pub groups: usize,
    /// Terms of each column.
    pub factors: Rounded,
    pub columns: usize,
    /// Sums: a row of lanes for each column.
    pub out: *mut f32,
    /// Factor of each column's earlier sums before more is added, or `None` if the sums start here.
    pub before: Option<&'a [f32; BESIDE]>,
}

/// Columns of whole groups of numbers, in pairs, with scales and the initial values of the sums of
/// [crossed](crate::simd::int16) products.
#[derive(Clone, Copy)]
pub(crate) struct Rounded {
    pairs: *mut i32,
    scales: *mut f32,
    starts: *mut i32,
}

impl Rounded {
    /// Returns the size of `columns` columns of `len` elements, in 32-bit words, or `None` if it
    /// overflows.
    pub fn words(len: usize, columns: usize) -> Option<usize> {
        let groups = len.div_ceil(GROUP).checked_mul(columns)?;
        groups.checked_mul(GROUP / 2 + 2)
    }

    /// Returns the columns for which `words` has room.
    pub fn at(words: &mut [f32], len: usize, columns: usize) -> Self {
        let groups = len.div_ceil(GROUP) * columns;
        let (pairs, scales) = words.split_at_mut(groups * (GROUP / 2));
        let (scales, starts) = scales.split_at_mut(groups);
        assert!(starts.len() >= groups, "there is no room for starts");
        Rounded {
            pairs: pairs.as_mut_ptr().cast(),
            scales: scales.as_mut_ptr(),
            starts: starts.as_mut_ptr().cast(),
        }
    }

    /// Returns the terms of the first column or lane.
    #[inline(always)]
    fn terms(self, step: usize) -> Terms {
        Terms {
            pairs: self.pairs,
            scales: self.scales,
            starts: self.starts,
            step,
        }
    }
}

/// 16-bit functions of attention.
///
/// # Safety
/// The instruction set must be available, and all addresses must be valid for the stated data.
#[derive(Clone, Copy)]
pub(crate) struct Products {
    /// Rounds some terms of each of some lanes, row after row. The number of lanes is a multiple of
    /// [`STEP`]: `(rows, terms, lanes, to)`.
    pub round: unsafe fn(*const f32, usize, usize, Rounded),
    /// Sums of products with contiguous columns, each rounded by [`round_columns`].
    pub along: unsafe fn(&Outer<'_>),
    /// Sums of products with up to [`BESIDE`] adjacent columns, in the form that `round` creates
    /// for that many lanes.
    pub beside: unsafe fn(&Outer<'_>),
    /// True if products are crossed.
    pub crossed: bool,
}

vectorized! {
    /// Rounds columns of whole groups. `crossed` says if [products](Products) are crossed.
    ///
    /// # Safety
    /// `to` must have room for all whole groups of `x`, and no other code may use it.
    pub(crate) unsafe fn round_columns(x: &[f32], to: Rounded, crossed: bool) {
        for (i, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            // Compilers would gather elements of many groups, which is slow.
            let x = std::hint::black_box(x);
            // SAFETY: `i` is below the number of whole groups, and `to` has room for all of them.
            // `x` is borrowed, so it is elsewhere.
            unsafe { int16::round_group(x, to.terms(1), i, crossed) }
        }
    }
}

/// # Safety
/// As [`Products::round`].
#[inline(always)]
unsafe fn round<V: Int16Simd>(rows: *const f32, terms: usize, lanes: usize, to: Rounded) {
    for (group, first) in (0..terms).step_by(GROUP).enumerate() {
        for lane in (0..lanes).step_by(V::LANES) {
            // SAFETY: terms `first..first + GROUP`, or those that are left, have `V::LANES` lanes
            // from `lane`, as `lanes` is a multiple of `STEP`. `to` has room for all groups of all
            // lanes. The caller has the instructions of `V`.
            unsafe {
                int16::round::<V, F32>(
                    rows.add(first * lanes + lane).cast(),
                    lanes,
                    GROUP.min(terms - first),
                    to.terms(lanes).behind(lane, lane),
                    group,
                );
            }
        }
    }
}

/// Layout of columns of factors.
trait ColumnLayout {
    /// Words from a pair of a column to the next one, and from a scale to the next one.
    const NEXT: usize;
    /// Returns the words from a column's first pair to that of the next column, for this number of
    /// groups.
    fn pairs(groups: usize) -> usize;
    /// Returns the words from a column's first scale to that of the next column, for this number of
    /// groups.
    fn scales(groups: usize) -> usize;
}

/// Columns one after the other.
struct Consecutive;

/// Adjacent columns.
struct Adjacent;

impl ColumnLayout for Consecutive {
    const NEXT: usize = 1;
    #[inline(always)]
    fn pairs(groups: usize) -> usize {
        groups * (GROUP / 2)
    }
    #[inline(always)]
    fn scales(groups: usize) -> usize {
        groups
    }
}

impl ColumnLayout for Adjacent {
    const NEXT: usize = BESIDE;
    #[inline(always)]
    fn pairs(_groups: usize) -> usize {
        1
    }
    #[inline(always)]
    fn scales(_groups: usize) -> usize {
        1
    }
}

/// Computes `R` registers of `C` columns at a time.
///
/// # Safety
/// As [`Products`], and `outer.lanes` must be a multiple of [`STEP`].
#[inline(always)]
unsafe fn sums<V: Int16Simd, X: ColumnLayout, const R: usize, const C: usize>(outer: &Outer<'_>) {
    const { assert!(STEP.is_multiple_of(R * V::LANES) && C <= 6) };
    for lane in (0..outer.lanes).step_by(R * V::LANES) {
        for column in (0..outer.columns).step_by(C) {
            // SAFETY: `R * V::LANES` divides `STEP`, which divides the lanes, so that many are left
            // from `lane`. The tile has at most as many columns as are left from `column`. The
            // caller has the instructions of `V`.
            unsafe {
                match outer.columns - column {
                    1 => tile::<V, X, R, 1>(outer, lane, column),
                    2 => tile::<V, X, R, 2>(outer, lane, column),
                    3 => tile::<V, X, R, 3>(outer, lane, column),
                    4 if C > 4 => tile::<V, X, R, 4>(outer, lane, column),
                    5 if C > 5 => tile::<V, X, R, 5>(outer, lane, column),
                    _ => tile::<V, X, R, C>(outer, lane, column),
                }
            }
        }
    }
}

/// # Safety
/// As [`sums`].
#[inline(always)]
unsafe fn tile<V: Int16Simd, X: ColumnLayout, const R: usize, const C: usize>(
    outer: &Outer<'_>,
    lane: usize,
    column: usize,
) {
    // SAFETY: `sums` passes only lanes and columns that exist, and each has `groups` groups. `out`
    // has a row of lanes for each column and does not overlap the operands. `before` is indexed
    // with a check.
    unsafe {
        let rows = outer.rows.terms(outer.lanes).behind(lane, lane);
        let apart = [X::pairs(outer.groups), X::scales(outer.groups)];
        let first = outer.factors.terms(X::NEXT);
        let factors = int16::Columns {
            first: first.behind(column * apart[0], column * apart[1]),
            apart,
        };
        let mut sums = [[V::splat_float(0.0); R]; C];
        for group in 0..outer.groups {
            let whole = int16::products::<V, R, C>(rows, factors, group);
            let mut scales = [V::splat_float(0.0); R];
            for (r, scale) in scales.iter_mut().enumerate() {
                *scale = V::load_floats(rows.scale(group).add(r * V::LANES));
            }
            for c in 0..C {
                let factor = V::splat_float(factors.at(c).scale(group).read());
                for r in 0..R {
                    let scale = V::mul(scales[r], factor);
                    V::accumulate(&mut sums[c][r], V::floats(whole[c][r]), scale);
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                let out = outer
                    .out
                    .add((column + c) * outer.lanes + lane + r * V::LANES);
                let mut sum = sums[c][r];
                if let Some(before) = outer.before {
                    let before = V::splat_float(before[column + c]);
                    sum = V::mul_add(V::load_floats(out), before, sum);
                }
                V::store_floats(sum, out);
            }
        }
    }
}

/// Compiles all functions for one instruction set, with the given numbers of row registers and
/// columns per tile.
#[cfg(target_arch = "x86_64")]
macro_rules! compile {
    ($name:ident, $simd:ty, $rows:literal x $columns:literal, $features:literal) => {
        mod $name {
            use super::*;

            #[target_feature(enable = $features)]
            unsafe fn round(rows: *const f32, terms: usize, lanes: usize, to: Rounded) {
                // SAFETY: rows and room satisfy `Products::round`. This function is compiled with
                // the instructions of its registers, and `products` only returns it if they were
                // detected.
                unsafe { super::round::<$simd>(rows, terms, lanes, to) }
            }

            #[target_feature(enable = $features)]
            unsafe fn sums<X: ColumnLayout>(outer: &Outer<'_>) {
                // SAFETY: `outer` satisfies `Products`. This function is compiled with the
                // instructions of its registers, and `products` only returns it if they were
                // detected.
                unsafe { super::sums::<$simd, X, $rows, $columns>(outer) }
            }

            pub const PRODUCTS: Products = Products {
                round,
                along: sums::<Consecutive>,
                beside: sums::<Adjacent>,
                crossed: <$simd as crate::simd::int8::Simd>::CROSSED,
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
compile!(avx512, Zmm<true>, 2 x 6, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512_crossed, Zmm<true, true>, 2 x 6,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx_vnni, Ymm<true>, 2 x 4, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
compile!(avx2, Ymm<false>, 2 x 4, "avx2,fma,f16c");

/// Returns the 16-bit functions of attention, or `None` if they are not faster than F32.
pub(crate) fn products(isa: Isa) -> Option<Products> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) if isa.is_crossed() => Some(avx512_crossed::PRODUCTS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) if token.vnni() => Some(avx512::PRODUCTS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(token) if token.vnni() => Some(avx_vnni::PRODUCTS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => Some(avx2::PRODUCTS),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::numbers;
    use proptest::prelude::*;

    /// Returns the products of all instruction sets that have them.
    fn all_products() -> Vec<Products> {
        Isa::all().into_iter().filter_map(products).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn outer_product_sums_match_plain_loops(
            steps in 1usize..5, terms in 1usize..140, columns in 1usize..=BESIDE, add: bool,
            seed: u32,
        ) {
            let lanes = steps * STEP;
            let len = terms.next_multiple_of(GROUP);
            let rows = numbers(seed, terms * lanes);
            let factors = numbers(!seed, len * BESIDE);
            // The same factors, term by term.
            let turned: Vec<_> = (0..len * BESIDE)
                .map(|i| factors[i % BESIDE * len + i / BESIDE])
                .collect();
            let before = [0.5; BESIDE];
            for products in all_products() {
                let room = |columns| vec![f32::NAN; Rounded::words(len, columns).unwrap()];
                let (mut rounded, mut along, mut beside) =
                    (room(lanes), room(BESIDE), room(BESIDE));
                let rounded = Rounded::at(&mut rounded, len, lanes);
                let along = Rounded::at(&mut along, len, BESIDE);
                let beside = Rounded::at(&mut beside, len, BESIDE);
                // SAFETY: there is room for all, and the instructions were detected.
                unsafe {
                    (products.round)(rows.as_ptr(), terms, lanes, rounded);
                    round_columns(Isa::Generic, &factors, along, products.crossed);
                    (products.round)(turned.as_ptr(), len, BESIDE, beside);
                }
                for (function, factors_of) in [(products.along, along), (products.beside, beside)] {
                    let start = if add { 0.25 } else { f32::NAN };
                    let mut out = vec![start; lanes * columns];
                    let work = Outer {
                        rows: rounded,
                        lanes,
                        groups: len / GROUP,
                        factors: factors_of,
                        columns,
                        out: out.as_mut_ptr(),
                        before: add.then_some(&before),
                    };
                    // SAFETY: both operands have `len / GROUP` groups, `out` has `lanes` sums for
                    // each column, and the instructions were detected.
                    unsafe { function(&work) };
                    let (mut error, mut power) = (0.0, 0.0);
                    for (i, got) in out.into_iter().enumerate() {
                        let (column, lane) = (i / lanes, i % lanes);
                        let products =
                            (0..terms).map(|k| rows[k * lanes + lane] * factors[column * len + k]);
                        let sum = products.map(f64::from).sum::<f64>();
                        let start = if add { 0.125 } else { 0.0 };
                        error += (f64::from(got) - start - sum).powi(2);
                        power += sum * sum;
                    }
                    prop_assert!(error < 3e-8 * power, "{error} {power}");
                }
            }
        }
    }
}
