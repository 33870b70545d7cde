//! Builds the graph of a micro-batch: a walk over the [`Spec`] of a model.
//!
//! Nodes are named as in llama.cpp.

mod adapted;
mod altup;
mod attention;
mod embeddings;
mod feed_forward;
mod inputs;
mod state;

pub(crate) use attention::rope_factors_name;
pub use inputs::{GraphInputs, Input};

use super::spec::{
    Branch, Head, Layer, Linear, Mixer, Norm, NormKind, PerLayer, Pooling, Presence, Rotation,
    Spec, SubLayer,
};
use super::tensors::names;
use crate::adapter::{Adapter, ScaledAdapter};
use crate::weights::Weights;
use samite_core::{DType, Error, Graph, Result, Rope, StoredTensor, TensorId, Unary};
use std::collections::HashMap;
use std::sync::Arc;

/// Shape of a graph: everything it depends on besides the model. Equal shapes have equal graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Number of tokens in the micro-batch.
    pub n_tokens: usize,
    /// Number of KV cache cells that attention reads.
    pub n_kv: usize,
    /// Number of cells that layers with a window read, or 0 if they use the same cells as the other
    /// layers.
    pub n_window: usize,
    /// Number of tokens whose logits are requested.
    pub n_outputs: usize,
    /// Number of sequences, which are contiguous and have equally many tokens. 1 if the model has
    /// no recurrent state.
    pub n_seqs: usize,
    /// Number of sequences whose mean is requested.
    pub n_means: usize,
    /// True if the input consists of embeddings instead of tokens.
    pub is_embedded: bool,
    /// True if positions differ between axes.
    pub has_axes: bool,
    /// Adapters that the tokens of the micro-batch use, if some sequences have their own. Each bit
    /// is an index into the list of all sequences' adapters.
    pub mixed: Option<u64>,
    /// Number of top-k tokens that the graph selects for each requested row of logits; 0 for none.
    pub n_top_k: usize,
}

/// Requested results of a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// Logits after tokens.
    #[default]
    Logits,
    /// Embeddings of tokens or of texts.
    Embeddings(Pooling),
    /// Logits and embeddings of tokens.
    Both,
}

impl Output {
    /// Returns `self`, or embeddings instead of logits for a model that does not return logits.
    pub fn resolve(self, spec: &Spec) -> Self {
        match (self, &spec.head.output) {
            (Output::Logits, None) => Output::Embeddings(spec.pooling.unwrap_or(Pooling::None)),
            (Output::Both, None) => Output::Embeddings(Pooling::None),
            _ => self,
        }
    }
}

/// Cache of a layer. Absent tensors are not needed by the layer.
#[derive(Clone, Debug, Default)]
pub struct LayerCache {
    /// Keys `[head size · kv heads, cells]`.
    pub k: Option<Arc<StoredTensor>>,
    /// Values `[head size · kv heads, cells]`. Absent if the keys contain them.
    pub v: Option<Arc<StoredTensor>>,
    /// Convolution states, `[elements, rows]`.
    pub conv: Option<Arc<StoredTensor>>,
    /// Recurrent states, `[elements, rows]`.
    pub state: Option<Arc<StoredTensor>>,
    /// True if keys and values use the cells for layers with a window.
    pub windowed: bool,
    /// True to compute attention with several operations although flash attention is on, because
    /// the device refuses it.
    pub no_flash: bool,
}

impl LayerCache {
    /// Returns all tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Arc<StoredTensor>> {
        [&self.k, &self.v, &self.conv, &self.state]
            .into_iter()
            .flatten()
    }
}

/// Context of a graph: everything that [`build`] reads.
#[derive(Clone, Copy)]
pub(crate) struct GraphContext<'a> {
    pub spec: &'a Spec,
    pub weights: &'a Weights,
    /// Cache of each layer.
    pub cache: &'a [LayerCache],
    /// Capacity of the context, in tokens.
    pub n_ctx: usize,
    pub adapters: &'a [ScaledAdapter],
    /// Adapters that belong to sequences, see [`GraphShape::mixed`].
    pub mixed: &'a [Arc<Adapter>],
    /// True to compute attention with one operation (flash attention).
    pub flash: bool,
    /// Requested results.
    pub output: Output,
}

