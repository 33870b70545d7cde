//! Tiled attention for many queries.

use crate::{device, mistaken, own};
use samite_core::{DType, Device, Op, Precision};
use samite_testing::{Contents, FusionCase, Recipe, Rng};
use std::sync::Arc;

/// Parameters of a random prompt.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Head sizes of keys and values.
    sizes: [usize; 2],
    heads: [usize; 2],
    tokens: usize,
    keys: usize,
    batch: usize,
    types: [DType; 2],
    mask: Mask,
    has_sinks: bool,
    max_bias: f32,
    softcap: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    None,
    /// Random mask.
    Any,
    /// Causal mask; cells after the last token contain NaN.
    Causal,
    /// Sliding window over a few previous tokens.
    Window,
    /// Every key is masked.
    Nothing,
}

fn kind(rng: &mut Rng) -> Kind {
    let (types, sizes) = match rng.below(3) {
        0 => {
            let blocks = [DType::Q8_0, DType::Q4_0, DType::F16];
            let types = [rng.pick(&blocks), rng.pick(&blocks)];
            (types, rng.pick(&[[64, 64], [32, 96], [128, 128]]))
        }
        _ => {
            let types = [DType::F32, DType::F16, DType::F16, DType::BF16];
            let sizes = [
                [64, 64],
                [80, 80],
                [128, 128],
                [192, 128],
                [24, 20],
                [100, 36],
                [256, 256],
            ];
            ([rng.pick(&types), rng.pick(&types)], rng.pick(&sizes))
        }
    };
    let mask = rng.pick(&[
        Mask::None,
        Mask::Any,
        Mask::Any,
        Mask::Causal,
        Mask::Causal,
        Mask::Window,
        Mask::Nothing,
    ]);
    let [kv, group] = [1 + rng.below(2), 1 + rng.below(3)];
    let tokens = 16 + rng.below(60);
    let has_bias = mask != Mask::None && rng.one_in(4);
    Kind {
        sizes,
        heads: [kv * group, kv],
        tokens,
        keys: 1 + tokens + rng.below(60),
        batch: 1 + usize::from(rng.one_in(4)),
        types,
        mask,
        has_sinks: rng.one_in(3),
        max_bias: if has_bias { 8.0 } else { 0.0 },
        softcap: rng.pick(&[0.0, 0.0, 5.0]),
    }
}

fn prompt(kind: Kind) -> FusionCase {
    let Kind {
        tokens,
        keys,
        batch,
        ..
    } = kind;
    let [k_size, v_size] = kind.sizes;
    let [heads, kv_heads] = kind.heads;
    let mut work = FusionCase::default();
    let wide = Recipe::Uniform {
        min: -3.0,
        max: 3.0,
    };
    // Ordered by head and token, as in models.
    let q = work.input(DType::F32, [k_size, heads, tokens, batch], wide);
    let q = work.graph.permute(q, [0, 2, 1, 3]).unwrap();
    let k = work.input(kind.types[0], [k_size, keys, kv_heads, batch], wide);
    let v = work.input(kind.types[1], [v_size, keys, kv_heads, batch], wide);
    let seen = |token: usize, key: usize| match kind.mask {
        Mask::Causal => key <= token,
        Mask::Window => key <= token && key + 5 > token,
        _ => false,
    };
    let mask = match kind.mask {
        Mask::None => None,
        Mask::Any => Some(work.input(DType::F16, [keys, tokens, 1, 1], Recipe::Mask)),
        _ => {
            let mask = work
                .graph
                .input("", DType::F16, [keys, tokens, 1, 1])
                .unwrap();
            let rows = (0..tokens).flat_map(|token| (0..keys).map(move |key| (token, key)));
            // Zero, or minus infinity.
            let halves = rows.flat_map(|(token, key)| {
                let half: u16 = if seen(token, key) { 0 } else { 0xfc00 };
                half.to_le_bytes()
            });
            work.inputs.push((mask, Contents::Bytes(halves.collect())));
            Some(mask)
        }
    };
    if kind.mask == Mask::Causal && batch == 1 && kind.types[1] == DType::F16 {
        // NaN in masked cells.
        let layout = work.graph.tensor(v).layout;
        let mut bytes = wide.bytes(&layout, &mut Rng::new(5)).unwrap();
        for head in 0..kv_heads {
            let first = 2 * v_size * (head * keys + tokens);
            let end = 2 * v_size * (head + 1) * keys;
            bytes[first..end].fill(0xff);
        }
        let fill = work.inputs.iter_mut().find(|(input, _)| *input == v);
        fill.unwrap().1 = Contents::Bytes(bytes);
    }
    let sinks = kind
        .has_sinks
        .then(|| work.input(DType::F32, [heads, 1, 1, 1], wide));
    let op = Op::FlashAttn {
        scale: 1.0 / (k_size as f32).sqrt(),
        max_bias: kind.max_bias,
        softcap: kind.softcap,
        precision: Precision::F32,
    };
    let sources = [Some(q), Some(k), Some(v), mask, sinks];
    let y = work.graph.push(op, &sources).unwrap();
    work.node(y);
    work.results.push(y);
    work
}

