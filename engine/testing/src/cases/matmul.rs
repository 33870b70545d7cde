//! Matrix products.

use super::{FLOATS, weight_types};
use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Precision, Shape};

pub fn add(cases: &mut Cases) {
    plain(cases);
    batched(cases);
    experts(cases);
}

/// Returns the limit. Devices may round activations to the type of weights, or to 8 bits for
/// quantized weights.
fn limit(weights: DType, x: DType) -> Limit {
    Limit::Nmse(match weights {
        _ if weights.is_quantized() => 5e-4,
        DType::BF16 => 1e-5,
        DType::F16 => 1e-6,
        _ if x != DType::F32 => 1e-6,
        _ => 1e-7,
    })
}

fn plain(cases: &mut Cases) {
    for dtype in weight_types() {
        let block = dtype.block_len();
        let lengths: &[usize] = if dtype.is_quantized() {
            &[1, 3, 8]
        } else {
            &[1, 7, 64, 100, 257]
        };
        for k in lengths
            .iter()
            .map(|&blocks| blocks * block)
            .filter(|&k| k <= 768)
        {
            for (m, n) in [
                (1, 1),
                (16, 1),
                (33, 1),
                (5, 2),
                (16, 3),
                (32, 4),
                (17, 7),
                (64, 16),
                (24, 33),
            ] {
                // A single sum must not be close to zero, or its relative error is meaningless.
                let recipe = match m * n {
                    1 => Recipe::Uniform { min: 0.2, max: 1.0 },
                    _ => Recipe::UNIT,
                };
                cases.add("", limit(dtype, DType::F32), |b| {
                    let w = b.weights(dtype, [k, m, 1, 1], recipe)?;
                    let x = b.input(DType::F32, [k, n, 1, 1], recipe)?;
                    b.graph.mul_mat(w, x)
                });
            }
        }
        let k = if dtype.is_quantized() { 2 * block } else { 96 };
        for (x, m, n) in [
            (DType::F16, 9, 1),
            (DType::F16, 16, 5),
            (DType::BF16, 9, 1),
            (DType::BF16, 16, 5),
        ] {
            cases.add("", limit(dtype, x), |b| {
                let w = b.weights(dtype, [k, m, 1, 1], Recipe::UNIT)?;
                let x = b.input(x, [k, n, 1, 1], Recipe::UNIT)?;
                b.graph.mul_mat(w, x)
            });
        }
        cases.add("in f32", limit(dtype, DType::F32), |b| {
            let w = b.weights(dtype, [k, 9, 1, 1], Recipe::UNIT)?;
            let x = b.input(DType::F32, [k, 4, 1, 1], Recipe::UNIT)?;
            b.graph.mul_mat_precise(w, x, Precision::F32)
        });
        for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
            cases.add("", limit(dtype, DType::F32), |b| {
                let w = b.weights(dtype, [k, 9, 1, 1], Recipe::UNIT)?;
                let x = b.operand(DType::F32, [k, 4, 3, 1], Recipe::UNIT, form)?;
                b.graph.mul_mat(w, x)
            });
        }
        cases.add("rows of weights", limit(dtype, DType::F32), |b| {
            let w = b.operand(dtype, [k, 9, 1, 1], Recipe::UNIT, Form::Gaps)?;
            let x = b.input(DType::F32, [k, 4, 1, 1], Recipe::UNIT)?;
            b.graph.mul_mat(w, x)
        });
    }
    // Large enough for libraries and tiled kernels: whole tiles, and one more or less.
    for dtype in weight_types() {
        let k = match dtype.block_len() {
            256 => 512,
            128 => 384,
            _ => 320,
        };
        for (m, n) in [(32, 32), (33, 47), (64, 40), (95, 33)] {
            cases.add("large", limit(dtype, DType::F32), |b| {
                let w = b.weights(dtype, [k, m, 1, 1], Recipe::UNIT)?;
                let x = b.input(DType::F32, [k, n, 1, 1], Recipe::UNIT)?;
                b.graph.mul_mat(w, x)
            });
        }
        cases.add("large", limit(dtype, DType::F32), |b| {
            let w = b.weights(dtype, [k, 34, 2, 1], Recipe::UNIT)?;
            let x = b.input(DType::F32, [k, 33, 4, 1], Recipe::UNIT)?;
            b.graph.mul_mat(w, x)
        });
        cases.add("large", limit(dtype, DType::F32), |b| {
            let w = b.weights(dtype, [k, 40, 1, 1], Recipe::UNIT)?;
            let x = b.operand(DType::F32, [k, 36, 2, 1], Recipe::UNIT, Form::Permuted)?;
            b.graph.mul_mat(w, x)
        });
    }
    // Shapes of real layers, truncated.
    for dtype in [
        DType::Q4_0,
        DType::Q8_0,
        DType::Q4_K,
        DType::Q6_K,
        DType::F16,
        DType::F32,
    ] {
        for (k, m, n) in [(2048, 128, 1), (1024, 256, 5), (512, 96, 64)] {
            cases.add("", limit(dtype, DType::F32), |b| {
                let w = b.weights(dtype, [k, m, 1, 1], Recipe::UNIT)?;
                let x = b.input(DType::F32, [k, n, 1, 1], Recipe::UNIT)?;
                b.graph.mul_mat(w, x)
            });
        }
    }
}

