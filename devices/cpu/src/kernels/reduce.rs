//! Operations along rows: norms, sums, maxima.

use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase};
use crate::operand::Operand;
use samite_core::Result;

/// Number of parallel partial sums, which become vector registers.
const LANES: usize = 32;

/// Returns the sum of `f` over the elements, in a fixed order.
#[inline(always)]
pub(crate) fn sum_of(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += f(*x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(a, b)| *a += *b);
        width /= 2;
    }
    lanes[0]
}

/// Returns the sum of `f` over the pairs of two rows of equal length, in a fixed order.
#[inline(always)]
pub(crate) fn sum_of_pairs(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += f(*x, *y);
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane += f(*x, *y);
    }
    sum_of(&lanes, |lane| lane)
}

/// Returns the sum of the products of two rows of equal length, in a fixed order.
#[inline(always)]
pub(crate) fn dot_of(x: &[f32], y: &[f32]) -> f32 {
    sum_of_pairs(x, y, |x, y| x * y)
}

/// Returns the largest element, ignoring NaN, or minus infinity for none.
#[inline(always)]
pub(crate) fn max_of(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = if *x > *lane { *x } else { *lane };
    }
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        let pairs = low.iter_mut().zip(high);
        pairs.for_each(|(a, b)| *a = if *b > *a { *b } else { *a });
        width /= 2;
    }
    lanes[0]
}

/// Calls `f` for each row of the F32 result, after copying the source's row to it.
pub(crate) fn change_rows(
    context: &KernelContext<'_>,
    cost: f64,
    f: impl Fn(Isa, [usize; 3], &mut [f32]) + Send + Sync + 'static,
) -> Result<Phase> {
    Ok(change_rows_of(context, context.source(0)?, cost, f))
}

/// Does what [`change_rows`] does with another operand of the result's shape as the source.
fn change_rows_of(
    context: &KernelContext<'_>,
    source: Operand,
    cost: f64,
    f: impl Fn(Isa, [usize; 3], &mut [f32]) + Send + Sync + 'static,
) -> Phase {
    let (result, isa) = (context.result(), context.isa);
    Phase::new(
        result.rows(),
        result.elements() as f64 * cost,
        move |tasks, _| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: the row is inside the shape, which both operands share, and tasks are
                // rows.
                unsafe {
                    let out = result.row_mut::<f32>(row);
                    source.load(row, 0, out);
                    f(isa, row, out);
                }
            }
            Ok(())
        },
    )
}

/// Normalises rows so that their squares have mean 1.
pub(crate) fn rms_norm(context: &KernelContext<'_>, eps: f32) -> Result<Phase> {
    change_rows(context, 0.4, move |isa, _, out| rms_norm_row(isa, out, eps))
}

/// Normalises rows so that their squares have sum 1.
pub(crate) fn l2_norm(context: &KernelContext<'_>, eps: f32) -> Result<Phase> {
    change_rows(context, 0.4, move |isa, _, out| l2_norm_row(isa, out, eps))
}

/// Normalises rows to mean 0 and variance 1.
pub(crate) fn norm(context: &KernelContext<'_>, eps: f32) -> Result<Phase> {
    change_rows(context, 0.6, move |isa, _, out| norm_row(isa, out, eps))
}

