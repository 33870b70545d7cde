//! Softmax with mask, ALiBi and sinks.

use super::reduce::{change_rows, max_of, sum_of};
use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase};
use crate::operand::Operand;
use crate::simd::math;
use samite_core::{DType, Error, Op, Result};

/// Slopes of the heads' ALiBi biases ([Press et al. 2022](https://arxiv.org/abs/2108.12409)).
#[derive(Clone, Copy)]
pub(crate) struct Slopes {
    heads: usize,
    first: f32,
    second: f32,
    none: bool,
}

impl Slopes {
    pub fn new(heads: usize, max_bias: f32) -> Self {
        let power = 1usize << heads.max(1).ilog2();
        Slopes {
            heads: power,
            first: 2f32.powf(-max_bias / power as f32),
            second: 2f32.powf(-max_bias / 2.0 / power as f32),
            none: max_bias <= 0.0,
        }
    }

    pub fn for_head(&self, head: usize) -> f32 {
        if self.none {
            1.0
        } else if head < self.heads {
            self.first.powi(head as i32 + 1)
        } else {
            self.second.powi(2 * (head - self.heads) as i32 + 1)
        }
    }
}

/// Adds `slope` times a row of the mask to `x`.
///
/// # Safety
/// See [`Operand`]; the mask must have such a row, at least as long as `x`.
unsafe fn add_mask(isa: Isa, mask: &Operand, row: [usize; 3], slope: f32, x: &mut [f32]) {
    if mask.dtype() == DType::F32 && mask.layout().has_contiguous_rows() {
        // SAFETY: the mask has this row, which is F32 without gaps, as was just checked.
        let mask = unsafe { mask.row::<f32>(row) };
        return add_scaled(isa, x, &mask[..x.len()], slope);
    }

    let mut buffer = [0.0; 256];
    for (chunk, x) in x.chunks_mut(256).enumerate() {
        let buffer = &mut buffer[..x.len()];
        // SAFETY: the chunk is inside the row.
        unsafe { mask.load(row, chunk * 256, buffer) };
        add_scaled(isa, x, buffer, slope);
    }
}

vectorized! {
    pub(crate) fn scale_row(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

vectorized! {
    fn add_scaled(x: &mut [f32], mask: &[f32], slope: f32) {
        for (x, &m) in x.iter_mut().zip(mask) {
            let sum = *x + slope * m;
            // A hidden logit may be NaN.
            *x = if m == f32::NEG_INFINITY { m } else { sum };
        }
    }
}

vectorized! {
    /// Computes the softmax of logits, optionally with a sink in the sum.
    fn shares(x: &mut [f32], sink: Option<f32>) {
        let max = max_of(x).max(sink.unwrap_or(f32::NEG_INFINITY));
        x.iter_mut().for_each(|x| *x = math::bounded_exp::<FUSED>(*x - max));
        let sum = sum_of(x, |x| x) + sink.map_or(0.0,
            |sink| math::bounded_exp::<FUSED>(sink - max));
        let factor = 1.0 / sum;
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Computes the softmax of each row.
pub(crate) fn soft_max(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let Op::SoftMax { scale, max_bias } = *context.node.op() else {
        return Err(Error::invalid("not soft_max"));
    };
    let (mask, sinks) = (context.optional(1), context.optional(2));
    let slopes = Slopes::new(context.result().shape()[2], max_bias);
    let phase = change_rows(context, 1.2, move |isa, [i1, i2, i3], out| {
        scale_row(isa, out, scale);
        if let Some(mask) = &mask {
            let [_, _, m2, m3] = mask.shape();
            // SAFETY: inference checked that the mask covers the source.
            unsafe { add_mask(isa, mask, [i1, i2 % m2, i3 % m3], slopes.for_head(i2), out) };
        }
        // SAFETY: each head has one sink, without gaps.
        let sink = sinks.map(|sinks| unsafe { *sinks.base().cast::<f32>().add(i2) });
        shares(isa, out, sink);
    })?;
    Ok(vec![phase])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_geometric_for_any_number_of_heads() {
        let slopes = Slopes::new(8, 8.0);
        assert!((0..8).all(|h| (slopes.for_head(h) - 0.5f32.powi(h as i32 + 1)).abs() < 1e-7));
        // Beyond the power of two, the intermediate values follow.
        let slopes = Slopes::new(12, 8.0);
        assert!((slopes.for_head(8) - 0.5f32.sqrt()).abs() < 1e-6);
        assert_eq!(Slopes::new(12, 0.0).for_head(3), 1.0);
    }
}
