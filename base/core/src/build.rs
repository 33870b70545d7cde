//! Graph building: methods of [`Graph`] for the operations.
//!
//! Every method appends one node and returns its id. It fails with [`Error::Shape`] if the operands
//! do not fit. [`Op`] documents the operations.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, TensorId};
use crate::layout::{DIMS, Shape};
use crate::op::{Glu, Op, Precision, Rope, SortOrder, Unary};

/// Declares methods that append an operation with fixed sources.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($source:ident),*;
        $($param:ident: $type:ty),*) = $op:expr;)*) => {
        /// # Operations
        impl Graph {
            $(
                $(#[$doc])*
                /// # Errors
                /// [`Error::Shape`] if the operands do not fit.
                pub fn $name(&mut self, $($source: TensorId,)* $($param: $type),*) -> Result<TensorId> {
                    self.push($op, &[$(Some($source)),*])
                }
            )*
        }
    };
}

operations! {
    /// [`Op::Dup`]
    dup(a;) = Op::Dup;
    /// [`Op::Add`]
    add(a, b;) = Op::Add;
    /// [`Op::AddId`]
    add_id(a, b, ids;) = Op::AddId;
    /// [`Op::Sub`]
    sub(a, b;) = Op::Sub;
    /// [`Op::Mul`]
    mul(a, b;) = Op::Mul;
    /// [`Op::Div`]
    div(a, b;) = Op::Div;
    /// [`Op::Scale`] without bias
    scale(a; scale: f32) = Op::Scale { scale, bias: 0.0 };
    /// [`Op::Scale`]
    scale_bias(a; scale: f32, bias: f32) = Op::Scale { scale, bias };
    /// [`Op::Sqr`]
    sqr(a;) = Op::Sqr;
    /// [`Op::Sqrt`]
    sqrt(a;) = Op::Sqrt;
    /// [`Op::Log`]
    log(a;) = Op::Log;
    /// [`Op::Sum`]
    sum(a;) = Op::Sum;
    /// [`Op::SumRows`]
    sum_rows(a;) = Op::SumRows;
    /// [`Op::Mean`]
    mean(a;) = Op::Mean;
    /// [`Op::CumSum`]
    cumsum(a;) = Op::CumSum;
    /// [`Op::ArgMax`]
    argmax(a;) = Op::ArgMax;
    /// [`Op::Repeat`]
    repeat(a; shape: Shape) = Op::Repeat { shape };
    /// [`Op::Concat`]
    concat(a, b; dim: usize) = Op::Concat { dim };
    /// [`Op::Norm`]
    norm(a; eps: f32) = Op::Norm { eps };
    /// [`Op::RmsNorm`]
    rms_norm(a; eps: f32) = Op::RmsNorm { eps };
    /// [`Op::L2Norm`]
    l2_norm(a; eps: f32) = Op::L2Norm { eps };
    /// [`Op::MulMat`] with the device's choice of precision
    mul_mat(weights, x;) = Op::MulMat { precision: Precision::Default };
    /// [`Op::MulMat`]
    mul_mat_precise(weights, x; precision: Precision) = Op::MulMat { precision };
    /// [`Op::OutProd`]
    out_prod(a, b;) = Op::OutProd;
    /// [`Op::MulMatId`] with the device's choice of precision
    mul_mat_id(experts, x, ids;) = Op::MulMatId { precision: Precision::Default };
    /// [`Op::Cpy`]: converts `a` into the memory of `into`
    cpy(a, into;) = Op::Cpy;
    /// [`Op::Cast`]
    cast(a; dtype: DType) = Op::Cast { dtype };
    /// [`Op::Cont`]
    cont(a;) = Op::Cont;
    /// [`Op::Reshape`]
    reshape(a; shape: Shape) = Op::Reshape { shape };
    /// [`Op::View`]: `strides` are those of dimensions 1 to 3, in bytes
    view(a; shape: Shape, strides: [usize; DIMS - 1], offset: usize) = Op::View { shape, strides,
        offset };
    /// [`Op::Permute`]
    permute(a; axes: [usize; DIMS]) = Op::Permute { axes };
    /// [`Op::Transpose`]
    transpose(a;) = Op::Transpose;
    /// [`Op::GetRows`]
    get_rows(table, rows;) = Op::GetRows;
    /// [`Op::SetRows`]
    set_rows(rows, numbers, into;) = Op::SetRows;
    /// [`Op::DiagMaskInf`]
    diag_mask_inf(a; past: usize) = Op::DiagMaskInf { past };
    /// [`Op::DiagMaskZero`]
    diag_mask_zero(a; past: usize) = Op::DiagMaskZero { past };
    /// [`Op::Clamp`]
    clamp(a; min: f32, max: f32) = Op::Clamp { min, max };
    /// [`Op::Pad`]
    pad(a; before: Shape, after: Shape) = Op::Pad { before, after };
    /// [`Op::Arange`]
    arange(; start: f32, stop: f32, step: f32) = Op::Arange { start, stop, step };
    /// [`Op::ArgSort`]
    argsort(a; order: SortOrder) = Op::ArgSort { order };
    /// [`Op::TopK`]
    top_k(a; k: usize) = Op::TopK { k };
    /// [`Op::Fill`]
    fill(a; value: f32) = Op::Fill { value };
    /// [`Op::SsmConv`]
    ssm_conv(x, weights;) = Op::SsmConv;
    /// [`Op::Unary`]
    unary(a; function: Unary) = Op::Unary(function);
    /// [`Op::Glu`] of the two halves of each row
    glu(a; kind: Glu) = Op::Glu { kind, swapped: false };
    /// [`Op::Glu`] of two tensors
    glu_split(a, gate; kind: Glu) = Op::Glu { kind, swapped: false };
    /// [`Op::RepeatBack`]
    repeat_back(a; shape: Shape) = Op::RepeatBack { shape };
    /// [`Op::SiluBack`]
    silu_back(gradient, x;) = Op::SiluBack;
    /// [`Op::RmsNormBack`]
    rms_norm_back(gradient, x; eps: f32) = Op::RmsNormBack { eps };
    /// [`Op::SoftMaxBack`]
    soft_max_back(gradient, y; scale: f32) = Op::SoftMaxBack { scale };
    /// [`Op::GetRowsBack`]
    get_rows_back(gradient, numbers; rows: usize) = Op::GetRowsBack { rows };
    /// [`Op::CrossEntropyLoss`]
    cross_entropy_loss(logits, labels;) = Op::CrossEntropyLoss;
    /// [`Op::CrossEntropyLossBack`]
    cross_entropy_loss_back(gradient, logits, labels;) = Op::CrossEntropyLossBack;
    /// [`Op::OptStepSgd`]
    opt_step_sgd(weights, gradient, parameters;) = Op::OptStepSgd;
}

