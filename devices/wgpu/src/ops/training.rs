//! Gradients, losses and optimizer steps.

use super::{elements, floats, reductions};
use crate::plan::{
    Capacity, GROUP, Launch, Operand, OperandSource, Operands, UnsupportedLaunch, WorkgroupCount,
};
use crate::shader::Access;
use samite_core::{DType, Node};

fn all(node: Node<'_>, sources: usize) -> Result<Vec<Operand>, UnsupportedLaunch> {
    let mut operands = vec![node.result()];
    for index in 0..sources {
        operands.push(node.source_operand(index)?);
    }
    floats(&operands)?;
    elements(&operands[0])?;
    Ok(operands)
}

/// Computes the gradient of a repetition.
pub fn repeat_back(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    Ok(Launch::new(
        "repeat_back",
        all(node, 1)?,
        WorkgroupCount::Elements,
    ))
}

/// Computes the gradient of SiLU.
pub fn silu_back(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let launch = Launch::new("elementwise", all(node, 2)?, WorkgroupCount::Elements)
        .with(
            "expression",
            "x * sigmoid(z) * (1.0 + z * (1.0 - sigmoid(z)))",
        )
        .with("first_value", "get_a(i)")
        .with("second_value", "get_b(i)");
    Ok(launch.cut(&[1, 2, 3]))
}

fn row_gradient(
    node: Node<'_>,
    parameter: f32,
    [factor, gradient]: [&str; 2],
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let launch =
        Launch::new("row_gradient", all(node, 2)?, WorkgroupCount::Rows).floats([parameter]);
    let launch = launch.with("factor", factor).with("gradient", gradient);
    Ok(launch
        .with("group_size", GROUP)
        .reduces(capacity)
        .cut(&[1, 2, 3]))
}

/// Computes the gradient of RMSNorm.
pub fn rms_norm_back(
    node: Node<'_>,
    eps: f32,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let texts = [
        "1.0 / sqrt(squares / count + p.x)",
        "factor * (g - x * (factor * factor * products / count))",
    ];
    row_gradient(node, eps, texts, capacity)
}

/// Computes the gradient of softmax.
pub fn soft_max_back(
    node: Node<'_>,
    scale: f32,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    row_gradient(
        node,
        scale,
        ["p.x", "factor * x * (g - products)"],
        capacity,
    )
}

/// Computes the gradient of a row lookup.
pub fn get_rows_back(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let operands = vec![
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
    ];
    floats(&operands[..2])?;
    if operands[2].dtype != DType::I32 {
        return Err("numbers of rows must be i32".into());
    }
    Ok(Launch::new("get_rows_back", operands, WorkgroupCount::Elements).can_fail())
}

/// Computes the cross-entropy loss of logits: first of each row, then their mean.
pub fn cross_entropy(
    node: Node<'_>,
    capacity: &Capacity,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let mut operands = all(node, 2)?;
    let (y, rows) = (operands[0], operands[1].rows());
    operands[0] = Operand::workspace('y', Access::Write, DType::F32, rows);
    let of_rows = Launch::new("cross_entropy", operands, WorkgroupCount::Groups(rows))
        .with("group_size", GROUP)
        .reduces(capacity);
    let mean = reductions::sum_scratch(y, rows, 1.0 / rows as f32, capacity);
    Ok(vec![of_rows, mean])
}

/// Computes the gradient of the cross-entropy loss.
pub fn cross_entropy_back(
    node: Node<'_>,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let operands = all(node, 3)?;
    let rows = operands[0].rows();
    let launch =
        Launch::new("cross_entropy_back", operands, WorkgroupCount::Rows).floats([rows as f32]);
    Ok(launch.with("group_size", GROUP).reduces(capacity))
}

/// Returns the sources as operands. The kernel updates those in `written`.
fn in_place(
    node: Node<'_>,
    sources: usize,
    written: &[usize],
) -> Result<Vec<Operand>, UnsupportedLaunch> {
    let mut operands = Vec::new();
    for index in 0..sources {
        let mut operand = node.source_operand(index)?;
        if written.contains(&index) {
            operand.access = Access::Update;
        }
        debug_assert_eq!(operand.which, OperandSource::Source(index));
        operands.push(operand);
    }
    floats(&operands)?;
    Ok(operands)
}

/// Computes a step of AdamW.
pub fn adamw(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    Ok(Launch::new(
        "adamw",
        in_place(node, 5, &[0, 2, 3])?,
        WorkgroupCount::Elements,
    ))
}

/// Computes a step of gradient descent.
pub fn sgd(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    Ok(Launch::new(
        "sgd",
        in_place(node, 3, &[0])?,
        WorkgroupCount::Elements,
    ))
}
