//! Functions of one or two elements.

use crate::detect::{Isa, vectorized};
use crate::kernel::{KernelContext, Phase};
use crate::operand::{Operand, Piece, pieces};
use crate::simd::math;
use samite_core::{DType, Result, Unary};

/// Elements that one task computes.
const TASK: usize = 1024;

/// Returns a function of one element.
pub(crate) fn unary(context: &KernelContext<'_>, function: Unary) -> Result<Phase> {
    match function {
        Unary::Abs => map(context, 0.3, f32::abs),
        Unary::Sgn => map(context, 0.3, |x| {
            f32::from(i8::from(x > 0.0) - i8::from(x < 0.0))
        }),
        Unary::Neg => map(context, 0.3, |x| -x),
        Unary::Step => map(context, 0.3, |x| if x > 0.0 { 1.0 } else { 0.0 }),
        Unary::Tanh => map(context, 1.0, math::tanh),
        Unary::Elu => map(context, 4.0, |x| if x > 0.0 { x } else { x.exp_m1() }),
        Unary::Relu => map(context, 0.3, math::relu),
        Unary::Sigmoid => map(context, 1.0, math::sigmoid),
        Unary::Gelu => map(context, 1.0, math::gelu),
        Unary::GeluQuick => map(context, 1.0, math::gelu_quick),
        Unary::Silu => map(context, 1.0, math::silu),
        Unary::HardSwish => map(context, 0.5, |x| x * ((x + 3.0) / 6.0).clamp(0.0, 1.0)),
        Unary::HardSigmoid => map(context, 0.5, |x| ((x + 3.0) / 6.0).clamp(0.0, 1.0)),
        Unary::Exp => map(context, 1.0, math::exp),
        Unary::ExpM1 => map(context, 4.0, f32::exp_m1),
        Unary::SoftPlus => map(context, 8.0, |x| if x > 20.0 { x } else { x.exp().ln_1p() }),
        Unary::GeluErf => map(context, 2.0, math::gelu_erf),
        Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => map(context, 4.0, move |x| {
            if x > 0.0 {
                alpha_p * x * x + beta * x
            } else {
                (x.min(eps).exp_m1() - x) * alpha_n + beta * x
            }
        }),
        Unary::Floor => map(context, 0.5, f32::floor),
        Unary::Ceil => map(context, 0.5, f32::ceil),
        Unary::Round => map(context, 0.5, f32::round),
        Unary::Trunc => map(context, 0.5, f32::trunc),
    }
}

/// Limits numbers to a range. NaN stays.
pub(crate) fn clamp(context: &KernelContext<'_>, min: f32, max: f32) -> Result<Phase> {
    map(context, 0.3, move |x| {
        if x < min {
            min
        } else if x > max {
            max
        } else {
            x
        }
    })
}

/// Returns the result of `f` for each element; `cost` is in nanoseconds.
pub(crate) fn map(
    context: &KernelContext<'_>,
    cost: f64,
    f: impl Fn(f32) -> f32 + Copy + Send + Sync + 'static,
) -> Result<Phase> {
    let (mut result, mut source) = (context.result(), context.source(0)?);
    if let (Some(flat_result), Some(flat_source)) = (result.flat(), source.flat()) {
        (result, source) = (flat_result, flat_source);
    }
    let elements = result.elements();
    let isa = context.isa;
    Ok(Phase::new(
        elements.div_ceil(TASK),
        elements as f64 * cost,
        move |tasks, _| {
            let range = tasks.start * TASK..(tasks.end * TASK).min(elements);
            pieces(result.layout(), range, |piece| {
                // SAFETY: pieces lie inside the shape, which both operands share, and tasks do not
                // overlap.
                unsafe {
                    result.write_with(isa, piece, |piece, out| {
                        map_piece(isa, &source, piece, out, f)
                    });
                }
            });
            Ok(())
        },
    ))
}

