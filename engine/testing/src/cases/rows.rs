//! Rows by number.

use super::{FLOATS, QUANTIZED, converted, weight_types};
use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Shape};

pub fn add(cases: &mut Cases) {
    get(cases);
    set(cases);
}

fn get(cases: &mut Cases) {
    for dtype in weight_types() {
        let n0 = if dtype.is_quantized() {
            2 * dtype.block_len()
        } else {
            33
        };
        // Decoding is exact, but that of some formats rounds a product.
        let limit = if dtype.is_quantized() {
            Limit::Nmse(1e-12)
        } else {
            Limit::Exact
        };
        for (rows, picked) in [(1, 1), (5, 3), (40, 17)] {
            cases.add("", limit, |b| {
                let table = b.weights(dtype, [n0, rows, 1, 1], Recipe::UNIT)?;
                let ids = b.input(DType::I32, [picked, 1, 1, 1], Recipe::Ids { limit: rows })?;
                b.graph.get_rows(table, ids)
            });
        }
        for form in [Form::Plain, Form::Gaps] {
            cases.add("batches", limit, |b| {
                let table = b.operand(dtype, [n0, 6, 3, 2], Recipe::UNIT, form)?;
                let ids = b.operand(DType::I32, [4, 3, 2, 1], Recipe::Ids { limit: 6 }, form)?;
                b.graph.get_rows(table, ids)
            });
        }
    }
    for form in [Form::Plain, Form::Gaps] {
        cases.add("", Limit::Exact, |b| {
            let numbers = Recipe::Uniform {
                min: -1e6,
                max: 1e6,
            };
            let table = b.operand(DType::I32, [3, 9, 2, 1], numbers, form)?;
            let ids = b.input(DType::I32, [5, 2, 1, 1], Recipe::Ids { limit: 9 })?;
            b.graph.get_rows(table, ids)
        });
    }
}

fn set(cases: &mut Cases) {
    for to in FLOATS.into_iter().chain([DType::F8_E4M3]).chain(QUANTIZED) {
        let n0 = if to.is_quantized() {
            2 * to.block_len()
        } else {
            33
        };
        for from in [DType::F32, DType::F16] {
            let limit = converted(from, to);
            for index in [DType::I64, DType::I32] {
                let configs: [(Shape, [usize; 3], usize); 3] = [
                    ([n0, 1, 1, 1], [1, 1, 1], 4),
                    ([n0, 3, 1, 1], [3, 1, 1], 9),
                    ([n0, 3, 4, 2], [3, 2, 1], 7),
                ];
                for ([n0, r, n2, n3], [i0, i1, i2], rows) in configs {
                    cases.add("", limit, |b| {
                        let source = b.input(from, [n0, r, n2, n3], Recipe::UNIT)?;
                        let distinct = Recipe::DistinctIds { limit: rows };
                        let numbers = b.input(index, [i0, i1, i2, 1], distinct)?;
                        let into = b.input(to, [n0, rows, n2, n3], Recipe::UNIT)?;
                        b.graph.set_rows(source, numbers, into)
                    });
                }
            }
            cases.add("views", limit, |b| {
                let source = b.operand(from, [n0, 3, 2, 1], Recipe::UNIT, Form::Permuted)?;
                let distinct = Recipe::DistinctIds { limit: 8 };
                let numbers = b.input(DType::I64, [3, 1, 1, 1], distinct)?;
                let into = b.operand(to, [n0, 8, 2, 1], Recipe::UNIT, Form::Gaps)?;
                b.graph.set_rows(source, numbers, into)
            });
        }
    }
}
