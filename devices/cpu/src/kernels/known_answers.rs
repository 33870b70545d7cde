//! Small known answers for every operation, through the whole device.

use crate::harness::*;
use samite_core::*;

/// A function of one number.
type Function = fn(f32) -> f32;

fn near(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{got:?}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let close = (a - b).abs() <= 1e-5 * b.abs().max(1.0);
        assert!(
            close || a == b,
            "element {i}: {got:?} instead of {expected:?}"
        );
    }
}

/// Runs `build` on one F32 input.
fn one(
    extents: &[usize],
    x: &[f32],
    build: impl Fn(&mut Graph, TensorId) -> Result<TensorId>,
) -> Vec<f32> {
    let mut g = Graph::new();
    let id = input(&mut g, extents);
    build(&mut g, id).unwrap();
    evaluate(&g, &[(id, x)])
}

/// Runs `build` on two F32 inputs.
fn two(
    [a, b]: [(&[usize], &[f32]); 2],
    build: impl Fn(&mut Graph, TensorId, TensorId) -> Result<TensorId>,
) -> Vec<f32> {
    let mut g = Graph::new();
    let (x, y) = (input(&mut g, a.0), input(&mut g, b.0));
    build(&mut g, x, y).unwrap();
    evaluate(&g, &[(x, a.1), (y, b.1)])
}

#[test]
fn arithmetic_repeats_the_second_operand() {
    let a: (&[usize], &[f32]) = (&[4, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]);
    let sum = two([a, (&[4], &[10., 20., 30., 40.])], |g, a, b| g.add(a, b));
    near(&sum, &[11., 22., 33., 44., 15., 26., 37., 48.]);
    let product = two([a, (&[2, 2], &[1., 2., 3., 4.])], |g, a, b| g.mul(a, b));
    near(&product, &[1., 4., 3., 8., 15., 24., 21., 32.]);
    let difference = two([a, (&[1, 2], &[1., 2.])], |g, a, b| g.sub(a, b));
    near(&difference, &[0., 1., 2., 3., 3., 4., 5., 6.]);
    let quotient = two([a, (&[1], &[2.])], |g, a, b| g.div(a, b));
    near(&quotient, &[0.5, 1., 1.5, 2., 2.5, 3., 3.5, 4.]);
}

#[test]
fn arithmetic_on_turned_operands_and_halves() {
    let turned = two(
        [
            (&[2, 2], &[1., 2., 3., 4.]),
            (&[2, 2], &[10., 20., 30., 40.]),
        ],
        |g, a, b| {
            let b = g.transpose(b)?;
            g.add(a, b)
        },
    );
    near(&turned, &[11., 32., 23., 44.]);
    for dtype in [DType::F16, DType::BF16] {
        let doubled = one(&[3], &[1., -2., 0.5], |g, x| {
            let half = g.cast(x, dtype)?;
            let sum = g.add(half, half)?;
            g.cast(sum, DType::F32)
        });
        near(&doubled, &[2., -4., 1.]);
    }
}

#[test]
fn results_may_overwrite_either_operand() {
    // The harness gives every node memory of its own, so the places are shared by hand, through views.
    for written in [0, 1] {
        let mut g = Graph::new();
        let (a, b) = (input(&mut g, &[3]), input(&mut g, &[3]));
        let difference = g.sub(a, b).unwrap();
        let nodes: Vec<_> = g.ids().collect();
        let buffer = host_buffer_type().allocate(128, Usage::Any).unwrap();
        let places: Vec<_> = [0, 64, 64 * written]
            .map(|offset| {
                Some(TensorRef {
                    buffer: std::sync::Arc::clone(&buffer),
                    slot: Slot {
                        offset,
                        layout: g.tensor(a).layout,
                    },
                })
            })
            .into();
        let place = |id: TensorId| places[id.index()].as_ref().unwrap();
        place(a)
            .write(0, bytemuck::cast_slice(&[5f32, 6., 7.]))
            .unwrap();
        place(b)
            .write(0, bytemuck::cast_slice(&[1f32, 2., 4.]))
            .unwrap();
        let device = device(1);
        let mut stream = device.open_stream().unwrap();
        let mut prepared = stream
            .prepare(Placed {
                graph: &g,
                nodes: &nodes,
                places: &places,
                workspace: None,
                compiled: None,
            })
            .unwrap();
        let control = RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        };
        stream.run(prepared.as_mut(), control).unwrap();
        let mut out = [0f32; 3];
        place(difference)
            .read(0, bytemuck::cast_slice_mut(&mut out))
            .unwrap();
        assert_eq!(out, [4., 4., 3.]);
    }
}

