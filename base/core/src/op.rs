//! Operations: what a node computes, with typed parameters. The meaning of each is ggml's.

use crate::dtype::DType;
use crate::layout::{DIMS, Shape};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a tensor is computed by.
///
/// Sources are numbered as in ggml; *optional* ones may be absent. `n0` to `n3` are the extents of source 0.
/// [`infer`](crate::infer) holds the exact rules for shapes and types.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Op {
    /// A leaf: an input, a weight, a cache. No sources.
    Leaf,
    /// Same elements in new memory. With quantized types, blocks are copied.
    Dup,
    /// Source 0 plus source 1; source 1 repeats to the shape of source 0.
    Add,
    /// Source 0 `[n0, experts used, tokens]` plus those rows of source 1 `[n0, experts]` that source 2 (i32
    /// `[experts used, tokens]`) names.
    AddId,
    /// Source 0 minus source 1; source 1 repeats to the shape of source 0.
    Sub,
    /// Source 0 times source 1, element by element; source 1 repeats to the shape of source 0.
    Mul,
    /// Source 0 divided by source 1; source 1 repeats to the shape of source 0.
    Div,
    /// `scale * x + bias`.
    Scale {
        /// Factor.
        #[serde(with = "crate::exact")]
        scale: f32,
        /// Summand.
        #[serde(with = "crate::exact")]
        bias: f32,
    },
    /// Square.
    Sqr,
    /// Square root.
    Sqrt,
    /// Natural logarithm.
    Log,
    /// Sum of all elements, as one element.
    Sum,
    /// Sum of each row: `[1, n1, n2, n3]`.
    SumRows,
    /// Mean of each row: `[1, n1, n2, n3]`.
    Mean,
    /// Running sum along each row.
    CumSum,
    /// Index of the largest element of each row of a matrix, the first of equals: i32 `[n1]`.
    ArgMax,
    /// Source 0 repeated to `shape`.
    Repeat {
        /// Shape of the result; each extent a multiple of the source's.
        shape: Shape,
    },
    /// Source 0 followed by source 1 along `dim`.
    Concat {
        /// Dimension along which extents add up.
        dim: usize,
    },
    /// Each row shifted to mean 0 and scaled to variance 1: `(x - mean) / sqrt(variance + eps)`.
    Norm {
        /// Added to the variance.
        #[serde(with = "crate::exact")]
        eps: f32,
    },
    /// Each row divided by `sqrt(mean(x²) + eps)`.
    RmsNorm {
        /// Added to the mean of squares.
        #[serde(with = "crate::exact")]
        eps: f32,
    },
    /// Each row divided by `max(sqrt(sum(x²)), eps)`.
    L2Norm {
        /// Smallest divisor.
        #[serde(with = "crate::exact")]
        eps: f32,
    },
    /// Matrix product: source 0 `[k, m, a, b]` (weights) with source 1 `[k, n, a·x, b·y]` gives f32
    /// `[m, n, a·x, b·y]`: element `(i, j)` is the dot product of row `i` of source 0 and row `j` of source 1.
    MulMat {
        /// Least precision of the accumulation.
        precision: Precision,
    },
    /// Sum of outer products: source 0 `[m, k, a, b]` and source 1 f32 `[n, k, a·x, b·y]` give f32 `[m, n, a·x, b·y]`:
    /// element `(i, j)` is the sum over all `k` of `(i, k)` of source 0 times `(j, k)` of source 1. Both gradients of a
    /// matrix product are of this kind.
    OutProd,
    /// Matrix products with chosen experts: source 0 `[k, m, experts]`, source 1 f32 `[k, 1 or used, tokens]`,
    /// source 2 i32 `[used, tokens]`: f32 `[m, used, tokens]`.
    MulMatId {
        /// Least precision of the accumulation.
        precision: Precision,
    },
    /// Source 0 converted into the memory of source 1, which the result is a view of. Same number of elements.
    Cpy,
    /// Source 0 converted to another type.
    Cast {
        /// Type of the result.
        dtype: DType,
    },
    /// Source 0 without gaps.
    Cont,
    /// The same memory with another shape. Source 0 is contiguous.
    Reshape {
        /// Shape of the result, with as many elements as the source.
        shape: Shape,
    },
    /// A window into the memory of source 0.
    View {
        /// Shape of the window.
        shape: Shape,
        /// Byte strides of dimensions 1, 2 and 3; that of dimension 0 is the type's size.
        strides: [usize; DIMS - 1],
        /// Byte offset of the first element in source 0.
        offset: usize,
    },
    /// The same memory with dimensions exchanged: source dimension `i` becomes dimension `axes[i]`.
    Permute {
        /// Where each dimension goes.
        axes: [usize; DIMS],
    },
    /// Dimensions 0 and 1 exchanged.
    Transpose,
    /// Rows of source 0 `[n0, n1, n2, n3]` named by source 1 (i32 `[r, n2, n3]`), decoded to f32 (i32 stays):
    /// `[n0, r, n2, n3]`.
    GetRows,
    /// Writes the rows of source 0 (f32 or f16 `[n0, r, n2, n3]`) to the rows of source 2 that source 1 (i64 or i32
    /// `[r, n2/x, n3/y]`) names. The result is a view of source 2.
    SetRows,
    /// Elements right of the diagonal, `i0 > past + i1`, become minus infinity.
    DiagMaskInf {
        /// Columns left of the first row's diagonal.
        past: usize,
    },
    /// Elements right of the diagonal, `i0 > past + i1`, become 0.
    DiagMaskZero {
        /// Columns left of the first row's diagonal.
        past: usize,
    },
    /// `softmax(scale * x + slope(head) * mask)` along each row. Optional source 1: mask, f32 or f16
    /// `[n0, ≥ n1, n2/x, n3/y]`. Optional source 2: sinks, f32 `[n2]`: one more logit per head in the denominator.
    SoftMax {
        /// Factor of the logits.
        #[serde(with = "crate::exact")]
        scale: f32,
        /// Largest ALiBi bias; 0 for slopes of 1.
        #[serde(with = "crate::exact")]
        max_bias: f32,
    },
    /// Rotary position embedding of source 0 `[head size, heads, tokens, n3]` at the positions of source 1 (i32
    /// `[tokens]`). Optional source 2: frequency divisors, f32 `[≥ dims/2]`.
    Rope(Rope),
    /// Elements limited to `min..=max`.
    Clamp {
        /// Lower limit.
        #[serde(with = "crate::exact")]
        min: f32,
        /// Upper limit.
        #[serde(with = "crate::exact")]
        max: f32,
    },
    /// Zeros around source 0.
    Pad {
        /// Zeros before, by dimension.
        before: Shape,
        /// Zeros behind, by dimension.
        after: Shape,
    },
    /// `start, start + step, …` up to but without `stop`: f32. No sources.
    Arange {
        /// First value.
        #[serde(with = "crate::exact")]
        start: f32,
        /// End, exclusive.
        #[serde(with = "crate::exact")]
        stop: f32,
        /// Distance.
        #[serde(with = "crate::exact")]
        step: f32,
    },
    /// Indices that sort each row: i32. The order of equal elements is not specified.
    ArgSort {
        /// Direction.
        order: SortOrder,
    },
    /// Indices of the `k` largest elements of each row, in no particular order: i32 `[k, n1, n2, n3]`.
    TopK {
        /// How many.
        k: usize,
    },
    /// A tensor of the shape of source 0 with every element `value`.
    Fill {
        /// The value.
        #[serde(with = "crate::exact")]
        value: f32,
    },
    /// Attention in one step: source 0 queries f32 `[d, tokens, heads, batch]`, source 1 keys `[d, kv, kv heads,
    /// batch]`, source 2 values `[dv, kv, kv heads, batch]`, optional source 3 mask f16 `[kv, ≥ tokens, heads/x, batch/y]`,
    /// optional source 4 sinks f32 `[heads]`: f32 `[dv, heads, tokens, batch]`.
    FlashAttn {
        /// Factor of the logits.
        #[serde(with = "crate::exact")]
        scale: f32,
        /// Largest ALiBi bias; 0 for slopes of 1.
        #[serde(with = "crate::exact")]
        max_bias: f32,
        /// If not 0, logits become `softcap * tanh(logit / softcap)`.
        #[serde(with = "crate::exact")]
        softcap: f32,
        /// Least precision of the accumulation.
        precision: Precision,
    },
    /// A function of each element.
    Unary(Unary),
    /// A gated linear unit: `f(x) * g`. With one source, `x` is the first half of each row and `g` the second; with
    /// two, source 0 is `x` and source 1 is `g`.
    Glu {
        /// The function.
        kind: Glu,
        /// With one source: the halves are exchanged.
        swapped: bool,
    },
    /// The gradient of [`Repeat`](Op::Repeat): all parts of source 0 (f32) that came from one element of `shape`, summed.
    RepeatBack {
        /// Shape of the result; each extent divides the source's.
        shape: Shape,
    },
    /// The gradient of [`Unary::Silu`]: source 0 is the gradient of its result, source 1 its operand. Both f32.
    SiluBack,
    /// The gradient of [`RmsNorm`](Op::RmsNorm): source 0 is the gradient of its result, source 1 its operand. Both f32.
    RmsNormBack {
        /// As in the forward operation.
        #[serde(with = "crate::exact")]
        eps: f32,
    },
    /// The gradient of [`SoftMax`](Op::SoftMax) without sinks: source 0 is the gradient of its result, source 1 that result.
    /// Both f32.
    SoftMaxBack {
        /// As in the forward operation.
        #[serde(with = "crate::exact")]
        scale: f32,
    },
    /// The gradients of [`FlashAttn`](Op::FlashAttn) without ALiBi, softcap and sinks: source 0 is the gradient of its result, sources 1 to 3 are
    /// queries, keys and values, all f32, optional source 4 is the mask. The result is one row, f32: the gradients of
    /// queries, then of keys, then of values, each ordered like the result of attention, `[size, heads, tokens, batch]`.
    FlashAttnBack {
        /// As in the forward operation.
        #[serde(with = "crate::exact")]
        scale: f32,
    },
    /// The gradient of [`Rope`](Op::Rope), which turns the other way: sources as there, with the gradient of the result first.
    RopeBack(Rope),
    /// The gradient of [`GetRows`](Op::GetRows) of a matrix: source 0 is the gradient of its result, f32 `[n0, r]`, source 1
    /// the row numbers, i32 `[r]`. Gradients of equal rows add up: f32 `[n0, rows]`.
    GetRowsBack {
        /// Rows of the table.
        rows: usize,
    },
    /// `-sum(labels · log(softmax(logits))) / rows`, as one element: source 0 logits f32, source 1 the probabilities that they
    /// should have, f32, of the same shape.
    CrossEntropyLoss,
    /// The gradient of [`CrossEntropyLoss`](Op::CrossEntropyLoss) with respect to the logits, for rows of labels that sum to 1:
    /// source 0 is the gradient of the loss, one element, source 1 the logits, source 2 the labels. All f32.
    CrossEntropyLossBack,
    /// A step of AdamW ([Loshchilov and Hutter 2019](https://arxiv.org/abs/1711.05101)): source 0 the weights, source 1 their
    /// gradient, source 2 and 3 the running means of the gradient and of its square, all f32 of one shape without gaps.
    /// Source 4 holds seven numbers, f32: learning rate, `beta1`, `beta2`, eps, weight decay, and the bias corrections
    /// `1 / (1 - beta1^step)` and `1 / (1 - beta2^step)`. Weights and means are changed in place; the result is a view of the weights.
    OptStepAdamW,
    /// A step of gradient descent: source 0 the weights, source 1 their gradient, both f32 of one shape without gaps; source
    /// 2 the learning rate and the weight decay, f32. The weights are changed in place; the result is a view of them.
    OptStepSgd,
}

