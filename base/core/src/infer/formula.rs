//! Operations that are defined by a [formula](crate::formula).

use super::{Check, FLOATS};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{DIMS, Layout, Shape};
use crate::op::{Op, Pool, Window};

/// Maximum extent of a convolution. Sums of such extents do not overflow.
const LONGEST: usize = i32::MAX as usize;

impl Check<'_> {
    /// Checks that `sources` are f32.
    fn all_f32(&self, sources: std::ops::Range<usize>) -> Result<()> {
        for index in sources {
            self.is(index, "what it computes with", &[DType::F32])?;
        }
        Ok(())
    }

    fn shaped(&self, index: usize, shape: Shape) -> Result<()> {
        self.ensure(
            self.source(index)?.shape() == shape,
            format_args!("source {index} is not {shape:?}"),
        )
    }

    /// Returns the shapes of a kernel (f32 or f16) and of its input (f32).
    fn kernel_and_image(&self) -> Result<(Shape, Shape)> {
        self.is(0, "the kernel", &[DType::F32, DType::F16])?;
        self.all_f32(1..2)?;
        Ok((self.source(0)?.shape(), self.source(1)?.shape()))
    }

    /// Returns the number of output positions of a kernel of `k` elements along dimension `d` of
    /// `extent` elements.
    fn places(&self, window: &Window, d: usize, extent: usize, k: usize) -> Result<usize> {
        let (stride, padding, dilation) = (
            i128::from(window.stride[d]),
            i128::from(window.padding[d]),
            i128::from(window.dilation[d]),
        );
        self.ensure(
            stride > 0 && extent <= LONGEST && k <= LONGEST,
            "a stride is 0, or an extent beyond 2^31 - 1",
        )?;
        let room = extent as i128 + 2 * padding - dilation * (k as i128 - 1) - 1;
        self.ensure(
            room > -stride && room <= LONGEST as i128, // ggml rounds to zero
            "the kernel is longer than what it is applied to",
        )?;
        Ok((room / stride) as usize + 1)
    }
}

