//! Copies and conversions, repetition, concatenation, padding.

use super::{DECODED, FLOATS, QUANTIZED, converted};
use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::DType::{
    self, BF16, F8_E4M3, F16, F32, I8, I16, I32, I64, IQ2_XS, Q4_0, Q6_K, Q8_0,
};

pub fn add(cases: &mut Cases) {
    same_type(cases);
    conversions(cases);
    shapes(cases);
}

const NUMBERS: Recipe = Recipe::Uniform {
    min: -100.0,
    max: 100.0,
};

/// Returns a row length of whole blocks.
fn width(dtypes: &[DType], blocks: usize) -> usize {
    blocks
        * dtypes
            .iter()
            .map(|dtype| dtype.block_len())
            .max()
            .unwrap_or(1)
}

fn same_type(cases: &mut Cases) {
    let permutations = [
        [0, 1, 2, 3],
        [0, 2, 1, 3],
        [0, 3, 2, 1],
        [0, 2, 3, 1],
        [1, 0, 2, 3],
        [2, 0, 1, 3],
        [1, 2, 0, 3],
        [3, 1, 2, 0],
        [3, 2, 1, 0],
    ];
    for dtype in [
        F32, F16, BF16, F8_E4M3, I32, I64, I16, I8, Q4_0, Q8_0, Q6_K, IQ2_XS,
    ] {
        let recipe = if dtype.is_integer() {
            NUMBERS
        } else {
            Recipe::UNIT
        };
        let shape = [
            width(&[dtype], if dtype.is_quantized() { 2 } else { 7 }),
            4,
            3,
            2,
        ];
        for axes in permutations
            .into_iter()
            .filter(|axes| !dtype.is_quantized() || axes[0] == 0)
        {
            cases.add(&format!("{axes:?}"), Limit::Exact, |b| {
                let x = b.input(dtype, shape, recipe)?;
                let x = b.graph.permute(x, axes)?;
                b.graph.cont(x)
            });
        }
        for form in [Form::Plain, Form::Gaps, Form::Permuted] {
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(dtype, shape, recipe, form)?;
                b.graph.dup(x)
            });
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(dtype, shape, recipe, form)?;
                let into = b.operand(dtype, shape, recipe, Form::Gaps)?;
                b.graph.cpy(x, into)
            });
        }
    }
    // Into another shape: elements are copied in logical order.
    for dtype in FLOATS {
        for form in [Form::Plain, Form::Transposed] {
            cases.add("another shape", Limit::Exact, |b| {
                let x = b.operand(dtype, [6, 5, 2, 1], Recipe::UNIT, form)?;
                let into = b.operand(dtype, [4, 15, 1, 1], Recipe::UNIT, Form::Gaps)?;
                b.graph.cpy(x, into)
            });
        }
    }
    // Writes to a transposed cache of values: one column for each token.
    for (from, to) in [(F32, F16), (F32, F32), (F16, F16)] {
        cases.add("columns of a cache", Limit::Exact, |b| {
            let x = b.operand(from, [5, 32, 1, 1], Recipe::UNIT, Form::Transposed)?;
            let cache = b.input(to, [16, 32, 1, 1], Recipe::UNIT)?;
            let size = to.block_bytes();
            let into = b.graph.view(
                cache,
                [5, 32, 1, 1],
                [16 * size, 512 * size, 512 * size],
                7 * size,
            )?;
            b.graph.cpy(x, into)
        });
    }
}

