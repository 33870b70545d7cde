//! Indices in the order of values.

use crate::call::Call;
use crate::value::room;
use samite_core::{Result, SortOrder};

/// Writes the first `count` indices of each row, sorted by value. Equal values keep their order.
fn sorted(call: &Call, order: SortOrder, count: usize) -> Result<()> {
    let x = call.numbers(0)?;
    let (mut all, mut indices) = (call.room()?, room(x.shape[0])?);
    for row in x.rows() {
        indices.clear();
        indices.extend(0..row.len());
        // The unstable sort does not allocate.
        indices.sort_unstable_by(|&a, &b| {
            let by_value = match order {
                SortOrder::Ascending => row[a].total_cmp(&row[b]),
                SortOrder::Descending => row[b].total_cmp(&row[a]),
            };
            by_value.then(a.cmp(&b))
        });
        all.extend(indices.iter().take(count).map(|&i| i as i64));
    }
    call.store_integers(all)
}

/// Writes all indices of each row.
pub fn argsort(call: &Call, order: SortOrder) -> Result<()> {
    sorted(call, order, usize::MAX)
}

/// Writes the indices of the `k` largest elements of each row, largest first.
pub fn top_k(call: &Call, k: usize) -> Result<()> {
    sorted(call, SortOrder::Descending, k)
}

/// Writes the index of the largest element of each row, the first of equals.
pub fn argmax(call: &Call) -> Result<()> {
    let x = call.numbers(0)?;
    let largest = |row: &[f64]| {
        let (mut best, mut largest) = (0, f64::NEG_INFINITY);
        for (i, &value) in row.iter().enumerate() {
            if value > largest {
                (best, largest) = (i, value);
            }
        }
        best as i64
    };
    call.store_integers(x.rows().map(largest))
}