fn batched(cases: &mut Cases) {
    for dtype in weight_types() {
        let k = if dtype.is_quantized() {
            dtype.block_len()
        } else {
            40
        };
        let shapes: [(Shape, Shape); 4] = [
            ([k, 5, 2, 1], [k, 3, 2, 1]),
            ([k, 5, 2, 1], [k, 1, 6, 1]),
            ([k, 4, 1, 2], [k, 3, 4, 2]),
            ([k, 4, 2, 3], [k, 2, 4, 6]),
        ];
        for (w, x) in shapes {
            cases.add("", limit(dtype, DType::F32), |b| {
                let w = b.input(dtype, w, Recipe::UNIT)?;
                let x = b.input(DType::F32, x, Recipe::UNIT)?;
                b.graph.mul_mat(w, x)
            });
        }
    }
    // Attention without fusion: keys and queries with heads and tokens swapped, eight heads over
    // two.
    for dtype in FLOATS.into_iter().chain([DType::Q8_0, DType::Q4_0]) {
        for (d, kv, tokens) in [(32, 7, 1), (64, 33, 5), (128, 40, 3)] {
            cases.add("permuted heads", limit(dtype, DType::F32), |b| {
                let k = b.operand(dtype, [d, kv, 2, 1], Recipe::UNIT, Form::Permuted)?;
                let q = b.operand(DType::F32, [d, tokens, 8, 1], Recipe::UNIT, Form::Permuted)?;
                b.graph.mul_mat(k, q)
            });
        }
    }
    for dtype in FLOATS {
        cases.add("transposed values", limit(dtype, DType::F32), |b| {
            let v = b.operand(dtype, [33, 32, 2, 1], Recipe::UNIT, Form::Gaps)?;
            let weights = Recipe::Uniform { min: 0.0, max: 0.1 };
            let p = b.input(DType::F32, [33, 5, 8, 1], weights)?;
            b.graph.mul_mat(v, p)
        });
    }
}

fn experts(cases: &mut Cases) {
    for dtype in weight_types() {
        let k = if dtype.is_quantized() {
            dtype.block_len().max(64)
        } else {
            50
        };
        for (m, count, used, tokens) in [
            (1, 1, 1, 1),
            (8, 4, 2, 1),
            (9, 4, 2, 5),
            (32, 8, 4, 3),
            (16, 3, 3, 33),
            // Several panels, and many columns for each expert.
            (70, 3, 1, 120),
            (40, 1, 1, 600),
        ] {
            for rows in [1, used] {
                if rows == used && used == 1 {
                    continue;
                }
                cases.add("", limit(dtype, DType::F32), |b| {
                    let w = b.weights(dtype, [k, m, count, 1], Recipe::UNIT)?;
                    let x = b.input(DType::F32, [k, rows, tokens, 1], Recipe::UNIT)?;
                    let distinct = Recipe::DistinctIds { limit: count };
                    let ids = b.input(DType::I32, [used, tokens, 1, 1], distinct)?;
                    b.graph.mul_mat_id(w, x, ids)
                });
            }
        }
        for (m, count, used, tokens) in [(9, 4, 3, 2), (33, 6, 4, 9), (70, 3, 2, 120)] {
            cases.add("skipped", limit(dtype, DType::F32), |b| {
                let w = b.weights(dtype, [k, m, count, 1], Recipe::UNIT)?;
                let x = b.input(DType::F32, [k, used, tokens, 1], Recipe::UNIT)?;
                let ids = Recipe::SkippedIds { limit: count };
                let ids = b.input(DType::I32, [used, tokens, 1, 1], ids)?;
                b.graph.mul_mat_id(w, x, ids)
            });
        }
        // The ids are the first columns of an argsort.
        cases.add("views", limit(dtype, DType::F32), |b| {
            let w = b.weights(dtype, [k, 12, 6, 1], Recipe::UNIT)?;
            let x = b.operand(DType::F32, [k, 2, 4, 1], Recipe::UNIT, Form::Gaps)?;
            let sorted = b.input(DType::I32, [6, 4, 1, 1], Recipe::DistinctIds { limit: 6 })?;
            let ids = b.graph.view(sorted, [2, 4, 1, 1], [24, 96, 96], 0)?;
            b.graph.mul_mat_id(w, x, ids)
        });
    }
}
