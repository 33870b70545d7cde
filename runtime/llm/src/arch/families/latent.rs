//! Latent attention (MLA): DeepSeek V2 to R1, Mistral 4, MiniCPM3, PLM.

use crate::arch::spec::{
    Activation, Attention, Latent, LatentUp, Linear, Mixer, Mlp, Presence, Projection, Routing,
    SubLayer, Temperature,
};
use crate::arch::{Architecture, Base, Keys, Spec};
use crate::error::Result;
use samite_core::RopeMode;

/// Elements of a query or key head, and of a value head.
type HeadSizes = [usize; 2];

/// Creates latent attention with heads of these sizes, in the absorbed form or not.
fn attention(base: &Base<'_>, il: usize, sizes: HeadSizes, absorbed: bool) -> Result<Attention> {
    let keys = base.keys;
    let [head, head_v] = sizes;
    let (n_head, n_embd, rotated) = (base.heads[il], base.n_embd, base.rope.dims);
    keys.at_least_1("attention.head_count", n_head)?;
    let rank = keys.require_extent("attention.kv_lora_rank")?;
    let Some(plain) = head
        .checked_sub(rotated)
        .filter(|&plain| plain > 0 || !absorbed)
    else {
        return Err(keys.error(
            "rope.dimension_count",
            format_args!("is {rotated}, but heads have only {head} elements"),
        ));
    };
    let q_rank = keys
        .count("attention.q_lora_rank")?
        .filter(|&rank| rank != 0);
    let is_direct = keys.has_tensor(&format!("blk.{il}.attn_q.weight"));
    let q = match q_rank.filter(|_| !is_direct) {
        Some(q_rank) => (
            Some((
                Linear::new("attn_q_a", [n_embd, q_rank]),
                base.norm("attn_q_a_norm", q_rank),
            )),
            Linear::new("attn_q_b", [q_rank, n_head * head]),
        ),
        None => (None, Linear::new("attn_q", [n_embd, n_head * head])),
    };
    let latent = Latent {
        rank,
        plain,
        rotated,
        head_v,
        q,
        kv: Linear::new("attn_kv_a_mqa", [n_embd, rank + rotated]),
        norm: base.norm("attn_kv_a_norm", rank),
        up: if absorbed {
            LatentUp::Absorbed(["attn_k_b.weight", "attn_v_b.weight"])
        } else {
            LatentUp::Joint(Linear::new("attn_kv_b", [rank, n_head * (plain + head_v)]))
        },
    };
    let (heads_kv, sizes, before) = if absorbed {
        (1, [rank + rotated, rank], rank)
    } else {
        (n_head, sizes, plain)
    };
    let mut attention = base.attention_of([n_head, heads_kv], sizes, il);
    attention.projection = Projection::Latent(Box::new(latent));
    attention.scale = 1.0 / (head as f32).sqrt();
    attention.output = Linear::new("attn_output", [n_head * head_v, n_embd]);
    if let Some(rotation) = &mut attention.rotation {
        rotation.rope.offset = before;
    }
    Ok(attention)
}

/// Creates DeepSeek V2 or one of its successors. With YaRN, the magnitude of rotated elements is
/// that of multiplier 1 if `is_plain` is set.
fn deepseek2(keys: &Keys<'_>, is_plain: bool) -> Result<Spec> {
    let mut base = Base::read(keys, RopeMode::Normal)?;
    let size = |name| Ok::<_, crate::Error>(keys.count(name)?.filter(|&size| size != 0));
    let mla = (
        size("attention.key_length_mla")?,
        size("attention.value_length_mla")?,
    );
    let (sizes, absorbed) = match mla {
        (Some(k), Some(v)) => ([k, v], true),
        _ => ([base.head_k, base.head_v], false),
    };
    let stretch = (1.0 / base.rope.freq_scale).ln();
    // Files store a tenth of the multiplier.
    let multiplier = keys.factor("rope.scaling.yarn_log_multiplier")?;
    let multiplier = multiplier.map_or(0.0, |tenth| tenth / 0.1);
    let magnitude = |multiplier: f32| 1.0 + 0.1 * multiplier * stretch;
    if base.rope.ext_factor != 0.0 && multiplier != 0.0 {
        let factor = keys.positive("rope.scaling.attn_factor", 1.0)?;
        base.rope.attn_factor = factor / magnitude(if is_plain { 1.0 } else { multiplier });
    }
    let scale = base.rope.attn_factor * magnitude(1.0) * magnitude(multiplier);
    let n_vocab = base.n_vocab;
    let otherwise = match (base.n_layer, n_vocab) {
        // GLM 4.7 Flash.
        (47 | 48, 154_880) => Routing::Sigmoid,
        _ => Routing::Softmax,
    };
    let routing = base.routing(otherwise)?;
    let normalize = keys.flag("expert_weights_norm")?;
    let temperature = match keys.factor("attention.temperature_scale")? {
        Some(scale) => Some(Temperature {
            scale,
            floor: keys.require_extent("attention.temperature_length")? as f32,
            offset: 0.0,
        }),
        None => None,
    };
    let counts = base.require_expert_counts()?;
    let shared = keys.require_extent("expert_shared_count")?;
    let lead = base.dense_lead()?;
    base.decoder(|il| {
        let mut attention = attention(&base, il, sizes, absorbed)?;
        attention.scale *= scale * scale;
        attention.temperature = temperature;
        let mixer: Mixer = if il < lead {
            base.swiglu(il)?.into()
        } else {
            let width = base.require_expert_width()?;
            let mut experts = base.experts(il, counts, width)?;
            experts.routing = routing;
            experts.normalize = normalize;
            experts.selection_bias = Some(("exp_probs_b.bias", Presence::Optional));
            experts
                .with_shared(base.shared_expert(width * shared))
                .into()
        };
        Ok(base.pre_norm(il, attention, mixer))
    })
}

/// DeepSeek V2, V3, R1, Kimi K2, GLM 4.7 Flash.
pub(super) const DEEPSEEK2: Architecture = Architecture {
    name: "deepseek2",
    spec: |keys| deepseek2(keys, true),
};

/// Mistral 4.
pub(super) const MISTRAL4: Architecture = Architecture {
    name: "mistral4",
    spec: |keys| deepseek2(keys, false),
};

/// MiniCPM3: scale factors of embeddings, residual additions and logits.
pub(super) const MINICPM3: Architecture = Architecture {
    name: "minicpm3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let sizes = [base.head_k, base.head_v];
        let residual = 1.4 / (base.n_layer as f32).sqrt();
        let mut spec = base.decoder(|il| {
            let mut attention = attention(&base, il, sizes, false)?;
            attention.set_rope_factors(base.long_short()?);
            let mut layer = base.pre_norm(il, attention, base.swiglu(il)?);
            for part in &mut layer.parts {
                part.scale = Some(residual);
            }
            Ok(layer)
        })?;
        spec.embedding.scale = Some(12.0);
        spec.head.scale = Some(256.0 / base.n_embd as f32);
        Ok(spec)
    },
};

/// PLM: squared ReLU.
pub(super) const PLM: Architecture = Architecture {
    name: "plm",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let sizes = [base.head_k, base.head_v];
        base.decoder(|il| {
            let attention = attention(&base, il, sizes, false)?;
            let mlp: Mlp = base.plain(il, Activation::SquaredRelu)?;
            let first = SubLayer::new(base.stream_norm("attn_norm"), attention);
            let second = SubLayer::new(base.stream_norm("ffn_norm"), mlp);
            Ok(base.layer(il, [first, second]))
        })
    },
};
