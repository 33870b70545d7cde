//! Kernels, one file per family, and their table.
//!
//! Only [`kernel`] decides which operations and types are supported. Both the device's answers and
//! its execution use it.

mod attention;
mod copy;
mod elementwise;
mod formula;
mod functions;
mod matmul;
mod norm;
mod reduce;
mod rope;
mod rows;
mod sort;
mod state;
mod training;

use crate::call::Call;
use crate::value::{is_readable, is_writable};
use samite_core::formula::is_formula;
use samite_core::{DType, Node, Op, Result, Support};
use samite_quant::can_encode;
use std::sync::Arc;

/// Implementation of an operation, and its types.
#[derive(Clone)]
pub(crate) struct Kernel {
    types: Types,
    run: KernelFunction,
}

type KernelFunction = Arc<dyn Fn(&Call) -> Result<()> + Send + Sync>;

/// Types that a kernel supports.
#[derive(Clone, Copy)]
enum Types {
    /// All: bytes are copied without decoding.
    Any,
    /// Operands that can be decoded and results that can be encoded.
    Numbers,
    /// Conversion of source 0 to the type of the result.
    Conversion,
    /// Rows of source 0 converted to the type of the result, which is not an integer type.
    Encoding,
}

impl Kernel {
    /// Returns whether the kernel supports the types of `node`.
    pub fn accepts(&self, node: Node<'_>) -> Support {
        let to = node.dtype();
        let sources = || {
            node.tensor()
                .operands()
                .map(|(_, id)| node.graph().tensor(id).layout.dtype())
        };
        let from = node.source(0).map_or(to, Node::dtype);
        match self.types {
            Types::Any => Support::Yes,
            Types::Numbers => sources()
                .map(readable)
                .fold(writable(to), |all, one| all.and(|| one)),
            Types::Conversion if from == to => Support::Yes,
            Types::Conversion => readable(from).and(|| writable(to)).and(|| {
                let mixed = |a: DType, b: DType| a.is_integer() && b.is_quantized();
                Support::when(
                    !mixed(from, to) && !mixed(to, from),
                    format!("there is no conversion from {from} to {to}"),
                )
            }),
            Types::Encoding => {
                Support::when(can_encode(to), format!("rows cannot be encoded as {to}"))
            }
        }
    }

    /// Computes one node.
    pub fn run(&self, call: &Call) -> Result<()> {
        (self.run)(call).map_err(|error| call.failed(error))
    }
}

fn readable(dtype: DType) -> Support {
    Support::when(is_readable(dtype), format!("{dtype} cannot be decoded"))
}

fn writable(dtype: DType) -> Support {
    Support::when(is_writable(dtype), format!("{dtype} cannot be encoded"))
}

