//! GLM.

use super::llama::both_norms;
use crate::arch::spec::{Presence, Routing, SubLayer};
use crate::arch::{Architecture, Base};
use samite_core::{Glu, RopeMode};

/// ChatGLM 3 and GLM-4 9B: one matrix for gate and value.
pub(super) const CHATGLM: Architecture = Architecture {
    name: "chatglm",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        base.decoder(|il| {
            let mlp = base.fused_gated(base.width(il)?, Glu::Swiglu);
            Ok(base.pre_norm(il, base.attention(il)?, mlp))
        })
    },
};

/// GLM-4 of 2025: norms before and after the sub-layers.
pub(super) const GLM4: Architecture = Architecture {
    name: "glm4",
    spec: |keys| {
        // If positions have several axes, heads are rotated by halves.
        let sections = keys.counts("rope.dimension_sections", 4)?;
        let mode = if sections.is_some_and(|sections| sections.iter().any(|&n| n != 0)) {
            RopeMode::Neox
        } else {
            RopeMode::Normal
        };
        let base = Base::read(keys, mode)?;
        base.decoder(|il| {
            let mlp = base.fused_gated(base.width(il)?, Glu::Swiglu);
            Ok(both_norms(&base, il, base.attention(il)?, mlp))
        })
    },
};

/// GLM-4.5 and later, with experts: QK-norm if the file has it.
pub(super) const GLM4MOE: Architecture = Architecture {
    name: "glm4moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        let lead = base.dense_lead()?;
        let routing = base.routing(Routing::Sigmoid)?;
        let normalize = keys.flag("expert_weights_norm")?;
        let shared = keys.count("expert_shared_count")?.unwrap_or(0);
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            for norm in attention.norms.iter_mut().flatten() {
                norm.weight = Presence::Optional;
            }
            if !keys.has_tensor(&format!("blk.{il}.attn_q_norm.weight")) {
                attention.norms = [None, None, None];
            }
            let norm = base.stream_norm("post_attention_norm");
            let feed_forward = if il < lead {
                SubLayer::new(norm, base.swiglu(il)?)
            } else {
                let width = base.expert_width_or_share(il, counts[1])?;
                let mut experts = base.experts(il, counts, width)?;
                experts.routing = routing;
                experts.normalize = normalize;
                experts.selection_bias = Some(("exp_probs_b.bias", Presence::Required));
                if shared > 0 {
                    experts = experts.with_shared(base.shared_expert(width * shared));
                }
                SubLayer::new(norm, experts)
            };
            let attention = SubLayer::new(base.stream_norm("attn_norm"), attention);
            Ok(base.layer(il, [attention, feed_forward]))
        })
    },
};
