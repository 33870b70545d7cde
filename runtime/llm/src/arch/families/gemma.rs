//! Gemma.

use super::llama::both_norms;
use crate::arch::spec::{
    Activation, AltUp, Attention, Branch, Linear, Mixer, Mlp, Norm, PerLayer, Presence, Projection,
    RopeFactors, RouterInput, Spec, SubLayer,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::{Glu, RopeMode};
use std::f32::consts::FRAC_1_SQRT_2;

/// Key of the number of last layers that use the keys and values of earlier layers.
const SHARED: &str = "attention.shared_kv_layers";

/// Matrices that files may have in these layers although no graph reads them.
const IGNORED: [&str; 3] = ["attn_k.", "attn_v.", "attn_k_norm."];

pub(super) fn mlp(base: &Base<'_>, il: usize) -> Result<Mlp> {
    Ok(base.gated(
        ["ffn_gate", "ffn_up", "ffn_down"],
        base.width(il)?,
        Glu::Geglu,
    ))
}

/// Sets what all Gemma models have in common: embeddings are scaled by the root of the width, and
/// the embedding table is the output matrix. `softcap` is the default soft cap of logits.
fn finish(base: &Base<'_>, keys: &Keys<'_>, mut spec: Spec, softcap: f32) -> Result<Spec> {
    spec.embedding.scale = Some((base.n_embd as f32).sqrt());
    // Files use 0 for no soft cap.
    spec.head.softcap = keys.finite("final_logit_softcapping")?.unwrap_or(softcap);
    Ok(spec)
}

/// Returns the scale of the attention logits. The largest model of a generation, with `largest`
/// layers, uses the width divided by the number of heads.
fn scale(base: &Base<'_>, attention: &Attention, largest: usize) -> f32 {
    let size = if base.n_layer == largest {
        base.n_embd / attention.n_head
    } else {
        attention.head_k
    };
    1.0 / (size as f32).sqrt()
}

/// Gemma.
pub(super) const GEMMA: Architecture = Architecture {
    name: "gemma",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec =
            base.decoder(|il| Ok(base.pre_norm(il, base.attention(il)?, mlp(&base, il)?)))?;
        spec.embedding.scale = Some((base.n_embd as f32).sqrt());
        Ok(spec)
    },
};

/// Gemma 2: every other layer has a window, and logits are soft-capped.
pub(super) const GEMMA2: Architecture = Architecture {
    name: "gemma2",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?.unwrap_or(4096);
        let windowed = base.windowed(2, false)?;
        let rope = base.window_rope(false)?;
        let softcap = keys.factor("attn_logit_softcapping")?.unwrap_or(50.0);
        let spec = base.decoder(|il| {
            let mut attention = base.attention(il)?;
            attention.softcap = softcap;
            attention.scale = scale(&base, &attention, 46);
            if windowed[il] {
                attention.set_window(window, rope);
            }
            Ok(both_norms(&base, il, attention, mlp(&base, il)?))
        })?;
        finish(&base, keys, spec, 30.0)
    },
};

/// Creates the attention of Gemma 3n and 4. Layers with a window have their own head size. Values
/// are normalized, and equal the keys if the file has no matrix of values. The last `shared` layers
/// use the keys and values of earlier layers.
fn sharing_attention(
    base: &Base<'_>,
    il: usize,
    windowed: &[bool],
    shared: usize,
) -> Result<Attention> {
    const WINDOW: &str = "attention.sliding_window";
    let keys = base.keys;
    let is_windowed = windowed[il];
    let sizes = if is_windowed {
        [
            keys.extent("attention.key_length_swa")?
                .unwrap_or(base.head_k),
            keys.extent("attention.value_length_swa")?
                .unwrap_or(base.head_v),
        ]
    } else {
        [base.head_k, base.head_v]
    };
    let heads = [base.heads[il], base.heads_kv[il]];
    keys.at_least_1("attention.head_count", heads[0])?;
    keys.at_least_1("attention.head_count_kv", heads[1])?;
    let mut attention = base.attention_of(heads, sizes, il);
    attention.scale = 1.0;
    attention.norms = [
        Some(base.norm("attn_q_norm", sizes[0])),
        Some(base.norm("attn_k_norm", sizes[0])),
        Some(base.bare_norm("Vcur_normed")),
    ];
    let own = base.n_layer.saturating_sub(shared);
    if let Projection::Separate { kv, .. } = &mut attention.projection {
        let has_values = keys.has_tensor(&format!("blk.{il}.attn_v.weight"));
        let has_keys = keys.has_tensor(&format!("blk.{il}.attn_k.weight"));
        if let Some((_, values)) = kv
            && has_keys
            && !has_values
        {
            *values = None;
        }
        if il >= own {
            let back = if is_windowed { 2 } else { 1 };
            let from = own.checked_sub(back);
            let from = from.filter(|&from| windowed[from] == is_windowed);
            attention.keys_of = Some(from.ok_or_else(|| {
                keys.error(
                    SHARED,
                    format_args!(
                        "is {shared}: there is no earlier layer of its kind for layer {il}"
                    ),
                )
            })?);
            *kv = None;
            attention.norms[1] = None;
            attention.norms[2] = None;
        }
    }
    if is_windowed {
        let mut rope = base.window_rope(false)?;
        rope.freq_base = keys.positive("rope.freq_base_swa", 10_000.0)?;
        if let Some(dims) = keys.extent("rope.dimension_count_swa")? {
            rope.dims = dims;
        }
        attention.set_window(keys.require_extent(WINDOW)?, rope);
    } else {
        // Images are read in both directions within windows only.
        attention.are_images_causal = true;
        attention.set_rope_factors(RopeFactors::Frequencies);
    }
    Ok(attention)
}

