//! Row reductions: sums, norms, softmax, argmax, sort and top-k.

use super::{Launches, NO_KERNEL, floats};
use crate::plan::{
    GROUP, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported, groups_for,
};
use samite_core::{DType, Node, Op, SortOrder};

/// Elements that are sorted in shared memory, as in `kernels/sort.cu`.
const SORTED_PIECE: usize = 2048;
/// Longest row that is sorted as a whole. The work grows with the square of the length.
const MAX_SORT: usize = 1 << 14;
/// Number of elements above which several groups share a sum and one adds up their results.
const SUMMED_PIECE: usize = 1 << 13;

/// Row length from which a norm uses the most threads that a group can have.
const LONG_ROW: usize = 2048;

/// Returns the threads of a group that norms rows of `length` elements.
pub fn norm_threads(length: usize) -> u32 {
    if length < LONG_ROW { GROUP } else { 1024 }
}

/// Returns the launches of a reduction.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::Norm { eps } => norm(node, eps, [1, 0]),
        Op::RmsNorm { eps } => norm(node, eps, [0, 0]),
        Op::L2Norm { eps } => norm(node, eps, [0, 1]),
        Op::Sum => sum(node.result(), node.operand(0)?, 1.0),
        Op::SumRows => sum_rows(node, 1.0),
        Op::Mean => {
            let count = node.operand(0)?.shape[0];
            sum_rows(node, 1.0 / count as f32)
        }
        Op::CumSum => {
            let operands = vec![node.result(), node.operand(0)?];
            floats(&operands)?;
            let groups = operands[0].rows().min(MAX_GROUPS);
            Ok(vec![PlannedLaunch::new(
                "reduce",
                "running_sums",
                operands,
                groups,
            )?])
        }
        Op::ArgMax => argmax(node),
        Op::ArgSort { order } => argsort(node, order),
        Op::TopK { k } => top_k(node, k),
        Op::SoftMax { scale, max_bias } => soft_max(node, scale, max_bias),
        _ => Err(NO_KERNEL.into()),
    }
}

fn norm(node: Node<'_>, eps: f32, kind: [usize; 2]) -> Launches {
    let operands = vec![node.result(), node.operand(0)?];
    floats(&operands)?;
    let (length, groups) = (operands[0].shape[0], operands[0].rows().min(MAX_GROUPS));
    Ok(vec![
        PlannedLaunch::new("norm", "norm", operands, groups)?
            .ints(kind)
            .floats([eps])
            .threads(norm_threads(length)),
    ])
}

/// Computes `sums` sums of `count` elements of `all` each, in logical order.
fn sums(
    [y, a]: [LaunchOperand; 2],
    [count, sums, all]: [usize; 3],
    factor: f32,
) -> Result<PlannedLaunch, Unsupported> {
    floats([&y, &a])?;
    if u32::try_from(count).is_err() {
        return Err("sums of so many elements".into());
    }
    let launch = PlannedLaunch::new("reduce", "sums", vec![y, a], sums.min(MAX_GROUPS))?;
    Ok(launch
        .ints([count, sums, all & 0xffff_ffff, all >> 32])
        .floats([factor]))
}

/// Computes the sum of all elements of `a`, times `factor`. Many are first summed in pieces.
fn sum(y: LaunchOperand, a: LaunchOperand, factor: f32) -> Launches {
    let all = a.elements();
    let pieces = all.div_ceil(SUMMED_PIECE).clamp(1, 1 << 10);
    let count = all.div_ceil(pieces);
    if pieces == 1 {
        return Ok(vec![sums([y, a], [all, 1, all], factor)?]);
    }
    let pieces = all.div_ceil(count);
    let scratch = LaunchOperand::workspace(DType::F32, 0, pieces);
    Ok(vec![
        sums([scratch, a], [count, pieces, all], 1.0)?,
        sums([y, scratch], [pieces, 1, pieces], factor)?,
    ])
}

