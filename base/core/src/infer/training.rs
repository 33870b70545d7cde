//! Gradients, losses and optimizer steps.

use super::Check;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{DIMS, Layout, Shape};

pub(super) fn repeat_back(c: &Check<'_>, shape: Shape) -> Result<Layout> {
    c.is(0, "source 0", &[DType::F32])?;
    let part = c.result(DType::F32, shape)?;
    c.ensure(
        !part.is_empty() && part.repeats_to(c.source(0)?.shape()),
        format_args!("{shape:?} does not repeat to the source's shape"),
    )?;
    Ok(part)
}

pub(super) fn rms_norm_back(c: &Check<'_>, eps: f32) -> Result<Layout> {
    c.ensure(eps >= 0.0, "eps is negative or not a number")?;
    gradient_of_rows(c)
}

pub(super) fn get_rows_back(c: &Check<'_>, rows: usize) -> Result<Layout> {
    c.is(0, "the gradient", &[DType::F32, DType::F16])?;
    c.is(1, "the row numbers", &[DType::I32])?;
    let ([n0, r, n2, n3], numbers) = (c.source(0)?.shape(), c.source(1)?.shape());
    c.ensure(n2 == 1 && n3 == 1, "the gradient is not a matrix")?;
    c.ensure(
        numbers == [r, 1, 1, 1],
        "there is not one row number for each row",
    )?;
    c.result(DType::F32, [n0, rows, 1, 1])
}

pub(super) fn cross_entropy_loss(c: &Check<'_>) -> Result<Layout> {
    logits_and_labels(c, 0)?;
    c.result(DType::F32, [1; DIMS])
}

pub(super) fn cross_entropy_loss_back(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "the gradient", &[DType::F32])?;
    c.ensure(
        c.source(0)?.shape() == [1; DIMS],
        "the gradient of the loss is not one element",
    )?;
    logits_and_labels(c, 1)
}

/// Checks a gradient and one more operand of the same shape, both f32. The result has the same
/// layout.
pub(super) fn gradient_of_rows(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "the gradient", &[DType::F32])?;
    c.is(1, "source 1", &[DType::F32])?;
    let (gradient, other) = (c.source(0)?, c.source(1)?);
    c.ensure(
        gradient.shape() == other.shape(),
        "the sources differ in shape",
    )?;
    c.like(gradient)
}

/// Checks logits in source `first` and labels in the next one. Returns the layout of a gradient of
/// the logits.
fn logits_and_labels(c: &Check<'_>, first: usize) -> Result<Layout> {
    c.is(first, "the logits", &[DType::F32])?;
    c.is(first + 1, "the labels", &[DType::F32])?;
    let (logits, labels) = (c.source(first)?, c.source(first + 1)?);
    c.ensure(
        logits.shape() == labels.shape(),
        "logits and labels differ in shape",
    )?;
    c.ensure(
        logits.is_contiguous() && labels.is_contiguous(),
        "logits or labels are not contiguous",
    )?;
    c.like(logits)
}

/// Checks weights, tensors of the same shape up to source `parameters`, and `count` numbers there.
/// Returns the layout of the weights.
pub(super) fn step(c: &Check<'_>, parameters: usize, count: usize) -> Result<Layout> {
    let weights = c.source(0)?;
    for index in 0..parameters {
        c.is(index, "weights, gradients and means", &[DType::F32])?;
        let source = c.source(index)?;
        c.ensure(
            source.shape() == weights.shape() && source.is_contiguous(),
            format_args!("source {index} differs in shape from the weights or has gaps"),
        )?;
    }
    c.is(parameters, "the parameters", &[DType::F32])?;
    let numbers = c.source(parameters)?;
    c.ensure(
        numbers.shape() == [count, 1, 1, 1] && numbers.is_contiguous(),
        format_args!("there are not {count} parameters"),
    )?;
    Ok(*weights)
}
