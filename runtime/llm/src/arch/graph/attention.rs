//! The nodes of attention.

use super::{Builder, GraphShape, LayerCache};
use crate::arch::graph::Input;
use crate::arch::spec::{
    Attention, Gate, Latent, LatentUp, NormOver, Projection, RopeFactors, Rotation, Temperature,
};
use crate::arch::tensors::names;
use samite_core::{DType, Error, Op, Precision, Result, StoredTensor, TensorId, Unary};
use std::sync::Arc;

/// Keys, and values if the keys do not contain them.
type KeysValues = (TensorId, Option<TensorId>);

/// Projections of attention, `[head size, heads, tokens]` each.
struct Projected {
    /// Queries. Absent if no results are requested.
    q: Option<TensorId>,
    /// Keys and values, if the layer has its own.
    kv: Option<KeysValues>,
    /// Gate of the result, `[head size or 1, heads, tokens]`.
    gate: Option<TensorId>,
}

impl Builder<'_> {
    /// Returns the result of attention after the output matrix. Returns `None` if no logits are
    /// requested.
    pub(super) fn attention(&mut self, a: &Attention, x: TensorId) -> Result<Option<TensorId>> {
        let Projected { q, kv, gate } = self.projected(a, x)?;
        let mut own = None;
        if let Some((k, v)) = kv {
            // The norm of values comes first, so that devices see rotations and cache writes in
            // sequence.
            let v = match v {
                Some(v) => Some(self.normed_heads(a, v, 2, "Vcur")?),
                None => None,
            };
            let k = self.prepared(a, k, 1, "Kcur")?;
            if a.is_bidirectional {
                own = Some((k, v))
            } else {
                self.store(k, v)?
            }
        }
        let Some(q) = q else {
            return Ok(None);
        };
        let mut q = self.prepared(a, q, 0, "Qcur")?;
        if let Some(temperature) = a.temperature {
            q = self.cooled(q, temperature)?;
        }
        let (k, v) = match own {
            Some(own) => self.of_batch(a, own)?,
            None => self.of_cache(a)?,
        };
        let mut attended = self.attended(a, q, k, v)?;
        if let Some(gate) = gate {
            attended = self.gated(a, attended, gate)?;
        }
        let attended = self.wanted(attended, "kqv_out_kept")?;
        let attended = match &a.projection {
            Projection::Latent(latent) => self.latent_values(latent, a, attended)?,
            _ => attended,
        };
        let attended = self.maybe_norm(attended, &a.sub_norm)?;
        self.linear(attended, &a.output, "attn_out").map(Some)
    }

    /// Returns the queries, keys and values of `x`. Their products are adjacent, so that devices
    /// can share the preparation of `x`.
    fn projected(&mut self, a: &Attention, x: TensorId) -> Result<Projected> {
        let is_finished = self.is_last_mixing && self.shape.n_outputs == 0;
        let gate = match &a.gate {
            Some(Gate::Linear(linear, function)) if !is_finished => {
                let gate = self.linear(x, linear, "attn_gate")?;
                let gate = self.graph.unary(gate, *function)?;
                Some(self.named(gate, "attn_gate"))
            }
            _ => None,
        };
        let (heads, heads_kv) = (a.n_head, a.n_head_kv);
        let clamped = |builder: &mut Self, x| match a.clamp {
            Some(limit) => builder.graph.clamp(x, -limit, limit),
            None => Ok(x),
        };
        let (q, k, v) = match &a.projection {
            Projection::Fused(linear) => {
                let all = self.linear(x, linear, "wqkv")?;
                let all = clamped(self, all)?;
                let q = self.slice(all, a.head_k, heads, 0, "Qcur")?;
                let at = a.head_k * heads;
                let k = self.slice(all, a.head_k, heads_kv, at, "Kcur")?;
                let at = at + a.head_k * heads_kv;
                let v = self.slice(all, a.head_v, heads_kv, at, "Vcur")?;
                return Ok(Projected {
                    q: (!is_finished).then_some(q),
                    kv: Some((k, Some(v))),
                    gate,
                });
            }
            Projection::Latent(latent) => {
                let (q, kv) = self.latent(latent, a, x, is_finished)?;
                return Ok(Projected {
                    q,
                    kv: Some(kv),
                    gate,
                });
            }
            Projection::Separate { q, kv } => {
                let q = if is_finished {
                    None
                } else {
                    Some(self.linear(x, q, "Qcur")?)
                };
                match kv {
                    None => (q, None, None),
                    Some((k, v)) => {
                        let k = self.linear(x, k, "Kcur")?;
                        let v = match v {
                            Some(v) => Some(self.linear(x, v, "Vcur")?),
                            None => None,
                        };
                        (q, Some(k), v)
                    }
                }
            }
        };
        let mut gate = gate;
        let q = match q {
            None => None,
            Some(q) if a.gate == Some(Gate::InQueries) => {
                let pairs = self.heads(q, 2 * a.head_k, heads, "Qcur_full")?;
                let half = self.half(pairs, a.head_k, 1)?;
                let half = self.graph.cont(half)?;
                let half = self.graph.unary(half, Unary::Sigmoid)?;
                gate = Some(self.named(half, "gate_sigmoid"));
                Some(self.half(pairs, a.head_k, 0)?)
            }
            Some(q) => Some(self.whole_or_heads(a, q, 0, "Qcur", clamped)?),
        };
        let kv = match k {
            None => None,
            Some(k) => {
                let v = match v {
                    Some(v) => v,
                    None => k,
                };
                let k = self.whole_or_heads(a, k, 1, "Kcur", clamped)?;
                let v = clamped(self, v)?;
                Some((k, Some(self.heads(v, a.head_v, heads_kv, "Vcur")?)))
            }
        };
        Ok(Projected { q, kv, gate })
    }

    /// Returns the queries, and the keys and values, of latent attention.
    fn latent(
        &mut self,
        l: &Latent,
        a: &Attention,
        x: TensorId,
        is_finished: bool,
    ) -> Result<(Option<TensorId>, KeysValues)> {
        let (n_head, n_tokens) = (a.n_head, self.shape.n_tokens);
        let q = if is_finished {
            None
        } else {
            Some(self.latent_queries(l, a, x)?)
        };
        let all = self.linear(x, &l.kv, "kv_cmpr_pe")?;
        let short = self.columns(all, 0, l.rank)?;
        let short = self.norm(short, &l.norm)?;
        self.named(short, "kv_cmpr");
        let shared = self.slice(all, l.rotated, 1, l.rank, "k_pe")?;
        let LatentUp::Joint(up) = &l.up else {
            let short = self.graph.reshape(short, [l.rank, 1, n_tokens, 1])?;
            let k = self.graph.concat(short, shared, 0)?;
            return Ok((q, (self.named(k, "Kcur"), None)));
        };
        let both = self.linear(short, up, "kv")?;
        let each = l.plain + l.head_v;
        let both = self.graph.reshape(both, [each, n_head, n_tokens, 1])?;
        let [element, head, token, all] = self.graph.tensor(both).layout.strides();
        let strides = [head, token, all];
        let shape = [l.head_v, n_head, n_tokens, 1];
        let v = self.graph.view(both, shape, strides, l.plain * element)?;
        let v = self.graph.cont(v)?;
        let shape = [l.rotated, n_head, n_tokens, 1];
        let mut k = self.graph.repeat(shared, shape)?;
        if l.plain > 0 {
            let shape = [l.plain, n_head, n_tokens, 1];
            let plain = self.graph.view(both, shape, strides, 0)?;
            k = self.graph.concat(plain, k, 0)?;
        }
        Ok((q, (self.named(k, "Kcur"), Some(self.named(v, "Vcur")))))
    }

    fn latent_queries(&mut self, l: &Latent, a: &Attention, x: TensorId) -> Result<TensorId> {
        let (down, up) = &l.q;
        let x = match down {
            Some((down, norm)) => {
                let short = self.linear(x, down, "q_a")?;
                self.norm(short, norm)?
            }
            None => x,
        };
        let q = self.linear(x, up, "q")?;
        let q = self.heads(q, l.plain + l.rotated, a.n_head, "q")?;
        let LatentUp::Absorbed([k_b, _]) = l.up else {
            return Ok(q);
        };
        let plain = self.half(q, l.plain, 0)?;
        let layout = self.graph.tensor(q).layout;
        let ([_, n1, n2, _], [s0, s1, s2, s3]) = (layout.shape(), layout.strides());
        let shape = [l.rotated, n1, n2, 1];
        let rotated = self.graph.view(q, shape, [s1, s2, s3], l.plain * s0)?;
        let plain = self.graph.permute(plain, [0, 2, 1, 3])?;
        let k_b = self.weight(k_b)?;
        let absorbed = self.graph.mul_mat(k_b, plain)?;
        let absorbed = self.graph.permute(absorbed, [0, 2, 1, 3])?;
        self.named(absorbed, "q_nope_absorbed");
        let q = self.graph.concat(absorbed, rotated, 0)?;
        Ok(self.named(q, "Qcur"))
    }

    /// Returns the values that result from short rows, `[head size · heads, tokens]`.
    fn latent_values(&mut self, l: &Latent, a: &Attention, x: TensorId) -> Result<TensorId> {
        let LatentUp::Absorbed([_, v_b]) = l.up else {
            return Ok(x);
        };
        let n_tokens = self.extents(x)[1];
        let heads = self.graph.reshape(x, [l.rank, a.n_head, n_tokens, 1])?;
        let heads = self.graph.permute(heads, [0, 2, 1, 3])?;
        let v_b = self.weight(v_b)?;
        let values = self.graph.mul_mat(v_b, heads)?;
        self.named(values, "fattn_mla");
        let values = self.graph.permute(values, [0, 2, 1, 3])?;
        let values = self.graph.cont(values)?;
        let shape = [l.head_v * a.n_head, n_tokens, 1, 1];
        self.graph.reshape(values, shape)
    }

    /// Returns some of the elements of each row, without gaps.
    pub(super) fn columns(&mut self, x: TensorId, first: usize, count: usize) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        let ([_, n1, n2, n3], [s0, s1, s2, s3]) = (layout.shape(), layout.strides());
        let view = self
            .graph
            .view(x, [count, n1, n2, n3], [s1, s2, s3], first * s0)?;
        self.graph.cont(view)
    }

    /// Splits queries (0) or keys (1) into heads, after a norm over all heads if they have one.
    fn whole_or_heads(
        &mut self,
        a: &Attention,
        x: TensorId,
        which: usize,
        name: &str,
        clamped: impl Fn(&mut Self, TensorId) -> Result<TensorId>,
    ) -> Result<TensorId> {
        let mut x = clamped(self, x)?;
        if a.norm_over == NormOver::Token {
            x = self.maybe_norm(x, &a.norms[which])?;
        }
        self.heads(x, a.head_k, [a.n_head, a.n_head_kv][which], name)
    }

    fn heads(&mut self, x: TensorId, size: usize, count: usize, name: &str) -> Result<TensorId> {
        let n_tokens = self.extents(x)[1];
        let heads = self.graph.reshape(x, [size, count, n_tokens, 1])?;
        Ok(self.named(heads, name))
    }

    /// Returns heads that are slices of longer rows.
    fn slice(
        &mut self,
        x: TensorId,
        size: usize,
        count: usize,
        at: usize,
        name: &str,
    ) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        let [element, row, ..] = layout.strides();
        let n_tokens = layout.shape()[1];
        let strides = [size * element, row, row * n_tokens];
        let view = self
            .graph
            .view(x, [size, count, n_tokens, 1], strides, at * element)?;
        Ok(self.named(view, name))
    }

    /// Returns the first (0) or second (1) `size` elements of each head.
    fn half(&mut self, x: TensorId, size: usize, which: usize) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        let ([_, n1, n2, _], [s0, s1, s2, s3]) = (layout.shape(), layout.strides());
        self.graph
            .view(x, [size, n1, n2, 1], [s1, s2, s3], which * size * s0)
    }

    /// Permutes heads from `[head size, heads, tokens]` to `[head size, tokens, heads]`, as a view
    /// of a view: OpenVINO's plugin refuses attention on others.
    fn by_heads(&mut self, mut x: TensorId) -> Result<TensorId> {
        let layout = self.graph.tensor(x).layout;
        if layout.is_contiguous() {
            x = self.graph.reshape(x, layout.shape())?;
        }
        self.graph.permute(x, [0, 2, 1, 3])
    }

    /// Returns heads of queries (0), keys (1) or values (2) after their norm, if it applies to
    /// heads.
    fn normed_heads(
        &mut self,
        a: &Attention,
        x: TensorId,
        which: usize,
        name: &str,
    ) -> Result<TensorId> {
        match &a.norms[which] {
            Some(norm) => {
                let x = self.norm(x, norm)?;
                Ok(self.named(x, name))
            }
            None => Ok(x),
        }
    }

    /// Returns heads of queries (0) or keys (1) after norm and rotation.
    fn prepared(
        &mut self,
        a: &Attention,
        mut x: TensorId,
        which: usize,
        name: &str,
    ) -> Result<TensorId> {
        if a.norm_over == NormOver::Heads {
            x = self.normed_heads(a, x, which, name)?;
        }
        if let Some(rotation) = &a.rotation {
            let (positions, rope) = self.rotation(rotation)?;
            let rope_factors = self.rope_factors(rotation)?;
            x = self.graph.rope(x, positions, rope_factors, rope)?;
            self.named(x, name);
        }
        if a.norm_over == NormOver::RotatedHeads {
            x = self.normed_heads(a, x, which, name)?;
        }
        Ok(x)
    }

    fn rope_factors(&mut self, rotation: &Rotation) -> Result<Option<TensorId>> {
        if let RopeFactors::Yarn(yarn) = rotation.rope_factors {
            let pairs = [rotation.rope.dims / 2, 1, 1, 1];
            return Ok(Some(self.input(
                Input::RopeFactors(yarn),
                DType::F32,
                pairs,
            )?));
        }
        match rope_factors_name(rotation.rope_factors, self.parts.n_ctx) {
            Some(name) => self.global_weight(name),
            None => Ok(None),
        }
    }

    /// Scales queries by their positions.
    fn cooled(&mut self, q: TensorId, temperature: Temperature) -> Result<TensorId> {
        let shape = [1, 1, self.shape.n_tokens, 1];
        let scale = self.input(Input::Temperature(temperature), DType::F32, shape)?;
        let q = self.graph.mul(q, scale)?;
        Ok(self.named(q, "Qcur_attn_temp_scaled"))
    }

    /// Writes keys and values to the cells of their tokens.
    fn store(&mut self, k: TensorId, v: Option<TensorId>) -> Result<()> {
        let (keys, cache) = self.keys(self.il)?;
        let windowed = cache.windowed;
        let cells = self.per_token(Input::Cells { windowed }, DType::I64)?;
        let values = v.zip(cache.v.as_ref());
        for (rows, cache) in [(k, &keys)].into_iter().chain(values) {
            let name = format!("{} (view)", cache.name());
            let cache = self.stored(cache)?;
            let width = self.extents(cache)[0];
            let is_dense = self.graph.tensor(rows).layout.is_contiguous();
            let rows = if is_dense {
                rows
            } else {
                self.graph.cont(rows)?
            };
            let shape = [width, self.shape.n_tokens, 1, 1];
            let rows = self.graph.reshape(rows, shape)?;
            let written = self.graph.set_rows(rows, cells, cache)?;
            self.graph.set_name(written, name);
        }
        Ok(())
    }

    /// Returns the keys of a layer, and its cache.
    fn keys(&self, il: usize) -> Result<(Arc<StoredTensor>, LayerCache)> {
        let cache = self.parts.cache.get(il).cloned().unwrap_or_default();
        match &cache.k {
            Some(keys) => Ok((Arc::clone(keys), cache)),
            None => Err(Error::invalid(format!("layer {il} keeps no keys"))),
        }
    }

    /// Returns the first `n_kv` of the cached rows, by head: `[head size, cells, kv heads]`.
    fn cached(
        &mut self,
        cache: &Arc<StoredTensor>,
        size: usize,
        n_kv: usize,
        name: &str,
    ) -> Result<TensorId> {
        let leaf = self.stored(cache)?;
        let layout = *cache.layout();
        let (row, head) = (layout.row_bytes(), layout.dtype().row_bytes(size)?);
        let shape = [size, layout.shape()[0] / size, n_kv, 1];
        let all = layout.strides()[1] * layout.shape()[1];
        let view = self.graph.view(leaf, shape, [head, row, all], 0)?;
        let view = self.graph.permute(view, [0, 2, 1, 3])?;
        Ok(self.named(view, name))
    }

    /// Returns the cached keys and values that attention reads: `[head size, cells, kv heads]`.
    fn of_cache(&mut self, a: &Attention) -> Result<(TensorId, TensorId)> {
        let (keys, cache) = self.keys(a.keys_of.unwrap_or(self.il))?;
        let GraphShape { n_kv, n_window, .. } = self.shape;
        let n_kv = if cache.windowed { n_window } else { n_kv };
        let k = self.cached(&keys, a.head_k, n_kv, "k")?;
        let v = match &cache.v {
            Some(v) => self.cached(v, a.head_v, n_kv, "v")?,
            None => self.half(k, a.head_v, 0)?,
        };
        Ok((k, v))
    }

    /// Returns the keys and values of the micro-batch: `[head size, tokens, kv heads]`.
    fn of_batch(&mut self, a: &Attention, (k, v): KeysValues) -> Result<(TensorId, TensorId)> {
        let v = match v {
            Some(v) => v,
            None => self.half(k, a.head_v, 0)?,
        };
        let (k, v) = (self.by_heads(k)?, self.by_heads(v)?);
        Ok((self.named(k, "k"), self.named(v, "v")))
    }

    /// Returns the result of attention before the output matrix: `[head size · heads, tokens]`.
    fn attended(
        &mut self,
        a: &Attention,
        q: TensorId,
        k: TensorId,
        v: TensorId,
    ) -> Result<TensorId> {
        let cache = self.parts.cache.get(a.keys_of.unwrap_or(self.il));
        let input = Input::Mask {
            span: a.span,
            is_bidirectional: a.is_bidirectional,
            are_images_causal: a.are_images_causal,
            distances: a.max_bias != 0.0,
            windowed: cache.is_some_and(|cache| cache.windowed),
        };
        let (n_tokens, n_kv) = (self.shape.n_tokens, self.extents(k)[1]);
        let mask = self.input(input, DType::F16, [n_kv, n_tokens, 1, 1])?;
        let sinks = match a.sinks {
            Some(name) => Some(self.weight(name)?),
            None => None,
        };
        let q = self.by_heads(q)?;
        self.named(q, "q");
        let no_flash = cache.is_some_and(|cache| cache.no_flash);
        let attended = if self.parts.flash && !no_flash {
            let op = Op::FlashAttn {
                scale: a.scale,
                max_bias: a.max_bias,
                softcap: a.softcap,
                precision: Precision::F32,
            };
            let sources = [Some(q), Some(k), Some(v), Some(mask), sinks];
            let attended = self.graph.push(op, &sources)?;
            self.named(attended, "fattn")
        } else {
            let mut logits = self.graph.mul_mat(k, q)?;
            self.named(logits, "kq");
            let mut scale = a.scale;
            if a.softcap != 0.0 {
                logits = self.soft_cap(logits, scale, a.softcap)?;
                scale = 1.0;
            }
            let weights = self
                .graph
                .soft_max(logits, Some(mask), sinks, scale, a.max_bias)?;
            self.named(weights, "kq_soft_max");
            // Blocks cannot be transposed.
            let v = if self.graph.tensor(v).layout.dtype().is_quantized() {
                let cast = Op::Cast { dtype: DType::F32 };
                self.graph.push(cast, &[Some(v)])?
            } else {
                v
            };
            let v = self.graph.transpose(v)?;
            let v = self.graph.cont(v)?;
            self.named(v, "v_cont");
            let attended = self.graph.mul_mat(v, weights)?;
            self.named(attended, "kqv");
            let merged = self.graph.permute(attended, [0, 2, 1, 3])?;
            let merged = self.graph.cont(merged)?;
            self.named(merged, "kqv_merged")
        };
        let width = a.head_v * a.n_head;
        let flat = self.graph.reshape(attended, [width, n_tokens, 1, 1])?;
        Ok(self.named(flat, "kqv_out"))
    }

    /// Multiplies the result of attention by its gate, which has as many elements or one for each
    /// head.
    fn gated(&mut self, a: &Attention, attended: TensorId, gate: TensorId) -> Result<TensorId> {
        let n_tokens = self.shape.n_tokens;
        let [width, count, ..] = self.extents(gate);
        let by_head = width == a.n_head && count == n_tokens && a.head_v != 1;
        let gated = if by_head {
            let heads = [a.head_v, a.n_head, n_tokens, 1];
            let heads = self.graph.reshape(attended, heads)?;
            let gate = self.graph.reshape(gate, [1, a.n_head, n_tokens, 1])?;
            let gated = self.graph.mul(heads, gate)?;
            let flat = [a.head_v * a.n_head, n_tokens, 1, 1];
            self.graph.reshape(gated, flat)?
        } else {
            let flat = [a.head_v * a.n_head, n_tokens, 1, 1];
            let gate = self.graph.reshape(gate, flat)?;
            self.graph.mul(attended, gate)?
        };
        Ok(self.named(gated, "attn_gated"))
    }
}

/// Returns the name of the tensor with the frequency divisors in a context of `n_cells`, if they
/// come from the file.
pub(crate) fn rope_factors_name(rope_factors: RopeFactors, n_cells: usize) -> Option<&'static str> {
    let [long, short] = names::LONG_SHORT;
    match rope_factors {
        RopeFactors::None | RopeFactors::Yarn(_) => None,
        RopeFactors::Frequencies => Some(names::FREQUENCIES),
        RopeFactors::LongShort { above } if n_cells > above => Some(long),
        RopeFactors::LongShort { .. } => Some(short),
    }
}
