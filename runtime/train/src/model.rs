//! The model that is trained, or whose adapter is: llama's architecture over whole texts, without a
//! cache.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use samite_core::{DType, Graph, Shape, TensorId};
use samite_gguf::{KEY_ARCHITECTURE, Metadata};
use samite_llm::adapter::{SUFFIX_A, SUFFIX_B};
use samite_llm::arch::Spec;
use samite_llm::arch::spec::{
    Activation, Attention, Linear, Mixer, Mlp, Norm, NormKind, Projection, RopeFactors, SubLayer,
};
use std::collections::BTreeMap;

/// Architecture of models that are trained from scratch.
const ARCHITECTURE: &str = "llama";

/// One parameter of a model: its name in files, its shape, and its initialization.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// llama.cpp's name.
    pub name: String,
    /// Extents, innermost first.
    pub shape: Shape,
    /// Deviation of the initial weights, which are zeros for 0. `None` initializes to ones.
    pub deviation: Option<f32>,
    /// Layer of the parameter.
    pub layer: Option<usize>,
}

impl ParameterSpec {
    /// Returns whether the parameter is a matrix, to which weight decay applies.
    pub fn is_matrix(&self) -> bool {
        self.deviation.is_some()
    }
}

impl ModelConfig {
    /// Returns all parameters, in the order in which they are written.
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
        // Matrices whose products are added to the residual stream start small, so that it does not
        // grow with depth.
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

    /// Returns the structure of the model.
    ///
    /// # Errors
    /// Returns an error if the numbers contradict each other.
    pub fn spec(&self) -> Result<Spec> {
        Ok(Spec::from_metadata(&self.metadata()?, usize::MAX, &|_| {
            false
        })?)
    }

    /// Returns the metadata of a model's file that describe its shape.
    ///
    /// # Errors
    /// Returns an error if a key cannot be set.
    pub fn metadata(&self) -> Result<Metadata> {
        let mut metadata = Metadata::new();
        metadata.set(KEY_ARCHITECTURE, ARCHITECTURE)?;
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
            metadata.set(&format!("{ARCHITECTURE}.{key}"), value)?;
        }
        metadata.set("llama.rope.freq_base", self.rope_base)?;
        metadata.set("llama.attention.layer_norm_rms_epsilon", self.norm_eps)?;
        Ok(metadata)
    }
}

/// Values that a model's graph needs in addition to its weights and tokens, and that are the same
/// in each run.
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// 0, 1, …: i32 `[context]`.
    pub positions: TensorId,
    /// 0 if a token sees another one, else minus infinity: f16 `[context, context]`.
    pub mask: TensorId,
    /// Ones: f32 `[1, context · batch]`.
    pub ones: TensorId,
}

/// Inputs for building a graph of a model.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Structure of the model.
    pub spec: &'a Spec,
    /// Number of tokens of a text that are seen together.
    pub context: usize,
    /// Number of texts.
    pub batch: usize,
    /// Weights by llama.cpp's names, and those of an adapter. Without an output matrix, the
    /// embedding table is used instead.
    pub weights: &'a BTreeMap<String, TensorId>,
    /// Factor of the adapter's products: its alpha divided by its rank.
    pub adapter_factor: f32,
    /// Values that are the same in each run.
    pub constants: Constants,
}

/// Inputs and results of a model's graph.
#[derive(Clone, Debug)]
pub struct Forward {
    /// Token ids, text after text: i32 `[context · batch]`.
    pub tokens: TensorId,
    /// Index of the next token's logit among all logits, for each token, `vocabulary · i + id`: i64
    /// `[context · batch]`.
    pub targets: TensorId,
    /// Input of the first layer, and result of each layer: f32 `[width, context · batch]`.
    pub layers: Vec<TensorId>,
    /// Logits: f32 `[vocabulary, context · batch]`.
    pub logits: TensorId,
    /// Cross entropy in nats per token, one element.
    pub loss: TensorId,
}

