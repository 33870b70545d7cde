//! Convolutions, pooling and scaling of images and signals.

use super::{Elements, Shapes};
use crate::op::{Interpolation, Op, Pool, Window};
use std::ops::Range;

/// Returns the input index under kernel element `k` at output `o`, along dimension `d`. `None` in
/// the padding.
fn seen(window: &Window, d: usize, o: usize, k: usize, extent: usize) -> Option<usize> {
    let at = o * window.stride[d] as usize + k * window.dilation[d] as usize;
    at.checked_sub(window.padding[d] as usize)
        .filter(|&at| at < extent)
}

/// Returns the output index at which kernel element `k` lies on input `at`, along dimension `d`.
fn place(window: &Window, d: usize, at: usize, k: usize, places: usize) -> Option<usize> {
    let stride = window.stride[d] as usize;
    let from = (at + window.padding[d] as usize).checked_sub(k * window.dilation[d] as usize)?;
    (from.is_multiple_of(stride) && from / stride < places).then_some(from / stride)
}

/// Returns the part of a pooling window that lies within `extent` elements, however long the window
/// is.
fn pooled(o: usize, stride: usize, padding: usize, kernel: usize, extent: usize) -> Range<usize> {
    let first = o * stride;
    first.saturating_sub(padding)..(first + kernel).saturating_sub(padding).min(extent)
}

/// Computes the gradient of pooling one plane.
pub fn pool_back(op: &Op, shapes: &Shapes, unit: usize, x: &mut impl Elements) {
    let Op::Pool2dBack {
        pool,
        kernel,
        stride,
        padding,
    } = *op
    else {
        return;
    };
    let [n0, n1, n2, _] = shapes.result;
    let (i2, i3) = (unit % n2, unit / n2);
    for i1 in 0..n1 {
        (0..n0).for_each(|i0| x.put([i0, i1, i2, i3], 0.0));
    }
    let [width, height, ..] = shapes.sources[0];
    for (o1, o0) in (0..height).flat_map(|o1| (0..width).map(move |o0| (o1, o0))) {
        let columns = pooled(o0, stride[0], padding[0], kernel[0], n0);
        let rows = pooled(o1, stride[1], padding[1], kernel[1], n1);
        let inside = rows.flat_map(|h| columns.clone().map(move |w| [w, h, i2, i3]));
        let gradient = x.get(0, [o0, o1, i2, i3]);
        match pool {
            Pool::Mean => {
                let share = gradient / (kernel[0] * kernel[1]) as f64;
                inside.for_each(|at| add(x, at, share));
            }
            Pool::Max => {
                let (mut largest, mut place) = (f64::from(f32::MIN), None);
                for at in inside {
                    let value = x.get(1, at);
                    if value > largest {
                        (largest, place) = (value, Some(at));
                    }
                }
                place.into_iter().for_each(|at| add(x, at, gradient));
            }
        }
    }
}

/// Adds to an element that the unit wrote.
fn add(x: &mut impl Elements, at: [usize; 4], value: f64) {
    let sum = x.written(at) + value;
    x.put(at, sum);
}

