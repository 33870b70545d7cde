//! Recurrences of linear attention, with a matrix state per head and sequence. In the result, the
//! states follow the outputs of the tokens.

use super::{Elements, Shapes};
use crate::op::Op;

/// Returns the source with the initial matrices.
fn state_source(op: &Op) -> usize {
    match op {
        Op::RwkvWkv6 => 5,
        Op::RwkvWkv7 => 6,
        _ => 4,
    }
}

/// Returns the number of heads times sequences, times the rows or columns of a matrix.
pub fn units(op: &Op, shapes: &Shapes) -> usize {
    let [size, heads, ..] = shapes.sources[0];
    size * heads * shapes.sources[state_source(op)][1]
}

/// Computes one row (RWKV-7) or column of the matrix of one head of one sequence.
pub fn compute(op: &Op, shapes: &Shapes, unit: usize, x: &mut impl Elements) {
    let [size, heads, all_tokens, _] = shapes.sources[0];
    let first_state = state_source(op);
    let sequences = shapes.sources[first_state][1].max(1);
    let (part, unit) = (unit % size, unit / size);
    let (head, sequence) = (unit % heads, unit / heads);
    let tokens = all_tokens / sequences;
    let width = size * heads;
    // Position of element (i, j) of the matrix, in the result and in the source.
    let flat = |i: usize, j: usize| head * size * size + i * size + j;
    let place = |i: usize, j: usize| {
        let at = flat(i, j);
        [at % width, all_tokens + sequence * size + at / width, 0, 0]
    };
    for t in 0..tokens {
        let token = sequence * tokens + t;
        let of = |i: usize| [i, head, token, 0];
        let before = |x: &_, i: usize, j: usize| match t {
            0 => Elements::get(x, first_state, [flat(i, j), sequence, 0, 0]),
            _ => Elements::written(x, place(i, j)),
        };
        let out = |i: usize| [head * size + i, token, 0, 0];
        let mut sum = 0.0;
        if matches!(op, Op::RwkvWkv7) {
            let i = part;
            let pull: f64 = (0..size).map(|j| x.get(4, of(j)) * before(x, i, j)).sum();
            for j in 0..size {
                let value = before(x, i, j) * x.get(1, of(j))
                    + x.get(3, of(i)) * x.get(2, of(j))
                    + pull * x.get(5, of(j));
                x.put(place(i, j), value);
                sum += value * x.get(0, of(j));
            }
            x.put(out(i), sum);
            continue;
        }
        // Each column of the matrix is read completely before it is written.
        let j = part;
        for i in 0..size {
            let old = before(x, i, j);
            let pair = x.get(1, of(j)) * x.get(0, of(i));
            let new = match *op {
                Op::RwkvWkv6 => {
                    let bonus = x.get(3, [i, head, 0, 0]);
                    sum += (pair * bonus + old) * x.get(2, of(i));
                    old * x.get(4, of(i)) + pair
                }
                Op::GatedLinearAttn { scale } => {
                    let new = old * x.get(3, of(i)) + pair;
                    sum += new * x.get(2, of(i)) * f64::from(scale);
                    new
                }
                _ => old,
            };
            x.put(place(i, j), new);
        }
        x.put(out(j), sum);
    }
}
