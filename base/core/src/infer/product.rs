//! Matrix products.

use super::{Check, FLOATS};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;

pub(super) fn mul_mat(c: &Check<'_>) -> Result<Layout> {
    let (a, b) = (c.source(0)?, c.source(1)?);
    c.is(1, "source 1", FLOATS)?;
    c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
    let ([k, m, ..], [bk, n, b2, b3]) = (a.shape(), b.shape());
    c.ensure(k == bk, format_args!("rows differ in length: {k} and {bk}"))?;
    repeats_over_batches(c, a, b)?;
    c.result(DType::F32, [m, n, b2, b3])
}

pub(super) fn out_prod(c: &Check<'_>) -> Result<Layout> {
    let (a, b) = (c.source(0)?, c.source(1)?);
    c.is(1, "source 1", &[DType::F32])?;
    c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
    let ([m, k, ..], [n, bk, b2, b3]) = (a.shape(), b.shape());
    c.ensure(
        k == bk,
        format_args!("the numbers of rows differ: {k} and {bk}"),
    )?;
    repeats_over_batches(c, a, b)?;
    c.result(DType::F32, [m, n, b2, b3])
}

pub(super) fn mul_mat_id(c: &Check<'_>) -> Result<Layout> {
    let (a, b, ids) = (c.source(0)?, c.source(1)?, c.source(2)?);
    c.is(1, "source 1", &[DType::F32])?;
    c.is(2, "the expert numbers", &[DType::I32])?;
    c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
    c.ensure(
        !a.is_transposed(),
        "source 0 is transposed; make it contiguous first",
    )?;
    let ([k, m, _, a3], [bk, b1, tokens, b3], [used, i1, i2, i3]) =
        (a.shape(), b.shape(), ids.shape());
    c.ensure(
        a3 == 1 && b3 == 1 && i2 == 1 && i3 == 1,
        "too many dimensions",
    )?;
    c.ensure(k == bk, format_args!("rows differ in length: {k} and {bk}"))?;
    c.ensure(
        i1 == tokens,
        "there is not one list of experts for each token",
    )?;
    c.ensure(
        b1 != 0 && used % b1 == 0,
        "source 1's rows do not repeat over the experts used",
    )?;
    c.result(DType::F32, [m, used, tokens, 1])
}

/// Checks that the matrices of source 0, not transposed, repeat over those of source 1.
fn repeats_over_batches(c: &Check<'_>, a: &Layout, b: &Layout) -> Result<()> {
    let ([_, _, a2, a3], [_, _, b2, b3]) = (a.shape(), b.shape());
    c.ensure(
        a2 != 0 && a3 != 0 && b2 % a2 == 0 && b3 % a3 == 0,
        "source 0 does not repeat over source 1's batches",
    )?;
    c.ensure(
        !a.is_transposed(),
        "source 0 is transposed; make it contiguous first",
    )
}
