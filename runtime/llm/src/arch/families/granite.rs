//! Granite and MiniCPM: scale factors of embeddings, residual additions, attention and logits.

use super::llama::attention;
use crate::arch::spec::{Activation, Linear, Mixer, Mlp, Spec};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::{Glu, RopeMode};

/// Creates the shared expert, with one matrix for gate and value if the file has it.
fn shared(base: &Base<'_>, il: usize, width: usize) -> Mlp {
    if base
        .keys
        .has_tensor(&format!("blk.{il}.ffn_gate_shexp.weight"))
    {
        return base.shared_expert(width);
    }
    Mlp {
        gate: None,
        up: Linear::new("ffn_up_shexp", [base.n_embd, 2 * width]),
        activation: Activation::Gated(Glu::Swiglu),
        divisor: None,
        sub_norm: None,
        down: Linear::new("ffn_down_shexp", [width, base.n_embd]),
    }
}

/// Creates the feed-forward network of layer `il`, or experts with a shared expert.
pub(super) fn feed_forward(base: &Base<'_>, il: usize) -> Result<Mixer> {
    let Some(counts) = base.expert_counts()? else {
        return Ok(base.swiglu(il)?.into());
    };
    let experts = base.experts(il, counts, base.width(il)?)?;
    let width = base.keys.count("expert_shared_feed_forward_length")?;
    Ok(match width.filter(|&width| width != 0) {
        Some(width) => experts.with_shared(shared(base, il, width)).into(),
        None => experts.into(),
    })
}

/// Creates a model whose sub-layers are scaled by `residual` before they are added.
fn scaled(
    base: &Base<'_>,
    residual: Option<f32>,
    rotated: impl Fn(usize) -> bool,
    windowed: impl Fn(usize) -> Option<usize>,
    sinks: Option<&'static str>,
) -> Result<Spec> {
    base.decoder(|il| {
        let mut attention = attention(base, il)?;
        attention.sinks = sinks;
        if let Some(size) = windowed(il) {
            attention.set_window(size, base.rope);
        }
        attention.rotation = attention.rotation.filter(|_| rotated(il));
        let mut layer = base.pre_norm(il, attention, feed_forward(base, il)?);
        for part in &mut layer.parts {
            part.scale = residual;
        }
        Ok(layer)
    })
}

fn granite(keys: &Keys<'_>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Normal)?;
    let rotated = keys.get("rope.scaling.finetuned")?.unwrap_or(true);
    let residual = keys.factor("residual_scale")?;
    let mut spec = scaled(&base, residual, |_| rotated, |_| None, None)?;
    finish(keys, &mut spec)?;
    Ok(spec)
}

/// Sets Granite's factors of embeddings and logits.
pub(super) fn finish(keys: &Keys<'_>, spec: &mut Spec) -> Result<()> {
    spec.embedding.scale = keys.factor("embedding_scale")?;
    spec.head.scale = keys.factor("logit_scale")?.map(f32::recip);
    Ok(())
}

/// Granite 3.
pub(super) const GRANITE: Architecture = Architecture {
    name: "granite",
    spec: granite,
};

/// Granite 3 with experts.
pub(super) const GRANITE_MOE: Architecture = Architecture {
    name: "granitemoe",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let residual = keys.factor("residual_scale")?;
        let mut spec = scaled(&base, residual, |_| true, |_| None, None)?;
        finish(keys, &mut spec)?;
        Ok(spec)
    },
};

/// Granite with windows and attention sinks.
pub(super) const GRANITE_SWA: Architecture = Architecture {
    name: "granite_swa",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let window = keys.require_extent("attention.sliding_window")?;
        let windowed = base.windowed(1, false)?;
        let rotated = keys.flags("attention.rope_pattern", base.n_layer)?;
        let mut spec = scaled(
            &base,
            keys.factor("residual_scale")?,
            |il| rotated.as_ref().is_none_or(|rotated| rotated[il]),
            |il| windowed[il].then_some(window),
            Some("attn_sinks.weight"),
        )?;
        finish(keys, &mut spec)?;
        Ok(spec)
    },
};

/// MiniCPM: the scale factors derive from its dimensions, unless the file specifies them.
pub(super) const MINICPM: Architecture = Architecture {
    name: "minicpm",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let factor =
            |name, otherwise| Ok::<_, crate::Error>(keys.factor(name)?.unwrap_or(otherwise));
        let residual = factor("residual_scale", 1.4 / (base.n_layer as f32).sqrt())?;
        let mut spec = scaled(&base, Some(residual), |_| true, |_| None, None)?;
        spec.embedding.scale = Some(factor("embedding_scale", 12.0)?);
        let logits = factor("logit_scale", 256.0 / base.n_embd as f32)?;
        spec.head.scale = Some(1.0 / logits);
        Ok(spec)
    },
};
