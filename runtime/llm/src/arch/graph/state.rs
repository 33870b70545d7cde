//! The nodes of layers with a recurrent state.

use super::Builder;
use crate::arch::graph::Input;
use crate::arch::spec::{
    ConvolutionSteps, DeltaInput, DeltaNet, DeltaRates, ShortConv, StateSpace, Steps,
};
use samite_core::{DType, Error, Glu, Result, StoredTensor, TensorId, Unary};
use std::sync::Arc;

impl Builder<'_> {
    /// Returns the number of tokens of each sequence.
    fn n_each(&self) -> usize {
        self.shape.n_tokens / self.shape.n_seqs.max(1)
    }

    fn is_finished(&self) -> bool {
        self.is_last_mixing && self.shape.n_outputs == 0
    }

    fn kept(&self, tensor: Option<&Arc<StoredTensor>>) -> Result<Arc<StoredTensor>> {
        let missing = || Error::invalid(format!("layer {} keeps no state", self.il));
        tensor.cloned().ok_or_else(missing)
    }

    /// Reads the state of each sequence: `[elements, sequences]`.
    fn remembered(&mut self, kept: &Arc<StoredTensor>) -> Result<TensorId> {
        let shape = [self.shape.n_seqs, 1, 1, 1];
        let rows = self.input(Input::StateRead, DType::I32, shape)?;
        let kept = self.stored(kept)?;
        self.graph.get_rows(kept, rows)
    }

    /// Writes the state of each sequence.
    fn remember(&mut self, rows: TensorId, kept: &Arc<StoredTensor>, name: &str) -> Result<()> {
        let shape = [self.shape.n_seqs, 1, 1, 1];
        let numbers = self.input(Input::StateWrite, DType::I64, shape)?;
        let kept = self.stored(kept)?;
        let written = self.graph.set_rows(rows, numbers, kept)?;
        self.named(written, name);
        Ok(())
    }

    /// Convolves `x` `[channels, tokens, sequences]` over time, after each sequence's convolution
    /// state, and updates that state.
    fn convolved(&mut self, x: TensorId, weights: &str) -> Result<TensorId> {
        let cache = self.parts.cache.get(self.il).and_then(|c| c.conv.as_ref());
        let kept = self.kept(cache)?;
        let weights = self.weight(weights)?;
        let ([width, channels, ..], n_seqs) = (self.extents(weights), self.shape.n_seqs);
        let before = self.remembered(&kept)?;
        let before = self
            .graph
            .reshape(before, [width - 1, channels, n_seqs, 1])?;
        let turned = self.graph.transpose(x)?;
        let all = self.graph.concat(before, turned, 0)?;
        self.named(all, "conv_input");
        let end = self.columns(all, self.extents(all)[0] + 1 - width, width - 1)?;
        let rows = [(width - 1) * channels, n_seqs, 1, 1];
        let end = self.graph.reshape(end, rows)?;
        self.remember(end, &kept, "conv_state")?;
        let sums = self.graph.ssm_conv(all, weights)?;
        Ok(self.named(sums, "conv_output"))
    }

    /// Convolves `x` with zero padding on both sides of each sequence; uses no state.
    fn convolved_on_both_sides(&mut self, x: TensorId, weights: &str) -> Result<TensorId> {
        let weights = self.weight(weights)?;
        let around = self.extents(weights)[0] - 1;
        let turned = self.graph.transpose(x)?;
        let turned = self.graph.cont(turned)?;
        let (before, after) = (around / 2, around - around / 2);
        let all = self
            .graph
            .pad(turned, [before, 0, 0, 0], [after, 0, 0, 0])?;
        self.named(all, "conv_input");
        let sums = self.graph.ssm_conv(all, weights)?;
        Ok(self.named(sums, "conv_output"))
    }

    /// Appends a short convolution between two gates. Returns `None` if no logits are requested.
    pub(super) fn short_conv(&mut self, c: &ShortConv, x: TensorId) -> Result<Option<TensorId>> {
        let all = self.linear(x, &c.input, "bcx")?;
        let (n_each, n_seqs) = (self.n_each(), self.shape.n_seqs);
        let all = self
            .graph
            .reshape(all, [3 * c.channels, n_each, n_seqs, 1])?;
        let [before, behind, x] = [0, 1, 2].map(|i| self.part_of(all, i * c.channels, c.channels));
        let (before, behind, x) = (before?, behind?, x?);
        let x = self.graph.mul(before, x)?;
        let sums = if c.is_bidirectional {
            self.convolved_on_both_sides(x, c.weights)?
        } else {
            self.convolved(x, c.weights)?
        };
        if self.is_finished() {
            return Ok(None);
        }
        let gated = self.graph.mul(behind, sums)?;
        let gated = self
            .graph
            .reshape(gated, [c.channels, self.shape.n_tokens, 1, 1])?;
        let gated = self.wanted(gated, "conv_kept")?;
        self.linear(gated, &c.output, "conv_out").map(Some)
    }

    /// Returns some elements of each row.
    fn part_of(&mut self, x: TensorId, first: usize, count: usize) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        let ([_, n1, n2, n3], [s0, s1, s2, s3]) = (layout.shape(), layout.strides());
        self.graph
            .view(x, [count, n1, n2, n3], [s1, s2, s3], first * s0)
    }

    /// Appends a gated delta net. Returns `None` if no logits are requested.
    pub(super) fn delta_net(&mut self, d: &DeltaNet, x: TensorId) -> Result<Option<TensorId>> {
        let cache = self.parts.cache.get(self.il).and_then(|c| c.state.as_ref());
        let kept = self.kept(cache)?;
        let (n_tokens, n_each, n_seqs) = (self.shape.n_tokens, self.n_each(), self.shape.n_seqs);
        let [_, bias, factor] = d.names;
        let (mixed, gate) = self.delta_input(d, x)?;
        let (alpha, beta) = self.delta_rates(d, x)?;
        let beta = self.graph.unary(beta, Unary::Sigmoid)?;
        self.named(beta, "beta_sigmoid");
        let one = [1, d.n_head, n_each, n_seqs];
        let beta = self.graph.reshape(beta, one)?;
        let bias = self.weight(bias)?;
        let alpha = self.graph.add(alpha, bias)?;
        let alpha = self.graph.unary(alpha, Unary::SoftPlus)?;
        let factor = self.weight(factor)?;
        let decay = self.graph.mul(alpha, factor)?;
        self.named(decay, "gate");
        let decay = self.graph.reshape(decay, one)?;

        let channels = d.channels();
        let mixed = self.graph.reshape(mixed, [channels, n_each, n_seqs, 1])?;
        let sums = self.convolved(mixed, d.names[0])?;
        let sums = self.graph.unary(sums, Unary::Silu)?;
        self.named(sums, "conv_output_silu");
        let q = self.delta_heads(sums, d.size, d.n_head_k, 0)?;
        let k = self.delta_heads(sums, d.size, d.n_head_k, d.size * d.n_head_k)?;
        let v = self.delta_heads(sums, d.size, d.n_head, 2 * d.size * d.n_head_k)?;
        let q = self.unit(q, d)?;
        let k = self.unit(k, d)?;

        let elements = d.size * d.size * d.n_head;
        let state = self.remembered(&kept)?;
        let state = self
            .graph
            .reshape(state, [d.size, d.size, d.n_head, n_seqs])?;
        let both = self
            .graph
            .gated_delta_net([q, k, v, decay, beta, state], 1)?;
        self.named(both, "delta_net");
        let [element, ..] = self.graph.tensor(both).layout.strides();
        let outputs = d.size * d.n_head * n_tokens;
        let row = elements * element;
        let state = self.graph.view(
            both,
            [elements, n_seqs, 1, 1],
            [row, row * n_seqs, row * n_seqs],
            outputs * element,
        )?;
        self.remember(state, &kept, "state")?;
        if self.is_finished() {
            return Ok(None);
        }
        let head = d.size * element;
        let (token, all) = (head * d.n_head, head * d.n_head * n_tokens);
        let found =
            self.graph
                .view(both, [d.size, d.n_head, n_tokens, 1], [head, token, all], 0)?;
        let normed = self.norm(found, &d.norm)?;
        let gate = self.graph.unary(gate, Unary::Silu)?;
        let gate = self.graph.reshape(gate, [d.size, d.n_head, n_tokens, 1])?;
        let gated = self.graph.mul(normed, gate)?;
        let gated = self
            .graph
            .reshape(gated, [d.size * d.n_head, n_tokens, 1, 1])?;
        self.named(gated, "final_output");
        let gated = self.wanted(gated, "delta_kept")?;
        self.linear(gated, &d.output, "linear_attn_out").map(Some)
    }

    /// Appends a selective state space. Returns `None` if no logits are requested.
    pub(super) fn state_space(&mut self, s: &StateSpace, x: TensorId) -> Result<Option<TensorId>> {
        let cache = self.parts.cache.get(self.il).and_then(|c| c.state.as_ref());
        let kept = self.kept(cache)?;
        let (n_tokens, n_each, n_seqs) = (self.shape.n_tokens, self.n_each(), self.shape.n_seqs);
        let (inner, channels) = (s.inner(), s.channels());
        let all = self.linear(x, &s.input, "ssm_in")?;
        let width = self.extents(all)[0];
        let all = self.graph.reshape(all, [width, n_each, n_seqs, 1])?;
        let [gate_at, mixed_at] = match s.steps {
            Steps::OfInput => [0, inner],
            Steps::OfConvolution(_) => [inner, 0],
        };
        let gate = self.part_of(all, gate_at, inner)?;
        let mixed = self.part_of(all, mixed_at, channels)?;
        let mut sums = self.convolved(mixed, "ssm_conv1d.weight")?;
        if let Some(bias) = self.optional_weight("ssm_conv1d.bias")? {
            sums = self.graph.add(sums, bias)?;
        }
        let sums = self.graph.unary(sums, Unary::Silu)?;
        self.named(sums, "conv_output_silu");
        let x = self.delta_heads(sums, s.size, s.n_head, 0)?;
        let shared = s.groups * s.columns;
        let (steps, b, c) = match &s.steps {
            Steps::OfInput => {
                let steps = self.columns(all, inner + channels, s.n_head)?;
                let bias = self.weight("ssm_dt.bias")?;
                let b = self.delta_heads(sums, s.columns, s.groups, inner)?;
                let c = self.delta_heads(sums, s.columns, s.groups, inner + shared)?;
                (self.graph.add(steps, bias)?, b, c)
            }
            Steps::OfConvolution(steps) => {
                let ConvolutionSteps {
                    rank,
                    all,
                    norms,
                    up,
                } = &**steps;
                let all = self.linear(sums, all, "ssm_x_db")?;
                let extents = [(0, *rank), (*rank, shared), (rank + shared, shared)];
                let [mut steps, mut b, mut c] = [all; 3];
                let parts = [&mut steps, &mut b, &mut c].into_iter().zip(extents);
                for (number, (part, (first, count))) in parts.enumerate() {
                    *part = self.columns(all, first, count)?;
                    if let Some(norms) = norms {
                        *part = self.norm(*part, &norms[number])?;
                    }
                }
                let heads = [s.columns, s.groups, n_each, n_seqs];
                let b = self.graph.reshape(b, heads)?;
                let c = self.graph.reshape(c, heads)?;
                (self.linear(steps, up, "ssm_dt")?, b, c)
            }
        };
        self.named(steps, "ssm_dt");
        let rates = self.weight("ssm_a")?;
        let rows = self.input(Input::StateRead, DType::I32, [n_seqs, 1, 1, 1])?;
        let matrices = self.stored(&kept)?;
        let shape = [s.columns, s.size, s.n_head, kept.layout().shape()[1]];
        let matrices = self.graph.reshape(matrices, shape)?;
        let both = self
            .graph
            .ssm_scan([matrices, x, steps, rates, b, c, rows], 1)?;
        self.named(both, "ssm_scan");

        let elements = s.columns * inner;
        let [element, ..] = self.graph.tensor(both).layout.strides();
        let row = elements * element;
        let state = self.graph.view(
            both,
            [elements, n_seqs, 1, 1],
            [row, row * n_seqs, row * n_seqs],
            inner * n_tokens * element,
        )?;
        self.remember(state, &kept, "state")?;
        if self.is_finished() {
            return Ok(None);
        }
        let head = s.size * element;
        let (token, all) = (head * s.n_head, head * s.n_head * n_tokens);
        let found = [s.size, s.n_head, n_tokens, 1];
        let found = self.graph.view(both, found, [head, token, all], 0)?;
        // Skip connection.
        let factors = self.weight("ssm_d")?;
        let factors = self.graph.reshape(factors, [1, s.n_head, 1, 1])?;
        let x = self.graph.cont(x)?;
        let x = self.graph.reshape(x, [s.size, s.n_head, n_tokens, 1])?;
        let direct = self.graph.mul(x, factors)?;
        let sum = self.graph.add(direct, found)?;
        let sum = self.graph.reshape(sum, [inner, n_tokens, 1, 1])?;
        let gate = self.graph.cont(gate)?;
        let gate = self.graph.reshape(gate, [inner, n_tokens, 1, 1])?;
        let mut gated = self.graph.glu_split(gate, sum, Glu::Swiglu)?;
        if let Some(norm) = &s.norm {
            let groups = [inner / s.groups, s.groups, n_tokens, 1];
            let by_group = self.graph.reshape(gated, groups)?;
            let normed = self.norm(by_group, norm)?;
            gated = self.graph.reshape(normed, [inner, n_tokens, 1, 1])?;
        }
        self.named(gated, "final_output");
        let gated = self.wanted(gated, "ssm_kept")?;
        self.linear(gated, &s.output, "ssm_out").map(Some)
    }

    /// Returns queries, keys and values `[channels, tokens]`, and gates `[size · heads, tokens]`.
    fn delta_input(&mut self, d: &DeltaNet, x: TensorId) -> Result<(TensorId, TensorId)> {
        let linear = match &d.input {
            DeltaInput::Split(qkv, gate) => {
                let mixed = self.linear(x, qkv, "linear_attn_qkv_mixed")?;
                return Ok((mixed, self.linear(x, gate, "z")?));
            }
            DeltaInput::ByHead(linear) => linear,
        };
        let all = self.linear(x, linear, "linear_attn_mixed_qkvz")?;
        let n_tokens = self.shape.n_tokens;
        let values = d.size * d.n_head / d.n_head_k;
        let each = 2 * d.size + 2 * values;
        let all = self.graph.reshape(all, [each, d.n_head_k, n_tokens, 1])?;
        let mut parts = [None; 4];
        let mut first = 0;
        for (part, count) in parts.iter_mut().zip([d.size, d.size, values, values]) {
            let columns = self.columns(all, first, count)?;
            let shape = [count * d.n_head_k, n_tokens, 1, 1];
            *part = Some(self.graph.reshape(columns, shape)?);
            first += count;
        }
        let [Some(q), Some(k), Some(v), Some(gate)] = parts else {
            return Err(Error::invalid("a part is missing"));
        };
        let qk = self.graph.concat(q, k, 0)?;
        Ok((self.graph.concat(qk, v, 0)?, gate))
    }

    /// Returns the inputs of decays and of betas: `[heads, tokens]` each.
    fn delta_rates(&mut self, d: &DeltaNet, x: TensorId) -> Result<(TensorId, TensorId)> {
        let linear = match &d.rates {
            DeltaRates::Split(decays, betas) => {
                let beta = self.linear(x, betas, "beta")?;
                return Ok((self.linear(x, decays, "alpha")?, beta));
            }
            DeltaRates::ByHead(linear) => linear,
        };
        let n_tokens = self.shape.n_tokens;
        let all = self.linear(x, linear, "mixed_ba")?;
        let each = d.n_head / d.n_head_k;
        let all = self
            .graph
            .reshape(all, [2 * each, d.n_head_k, n_tokens, 1])?;
        let [beta, alpha] = [0, each].map(|first| {
            let columns = self.columns(all, first, each)?;
            self.graph.reshape(columns, [d.n_head, n_tokens, 1, 1])
        });
        Ok((alpha?, beta?))
    }

    /// Returns the heads that start at element `first` of each row: `[size, heads, tokens,
    /// sequences]`.
    fn delta_heads(
        &mut self,
        x: TensorId,
        size: usize,
        count: usize,
        first: usize,
    ) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        let ([_, n1, n2, _], [s0, s1, s2, _]) = (layout.shape(), layout.strides());
        self.graph
            .view(x, [size, count, n1, n2], [size * s0, s1, s2], first * s0)
    }

    /// Normalizes heads to length 1, and repeats them for each value head if value heads that share
    /// a key head are adjacent.
    fn unit(&mut self, x: TensorId, d: &DeltaNet) -> Result<TensorId> {
        let size = d.size as f32;
        let normed = self.graph.rms_norm(x, d.eps / size)?;
        let unit = self.graph.scale(normed, 1.0 / size.sqrt())?;
        if d.n_head == d.n_head_k || !d.neighbours {
            return Ok(unit);
        }
        // The operation assigns key heads to value heads in turn; here, adjacent value heads share
        // a key head.
        let (n_each, n_seqs) = (self.n_each(), self.shape.n_seqs);
        let times = d.n_head / d.n_head_k;
        let rows = [d.size, 1, d.n_head_k * n_each * n_seqs, 1];
        let rows = self.graph.reshape(unit, rows)?;
        let shape = [d.size, times, d.n_head_k * n_each * n_seqs, 1];
        let repeated = self.graph.repeat(rows, shape)?;
        self.graph
            .reshape(repeated, [d.size, d.n_head, n_each, n_seqs])
    }
}
