//! Llama, and models with small differences from it.

use crate::arch::spec::{
    Activation, Attention, Branch, Gate, Layer, Linear, Mlp, NormKind, NormOver, RopeFactors, Spec,
    SubLayer, Temperature,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::{Glu, RopeMode, Unary};

/// Creates the feed-forward network of layer `il`, or the mixture of experts that the file
/// specifies.
pub(super) fn feed_forward(base: &Base<'_>, il: usize) -> Result<crate::arch::spec::Mixer> {
    Ok(match base.expert_counts()? {
        Some(counts) => base.experts(il, counts, base.width(il)?)?.into(),
        None => base.swiglu(il)?.into(),
    })
}

/// Creates the attention of Llama: frequencies may have divisors, and logits may have their own
/// scale.
pub(super) fn attention(base: &Base<'_>, il: usize) -> Result<Attention> {
    let mut attention = base.attention(il)?;
    // Llama 3.1 and later stretch their frequencies unevenly.
    attention.set_rope_factors(base.rope_factors()?);
    if let Some(scale) = base.attention_scale()? {
        attention.scale = scale;
    }
    Ok(attention)
}

/// Creates a model that differs from Llama only in its attention.
fn with_attention(
    keys: &Keys<'_>,
    mode: RopeMode,
    attention: impl Fn(&Base<'_>, usize) -> Result<Attention>,
) -> Result<Spec> {
    let base = Base::read(keys, mode)?;
    base.decoder(|il| Ok(base.pre_norm(il, attention(&base, il)?, feed_forward(&base, il)?)))
}

/// Llama, Mistral, Mixtral, TinyLlama, SmolLM, ...
pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    spec: |keys| with_attention(keys, RopeMode::Normal, attention),
};

/// InternLM 2.
pub(super) const INTERNLM2: Architecture = Architecture {
    name: "internlm2",
    spec: |keys| with_attention(keys, RopeMode::Normal, |base, il| base.attention(il)),
};

/// XVERSE.
pub(super) const XVERSE: Architecture = Architecture {
    name: "xverse",
    spec: |keys| with_attention(keys, RopeMode::Normal, |base, il| base.attention(il)),
};

/// Pangu Embedded.
pub(super) const PANGU: Architecture = Architecture {
    name: "pangu-embedded",
    spec: |keys| {
        let mut spec = with_attention(keys, RopeMode::Neox, |base, il| base.attention(il))?;
        spec.ignored.names = vec!["rope_f"];
        Ok(spec)
    },
};

/// EXAONE 3.
pub(super) const EXAONE: Architecture = Architecture {
    name: "exaone",
    spec: |keys| {
        with_attention(keys, RopeMode::Neox, |base, il| {
            let mut attention = base.attention(il)?;
            attention.set_rope_factors(RopeFactors::Frequencies);
            Ok(attention)
        })
    },
};

/// ERNIE 4.5 without experts.
pub(super) const ERNIE4_5: Architecture = Architecture {
    name: "ernie4_5",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))
    },
};

/// PaddleOCR-VL's language model, text only: all axes of a position are equal.
pub(super) const PADDLEOCR: Architecture = Architecture {
    name: "paddleocr",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))
    },
};

/// Baichuan: the model with 32 layers uses RoPE, the one with 40 layers ALiBi.
pub(super) const BAICHUAN: Architecture = Architecture {
    name: "baichuan",
    spec: |keys| {
        with_attention(keys, RopeMode::Normal, |base, il| {
            let mut attention = base.attention(il)?;
            attention.rotation = attention.rotation.filter(|_| base.n_layer == 32);
            if base.n_layer == 40 {
                attention.max_bias = 8.0;
            }
            Ok(attention)
        })
    },
};

/// Tensors that files of [`REFACT`] and similar models may have but no graph reads: divisors, and
/// all biases except those of queries, keys and values.
pub(super) const UNREAD: [&str; 5] = [
    "rope_f",
    "attn_output.bias",
    "ffn_gate.bias",
    "ffn_up.bias",
    "ffn_down.bias",
];

/// Refact: ALiBi.
pub(super) const REFACT: Architecture = Architecture {
    name: "refact",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.rotation = None;
            attention.max_bias = 8.0;
            let mut layer = base.pre_norm(il, attention, feed_forward(&base, il)?);
            layer.without_biases();
            Ok(layer)
        })?;
        spec.ignored.names = UNREAD.to_vec();
        Ok(spec)
    },
};

