//! Row reductions: sums, norms, argmax, sort and top-k.

use super::matmul::numbers;
use super::{elements, floats, load_four};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use crate::shader::Access;
use crate::template::include;
use samite_core::{DType, Node, SortOrder};
use samite_fusion::ScaledNorm;

/// Longest row that is sorted. The work grows with the square of the length.
const MAX_SORT: usize = 1 << 14;
/// Length above which top-k first finds the largest elements of pieces of the row.
const SORTED_PIECE: usize = 1 << 10;
/// Number of elements above which several workgroups share a reduction and one combines their
/// results.
const PIECE: usize = 1 << 13;
/// Maximum number of such workgroups.
const MAX_PIECES: usize = 256;

/// Returns the elements per piece and the number of pieces.
fn pieces(count: usize) -> [usize; 2] {
    let size = PIECE.max(count.div_ceil(MAX_PIECES));
    [size, count.div_ceil(size).max(1)]
}

fn both(node: Node<'_>) -> Result<Vec<Operand>, UnsupportedLaunch> {
    let operands = vec![node.result(), node.source_operand(0)?];
    floats(&operands)?;
    elements(&operands[0])?;
    Ok(operands)
}

/// Computes the sum of all elements. Large inputs are first summed in pieces.
pub fn sum(node: Node<'_>, capacity: &Capacity) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let [y, a] = both(node)?[..] else {
        return Err("operands are missing".into());
    };
    let count = a.elements();
    let [size, pieces] = pieces(count);
    if pieces == 1 {
        return Ok(vec![sums([y, a], [count, 1, count], 1.0, capacity)]);
    }
    let scratch = |name, access| Operand::workspace(name, access, DType::F32, pieces);
    Ok(vec![
        sums(
            [scratch('y', Access::Write), a],
            [size, pieces, count],
            1.0,
            capacity,
        ),
        sum_scratch(y, pieces, 1.0, capacity),
    ])
}

/// Computes the sum of `count` numbers in scratch memory, times `factor`.
pub fn sum_scratch(y: Operand, count: usize, factor: f32, capacity: &Capacity) -> Launch {
    let a = Operand::workspace('a', Access::Read, DType::F32, count);
    sums([y, a], [count, 1, count], factor, capacity)
}

/// Computes sums times `factor`. `sizes` holds the elements per sum, the number of sums, and the
/// total number of elements.
fn sums(operands: [Operand; 2], sizes: [usize; 3], factor: f32, capacity: &Capacity) -> Launch {
    Launch::new("rows", operands.to_vec(), WorkgroupCount::Groups(sizes[1]))
        .ints(sizes)
        .floats([factor])
        .with("group_size", GROUP)
        .reduces(capacity)
}

/// Computes the sum of each row, times `factor`.
pub fn sum_rows(
    node: Node<'_>,
    factor: f32,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let [y, a] = both(node)?[..] else {
        return Err("operands are missing".into());
    };
    let (length, rows) = (a.shape[0], a.rows());
    Ok(sums(
        [y, a],
        [length, rows, length * rows],
        factor,
        capacity,
    ))
}

/// Computes the running sum of each row.
pub fn running_sum(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    Ok(Launch::new("cumsum", both(node)?, WorkgroupCount::Rows).cut(&[1, 2, 3]))
}

/// Normalizes rows, around their mean or around 0.
pub fn norm(
    node: Node<'_>,
    eps: f32,
    [centered, scale]: [&str; 2],
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let launch = Launch::new("norm", both(node)?, WorkgroupCount::Rows).floats([eps]);
    let launch = launch.with("centered", centered).with("scale", scale);
    Ok(launch
        .with("group_size", GROUP)
        .reduces(capacity)
        .cut(&[1, 2, 3]))
}