/// Creates per-layer embeddings with rows of `size` elements.
fn per_layer(base: &Base<'_>, size: usize) -> PerLayer {
    PerLayer {
        size,
        projection: Linear::new("per_layer_model_proj", [base.n_embd, size * base.n_layer]),
        norm: base.norm("per_layer_proj_norm", size),
    }
}

/// Creates the feed-forward network of Gemma 3n. For each layer, `deviations` holds the number of
/// standard deviations by which the gate's elements must exceed their mean, or 0 for an ordinary
/// gate.
fn sparse_mlp(base: &Base<'_>, il: usize, deviations: &[f32]) -> Result<Mlp> {
    let mut mlp = mlp(base, il)?;
    if let Some(&deviations) = deviations.get(il).filter(|&&deviations| deviations != 0.0) {
        mlp.activation = Activation::SparseGeglu { deviations };
    }
    Ok(mlp)
}

/// Gemma 3n, text only: four residual streams (AltUp), a low-rank matrix parallel to attention,
/// sparse gates, per-layer embeddings, and shared keys and values.
pub(super) const GEMMA3N: Architecture = Architecture {
    name: "gemma3n",
    spec: |keys| {
        // Defaults for keys that files may omit.
        const RANK: usize = 64;
        const OWN: usize = 20;
        const SPARSE: usize = 10;
        // One of twenty samples of a normal distribution exceeds this.
        const DEVIATIONS: f32 = 1.644_853_6;
        const ACTIVE: &str = "altup.active_idx";
        let base = Base::read(keys, RopeMode::Neox)?;
        let windowed = base.windowed(5, false)?;
        let (n_embd, n_layer) = (base.n_embd, base.n_layer);
        let size = keys.extent("embedding_length_per_layer_input")?;
        let size = size.unwrap_or(256);
        let count = keys.count("altup.num_inputs")?.unwrap_or(4);
        if !(2..=64).contains(&count) {
            let wanted = format_args!("is {count}, must be 2 to 64");
            return Err(keys.error("altup.num_inputs", wanted));
        }
        if let Some(active @ 1..) = keys.count(ACTIVE)? {
            let wanted = format_args!("is {active}, must be 0");
            return Err(keys.error(ACTIVE, wanted));
        }
        let shared = keys.count(SHARED)?;
        let shared = shared.unwrap_or(n_layer.saturating_sub(OWN));
        let deviations = keys.floats("activation_sparsity_scale", n_layer + base.n_mtp_layers)?;
        let deviations = deviations.unwrap_or_else(|| vec![DEVIATIONS; SPARSE]);
        let spec = base.decoder(|il| {
            let mut attention = sharing_attention(&base, il, &windowed, shared)?;
            attention.set_rope_factors(RopeFactors::None);
            let mut first = SubLayer::new(base.stream_norm("attn_norm"), attention);
            for branch in &mut first.branches {
                branch.post = Some(base.stream_norm("post_attention_norm"));
            }
            let [down, up] = [("laurel_l", [n_embd, RANK]), ("laurel_r", [RANK, n_embd])]
                .map(|(name, extents)| Linear::new(name, extents));
            first.branches.push(Branch {
                post: Some(base.stream_norm("laurel_post_norm")),
                ..Branch::new(Mixer::LowRank(down, up))
            });
            first.branches.push(Branch::new(Mixer::Identity));
            first.sum_scale = Some(FRAC_1_SQRT_2);
            let second = sparse_mlp(&base, il, &deviations)?;
            let mut second = SubLayer::new(base.stream_norm("ffn_norm"), second);
            second.post = Some(base.stream_norm("post_ffw_norm"));
            Ok(base.layer(il, [first, second]))
        })?;
        let mut spec = finish(&base, keys, spec, 30.0)?;
        spec.embedding.scales_table_alone = true;
        spec.embedding.per_layer = Some(per_layer(&base, size));
        spec.altup = Some(AltUp {
            count,
            router_norm: base.stream_norm("altup_router_norm"),
            router: Linear::new("altup_router", [n_embd, count]),
            predict: Linear::new("altup_predict_coef", [count, count * count]),
            correct: Linear::new("altup_correct_coef", [count, count]),
            correct_scale: "altup_correct_scale.weight",
            others: (
                Linear::new("inp_gate", [n_embd, size]),
                Linear::new("proj", [size, n_embd]),
                base.stream_norm("post_norm"),
            ),
            begin: "altup_proj.weight",
            end: "altup_unembd_proj.weight",
        });
        spec.ignored.names = IGNORED.to_vec();
        Ok(spec)
    },
};