pub(super) fn formula(c: &Check<'_>) -> Result<Layout> {
    match *c.op {
        Op::Acc { strides, offset } => window(c, strides, offset, &[DType::F32]),
        Op::Set { strides, offset } => window(c, strides, offset, &[DType::F32, DType::I32]),
        Op::CountEqual => {
            c.is(0, "what is counted", &[DType::I32])?;
            c.is(1, "what is counted", &[DType::I32])?;
            c.shaped(1, c.source(0)?.shape())?;
            c.result(DType::I64, [1; DIMS])
        }
        Op::GroupNorm { groups, eps } => {
            c.all_f32(0..1)?;
            let channels = c.source(0)?.shape()[2];
            c.ensure(
                groups > 0 && groups <= channels.max(1),
                "there are no groups, or more than channels",
            )?;
            c.ensure(eps >= 0.0, "eps is negative or not a number")?;
            c.like(c.source(0)?)
        }
        Op::Diag => {
            c.all_f32(0..1)?;
            let [n, one, n2, n3] = c.source(0)?.shape();
            c.ensure(one == 1, "source 0 has more than one row")?;
            c.result(DType::F32, [n, n, n2, n3])
        }
        Op::Tri { .. } => {
            c.all_f32(0..1)?;
            let [n0, n1, ..] = c.source(0)?.shape();
            c.ensure(n0 == n1, "the matrices are not square")?;
            c.like(c.source(0)?)
        }
        Op::Upscale { shape, .. } => {
            c.all_f32(0..1)?;
            c.ensure(!c.source(0)?.is_empty(), "source 0 is empty")?;
            c.result(DType::F32, shape)
        }
        Op::PadCircular { before, after } => {
            c.all_f32(0..1)?;
            let from = c.source(0)?;
            c.ensure(!from.is_empty(), "source 0 is empty")?;
            let mut shape = [0; DIMS];
            for (d, extent) in shape.iter_mut().enumerate() {
                let whole = from.shape()[d].checked_add(before[d]);
                let whole = whole.and_then(|n| n.checked_add(after[d]));
                *extent = whole
                    .filter(|&n| n <= LONGEST)
                    .ok_or_else(|| c.error("the result is too large"))?;
            }
            c.result(DType::F32, shape)
        }
        Op::PadReflect1d { before, after } => {
            c.all_f32(0..1)?;
            let [n0, n1, n2, n3] = c.source(0)?.shape();
            c.ensure(before < n0 && after < n0, "there is not so much to mirror")?;
            c.result(DType::F32, [n0 + before + after, n1, n2, n3])
        }
        Op::Roll { .. } => {
            c.all_f32(0..1)?;
            c.like(c.source(0)?)
        }
        Op::TimestepEmbedding { dim, max_period } => {
            c.all_f32(0..1)?;
            let [n, n1, n2, n3] = c.source(0)?.shape();
            c.ensure([n1, n2, n3] == [1; 3], "source 0 has more than one row")?;
            c.ensure(
                dim <= LONGEST && max_period > 0,
                "no such dimension or period",
            )?;
            c.result(DType::F32, [dim, n, 1, 1])
        }
        Op::SolveTri => {
            c.all_f32(0..2)?;
            let [k, n, n2, n3] = c.source(1)?.shape();
            c.shaped(0, [n, n, n2, n3])?;
            c.result(DType::F32, [k, n, n2, n3])
        }
        Op::LightningIndexer => indexer(c),
        Op::HyperComb { iterations, .. } => {
            c.ensure(iterations <= 10_000, "there are too many iterations")?;
            c.all_f32(0..3)?;
            let tokens = c.source(0)?.shape()[1];
            c.shaped(0, [24, tokens, 1, 1])?;
            c.shaped(1, [3, 1, 1, 1])?;
            c.shaped(2, [24, 1, 1, 1])?;
            c.result(DType::F32, [4, 4, tokens, 1])
        }
        Op::HyperPre { gated, .. } => {
            c.all_f32(0..2)?;
            let [n, streams, tokens, one] = c.source(0)?.shape();
            c.ensure(one == 1, "there are too many dimensions")?;
            if gated {
                c.shaped(1, [n, streams, tokens, 1])?
            } else {
                c.shaped(1, [streams, tokens, 1, 1])?
            }
            c.result(DType::F32, [n, tokens, 1, 1])
        }
        Op::HyperPost => {
            c.all_f32(0..4)?;
            let [n, streams, tokens, one] = c.source(1)?.shape();
            c.ensure(one == 1, "there are too many dimensions")?;
            c.shaped(0, [n, tokens, 1, 1])?;
            c.shaped(2, [streams, tokens, 1, 1])?;
            if c.optional(3).is_some() {
                c.shaped(3, [streams, streams, tokens, 1])?;
            }
            c.result(DType::F32, [n, streams, tokens, 1])
        }
        Op::TopKMask => top_k_mask(c),
        Op::WinPart { windows, size } => {
            c.all_f32(0..1)?;
            let [channels, width, height, one] = c.source(0)?.shape();
            c.ensure(
                one == 1 && size > 0,
                "there are several images, or no window",
            )?;
            c.ensure(
                windows == [width.div_ceil(size), height.div_ceil(size)],
                "the windows do not cover the image",
            )?;
            let count = windows[0].checked_mul(windows[1]);
            let count = count.ok_or_else(|| c.error("the result is too large"))?;
            c.result(DType::F32, [channels, size, size, count])
        }
        Op::WinUnpart { size, shape } => {
            c.all_f32(0..1)?;
            let [channels, width, height, one] = shape;
            c.ensure(
                one == 1 && size > 0,
                "there are several images, or no window",
            )?;
            let count = width.div_ceil(size).checked_mul(height.div_ceil(size));
            let count = count.ok_or_else(|| c.error("the result is too large"))?;
            c.shaped(0, [channels, size, size, count])?;
            c.result(DType::F32, shape)
        }
        Op::GetRelPos => {
            c.is(0, "the embeddings", &[DType::F16])?;
            let [n, rows, n2, n3] = c.source(0)?.shape();
            c.ensure(
                rows % 2 == 1 && [n2, n3] == [1, 1],
                "there is an even number of rows, or more than one matrix",
            )?;
            c.result(DType::F16, [n, rows / 2 + 1, rows / 2 + 1, 1])
        }
        Op::AddRelPos => {
            c.all_f32(0..3)?;
            let [length, columns, rows, batch] = c.source(1)?.shape();
            c.shaped(2, c.source(1)?.shape())?;
            let (keys, queries) = (length.checked_mul(length), columns.checked_mul(rows));
            let (keys, queries) = keys
                .zip(queries)
                .ok_or_else(|| c.error("the scores are too many"))?;
            c.shaped(0, [keys, queries, batch, 1])?;
            c.like(c.source(0)?)
        }
        Op::RwkvWkv6 => recurrence(c, 5, Some(3)),
        Op::RwkvWkv7 => recurrence(c, 6, None),
        Op::GatedLinearAttn { .. } => recurrence(c, 4, None),
        _ => image(c),
    }
}