fn with(types: Types, run: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Option<Kernel> {
    Some(Kernel {
        types,
        run: Arc::new(run),
    })
}

/// Returns the kernel for `op`, or `None` for leaves, views and unknown operations.
pub(crate) fn kernel(op: &Op) -> Option<Kernel> {
    use Types::{Any, Conversion, Encoding, Numbers};
    match *op {
        Op::Dup | Op::Cont => with(Any, copy::convert),
        Op::Cpy | Op::Cast { .. } => with(Conversion, copy::convert),
        Op::Repeat { .. } => with(Any, copy::repeat),
        Op::Concat { dim } => with(Any, move |call| copy::concat(call, dim)),
        Op::Pad { before, .. } => with(Numbers, move |call| copy::pad(call, before)),

        Op::Add => with(Numbers, |call| elementwise::binary(call, |a, b| a + b)),
        Op::Sub => with(Numbers, |call| elementwise::binary(call, |a, b| a - b)),
        Op::Mul => with(Numbers, |call| elementwise::binary(call, |a, b| a * b)),
        Op::Div => with(Numbers, |call| elementwise::binary(call, |a, b| a / b)),
        Op::AddId => with(Numbers, elementwise::add_id),
        Op::Scale { scale, bias } => with(Numbers, move |call| {
            elementwise::map(call, |x| f64::from(scale) * x + f64::from(bias))
        }),
        Op::Sqr => with(Numbers, |call| elementwise::map(call, |x| x * x)),
        Op::Sqrt => with(Numbers, |call| elementwise::map(call, f64::sqrt)),
        Op::Log => with(Numbers, |call| elementwise::map(call, f64::ln)),
        Op::Clamp { min, max } => with(Numbers, move |call| {
            elementwise::map(call, |x| x.min(max.into()).max(min.into()))
        }),
        Op::Fill { value } => with(Numbers, move |call| {
            elementwise::generate(call, |_| value.into())
        }),
        Op::Arange { start, step, .. } => with(Numbers, move |call| {
            elementwise::generate(call, |i| f64::from(start) + f64::from(step) * i as f64)
        }),
        Op::Unary(function) => with(Numbers, move |call| {
            elementwise::map(call, |x| functions::unary(function, x))
        }),
        Op::Glu { kind, swapped } => {
            with(Numbers, move |call| elementwise::glu(call, kind, swapped))
        }

        Op::Sum => with(Numbers, reduce::sum),
        Op::SumRows => with(Numbers, |call| reduce::rows(call, |row| row.iter().sum())),
        Op::Mean => with(Numbers, |call| {
            reduce::rows(call, |row| row.iter().sum::<f64>() / row.len() as f64)
        }),
        Op::CumSum => with(Numbers, reduce::running_sum),
        Op::SsmConv => with(Numbers, state::conv),
        Op::SsmScan { snapshots } => with(Numbers, move |call| state::scan(call, snapshots)),
        Op::GatedDeltaNet { snapshots } => {
            with(Numbers, move |call| state::delta_net(call, snapshots))
        }

        Op::Norm { eps } => with(Numbers, move |call| norm::norm(call, eps.into())),
        Op::RmsNorm { eps } => with(Numbers, move |call| norm::rms_norm(call, eps.into())),
        Op::L2Norm { eps } => with(Numbers, move |call| norm::l2_norm(call, eps.into())),

        Op::MulMat { .. } => with(Numbers, matmul::mul_mat),
        Op::MulMatId { .. } => with(Numbers, matmul::mul_mat_id),
        Op::OutProd => with(Numbers, matmul::out_prod),

        Op::GetRows => with(Numbers, rows::get),
        Op::SetRows => with(Encoding, rows::set),

        Op::DiagMaskInf { past } => with(Numbers, move |call| {
            attention::diag_mask(call, past, f64::NEG_INFINITY)
        }),
        Op::DiagMaskZero { past } => {
            with(Numbers, move |call| attention::diag_mask(call, past, 0.0))
        }
        Op::SoftMax { scale, max_bias } => with(Numbers, move |call| {
            attention::soft_max(call, scale.into(), max_bias.into())
        }),
        Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            ..
        } => with(Numbers, move |call| {
            attention::flash(call, scale.into(), max_bias.into(), softcap.into())
        }),
        Op::FlashAttnBack { scale } => with(Numbers, move |call| {
            attention::flash_back(call, scale.into())
        }),
        Op::Rope(parameters) => with(Numbers, move |call| rope::rope(call, parameters, 1.0)),
        Op::RopeBack(parameters) => with(Numbers, move |call| rope::rope(call, parameters, -1.0)),

        Op::ArgMax => with(Numbers, sort::argmax),
        Op::ArgSort { order } => with(Numbers, move |call| sort::argsort(call, order)),
        Op::TopK { k } => with(Numbers, move |call| sort::top_k(call, k)),

        Op::RepeatBack { .. } => with(Numbers, training::repeat_back),
        Op::SiluBack => with(Numbers, training::silu_back),
        Op::RmsNormBack { eps } => with(Numbers, move |call| {
            training::rms_norm_back(call, eps.into())
        }),
        Op::SoftMaxBack { scale } => with(Numbers, move |call| {
            training::soft_max_back(call, scale.into())
        }),
        Op::GetRowsBack { .. } => with(Numbers, training::get_rows_back),
        Op::CrossEntropyLoss => with(Numbers, training::cross_entropy_loss),
        Op::CrossEntropyLossBack => with(Numbers, training::cross_entropy_loss_back),
        Op::OptStepAdamW => with(Numbers, training::adamw),
        Op::OptStepSgd => with(Numbers, training::sgd),
        _ if is_formula(op.kind()) => with(Numbers, formula::compute),
        _ => None,
    }
}
