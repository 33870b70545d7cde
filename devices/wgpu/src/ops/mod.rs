//! The operation table: maps a node to its launches, or to the reason why the node is unsupported.
//! Both the device's `supports` and its runs use it.

pub mod attention;
mod copies;
pub mod elementwise;
pub mod matmul;
pub mod reductions;
pub mod rope;
mod rows;
mod state;
mod training;

use crate::plan::{Capacity, Launch, Operand, Operands, UnsupportedLaunch};
use crate::shader::{is_readable, is_writable};
use samite_core::{DType, Node, Op};
use samite_fusion::OperandFacts;

/// Returns the launches of one node. Leaves, views and empty results need none.
///
/// # Errors
/// Returns the reason if the device does not support the node.
pub fn launches_of(
    node: Node<'_>,
    capacity: &Capacity,
    known: OperandFacts,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    if matches!(node.op(), Op::Leaf) || node.op().is_view() {
        return Ok(Vec::new());
    }
    let mut fitting = Vec::new();
    for launch in whole(node, capacity, known)? {
        check_types(&launch)?;
        launch.fit(capacity, &mut fitting)?;
    }
    Ok(fitting)
}

/// Returns the launches of a node before they are split at the binding limit.
fn whole(
    node: Node<'_>,
    capacity: &Capacity,
    known: OperandFacts,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let one = |launch: Result<Launch, UnsupportedLaunch>| launch.map(|launch| vec![launch]);
    match *node.op() {
        Op::Dup | Op::Cont | Op::Cpy | Op::Cast { .. } => one(copies::convert(node)),
        Op::Repeat { .. } => one(copies::repeat(node)),
        Op::Concat { dim } => one(copies::concat(node, dim)),
        Op::Pad { before, .. } => one(elementwise::pad(node, before)),

        Op::Add => one(elementwise::binary(node, "x + z")),
        Op::Sub => one(elementwise::binary(node, "x - z")),
        Op::Mul => one(elementwise::binary(node, "x * z")),
        Op::Div => one(elementwise::binary(node, "x / z")),
        Op::Scale { scale, bias } => one(elementwise::unary(node, "p.x * x + p.y", [scale, bias])),
        Op::Sqr => one(elementwise::unary(node, "x * x", [])),
        Op::Sqrt => one(elementwise::unary(node, "sqrt(x)", [])),
        Op::Log => one(elementwise::unary(node, "log(x)", [])),
        Op::Clamp { min, max } => one(elementwise::unary(
            node,
            "max(min(x, p.y), p.x)",
            [min, max],
        )),
        Op::Fill { value } => one(elementwise::generate(node, "p.x", [value])),
        Op::Arange { start, step, .. } => one(elementwise::generate(
            node,
            "p.x + p.y * f32(n)",
            [start, step],
        )),
        Op::Unary(function) => one(elementwise::function(node, function)),
        Op::Glu { kind, swapped } => one(elementwise::glu(node, kind, swapped)),
        Op::DiagMaskInf { past } => one(elementwise::diag_mask(node, past, f32::NEG_INFINITY)),
        Op::DiagMaskZero { past } => one(elementwise::diag_mask(node, past, 0.0)),
        Op::AddId => one(rows::add_id(node)),
        Op::GetRows => rows::get(node, capacity, known.packed),
        Op::SetRows => rows::set(node, capacity),

        Op::Sum => reductions::sum(node, capacity),
        Op::SumRows => one(reductions::sum_rows(node, 1.0, capacity)),
        Op::Mean => {
            let count = node.source_layout(0).map_or(1, |x| x.shape()[0]);
            one(reductions::sum_rows(node, 1.0 / count as f32, capacity))
        }
        Op::CumSum => one(reductions::running_sum(node)),
        Op::Norm { eps } => one(reductions::norm(
            node,
            eps,
            ["true", "1.0 / sqrt(squares / count + eps)"],
            capacity,
        )),
        Op::RmsNorm { eps } => one(reductions::norm(
            node,
            eps,
            ["false", "1.0 / sqrt(squares / count + eps)"],
            capacity,
        )),
        Op::L2Norm { eps } => one(reductions::norm(
            node,
            eps,
            ["false", "1.0 / max(sqrt(squares), eps)"],
            capacity,
        )),
        Op::ArgMax => reductions::argmax(node),
        Op::ArgSort { order } => one(reductions::argsort(node, order)),
        Op::TopK { k } => reductions::top_k(node, k),

        Op::MulMat { .. } => matmul::mul_mat(node, capacity, known),
        Op::MulMatId { .. } => matmul::mul_mat_id(node, capacity, known),
        Op::OutProd => one(matmul::out_prod(node)),

        Op::SoftMax { scale, max_bias } => {
            one(attention::soft_max(node, scale, max_bias, capacity))
        }
        Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            ..
        } => attention::flash(
            node,
            [scale, max_bias, softcap],
            capacity,
            known.aligned,
            None,
        ),
        Op::FlashAttnBack { scale } => attention::flash_back(node, scale, capacity),
        Op::Rope(rope) => one(rope::rope(node, rope, 1.0)),
        Op::RopeBack(rope) => one(rope::rope(node, rope, -1.0)),

        Op::SsmConv => one(state::conv(node)),
        Op::SsmScan { snapshots } => one(state::scan(node, snapshots)),
        Op::GatedDeltaNet { snapshots } => one(state::delta_net(node, snapshots)),

        Op::RepeatBack { .. } => one(training::repeat_back(node)),
        Op::SiluBack => one(training::silu_back(node)),
        Op::RmsNormBack { eps } => one(training::rms_norm_back(node, eps, capacity)),
        Op::SoftMaxBack { scale } => one(training::soft_max_back(node, scale, capacity)),
        Op::GetRowsBack { .. } => one(training::get_rows_back(node)),
        Op::CrossEntropyLoss => training::cross_entropy(node, capacity),
        Op::CrossEntropyLossBack => one(training::cross_entropy_back(node, capacity)),
        Op::OptStepAdamW => one(training::adamw(node)),
        Op::OptStepSgd => one(training::sgd(node)),
        _ => Err("there is no kernel for it".into()),
    }
}

