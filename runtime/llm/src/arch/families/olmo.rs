//! OLMo.

use super::llama::post_norms;
use crate::arch::{Architecture, Base};
use samite_core::{Rope, RopeMode};

use crate::arch::spec::SubLayer;

/// OLMo: norms without scales.
pub(super) const OLMO: Architecture = Architecture {
    name: "olmo",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Normal)?;
        let clamp = keys.factor("attention.clamp_kqv")?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.clamp = clamp;
            Ok(base.layer(
                il,
                [
                    SubLayer::new(base.bare_norm("attn_norm"), attention),
                    SubLayer::new(base.bare_norm("ffn_norm"), base.swiglu(il)?),
                ],
            ))
        })?;
        spec.head.norm = Some(base.bare_norm("output_norm"));
        Ok(spec)
    },
};

/// OLMo 2 and 3: norms only after the sub-layers; queries and keys are normalized over all heads;
/// OLMo 3 has windows.
pub(super) const OLMO2: Architecture = Architecture {
    name: "olmo2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(4, false)?;
        let rope = Rope::new(base.rope.dims, base.rope.mode, base.rope.freq_base);
        base.decoder(|il| {
            let mut attention = base.token_normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            Ok(post_norms(&base, il, attention, base.swiglu(il)?))
        })
    },
};

/// OLMoE: the weights of experts are not normalized.
pub(super) const OLMOE: Architecture = Architecture {
    name: "olmoe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let mut experts = base.experts(il, counts, base.width(il)?)?;
            experts.normalize = false;
            Ok(base.pre_norm(il, base.token_normed_attention(il)?, experts))
        })
    },
};