/// Least precision that a product must be accumulated in. A device may always do better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Precision {
    /// The device's choice.
    #[default]
    Default,
    F32,
    BF16,
    F16,
    Q8,
    Q4,
}

/// Parameters of rotary position embedding with YaRN scaling ([Peng et al. 2023](https://arxiv.org/abs/2309.00071)).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// How many elements of each head are rotated. Even.
    pub dims: usize,
    /// Elements of each head before the rotated ones. Even.
    pub offset: usize,
    /// Which elements form a pair.
    pub mode: RopeMode,
    /// Context length that the model was trained with; used by YaRN's corrections.
    pub original_context: usize,
    /// Base of the geometric series of frequencies.
    #[serde(with = "crate::exact")]
    pub freq_base: f32,
    /// Factor of the positions: 1 / (linear scaling factor).
    #[serde(with = "crate::exact")]
    pub freq_scale: f32,
    /// Mix of interpolation and extrapolation; 0 for no YaRN.
    #[serde(with = "crate::exact")]
    pub ext_factor: f32,
    /// Factor of the rotated vector's magnitude.
    #[serde(with = "crate::exact")]
    pub attn_factor: f32,
    /// Rotations above which a dimension extrapolates.
    #[serde(with = "crate::exact")]
    pub beta_fast: f32,
    /// Rotations below which a dimension interpolates.
    #[serde(with = "crate::exact")]
    pub beta_slow: f32,
}

