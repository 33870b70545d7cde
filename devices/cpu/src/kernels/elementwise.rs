//! Functions of one or two elements.

use crate::detect::Isa;
use crate::operand::{Operand, Piece, pieces};
use crate::prepare::{Phase, Site};
use crate::simd::math;
use samite_core::{DType, Error, Op, Result, Unary};

/// Elements that one task computes.
const TASK: usize = 1024;

/// Scale, square, root, logarithm, clamp, fill, and all unary functions.
pub(crate) fn unary(site: &Site<'_>) -> Result<Vec<Phase>> {
    let phase = match *site.node.op() {
        Op::Scale { scale, bias } => map(site, 0.3, move |x| x * scale + bias),
        Op::Sqr => map(site, 0.3, |x| x * x),
        Op::Sqrt => map(site, 0.5, f32::sqrt),
        Op::Log => map(site, 4.0, f32::ln),
        Op::Clamp { min, max } => map(site, 0.3, move |x| {
            if x < min {
                min
            } else if x > max {
                max
            } else {
                x
            }
        }),
        Op::Fill { value } => map(site, 0.2, move |_| value),
        Op::Unary(function) => function_of(site, function),
        ref op => Err(Error::invalid(format!(
            "{op} is not a function of one element"
        ))),
    };
    Ok(vec![phase?])
}

fn function_of(site: &Site<'_>, function: Unary) -> Result<Phase> {
    match function {
        Unary::Abs => map(site, 0.3, f32::abs),
        Unary::Sgn => map(site, 0.3, |x| {
            f32::from(i8::from(x > 0.0) - i8::from(x < 0.0))
        }),
        Unary::Neg => map(site, 0.3, |x| -x),
        Unary::Step => map(site, 0.3, |x| if x > 0.0 { 1.0 } else { 0.0 }),
        Unary::Tanh => map(site, 1.0, math::tanh),
        Unary::Elu => map(site, 4.0, |x| if x > 0.0 { x } else { x.exp_m1() }),
        Unary::Relu => map(site, 0.3, math::relu),
        Unary::Sigmoid => map(site, 1.0, math::sigmoid),
        Unary::Gelu => map(site, 1.0, math::gelu),
        Unary::GeluQuick => map(site, 1.0, math::gelu_quick),
        Unary::Silu => map(site, 1.0, math::silu),
        Unary::HardSwish => map(site, 0.5, |x| x * ((x + 3.0) / 6.0).clamp(0.0, 1.0)),
        Unary::HardSigmoid => map(site, 0.5, |x| ((x + 3.0) / 6.0).clamp(0.0, 1.0)),
        Unary::Exp => map(site, 1.0, math::exp),
        Unary::ExpM1 => map(site, 4.0, f32::exp_m1),
        Unary::SoftPlus => map(site, 8.0, |x| if x > 20.0 { x } else { x.exp().ln_1p() }),
        Unary::GeluErf => map(site, 2.0, math::gelu_erf),
        Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => map(site, 4.0, move |x| {
            if x > 0.0 {
                alpha_p * x * x + beta * x
            } else {
                (x.min(eps).exp_m1() - x) * alpha_n + beta * x
            }
        }),
        Unary::Floor => map(site, 0.5, f32::floor),
        Unary::Ceil => map(site, 0.5, f32::ceil),
        Unary::Round => map(site, 0.5, f32::round),
        Unary::Trunc => map(site, 0.5, f32::trunc),
    }
}

/// The result of `f` for each element; `cost` is in nanoseconds.
fn map(
    site: &Site<'_>,
    cost: f64,
    f: impl Fn(f32) -> f32 + Copy + Send + Sync + 'static,
) -> Result<Phase> {
    let (mut result, mut source) = (site.result(), site.source(0)?);
    if let (Some(flat_result), Some(flat_source)) = (result.flat(), source.flat()) {
        (result, source) = (flat_result, flat_source);
    }
    let elements = result.elements();
    let isa = site.isa;
    Ok(Phase::new(
        elements.div_ceil(TASK),
        elements as f64 * cost,
        move |tasks, _| {
            let range = tasks.start * TASK..(tasks.end * TASK).min(elements);
            pieces(result.layout(), range, |piece| {
                // SAFETY: pieces lie inside of the shape, which both operands share; tasks do not overlap.
                unsafe {
                    result.write_with(piece, |piece, out| {
                        source.load(piece.row, piece.start, out);
                        isa.run(|| out.iter_mut().for_each(|x| *x = f(*x)));
                    });
                }
            });
            Ok(())
        },
    ))
}

