//! Qwen.

use crate::arch::spec::{Attention, Presence};
use crate::arch::{Architecture, Base};
use crate::error::Result;
use samite_core::RopeMode;

/// Qwen2 and Qwen2.5: biases on queries, keys and values; rotation by halves.
pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.refuse_experts()?;
        base.decoder(|il| {
            let attention = base.attention(il)?.with_projection_bias(Presence::Required);
            Ok(base.pre_norm(il, attention, base.swiglu(il)?))
        })
    },
};

/// The attention of Qwen3: every head of queries and keys is normalised before its rotation.
fn attention(base: &Base<'_>, il: usize) -> Result<Attention> {
    let mut attention = base.attention(il)?;
    attention.norms[0] = Some(base.norm("attn_q_norm", base.head_k));
    attention.norms[1] = Some(base.norm("attn_k_norm", base.head_k));
    Ok(attention)
}

/// Qwen3.
pub(super) const QWEN3: Architecture = Architecture {
    name: "qwen3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.refuse_experts()?;
        base.decoder(|il| Ok(base.pre_norm(il, attention(&base, il)?, base.swiglu(il)?)))
    },
};

/// Qwen3 with experts, such as 30B-A3B.
pub(super) const QWEN3MOE: Architecture = Architecture {
    name: "qwen3moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let width = base.expert_width_or_share(il, counts[1])?;
            Ok(base.pre_norm(il, attention(&base, il)?, base.experts(counts, width)))
        })
    },
};