impl Rope {
    /// Plain rotary embedding of `dims` elements with base `freq_base`, without scaling.
    pub fn new(dims: usize, mode: RopeMode, freq_base: f32) -> Self {
        Rope {
            dims,
            offset: 0,
            mode,
            original_context: 0,
            freq_base,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }
    }
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RopeMode {
    /// Neighbours: `(0, 1), (2, 3), …`
    Normal,
    /// Halves: `(0, dims/2), (1, dims/2 + 1), …`
    Neox,
}

/// Direction of a sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SortOrder {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// Functions of one element, numbered as ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // standard functions under their usual names
pub enum Unary {
    Abs,
    /// -1, 0 or 1.
    Sgn,
    Neg,
    /// 1 where the element is positive, else 0.
    Step,
    Tanh,
    /// `x` where positive, else `exp(x) - 1`.
    Elu,
    Relu,
    Sigmoid,
    /// The approximation with tanh.
    Gelu,
    /// `x * sigmoid(1.702 x)`.
    GeluQuick,
    Silu,
    /// `x * clamp((x + 3) / 6, 0, 1)`.
    HardSwish,
    /// `clamp((x + 3) / 6, 0, 1)`.
    HardSigmoid,
    Exp,
    /// `exp(x) - 1`.
    ExpM1,
    /// `log(1 + exp(x))`; the identity above 20.
    SoftPlus,
    /// The definition with the error function.
    GeluErf,
    /// Expanded integral of the ELU ([Huang 2024](https://arxiv.org/abs/2411.13010)), with parameters as ggml stores
    /// them: `alpha_n` already holds `beta + softplus(·)`, `alpha_p` `softplus(·)`.
    Xielu {
        #[serde(with = "crate::exact")]
        alpha_n: f32,
        #[serde(with = "crate::exact")]
        alpha_p: f32,
        #[serde(with = "crate::exact")]
        beta: f32,
        #[serde(with = "crate::exact")]
        eps: f32,
    },
    Floor,
    Ceil,
    /// To the nearest integer, halves away from zero.
    Round,
    Trunc,
}

impl Unary {
    /// One of each, with sample parameters where there are any: for tables and tests.
    pub const ALL: [Unary; 22] = [
        Unary::Abs,
        Unary::Sgn,
        Unary::Neg,
        Unary::Step,
        Unary::Tanh,
        Unary::Elu,
        Unary::Relu,
        Unary::Sigmoid,
        Unary::Gelu,
        Unary::GeluQuick,
        Unary::Silu,
        Unary::HardSwish,
        Unary::HardSigmoid,
        Unary::Exp,
        Unary::ExpM1,
        Unary::SoftPlus,
        Unary::GeluErf,
        Unary::Xielu {
            alpha_n: 4.0,
            alpha_p: 20.0,
            beta: 0.5,
            eps: 1e-7,
        },
        Unary::Floor,
        Unary::Ceil,
        Unary::Round,
        Unary::Trunc,
    ];

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Abs => "abs",
            Unary::Sgn => "sgn",
            Unary::Neg => "neg",
            Unary::Step => "step",
            Unary::Tanh => "tanh",
            Unary::Elu => "elu",
            Unary::Relu => "relu",
            Unary::Sigmoid => "sigmoid",
            Unary::Gelu => "gelu",
            Unary::GeluQuick => "gelu_quick",
            Unary::Silu => "silu",
            Unary::HardSwish => "hardswish",
            Unary::HardSigmoid => "hardsigmoid",
            Unary::Exp => "exp",
            Unary::ExpM1 => "expm1",
            Unary::SoftPlus => "softplus",
            Unary::GeluErf => "gelu_erf",
            Unary::Xielu { .. } => "xielu",
            Unary::Floor => "floor",
            Unary::Ceil => "ceil",
            Unary::Round => "round",
            Unary::Trunc => "trunc",
        }
    }
}