#[test]
fn functions_of_one_element() {
    let x = [-2.0, -0.5, 0.0, 0.5, 3.5];
    let of = |function| one(&[5], &x, |g, a| g.unary(a, function));
    near(&of(Unary::Abs), &[2.0, 0.5, 0.0, 0.5, 3.5]);
    near(&of(Unary::Sgn), &[-1., -1., 0., 1., 1.]);
    near(&of(Unary::Step), &[0., 0., 0., 1., 1.]);
    near(&of(Unary::Relu), &[0., 0., 0., 0.5, 3.5]);
    near(&of(Unary::Round), &[-2., -1., 0., 1., 4.]);
    near(
        &of(Unary::HardSigmoid),
        &[1. / 6., 2.5 / 6., 0.5, 3.5 / 6., 1.],
    );
    let exact: [(Unary, Function); 8] = [
        (Unary::Tanh, f32::tanh),
        (Unary::Exp, f32::exp),
        (Unary::ExpM1, f32::exp_m1),
        (Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Silu, |x| x / (1.0 + (-x).exp())),
        (Unary::SoftPlus, |x| x.exp().ln_1p()),
        (Unary::Elu, |x| if x > 0.0 { x } else { x.exp_m1() }),
        (Unary::GeluQuick, |x| x / (1.0 + (-1.702 * x).exp())),
    ];
    for (function, expected) in exact {
        near(&of(function), &x.map(expected));
    }
    near(
        &of(Unary::Gelu),
        &[-0.045_402, -0.154_286, 0.0, 0.345_714, 3.499_38],
    );
    near(
        &of(Unary::GeluErf),
        &[-0.045_500, -0.154_269, 0.0, 0.345_731, 3.499_186],
    );
    near(
        &one(&[5], &x, |g, a| g.scale_bias(a, 2.0, 1.0)),
        &[-3., 0., 1., 2., 8.],
    );
    near(
        &one(&[5], &x, |g, a| g.clamp(a, -1.0, 1.0)),
        &[-1., -0.5, 0., 0.5, 1.],
    );
    near(&one(&[5], &x, |g, a| g.fill(a, 7.0)), &[7.0; 5]);
    let roots = one(&[5], &x, |g, a| {
        let squares = g.sqr(a)?;
        g.sqrt(squares)
    });
    near(&roots, &[2.0, 0.5, 0.0, 0.5, 3.5]);
}

#[test]
fn gated_units() {
    let x = [1.0, -1.0, 2.0, 3.0];
    near(&one(&[4], &x, |g, a| g.glu(a, Glu::Reglu)), &[2.0, 0.0]);
    let swapped = |g: &mut Graph, a| {
        let kind = Glu::Reglu;
        g.push(
            Op::Glu {
                kind,
                swapped: true,
            },
            &[Some(a)],
        )
    };
    near(&one(&[4], &x, swapped), &[2.0, -3.0]);
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let split = two([(&[2], &x[..2]), (&[2], &x[2..])], |g, a, b| {
        g.glu_split(a, b, Glu::Swiglu)
    });
    near(&split, &[silu(1.0) * 2.0, silu(-1.0) * 3.0]);
    let oai = Glu::SwigluOai {
        alpha: 1.0,
        limit: 2.5,
    };
    near(
        &one(&[4], &x, |g, a| g.glu(a, oai)),
        &[silu(1.0) * 3.0, silu(-1.0) * 3.5],
    );
}

#[test]
fn rows_reduced() {
    let x = [1.0, 2.0, 3.0, -4.0, 0.0, 4.0];
    near(&one(&[3, 2], &x, |g, a| g.sum(a)), &[6.0]);
    near(&one(&[3, 2], &x, |g, a| g.sum_rows(a)), &[6.0, 0.0]);
    near(&one(&[3, 2], &x, |g, a| g.mean(a)), &[2.0, 0.0]);
    near(
        &one(&[3, 2], &x, |g, a| g.cumsum(a)),
        &[1., 3., 6., -4., -4., 0.],
    );
    let r = (14f32 / 3.0).sqrt();
    let s = (32f32 / 3.0).sqrt();
    near(
        &one(&[3, 2], &x, |g, a| g.rms_norm(a, 0.0)),
        &[1. / r, 2. / r, 3. / r, -4. / s, 0., 4. / s],
    );
    let t = (2f32 / 3.0).sqrt();
    near(
        &one(&[3, 2], &x, |g, a| g.norm(a, 0.0)),
        &[-1. / t, 0., 1. / t, -4. / s, 0., 4. / s],
    );
    near(&one(&[2], &[3., 4.], |g, a| g.l2_norm(a, 0.0)), &[0.6, 0.8]);
    // Sums over a turned source.
    let turned = one(&[3, 2], &x, |g, a| {
        let a = g.transpose(a)?;
        g.sum_rows(a)
    });
    near(&turned, &[-3.0, 2.0, 7.0]);
}

