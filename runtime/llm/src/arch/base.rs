//! The metadata that most architectures read in the same way, and the building blocks of layers.

pub(super) mod outputs;

use super::keys::{Keys, check_count};
use super::spec::{
    Activation, Attention, Embedding, Experts, Head, IgnoredTensors, Layer, Linear, Mixer, Mlp,
    Norm, NormKind, NormOver, Presence, Projection, RopeFactors, Rotation, RouterInput, Routing,
    Span, Spec, SubLayer,
};
use crate::error::{Error, Result};
use samite_core::{Glu, Rope, RopeMode, Unary};
use samite_gguf::StringArray;

/// The parameters that nearly every architecture has, and the building blocks that derive from
/// them. The blocks are those of Llama; an architecture changes what differs.
#[derive(Debug)]
pub struct Base<'a> {
    /// Metadata of the file.
    pub keys: &'a Keys<'a>,
    /// Size of the vocabulary.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Number of layers, without MTP layers.
    pub n_layer: usize,
    /// Number of MTP layers, which are not used.
    pub n_mtp_layers: usize,
    /// Number of query heads by layer; 0 in layers without attention.
    pub heads: Vec<usize>,
    /// Number of key and value heads by layer.
    pub heads_kv: Vec<usize>,
    /// Width of the feed-forward network by layer; 0 in layers without one. Absent if the file does
    /// not specify it.
    pub widths: Option<Vec<usize>>,
    /// Elements of a query or key head.
    pub head_k: usize,
    /// Elements of a value head.
    pub head_v: usize,
    /// Normalization function.
    pub norm: NormKind,
    /// Presence of biases in norms.
    pub norm_bias: Presence,
    /// Presence of biases in linear layers.
    pub bias: Presence,
    /// Rotation of queries and keys.
    pub rope: Rope,
}

/// Key of the epsilon of RMSNorm.
const RMS_EPSILON: &str = "attention.layer_norm_rms_epsilon";
/// Key of the epsilon of LayerNorm.
const LAYER_EPSILON: &str = "attention.layer_norm_epsilon";

impl<'a> Base<'a> {
    /// Reads the parameters of a model with RMSNorm whose heads are rotated by `mode`.
    ///
    /// # Errors
    /// Returns an error if a key is missing or has another type, or if a number is zero, absurd or
    /// contradicts another. The message names the key.
    pub fn read(keys: &'a Keys<'a>, mode: RopeMode) -> Result<Self> {
        let norm = NormKind::Rms(keys.epsilon(RMS_EPSILON)?);
        Self::with_norm(keys, mode, norm)
    }

    /// Reads the parameters of a model with LayerNorm, with scales and biases.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read).
    pub fn read_layer_norm(keys: &'a Keys<'a>, mode: RopeMode) -> Result<Self> {
        let norm = NormKind::Layer(keys.epsilon(LAYER_EPSILON)?);
        Ok(Base {
            norm_bias: Presence::Optional,
            ..Self::with_norm(keys, mode, norm)?
        })
    }

    fn with_norm(keys: &'a Keys<'a>, mode: RopeMode, norm: NormKind) -> Result<Self> {
        let n_layer = keys.require_extent("block_count")?;
        if n_layer > keys.n_tensors() {
            return Err(keys.error(
                "block_count",
                format_args!(
                    "is {n_layer}, but the file has {} tensors: too few for so many layers",
                    keys.n_tensors()
                ),
            ));
        }
        let n_mtp_layers = keys.count("nextn_predict_layers")?.unwrap_or(0);
        if n_mtp_layers >= n_layer {
            return Err(keys.error(
                "nextn_predict_layers",
                format_args!("is {n_mtp_layers}, but there are only {n_layer} layers"),
            ));
        }
        let n_embd = keys.require_extent("embedding_length")?;
        let heads = match keys.counts("attention.head_count", n_layer)? {
            Some(heads) => heads,
            None => vec![keys.require_extent("attention.head_count")?; n_layer],
        };
        let heads_kv = keys.counts("attention.head_count_kv", n_layer)?;
        let most_heads = heads.iter().copied().max().unwrap_or(0);
        keys.at_least_1("attention.head_count", most_heads)?;
        let head = |name: &str| -> Result<usize> {
            match keys.extent(name)? {
                Some(size) => Ok(size),
                None if n_embd.is_multiple_of(most_heads) => Ok(n_embd / most_heads),
                None => Err(keys.error(
                    "embedding_length",
                    format_args!(
                        "{n_embd} is not a multiple of {most_heads} heads, and \"{}\" is missing",
                        keys.key(name)
                    ),
                )),
            }
        };
        let (head_k, head_v) = (
            head("attention.key_length")?,
            head("attention.value_length")?,
        );
        for (size, name) in [(head_k, "key"), (head_v, "value")] {
            let name = keys.key(&format!("attention.{name}_length (times heads)"));
            check_count(&name, most_heads as u64 * size as u64)?;
        }
        let n_ctx_train = keys.require_extent("context_length")?;
        Ok(Base {
            n_vocab: n_vocab(keys)?,
            n_embd,
            n_ctx_train,
            n_layer: n_layer - n_mtp_layers,
            n_mtp_layers,
            heads_kv: heads_kv.unwrap_or_else(|| heads.clone()),
            heads,
            widths: keys.counts("feed_forward_length", n_layer)?,
            head_k,
            head_v,
            norm,
            norm_bias: Presence::Absent,
            bias: Presence::Optional,
            rope: rope(keys, mode, head_k, n_ctx_train)?,
            keys,
        })
    }

