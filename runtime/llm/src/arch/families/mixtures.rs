//! Mixtures of experts that belong to no other family.

use super::llama::{both_norms, late_norms};
use crate::arch::spec::{
    Activation, Attention, Branch, Experts, Gate, Linear, Mixer, Presence, RopeFactors,
    RouterInput, Routing, Span, SubLayer, Temperature,
};
use crate::arch::{Architecture, Base};
use crate::error::Result;
use samite_core::{Glu, Rope, RopeMode, Unary};

/// Name of the biases that affect only the choice of experts.
const SELECTION_BIAS: &str = "exp_probs_b.bias";

/// Common parameters of mixtures of experts.
struct Mixture<'a> {
    base: &'a Base<'a>,
    counts: [usize; 2],
    /// Number of layers before the first mixture.
    lead: usize,
    routing: Routing,
    normalize: bool,
    /// Width of the shared expert, if there is one.
    shared: Option<usize>,
}

impl<'a> Mixture<'a> {
    /// Reads the parameters. The file's routing takes precedence over `routing`. Weights are
    /// normalized if the file says so.
    fn read(base: &'a Base<'a>, routing: Routing) -> Result<Self> {
        let keys = base.keys;
        let shared = keys.count("expert_shared_count")?.unwrap_or(0);
        let said = keys.count("expert_shared_feed_forward_length")?;
        let width = base.expert_width()?;
        Ok(Mixture {
            counts: base.require_expert_counts()?,
            lead: base.dense_lead()?,
            routing: base.routing(routing)?,
            normalize: keys.flag("expert_weights_norm")?,
            shared: match (said.filter(|&width| width != 0), shared, width) {
                (Some(width), ..) => Some(width),
                (None, 0, _) | (None, _, None) => None,
                (None, shared, Some(width)) => Some(shared * width),
            },
            base,
        })
    }

    /// Creates the experts of layer `il`, with the width that the file specifies.
    fn experts(&self, il: usize) -> Result<Experts> {
        let width = self.base.require_expert_width()?;
        self.experts_of(il, width)
    }

    fn experts_of(&self, il: usize, width: usize) -> Result<Experts> {
        let mut experts = self.base.experts(il, self.counts, width)?;
        experts.routing = self.routing;
        experts.normalize = self.normalize;
        experts.selection_bias = Some((SELECTION_BIAS, Presence::Optional));
        Ok(match self.shared {
            Some(width) => experts.with_shared(self.base.shared_expert(width)),
            None => experts,
        })
    }

    /// Creates the feed-forward network of layer `il`, which is dense in the first layers.
    fn mixer(&self, il: usize) -> Result<Mixer> {
        Ok(if il < self.lead {
            self.base.swiglu(il)?.into()
        } else {
            self.experts(il)?.into()
        })
    }
}

/// Creates the attention of Llama, whose frequencies may have divisors.
fn divided(base: &Base<'_>, il: usize) -> Result<Attention> {
    let mut attention = base.attention(il)?;
    attention.set_rope_factors(base.rope_factors()?);
    Ok(attention)
}

/// DBRX: LayerNorm, and limited queries, keys and values.
pub(super) const DBRX: Architecture = Architecture {
    name: "dbrx",
    spec: |keys| {
        let base = Base {
            norm_bias: Presence::Absent,
            ..Base::read_layer_norm(keys, RopeMode::Neox)?
        };
        let counts = base.require_expert_counts()?;
        let clamp = keys.factor("attention.clamp_kqv")?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.clamp = clamp;
            let experts = base.experts(il, counts, base.width(il)?)?;
            Ok(base.layer(
                il,
                [
                    SubLayer::new(base.stream_norm("attn_norm"), attention),
                    SubLayer::new(base.stream_norm("attn_output_norm"), experts),
                ],
            ))
        })
    },
};

/// DeepSeek 1 with experts.
pub(super) const DEEPSEEK: Architecture = Architecture {
    name: "deepseek",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let mixture = Mixture {
            normalize: false,
            routing: Routing::Softmax,
            ..Mixture::read(&base, Routing::Softmax)?
        };
        base.decoder(|il| Ok(base.pre_norm(il, divided(&base, il)?, mixture.mixer(il)?)))
    },
};