#[test]
fn orders_and_maxima() {
    let mut g = Graph::new();
    let x = input(&mut g, &[4, 2]);
    let largest = g.argmax(x).unwrap();
    let up = g.argsort(x, SortOrder::Ascending).unwrap();
    let down = g.argsort(x, SortOrder::Descending).unwrap();
    let top = g.top_k(x, 2).unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(x, &[1f32, 9., -3., 9., 4., 3., 2., 1.]);
    bench.run().unwrap();
    assert_eq!(bench.read::<i32>(largest), [1, 0]);
    let ascending = bench.read::<i32>(up);
    assert_eq!(ascending[..2], [2, 0]);
    assert_eq!(ascending[4..], [3, 2, 1, 0]);
    assert_eq!(bench.read::<i32>(down), [1, 3, 0, 2, 0, 1, 2, 3]);
    let mut top = bench.read::<i32>(top);
    top[..2].sort_unstable();
    top[2..].sort_unstable();
    assert_eq!(top, [1, 3, 0, 1]);
}

#[test]
fn arranged_elements() {
    near(
        &one(&[2], &[1., 2.], |g, a| g.repeat(a, [4, 2, 1, 1])),
        &[1., 2., 1., 2., 1., 2., 1., 2.],
    );
    let pair: [(&[usize], &[f32]); 2] = [(&[2, 1], &[1., 2.]), (&[2, 1], &[3., 4.])];
    near(&two(pair, |g, a, b| g.concat(a, b, 0)), &[1., 2., 3., 4.]);
    let stacked = two(pair, |g, a, b| {
        let stacked = g.concat(a, b, 1)?;
        let turned = g.transpose(stacked)?;
        g.cont(turned)
    });
    near(&stacked, &[1., 3., 2., 4.]);
    let padded = one(&[2], &[1., 2.], |g, a| g.pad(a, [1, 1, 0, 0], [0, 0, 0, 0]));
    near(&padded, &[0., 0., 0., 0., 1., 2.]);
    let mut g = Graph::new();
    g.arange(1.0, 2.0, 0.25).unwrap();
    near(&evaluate(&g, &[]), &[1.0, 1.25, 1.5, 1.75]);
    let masked = one(&[3, 2], &[1.0; 6], |g, a| g.diag_mask_inf(a, 1));
    let no = f32::NEG_INFINITY;
    near(&masked, &[1., 1., no, 1., 1., 1.]);
}

#[test]
fn rows_read_and_written() {
    let mut g = Graph::new();
    let table = input(&mut g, &[32, 3]);
    let quantized = g.cast(table, DType::Q8_0).unwrap();
    let ids = integers(&mut g, &[2]);
    let rows = g.get_rows(quantized, ids).unwrap();
    let cache = g.leaf("cache", DType::F16, [32, 4, 1, 1]).unwrap();
    let cache = g.set_rows(rows, ids, cache).unwrap();
    let out = g.cast(cache, DType::F32).unwrap();
    let x: Vec<f32> = (0..96).map(|i| (i / 32 + 1) as f32).collect();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(table, &x);
    bench.write(ids, &[2, 0]);
    bench.run().unwrap();
    let out = bench.read::<f32>(out);
    let firsts: Vec<_> = out.chunks(32).map(|row| row[5].round()).collect();
    assert_eq!(firsts, [1.0, 0.0, 3.0, 0.0]);
}

#[test]
fn the_last_of_equal_row_numbers_wins() {
    let mut g = Graph::new();
    let rows = input(&mut g, &[2000, 3]);
    let ids = integers(&mut g, &[3]);
    let cache = g.leaf("cache", DType::F32, [2000, 2, 1, 1]).unwrap();
    let cache = g.set_rows(rows, ids, cache).unwrap();
    let x: Vec<f32> = (0..6000).map(|i| (i / 2000) as f32 + 1.0).collect();
    let mut bench = Bench::new(&g, &device(4)).unwrap();
    bench.write(rows, &x);
    bench.write(ids, &[1, 1, 1]);
    for _ in 0..20 {
        bench.run().unwrap();
        assert_eq!(bench.read::<f32>(cache)[2000..], [3.0; 2000]);
    }
}

