//! Attention.

use super::*;

/// Computes attention row by row in f64.
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
    // With 1500 keys and few rows, keys are split among tasks. With 40 tokens, they are computed in
    // blocks. With 200 tokens, one task of a single thread computes two blocks.
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
            // A cell that no row sees may hold anything. Blocks of one task may or may not see the
            // same of the first keys.
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
fn tokens_attend_only_to_their_own_sequence() {
    // 42 sequences have a token and 32 keys each. One has 54 tokens, which see the earlier ones,
    // and 40 keys before all.
    let (d, heads, kv_heads, alone, own, before) = (32, 6, 2, 42, 32, 40);
    let tokens = alone + 54;
    let keys = alone * own + before + 54;
    let is_seen = |token: usize, key: usize| {
        if token < alone {
            key / own == token
        } else {
            key >= alone * own && key - alone * own <= before + token - alone
        }
    };
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let mut g = Graph::new();
        let q = input(&mut g, &[d, tokens, heads]);
        let k = input(&mut g, &[d, keys, kv_heads]);
        let v = input(&mut g, &[d, keys, kv_heads]);
        let mask = input(&mut g, &[keys, tokens]);
        let sinks = input(&mut g, &[heads]);
        let half_mask = g.cast(mask, DType::F16).unwrap();
        let (k2, v2) = (g.cast(k, dtype).unwrap(), g.cast(v, dtype).unwrap());
        let (seen_k, seen_v) = (
            g.cast(k2, DType::F32).unwrap(),
            g.cast(v2, DType::F32).unwrap(),
        );
        let out = g
            .flash_attn([q, k2, v2], Some(half_mask), Some(sinks), 0.5)
            .unwrap();
        let queries = numbers(1, d * tokens * heads);
        let mask_rows: Vec<f32> = (0..tokens * keys)
            .map(|i| {
                if is_seen(i / keys, i % keys) {
                    0.0
                } else {
                    f32::NEG_INFINITY
                }
            })
            .collect();
        let [(got, key_rows, values), other] = [1, 3].map(|threads| {
            let mut bench = Bench::new(&g, &device(threads)).unwrap();
            bench.write(q, &queries);
            bench.write(k, &numbers(2, d * keys * kv_heads));
            bench.write(v, &numbers(3, d * keys * kv_heads));
            bench.write(mask, &mask_rows);
            bench.write(sinks, &[f32::NEG_INFINITY; 6]);
            bench.run().unwrap();
            let [out, k, v] = [out, seen_k, seen_v].map(|tensor| bench.read::<f32>(tensor));
            (out, k, v)
        });
        assert_eq!(got, other.0, "{dtype}");
        for token in 0..tokens {
            for head in 0..heads {
                let kv = head / (heads / kv_heads) * keys * d;
                let query = &queries[(head * tokens + token) * d..];
                let hidden = |key| {
                    if is_seen(token, key) {
                        0.0
                    } else {
                        f64::NEG_INFINITY
                    }
                };
                let expected = attend(query, &key_rows[kv..], &values[kv..], [d, keys], hidden);
                let got = &got[(token * heads + head) * d..][..d];
                // Tokens that are computed one by one are not rounded to 16 bits. The second block
                // of 21 tokens is the last one of them.
                let bound = if token < alone { 2e-6 } else { 5e-4 };
                for (a, b) in got.iter().zip(expected) {
                    assert!((f64::from(*a) - b).abs() < bound, "{a} {b} {dtype} {token}");
                }
            }
        }
    }
}

#[test]
fn attention_with_rising_and_falling_logits() {
    let (d, keys, heads) = (8, 700, 4);
    for tokens in [1, 40] {
        let mut g = Graph::new();
        let q = input(&mut g, &[d, tokens, heads]);
        let (k, v) = (input(&mut g, &[d, keys, 1]), input(&mut g, &[d, keys, 1]));
        g.flash_attn([q, k, v], None, None, 0.5).unwrap();
        // From key to key, logits grow by 0.25 and 0.0625, or fall by the same amounts.
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
fn fully_masked_rows_are_zero_and_sinks_take_weight() {
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
