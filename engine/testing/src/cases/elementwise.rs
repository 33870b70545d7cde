//! Element-wise operations: functions, arithmetic, gated units, fills.

use super::{FLOATS, rounded_to};
use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Glu, Op, Shape, Unary};

pub fn add(cases: &mut Cases) {
    unary(cases);
    scalar(cases);
    binary(cases);
    glu(cases);
    generated(cases);
}

const SHAPES: [Shape; 5] = [
    [1, 1, 1, 1],
    [7, 1, 1, 1],
    [33, 3, 1, 1],
    [5, 3, 2, 2],
    [256, 5, 1, 1],
];

/// Returns numbers from a wide range. A single number comes from a narrow range, because far out in
/// the tail of a function its relative error is meaningless.
fn wide(elements: usize) -> Recipe {
    match elements {
        1 => Recipe::UNIT,
        _ => Recipe::Uniform {
            min: -10.0,
            max: 10.0,
        },
    }
}

fn unary(cases: &mut Cases) {
    for function in Unary::ALL {
        for dtype in FLOATS {
            let limit = rounded_to(dtype);
            for shape in SHAPES {
                cases.add("", limit, |b| {
                    let x = b.input(dtype, shape, wide(shape.iter().product()))?;
                    b.graph.unary(x, function)
                });
            }
            for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
                cases.add("", limit, |b| {
                    let x = b.operand(dtype, [17, 4, 3, 2], Recipe::UNIT, form)?;
                    b.graph.unary(x, function)
                });
            }
        }
        // Ties of rounding and the kinks of piecewise functions lie at small integers and halves.
        cases.add("at special values", rounded_to(DType::F32), |b| {
            let x = b.input(DType::F32, [64, 1, 1, 1], Recipe::Ties)?;
            let halves = b.graph.scale(x, 0.5)?;
            b.graph.unary(halves, function)
        });
    }
}

fn scalar(cases: &mut Cases) {
    let ops = [
        (
            Op::Scale {
                scale: -0.75,
                bias: 0.0,
            },
            -1.0,
        ),
        (
            Op::Scale {
                scale: 1.5,
                bias: 2.0,
            },
            -1.0,
        ),
        (Op::Sqr, -1.0),
        (Op::Sqrt, 0.0),
        (
            Op::Clamp {
                min: -0.5,
                max: 0.25,
            },
            -1.0,
        ),
        (
            Op::Clamp {
                min: f32::NEG_INFINITY,
                max: 0.0,
            },
            -1.0,
        ),
    ];
    for (op, min) in ops {
        let recipe = Recipe::Uniform { min, max: 1.0 };
        for dtype in FLOATS {
            for shape in SHAPES {
                cases.add("", rounded_to(dtype), |b| {
                    let x = b.input(dtype, shape, recipe)?;
                    b.graph.push(op, &[Some(x)])
                });
            }
            for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
                cases.add("", rounded_to(dtype), |b| {
                    let x = b.operand(dtype, [17, 4, 3, 2], recipe, form)?;
                    b.graph.push(op, &[Some(x)])
                });
            }
        }
    }
}