/// Computes one piece of a row. `out` may be the memory of `x`.
///
/// # Safety
/// See [`Operand`]; the piece must be inside `x`.
#[inline]
unsafe fn map_piece(
    isa: Isa,
    x: &Operand,
    piece: Piece,
    out: &mut [f32],
    f: impl Fn(f32) -> f32 + Copy,
) {
    // SAFETY: the piece is inside `x`, so its elements exist at `from`. They are not read as a
    // slice if `out` is the same memory. Memory that overlaps in another way was refused.
    unsafe {
        match dense(x, x.shape()[0], piece.row, piece.start) {
            Some(from) if from != out.as_ptr() => {
                let x = std::slice::from_raw_parts(from, out.len());
                map_slice(isa, out, x, f);
            }
            _ => {
                x.load(piece.row, piece.start, out);
                change_slice(isa, out, f);
            }
        }
    }
}

/// Returns the result of `f` for each pair of elements of both sources. The second source repeats.
pub(crate) fn binary(
    context: &KernelContext<'_>,
    cost: f64,
    f: impl Fn(f32, f32) -> f32 + Copy + Send + Sync + 'static,
) -> Result<Phase> {
    zip(context, context.source(0)?, context.source(1)?, cost, f)
}

/// Returns the result of `f` for each pair of elements. `b` repeats to the shape of `a`, which is
/// that of the result.
pub(crate) fn zip(
    context: &KernelContext<'_>,
    mut a: Operand,
    mut b: Operand,
    cost: f64,
    f: impl Fn(f32, f32) -> f32 + Copy + Send + Sync + 'static,
) -> Result<Phase> {
    let mut result = context.result();
    if a.shape() == b.shape()
        && let (Some(flat_result), Some(flat_a), Some(flat_b)) = (result.flat(), a.flat(), b.flat())
    {
        (result, a, b) = (flat_result, flat_a, flat_b);
    }
    let elements = result.elements();
    let isa = context.isa;
    Ok(Phase::new(
        elements.div_ceil(TASK),
        elements as f64 * cost,
        move |tasks, _| {
            let range = tasks.start * TASK..(tasks.end * TASK).min(elements);
            pieces(result.layout(), range, |piece| {
                // SAFETY: pieces lie inside the shape of the result and of `a`, to which `b`
                // repeats. Tasks do not overlap.
                unsafe {
                    result.write_with(isa, piece, |piece, out| {
                        zip_piece(isa, &a, &b, piece, out, f)
                    });
                }
            });
            Ok(())
        },
    ))
}

/// Computes a row of the sum of two operands of equal shape with dense F32 rows. The result may be
/// the memory of one of them.
///
/// # Safety
/// See [`Operand`]; the row must be inside the shape.
pub(crate) unsafe fn add_row(
    isa: Isa,
    result: &Operand,
    a: &Operand,
    b: &Operand,
    row: [usize; 3],
) {
    let piece = Piece {
        row,
        start: 0,
        len: result.shape()[0],
    };
    // SAFETY: the piece is a whole row inside all three shapes, since these are equal.
    unsafe { zip_piece(isa, a, b, piece, result.row_mut(row), |a, b| a + b) };
}

