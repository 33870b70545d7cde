//! Operations before attention, as one launch and separately: QK-norms, RoPE, and the writes to
//! both caches.

use crate::{device, mistaken, own};
use samite_core::{Device, Op, TensorId};
use samite_testing::{Rng, RotationKind, rotation_case, rotation_kind};
use std::sync::Arc;

/// Returns the expected number of launches for a layer.
fn launches(kind: RotationKind) -> usize {
    let [q, k] = kind.has_norms;
    match kind.has_caches {
        // A cache block belongs to a single head.
        true if q == k && kind.size.is_multiple_of(kind.cache.block_len()) => 1,
        // A norm and a rotation form one launch.
        true => 4,
        false => 2,
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
            let kind = rotation_kind(&mut Rng::new(seed));
            let layer = rotation_case(kind);
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
                assert!(difference <= kind.limit(), "{difference:e}, {text}");
            } else {
                assert!(apart == whole, "{text}")
            }
            let error = layer.error(seed, &whole);
            assert!(error <= kind.limit(), "{error:e}, {text}");
        }
    }
}

/// Kernels with one planted bug each. The test must detect all of them.
#[test]
fn planted_bugs_in_the_fused_kernel_are_detected() {
    let is_wrong = |device: &Arc<dyn Device>| {
        (0..20).any(|seed| {
            let kind = RotationKind {
                has_norms: [true; 2],
                has_caches: true,
                ..rotation_kind(&mut Rng::new(seed))
            };
            let layer = rotation_case(kind);
            let found = layer.run(device, seed, false, &[&layer.nodes]);
            // NaN must not count as a small error.
            let is_right = layer.error(seed, &found) <= kind.limit();
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