#[test]
fn rope_turns_pairs() {
    let mut g = Graph::new();
    let x = input(&mut g, &[4, 1, 2]);
    let positions = integers(&mut g, &[2]);
    let normal = g
        .rope(x, positions, None, Rope::new(4, RopeMode::Normal, 100.0))
        .unwrap();
    let neox = g
        .rope(x, positions, None, Rope::new(2, RopeMode::Neox, 100.0))
        .unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(x, &[1f32, 0., 1., 0., 1., 2., 3., 4.]);
    bench.write(positions, &[0, 2]);
    bench.run().unwrap();
    // Angles at position 2: 2 and 2 / 10.
    let (s, c) = 2f32.sin_cos();
    let (t, d) = 0.2f32.sin_cos();
    let turned = [c - 2. * s, s + 2. * c, 3. * d - 4. * t, 3. * t + 4. * d];
    let got = bench.read::<f32>(normal);
    near(&got[..4], &[1., 0., 1., 0.]);
    near(&got[4..], &turned);
    let got = bench.read::<f32>(neox);
    near(&got[4..], &[c - 2. * s, s + 2. * c, 3., 4.]);
}

#[test]
fn soft_max_with_mask_and_sinks() {
    let mut g = Graph::new();
    let x = input(&mut g, &[3, 1, 2]);
    let mask = input(&mut g, &[3, 1]);
    let sinks = input(&mut g, &[2]);
    g.soft_max(x, Some(mask), Some(sinks), 2.0, 0.0).unwrap();
    let no = f32::NEG_INFINITY;
    let out = evaluate(
        &g,
        &[
            (x, &[0.5, 0., 9., 0., 0., 9.]),
            (mask, &[0., 1., no]),
            (sinks, &[0., no]),
        ],
    );
    let e = std::f32::consts::E;
    let both = e / (1. + 2. * e);
    near(&out, &[both, both, 0., 1. / (1. + e), e / (1. + e), 0.]);
}

#[test]
fn products_of_every_type() {
    let (k, m, n) = (256, 9, 7);
    let (w, x) = (numbers(1, k * m), numbers(2, k * n));
    for dtype in DType::all().filter(|&dtype| samite_quant::can_encode(dtype)) {
        let mut bytes = vec![0; m * dtype.row_bytes(k).unwrap()];
        samite_quant::encode_row(dtype, &w, &mut bytes).unwrap();
        let mut decoded = vec![0.0; k * m];
        samite_quant::decode_row(dtype, &bytes, &mut decoded).unwrap();
        for columns in [1, n] {
            let mut g = Graph::new();
            let weights = g.leaf("w", dtype, [k, m, 1, 1]).unwrap();
            let input = input(&mut g, &[k, columns]);
            let product = g.mul_mat(weights, input).unwrap();
            let mut bench = Bench::new(&g, &device(1)).unwrap();
            bench.write(weights, &bytes);
            bench.write(input, &x[..k * columns]);
            bench.run().unwrap();
            let got = bench.read::<f32>(product);
            let (mut error, mut power) = (0.0, 0.0);
            for c in 0..columns {
                for r in 0..m {
                    let pairs = decoded[r * k..][..k].iter().zip(&x[c * k..]);
                    let expected: f64 = pairs.map(|(a, b)| f64::from(a * b)).sum();
                    error += (f64::from(got[c * m + r]) - expected).powi(2);
                    power += expected * expected;
                }
            }
            assert!(error / power < 2e-4, "{dtype} {columns}: {}", error / power);
        }
    }
}

#[test]
fn products_repeat_weights_and_read_turned_columns() {
    // Two matrices of columns share one matrix of weights; columns are turned.
    let mut g = Graph::new();
    let w = input(&mut g, &[2, 3]);
    let x = input(&mut g, &[1, 2, 2]);
    let turned = g.permute(x, [1, 0, 2, 3]).unwrap();
    g.mul_mat(w, turned).unwrap();
    let out = evaluate(
        &g,
        &[(w, &[1., 0., 0., 1., 1., 1.]), (x, &[1., 2., 3., 4.])],
    );
    near(&out, &[1., 2., 3., 3., 4., 7.]);
}

