//! Operations that carry a state from token to token.

use super::reduce::dot_of;
use super::rows::row_number;
use crate::detect::vectorized;
use crate::kernel::{Kernel, KernelContext, Phase, UnsupportedKernel, dense_rows};
use crate::operand::Operand;
use samite_core::{Node, Result};

/// Channels of a task of a convolution, and tokens that are computed before they are written.
const CHANNELS: usize = 16;
const TOKENS: usize = 64;

/// Rows of a matrix that a task keeps in the L1 cache while it processes all tokens.
pub(super) const ROWS: usize = 32;

/// Maximum number of decays of a head, and of columns of a state space matrix.
pub(super) const MAX_DECAYS: usize = 512;

/// Returns the kernel of a convolution over time, channel by channel.
pub(crate) fn conv_kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    dense_rows(node, 0)?;
    dense_rows(node, 1)?;
    Ok(Kernel::one_phase(conv))
}

vectorized! {
    /// Computes, from each element of `x`, the sum of the products of `weights` with the following
    /// elements.
    fn conv_row(out: &mut [f32], x: &[f32], weights: &[f32]) {
        out.fill(0.0);
        for (i, weight) in weights.iter().enumerate() {
            let pairs = out.iter_mut().zip(&x[i..]);
            pairs.for_each(|(out, x)| *out += weight * x);
        }
    }
}

/// The usual width of a convolution.
const USUAL_WIDTH: usize = 4;

vectorized! {
    /// Computes the sums of one token: of `USUAL_WIDTH` elements of each channel, channel after
    /// channel.
    fn conv_token(out: &mut [f32], x: &[f32], weights: &[f32]) {
        let (x, _) = x.as_chunks::<USUAL_WIDTH>();
        let (weights, _) = weights.as_chunks::<USUAL_WIDTH>();
        for ((out, x), weights) in out.iter_mut().zip(x).zip(weights) {
            // In the same order as for rows of several tokens.
            let mut sum = 0.0;
            for (x, weight) in x.iter().zip(weights) {
                sum += weight * x;
            }
            *out = sum;
        }
    }
}

/// Returns the phase of a convolution of one token, whose channels follow one another, as in
/// decoding.
fn conv_of_token(context: &KernelContext<'_>) -> Result<Phase> {
    let (x, weights, result) = (context.source(0)?, context.source(1)?, context.result());
    let isa = context.isa;
    let [channels, _, sequences, _] = result.shape();
    let cost = result.elements() as f64 * 1.2;
    Ok(Phase::new(sequences, cost, move |tasks, _| {
        for sequence in tasks {
            // SAFETY: rows are dense F32, and those of the channels follow one another. No other
            // task has this sequence.
            unsafe {
                let numbers = |first: *const u8| {
                    std::slice::from_raw_parts(first.cast::<f32>(), channels * USUAL_WIDTH)
                };
                let out = std::slice::from_raw_parts_mut(
                    result.at([0, sequence, 0]).cast::<f32>(),
                    channels,
                );
                let first = x.at([0, sequence, 0]);
                conv_token(isa, out, numbers(first), numbers(weights.base()));
            }
        }
        Ok(())
    }))
}

fn conv(context: &KernelContext<'_>) -> Result<Phase> {
    let (x, weights, result) = (context.source(0)?, context.source(1)?, context.result());
    let isa = context.isa;
    let [channels, tokens, sequences, _] = result.shape();
    let width = weights.shape()[0];
    let is_behind = |rows: &Operand| rows.strides()[1] == USUAL_WIDTH * size_of::<f32>();
    if (tokens, width) == (1, USUAL_WIDTH) && is_behind(&x) && is_behind(&weights) {
        return conv_of_token(context);
    }
    let blocks = channels.div_ceil(CHANNELS);
    let cost = result.elements() as f64 * width as f64 * 0.3;
    Ok(Phase::new(blocks * sequences, cost, move |tasks, _| {
        let mut sums = [[0.0f32; TOKENS]; CHANNELS];
        for task in tasks {
            let (block, sequence) = (task % blocks, task / blocks);
            let first = block * CHANNELS;
            let count = CHANNELS.min(channels - first);
            for token in (0..tokens).step_by(TOKENS) {
                let length = TOKENS.min(tokens - token);
                for (channel, sums) in sums[..count].iter_mut().enumerate() {
                    // SAFETY: the channel is inside both shapes, and rows are dense F32.
                    let (x, weights) = unsafe {
                        (
                            x.row::<f32>([first + channel, sequence, 0]),
                            weights.row::<f32>([first + channel, 0, 0]),
                        )
                    };
                    conv_row(isa, &mut sums[..length], &x[token..], weights);
                }
                for i in 0..length {
                    // SAFETY: the row is inside the result, which is dense F32. No other task has
                    // these channels of this sequence.
                    unsafe {
                        let row = result.at([token + i, sequence, 0]).cast::<f32>();
                        for (channel, sums) in sums[..count].iter().enumerate() {
                            row.add(first + channel).write(sums[i]);
                        }
                    }
                }
            }
        }
        Ok(())
    }))
}