vectorized! {
    fn rms_norm_row(x: &mut [f32], eps: f32) {
        let factor = rms_factor_of(x, eps);
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Returns the factor that makes the mean of a row's squares 1.
#[inline(always)]
fn rms_factor_of(x: &[f32], eps: f32) -> f32 {
    let mean = sum_of(x, |x| x * x) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

vectorized! {
    /// Does what [`rms_factor_of`] does, and selects the instructions.
    pub(crate) fn rms_factor(x: &[f32], eps: f32) -> f32 {
        rms_factor_of(x, eps)
    }
}

vectorized! {
    /// Computes a part of a row of an RMS norm, times a row.
    pub(crate) fn norm_slice(out: &mut [f32], x: &[f32], factor: f32, scale: &[f32]) {
        let pairs = x.iter().zip(scale);
        out.iter_mut().zip(pairs).for_each(|(out, (x, scale))| *out = x * factor * scale);
    }
}

vectorized! {
    /// Does what [`norm_slice`] does, in place.
    fn change_norm(x: &mut [f32], factor: f32, scale: &[f32]) {
        x.iter_mut().zip(scale).for_each(|(x, scale)| *x = *x * factor * scale);
    }
}

/// Returns the RMS norm of each row of `x` times the row `scale`, which are a product of two nodes.
/// The result may be the memory of `x`, but must not overlap it in another way.
pub(crate) fn scaled_norm(
    context: &KernelContext<'_>,
    x: Operand,
    eps: f32,
    scale: Operand,
) -> Phase {
    change_rows_of(context, x, 0.5, move |isa, _, out| {
        // SAFETY: the scale is one dense F32 row, which no task writes.
        let scale = unsafe { scale.row::<f32>([0; 3]) };
        change_norm(isa, out, rms_factor(isa, out, eps), scale);
    })
}

vectorized! {
    fn l2_norm_row(x: &mut [f32], eps: f32) {
        let scale = 1.0 / sum_of(x, |x| x * x).sqrt().max(eps);
        x.iter_mut().for_each(|x| *x *= scale);
    }
}

vectorized! {
    fn norm_row(x: &mut [f32], eps: f32) {
        let mean = sum_of(x, |x| x) / x.len() as f32;
        x.iter_mut().for_each(|x| *x -= mean);
        let variance = sum_of(x, |x| x * x) / x.len() as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        x.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Computes running sums along each row.
pub(crate) fn cumsum(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    Ok(vec![change_rows(context, 1.5, |_, _, out| {
        let mut sum = 0.0;
        for x in out {
            sum += f64::from(*x);
            *x = sum as f32;
        }
    })?])
}

vectorized! {
    fn sum_slice(x: &[f32]) -> f32 {
        sum_of(x, |x| x)
    }
}

/// Returns the sum of a row, in pieces that fit on the stack.
///
/// # Safety
/// See [`Operand`]; the row must be inside the shape.
pub(crate) unsafe fn sum_row(isa: Isa, source: &Operand, row: [usize; 3]) -> f64 {
    let n0 = source.shape()[0];
    let mut buffer = [0.0; 512];
    let (mut sum, mut start) = (0.0, 0);
    while start < n0 {
        let buffer = &mut buffer[..(n0 - start).min(512)];
        // SAFETY: the elements are inside the row.
        unsafe { source.load(row, start, buffer) };
        sum += f64::from(sum_slice(isa, buffer));
        start += buffer.len();
    }
    sum
}

/// Computes the sum of all elements.
pub(crate) fn sum(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    Ok(vec![Phase::new(
        1,
        source.elements() as f64 * 0.3,
        move |_, _| {
            let layout = source.layout();
            let rows = if layout.is_empty() { 0 } else { layout.rows() };
            // SAFETY: all rows are inside the shape, and the result has one element.
            unsafe {
                let sum: f64 = (0..rows)
                    .map(|row| sum_row(isa, &source, layout.row_index(row)))
                    .sum();
                result.store(isa, [0; 3], 0, &[sum as f32]);
            }
            Ok(())
        },
    )])
}

/// Computes the mean of each row.
pub(crate) fn mean(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let elements = context.source(0)?.shape()[0];
    sum_rows(context, elements as f64)
}

/// Computes the sum of each row, divided by `divisor`.
pub(crate) fn sum_rows(context: &KernelContext<'_>, divisor: f64) -> Result<Vec<Phase>> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    Ok(vec![Phase::new(
        result.rows(),
        source.elements() as f64 * 0.3,
        move |tasks, _| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows, and tasks are rows.
                unsafe {
                    let sum = sum_row(isa, &source, row);
                    result.store(isa, row, 0, &[(sum / divisor) as f32]);
                }
            }
            Ok(())
        },
    )])
}

/// Number of elements whose maximum is taken at once. The position is searched only in the block
/// with the largest element.
const BLOCK: usize = 512;

vectorized! {
    /// Returns the position and value of the first largest element, if it is above `floor`.
    fn first_largest(x: &[f32], floor: f32) -> Option<(usize, f32)> {
        let mut largest = floor;
        let mut found = None;
        for (i, block) in x.chunks(BLOCK).enumerate() {
            let max = max_of(block);
            if max > largest {
                largest = max;
                found = Some((i * BLOCK, block));
            }
        }
        let (start, block) = found?;
        let place = block.iter().position(|x| *x == largest)?;
        Some((start + place, largest))
    }
}