    /// Creates a decoder with the layers that `layer` returns for each index.
    ///
    /// # Errors
    /// Returns the errors of `layer`.
    pub fn decoder(&self, mut layer: impl FnMut(usize) -> Result<Layer>) -> Result<Spec> {
        Ok(Spec {
            n_vocab: self.n_vocab,
            n_deepstack: 0,
            n_embd: self.n_embd,
            n_ctx_train: self.n_ctx_train,
            embedding: Embedding::default(),
            layers: (0..self.n_layer).map(&mut layer).collect::<Result<_>>()?,
            altup: None,
            head: self.head(),
            pooling: None,
            ignored: IgnoredTensors {
                names: Vec::new(),
                layers: self.n_mtp_layers,
            },
        })
    }

    /// Creates the last norm and the output matrix, which may be the embedding table.
    pub fn head(&self) -> Head {
        Head {
            norm: Some(self.norm("output_norm", self.n_embd)),
            output: Some(
                Linear::new("output", [self.n_embd, self.n_vocab]).bias(Presence::Optional),
            ),
            scale: None,
            softcap: 0.0,
            dense: Vec::new(),
            classifier: None,
        }
    }

    /// Creates a layer from a sequence of sub-layers.
    pub fn layer(&self, block: usize, parts: impl Into<Vec<SubLayer>>) -> Layer {
        Layer {
            block,
            parts: parts.into(),
            scale: None,
            skip: None,
            norm_again: false,
        }
    }

    /// Creates a layer of Llama, with a norm before attention and one before the feed-forward
    /// network.
    pub fn pre_norm(
        &self,
        il: usize,
        attention: Attention,
        feed_forward: impl Into<super::spec::Mixer>,
    ) -> Layer {
        self.layer(
            il,
            [
                SubLayer::new(self.norm("attn_norm", self.n_embd), attention),
                SubLayer::new(self.norm("ffn_norm", self.n_embd), feed_forward),
            ],
        )
    }

    /// Creates a norm of rows of `width` elements.
    pub fn norm(&self, name: &'static str, width: usize) -> Norm {
        Norm {
            name,
            suffix: ".weight",
            extents: [width, 1],
            kind: self.norm,
            weight: Presence::Required,
            bias: self.norm_bias,
        }
    }

    /// Creates a norm without scale.
    pub fn bare_norm(&self, name: &'static str) -> Norm {
        Norm {
            weight: Presence::Absent,
            bias: Presence::Absent,
            ..self.stream_norm(name)
        }
    }

    /// Creates a norm of the residual stream.
    pub fn stream_norm(&self, name: &'static str) -> Norm {
        self.norm(name, self.n_embd)
    }

    /// Creates a linear layer.
    pub fn linear(&self, name: &'static str, extents: [usize; 2]) -> Linear {
        Linear::new(name, extents).bias(self.bias)
    }

    /// Creates the attention of layer `il`, with one matrix for queries, keys and values if the
    /// file has it.
    ///
    /// # Errors
    /// Returns an error if the layer has no heads, or if the number of query heads is not a
    /// multiple of the number of key and value heads.
    pub fn attention(&self, il: usize) -> Result<Attention> {
        let (n_head, n_head_kv) = (self.heads[il], self.heads_kv[il]);
        self.keys.at_least_1("attention.head_count", n_head)?;
        self.keys.at_least_1("attention.head_count_kv", n_head_kv)?;
        if !n_head.is_multiple_of(n_head_kv) {
            return Err(Error::model(format!(
                "keys \"{}\" and \"{}\": {n_head} heads do not share {n_head_kv} key-value heads evenly in layer {il}",
                self.keys.key("attention.head_count"),
                self.keys.key("attention.head_count_kv"),
            )));
        }
        Ok(self.attention_of([n_head, n_head_kv], [self.head_k, self.head_v], il))
    }

