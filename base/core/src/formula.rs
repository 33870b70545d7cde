//! Element-wise definitions of operations, shared by all devices.
//!
//! These are ggml operations that language models rarely need: convolutions, pooling, recurrences.
//! A device without a faster kernel computes them with [`compute`] and its own way to read and
//! write elements. The work is split into *units* (parts of rows of the result, heads, columns).
//! Units write different elements, so a device may run them in parallel and in any order.

mod image;
mod recurrence;
mod stream;
mod windows;

use crate::layout::{DIMS, Layout, Shape};
use crate::op::{Op, OpKind, Triangle};

/// Maximum number of sources of such an operation.
pub const MAX_SOURCES: usize = 7;

/// Shapes of a node's result and sources. An absent source is empty.
#[derive(Clone, Copy, Debug)]
pub struct Shapes {
    /// Shape of the result.
    pub result: Shape,
    /// Shapes of the sources.
    pub sources: [Shape; MAX_SOURCES],
    /// Byte strides of the result.
    pub strides: [usize; DIMS],
}

impl Shapes {
    /// Returns the shapes of a node with these layouts.
    pub fn new<'l>(result: &Layout, sources: impl IntoIterator<Item = Option<&'l Layout>>) -> Self {
        let mut shapes = [[0; DIMS]; MAX_SOURCES];
        for (shape, layout) in shapes.iter_mut().zip(sources) {
            *shape = layout.map_or([0; DIMS], Layout::shape);
        }
        Shapes {
            result: result.shape(),
            sources: shapes,
            strides: result.strides(),
        }
    }
}

/// Access to the elements of the sources and of the result.
pub trait Elements {
    /// Returns an element of a source. For an absent source, any number.
    fn get(&self, source: usize, position: [usize; DIMS]) -> f64;

    /// Writes an element of the result.
    fn put(&mut self, position: [usize; DIMS], value: f64);

    /// Returns an element of the result that the same unit wrote, after rounding.
    fn written(&self, position: [usize; DIMS]) -> f64;
}

/// Returns whether operations of this kind are defined here.
pub fn is_formula(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Sin
            | OpKind::Cos
            | OpKind::LeakyRelu
            | OpKind::Acc
            | OpKind::Set
            | OpKind::CountEqual
            | OpKind::GroupNorm
            | OpKind::Diag
            | OpKind::Tri
            | OpKind::Im2Col
            | OpKind::Im2ColBack
            | OpKind::Im2Col3d
            | OpKind::Col2Im1d
            | OpKind::Conv2d
            | OpKind::Conv3d
            | OpKind::Conv2dDepthwise
            | OpKind::ConvTranspose1d
            | OpKind::ConvTranspose2d
            | OpKind::Pool1d
            | OpKind::Pool2d
            | OpKind::Pool2dBack
            | OpKind::WinPart
            | OpKind::WinUnpart
            | OpKind::GetRelPos
            | OpKind::AddRelPos
            | OpKind::Upscale
            | OpKind::PadCircular
            | OpKind::PadReflect1d
            | OpKind::Roll
            | OpKind::TimestepEmbedding
            | OpKind::RwkvWkv6
            | OpKind::RwkvWkv7
            | OpKind::GatedLinearAttn
            | OpKind::SolveTri
            | OpKind::LightningIndexer
            | OpKind::HyperComb
            | OpKind::HyperPre
            | OpKind::HyperPost
            | OpKind::TopKMask
    )
}

/// Elements of a row that a unit computes. Few, as each of them may be a sum over a whole kernel.
const PART: usize = 16;

