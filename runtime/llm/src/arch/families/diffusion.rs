//! Diffusion models, which fill in the tokens of a text in any order, with bidirectional attention.

use super::llama;
use crate::arch::spec::{Presence, Spec};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::RopeMode;

fn filled(mut spec: Spec) -> Spec {
    spec.set_bidirectional();
    spec
}

/// Dream: Qwen2 with bidirectional attention.
pub(super) const DREAM: Architecture = Architecture {
    name: "dream",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec =
            base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))?;
        if let Some(output) = &mut spec.head.output {
            output.bias = Presence::Absent;
        }
        spec.ignored.names = vec!["output.bias"];
        Ok(filled(spec))
    },
};

/// LLaDA: Llama without biases, except possibly those of queries, keys and values.
pub(super) const LLADA: Architecture = Architecture {
    name: "llada",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        base.refuse_experts()?;
        let mut spec = base.decoder(|il| {
            let mut layer = base.pre_norm(il, base.attention(il)?, base.swiglu(il)?);
            layer.without_biases();
            Ok(layer)
        })?;
        spec.ignored.names = llama::UNREAD.to_vec();
        Ok(filled(spec))
    },
};

/// Creates a model with QK-norm and experts.
fn mixture(keys: &Keys<'_>, normalize: bool) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    let counts = base.require_expert_counts()?;
    let spec = base.decoder(|il| {
        let width = base.expert_width_or_share(il, counts[1])?;
        let mut experts = base.experts(il, counts, width)?;
        experts.normalize = normalize;
        Ok(base.pre_norm(il, base.normed_attention(il)?, experts))
    })?;
    Ok(filled(spec))
}

/// LLaDA with experts, whose weights are not normalized.
pub(super) const LLADA_MOE: Architecture = Architecture {
    name: "llada-moe",
    spec: |keys| mixture(keys, false),
};

/// RND1: Qwen3 with experts.
pub(super) const RND1: Architecture = Architecture {
    name: "rnd1",
    spec: |keys| mixture(keys, true),
};
