//! What makes one thing of a whole row.

use super::matmul::numbers;
use super::{elements, floats, load_four};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, Reason, Work};
use crate::shader::Access;
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

/// A norm of rows times one row, `scaled`; of a sum of two, if there is one. Where `quantized`, the results are made 8-bit numbers, too.
pub fn scaled_norm(
    norm: Node<'_>,
    scaled: Node<'_>,
    sum: Option<(Node<'_>, [Node<'_>; 2])>,
    eps: f32,
    quantized: bool,
    capacity: &Capacity,
) -> Result<Launch, Reason> {
    let y = scaled.result().of(scaled);
    let b = scaled.source_operand(1)?.of(scaled).named('b');
    let mut operands = vec![y];
    let (mut first, mut again) = ("four(row, k)", "four(row, k)");
    let mut loaded;
    match sum {
        None => {
            let a = norm.source_operand(0)?.of(norm).named('a');
            loaded = load_four(&a);
            operands.push(a);
        }
        Some((sum, _)) => {
            let a = sum.source_operand(0)?.of(sum).named('a');
            let c = sum.source_operand(1)?.of(sum).named('c');
            let mut s = sum.result().of(sum).named('s');
            s.access = Access::Update;
            loaded = format!("{} + {}", load_four(&a), load_four(&c));
            (first, again) = ("summed(row, k)", "again(row, k)");
            loaded += &format!(
                ";\n}}\nfn summed(row: vec3<u32>, k: u32) -> vec4<f32> {{\n    let x = four(row, k);\n    EACH(j, 4) {{ put_s(vec4<u32>(k + #ju, row), x[#j]); }}\n    return x;\n}}\nfn again(row: vec3<u32>, k: u32) -> vec4<f32> {{\n    return {}",
                load_four(&s)
            );
            operands.extend([a, c, s]);
        }
    }
    operands.push(b);
    floats(&operands)?;
    elements(&y)?;
    let scratch = operands.len();
    let mut quantize = "";
    if quantized {
        operands.push(numbers(&y, Access::Write));
        quantize = "quantize(x, k, number, shape.x, rows_of(shape), local)";
    }
    let launch = Launch::new("scaled_norm", operands, Work::Rows)
        .floats([eps])
        .with("LOADED_A", loaded)
        .with("LOADED_B", load_four(&b))
        .with("SUM_OF_FOUR", first)
        .with("AGAIN", again)
        .with("QUANTIZED;", quantize.to_owned() + ";")
        .with("SCRATCH", scratch)
        .with("GROUP_SIZE", GROUP);
    Ok(launch.reduces(capacity))
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
