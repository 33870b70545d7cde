//! The building blocks of architectures: each method appends some nodes, named as in llama.cpp.

use crate::adapter::{Pair, ScaledAdapter};
use crate::hparams::{Experts, Hyperparameters};
use crate::weights::Weights;
use samite_core::{DType, Error, Glu, Graph, Result, SortOrder, StoredTensor, TensorId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What a graph depends on besides the model: equal shapes have equal graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Tokens of the micro-batch.
    pub n_tokens: usize,
    /// Cells of the KV cache that attention looks at.
    pub n_kv: usize,
    /// Tokens whose logits are wanted.
    pub n_outputs: usize,
}

/// The KV cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Keys `[head size · kv heads, cells]`.
    pub k: Arc<StoredTensor>,
    /// Values `[head size · kv heads, cells]`.
    pub v: Arc<StoredTensor>,
}

/// The inputs of a graph, and its result.
#[derive(Clone, Copy, Debug)]
pub struct GraphInputs {
    /// Token ids: i32 `[tokens]`.
    pub tokens: TensorId,
    /// Positions: i32 `[tokens]`.
    pub positions: TensorId,
    /// The cell that each token's keys and values are written to: i64 `[tokens]`.
    pub cells: TensorId,
    /// 0 where a token sees a cell, minus infinity elsewhere: f16 `[kv, tokens]`. Absent if nothing is attended to.
    pub mask: Option<TensorId>,
    /// Which tokens' logits are wanted: i32 `[outputs]`. Absent if all are, or none.
    pub outputs: Option<TensorId>,
    /// Result: f32 `[vocabulary, outputs]`.
    pub logits: Option<TensorId>,
}

