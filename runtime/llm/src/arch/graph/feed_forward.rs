//! The nodes of feed-forward networks and of mixtures of experts.

use super::Builder;
use crate::arch::spec::{Activation, Experts, Linear, Mlp, RouterInput, Routing};
use samite_core::{Error, Glu, Result, SortOrder, TensorId, Unary};

/// Minimum divisor when weights are normalized: the smallest normal number of half precision, as in
/// llama.cpp.
const MIN_SUM: f32 = 6.103_515_6e-5;

impl Builder<'_> {
    /// Appends a feed-forward network, whose result is called `name`.
    pub(super) fn mlp(&mut self, x: TensorId, mlp: &Mlp, name: &str) -> Result<TensorId> {
        let product = |builder: &mut Self, linear: &Linear, x: TensorId| {
            builder.linear(x, linear, linear.name)
        };
        let gate = match &mlp.gate {
            Some(gate) => Some(product(self, gate, x)?),
            None => None,
        };
        let up = product(self, &mlp.up, x)?;
        let inner = self.activated(mlp.activation, gate, up)?;
        self.named(inner, &format!("ffn_{}", mlp.activation.name()));
        let inner = match mlp.divisor {
            Some(name) => {
                let divisor = self.weight(name)?;
                self.graph.div(inner, divisor)?
            }
            None => inner,
        };
        let inner = self.maybe_norm(inner, &mlp.sub_norm)?;
        self.linear(inner, &mlp.down, name)
    }

    fn activated(
        &mut self,
        activation: Activation,
        gate: Option<TensorId>,
        up: TensorId,
    ) -> Result<TensorId> {
        match (activation, gate) {
            (Activation::Gated(kind), Some(gate)) => self.graph.glu_split(gate, up, kind),
            (Activation::Gated(kind), None) => self.graph.glu(up, kind),
            (Activation::Plain(function), None) => self.graph.unary(up, function),
            (Activation::Plain(function), Some(gate)) => {
                let gate = self.graph.unary(gate, function)?;
                self.graph.mul(gate, up)
            }
            (Activation::ClampedSwiglu { limit }, gate) => {
                let Some(gate) = gate else {
                    return Err(Error::invalid("a gated unit without a gate"));
                };
                let up = self.graph.clamp(up, -limit, limit)?;
                let gate = self.graph.unary(gate, Unary::Silu)?;
                let gate = self.graph.clamp(gate, f32::NEG_INFINITY, limit)?;
                self.graph.mul(gate, up)
            }
            (Activation::SparseGeglu { deviations }, gate) => {
                let gate = gate.ok_or_else(|| Error::invalid("a gated unit without a gate"))?;
                let gate = self.exceeding(gate, deviations)?;
                self.graph.glu_split(gate, up, Glu::Geglu)
            }
            (Activation::SquaredRelu, gate) => {
                let positive = self.graph.unary(gate.unwrap_or(up), Unary::Relu)?;
                let square = self.graph.sqr(positive)?;
                match gate {
                    Some(_) => self.graph.mul(square, up),
                    None => Ok(square),
                }
            }
        }
    }

    /// Returns the amount by which elements exceed the mean of their row plus `deviations` standard
    /// deviations, or 0 for elements below.
    fn exceeding(&mut self, x: TensorId, deviations: f32) -> Result<TensorId> {
        let [width, ..] = self.extents(x);
        let mean = self.graph.mean(x)?;
        let distance = self.graph.sub(x, mean)?;
        let squares = self.graph.sqr(distance)?;
        let variance = self.graph.sum_rows(squares)?;
        let divisor = width.saturating_sub(1).max(1) as f32;
        let variance = self.graph.scale(variance, 1.0 / divisor)?;
        let deviation = self.graph.sqrt(variance)?;
        let least = self.graph.scale(deviation, deviations)?;
        let above = self.graph.sub(distance, least)?;
        self.graph.unary(above, Unary::Relu)
    }

    /// Returns the products of each token with the experts in `chosen`.
    fn expert_linear(
        &mut self,
        x: TensorId,
        linear: &Linear,
        chosen: TensorId,
        name: &str,
    ) -> Result<TensorId> {
        let weight = format!("{}.weight", linear.name);
        let experts = self.weight(&weight)?;
        let y = self.graph.mul_mat_id(experts, x, chosen)?;
        let n_tokens = self.extents(chosen)[1];
        let y = self.adapted(
            y,
            &weight,
            Some([1, 1, n_tokens, 1]),
            |builder, _, [a, b]| {
                let inner = builder.graph.mul_mat_id(a, x, chosen)?;
                builder.graph.mul_mat_id(b, inner, chosen)
            },
        )?;
        self.named(y, name);
        let y = self.scaled_by_expert(y, &format!("{}.scale", linear.name), chosen)?;
        match self.optional_weight(&format!("{}.bias", linear.name))? {
            Some(bias) => {
                let sum = self.graph.add_id(y, bias, chosen)?;
                Ok(self.named(sum, name))
            }
            None => Ok(y),
        }
    }

    /// Multiplies the results of the chosen experts by their elements of the vector called `name`,
    /// if the model has it.
    fn scaled_by_expert(&mut self, y: TensorId, name: &str, chosen: TensorId) -> Result<TensorId> {
        let Some(scales) = self.optional_weight(name)? else {
            return Ok(y);
        };
        let (count, n_tokens) = (self.extents(scales)[0], self.extents(chosen)[1]);
        let scales = self.graph.reshape(scales, [1, count, 1, 1])?;
        let scales = self.graph.repeat(scales, [1, count, n_tokens, 1])?;
        let scales = self.graph.get_rows(scales, chosen)?;
        self.graph.mul(y, scales)
    }

    /// Appends a mixture of experts for `x`; the residual streams are those before the sub-layer
    /// and before the layer.
    pub(super) fn experts(
        &mut self,
        e: &Experts,
        x: TensorId,
        [stream, before]: [TensorId; 2],
    ) -> Result<TensorId> {
        let [width, n_tokens, ..] = self.extents(x);
        let routed = match &e.router_input {
            RouterInput::Experts => x,
            RouterInput::Layer => self.wanted(before, "router_inp_kept")?,
            RouterInput::Normed(norm, scale) => {
                let stream = self.wanted(stream, "router_inp_kept")?;
                let normed = self.norm(stream, norm)?;
                self.graph.scale(normed, *scale)?
            }
        };
        let (chosen, weights) = self.route(e, routed)?;
        let single = [width, 1, n_tokens, 1];
        let mut inner = self.graph.reshape(x, single)?;
        if e.weigh_input {
            let repeated = self.graph.repeat(inner, [width, e.used, n_tokens, 1])?;
            inner = self.graph.mul(repeated, weights)?;
            self.named(inner, "ffn_moe_weighted");
        }
        let mlp = &e.experts;
        let up = self.expert_linear(inner, &mlp.up, chosen, "ffn_moe_up")?;
        let gate = match &mlp.gate {
            Some(gate) => Some(self.expert_linear(inner, gate, chosen, "ffn_moe_gate")?),
            None => None,
        };
        let product = self.activated(mlp.activation, gate, up)?;
        self.named(product, &format!("ffn_moe_{}", mlp.activation.name()));
        let mut said = self.expert_linear(product, &mlp.down, chosen, "ffn_moe_down")?;
        if !e.weigh_input {
            said = self.graph.mul(said, weights)?;
            self.named(said, "ffn_moe_weighted");
        }
        let mut sum = self.sum_of_experts(said)?;
        if let Some((mlp, gate)) = &e.shared {
            let mut shared = self.mlp(x, mlp, "ffn_shexp")?;
            if let Some(gate) = gate {
                let share = self.linear(x, gate, "shared_expert_gate")?;
                let share = self.graph.unary(share, Unary::Sigmoid)?;
                shared = self.graph.mul(shared, share)?;
                self.named(shared, "ffn_shexp_gated");
            }
            sum = self.graph.add(sum, shared)?;
            self.named(sum, "ffn_out");
        }
        Ok(sum)
    }

    /// Returns the experts of each token, i32 `[used, tokens]`, and their weights, `[1, used,
    /// tokens]`.
    fn route(&mut self, e: &Experts, x: TensorId) -> Result<(TensorId, TensorId)> {
        let (count, used) = (e.router.to, e.used);
        let n_tokens = self.extents(x)[1];
        let logits = self.linear(x, &e.router, "ffn_moe_logits")?;
        let scores = match e.routing {
            Routing::Softmax => self.graph.soft_max(logits, None, None, 1.0, 0.0)?,
            Routing::SoftmaxOfChosen => logits,
            Routing::Sigmoid => self.graph.unary(logits, Unary::Sigmoid)?,
            Routing::SqrtSoftplus => {
                let positive = self.graph.unary(logits, Unary::SoftPlus)?;
                self.graph.sqrt(positive)?
            }
        };
        self.named(scores, "ffn_moe_probs");
        let mut selection = scores;
        if let Some((name, _)) = e.selection_bias
            && let Some(bias) = self.optional_weight(name)?
        {
            selection = self.graph.add(scores, bias)?;
            self.named(selection, "ffn_moe_probs_biased");
        }
        if let Some([groups, used]) = e.groups {
            selection = self.best_groups(selection, groups, used)?;
            self.named(selection, "ffn_moe_probs_masked");
        }
        let chosen = self.largest(selection, used, "ffn_moe")?;
        let single = self.graph.reshape(scores, [1, count, n_tokens, 1])?;
        let weights = self.graph.get_rows(single, chosen)?;
        self.named(weights, "ffn_moe_weights");
        let mut weights = self.graph.reshape(weights, [used, n_tokens, 1, 1])?;
        if e.routing == Routing::SoftmaxOfChosen {
            weights = self.graph.soft_max(weights, None, None, 1.0, 0.0)?;
            self.named(weights, "ffn_moe_weights_softmax");
        }
        if e.normalize {
            let sum = self.graph.sum_rows(weights)?;
            self.named(sum, "ffn_moe_weights_sum");
            let sum = self.graph.clamp(sum, MIN_SUM, f32::INFINITY)?;
            self.named(sum, "ffn_moe_weights_sum_clamped");
            weights = self.graph.div(weights, sum)?;
            self.named(weights, "ffn_moe_weights_norm");
        }
        if let Some(scale) = e.scale {
            weights = self.graph.scale(weights, scale)?;
            self.named(weights, "ffn_moe_weights_scaled");
        }
        let weights = self.graph.reshape(weights, [1, used, n_tokens, 1])?;
        Ok((chosen, weights))
    }

    /// Returns the indices of the `count` largest elements of each row.
    fn largest(&mut self, x: TensorId, count: usize, name: &str) -> Result<TensorId> {
        let sorted = self.graph.argsort(x, SortOrder::Descending)?;
        self.named(sorted, &format!("{name}_argsort"));
        let layout = self.graph.tensor(sorted).layout;
        let ([_, n1, n2, n3], [_, s1, s2, s3]) = (layout.shape(), layout.strides());
        let chosen = self
            .graph
            .view(sorted, [count, n1, n2, n3], [s1, s2, s3], 0)?;
        Ok(self.named(chosen, &format!("{name}_topk")))
    }

    /// Replaces the scores of experts outside the `used` best of `groups` groups by minus infinity.
    /// The score of a group is the sum of its two best experts.
    fn best_groups(&mut self, scores: TensorId, groups: usize, used: usize) -> Result<TensorId> {
        let [count, n_tokens, ..] = self.extents(scores);
        let each = count / groups;
        let grouped = self.graph.reshape(scores, [each, groups, n_tokens, 1])?;
        let two = each.min(2);
        let best = self.largest(grouped, two, "ffn_moe_group")?;
        let single = self.graph.reshape(grouped, [1, each, groups, n_tokens])?;
        let best = self.graph.get_rows(single, best)?;
        let best = self.graph.reshape(best, [two, groups, n_tokens, 1])?;
        let sums = self.graph.sum_rows(best)?;
        let sums = self.graph.reshape(sums, [groups, n_tokens, 1, 1])?;
        let chosen = self.largest(sums, used, "ffn_moe_groups")?;
        let kept = self.graph.get_rows(grouped, chosen)?;
        let nothing = self.graph.fill(grouped, f32::NEG_INFINITY)?;
        let masked = self.graph.set_rows(kept, chosen, nothing)?;
        self.graph.reshape(masked, [count, n_tokens, 1, 1])
    }

    /// Returns the sum over the experts of each token.
    fn sum_of_experts(&mut self, said: TensorId) -> Result<TensorId> {
        let layout = self.graph.tensor(said).layout;
        let [width, used, n_tokens, _] = layout.shape();
        let [_, one_expert, one_token, all] = layout.strides();
        let mut sum = None;
        for expert in 0..used {
            let shape = [width, n_tokens, 1, 1];
            let strides = [one_token, all, all];
            let one = self.graph.view(said, shape, strides, expert * one_expert)?;
            sum = Some(match sum {
                None if used == 1 => self.graph.cont(one)?,
                None => one,
                Some(sum) => {
                    let sum = self.graph.add(sum, one)?;
                    self.named(sum, "ffn_moe_out")
                }
            });
        }
        sum.ok_or_else(|| Error::invalid("a mixture of no experts"))
    }
}
