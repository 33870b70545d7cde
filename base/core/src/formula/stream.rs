//! Operations on columns, tokens and residual streams.

use super::{Elements, Shapes};
use crate::layout::Shape;

/// Computes one column of `A⁻¹ B`, from the top down.
pub fn solve(shapes: &Shapes, unit: usize, x: &mut impl Elements) {
    let [columns, n, n2, _] = shapes.result;
    let (column, i2, i3) = (unit % columns, unit / columns % n2, unit / (columns * n2));
    for i in 0..n {
        let known: f64 = (0..i)
            .map(|t| x.get(0, [t, i, i2, i3]) * x.written([column, t, i2, i3]))
            .sum();
        let value = (x.get(1, [column, i, i2, i3]) - known) / x.get(0, [i, i, i2, i3]);
        x.put([column, i, i2, i3], value);
    }
}

/// Returns the score of key `at[0]` for token `at[1]`.
pub fn score(shapes: &Shapes, [key, token, _, batch]: [usize; 4], x: &impl Elements) -> f64 {
    let [size, heads, ..] = shapes.sources[0];
    let masks = shapes.sources[3][3].max(1);
    let sum: f64 = (0..heads)
        .map(|head| {
            let products =
                (0..size).map(|i| x.get(0, [i, head, token, batch]) * x.get(1, [i, 0, key, batch]));
            products.sum::<f64>().max(0.0) * x.get(2, [head, token, 0, batch])
        })
        .sum();
    sum + x.get(3, [key, token, 0, batch % masks])
}

/// Computes one row of the mask of sparse attention.
pub fn mask(shapes: &Shapes, [i1, i2, i3]: [usize; 3], x: &mut impl Elements) {
    let [mask, picks, scores, blocks, more] = std::array::from_fn(|index| {
        let shape: Shape = shapes.sources[index];
        (shape != [0; 4]).then_some(shape)
    });
    let cells = shapes.result[0];
    for cell in 0..cells {
        x.put([cell, i1, i2, i3], f64::NEG_INFINITY);
    }
    let from = mask.map_or([0; 3], |[_, n1, n2, n3]| [i1 % n1, i2 % n2, i3 % n3]);
    // Numbers below 2^31 are exact.
    let index =
        |value: f64, limit: usize| (value >= 0.0 && value < limit as f64).then_some(value as usize);
    let keep = |x: &mut _, value: f64| {
        if let Some(cell) = index(value, cells) {
            let value = Elements::get(x, 0, [cell, from[0], from[1], from[2]]);
            Elements::put(x, [cell, i1, i2, i3], value);
        }
    };
    let limit = match (blocks, scores) {
        (Some(blocks), _) => blocks[1],
        (None, Some(scores)) => scores[0],
        (None, None) => cells,
    };
    for i in 0..picks.map_or(0, |shape| shape[0]) {
        let Some(pick) = index(x.get(1, [i, i1, i2, i3]), limit) else {
            continue;
        };
        let is_dead = |score: f64| score.is_nan() || score == f64::NEG_INFINITY;
        if scores.is_some() && is_dead(x.get(2, [pick, i1, i2, i3])) {
            continue;
        }
        match blocks {
            Some(blocks) => (0..blocks[0]).for_each(|b| keep(x, x.get(3, [b, pick, 0, 0]))),
            None => keep(x, pick as f64),
        }
    }
    for i in 0..more.map_or(0, |shape| shape[0]) {
        keep(x, x.get(4, [i, i1, i2, i3]));
    }
}

/// Number of residual streams that are mixed.
const STREAMS: usize = 4;

/// Computes the mixing matrix of one token.
pub fn comb(token: usize, eps: f64, iterations: usize, x: &mut impl Elements) {
    let mut m = [[0.0; STREAMS]; STREAMS]; // [from][to]
    for (from, row) in m.iter_mut().enumerate() {
        for (to, value) in row.iter_mut().enumerate() {
            let i = 2 * STREAMS + to + STREAMS * from;
            let scale = x.get(1, [2, 0, 0, 0]);
            *value = x.get(0, [i, token, 0, 0]) * scale + x.get(2, [i, 0, 0, 0]);
        }
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut()
            .for_each(|value| *value = (*value - largest).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|value| *value = *value / sum + eps);
    }
    for iteration in 0..iterations.max(1) {
        if iteration > 0 {
            for row in &mut m {
                let sum = eps + row.iter().sum::<f64>();
                row.iter_mut().for_each(|value| *value /= sum);
            }
        }
        for to in 0..STREAMS {
            let sum = eps + m.iter().map(|row| row[to]).sum::<f64>();
            m.iter_mut().for_each(|row| row[to] /= sum);
        }
    }
    for (from, row) in m.iter().enumerate() {
        for (to, &value) in row.iter().enumerate() {
            x.put([to, from, token, 0], value);
        }
    }
}

/// Returns the sum of weighted streams.
pub fn pre(
    shapes: &Shapes,
    [i, token, ..]: [usize; 4],
    scale: f64,
    gated: bool,
    x: &impl Elements,
) -> f64 {
    let streams = shapes.sources[0][1];
    let sum: f64 = (0..streams)
        .map(|stream| {
            let weight = if gated {
                1.0 / (1.0 + (-x.get(1, [i, stream, token, 0])).exp())
            } else {
                x.get(1, [stream, token, 0, 0])
            };
            x.get(0, [i, stream, token, 0]) * weight
        })
        .sum();
    scale * sum
}

/// Returns an element of an updated stream.
pub fn post(shapes: &Shapes, [i, to, token, _]: [usize; 4], x: &impl Elements) -> f64 {
    let own = x.get(0, [i, token, 0, 0]) * x.get(2, [to, token, 0, 0]);
    let residual = |from| x.get(1, [i, from, token, 0]);
    let is_mixed = shapes.sources[3][0] > 0;
    own + if is_mixed {
        (0..shapes.result[1])
            .map(|from| residual(from) * x.get(3, [to, from, token, 0]))
            .sum()
    } else {
        residual(to)
    }
}
