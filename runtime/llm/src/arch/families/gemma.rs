//! Gemma.

use super::llama::both_norms;
use crate::arch::spec::{Attention, Mlp, Spec};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::{Glu, RopeMode};

fn mlp(base: &Base<'_>, il: usize) -> Result<Mlp> {
    Ok(base.gated(
        ["ffn_gate", "ffn_up", "ffn_down"],
        base.width(il)?,
        Glu::Geglu,
    ))
}

/// What all have in common: embeddings are scaled by the root of the width; they are the output, too.
fn finish(base: &Base<'_>, keys: &Keys<'_>, mut spec: Spec) -> Result<Spec> {
    spec.embedding.scale = Some((base.n_embd as f32).sqrt());
    spec.head.softcap = keys.factor("final_logit_softcapping")?.unwrap_or(0.0);
    Ok(spec)
}

/// The factor of attention's logits: the largest model of a generation, of so many layers, has that of the width shared by its heads.
fn scale(base: &Base<'_>, attention: &Attention, largest: usize) -> f32 {
    let size = match base.n_layer == largest {
        true => base.n_embd / attention.n_head,
        false => attention.head_k,
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

/// Gemma 2: every other layer has a window; logits are soft-capped.
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
        let mut spec = finish(&base, keys, spec)?;
        if spec.head.softcap == 0.0 {
            spec.head.softcap = 30.0;
        }
        Ok(spec)
    },
};

/// Gemma 3: five of six layers have a window, with a rotation of its own.
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
        let mut spec = finish(&base, keys, spec)?;
        spec.spare.names = vec!["dense_2", "dense_3"];
        Ok(spec)
    },
};
