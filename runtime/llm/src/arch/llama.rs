//! Llama, and the many models of the same shape: Mistral, Mixtral, TinyLlama, SmolLM, ...

use super::{Architecture, Bias, Blocks, TensorList, WeightUse};
use crate::hparams::ExpertUse;
use crate::rules::Role;
use samite_core::{Result, RopeMode};

#[derive(Debug)]
pub(super) struct Llama;

impl Architecture for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn rope_mode(&self) -> RopeMode {
        RopeMode::Normal
    }

    fn expert_use(&self) -> ExpertUse {
        ExpertUse::Maybe
    }

    fn tensors(&self, list: &mut TensorList<'_>) {
        list.embedding_and_output();
        // Llama 3.1 and later stretch their frequencies unevenly.
        let pairs = [list.hparams.rope_dims / 2, 1];
        let role = Role::Layer(0);
        list.allow(
            "rope_freqs.weight".to_owned(),
            pairs,
            role,
            WeightUse::RopeDivisors,
        );
        for il in 0..list.hparams.n_layer() {
            list.decoder_layer(il, Bias::Optional);
        }
    }

    fn build(&self, b: &mut Blocks<'_>) -> Result<()> {
        let divisors = b.optional_weight("rope_freqs.weight")?;
        let mut x = b.embedding()?;
        for il in b.layers() {
            let normed = b.norm(x, "attn_norm", il)?;
            let (q, [k, v]) = b.queries_keys_values(normed, il)?;
            let k = b.rope(k, divisors, "Kcur", il)?;
            b.store(k, v, il)?;
            let Some(q) = q else {
                return Ok(());
            };
            let q = b.rope(q, divisors, "Qcur", il)?;
            let attended = b.attention(q, il)?;
            x = b.rest_of_layer(attended, x, il)?;
        }
        b.output(x)
    }
}
