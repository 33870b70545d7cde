//! Phi.

use super::llama::side_by_side;
use crate::arch::spec::Presence;
use crate::arch::{Architecture, Base};
use samite_core::{Glu, RopeMode};

/// Phi 1 to 2: parallel sub-layers, GELU, biases.
pub(super) const PHI2: Architecture = Architecture {
    name: "phi2",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        base.decoder(|il| Ok(side_by_side(&base, il, base.attention(il)?, base.gelu(il)?)))
    },
};

/// Phi 3 and 4: one matrix for gate and value; other frequencies in long contexts; a window in some
/// files.
pub(super) const PHI3: Architecture = Architecture {
    name: "phi3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if let Some(size) = window {
                attention.set_window(size, base.rope);
            }
            attention.set_rope_factors(base.long_short()?);
            let mlp = base.fused_gated(base.width(il)?, Glu::Swiglu);
            Ok(base.pre_norm(il, attention, mlp))
        })
    },
};

/// Phi 3.5 with experts.
pub(super) const PHIMOE: Architecture = Architecture {
    name: "phimoe",
    spec: |keys| {
        let base = Base {
            norm_bias: Presence::Required,
            ..Base::read(keys, RopeMode::Neox)?
        };
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.set_rope_factors(base.long_short()?);
            Ok(base.pre_norm(il, attention, base.experts(il, counts, base.width(il)?)?))
        })
    },
};