fn conversions(cases: &mut Cases) {
    let mut pairs = Vec::new();
    for from in FLOATS {
        pairs.extend(
            FLOATS
                .into_iter()
                .filter(|&to| to != from)
                .map(|to| (from, to)),
        );
        pairs.extend([(from, F8_E4M3), (F8_E4M3, from)]);
        pairs.extend(QUANTIZED.map(|to| (from, to)));
        pairs.extend(QUANTIZED.into_iter().chain(DECODED).map(|to| (to, from)));
    }
    pairs.extend([(F32, I32), (I32, F32), (Q4_0, Q8_0), (Q8_0, Q4_0)]);
    for (from, to) in pairs {
        let recipe = if from == F32 && to == I32 || from == I32 {
            NUMBERS
        } else {
            Recipe::UNIT
        };
        let limit = converted(from, to);
        let shape = [
            width(
                &[from, to],
                if from.is_quantized() || to.is_quantized() {
                    2
                } else {
                    33
                },
            ),
            3,
            2,
            1,
        ];
        for form in [Form::Plain, Form::Gaps, Form::Permuted] {
            cases.add("", limit, |b| {
                let x = b.operand(from, shape, recipe, form)?;
                b.graph.cast(x, to)
            });
        }
        for (from_form, to_form) in [(Form::Plain, Form::Plain), (Form::Gaps, Form::Gaps)] {
            cases.add("", limit, |b| {
                let x = b.operand(from, shape, recipe, from_form)?;
                let into = b.operand(to, shape, Recipe::UNIT, to_form)?;
                b.graph.cpy(x, into)
            });
        }
    }
    for small in [F16, BF16, F8_E4M3] {
        for (from, to) in [(F32, small), (small, F32)] {
            cases.add("elements with gaps", Limit::Exact, |b| {
                let x = b.operand(from, [6, 5, 2, 1], Recipe::UNIT, Form::Transposed)?;
                let into = b.operand(to, [6, 5, 2, 1], Recipe::UNIT, Form::Transposed)?;
                b.graph.cpy(x, into)
            });
        }
    }
    for from in [F32, F16, F8_E4M3] {
        cases.add("beyond the largest number", Limit::Exact, |b| {
            let x = b.input(
                F32,
                [64, 1, 1, 1],
                Recipe::Uniform {
                    min: -2e5,
                    max: 2e5,
                },
            )?;
            b.graph.cast(x, from)
        });
        cases.add("very small numbers", Limit::Exact, |b| {
            let x = b.input(
                F32,
                [64, 1, 1, 1],
                Recipe::Uniform {
                    min: -1e-6,
                    max: 1e-6,
                },
            )?;
            b.graph.cast(x, from)
        });
    }
}

fn shapes(cases: &mut Cases) {
    for dtype in [F32, F16, BF16, I32] {
        let recipe = if dtype.is_integer() {
            NUMBERS
        } else {
            Recipe::UNIT
        };
        for (from, to) in [
            ([1, 1, 1, 1], [33, 3, 1, 1]),
            ([7, 3, 1, 1], [7, 3, 1, 1]),
            ([7, 1, 2, 1], [14, 4, 2, 3]),
            ([1, 5, 1, 2], [9, 5, 3, 2]),
            ([64, 1, 1, 1], [64, 9, 1, 1]),
        ] {
            cases.add("", Limit::Exact, |b| {
                let x = b.input(dtype, from, recipe)?;
                b.graph.repeat(x, to)
            });
        }
        for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(dtype, [6, 2, 3, 1], recipe, form)?;
                b.graph.repeat(x, [12, 2, 3, 2])
            });
        }
    }
    for dtype in [F32, F16, BF16, I32, Q8_0] {
        let recipe = if dtype.is_integer() {
            NUMBERS
        } else {
            Recipe::UNIT
        };
        for dim in 0..4 {
            for form in [Form::Plain, Form::Gaps, Form::Permuted] {
                cases.add("", Limit::Exact, |b| {
                    let mut shape = [width(&[dtype], 2), 3, 2, 2];
                    let x = b.operand(dtype, shape, recipe, form)?;
                    shape[dim] += shape[dim] / 2;
                    let y = b.input(dtype, shape, recipe)?;
                    b.graph.concat(x, y, dim)
                });
            }
        }
    }
    for (before, after) in [
        ([0, 0, 0, 0], [1, 0, 0, 0]),
        ([2, 1, 0, 0], [0, 0, 3, 0]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([0, 0, 0, 2], [31, 2, 0, 0]),
    ] {
        for form in [Form::Plain, Form::Gaps, Form::Permuted, Form::Transposed] {
            cases.add("", Limit::Exact, |b| {
                let x = b.operand(F32, [7, 3, 2, 1], Recipe::UNIT, form)?;
                b.graph.pad(x, before, after)
            });
        }
    }
}
