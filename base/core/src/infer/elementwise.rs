//! Element-wise operations.

use super::{Check, FLOATS};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::op::Glu;

/// Checks two operands. The second repeats to the shape of the first.
pub(super) fn binary(c: &Check<'_>) -> Result<Layout> {
    let (a, b) = (c.source(0)?, c.source(1)?);
    c.is(0, "source 0", FLOATS)?;
    c.is(1, "source 1", FLOATS)?;
    c.ensure(
        b.repeats_to(a.shape()),
        "source 1 does not repeat to the shape of source 0",
    )?;
    c.like(a)
}

/// Checks the operand of an element-wise function of floats.
pub(super) fn each(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "source 0", FLOATS)?;
    c.like(c.source(0)?)
}

pub(super) fn add_id(c: &Check<'_>) -> Result<Layout> {
    let (a, b, ids) = (
        c.source(0)?.shape(),
        c.source(1)?.shape(),
        c.source(2)?.shape(),
    );
    c.is(0, "source 0", &[DType::F32])?;
    c.is(1, "source 1", &[DType::F32])?;
    c.is(2, "the row numbers", &[DType::I32])?;
    c.ensure(a[0] == b[0], "rows differ in length")?;
    c.ensure(
        a[1] == ids[0] && a[2] == ids[1],
        "there is not one row number for each row",
    )?;
    c.ensure(
        a[3] == 1 && b[2] == 1 && b[3] == 1 && ids[2] == 1 && ids[3] == 1,
        "too many dimensions",
    )?;
    c.like(c.source(0)?)
}

pub(super) fn diag_mask(c: &Check<'_>, past: usize) -> Result<Layout> {
    c.is(0, "source 0", FLOATS)?;
    c.ensure(past <= i32::MAX as usize, "past is beyond 2^31 - 1")?;
    c.like(c.source(0)?)
}

pub(super) fn glu(c: &Check<'_>, kind: Glu, swapped: bool) -> Result<Layout> {
    let types: &[DType] = match kind {
        Glu::SwigluOai { .. } => &[DType::F32],
        _ => FLOATS,
    };
    c.is(0, "source 0", types)?;
    let a = c.source(0)?;
    c.ensure(
        a.contiguous_from(1),
        "the rows of source 0 are not evenly spaced without gaps",
    )?;
    if let Some(b) = c.optional(1) {
        c.ensure(
            a.shape() == b.shape() && a.dtype() == b.dtype(),
            "the sources differ in shape or type",
        )?;
        c.ensure(
            b.contiguous_from(1),
            "the rows of source 1 are not evenly spaced without gaps",
        )?;
        c.ensure(!swapped, "only one source's halves can be swapped")?;
        return c.like(a);
    }
    let [n0, n1, n2, n3] = a.shape();
    c.ensure(n0 % 2 == 0, "rows have no two halves")?;
    c.result(a.dtype(), [n0 / 2, n1, n2, n3])
}
