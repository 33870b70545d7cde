//! Gated linear units.

use super::elementwise::{zip, zip_slices};
use crate::detect::Isa;
use crate::kernel::{KernelContext, Phase};
use crate::simd::math;
use samite_core::{Glu, Result};

/// Evaluates an expression with the function of a kind.
macro_rules! with_function {
    ($kind:expr, $f:ident => $result:expr) => {
        with_function!($kind, $f => $result;
            Glu::Reglu => |x, g| math::relu(x) * g,
            Glu::Geglu => |x, g| math::gelu(x) * g,
            Glu::Swiglu => |x, g| math::silu(x) * g,
            Glu::GegluErf => |x, g| math::gelu_erf(x) * g,
            Glu::GegluQuick => |x, g| math::gelu_quick(x) * g,
            Glu::SwigluOai { alpha, limit } => move |x: f32, g: f32| {
                let x = x.min(limit);
                x * math::sigmoid(alpha * x) * (1.0 + g.min(limit).max(-limit))
            },
            Glu::SwigluClamp { limit } => move |x: f32, g: f32| {
                math::silu(x.min(limit)) * g.min(limit).max(-limit)
            },
        )
    };
    ($kind:expr, $f:ident => $result:expr; $($pattern:pat => $function:expr,)*) => {
        match $kind {
            $($pattern => {
                let $f = $function;
                $result
            })*
        }
    };
}

/// Computes all gated linear units.
pub(crate) fn glu(context: &KernelContext<'_>, kind: Glu, swapped: bool) -> Result<Phase> {
    let a = context.source(0)?;
    let (x, gate) = match context.optional(1) {
        Some(gate) => (a, gate),
        None => {
            let half = a.shape()[0] / 2;
            let (first, second) = (a.columns(0, half)?, a.columns(half, half)?);
            if swapped {
                (second, first)
            } else {
                (first, second)
            }
        }
    };
    with_function!(kind, function => zip(context, x, gate, cost(kind), function))
}

/// Returns the estimated nanoseconds for an element.
pub(crate) fn cost(kind: Glu) -> f64 {
    match kind {
        Glu::Reglu => 0.5,
        Glu::GegluErf => 2.0,
        _ => 1.0,
    }
}

/// Computes a part of a row of a gated linear unit.
pub(crate) fn gate_slice(isa: Isa, kind: Glu, out: &mut [f32], x: &[f32], gate: &[f32]) {
    with_function!(kind, function => zip_slices(isa, out, x, gate, function));
}