/// Bailing (Ling).
pub(super) const BAILINGMOE: Architecture = Architecture {
    name: "bailingmoe",
    spec: |keys| {
        let mut base = Base::read(keys, RopeMode::Normal)?;
        (base.head_k, base.head_v) = (base.rope.dims, base.rope.dims);
        let shared = keys.require_extent("expert_shared_count")?;
        let mixture = Mixture {
            routing: Routing::Softmax,
            shared: Some(shared * base.require_expert_width()?),
            ..Mixture::read(&base, Routing::Softmax)?
        };
        base.decoder(|il| Ok(base.pre_norm(il, divided(&base, il)?, mixture.experts(il)?)))
    },
};

/// Bailing 2 (Ling 2).
pub(super) const BAILINGMOE2: Architecture = Architecture {
    name: "bailingmoe2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut mixture = Mixture::read(&base, Routing::Softmax)?;
        let count = keys.require_extent("expert_shared_count")?;
        let width = keys.count("expert_shared_feed_forward_length")?;
        let width = match width.filter(|&width| width != 0) {
            Some(width) => width,
            None => base.require_expert_width()?,
        };
        mixture.shared = Some(count * width);
        base.decoder(|il| Ok(base.pre_norm(il, base.normed_attention(il)?, mixture.mixer(il)?)))
    },
};

/// dots.llm1.
pub(super) const DOTS1: Architecture = Architecture {
    name: "dots1",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let count = keys.require_extent("expert_shared_count")?;
        let mixture = Mixture {
            shared: Some(count * base.require_expert_width()?),
            ..Mixture::read(&base, Routing::Softmax)?
        };
        base.decoder(|il| Ok(base.pre_norm(il, base.normed_attention(il)?, mixture.mixer(il)?)))
    },
};

/// Hunyuan with experts.
pub(super) const HUNYUAN_MOE: Architecture = Architecture {
    name: "hunyuan-moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        let shared = keys.count("expert_shared_feed_forward_length")?;
        base.decoder(|il| {
            let width = base.width(il)?;
            let shared = shared.filter(|&width| width != 0).unwrap_or(width);
            let experts = base.experts(il, counts, width)?;
            let experts = experts.with_shared(base.shared_expert(shared));
            Ok(base.pre_norm(il, late_norms(&base, il)?, experts))
        })
    },
};

/// Hunyuan 3.
pub(super) const HY_V3: Architecture = Architecture {
    name: "hy_v3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut mixture = Mixture::read(&base, Routing::Sigmoid)?;
        let mut spec = base.decoder(|il| {
            let width = base.expert_width_or_share(il, mixture.counts[1])?;
            mixture.shared = mixture.shared.or(Some(width));
            let has_experts = keys.has_tensor(&format!("blk.{il}.ffn_gate_inp.weight"));
            let mixer = if has_experts {
                let mut experts = mixture.experts_of(il, width)?;
                experts.selection_bias = Some(("exp_probs_b", Presence::Optional));
                experts.into()
            } else {
                base.swiglu(il)?.into()
            };
            let feed_forward: Mixer = mixer;
            Ok(base.pre_norm(il, base.normed_attention(il)?, feed_forward))
        })?;
        // Files may have dense feed-forward networks that the experts replace.
        spec.ignored.names = vec!["ffn_gate.", "ffn_up.", "ffn_down."];
        Ok(spec)
    },
};

/// ERNIE 4.5 with experts.
pub(super) const ERNIE4_5_MOE: Architecture = Architecture {
    name: "ernie4_5-moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let mixture = Mixture {
            routing: Routing::Softmax,
            normalize: true,
            shared: keys
                .count("expert_shared_feed_forward_length")?
                .filter(|&width| width != 0),
            ..Mixture::read(&base, Routing::Softmax)?
        };
        let step = keys.require_extent("interleave_moe_layer_step")?;
        base.decoder(|il| {
            let is_mixture = il >= mixture.lead && (il + 1) % step == 0;
            let mixer = if is_mixture {
                mixture.experts(il)?.into()
            } else {
                Mixer::from(base.swiglu(il)?)
            };
            Ok(base.pre_norm(il, base.attention(il)?, mixer))
        })
    },
};

/// MiniMax M2.
pub(super) const MINIMAX_M2: Architecture = Architecture {
    name: "minimax-m2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mixture = Mixture {
            normalize: true,
            shared: None,
            ..Mixture::read(&base, Routing::Sigmoid)?
        };
        base.decoder(|il| {
            let mut experts = mixture.experts_of(il, base.width(il)?)?;
            experts.selection_bias = Some((SELECTION_BIAS, Presence::Required));
            Ok(base.pre_norm(il, base.token_normed_attention(il)?, experts))
        })
    },
};

