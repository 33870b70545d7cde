//! Gated linear units.

use super::elementwise::zip;
use crate::prepare::{Phase, Site};
use crate::simd::math;
use samite_core::{Error, Glu, Op, Result};

/// All gated linear units.
pub(crate) fn glu(site: &Site<'_>) -> Result<Vec<Phase>> {
    let Op::Glu { kind, swapped } = *site.node.op() else {
        return Err(Error::invalid("not a gated linear unit"));
    };
    let a = site.source(0)?;
    let (x, gate) = match site.optional(1) {
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
    let phase = match kind {
        Glu::Reglu => zip(site, x, gate, 0.5, |x, g| math::relu(x) * g),
        Glu::Geglu => zip(site, x, gate, 1.0, |x, g| math::gelu(x) * g),
        Glu::Swiglu => zip(site, x, gate, 1.0, |x, g| math::silu(x) * g),
        Glu::GegluErf => zip(site, x, gate, 2.0, |x, g| math::gelu_erf(x) * g),
        Glu::GegluQuick => zip(site, x, gate, 1.0, |x, g| math::gelu_quick(x) * g),
        Glu::SwigluOai { alpha, limit } => zip(site, x, gate, 1.0, move |x, g| {
            let x = x.min(limit);
            x * math::sigmoid(alpha * x) * (1.0 + g.min(limit).max(-limit))
        }),
        Glu::SwigluClamp { limit } => zip(site, x, gate, 1.0, move |x, g| {
            math::silu(x.min(limit)) * g.min(limit).max(-limit)
        }),
    };
    Ok(vec![phase?])
}
