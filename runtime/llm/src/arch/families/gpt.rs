//! GPT-2 and its successors: LayerNorm, feed-forward networks without gates, parallel sub-layers.

use super::llama::side_by_side;
use crate::arch::spec::{
    Activation, Attention, Branch, Mixer, Norm, NormKind, NormOver, Presence, Routing, Spec,
    SubLayer,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::RopeMode;

/// Reads a base with biases everywhere.
fn biased<'a>(keys: &'a Keys<'a>) -> Result<Base<'a>> {
    Base::read_layer_norm(keys, RopeMode::Neox)
}

/// Reads a base with norms without biases.
fn unbiased<'a>(keys: &'a Keys<'a>, mode: RopeMode) -> Result<Base<'a>> {
    Ok(Base {
        norm_bias: Presence::Absent,
        ..Base::read_layer_norm(keys, mode)?
    })
}

/// Creates the attention of layer `il` without a rotation.
fn unrotated(base: &Base<'_>, il: usize) -> Result<Attention> {
    Ok(Attention {
        rotation: None,
        ..base.attention(il)?
    })
}

/// Creates a model with learned positions and GELU.
fn gpt2(keys: &Keys<'_>) -> Result<Spec> {
    let base = biased(keys)?;
    let mut spec =
        base.decoder(|il| Ok(base.pre_norm(il, unrotated(&base, il)?, base.gelu(il)?)))?;
    spec.embedding.positions = Some(base.n_ctx_train);
    Ok(spec)
}

/// GPT-2.
pub(super) const GPT2: Architecture = Architecture {
    name: "gpt2",
    spec: gpt2,
};

/// StarCoder.
pub(super) const STARCODER: Architecture = Architecture {
    name: "starcoder",
    spec: gpt2,
};

/// Creates a model with RoPE and GELU.
fn rotated(keys: &Keys<'_>) -> Result<Spec> {
    let base = biased(keys)?;
    base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.gelu(il)?)))
}

/// StarCoder 2.
pub(super) const STARCODER2: Architecture = Architecture {
    name: "starcoder2",
    spec: rotated,
};

/// CodeShell.
pub(super) const CODESHELL: Architecture = Architecture {
    name: "codeshell",
    spec: rotated,
};

/// Creates a model with RoPE and squared ReLU.
fn squared(keys: &Keys<'_>) -> Result<Spec> {
    let base = biased(keys)?;
    base.decoder(|il| {
        let mlp = base.plain(il, Activation::SquaredRelu)?;
        Ok(base.pre_norm(il, base.attention(il)?, mlp))
    })
}

/// Nemotron 3 and 4.
pub(super) const NEMOTRON: Architecture = Architecture {
    name: "nemotron",
    spec: squared,
};

/// Jais 2.
pub(super) const JAIS2: Architecture = Architecture {
    name: "jais2",
    spec: squared,
};

/// Jais: ALiBi, gates, and attention logits divided by the head size.
pub(super) const JAIS: Architecture = Architecture {
    name: "jais",
    spec: |keys| {
        let base = biased(keys)?;
        let max_bias = keys.finite("attention.max_alibi_bias")?.unwrap_or(0.0);
        base.decoder(|il| {
            let mut attention = unrotated(&base, il)?;
            attention.max_bias = max_bias;
            attention.scale = 1.0 / attention.head_v as f32;
            Ok(base.pre_norm(il, attention, base.swiglu(il)?))
        })
    },
};

/// BLOOM: ALiBi, and a norm of the embeddings.
pub(super) const BLOOM: Architecture = Architecture {
    name: "bloom",
    spec: |keys| {
        let base = biased(keys)?;
        let mut spec = base.decoder(|il| {
            let mut attention = unrotated(&base, il)?;
            attention.max_bias = 8.0;
            Ok(base.pre_norm(il, attention, base.gelu(il)?))
        })?;
        spec.embedding.norm = Some(base.stream_norm("token_embd_norm"));
        Ok(spec)
    },
};

/// MPT: ALiBi or learned positions.
pub(super) const MPT: Architecture = Architecture {
    name: "mpt",
    spec: |keys| {
        let base = biased(keys)?;
        let max_bias = keys.finite("attention.max_alibi_bias")?.unwrap_or(0.0);
        let clamp = keys.factor("attention.clamp_kqv")?;
        let normed = keys.has_tensor("blk.0.attn_q_norm.weight");
        let mut spec = base.decoder(|il| {
            let mut attention = if normed {
                base.token_normed_attention(il)?
            } else {
                base.attention(il)?
            };
            attention.rotation = None;
            attention.max_bias = max_bias;
            attention.clamp = clamp;
            let mut mlp = base.gelu(il)?;
            if keys.has_tensor(&format!("blk.{il}.ffn.act.scales")) {
                mlp.divisor = Some("ffn.act.scales");
            }
            Ok(base.pre_norm(il, attention, mlp))
        })?;
        if keys.has_tensor("position_embd.weight") {
            spec.embedding.positions = Some(base.n_ctx_train);
        }
        if !normed {
            spec.ignored.names = vec!["attn_k_norm"];
        }
        Ok(spec)
    },
};

