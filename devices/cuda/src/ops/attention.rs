//! Attention.

use super::blocks::{decode, module_for, whole_blocks};
use super::packed::Int8Columns;
use super::{Launches, NO_KERNEL, floats};
use crate::modules;
use crate::plan::{Card, LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported};
use samite_core::{DType, Node, Op, Precision};

/// Source of the kernels without tensor cores.
const SOURCE: &str = "flash_attn";
/// Minimum number of rows with the same keys for tensor cores.
const MIN_TENSOR_ROWS: usize = 16;
/// Threads of a group.
const THREADS: u32 = 128;
/// Keys of a tile.
const KEYS: usize = 32;
/// Minimum number of keys of a group if several groups share the keys of a row.
const MIN_KEYS: usize = 32;
/// Maximum number of groups that share the keys of a row.
const MAX_SHARES: usize = 64;
/// Maximum elements of a query or value.
const MAX_HEAD: usize = 640;
/// Maximum elements of a head for gradients.
const MAX_BACK_HEAD: usize = 1024;
/// Offset of scratch memory that follows other scratch memory is a multiple of this.
const ALIGNMENT: usize = 256;

/// Returns the launches of attention.
pub fn launches(node: Node<'_>, card: &Card) -> Launches {
    match *node.op() {
        Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            precision,
        } => flash(node, [scale, max_bias, softcap], precision, card, None),
        Op::FlashAttnBack { scale } => flash_back(node, scale),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns the launches of attention that also convert its result to the columns `b` of a product,
/// as 8-bit numbers. There are some only where groups share the keys of a row.
pub fn quantized(node: Node<'_>, b: &LaunchOperand, card: &Card) -> Launches {
    let &Op::FlashAttn {
        scale,
        max_bias,
        softcap,
        precision,
    } = node.op()
    else {
        return Err(NO_KERNEL.into());
    };
    if !node.layout().shape()[0].is_multiple_of(32) {
        return Err(NO_KERNEL.into());
    }
    let columns = Some(Int8Columns::new(b));
    flash(node, [scale, max_bias, softcap], precision, card, columns)
}

/// Kernel of attention: rows of a tile, source and function. A row is a query of one head.
#[derive(Clone, Copy)]
struct AttentionKernel {
    rows: usize,
    source: &'static str,
    function: &'static str,
}

impl AttentionKernel {
    /// Returns the kernel for heads of at most `size` elements and `rows` rows with the same keys.
    fn new(size: usize, rows: usize) -> Self {
        let (rows, function) = match (size, rows) {
            (..=128, 17..) => (32, "flash_attn_32_1"),
            (..=128, _) => (8, "flash_attn_8_1"),
            (..=256, 9..) => (16, "flash_attn_16_2"),
            _ => (8, "flash_attn_8_5"),
        };
        AttentionKernel {
            rows,
            source: SOURCE,
            function,
        }
    }

    /// Does what [`new`](Self::new) does, with tensor cores. They multiply halves. Returns `None`
    /// if there is no such kernel.
    fn with_tensor_cores(size: usize, rows: usize, keys: DType, card: &Card) -> Option<Self> {
        let function = match size {
            0..=64 => "flash_attn_mma_64",
            65..=128 => "flash_attn_mma_128",
            _ => return None,
        };
        let kernel = AttentionKernel {
            rows: 64,
            source: "flash_attn_mma",
            function,
        };
        let has_kernel = modules::find(&module_for(kernel.source, keys)).is_some();
        (has_kernel && rows >= MIN_TENSOR_ROWS && card.capability >= 80).then_some(kernel)
    }
}

/// Returns the number of groups that share the keys of a row, so that few rows still occupy the
/// card.
fn shares(groups: usize, keys: usize, card: &Card) -> usize {
    let enough = 4 * card.processors as usize;
    (enough / groups.max(1))
        .min(keys / MIN_KEYS)
        .clamp(1, MAX_SHARES)
}

/// Computes attention in one pass over keys and values. Keys and values that have no kernel are
/// decoded to scratch memory first. If `columns` is set, the result is also stored there.
fn flash(
    node: Node<'_>,
    [scale, max_bias, softcap]: [f32; 3],
    precision: Precision,
    card: &Card,
    columns: Option<Int8Columns>,
) -> Launches {
    let (y, q) = (node.result(), node.operand(0)?);
    let (mut k, mut v) = (node.operand(1)?, node.operand(2)?);
    let (mask, sinks) = (node.optional(3), node.optional(4));
    if q.shape[0].max(v.shape[0]) > MAX_HEAD {
        return Err("heads of this size".into());
    }
    whole_blocks(&k)?;
    whole_blocks(&v)?;
    let mut launches = Vec::new();
    // Scratch memory begins with the columns.
    let codes = columns.map(|columns| columns.scratch);
    let mut scratch = codes.map_or(0, |codes| codes.bytes().next_multiple_of(ALIGNMENT));
    let has_kernel = |dtype| modules::find(&module_for(SOURCE, dtype)).is_some();
    if k.dtype != v.dtype || !has_kernel(k.dtype) {
        for operand in [&mut k, &mut v] {
            if operand.dtype != DType::F32 {
                let decoded = contiguous(operand, scratch)?;
                scratch = (scratch + decoded.bytes()).next_multiple_of(ALIGNMENT);
                launches.push(decode(decoded, *operand)?);
                *operand = decoded;
            }
        }
    }
    let heads = q.shape[2];
    let sharing = heads / k.shape[2].max(1);
    let rows = q.shape[1] * sharing;
    let size = q.shape[0].max(v.shape[0]);
    let may_round = softcap == 0.0 && precision == Precision::Default;
    let kernel = may_round
        .then(|| AttentionKernel::with_tensor_cores(size, rows, k.dtype, card))
        .flatten()
        .unwrap_or_else(|| AttentionKernel::new(size, rows));
    let groups = rows.div_ceil(kernel.rows) * k.shape[2] * q.shape[3];
    let shares = shares(groups, k.shape[1], card);
    let partials = match shares {
        1 => LaunchOperand::missing(),
        _ => LaunchOperand::workspace(DType::F32, scratch, q.rows() * shares * (v.shape[0] + 2)),
    };
    let groups = if y.elements() == 0 { 0 } else { groups };
    let keys = k.shape[1].div_ceil(shares).next_multiple_of(KEYS);
    let operands = vec![y, q, k, v, mask, sinks, partials];
    let module = module_for(kernel.source, k.dtype);
    let attention = PlannedLaunch::new(
        &module,
        kernel.function,
        operands,
        (groups * shares).min(MAX_GROUPS),
    )?;
    let power = 1 << heads.max(1).ilog2();
    launches.push(
        attention
            .threads(THREADS)
            .ints([power, shares, keys])
            .floats([scale, max_bias, softcap]),
    );
    if shares > 1 {
        let groups = y.rows().min(MAX_GROUPS);
        let operands = vec![
            y,
            partials,
            sinks,
            codes.unwrap_or(LaunchOperand::missing()),
        ];
        let combine = PlannedLaunch::new("attention", "combine", operands, groups)?;
        let scales = columns.map_or(0, |columns| columns.codes);
        launches.push(combine.threads(THREADS).ints([power, shares, scales]));
    } else if columns.is_some() {
        return Err(NO_KERNEL.into());
    }
    Ok(launches)
}

/// Returns scratch memory from byte `first` on for the elements of `operand` as f32.
fn contiguous(operand: &LaunchOperand, first: usize) -> Result<LaunchOperand, Unsupported> {
    let mut scratch = LaunchOperand::workspace(DType::F32, first, operand.elements());
    scratch.shape = operand.shape;
    for dim in 1..scratch.shape.len() {
        scratch.strides[dim] = scratch.strides[dim - 1] * scratch.shape[dim - 1];
    }
    if scratch.shape.contains(&0) {
        return Err("no keys".into());
    }
    Ok(scratch)
}

/// Computes gradients of attention. The first launch computes those of queries and the row
/// statistics of logits; the second computes those of keys and values.
fn flash_back(node: Node<'_>, scale: f32) -> Launches {
    let mut operands = vec![node.result()];
    for index in 0..4 {
        operands.push(node.operand(index)?);
    }
    let [q, k, v] = [2, 3, 4].map(|index| operands[index]);
    if q.shape[0].max(v.shape[0]) > MAX_BACK_HEAD {
        return Err("heads of this size".into());
    }
    floats(&operands)?;
    operands.push(node.optional(4));
    operands.push(LaunchOperand::workspace(DType::F32, 0, 2 * q.rows()));
    [("back_queries", q.rows()), ("back_keys", k.rows())]
        .into_iter()
        .map(|(function, rows)| {
            let groups = rows.min(MAX_GROUPS);
            let launch = PlannedLaunch::new("attention", function, operands.clone(), groups)?;
            Ok(launch.threads(THREADS).floats([scale]))
        })
        .collect()
}
