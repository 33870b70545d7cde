//! Indices of sorted and of largest elements.

use crate::detect::Isa;
use crate::prepare::{Phase, Site};
use crate::table::{Kernel, Reason, dense_rows};
use samite_core::{Error, Node, Op, Result, SortOrder};
use std::cmp::Ordering;

/// Largest first; equal elements by position, so that the result is unique.
fn descending(values: &[f32], a: i32, b: i32) -> Ordering {
    let value = |i: i32| values.get(i as usize).copied().unwrap_or(f32::NAN);
    value(b).total_cmp(&value(a)).then(a.cmp(&b))
}

pub(crate) fn argsort_kernel(node: Node<'_>) -> Result<Kernel, Reason> {
    dense_rows(node, 0)?;
    Ok(Kernel::plain(argsort))
}

/// Indices that sort each row.
fn argsort(site: &Site<'_>) -> Result<Vec<Phase>> {
    let Op::ArgSort { order } = *site.node.op() else {
        return Err(Error::invalid("not argsort"));
    };
    let (result, source) = (site.result(), site.source(0)?);
    Ok(vec![Phase::new(
        result.rows(),
        result.elements() as f64 * 30.0,
        move |tasks, _| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows; tasks are rows.
                let (values, indices) =
                    unsafe { (source.row::<f32>(row), result.row_mut::<i32>(row)) };
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

/// Bytes of one worker's list of indices.
fn list_bytes(row: usize) -> Option<usize> {
    row.checked_mul(4)?.checked_next_multiple_of(64)
}

pub(crate) fn top_k_kernel(node: Node<'_>) -> Result<Kernel, Reason> {
    fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
        list_bytes(node.source_layout(0)?.shape()[0])?.checked_mul(threads)
    }
    dense_rows(node, 0)?;
    Ok(Kernel {
        scratch,
        build: top_k,
    })
}

/// Indices of the largest elements of each row.
fn top_k(site: &Site<'_>) -> Result<Vec<Phase>> {
    let (result, source) = (site.result(), site.source(0)?);
    let (n0, k) = (source.shape()[0], result.shape()[0]);
    let bytes = list_bytes(n0).unwrap_or(usize::MAX);
    let scratch = site.scratch(bytes.saturating_mul(site.threads))?;
    Ok(vec![Phase::new(
        result.rows(),
        source.elements() as f64 * 5.0,
        move |tasks, worker| {
            // SAFETY: each worker has a list of its own.
            let indices: &mut [i32] =
                unsafe { std::slice::from_raw_parts_mut(scratch.at(worker * bytes).cast(), n0) };
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: source and result have the same rows; tasks are rows.
                let (values, out) = unsafe { (source.row::<f32>(row), result.row_mut::<i32>(row)) };
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