/// Computes a norm of rows, or of the sum of two operands, times a row. If `quantized`, the kernel
/// also quantizes the result to 8 bits.
pub fn scaled_norm(
    norm: &ScaledNorm<'_>,
    quantized: bool,
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let &ScaledNorm {
        norm,
        scaled,
        sum,
        eps,
    } = norm;
    let y = scaled.result().in_node(scaled);
    let b = scaled.source_operand(1)?.in_node(scaled).named('b');
    let mut operands = vec![y];
    let (mut first, mut again) = ("four(row, k)", "four(row, k)");
    let loaded;
    let mut sums = String::new();
    match sum {
        None => {
            let a = norm.source_operand(0)?.in_node(norm).named('a');
            loaded = load_four(&a);
            operands.push(a);
        }
        Some(sum) => {
            let a = sum.source_operand(0)?.in_node(sum).named('a');
            let c = sum.source_operand(1)?.in_node(sum).named('c');
            let mut s = sum.result().in_node(sum).named('s');
            s.access = Access::Update;
            loaded = format!("{} + {}", load_four(&a), load_four(&c));
            (first, again) = ("summed(row, k)", "again(row, k)");
            sums = include("scaled_norm_sums", [("loaded_sum", load_four(&s))]);
            operands.extend([a, c, s]);
        }
    }
    operands.push(b);
    floats(&operands)?;
    elements(&y)?;
    let scratch = operands.len();
    if quantized {
        operands.push(numbers(&y, Access::Write));
    }
    let launch = Launch::new("scaled_norm", operands, WorkgroupCount::Rows)
        .floats([eps])
        .with("loaded_a", loaded)
        .with("loaded_b", load_four(&b))
        .with("sum_of_four", first)
        .with("again", again)
        .with("sums", sums)
        .with("group_size", GROUP);
    let launch = if quantized {
        launch
            .with("quantize_function", "{{>q8}}")
            .with("scratch", scratch)
            .with(
                "quantized",
                "quantize(x, k, number, shape.x, rows_of(shape), local)",
            )
    } else {
        launch.with("quantize_function", "").with("quantized", "")
    };
    Ok(launch.reduces(capacity))
}

/// Computes the index of the largest element of each row. Long rows are first searched in pieces.
pub fn argmax(node: Node<'_>) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    floats([&a])?;
    let (length, rows) = (a.shape[0], a.rows());
    let [size, pieces] = pieces(length);
    let launch = |operands: Vec<Operand>, sizes: [usize; 3], candidate: &str| {
        Launch::new("argmax", operands, WorkgroupCount::Groups(rows * sizes[2]))
            .ints(sizes)
            .with("candidate", candidate)
    };
    if pieces == 1 {
        return Ok(vec![launch(vec![a, y], [length, length, 1], "j")]);
    }
    let scratch = |name, access| Operand::workspace(name, access, DType::I32, rows * pieces);
    let found = format!("u32(int_w(at_w(vec4<u32>(number * {pieces}u + j, 0u, 0u, 0u))))");
    Ok(vec![
        launch(
            vec![a, scratch('y', Access::Write)],
            [length, size, pieces],
            "j",
        ),
        launch(
            vec![a, y, scratch('w', Access::Read)],
            [pieces, pieces, 1],
            &found,
        ),
    ])
}

/// Stores the index of an element: in the result, or in the candidates of its piece of the row.
const STORED: &str = "store_int_y(at_y(vec4<u32>(before, i.yzw)), i32(i.x))";
const STORED_OF_PIECE: &str = "let number = (n / shape.x * ((shape.x + piece - 1u) / piece) + i.x / piece) * count + before; store_int_y(at_y(vec4<u32>(number, 0u, 0u, 0u)), i32(i.x))";

fn sorted(node: Node<'_>, count: usize, descending: bool) -> Result<Launch, UnsupportedLaunch> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    floats([&a])?;
    if a.shape[0] > MAX_SORT {
        return Err(format!("rows longer than {MAX_SORT}").into());
    }
    let launch = Launch::new("sort", vec![a, y], WorkgroupCount::Elements);
    Ok(launch
        .ints([count, usize::from(descending), usize::MAX])
        .with("stored", STORED)
        .cut(&[1, 2, 3]))
}

/// Computes the indices that sort each row.
pub fn argsort(node: Node<'_>, order: SortOrder) -> Result<Launch, UnsupportedLaunch> {
    sorted(node, usize::MAX, order == SortOrder::Descending)
}

/// Computes the indices of the `k` largest elements of each row. Long rows are first searched in
/// pieces.
pub fn top_k(node: Node<'_>, k: usize) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a) = (node.result(), node.source_operand(0)?);
    let pieces = a.shape[0].div_ceil(SORTED_PIECE);
    if pieces <= 4 || k >= SORTED_PIECE {
        return Ok(vec![sorted(node, k, true)?]);
    }
    floats([&a])?;
    let found = k * pieces;
    if found > MAX_SORT {
        return Err(format!("so many of a row, of more than {MAX_SORT} in its pieces").into());
    }
    let count = found * a.rows();
    let scratch = |name, access| Operand::workspace(name, access, DType::I32, count);
    let first = Launch::new(
        "sort",
        vec![a, scratch('y', Access::Write)],
        WorkgroupCount::Elements,
    );
    let operands = vec![a, y, scratch('w', Access::Read)];
    let work = WorkgroupCount::Groups(count.div_ceil(GROUP as usize));
    Ok(vec![
        first
            .ints([k, 1, SORTED_PIECE])
            .with("stored", STORED_OF_PIECE),
        Launch::new("top_k", operands, work).ints([k, SORTED_PIECE, pieces]),
    ])
}
