//! Sums and means.

use crate::call::Call;
use samite_core::Result;

/// Computes the sum of all elements.
pub fn sum(call: &Call) -> Result<()> {
    call.store(&[call.numbers(0)?.values.iter().sum()])
}

/// Computes one number for each row.
pub fn rows(call: &Call, f: impl Fn(&[f64]) -> f64) -> Result<()> {
    call.store_all(call.numbers(0)?.rows().map(f))
}

/// Computes the sums of each element and all before it in its row.
pub fn running_sum(call: &Call) -> Result<()> {
    let x = call.numbers(0)?;
    let mut values = call.room()?;
    for row in x.rows() {
        let mut sum = 0.0;
        values.extend(row.iter().map(|x| {
            sum += x;
            sum
        }));
    }
    call.store(&values)
}
