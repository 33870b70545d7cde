//! The table of operations, one entry each.
//!
//! An entry has a description, parameters, and the [facts](super::Facts) that hold whatever its operands are. The rules for
//! operands are in [`infer`](crate::infer).

use super::parameter::{Bits, Parameter};
use super::{Facts, Glu, Interpolation, Pool, Precision, Rope, SortOrder, Triangle, Unary, Window};
use crate::dtype::DType;
use crate::layout::{DIMS, Shape};
use serde::{Deserialize, Serialize};

/// Makes of the table: the types [`Op`] and [`OpKind`], how parameters are written, compared and listed, and the facts of each kind.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $kind:ident $(($whole:ident: $whole_type:ty))? $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })?
            => { name: $name:literal, sources: $sources:literal $(, $fact:ident: $value:expr)* };
    )*) => {
        /// The operation that computes a tensor.
        ///
        /// Sources are numbered as in ggml; *optional* ones may be absent. `n0` to `n3` are the extents of source 0.
        /// [`infer`](crate::infer) holds the exact rules for shapes and types.
        ///
        /// Two operations are equal if they have the same parameters bit by bit: -0 is not 0, and a NaN is itself.
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

            pub(super) fn facts(self) -> &'static Facts {
                const FACTS: &[Facts] = &[
                    $(Facts { name: $name, sources: $sources, $($fact: $value,)* ..Facts::USUAL },)*
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
            /// The operation without its parameters.
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
    /// A leaf: an input, a weight, a cache. No sources.
    Leaf => { name: "none", sources: 0 };

    /// Same elements in new memory. With quantized types, blocks are copied.
    Dup => { name: "dup", sources: 1 };

    /// Source 0 plus source 1; source 1 repeats to the shape of source 0.
    Add => { name: "add", sources: 2, may_overwrite: &[0, 1] };

    /// Source 0 `[n0, experts used, tokens]` plus those rows of source 1 `[n0, experts]` that source 2 (i32
    /// `[experts used, tokens]`) names.
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
        /// Smallest divisor.
        eps: f32,
    } => { name: "l2_norm", sources: 1 };

    /// Matrix product: source 0 `[k, m, a, b]` (weights) with source 1 `[k, n, a·x, b·y]` gives f32
    /// `[m, n, a·x, b·y]`: element `(i, j)` is the dot product of row `i` of source 0 and row `j` of source 1.
    MulMat {
        /// Least precision of the accumulation.
        precision: Precision,
    } => { name: "mul_mat", sources: 2 };

    /// Sum of outer products: source 0 `[m, k, a, b]` and source 1 f32 `[n, k, a·x, b·y]` give f32 `[m, n, a·x, b·y]`:
    /// element `(i, j)` is the sum over all `k` of `(i, k)` of source 0 times `(j, k)` of source 1. Both gradients of a
    /// matrix product are of this kind.
    OutProd => { name: "out_prod", sources: 2 };

    /// Matrix products with chosen experts: source 0 `[k, m, experts]`, source 1 f32 `[k, 1 or used, tokens]`,
    /// source 2 i32 `[used, tokens]`: f32 `[m, used, tokens]`.
    MulMatId {
        /// Least precision of the accumulation.
        precision: Precision,
    } => { name: "mul_mat_id", sources: 3 };

    /// Source 0 converted into the memory of source 1, which the result is a view of. Same number of elements.
    Cpy => { name: "cpy", sources: 2, result_in: Some(1), writes: &[1] };

    /// Source 0 converted to another type.
    Cast {
        /// Type of the result.
        dtype: DType,
    } => { name: "cast", sources: 1 };

    /// Source 0 without gaps.
    Cont => { name: "cont", sources: 1 };

    /// The same memory with another shape. Source 0 is contiguous.
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

    /// The same memory with dimensions exchanged: source dimension `i` becomes dimension `axes[i]`.
    Permute {
        /// Where each dimension goes.
        axes: [usize; DIMS],
    } => { name: "permute", sources: 1, is_view: true, result_in: Some(0) };

    /// Dimensions 0 and 1 exchanged.
    Transpose => { name: "transpose", sources: 1, is_view: true, result_in: Some(0) };

    /// Rows of source 0 `[n0, n1, n2, n3]` named by source 1 (i32 `[r, n2, n3]`), decoded to f32 (i32 stays):
    /// `[n0, r, n2, n3]`.
    GetRows => { name: "get_rows", sources: 2 };

    /// Writes the rows of source 0 (f32 or f16 `[n0, r, n2, n3]`) to the rows of source 2 that source 1 (i64 or i32
    /// `[r, n2/x, n3/y]`) names. The result is a view of source 2.
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

    /// `softmax(scale * x + slope(head) * mask)` along each row. Optional source 1: mask, f32 or f16
    /// `[n0, ≥ n1, n2/x, n3/y]`. Optional source 2: sinks, f32 `[n2]`: one more logit per head in the denominator.
    SoftMax {
        /// Factor of the logits.
        scale: f32,
        /// Largest ALiBi bias; 0 for slopes of 1.
        max_bias: f32,
    } => { name: "soft_max", sources: 1, optional: 2, may_overwrite: &[0] };

    /// Rotary position embedding of source 0 `[head size, heads, tokens, n3]` at the positions of source 1 (i32
    /// `[tokens]`, with [sections](crate::RopeMode) `[4 tokens]`, one axis behind the other). Optional source 2: frequency divisors, f32 `[≥ pairs]`.
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
        /// Zeros behind, by dimension.
        after: Shape,
    } => { name: "pad", sources: 1 };

    /// `start, start + step, …` up to but without `stop`: f32. No sources.
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

    /// Indices of the `k` largest elements of each row, in no particular order: i32 `[k, n1, n2, n3]`.
    TopK {
        /// How many.
        k: usize,
    } => { name: "top_k", sources: 1 };

    /// A tensor of the shape of source 0 with every element `value`.
    Fill {
        /// The value.
        value: f32,
    } => { name: "fill", sources: 1, may_overwrite: &[0] };

    /// Attention in one step: source 0 queries f32 `[d, tokens, heads, batch]`, source 1 keys `[d, kv, kv heads,
    /// batch]`, source 2 values `[dv, kv, kv heads, batch]`, optional source 3 mask f16 `[kv, ≥ tokens, heads/x, batch/y]`,
    /// optional source 4 sinks f32 `[heads]`: f32 `[dv, heads, tokens, batch]`.
    FlashAttn {
        /// Factor of the logits.
        scale: f32,
        /// Largest ALiBi bias; 0 for slopes of 1.
        max_bias: f32,
        /// If not 0, logits become `softcap * tanh(logit / softcap)`.
        softcap: f32,
        /// Least precision of the accumulation.
        precision: Precision,
    } => { name: "flash_attn_ext", sources: 3, optional: 2 };

    /// A convolution over time, channel by channel: source 0 f32 `[width - 1 + tokens, channels, sequences]`, whose rows begin with what
    /// came before the first token, and source 1 f32 `[width, channels]`: f32 `[channels, tokens, sequences]`.
    SsmConv => { name: "ssm_conv", sources: 2 };

    /// The gated delta rule ([Yang et al. 2024](https://arxiv.org/abs/2412.06464)): for each head, a matrix `S` that every token
    /// changes: `S ← exp(g) S`, `S ← S + k ⊗ beta (v - Sᵀk)`; what it gives is `Sᵀq / sqrt(d)`.
    ///
    /// Sources, all f32: 0 queries and 1 keys `[d, heads / x, tokens, sequences / y]`, 2 values `[d, heads, tokens, sequences]`, 3
    /// logarithms of decays `[1 or d, heads, tokens, sequences]`, 4 betas `[1, heads, tokens, sequences]`, 5 the transposed matrices at the beginning,
    /// `[d, d, heads, sequences]`. The result is f32 `[d · heads, tokens · sequences + snapshots · d · sequences]`: what all tokens get,
    /// `[d, heads, tokens, sequences]`, then matrices, `[d, d, heads, sequences]` each: those at the end, one token before it, and so on. Before
    /// the first token, they are those of source 5.
    GatedDeltaNet {
        /// How many matrices the result has of each head; at least 1.
        snapshots: usize,
    } => { name: "gated_delta_net", sources: 6 };

    /// A selective state space ([Gu & Dao 2023](https://arxiv.org/abs/2312.00752), [Dao & Gu 2024](https://arxiv.org/abs/2405.21060)): for each head, a
    /// matrix `S` that every token changes: `S ← exp(Δ A) S + Δ x ⊗ B`, where `Δ = softplus(dt)`; what it gives is `S C`.
    ///
    /// Sources: 0 matrices f32 `[n, d, heads, rows]`, 1 x f32 `[d, heads, tokens, sequences]`, 2 dt f32 `[heads, tokens, sequences]`, 3 A f32 `[1 or n, heads]`,
    /// 4 B and 5 C f32 `[n, groups, tokens, sequences]`, where as many heads as there are of each group share one, neighbours; 6 the row of source 0 that
    /// each sequence begins with, i32 `[sequences]`. The result is f32 `[d · heads · tokens · sequences + snapshots · n · d · heads · sequences]`: what
    /// all tokens get, `[d, heads, tokens, sequences]`, then matrices, `[n, d, heads, sequences]` each: those at the end, one token before it, and so on.
    /// Before the first token, they are those of source 0.
    SsmScan {
        /// How many matrices the result has of each head; at least 1.
        snapshots: usize,
    } => { name: "ssm_scan", sources: 7 };

    /// Sine.
    Sin => { name: "sin", sources: 1, may_overwrite: &[0] };

    /// Cosine.
    Cos => { name: "cos", sources: 1, may_overwrite: &[0] };

    /// `x` where positive, else `slope * x`.
    LeakyRelu {
        /// Factor of what is negative.
        slope: f32,
    } => { name: "leaky_relu", sources: 1, may_overwrite: &[0] };

    /// Source 0 with source 1 added in a window. Both f32, source 0 contiguous.
    Acc {
        /// Byte strides of dimensions 1, 2 and 3 of the window.
        strides: [usize; DIMS - 1],
        /// Byte offset of the window.
        offset: usize,
    } => { name: "acc", sources: 2, may_overwrite: &[0] };

    /// Source 0 with source 1 in place of a window. Both f32 or both i32, source 0 contiguous.
    Set {
        /// Byte strides of dimensions 1, 2 and 3 of the window.
        strides: [usize; DIMS - 1],
        /// Byte offset of the window.
        offset: usize,
    } => { name: "set", sources: 2, may_overwrite: &[0] };

    /// How many elements of source 0 and source 1 (both i32, of one shape) are equal: i64, one element.
    CountEqual => { name: "count_equal", sources: 2 };

    /// Neighbouring channels (dimension 2) in groups, each shifted to mean 0 and scaled to variance 1. f32.
    GroupNorm {
        /// How many groups. The last one may be smaller.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    } => { name: "group_norm", sources: 1 };

    /// A row `[n, 1, n2, n3]` as the diagonal of a matrix `[n, n, n2, n3]`, zeros elsewhere. f32.
    Diag => { name: "diag", sources: 1 };

    /// Zeros outside of a triangle of square matrices. f32.
    Tri {
        /// What stays.
        part: Triangle,
    } => { name: "tri", sources: 1, may_overwrite: &[0] };

    /// The patches that a convolution sees, as rows: source 0 is its kernel, of which only the shape matters, `[kw, kh, c, _]`, source 1 the image
    /// `[w, h, c, n]`: `[c · kh · kw, ow, oh, n]`. In one dimension, kernel `[k, c, _]` and signal `[w, c, n]`: `[c · k, ow, n]`.
    Im2Col {
        /// How the kernel moves.
        window: Window,
        /// Whether there are two dimensions.
        planar: bool,
        /// Type of the result.
        dtype: DType,
    } => { name: "im2col", sources: 2 };

    /// The gradient of [`Im2Col`](Op::Im2Col): source 0 is the gradient of its result, source 1 the kernel: f32 `shape`.
    Im2ColBack {
        /// As in the forward operation.
        window: Window,
        /// As in the forward operation.
        planar: bool,
        /// Shape of the image.
        shape: Shape,
    } => { name: "im2col_back", sources: 2 };

    /// [`Im2Col`](Op::Im2Col) in three dimensions: kernel `[kw, kh, kd, _]`, volume `[w, h, d, c · n]`: `[c · kd · kh · kw, ow, oh, od · n]`.
    Im2Col3d {
        /// How the kernel moves.
        window: Window,
        /// `c`
        channels: usize,
        /// Type of the result.
        dtype: DType,
    } => { name: "im2col_3d", sources: 2 };

    /// Columns of a transposed convolution put together: `[k · channels, t]`, channels outermost, gives `[(t - 1) · stride + k - 2 crop, channels]`.
    Col2Im1d {
        /// Distance between columns.
        stride: usize,
        /// Channels of the result.
        channels: usize,
        /// How much is cut off at either end.
        crop: usize,
    } => { name: "col2im_1d", sources: 1 };

    /// A convolution: kernel `[kw, kh, c, o]` (source 0) over images `[w, h, c, n]` (source 1): `[ow, oh, o, n]`, f32.
    Conv2d {
        /// How the kernel moves.
        window: Window,
    } => { name: "conv_2d", sources: 2 };

    /// A convolution in three dimensions: kernel `[kw, kh, kd, c · o]` over volumes f32 `[w, h, d, c · n]`: f32 `[ow, oh, od, o · n]`.
    Conv3d {
        /// How the kernel moves.
        window: Window,
        /// `c`
        channels: usize,
    } => { name: "conv_3d", sources: 2 };

    /// A convolution of each channel with a kernel of its own: kernel `[kw, kh, 1, c]`, images f32 `[w, h, c, n]`: f32 `[ow, oh, c, n]`.
    Conv2dDepthwise {
        /// How the kernel moves.
        window: Window,
    } => { name: "conv_2d_dw", sources: 2 };

    /// A transposed convolution in one dimension: kernel `[k, o, c]`, signal f32 `[w, c]`: f32 `[(w - 1) · stride + k, o]`.
    ConvTranspose1d {
        /// Distance between copies of the kernel.
        stride: usize,
    } => { name: "conv_transpose_1d", sources: 2 };

    /// A transposed convolution: kernel `[kw, kh, o, c]`, images f32 `[w, h, c, n]`: f32 `[(w - 1) · stride + kw, (h - 1) · stride + kh, o, n]`.
    ConvTranspose2d {
        /// Distance between copies of the kernel.
        stride: usize,
    } => { name: "conv_transpose_2d", sources: 2 };

    /// The largest or the mean of those elements of each window that there are: f32 `[ow, n1, n2, n3]`.
    Pool1d {
        /// What of a window.
        pool: Pool,
        /// Length of a window.
        kernel: usize,
        /// Distance between windows.
        stride: usize,
        /// How far the first window begins before the first element.
        padding: usize,
    } => { name: "pool_1d", sources: 1 };

    /// The largest of each window, or its sum over the window's area: f32 `[ow, oh, n2, n3]`.
    Pool2d {
        /// What of a window.
        pool: Pool,
        /// Extents of a window.
        kernel: [usize; 2],
        /// Distances between windows.
        stride: [usize; 2],
        /// How far the first window begins before the first element.
        padding: [usize; 2],
    } => { name: "pool_2d", sources: 1 };

    /// Source 0 scaled to `shape`. f32.
    Upscale {
        /// How elements between others come about.
        interpolation: Interpolation,
        /// Corners stay corners.
        align_corners: bool,
        /// Bilinear: elements that are further apart than those of the result are averaged.
        antialias: bool,
        /// Shape of the result.
        shape: Shape,
    } => { name: "upscale", sources: 1 };

    /// Source 0 with what is at its other ends around it. f32.
    PadCircular {
        /// Elements before, by dimension.
        before: Shape,
        /// Elements behind, by dimension.
        after: Shape,
    } => { name: "pad_circular", sources: 1 };

    /// Rows with their mirror images at both ends; the last element is not repeated. f32.
    PadReflect1d {
        /// Elements before.
        before: usize,
        /// Elements behind.
        after: usize,
    } => { name: "pad_reflect_1d", sources: 1 };

    /// Elements moved forward along each dimension; what falls off one end comes in at the other. f32.
    Roll {
        /// How far, by dimension.
        shift: Shape,
    } => { name: "roll", sources: 1 };

    /// For each number of source 0 (f32 `[n]`) its cosines and sines with falling frequencies: f32 `[dim, n]`.
    TimestepEmbedding {
        /// Length of a row.
        dim: usize,
        /// Of the slowest one.
        max_period: usize,
    } => { name: "timestep_embedding", sources: 1 };

    /// The recurrence of RWKV-6 ([Peng et al. 2024](https://arxiv.org/abs/2404.05892)): for each head a matrix `S`; each token gives
    /// `(S + u k ⊗ v)ᵀ r`, and `S ← w S + k ⊗ v`. Sources, all f32 without gaps: 0 `k`, 1 `v`, 2 `r` `[d, heads, tokens]`, 3 `u` `[d, heads]`, 4 `w`
    /// `[d, heads, tokens]`, 5 the matrices at the beginning `[d · d · heads, sequences]`. f32 `[d · heads, tokens + d · sequences]`: what tokens get, then the matrices.
    RwkvWkv6 => { name: "rwkv_wkv6", sources: 6 };

    /// The recurrence of RWKV-7 ([Peng et al. 2025](https://arxiv.org/abs/2503.14456)): `S ← S diag(w) + (S a) ⊗ b + v ⊗ k`; each token gives `S r`. Sources: 0 `r`, 1 `w`,
    /// 2 `k`, 3 `v`, 4 `a`, 5 `b`, 6 the matrices at the beginning; types, shapes and result as in [`RwkvWkv6`](Op::RwkvWkv6).
    RwkvWkv7 => { name: "rwkv_wkv7", sources: 7 };

    /// Gated linear attention ([Yang et al. 2023](https://arxiv.org/abs/2312.06635)): `S ← g S + k ⊗ v`; each token gives `scale Sᵀ q`. Sources: 0 `k`, 1 `v`, 2 `q`, 3 `g`, 4 the
    /// matrices at the beginning; types, shapes and result as in [`RwkvWkv6`](Op::RwkvWkv6).
    GatedLinearAttn {
        /// Factor of the results.
        scale: f32,
    } => { name: "gated_linear_attn", sources: 5 };

    /// `A⁻¹ B` for lower triangular `A` (source 0, f32 `[n, n, n2, n3]`) and `B` (source 1, f32 `[k, n, n2, n3]`).
    SolveTri => { name: "solve_tri", sources: 2 };

    /// Scores of keys for sparse attention: source 0 queries f32 `[d, heads, tokens, batch]`, source 1 keys `[d, 1, kv, batch]`, source 2 weights of heads f32
    /// `[heads, tokens, 1, batch]`, source 3 mask f16 `[kv, tokens, 1, batch / y]`: f32 `[kv, tokens, 1, batch]`: the sum over heads of `weight · max(0, q · k)`, plus the mask.
    LightningIndexer => { name: "lightning_indexer", sources: 4 };

    /// How DeepSeek-V4 mixes 4 residual streams: source 0 f32 `[24, tokens]`, source 1 factors f32 `[3]`, source 2 summands f32 `[24]`. Of their last 16 rows, a softmax and
    /// then Sinkhorn's iterations make a doubly stochastic matrix for each token: f32 `[4, 4, tokens]`.
    HyperComb {
        /// Added to sums.
        eps: f32,
        /// How often rows and columns are scaled.
        iterations: usize,
    } => { name: "dsv4_hc_comb", sources: 3 };

    /// Residual streams f32 `[n, streams, tokens]` (source 0) as one: `scale` times the sum of them with weights f32 `[streams, tokens]` or, gated, with the
    /// sigmoid of `[n, streams, tokens]` (source 1): f32 `[n, tokens]`.
    HyperPre {
        /// Factor of the sum.
        scale: f32,
        /// Whether each element has its own weight.
        gated: bool,
    } => { name: "dsv4_hc_pre", sources: 2 };

    /// A result f32 `[n, tokens]` (source 0) back in residual streams f32 `[n, streams, tokens]` (source 1): each gets it with its factor of source 2, f32 `[streams, tokens]`, plus the
    /// streams mixed by optional source 3, f32 `[to, from, tokens]`; without that, plus itself.
    HyperPost => { name: "dsv4_hc_post", sources: 3, optional: 1 };

    /// A function of each element.
    Unary(function: Unary) => { name: "unary", sources: 1, may_overwrite: &[0] };

    /// A gated linear unit: `f(x) * g`. With one source, `x` is the first half of each row and `g` the second; with
    /// two, source 0 is `x` and source 1 is `g`.
    Glu {
        /// The function.
        kind: Glu,
        /// With one source: the halves are exchanged.
        swapped: bool,
    } => { name: "glu", sources: 1, optional: 1 };

    /// The gradient of [`Repeat`](Op::Repeat): all parts of source 0 (f32) that came from one element of `shape`, summed.
    RepeatBack {
        /// Shape of the result; each extent divides the source's.
        shape: Shape,
    } => { name: "repeat_back", sources: 1 };

    /// The gradient of [`Unary::Silu`]: source 0 is the gradient of its result, source 1 its operand. Both f32.
    SiluBack => { name: "silu_back", sources: 2, may_overwrite: &[0, 1] };

    /// The gradient of [`RmsNorm`](Op::RmsNorm): source 0 is the gradient of its result, source 1 its operand. Both f32.
    RmsNormBack {
        /// As in the forward operation.
        eps: f32,
    } => { name: "rms_norm_back", sources: 2, may_overwrite: &[0] };

    /// The gradient of [`SoftMax`](Op::SoftMax) without sinks: source 0 is the gradient of its result, source 1 that result.
    /// Both f32.
    SoftMaxBack {
        /// As in the forward operation.
        scale: f32,
    } => { name: "soft_max_back", sources: 2, may_overwrite: &[0] };

    /// The gradients of [`FlashAttn`](Op::FlashAttn) without ALiBi, softcap and sinks: source 0 is the gradient of its result, sources 1 to 3 are
    /// queries, keys and values, all f32, optional source 4 is the mask. The result is one row, f32: the gradients of
    /// queries, then of keys, then of values, each ordered like the result of attention, `[size, heads, tokens, batch]`.
    FlashAttnBack {
        /// As in the forward operation.
        scale: f32,
    } => { name: "flash_attn_back", sources: 4, optional: 1 };

    /// The gradient of [`Rope`](Op::Rope), which turns the other way: sources as there, with the gradient of the result first.
    RopeBack(rope: Rope) => { name: "rope_back", sources: 2, optional: 1, may_overwrite: &[0] };

    /// The gradient of [`GetRows`](Op::GetRows) of a matrix: source 0 is the gradient of its result, f32 or f16 `[n0, r]`, source 1
    /// the row numbers, i32 `[r]`. Gradients of equal rows add up: f32 `[n0, rows]`.
    GetRowsBack {
        /// Rows of the table.
        rows: usize,
    } => { name: "get_rows_back", sources: 2 };

    /// `-sum(labels · log(softmax(logits))) / rows`, as one element: source 0 logits f32, source 1 the probabilities that they
    /// should have, f32, of the same shape.
    CrossEntropyLoss => { name: "cross_entropy_loss", sources: 2 };

    /// The gradient of [`CrossEntropyLoss`](Op::CrossEntropyLoss) with respect to the logits, for rows of labels that sum to 1:
    /// source 0 is the gradient of the loss, one element, source 1 the logits, source 2 the labels. All f32.
    CrossEntropyLossBack => { name: "cross_entropy_loss_back", sources: 3 };

    /// A step of AdamW ([Loshchilov and Hutter 2019](https://arxiv.org/abs/1711.05101)): source 0 the weights, source 1 their
    /// gradient, source 2 and 3 the running means of the gradient and of its square, all f32 of one shape without gaps.
    /// Source 4 holds seven numbers, f32: learning rate, `beta1`, `beta2`, eps, weight decay, and the bias corrections
    /// `1 / (1 - beta1^step)` and `1 / (1 - beta2^step)`. Weights and means are changed in place; the result is a view of the weights.
    OptStepAdamW => { name: "opt_step_adamw", sources: 5, result_in: Some(0), writes: &[0, 2, 3] };

    /// A step of gradient descent: source 0 the weights, source 1 their gradient, both f32 of one shape without gaps; source
    /// 2 the learning rate and the weight decay, f32. The weights are changed in place; the result is a view of them.
    OptStepSgd => { name: "opt_step_sgd", sources: 3, result_in: Some(0), writes: &[0] };
}
