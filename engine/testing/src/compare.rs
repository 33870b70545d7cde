//! Comparison of results.

use crate::case::{Case, Limit};
use samite_core::{Error, Layout, Result};
use samite_quant::{RowReader, gather_row};

/// Returns the normalised mean squared error of `values` against `reference`: `sum((a - b)²) /
/// sum(b²)`.
///
/// Infinite if the lengths differ, or if one element of a pair is infinite or NaN and the other one
/// differs.
pub fn nmse(values: &[f64], reference: &[f64]) -> f64 {
    if values.len() != reference.len() {
        return f64::INFINITY;
    }
    let (mut error, mut power) = (0.0, 0.0);
    for (&a, &b) in values.iter().zip(reference) {
        if a == b || (a.is_nan() && b.is_nan()) {
            power += if b.is_finite() { b * b } else { 0.0 };
        } else if a.is_finite() && b.is_finite() {
            error += (a - b) * (a - b);
            power += b * b;
        } else {
            return f64::INFINITY;
        }
    }
    if error == 0.0 { 0.0 } else { error / power }
}

/// Returns the blocks of a tensor in logical order, from the bytes that it spans.
fn gather(layout: &Layout, span: &[u8]) -> Result<Vec<u8>> {
    let (mut all, mut row) = (Vec::new(), Vec::new());
    for number in 0..layout.rows() {
        gather_row(layout, span, number, &mut row)?;
        all.extend_from_slice(&row);
    }
    Ok(all)
}

/// Returns the numbers of a tensor in logical order, from the bytes that it spans.
fn decode(layout: &Layout, span: &[u8]) -> Result<Vec<f64>> {
    let (mut all, mut reader) = (Vec::new(), RowReader::default());
    for row in 0..layout.rows() {
        all.extend_from_slice(reader.read(layout, span, row)?);
    }
    Ok(all)
}

/// Result of a comparison.
pub(crate) struct Difference {
    pub nmse: f64,
    /// Description of an excessive difference.
    pub problem: Option<String>,
}

/// Compares a tensor with this layout in two memories.
pub(crate) fn compare(
    layout: &Layout,
    limit: Limit,
    rows_of: impl Fn() -> Result<(usize, Vec<f64>)>,
    [span, expected_span]: [&[u8]; 2],
) -> Result<Difference> {
    let n0 = layout.shape()[0];
    let (bytes, expected) = (gather(layout, span)?, gather(layout, expected_span)?);
    let fine = Difference {
        nmse: 0.0,
        problem: None,
    };
    let broken = |problem: String| Difference {
        nmse: f64::INFINITY,
        problem: Some(problem),
    };
    if bytes == expected {
        return Ok(fine);
    }
    let max = match limit {
        Limit::Exact => {
            let at = bytes.iter().zip(&expected).position(|(a, b)| a != b);
            let block = at.unwrap_or(0) / layout.dtype().block_bytes();
            return Ok(broken(format!(
                "not the same bytes: the first difference is in element {}",
                block * layout.dtype().block_len()
            )));
        }
        Limit::Nmse(max) => max,
        Limit::SortedIndices | Limit::IndexSets => {
            let (row_len, source) = rows_of()?;
            // An argmax is one index for each row, in dimension 0.
            let per_row = if layout.elements() * row_len == source.len() {
                1
            } else {
                n0
            };
            let name = |bytes: &[u8]| named(&source, row_len, per_row, bytes, limit);
            return Ok(match (name(&bytes), name(&expected)) {
                (Ok(a), Ok(b)) if a == b => fine,
                (Err(problem), _) => broken(problem),
                _ => broken("the indices name other values than the reference's".into()),
            });
        }
    };
    let (values, reference) = (decode(layout, span)?, decode(layout, expected_span)?);
    let nmse = nmse(&values, &reference);
    let problem = (nmse.is_nan() || nmse > max).then(|| {
        let worst = values
            .iter()
            .zip(&reference)
            .enumerate()
            .max_by(|(_, a), (_, b)| distance(a).total_cmp(&distance(b)))
            .map_or(0, |(i, _)| i);
        format!(
            "NMSE {nmse:.3e} > {max:.0e}; element {worst} is {} instead of {}",
            values[worst], reference[worst]
        )
    });
    Ok(Difference { nmse, problem })
}