/// Mistral 3: queries at late positions are scaled.
pub(super) const MISTRAL3: Architecture = Architecture {
    name: "mistral3",
    spec: |keys| {
        with_attention(keys, RopeMode::Normal, |base, il| {
            let mut attention = attention(base, il)?;
            if let Some(scale) = base.keys.factor("attention.temperature_scale")? {
                let steps = base
                    .keys
                    .require_extent("rope.scaling.original_context_length")?;
                attention.temperature = Some(Temperature {
                    scale,
                    floor: steps as f32,
                    offset: 0.0,
                });
            }
            Ok(attention)
        })
    },
};

/// SmolLM3: every fourth layer has no rotation.
pub(super) const SMOLLM3: Architecture = Architecture {
    name: "smollm3",
    spec: |keys| {
        with_attention(keys, RopeMode::Normal, |base, il| {
            let mut attention = base.attention(il)?;
            attention.scale = base.attention_scale()?.unwrap_or(attention.scale);
            attention.rotation = attention.rotation.filter(|_| (il + 1) % 4 != 0);
            Ok(attention)
        })
    },
};

/// Arcee: squared ReLU.
pub(super) const ARCEE: Architecture = Architecture {
    name: "arcee",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        base.decoder(|il| {
            let mlp = base.plain(il, Activation::SquaredRelu)?;
            Ok(base.pre_norm(il, attention(&base, il)?, mlp))
        })
    },
};

/// Apertus: xIELU, with parameters for each layer.
pub(super) const APERTUS: Architecture = Architecture {
    name: "apertus",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let numbers = |name: &str| {
            let values = keys.floats(name, base.n_layer)?;
            values.ok_or_else(|| keys.error(name, "is missing"))
        };
        let (alpha_n, alpha_p) = (numbers("xielu.alpha_n")?, numbers("xielu.alpha_p")?);
        let (beta, eps) = (numbers("xielu.beta")?, numbers("xielu.eps")?);
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            attention.scale = base.attention_scale()?.unwrap_or(attention.scale);
            attention.set_rope_factors(base.rope_factors()?);
            // The operation expects these transformed values: see `Unary::Xielu`.
            let soft_plus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
            let function = Unary::Xielu {
                alpha_n: beta[il] + soft_plus(alpha_n[il]),
                alpha_p: soft_plus(alpha_p[il]),
                beta: beta[il],
                eps: eps[il],
            };
            let mlp = base.plain(il, Activation::Plain(function))?;
            Ok(base.pre_norm(il, attention, mlp))
        })
    },
};

/// Seed-OSS: the norm before the feed-forward part has another name.
pub(super) const SEED_OSS: Architecture = Architecture {
    name: "seed_oss",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.scale = base.attention_scale()?.unwrap_or(attention.scale);
            Ok(base.layer(
                il,
                [
                    SubLayer::new(base.stream_norm("attn_norm"), attention),
                    SubLayer::new(base.stream_norm("post_attention_norm"), base.swiglu(il)?),
                ],
            ))
        })
    },
};

/// DeciLM and Nemotron models of the "Puzzle" kind: layers without attention, with a matrix instead
/// of attention, or without a feed-forward network.
pub(super) const DECI: Architecture = Architecture {
    name: "deci",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let n_embd = base.n_embd;
        base.decoder(|il| {
            let mut parts = Vec::new();
            match (base.heads[il], base.heads_kv[il]) {
                (0, _) => {}
                (_, 0) => {
                    let matrix = base.linear("attn_output", [n_embd, n_embd]);
                    parts.push(SubLayer::new(base.stream_norm("attn_norm"), matrix));
                }
                _ => parts.push(SubLayer::new(
                    base.stream_norm("attn_norm"),
                    attention(&base, il)?,
                )),
            }
            if base.widths.as_ref().is_none_or(|widths| widths[il] != 0) {
                parts.push(SubLayer::new(
                    base.stream_norm("ffn_norm"),
                    base.swiglu(il)?,
                ));
            }
            Ok(base.layer(il, parts))
        })
    },
};

/// Nanbeige: all layers are repeated several times.
pub(super) const NANBEIGE: Architecture = Architecture {
    name: "nanbeige",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let loops = keys.extent("num_loops")?.unwrap_or(1);
        let bare = keys.flag("skip_loop_final_norm")?;
        let mut spec =
            base.decoder(|il| Ok(base.pre_norm(il, attention(&base, il)?, base.swiglu(il)?)))?;
        let once = spec.layers.clone();
        for _ in 1..loops {
            if let Some(last) = spec.layers.last_mut().filter(|_| !bare) {
                last.norm_again = true;
            }
            spec.layers.extend(once.iter().cloned());
        }
        Ok(spec)
    },
};