/// EXAONE 4.5 with experts: RoPE only in layers with a window.
pub(super) const EXAONE_MOE: Architecture = Architecture {
    name: "exaone-moe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(4, false)?;
        let mut mixture = Mixture::read(&base, Routing::Softmax)?;
        let shared = keys.count("expert_shared_feed_forward_length")?;
        let width = base.require_expert_width()?;
        mixture.shared = Some(shared.filter(|&width| width != 0).unwrap_or(width));
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            attention.set_rope_factors(RopeFactors::Frequencies);
            if windowed[il] {
                attention.set_window(window, base.rope)
            } else {
                attention.rotation = None
            }
            Ok(base.pre_norm(il, attention, mixture.mixer(il)?))
        })
    },
};

/// Llama 4: chunks with RoPE, full attention with scaled queries; the weights of experts apply to
/// their input.
pub(super) const LLAMA4: Architecture = Architecture {
    name: "llama4",
    spec: |keys| {
        const CHUNK: usize = 8192;
        let base = Base::read(keys, RopeMode::Normal)?;
        let chunked = keys.count("attention.sliding_window")? != Some(0);
        let windowed = base.windowed(4, false)?;
        let rope = base.window_rope(false)?;
        let counts = base.require_expert_counts()?;
        let step = keys.require_extent("interleave_moe_layer_step")?;
        // The model with 128 experts has no QK-norm.
        let normed = counts[0] != 128;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.set_rope_factors(RopeFactors::Frequencies);
            if let Some(scale) = base.attention_scale()? {
                attention.scale = scale;
            }
            let is_rotated = !chunked || (il + 1) % 4 != 0;
            if chunked && windowed[il] {
                attention.set_window(CHUNK, rope);
                attention.span = Span::Chunk(CHUNK);
            }
            if is_rotated && normed {
                attention = bare_late_norms(&base, attention);
            }
            if !is_rotated {
                attention.rotation = None;
                attention.temperature = Some(Temperature {
                    scale: 0.1,
                    floor: CHUNK as f32,
                    offset: 1.0,
                });
            }
            if (il + 1) % step != 0 {
                return Ok(base.pre_norm(il, attention, base.swiglu(il)?));
            }
            let width = base.require_expert_width()?;
            let mut experts = base.experts(il, counts, width)?;
            experts.routing = Routing::Sigmoid;
            experts.normalize = false;
            experts.weigh_input = true;
            let experts = experts.with_shared(base.shared_expert(width));
            Ok(base.pre_norm(il, attention, experts))
        })
    },
};

/// Adds QK-norm after the rotation, without scales.
fn bare_late_norms(base: &Base<'_>, mut attention: Attention) -> Attention {
    attention.norm_over = crate::arch::spec::NormOver::RotatedHeads;
    attention.norms[0] = Some(base.bare_norm("Qcur_normed"));
    attention.norms[1] = Some(base.bare_norm("Kcur_normed"));
    attention
}

/// SmallThinker: the input of the router is the residual stream before the layer.
pub(super) const SMALLTHINKER: Architecture = Architecture {
    name: "smallthinker",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        // The size in files is not the size that the model was trained with.
        let window = base.window()?.map(|_| 4096);
        let windowed = base.windowed(4, true)?;
        let rope = base.window_rope(false)?;
        let counts = base.require_expert_counts()?;
        let routing = base.routing(Routing::Softmax)?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if let Some(size) = window {
                if windowed[il] {
                    attention.set_window(size, rope);
                }
                attention.rotation = attention.rotation.filter(|_| il % 4 != 0);
            }
            let experts = base.experts(il, counts, base.require_expert_width()?)?;
            let mut experts = experts.with_activation(Activation::Gated(Glu::Reglu));
            experts.routing = routing;
            experts.router_input = RouterInput::Layer;
            Ok(base.pre_norm(il, attention, experts))
        })
    },
};

/// Arctic: the input of the experts is the residual stream before the layer; a dense feed-forward
/// network follows attention.
pub(super) const ARCTIC: Architecture = Architecture {
    name: "arctic",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let names = ["ffn_gate", "ffn_up", "ffn_down"];
            let plain = base.gated(names, base.n_embd, Glu::Swiglu);
            let mut part = SubLayer::new(base.stream_norm("ffn_norm"), plain);
            part.branches.push(Branch {
                norm: Some(base.stream_norm("ffn_norm_exps")),
                of_layer: true,
                ..Branch::new(base.experts(il, counts, base.width(il)?)?)
            });
            let attention = SubLayer::new(base.stream_norm("attn_norm"), base.attention(il)?);
            Ok(base.layer(il, [attention, part]))
        })
    },
};

