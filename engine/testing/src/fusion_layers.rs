//! Random parts of layers, as devices fuse them.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use crate::{FusionCase, Recipe, Rng};
use samite_core::{DType, Glu, Op, Precision, Rope, RopeMode, TensorId};

/// Cells of a cache.
const CELLS: usize = 12;

/// Parameters of the operations before attention.
#[derive(Clone, Copy, Debug)]
pub struct RotationKind {
    /// Elements of a head.
    pub size: usize,
    /// Heads of queries and of keys.
    pub heads: [usize; 2],
    /// Number of tokens.
    pub tokens: usize,
    /// Parameters of RoPE.
    pub rope: Rope,
    /// True if frequencies have divisors.
    pub has_divisors: bool,
    /// True if queries and keys are slices of longer rows.
    pub is_sliced: bool,
    /// Type of the caches.
    pub cache: DType,
    /// True if keys come before queries.
    pub keys_first: bool,
    /// True if values are written before keys.
    pub values_first: bool,
    /// True for queries and for keys that have a norm.
    pub has_norms: [bool; 2],
    /// True if keys and values are written to caches.
    pub has_caches: bool,
}

impl RotationKind {
    /// Returns the largest error, an NMSE: low-precision numbers may round to a neighbour.
    pub fn limit(&self) -> f64 {
        match self.cache {
            DType::F32 => 1e-9,
            DType::F16 => 1e-7,
            DType::BF16 => 1e-5,
            _ => 1e-4,
        }
    }
}

/// Returns random parameters.
pub fn rotation_kind(rng: &mut Rng) -> RotationKind {
    let size = rng.pick(&[16, 24, 64, 80, 96, 128, 256, 512]);
    let dims = rng.pick(&[size, size / 2]);
    let mode = rng.pick(&[RopeMode::Normal, RopeMode::Neox]);
    let mut rope = Rope::new(dims, mode, 10_000.0);
    rope.offset = rng.pick(&[0, size - dims]);
    if rng.one_in(3) {
        rope.freq_scale = 0.25;
        rope.ext_factor = 1.0;
        rope.original_context = 64;
    }
    let has_norms = rng.pick(&[[true; 2], [true; 2], [true; 2], [false; 2], [true, false]]);
    let [kv, group] = [1 + rng.below(3), 1 + rng.below(3)];
    let mut kind = RotationKind {
        size,
        heads: [kv * group, kv],
        tokens: 1 + rng.below(5),
        rope,
        has_divisors: rng.one_in(4),
        is_sliced: rng.one_in(3),
        cache: rng.pick(&[DType::F16, DType::F32, DType::BF16]),
        keys_first: rng.one_in(2),
        values_first: rng.one_in(2),
        has_norms,
        has_caches: !rng.one_in(4),
    };
    let has_whole_blocks = kind.has_caches && (size * kv).is_multiple_of(32);
    if has_whole_blocks && rng.one_in(3) {
        kind.cache = rng.pick(&[DType::Q8_0, DType::Q4_0, DType::IQ4_NL]);
    }
    kind
}

/// Builds QK norms, RoPE and the writes to both caches.
///
/// # Panics
/// If the graph refuses a node.
pub fn rotation_case(kind: RotationKind) -> FusionCase {
    let mut layer = FusionCase::default();
    let RotationKind { size, tokens, .. } = kind;
    let recipe = Recipe::Uniform {
        min: -2.0,
        max: 2.0,
    };
    let positions = layer.input(DType::I32, [tokens, 1, 1, 1], Recipe::Ids { limit: 2000 });
    let cells = layer.input(
        DType::I64,
        [tokens, 1, 1, 1],
        Recipe::DistinctIds { limit: CELLS },
    );
    let divisors = kind.has_divisors.then(|| {
        let recipe = Recipe::Uniform { min: 1.0, max: 8.0 };
        layer.input(DType::F32, [kind.rope.dims / 2, 1, 1, 1], recipe)
    });
    let width = size * kind.heads[1];
    let mut caches = Vec::new();
    if kind.has_caches {
        let cache = |_| layer.input(kind.cache, [width, CELLS, 1, 1], recipe);
        caches.extend((0..2).map(cache));
    }
    let value = layer.input(DType::F32, [width, tokens, 1, 1], recipe);
    let turned = |layer: &mut FusionCase, which: usize| {
        let heads = kind.heads[which];
        let x = if kind.is_sliced {
            let all = layer.input(DType::F32, [size * (heads + 1), tokens, 1, 1], recipe);
            let [element, row, ..] = layer.graph.tensor(all).layout.strides();
            let strides = [size * element, row, row * tokens];
            let shape = [size, heads, tokens, 1];
            let view = layer.graph.view(all, shape, strides, size * element);
            view.unwrap()
        } else {
            layer.input(DType::F32, [size, heads, tokens, 1], recipe)
        };
        let mut x = x;
        if kind.has_norms[which] {
            let factor = layer.input(DType::F32, [size, 1, 1, 1], recipe);
            // Large epsilons, so that each one matters.
            let eps = [0.5, 0.25][which];
            let normed = layer.graph.rms_norm(x, eps).unwrap();
            let scaled = layer.graph.mul(normed, factor).unwrap();
            if !kind.is_sliced {
                layer.in_place.push(normed);
            }
            layer.in_place.push(scaled);
            layer.node(normed);
            x = layer.node(scaled);
        }
        let y = layer.graph.rope(x, positions, divisors, kind.rope).unwrap();
        if !kind.is_sliced || kind.has_norms[which] {
            layer.in_place.push(y);
        }
        layer.node(y)
    };
    let mut query = None;
    if !kind.keys_first {
        query = Some(turned(&mut layer, 0));
    }
    let key = turned(&mut layer, 1);
    if kind.has_caches {
        let rows = layer.graph.reshape(key, [width, tokens, 1, 1]).unwrap();
        let order = if kind.values_first { [1, 0] } else { [0, 1] };
        for which in order {
            let source = [rows, value][which];
            let written = layer.graph.set_rows(source, cells, caches[which]).unwrap();
            let written = layer.node(written);
            layer.results.push(written);
        }
    } else {
        layer.results.push(key);
    }
    let query = query.unwrap_or_else(|| turned(&mut layer, 0));
    layer.results.push(query);
    for &id in &layer.results {
        layer.graph.set_output(id);
    }
    layer
}