/// Creates attention whose QK-norm follows the rotation.
pub(super) fn late_norms(base: &Base<'_>, il: usize) -> Result<Attention> {
    let mut attention = base.normed_attention(il)?;
    attention.norm_over = NormOver::RotatedHeads;
    Ok(attention)
}

/// Maincoder: QK-norm after the rotation.
pub(super) const MAINCODER: Architecture = Architecture {
    name: "maincoder",
    spec: |keys| with_attention(keys, RopeMode::Normal, late_norms),
};

/// Creates Hunyuan, whose rotation has a base that a factor changes.
fn hunyuan(keys: &Keys<'_>) -> Result<Spec> {
    let mut base = Base::read(keys, RopeMode::Neox)?;
    if let Some(alpha) = keys
        .factor("rope.scaling.alpha")?
        .filter(|&alpha| alpha > 0.0)
    {
        let size = base.head_k as f32;
        base.rope.freq_base *= alpha.powf(size / (size - 2.0));
    }
    base.decoder(|il| {
        let mut attention = late_norms(&base, il)?;
        attention.set_rope_factors(RopeFactors::None);
        Ok(base.pre_norm(il, attention, base.swiglu(il)?))
    })
}

/// Hunyuan without experts.
pub(super) const HUNYUAN_DENSE: Architecture = Architecture {
    name: "hunyuan-dense",
    spec: hunyuan,
};

/// Hunyuan-VL's language model, text only: all axes of a position are equal.
pub(super) const HUNYUAN_VL: Architecture = Architecture {
    name: "hunyuan_vl",
    spec: hunyuan,
};

/// BitNet: norms before the last matrix of each sub-layer; the embedding table is the output
/// matrix.
pub(super) const BITNET: Architecture = Architecture {
    name: "bitnet",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.sub_norm = Some(base.stream_norm("attn_sub_norm"));
            let mut mlp = base.swiglu(il)?;
            mlp.sub_norm = Some(base.norm("ffn_sub_norm", base.width(il)?));
            Ok(base.pre_norm(il, attention, mlp))
        })?;
        Ok(spec)
    },
};

/// CogVLM's language model, text only: tensors for images are not used.
pub(super) const COGVLM: Architecture = Architecture {
    name: "cogvlm",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec =
            base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))?;
        spec.ignored.names = vec!["vis_", "rope_freqs"];
        Ok(spec)
    },
};

/// PLaMo: attention and feed-forward network in parallel.
pub(super) const PLAMO: Architecture = Architecture {
    name: "plamo",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.decoder(|il| {
            Ok(side_by_side(
                &base,
                il,
                base.attention(il)?,
                base.swiglu(il)?,
            ))
        })
    },
};

/// Creates a layer whose attention and feed-forward network have the same input.
pub(super) fn side_by_side(
    base: &Base<'_>,
    il: usize,
    attention: Attention,
    feed_forward: impl Into<crate::arch::spec::Mixer>,
) -> Layer {
    let mut part = SubLayer::new(base.stream_norm("attn_norm"), attention);
    part.branches.push(Branch::new(feed_forward));
    base.layer(il, [part])
}

/// Creates a layer with norms before and after both sub-layers.
pub(super) fn both_norms(
    base: &Base<'_>,
    il: usize,
    attention: Attention,
    feed_forward: impl Into<crate::arch::spec::Mixer>,
) -> Layer {
    let mut layer = base.pre_norm(il, attention, feed_forward);
    let names = ["post_attention_norm", "post_ffw_norm"];
    for (part, name) in layer.parts.iter_mut().zip(names) {
        part.post = Some(base.stream_norm(name));
    }
    layer
}

/// Creates a layer with norms only after both sub-layers.
pub(super) fn post_norms(
    base: &Base<'_>,
    il: usize,
    attention: Attention,
    feed_forward: impl Into<crate::arch::spec::Mixer>,
) -> Layer {
    let mut layer = both_norms(base, il, attention, feed_forward);
    for part in &mut layer.parts {
        part.norm = None;
    }
    layer
}

