//! Operations on rows: norms, sums, sorting, rows by number.

use super::{Check, FLOATS};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{DIMS, Layout};

/// Checks the norm of rows.
pub(super) fn norm(c: &Check<'_>, eps: f32) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    c.ensure(eps >= 0.0, "eps is negative or not a number")?;
    c.like(c.source(0)?)
}

pub(super) fn cumsum(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    c.like(c.source(0)?)
}

pub(super) fn sum(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", FLOATS)?;
    c.result(c.source(0)?.dtype(), [1; DIMS])
}

/// Returns the layout of one number per row.
pub(super) fn sum_rows(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let [_, n1, n2, n3] = c.source(0)?.shape();
    c.result(DType::F32, [1, n1, n2, n3])
}

pub(super) fn argmax(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let [n0, n1, n2, n3] = c.source(0)?.shape();
    c.ensure(n2 == 1 && n3 == 1, "source 0 is not a matrix")?;
    c.ensure(
        n0 >= 1 && n0 <= i32::MAX as usize,
        "a row must have 1 to 2^31 - 1 elements",
    )?;
    c.result(DType::I32, [n1, 1, 1, 1])
}

pub(super) fn argsort(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let shape = c.source(0)?.shape();
    c.ensure(
        shape[0] <= i32::MAX as usize,
        "a row has more than 2^31 - 1 elements",
    )?;
    c.result(DType::I32, shape)
}

pub(super) fn top_k(c: &Check<'_>, k: usize) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let [n0, n1, n2, n3] = c.source(0)?.shape();
    c.ensure(
        k >= 1 && k <= n0,
        format_args!("k is not between 1 and the row length {n0}"),
    )?;
    c.ensure(
        n0 <= i32::MAX as usize,
        "a row has more than 2^31 - 1 elements",
    )?;
    c.result(DType::I32, [k, n1, n2, n3])
}

pub(super) fn get_rows(c: &Check<'_>) -> Result<Layout> {
    let (a, rows) = (c.source(0)?, c.source(1)?);
    c.is(1, "the row numbers", &[DType::I32])?;
    c.ensure(a.has_contiguous_rows(), "the rows of source 0 have gaps")?;
    let ([n0, _, n2, n3], [r0, r1, r2, r3]) = (a.shape(), rows.shape());
    c.ensure(
        n2 == r1 && n3 == r2 && r3 == 1,
        "there is not one list of rows for each matrix",
    )?;
    let dtype = if a.dtype() == DType::I32 {
        DType::I32
    } else {
        DType::F32
    };
    c.ensure(
        dtype == DType::I32 || !a.dtype().is_integer(),
        "source 0 has a type without conversion to f32",
    )?;
    c.result(dtype, [n0, r0, r1, r2])
}

pub(super) fn set_rows(c: &Check<'_>) -> Result<Layout> {
    let (rows, index, into) = (c.source(0)?, c.source(1)?, c.source(2)?);
    c.is(0, "the rows", &[DType::F32, DType::F16])?;
    c.is(1, "the row numbers", &[DType::I64, DType::I32])?;
    let (r, i, d) = (rows.shape(), index.shape(), into.shape());
    c.ensure(
        r[0] == d[0] && r[2] == d[2] && r[3] == d[3],
        "source 0 and the destination differ in extents 0, 2 or 3",
    )?;
    c.ensure(r[1] == i[0], "there is not one row number for each row")?;
    c.ensure(
        i[1] != 0 && i[2] != 0 && r[2] % i[1] == 0 && r[3] % i[2] == 0 && i[3] == 1,
        "the row numbers do not repeat over the batches",
    )?;
    c.ensure(
        rows.has_contiguous_rows() && into.has_contiguous_rows(),
        "rows have gaps",
    )?;
    c.ensure(
        into.has_distinct_elements(),
        "elements of the destination share memory",
    )?;
    Ok(*into)
}