/// Checks source 1 in a window of source 0.
fn window(
    c: &Check<'_>,
    strides: [usize; DIMS - 1],
    offset: usize,
    types: &[DType],
) -> Result<Layout> {
    c.is(0, "source 0", types)?;
    let (into, part) = (c.source(0)?, c.source(1)?);
    c.ensure(part.dtype() == into.dtype(), "the sources differ in type")?;
    c.ensure(into.is_contiguous(), "source 0 is not contiguous")?;
    let size = into.dtype().block_bytes();
    let [a, b, d] = strides;
    let all = Layout::strided(into.dtype(), part.shape(), [size, a, b, d]);
    let all = all.map_err(|error| c.error(error))?;
    let is_whole = strides
        .iter()
        .chain([&offset])
        .all(|n| n.is_multiple_of(size));
    // Each dimension steps over all previous ones, so all elements are distinct.
    let steps = (1..DIMS).all(|dim| {
        let extent = part.shape()[dim - 1];
        part.shape()[dim] == 1
            || all.strides()[dim] >= all.strides()[dim - 1].saturating_mul(extent)
    });
    let end = offset.checked_add(all.bytes());
    c.ensure(
        part.is_empty() || is_whole && steps && end.is_some_and(|end| end <= into.bytes()),
        "the window does not lie in source 0, or overlaps itself",
    )?;
    c.like(into)
}

fn indexer(c: &Check<'_>) -> Result<Layout> {
    c.all_f32(0..1)?;
    c.all_f32(2..3)?;
    c.is(3, "the mask", &[DType::F16])?;
    let [size, heads, tokens, batch] = c.source(0)?.shape();
    let keys = c.source(1)?;
    c.ensure(!keys.dtype().is_integer(), "keys are integers")?;
    let kv = keys.shape()[2];
    c.shaped(1, [size, 1, kv, batch])?;
    c.shaped(2, [heads, tokens, 1, batch])?;
    let masks = c.source(3)?.shape();
    c.ensure(
        masks[..3] == [kv, tokens, 1] && masks[3] > 0 && batch.is_multiple_of(masks[3]),
        "the mask does not fit",
    )?;
    c.result(DType::F32, [kv, tokens, 1, batch])
}

fn top_k_mask(c: &Check<'_>) -> Result<Layout> {
    c.is(0, "the mask", &[DType::F32, DType::F16])?;
    let (mask, picks) = (c.source(0)?, c.source(1)?);
    let [_, rows @ ..] = picks.shape();
    let [cells, masks @ ..] = mask.shape();
    let repeats = |(&rows, &masks): (&usize, &usize)| masks > 0 && rows.is_multiple_of(masks);
    c.ensure(
        rows.iter().zip(&masks).all(repeats),
        "the mask does not repeat over the picks",
    )?;
    c.is(2, "the scores", &[DType::F32])?;
    for index in [1, 3, 4] {
        c.is(index, "the numbers of picks and cells", &[DType::I32])?;
    }
    for index in [2, 4] {
        let is_like = |source: &Layout| source.shape()[1..] == rows;
        c.ensure(
            c.optional(index).is_none_or(is_like),
            format_args!("source {index} has other rows than the picks"),
        )?;
    }
    if let Some(blocks) = c.optional(3) {
        let [_, count, n2, n3] = blocks.shape();
        c.ensure(
            [n2, n3] == [1, 1]
                && c.optional(2)
                    .is_none_or(|scores| scores.shape()[0] == count),
            "there is not one list of cells for each pick",
        )?;
    }
    let [n1, n2, n3] = rows;
    c.result(mask.dtype(), [cells, n1, n2, n3])
}