/// Add, sub, mul, div.
pub(crate) fn binary(site: &Site<'_>) -> Result<Vec<Phase>> {
    let (a, b) = (site.source(0)?, site.source(1)?);
    let phase = match site.node.op() {
        Op::Add => zip(site, a, b, 0.4, |a, b| a + b),
        Op::Sub => zip(site, a, b, 0.4, |a, b| a - b),
        Op::Mul => zip(site, a, b, 0.4, |a, b| a * b),
        Op::Div => zip(site, a, b, 0.6, |a, b| a / b),
        op => Err(Error::invalid(format!(
            "{op} is not a function of two elements"
        ))),
    };
    Ok(vec![phase?])
}

/// The result of `f` for each pair of elements; `b` repeats to the shape of `a`, which is that of the result.
pub(crate) fn zip(
    site: &Site<'_>,
    mut a: Operand,
    mut b: Operand,
    cost: f64,
    f: impl Fn(f32, f32) -> f32 + Copy + Send + Sync + 'static,
) -> Result<Phase> {
    let mut result = site.result();
    if a.shape() == b.shape()
        && let (Some(flat_result), Some(flat_a), Some(flat_b)) = (result.flat(), a.flat(), b.flat())
    {
        (result, a, b) = (flat_result, flat_a, flat_b);
    }
    let elements = result.elements();
    let isa = site.isa;
    Ok(Phase::new(
        elements.div_ceil(TASK),
        elements as f64 * cost,
        move |tasks, _| {
            let range = tasks.start * TASK..(tasks.end * TASK).min(elements);
            pieces(result.layout(), range, |piece| {
                // SAFETY: pieces lie inside of the shape of the result and of `a`, to which `b` repeats; tasks do not
                // overlap.
                unsafe {
                    result.write_with(piece, |piece, out| zip_piece(isa, &a, &b, piece, out, f));
                }
            });
            Ok(())
        },
    ))
}

/// One piece of a row. `out` may be the memory of `a` or of `b`.
///
/// # Safety
/// See [`Operand`]; the piece must be inside of `a`.
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
    if b0 == a.shape()[0] && b.dtype() == DType::F32 && b.has_dense_rows() {
        // SAFETY: the row exists, and the piece is inside of it.
        let from = unsafe { b.at(row).cast::<f32>().add(piece.start) };
        if from.cast_const() != out.as_ptr() {
            // SAFETY: as above; the result overlaps `b` only where an operation runs in place, handled below.
            unsafe {
                a.load(piece.row, piece.start, out);
                let b = std::slice::from_raw_parts(from, piece.len);
                isa.run(|| out.iter_mut().zip(b).for_each(|(x, y)| *x = f(*x, *y)));
            }
            return;
        }
    }
    let mut buffer = [0.0; TASK];
    let mut done = 0;
    while done < piece.len {
        // Up to the end of `b`'s row, after which it repeats.
        let start = (piece.start + done) % b0;
        let len = (piece.len - done).min(b0 - start).min(TASK);
        // The second operand first: `out` may be its memory.
        // SAFETY: inside of `b`'s row, and of the piece of `a`'s row.
        unsafe {
            b.load(row, start, &mut buffer[..len]);
            a.load(piece.row, piece.start + done, &mut out[done..][..len]);
        }
        let (out, buffer) = (&mut out[done..][..len], &buffer[..len]);
        isa.run(|| out.iter_mut().zip(buffer).for_each(|(x, y)| *x = f(*x, *y)));
        done += len;
    }
}

/// Minus infinity or 0 right of the diagonal.
pub(crate) fn diag_mask(site: &Site<'_>) -> Result<Vec<Phase>> {
    let (past, value) = match *site.node.op() {
        Op::DiagMaskInf { past } => (past, f32::NEG_INFINITY),
        Op::DiagMaskZero { past } => (past, 0.0),
        ref op => return Err(Error::invalid(format!("{op} is not a mask"))),
    };
    let (result, source) = (site.result(), site.source(0)?);
    let n0 = result.shape()[0];
    Ok(vec![Phase::new(
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
                // SAFETY: the row is inside of the shape, which both operands share; tasks are rows.
                unsafe {
                    result.write_with(whole, |piece, out| {
                        source.load(row, piece.start, out);
                        let keep = first_masked.saturating_sub(piece.start).min(out.len());
                        out[keep..].fill(value);
                    });
                }
            }
            Ok(())
        },
    )])
}