/// PLaMo 3: windows, and norms before and after the sub-layers.
pub(super) const PLAMO3: Architecture = Architecture {
    name: "plamo3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(8, false)?;
        let rope = base.window_rope(false)?;
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            let mlp = base.fused_gated(base.width(il)?, Glu::Swiglu);
            let mut layer = both_norms(&base, il, attention, mlp);
            for norm in layer.parts.iter_mut().filter_map(|part| part.post.as_mut()) {
                // llama.cpp reads and writes these names without a suffix.
                if keys.has_tensor(&format!("blk.{il}.{}", norm.name)) {
                    norm.suffix = "";
                }
            }
            Ok(layer)
        })
    },
};

/// OpenELM: heads and widths differ by layer; the embedding table is the output matrix.
pub(super) const OPENELM: Architecture = Architecture {
    name: "openelm",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let spec =
            base.decoder(|il| Ok(base.pre_norm(il, base.normed_attention(il)?, base.swiglu(il)?)))?;
        Ok(spec)
    },
};

/// EXAONE 4: norms only after the sub-layers; the large model has windows, and RoPE only there.
pub(super) const EXAONE4: Architecture = Architecture {
    name: "exaone4",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = (base.n_layer == 64).then(|| base.window()).transpose()?;
        let window = window.map(|size| size.unwrap_or(4096));
        let windowed = base.windowed(4, false)?;
        let rope = base.window_rope(false)?;
        base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            attention.set_rope_factors(RopeFactors::Frequencies);
            match window {
                Some(size) if windowed[il] => attention.set_window(size, rope),
                Some(_) => attention.rotation = None,
                None => {}
            }
            Ok(post_norms(&base, il, attention, base.swiglu(il)?))
        })
    },
};

/// Spark 2.5: windows, and a gate for each head.
pub(super) const SPARK2_5: Architecture = Architecture {
    name: "spark2_5",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(1, false)?;
        let rope = base.window_rope(false)?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            if windowed[il] {
                attention.set_window(window, rope);
            }
            let gate = Linear::new("attn_gate", [base.n_embd, attention.n_head]);
            attention.gate = Some(Gate::Linear(gate, Unary::Sigmoid));
            let names = ["ffn_gate", "ffn_up", "ffn_down"];
            let mlp = base.gated(names, base.width(il)?, Glu::Geglu);
            Ok(base.pre_norm(il, attention, mlp))
        })
    },
};

/// Muse Glimmer: windows with RoPE, full attention without; gates; norms before and after the
/// sub-layers.
pub(super) const MUSE_GLIMMER: Architecture = Architecture {
    name: "muse-glimmer",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(4, false)?;
        let rope = base.window_rope(false)?;
        let mut spec = base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if windowed[il] {
                attention.set_window(window, rope)
            } else {
                attention.rotation = None
            }
            let width = attention.n_head * attention.head_v;
            let gate = Linear::new("attn_gate", [base.n_embd, width]);
            attention.gate = Some(Gate::Linear(gate, Unary::Sigmoid));
            let mut layer = both_norms(&base, il, attention, base.swiglu(il)?);
            for norm in layer.parts.iter_mut().filter_map(|part| part.post.as_mut()) {
                norm.kind = NormKind::Rms(1e-8);
            }
            Ok(layer)
        })?;
        spec.embedding.norm = Some(base.bare_norm("token_embd_norm"));
        spec.head.scale = keys.factor("logit_scale")?;
        spec.head.softcap = keys.finite("final_logit_softcapping")?.unwrap_or(30.0);
        Ok(spec)
    },
};

/// Talkie: norms without scales; every layer adds the embeddings again.
pub(super) const TALKIE: Architecture = Architecture {
    name: "talkie",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec = base.decoder(|il| {
            let mut attention = late_norms(&base, il)?;
            attention.norms[0] = Some(crate::arch::spec::Norm {
                extents: [1, attention.n_head],
                ..base.norm("attn_q_norm", 1)
            });
            attention.norms[1] = Some(base.bare_norm("attn_k_norm"));
            let mlp: Mlp = base.swiglu(il)?;
            Ok(Layer {
                skip: Some("layer_output_scale.weight"),
                ..base.layer(
                    il,
                    [
                        SubLayer::new(base.bare_norm("attn_norm"), attention),
                        SubLayer::new(base.bare_norm("ffn_norm"), mlp),
                    ],
                )
            })
        })?;
        spec.embedding.norm = Some(base.bare_norm("token_embd_norm"));
        spec.head.norm = Some(base.bare_norm("output_norm"));
        spec.head.scale = keys.factor("logit_scale")?;
        Ok(spec)
    },
};
