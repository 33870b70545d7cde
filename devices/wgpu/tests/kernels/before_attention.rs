//! Operations before attention, as one launch and separately: QK-norms, RoPE, and the writes to
//! both caches.

use crate::{Work, device, mistaken, own};
use samite_core::{DType, Device, Op, Rope, RopeMode, TensorId};
use samite_testing::{Recipe, Rng};
use std::sync::Arc;

const CELLS: usize = 12;

/// Parameters of a random layer.
#[derive(Clone, Copy, Debug)]
struct Kind {
    size: usize,
    heads: [usize; 2],
    tokens: usize,
    rope: Rope,
    has_divisors: bool,
    /// Queries and keys are slices of longer rows.
    is_sliced: bool,
    cache: DType,
    /// Keys come before queries, and values before keys.
    keys_first: bool,
    values_first: bool,
    has_norms: [bool; 2],
    /// Keys and values are written to caches.
    has_caches: bool,
}

fn kind(rng: &mut Rng) -> Kind {
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
    let mut kind = Kind {
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

fn layer(kind: Kind) -> Work {
    let mut layer = Work::default();
    let Kind { size, tokens, .. } = kind;
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
    let turned = |layer: &mut Work, which: usize| {
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

/// Returns the expected number of launches for a layer.
fn launches(kind: Kind) -> usize {
    let [q, k] = kind.has_norms;
    match kind.has_caches {
        // A cache block belongs to a single head.
        true if q == k && kind.size.is_multiple_of(kind.cache.block_len()) => 1,
        // A norm and a rotation form one launch.
        true => 4,
        false => 2,
    }
}

/// Returns the error limit: low-precision numbers may round to a neighbour.
fn limit(kind: Kind) -> f64 {
    match kind.cache {
        DType::F32 => 1e-9,
        DType::F16 => 1e-7,
        DType::BF16 => 1e-5,
        _ => 1e-4,
    }
}

#[test]
fn the_fused_launch_matches_separate_launches_bit_for_bit() {
    let seeds = std::env::var("SAMITE_RANDOM_GRAPHS").ok();
    let seeds = seeds.and_then(|text| text.parse().ok()).unwrap_or(40u64);
    for (number, parameters) in ["", "subgroups=off", "overlaps=off"].iter().enumerate() {
        let Some(device) = device(parameters) else {
            return;
        };
        for seed in (0..seeds).map(|seed| 3 * seed + number as u64) {
            let kind = kind(&mut Rng::new(seed));
            let layer = layer(kind);
            let text = format!("'{parameters}', seed {seed}: {kind:?}");
            let found = own(&device).launch_count(&layer.graph, &layer.nodes);
            assert_eq!(found, Some(launches(kind)), "{text}");
            let whole = layer.run(&device, seed, false, &[&layer.nodes]);
            let in_place = layer.run(&device, seed, true, &[&layer.nodes]);
            assert!(in_place == whole, "in place, {text}");
            // A norm and the following factor are also one launch, and everything else is separate.
            let mut parts: Vec<&[TensorId]> = Vec::new();
            let mut at = 0;
            while let Some(&id) = layer.nodes.get(at) {
                let is_norm = matches!(layer.graph.tensor(id).op, Op::RmsNorm { .. });
                let count = 1 + usize::from(is_norm);
                parts.push(&layer.nodes[at..at + count]);
                at += count;
            }
            let apart = layer.run(&device, seed, false, &parts);
            // Strided rows use another kernel there, with another summation order.
            if kind.is_sliced {
                let difference = layer.difference(&whole, &apart);
                assert!(difference <= limit(kind), "{difference:e}, {text}");
            } else {
                assert!(apart == whole, "{text}")
            }
            let error = layer.error(seed, &whole);
            assert!(error <= limit(kind), "{error:e}, {text}");
        }
    }
}

/// Kernels with one planted bug each. The test must detect all of them.
#[test]
fn planted_bugs_in_the_fused_kernel_are_detected() {
    let is_wrong = |device: &Arc<dyn Device>| {
        (0..20).any(|seed| {
            let kind = Kind {
                has_norms: [true; 2],
                has_caches: true,
                ..kind(&mut Rng::new(seed))
            };
            let layer = layer(kind);
            let found = layer.run(device, seed, false, &[&layer.nodes]);
            // NaN must not count as a small error.
            let is_right = layer.error(seed, &found) <= limit(kind);
            !is_right
        })
    };
    let Some(right) = device("") else { return };
    assert!(!is_wrong(&right));
    for (right, wrong) in [
        (
            "scale_k(row, parameters.floats[2].y",
            "scale_k(row, parameters.floats[2].x",
        ),
        (
            "* get_g(vec4<u32>(i.x, 0u, 0u, 0u))",
            "* get_f(vec4<u32>(i.x, 0u, 0u, 0u))",
        ),
        ("let head = row.x * keys.x;", "let head = row.x;"),
        (
            "row_indices(number - rows_of(queries), keys)",
            "row_indices(number, keys)",
        ),
        (
            "let place = select(rest + k.y, rest, rest < k.x);",
            "let place = rest;",
        ),
        (
            "put_u(vec4<u32>(i.x, row, 0u, 0u), get_v(i))",
            "put_u(vec4<u32>(i.x, i.y, 0u, 0u), get_v(i))",
        ),
        ("pair_of(t, pairs, row.y)", "pair_of(t, pairs, row.x)"),
        ("(row.x * blocks + n)", "n"),
        ("turned[n * 32u + j]", "turned[n * 32u]"),
        (
            "get_v(vec4<u32>(i.x * 32u + j, i.yzw))",
            "get_v(vec4<u32>(i.x + j, i.yzw))",
        ),
        (
            "vec3<u32>(row, 0u, 0u)) + i.x *",
            "vec3<u32>(i.y, 0u, 0u)) + i.x *",
        ),
    ] {
        let Some(device) = mistaken("", right, wrong) else {
            return;
        };
        assert!(is_wrong(&device), "'{wrong}' in place of '{right}'");
    }
}
