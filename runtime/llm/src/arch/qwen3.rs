//! Qwen3: every head of queries and keys is normalised before its rotation; heads may be wider than the model / heads.

use super::{Architecture, Bias, Blocks, TensorList};
use samite_core::{Result, RopeMode};

#[derive(Debug)]
pub(super) struct Qwen3;

/// The tensors of Qwen3, with experts or without.
pub(super) fn tensors(list: &mut TensorList<'_>) {
    list.embedding_and_output();
    for il in 0..list.hparams.n_layer() {
        list.decoder_layer(il, Bias::Optional);
        list.norm(il, "attn_q_norm", list.hparams.head_dim_k);
        list.norm(il, "attn_k_norm", list.hparams.head_dim_k);
    }
}

/// The graph of Qwen3, with experts or without.
pub(super) fn build(b: &mut Blocks<'_>) -> Result<()> {
    let mut x = b.embedding()?;
    for il in b.layers() {
        let normed = b.norm(x, "attn_norm", il)?;
        let (q, [k, v]) = b.queries_keys_values(normed, il)?;
        let k = b.norm(k, "attn_k_norm", il)?;
        let k = b.rope(k, None, "Kcur", il)?;
        b.store(k, v, il)?;
        let Some(q) = q else {
            return Ok(());
        };
        let q = b.norm(q, "attn_q_norm", il)?;
        let q = b.rope(q, None, "Qcur", il)?;
        let attended = b.attention(q, il)?;
        x = b.rest_of_layer(attended, x, il)?;
    }
    b.output(x)
}

impl Architecture for Qwen3 {
    fn name(&self) -> &'static str {
        "qwen3"
    }

    fn rope_mode(&self) -> RopeMode {
        RopeMode::Neox
    }

    fn tensors(&self, list: &mut TensorList<'_>) {
        tensors(list);
    }

    fn build(&self, b: &mut Blocks<'_>) -> Result<()> {
        build(b)
    }
}