    /// Creates the attention of layer `il` with a norm of every query and key head.
    ///
    /// # Errors
    /// Fails like [`attention`](Self::attention).
    pub fn normed_attention(&self, il: usize) -> Result<Attention> {
        let mut attention = self.attention(il)?;
        for (norm, name) in attention
            .norms
            .iter_mut()
            .zip(["attn_q_norm", "attn_k_norm"])
        {
            *norm = Some(self.norm(name, self.head_k));
        }
        Ok(attention)
    }

    /// Creates the attention of layer `il` with a norm over all query heads, and one over all key
    /// heads.
    ///
    /// # Errors
    /// Fails like [`attention`](Self::attention).
    pub fn token_normed_attention(&self, il: usize) -> Result<Attention> {
        let mut attention = self.attention(il)?;
        attention.norm_over = NormOver::Token;
        let [q, k] = [attention.n_head, attention.n_head_kv].map(|count| count * self.head_k);
        attention.norms[0] = Some(self.norm("attn_q_norm", q));
        attention.norms[1] = Some(self.norm("attn_k_norm", k));
        Ok(attention)
    }

    /// Returns the frequency divisors that files of Llama and similar models may have.
    ///
    /// # Errors
    /// Returns an error if a key has another type.
    pub fn rope_factors(&self) -> Result<RopeFactors> {
        Ok(match self.keys.get::<&str>("rope.scaling.type")? {
            Some("longrope") => self.long_short()?,
            _ => RopeFactors::Frequencies,
        })
    }

    /// Returns separate divisors for contexts that are longer and shorter than the original one.
    ///
    /// # Errors
    /// Returns an error if a key has another type.
    pub fn long_short(&self) -> Result<RopeFactors> {
        let original = self.keys.extent("rope.scaling.original_context_length")?;
        Ok(RopeFactors::LongShort {
            above: original.unwrap_or(self.n_ctx_train),
        })
    }

    /// Returns the scale of the attention logits, if the file specifies it.
    ///
    /// # Errors
    /// Returns an error if the value has another type, is infinite, or is NaN.
    pub fn attention_scale(&self) -> Result<Option<f32>> {
        self.keys.factor("attention.scale")
    }

