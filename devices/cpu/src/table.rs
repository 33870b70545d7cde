//! The one table of kernels: what is not in it is not supported, and what is in it can be built.

use crate::kernel::{Kernel, Reason};
use crate::kernels::{
    attention, backward, copy, elementwise, experts, glu, matmul, out_prod, reduce, rope, rows,
    shape, softmax, sort, training,
};
use crate::operand::alignment;
use crate::packed;
use samite_core::{Layout, Node, Op, Result};

/// The kernel for a node, from its operation, types and layouts.
pub(crate) fn kernel_for(node: Node<'_>) -> Result<Kernel, Reason> {
    aligned(node.layout())?;
    let sources = (0..node.tensor().sources.len()).filter_map(|i| node.source_layout(i));
    for layout in sources {
        aligned(layout)?;
    }
    for source in 0..node.tensor().sources.len() {
        only_where_known(node, source)?;
    }
    Ok(match node.op() {
        Op::Add | Op::Sub | Op::Mul | Op::Div => Kernel::plain(elementwise::binary),
        Op::AddId => Kernel::plain(rows::add_id),
        Op::Scale { .. }
        | Op::Sqr
        | Op::Sqrt
        | Op::Log
        | Op::Clamp { .. }
        | Op::Fill { .. }
        | Op::Unary(_) => Kernel::plain(elementwise::unary),
        Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } => Kernel::plain(elementwise::diag_mask),
        Op::Sum => Kernel::plain(reduce::sum),
        Op::SumRows | Op::Mean => Kernel::plain(reduce::rows),
        Op::CumSum => Kernel::plain(reduce::cumsum),
        Op::ArgMax => Kernel::plain(reduce::argmax),
        Op::Norm { .. } | Op::RmsNorm { .. } | Op::L2Norm { .. } => Kernel::plain(reduce::norm),
        Op::Repeat { .. } => Kernel::plain(shape::repeat),
        Op::Concat { .. } => Kernel::plain(shape::concat),
        Op::Pad { .. } => Kernel::plain(shape::pad),
        Op::Arange { .. } => Kernel::plain(shape::arange),
        Op::Dup | Op::Cont | Op::Cast { .. } | Op::Cpy => copy::kernel(node)?,
        Op::GetRows => rows::get_rows_kernel(node)?,
        Op::SetRows => rows::set_rows_kernel(node)?,
        Op::SoftMax { .. } => Kernel::plain(softmax::soft_max),
        Op::Rope(_) | Op::RopeBack(_) => rope::KERNEL,
        Op::ArgSort { .. } => sort::ARGSORT,
        Op::TopK { .. } => sort::TOP_K,
        Op::Glu { .. } => Kernel::plain(glu::glu),
        Op::MulMat { .. } => matmul::kernel(node)?,
        Op::MulMatId { .. } => experts::kernel(node)?,
        Op::FlashAttn { .. } => attention::kernel(node)?,
        Op::FlashAttnBack { .. } => attention::GRADIENT,
        Op::OutProd => out_prod::kernel(node)?,
        Op::RepeatBack { .. } => Kernel::plain(backward::repeat),
        Op::SiluBack => Kernel::plain(backward::silu),
        Op::RmsNormBack { .. } | Op::SoftMaxBack { .. } => backward::rows_kernel(node)?,
        Op::GetRowsBack { .. } => Kernel::plain(backward::get_rows),
        Op::CrossEntropyLoss => training::CROSS_ENTROPY,
        Op::CrossEntropyLossBack => Kernel::plain(training::cross_entropy_back),
        Op::OptStepAdamW | Op::OptStepSgd => Kernel::plain(training::step),
        op => return Err(format!("there is no kernel for {}", op.name()).into()),
    })
}

/// Packed weights are there for products and rows by number only, and as a whole.
fn only_where_known(node: Node<'_>, source: usize) -> Result<(), Reason> {
    if !packed::is_packed(node, source) {
        return Ok(());
    }
    let known = matches!(
        node.op(),
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::GetRows
    );
    let view = node
        .source(source)
        .is_some_and(|source| source.tensor().view.is_some());
    if source == 0 && known && !view {
        Ok(())
    } else {
        Err(format!("source {source} lies in packed memory").into())
    }
}

/// Elements and blocks must lie at multiples of their alignment, and blocks without gaps.
fn aligned(layout: &Layout) -> Result<(), Reason> {
    let alignment = alignment(layout.dtype());
    if !layout.strides().iter().all(|s| s.is_multiple_of(alignment)) {
        return Err("strides are not multiples of the element's alignment".into());
    }
    if layout.dtype().is_quantized() && !layout.has_contiguous_rows() {
        return Err("blocks of a row do not lie one after the other".into());
    }
    Ok(())
}