fn distance((a, b): &(&f64, &f64)) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let distance = (*a - *b).abs();
    if distance.is_nan() {
        f64::INFINITY
    } else {
        distance
    }
}

/// Returns the indexed values, row by row.
fn named(
    source: &[f64],
    row_len: usize,
    per_row: usize,
    bytes: &[u8],
    limit: Limit,
) -> std::result::Result<Vec<f64>, String> {
    let indices: Vec<_> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| i32::from_le_bytes(*b))
        .collect();
    let mut all = Vec::with_capacity(indices.len());
    for (row, indices) in indices.chunks(per_row.max(1)).enumerate() {
        let mut seen = vec![false; row_len];
        let mut values = Vec::with_capacity(indices.len());
        for &index in indices {
            match usize::try_from(index)
                .ok()
                .and_then(|i| Some((i, seen.get_mut(i)?)))
            {
                None => return Err(format!("index {index} in row {row} is not in 0..{row_len}")),
                Some((_, true)) => return Err(format!("index {index} is twice in row {row}")),
                Some((i, seen)) => {
                    *seen = true;
                    values.push(source[row * row_len + i]);
                }
            }
        }
        if limit == Limit::IndexSets {
            values.sort_by(f64::total_cmp);
        }
        all.extend(values);
    }
    Ok(all)
}

/// Returns the numbers of source 0 of a case's output in logical order, and the length of its rows.
/// `inputs` holds the bytes of all inputs.
pub(crate) fn source_rows(case: &Case, inputs: &[Vec<u8>]) -> Result<(usize, Vec<f64>)> {
    let found = case.graph.node(case.output).source(0).and_then(|source| {
        let base = case.graph.memory_of(source.id());
        let offset = source.tensor().view.map_or(0, |view| view.offset);
        let input = case.inputs.iter().position(|input| input.tensor == base)?;
        Some((source.layout(), inputs[input].get(offset..)?))
    });
    let Some((layout, span)) = found else {
        return Err(Error::invalid(
            "indices are compared only where source 0 is an input",
        ));
    };
    Ok((layout.shape()[0], decode(layout, span)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_relative_to_the_reference() {
        assert_eq!(nmse(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(nmse(&[3.0, 0.0], &[2.0, 0.0]), 0.25);
        assert_eq!(nmse(&[f64::NAN, 1.0], &[f64::NAN, 1.0]), 0.0);
        assert_eq!(nmse(&[f64::INFINITY], &[f64::INFINITY]), 0.0);
        assert_eq!(nmse(&[f64::NEG_INFINITY], &[f64::INFINITY]), f64::INFINITY);
        assert_eq!(nmse(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(nmse(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(nmse(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }

    #[test]
    fn indices_are_compared_by_the_values_they_select() {
        let source = [5.0, 1.0, 5.0, 2.0];
        let bytes = |indices: [i32; 2]| {
            indices
                .iter()
                .flat_map(|i| i.to_le_bytes())
                .collect::<Vec<_>>()
        };
        let sets = |indices| named(&source, 4, 2, &bytes(indices), Limit::IndexSets);
        let order = |indices| named(&source, 4, 2, &bytes(indices), Limit::SortedIndices);
        assert_eq!(sets([0, 3]), sets([3, 2]));
        assert_ne!(order([0, 3]), order([3, 0]));
        assert!(sets([1, 1]).unwrap_err().contains("twice"));
        assert!(sets([4, 1]).unwrap_err().contains("not in 0..4"));
    }
}
