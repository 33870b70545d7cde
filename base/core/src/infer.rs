//! Shape inference: the only code that decides whether operands fit an operation. Each operation
//! has one rule, each family of operations one file.
//!
//! Everything that creates nodes (the builder, imports from other programs, tests) calls [`infer`].
//! Every node is therefore well-formed, and kernels do not check shapes. Kernels do check values,
//! such as the indices of `get_rows`.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{Layout, Shape};
use crate::op::Op;

mod attention;
mod elementwise;
mod formula;
mod memory;
mod product;
mod row;
mod state;
mod training;

/// The sources of one node during the check. Errors name the operation and all operands.
struct Check<'a> {
    op: &'a Op,
    sources: &'a [Option<&'a Layout>],
}

impl<'a> Check<'a> {
    fn error(&self, problem: impl std::fmt::Display) -> Error {
        let operands: Vec<_> = self
            .sources
            .iter()
            .map(|s| s.map_or_else(|| "-".to_owned(), ToString::to_string))
            .collect();
        Error::shape(format!(
            "{}: {problem} (operands: {})",
            self.op,
            operands.join(", ")
        ))
    }

    fn ensure(&self, holds: bool, problem: impl std::fmt::Display) -> Result<()> {
        if holds {
            Ok(())
        } else {
            Err(self.error(problem))
        }
    }

