//! Row-wise operations: sums, norms, sorts, masks.

use super::{FLOATS, rounded_to};
use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Op, Shape, SortOrder};

const SHAPES: [Shape; 7] = [
    [1, 1, 1, 1],
    [1, 5, 1, 1],
    [7, 1, 1, 1],
    [33, 3, 1, 1],
    [5, 3, 2, 2],
    [64, 9, 1, 1],
    [1025, 2, 1, 1],
];

const FORMS: [Form; 4] = [Form::Plain, Form::Gaps, Form::Permuted, Form::Transposed];

pub fn add(cases: &mut Cases) {
    sums(cases);
    norms(cases);
    indices(cases);
    masks(cases);
}

/// Adds `op` of one source over shapes and forms.
fn over_rows(cases: &mut Cases, dtype: DType, op: Op, recipe: Recipe, limit: Limit) {
    for shape in SHAPES {
        cases.add("", limit, |b| {
            let x = b.input(dtype, shape, recipe)?;
            b.graph.push(op, &[Some(x)])
        });
    }
    for form in &FORMS[1..] {
        for shape in [[17, 4, 3, 2], [64, 2, 5, 1]] {
            cases.add("", limit, |b| {
                let x = b.operand(dtype, shape, recipe, *form)?;
                b.graph.push(op, &[Some(x)])
            });
        }
    }
}

fn sums(cases: &mut Cases) {
    let recipe = Recipe::Uniform {
        min: -0.5,
        max: 1.0,
    };
    for dtype in FLOATS {
        over_rows(cases, dtype, Op::Sum, recipe, rounded_to(dtype));
    }
    for op in [Op::SumRows, Op::Mean, Op::CumSum] {
        over_rows(cases, DType::F32, op, recipe, Limit::Nmse(1e-7));
    }
}

fn norms(cases: &mut Cases) {
    // Not centred, so that a variance computed as a difference of large sums is detected.
    let shifted = Recipe::Uniform { min: 3.0, max: 5.0 };
    for eps in [0.0, 1e-5, 0.1] {
        for recipe in [Recipe::UNIT, shifted] {
            for op in [Op::Norm { eps }, Op::RmsNorm { eps }, Op::L2Norm { eps }] {
                // A row of one element has variance 0, so without eps its norm is undefined.
                let undefined =
                    |shape: &Shape| matches!(op, Op::Norm { eps: 0.0 }) && shape[0] == 1;
                for shape in SHAPES.iter().filter(|shape| !undefined(shape)) {
                    cases.add(&format!("{recipe:?}"), Limit::Nmse(1e-7), |b| {
                        let x = b.input(DType::F32, *shape, recipe)?;
                        b.graph.push(op, &[Some(x)])
                    });
                }
                for form in &FORMS[1..] {
                    cases.add(&format!("{recipe:?}"), Limit::Nmse(1e-7), |b| {
                        let x = b.operand(DType::F32, [64, 4, 3, 2], recipe, *form)?;
                        b.graph.push(op, &[Some(x)])
                    });
                }
            }
        }
    }
    for op in [
        Op::Norm { eps: 1e-5 },
        Op::RmsNorm { eps: 1e-5 },
        Op::L2Norm { eps: 1e-5 },
    ] {
        cases.add("of zeros", Limit::Exact, |b| {
            let x = b.input(DType::F32, [33, 2, 1, 1], Recipe::Zeros)?;
            b.graph.push(op, &[Some(x)])
        });
    }
}

fn indices(cases: &mut Cases) {
    let shapes = [
        [1, 1, 1, 1],
        [2, 3, 1, 1],
        [7, 1, 1, 1],
        [33, 3, 1, 1],
        [64, 2, 3, 2],
        [1000, 2, 1, 1],
    ];
    for shape in shapes {
        for recipe in [Recipe::Distinct, Recipe::Ties] {
            let note = format!("{recipe:?}");
            for order in [SortOrder::Ascending, SortOrder::Descending] {
                cases.add(&note, Limit::SortedIndices, |b| {
                    let x = b.input(DType::F32, shape, recipe)?;
                    b.graph.argsort(x, order)
                });
            }
            let mut counts = vec![1, 2, 5, shape[0]];
            counts.retain(|&k| k <= shape[0]);
            counts.dedup();
            for k in counts {
                cases.add(&note, Limit::IndexSets, |b| {
                    let x = b.input(DType::F32, shape, recipe)?;
                    b.graph.top_k(x, k)
                });
            }
            if shape[2] == 1 {
                // The first of equal elements.
                cases.add(&note, Limit::Exact, |b| {
                    let x = b.input(DType::F32, shape, recipe)?;
                    b.graph.argmax(x)
                });
            }
        }
    }
    for form in &FORMS[1..] {
        for order in [SortOrder::Ascending, SortOrder::Descending] {
            cases.add("", Limit::SortedIndices, |b| {
                let x = b.operand(DType::F32, [17, 4, 3, 1], Recipe::UNIT, *form)?;
                b.graph.argsort(x, order)
            });
        }
        cases.add("", Limit::IndexSets, |b| {
            let x = b.operand(DType::F32, [17, 4, 3, 1], Recipe::UNIT, *form)?;
            b.graph.top_k(x, 3)
        });
        cases.add("", Limit::Exact, |b| {
            let x = b.operand(DType::F32, [17, 4, 1, 1], Recipe::UNIT, *form)?;
            b.graph.argmax(x)
        });
    }
}

fn masks(cases: &mut Cases) {
    for dtype in FLOATS {
        for (shape, past) in [
            ([1, 1, 1, 1], 0),
            ([7, 7, 1, 1], 0),
            ([33, 5, 2, 2], 28),
            ([64, 9, 3, 1], 3),
            ([8, 12, 1, 1], 100),
        ] {
            cases.add("", Limit::Exact, |b| {
                let x = b.input(dtype, shape, Recipe::UNIT)?;
                b.graph.diag_mask_inf(x, past)
            });
        }
        for form in &FORMS[1..] {
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(dtype, [9, 6, 3, 2], Recipe::UNIT, *form)?;
                b.graph.diag_mask_inf(x, 2)
            });
        }
    }
}
