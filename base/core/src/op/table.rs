//! The table of operations, one entry each.
//!
//! An entry has a description, parameters, and the [facts](super::OpFacts) that do not depend on
//! the operands. The rules for operands are in [`infer`](crate::infer).

use super::parameter::{Bits, Parameter};
use super::{
    Glu, Interpolation, OpFacts, Pool, Precision, Rope, SortOrder, Triangle, Unary, Window,
};
use crate::dtype::DType;
use crate::layout::{DIMS, Shape};
use serde::{Deserialize, Serialize};

/// Generates from the table: the types [`Op`] and [`OpKind`], the serialisation, comparison and
/// listing of parameters, and the facts of each kind.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $kind:ident $(($whole:ident: $whole_type:ty))? $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })?
            => { name: $name:literal, sources: $sources:literal $(, $fact:ident: $value:expr)* };
    )*) => {
        /// Operation that computes a tensor.
        ///
        /// Sources are numbered as in ggml; *optional* ones may be absent. `n0` to `n3` are the
        /// extents of source 0. [`infer`](crate::infer) holds the exact rules for shapes and types.
        ///
        /// Two operations are equal if they have the same parameters bit by bit: -0 is not 0, and a
        /// NaN is itself.
        #[derive(Clone, Copy, Debug, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Op {
            $(
                $(#[$doc])*
                $kind $(($whole_type))? $({
                    $($(#[$field_doc])* #[serde(with = "super::parameter")] $field: $type,)*
                })?,
            )*
        }

        /// An [`Op`] without its parameters.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum OpKind {
            $(#[doc = concat!("[`Op::", stringify!($kind), "`]")] $kind,)*
        }

        impl OpKind {
            /// Every kind, in the order of the table.
            pub const ALL: [OpKind; [$(stringify!($kind)),*].len()] = [$(OpKind::$kind),*];

            pub(super) fn facts(self) -> &'static OpFacts {
                const FACTS: &[OpFacts] = &[
                    $(OpFacts {
                        name: $name,
                        sources: $sources,
                        $($fact: $value,)*
                        ..OpFacts::USUAL
                    },)*
                ];
                &FACTS[self as usize]
            }
        }

        impl PartialEq for Op {
            fn eq(&self, other: &Self) -> bool {
                match self {
                    $(Op::$kind $(($whole))? $({ $($field),* })? => {
                        let mine = ($(Bits($whole),)? $($(Bits($field),)*)?);
                        match other {
                            Op::$kind $(($whole))? $({ $($field),* })? => {
                                mine == ($(Bits($whole),)? $($(Bits($field),)*)?)
                            }
                            _ => false,
                        }
                    })*
                }
            }
        }

        impl Eq for Op {}

        impl Op {
            /// Returns the operation without its parameters.
            pub fn kind(&self) -> OpKind {
                match self {
                    $(Op::$kind { .. } => OpKind::$kind,)*
                }
            }

            /// Adds names and values of the parameters to `list`.
            pub(super) fn list_parameters(&self, list: &mut Vec<(&'static str, String)>) {
                match self {
                    $(Op::$kind $(($whole))? $({ $($field),* })? => {
                        $($whole.list(stringify!($whole), list);)?
                        $($($field.list(stringify!($field), list);)*)?
                    })*
                }
            }
        }
    };
}

operations! {
    /// A leaf: an input, a weight or a cache. No sources.
    Leaf => { name: "none", sources: 0 };

    /// Same elements in new memory. With quantized types, blocks are copied.
    Dup => { name: "dup", sources: 1 };

    /// Source 0 plus source 1; source 1 repeats to the shape of source 0.
    Add => { name: "add", sources: 2, may_overwrite: &[0, 1] };

    /// Source 0 `[n0, experts used, tokens]` plus the rows of source 1 `[n0, experts]` selected by
    /// source 2 (i32 `[experts used, tokens]`). An id of -1 adds nothing.
    AddId => { name: "add_id", sources: 3, may_overwrite: &[0] };

    /// Source 0 minus source 1; source 1 repeats to the shape of source 0.
    Sub => { name: "sub", sources: 2, may_overwrite: &[0, 1] };

    /// Source 0 times source 1, element by element; source 1 repeats to the shape of source 0.
    Mul => { name: "mul", sources: 2, may_overwrite: &[0, 1] };

    /// Source 0 divided by source 1; source 1 repeats to the shape of source 0.
    Div => { name: "div", sources: 2, may_overwrite: &[0, 1] };

    /// `scale * x + bias`.
    Scale {
        /// Factor.
        scale: f32,
        /// Summand.
        bias: f32,
    } => { name: "scale", sources: 1, may_overwrite: &[0] };

    /// Square.
    Sqr => { name: "sqr", sources: 1, may_overwrite: &[0] };

    /// Square root.
    Sqrt => { name: "sqrt", sources: 1, may_overwrite: &[0] };

    /// Natural logarithm.
    Log => { name: "log", sources: 1, may_overwrite: &[0] };

    /// Sum of all elements, as one element.
    Sum => { name: "sum", sources: 1 };

    /// Sum of each row: `[1, n1, n2, n3]`.
    SumRows => { name: "sum_rows", sources: 1 };

    /// Mean of each row: `[1, n1, n2, n3]`.
    Mean => { name: "mean", sources: 1 };

    /// Running sum along each row.
    CumSum => { name: "cumsum", sources: 1 };

    /// Index of the largest element of each row of a matrix, the first of equals: i32 `[n1]`.
    ArgMax => { name: "argmax", sources: 1 };

    /// Source 0 repeated to `shape`.
    Repeat {
        /// Shape of the result; each extent a multiple of the source's.
        shape: Shape,
    } => { name: "repeat", sources: 1 };

    /// Source 0 followed by source 1 along `dim`.
    Concat {
        /// Dimension along which extents add up.
        dim: usize,
    } => { name: "concat", sources: 2 };

    /// Each row shifted to mean 0 and scaled to variance 1: `(x - mean) / sqrt(variance + eps)`.
    Norm {
        /// Added to the variance.
        eps: f32,
    } => { name: "norm", sources: 1 };

    /// Each row divided by `sqrt(mean(x²) + eps)`.
    RmsNorm {
        /// Added to the mean of squares.
        eps: f32,
    } => { name: "rms_norm", sources: 1, may_overwrite: &[0] };

    /// Each row divided by `max(sqrt(sum(x²)), eps)`.
    L2Norm {
        /// Minimum divisor.
        eps: f32,
    } => { name: "l2_norm", sources: 1 };

    /// Matrix product: source 0 `[k, m, a, b]` (weights) with source 1 `[k, n, a·x, b·y]` gives f32
    /// `[m, n, a·x, b·y]`: element `(i, j)` is the dot product of row `i` of source 0 and row `j`
    /// of source 1.
    MulMat {
        /// Minimum precision of the accumulation.
        precision: Precision,
    } => { name: "mul_mat", sources: 2 };

    /// Sum of outer products: source 0 `[m, k, a, b]` and source 1 f32 `[n, k, a·x, b·y]` give f32
    /// `[m, n, a·x, b·y]`: element `(i, j)` is the sum over all `k` of `(i, k)` of source 0 times
    /// `(j, k)` of source 1. Both gradients of a matrix product have this form.
    OutProd => { name: "out_prod", sources: 2 };

    /// Matrix products with selected experts: source 0 `[k, m, experts]`, source 1 f32 `[k, 1 or
    /// used, tokens]`, source 2 i32 `[used, tokens]`: f32 `[m, used, tokens]`. An id of -1 skips a
    /// product: its row of the result is zero.
    MulMatId {
        /// Minimum precision of the accumulation.
        precision: Precision,
    } => { name: "mul_mat_id", sources: 3 };

    /// Source 0 converted into the memory of source 1. The result is a view of source 1. Same
    /// number of elements.
    Cpy => { name: "cpy", sources: 2, result_in: Some(1), writes: &[1] };

    /// Source 0 converted to another type.
    Cast {
        /// Type of the result.
        dtype: DType,
    } => { name: "cast", sources: 1 };

    /// Source 0 without gaps.
    Cont => { name: "cont", sources: 1 };

    /// Memory of source 0 with another shape. Source 0 is contiguous.
    Reshape {
        /// Shape of the result, with as many elements as the source.
        shape: Shape,
    } => { name: "reshape", sources: 1, is_view: true, result_in: Some(0) };

    /// A window into the memory of source 0.
    View {
        /// Shape of the window.
        shape: Shape,
        /// Byte strides of dimensions 1, 2 and 3; that of dimension 0 is the type's size.
        strides: [usize; DIMS - 1],
        /// Byte offset of the first element in source 0.
        offset: usize,
    } => { name: "view", sources: 1, is_view: true, result_in: Some(0) };

    /// Memory of source 0 with permuted dimensions: source dimension `i` becomes dimension
    /// `axes[i]`.
    Permute {
        /// Target of each dimension.
        axes: [usize; DIMS],
    } => { name: "permute", sources: 1, is_view: true, result_in: Some(0) };

    /// Dimensions 0 and 1 swapped.
    Transpose => { name: "transpose", sources: 1, is_view: true, result_in: Some(0) };

    /// Rows of source 0 `[n0, n1, n2, n3]` selected by source 1 (i32 `[r, n2, n3]`), decoded to f32
    /// (i32 stays): `[n0, r, n2, n3]`.
    GetRows => { name: "get_rows", sources: 2 };

    /// Writes the rows of source 0 (f32 or f16 `[n0, r, n2, n3]`) to the rows of source 2 selected
    /// by source 1 (i64 or i32 `[r, n2/x, n3/y]`). The result is a view of source 2.
    SetRows => { name: "set_rows", sources: 3, result_in: Some(2), writes: &[2] };

    /// Elements right of the diagonal, `i0 > past + i1`, become minus infinity.
    DiagMaskInf {
        /// Columns left of the first row's diagonal.
        past: usize,
    } => { name: "diag_mask_inf", sources: 1, may_overwrite: &[0] };

    /// Elements right of the diagonal, `i0 > past + i1`, become 0.
    DiagMaskZero {
        /// Columns left of the first row's diagonal.
        past: usize,
    } => { name: "diag_mask_zero", sources: 1, may_overwrite: &[0] };

    /// `softmax(scale * x + slope(head) * mask)` along each row. Optional source 1: mask, f32 or
    /// f16 `[n0, ≥ n1, n2/x, n3/y]`. Optional source 2: sinks, f32 `[n2]`: one more logit per head
    /// in the denominator.
    SoftMax {
        /// Factor of the logits.
        scale: f32,
        /// Maximum ALiBi bias. 0 for slopes of 1.
        max_bias: f32,
    } => { name: "soft_max", sources: 1, optional: 2, may_overwrite: &[0] };

    /// Rotary position embedding of source 0 `[head size, heads, tokens, n3]` at the positions of
    /// source 1 (i32 `[tokens]`, with [sections](crate::RopeMode) `[4 tokens]`, one axis after the
    /// other). Optional source 2: frequency divisors, f32 `[≥ pairs]`.
    Rope(rope: Rope) => { name: "rope", sources: 2, optional: 1, may_overwrite: &[0] };

    /// Elements limited to `min..=max`.
    Clamp {
        /// Lower limit.
        min: f32,
        /// Upper limit.
        max: f32,
    } => { name: "clamp", sources: 1, may_overwrite: &[0] };

    /// Zeros around source 0.
    Pad {
        /// Zeros before, by dimension.
        before: Shape,
        /// Zeros after, by dimension.
        after: Shape,
    } => { name: "pad", sources: 1 };

    /// The f32 values `start, start + step, …` up to `stop`, exclusive. No sources.
    Arange {
        /// First value.
        start: f32,
        /// End, exclusive.
        stop: f32,
        /// Distance.
        step: f32,
    } => { name: "arange", sources: 0 };

    /// Indices that sort each row: i32. The order of equal elements is not specified.
    ArgSort {
        /// Direction.
        order: SortOrder,
    } => { name: "argsort", sources: 1 };

    /// Indices of the `k` largest elements of each row, in no particular order: i32 `[k, n1, n2,
    /// n3]`.
    TopK {
        /// Number of indices.
        k: usize,
    } => { name: "top_k", sources: 1 };

    /// A tensor of the shape of source 0 with every element `value`.
    Fill {
        /// The value.
        value: f32,
    } => { name: "fill", sources: 1, may_overwrite: &[0] };

    /// Fused attention: source 0 queries f32 `[d, tokens, heads, batch]`, source 1 keys `[d, kv, kv
    /// heads, batch]`, source 2 values `[dv, kv, kv heads, batch]`, optional source 3 mask f16
    /// `[kv, ≥ tokens, heads/x, batch/y]`, optional source 4 sinks f32 `[heads]`: f32 `[dv, heads,
    /// tokens, batch]`.
    FlashAttn {
        /// Factor of the logits.
        scale: f32,
        /// Maximum ALiBi bias. 0 for slopes of 1.
        max_bias: f32,
        /// If not 0, logits become `softcap * tanh(logit / softcap)`.
        softcap: f32,
        /// Minimum precision of the accumulation.
        precision: Precision,
    } => { name: "flash_attn_ext", sources: 3, optional: 2 };

    /// Convolution over time, channel by channel: source 0 f32 `[width - 1 + tokens, channels,
    /// sequences]`, whose rows start with the inputs before the first token, and source 1 f32
    /// `[width, channels]`: f32 `[channels, tokens, sequences]`.
    SsmConv => { name: "ssm_conv", sources: 2 };

    /// Gated delta rule ([Yang et al. 2024](https://arxiv.org/abs/2412.06464)). Each head has a
    /// matrix state `S` that every token updates: `S ← exp(g) S`, `S ← S + k ⊗ beta (v - Sᵀk)`. The
    /// output is `Sᵀq / sqrt(d)`.
    ///
    /// Sources, all f32: 0 queries and 1 keys `[d, heads / x, tokens, sequences / y]`, 2 values
    /// `[d, heads, tokens, sequences]`, 3 logarithms of decays `[1 or d, heads, tokens,
    /// sequences]`, 4 betas `[1, heads, tokens, sequences]`, 5 the transposed initial matrices `[d,
    /// d, heads, sequences]`. The result is f32 `[d · heads, tokens · sequences + snapshots · d ·
    /// sequences]`: the outputs of all tokens `[d, heads, tokens, sequences]`, then `snapshots`
    /// matrices `[d, d, heads, sequences]`: the final ones, those one token earlier, and so on.
    /// Before the first token they are those of source 5.
    GatedDeltaNet {
        /// Number of matrices per head in the result. At least 1.
        snapshots: usize,
    } => { name: "gated_delta_net", sources: 6 };

    /// Selective state space model ([Gu & Dao 2023](https://arxiv.org/abs/2312.00752), [Dao & Gu
    /// 2024](https://arxiv.org/abs/2405.21060)). Each head has a matrix state `S` that every token
    /// updates: `S ← exp(Δ A) S + Δ x ⊗ B`, where `Δ = softplus(dt)`. The output is `S C`.
    ///
    /// Sources: 0 matrices f32 `[n, d, heads, rows]`, 1 x f32 `[d, heads, tokens, sequences]`, 2 dt
    /// f32 `[heads, tokens, sequences]`, 3 A f32 `[1 or n, heads]`, 4 B and 5 C f32 `[n, groups,
    /// tokens, sequences]`, where adjacent heads share a group, equally many each, 6 the row of
    /// source 0 that each sequence starts with, i32 `[sequences]`. The result is f32 `[d · heads ·
    /// tokens · sequences + snapshots · n · d · heads · sequences]`: the outputs of all tokens `[d,
    /// heads, tokens, sequences]`, then `snapshots` matrices `[n, d, heads, sequences]`: the final
    /// ones, those one token earlier, and so on. Before the first token they are those of source 0.
    SsmScan {
        /// Number of matrices per head in the result. At least 1.
        snapshots: usize,
    } => { name: "ssm_scan", sources: 7 };

    /// Sine.
    Sin => { name: "sin", sources: 1, may_overwrite: &[0] };

    /// Cosine.
    Cos => { name: "cos", sources: 1, may_overwrite: &[0] };

    /// `x` where positive, else `slope * x`.
    LeakyRelu {
        /// Factor of negative elements.
        slope: f32,
    } => { name: "leaky_relu", sources: 1, may_overwrite: &[0] };

    /// Source 0 with source 1 added in a window. Both f32, source 0 contiguous.
    Acc {
        /// Byte strides of dimensions 1, 2 and 3 of the window.
        strides: [usize; DIMS - 1],
        /// Byte offset of the window.
        offset: usize,
    } => { name: "acc", sources: 2, may_overwrite: &[0] };

    /// Source 0 with a window replaced by source 1. Both f32 or both i32, source 0 contiguous.
    Set {
        /// Byte strides of dimensions 1, 2 and 3 of the window.
        strides: [usize; DIMS - 1],
        /// Byte offset of the window.
        offset: usize,
    } => { name: "set", sources: 2, may_overwrite: &[0] };

    /// Number of equal elements of source 0 and source 1 (both i32, of one shape): i64, one
    /// element.
    CountEqual => { name: "count_equal", sources: 2 };

    /// Adjacent channels (dimension 2) in groups, each shifted to mean 0 and scaled to unit
    /// variance. f32.
    GroupNorm {
        /// Number of groups. The last one may be smaller.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    } => { name: "group_norm", sources: 1 };

    /// A row `[n, 1, n2, n3]` as the diagonal of a matrix `[n, n, n2, n3]`, zeros elsewhere. f32.
    Diag => { name: "diag", sources: 1 };

    /// Zeros outside a triangle of square matrices. f32.
    Tri {
        /// The part that is kept.
        part: Triangle,
    } => { name: "tri", sources: 1, may_overwrite: &[0] };

    /// Input patches of a convolution, as rows: source 0 is the kernel, used only for its shape,
    /// `[kw, kh, c, _]`, source 1 the image `[w, h, c, n]`: `[c · kh · kw, ow, oh, n]`. In one
    /// dimension, kernel `[k, c, _]` and signal `[w, c, n]`: `[c · k, ow, n]`.
    Im2Col {
        /// Movement of the kernel.
        window: Window,
        /// True in two dimensions.
        planar: bool,
        /// Type of the result.
        dtype: DType,
    } => { name: "im2col", sources: 2 };

    /// The gradient of [`Im2Col`](Op::Im2Col): source 0 is the gradient of its result, source 1 the
    /// kernel: f32 `shape`.
    Im2ColBack {
        /// Value of the forward operation.
        window: Window,
        /// Value of the forward operation.
        planar: bool,
        /// Shape of the image.
        shape: Shape,
    } => { name: "im2col_back", sources: 2 };

    /// [`Im2Col`](Op::Im2Col) in three dimensions: kernel `[kw, kh, kd, _]`, volume `[w, h, d, c ·
    /// n]`: `[c · kd · kh · kw, ow, oh, od · n]`.
    Im2Col3d {
        /// Movement of the kernel.
        window: Window,
        /// Number of channels, `c`.
        channels: usize,
        /// Type of the result.
        dtype: DType,
    } => { name: "im2col_3d", sources: 2 };

    /// Sum of the columns of a transposed convolution: `[k · channels, t]`, channels outermost,
    /// gives `[(t - 1) · stride + k - 2 crop, channels]`.
    Col2Im1d {
        /// Distance between columns.
        stride: usize,
        /// Channels of the result.
        channels: usize,
        /// Number of elements removed at either end.
        crop: usize,
    } => { name: "col2im_1d", sources: 1 };

    /// Convolution of kernel `[kw, kh, c, o]` (source 0) over images `[w, h, c, n]` (source 1):
    /// `[ow, oh, o, n]`, f32.
    Conv2d {
        /// Movement of the kernel.
        window: Window,
    } => { name: "conv_2d", sources: 2 };

    /// Convolution in three dimensions: kernel `[kw, kh, kd, c · o]` over volumes f32 `[w, h, d, c
    /// · n]`: f32 `[ow, oh, od, o · n]`.
    Conv3d {
        /// Movement of the kernel.
        window: Window,
        /// Number of channels, `c`.
        channels: usize,
    } => { name: "conv_3d", sources: 2 };

    /// Convolution of each channel with its own kernel: kernel `[kw, kh, 1, c]`, images f32 `[w, h,
    /// c, n]`: f32 `[ow, oh, c, n]`.
    Conv2dDepthwise {
        /// Movement of the kernel.
        window: Window,
    } => { name: "conv_2d_dw", sources: 2 };

    /// Transposed convolution in one dimension: kernel `[k, o, c]`, signal f32 `[w, c]`: f32
    /// `[(w - 1) · stride + k, o]`.
    ConvTranspose1d {
        /// Distance between copies of the kernel.
        stride: usize,
    } => { name: "conv_transpose_1d", sources: 2 };

    /// Transposed convolution: kernel `[kw, kh, o, c]`, images f32 `[w, h, c, n]`: f32 `[(w - 1) ·
    /// stride + kw, (h - 1) · stride + kh, o, n]`.
    ConvTranspose2d {
        /// Distance between copies of the kernel.
        stride: usize,
    } => { name: "conv_transpose_2d", sources: 2 };

    /// Maximum or mean of each window, without the padding: f32 `[ow, n1, n2, n3]`.
    Pool1d {
        /// Reduction of a window.
        pool: Pool,
        /// Length of a window.
        kernel: usize,
        /// Distance between windows.
        stride: usize,
        /// Elements of padding before the first element.
        padding: usize,
    } => { name: "pool_1d", sources: 1 };

    /// Maximum of each window, or its sum over the window's area: f32 `[ow, oh, n2, n3]`.
    Pool2d {
        /// Reduction of a window.
        pool: Pool,
        /// Extents of a window.
        kernel: [usize; 2],
        /// Distances between windows.
        stride: [usize; 2],
        /// Elements of padding before the first element.
        padding: [usize; 2],
    } => { name: "pool_2d", sources: 1 };

    /// The gradient of [`Pool2d`](Op::Pool2d): source 0 is the gradient of its result, source 1 its
    /// operand: f32, with the shape of source 1. The gradient of a maximum goes to the first of
    /// equals.
    Pool2dBack {
        /// Value of the forward operation.
        pool: Pool,
        /// Value of the forward operation.
        kernel: [usize; 2],
        /// Value of the forward operation.
        stride: [usize; 2],
        /// Value of the forward operation.
        padding: [usize; 2],
    } => { name: "pool_2d_back", sources: 2 };

    /// Image f32 `[c, w, h]`, padded with zeros, in square windows, ordered by row of windows: f32
    /// `[c, size, size, windows]`.
    WinPart {
        /// Windows per row, and rows of windows.
        windows: [usize; 2],
        /// Extent of a window.
        size: usize,
    } => { name: "win_part", sources: 1 };

    /// Image joined from the windows of [`WinPart`](Op::WinPart), without the padding: f32.
    WinUnpart {
        /// Extent of a window.
        size: usize,
        /// Shape of the image, `[c, w, h, 1]`.
        shape: Shape,
    } => { name: "win_unpart", sources: 1 };

    /// Relative position embeddings f16 `[n, 2 l - 1]` of each pair of positions: row `(k, q)` of
    /// the result is row `l - 1 - k + q`: f16 `[n, l, l]`.
    GetRelPos => { name: "get_rel_pos", sources: 1 };

    /// Attention scores f32 `[l · l, w · h, batch]` (source 0) over an image of `l` by `l` keys,
    /// plus the scores of each key's column (source 1) and row (source 2), both f32 `[l, w, h,
    /// batch]`.
    AddRelPos => { name: "add_rel_pos", sources: 3, may_overwrite: &[0] };

    /// Source 0 scaled to `shape`. f32.
    Upscale {
        /// Interpolation between elements.
        interpolation: Interpolation,
        /// True if corners map to corners.
        align_corners: bool,
        /// True to average elements in bilinear downscaling.
        antialias: bool,
        /// Shape of the result.
        shape: Shape,
    } => { name: "upscale", sources: 1 };

    /// Source 0 padded with its elements from the opposite ends. f32.
    PadCircular {
        /// Elements before, by dimension.
        before: Shape,
        /// Elements after, by dimension.
        after: Shape,
    } => { name: "pad_circular", sources: 1 };

    /// Rows with their mirror images at both ends; the last element is not repeated. f32.
    PadReflect1d {
        /// Elements before.
        before: usize,
        /// Elements after.
        after: usize,
    } => { name: "pad_reflect_1d", sources: 1 };

    /// Elements shifted forward along each dimension, with wrap-around. f32.
    Roll {
        /// Shift, by dimension.
        shift: Shape,
    } => { name: "roll", sources: 1 };

    /// Cosines and sines with falling frequencies for each number of source 0 (f32 `[n]`): f32
    /// `[dim, n]`.
    TimestepEmbedding {
        /// Length of a row.
        dim: usize,
        /// Period of the lowest frequency.
        max_period: usize,
    } => { name: "timestep_embedding", sources: 1 };

    /// RWKV-6 recurrence ([Peng et al. 2024](https://arxiv.org/abs/2404.05892)) with a matrix state
    /// `S` per head. The output of a token is `(S + u k ⊗ v)ᵀ r`, then `S ← w S + k ⊗ v`. Sources,
    /// all f32 without gaps: 0 `k`, 1 `v`, 2 `r` `[d, heads, tokens]`, 3 `u` `[d, heads]`, 4 `w`
    /// `[d, heads, tokens]`, 5 the initial matrices `[d · d · heads, sequences]`. The result is f32
    /// `[d · heads, tokens + d · sequences]`: the outputs of the tokens, then the matrices.
    RwkvWkv6 => { name: "rwkv_wkv6", sources: 6 };

    /// RWKV-7 recurrence ([Peng et al. 2025](https://arxiv.org/abs/2503.14456)): `S ← S diag(w) +
    /// (S a) ⊗ b + v ⊗ k`. The output of a token is `S r`. Sources: 0 `r`, 1 `w`, 2 `k`, 3 `v`, 4
    /// `a`, 5 `b`, 6 the initial matrices. Types, shapes and result as in
    /// [`RwkvWkv6`](Op::RwkvWkv6).
    RwkvWkv7 => { name: "rwkv_wkv7", sources: 7 };

    /// Gated linear attention ([Yang et al. 2023](https://arxiv.org/abs/2312.06635)): `S ← g S + k
    /// ⊗ v`. The output of a token is `scale Sᵀ q`. Sources: 0 `k`, 1 `v`, 2 `q`, 3 `g`, 4 the
    /// initial matrices. Types, shapes and result as in [`RwkvWkv6`](Op::RwkvWkv6).
    GatedLinearAttn {
        /// Factor of the results.
        scale: f32,
    } => { name: "gated_linear_attn", sources: 5 };

    /// `A⁻¹ B` for lower triangular `A` (source 0, f32 `[n, n, n2, n3]`) and `B` (source 1, f32
    /// `[k, n, n2, n3]`).
    SolveTri => { name: "solve_tri", sources: 2 };

    /// Key scores for sparse attention: source 0 queries f32 `[d, heads, tokens, batch]`, source 1
    /// keys `[d, 1, kv, batch]`, source 2 head weights f32 `[heads, tokens, 1, batch]`, source 3
    /// mask f16 `[kv, tokens, 1, batch / y]`: f32 `[kv, tokens, 1, batch]`: the sum over heads of
    /// `weight · max(0, q · k)`, plus the mask.
    LightningIndexer => { name: "lightning_indexer", sources: 4 };

    /// Mixing matrices of DeepSeek-V4's 4 residual streams: source 0 f32 `[24, tokens]`, source 1
    /// factors f32 `[3]`, source 2 summands f32 `[24]`. A softmax and Sinkhorn iterations turn the
    /// last 16 rows into a doubly stochastic matrix for each token: f32 `[4, 4, tokens]`.
    HyperComb {
        /// Added to sums.
        eps: f32,
        /// Number of times that rows and columns are scaled.
        iterations: usize,
    } => { name: "dsv4_hc_comb", sources: 3 };

    /// Residual streams f32 `[n, streams, tokens]` (source 0) merged into one: `scale` times their
    /// sum with weights f32 `[streams, tokens]` or, if gated, with the sigmoid of `[n, streams,
    /// tokens]` (source 1): f32 `[n, tokens]`.
    HyperPre {
        /// Factor of the sum.
        scale: f32,
        /// True if each element has its own weight.
        gated: bool,
    } => { name: "dsv4_hc_pre", sources: 2 };

    /// Result f32 `[n, tokens]` (source 0) added to residual streams f32 `[n, streams, tokens]`
    /// (source 1). Each stream is the result times its factor in source 2, f32 `[streams, tokens]`,
    /// plus the streams mixed by optional source 3, f32 `[to, from, tokens]`, or plus itself
    /// without source 3.
    HyperPost => { name: "dsv4_hc_post", sources: 3, optional: 1 };

    /// Mask of sparse attention: the elements of source 0 (f32 or f16 `[kv, m1, m2, m3]`) that are
    /// selected, minus infinity elsewhere: `[kv, n1, n2, n3]`. Source 0 repeats over the rows of
    /// source 1, i32 `[k, n1, n2, n3]`, the picks of each row. Optional source 2: f32 `[picks, n1,
    /// n2, n3]`, where a pick with minus infinity or NaN counts for nothing. Optional source 3: i32
    /// `[b, picks]`, the cells of each pick, which is a cell itself otherwise. Optional source 4:
    /// i32 `[e, n1, n2, n3]`, more cells. Numbers out of range select nothing.
    TopKMask => { name: "top_k_mask", sources: 2, optional: 3 };

    /// Element-wise function.
    Unary(function: Unary) => { name: "unary", sources: 1, may_overwrite: &[0] };

    /// Gated linear unit: `f(x) * g`. With one source, `x` is the first half of each row and `g`
    /// the second. With two, source 0 is `x` and source 1 is `g`.
    Glu {
        /// The function.
        kind: Glu,
        /// True if the halves of a single source are swapped.
        swapped: bool,
    } => { name: "glu", sources: 1, optional: 1 };

    /// Gradient of [`Repeat`](Op::Repeat): sum of all elements of source 0 (f32) that came from one
    /// element of `shape`.
    RepeatBack {
        /// Shape of the result; each extent divides the source's.
        shape: Shape,
    } => { name: "repeat_back", sources: 1 };

    /// The gradient of [`Unary::Silu`]: source 0 is the gradient of its result, source 1 its
    /// operand. Both f32.
    SiluBack => { name: "silu_back", sources: 2, may_overwrite: &[0, 1] };

    /// The gradient of [`RmsNorm`](Op::RmsNorm): source 0 is the gradient of its result, source 1
    /// its operand. Both f32.
    RmsNormBack {
        /// Value of the forward operation.
        eps: f32,
    } => { name: "rms_norm_back", sources: 2, may_overwrite: &[0] };

    /// The gradient of [`SoftMax`](Op::SoftMax) without sinks: source 0 is the gradient of its
    /// result, source 1 that result. Both f32.
    SoftMaxBack {
        /// Value of the forward operation.
        scale: f32,
    } => { name: "soft_max_back", sources: 2, may_overwrite: &[0] };

    /// The gradients of [`FlashAttn`](Op::FlashAttn) without ALiBi, softcap and sinks: source 0 is
    /// the gradient of its result, sources 1 to 3 are queries, keys and values, all f32, optional
    /// source 4 is the mask. The result is one row, f32: the gradients of queries, then of keys,
    /// then of values, each ordered like the result of attention, `[size, heads, tokens, batch]`.
    FlashAttnBack {
        /// Value of the forward operation.
        scale: f32,
    } => { name: "flash_attn_back", sources: 4, optional: 1 };

    /// The gradient of [`Rope`](Op::Rope), which rotates in the opposite direction. The gradient of
    /// the result comes first, then Rope's sources.
    RopeBack(rope: Rope) => { name: "rope_back", sources: 2, optional: 1, may_overwrite: &[0] };

    /// The gradient of [`GetRows`](Op::GetRows) of a matrix: source 0 is the gradient of its
    /// result, f32 or f16 `[n0, r]`, source 1 the row numbers, i32 `[r]`. Gradients of equal rows
    /// add up: f32 `[n0, rows]`.
    GetRowsBack {
        /// Rows of the table.
        rows: usize,
    } => { name: "get_rows_back", sources: 2 };

    /// `-sum(labels · log(softmax(logits))) / rows`, as one element: source 0 logits f32, source 1
    /// the target probabilities, f32, of the same shape.
    CrossEntropyLoss => { name: "cross_entropy_loss", sources: 2 };

    /// The gradient of [`CrossEntropyLoss`](Op::CrossEntropyLoss) with respect to the logits, for
    /// rows of labels that sum to 1: source 0 is the gradient of the loss, one element, source 1
    /// the logits, source 2 the labels. All f32.
    CrossEntropyLossBack => { name: "cross_entropy_loss_back", sources: 3 };

    /// AdamW step ([Loshchilov and Hutter 2019](https://arxiv.org/abs/1711.05101)): source 0 the
    /// weights, source 1 their gradient, source 2 and 3 the running means of the gradient and of
    /// its square, all f32 of one shape without gaps. Source 4 holds seven numbers, f32: learning
    /// rate, `beta1`, `beta2`, eps, weight decay, and the bias corrections `1 / (1 - beta1^step)`
    /// and `1 / (1 - beta2^step)`. Updates weights and means in place. The result is a view of the
    /// weights.
    OptStepAdamW => { name: "opt_step_adamw", sources: 5, result_in: Some(0), writes: &[0, 2, 3] };

    /// Gradient descent step: source 0 the weights, source 1 their gradient, both f32 of one shape
    /// without gaps, source 2 the learning rate and the weight decay, f32. Updates the weights in
    /// place. The result is a view of them.
    OptStepSgd => { name: "opt_step_sgd", sources: 3, result_in: Some(0), writes: &[0] };
}
