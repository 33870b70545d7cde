//! Copies, reshapes and views.

use super::Check;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{DIMS, Layout, Shape};

/// Returns the layout of a copy.
pub(super) fn copy(c: &Check<'_>) -> Result<Layout> {
    c.like(c.source(0)?)
}

pub(super) fn cpy(c: &Check<'_>) -> Result<Layout> {
    let (a, b) = (c.source(0)?, c.source(1)?);
    c.ensure(
        a.elements() == b.elements(),
        "the numbers of elements differ",
    )?;
    c.ensure(
        b.has_distinct_elements(),
        "elements of the destination share memory",
    )?;
    Ok(*b)
}

pub(super) fn cast(c: &Check<'_>, dtype: DType) -> Result<Layout> {
    c.result(dtype, c.source(0)?.shape())
}

pub(super) fn repeat(c: &Check<'_>, shape: Shape) -> Result<Layout> {
    let a = c.source(0)?;
    c.ensure(
        !a.dtype().is_quantized(),
        "blocks of a quantized type cannot be repeated",
    )?;
    c.ensure(
        a.repeats_to(shape),
        format_args!("the source does not repeat to {shape:?}"),
    )?;
    c.result(a.dtype(), shape)
}

pub(super) fn concat(c: &Check<'_>, dim: usize) -> Result<Layout> {
    let (a, b) = (c.source(0)?, c.source(1)?);
    c.ensure(dim < DIMS, "there are 4 dimensions")?;
    c.ensure(a.dtype() == b.dtype(), "the types differ")?;
    let mut shape = a.shape();
    for d in (0..DIMS).filter(|&d| d != dim) {
        c.ensure(
            shape[d] == b.shape()[d],
            format_args!("extents differ in dimension {d}"),
        )?;
    }
    shape[dim] = shape[dim]
        .checked_add(b.shape()[dim])
        .ok_or_else(|| c.error("the size overflows"))?;
    c.result(a.dtype(), shape)
}

pub(super) fn pad(c: &Check<'_>, before: Shape, after: Shape) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let mut shape = c.source(0)?.shape();
    for d in 0..DIMS {
        shape[d] = shape[d]
            .checked_add(before[d])
            .and_then(|n| n.checked_add(after[d]))
            .ok_or_else(|| c.error("the size overflows"))?;
    }
    c.result(DType::F32, shape)
}

pub(super) fn arange(c: &Check<'_>, start: f32, stop: f32, step: f32) -> Result<Layout> {
    let steps = ((stop - start) / step).ceil();
    c.ensure(
        stop > start && step > 0.0 && steps <= 1e9,
        "the range is empty, infinite or longer than 10^9",
    )?;
    c.result(DType::F32, [steps as usize, 1, 1, 1])
}

pub(super) fn reshape(c: &Check<'_>, shape: Shape) -> Result<Layout> {
    let a = c.source(0)?;
    c.ensure(a.is_contiguous(), "the source is not contiguous")?;
    let layout = c.result(a.dtype(), shape)?;
    c.ensure(
        layout.elements() == a.elements(),
        format_args!("{shape:?} has another number of elements"),
    )?;
    Ok(layout)
}

pub(super) fn view(c: &Check<'_>, shape: Shape, [s1, s2, s3]: [usize; DIMS - 1]) -> Result<Layout> {
    let dtype = c.source(0)?.dtype();
    Layout::strided(dtype, shape, [dtype.block_bytes(), s1, s2, s3]).map_err(|error| c.error(error))
}

pub(super) fn permute(c: &Check<'_>, axes: [usize; DIMS]) -> Result<Layout> {
    c.source(0)?.permuted(axes).map_err(|error| c.error(error))
}