    /// Returns the size of the attention window, if the file specifies one.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn window(&self) -> Result<Option<usize>> {
        let size = self.keys.count("attention.sliding_window")?;
        Ok(size.filter(|&size| size != 0))
    }

    /// Returns which layers have a window. The file's pattern takes precedence; by default, all
    /// layers but the last of `each` have one, or all but the first if `first` is set.
    ///
    /// # Errors
    /// Returns an error if the value has another type, or if the list is too short.
    pub fn windowed(&self, each: usize, first: bool) -> Result<Vec<bool>> {
        const KEY: &str = "attention.sliding_window_pattern";
        let is_list = self.keys.is_list(KEY);
        let layers = self.n_layer + self.n_mtp_layers;
        let each = match self.keys.flags(KEY, layers) {
            Ok(Some(pattern)) if is_list => return Ok(pattern),
            Err(error) if is_list => return Err(error),
            _ => self.keys.count(KEY)?.unwrap_or(each),
        };
        let windowed = |il: usize| match (each, first) {
            (0, _) => true,
            (each, true) => !il.is_multiple_of(each),
            (each, false) => il % each != each - 1,
        };
        Ok((0..layers).map(windowed).collect())
    }

    /// Returns the rotation of layers with a window. It has its own base, if the file specifies
    /// one. Its scale is that of all layers, or none if `plain` is set.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is not positive.
    pub fn window_rope(&self, plain: bool) -> Result<Rope> {
        let freq_base = self
            .keys
            .positive("rope.freq_base_swa", self.rope.freq_base)?;
        Ok(if plain {
            Rope::new(self.rope.dims, self.rope.mode, freq_base)
        } else {
            Rope {
                freq_base,
                ..self.rope
            }
        })
    }

    /// Creates the attention of layer `block` with these numbers of query heads and of key and
    /// value heads, and these sizes of key heads and of value heads.
    pub fn attention_of(
        &self,
        [n_head, n_head_kv]: [usize; 2],
        [head_k, head_v]: [usize; 2],
        block: usize,
    ) -> Attention {
        let n_embd = self.n_embd;
        let [n_q, n_k, n_v] = [n_head * head_k, n_head_kv * head_k, n_head_kv * head_v];
        let projection = if self
            .keys
            .has_tensor(&format!("blk.{block}.attn_qkv.weight"))
        {
            Projection::Fused(self.linear("attn_qkv", [n_embd, n_q + n_k + n_v]))
        } else {
            Projection::Separate {
                q: self.linear("attn_q", [n_embd, n_q]),
                kv: Some((
                    self.linear("attn_k", [n_embd, n_k]),
                    Some(self.linear("attn_v", [n_embd, n_v])),
                )),
            }
        };
        Attention {
            n_head,
            n_head_kv,
            head_k,
            head_v,
            projection,
            clamp: None,
            norms: [None, None, None],
            norm_over: NormOver::Heads,
            rotation: Some(Rotation {
                rope: self.rope,
                rope_factors: RopeFactors::None,
                axes: None,
            }),
            span: Span::Full,
            is_bidirectional: false,
            are_images_causal: false,
            keys_of: None,
            scale: 1.0 / (head_k as f32).sqrt(),
            softcap: 0.0,
            max_bias: 0.0,
            sinks: None,
            temperature: None,
            gate: None,
            sub_norm: None,
            output: self.linear("attn_output", [n_head * head_v, n_embd]),
        }
    }

    /// Returns the width of the feed-forward network of layer `il`.
    ///
    /// # Errors
    /// Returns an error if the file does not specify it, or if it is 0.
    pub fn width(&self, il: usize) -> Result<usize> {
        const KEY: &str = "feed_forward_length";
        match &self.widths {
            Some(widths) => self.keys.at_least_1(KEY, widths[il]),
            None => self.keys.require_extent(KEY),
        }
    }

    /// Creates the gated feed-forward network of layer `il`.
    ///
    /// # Errors
    /// Fails like [`width`](Self::width).
    pub fn swiglu(&self, il: usize) -> Result<Mlp> {
        Ok(self.gated(
            ["ffn_gate", "ffn_up", "ffn_down"],
            self.width(il)?,
            Glu::Swiglu,
        ))
    }

    /// Creates a gated feed-forward network of `width` with the given names of its matrices.
    pub fn gated(&self, [gate, up, down]: [&'static str; 3], width: usize, glu: Glu) -> Mlp {
        Mlp {
            gate: Some(self.linear(gate, [self.n_embd, width])),
            up: self.linear(up, [self.n_embd, width]),
            activation: Activation::Gated(glu),
            divisor: None,
            sub_norm: None,
            down: self.linear(down, [width, self.n_embd]),
        }
    }

    /// Creates a gated feed-forward network of `width` with one matrix for gate and value.
    pub fn fused_gated(&self, width: usize, glu: Glu) -> Mlp {
        Mlp {
            gate: None,
            up: self.linear("ffn_up", [self.n_embd, 2 * width]),
            activation: Activation::Gated(glu),
            divisor: None,
            sub_norm: None,
            down: self.linear("ffn_down", [width, self.n_embd]),
        }
    }

    /// Creates the feed-forward network of layer `il` without a gate.
    ///
    /// # Errors
    /// Fails like [`width`](Self::width).
    pub fn plain(&self, il: usize, activation: Activation) -> Result<Mlp> {
        let width = self.width(il)?;
        Ok(Mlp {
            gate: None,
            up: self.linear("ffn_up", [self.n_embd, width]),
            activation,
            divisor: None,
            sub_norm: None,
            down: self.linear("ffn_down", [width, self.n_embd]),
        })
    }

    /// Creates the feed-forward network of layer `il` with GELU.
    ///
    /// # Errors
    /// Fails like [`width`](Self::width).
    pub fn gelu(&self, il: usize) -> Result<Mlp> {
        self.plain(il, Activation::Plain(Unary::Gelu))
    }

    /// Returns the number of experts, and of those that a token uses, if the file specifies
    /// experts.
    ///
    /// # Errors
    /// Returns an error if one of the two is missing or 0, or if more experts are used than exist.
    pub fn expert_counts(&self) -> Result<Option<[usize; 2]>> {
        match self.keys.count("expert_count")? {
            None | Some(0) => Ok(None),
            Some(_) => self.require_expert_counts().map(Some),
        }
    }

    /// Returns the number of experts, and of those that a token uses, for an architecture that
    /// always has experts.
    ///
    /// # Errors
    /// Fails like [`expert_counts`](Self::expert_counts), or if the file does not specify experts.
    pub fn require_expert_counts(&self) -> Result<[usize; 2]> {
        let count = self.keys.require_extent("expert_count")?;
        let used = self.keys.require_extent("expert_used_count")?;
        if used > count {
            return Err(self.keys.error(
                "expert_used_count",
                format_args!("is {used}, but there are only {count} experts"),
            ));
        }
        Ok([count, used])
    }

    /// Rejects files with experts, for an architecture that has none.
    ///
    /// # Errors
    /// Returns an error if the file specifies experts.
    pub fn refuse_experts(&self) -> Result<()> {
        match self.keys.count("expert_count")? {
            None | Some(0) => Ok(()),
            Some(count) => Err(self.keys.error(
                "expert_count",
                format_args!(
                    "is {count}: mixtures of experts are not supported for this architecture"
                ),
            )),
        }
    }

    /// Returns the width of an expert, if the file specifies it.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn expert_width(&self) -> Result<Option<usize>> {
        // 0 stands for an unspecified width.
        let width = self.keys.count("expert_feed_forward_length")?;
        Ok(width.filter(|&width| width != 0))
    }

    /// Returns the width of an expert, which the file must specify.
    ///
    /// # Errors
    /// Returns an error if it does not.
    pub fn require_expert_width(&self) -> Result<usize> {
        self.keys.require_extent("expert_feed_forward_length")
    }

    /// Returns the routing function that the file specifies, or `otherwise`.
    ///
    /// # Errors
    /// Returns an error if the function is not supported.
    pub fn routing(&self, otherwise: Routing) -> Result<Routing> {
        const KEY: &str = "expert_gating_func";
        match self.keys.count(KEY)? {
            None | Some(0) => Ok(otherwise),
            Some(1) => Ok(Routing::Softmax),
            Some(2) => Ok(Routing::Sigmoid),
            Some(3) => Ok(Routing::SoftmaxOfChosen),
            Some(4) => Ok(Routing::SqrtSoftplus),
            Some(other) => Err(self
                .keys
                .error(KEY, format_args!("is {other}, must be 1 to 4"))),
        }
    }

    /// Returns the number of dense layers before the first mixture of experts.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn dense_lead(&self) -> Result<usize> {
        Ok(self.keys.count("leading_dense_block_count")?.unwrap_or(0))
    }

    /// Creates a shared expert of `width`, which every token uses.
    pub fn shared_expert(&self, width: usize) -> Mlp {
        let n_embd = self.n_embd;
        Mlp {
            gate: Some(Linear::new("ffn_gate_shexp", [n_embd, width])),
            up: Linear::new("ffn_up_shexp", [n_embd, width]),
            activation: Activation::Gated(Glu::Swiglu),
            divisor: None,
            sub_norm: None,
            down: Linear::new("ffn_down_shexp", [width, n_embd]),
        }
    }

    /// Returns the width of an expert. If the file does not specify it, the width of a feed-forward
    /// network is divided by the number of experts that a token uses.
    ///
    /// # Errors
    /// Fails like [`width`](Self::width).
    pub fn expert_width_or_share(&self, il: usize, used: usize) -> Result<usize> {
        match self.expert_width()? {
            Some(width) => Ok(width),
            None => Ok((self.width(il)? / used).max(1)),
        }
    }

    /// Creates the mixture of experts of layer `il`, with `count` gated experts of `width`. A token
    /// uses `used` of them. The router uses a softmax over all experts, and weights are normalized
    /// to sum to 1. The remaining parameters come from the file.
    ///
    /// # Errors
    /// Returns an error if the groups of experts are invalid, or if a value is not a number.
    pub fn experts(&self, il: usize, [count, used]: [usize; 2], width: usize) -> Result<Experts> {
        let matrix = |name, extents| Linear {
            experts: Some(count),
            ..Linear::new(name, extents)
        };
        let n_embd = self.n_embd;
        let is_fused = self
            .keys
            .has_tensor(&format!("blk.{il}.ffn_gate_up_exps.weight"));
        let (gate, up) = if is_fused {
            (None, matrix("ffn_gate_up_exps", [n_embd, 2 * width]))
        } else {
            (
                Some(matrix("ffn_gate_exps", [n_embd, width])),
                matrix("ffn_up_exps", [n_embd, width]),
            )
        };
        Ok(Experts {
            router: Linear::new("ffn_gate_inp", [n_embd, count]),
            router_input: RouterInput::Experts,
            routing: Routing::Softmax,
            selection_bias: None,
            groups: self.expert_groups(count, used)?,
            used,
            normalize: true,
            scale: self.keys.factor("expert_weights_scale")?,
            weigh_input: false,
            experts: Mlp {
                gate,
                up,
                activation: self.clamped_swiglu("swiglu_clamp_exp", il)?,
                divisor: None,
                sub_norm: None,
                down: matrix("ffn_down_exps", [width, n_embd]),
            },
            shared: None,
        })
    }

    /// Returns the gated activation of the experts of layer `il`, with the limit in the key `name`
    /// if the file has it.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn clamped_swiglu(&self, name: &str, il: usize) -> Result<Activation> {
        let limits = self.keys.floats(name, self.n_layer + self.n_mtp_layers)?;
        Ok(match limits.map(|limits| limits[il]) {
            Some(limit) if limit > 1e-6 => Activation::ClampedSwiglu { limit },
            _ => Activation::Gated(Glu::Swiglu),
        })
    }

    /// Returns the number of expert groups, and of those that experts are chosen from. Returns
    /// `None` for a single group.
    fn expert_groups(&self, count: usize, used: usize) -> Result<Option<[usize; 2]>> {
        let groups = self.keys.count("expert_group_count")?.unwrap_or(0);
        if groups <= 1 {
            return Ok(None);
        }
        let best = self.keys.require_extent("expert_group_used_count")?;
        if !count.is_multiple_of(groups) || best > groups || best * (count / groups) < used {
            return Err(self.keys.error(
                "expert_group_count",
                format_args!("{count} experts in {groups} groups, of which {best} count, cannot give {used} for a token"),
            ));
        }
        Ok(Some([groups, best]))
    }
}

