//! Encoders: models with bidirectional attention that return embeddings of texts.

use super::gemma;
use super::llama::both_norms;
use crate::arch::spec::{
    Activation, Attention, Branch, Experts, Layer, Mixer, Mlp, Norm, NormOver, Presence, Span,
    Spec, SubLayer,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::{Glu, Rope, RopeMode, Unary};

/// Creates the common structure of BERT and similar models: norms after the residual additions, a
/// norm of the embeddings, and optionally the first token type.
fn bert(
    base: &Base<'_>,
    mut layer: impl FnMut(usize) -> Result<(Attention, Mixer)>,
) -> Result<Spec> {
    let mut spec = base.encoder(|il| {
        let (attention, feed_forward) = layer(il)?;
        let part = |mixer: Mixer, name| SubLayer {
            sum_norm: Some(base.stream_norm(name)),
            ..SubLayer::bare(mixer)
        };
        Ok(base.layer(
            il,
            [
                part(attention.into(), "attn_output_norm"),
                part(feed_forward, "layer_output_norm"),
            ],
        ))
    })?;
    spec.head.norm = None;
    spec.head.classifier = base.classifier(Unary::Tanh)?;
    spec.embedding.norm = Some(base.stream_norm("token_embd_norm"));
    if base.keys.has_tensor("token_types.weight") {
        spec.embedding.token_types = Some(token_types(base.keys)?);
    }
    Ok(spec)
}

/// Returns the number of token types.
fn token_types(keys: &Keys<'_>) -> Result<usize> {
    const KEY: &str = "tokenizer.ggml.token_type_count";
    match keys.metadata().require::<u64>(KEY)? {
        // The maximum is far beyond real models; extents are checked against the tensor.
        count @ 1..=65_536 => Ok(count as usize),
        count => Err(crate::error::Error::model(format!(
            "key \"{KEY}\": is {count}, must be 1 to 65536"
        ))),
    }
}

/// Creates a feed-forward network with exact GELU, not with the approximation.
fn gelu(base: &Base<'_>, il: usize) -> Result<Mixer> {
    Ok(base.plain(il, Activation::Plain(Unary::GeluErf))?.into())
}

fn unrotated(base: &Base<'_>, il: usize) -> Result<Attention> {
    Ok(Attention {
        rotation: None,
        ..base.attention(il)?
    })
}

/// BERT, RoBERTa, MiniLM, BGE, E5, ...: learned positions.
pub(super) const BERT: Architecture = Architecture {
    name: "bert",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        let mut spec = bert(&base, |il| Ok((unrotated(&base, il)?, gelu(&base, il)?)))?;
        spec.embedding.positions = Some(base.n_ctx_train);
        Ok(spec)
    },
};

/// nomic-embed-text 1: RoPE and gated feed-forward networks.
pub(super) const NOMIC_BERT: Architecture = Architecture {
    name: "nomic-bert",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        bert(&base, |il| {
            Ok((base.attention(il)?, base.swiglu(il)?.into()))
        })
    },
};

/// nomic-embed-text 2: RoPE, and experts in some layers. The weights of experts are not normalized.
pub(super) const NOMIC_BERT_MOE: Architecture = Architecture {
    name: "nomic-bert-moe",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        let each = keys.count("moe_every_n_layers")?.unwrap_or(0);
        bert(&base, |il| {
            let feed_forward = if each > 0 && il % each == 1 {
                experts(&base, il)?.into()
            } else {
                gelu(&base, il)?
            };
            Ok((base.attention(il)?, feed_forward))
        })
    },
};

/// Creates experts without gates.
fn experts(base: &Base<'_>, il: usize) -> Result<Experts> {
    let counts = base.require_expert_counts()?;
    let mut experts = base
        .experts(il, counts, base.width(il)?)?
        .with_activation(Activation::Plain(Unary::GeluErf));
    experts.normalize = false;
    experts.experts.gate = None;
    Ok(experts)
}

/// Jina embeddings 3: RoPE.
pub(super) const JINA_BERT_V3: Architecture = Architecture {
    name: "jina-bert-v3",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        bert(&base, |il| Ok((base.attention(il)?, gelu(&base, il)?)))
    },
};

/// Jina embeddings 2: ALiBi and gated feed-forward networks. The models for code have QK-norm and
/// add the layer's input twice.
pub(super) const JINA_BERT_V2: Architecture = Architecture {
    name: "jina-bert-v2",
    spec: |keys| {
        let base = Base::read_layer_norm(keys, RopeMode::Neox)?;
        let mut spec = bert(&base, |il| {
            let mut attention = unrotated(&base, il)?;
            attention.max_bias = 8.0;
            attention.norm_over = NormOver::Token;
            let heads = [attention.n_head, attention.n_head_kv];
            let names = ["attn_q_norm", "attn_k_norm"];
            for (which, (name, count)) in names.into_iter().zip(heads).enumerate() {
                if keys.has_tensor(&format!("blk.{il}.{name}.weight")) {
                    attention.norms[which] = Some(base.norm(name, count * base.head_k));
                }
            }
            Ok((attention, jina_mlp(&base, il)?.into()))
        })?;
        for layer in &mut spec.layers {
            if keys.has_tensor(&format!("blk.{}.attn_norm_2.weight", layer.block)) {
                layer
                    .parts
                    .insert(1, again(base.stream_norm("attn_norm_2")));
            }
        }
        Ok(spec)
    },
};

