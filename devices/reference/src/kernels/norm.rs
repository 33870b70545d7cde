//! Normalization of rows.

use crate::call::Call;
use samite_core::Result;

/// Replaces every element `x` by `(x - shift) * scale`, where `f` returns shift and scale of a row.
fn affine(call: &Call, f: impl Fn(&[f64]) -> (f64, f64)) -> Result<()> {
    let x = call.numbers(0)?;
    let mut values = call.room()?;
    for row in x.rows() {
        let (shift, scale) = f(row);
        values.extend(row.iter().map(|x| (x - shift) * scale));
    }
    call.store(&values)
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

/// Normalises rows to mean 0 and variance 1.
pub fn norm(call: &Call, eps: f64) -> Result<()> {
    affine(call, |row| {
        let center = mean(row.iter().copied());
        let variance = mean(row.iter().map(|x| (x - center).powi(2)));
        (center, 1.0 / (variance + eps).sqrt())
    })
}

/// Normalises rows to mean square 1.
pub fn rms_norm(call: &Call, eps: f64) -> Result<()> {
    affine(call, |row| {
        (0.0, 1.0 / (mean(row.iter().map(|x| x * x)) + eps).sqrt())
    })
}

/// Normalises rows to length 1.
pub fn l2_norm(call: &Call, eps: f64) -> Result<()> {
    affine(call, |row| {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        (0.0, 1.0 / length.max(eps))
    })
}