impl Forward {
    /// Appends a model and its loss to `graph`.
    ///
    /// # Errors
    /// Returns an error if a parameter is missing or operands do not match.
    pub fn append(graph: &mut Graph, parts: Parts<'_>) -> Result<Self> {
        let count = parts.context * parts.batch;
        let mut model = ModelGraphBuilder {
            graph,
            parts,
            prefix: String::new(),
        };
        let tokens = model.graph.input("tokens", DType::I32, [count, 1, 1, 1])?;
        let targets = model.graph.input("targets", DType::I64, [count, 1, 1, 1])?;
        let embedding = model.weight("token_embd.weight")?;
        let mut x = model.graph.get_rows(embedding, tokens)?;
        let mut layers = vec![x];
        for layer in &parts.spec.layers {
            model.prefix = format!("blk.{}.", layer.block);
            for part in &layer.parts {
                x = model.part(x, part)?;
            }
            layers.push(x);
        }
        model.prefix.clear();
        let head = &parts.spec.head;
        let normed = model.maybe_norm(x, &head.norm)?;
        let output = match (&head.output, model.optional("output.weight")) {
            (None, _) => return unknown("no logits"),
            (Some(output), Some(_)) => output.name,
            (Some(_), None) => "token_embd",
        };
        let logits = model.product(normed, output)?;
        model.graph.set_name(logits, "logits");
        let labels = model.labels(logits, targets)?;
        let loss = model.graph.cross_entropy_loss(logits, labels)?;
        model.graph.set_name(loss, "loss");
        Ok(Forward {
            tokens,
            targets,
            layers,
            logits,
            loss,
        })
    }
}

struct ModelGraphBuilder<'a> {
    graph: &'a mut Graph,
    parts: Parts<'a>,
    /// Prefix of the names of a layer's tensors.
    prefix: String,
}

/// Creates the error for a construct without known gradients.
fn unknown<T>(part: &str) -> Result<T> {
    Err(Error::config(format!(
        "the model has {part}: it cannot be trained, nor an adapter of it"
    )))
}

