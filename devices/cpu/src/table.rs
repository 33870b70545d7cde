//! The table of kernels. Operations without an entry are unsupported, and every entry can be built.

use crate::kernel::{Kernel, UnsupportedKernel, dense_rows};
use crate::kernels::{
    attention, backward, convolution, copy, delta, elementwise, experts, formula, glu, indexer,
    matmul, out_prod, reduce, rope, rows, shape, softmax, sort, state, training,
};
use crate::operand::alignment;
use crate::packed;
use samite_core::formula::is_formula;
use samite_core::{Layout, Node, Op, Result};

/// Returns the kernel for a node, from its operation, types and layouts.
pub(crate) fn kernel_for(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    aligned(node.layout())?;
    let sources = (0..node.tensor().sources.len()).filter_map(|i| node.source_layout(i));
    for layout in sources {
        aligned(layout)?;
    }
    for source in 0..node.tensor().sources.len() {
        only_where_known(node, source)?;
    }
    Ok(match *node.op() {
        Op::Add => Kernel::one_phase(|c| elementwise::binary(c, 0.4, |a, b| a + b)),
        Op::Sub => Kernel::one_phase(|c| elementwise::binary(c, 0.4, |a, b| a - b)),
        Op::Mul => Kernel::one_phase(|c| elementwise::binary(c, 0.4, |a, b| a * b)),
        Op::Div => Kernel::one_phase(|c| elementwise::binary(c, 0.6, |a, b| a / b)),
        Op::AddId => Kernel::plain(rows::add_id),
        Op::Scale { scale, bias } => {
            Kernel::one_phase(move |c| elementwise::map(c, 0.3, move |x| x * scale + bias))
        }
        Op::Sqr => Kernel::one_phase(|c| elementwise::map(c, 0.3, |x| x * x)),
        Op::Sqrt => Kernel::one_phase(|c| elementwise::map(c, 0.5, f32::sqrt)),
        Op::Log => Kernel::one_phase(|c| elementwise::map(c, 4.0, f32::ln)),
        Op::Clamp { min, max } => Kernel::one_phase(move |c| elementwise::clamp(c, min, max)),
        Op::Fill { value } => Kernel::one_phase(move |c| elementwise::map(c, 0.2, move |_| value)),
        Op::Unary(function) => Kernel::one_phase(move |c| elementwise::unary(c, function)),
        Op::DiagMaskInf { past } => {
            Kernel::one_phase(move |c| elementwise::diag_mask(c, past, f32::NEG_INFINITY))
        }
        Op::DiagMaskZero { past } => {
            Kernel::one_phase(move |c| elementwise::diag_mask(c, past, 0.0))
        }
        Op::Sum => Kernel::plain(reduce::sum),
        Op::SumRows => Kernel::plain(|c| reduce::sum_rows(c, 1.0)),
        Op::Mean => Kernel::plain(reduce::mean),
        Op::CumSum => Kernel::plain(reduce::cumsum),
        Op::SsmConv => state::conv_kernel(node)?,
        Op::SsmScan { snapshots } => state::scan_kernel(node, snapshots)?,
        Op::GatedDeltaNet { snapshots } => delta::delta_net_kernel(node, snapshots)?,
        Op::ArgMax => Kernel::plain(reduce::argmax),
        Op::Norm { eps } => Kernel::one_phase(move |c| reduce::norm(c, eps)),
        Op::RmsNorm { eps } => Kernel::one_phase(move |c| reduce::rms_norm(c, eps)),
        Op::L2Norm { eps } => Kernel::one_phase(move |c| reduce::l2_norm(c, eps)),
        Op::Repeat { .. } => Kernel::plain(shape::repeat),
        Op::Concat { .. } => Kernel::plain(shape::concat),
        Op::Pad { .. } => Kernel::plain(shape::pad),
        Op::Arange { .. } => Kernel::plain(shape::arange),
        Op::Dup | Op::Cont | Op::Cast { .. } | Op::Cpy => copy::kernel(node)?,
        Op::GetRows => rows::get_rows_kernel(node)?,
        Op::SetRows => rows::set_rows_kernel(node)?,
        Op::SoftMax { .. } => Kernel::plain(softmax::soft_max),
        Op::Rope(r) => Kernel::with_scratch(rope::scratch, move |c| rope::rotation(c, r, false)),
        Op::RopeBack(r) => Kernel::with_scratch(rope::scratch, move |c| rope::rotation(c, r, true)),
        Op::ArgSort { order } => {
            Kernel::with_scratch(sort::scratch, move |c| sort::argsort(c, order))
        }
        Op::TopK { .. } => Kernel::with_scratch(sort::scratch, sort::top_k),
        Op::Glu { kind, swapped } => Kernel::one_phase(move |c| glu::glu(c, kind, swapped)),
        Op::MulMat { .. } => matmul::kernel(node)?,
        Op::MulMatId { .. } => experts::kernel(node)?,
        Op::FlashAttn { .. } => attention::kernel(node)?,
        Op::FlashAttnBack { .. } => {
            Kernel::with_scratch(attention::gradient::scratch, attention::gradient::build)
        }
        Op::OutProd => out_prod::kernel(node)?,
        Op::RepeatBack { .. } => Kernel::plain(backward::repeat),
        Op::SiluBack => Kernel::plain(backward::silu),
        Op::RmsNormBack { eps } => {
            dense_rows(node, 1)?;
            Kernel::one_phase(move |c| backward::rms_norm(c, eps))
        }
        Op::SoftMaxBack { scale } => {
            dense_rows(node, 1)?;
            Kernel::one_phase(move |c| backward::soft_max(c, scale))
        }
        Op::GetRowsBack { .. } => Kernel::plain(backward::get_rows),
        Op::CrossEntropyLoss => Kernel::with_scratch(
            |node, _, _| training::scratch(node),
            training::cross_entropy,
        ),
        Op::CrossEntropyLossBack => Kernel::plain(training::cross_entropy_back),
        Op::OptStepAdamW => Kernel::one_phase(training::adam_w),
        Op::OptStepSgd => Kernel::one_phase(training::gradient_descent),
        Op::LightningIndexer => indexer::kernel(node)?,
        Op::Conv2d { .. } | Op::Conv3d { .. } => convolution::kernel(node)?,
        ref op if is_formula(op.kind()) => formula::kernel(node)?,
        ref op => return Err(format!("there is no kernel for {}", op.name()).into()),
    })
}

/// Refuses packed weights except as a whole, in products and row lookups.
fn only_where_known(node: Node<'_>, source: usize) -> Result<(), UnsupportedKernel> {
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

/// Checks that elements and blocks are aligned, and that blocks have no gaps.
fn aligned(layout: &Layout) -> Result<(), UnsupportedKernel> {
    let alignment = alignment(layout.dtype());
    if !layout.strides().iter().all(|s| s.is_multiple_of(alignment)) {
        return Err("strides are not multiples of the element's alignment".into());
    }
    if layout.dtype().is_quantized() && !layout.has_contiguous_rows() {
        return Err("blocks of a row do not lie one after the other".into());
    }
    Ok(())
}