/// Returns the size of the vocabulary, which is the number of listed tokens. Only a file without a
/// vocabulary needs a key with the size.
fn n_vocab(keys: &Keys<'_>) -> Result<usize> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let Some(tokens) = keys.metadata().get::<&StringArray>(TOKENS)? else {
        return keys.require_extent("vocab_size");
    };
    match tokens.len() {
        0 => Err(Error::model(format!(
            "key \"{TOKENS}\": is 0, must be at least 1"
        ))),
        count => check_count(TOKENS, count as u64),
    }
}

/// Returns the rotation of queries and keys with heads of `head_k` elements, scaled beyond the
/// context of the training as the file specifies.
fn rope(keys: &Keys<'_>, mode: RopeMode, head_k: usize, n_ctx_train: usize) -> Result<Rope> {
    let dims = keys
        .count("rope.dimension_count")?
        .filter(|&dims| dims != 0);
    let dims = dims.unwrap_or(head_k);
    if dims > head_k || !dims.is_multiple_of(2) {
        return Err(keys.error(
            "rope.dimension_count",
            format_args!("is {dims}, must be even and at most the head size {head_k}"),
        ));
    }
    let rope = Rope {
        attn_factor: keys.positive("rope.scaling.attn_factor", 1.0)?,
        ..Rope::new(dims, mode, keys.positive("rope.freq_base", 10_000.0)?)
    };
    let at_least_0 = |v: f32| v >= 0.0 && v.is_finite();
    let mut factor = None;
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        if factor.is_none() {
            factor = keys.float(name, at_least_0, "a finite number, not negative")?;
        }
    }
    // Converters write 0 for no scaling.
    let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
    match keys.get::<&str>("rope.scaling.type")?.unwrap_or("linear") {
        "none" => Ok(rope),
        // The divisors of the frequencies implement the rest of LongRoPE.
        "linear" | "longrope" => Ok(Rope {
            freq_scale: 1.0 / factor,
            ..rope
        }),
        "yarn" if factor < 1.0 => Err(keys.error(
            "rope.scaling.factor",
            format_args!("is {factor}, YaRN needs at least 1"),
        )),
        "yarn" => {
            let ext_factor =
                keys.float("rope.scaling.yarn_ext_factor", f32::is_finite, "finite")?;
            let original = keys.extent("rope.scaling.original_context_length")?;
            let mscale = |multiplier: f32| 1.0 + 0.1 * multiplier * factor.ln();
            // The operation multiplies by 1 + 0.1 ln(factor), which is the magnitude of multiplier
            // 1.
            let magnitude = match keys.factor("rope.scaling.yarn_log_multiplier")? {
                Some(multiplier) => 1.0 / mscale(multiplier),
                None => 1.0,
            };
            Ok(Rope {
                attn_factor: magnitude * rope.attn_factor,
                original_context: original.unwrap_or(n_ctx_train),
                freq_scale: 1.0 / factor,
                // A negative value stands for an unspecified one.
                ext_factor: ext_factor.filter(|&v| v >= 0.0).unwrap_or(1.0),
                beta_fast: keys.positive("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: keys.positive("rope.scaling.yarn_beta_slow", 1.0)?,
                ..rope
            })
        }
        other => Err(keys.error(
            "rope.scaling.type",
            format_args!(
                "scaling '{other}' is not supported; supported are: none, linear, longrope, yarn"
            ),
        )),
    }
}