/// Parameters of a layer without its rotations.
#[derive(Clone, Copy, Debug)]
pub struct LayerKind {
    /// Type of the weights.
    pub weights: DType,
    /// Number of tokens.
    pub tokens: usize,
    /// Elements of a token's state, and of the gated unit.
    pub sizes: [usize; 2],
    /// True if the norm follows an addition.
    pub has_sum: bool,
    /// Number of products of the normed state besides those of the gated unit.
    pub products: usize,
    /// Kind of the gated unit.
    pub glu: Glu,
    /// Heads of attention, heads of keys, keys.
    pub attention: [usize; 3],
}

/// Returns random parameters.
pub fn layer_kind(rng: &mut Rng) -> LayerKind {
    let kv_heads = 1 + rng.below(2);
    LayerKind {
        weights: rng.pick(&[
            DType::Q4_0,
            DType::Q8_0,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
        ]),
        tokens: 1 + rng.below(9),
        sizes: [256 * (1 + rng.below(3)), 256 * (1 + rng.below(5))],
        has_sum: rng.one_in(2),
        products: rng.below(5),
        glu: rng.pick(&[
            Glu::Swiglu,
            Glu::Geglu,
            Glu::Reglu,
            Glu::GegluErf,
            Glu::SwigluOai {
                alpha: 1.5,
                limit: 2.0,
            },
        ]),
        attention: [
            kv_heads * (1 + rng.below(3)),
            kv_heads,
            rng.pick(&[9, 70, 300, 700]),
        ],
    }
}

/// Builds a norm with its products, a gated unit with its product, and attention with its product.
///
/// # Panics
/// If the graph refuses a node.
pub fn layer_case(kind: LayerKind) -> FusionCase {
    let mut layer = FusionCase::default();
    let [size, hidden] = kind.sizes;
    let tokens = kind.tokens;
    let product = |layer: &mut FusionCase, rows: usize, x: TensorId| {
        let length = layer.graph.tensor(x).layout.shape()[0];
        let small = Recipe::Uniform {
            min: -0.1,
            max: 0.1,
        };
        let w = layer.input(kind.weights, [length, rows, 1, 1], small);
        layer.weights.push(w);
        let y = layer.graph.mul_mat(w, x).unwrap();
        layer.node(y)
    };
    let mut x = layer.input(DType::F32, [size, tokens, 1, 1], Recipe::UNIT);
    if kind.has_sum {
        let z = layer.input(DType::F32, [size, tokens, 1, 1], Recipe::UNIT);
        let sum = layer.graph.add(x, z).unwrap();
        x = layer.node(sum);
        layer.in_place.push(x);
        layer.results.push(x);
    }
    let factor = layer.input(DType::F32, [size, 1, 1, 1], Recipe::UNIT);
    let normed = layer.graph.rms_norm(x, 0.25).unwrap();
    layer.node(normed);
    let scaled = layer.graph.mul(normed, factor).unwrap();
    layer.node(scaled);
    for number in 0..kind.products {
        let y = product(&mut layer, 24 + 40 * number, scaled);
        layer.results.push(y);
    }
    let [gate, up] = [0, 1].map(|_| product(&mut layer, hidden, scaled));
    let gated = layer.graph.glu_split(gate, up, kind.glu).unwrap();
    layer.node(gated);
    let down = product(&mut layer, size, gated);
    layer.results.push(down);

    let [heads, kv_heads, keys] = kind.attention;
    let q = layer.input(DType::F32, [64, tokens, heads, 1], Recipe::UNIT);
    let [k, v] = [0, 1].map(|_| layer.input(DType::F16, [64, keys, kv_heads, 1], Recipe::UNIT));
    let op = Op::FlashAttn {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
        precision: Precision::F32,
    };
    let y = layer.graph.push(op, &[Some(q), Some(k), Some(v)]).unwrap();
    layer.node(y);
    // Rows of K-quants have whole blocks.
    if (64 * heads).is_multiple_of(256) || kind.weights.block_len() == 32 {
        let rows = layer.graph.reshape(y, [64 * heads, tokens, 1, 1]).unwrap();
        let y = product(&mut layer, 96, rows);
        layer.results.push(y);
    } else {
        layer.results.push(y);
    }
    for &id in &layer.results {
        layer.graph.set_output(id);
    }
    layer
}
