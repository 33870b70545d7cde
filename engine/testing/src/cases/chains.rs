//! Short chains of operations that devices may fuse, and operations on computed operands.

use crate::case::{Cases, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Glu, Op, Rope, RopeMode, SortOrder, Unary};

pub fn add(cases: &mut Cases) {
    norms(cases);
    products(cases);
    routers(cases);
    caches(cases);
}

fn norms(cases: &mut Cases) {
    for norm in [Op::RmsNorm { eps: 1e-5 }, Op::Norm { eps: 1e-5 }] {
        for shape in [[7, 1, 1, 1], [64, 5, 1, 1], [96, 3, 4, 1]] {
            cases.add(
                &format!("{} of a sum with a weight", norm.name()),
                Limit::Nmse(1e-7),
                |b| {
                    let x = b.input(DType::F32, shape, Recipe::UNIT)?;
                    let y = b.input(DType::F32, shape, Recipe::UNIT)?;
                    let weight = b.input(DType::F32, [shape[0], 1, 1, 1], Recipe::UNIT)?;
                    let sum = b.graph.add(x, y)?;
                    let normed = b.graph.push(norm, &[Some(sum)])?;
                    b.graph.mul(normed, weight)
                },
            );
            cases.add(
                &format!("{} with weight and bias", norm.name()),
                Limit::Nmse(1e-7),
                |b| {
                    let x = b.input(DType::F32, shape, Recipe::UNIT)?;
                    let weight = b.input(DType::F32, [shape[0], 1, 1, 1], Recipe::UNIT)?;
                    let bias = b.input(DType::F32, [shape[0], 1, 1, 1], Recipe::UNIT)?;
                    let normed = b.graph.push(norm, &[Some(x)])?;
                    let scaled = b.graph.mul(normed, weight)?;
                    b.graph.add(scaled, bias)
                },
            );
            cases.add(
                &format!("{} used twice", norm.name()),
                Limit::Nmse(1e-7),
                |b| {
                    let x = b.input(DType::F32, shape, Recipe::UNIT)?;
                    let weight = b.input(DType::F32, [shape[0], 1, 1, 1], Recipe::UNIT)?;
                    let normed = b.graph.push(norm, &[Some(x)])?;
                    let scaled = b.graph.mul(normed, weight)?;
                    b.graph.sub(scaled, normed)
                },
            );
        }
    }
}

fn products(cases: &mut Cases) {
    for dtype in [
        DType::F32,
        DType::F16,
        DType::Q4_0,
        DType::Q8_0,
        DType::Q4_K,
    ] {
        for n in [1, 5] {
            cases.add(
                &format!("{dtype} product with bias, n = {n}"),
                Limit::Nmse(5e-4),
                |b| {
                    let w = b.weights(dtype, [256, 24, 1, 1], Recipe::UNIT)?;
                    let x = b.input(DType::F32, [256, n, 1, 1], Recipe::UNIT)?;
                    let bias = b.input(DType::F32, [24, 1, 1, 1], Recipe::UNIT)?;
                    let y = b.graph.mul_mat(w, x)?;
                    b.graph.add(y, bias)
                },
            );
            cases.add(
                &format!("{dtype} gate and up, n = {n}"),
                Limit::Nmse(1e-3),
                |b| {
                    let gate = b.weights(dtype, [256, 24, 1, 1], Recipe::UNIT)?;
                    let up = b.weights(dtype, [256, 24, 1, 1], Recipe::UNIT)?;
                    let x = b.input(DType::F32, [256, n, 1, 1], Recipe::UNIT)?;
                    let x = b.graph.scale(x, 0.1)?;
                    let gate = b.graph.mul_mat(gate, x)?;
                    let up = b.graph.mul_mat(up, x)?;
                    b.graph.glu_split(gate, up, Glu::Swiglu)
                },
            );
            // Three products of one activation, like queries, keys and values.
            cases.add(
                &format!("{dtype} three products, n = {n}"),
                Limit::Nmse(5e-4),
                |b| {
                    let x = b.input(DType::F32, [256, n, 1, 1], Recipe::UNIT)?;
                    let mut parts = Vec::new();
                    for m in [16, 8, 24] {
                        let w = b.weights(dtype, [256, m, 1, 1], Recipe::UNIT)?;
                        parts.push(b.graph.mul_mat(w, x)?);
                    }
                    let both = b.graph.concat(parts[0], parts[1], 0)?;
                    b.graph.concat(both, parts[2], 0)
                },
            );
        }
    }
}

fn routers(cases: &mut Cases) {
    for tokens in [1, 6] {
        cases.add(
            &format!("expert weights, {tokens} tokens"),
            Limit::Nmse(1e-6),
            |b| {
                let logits = b.input(DType::F32, [8, tokens, 1, 1], Recipe::Distinct)?;
                let logits = b.graph.scale(logits, 0.3)?;
                let probabilities = b.graph.soft_max(logits, None, None, 1.0, 0.0)?;
                let sorted = b.graph.argsort(probabilities, SortOrder::Descending)?;
                let chosen =
                    b.graph
                        .view(sorted, [2, tokens, 1, 1], [32, 32 * tokens, 32 * tokens], 0)?;
                let table = b.graph.reshape(probabilities, [1, 8, tokens, 1])?;
                let weights = b.graph.get_rows(table, chosen)?;
                let weights = b.graph.reshape(weights, [2, tokens, 1, 1])?;
                let sum = b.graph.sum_rows(weights)?;
                b.graph.div(weights, sum)
            },
        );
    }
}

fn caches(cases: &mut Cases) {
    for cache in [DType::F32, DType::F16, DType::Q8_0] {
        for tokens in [1, 4] {
            cases.add(
                &format!("{cache} cache written and read, {tokens} tokens"),
                Limit::Nmse(1e-4),
                |b| {
                    let keys = b.input(DType::F32, [32, 2, tokens, 1], Recipe::UNIT)?;
                    let positions = b.input(
                        DType::I32,
                        [tokens, 1, 1, 1],
                        Recipe::Positions { start: 2 },
                    )?;
                    let rope = Rope::new(32, RopeMode::Neox, 10_000.0);
                    let turned = b.graph.rope(keys, positions, None, rope)?;
                    let rows = b.graph.reshape(turned, [64, tokens, 1, 1])?;
                    let numbers = b.input(
                        DType::I64,
                        [tokens, 1, 1, 1],
                        Recipe::Positions { start: 1 },
                    )?;
                    let store = b.input(cache, [64, 16, 1, 1], Recipe::UNIT)?;
                    let written = b.graph.set_rows(rows, numbers, store)?;
                    let filled = b.graph.rows(written, 0, 14)?;
                    let read = b.graph.cast(filled, DType::F32)?;
                    b.graph.unary(read, Unary::Tanh)
                },
            );
        }
    }
}
