//! Gradients, losses and optimizer steps.

use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Op, Rope, RopeMode, Shape};

/// Positive numbers, such as sums of squares or labels.
const POSITIVE: Recipe = Recipe::Uniform { min: 0.0, max: 0.2 };

pub fn add(cases: &mut Cases) {
    outer_products(cases);
    repetitions(cases);
    rows(cases);
    ropes(cases);
    tables(cases);
    losses(cases);
    steps(cases);
}

fn outer_products(cases: &mut Cases) {
    let limit = Limit::Nmse(1e-9);
    let shapes: [([usize; 3], [usize; 2], [usize; 2]); 9] = [
        ([1, 1, 1], [1, 1], [1, 1]),
        ([16, 1, 10], [1, 1], [1, 1]),
        ([7, 5, 3], [1, 1], [1, 1]),
        ([64, 33, 31], [1, 1], [1, 1]),
        ([129, 300, 50], [1, 1], [1, 1]),
        ([256, 16, 16], [1, 1], [1, 1]),
        ([35, 40, 9], [3, 1], [1, 1]),
        ([20, 12, 7], [2, 1], [3, 1]),
        ([20, 12, 7], [1, 2], [4, 2]),
    ];
    for dtype in super::FLOATS {
        for ([m, k, n], [a2, a3], [share2, share3]) in shapes {
            cases.add("", limit, |b| {
                let rows = b.input(dtype, [m, k, a2, a3], Recipe::UNIT)?;
                let factors = [n, k, a2 * share2, a3 * share3];
                let factors = b.input(DType::F32, factors, Recipe::UNIT)?;
                b.graph.out_prod(rows, factors)
            });
        }
    }
    for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
        cases.add("", limit, |b| {
            let rows = b.input(DType::F32, [70, 9, 3, 1], Recipe::UNIT)?;
            let factors = b.operand(DType::F32, [13, 9, 3, 1], Recipe::UNIT, form)?;
            b.graph.out_prod(rows, factors)
        });
    }
    cases.add("rows with gaps", limit, |b| {
        let rows = b.operand(DType::F32, [70, 9, 3, 1], Recipe::UNIT, Form::Gaps)?;
        let factors = b.input(DType::F32, [13, 9, 3, 1], Recipe::UNIT)?;
        b.graph.out_prod(rows, factors)
    });
}

fn repetitions(cases: &mut Cases) {
    let configs: [(Shape, [usize; 4]); 8] = [
        ([8, 5, 4, 3], [1, 1, 1, 1]),
        ([8, 5, 4, 3], [2, 1, 1, 1]),
        ([8, 5, 4, 3], [1, 2, 1, 3]),
        ([5, 1, 3, 1], [3, 4, 2, 2]),
        ([100, 1, 1, 1], [1, 37, 3, 1]),
        ([1, 3, 2, 1], [70, 2, 1, 1]),
        ([1, 1, 1, 1], [33, 5, 2, 2]),
        ([65, 2, 2, 1], [2, 9, 1, 1]),
    ];
    for (shape, times) in configs {
        let whole = std::array::from_fn(|d| shape[d] * times[d]);
        for form in [Form::Plain, Form::Gaps, Form::Permuted, Form::Transposed] {
            cases.add("", Limit::Nmse(1e-7), |b| {
                let x = b.operand(DType::F32, whole, Recipe::UNIT, form)?;
                b.graph.repeat_back(x, shape)
            });
        }
    }
}

fn rows(cases: &mut Cases) {
    let ops = [
        Op::SiluBack,
        Op::RmsNormBack { eps: 1e-5 },
        Op::RmsNormBack { eps: 0.1 },
        Op::SoftMaxBack { scale: 1.0 },
        Op::SoftMaxBack { scale: 0.125 },
    ];
    for op in ops {
        let shapes: [Shape; 6] = [
            [1, 1, 1, 1],
            [7, 1, 1, 1],
            [64, 5, 1, 1],
            [33, 3, 2, 2],
            [129, 10, 1, 1],
            [1025, 2, 1, 1],
        ];
        for shape in shapes {
            // The gradient of the norm of a single number is a difference of almost equal numbers.
            if shape[0] == 1 && matches!(op, Op::RmsNormBack { .. }) {
                continue;
            }
            cases.add("", Limit::Nmse(1e-7), |b| {
                let gradient = b.input(DType::F32, shape, Recipe::UNIT)?;
                let other = b.input(DType::F32, shape, Recipe::UNIT)?;
                b.graph.push(op, &[Some(gradient), Some(other)])
            });
        }
        for form in [Form::Gaps, Form::Permuted] {
            cases.add("", Limit::Nmse(1e-7), |b| {
                let gradient = b.operand(DType::F32, [40, 3, 5, 2], Recipe::UNIT, form)?;
                let other = b.operand(DType::F32, [40, 3, 5, 2], Recipe::UNIT, form)?;
                b.graph.push(op, &[Some(gradient), Some(other)])
            });
        }
    }
    for past in [0, 2] {
        for form in [Form::Plain, Form::Permuted] {
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(DType::F32, [9, 7, 3, 1], Recipe::UNIT, form)?;
                b.graph.diag_mask_zero(x, past)
            });
        }
    }
    for shape in [[1, 1, 1, 1], [100, 3, 2, 1]] {
        cases.add("", Limit::Nmse(1e-9), |b| {
            let range = Recipe::Uniform {
                min: 0.001,
                max: 50.0,
            };
            let x = b.input(DType::F32, shape, range)?;
            b.graph.log(x)
        });
    }
}