/// Checks queries, keys and so on, and the matrices in source `state`. Source `bonus` has no token
/// dimension.
fn recurrence(c: &Check<'_>, state: usize, bonus: Option<usize>) -> Result<Layout> {
    c.all_f32(0..state + 1)?;
    let [size, heads, tokens, one] = c.source(0)?.shape();
    c.ensure(one == 1, "there are too many dimensions")?;
    for index in 0..state {
        let all = if bonus == Some(index) { 1 } else { tokens };
        c.shaped(index, [size, heads, all, 1])?;
    }
    for index in 0..=state {
        c.ensure(
            c.source(index)?.is_contiguous(),
            format_args!("source {index} is not contiguous"),
        )?;
    }
    let matrices = c.source(state)?.shape();
    let product = size.checked_mul(size).and_then(|n| n.checked_mul(heads));
    c.ensure(
        product == Some(matrices[0]) && matrices[2..] == [1, 1],
        "the matrices do not fit",
    )?;
    let sequences = matrices[1];
    c.ensure(
        sequences > 0 && tokens > 0 && tokens.is_multiple_of(sequences),
        "sequences differ in length",
    )?;
    // The matrices exist already, so this does not overflow.
    c.result(DType::F32, [size * heads, tokens + size * sequences, 1, 1])
}