/// Builder of a graph.
struct Builder<'a> {
    parts: GraphContext<'a>,
    shape: GraphShape,
    graph: Graph,
    inputs: GraphInputs,
    /// Adapters that change weights, in the order in which they are applied.
    changes: Vec<adapted::Change<'a>>,
    /// Leaves of stored tensors that the graph already has.
    leaves: HashMap<*const StoredTensor, TensorId>,
    /// Index of the current layer.
    il: usize,
    /// Prefix of the names of the layer's tensors.
    prefix: String,
    /// Input of the first layer, if layers add it.
    embedded: Option<TensorId>,
    /// Per-layer embeddings: `[size, tokens, layers]`.
    per_layer: Option<TensorId>,
    /// Embeddings with rows for the first layers.
    deepstack: Option<TensorId>,
    /// True in the last sub-layer that mixes tokens. After it, only requested tokens are computed.
    is_last_mixing: bool,
}

/// Builds the graph of a micro-batch, from tokens to logits.
///
/// # Errors
/// Returns an error if operands do not match. This does not happen for a model whose tensors were
/// checked.
pub(crate) fn build(parts: GraphContext<'_>, shape: GraphShape) -> Result<(Graph, GraphInputs)> {
    let mut builder = Builder {
        changes: adapted::changes(&parts, shape),
        parts,
        shape,
        graph: Graph::new(),
        inputs: GraphInputs::default(),
        leaves: HashMap::new(),
        il: 0,
        prefix: String::new(),
        embedded: None,
        per_layer: None,
        deepstack: None,
        is_last_mixing: false,
    };
    builder.model()?;
    Ok((builder.graph, builder.inputs))
}