fn ropes(cases: &mut Cases) {
    let sections = [5, 4, 4, 3];
    for (mode, dims) in [
        (RopeMode::Multi { sections }, 32),
        (RopeMode::Interleaved { sections }, 32),
        (RopeMode::Vision { sections }, 16),
    ] {
        cases.add("several positions", Limit::Nmse(1e-9), |b| {
            let x = b.input(DType::F32, [32, 3, 5, 2], Recipe::UNIT)?;
            let start = Recipe::Positions { start: 7 };
            let positions = b.input(DType::I32, [20, 1, 1, 1], start)?;
            let rope = Rope::new(dims, mode, 10_000.0);
            b.graph.rope_back(x, positions, None, rope)
        });
    }
    for mode in [RopeMode::Normal, RopeMode::Neox] {
        for (dims, offset) in [(32, 0), (16, 8)] {
            for yarn in [0.0, 1.0] {
                cases.add(
                    &format!("offset {offset}, yarn {yarn}"),
                    Limit::Nmse(1e-9),
                    |b| {
                        let x = b.input(DType::F32, [32, 3, 5, 2], Recipe::UNIT)?;
                        let start = Recipe::Positions { start: 7 };
                        let positions = b.input(DType::I32, [5, 1, 1, 1], start)?;
                        let rope = Rope {
                            offset,
                            ext_factor: yarn,
                            freq_scale: 0.5,
                            attn_factor: 1.2,
                            original_context: 64,
                            ..Rope::new(dims, mode, 10_000.0)
                        };
                        b.graph.rope_back(x, positions, None, rope)
                    },
                );
            }
        }
        cases.add("with divisors", Limit::Nmse(1e-9), |b| {
            let x = b.operand(DType::F32, [32, 3, 5, 2], Recipe::UNIT, Form::Permuted)?;
            let start = Recipe::Positions { start: 0 };
            let positions = b.input(DType::I32, [5, 1, 1, 1], start)?;
            let range = Recipe::Uniform { min: 1.0, max: 4.0 };
            let divisors = b.input(DType::F32, [16, 1, 1, 1], range)?;
            let rope = Rope::new(32, mode, 10_000.0);
            b.graph.rope_back(x, positions, Some(divisors), rope)
        });
    }
}

fn tables(cases: &mut Cases) {
    for (n0, given, rows) in [(2, 3, 2), (33, 5, 9), (200, 40, 7), (64, 3, 100)] {
        for (dtype, form) in [
            (DType::F32, Form::Plain),
            (DType::F32, Form::Gaps),
            (DType::F32, Form::Transposed),
            (DType::F16, Form::Plain),
        ] {
            cases.add("", Limit::Nmse(1e-8), |b| {
                let gradient = b.operand(dtype, [n0, given, 1, 1], Recipe::UNIT, form)?;
                let numbers = b.input(DType::I32, [given, 1, 1, 1], Recipe::Ids { limit: rows })?;
                b.graph.get_rows_back(gradient, numbers, rows)
            });
        }
    }
}

fn losses(cases: &mut Cases) {
    let shapes: [Shape; 5] = [
        [1, 3, 1, 1],
        [10, 5, 4, 3],
        [300, 1, 1, 1],
        [1000, 17, 1, 1],
        [37, 64, 1, 1],
    ];
    for shape in shapes {
        for size in [1.0, 30.0] {
            let range = Recipe::Uniform {
                min: -size,
                max: size,
            };
            let note = format!("logits up to {size}");
            cases.add(&note, Limit::Nmse(1e-9), |b| {
                let logits = b.input(DType::F32, shape, range)?;
                let labels = b.input(DType::F32, shape, POSITIVE)?;
                b.graph.cross_entropy_loss(logits, labels)
            });
            cases.add(&note, Limit::Nmse(1e-8), |b| {
                let gradient = b.input(DType::F32, [1, 1, 1, 1], Recipe::UNIT)?;
                let logits = b.input(DType::F32, shape, range)?;
                let labels = b.input(DType::F32, shape, POSITIVE)?;
                b.graph.cross_entropy_loss_back(gradient, logits, labels)
            });
        }
    }
}

fn steps(cases: &mut Cases) {
    let limit = Limit::Nmse(1e-8);
    for shape in [[1, 1, 1, 1], [10, 5, 4, 3], [5000, 3, 1, 1]] {
        cases.add("", limit, |b| {
            let weights = b.input(DType::F32, shape, Recipe::UNIT)?;
            let gradient = b.input(DType::F32, shape, Recipe::UNIT)?;
            let means = b.input(DType::F32, shape, Recipe::UNIT)?;
            let squares = b.input(DType::F32, shape, POSITIVE)?;
            let parameters = b.input(DType::F32, [7, 1, 1, 1], POSITIVE)?;
            b.graph
                .opt_step_adamw(weights, gradient, [means, squares], parameters)
        });
        cases.add("", limit, |b| {
            let weights = b.input(DType::F32, shape, Recipe::UNIT)?;
            let gradient = b.input(DType::F32, shape, Recipe::UNIT)?;
            let parameters = b.input(DType::F32, [2, 1, 1, 1], POSITIVE)?;
            b.graph.opt_step_sgd(weights, gradient, parameters)
        });
    }
}