impl ModelGraphBuilder<'_> {
    fn optional(&self, name: &str) -> Option<TensorId> {
        self.parts.weights.get(name).copied()
    }

    fn weight(&self, name: &str) -> Result<TensorId> {
        let known = self.optional(name);
        known.ok_or_else(|| Error::config(format!("the model has no parameter '{name}'")))
    }

    fn norm(&mut self, x: TensorId, norm: &Norm) -> Result<TensorId> {
        let NormKind::Rms(eps) = norm.kind else {
            return unknown("norms that shift the mean");
        };
        let scale = self.weight(&format!("{}{}.weight", self.prefix, norm.name))?;
        let normed = self.graph.rms_norm(x, eps)?;
        Ok(self.graph.mul(normed, scale)?)
    }

    fn maybe_norm(&mut self, x: TensorId, norm: &Option<Norm>) -> Result<TensorId> {
        match norm {
            Some(norm) => self.norm(x, norm),
            None => Ok(x),
        }
    }

    /// Returns the residual stream after a sub-layer.
    fn part(&mut self, x: TensorId, part: &SubLayer) -> Result<TensorId> {
        let normed = self.maybe_norm(x, &part.norm)?;
        let [branch] = &part.branches[..] else {
            return unknown("parts side by side");
        };
        let result = match &branch.mixer {
            Mixer::Attention(attention) => self.attention(normed, attention)?,
            Mixer::Mlp(mlp) => self.feed_forward(normed, mlp)?,
            _ => return unknown("parts other than attention and gated units"),
        };
        Ok(self.graph.add(x, result)?)
    }

    fn linear(&mut self, x: TensorId, linear: &Linear) -> Result<TensorId> {
        self.product(x, &format!("{}{}", self.prefix, linear.name))
    }

    /// Returns the product with the matrix called `part`, including the adapter's change and the
    /// bias.
    fn product(&mut self, x: TensorId, part: &str) -> Result<TensorId> {
        let name = format!("{part}.weight");
        let weights = self.weight(&name)?;
        let mut y = self.graph.mul_mat(weights, x)?;
        self.graph.set_name(y, part);
        if let Some(a) = self.optional(&format!("{name}{SUFFIX_A}")) {
            let b = self.weight(&format!("{name}{SUFFIX_B}"))?;
            let inner = self.graph.mul_mat(a, x)?;
            let change = self.graph.mul_mat(b, inner)?;
            let change = self.graph.scale(change, self.parts.adapter_factor)?;
            y = self.graph.add(y, change)?;
        }
        if let Some(bias) = self.optional(&format!("{part}.bias")) {
            y = self.graph.add(y, bias)?;
        }
        Ok(y)
    }

    /// Splits rows into heads, `[head, tokens, heads, batch]`, and rotates them by their positions
    /// if `turned_by` is set.
    fn heads(
        &mut self,
        x: TensorId,
        [size, heads]: [usize; 2],
        turned_by: Option<&Attention>,
    ) -> Result<TensorId> {
        let Parts { context, batch, .. } = self.parts;
        let mut x = self.graph.reshape(x, [size, heads, context, batch])?;
        if let Some(rotation) = turned_by.and_then(|attention| attention.rotation.as_ref()) {
            let rope_factors = match rotation.rope_factors {
                RopeFactors::None => None,
                RopeFactors::Frequencies => self.optional("rope_freqs.weight"),
                RopeFactors::LongShort { .. } => return unknown("two sets of frequencies"),
                RopeFactors::Yarn(_) => return unknown("YaRN without rounding"),
            };
            let positions = self.parts.constants.positions;
            x = self.graph.rope(x, positions, rope_factors, rotation.rope)?;
        }
        Ok(self.graph.permute(x, [0, 2, 1, 3])?)
    }

    fn attention(&mut self, x: TensorId, attention: &Attention) -> Result<TensorId> {
        let Projection::Separate {
            q,
            kv: Some((k, Some(v))),
        } = &attention.projection
        else {
            return unknown("attention whose queries, keys and values have no matrix each");
        };
        if attention.norms.iter().any(Option::is_some) {
            return unknown("norms of queries and keys");
        }
        if attention.is_bidirectional {
            return unknown("tokens that look at later ones");
        }
        let (q, k, v) = (self.linear(x, q)?, self.linear(x, k)?, self.linear(x, v)?);
        let Attention {
            n_head,
            n_head_kv,
            head_k,
            head_v,
            ..
        } = *attention;
        let q = self.heads(q, [head_k, n_head], Some(attention))?;
        let k = self.heads(k, [head_k, n_head_kv], Some(attention))?;
        let v = self.heads(v, [head_v, n_head_kv], None)?;
        let mask = Some(self.parts.constants.mask);
        let seen = self
            .graph
            .flash_attn([q, k, v], mask, None, attention.scale)?;
        let count = self.parts.context * self.parts.batch;
        let seen = self.graph.reshape(seen, [head_v * n_head, count, 1, 1])?;
        self.linear(seen, &attention.output)
    }

    fn feed_forward(&mut self, x: TensorId, mlp: &Mlp) -> Result<TensorId> {
        let (Activation::Gated(kind), Some(gate)) = (mlp.activation, &mlp.gate) else {
            return unknown("feed-forward parts without gates");
        };
        let gate = self.linear(x, gate)?;
        let up = self.linear(x, &mlp.up)?;
        let inner = self.graph.glu_split(gate, up, kind)?;
        self.linear(inner, &mlp.down)
    }

    /// Returns 1 for the next token of each token, 0 for all others.
    fn labels(&mut self, logits: TensorId, targets: TensorId) -> Result<TensorId> {
        let shape = self.graph.tensor(logits).layout.shape();
        let zeros = self.graph.fill(logits, 0.0)?;
        let list = self.graph.reshape(zeros, [1, shape[0] * shape[1], 1, 1])?;
        let labels = self
            .graph
            .set_rows(self.parts.constants.ones, targets, list)?;
        Ok(self.graph.reshape(labels, shape)?)
    }
}