/// A graph in the making, with what its blocks refer to.
#[derive(Debug)]
pub struct Blocks<'a> {
    graph: Graph,
    inputs: GraphInputs,
    shape: GraphShape,
    hparams: &'a Hyperparameters,
    weights: &'a Weights,
    cache: &'a [LayerCache],
    adapters: &'a [ScaledAdapter],
    /// One operation for the attention instead of several.
    flash: bool,
    /// Leaves of stored tensors that are in the graph already.
    leaves: HashMap<*const StoredTensor, TensorId>,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(
        hparams: &'a Hyperparameters,
        weights: &'a Weights,
        cache: &'a [LayerCache],
        adapters: &'a [ScaledAdapter],
        shape: GraphShape,
        flash: bool,
    ) -> Result<Self> {
        let mut graph = Graph::new();
        let per_token = [shape.n_tokens, 1, 1, 1];
        let inputs = GraphInputs {
            tokens: graph.input("inp_tokens", DType::I32, per_token)?,
            positions: graph.input("inp_pos", DType::I32, per_token)?,
            cells: graph.input("inp_cells", DType::I64, per_token)?,
            mask: None,
            outputs: None,
            logits: None,
        };
        Ok(Blocks {
            graph,
            inputs,
            shape,
            hparams,
            weights,
            cache,
            adapters,
            flash,
            leaves: HashMap::new(),
        })
    }

    pub(crate) fn finish(self) -> (Graph, GraphInputs) {
        (self.graph, self.inputs)
    }

    /// The layers, by number.
    pub fn layers(&self) -> Range<usize> {
        0..self.hparams.n_layer()
    }

    fn named(&mut self, id: TensorId, name: &str, il: usize) -> TensorId {
        self.graph.set_name(id, format!("{name}-{il}"));
        id
    }

    fn stored(&mut self, tensor: &Arc<StoredTensor>) -> Result<TensorId> {
        if let Some(&id) = self.leaves.get(&Arc::as_ptr(tensor)) {
            return Ok(id);
        }
        let id = self.graph.stored(tensor)?;
        self.leaves.insert(Arc::as_ptr(tensor), id);
        Ok(id)
    }

    /// The weight called `name`, if the model has it.
    ///
    /// # Errors
    /// If the graph is full.
    pub fn optional_weight(&mut self, name: &str) -> Result<Option<TensorId>> {
        let weights = self.weights;
        weights
            .get(name)
            .map(|tensor| self.stored(tensor))
            .transpose()
    }

    fn weight(&mut self, name: &str) -> Result<TensorId> {
        self.optional_weight(name)?
            .ok_or_else(|| Error::invalid(format!("the model has no tensor '{name}'")))
    }

    /// `y`, the result of an operation with the weight called `name`, and what adapters add to it. `change` appends the product
    /// with the two matrices of a pair.
    fn adapted(
        &mut self,
        mut y: TensorId,
        name: &str,
        change: impl Fn(&mut Self, &Pair, [TensorId; 2]) -> Result<TensorId>,
    ) -> Result<TensorId> {
        let (adapters, name) = (self.adapters, self.weights.data_name(name).unwrap_or(name));
        for adapter in adapters {
            let Some((pair, scale)) = adapter.pair(name) else {
                continue;
            };
            let matrices = [self.stored(&pair.a)?, self.stored(&pair.b)?];
            let change = change(self, pair, matrices)?;
            let change = self.graph.scale(change, scale)?;
            y = self.graph.add(y, change)?;
        }
        Ok(y)
    }

    /// The product of the matrix called `name`, as adapters change it, and `x`.
    fn product(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let matrix = self.weight(name)?;
        let y = self.graph.mul_mat(matrix, x)?;
        self.adapted(y, name, |blocks, pair, [a, b]| {
            // The pair of an embedding is the other way round.
            let [first, second] = if pair.is_embedding {
                let turned = blocks.graph.transpose(b)?;
                [blocks.graph.cont(turned)?, a]
            } else {
                [a, b]
            };
            let inner = blocks.graph.mul_mat(first, x)?;
            blocks.graph.mul_mat(second, inner)
        })
    }

    /// The embeddings of the tokens: `[width, tokens]`.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn embedding(&mut self) -> Result<TensorId> {
        const NAME: &str = "token_embd.weight";
        let (table, tokens) = (self.weight(NAME)?, self.inputs.tokens);
        let x = self.graph.get_rows(table, tokens)?;
        let x = self.adapted(x, NAME, |blocks, _, [a, b]| {
            let rows = blocks.graph.get_rows(a, tokens)?;
            blocks.graph.mul_mat(b, rows)
        })?;
        self.graph.set_name(x, "inp_embd");
        Ok(x)
    }

    /// The scaled RMS norm called `name` of each row of `x`.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn norm(&mut self, x: TensorId, name: &str, il: usize) -> Result<TensorId> {
        let scale = self.weight(&format!("blk.{il}.{name}.weight"))?;
        let normed = self.graph.rms_norm(x, self.hparams.rms_eps)?;
        self.named(normed, "norm", il);
        let scaled = self.graph.mul(normed, scale)?;
        Ok(self.named(scaled, name, il))
    }

    /// The linear layer whose weights are called `weights`; the result is called `name`.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn linear(
        &mut self,
        x: TensorId,
        weights: &str,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let y = self.product(x, &format!("blk.{il}.{weights}.weight"))?;
        self.named(y, name, il);
        match self.optional_weight(&format!("blk.{il}.{weights}.bias"))? {
            Some(bias) => self.add(y, bias, name, il),
            None => Ok(y),
        }
    }

    /// The sum of two tensors.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn add(&mut self, a: TensorId, b: TensorId, name: &str, il: usize) -> Result<TensorId> {
        let sum = self.graph.add(a, b)?;
        Ok(self.named(sum, name, il))
    }

    fn heads(
        &mut self,
        x: TensorId,
        size: usize,
        count: usize,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let n_tokens = self.graph.tensor(x).layout.shape()[1];
        let heads = self.graph.reshape(x, [size, count, n_tokens, 1])?;
        Ok(self.named(heads, name, il))
    }

    fn queries(&mut self, x: TensorId, il: usize) -> Result<TensorId> {
        let q = self.linear(x, "attn_q", "Qcur", il)?;
        self.heads(
            q,
            self.hparams.head_dim_k,
            self.hparams.layers[il].n_head,
            "Qcur",
            il,
        )
    }

    /// The queries of `x`, `[head size, heads, tokens]`, if the layer does more than to store keys and values; its keys and its
    /// values, `[head size, kv heads, tokens]` each. They come one after the other, so that devices can share what they do to
    /// `x`.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn queries_keys_values(
        &mut self,
        x: TensorId,
        il: usize,
    ) -> Result<(Option<TensorId>, [TensorId; 2])> {
        let n_head_kv = self.hparams.layers[il].n_head_kv;
        let q = match self.is_finished(il) {
            true => None,
            false => Some(self.queries(x, il)?),
        };
        let k = self.linear(x, "attn_k", "Kcur", il)?;
        let k = self.heads(k, self.hparams.head_dim_k, n_head_kv, "Kcur", il)?;
        let v = self.linear(x, "attn_v", "Vcur", il)?;
        let v = self.heads(v, self.hparams.head_dim_v, n_head_kv, "Vcur", il)?;
        Ok((q, [k, v]))
    }

    /// Heads rotated by their tokens' positions.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn rope(
        &mut self,
        x: TensorId,
        divisors: Option<TensorId>,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let positions = self.inputs.positions;
        let rotated = self
            .graph
            .rope(x, positions, divisors, self.hparams.rope())?;
        Ok(self.named(rotated, name, il))
    }

    /// Writes keys and values to the cells of their tokens.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn store(&mut self, k: TensorId, v: TensorId, il: usize) -> Result<()> {
        let cache = &self.cache[il];
        for (rows, cache, name) in [(k, &cache.k, "k_cache"), (v, &cache.v, "v_cache")] {
            let cache = self.stored(cache)?;
            let width = self.graph.tensor(cache).layout.shape()[0];
            let rows = self
                .graph
                .reshape(rows, [width, self.shape.n_tokens, 1, 1])?;
            let written = self.graph.set_rows(rows, self.inputs.cells, cache)?;
            self.named(written, name, il);
        }
        Ok(())
    }

    /// Whether nothing is left to do: the last layer's keys and values are stored and no logits are wanted.
    fn is_finished(&self, il: usize) -> bool {
        self.shape.n_outputs == 0 && il + 1 == self.hparams.n_layer()
    }

    fn mask(&mut self) -> Result<TensorId> {
        if let Some(mask) = self.inputs.mask {
            return Ok(mask);
        }
        let shape = [self.shape.n_kv, self.shape.n_tokens, 1, 1];
        let mask = self.graph.input("inp_mask", DType::F16, shape)?;
        self.inputs.mask = Some(mask);
        Ok(mask)
    }

    /// The cached rows that attention looks at, by head: `[head size, cells, kv heads]`.
    fn cached(
        &mut self,
        cache: &Arc<StoredTensor>,
        size: usize,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let leaf = self.stored(cache)?;
        let layout = *cache.layout();
        let (row, head) = (layout.row_bytes(), layout.dtype().row_bytes(size)?);
        let shape = [size, self.shape.n_kv, layout.shape()[0] / size, 1];
        let all = layout.strides()[1] * layout.shape()[1];
        let view = self.graph.view(leaf, shape, [row, head, all], 0)?;
        Ok(self.named(view, name, il))
    }

    /// What the queries find in the cache: `[head size · heads, tokens]`.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn attention(&mut self, q: TensorId, il: usize) -> Result<TensorId> {
        let (hparams, cache) = (self.hparams, &self.cache[il]);
        let mask = self.mask()?;
        let k = self.cached(&cache.k, hparams.head_dim_k, "k", il)?;
        let v = self.cached(&cache.v, hparams.head_dim_v, "v", il)?;
        let q = self.graph.permute(q, [0, 2, 1, 3])?;
        self.named(q, "q", il);
        let scale = 1.0 / (hparams.head_dim_k as f32).sqrt();
        let attended = if self.flash {
            let attended = self.graph.flash_attn([q, k, v], Some(mask), None, scale)?;
            self.named(attended, "fattn", il)
        } else {
            let logits = self.graph.mul_mat(k, q)?;
            self.named(logits, "kq", il);
            let weights = self.graph.soft_max(logits, Some(mask), None, scale, 0.0)?;
            self.named(weights, "kq_soft_max", il);
            let v = self.graph.transpose(v)?;
            let v = self.graph.cont(v)?;
            self.named(v, "v_cont", il);
            let attended = self.graph.mul_mat(v, weights)?;
            self.named(attended, "kqv", il);
            let merged = self.graph.permute(attended, [0, 2, 1, 3])?;
            let merged = self.graph.cont(merged)?;
            self.named(merged, "kqv_merged", il)
        };
        let width = hparams.head_dim_v * hparams.layers[il].n_head;
        let flat = self
            .graph
            .reshape(attended, [width, self.shape.n_tokens, 1, 1])?;
        Ok(self.named(flat, "kqv_out", il))
    }

    /// In the last layer, only those columns that lead to wanted logits; else `tensors` themselves.
    ///
    /// # Errors
    /// If operands do not fit.
    fn keep_outputs(&mut self, tensors: [TensorId; 2], il: usize) -> Result<[TensorId; 2]> {
        let n_outputs = self.shape.n_outputs;
        if il + 1 != self.hparams.n_layer() || n_outputs == self.shape.n_tokens {
            return Ok(tensors);
        }
        let outputs = self
            .graph
            .input("inp_out_ids", DType::I32, [n_outputs, 1, 1, 1])?;
        self.inputs.outputs = Some(outputs);
        let [a, b] = tensors.map(|tensor| self.graph.get_rows(tensor, outputs));
        let kept = [a?, b?];
        self.named(kept[0], "kqv_out_kept", il);
        self.named(kept[1], "inp_kept", il);
        Ok(kept)
    }

    /// What follows attention in a layer: projection, residual `x`, norm, gated feed-forward part or mixture of experts,
    /// residual.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn rest_of_layer(
        &mut self,
        attended: TensorId,
        x: TensorId,
        il: usize,
    ) -> Result<TensorId> {
        let [attended, x] = self.keep_outputs([attended, x], il)?;
        let projected = self.linear(attended, "attn_output", "attn_out", il)?;
        let middle = self.add(projected, x, "ffn_inp", il)?;
        let normed = self.norm(middle, "ffn_norm", il)?;
        let ffn = match self.hparams.experts {
            Some(experts) => self.mixture(normed, experts, il)?,
            None => self.swiglu(normed, il)?,
        };
        self.add(ffn, middle, "l_out", il)
    }

    /// The gated feed-forward part.
    ///
    /// # Errors
    /// If operands do not fit.
    fn swiglu(&mut self, x: TensorId, il: usize) -> Result<TensorId> {
        let gate = self.linear(x, "ffn_gate", "ffn_gate", il)?;
        let up = self.linear(x, "ffn_up", "ffn_up", il)?;
        let product = self.graph.glu_split(gate, up, Glu::Swiglu)?;
        self.named(product, "ffn_swiglu", il);
        self.linear(product, "ffn_down", "ffn_out", il)
    }

    /// The mixture of experts: of each token's `experts.used` most probable ones, with weights that add up to 1.
    ///
    /// # Errors
    /// If operands do not fit.
    fn mixture(&mut self, x: TensorId, experts: Experts, il: usize) -> Result<TensorId> {
        let Experts { count, used, .. } = experts;
        let [width, n_tokens, ..] = self.graph.tensor(x).layout.shape();
        let router = self.linear(x, "ffn_gate_inp", "ffn_moe_logits", il)?;
        let probabilities = self.graph.soft_max(router, None, None, 1.0, 0.0)?;
        self.named(probabilities, "ffn_moe_probs", il);
        let sorted = self.graph.argsort(probabilities, SortOrder::Descending)?;
        self.named(sorted, "ffn_moe_argsort", il);
        let [_, s1, s2, s3] = self.graph.tensor(sorted).layout.strides();
        let chosen = self
            .graph
            .view(sorted, [used, n_tokens, 1, 1], [s1, s2, s3], 0)?;
        self.named(chosen, "ffn_moe_topk", il);

        let single = self.graph.reshape(probabilities, [1, count, n_tokens, 1])?;
        let weights = self.graph.get_rows(single, chosen)?;
        self.named(weights, "ffn_moe_weights", il);
        let weights = self.graph.reshape(weights, [used, n_tokens, 1, 1])?;
        let sum = self.graph.sum_rows(weights)?;
        self.named(sum, "ffn_moe_weights_sum", il);
        // The smallest normal number of half precision, as llama.cpp has it: no division by zero.
        let sum = self.graph.clamp(sum, 2f32.powi(-14), f32::INFINITY)?;
        self.named(sum, "ffn_moe_weights_sum_clamped", il);
        let weights = self.graph.div(weights, sum)?;
        self.named(weights, "ffn_moe_weights_norm", il);
        let weights = self.graph.reshape(weights, [1, used, n_tokens, 1])?;

        let x = self.graph.reshape(x, [width, 1, n_tokens, 1])?;
        let up = self.expert_product("ffn_up_exps", x, chosen, "ffn_moe_up", il)?;
        let gate = self.expert_product("ffn_gate_exps", x, chosen, "ffn_moe_gate", il)?;
        let product = self.graph.glu_split(gate, up, Glu::Swiglu)?;
        self.named(product, "ffn_moe_swiglu", il);
        let down = self.expert_product("ffn_down_exps", product, chosen, "ffn_moe_down", il)?;
        let weighted = self.graph.mul(down, weights)?;
        self.named(weighted, "ffn_moe_weighted", il);

        let [_, one_expert, one_token, all] = self.graph.tensor(weighted).layout.strides();
        let mut sum = None;
        for expert in 0..used {
            let shape = [width, n_tokens, 1, 1];
            let strides = [one_token, all, all];
            let said = self
                .graph
                .view(weighted, shape, strides, expert * one_expert)?;
            sum = Some(match sum {
                None if used == 1 => self.graph.cont(said)?,
                None => said,
                Some(sum) => self.add(sum, said, "ffn_moe_out", il)?,
            });
        }
        sum.ok_or_else(|| Error::invalid("a mixture of no experts"))
    }

    fn expert_product(
        &mut self,
        weights: &str,
        x: TensorId,
        chosen: TensorId,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let weights = format!("blk.{il}.{weights}.weight");
        let matrices = self.weight(&weights)?;
        let y = self.graph.mul_mat_id(matrices, x, chosen)?;
        let y = self.adapted(y, &weights, |blocks, _, [a, b]| {
            let inner = blocks.graph.mul_mat_id(a, x, chosen)?;
            blocks.graph.mul_mat_id(b, inner, chosen)
        })?;
        Ok(self.named(y, name, il))
    }

    /// The logits, from the last layer's result.
    ///
    /// # Errors
    /// If operands do not fit.
    pub fn output(&mut self, x: TensorId) -> Result<()> {
        let scale = self.weight("output_norm.weight")?;
        let normed = self.graph.rms_norm(x, self.hparams.rms_eps)?;
        self.graph.set_name(normed, "norm");
        let normed = self.graph.mul(normed, scale)?;
        self.graph.set_name(normed, "result_norm");
        let mut logits = self.product(normed, "output.weight")?;
        if let Some(bias) = self.optional_weight("output.bias")? {
            self.graph.set_name(logits, "result_output_no_bias");
            logits = self.graph.add(logits, bias)?;
        }
        self.graph.set_name(logits, "result_output");
        self.graph.set_output(logits);
        self.inputs.logits = Some(logits);
        Ok(())
    }
}