/// Grok: attention logits and output logits are soft-capped; experts, optionally in parallel with a
/// dense feed-forward network.
pub(super) const GROK: Architecture = Architecture {
    name: "grok",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let counts = base.require_expert_counts()?;
        let factor =
            |name, otherwise| Ok::<_, crate::Error>(keys.factor(name)?.unwrap_or(otherwise));
        let softcap = factor("attn_logit_softcapping", 30.0)?;
        // Scale of the logits before they are capped.
        let scale = factor("attention.output_scale", 0.088_388_35)?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.softcap = softcap;
            attention.scale = scale;
            let width = match base.expert_width()? {
                Some(width) => width,
                None => base.width(il)?,
            };
            let gelu = Activation::Gated(Glu::Geglu);
            let mut experts = base.experts(il, counts, width)?.with_activation(gelu);
            if experts.experts.gate.is_none() {
                experts.experts.activation = Activation::Plain(Unary::Gelu);
            }
            let mut feed_forward = SubLayer::new(base.stream_norm("ffn_norm"), experts);
            if keys.has_tensor(&format!("blk.{il}.ffn_up.weight")) {
                let names = ["ffn_gate", "ffn_up", "ffn_down"];
                let plain = base.gated(names, base.width(il)?, Glu::Geglu);
                feed_forward.branches.push(Branch::new(plain));
                for branch in &mut feed_forward.branches {
                    branch.scale = Some(std::f32::consts::FRAC_1_SQRT_2);
                }
            }
            let name = if keys.has_tensor(&format!("blk.{il}.layer_output_norm.weight")) {
                "layer_output_norm"
            } else {
                "post_ffw_norm"
            };
            feed_forward.post = Some(base.stream_norm(name));
            let mut first = SubLayer::new(base.stream_norm("attn_norm"), attention);
            first.post = Some(base.stream_norm("attn_output_norm"));
            Ok(base.layer(il, [first, feed_forward]))
        })?;
        spec.embedding.scale = Some(factor("embedding_scale", 78.383_67)?);
        spec.head.scale = Some(factor("logit_scale", 0.577_350_26)?);
        spec.head.softcap = keys.factor("final_logit_softcapping")?.unwrap_or(0.0);
        Ok(spec)
    },
};

/// MiMo V2: layers with a window have their own heads; attention sinks if the file has them.
pub(super) const MIMO2: Architecture = Architecture {
    name: "mimo2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(1, false)?;
        let rope = base.window_rope(false)?;
        let mixture = Mixture {
            routing: Routing::Sigmoid,
            normalize: true,
            shared: None,
            ..Mixture::read(&base, Routing::Sigmoid)?
        };
        let scale = keys.factor("attention.value_scale")?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if windowed[il] {
                attention.set_window(window, rope);
            }
            if keys.has_tensor(&format!("blk.{il}.attn_sinks.weight")) {
                attention.sinks = Some("attn_sinks.weight");
            }
            let has_experts = keys.has_tensor(&format!("blk.{il}.ffn_gate_inp.weight"));
            let mixer = if has_experts {
                mixture.experts(il)?.into()
            } else {
                Mixer::from(base.swiglu(il)?)
            };
            let mut layer = base.pre_norm(il, attention, mixer);
            if let Some(first) = layer.parts.first_mut() {
                first.scale = scale;
            }
            Ok(layer)
        })?;
        // Files may have dense feed-forward networks that the experts replace.
        spec.ignored.names = vec!["ffn_gate.", "ffn_up.", "ffn_down."];
        Ok(spec)
    },
};

/// gpt-oss: windows in every other layer, attention sinks, biases, and its own gated activation.
pub(super) const GPT_OSS: Architecture = Architecture {
    name: "gpt-oss",
    spec: |keys| {
        let mut base = Base::read(keys, RopeMode::Neox)?;
        (base.head_k, base.head_v) = (base.rope.dims, base.rope.dims);
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(2, false)?;
        let rope = base.window_rope(false)?;
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.sinks = Some("attn_sinks.weight");
            if windowed[il] {
                attention.set_window(window, rope);
            }
            // The reference implementation does not round; llama.cpp does.
            attention.set_exact_yarn();
            let glu = Glu::SwigluOai {
                alpha: 1.702,
                limit: 7.0,
            };
            let experts = base.experts(il, counts, base.require_expert_width()?)?;
            let mut experts = experts.with_activation(Activation::Gated(glu));
            experts.routing = Routing::SoftmaxOfChosen;
            experts.normalize = false;
            experts.router.bias = Presence::Required;
            experts.experts.up.bias = Presence::Required;
            experts.experts.down.bias = Presence::Required;
            if let Some(gate) = &mut experts.experts.gate {
                gate.bias = Presence::Required;
            }
            Ok(base.layer(
                il,
                [
                    SubLayer::new(base.stream_norm("attn_norm"), attention),
                    SubLayer::new(base.stream_norm("post_attention_norm"), experts),
                ],
            ))
        })
    },
};

