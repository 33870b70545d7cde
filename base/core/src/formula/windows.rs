//! Attention within windows of an image, with relative positions
//! ([Li et al. 2022](https://arxiv.org/abs/2203.16527)).

use super::{Elements, Shapes};
use crate::op::Op;

/// Returns element `at` of the result.
pub fn element(op: &Op, shapes: &Shapes, at: [usize; 4], x: &impl Elements) -> f64 {
    let [i0, i1, i2, i3] = at;
    match *op {
        Op::WinPart { windows, size } => {
            let [_, width, height, _] = shapes.sources[0];
            let (column, row) = (i3 % windows[0] * size + i1, i3 / windows[0] * size + i2);
            if column < width && row < height {
                x.get(0, [i0, column, row, 0])
            } else {
                0.0
            }
        }
        Op::WinUnpart { size, shape } => {
            let window = i2 / size * shape[1].div_ceil(size) + i1 / size;
            x.get(0, [i0, i1 % size, i2 % size, window])
        }
        Op::GetRelPos => x.get(0, [i0, shapes.result[1] - 1 - i1 + i2, 0, 0]),
        _ => {
            let [length, columns, ..] = shapes.sources[1];
            let of_query = |index, key| x.get(index, [key, i1 % columns, i1 / columns, i2]);
            x.get(0, at) + of_query(1, i0 % length) + of_query(2, i0 / length)
        }
    }
}