fn binary(cases: &mut Cases) {
    use DType::{BF16, F16, F32};
    let shapes: [(Shape, Shape); 12] = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([7, 1, 1, 1], [7, 1, 1, 1]),
        ([7, 3, 1, 1], [1, 1, 1, 1]),
        ([64, 5, 1, 1], [64, 1, 1, 1]),
        ([64, 5, 1, 1], [1, 5, 1, 1]),
        ([33, 4, 3, 2], [33, 4, 3, 2]),
        ([33, 4, 3, 2], [33, 1, 3, 1]),
        ([33, 4, 3, 2], [33, 2, 1, 2]),
        ([32, 4, 3, 2], [8, 2, 3, 1]),
        ([33, 4, 3, 2], [1, 4, 1, 2]),
        ([256, 2, 1, 1], [256, 2, 1, 1]),
        ([0, 3, 1, 1], [0, 1, 1, 1]),
    ];
    for op in [Op::Add, Op::Sub, Op::Mul, Op::Div] {
        // Divisors stay away from zero.
        let second = match op {
            Op::Div => Recipe::Uniform { min: 0.5, max: 2.0 },
            _ => Recipe::UNIT,
        };
        for (a, b) in [
            (F32, F32),
            (F16, F16),
            (BF16, BF16),
            (F16, F32),
            (BF16, F32),
            (F32, F16),
        ] {
            for (a_shape, b_shape) in shapes {
                cases.add("", rounded_to(a), |c| {
                    let x = c.input(a, a_shape, Recipe::UNIT)?;
                    let y = c.input(b, b_shape, second)?;
                    c.graph.push(op, &[Some(x), Some(y)])
                });
            }
            let forms = [
                (Form::Gaps, Form::Plain),
                (Form::Plain, Form::Gaps),
                (Form::Permuted, Form::Plain),
                (Form::Plain, Form::Transposed),
                (Form::Transposed, Form::Permuted),
            ];
            for (a_form, b_form) in forms {
                cases.add("", rounded_to(a), |c| {
                    let x = c.operand(a, [12, 4, 3, 2], Recipe::UNIT, a_form)?;
                    let y = c.operand(b, [12, 4, 1, 2], second, b_form)?;
                    c.graph.push(op, &[Some(x), Some(y)])
                });
            }
        }
        cases.add("both sources are one", Limit::Nmse(1e-7), |c| {
            let x = c.input(F32, [33, 3, 1, 1], Recipe::Uniform { min: 0.5, max: 2.0 })?;
            c.graph.push(op, &[Some(x), Some(x)])
        });
    }
    for (width, used, experts, tokens) in
        [(7, 1, 1, 1), (32, 2, 4, 3), (65, 4, 8, 5), (256, 6, 6, 2)]
    {
        for form in [Form::Plain, Form::Gaps] {
            cases.add(
                if form == Form::Gaps { "views" } else { "" },
                Limit::Nmse(1e-7),
                |b| {
                    let x = b.operand(F32, [width, used, tokens, 1], Recipe::UNIT, form)?;
                    let bias = b.input(F32, [width, experts, 1, 1], Recipe::UNIT)?;
                    let ids = Recipe::DistinctIds { limit: experts };
                    let ids = b.operand(DType::I32, [used, tokens, 1, 1], ids, form)?;
                    b.graph.add_id(x, bias, ids)
                },
            );
        }
        cases.add("skipped", Limit::Nmse(1e-7), |b| {
            let x = b.input(F32, [width, used, tokens, 1], Recipe::UNIT)?;
            let bias = b.input(F32, [width, experts, 1, 1], Recipe::UNIT)?;
            let ids = Recipe::SkippedIds { limit: experts };
            let ids = b.input(DType::I32, [used, tokens, 1, 1], ids)?;
            b.graph.add_id(x, bias, ids)
        });
    }
}

fn glu(cases: &mut Cases) {
    for kind in Glu::ALL {
        let types: &[DType] = match kind {
            Glu::SwigluOai { .. } => &[DType::F32],
            _ => &FLOATS,
        };
        for &dtype in types {
            for [n0, n1, n2, n3] in [[1, 1, 1, 1], [7, 3, 1, 1], [64, 5, 1, 1], [33, 2, 3, 2]] {
                for swapped in [false, true] {
                    let note = if swapped { "swapped" } else { "" };
                    cases.add(note, rounded_to(dtype), |b| {
                        let x = b.input(dtype, [2 * n0, n1, n2, n3], wide(n0))?;
                        b.graph.push(Op::Glu { kind, swapped }, &[Some(x)])
                    });
                }
                cases.add("", rounded_to(dtype), |b| {
                    let x = b.input(dtype, [n0, n1, n2, n3], wide(n0))?;
                    let gate = b.input(dtype, [n0, n1, n2, n3], wide(n0))?;
                    b.graph.glu_split(x, gate, kind)
                });
            }
            // Halves of longer rows, as in a fused projection.
            cases.add("views", rounded_to(dtype), |b| {
                let both = b.input(dtype, [80, 6, 1, 1], wide(80))?;
                let size = dtype.block_bytes();
                let x =
                    b.graph
                        .view(both, [40, 6, 1, 1], [80 * size, 480 * size, 480 * size], 0)?;
                let gate = b.graph.view(
                    both,
                    [40, 6, 1, 1],
                    [80 * size, 480 * size, 480 * size],
                    40 * size,
                )?;
                b.graph.glu_split(x, gate, kind)
            });
            cases.add("a view", rounded_to(dtype), |b| {
                let x = b.input(dtype, [80, 6, 1, 1], wide(80))?;
                let size = dtype.block_bytes();
                let x = b.graph.view(
                    x,
                    [64, 6, 1, 1],
                    [80 * size, 480 * size, 480 * size],
                    8 * size,
                )?;
                b.graph.glu(x, kind)
            });
        }
    }
}

fn generated(cases: &mut Cases) {
    for dtype in FLOATS {
        for shape in SHAPES {
            for value in [0.0, -1.5] {
                cases.add(&format!("with {value}"), Limit::Exact, |b| {
                    let x = b.input(dtype, shape, Recipe::UNIT)?;
                    b.graph.fill(x, value)
                });
            }
        }
    }
    for (start, stop, step) in [
        (0.0, 1.0, 1.0),
        (0.0, 10.0, 1.0),
        (-3.0, 4.2, 0.7),
        (1.0, 100.0, 0.25),
    ] {
        cases.add("", Limit::Nmse(1e-10), |b| {
            b.graph.arange(start, stop, step)
        });
    }
}
