//! Indices of sorted and of largest elements.

use crate::detect::Isa;
use crate::operand::Operand;
use crate::prepare::{Phase, Scratch, Site};
use crate::table::Kernel;
use samite_core::{Error, Node, Op, Result, SortOrder};
use std::cmp::Ordering;

/// Largest first; equal elements by position, so that the result is unique.
fn descending(values: &[f32], a: i32, b: i32) -> Ordering {
    let value = |i: i32| values.get(i as usize).copied().unwrap_or(f32::NAN);
    value(b).total_cmp(&value(a)).then(a.cmp(&b))
}

/// The kernel of argsort.
pub(crate) const ARGSORT: Kernel = Kernel {
    scratch,
    build: argsort,
};

/// The kernel of top_k.
pub(crate) const TOP_K: Kernel = Kernel {
    scratch,
    build: top_k,
};

/// Memory of a worker: a row of values, and a list of indices.
fn worker_bytes(row: usize) -> Option<usize> {
    row.checked_mul(8)?.checked_next_multiple_of(64)
}

fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    worker_bytes(node.source_layout(0)?.shape()[0])?.checked_mul(threads)
}

/// The scratch memory of all workers, and bytes of each.
fn workers(site: &Site<'_>, row: usize) -> Result<(Scratch, usize)> {
    let bytes = worker_bytes(row)
        .ok_or_else(|| Error::shape("the size of the workspace for sorting overflows"))?;
    Ok((site.scratch(bytes.saturating_mul(site.threads))?, bytes))
}

/// The values of a row, without gaps: in place, or in the memory at `own`.
///
/// # Safety
/// See [`Operand`]; the row must exist, and `own` have room for it.
unsafe fn values<'a>(source: &Operand, row: [usize; 3], own: *mut u8) -> &'a [f32] {
    // SAFETY: the caller's contract.
    unsafe {
        if source.has_dense_rows() {
            return source.row(row);
        }
        let own = std::slice::from_raw_parts_mut(own.cast(), source.shape()[0]);
        source.load(row, 0, own);
        own
    }
}

/// Indices that sort each row.
fn argsort(site: &Site<'_>) -> Result<Vec<Phase>> {
    let Op::ArgSort { order } = *site.node.op() else {
        return Err(Error::invalid("not argsort"));
    };
    let (result, source) = (site.result(), site.source(0)?);
    let (scratch, bytes) = workers(site, source.shape()[0])?;
    Ok(vec![Phase::new(
        result.rows(),
        result.elements() as f64 * 30.0,
        move |tasks, worker| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows; tasks are rows; workers have their own memory.
                let (values, indices) = unsafe {
                    let own = scratch.at(worker * bytes);
                    (values(&source, row, own), result.row_mut::<i32>(row))
                };
                indices
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, index)| *index = i as i32);
                indices.sort_unstable_by(|&a, &b| match order {
                    SortOrder::Descending => descending(values, a, b),
                    SortOrder::Ascending => descending(values, b, a),
                });
            }
            Ok(())
        },
    )])
}

/// Indices of the largest elements of each row.
fn top_k(site: &Site<'_>) -> Result<Vec<Phase>> {
    let (result, source) = (site.result(), site.source(0)?);
    let (n0, k) = (source.shape()[0], result.shape()[0]);
    let (scratch, bytes) = workers(site, n0)?;
    Ok(vec![Phase::new(
        result.rows(),
        source.elements() as f64 * 5.0,
        move |tasks, worker| {
            let own = scratch.at(worker * bytes);
            // SAFETY: each worker has a list of its own, behind its row of values.
            let indices: &mut [i32] =
                unsafe { std::slice::from_raw_parts_mut(own.cast::<i32>().add(n0), n0) };
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows; tasks are rows.
                let (values, out) =
                    unsafe { (values(&source, row, own), result.row_mut::<i32>(row)) };
                indices
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, index)| *index = i as i32);
                if k < n0 {
                    indices.select_nth_unstable_by(k, |&a, &b| descending(values, a, b));
                }
                out.copy_from_slice(&indices[..k]);
            }
            Ok(())
        },
    )])
}