/// Returns parameters that cooperative matrices support.
fn kind_for_matrices(rng: &mut Rng) -> Kind {
    Kind {
        sizes: rng.pick(&[[64, 64], [64, 32], [16, 64], [48, 32]]),
        types: [DType::F16; 2],
        ..kind(rng)
    }
}

/// Error limits with F32, and with queries and key weights in half precision.
const LIMITS: [f64; 2] = [1e-9, 4e-6];

/// Returns the first prompt whose result differs from the reference, with its error.
fn first_wrong(
    device: &Arc<dyn Device>,
    seeds: impl Iterator<Item = u64>,
    kind: fn(&mut Rng) -> Kind,
    limit: f64,
) -> Option<String> {
    seeds.into_iter().find_map(|seed| {
        let kind = kind(&mut Rng::new(seed));
        let work = prompt(kind);
        let launches = own(device).launch_count(&work.graph, &work.nodes);
        assert_eq!(launches, Some(1), "seed {seed}: {kind:?}");
        let found = work.run(device, seed, false, &[&work.nodes]);
        let error = work.error(seed, &found);
        // NaN must not count as a small error.
        let is_right = error <= limit;
        (!is_right).then(|| format!("{error:e}, seed {seed}: {kind:?}"))
    })
}

/// Minimum number of prompts, also used with planted bugs: these must be detected where the correct
/// kernel passes.
const PROMPTS: u64 = 40;

fn prompts() -> u64 {
    let prompts = std::env::var("SAMITE_RANDOM_GRAPHS").ok();
    let prompts = prompts.and_then(|text| text.parse().ok());
    prompts.unwrap_or(PROMPTS).max(PROMPTS)
}

#[test]
fn tiled_attention_matches_the_reference() {
    for (parameters, seeds) in [("", 0..prompts()), ("subgroups=off", 100..110)] {
        let Some(device) = device(parameters) else {
            return;
        };
        let wrong = first_wrong(&device, seeds, kind, LIMITS[0]);
        assert_eq!(wrong, None, "{parameters}");
        let work = prompt(kind(&mut Rng::new(1)));
        let run = || work.run(&device, 1, false, &[&work.nodes]);
        assert!(run() == run(), "{parameters}");
    }
}

#[test]
fn cooperative_matrix_attention_matches_the_reference() {
    let Some(device) = device("") else { return };
    own(&device).emulate_matrices();
    drop(Arc::clone(&device).open_stream().unwrap());
    assert!(own(&device).attends_by_matrices());
    let wrong = first_wrong(&device, 0..prompts(), kind_for_matrices, LIMITS[1]);
    assert_eq!(wrong, None);
}

/// Kernels with one planted bug each. The test must detect all of them. The texts are those passed
/// to the compiler, with loops unrolled.
#[test]
fn planted_kernel_bugs_are_detected() {
    for (right, wrong) in [
        ("total[1] *= rescale1;", ""),
        ("sum0_1 *= rescale1;", ""),
        ("head / (queries.z / keys.z)", "head % keys.z"),
        ("largest = next;", ""),
        ("if w1 != 0.0 {", "{"),
        ("select(exp(sink - last0), 0.0, is_masked(sink))", "0.0"),
        ("total = sum_of_rows(total, local);", ""),
        ("number % tiles * TILE", "0u"),
        ("factor * mask1_3", "mask1_3"),
        ("p.z * tanh(clamp(logit0_0 / p.z, -15.0, 15.0))", "logit0_0"),
    ] {
        let Some(device) = mistaken("", right, wrong) else {
            return;
        };
        let found = first_wrong(&device, 0..PROMPTS, kind, LIMITS[0]);
        assert!(found.is_some(), "'{wrong}' in place of '{right}'");
    }
}

/// Tests planted bugs in the kernel for cooperative matrices. Some are already detected when the
/// device is opened; then the results are correct, because the other kernel is used.
#[test]
fn planted_cooperative_matrix_bugs_are_detected() {
    for (right, wrong, is_found_at_opening) in [
        ("total *= rescale;", "", true),
        ("factors[mine] = rescale;", "factors[mine] = 1.0;", true),
        ("number % tiles * QUERIES", "0u", true),
        ("&tile_b[16u * n * STRIDE", "&tile_b[STRIDE", true),
        (
            "select(exp(sink - last), 0.0, is_masked(sink))",
            "0.0",
            false,
        ),
        ("logit3 += factor * mask3;", "", false),
        ("head / (queries.z / keys.z)", "head % keys.z", false),
    ] {
        let Some(device) = mistaken("", right, wrong) else {
            return;
        };
        own(&device).emulate_matrices();
        drop(Arc::clone(&device).open_stream().unwrap());
        assert_eq!(
            own(&device).attends_by_matrices(),
            !is_found_at_opening,
            "'{wrong}' in place of '{right}'"
        );
        if !is_found_at_opening {
            let found = first_wrong(&device, 0..PROMPTS, kind_for_matrices, LIMITS[1]);
            assert!(found.is_some(), "'{wrong}' in place of '{right}'");
        }
    }
}
