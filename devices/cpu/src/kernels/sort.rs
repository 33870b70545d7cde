//! Indices of sorted and of largest elements.

use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::operand::Operand;
use samite_core::{Error, Node, Result, SortOrder};
use std::cmp::Ordering;

/// Orders largest first, and equal elements by position, so that the result is unique.
fn descending(values: &[f32], a: i32, b: i32) -> Ordering {
    let value = |i: i32| values.get(i as usize).copied().unwrap_or(f32::NAN);
    value(b).total_cmp(&value(a)).then(a.cmp(&b))
}

/// Writes 0, 1, 2 and so on.
fn count_up(indices: &mut [i32]) {
    indices
        .iter_mut()
        .zip(0..)
        .for_each(|(index, i)| *index = i);
}

/// Returns an integer with the order of [`f32::total_cmp`], which vectors can compare.
#[inline(always)]
fn key(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// Number of elements that [`largest`] tests together for candidates.
const BLOCK: usize = 64;

/// Minimum number of elements per wanted one (at least a block) to filter a row. Smaller rows are
/// selected from as a whole.
const WORTH_FILTERING: usize = 32;

fn worth_filtering(row: usize, k: usize) -> bool {
    row / WORTH_FILTERING >= k.max(BLOCK)
}

vectorized! {
    /// Puts the indices of the `k` largest elements first in a list with room for all, for rows
    /// that are [`worth_filtering`]. An element that is not above the `k`th largest before it is
    /// not among them, because the first of equals counts.
    fn largest(values: &[f32], k: usize, list: &mut [i32]) {
        let some = 2 * k.max(BLOCK);
        let (rest, blocks) = values[some..].as_rchunks::<BLOCK>();
        let mut start = some + rest.len();
        let list = &mut list[..start];
        count_up(list);
        let mut floor = select(values, k, list);
        let mut len = k;
        for block in blocks {
            let mut any = false;
            for x in block {
                any |= key(*x) > floor;
            }
            if any {
                for (i, x) in block.iter().enumerate() {
                    if key(*x) > floor {
                        list[len] = (start + i) as i32;
                        len += 1;
                        if len == list.len() {
                            floor = select(values, k, list);
                            len = k;
                        }
                    }
                }
            }
            start += BLOCK;
        }
        select(values, k, &mut list[..len]);
    }
}

/// Puts the `k` largest of a list first, and returns the key of the smallest of them.
fn select(values: &[f32], k: usize, list: &mut [i32]) -> i32 {
    let (_, last, _) = list.select_nth_unstable_by(k - 1, |&a, &b| descending(values, a, b));
    key(values[*last as usize])
}

/// Returns the bytes of a worker's memory: a row of values, and a list of indices.
fn worker_bytes(row: usize) -> Option<usize> {
    row.checked_mul(8)?.checked_next_multiple_of(64)
}

/// Returns the bytes of scratch memory for sorting.
pub(crate) fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    worker_bytes(node.source_layout(0)?.shape()[0])?.checked_mul(threads)
}

/// Returns the scratch memory of all workers, and the bytes of each.
fn workers(context: &KernelContext<'_>, row: usize) -> Result<(Scratch, usize)> {
    let bytes = worker_bytes(row)
        .ok_or_else(|| Error::shape("the size of the workspace for sorting overflows"))?;
    Ok((
        context.scratch(bytes.saturating_mul(context.threads))?,
        bytes,
    ))
}

/// Returns the values of a row, without gaps: in place, or in the memory at `own`.
///
/// # Safety
/// See [`Operand`]. The row must exist, and `own` must have room for it.
unsafe fn values<'a>(source: &Operand, row: [usize; 3], own: *mut u8) -> &'a [f32] {
    // SAFETY: the row exists, so its numbers may be read in place if they are dense F32. `own` has
    // room for the whole row and belongs only to the caller, so it may be borrowed for writing.
    unsafe {
        if source.has_dense_rows() {
            return source.row(row);
        }
        let own = std::slice::from_raw_parts_mut(own.cast(), source.shape()[0]);
        source.load(row, 0, own);
        own
    }
}

/// Computes the indices that sort each row.
pub(crate) fn argsort(context: &KernelContext<'_>, order: SortOrder) -> Result<Vec<Phase>> {
    let (result, source) = (context.result(), context.source(0)?);
    let (scratch, bytes) = workers(context, source.shape()[0])?;
    Ok(vec![Phase::new(
        result.rows(),
        result.elements() as f64 * 30.0,
        move |tasks, worker| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows. Tasks are rows. Workers have their
                // own memory.
                let (values, indices) = unsafe {
                    let own = scratch.at(worker * bytes);
                    (values(&source, row, own), result.row_mut::<i32>(row))
                };
                count_up(indices);
                indices.sort_unstable_by(|&a, &b| match order {
                    SortOrder::Descending => descending(values, a, b),
                    SortOrder::Ascending => descending(values, b, a),
                });
            }
            Ok(())
        },
    )])
}

