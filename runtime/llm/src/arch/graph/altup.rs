//! The nodes of AltUp, with several residual streams: `[width, altup, tokens]`.

use super::Builder;
use crate::arch::graph::Input;
use crate::arch::spec::{AltUp, Layer};
use samite_core::{DType, Result, TensorId, Unary};

impl Builder<'_> {
    /// Creates all streams from the embedding.
    pub(super) fn spread(&mut self, s: &AltUp, x: TensorId) -> Result<TensorId> {
        let [width, n_tokens, ..] = self.extents(x);
        let repeated = self.graph.repeat(x, [width, n_tokens, s.count - 1, 1])?;
        let others = self.product(repeated, s.begin)?;
        let others = self.as_long_as(x, others)?;
        let others = self.graph.permute(others, [0, 2, 1, 3])?;
        let others = self.graph.cont(others)?;
        let first = self.graph.reshape(x, [width, 1, n_tokens, 1])?;
        let all = self.graph.concat(first, others, 1)?;
        self.graph.set_name(all, "inp_stacked");
        Ok(all)
    }

    /// Merges all streams into one.
    pub(super) fn merged(&mut self, s: &AltUp, all: TensorId) -> Result<TensorId> {
        let first = self.first_stream(all)?;
        let others = self.other_streams(all)?;
        let others = self.graph.permute(others, [0, 2, 1, 3])?;
        let others = self.graph.cont(others)?;
        let others = self.product(others, s.end)?;
        let others = self.as_long_as(first, others)?;
        let [width, n_tokens, count, _] = self.extents(others);
        let [_, row, stream, _] = self.graph.tensor(others).layout.strides();
        let mut sum = first;
        for number in 0..count {
            let shape = [width, n_tokens, 1, 1];
            let strides = [row, stream, stream];
            let one = self.graph.view(others, shape, strides, number * stream)?;
            sum = self.graph.add(sum, one)?;
        }
        let mean = self.graph.scale(sum, 1.0 / s.count as f32)?;
        self.graph.set_name(mean, "unembd_merged");
        Ok(mean)
    }

    /// Returns all streams after a layer, or `None` like [`layer`](Self::layer).
    pub(super) fn layer_of_streams(
        &mut self,
        s: &AltUp,
        layer: &Layer,
        all: TensorId,
        last: [usize; 2],
    ) -> Result<Option<TensorId>> {
        let mut predicted = self.predicted(s, all)?;
        let first = self.first_stream(predicted)?;
        self.named(first, "active_prediction");
        let Some(found) = self.layer(layer, first, last)? else {
            return Ok(None);
        };
        self.named(found, "attn_ffw_laurel_gated");
        let [width, count, n_tokens, _] = self.extents(predicted);
        let n_found = self.extents(found)[1];
        if n_found != n_tokens {
            let rows = self.input(Input::Outputs, DType::I32, [n_found, 1, 1, 1])?;
            let shape = [width * count, n_tokens, 1, 1];
            predicted = self.graph.reshape(predicted, shape)?;
            predicted = self.graph.get_rows(predicted, rows)?;
            let shape = [width, count, n_found, 1];
            predicted = self.graph.reshape(predicted, shape)?;
        }
        let corrected = self.corrected(s, predicted, found)?;

        let first = self.first_stream(corrected)?;
        let scale = self.weight(s.correct_scale)?;
        let scaled = self.graph.mul(first, scale)?;
        let (gate, output, post) = &s.others;
        let change = self.per_layer(gate, output, scaled)?;
        let change = self.norm(change, post)?;
        let change = self.graph.reshape(change, [width, 1, n_found, 1])?;
        let others = self.other_streams(corrected)?;
        let others = self.graph.add(others, change)?;
        let first = self.graph.reshape(first, [width, 1, n_found, 1])?;
        let all = self.graph.concat(first, others, 1)?;
        Ok(Some(self.named(all, "l_out")))
    }

    /// Returns the router's result for the stream `x`: `[altup, tokens]`.
    fn modalities(&mut self, s: &AltUp, x: TensorId) -> Result<TensorId> {
        let [width, ..] = self.extents(x);
        let normed = self.norm(x, &s.router_norm)?;
        let normed = self.graph.scale(normed, 1.0 / width as f32)?;
        let routed = self.linear(normed, &s.router, "altup_router")?;
        let said = self.graph.unary(routed, Unary::Tanh)?;
        Ok(self.named(said, "modalities"))
    }

    /// Adds a mixture of all streams to each stream.
    fn predicted(&mut self, s: &AltUp, all: TensorId) -> Result<TensorId> {
        let [_, count, n_tokens, _] = self.extents(all);
        let first = self.first_stream(all)?;
        let said = self.modalities(s, first)?;
        let shares = self.linear(said, &s.predict, "all_coefs")?;
        let shares = self.graph.reshape(shares, [count, count, n_tokens, 1])?;
        let turned = self.graph.transpose(all)?;
        let turned = self.graph.cont(turned)?;
        let mixed = self.graph.mul_mat(turned, shares)?;
        let sum = self.graph.add(mixed, all)?;
        Ok(self.named(sum, "predictions"))
    }

    /// Corrects all streams by the difference between the layer's result and the first stream.
    fn corrected(&mut self, s: &AltUp, all: TensorId, found: TensorId) -> Result<TensorId> {
        let [width, count, n_tokens, _] = self.extents(all);
        let said = self.modalities(s, found)?;
        let first = self.first_stream(all)?;
        let change = self.graph.sub(found, first)?;
        self.named(change, "innovation");
        let shares = self.linear(said, &s.correct, "all_coefs")?;
        let shares = self.graph.scale_bias(shares, 1.0, 1.0)?;
        let shares = self.graph.reshape(shares, [1, count, n_tokens, 1])?;
        let change = self.graph.reshape(change, [width, 1, n_tokens, 1])?;
        let change = self.graph.repeat(change, [width, count, n_tokens, 1])?;
        let change = self.graph.mul(change, shares)?;
        let sum = self.graph.add(change, all)?;
        Ok(self.named(sum, "corrected"))
    }

    /// Returns the first stream: `[width, tokens]`.
    fn first_stream(&mut self, all: TensorId) -> Result<TensorId> {
        let layout = self.graph.tensor(all).layout;
        let ([width, _, n_tokens, _], [_, _, token, _]) = (layout.shape(), layout.strides());
        let end = token * n_tokens;
        let first = self
            .graph
            .view(all, [width, n_tokens, 1, 1], [token, end, end], 0)?;
        self.graph.cont(first)
    }

    /// Returns all streams but the first.
    fn other_streams(&mut self, all: TensorId) -> Result<TensorId> {
        let layout = self.graph.tensor(all).layout;
        let ([width, count, n_tokens, _], [_, stream, token, end]) =
            (layout.shape(), layout.strides());
        let shape = [width, count - 1, n_tokens, 1];
        self.graph.view(all, shape, [stream, token, end], stream)
    }

    /// Rescales the columns of `x` to the lengths of those of `like`.
    fn as_long_as(&mut self, like: TensorId, x: TensorId) -> Result<TensorId> {
        let [wanted, own] = [self.lengths(like)?, self.lengths(x)?];
        let scaled = self.graph.mul(x, wanted)?;
        self.graph.div(scaled, own)
    }

    fn lengths(&mut self, x: TensorId) -> Result<TensorId> {
        let squares = self.graph.sqr(x)?;
        let sums = self.graph.sum_rows(squares)?;
        self.graph.sqrt(sums)
    }
}
