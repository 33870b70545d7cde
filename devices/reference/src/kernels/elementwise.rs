//! Element-wise operations.

use crate::call::Call;
use crate::kernels::functions;
use crate::value::positions;
use samite_core::{Glu, Result};

/// Computes `f` of each element of source 0.
pub fn map(call: &Call, f: impl Fn(f64) -> f64) -> Result<()> {
    call.store_all(call.numbers(0)?.values.into_iter().map(f))
}

/// Computes `f` of the index of each element.
pub fn generate(call: &Call, f: impl Fn(usize) -> f64) -> Result<()> {
    let elements = call.result.tensor.layout().elements();
    call.store_all((0..elements).map(f))
}

/// Computes `f` of each element of source 0 and its partner in source 1, which repeats.
pub fn binary(call: &Call, f: impl Fn(f64, f64) -> f64) -> Result<()> {
    let (a, b) = (call.numbers(0)?, call.numbers(1)?);
    let values = positions(a.shape).map(|position| f(a.at(position), b.at_repeated(position)));
    call.store_all(values)
}

/// Adds to each row of source 0 the row of source 1 that source 2 selects, if any.
pub fn add_id(call: &Call) -> Result<()> {
    let (a, b, ids) = (call.numbers(0)?, call.numbers(1)?, call.integers(2)?);
    let mut values = call.room()?;
    for [i1, i2, i3] in crate::value::rows(a.shape) {
        let a = a.row([i1, i2, i3]);
        match call.expert(ids.at([i1, i2, 0, 0]), b.shape[1], 2)? {
            Some(expert) => {
                let rows = a.iter().zip(b.row([expert, 0, 0]));
                values.extend(rows.map(|(a, b)| a + b));
            }
            None => values.extend(a),
        }
    }
    call.store(&values)
}

/// Computes a gated linear unit of the halves of each row, or of two sources.
pub fn glu(call: &Call, kind: Glu, swapped: bool) -> Result<()> {
    let (a, b) = (call.numbers(0)?, call.optional_numbers(1)?);
    let mut values = call.room()?;
    for row in crate::value::rows(a.shape) {
        let whole = a.row(row);
        let (x, gate) = match &b {
            Some(b) => (whole, b.row(row)),
            None => {
                let (first, second) = whole.split_at(whole.len() / 2);
                if swapped {
                    (second, first)
                } else {
                    (first, second)
                }
            }
        };
        values.extend(
            x.iter()
                .zip(gate)
                .map(|(&x, &g)| functions::glu(kind, x, g)),
        );
    }
    call.store(&values)
}
