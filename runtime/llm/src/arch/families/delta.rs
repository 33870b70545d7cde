//! Models with recurrent state in most layers: Qwen3-Next, Qwen3.5 and LFM2.

use crate::arch::base::with_images;
use crate::arch::spec::{
    Attention, DeltaInput, DeltaNet, DeltaRates, Gate, Layer, Linear, Mixer, Presence, Projection,
    Routing, ShortConv, Spec, SubLayer,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::RopeMode;

/// Creates the attention of layer `il` with QK-norm and a gate for every element.
fn gated_attention(base: &Base<'_>, il: usize) -> Result<Attention> {
    let mut attention = base.normed_attention(il)?;
    let width = attention.n_head * attention.head_k;
    if let Projection::Separate { q, .. } = &mut attention.projection {
        q.to = 2 * width;
    }
    attention.gate = Some(Gate::InQueries);
    attention.scale = base.attention_scale()?.unwrap_or(attention.scale);
    Ok(attention)
}

/// Creates the gated delta net of layer `il`, with one input matrix if the file has it. Value heads
/// that share a key head are adjacent if `neighbours` is set. Otherwise they are as many heads
/// apart as there are key heads.
fn delta_net(base: &Base<'_>, il: usize, neighbours: bool) -> Result<DeltaNet> {
    let keys = base.keys;
    let size = keys.require_extent("ssm.state_size")?;
    let n_head_k = keys.require_extent("ssm.group_count")?;
    let n_head = keys.require_extent("ssm.time_step_rank")?;
    if !n_head.is_multiple_of(n_head_k) {
        return Err(keys.error(
            "ssm.time_step_rank",
            format_args!("{n_head} heads of values do not share {n_head_k} heads of keys evenly"),
        ));
    }
    let inner = keys.require_extent("ssm.inner_size")?;
    if inner != size * n_head {
        return Err(keys.error(
            "ssm.inner_size",
            format_args!("is {inner}, must be {size} times {n_head}"),
        ));
    }
    let (n_embd, values) = (base.n_embd, size * n_head);
    let channels = 2 * size * n_head_k + values;
    let has = |name: &str| keys.has_tensor(&format!("blk.{il}.{name}.weight"));
    let is_one = has("ssm_in") && !has("attn_qkv");
    Ok(DeltaNet {
        n_head_k,
        n_head,
        size,
        width: keys.require_extent("ssm.conv_kernel")?,
        input: if is_one {
            DeltaInput::ByHead(Linear::new("ssm_in", [n_embd, channels + values]))
        } else {
            DeltaInput::Split(
                Linear::new("attn_qkv", [n_embd, channels]),
                Linear::new("attn_gate", [n_embd, values]),
            )
        },
        rates: if neighbours {
            DeltaRates::ByHead(Linear::new("ssm_ba", [n_embd, 2 * n_head]))
        } else {
            DeltaRates::Split(
                Linear::new("ssm_alpha", [n_embd, n_head]),
                Linear::new("ssm_beta", [n_embd, n_head]),
            )
        },
        neighbours,
        names: ["ssm_conv1d.weight", "ssm_dt.bias", "ssm_a"],
        eps: keys.epsilon("attention.layer_norm_rms_epsilon")?,
        norm: base.norm("ssm_norm", size),
        output: Linear::new("ssm_out", [values, n_embd]),
    })
}

/// Creates a model with gated delta nets in most layers and attention in the others.
fn hybrid(
    keys: &Keys<'_>,
    neighbours: bool,
    feed_forward: impl Fn(&Base<'_>, usize) -> Result<Mixer>,
) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    let layers = base.n_layer + base.n_mtp_layers;
    let recurrent = keys.flags("attention.recurrent_layers", layers);
    let every = keys.extent("full_attention_interval")?.unwrap_or(4);
    let is_recurrent = |il: usize| match &recurrent {
        Ok(Some(recurrent)) => recurrent[il],
        _ => !(il + 1).is_multiple_of(every),
    };
    base.decoder(|il| {
        let norm = base.stream_norm("attn_norm");
        let mixer: Mixer = if is_recurrent(il) {
            delta_net(&base, il, neighbours)?.into()
        } else {
            gated_attention(&base, il)?.into()
        };
        let second = base.stream_norm("post_attention_norm");
        let parts = [
            SubLayer::new(norm, mixer),
            SubLayer::new(second, feed_forward(&base, il)?),
        ];
        Ok(base.layer(il, parts))
    })
}

/// Creates experts and a shared expert, which has a router weight.
fn experts(base: &Base<'_>, il: usize) -> Result<Mixer> {
    let counts = base.require_expert_counts()?;
    let width = base.expert_width_or_share(il, counts[1])?;
    let mut experts = base.experts(il, counts, width)?;
    let shared = base.keys.count("expert_shared_feed_forward_length")?;
    let shared = match shared.filter(|&width| width != 0) {
        Some(width) => width,
        None => base.width(il)?,
    };
    let gate = Linear::new("ffn_gate_inp_shexp", [base.n_embd, 1]);
    experts.shared = Some((base.shared_expert(shared), Some(gate)));
    Ok(experts.into())
}

/// Qwen3-Next.
pub(super) const QWEN3NEXT: Architecture = Architecture {
    name: "qwen3next",
    spec: |keys| {
        let mut spec = hybrid(keys, true, experts)?;
        // Files may have both forms of the input matrix.
        spec.ignored.names = vec!["ssm_in."];
        Ok(spec)
    },
};

/// Qwen3.5 and 3.6.
pub(super) const QWEN35: Architecture = Architecture {
    name: "qwen35",
    spec: |keys| {
        let spec = hybrid(keys, false, |base, il| Ok(base.swiglu(il)?.into()))?;
        with_images(spec, keys, |sections| RopeMode::Interleaved { sections })
    },
};

/// Qwen3.5 and 3.6 with experts.
pub(super) const QWEN35MOE: Architecture = Architecture {
    name: "qwen35moe",
    spec: |keys| {
        let spec = hybrid(keys, false, experts)?;
        with_images(spec, keys, |sections| RopeMode::Interleaved { sections })
    },
};

/// Creates LFM2: short convolutions, and some layers with attention.
fn lfm2(keys: &Keys<'_>, feed_forward: impl Fn(&Base<'_>, usize) -> Result<Mixer>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Neox)?;
    let width = keys.require_extent("shortconv.l_cache")?;
    let window = base.window()?;
    let n_embd = base.n_embd;
    let mut spec = base.decoder(|il| -> Result<Layer> {
        let mixer: Mixer = match base.heads_kv[il] {
            0 => ShortConv {
                channels: n_embd,
                width,
                is_bidirectional: false,
                input: Linear::new("shortconv.in_proj", [n_embd, 3 * n_embd]),
                weights: "shortconv.conv.weight",
                output: Linear::new("shortconv.out_proj", [n_embd, n_embd]),
            }
            .into(),
            _ => {
                let mut attention = base.normed_attention(il)?;
                if let Some(size) = window {
                    attention.set_window(size, base.rope);
                }
                attention.into()
            }
        };
        let parts = [
            SubLayer::new(base.stream_norm("attn_norm"), mixer),
            SubLayer::new(base.stream_norm("ffn_norm"), feed_forward(&base, il)?),
        ];
        Ok(base.layer(il, parts))
    })?;
    spec.head.norm = Some(base.stream_norm("token_embd_norm"));
    spec.head.dense = base.dense()?;
    Ok(spec)
}

/// LFM2.
pub(super) const LFM2: Architecture = Architecture {
    name: "lfm2",
    spec: |keys| lfm2(keys, |base, il| Ok(base.swiglu(il)?.into())),
};

/// LFM2 with experts.
pub(super) const LFM2MOE: Architecture = Architecture {
    name: "lfm2moe",
    spec: |keys| {
        lfm2(keys, |base, il| {
            if il < base.dense_lead()? {
                return Ok(base.swiglu(il)?.into());
            }
            let counts = base.require_expert_counts()?;
            let mut experts = base.experts(il, counts, base.require_expert_width()?)?;
            experts.routing = base.routing(Routing::Sigmoid)?;
            experts.selection_bias = Some(("exp_probs_b.bias", Presence::Required));
            Ok(experts.into())
        })
    },
};