/// Computes the indices of the largest elements of each row.
pub(crate) fn top_k(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, source) = (context.result(), context.source(0)?);
    let (n0, k) = (source.shape()[0], result.shape()[0]);
    let (scratch, bytes) = workers(context, n0)?;
    let (filter, isa) = (worth_filtering(n0, k), context.isa);
    let each = if filter { 0.2 } else { 5.0 };
    Ok(vec![Phase::new(
        result.rows(),
        source.elements() as f64 * each,
        move |tasks, worker| {
            let own = scratch.at(worker * bytes);
            // SAFETY: each worker has its own list, after its row of values.
            let indices: &mut [i32] =
                unsafe { std::slice::from_raw_parts_mut(own.cast::<i32>().add(n0), n0) };
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows, and tasks are rows.
                let (values, out) =
                    unsafe { (values(&source, row, own), result.row_mut::<i32>(row)) };
                if filter {
                    largest(isa, values, k, indices);
                } else {
                    count_up(indices);
                    if k < n0 {
                        indices.select_nth_unstable_by(k, |&a, &b| descending(values, a, b));
                    }
                }
                out.copy_from_slice(&indices[..k]);
            }
            Ok(())
        },
    )])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{Bench, device, input, numbers};
    use proptest::prelude::*;
    use samite_core::Graph;

    #[test]
    fn sort_keys_follow_the_total_order() {
        let mut values = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::from_bits(1),
            -0.0,
            0.0,
            f32::from_bits(1),
            1.0,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
            -f32::NAN,
            f32::from_bits(u32::MAX),
        ];
        values.sort_unstable_by(f32::total_cmp);
        assert!(values.is_sorted_by(|a, b| key(*a) < key(*b)));
    }

    /// Returns the `k` largest by sorting, in the order of their indices.
    fn by_sorting(values: &[f32], k: usize) -> Vec<i32> {
        let mut all: Vec<i32> = (0..values.len() as i32).collect();
        all.sort_unstable_by(|&a, &b| descending(values, a, b));
        all.truncate(k);
        all.sort_unstable();
        all
    }

    /// Checks filtering at every instruction set.
    fn check(values: &[f32], k: usize) {
        let expected = by_sorting(values, k);
        for isa in Isa::all() {
            let mut list = vec![-1; values.len()];
            largest(isa, values, k, &mut list);
            list[..k].sort_unstable();
            assert_eq!(list[..k], expected, "{} of {}", k, values.len());
        }
    }

    #[test]
    fn top_k_filters_sorted_and_constant_rows() {
        let rising: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let falling: Vec<f32> = rising.iter().map(|x| -x).collect();
        let zeros: Vec<f32> = (0..5000)
            .map(|i| if i % 3 == 0 { 0.0 } else { -0.0 })
            .collect();
        let least = vec![f32::from_bits(u32::MAX); 5000];
        for values in [
            rising,
            falling,
            zeros,
            least,
            vec![f32::NAN; 5000],
            numbers(1, 5000),
        ] {
            for k in [1, 2, 63, 64, 65, 312] {
                check(&values, k);
                check(&values[..BLOCK * WORTH_FILTERING + k], k.min(BLOCK));
            }
        }
    }

    #[test]
    fn the_device_sorts_short_and_long_rows() {
        for (n0, k) in [
            (1, 1),
            (7, 7),
            (2047, 5),
            (2048, 5),
            (3000, 1),
            (3000, 700),
            (3000, 3000),
        ] {
            let mut g = Graph::new();
            let x = input(&mut g, &[n0, 3]);
            let gaps = input(&mut g, &[3, n0]);
            let top = g.top_k(x, k).unwrap();
            let turned = g.transpose(gaps).unwrap();
            let turned = g.top_k(turned, k).unwrap();
            let mut bench = Bench::new(&g, &device(2)).unwrap();
            let values = numbers(4, 3 * n0);
            bench.write(x, &values);
            let across: Vec<f32> = (0..3 * n0).map(|i| values[i % 3 * n0 + i / 3]).collect();
            bench.write(gaps, &across);
            bench.run().unwrap();
            for id in [top, turned] {
                let mut got = bench.read::<i32>(id);
                for (row, got) in values.chunks(n0).zip(got.chunks_mut(k)) {
                    got.sort_unstable();
                    assert_eq!(got, by_sorting(row, k), "{k} of {n0}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn top_k_filtering_matches_sorting(
            values in prop::collection::vec(
                prop_oneof![any::<u32>().prop_map(f32::from_bits),
                    (-5..5i32).prop_map(|x| x as f32), -5.0..5.0f32],
                1024..3000,
            ),
            k in 1..=64usize,
        ) {
            check(&values, k);
        }
    }
}