/// GPT-NeoX and Pythia: sub-layers in parallel or in sequence.
pub(super) const GPTNEOX: Architecture = Architecture {
    name: "gptneox",
    spec: |keys| {
        let base = biased(keys)?;
        let parallel = keys.flag("use_parallel_residual")?;
        base.decoder(|il| {
            let (attention, mlp) = (base.attention(il)?, base.gelu(il)?);
            if !parallel {
                return Ok(base.pre_norm(il, attention, mlp));
            }
            let mut part = SubLayer::new(base.stream_norm("attn_norm"), attention);
            part.branches.push(Branch {
                norm: Some(base.stream_norm("ffn_norm")),
                ..Branch::new(mlp)
            });
            Ok(base.layer(il, [part]))
        })
    },
};

/// Falcon: parallel sub-layers; in the large model, attention has its own norm.
pub(super) const FALCON: Architecture = Architecture {
    name: "falcon",
    spec: |keys| {
        let base = biased(keys)?;
        base.decoder(|il| {
            let mut layer = side_by_side(&base, il, base.attention(il)?, base.gelu(il)?);
            if keys.has_tensor(&format!("blk.{il}.attn_norm_2.weight")) {
                let branches = layer
                    .parts
                    .iter_mut()
                    .flat_map(|part| part.branches.iter_mut());
                for branch in branches.take(1) {
                    branch.norm = Some(base.stream_norm("attn_norm_2"));
                }
            }
            Ok(layer)
        })
    },
};

/// Adds norms of query and key heads whose scales differ by head.
fn norms_by_head(base: &Base<'_>, attention: &mut Attention) {
    let norm = |name, count| Norm {
        extents: [base.head_k, count],
        bias: Presence::Absent,
        ..base.norm(name, base.head_k)
    };
    attention.norm_over = NormOver::Heads;
    attention.norms[0] = Some(norm("attn_q_norm", attention.n_head));
    attention.norms[1] = Some(norm("attn_k_norm", attention.n_head_kv));
}

/// StableLM: sub-layers in sequence, or in parallel if there is no second norm.
pub(super) const STABLELM: Architecture = Architecture {
    name: "stablelm",
    spec: |keys| {
        let base = biased(keys)?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if keys.has_tensor(&format!("blk.{il}.attn_q_norm.weight")) {
                norms_by_head(&base, &mut attention);
            }
            let mlp = base.swiglu(il)?;
            Ok(if keys.has_tensor(&format!("blk.{il}.ffn_norm.weight")) {
                base.pre_norm(il, attention, mlp)
            } else {
                side_by_side(&base, il, attention, mlp)
            })
        })
    },
};

/// Orion.
pub(super) const ORION: Architecture = Architecture {
    name: "orion",
    spec: |keys| {
        let base = biased(keys)?;
        base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))
    },
};

/// Command R: parallel sub-layers; the large model has QK-norm.
pub(super) const COMMAND_R: Architecture = Architecture {
    name: "command-r",
    spec: |keys| {
        let base = unbiased(keys, RopeMode::Normal)?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if base.n_layer >= 64 {
                norms_by_head(&base, &mut attention);
            }
            Ok(side_by_side(&base, il, attention, base.swiglu(il)?))
        })?;
        spec.head.scale = keys.factor("logit_scale")?;
        Ok(spec)
    },
};

/// Command R7B: three of four layers have a window, and only these have RoPE.
pub(super) const COHERE2: Architecture = Architecture {
    name: "cohere2",
    spec: |keys| {
        let base = unbiased(keys, RopeMode::Normal)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(4, false)?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if windowed[il] {
                attention.set_window(window, base.rope)
            } else {
                attention.rotation = None
            }
            Ok(side_by_side(&base, il, attention, base.swiglu(il)?))
        })?;
        spec.head.scale = keys.factor("logit_scale")?;
        Ok(spec)
    },
};

/// Cohere 2 with experts: the sum of the experts and the shared expert is halved.
pub(super) const COHERE2MOE: Architecture = Architecture {
    name: "cohere2moe",
    spec: |keys| {
        let mut base = unbiased(keys, RopeMode::Normal)?;
        if let Some(eps) = keys.factor("attention.layer_norm_rms_epsilon")? {
            base.norm = NormKind::Rms(eps);
        }
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(4, true)?;
        let counts = base.require_expert_counts()?;
        let lead = base.dense_lead()?;
        let routing = base.routing(Routing::Sigmoid)?;
        let normalize = keys.flag("expert_weights_norm")?;
        let shared = keys.count("expert_shared_count")?.unwrap_or(0);
        let shared_width = keys.count("expert_shared_feed_forward_length")?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            match windowed[il] {
                true => attention.set_window(window, base.rope),
                false if il < lead => {}
                false => attention.rotation = None,
            }
            if il < lead {
                return Ok(side_by_side(&base, il, attention, base.swiglu(il)?));
            }
            let width = match base.expert_width()? {
                Some(width) => width,
                None => base.width(il)?,
            };
            let mut experts = base.experts(il, counts, width)?;
            experts.routing = routing;
            experts.normalize = normalize;
            if shared > 0 {
                let width = shared_width.filter(|&width| width != 0);
                let width = width.unwrap_or(counts[0].min(shared) * base.require_expert_width()?);
                experts = experts.with_shared(base.shared_expert(width));
            }
            let mut layer = side_by_side(&base, il, attention, experts);
            if shared > 0 {
                let branches = layer
                    .parts
                    .iter_mut()
                    .flat_map(|part| part.branches.iter_mut());
                for branch in branches.filter(|b| matches!(b.mixer, Mixer::Experts(_))) {
                    branch.scale = Some(0.5);
                }
            }
            Ok(layer)
        })?;
        spec.head.scale = keys.factor("logit_scale")?;
        Ok(spec)
    },
};