/// Estimates the elements that are read for the whole result.
pub fn reads(op: &Op, shapes: &Shapes) -> f64 {
    let [a, b, ..] = shapes
        .sources
        .map(|shape| shape.map(|extent| extent as f64));
    let [n0, n1, n2, n3] = shapes.result.map(|extent| extent as f64);
    let each = match *op {
        Op::Conv2d { .. } => a[0] * a[1] * a[2],
        Op::Conv2dDepthwise { .. } => a[0] * a[1],
        Op::Conv3d { channels, .. } => a[0] * a[1] * a[2] * channels as f64,
        Op::ConvTranspose1d { .. } => a[0] * a[2],
        Op::ConvTranspose2d { .. } => a[0] * a[1] * a[3],
        Op::Im2ColBack { .. } => b[0] * b[1],
        Op::Col2Im1d { channels, .. } => a[0] / channels as f64,
        Op::Pool1d { kernel, .. } => a[0].min(kernel as f64),
        Op::Pool2dBack { kernel, .. } => b[0].min(kernel[0] as f64) * b[1].min(kernel[1] as f64),
        Op::Pool2d { kernel, .. } => a[0].min(kernel[0] as f64) * a[1].min(kernel[1] as f64),
        Op::Upscale { .. } => (2.0 * a[0] / n0 + 2.0) * (2.0 * a[1] / n1 + 2.0),
        Op::RwkvWkv6 | Op::RwkvWkv7 | Op::GatedLinearAttn { .. } => 4.0 * a[0],
        Op::SolveTri => n1,
        Op::LightningIndexer => a[0] * a[1],
        Op::HyperComb { iterations, .. } => 1.0 + iterations as f64,
        Op::HyperPre { .. } | Op::HyperPost => 8.0,
        _ => 1.0,
    };
    let sources: usize = shapes
        .sources
        .iter()
        .map(|shape| shape.iter().product::<usize>())
        .sum();
    (n0 * n1 * n2 * n3 * each).max(sources as f64)
}

/// Returns the number of units of work.
pub fn units(op: &Op, shapes: &Shapes) -> usize {
    let [n0, n1, n2, n3] = shapes.result;
    if shapes.result.contains(&0) {
        return 0;
    }
    match *op {
        Op::Acc { .. } | Op::Set { .. } | Op::CountEqual => 1,
        Op::GroupNorm { groups, .. } => groups.saturating_mul(n3),
        Op::RwkvWkv6 | Op::RwkvWkv7 | Op::GatedLinearAttn { .. } => recurrence::units(op, shapes),
        Op::SolveTri => shapes.result[0] * n2 * n3,
        Op::HyperComb { .. } => n2,
        Op::Pool2dBack { .. } => n2 * n3,
        Op::TopKMask => n1 * n2 * n3,
        _ => n0.div_ceil(PART) * n1 * n2 * n3,
    }
}

/// Computes one unit. Writes nothing for other operations.
pub fn compute(op: &Op, shapes: &Shapes, unit: usize, x: &mut impl Elements) {
    match *op {
        Op::Acc { .. } | Op::Set { .. } => window(op, shapes, x),
        Op::CountEqual => {
            let equal = positions(shapes.sources[0]).filter(|&at| x.get(0, at) == x.get(1, at));
            let count = equal.count();
            x.put([0; DIMS], count as f64);
        }
        Op::GroupNorm { groups, eps } => group_norm(shapes, unit, groups, eps.into(), x),
        Op::RwkvWkv6 | Op::RwkvWkv7 | Op::GatedLinearAttn { .. } => {
            recurrence::compute(op, shapes, unit, x);
        }
        Op::SolveTri => stream::solve(shapes, unit, x),
        Op::Pool2dBack { .. } => image::pool_back(op, shapes, unit, x),
        Op::TopKMask => stream::mask(shapes, row(shapes.result, unit), x),
        Op::HyperComb { eps, iterations } => stream::comb(unit, eps.into(), iterations, x),
        _ => {
            let n0 = shapes.result[0];
            let parts = n0.div_ceil(PART);
            let (start, row) = (unit % parts * PART, row(shapes.result, unit / parts));
            for i0 in start..n0.min(start + PART) {
                let at = [i0, row[0], row[1], row[2]];
                let value = element(op, shapes, at, x);
                x.put(at, value);
            }
        }
    }
}