/// AFMoE: windows with RoPE, full attention without; gates; norms before and after the sub-layers.
pub(super) const AFMOE: Architecture = Architecture {
    name: "afmoe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(4, false)?;
        let rope = base.window_rope(false)?;
        let mixture = Mixture::read(&base, Routing::Sigmoid)?;
        let shared = keys.count("expert_shared_count")?.unwrap_or(0);
        let mixture = Mixture {
            shared: match shared {
                0 => None,
                shared => Some(shared * base.require_expert_width()?),
            },
            ..mixture
        };
        let mut spec = base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            attention.rotation = attention.rotation.filter(|_| (il + 1) % 4 != 0);
            let width = attention.n_head * attention.head_k;
            let gate = Linear::new("attn_gate", [base.n_embd, width]);
            attention.gate = Some(Gate::Linear(gate, Unary::Sigmoid));
            Ok(both_norms(&base, il, attention, mixture.mixer(il)?))
        })?;
        spec.embedding.scale = Some((base.n_embd as f32).sqrt());
        Ok(spec)
    },
};

/// Mellum: layers with a window have their own rotation.
pub(super) const MELLUM: Architecture = Architecture {
    name: "mellum",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(4, false)?;
        let plain = base.window_rope(true)?;
        let rope = Rope {
            freq_scale: base.rope.freq_scale,
            ..plain
        };
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            let width = base.expert_width_or_share(il, counts[1])?;
            Ok(base.pre_norm(il, attention, base.experts(il, counts, width)?))
        })
    },
};

/// Maple: RoPE only in layers with a window; gated activation with a limit.
pub(super) const MAPLE: Architecture = Architecture {
    name: "maple",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(1, false)?;
        let rope = base.window_rope(false)?;
        let counts = base.require_expert_counts()?;
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if windowed[il] {
                attention.set_window(window, rope)
            } else {
                attention.rotation = None
            }
            let mut experts = base.experts(il, counts, base.require_expert_width()?)?;
            experts.scale = None;
            if let Activation::ClampedSwiglu { limit } = experts.experts.activation {
                experts.experts.activation = Activation::Gated(Glu::SwigluClamp { limit });
            }
            Ok(base.pre_norm(il, attention, experts))
        })
    },
};

/// Adds a gate for each head.
fn gate_heads(attention: &mut Attention, function: Unary) {
    let gate = Linear::new("attn_gate", [attention.output.to, attention.n_head]);
    attention.gate = Some(Gate::Linear(gate, function));
}

/// Laguna: a gate for each head; layers with a window have plain RoPE.
pub(super) const LAGUNA: Architecture = Architecture {
    name: "laguna",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(4, true)?;
        let mut rope = base.window_rope(true)?;
        if let Some(dims) = keys.extent("rope.dimension_count_swa")? {
            rope.dims = dims;
        }
        let mut mixture = Mixture::read(&base, Routing::Sigmoid)?;
        if mixture.shared.is_none() {
            mixture.shared = Some(base.require_expert_width()?);
        }
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            gate_heads(&mut attention, Unary::SoftPlus);
            Ok(base.pre_norm(il, attention, mixture.mixer(il)?))
        })
    },
};

/// Step 3.5: layers with full attention rotate half of each head.
pub(super) const STEP35: Architecture = Architecture {
    name: "step35",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(1, false)?;
        let rope = base.window_rope(false)?;
        let mixture = Mixture::read(&base, Routing::Sigmoid)?;
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if windowed[il] {
                attention.set_window(window, rope)
            } else {
                attention.set_rope_factors(RopeFactors::Frequencies)
            }
            gate_heads(&mut attention, Unary::Sigmoid);
            let has_experts = keys.has_tensor(&format!("blk.{il}.ffn_gate_inp.weight"));
            let mixer = if has_experts {
                let mut experts = mixture.experts(il)?;
                if let Some((shared, _)) = &mut experts.shared {
                    shared.activation = base.clamped_swiglu("swiglu_clamp_shexp", il)?;
                }
                Mixer::from(experts)
            } else {
                base.swiglu(il)?.into()
            };
            Ok(base.pre_norm(il, attention, mixer))
        })
    },
};