/// Gated linear units, numbered as ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Glu {
    /// `relu(x) * g`
    Reglu,
    /// `gelu(x) * g`, with tanh.
    Geglu,
    /// `silu(x) * g`
    Swiglu,
    /// gpt-oss: `x' = min(x, limit)`, `g' = clamp(g, -limit, limit)`: `x' * sigmoid(alpha * x') * (1 + g')`.
    SwigluOai {
        /// Steepness of the sigmoid.
        #[serde(with = "crate::exact")]
        alpha: f32,
        /// Limit of both halves.
        #[serde(with = "crate::exact")]
        limit: f32,
    },
    /// `gelu(x) * g`, with the error function.
    GegluErf,
    /// `gelu_quick(x) * g`
    GegluQuick,
    /// `silu(x') * g'` with `x' = min(x, limit)`, `g' = clamp(g, -limit, limit)`.
    SwigluClamp {
        /// Limit of both halves.
        #[serde(with = "crate::exact")]
        limit: f32,
    },
}

impl Glu {
    /// One of each, with the usual parameters: for tables and tests.
    pub const ALL: [Glu; 7] = [
        Glu::Reglu,
        Glu::Geglu,
        Glu::Swiglu,
        Glu::SwigluOai {
            alpha: 1.702,
            limit: 7.0,
        },
        Glu::GegluErf,
        Glu::GegluQuick,
        Glu::SwigluClamp { limit: 7.0 },
    ];

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            Glu::Reglu => "reglu",
            Glu::Geglu => "geglu",
            Glu::Swiglu => "swiglu",
            Glu::SwigluOai { .. } => "swiglu_oai",
            Glu::GegluErf => "geglu_erf",
            Glu::GegluQuick => "geglu_quick",
            Glu::SwigluClamp { .. } => "swiglu_clamp",
        }
    }
}