/// Creates a sub-layer that adds the layer's input and normalizes the sum.
fn again(norm: Norm) -> SubLayer {
    SubLayer {
        branches: vec![Branch {
            of_layer: true,
            ..Branch::new(Mixer::Identity)
        }],
        sum_norm: Some(norm),
        ..SubLayer::bare(Mixer::Identity)
    }
}

/// Creates a gated feed-forward network; some files have one matrix for gate and value.
fn jina_mlp(base: &Base<'_>, il: usize) -> Result<Mlp> {
    let names = ["ffn_gate", "ffn_up", "ffn_down"];
    let width = base.width(il)?;
    let mut mlp = if base.keys.has_tensor(&format!("blk.{il}.ffn_gate.weight")) {
        base.gated(names, width, Glu::GegluErf)
    } else {
        base.fused_gated(width, Glu::GegluErf)
    };
    if let Some(gate) = &mut mlp.gate {
        gate.bias = Presence::Absent;
    }
    Ok(mlp)
}

/// Removes the norm before attention if the file does not have it.
fn maybe_normed(base: &Base<'_>, mut layer: Layer) -> Layer {
    let name = format!("blk.{}.attn_norm.weight", layer.block);
    if let Some(part) = layer.parts.first_mut()
        && layer.block == 0
        && !base.keys.has_tensor(&name)
    {
        part.norm = None;
    }
    layer
}

/// ModernBERT: norms before the sub-layers, and local attention in all but every third layer.
pub(super) const MODERN_BERT: Architecture = Architecture {
    name: "modern-bert",
    spec: |keys| {
        let base = Base {
            norm_bias: Presence::Absent,
            ..Base::read_layer_norm(keys, RopeMode::Neox)?
        };
        let window = base.window()?;
        let windowed = base.windowed(3, true)?;
        let rope = local_rope(&base)?;
        let glu = match keys.get::<&str>("hidden_activation")? {
            None | Some("gelu" | "geglu") => Glu::GegluErf,
            Some("silu" | "swish" | "swiglu") => Glu::Swiglu,
            Some("reglu") => Glu::Reglu,
            Some(other) => {
                return Err(keys.error(
                    "hidden_activation",
                    format_args!(
                        "is '{}', known are gelu, silu and reglu",
                        other.escape_debug()
                    ),
                ));
            }
        };
        let mut spec = base.encoder(|il| {
            let mut attention = base.attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                look_around(&mut attention, size, rope);
            }
            let mlp = base.fused_gated(base.width(il)?, glu);
            Ok(maybe_normed(&base, base.pre_norm(il, attention, mlp)))
        })?;
        spec.embedding.norm = Some(base.stream_norm("token_embd_norm"));
        spec.head.classifier = base.classifier(Unary::GeluErf)?;
        if let Some(classifier) = &mut spec.head.classifier {
            // Default for files without the key.
            classifier.of_mean |= keys.count("classifier.pooling_type")?.is_none();
        }
        Ok(spec)
    },
};

/// Returns the rotation of layers with local attention.
fn local_rope(base: &Base<'_>) -> Result<Rope> {
    let freq_base = base.keys.positive("rope.freq_base_swa", 10_000.0)?;
    Ok(Rope {
        freq_base,
        ..base.window_rope(true)?
    })
}

fn look_around(attention: &mut Attention, size: usize, rope: Rope) {
    attention.set_window(size, rope);
    attention.span = Span::Around(size);
}

/// NeoBERT.
pub(super) const NEO_BERT: Architecture = Architecture {
    name: "neo-bert",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let mut spec = base.encoder(|il| {
            let mlp = base.fused_gated(base.width(il)?, Glu::Swiglu);
            Ok(base.pre_norm(il, base.attention(il)?, mlp))
        })?;
        spec.head.norm = Some(base.stream_norm("enc.output_norm"));
        spec.head.classifier = base.classifier(Unary::Tanh)?;
        Ok(spec)
    },
};

/// EuroBERT.
pub(super) const EUROBERT: Architecture = Architecture {
    name: "eurobert",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        base.encoder(|il| Ok(base.pre_norm(il, base.attention(il)?, base.swiglu(il)?)))
    },
};

/// Llama with bidirectional attention.
pub(super) const LLAMA_EMBED: Architecture = Architecture {
    name: "llama-embed",
    spec: |keys| {
        let mut spec = (super::llama::LLAMA.spec)(keys)?;
        spec.set_bidirectional();
        spec.head.output = None;
        spec.ignored.names.push("output.");
        Ok(spec)
    },
};

/// EmbeddingGemma: Gemma 3 with bidirectional attention, which is local in five of six layers.
pub(super) const GEMMA_EMBEDDING: Architecture = Architecture {
    name: "gemma-embedding",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(6, false)?;
        let rope = local_rope(&base)?;
        let mut spec = base.encoder(|il| {
            let mut attention = base.normed_attention(il)?;
            if let Some(size) = window.filter(|_| windowed[il]) {
                look_around(&mut attention, size, rope);
            }
            Ok(both_norms(&base, il, attention, gemma::mlp(&base, il)?))
        })?;
        spec.embedding.scale = Some((base.n_embd as f32).sqrt());
        spec.embedding.scales_table_alone = true;
        spec.head.dense = base.dense()?;
        spec.ignored.names = vec!["output."];
        Ok(spec)
    },
};