/// Checks operands of a kernel with decays: six sources of dense rows. Source `limited` must not
/// have more columns than the maximum number of decays. `wrong` describes their number.
pub(super) fn check_decays(
    node: Node<'_>,
    limited: usize,
    wrong: impl Fn(usize) -> String,
) -> Result<(), UnsupportedKernel> {
    for source in 0..6 {
        dense_rows(node, source)?;
    }
    match node
        .source_layout(limited)
        .map_or(0, |layout| layout.shape()[0])
    {
        0..=MAX_DECAYS => Ok(()),
        columns => Err(format!("{}, at most {MAX_DECAYS} are possible", wrong(columns)).into()),
    }
}

/// Returns the kernel of a selective state space model.
pub(crate) fn scan_kernel(node: Node<'_>, snapshots: usize) -> Result<Kernel, UnsupportedKernel> {
    check_decays(node, 0, |columns| {
        format!("matrices have {columns} columns")
    })?;
    Ok(Kernel::one_phase(move |c| scan(c, snapshots)))
}

/// Input of one token to a state space matrix.
struct ScanStep<'a> {
    /// One factor for the whole matrix, or one for each column.
    decay: &'a [f32],
    step: f32,
    b: &'a [f32],
    c: &'a [f32],
}

vectorized! {
    /// Updates rows of a matrix by one token, with its value for each row. `out` gets each row's
    /// output.
    fn scan_step(rows: &mut [f32], values: &[f32], step: &ScanStep<'_>, out: &mut [f32]) {
        let &ScanStep { decay, step, b, c } = step;
        for ((row, value), out) in rows.chunks_exact_mut(b.len()).zip(values).zip(out) {
            let change = value * step;
            match *decay {
                [decay] => row.iter_mut().zip(b).for_each(|(s, b)| *s = *s * decay + change * b),
                ref decays => {
                    let pairs = row.iter_mut().zip(decays).zip(b);
                    pairs.for_each(|((s, decay), b)| *s = *s * decay + change * b);
                }
            }
            *out = dot_of(row, c);
        }
    }
}

fn scan(context: &KernelContext<'_>, snapshots: usize) -> Result<Phase> {
    let source = |index| context.source(index);
    let (start, x, steps) = (source(0)?, source(1)?, source(2)?);
    let (rates, b, c) = (source(3)?, source(4)?, source(5)?);
    let places = source(6)?;
    let (result, isa) = (context.result(), context.isa);
    let [size, heads, tokens, sequences] = x.shape();
    let [n, _, _, limit] = start.shape();
    let groups = b.shape()[1];
    let blocks = size.div_ceil(ROWS);
    let outputs = size * heads * tokens * sequences;
    let matrices = n * size * heads * sequences;
    let cost = matrices as f64 * (tokens as f64 * 0.15 + 0.1);
    let run = move |tasks: std::ops::Range<usize>, _| {
        let mut decay = [0.0; MAX_DECAYS];
        for task in tasks {
            let (block, matrix) = (task % blocks, task / blocks);
            let (head, sequence) = (matrix % heads, matrix / heads);
            let first = block * ROWS;
            let count = ROWS.min(size - first);
            let base = result.base().cast::<f32>();
            let place = |slot: usize| outputs + slot * matrices + (matrix * size + first) * n;
            // SAFETY: each sequence has a row number, so the element exists.
            let begin = unsafe { row_number(&places, 6, [0; 3], sequence, limit)? };
            // SAFETY: the result is dense F32 and has `outputs + snapshots * matrices` elements. No
            // other task has these rows of this matrix in any snapshot.
            let snapshot = |slot: usize| unsafe {
                std::slice::from_raw_parts_mut(base.add(place(slot)), count * n)
            };
            for (i, row) in snapshot(0).chunks_exact_mut(n).enumerate() {
                // SAFETY: the row is inside the shape, and rows are dense F32.
                row.copy_from_slice(unsafe { start.row::<f32>([first + i, head, begin]) });
            }
            let copy = |slot: usize| {
                if (1..snapshots).contains(&slot) {
                    snapshot(slot).copy_from_slice(snapshot(0));
                }
            };
            (tokens..snapshots).for_each(copy);
            // SAFETY: the row is inside the shape, and rows are dense F32.
            let rates = unsafe { rates.row::<f32>([head, 0, 0]) };
            let group = head / (heads / groups);
            for token in 0..tokens {
                // SAFETY: all rows are inside their shapes, by the rules of the operation, and rows
                // are dense F32.
                let (step, values, b, c) = unsafe {
                    (
                        steps.row::<f32>([token, sequence, 0])[head],
                        &x.row::<f32>([head, token, sequence])[first..first + count],
                        b.row::<f32>([group, token, sequence]),
                        c.row::<f32>([group, token, sequence]),
                    )
                };
                let step = if step > 20.0 {
                    step
                } else {
                    step.exp().ln_1p()
                };
                for (decay, rate) in decay.iter_mut().zip(rates) {
                    *decay = (step * rate).exp();
                }
                let to = ((sequence * tokens + token) * heads + head) * size + first;
                // SAFETY: the elements are among the first `outputs` of the result, and no other
                // task has them.
                let out = unsafe { std::slice::from_raw_parts_mut(base.add(to), count) };
                let step = ScanStep {
                    decay: &decay[..rates.len()],
                    step,
                    b,
                    c,
                };
                scan_step(isa, snapshot(0), values, &step, out);
                copy(tokens - 1 - token);
            }
        }
        Ok(())
    };
    Ok(Phase::new(blocks * heads * sequences, cost, run))
}