/// Computes one piece of a row. `out` may be the memory of `a` or of `b`.
///
/// # Safety
/// See [`Operand`]; the piece must be inside `a`.
#[inline]
unsafe fn zip_piece(
    isa: Isa,
    a: &Operand,
    b: &Operand,
    piece: Piece,
    out: &mut [f32],
    f: impl Fn(f32, f32) -> f32 + Copy,
) {
    let [b0, b1, b2, b3] = b.shape();
    let [i1, i2, i3] = piece.row;
    let row = [i1 % b1, i2 % b2, i3 % b3];
    let n0 = a.shape()[0];
    // SAFETY: the rows exist, and the piece is inside them. The result overlaps an operand only if
    // the operation runs in place.
    unsafe {
        if let Some(b) = dense(b, n0, row, piece.start).filter(|b| *b != out.as_ptr()) {
            let b = std::slice::from_raw_parts(b, piece.len);
            match dense(a, n0, piece.row, piece.start) {
                Some(a) if a != out.as_ptr() => {
                    let a = std::slice::from_raw_parts(a, piece.len);
                    zip_slices(isa, out, a, b, f);
                }
                _ => {
                    a.load(piece.row, piece.start, out);
                    change_with_slice(isa, out, b, f);
                }
            }
            return;
        }
        if b0 == 1 {
            let mut same = [0.0];
            b.load(row, 0, &mut same);
            return map_piece(isa, a, piece, out, move |x| f(x, same[0]));
        }
    }
    let mut buffer = [0.0; TASK];
    let mut done = 0;
    while done < piece.len {
        // Up to the end of `b`'s row, after which it repeats.
        let start = (piece.start + done) % b0;
        let len = (piece.len - done).min(b0 - start).min(TASK);
        // The second operand first: `out` may be its memory. SAFETY: inside `b`'s row, and inside
        // the piece of `a`'s row.
        unsafe {
            b.load(row, start, &mut buffer[..len]);
            a.load(piece.row, piece.start + done, &mut out[done..][..len]);
        }
        let (out, buffer) = (&mut out[done..][..len], &buffer[..len]);
        change_with_slice(isa, out, buffer, f);
        done += len;
    }
}

/// Returns the address of element `start` of `row`, if rows are `n0` dense f32 elements.
///
/// # Safety
/// See [`Operand`]; the element must be inside the shape.
#[inline]
unsafe fn dense(operand: &Operand, n0: usize, row: [usize; 3], start: usize) -> Option<*const f32> {
    let dense =
        operand.shape()[0] == n0 && operand.dtype() == DType::F32 && operand.has_dense_rows();
    // SAFETY: the element is inside the shape, so its address is inside the operand's memory.
    dense.then(|| unsafe { operand.at(row).cast::<f32>().add(start).cast_const() })
}

vectorized! {
    fn change_slice<F>(out: &mut [f32], f: F) where [Fn(f32) -> f32] {
        out.iter_mut().for_each(|x| *x = f(*x));
    }
}

vectorized! {
    fn map_slice<F>(out: &mut [f32], x: &[f32], f: F) where [Fn(f32) -> f32] {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x));
    }
}

vectorized! {
    fn change_with_slice<F>(out: &mut [f32], y: &[f32], f: F) where [Fn(f32, f32) -> f32] {
        out.iter_mut().zip(y).for_each(|(x, y)| *x = f(*x, *y));
    }
}

vectorized! {
    pub(crate) fn zip_slices<F>(out: &mut [f32], x: &[f32], y: &[f32],
        f: F) where [Fn(f32, f32) -> f32] {
        let pairs = x.iter().zip(y);
        out.iter_mut().zip(pairs).for_each(|(out, (x, y))| *out = f(*x, *y));
    }
}

/// Writes a number right of the diagonal, which starts `past` elements after the first one.
pub(crate) fn diag_mask(context: &KernelContext<'_>, past: usize, value: f32) -> Result<Phase> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    let n0 = result.shape()[0];
    Ok(Phase::new(
        result.rows(),
        result.elements() as f64 * 0.3,
        move |tasks, _| {
            for row in tasks {
                let row = result.layout().row_index(row);
                let first_masked = past.saturating_add(row[0]).saturating_add(1);
                let whole = Piece {
                    row,
                    start: 0,
                    len: n0,
                };
                // SAFETY: the row is inside the shape, which both operands share, and tasks are
                // rows.
                unsafe {
                    result.write_with(isa, whole, |piece, out| {
                        source.load(row, piece.start, out);
                        let keep = first_masked.saturating_sub(piece.start).min(out.len());
                        out[keep..].fill(value);
                    });
                }
            }
            Ok(())
        },
    ))
}
