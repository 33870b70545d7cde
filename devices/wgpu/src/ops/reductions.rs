//! What makes one thing of a whole row.

use super::{elements, floats};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, Reason, Work};
use samite_core::{Node, SortOrder};

/// The longest row that is sorted: the work grows with its square.
const LONGEST_SORT: usize = 1 << 14;

fn both(node: Node<'_>) -> Result<Vec<Operand>, Reason> {
    let operands = vec![node.result(), node.source_operand(0)?];
    floats(&operands)?;
    elements(&operands[0])?;
    Ok(operands)
}

/// The sum of all elements.
pub fn sum(node: Node<'_>, capacity: &Capacity) -> Result<Launch, Reason> {
    let operands = both(node)?;
    let count = operands[1].elements();
    let launch = Launch::new("rows", operands, Work::Groups(1));
    let launch = launch.ints([count, 1]).floats([1.0]);
    Ok(launch.with("GROUP_SIZE", GROUP).reduces(capacity))
}

/// The sum of each row, times `factor`.
pub fn sum_rows(node: Node<'_>, factor: f32, capacity: &Capacity) -> Result<Launch, Reason> {
    let operands = both(node)?;
    let (length, rows) = (operands[1].shape[0], operands[1].rows());
    let launch = Launch::new("rows", operands, Work::Rows).ints([length, rows]);
    Ok(launch
        .floats([factor])
        .with("GROUP_SIZE", GROUP)
        .reduces(capacity))
}

/// Each element and all before it in its row.
pub fn running_sum(node: Node<'_>) -> Result<Launch, Reason> {
    Ok(Launch::new("cumsum", both(node)?, Work::Rows).cut(&[1, 2, 3]))
}

/// Rows scaled by what their elements are together, around their mean or 0.
pub fn norm(
    node: Node<'_>,
    eps: f32,
    [centered, scale]: [&str; 2],
    capacity: &Capacity,
) -> Result<Launch, Reason> {
    let launch = Launch::new("norm", both(node)?, Work::Rows).floats([eps]);
    let launch = launch.with("CENTERED", centered).with("SCALE", scale);
    Ok(launch
        .with("GROUP_SIZE", GROUP)
        .reduces(capacity)
        .cut(&[1, 2, 3]))
}

/// The index of the largest element of each row.
pub fn argmax(node: Node<'_>) -> Result<Launch, Reason> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    floats([&a])?;
    Ok(Launch::new("argmax", vec![a, y], Work::Rows))
}

fn sorted(node: Node<'_>, count: usize, descending: bool) -> Result<Launch, Reason> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    floats([&a])?;
    if a.shape[0] > LONGEST_SORT {
        return Err(format!("rows longer than {LONGEST_SORT}").into());
    }
    let launch = Launch::new("sort", vec![a, y], Work::Elements);
    Ok(launch
        .ints([count, usize::from(descending)])
        .cut(&[1, 2, 3]))
}

/// The indices that sort each row.
pub fn argsort(node: Node<'_>, order: SortOrder) -> Result<Launch, Reason> {
    sorted(node, usize::MAX, order == SortOrder::Descending)
}

/// The indices of the `k` largest elements of each row.
pub fn top_k(node: Node<'_>, k: usize) -> Result<Launch, Reason> {
    sorted(node, k, true)
}