/// Gemma 4: experts parallel to a dense feed-forward network, per-layer embeddings, and shared keys
/// and values, if the file has them.
pub(super) const GEMMA4: Architecture = Architecture {
    name: "gemma4",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let windowed = base.windowed(1, false)?;
        let counts = base.expert_counts()?;
        let per_layer = keys.count("embedding_length_per_layer_input")?;
        let per_layer = per_layer.filter(|&size| size != 0);
        let n_embd = base.n_embd;
        let shared = keys.count(SHARED)?.unwrap_or(0);
        let spec = base.decoder(|il| {
            let attention = sharing_attention(&base, il, &windowed, shared)?;
            let mut layer = both_norms(&base, il, attention, mlp(&base, il)?);
            let has_experts = keys.has_tensor(&format!("blk.{il}.ffn_gate_inp.weight"));
            if let (Some(counts), true, Some(part)) = (counts, has_experts, layer.parts.get_mut(1))
            {
                let gelu = Activation::Gated(Glu::Geglu);
                let experts = base.experts(il, counts, base.require_expert_width()?)?;
                let mut experts = experts.with_activation(gelu);
                experts.scale = None;
                experts.router.scale = Presence::Absent;
                let norm = Norm {
                    suffix: ".scale",
                    ..base.stream_norm("ffn_gate_inp")
                };
                experts.router_input = RouterInput::Normed(norm, 1.0 / (n_embd as f32).sqrt());
                let plain = part.norm.take();
                for branch in &mut part.branches {
                    branch.norm = plain.clone();
                    branch.post = Some(base.stream_norm("post_ffw_norm_1"));
                }
                part.branches.push(Branch {
                    norm: Some(base.stream_norm("pre_ffw_norm_2")),
                    post: Some(base.stream_norm("post_ffw_norm_2")),
                    ..Branch::new(experts)
                });
            }
            if let Some(size) = per_layer {
                let gate = Linear::new("inp_gate", [n_embd, size]);
                let output = Linear::new("proj", [size, n_embd]);
                layer.parts.push(SubLayer {
                    post: Some(base.stream_norm("post_norm")),
                    ..SubLayer::bare(Mixer::PerLayer(gate, output))
                });
            }
            layer.scale = Some("layer_output_scale.weight");
            Ok(layer)
        })?;
        let mut spec = finish(&base, keys, spec, 30.0)?;
        spec.embedding.scales_table_alone = true;
        spec.embedding.per_layer = per_layer.map(|size| self::per_layer(&base, size));
        spec.ignored.names = IGNORED.to_vec();
        Ok(spec)
    },
};

/// Gemma 3: five of six layers have a window, with their own rotation.
pub(super) const GEMMA3: Architecture = Architecture {
    name: "gemma3",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let window = base.window()?;
        let windowed = base.windowed(6, false)?;
        let mut rope = base.window_rope(true)?;
        rope.freq_base = keys.positive("rope.freq_base_swa", 10_000.0)?;
        let spec = base.decoder(|il| {
            let mut attention = base.normed_attention(il)?;
            attention.scale = scale(&base, &attention, 62);
            if let Some(size) = window.filter(|_| windowed[il]) {
                attention.set_window(size, rope);
            }
            Ok(both_norms(&base, il, attention, mlp(&base, il)?))
        })?;
        let mut spec = finish(&base, keys, spec, 0.0)?;
        spec.embedding.scales_table_alone = true;
        spec.head.dense = base.dense()?;
        Ok(spec)
    },
};