#[test]
fn products_with_chosen_experts() {
    let mut g = Graph::new();
    let experts = input(&mut g, &[2, 1, 3]);
    let x = input(&mut g, &[2, 1, 2]);
    let ids = integers(&mut g, &[2, 2]);
    let product = g.mul_mat_id(experts, x, ids).unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(experts, &[1f32, 0., 0., 1., 1., 1.]);
    bench.write(x, &[1f32, 2., 3., 4.]);
    bench.write(ids, &[2, 0, 1, 2]);
    bench.run().unwrap();
    near(&bench.read(product), &[3., 1., 4., 7.]);
}

/// Attention row by row in f64.
fn attend(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    [d, keys]: [usize; 2],
    mask: impl Fn(usize) -> f64,
) -> Vec<f64> {
    let logits: Vec<f64> = (0..keys)
        .map(|j| {
            let dot: f64 = (0..d)
                .map(|i| f64::from(q[i]) * f64::from(k[j * d + i]))
                .sum();
            dot * 0.5 + mask(j)
        })
        .collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..d)
        .map(|i| {
            (0..keys)
                .map(|j| weights[j] * f64::from(v[j * d + i]))
                .sum::<f64>()
                / sum
        })
        .collect()
}

#[test]
fn attention_over_few_and_many_keys() {
    // With 1500 keys and few rows, keys are split among tasks. With 40 tokens, they are computed in blocks, with 200 two of them by one
    // task of a single thread.
    let shapes = [
        (8, 3, 2),
        (40, 130, 3),
        (32, 1500, 2),
        (40, 130, 40),
        (64, 150, 40),
        (40, 130, 200),
        (64, 150, 200),
    ];
    for (d, keys, tokens) in shapes {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (heads, kv_heads) = (6, 2);
            let mut g = Graph::new();
            let q = input(&mut g, &[d, tokens, heads]);
            let k = input(&mut g, &[d, keys, kv_heads]);
            let v = input(&mut g, &[d, keys, kv_heads]);
            let mask = input(&mut g, &[keys, tokens]);
            let half_mask = g.cast(mask, DType::F16).unwrap();
            let (k2, v2) = (g.cast(k, dtype).unwrap(), g.cast(v, dtype).unwrap());
            let out = g
                .flash_attn([q, k2, v2], Some(half_mask), None, 0.5)
                .unwrap();
            // Exact in every type.
            let coarse =
                |x: Vec<f32>| -> Vec<f32> { x.iter().map(|x| (x * 16.0).round() / 16.0).collect() };
            let queries = coarse(numbers(1, d * tokens * heads));
            let key_rows = coarse(numbers(2, d * keys * kv_heads));
            let values = coarse(numbers(3, d * keys * kv_heads));
            // A place that no row sees may hold anything.
            // Blocks of one task see the same of the first keys, or not.
            let causal = tokens == 200;
            let unused = |key: usize| key > 0 && key % 7 == 3 && (!causal || key >= 64);
            let hidden = |token: usize, key: usize| {
                unused(key) || key > 0 && (key + token).is_multiple_of(5) || causal && key > token
            };
            let mask_rows: Vec<f32> = (0..tokens * keys)
                .map(|i| {
                    if hidden(i / keys, i % keys) {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                })
                .collect();
            let poison = |rows: &[f32]| -> Vec<f32> {
                let poisoned = rows.iter().enumerate();
                poisoned
                    .map(|(i, &x)| if unused(i / d % keys) { f32::NAN } else { x })
                    .collect()
            };
            let [got, other] = [1, 3].map(|threads| {
                let mut bench = Bench::new(&g, &device(threads)).unwrap();
                bench.write(q, &queries);
                bench.write(k, &poison(&key_rows));
                bench.write(v, &poison(&values));
                bench.write(mask, &mask_rows);
                bench.run().unwrap();
                bench.read::<f32>(out)
            });
            assert_eq!(got, other, "{dtype} {keys}");
            for token in 0..tokens {
                for head in 0..heads {
                    let kv = head / (heads / kv_heads) * keys * d;
                    let expected = attend(
                        &queries[(head * tokens + token) * d..],
                        &key_rows[kv..],
                        &values[kv..],
                        [d, keys],
                        |key| {
                            if hidden(token, key) {
                                f64::NEG_INFINITY
                            } else {
                                0.0
                            }
                        },
                    );
                    let got = &got[(token * heads + head) * d..][..d];
                    // Blocks may round to 1/16382 of the largest number.
                    let bound = if tokens < 32 || dtype == DType::F32 {
                        1e-4
                    } else {
                        5e-4
                    };
                    for (a, b) in got.iter().zip(expected) {
                        assert!((f64::from(*a) - b).abs() < bound, "{a} {b} {dtype} {keys}");
                    }
                }
            }
        }
    }
}

