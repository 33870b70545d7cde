//! Projectors: from the results of the layers to rows for the language model.

use super::VitBuilder;
use crate::projector::Projector;
use samite_core::{Result, TensorId, Unary};

/// Epsilon of Gemma 3's norm before the matrix of its projector.
const SOFT_NORM_EPS: f32 = 1e-6;

/// Epsilon of LayerNorm in PyTorch, unless a model has its own.
const LAYER_NORM_EPS: f32 = 1e-5;

impl VitBuilder<'_> {
    /// Puts the patches that become one row side by side.
    fn merged(&mut self, x: TensorId) -> Result<TensorId> {
        let count = self.spec.merge * self.spec.merge;
        let shape = [self.spec.n_embd * count, self.order.len() / count, 1, 1];
        self.graph.reshape(x, shape)
    }

    /// Puts the patches that become one row side by side, with the same element of all patches
    /// first, as unfolding does.
    fn merged_by_element(&mut self, x: TensorId) -> Result<TensorId> {
        let count = self.spec.merge * self.spec.merge;
        let (width, rows) = (self.spec.n_embd, self.order.len() / count);
        let x = self.graph.reshape(x, [width, count, rows, 1])?;
        let x = self.graph.permute(x, [1, 0, 2, 3])?;
        let x = self.graph.cont(x)?;
        self.graph.reshape(x, [width * count, rows, 1, 1])
    }

    /// Applies two layers with the exact GELU, which projectors use.
    fn mlp(&mut self, x: TensorId, [first, second]: [&str; 2]) -> Result<TensorId> {
        let inner = self.linear(x, first)?;
        let inner = self.graph.unary(inner, Unary::GeluErf)?;
        self.linear(inner, second)
    }

    /// Returns the rows for a layer of the language model.
    pub fn deepstack(&mut self, x: TensorId, layer: usize) -> Result<TensorId> {
        let prefix = format!("v.deepstack.{layer}");
        let x = self.merged(x)?;
        let x = self.norm(x, &format!("{prefix}.norm"))?;
        self.mlp(x, [&format!("{prefix}.fc1"), &format!("{prefix}.fc2")])
    }

    pub fn projected(&mut self, x: TensorId) -> Result<TensorId> {
        match self.spec.projector {
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl => {
                let x = self.norm(x, "v.post_ln")?;
                let x = self.merged(x)?;
                self.mlp(x, ["mm.0", "mm.2"])
            }
            Projector::Idefics3 => {
                let x = self.norm(x, "v.post_ln")?;
                let x = self.merged(x)?;
                self.product(x, "mm.model.fc.weight")
            }
            Projector::InternVl => {
                let x = self.merged(x)?;
                let x = self.graph.norm(x, LAYER_NORM_EPS)?;
                let x = self.scaled(x, "mm.model.mlp.0")?;
                self.mlp(x, ["mm.model.mlp.1", "mm.model.mlp.3"])
            }
            Projector::Pixtral => {
                let x = if self.spec.merge > 1 {
                    let x = self.norm(x, "mm.input_norm")?;
                    let x = self.merged_by_element(x)?;
                    self.product(x, "mm.patch_merger.weight")?
                } else {
                    x
                };
                self.mlp(x, ["mm.1", "mm.2"])
            }
            Projector::Mlp => {
                let x = if self.weights.get("v.post_ln.weight").is_some() {
                    self.norm(x, "v.post_ln")?
                } else {
                    x
                };
                self.mlp(x, ["mm.0", "mm.2"])
            }
            Projector::Lfm2 => {
                let x = self.norm(x, "v.post_ln")?;
                let mut x = self.merged(x)?;
                if self.weights.get("mm.input_norm.weight").is_some() {
                    x = self.graph.norm(x, LAYER_NORM_EPS)?;
                    x = self.scaled(x, "mm.input_norm")?;
                }
                self.mlp(x, ["mm.1", "mm.2"])
            }
            Projector::Gemma3 => {
                let x = self.norm(x, "v.post_ln")?;
                let x = self.pooled(x)?;
                let x = self.graph.rms_norm(x, SOFT_NORM_EPS)?;
                let scale = self.vector(x, "mm.soft_emb_norm.weight")?;
                let x = self.graph.mul(x, scale)?;
                self.product(x, "mm.input_projection.weight")
            }
            Projector::Gemma4V => {
                let x = self.pooled(x)?;
                let mut x = self.graph.scale(x, (self.spec.n_embd as f32).sqrt())?;
                if self.weights.get("v.std_bias").is_some() {
                    let bias = self.vector(x, "v.std_bias")?;
                    x = self.graph.sub(x, bias)?;
                    let scale = self.vector(x, "v.std_scale")?;
                    x = self.graph.mul(x, scale)?;
                }
                let x = self.graph.rms_norm(x, self.spec.eps)?;
                self.product(x, "mm.input_projection.weight")
            }
        }
    }

    /// Returns the means of the patches that become one row.
    fn pooled(&mut self, x: TensorId) -> Result<TensorId> {
        let count = self.spec.merge * self.spec.merge;
        let rows = self.order.len() / count;
        let x = self.merged_by_element(x)?;
        let x = self.graph.reshape(x, [count, self.spec.n_embd, rows, 1])?;
        let x = self.graph.mean(x)?;
        self.graph.reshape(x, [self.spec.n_embd, rows, 1, 1])
    }
}