/// Adds what images need to a language model: positions on several axes, for which `mode` gives
/// the rotation by numbers of pairs, and DeepStack.
pub(super) fn with_images(
    mut spec: Spec,
    keys: &Keys<'_>,
    mode: impl Fn([u32; 4]) -> RopeMode,
) -> Result<Spec> {
    let sections = keys.counts("rope.dimension_sections", 4)?;
    if let Some(sections) = sections
        && let Ok(sections) = <[usize; 4]>::try_from(sections)
    {
        let sections = sections.map(|pairs| u32::try_from(pairs).unwrap_or(u32::MAX));
        let parts = spec.layers.iter_mut().flat_map(|layer| &mut layer.parts);
        for branch in parts.flat_map(|part| &mut part.branches) {
            if let Mixer::Attention(attention) = &mut branch.mixer {
                attention.set_axes(mode(sections));
            }
        }
    }
    spec.n_deepstack = keys.count("n_deepstack_layers")?.unwrap_or(0);
    if spec.n_deepstack >= spec.n_layer() {
        return Err(keys.error(
            "n_deepstack_layers",
            format_args!(
                "is {}, must be below the {} layers",
                spec.n_deepstack,
                spec.n_layer()
            ),
        ));
    }
    Ok(spec)
}

impl Rotation {
    /// Returns the rotation that shifts keys, which are rotated already, by a distance. It does not
    /// scale the magnitude, because the keys are scaled already.
    pub(crate) fn shift(&self) -> Rope {
        // With YaRN, the operation itself multiplies by 1 + 0.1 ln(1 / freq_scale).
        let magnitude = match self.rope.ext_factor {
            0.0 => 1.0,
            _ => 1.0 + 0.1 * (1.0 / self.rope.freq_scale).ln(),
        };
        Rope {
            attn_factor: 1.0 / magnitude,
            ..self.rope
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::spec::Mixer;
    use samite_gguf::{Metadata, Value};

    fn metadata(changes: &[(&str, Value)]) -> Metadata {
        let mut metadata = Metadata::new();
        let entries = [
            ("block_count", 2u32),
            ("embedding_length", 64),
            ("attention.head_count", 8),
            ("attention.head_count_kv", 4),
            ("feed_forward_length", 96),
            ("context_length", 128),
            ("vocab_size", 300),
        ];
        for (key, value) in entries {
            metadata.set(&format!("llama.{key}"), value).unwrap();
        }
        metadata
            .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
            .unwrap();
        for (key, value) in changes {
            metadata
                .set(&format!("llama.{key}"), value.clone())
                .unwrap();
        }
        metadata
    }

    fn read_as(name: &str, metadata: &Metadata) -> Result<Spec> {
        let spec = crate::arch::find(name)?.spec;
        spec(&Keys::new(metadata, "llama", 40, &|_| false))
    }

    fn read(changes: &[(&str, Value)]) -> Result<Spec> {
        read_as("llama", &metadata(changes))
    }

    fn rotation(spec: &Spec) -> Rotation {
        spec.layers[0]
            .attention()
            .unwrap()
            .rotation
            .clone()
            .unwrap()
    }

    #[test]
    fn defaults_derive_from_other_metadata() {
        let spec = read(&[]).unwrap();
        assert_eq!((spec.n_layer(), spec.n_vocab), (2, 300));
        let attention = spec.layers[1].attention().unwrap();
        assert_eq!((attention.head_k, attention.head_v), (8, 8));
        assert_eq!((attention.n_head, attention.n_head_kv), (8, 4));
        assert_eq!(
            rotation(&spec).rope,
            Rope::new(8, RopeMode::Normal, 10_000.0)
        );
    }

    #[test]
    fn altup_needs_at_least_two_streams_with_the_first_active() {
        let read = |changes: &[(&str, Value)]| {
            let window = ("attention.sliding_window", Value::from(8u32));
            read_as("gemma3n", &metadata(&[&[window], changes].concat()))
        };
        let count = |changes: &[(&str, Value)]| read(changes).unwrap().altup.unwrap().count;
        assert_eq!(count(&[("altup.active_idx", 0u32.into())]), 4);
        assert_eq!(count(&[("altup.num_inputs", 2u32.into())]), 2);
        for (key, value) in [
            ("altup.num_inputs", 1u32),
            ("altup.num_inputs", 65),
            ("altup.active_idx", 1),
        ] {
            let error = read(&[(key, value.into())]).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn layers_may_differ() {
        let spec = read(&[("attention.head_count_kv", vec![8u32, 2].into())]).unwrap();
        let heads = |il: usize| spec.layers[il].attention().unwrap().n_head_kv;
        assert_eq!((heads(0), heads(1)), (8, 2));
    }

    fn width(name: &str, changes: &[(&str, Value)]) -> usize {
        let spec = read_as(name, &metadata(changes)).unwrap();
        assert_eq!(spec.experts(), Some([8, 3]));
        let mixtures = spec.layers[0]
            .branches()
            .find_map(|branch| match &branch.mixer {
                Mixer::Experts(experts) => Some(experts.experts.up.to),
                _ => None,
            });
        mixtures.unwrap()
    }

    #[test]
    fn expert_width_is_explicit_or_derived() {
        let [count, used] = [8u32, 3].map(Value::from);
        let keys = [("expert_count", count), ("expert_used_count", used)];
        let with = |change: (&'static str, Value)| [&keys[..], &[change]].concat();
        assert_eq!(width("llama", &keys), 96);
        assert_eq!(width("qwen3moe", &keys), 32);
        let own = ("expert_feed_forward_length", Value::from(40u32));
        assert_eq!(width("qwen3moe", &with(own)), 40);
        let unsaid = ("expert_feed_forward_length", 0u32.into());
        assert_eq!(width("qwen3moe", &with(unsaid)), 32);
        assert_eq!(read(&[]).unwrap().experts(), None);
        let none = [("expert_count", 0u32.into())];
        assert_eq!(read_as("qwen3", &metadata(&none)).unwrap().experts(), None);

        let message = |name, changes: &[(&str, Value)]| {
            let error = read_as(name, &metadata(changes)).unwrap_err();
            error.to_string()
        };
        assert!(message("qwen3", &keys).contains("not supported for this architecture"));
        assert!(message("qwen3moe", &[]).contains("llama.expert_count"));
        assert!(message("llama", &keys[..1]).contains("llama.expert_used_count"));
        let many = [keys[0].clone(), ("expert_used_count", 9u32.into())];
        assert!(message("llama", &many).contains("only 8 experts"));
        let none = [keys[0].clone(), ("expert_used_count", 0u32.into())];
        assert!(message("llama", &none).contains("is 0"));
    }

    #[test]
    fn impossible_metadata_is_refused_by_key() {
        let cases: &[(&str, Value, &str)] = &[
            ("block_count", 0u32.into(), "is 0"),
            ("block_count", 41u32.into(), "40 tensors"),
            ("block_count", u64::MAX.into(), "at most"),
            ("embedding_length", 0u32.into(), "is 0"),
            (
                "embedding_length",
                65u32.into(),
                "not a multiple of 8 heads",
            ),
            ("attention.head_count", 0u32.into(), "is 0"),
            ("attention.head_count", (-1i32).into(), "does not fit"),
            ("attention.head_count", (1u32 << 28).into(), "multiple"),
            ("attention.head_count_kv", 0u32.into(), "is 0"),
            ("attention.head_count_kv", 3u32.into(), "evenly in layer 0"),
            ("attention.head_count_kv", vec![4u32].into(), "or 2 of them"),
            ("attention.key_length", (1u32 << 27).into(), "times heads"),
            ("feed_forward_length", "wide".into(), "found str"),
            ("rope.dimension_count", 7u32.into(), "even"),
            ("rope.dimension_count", 10u32.into(), "head size 8"),
            ("rope.freq_base", f32::NAN.into(), "positive"),
            (
                "rope.scaling.type",
                "spiral".into(),
                "none, linear, longrope, yarn",
            ),
            (
                "attention.layer_norm_rms_epsilon",
                f32::NAN.into(),
                "between 0 and 1",
            ),
            ("expert_count", 8u32.into(), "expert_used_count"),
            ("context_length", 0u32.into(), "is 0"),
        ];
        for (key, value, expected) in cases {
            let message = read(&[(key, value.clone())]).unwrap_err().to_string();
            assert!(message.contains(expected), "{key}: {message}");
        }
        let mut without = metadata(&[]);
        without.remove("llama.context_length");
        let error = read_as("llama", &without).unwrap_err().to_string();
        assert!(error.contains("llama.context_length"), "{error}");
    }

    #[test]
    fn a_yarn_shift_keeps_the_magnitude() {
        let spec = read(&[
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0f32.into()),
        ]);
        let rotation = rotation(&spec.unwrap());
        assert_eq!(rotation.rope.freq_scale, 0.25);
        assert_eq!(rotation.rope.original_context, 128);
        let total = rotation.shift().attn_factor * (1.0 + 0.1 * 4.0f32.ln());
        assert!((total - 1.0).abs() < 1e-6);
    }

    #[test]
    fn windows_end_at_the_token_and_chunks_are_aligned() {
        assert_eq!(Span::Full.positions(70), 0..=70);
        assert_eq!(Span::Window(3).positions(70), 68..=70);
        assert_eq!(Span::Chunk(32).positions(70), 64..=70);
        assert_eq!(Span::Chunk(32).positions(64), 64..=64);
    }
}
