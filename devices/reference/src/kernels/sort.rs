//! Indices in the order of values.

use crate::call::Call;
use samite_core::{Result, SortOrder};

/// The indices of `row`, sorted by value; equal values keep their order.
fn sorted(row: &[f64], order: SortOrder) -> Vec<i64> {
    let mut indices: Vec<usize> = (0..row.len()).collect();
    indices.sort_by(|&a, &b| match order {
        SortOrder::Ascending => row[a].total_cmp(&row[b]),
        SortOrder::Descending => row[b].total_cmp(&row[a]),
    });
    indices.into_iter().map(|i| i as i64).collect()
}

/// All indices of each row.
pub fn argsort(call: &Call, order: SortOrder) -> Result<()> {
    let x = call.numbers(0)?;
    call.store_integers(x.rows().flat_map(|row| sorted(row, order)))
}

/// The indices of the `k` largest elements of each row, largest first.
pub fn top_k(call: &Call, k: usize) -> Result<()> {
    let x = call.numbers(0)?;
    call.store_integers(
        x.rows()
            .flat_map(|row| sorted(row, SortOrder::Descending).into_iter().take(k)),
    )
}

/// The index of the largest element of each row, the first of equals.
pub fn argmax(call: &Call) -> Result<()> {
    let x = call.numbers(0)?;
    let largest = |row: &[f64]| {
        let mut best = 0;
        for (i, value) in row.iter().enumerate() {
            if *value > row[best] {
                best = i;
            }
        }
        best as i64
    };
    call.store_integers(x.rows().map(largest))
}