/// Returns element `at` of the result.
pub fn element(op: &Op, shapes: &Shapes, at: [usize; 4], x: &impl Elements) -> f64 {
    let [i0, i1, i2, i3] = at;
    let [kernel, image, ..] = shapes.sources;
    let [k0, k1, k2, _] = kernel;
    match op {
        Op::Im2Col {
            window,
            planar: true,
            ..
        } => {
            let (w, h, c) = (i0 % k0, i0 / k0 % k1, i0 / (k0 * k1));
            let w = seen(window, 0, i1, w, image[0]);
            let h = seen(window, 1, i2, h, image[1]);
            w.zip(h).map_or(0.0, |(w, h)| x.get(1, [w, h, c, i3]))
        }
        Op::Im2Col { window, .. } => {
            // A row is an image of height 1. If there is padding above it, all that is read lies in
            // the padding.
            let w = seen(window, 0, i1, i0 % k0, image[0]);
            let h = seen(window, 1, 0, 0, 1);
            w.zip(h).map_or(0.0, |(w, _)| x.get(1, [w, i0 / k0, i2, 0]))
        }
        Op::Im2Col3d {
            window, channels, ..
        } => {
            let depths = shapes.result[3] / (image[3] / channels).max(1);
            let (n, depth) = (i3 / depths, i3 % depths);
            let w = seen(window, 0, i1, i0 % k0, image[0]);
            let h = seen(window, 1, i2, i0 / k0 % k1, image[1]);
            let d = seen(window, 2, depth, i0 / (k0 * k1) % k2, image[2]);
            let channel = i0 / (k0 * k1 * k2);
            let inside = w.zip(h).zip(d);
            inside.map_or(0.0, |((w, h), d)| {
                x.get(1, [w, h, d, n * channels + channel])
            })
        }
        Op::Im2ColBack { window, planar, .. } => {
            let (k, gradient) = (image, kernel); // source 1 is the kernel here
            let mut sum = 0.0;
            for w in 0..k[0] {
                let Some(ow) = place(window, 0, i0, w, gradient[1]) else {
                    continue;
                };
                if !planar {
                    sum += x.get(0, [i1 * k[0] + w, ow, i2, 0]);
                    continue;
                }
                for h in 0..k[1] {
                    if let Some(oh) = place(window, 1, i1, h, gradient[2]) {
                        sum += x.get(0, [(i2 * k[1] + h) * k[0] + w, ow, oh, i3]);
                    }
                }
            }
            sum
        }
        Op::Col2Im1d {
            stride,
            channels,
            crop,
        } => {
            let (each, columns) = (k0 / channels, k1);
            let at = i0 + crop;
            let first = (at + 1).saturating_sub(each).div_ceil(*stride);
            (first..columns.min(at / stride + 1))
                .map(|column| x.get(0, [i1 * each + at - column * stride, column, 0, 0]))
                .sum()
        }
        Op::Conv2d { window } => {
            let mut sum = 0.0;
            for h in 0..k1 {
                let Some(y) = seen(window, 1, i1, h, image[1]) else {
                    continue;
                };
                for w in 0..k0 {
                    let Some(at) = seen(window, 0, i0, w, image[0]) else {
                        continue;
                    };
                    for c in 0..k2 {
                        sum += x.get(0, [w, h, c, i2]) * x.get(1, [at, y, c, i3]);
                    }
                }
            }
            sum
        }
        Op::Conv2dDepthwise { window } => {
            let mut sum = 0.0;
            for h in 0..k1 {
                for w in 0..k0 {
                    let y = seen(window, 1, i1, h, image[1]);
                    let at = seen(window, 0, i0, w, image[0]);
                    if let Some((at, y)) = at.zip(y) {
                        sum += x.get(0, [w, h, 0, i2]) * x.get(1, [at, y, i2, i3]);
                    }
                }
            }
            sum
        }
        Op::Conv3d { window, channels } => {
            let outputs = kernel[3] / channels;
            let (n, output) = (i3 / outputs, i3 % outputs);
            let mut sum = 0.0;
            for d in 0..k2 {
                for h in 0..k1 {
                    for w in 0..k0 {
                        let z = seen(window, 2, i2, d, image[2]);
                        let y = seen(window, 1, i1, h, image[1]);
                        let at = seen(window, 0, i0, w, image[0]);
                        let Some(((at, y), z)) = at.zip(y).zip(z) else {
                            continue;
                        };
                        for c in 0..*channels {
                            sum += x.get(0, [w, h, d, output * channels + c])
                                * x.get(1, [at, y, z, n * channels + c]);
                        }
                    }
                }
            }
            sum
        }
        Op::ConvTranspose1d { stride } => {
            let mut sum = 0.0;
            for k in 0..k0.min(i0 + 1) {
                let from = i0 - k;
                if !from.is_multiple_of(*stride) || from / stride >= image[0] {
                    continue;
                }
                for c in 0..k2 {
                    sum += x.get(0, [k, i1, c, 0]) * x.get(1, [from / stride, c, i2, 0]);
                }
            }
            sum
        }
        Op::ConvTranspose2d { stride } => {
            let of = |at: usize, k: usize, extent: usize| {
                let from = at.checked_sub(k)?;
                (from.is_multiple_of(*stride) && from / stride < extent).then_some(from / stride)
            };
            let mut sum = 0.0;
            for h in 0..k1 {
                for w in 0..k0 {
                    let (a, b) = (of(i0, w, image[0]), of(i1, h, image[1]));
                    let Some((a, b)) = a.zip(b) else { continue };
                    for c in 0..kernel[3] {
                        sum += x.get(0, [w, h, i2, c]) * x.get(1, [a, b, c, i3]);
                    }
                }
            }
            sum
        }
        Op::Pool1d {
            pool,
            kernel,
            stride,
            padding,
        } => {
            let there = pooled(i0, *stride, *padding, *kernel, k0);
            let there = there.map(|at| x.get(0, [at, i1, i2, i3]));
            match pool {
                Pool::Max => there.fold(f64::from(f32::MIN), f64::max),
                Pool::Mean => {
                    let (sum, count) = there.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
                    if count > 0 {
                        sum / f64::from(count)
                    } else {
                        0.0
                    }
                }
            }
        }
        Op::Pool2d {
            pool,
            kernel,
            stride,
            padding,
        } => {
            let columns = pooled(i0, stride[0], padding[0], kernel[0], k0);
            let rows = pooled(i1, stride[1], padding[1], kernel[1], k1);
            let there = rows.flat_map(|h| columns.clone().map(move |w| (w, h)));
            let there = there.map(|(w, h)| x.get(0, [w, h, i2, i3]));
            match pool {
                Pool::Max => there.fold(f64::from(f32::MIN), f64::max),
                Pool::Mean => there.sum::<f64>() / (kernel[0] * kernel[1]) as f64,
            }
        }
        Op::Upscale {
            interpolation,
            align_corners,
            antialias,
            ..
        } => upscale(shapes, at, *interpolation, *align_corners, *antialias, x),
        Op::PadCircular { before, .. } => {
            let from = std::array::from_fn(|d| {
                let extent = kernel[d];
                (at[d] + extent * before[d].div_ceil(extent) - before[d]) % extent
            });
            x.get(0, from)
        }
        Op::PadReflect1d { before, .. } => {
            let last = k0 - 1;
            let from = match i0.checked_sub(*before) {
                None => before - i0,
                Some(from) if from > last => 2 * last - from,
                Some(from) => from,
            };
            x.get(0, [from, i1, i2, i3])
        }
        Op::Roll { shift } => {
            let from = std::array::from_fn(|d| {
                let extent = kernel[d];
                (at[d] + extent - shift[d] % extent) % extent
            });
            x.get(0, from)
        }
        _ => f64::NAN,
    }
}

