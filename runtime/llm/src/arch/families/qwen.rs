//! Qwen.

use crate::arch::base::with_images;
use crate::arch::spec::{Linear, Presence};
use crate::arch::{Architecture, Base, Keys, Spec};
use crate::error::Result;
use samite_core::{Glu, RopeMode, Unary};

/// Qwen 1, whose files store twice the width of the feed-forward network.
pub(super) const QWEN: Architecture = Architecture {
    name: "qwen",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.decoder(|il| {
            let names = ["ffn_gate", "ffn_up", "ffn_down"];
            let mlp = base.gated(names, base.width(il)? / 2, Glu::Swiglu);
            Ok(base.pre_norm(il, base.attention(il)?, mlp))
        })
    },
};

/// Creates a model with biases of queries, keys and values, and rotation by halves.
fn qwen2(keys: &Keys<'_>, bias: Presence) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    base.refuse_experts()?;
    base.decoder(|il| {
        let attention = base.attention(il)?.with_projection_bias(bias);
        Ok(base.pre_norm(il, attention, base.swiglu(il)?))
    })
}

/// Qwen2 and Qwen2.5.
pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    spec: |keys| qwen2(keys, Presence::Required),
};

/// Language model of Qwen2-VL and Qwen2.5-VL.
pub(super) const QWEN2VL: Architecture = Architecture {
    name: "qwen2vl",
    spec: |keys| {
        let mut spec = qwen2(keys, Presence::Optional)?;
        if let Some(output) = &mut spec.head.output {
            output.bias = Presence::Absent;
        }
        spec.ignored.names = vec!["output.bias"];
        with_images(spec, keys, |sections| RopeMode::Multi { sections })
    },
};

/// Qwen2 with experts and a shared expert, which has a router weight.
pub(super) const QWEN2MOE: Architecture = Architecture {
    name: "qwen2moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        let shared = keys.count("expert_shared_feed_forward_length")?;
        base.decoder(|il| {
            let width = base.expert_width_or_share(il, counts[1])?;
            let mut experts = base.experts(il, counts, width)?;
            experts.normalize = false;
            let width = match shared.filter(|&width| width != 0) {
                Some(width) => width,
                None => base.width(il)?,
            };
            let gate = Linear::new("ffn_gate_inp_shexp", [base.n_embd, 1]);
            experts.shared = Some((base.shared_expert(width), Some(gate)));
            Ok(base.pre_norm(il, base.attention(il)?, experts))
        })
    },
};

/// Creates a model with QK-norm before the rotation.
fn qwen3(keys: &Keys<'_>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    base.refuse_experts()?;
    let mut spec =
        base.decoder(|il| Ok(base.pre_norm(il, base.normed_attention(il)?, base.swiglu(il)?)))?;
    // Rerankers have a classifier.
    spec.head.classifier = base.classifier(Unary::Tanh)?;
    if let Some(classifier) = &mut spec.head.classifier {
        classifier.shares = true;
    }
    Ok(spec)
}

/// Creates a model with experts and QK-norm before the rotation.
fn qwen3moe(keys: &Keys<'_>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    let counts = base.require_expert_counts()?;
    base.decoder(|il| {
        let width = base.expert_width_or_share(il, counts[1])?;
        let experts = base.experts(il, counts, width)?;
        Ok(base.pre_norm(il, base.normed_attention(il)?, experts))
    })
}

/// Qwen3.
pub(super) const QWEN3: Architecture = Architecture {
    name: "qwen3",
    spec: qwen3,
};

/// Qwen3 with experts, such as 30B-A3B.
pub(super) const QWEN3MOE: Architecture = Architecture {
    name: "qwen3moe",
    spec: qwen3moe,
};

/// Language model of Qwen3-VL.
pub(super) const QWEN3VL: Architecture = Architecture {
    name: "qwen3vl",
    spec: |keys| {
        with_images(qwen3(keys)?, keys, |sections| RopeMode::Interleaved {
            sections,
        })
    },
};

/// Language model of Qwen3-VL with experts.
pub(super) const QWEN3VLMOE: Architecture = Architecture {
    name: "qwen3vlmoe",
    spec: |keys| {
        with_images(qwen3moe(keys)?, keys, |sections| RopeMode::Interleaved {
            sections,
        })
    },
};