/// Computes the index of the first largest element of each row.
pub(crate) fn argmax(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    let [n0, n1, ..] = source.shape();
    let dense = source.has_dense_rows();
    let each = if dense { 0.1 } else { 0.6 };
    Ok(vec![Phase::new(
        n1,
        source.elements() as f64 * each,
        move |tasks, _| {
            for row in tasks {
                let (mut best, mut largest) = (0, f32::NEG_INFINITY);
                let mut look_at = |start: usize, x: &[f32]| {
                    if let Some((place, max)) = first_largest(isa, x, largest) {
                        (best, largest) = (start + place, max);
                    }
                };
                if dense {
                    // SAFETY: tasks are rows, and inference checked that the elements are F32.
                    look_at(0, unsafe { source.row([row, 0, 0]) });
                } else {
                    let mut buffer = [0.0; BLOCK];
                    for start in (0..n0).step_by(BLOCK) {
                        let buffer = &mut buffer[..(n0 - start).min(BLOCK)];
                        // SAFETY: the elements are inside the row.
                        unsafe { source.load([row, 0, 0], start, buffer) };
                        look_at(start, buffer);
                    }
                }
                // SAFETY: each row has one element, and inference bounded the index.
                unsafe { *result.base().cast::<i32>().add(row) = best as i32 };
            }
            Ok(())
        },
    )])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{Bench, device, input};
    use proptest::prelude::*;
    use samite_core::Graph;

    fn one_by_one(x: &[f32]) -> Option<(usize, f32)> {
        let mut found = None;
        let mut largest = f32::NEG_INFINITY;
        for (i, x) in x.iter().enumerate() {
            if *x > largest {
                (found, largest) = (Some((i, *x)), *x);
            }
        }
        found
    }

    #[test]
    fn rows_of_nan_and_negative_infinity_have_no_maximum() {
        for isa in Isa::all() {
            for x in [f32::NAN, f32::NEG_INFINITY] {
                assert_eq!(first_largest(isa, &[x; 2000], f32::NEG_INFINITY), None);
            }
            assert_eq!(first_largest(isa, &[1.0; 2000], 1.0), None);
            assert_eq!(first_largest(isa, &[1.0; 2000], 0.5), Some((0, 1.0)));
        }
    }

    #[test]
    fn argmax_handles_dense_and_strided_rows() {
        const ROW: usize = 2 * BLOCK + 100;
        let places = [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 99];
        let mut values = vec![-1.0; (places.len() + 1) * ROW];
        for (row, place) in values.chunks_mut(ROW).zip(places) {
            row[place] = 3.0;
            row[place + 1..].fill(f32::NAN);
            row[ROW - 1] = 3.0;
        }
        values[places.len() * ROW..].fill(f32::NEG_INFINITY);
        let rows = places.len() + 1;
        let across: Vec<f32> = (0..values.len())
            .map(|i| values[i % rows * ROW + i / rows])
            .collect();
        let mut g = Graph::new();
        let (x, gaps) = (input(&mut g, &[ROW, rows]), input(&mut g, &[rows, ROW]));
        let dense = g.argmax(x).unwrap();
        let turned = g.transpose(gaps).unwrap();
        let turned = g.argmax(turned).unwrap();
        let mut bench = Bench::new(&g, &device(2)).unwrap();
        bench.write(x, &values);
        bench.write(gaps, &across);
        bench.run().unwrap();
        let expected: Vec<i32> = places
            .iter()
            .map(|place| *place as i32)
            .chain([0])
            .collect();
        assert_eq!(bench.read::<i32>(dense), expected);
        assert_eq!(bench.read::<i32>(turned), expected);
    }

    proptest! {
        #[test]
        fn the_first_maximum_is_found(
            x in prop::collection::vec(
                prop_oneof![any::<u32>().prop_map(f32::from_bits),
                    (-5..5i32).prop_map(|x| x as f32), Just(-0.0f32)],
                0..2000,
            ),
            largest in prop_oneof![Just(f32::MAX), -6.0..6.0f32],
        ) {
            let x: Vec<f32> = x
                .into_iter()
                .map(|x| if x > largest { largest } else { x })
                .collect();
            for isa in Isa::all() {
                prop_assert_eq!(first_largest(isa, &x, f32::NEG_INFINITY), one_by_one(&x));
            }
        }
    }
}