    fn optional(&self, index: usize) -> Option<&'a Layout> {
        self.sources.get(index).copied().flatten()
    }

    fn source(&self, index: usize) -> Result<&'a Layout> {
        self.optional(index)
            .ok_or_else(|| self.error(format_args!("source {index} is missing")))
    }

    /// Checks the number of sources against the [table](crate::op).
    fn count(&self) -> Result<()> {
        let allowed = self.op.kind().sources();
        for index in 0..*allowed.start() {
            self.source(index)?;
        }
        self.ensure(
            self.sources.len() <= *allowed.end(),
            format_args!("takes at most {} sources", allowed.end()),
        )
    }

    /// Checks that the source, if present, has one of these types.
    fn is(&self, index: usize, what: &str, types: &[DType]) -> Result<()> {
        match self.optional(index) {
            Some(layout) if !types.contains(&layout.dtype()) => {
                Err(self.error(format_args!("{what} cannot be {}", layout.dtype())))
            }
            _ => Ok(()),
        }
    }

    /// Returns the layout of a new, contiguous result.
    fn result(&self, dtype: DType, shape: Shape) -> Result<Layout> {
        Layout::contiguous(dtype, shape).map_err(|error| self.error(error))
    }

    fn like(&self, source: &Layout) -> Result<Layout> {
        self.result(source.dtype(), source.shape())
    }
}

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Returns the layout of the result of `op` on `sources`, or the reason why they do not fit.
///
/// For operations whose result lies in a source's memory (views, `cpy`, `set_rows`), the layout
/// contains the strides in that memory.
///
/// # Errors
/// [`Error::Shape`] with the operation, the operands and the broken rule.
pub fn infer(op: &Op, sources: &[Option<&Layout>]) -> Result<Layout> {
    let c = &Check { op, sources };
    c.count()?;
    match *op {
        Op::Leaf => Err(c.error("a leaf has a layout of its own")),

        Op::Add | Op::Sub | Op::Mul | Op::Div => elementwise::binary(c),
        Op::Scale { .. }
        | Op::Sqr
        | Op::Sqrt
        | Op::Log
        | Op::Sin
        | Op::Cos
        | Op::LeakyRelu { .. }
        | Op::Clamp { .. }
        | Op::Unary(_)
        | Op::Fill { .. } => elementwise::each(c),
        Op::AddId => elementwise::add_id(c),
        Op::DiagMaskInf { past } | Op::DiagMaskZero { past } => elementwise::diag_mask(c, past),
        Op::Glu { kind, swapped } => elementwise::glu(c, kind, swapped),

        Op::Norm { eps } | Op::RmsNorm { eps } | Op::L2Norm { eps } => row::norm(c, eps),
        Op::CumSum => row::cumsum(c),
        Op::SsmConv => state::conv(c),
        Op::SsmScan { snapshots } => state::scan(c, snapshots),
        Op::GatedDeltaNet { snapshots } => state::delta_net(c, snapshots),
        Op::Sum => row::sum(c),
        Op::SumRows | Op::Mean => row::sum_rows(c),
        Op::ArgMax => row::argmax(c),
        Op::ArgSort { .. } => row::argsort(c),
        Op::TopK { k } => row::top_k(c, k),
        Op::GetRows => row::get_rows(c),
        Op::SetRows => row::set_rows(c),

        Op::Dup | Op::Cont => memory::copy(c),
        Op::Cpy => memory::cpy(c),
        Op::Cast { dtype } => memory::cast(c, dtype),
        Op::Repeat { shape } => memory::repeat(c, shape),
        Op::Concat { dim } => memory::concat(c, dim),
        Op::Pad { before, after } => memory::pad(c, before, after),
        Op::Arange { start, stop, step } => memory::arange(c, start, stop, step),
        Op::Reshape { shape } => memory::reshape(c, shape),
        Op::View { shape, strides, .. } => memory::view(c, shape, strides),
        Op::Permute { axes } => memory::permute(c, axes),
        Op::Transpose => memory::permute(c, [1, 0, 2, 3]),

        Op::MulMat { .. } => product::mul_mat(c),
        Op::OutProd => product::out_prod(c),
        Op::MulMatId { .. } => product::mul_mat_id(c),

        Op::SoftMax { max_bias, .. } => attention::soft_max(c, max_bias),
        Op::Rope(rope) | Op::RopeBack(rope) => attention::rope(c, rope),
        Op::FlashAttn { max_bias, .. } => attention::flash_attn(c, max_bias),
        Op::FlashAttnBack { .. } => attention::flash_attn_back(c),

        Op::RepeatBack { shape } => training::repeat_back(c, shape),
        Op::SiluBack | Op::SoftMaxBack { .. } => training::gradient_of_rows(c),
        Op::RmsNormBack { eps } => training::rms_norm_back(c, eps),
        Op::GetRowsBack { rows } => training::get_rows_back(c, rows),
        Op::CrossEntropyLoss => training::cross_entropy_loss(c),
        Op::CrossEntropyLossBack => training::cross_entropy_loss_back(c),
        Op::OptStepAdamW => training::step(c, 4, 7),
        Op::OptStepSgd => training::step(c, 2, 2),

        Op::Acc { .. }
        | Op::Set { .. }
        | Op::CountEqual
        | Op::GroupNorm { .. }
        | Op::Diag
        | Op::Tri { .. }
        | Op::Im2Col { .. }
        | Op::Im2ColBack { .. }
        | Op::Im2Col3d { .. }
        | Op::Col2Im1d { .. }
        | Op::Conv2d { .. }
        | Op::Conv3d { .. }
        | Op::Conv2dDepthwise { .. }
        | Op::ConvTranspose1d { .. }
        | Op::ConvTranspose2d { .. }
        | Op::Pool1d { .. }
        | Op::Pool2d { .. }
        | Op::Pool2dBack { .. }
        | Op::WinPart { .. }
        | Op::WinUnpart { .. }
        | Op::GetRelPos
        | Op::AddRelPos
        | Op::Upscale { .. }
        | Op::PadCircular { .. }
        | Op::PadReflect1d { .. }
        | Op::Roll { .. }
        | Op::TimestepEmbedding { .. }
        | Op::RwkvWkv6
        | Op::RwkvWkv7
        | Op::GatedLinearAttn { .. }
        | Op::SolveTri
        | Op::LightningIndexer
        | Op::HyperComb { .. }
        | Op::HyperPre { .. }
        | Op::HyperPost
        | Op::TopKMask => formula::formula(c),
    }
}

#[cfg(test)]
mod tests;