fn image(c: &Check<'_>) -> Result<Layout> {
    let too_large = || c.error("the result is too large");
    let product = |factors: &[usize]| {
        let all = factors
            .iter()
            .try_fold(1usize, |all, &n| all.checked_mul(n));
        all.filter(|&n| n <= LONGEST).ok_or_else(too_large)
    };
    match *c.op {
        Op::Im2Col {
            window,
            planar,
            dtype,
        } => {
            c.ensure(FLOATS.contains(&dtype), "the result is no float")?;
            c.is(1, "the image", FLOATS)?;
            let (k, x) = (c.source(0)?.shape(), c.source(1)?.shape());
            let width = c.places(&window, 0, x[0], k[0])?;
            if !planar {
                c.ensure(
                    k[1] == x[1] && x[3] == 1,
                    "channels differ, or images in one dimension",
                )?;
                return c.result(dtype, [product(&[k[0], k[1]])?, width, x[2], 1]);
            }
            c.ensure(k[2] == x[2], "channels differ")?;
            let height = c.places(&window, 1, x[1], k[1])?;
            c.result(dtype, [product(&k[..3])?, width, height, x[3]])
        }
        Op::Im2Col3d {
            window,
            channels,
            dtype,
        } => {
            c.ensure(FLOATS.contains(&dtype), "the result is no float")?;
            c.is(1, "the image", FLOATS)?;
            let (k, x) = (c.source(0)?.shape(), c.source(1)?.shape());
            c.ensure(
                channels > 0 && k[..3].iter().all(|&n| n > 0),
                "channels do not fit, or the kernel is empty",
            )?;
            let mut places = [0; 3];
            for (d, count) in places.iter_mut().enumerate() {
                *count = c.places(&window, d, x[d], k[d])?;
            }
            let [width, height, depth] = places;
            let row = product(&[k[0], k[1], k[2], channels])?;
            c.result(
                dtype,
                [row, width, height, product(&[depth, x[3] / channels])?],
            )
        }
        Op::Im2ColBack {
            window,
            planar,
            shape,
        } => {
            c.all_f32(0..1)?;
            let (gradient, k) = (c.source(0)?.shape(), c.source(1)?.shape());
            let width = c.places(&window, 0, shape[0], k[0])?;
            let wanted = if planar {
                let height = c.places(&window, 1, shape[1], k[1])?;
                [product(&[k[0], k[1], shape[2]])?, width, height, shape[3]]
            } else {
                c.ensure(shape[3] == 1, "images in one dimension")?;
                [product(&[k[0], shape[1]])?, width, shape[2], 1]
            };
            c.ensure(
                gradient == wanted,
                format_args!("the gradient is not {wanted:?}"),
            )?;
            c.result(DType::F32, shape)
        }
        Op::Col2Im1d {
            stride,
            channels,
            crop,
        } => {
            c.is(0, "source 0", FLOATS)?;
            let [k, columns, n2, n3] = c.source(0)?.shape();
            c.ensure(
                channels > 0 && k.is_multiple_of(channels) && stride > 0 && [n2, n3] == [1, 1],
                "channels or dimensions do not fit",
            )?;
            let reach = product(&[columns.saturating_sub(1), stride])?;
            let whole = product(&[reach + k / channels])?;
            let length = crop.checked_mul(2).and_then(|cut| whole.checked_sub(cut));
            let length = length.ok_or_else(|| c.error("more is cut off than there is"))?;
            c.result(c.source(0)?.dtype(), [length, channels, 1, 1])
        }
        Op::Conv2d { window } => {
            let (k, x) = c.kernel_and_image()?;
            c.ensure(k[2] == x[2], "channels differ")?;
            let width = c.places(&window, 0, x[0], k[0])?;
            let height = c.places(&window, 1, x[1], k[1])?;
            c.result(DType::F32, [width, height, k[3], x[3]])
        }
        Op::Conv2dDepthwise { window } => {
            let (k, x) = c.kernel_and_image()?;
            c.ensure(k[2] == 1 && k[3] == x[2], "channels differ")?;
            let width = c.places(&window, 0, x[0], k[0])?;
            let height = c.places(&window, 1, x[1], k[1])?;
            c.result(DType::F32, [width, height, x[2], x[3]])
        }
        Op::Conv3d { window, channels } => {
            let (k, x) = c.kernel_and_image()?;
            c.ensure(
                channels > 0 && k[3].is_multiple_of(channels) && x[3].is_multiple_of(channels),
                "channels do not fit",
            )?;
            let mut places = [0; 3];
            for (d, count) in places.iter_mut().enumerate() {
                *count = c.places(&window, d, x[d], k[d])?;
            }
            let [width, height, depth] = places;
            let images = product(&[k[3] / channels, x[3] / channels])?;
            c.result(DType::F32, [width, height, depth, images])
        }
        Op::ConvTranspose1d { stride } => {
            let (k, x) = c.kernel_and_image()?;
            c.ensure(
                stride > 0 && k[2] == x[1] && k[3] == 1 && x[2..] == [1, 1],
                "channels or dimensions do not fit",
            )?;
            let reach = product(&[x[0].saturating_sub(1), stride])?;
            c.result(DType::F32, [product(&[reach + k[0]])?, k[1], 1, 1])
        }
        Op::ConvTranspose2d { stride } => {
            let (k, x) = c.kernel_and_image()?;
            c.ensure(stride > 0 && k[3] == x[2], "channels differ")?;
            let width = product(&[x[0].saturating_sub(1), stride])?;
            let height = product(&[x[1].saturating_sub(1), stride])?;
            let (width, height) = (product(&[width + k[0]])?, product(&[height + k[1]])?);
            c.result(DType::F32, [width, height, k[2], x[3]])
        }
        Op::Pool1d {
            pool,
            kernel,
            stride,
            padding,
        } => {
            let [n0, n1, n2, n3] = pooled(c, pool)?;
            let width = pool_places(c, n0, kernel, stride, padding)?;
            c.result(DType::F32, [width, n1, n2, n3])
        }
        Op::Pool2d {
            pool,
            kernel,
            stride,
            padding,
        } => {
            let [n0, n1, n2, n3] = pooled(c, pool)?;
            let width = pool_places(c, n0, kernel[0], stride[0], padding[0])?;
            let height = pool_places(c, n1, kernel[1], stride[1], padding[1])?;
            c.result(DType::F32, [width, height, n2, n3])
        }
        Op::Pool2dBack {
            kernel,
            stride,
            padding,
            ..
        } => {
            c.all_f32(0..2)?;
            let shape @ [n0, n1, n2, n3] = c.source(1)?.shape();
            let width = pool_places(c, n0, kernel[0], stride[0], padding[0])?;
            let height = pool_places(c, n1, kernel[1], stride[1], padding[1])?;
            c.shaped(0, [width, height, n2, n3])?;
            c.result(DType::F32, shape)
        }
        _ => c.like(c.source(0)?),
    }
}

fn pooled(c: &Check<'_>, _: Pool) -> Result<Shape> {
    c.is(0, "source 0", &[DType::F32, DType::F16])?;
    Ok(c.source(0)?.shape())
}

/// Returns the number of windows of `kernel` elements along `extent`.
fn pool_places(
    c: &Check<'_>,
    extent: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
) -> Result<usize> {
    let small = [extent, kernel, stride, padding]
        .iter()
        .all(|&n| n <= LONGEST / 4);
    c.ensure(
        small && kernel > 0 && stride > 0 && extent + 2 * padding >= kernel,
        "the window does not fit",
    )?;
    Ok((extent + 2 * padding - kernel) / stride + 1)
}