/// Checks that kernels can read and write the types of all operands.
fn check_types(launch: &Launch) -> Result<(), UnsupportedLaunch> {
    for operand in &launch.operands {
        let dtype = operand.dtype;
        if operand.access.reads() && !is_readable(dtype) {
            return Err(format!("{dtype} cannot be read").into());
        }
        if operand.access.writes() && !is_writable(dtype) {
            return Err(format!("{dtype} cannot be written").into());
        }
        if operand.access.reads() && dtype.is_quantized() && !operand.has_contiguous_rows() {
            return Err("blocks with gaps between them".into());
        }
    }
    Ok(())
}

/// Returns source 0, the weights.
fn weights(node: Node<'_>, packed: bool) -> Result<Operand, UnsupportedLaunch> {
    let a = node.source_operand(0)?;
    Ok(if packed { a.packed() } else { a })
}

/// Fails for integer operands of a kernel that computes with floats.
fn floats<'a>(operands: impl IntoIterator<Item = &'a Operand>) -> Result<(), UnsupportedLaunch> {
    match operands
        .into_iter()
        .find(|operand| operand.dtype.is_integer() || operand.dtype == DType::F64)
    {
        Some(operand) => Err(format!("{} in place of floats", operand.dtype).into()),
        None => Ok(()),
    }
}

/// Returns the text that loads elements `k` to `k + 3` of row `row`, with 0 past the end of the
/// row.
fn load_four(operand: &Operand) -> String {
    let name = operand.name;
    if operand.shape[0].is_multiple_of(4) && operand.has_contiguous_rows() {
        format!("load4_{name}(row_{name}(row), k)")
    } else {
        format!("guarded4_{name}(row, k)")
    }
}

/// Fails for a quantized result of a kernel that writes single elements.
fn elements(operand: &Operand) -> Result<(), UnsupportedLaunch> {
    if operand.dtype.is_quantized() {
        Err(format!("a result in blocks of {}", operand.dtype).into())
    } else {
        Ok(())
    }
}

#[cfg(test)]
pub mod tests;
