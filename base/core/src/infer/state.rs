//! Operations that carry a state from token to token.

use super::Check;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{DIMS, Layout};

pub(super) fn conv(c: &Check<'_>) -> Result<Layout> {
    for index in 0..2 {
        c.is(index, "an operand", &[DType::F32])?;
    }
    let [length, channels, sequences, n3] = c.source(0)?.shape();
    let [width, rows, w2, w3] = c.source(1)?.shape();
    c.ensure(n3 == 1, "source 0 has four dimensions")?;
    c.ensure(w2 == 1 && w3 == 1, "source 1 is not a matrix")?;
    c.ensure(rows == channels, "the sources have different channels")?;
    c.ensure(width >= 1, "source 1 has no weights")?;
    let tokens = (length + 1).checked_sub(width);
    let tokens = tokens
        .ok_or_else(|| c.error("rows of source 0 are shorter than what comes before them"))?;
    c.result(DType::F32, [channels, tokens, sequences, 1])
}

pub(super) fn delta_net(c: &Check<'_>, snapshots: usize) -> Result<Layout> {
    for index in 0..6 {
        c.is(index, "an operand", &[DType::F32])?;
    }
    let values = c.source(2)?.shape();
    let [size, heads, tokens, sequences] = values;
    c.ensure(snapshots >= 1, "there must be at least one snapshot")?;
    for (index, name) in [(0, "queries"), (1, "keys")] {
        let [n0, n1, n2, n3] = c.source(index)?.shape();
        let fits = n0 == size
            && n2 == tokens
            && n1 > 0
            && n3 > 0
            && heads.is_multiple_of(n1)
            && sequences.is_multiple_of(n3);
        c.ensure(fits, format_args!("{name} do not fit the values"))?;
    }
    let per_token = |index: usize, name: &str, sizes: &[usize]| -> Result<()> {
        let [n0, rest @ ..] = c.source(index)?.shape();
        let fits = sizes.contains(&n0) && rest[..] == values[1..];
        c.ensure(fits, format_args!("{name} do not fit the values"))
    };
    per_token(3, "decays", &[1, size])?;
    per_token(4, "betas", &[1])?;
    let state: [usize; DIMS] = [size, size, heads, sequences];
    c.ensure(
        c.source(5)?.shape() == state,
        "the matrices do not fit the values",
    )?;
    let rows = snapshots
        .checked_mul(size)
        .and_then(|rows| rows.checked_add(tokens)?.checked_mul(sequences));
    let rows = rows.ok_or_else(|| c.error("the result is too large"))?;
    let width = size.checked_mul(heads);
    let width = width.ok_or_else(|| c.error("the result is too large"))?;
    c.result(DType::F32, [width, rows, 1, 1])
}

pub(super) fn scan(c: &Check<'_>, snapshots: usize) -> Result<Layout> {
    for index in 0..6 {
        c.is(index, "an operand", &[DType::F32])?;
    }
    c.is(6, "row numbers", &[DType::I32])?;
    c.ensure(snapshots >= 1, "there must be at least one snapshot")?;
    let x = c.source(1)?.shape();
    let [size, heads, tokens, sequences] = x;
    let [n, s1, s2, _] = c.source(0)?.shape();
    c.ensure(
        s1 == size && s2 == heads,
        "the matrices do not fit the values",
    )?;
    c.ensure(
        c.source(2)?.shape() == [heads, tokens, sequences, 1],
        "steps do not fit the values",
    )?;
    let [a0, a1, a2, a3] = c.source(3)?.shape();
    c.ensure(
        (a0 == 1 || a0 == n) && a1 == heads && a2 == 1 && a3 == 1,
        "rates do not fit the matrices",
    )?;
    for index in [4, 5] {
        let [n0, groups, n2, n3] = c.source(index)?.shape();
        c.ensure(
            n0 == n
                && n2 == tokens
                && n3 == sequences
                && groups > 0
                && heads.is_multiple_of(groups),
            format_args!("source {index} does not fit the values"),
        )?;
    }
    c.ensure(
        c.source(6)?.shape() == [sequences, 1, 1, 1],
        "there must be a row number for each sequence",
    )?;
    let matrices = snapshots
        .checked_mul(n)
        .and_then(|rows| rows.checked_add(tokens));
    let each = size
        .checked_mul(heads)
        .and_then(|each| each.checked_mul(sequences));
    let elements = each
        .zip(matrices)
        .and_then(|(each, matrices)| each.checked_mul(matrices));
    let elements = elements.ok_or_else(|| c.error("the result is too large"))?;
    c.result(DType::F32, [elements, 1, 1, 1])
}
