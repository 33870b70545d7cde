//! Matrix products of decoded weights with exact activations.

use crate::call::Call;
use crate::value::rows;
use samite_core::Result;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Computes one matrix product for each `[i2, i3]` of source 1. Consecutive ones share a matrix of
/// source 0.
pub fn mul_mat(call: &Call) -> Result<()> {
    let (weights, x) = (call.numbers(0)?, call.numbers(1)?);
    let [_, m, w2, w3] = weights.shape;
    let (share2, share3) = (x.shape[2] / w2, x.shape[3] / w3);
    let mut values = call.room()?;
    for [i1, i2, i3] in rows(x.shape) {
        let x = x.row([i1, i2, i3]);
        values.extend((0..m).map(|row| dot(weights.row([row, i2 / share2, i3 / share3]), x)));
    }
    call.store(&values)
}

/// Computes the sum over `k` of column `k` of source 0 times column `k` of source 1, for each `[i2,
/// i3]` of source 1.
pub fn out_prod(call: &Call) -> Result<()> {
    let (a, b) = (call.numbers(0)?, call.numbers(1)?);
    let ([m, terms, a2, a3], [n, _, b2, b3]) = (a.shape, b.shape);
    let (share2, share3) = (b2 / a2, b3 / a3);
    let mut values = call.room()?;
    for [j, i2, i3] in rows([m, n, b2, b3]) {
        let at = values.len();
        values.resize(at + m, 0.0);
        let sum = &mut values[at..];
        for term in 0..terms {
            let factor = b.at([j, term, i2, i3]);
            let row = a.row([term, i2 / share2, i3 / share3]);
            sum.iter_mut().zip(row).for_each(|(s, x)| *s += x * factor);
        }
    }
    call.store(&values)
}

/// Computes, for each token and each expert used, the product of that expert's matrix with a row of
/// source 1, or zeros without an expert.
pub fn mul_mat_id(call: &Call) -> Result<()> {
    let (experts, x, ids) = (call.numbers(0)?, call.numbers(1)?, call.integers(2)?);
    let [_, m, count, _] = experts.shape;
    let [used, tokens, _, _] = ids.shape;
    let mut values = call.room()?;
    for token in 0..tokens {
        for slot in 0..used {
            let expert = call.expert(ids.at([slot, token, 0, 0]), count, 2)?;
            let x = x.row([slot % x.shape[1], token, 0]);
            values.extend(
                (0..m)
                    .map(|row| expert.map_or(0.0, |expert| dot(experts.row([row, expert, 0]), x))),
            );
        }
    }
    call.store(&values)
}