impl Op {
    /// ggml's name of the operation; of the function, for unary and gated ones.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Leaf => "none",
            Op::Dup => "dup",
            Op::Add => "add",
            Op::AddId => "add_id",
            Op::Sub => "sub",
            Op::Mul => "mul",
            Op::Div => "div",
            Op::Scale { .. } => "scale",
            Op::Sqr => "sqr",
            Op::Sqrt => "sqrt",
            Op::Log => "log",
            Op::Sum => "sum",
            Op::SumRows => "sum_rows",
            Op::Mean => "mean",
            Op::CumSum => "cumsum",
            Op::ArgMax => "argmax",
            Op::Repeat { .. } => "repeat",
            Op::Concat { .. } => "concat",
            Op::Norm { .. } => "norm",
            Op::RmsNorm { .. } => "rms_norm",
            Op::L2Norm { .. } => "l2_norm",
            Op::MulMat { .. } => "mul_mat",
            Op::OutProd => "out_prod",
            Op::MulMatId { .. } => "mul_mat_id",
            Op::Cpy => "cpy",
            Op::Cast { .. } => "cast",
            Op::Cont => "cont",
            Op::Reshape { .. } => "reshape",
            Op::View { .. } => "view",
            Op::Permute { .. } => "permute",
            Op::Transpose => "transpose",
            Op::GetRows => "get_rows",
            Op::SetRows => "set_rows",
            Op::DiagMaskInf { .. } => "diag_mask_inf",
            Op::DiagMaskZero { .. } => "diag_mask_zero",
            Op::SoftMax { .. } => "soft_max",
            Op::Rope(_) => "rope",
            Op::Clamp { .. } => "clamp",
            Op::Pad { .. } => "pad",
            Op::Arange { .. } => "arange",
            Op::ArgSort { .. } => "argsort",
            Op::TopK { .. } => "top_k",
            Op::Fill { .. } => "fill",
            Op::FlashAttn { .. } => "flash_attn_ext",
            Op::Unary(unary) => unary.name(),
            Op::Glu { kind, .. } => kind.name(),
            Op::RepeatBack { .. } => "repeat_back",
            Op::SiluBack => "silu_back",
            Op::RmsNormBack { .. } => "rms_norm_back",
            Op::SoftMaxBack { .. } => "soft_max_back",
            Op::FlashAttnBack { .. } => "flash_attn_back",
            Op::RopeBack(_) => "rope_back",
            Op::GetRowsBack { .. } => "get_rows_back",
            Op::CrossEntropyLoss => "cross_entropy_loss",
            Op::CrossEntropyLossBack => "cross_entropy_loss_back",
            Op::OptStepAdamW => "opt_step_adamw",
            Op::OptStepSgd => "opt_step_sgd",
        }
    }

    /// Whether the result is only another look at a source's memory, with nothing to compute.
    pub fn is_view(&self) -> bool {
        matches!(
            self,
            Op::Reshape { .. } | Op::View { .. } | Op::Permute { .. } | Op::Transpose
        )
    }

    /// Which source's memory the result lies in, if it does not get memory of its own.
    pub fn aliased_source(&self) -> Option<usize> {
        match self {
            op if op.is_view() => Some(0),
            Op::Cpy => Some(1),
            Op::SetRows => Some(2),
            Op::OptStepAdamW | Op::OptStepSgd => Some(0),
            _ => None,
        }
    }

    /// Which sources' memory the operation writes to. The result is a view of one of them.
    pub fn written_sources(&self) -> &'static [usize] {
        match self {
            Op::Cpy => &[1],
            Op::SetRows => &[2],
            Op::OptStepAdamW => &[0, 2, 3],
            Op::OptStepSgd => &[0],
            _ => &[],
        }
    }

    /// Whether the result may overwrite source number `source`, if that has the same layout: every kernel of such an operation
    /// reads an element before it writes it.
    pub fn may_overwrite(&self, source: usize) -> bool {
        match self {
            Op::Add | Op::Sub | Op::Mul | Op::Div | Op::SiluBack => source <= 1,
            Op::AddId
            | Op::Scale { .. }
            | Op::Sqr
            | Op::Sqrt
            | Op::Log
            | Op::RmsNorm { .. }
            | Op::RmsNormBack { .. }
            | Op::DiagMaskInf { .. }
            | Op::DiagMaskZero { .. }
            | Op::SoftMax { .. }
            | Op::SoftMaxBack { .. }
            | Op::Rope(_)
            | Op::RopeBack(_)
            | Op::Clamp { .. }
            | Op::Fill { .. }
            | Op::Unary(_) => source == 0,
            _ => false,
        }
    }
}