/// Returns element `at` of the result of an operation whose elements are independent.
fn element(op: &Op, shapes: &Shapes, at: [usize; DIMS], x: &impl Elements) -> f64 {
    let [i0, i1, i2, i3] = at;
    match *op {
        Op::Sin => x.get(0, at).sin(),
        Op::Cos => x.get(0, at).cos(),
        Op::LeakyRelu { slope } => match x.get(0, at) {
            value if value > 0.0 => value,
            value => f64::from(slope) * value,
        },
        Op::Diag if i0 == i1 => x.get(0, [i0, 0, i2, i3]),
        Op::Diag => 0.0,
        Op::Tri { part } => {
            let stays = match part {
                Triangle::UpperDiag => i0 >= i1,
                Triangle::Upper => i0 > i1,
                Triangle::LowerDiag => i0 <= i1,
                Triangle::Lower => i0 < i1,
            };
            if stays { x.get(0, at) } else { 0.0 }
        }
        Op::TimestepEmbedding { dim, max_period } => {
            let half = dim / 2;
            if i0 >= 2 * half {
                return 0.0;
            }
            let frequency = (-(max_period as f64).ln() * (i0 % half) as f64 / half as f64).exp();
            let angle = x.get(0, [i1, 0, 0, 0]) * frequency;
            if i0 < half { angle.cos() } else { angle.sin() }
        }
        Op::WinPart { .. } | Op::WinUnpart { .. } | Op::GetRelPos | Op::AddRelPos => {
            windows::element(op, shapes, at, x)
        }
        Op::LightningIndexer => stream::score(shapes, at, x),
        Op::HyperPre { scale, gated } => stream::pre(shapes, at, scale.into(), gated, x),
        Op::HyperPost => stream::post(shapes, at, x),
        _ => image::element(op, shapes, at, x),
    }
}

/// Copies source 0, and adds source 1 to it or replaces it in a window.
fn window(op: &Op, shapes: &Shapes, x: &mut impl Elements) {
    let (strides, offset, adds) = match *op {
        Op::Acc { strides, offset } => (strides, offset, true),
        Op::Set { strides, offset } => (strides, offset, false),
        _ => return,
    };
    for at in positions(shapes.result) {
        let value = x.get(0, at);
        x.put(at, value);
    }
    let [n0, n1, n2, _] = shapes.result;
    let size = shapes.strides[0];
    for at in positions(shapes.sources[1]) {
        let [i0, i1, i2, i3] = at;
        let place = offset + i1 * strides[0] + i2 * strides[1] + i3 * strides[2];
        let i = place / size + i0;
        let to = [i % n0, i / n0 % n1, i / (n0 * n1) % n2, i / (n0 * n1 * n2)];
        let value = x.get(1, at) + if adds { x.written(to) } else { 0.0 };
        x.put(to, value);
    }
}

fn group_norm(shapes: &Shapes, unit: usize, groups: usize, eps: f64, x: &mut impl Elements) {
    let [n0, n1, n2, _] = shapes.result;
    let (group, i3) = (unit % groups, unit / groups);
    let each = n2.div_ceil(groups);
    let (first, end) = ((group * each).min(n2), ((group + 1) * each).min(n2));
    let all =
        || positions([n0, n1, end - first, 1]).map(|[i0, i1, i2, _]| [i0, i1, first + i2, i3]);
    let count = (n0 * n1 * (end - first)) as f64;
    let mean = all().map(|at| x.get(0, at)).sum::<f64>() / count;
    let variance = all().map(|at| (x.get(0, at) - mean).powi(2)).sum::<f64>() / count;
    let scale = 1.0 / (variance + eps).sqrt();
    for at in all() {
        let value = (x.get(0, at) - mean) * scale;
        x.put(at, value);
    }
}

/// Returns the indices of row number `unit` of a shape.
fn row([_, n1, n2, _]: Shape, unit: usize) -> [usize; 3] {
    [unit % n1, unit / n1 % n2, unit / (n1 * n2)]
}

/// Iterates over all positions of `shape`, dimension 0 fastest.
fn positions([n0, n1, n2, n3]: Shape) -> impl Iterator<Item = [usize; DIMS]> {
    (0..n3).flat_map(move |i3| {
        (0..n2)
            .flat_map(move |i2| (0..n1).flat_map(move |i1| (0..n0).map(move |i0| [i0, i1, i2, i3])))
    })
}
