//! Losses and optimizer steps.

use super::reduce::{max_of, sum_of, sum_of_pairs};
use crate::detect::vectorized;
use crate::kernel::{KernelContext, Phase};
use crate::operand::Operand;
use crate::simd::math;
use samite_core::{Error, Node, Result};

/// Number of weights that one task updates.
const TASK: usize = 4096;

/// Returns the bytes of scratch memory of the cross entropy: a number for each row.
pub(crate) fn scratch(node: Node<'_>) -> Option<usize> {
    node.source_layout(0)?.rows().checked_mul(size_of::<f64>())
}

/// Returns the mean over all rows of `-sum(labels · log(softmax(logits)))`.
pub(crate) fn cross_entropy(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, logits, labels) = (context.result(), context.source(0)?, context.source(1)?);
    let isa = context.isa;
    let count = logits.rows();
    let bytes = scratch(context.node)
        .ok_or_else(|| Error::shape("cross_entropy_loss: the size of its workspace overflows"))?;
    let sums = context.scratch(bytes)?;
    let each = Phase::new(count, logits.elements() as f64 * 1.2, move |tasks, _| {
        for row in tasks {
            let index = logits.layout().row_index(row);
            // SAFETY: both operands have these rows, without gaps. Each row has its place in the
            // scratch memory.
            unsafe {
                let (x, p) = (logits.row::<f32>(index), labels.row::<f32>(index));
                let [total, weight, hit] = entropy_row(isa, x, p);
                let loss = f64::from(weight) * f64::from(total).ln() - f64::from(hit);
                *sums.at(row * size_of::<f64>()).cast::<f64>() = loss;
            }
        }
        Ok(())
    });
    let mean = Phase::new(1, count as f64, move |_, _| {
        // SAFETY: the phase before wrote all rows, and the result has one element.
        unsafe {
            let sums = std::slice::from_raw_parts(sums.at(0).cast::<f64>(), count);
            let mean = sums.iter().sum::<f64>() / count as f64;
            result.store(isa, [0; 3], 0, &[mean as f32]);
        }
        Ok(())
    });
    Ok(vec![each, mean])
}

vectorized! {
    /// Returns the sum of `exp(x - m)`, the sum of the labels, and the sum of `p (x - m)`, where
    /// `m` is the largest logit.
    fn entropy_row(x: &[f32], p: &[f32]) -> [f32; 3] {
        let max = max_of(x);
        [
            sum_of(x, |x| math::bounded_exp::<FUSED>(x - max)),
            sum_of(p, |p| p),
            sum_of_pairs(x, p, |x, p| p * (x - max)),
        ]
    }
}

vectorized! {
    fn entropy_gradient_row(out: &mut [f32], x: &[f32], p: &[f32], factor: f32) {
        let max = max_of(x);
        for (y, x) in out.iter_mut().zip(x) {
            *y = math::bounded_exp::<FUSED>(*x - max);
        }
        let scale = factor / sum_of(out, |y| y);
        for (y, p) in out.iter_mut().zip(p) {
            *y = *y * scale - *p * factor;
        }
    }
}

/// Returns the gradient of the cross entropy with respect to the logits.
pub(crate) fn cross_entropy_back(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, gradient) = (context.result(), context.source(0)?);
    let (logits, labels, isa) = (context.source(1)?, context.source(2)?, context.isa);
    let count = logits.rows();
    Ok(vec![Phase::new(
        count,
        logits.elements() as f64 * 1.4,
        move |tasks, _| {
            // SAFETY: the gradient of the loss has one element.
            let factor = unsafe { *gradient.base().cast::<f32>() } / count as f32;
            for row in tasks {
                let index = result.layout().row_index(row);
                // SAFETY: all operands have these rows, without gaps, and tasks are rows.
                let (x, p, out) = unsafe {
                    (
                        logits.row::<f32>(index),
                        labels.row::<f32>(index),
                        result.row_mut::<f32>(index),
                    )
                };
                entropy_gradient_row(isa, out, x, p, factor);
            }
            Ok(())
        },
    )])
}

/// Returns the elements of a task as a mutable slice.
///
/// # Safety
/// See [`Operand`]. The operand must be F32 without gaps, and no other code may use these elements.
unsafe fn part<'a>(operand: &Operand, start: usize, len: usize) -> &'a mut [f32] {
    // SAFETY: elements `start..start + len` are inside the operand, which is F32 without gaps, so
    // they lie at `start` of its base. No other code uses them.
    unsafe { std::slice::from_raw_parts_mut(operand.base().cast::<f32>().add(start), len) }
}

/// Returns the number of tasks for this number of weights.
fn tasks(elements: usize) -> usize {
    elements.div_ceil(TASK)
}

/// Returns the first weight of a task, and the number that it updates.
fn range(task: usize, elements: usize) -> (usize, usize) {
    (task * TASK, (elements - task * TASK).min(TASK))
}

/// Computes one AdamW step.
pub(crate) fn adam_w(context: &KernelContext<'_>) -> Result<Phase> {
    let (weights, gradient) = (context.source(0)?, context.source(1)?);
    let (elements, isa) = (weights.elements(), context.isa);
    let (means, squares) = (context.source(2)?, context.source(3)?);
    let parameters = context.source(4)?;
    Ok(Phase::new(
        tasks(elements),
        elements as f64 * 1.0,
        move |tasks, _| {
            // SAFETY: inference checked that seven parameters exist and that the other operands
            // have the same elements, without gaps. Tasks do not overlap.
            let parameters: [f32; 7] = unsafe { *parameters.base().cast() };
            let [rate, beta1, beta2, eps, decay, correct1, correct2] = parameters;
            let keep = 1.0 - rate * decay;
            for task in tasks {
                let (start, len) = range(task, elements);
                // SAFETY: `range` stays within the elements, which all four operands have without
                // gaps, as inference checked. Tasks have different ranges, and the graph refuses
                // operands that share elements with a written one.
                let (w, g, m, v) = unsafe {
                    (
                        part(&weights, start, len),
                        &*part(&gradient, start, len),
                        part(&means, start, len),
                        part(&squares, start, len),
                    )
                };
                isa.run(|| {
                    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                        *m = *m * beta1 + *g * (1.0 - beta1);
                        *v = *v * beta2 + *g * *g * (1.0 - beta2);
                        let step = *m * correct1 / ((*v * correct2).sqrt() + eps);
                        *w = *w * keep - rate * step;
                    }
                });
            }
            Ok(())
        },
    ))
}

/// Computes one step of gradient descent.
pub(crate) fn gradient_descent(context: &KernelContext<'_>) -> Result<Phase> {
    let (weights, gradient) = (context.source(0)?, context.source(1)?);
    let (elements, isa) = (weights.elements(), context.isa);
    let parameters = context.source(2)?;
    Ok(Phase::new(
        tasks(elements),
        elements as f64 * 0.5,
        move |tasks, _| {
            // SAFETY: inference checked that two F32 parameters exist, one after the other.
            let [rate, decay]: [f32; 2] = unsafe { *parameters.base().cast() };
            let keep = 1.0 - rate * decay;
            for task in tasks {
                let (start, len) = range(task, elements);
                // SAFETY: `range` stays within the elements, which both operands have without gaps,
                // as inference checked. Tasks have different ranges, and the graph refuses weights
                // that share elements with another operand.
                let (w, g) = unsafe { (part(&weights, start, len), &*part(&gradient, start, len)) };
                isa.run(|| {
                    w.iter_mut()
                        .zip(g)
                        .for_each(|(w, g)| *w = *w * keep - rate * *g)
                });
            }
            Ok(())
        },
    ))
}
