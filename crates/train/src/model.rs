//! The model that is trained: llama's architecture over whole texts, without a cache.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use samite_core::{DType, Glu, Graph, Rope, RopeMode, Shape, TensorId};
use samite_gguf::{KEY_ARCHITECTURE, Metadata};
use std::collections::HashMap;

/// One parameter of a model: its name in files, its shape, and how it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// llama.cpp's name.
    pub name: String,
    /// Extents, innermost first.
    pub shape: Shape,
    /// Deviation of the initial weights; `None` for ones.
    pub deviation: Option<f32>,
    /// The layer that it belongs to.
    pub layer: Option<usize>,
}

impl ParameterSpec {
    /// Whether it is a matrix: what weight decay is for.
    pub fn is_matrix(&self) -> bool {
        self.deviation.is_some()
    }
}

impl ModelConfig {
    /// All parameters, in the order in which they are written.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let (width, kv) = (self.width, self.kv_heads * self.head());
        let matrix =
            |layer, name: String, inputs: usize, outputs: usize, scale: f32| ParameterSpec {
                name,
                shape: [inputs, outputs, 1, 1],
                deviation: Some(scale / (inputs as f32).sqrt()),
                layer,
            };
        let norm = |layer, name: String| ParameterSpec {
            name,
            shape: [width, 1, 1, 1],
            deviation: None,
            layer,
        };
        let mut all = vec![matrix(
            None,
            "token_embd.weight".into(),
            width,
            self.vocabulary,
            0.5,
        )];
        // What is added to the residual stream starts small, so that depth does not make it grow.
        let added = (2.0 * self.layers as f32).sqrt().recip();
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let layer = Some(layer);
            all.push(norm(layer, name("attn_norm")));
            all.push(matrix(layer, name("attn_q"), width, width, 1.0));
            all.push(matrix(layer, name("attn_k"), width, kv, 1.0));
            all.push(matrix(layer, name("attn_v"), width, kv, 1.0));
            all.push(matrix(layer, name("attn_output"), width, width, added));
            all.push(norm(layer, name("ffn_norm")));
            all.push(matrix(
                layer,
                name("ffn_gate"),
                width,
                self.feed_forward,
                1.0,
            ));
            all.push(matrix(layer, name("ffn_up"), width, self.feed_forward, 1.0));
            all.push(matrix(
                layer,
                name("ffn_down"),
                self.feed_forward,
                width,
                added,
            ));
        }
        all.push(norm(None, "output_norm.weight".into()));
        all
    }

    /// What a model's file says about its shape.
    ///
    /// # Errors
    /// If a key cannot be set.
    pub fn metadata(&self) -> Result<Metadata> {
        let mut metadata = Metadata::new();
        metadata.set(KEY_ARCHITECTURE, "llama")?;
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.width),
            ("feed_forward_length", self.feed_forward),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("rope.dimension_count", self.head()),
            ("vocab_size", self.vocabulary),
        ] {
            let value = u32::try_from(value)
                .map_err(|_| Error::config(format!("{key} of {value} is too large")))?;
            metadata.set(&format!("llama.{key}"), value)?;
        }
        metadata.set("llama.rope.freq_base", self.rope_base)?;
        metadata.set("llama.attention.layer_norm_rms_epsilon", self.norm_eps)?;
        Ok(metadata)
    }
}

/// The values that a model's graph needs beside its weights and tokens: the same in each run.
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// 0, 1, …: i32 `[context]`.
    pub positions: TensorId,
    /// 0 where a token sees another one, minus infinity elsewhere: f32 `[context, context]`.
    pub mask: TensorId,
    /// Ones: f32 `[1, context · batch]`.
    pub ones: TensorId,
}

/// The inputs and results of a model's graph.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// Token ids, text after text: i32 `[context · batch]`.
    pub tokens: TensorId,
    /// For each token, where among all logits that of the next one is, `vocabulary · i + id`: i64 `[context · batch]`.
    pub targets: TensorId,
    /// f32 `[vocabulary, context · batch]`.
    pub logits: TensorId,
    /// Cross entropy in nats per token, one element.
    pub loss: TensorId,
}