impl Builder<'_> {
    fn model(&mut self) -> Result<()> {
        let spec = self.parts.spec;
        let mut x = self.embedding()?;
        self.embedded = Some(x);
        if let Some(altup) = &spec.altup {
            x = self.spread(altup, x)?;
        }
        let last = spec.last_mixing();
        for (il, layer) in spec.layers.iter().enumerate() {
            self.il = il;
            self.prefix = format!("blk.{}.", layer.block);
            let result = match &spec.altup {
                Some(altup) => self.layer_of_streams(altup, layer, x, last)?,
                None => self.layer(layer, x, last)?,
            };
            let Some(result) = result else {
                return Ok(());
            };
            x = result;
            if let Some(rows) = self.deepstack.filter(|_| il < spec.n_deepstack) {
                let own = self.deepstack_slice(rows, il + 1)?;
                x = self.graph.add(x, own)?;
                self.named(x, "deepstack_out");
            }
        }
        self.prefix.clear();
        if let Some(altup) = &spec.altup {
            x = self.merged(altup, x)?;
        }
        self.output(&spec.head, x)
    }

    fn named(&mut self, id: TensorId, name: &str) -> TensorId {
        self.graph.set_name(id, format!("{name}-{}", self.il));
        id
    }

    fn extents(&self, id: TensorId) -> [usize; 4] {
        self.graph.tensor(id).layout.shape()
    }

    fn input(&mut self, input: Input, dtype: DType, shape: [usize; 4]) -> Result<TensorId> {
        if let Some(id) = self.inputs.get(&input) {
            return Ok(id);
        }
        let id = self.graph.input(input.name(), dtype, shape)?;
        self.inputs.list.push((input, id));
        Ok(id)
    }

    fn per_token(&mut self, input: Input, dtype: DType) -> Result<TensorId> {
        self.input(input, dtype, [self.shape.n_tokens, 1, 1, 1])
    }

    fn positions(&mut self) -> Result<TensorId> {
        self.per_token(Input::Positions, DType::I32)
    }

    /// Returns the positions for a rotation, and its operation.
    fn rotation(&mut self, rotation: &Rotation) -> Result<(TensorId, Rope)> {
        let rope = rotation.rope;
        match rotation.axes.filter(|_| self.shape.has_axes) {
            Some(mode) => {
                let shape = [4 * self.shape.n_tokens, 1, 1, 1];
                let positions = self.input(Input::Axes, DType::I32, shape)?;
                Ok((positions, Rope { mode, ..rope }))
            }
            None => Ok((self.per_token(Input::RopePositions, DType::I32)?, rope)),
        }
    }

    fn stored(&mut self, tensor: &Arc<StoredTensor>) -> Result<TensorId> {
        if let Some(&id) = self.leaves.get(&Arc::as_ptr(tensor)) {
            return Ok(id);
        }
        let id = self.graph.stored(tensor)?;
        self.leaves.insert(Arc::as_ptr(tensor), id);
        Ok(id)
    }

    /// Returns the weight with this full name, if the model has it.
    fn global_weight(&mut self, name: &str) -> Result<Option<TensorId>> {
        let weights = self.parts.weights;
        let tensor = weights.get(name);
        tensor.map(|tensor| self.stored(tensor)).transpose()
    }

    /// Returns the weight of the layer, if the model has it.
    fn optional_weight(&mut self, name: &str) -> Result<Option<TensorId>> {
        self.global_weight(&format!("{}{name}", self.prefix))
    }

    fn weight(&mut self, name: &str) -> Result<TensorId> {
        self.optional_weight(name)?.ok_or_else(|| {
            Error::invalid(format!("the model has no tensor '{}{name}'", self.prefix))
        })
    }

    /// Multiplies the matrix called `name`, including changes by adapters, by `x`.
    fn product(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let matrix = self.weight(name)?;
        let y = self.graph.mul_mat(matrix, x)?;
        self.adapted(y, name, None, |builder, pair, [a, b]| {
            // The matrices of an embedding's pair are swapped.
            let [first, second] = if pair.is_embedding {
                let turned = builder.graph.transpose(b)?;
                [builder.graph.cont(turned)?, a]
            } else {
                [a, b]
            };
            let inner = builder.graph.mul_mat(first, x)?;
            builder.graph.mul_mat(second, inner)
        })
    }

    /// Returns the embeddings of the tokens: `[width, tokens]`.
    fn embedding(&mut self) -> Result<TensorId> {
        let embedding = &self.parts.spec.embedding;
        let mut x = if self.shape.is_embedded {
            let spec = self.parts.spec;
            let shape = [spec.input_width(), self.shape.n_tokens, 1, 1];
            let rows = self.input(Input::Embeddings, DType::F32, shape)?;
            if spec.n_deepstack > 0 {
                self.deepstack = Some(rows);
                self.deepstack_slice(rows, 0)?
            } else {
                rows
            }
        } else {
            let tokens = self.per_token(Input::Tokens, DType::I32)?;
            let table = self.weight(names::EMBEDDING)?;
            let x = self.graph.get_rows(table, tokens)?;
            let x = self.adapted(x, names::EMBEDDING, None, |builder, _, [a, b]| {
                let rows = builder.graph.get_rows(a, tokens)?;
                builder.graph.mul_mat(b, rows)
            })?;
            self.graph.set_name(x, "inp_embd");
            x
        };
        let is_scaled = !(self.shape.is_embedded && embedding.scales_table_alone);
        if let Some(scale) = embedding.scale.filter(|_| is_scaled) {
            x = self.graph.scale(x, scale)?;
            self.graph.set_name(x, "inp_scaled");
        }
        if embedding.token_types.is_some() {
            let table = self.weight(names::TOKEN_TYPES)?;
            let first = self.graph.rows(table, 0, 1)?;
            x = self.graph.add(x, first)?;
        }
        if embedding.positions.is_some() {
            let table = self.weight(names::POSITIONS)?;
            let positions = self.positions()?;
            let rows = self.graph.get_rows(table, positions)?;
            x = self.graph.add(x, rows)?;
            self.graph.set_name(x, "inpL");
        }
        let x = self.maybe_norm(x, &embedding.norm)?;
        if let Some(per_layer) = &embedding.per_layer {
            // If the input consists of embeddings, token 0 (padding) provides the lookup.
            let tokens = self.per_token(Input::Tokens, DType::I32)?;
            self.per_layer = Some(self.per_layer_rows(per_layer, x, tokens)?);
        }
        Ok(x)
    }

    /// Returns the elements that embeddings have for `part`: 0 for the input, `il + 1` for layer
    /// `il`.
    fn deepstack_slice(&mut self, rows: TensorId, part: usize) -> Result<TensorId> {
        let width = self.parts.spec.n_embd;
        let row = self.graph.tensor(rows).layout.strides()[1];
        let shape = [width, self.shape.n_tokens, 1, 1];
        let offset = part * width * size_of::<f32>();
        let view = self.graph.view(rows, shape, [row; 3], offset)?;
        self.graph.cont(view)
    }

    /// Returns the per-layer embeddings of all layers: `[size, tokens, layers]`.
    fn per_layer_rows(
        &mut self,
        per_layer: &PerLayer,
        x: TensorId,
        tokens: TensorId,
    ) -> Result<TensorId> {
        let size = per_layer.size;
        let all = [size, self.parts.spec.n_layer(), self.shape.n_tokens, 1];
        let table = self.weight(names::PER_LAYER)?;
        let rows = self.graph.get_rows(table, tokens)?;
        let rows = self.graph.reshape(rows, all)?;
        let rows = self.graph.scale(rows, (size as f32).sqrt())?;
        let made = self.linear(x, &per_layer.projection, "per_layer_proj")?;
        let width = per_layer.projection.from as f32;
        let made = self.graph.scale(made, 1.0 / width.sqrt())?;
        let made = self.graph.reshape(made, all)?;
        let made = self.norm(made, &per_layer.norm)?;
        let sum = self.graph.add(made, rows)?;
        let sum = self.graph.scale(sum, std::f32::consts::FRAC_1_SQRT_2)?;
        let sum = self.graph.permute(sum, [0, 2, 1, 3])?;
        let sum = self.graph.cont(sum)?;
        self.graph.set_name(sum, "inp_per_layer");
        Ok(sum)
    }

    /// Returns the contribution of the layer's row of per-layer embeddings.
    fn per_layer(&mut self, gate: &Linear, output: &Linear, x: TensorId) -> Result<TensorId> {
        let Some(all) = self.per_layer else {
            return Err(Error::invalid("the model has no embeddings for each layer"));
        };
        let gate = self.linear(x, gate, "per_layer_inp_gate")?;
        let gate = self.graph.unary(gate, Unary::Gelu)?;
        let layout = self.graph.tensor(all).layout;
        let ([size, n_tokens, ..], [_, row, layer, _]) = (layout.shape(), layout.strides());
        let shape = [size, n_tokens, 1, 1];
        let mut own = self
            .graph
            .view(all, shape, [row, layer, layer], self.il * layer)?;
        let n_outputs = self.extents(x)[1];
        if n_outputs != n_tokens {
            let rows = self.input(Input::Outputs, DType::I32, [n_outputs, 1, 1, 1])?;
            own = self.graph.get_rows(own, rows)?;
        }
        let gated = self.graph.mul(gate, own)?;
        self.linear(gated, output, "per_layer_proj")
    }

    /// Normalizes `x` row by row.
    fn norm(&mut self, x: TensorId, norm: &Norm) -> Result<TensorId> {
        let mut x = match norm.kind {
            NormKind::Rms(eps) => self.graph.rms_norm(x, eps)?,
            NormKind::Layer(eps) => self.graph.norm(x, eps)?,
        };
        self.named(x, "norm");
        if let Some(scale) = self.optional_weight(&format!("{}{}", norm.name, norm.suffix))? {
            x = self.graph.mul(x, scale)?;
            self.named(x, norm.name);
        }
        if let Some(bias) = self.optional_weight(&format!("{}.bias", norm.name))? {
            x = self.graph.add(x, bias)?;
            self.named(x, norm.name);
        }
        Ok(x)
    }

    fn maybe_norm(&mut self, x: TensorId, norm: &Option<Norm>) -> Result<TensorId> {
        match norm {
            Some(norm) => self.norm(x, norm),
            None => Ok(x),
        }
    }

    fn maybe_scale(&mut self, x: TensorId, scale: Option<f32>) -> Result<TensorId> {
        match scale {
            Some(scale) => self.graph.scale(x, scale),
            None => Ok(x),
        }
    }

    /// Appends a linear layer, whose result is called `name`.
    fn linear(&mut self, x: TensorId, linear: &Linear, name: &str) -> Result<TensorId> {
        let mut y = self.product(x, &format!("{}.weight", linear.name))?;
        self.named(y, name);
        if linear.scale != Presence::Absent
            && let Some(scale) = self.optional_weight(&format!("{}.scale", linear.name))?
        {
            y = self.graph.mul(y, scale)?;
            self.named(y, name);
        }
        match self.optional_weight(&format!("{}.bias", linear.name))? {
            Some(bias) => {
                let sum = self.graph.add(y, bias)?;
                Ok(self.named(sum, name))
            }
            None => Ok(y),
        }
    }

    /// Returns the residual stream after a layer. Returns `None` if no logits are requested and
    /// everything is already cached.
    fn layer(
        &mut self,
        layer: &Layer,
        mut x: TensorId,
        [last_layer, last_part]: [usize; 2],
    ) -> Result<Option<TensorId>> {
        let mut before = x;
        for (at, part) in layer.parts.iter().enumerate() {
            self.is_last_mixing = [self.il, at] == [last_layer, last_part];
            let Some(change) = self.part(part, x, before)? else {
                return Ok(None);
            };
            x = self.wanted(x, "inp_kept")?;
            before = self.wanted(before, "inp_kept")?;
            if let (Some(embedded), Some(_)) = (self.embedded, layer.skip) {
                self.embedded = Some(self.wanted(embedded, "embd_kept")?);
            }
            self.is_last_mixing = false;
            let is_end = at + 1 == layer.parts.len();
            x = self.graph.add(change, x)?;
            x = self.maybe_scale(x, part.sum_scale)?;
            self.named(x, if is_end { "l_out" } else { "ffn_inp" });
            x = self.maybe_norm(x, &part.sum_norm)?;
        }
        if let Some(name) = layer.scale
            && let Some(scale) = self.optional_weight(name)?
        {
            x = self.graph.mul(x, scale)?;
            self.named(x, "out_scaled");
        }
        if let (Some(name), Some(embedded)) = (layer.skip, self.embedded) {
            let scale = self.weight(name)?;
            let skipped = self.graph.mul(embedded, scale)?;
            x = self.graph.add(x, skipped)?;
            self.named(x, "l_out");
        }
        x = self.directed(x)?;
        if layer.norm_again {
            let prefix = std::mem::take(&mut self.prefix);
            x = self.maybe_norm(x, &self.parts.spec.head.norm)?;
            self.prefix = prefix;
        }
        Ok(Some(x))
    }

    /// Returns what a sub-layer adds to the residual stream `x`; `before` is the stream before the
    /// layer.
    fn part(&mut self, part: &SubLayer, x: TensorId, before: TensorId) -> Result<Option<TensorId>> {
        let normed = self.maybe_norm(x, &part.norm)?;
        let mut sum: Option<TensorId> = None;
        for branch in &part.branches {
            let input = match (&branch.norm, branch.of_layer) {
                (None, false) => normed,
                (None, true) => before,
                (Some(norm), of_layer) => self.norm(if of_layer { before } else { x }, norm)?,
            };
            let Some(result) = self.branch(branch, input, [x, before])? else {
                continue;
            };
            let result = self.maybe_norm(result, &branch.post)?;
            let result = self.maybe_scale(result, branch.scale)?;
            sum = Some(match sum {
                Some(sum) => self.graph.add(sum, result)?,
                None => result,
            });
        }
        let Some(sum) = sum else {
            return Ok(None);
        };
        let sum = self.maybe_norm(sum, &part.post)?;
        self.maybe_scale(sum, part.scale).map(Some)
    }

    /// Returns the result of a branch with input `x`; `altup` are the residual streams before the
    /// sub-layer and before the layer. Returns `None` if no logits are requested.
    fn branch(
        &mut self,
        branch: &Branch,
        x: TensorId,
        altup: [TensorId; 2],
    ) -> Result<Option<TensorId>> {
        match &branch.mixer {
            Mixer::Attention(attention) => return self.attention(attention, x),
            Mixer::DeltaNet(net) => return self.delta_net(net, x),
            Mixer::ShortConv(conv) => return self.short_conv(conv, x),
            Mixer::StateSpace(space) => return self.state_space(space, x),
            _ => {}
        }
        if self.is_last_mixing && self.shape.n_outputs == 0 {
            return Ok(None);
        }
        let x = self.wanted(x, "ffn_inp_kept")?;
        let result = match &branch.mixer {
            Mixer::Attention(_)
            | Mixer::DeltaNet(_)
            | Mixer::ShortConv(_)
            | Mixer::StateSpace(_) => return Ok(None),
            Mixer::Mlp(mlp) => self.mlp(x, mlp, "ffn_out")?,
            Mixer::Experts(experts) => self.experts(experts, x, altup)?,
            Mixer::PerLayer(gate, output) => self.per_layer(gate, output, x)?,
            Mixer::Identity => x,
            Mixer::Linear(linear) => self.linear(x, linear, linear.name)?,
            Mixer::LowRank(down, up) => {
                let inner = self.linear(x, down, down.name)?;
                self.linear(inner, up, up.name)?
            }
        };
        Ok(Some(result))
    }

    /// Returns only the columns of `x` that lead to requested logits, if no later sub-layer mixes
    /// tokens. Otherwise returns `x` unchanged.
    fn wanted(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let GraphShape {
            n_tokens,
            n_outputs,
            ..
        } = self.shape;
        let is_whole = self.extents(x)[1] == n_tokens;
        if !self.is_last_mixing || n_outputs == n_tokens || !is_whole {
            return Ok(x);
        }
        let rows = self.input(Input::Outputs, DType::I32, [n_outputs, 1, 1, 1])?;
        let kept = self.graph.get_rows(x, rows)?;
        Ok(self.named(kept, name))
    }

    /// Computes the requested results from the result of the last layer.
    fn output(&mut self, head: &Head, x: TensorId) -> Result<()> {
        let normed = self.maybe_norm(x, &head.norm)?;
        if head.norm.is_some() {
            self.graph.set_name(normed, "result_norm");
        }
        let result = match self.parts.output {
            Output::Logits => self.logits(head, normed)?,
            Output::Embeddings(pooling) => self.embeddings(head, normed, pooling)?,
            Output::Both => {
                let embeddings = self.embeddings(head, normed, Pooling::None)?;
                self.graph.set_output(embeddings);
                self.inputs.embeddings = Some(embeddings);
                self.logits(head, normed)?
            }
        };
        self.graph.set_output(result);
        self.inputs.result = Some(result);
        if self.shape.n_top_k > 0 {
            self.device_top_k(result)?;
        }
        Ok(())
    }

    /// Appends the top-k tokens of each row of logits, and their logits if k is larger than 1.
    fn device_top_k(&mut self, logits: TensorId) -> Result<()> {
        let count = self.shape.n_top_k;
        let tokens = match count {
            1 => self.graph.argmax(logits)?,
            _ => self.graph.top_k(logits, count)?,
        };
        self.graph.set_name(tokens, "top_k_tokens");
        self.graph.set_output(tokens);
        let mut values = None;
        if count > 1 {
            let [n_vocab, rows, ..] = self.extents(logits);
            let single = self.graph.reshape(logits, [1, n_vocab, rows, 1])?;
            let chosen = self.graph.get_rows(single, tokens)?;
            self.graph.set_name(chosen, "top_k_logits");
            self.graph.set_output(chosen);
            values = Some(chosen);
        }
        self.inputs.device_top_k = Some((tokens, values));
        Ok(())
    }

    /// Returns the logits for the result of the last norm.
    fn logits(&mut self, head: &Head, normed: TensorId) -> Result<TensorId> {
        let mut logits = self.product(normed, "output.weight")?;
        if let Some(bias) = self.optional_weight("output.bias")? {
            self.graph.set_name(logits, "result_output_no_bias");
            logits = self.graph.add(logits, bias)?;
        }
        logits = self.maybe_scale(logits, head.scale)?;
        if head.softcap != 0.0 {
            logits = self.soft_cap(logits, 1.0, head.softcap)?;
        }
        self.graph.set_name(logits, "result_output");
        Ok(logits)
    }

    /// Returns `softcap · tanh(scale · x / softcap)`.
    fn soft_cap(&mut self, x: TensorId, scale: f32, softcap: f32) -> Result<TensorId> {
        let x = self.graph.scale(x, scale / softcap)?;
        let x = self.graph.unary(x, Unary::Tanh)?;
        self.graph.scale(x, softcap)
    }
}