impl Graph {
    /// Appends [`Op::SoftMax`] with its optional mask and sinks.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn soft_max(
        &mut self,
        a: TensorId,
        mask: Option<TensorId>,
        sinks: Option<TensorId>,
        scale: f32,
        max_bias: f32,
    ) -> Result<TensorId> {
        self.push(Op::SoftMax { scale, max_bias }, &[Some(a), mask, sinks])
    }

    /// Appends [`Op::Rope`] with optional frequency divisors.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn rope(
        &mut self,
        a: TensorId,
        positions: TensorId,
        divisors: Option<TensorId>,
        rope: Rope,
    ) -> Result<TensorId> {
        self.push(Op::Rope(rope), &[Some(a), Some(positions), divisors])
    }

    /// Appends [`Op::RopeBack`] with optional frequency divisors.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn rope_back(
        &mut self,
        gradient: TensorId,
        positions: TensorId,
        divisors: Option<TensorId>,
        rope: Rope,
    ) -> Result<TensorId> {
        self.push(
            Op::RopeBack(rope),
            &[Some(gradient), Some(positions), divisors],
        )
    }

    /// Appends [`Op::OptStepAdamW`]. `means` are the running means of the gradient and of its
    /// square.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn opt_step_adamw(
        &mut self,
        weights: TensorId,
        gradient: TensorId,
        means: [TensorId; 2],
        parameters: TensorId,
    ) -> Result<TensorId> {
        let [m, v] = means.map(Some);
        self.push(
            Op::OptStepAdamW,
            &[Some(weights), Some(gradient), m, v, Some(parameters)],
        )
    }

    /// Appends [`Op::FlashAttn`] with F32 accumulation, without softcap and ALiBi.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn flash_attn(
        &mut self,
        [q, k, v]: [TensorId; 3],
        mask: Option<TensorId>,
        sinks: Option<TensorId>,
        scale: f32,
    ) -> Result<TensorId> {
        let op = Op::FlashAttn {
            scale,
            max_bias: 0.0,
            softcap: 0.0,
            precision: Precision::F32,
        };
        self.push(op, &[Some(q), Some(k), Some(v), mask, sinks])
    }

    /// Appends [`Op::GatedDeltaNet`] with queries, keys, values, decays, betas and matrices.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn gated_delta_net(
        &mut self,
        sources: [TensorId; 6],
        snapshots: usize,
    ) -> Result<TensorId> {
        self.push(Op::GatedDeltaNet { snapshots }, &sources.map(Some))
    }

    /// Appends [`Op::SsmScan`] with matrices, x, dt, A, B, C and the rows of the matrices.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn ssm_scan(&mut self, sources: [TensorId; 7], snapshots: usize) -> Result<TensorId> {
        self.push(Op::SsmScan { snapshots }, &sources.map(Some))
    }

    /// Appends [`Op::FlashAttnBack`] for the attention of `q`, `k` and `v`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the operands do not fit.
    pub fn flash_attn_back(
        &mut self,
        gradient: TensorId,
        [q, k, v]: [TensorId; 3],
        mask: Option<TensorId>,
        scale: f32,
    ) -> Result<TensorId> {
        let op = Op::FlashAttnBack { scale };
        self.push(op, &[Some(gradient), Some(q), Some(k), Some(v), mask])
    }

    /// Appends a [view](Op::View) of the consecutive rows `first..first + count` of a tensor.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rows do not exist, or the elements of a row are not adjacent.
    pub fn rows(&mut self, a: TensorId, first: usize, count: usize) -> Result<TensorId> {
        let Some(layout) = self.tensors().get(a.index()).map(|tensor| tensor.layout) else {
            return Err(Error::invalid(format!(
                "there is no tensor {a} in this graph"
            )));
        };
        let ([n0, n1, n2, n3], [_, s1, s2, s3]) = (layout.shape(), layout.strides());
        if first.checked_add(count).is_none_or(|end| end > n1) {
            return Err(Error::shape(format!(
                "rows {first}..+{count} of a tensor with {n1} rows"
            )));
        }
        if !layout.has_contiguous_rows() {
            return Err(Error::shape(format!(
                "rows of {layout}, which have gaps, are no view"
            )));
        }
        // After the last row, or without rows, the offset does not matter.
        let offset = if count == 0 || layout.is_empty() {
            0
        } else {
            first * s1
        };
        self.view(a, [n0, count, n2, n3], [s1, s2, s3], offset)
    }
}