/// Returns an element of a scaled image. Computes positions in f32 like ggml, because their
/// rounding decides which neighbours are used.
fn upscale(
    shapes: &Shapes,
    at: [usize; 4],
    interpolation: Interpolation,
    align_corners: bool,
    antialias: bool,
    x: &impl Elements,
) -> f64 {
    let from = shapes.sources[0];
    let offset: f32 = if align_corners { 0.0 } else { 0.5 };
    let scale: [f32; 4] = std::array::from_fn(|d| {
        let (to, from) = (shapes.result[d], from[d]);
        if align_corners && d < 2 && to > 1 && from > 1 {
            (to - 1) as f32 / (from - 1) as f32
        } else {
            to as f32 / from as f32
        }
    });
    let nearest = |d: usize| (at[d] as f32 / scale[d]) as usize;
    let pixel = |w: i64, h: i64| {
        let limited = |at: i64, extent: usize| at.clamp(0, extent as i64 - 1) as usize;
        let (w, h) = (limited(w, from[0]), limited(h, from[1]));
        x.get(0, [w, h, nearest(2), nearest(3)])
    };
    let exact = |d: usize| (at[d] as f32 + offset) / scale[d] - offset;
    match interpolation {
        Interpolation::Nearest => x.get(0, [nearest(0), nearest(1), nearest(2), nearest(3)]),
        Interpolation::Bilinear if antialias => {
            // Weights of a triangle filter, as wide as the distance between elements of the result.
            let weights = |d: usize| {
                let center = (at[d] as f32 + offset) / scale[d];
                let support = (1.0 / scale[d]).max(1.0);
                let first = ((center - support + offset) as i64).max(0);
                let end = ((center + support + offset) as i64).min(from[d] as i64);
                (first..end).map(move |i| {
                    let distance = ((i as f32 - center + offset) / support).abs();
                    (i, f64::from((1.0 - distance).max(0.0)))
                })
            };
            let (mut sum, mut total) = (0.0, 0.0);
            for (h, of_row) in weights(1) {
                for (w, of_column) in weights(0) {
                    sum += pixel(w, h) * of_row * of_column;
                    total += of_row * of_column;
                }
            }
            if total > 0.0 { sum / total } else { sum }
        }
        Interpolation::Bilinear => {
            let part = |d: usize| {
                let at = exact(d);
                let low = (at.floor() as i64).clamp(0, from[d] as i64 - 1);
                (
                    at.floor() as i64,
                    f64::from((at - low as f32).clamp(0.0, 1.0)),
                )
            };
            let ((w, dw), (h, dh)) = (part(0), part(1));
            let row = |h| pixel(w, h) * (1.0 - dw) + pixel(w + 1, h) * dw;
            row(h) * (1.0 - dh) + row(h + 1) * dh
        }
        Interpolation::Bicubic => {
            let part = |d: usize| {
                let at = exact(d);
                (at.floor() as i64, f64::from(at - at.floor()))
            };
            let ((w, dw), (h, dh)) = (part(0), part(1));
            let (of_columns, of_rows) = (cubic(dw), cubic(dh));
            (0..4)
                .map(|i| {
                    let row =
                        (0..4).map(|j| of_columns[j] * pixel(w + j as i64 - 1, h + i as i64 - 1));
                    of_rows[i] * row.sum::<f64>()
                })
                .sum()
        }
    }
}

/// Returns the weights of four neighbours for a position `t` after the second one.
fn cubic(t: f64) -> [f64; 4] {
    const A: f64 = -0.75;
    let near = |t: f64| ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0;
    let far = |t: f64| ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A;
    [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
}
