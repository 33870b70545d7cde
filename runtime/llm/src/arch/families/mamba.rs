//! Selective state spaces (Mamba), alone and combined with attention.

use super::granite;
use super::llama;
use crate::arch::spec::{
    Activation, Branch, ConvolutionSteps, Layer, Linear, Mixer, Norm, Presence, RopeFactors,
    Routing, Spec, StateSpace, Steps, SubLayer,
};
use crate::arch::{Architecture, Base, Keys};
use crate::error::Result;
use samite_core::RopeMode;

/// Reads the dimensions of a state space: kernel size, elements of all heads, columns, and the
/// number of heads (Mamba 2) or the rank of the time steps (Mamba 1).
fn numbers(keys: &Keys<'_>) -> Result<[usize; 4]> {
    const KEYS: [&str; 4] = [
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    ];
    let mut numbers = [0; 4];
    for (number, key) in numbers.iter_mut().zip(KEYS) {
        *number = keys.require_extent(key)?;
    }
    Ok(numbers)
}

/// Creates the state space of Mamba 2.
fn mamba2(base: &Base<'_>, norm: Presence) -> Result<StateSpace> {
    let keys = base.keys;
    let [width, inner, columns, n_head] = numbers(keys)?;
    let groups = keys.require_extent("ssm.group_count")?;
    if !inner.is_multiple_of(n_head) {
        return Err(keys.error(
            "ssm.inner_size",
            format_args!("{inner} elements are not {n_head} heads of one size"),
        ));
    }
    if !n_head.is_multiple_of(groups) {
        return Err(keys.error(
            "ssm.group_count",
            format_args!("{n_head} heads are not {groups} groups of one size"),
        ));
    }
    let channels = inner + 2 * groups * columns;
    Ok(StateSpace {
        n_head,
        size: inner / n_head,
        groups,
        columns,
        width,
        input: Linear::new("ssm_in", [base.n_embd, inner + channels + n_head]),
        steps: Steps::OfInput,
        norm: match norm {
            Presence::Absent => None,
            weight => Some(Norm {
                extents: [inner / groups, groups],
                weight,
                ..base.norm("ssm_norm", inner / groups)
            }),
        },
        output: Linear::new("ssm_out", [inner, base.n_embd]),
    })
}

/// Creates the state space of Mamba 1. Its time steps, B and C may have norms, with or without
/// scales.
fn mamba1(base: &Base<'_>, il: usize) -> Result<StateSpace> {
    let keys = base.keys;
    let [width, inner, columns, rank] = numbers(keys)?;
    let is_normed = keys.has_tensor(&format!("blk.{il}.ssm_dt_norm.weight"));
    let bare = keys.flag("ssm.dt_b_c_rms")?;
    let norms = [
        ("ssm_dt_norm", rank),
        ("ssm_b_norm", columns),
        ("ssm_c_norm", columns),
    ];
    let norms = norms.map(|(name, size)| Norm {
        weight: if is_normed {
            Presence::Required
        } else {
            Presence::Absent
        },
        ..base.norm(name, size)
    });
    Ok(StateSpace {
        n_head: inner,
        size: 1,
        groups: 1,
        columns,
        width,
        input: Linear::new("ssm_in", [base.n_embd, 2 * inner]),
        steps: Steps::OfConvolution(Box::new(ConvolutionSteps {
            rank,
            all: Linear::new("ssm_x", [inner, rank + 2 * columns]),
            norms: (is_normed || bare).then_some(norms),
            up: Linear::new("ssm_dt", [rank, inner]).bias(Presence::Required),
        })),
        norm: None,
        output: Linear::new("ssm_out", [inner, base.n_embd]),
    })
}

/// Creates a model that consists of state spaces only.
fn pure(keys: &Keys<'_>, space: impl Fn(&Base<'_>, usize) -> Result<StateSpace>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Normal)?;
    base.decoder(|il| {
        let part = SubLayer::new(base.stream_norm("attn_norm"), space(&base, il)?);
        Ok(base.layer(il, [part]))
    })
}

/// Mamba and Falcon Mamba.
pub(super) const MAMBA: Architecture = Architecture {
    name: "mamba",
    spec: |keys| pure(keys, mamba1),
};

/// Mamba 2.
pub(super) const MAMBA2: Architecture = Architecture {
    name: "mamba2",
    spec: |keys| pure(keys, |base, _| mamba2(base, Presence::Required)),
};

/// Jamba: Mamba 1 in layers without key heads, attention without positions in the others, and
/// experts if the file has them.
pub(super) const JAMBA: Architecture = Architecture {
    name: "jamba",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        base.decoder(|il| {
            let mixer: Mixer = match base.heads_kv[il] {
                0 => mamba1(&base, il)?.into(),
                _ => {
                    let mut attention = base.attention(il)?;
                    attention.rotation = None;
                    attention.into()
                }
            };
            let has_experts = keys.has_tensor(&format!("blk.{il}.ffn_gate_inp.weight"));
            let second: Mixer = if has_experts {
                let counts = base.require_expert_counts()?;
                let mut experts = base.experts(il, counts, base.width(il)?)?;
                experts.normalize = false;
                experts.into()
            } else {
                base.swiglu(il)?.into()
            };
            let parts = [
                SubLayer::new(base.stream_norm("attn_norm"), mixer),
                SubLayer::new(base.stream_norm("ffn_norm"), second),
            ];
            Ok(base.layer(il, parts))
        })
    },
};