impl fmt::Display for Op {
    /// The name with the parameters that are set, for example `rms_norm(eps=0.00001)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Op::Scale { scale, bias } if *bias != 0.0 => write!(f, "(scale={scale}, bias={bias})"),
            Op::Scale { scale, .. } => write!(f, "(scale={scale})"),
            Op::Concat { dim } => write!(f, "(dim={dim})"),
            Op::Norm { eps }
            | Op::RmsNorm { eps }
            | Op::RmsNormBack { eps }
            | Op::L2Norm { eps } => write!(f, "(eps={eps})"),
            Op::View { offset, .. } if *offset != 0 => write!(f, "(offset={offset})"),
            Op::Permute { axes } => write!(f, "(axes={axes:?})"),
            Op::DiagMaskInf { past } | Op::DiagMaskZero { past } => write!(f, "(past={past})"),
            Op::SoftMax { scale, max_bias } => write!(f, "(scale={scale}, max_bias={max_bias})"),
            Op::SoftMaxBack { scale } => write!(f, "(scale={scale})"),
            Op::GetRowsBack { rows } => write!(f, "(rows={rows})"),
            Op::Rope(rope) | Op::RopeBack(rope) => write!(
                f,
                "(dims={}, mode={:?}, base={})",
                rope.dims, rope.mode, rope.freq_base
            ),
            Op::Clamp { min, max } => write!(f, "(min={min}, max={max})"),
            Op::Pad { before, after } => write!(f, "(before={before:?}, after={after:?})"),
            Op::Arange { start, stop, step } => {
                write!(f, "(start={start}, stop={stop}, step={step})")
            }
            Op::ArgSort { order } => write!(f, "({order:?})"),
            Op::TopK { k } => write!(f, "(k={k})"),
            Op::Fill { value } => write!(f, "(value={value})"),
            Op::FlashAttn { scale, .. } | Op::FlashAttnBack { scale } => {
                write!(f, "(scale={scale})")
            }
            _ => Ok(()),
        }
    }
}
