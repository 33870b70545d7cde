//! Qwen2 and Qwen2.5: biases on queries, keys and values; rotation by halves.

use super::{Architecture, Bias, Blocks, TensorList};
use samite_core::{Result, RopeMode};

#[derive(Debug)]
pub(super) struct Qwen2;

impl Architecture for Qwen2 {
    fn name(&self) -> &'static str {
        "qwen2"
    }

    fn rope_mode(&self) -> RopeMode {
        RopeMode::Neox
    }

    fn tensors(&self, list: &mut TensorList<'_>) {
        list.embedding_and_output();
        for il in 0..list.hparams.n_layer() {
            list.decoder_layer(il, Bias::Required);
        }
    }

    fn build(&self, b: &mut Blocks<'_>) -> Result<()> {
        let mut x = b.embedding()?;
        for il in b.layers() {
            let normed = b.norm(x, "attn_norm", il)?;
            let (q, [k, v]) = b.queries_keys_values(normed, il)?;
            let k = b.rope(k, None, "Kcur", il)?;
            b.store(k, v, il)?;
            let Some(q) = q else {
                return Ok(());
            };
            let q = b.rope(q, None, "Qcur", il)?;
            let attended = b.attention(q, il)?;
            x = b.rest_of_layer(attended, x, il)?;
        }
        b.output(x)
    }
}