/// Falcon-H1: attention and Mamba 2 in parallel.
pub(super) const FALCON_H1: Architecture = Architecture {
    name: "falcon-h1",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Neox)?;
        let mut spec = base.decoder(|il| {
            let mut attention = llama::attention(&base, il)?;
            attention.set_rope_factors(RopeFactors::None);
            let has_norm = keys.has_tensor(&format!("blk.{il}.ssm_norm.weight"));
            let norm = if has_norm {
                Presence::Required
            } else {
                Presence::Absent
            };
            let mut first = SubLayer::new(base.stream_norm("attn_norm"), attention);
            first.branches.push(Branch::new(mamba2(&base, norm)?));
            // llama.cpp expects this name without a suffix.
            let is_short = keys.has_tensor(&format!("blk.{il}.ffn_norm"));
            let norm = Norm {
                suffix: if is_short { "" } else { ".weight" },
                ..base.stream_norm("ffn_norm")
            };
            let second = SubLayer::new(norm, base.swiglu(il)?);
            Ok(base.layer(il, [first, second]))
        })?;
        spec.ignored.names = vec!["rope_freqs."];
        Ok(spec)
    },
};

/// Granite 4: Mamba 2 in layers without key heads, attention in the others.
pub(super) const GRANITE_HYBRID: Architecture = Architecture {
    name: "granitehybrid",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let rotated = keys.get("rope.scaling.finetuned")?.unwrap_or(true);
        let residual = keys.factor("residual_scale")?;
        let mut spec = base.decoder(|il| {
            let mixer: Mixer = match base.heads_kv[il] {
                0 => mamba2(&base, Presence::Required)?.into(),
                _ => {
                    let mut attention = llama::attention(&base, il)?;
                    attention.rotation = attention.rotation.filter(|_| rotated);
                    attention.into()
                }
            };
            let second = granite::feed_forward(&base, il)?;
            let parts = [
                SubLayer::new(base.stream_norm("attn_norm"), mixer),
                SubLayer::new(base.stream_norm("ffn_norm"), second),
            ];
            let mut layer = base.layer(il, parts);
            for part in &mut layer.parts {
                part.scale = residual;
            }
            Ok(layer)
        })?;
        granite::finish(keys, &mut spec)?;
        Ok(spec)
    },
};

/// Creates Nemotron-H, whose layers have a single sub-layer: Mamba 2, attention without positions,
/// or a feed-forward network.
fn nemotron_h(keys: &Keys<'_>) -> Result<Spec> {
    let base = Base::read(keys, RopeMode::Normal)?;
    let n_layers = base.n_layer + base.n_mtp_layers;
    let widths = keys.counts("feed_forward_length", n_layers)?;
    let scale = base.attention_scale()?;
    base.decoder(|il| -> Result<Layer> {
        let width = widths.as_ref().map_or(0, |widths| widths[il]);
        let mixer: Mixer = match (base.heads_kv[il], width) {
            (0, 0) => mamba2(&base, Presence::Required)?.into(),
            (_, 0) => {
                let mut attention = base.attention(il)?;
                attention.rotation = None;
                attention.scale = scale.unwrap_or(attention.scale);
                attention.into()
            }
            _ => match base.expert_counts()? {
                None => base.plain(il, Activation::SquaredRelu)?.into(),
                Some(counts) => {
                    let width = base.expert_width_or_share(il, counts[1])?;
                    let mut experts = base.experts(il, counts, width)?;
                    experts.experts.gate = None;
                    experts.experts.activation = Activation::SquaredRelu;
                    experts.routing = Routing::Sigmoid;
                    experts.selection_bias = Some(("exp_probs_b.bias", Presence::Required));
                    let shared = keys.require_extent("expert_shared_feed_forward_length")?;
                    let mut shared = base.shared_expert(shared);
                    shared.gate = None;
                    shared.activation = Activation::SquaredRelu;
                    experts.with_shared(shared).into()
                }
            },
        };
        let part = SubLayer::new(base.stream_norm("attn_norm"), mixer);
        Ok(base.layer(il, [part]))
    })
}

/// Nemotron-H.
pub(super) const NEMOTRON_H: Architecture = Architecture {
    name: "nemotron_h",
    spec: nemotron_h,
};

/// Nemotron 3 with experts.
pub(super) const NEMOTRON_H_MOE: Architecture = Architecture {
    name: "nemotron_h_moe",
    spec: nemotron_h,
};