#[test]
fn attention_to_keys_that_matter_more_and_more_or_less_and_less() {
    let (d, keys, heads) = (8, 700, 4);
    for tokens in [1, 40] {
        let mut g = Graph::new();
        let q = input(&mut g, &[d, tokens, heads]);
        let (k, v) = (input(&mut g, &[d, keys, 1]), input(&mut g, &[d, keys, 1]));
        g.flash_attn([q, k, v], None, None, 0.5).unwrap();
        // From key to key, logits grow by 0.25 and 0.0625, or fall by as much.
        let steps = [0.25, 0.0625, -0.0625, -0.25];
        let queries: Vec<f32> = (0..d * tokens * heads)
            .map(|i| 2.0 * steps[i / (d * tokens)] / d as f32)
            .collect();
        let key_rows: Vec<f32> = (0..d * keys).map(|i| (i / d) as f32).collect();
        let values = numbers(5, d * keys);
        let got = evaluate(&g, &[(q, &queries), (k, &key_rows), (v, &values)]);
        for (row, got) in got.chunks(d).enumerate() {
            let query = &queries[row % heads * tokens * d..];
            let expected = attend(query, &key_rows, &values, [d, keys], |_| 0.0);
            for (a, b) in got.iter().zip(expected) {
                assert!((f64::from(*a) - b).abs() < 1e-4, "{a} {b} {row} {tokens}");
            }
        }
    }
}

#[test]
fn a_row_that_sees_no_key_is_zero_and_sinks_take_their_share() {
    let mut g = Graph::new();
    let q = input(&mut g, &[4, 1, 1]);
    let (k, v) = (input(&mut g, &[4, 2, 1]), input(&mut g, &[4, 2, 1]));
    let mask = input(&mut g, &[2, 1]);
    let half = g.cast(mask, DType::F16).unwrap();
    let sinks = input(&mut g, &[1]);
    let plain = g.flash_attn([q, k, v], Some(half), None, 1.0).unwrap();
    let sunk = g.flash_attn([q, k, v], None, Some(sinks), 1.0).unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(v, &[2f32; 8]);
    bench.write(mask, &[f32::NEG_INFINITY; 2]);
    bench.write(sinks, &[2f32.ln()]);
    bench.run().unwrap();
    near(&bench.read(plain), &[0.0; 4]);
    near(&bench.read(sunk), &[1.0; 4]);
}

#[test]
fn copies_between_types_and_layouts() {
    let x = numbers(4, 64 * 6);
    // Through a turned copy and back.
    let back = one(&[64, 6], &x, |g, a| {
        let a = g.transpose(a)?;
        let half = g.cast(a, DType::BF16)?;
        let half = g.transpose(half)?;
        g.cast(half, DType::F32)
    });
    for (a, b) in back.iter().zip(&x) {
        assert!((a - b).abs() < 0.01);
    }
    for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
        let mut g = Graph::new();
        let a = input(&mut g, &[64, 6]);
        let into = g.leaf("into", dtype, [64, 3, 2, 1]).unwrap();
        let copy = g.cpy(a, into).unwrap();
        let out = g.leaf("out", DType::F32, [32, 12, 1, 1]).unwrap();
        g.cpy(copy, out).unwrap();
        let got = evaluate(&g, &[(a, &x)]);
        let mut bytes = vec![0; 6 * dtype.row_bytes(64).unwrap()];
        samite_quant::encode_row(dtype, &x, &mut bytes).unwrap();
        let mut expected = vec![0.0; x.len()];
        samite_quant::decode_row(dtype, &bytes, &mut expected).unwrap();
        assert_eq!(got, expected, "{dtype}");
    }
    let mut g = Graph::new();
    let a = input(&mut g, &[3]);
    let whole = g.cast(a, DType::I32).unwrap();
    g.cast(whole, DType::F32).unwrap();
    assert_eq!(evaluate(&g, &[(a, &[1.0, -2.0, 3.9])]), [1.0, -2.0, 3.0]);
}