impl Forward {
    /// Appends the model and its loss to `graph`; `weights` are the parameters by name.
    ///
    /// # Errors
    /// If a parameter is missing or operands do not fit.
    pub fn append(
        graph: &mut Graph,
        config: &ModelConfig,
        batch: usize,
        weights: &HashMap<String, TensorId>,
        constants: Constants,
    ) -> Result<Self> {
        let count = config.context * batch;
        let mut model = Builder {
            graph,
            config,
            batch,
            weights,
            constants,
        };
        let tokens = model.graph.input("tokens", DType::I32, [count, 1, 1, 1])?;
        let targets = model.graph.input("targets", DType::I64, [count, 1, 1, 1])?;
        let embedding = model.weight("token_embd.weight")?;
        let mut x = model.graph.get_rows(embedding, tokens)?;
        for layer in 0..config.layers {
            let part = model.attention(x, layer)?;
            x = model.graph.add(x, part)?;
            let part = model.feed_forward(x, layer)?;
            x = model.graph.add(x, part)?;
        }
        let normed = model.norm(x, "output_norm.weight")?;
        let logits = model.graph.mul_mat(embedding, normed)?;
        model.graph.set_name(logits, "logits");
        let labels = model.labels(logits, targets)?;
        let loss = model.graph.cross_entropy_loss(logits, labels)?;
        model.graph.set_name(loss, "loss");
        Ok(Forward {
            tokens,
            targets,
            logits,
            loss,
        })
    }
}

struct Builder<'a> {
    graph: &'a mut Graph,
    config: &'a ModelConfig,
    batch: usize,
    weights: &'a HashMap<String, TensorId>,
    constants: Constants,
}

impl Builder<'_> {
    fn weight(&self, name: &str) -> Result<TensorId> {
        let known = self.weights.get(name).copied();
        known.ok_or_else(|| Error::config(format!("the model has no parameter '{name}'")))
    }

    fn norm(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let scale = self.weight(name)?;
        let normed = self.graph.rms_norm(x, self.config.norm_eps)?;
        Ok(self.graph.mul(normed, scale)?)
    }

    fn product(&mut self, x: TensorId, part: &str, layer: usize) -> Result<TensorId> {
        let weights = self.weight(&format!("blk.{layer}.{part}.weight"))?;
        let y = self.graph.mul_mat(weights, x)?;
        self.graph.set_name(y, format!("{part}-{layer}"));
        Ok(y)
    }

    /// Splits rows into heads: `[head, tokens, heads, batch]`.
    fn heads(&mut self, x: TensorId, heads: usize, turned: bool) -> Result<TensorId> {
        let shape = [self.config.head(), heads, self.config.context, self.batch];
        let mut x = self.graph.reshape(x, shape)?;
        if turned {
            let rope = Rope::new(self.config.head(), RopeMode::Normal, self.config.rope_base);
            x = self.graph.rope(x, self.constants.positions, None, rope)?;
        }
        Ok(self.graph.permute(x, [0, 2, 1, 3])?)
    }

    fn attention(&mut self, x: TensorId, layer: usize) -> Result<TensorId> {
        let normed = self.norm(x, &format!("blk.{layer}.attn_norm.weight"))?;
        let q = self.product(normed, "attn_q", layer)?;
        let k = self.product(normed, "attn_k", layer)?;
        let v = self.product(normed, "attn_v", layer)?;
        let q = self.heads(q, self.config.heads, true)?;
        let k = self.heads(k, self.config.kv_heads, true)?;
        let v = self.heads(v, self.config.kv_heads, false)?;
        let scores = self.graph.mul_mat(k, q)?;
        let scale = (self.config.head() as f32).sqrt().recip();
        let mask = Some(self.constants.mask);
        let shares = self.graph.soft_max(scores, mask, None, scale, 0.0)?;
        // The sum of values, each times its share, is a product with the transposed values.
        let turned = self.graph.transpose(shares)?;
        let seen = self.graph.out_prod(v, turned)?;
        let seen = self.graph.permute(seen, [0, 2, 1, 3])?;
        let seen = self.graph.cont(seen)?;
        let count = self.config.context * self.batch;
        let seen = self.graph.reshape(seen, [self.config.width, count, 1, 1])?;
        self.product(seen, "attn_output", layer)
    }

    fn feed_forward(&mut self, x: TensorId, layer: usize) -> Result<TensorId> {
        let normed = self.norm(x, &format!("blk.{layer}.ffn_norm.weight"))?;
        let gate = self.product(normed, "ffn_gate", layer)?;
        let up = self.product(normed, "ffn_up", layer)?;
        let inner = self.graph.glu_split(gate, up, Glu::Swiglu)?;
        self.product(inner, "ffn_down", layer)
    }

    /// 1 for the next token of each, 0 for all others.
    fn labels(&mut self, logits: TensorId, targets: TensorId) -> Result<TensorId> {
        let shape = self.graph.tensor(logits).layout.shape();
        let zeros = self.graph.fill(logits, 0.0)?;
        let list = self.graph.reshape(zeros, [1, shape[0] * shape[1], 1, 1])?;
        let labels = self.graph.set_rows(self.constants.ones, targets, list)?;
        Ok(self.graph.reshape(labels, shape)?)
    }
}