/// Computes the sum of all elements of `a`, times `factor`, in one group.
///
/// # Errors
/// Returns the reason if there are too many.
pub fn sum_in_one_group(
    y: LaunchOperand,
    a: LaunchOperand,
    factor: f32,
) -> Result<PlannedLaunch, Unsupported> {
    let all = a.elements();
    sums([y, a], [all, 1, all], factor)
}

fn sum_rows(node: Node<'_>, factor: f32) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    let (length, rows) = (a.shape[0], a.rows());
    Ok(vec![sums([y, a], [length, rows, length * rows], factor)?])
}

fn argmax(node: Node<'_>) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    floats([&a])?;
    let threads = norm_threads(a.shape[0]);
    let launch = PlannedLaunch::new("reduce", "argmax", vec![y, a], a.rows().min(MAX_GROUPS))?;
    Ok(vec![launch.threads(threads)])
}

/// Returns a launch that sorts pieces of rows. `found` are candidates, `kept` takes the results.
fn sort(
    [y, a, found, kept]: [LaunchOperand; 4],
    [pieces, count, ascends, candidates]: [usize; 4],
) -> Result<PlannedLaunch, Unsupported> {
    let groups = (pieces * a.rows()).min(MAX_GROUPS);
    let launch = PlannedLaunch::new("sort", "sort", vec![y, a, found, kept], groups)?;
    Ok(launch
        .ints([pieces, count, ascends, candidates])
        .threads(512))
}

fn argsort(node: Node<'_>, order: SortOrder) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    floats([&a])?;
    let (length, ascends) = (a.shape[0], usize::from(order == SortOrder::Ascending));
    if length <= SORTED_PIECE {
        let operands = [y, a, LaunchOperand::missing(), LaunchOperand::missing()];
        return Ok(vec![sort(operands, [1, length, ascends, 0])?]);
    }
    if length > MAX_SORT {
        return Err(format!("rows longer than {MAX_SORT}").into());
    }
    let launch = PlannedLaunch::new("sort", "sort_long", vec![y, a], groups_for(a.elements()))?;
    Ok(vec![launch.ints([0, 0, ascends])])
}

/// Computes the `k` largest elements of each row: those of pieces first, then those of the
/// candidates, until one piece is left.
fn top_k(node: Node<'_>, k: usize) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    floats([&a])?;
    if k > SORTED_PIECE / 2 {
        // So few candidates would go that the work does not shrink.
        if a.shape[0] > SORTED_PIECE {
            return Err(format!("more than {} of long rows", SORTED_PIECE / 2).into());
        }
    }
    let rows = a.rows();
    let mut launches = Vec::new();
    let mut found = LaunchOperand::missing();
    let mut count = a.shape[0];
    // Two halves of the workspace take turns.
    let half = count.div_ceil(SORTED_PIECE) * k * rows * 4;
    for turn in 0.. {
        let pieces = count.div_ceil(SORTED_PIECE).max(1);
        if pieces == 1 {
            let operands = [y, a, found, LaunchOperand::missing()];
            launches.push(sort(operands, [1, k, 0, count])?);
            break;
        }
        let first = (turn % 2) * half.next_multiple_of(256);
        let kept = LaunchOperand::workspace(DType::I32, first, pieces * k * rows);
        launches.push(sort([y, a, found, kept], [pieces, k, 0, count])?);
        (found, count) = (kept, pieces * k);
    }
    Ok(launches)
}

fn soft_max(node: Node<'_>, scale: f32, max_bias: f32) -> Launches {
    let operands = vec![
        node.result(),
        node.operand(0)?,
        node.optional(1),
        node.optional(2),
    ];
    floats(&operands)?;
    let [length, _, heads, _] = operands[0].shape;
    let groups = operands[0].rows().min(MAX_GROUPS);
    let launch = PlannedLaunch::new("soft_max", "soft_max", operands, groups)?;
    Ok(vec![
        launch
            .ints([1 << heads.max(1).ilog2()])
            .floats([scale, max_bias])
            .threads(norm_threads(length)),
    ])
}
