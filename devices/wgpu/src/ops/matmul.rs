//! Matrix products.

use super::{floats, load_four, weights};
use crate::plan::{Capacity, GROUP, Launch, Operand, Operands, UnsupportedLaunch, WorkgroupCount};
use crate::shader::{Access, MATRICES};
use crate::template::include;
use crate::tuning::TILES;
use samite_core::{DType, Node};
use samite_fusion::OperandFacts;

/// Maximum columns of a product that is computed column by column, over whole rows.
pub const MAX_COLUMNS: usize = 8;
/// Maximum number of products with the same columns in one launch.
pub const MAX_MATRICES: usize = 3;
/// Invocations per workgroup of column-by-column products.
const VECTOR_GROUP: usize = 64;
/// Maximum columns for which an invocation holds 32 elements of each column.
const MAX_WIDE_COLUMNS: usize = 2;
/// Rows per workgroup of column-by-column products.
const VECTOR_ROWS: usize = 4;
/// Rows and columns of a tile of larger products.
const TILE: usize = 64;

/// Adds the loads of kernels that walk along rows. With few columns they load groups of 32 elements
/// that share scales, otherwise four elements at a time.
fn along_rows(launch: Launch, a: &Operand, b: &Operand, columns: usize) -> Launch {
    let groups = a.dtype.is_quantized() && a.access == Access::Read && columns <= MAX_WIDE_COLUMNS;
    let (wide, load) = if groups {
        (8, "load32_a(row_a(row), k, &w)".to_owned())
    } else {
        (1, format!("w[0] = {}", load_four(a)))
    };
    launch
        .with("wide_count", wide)
        .with("loaded_a", load)
        .with("loaded_b", load_four(b))
        .with("group_size", VECTOR_GROUP)
}

/// Computes a matrix product. Weights larger than a binding are split by rows, and larger results
/// by columns.
pub fn mul_mat(
    node: Node<'_>,
    capacity: &Capacity,
    known: OperandFacts,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a, b) = (
        node.result(),
        weights(node, known.packed)?,
        node.source_operand(1)?,
    );
    floats([&y, &a, &b])?;
    let room = capacity.binding.saturating_sub(capacity.alignment + 4);
    let mut columns = b.shape[1].max(1);
    while columns > 1
        && (b.part(1, 0, columns).bytes() > room || y.part(1, 0, columns).bytes() > room)
    {
        columns = columns.div_ceil(2);
    }
    let mut rows = a.shape[1].max(1);
    while rows > 1 && a.part(1, 0, rows).bytes() > room {
        rows = rows.div_ceil(2);
    }
    let mut launches = Vec::new();
    for first_column in (0..b.shape[1]).step_by(columns) {
        let count = columns.min(b.shape[1] - first_column);
        for first_row in (0..a.shape[1]).step_by(rows) {
            let height = rows.min(a.shape[1] - first_row);
            let parts = [
                y.part(1, first_column, count).part(0, first_row, height),
                a.part(1, first_row, height),
                b.part(1, first_column, count),
            ];
            let part = product(parts, capacity, known.aligned);
            launches.push(part);
        }
    }
    Ok(launches)
}

fn product([y, a, b]: [Operand; 3], capacity: &Capacity, aligned: bool) -> Launch {
    let (m, n, batches) = (a.shape[1], b.shape[1], b.shape[2] * b.shape[3]);
    if n <= MAX_COLUMNS {
        let work = WorkgroupCount::Groups(m.div_ceil(VECTOR_ROWS) * batches);
        let launch = Launch::new("mul_mat_vec", vec![y, a, b], work).with("column_count", n.max(1));
        return along_rows(launch, &a, &b, n).reduces(capacity);
    }
    let tiles = |tile: usize| n.div_ceil(tile) * batches;
    tiled(vec![y, a, b], tiles, capacity, aligned).with("tiles", "{{>mul_mat_batches}}")
}

/// Number of tiles that keeps large adapters busy.
const ENOUGH_TILES: usize = 256;

/// Computes a tiled product. `tiles` returns the number of tiles along columns for a tile size. The
/// caller sets the value `tiles`, the functions that map tiles to matrices.
fn tiled(
    mut operands: Vec<Operand>,
    tiles: impl Fn(usize) -> usize,
    capacity: &Capacity,
    aligned: bool,
) -> Launch {
    let [a, b] = [1, 2].map(|number| operands[number]);
    let rows = a.shape[1];
    // Halves cover the range and precision of weights of these types.
    let are_halves = a.dtype == DType::F16 || a.dtype.is_quantized() && a.dtype != DType::MXFP4;
    let with_matrices = capacity.matrices && are_halves && a.shape[0].is_multiple_of(32);
    let sizes = &TILES[capacity.tuning.tile.min(TILES.len() - 1)..];
    let count = |[height, width]: [usize; 2]| rows.div_ceil(height) * tiles(width);
    let [height, width] = if with_matrices {
        *sizes
            .iter()
            .find(|&&size| count(size) >= ENOUGH_TILES)
            .unwrap_or(&[64, 64])
    } else {
        [TILE, TILE]
    };
    let mut strides = b.strides[1..].iter();
    let is_wide = with_matrices
        && aligned
        && b.dtype == DType::F32
        && b.has_contiguous_rows()
        && strides.all(|stride| stride.is_multiple_of(16));
    let mut columns = load_four(&b);
    if is_wide {
        operands[2].access = Access::Wide;
        columns = "vector4_b(row_b(row), k)".to_owned();
    }
    let kernel = if with_matrices { MATRICES } else { "mul_mat" };
    let launch = Launch::new(
        kernel,
        operands,
        WorkgroupCount::Groups(count([height, width])),
    )
    .with("loaded_a", load_four(&a))
    .with("loaded_b", columns);
    if !with_matrices {
        return launch;
    }
    // Packed rows are decoded 16 elements at a time. With low tiles, half of them belong to a
    // neighbour.
    let pieces = match (a.access, height) {
        (Access::Packed, 128) => "{{>mul_mat_packed_pieces}}",
        (Access::Packed, _) => "{{>mul_mat_packed_halves}}",
        _ => "{{>mul_mat_pieces}}",
    };
    launch
        .with("loaded_pieces", pieces)
        .with("row_tile", height)
        .with("column_tile", width)
        .with("pieces_a", height / 32)
        .with("pieces_b", width / 32)
        .with("fragments_m", height / 64)
        .with("fragments_n", width / 32)
        .with("group_size", GROUP)
        .reduces(capacity)
}

/// Computes products with selected experts. Few tokens are computed column by column; many are
/// tiled by expert. Weights larger than a binding are split by experts, or by rows of one expert.
pub fn mul_mat_id(
    node: Node<'_>,
    capacity: &Capacity,
    known: OperandFacts,
) -> Result<Vec<Launch>, UnsupportedLaunch> {
    let (y, a) = (node.result(), weights(node, known.packed)?);
    let (b, c) = (node.source_operand(1)?, node.source_operand(2)?);
    floats([&y, &a, &b])?;
    let (experts, choices) = (a.shape[2], c.shape[0] * c.shape[1]);
    // Kernels store indices of choices in floats.
    if choices >= 1 << 24 {
        return Err("so many choices of experts".into());
    }
    let parts = parts_of_experts([y, a], capacity);
    if c.shape[1] > MAX_COLUMNS {
        let scratch = |access| {
            let count = experts * (1 + choices);
            Operand::workspace('w', access, DType::I32, count)
        };
        let lists = vec![scratch(Access::Write), c, y];
        let lists = Launch::new("expert_lists", lists, WorkgroupCount::Groups(experts))
            .ints([experts])
            .can_fail();
        let products = parts.into_iter().map(|(first, [y, a])| {
            // The last tile of each expert may be partial.
            let tiles = |tile: usize| choices.div_ceil(tile) + a.shape[2];
            let operands = vec![y, a, b, c, scratch(Access::Read)];
            let launch = tiled(operands, tiles, capacity, known.aligned).ints([first, experts]);
            let found = match launch.shader.kernel {
                MATRICES => "found",
                _ => "tile_a[0]",
            };
            launch.with(
                "tiles",
                include("mul_mat_experts", [("found", found.to_owned())]),
            )
        });
        return Ok(std::iter::once(lists).chain(products).collect());
    }
    let products = parts.into_iter().map(|(first, [y, a])| {
        let work = WorkgroupCount::Groups(a.shape[1].div_ceil(VECTOR_ROWS) * choices);
        let launch = Launch::new("mul_mat_id", vec![y, a, b, c], work).ints([first, experts]);
        along_rows(launch, &a, &b, 1).reduces(capacity).can_fail()
    });
    Ok(products.collect())
}

/// Splits results and weights into parts that fit into a binding. Returns each with its first
/// expert.
fn parts_of_experts([y, a]: [Operand; 2], capacity: &Capacity) -> Vec<(usize, [Operand; 2])> {
    let room = capacity.binding.saturating_sub(capacity.alignment + 4);
    let (height, experts) = (a.shape[1], a.shape[2]);
    let fits = |&count: &usize| a.part(2, 0, count).bytes() <= room;
    let count = (1..=experts).rev().find(fits).unwrap_or(1);
    let mut rows = height.max(1);
    while rows > 1 && a.part(2, 0, count).part(1, 0, rows).bytes() > room {
        rows = rows.div_ceil(2);
    }
    let mut parts = Vec::new();
    for first in (0..experts).step_by(count) {
        let a = a.part(2, first, count.min(experts - first));
        for from in (0..height).step_by(rows) {
            let rows = rows.min(height - from);
            parts.push((first, [y.part(0, from, rows), a.part(1, from, rows)]));
        }
    }
    parts
}

/// Returns the scratch operand for the columns as 8-bit numbers, with their scales and sums.
pub fn numbers(columns: &Operand, access: Access) -> Operand {
    let count = columns.rows() * (columns.shape[0] / 4 + columns.shape[0] / 8);
    Operand::workspace('w', access, DType::I32, count)
}

/// Quantizes the columns of a product to 8 bits.
pub fn quantize(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let b = node.source_operand(1)?;
    floats([&b])?;
    let work = WorkgroupCount::Groups(b.rows() * b.shape[0].div_ceil(QUANTIZED_PIECE));
    let launch = Launch::new("quantize", vec![numbers(&b, Access::Write), b], work);
    Ok(launch.with("loaded_b", load_four(&b)).with("scratch", 0))
}

/// Elements that one workgroup quantizes.
pub const QUANTIZED_PIECE: usize = 1024;

/// Computes products of packed weights with the same columns, which are 8-bit numbers in scratch
/// memory.
pub fn packed_products(
    nodes: &[Node<'_>],
    capacity: &Capacity,
) -> Result<Launch, UnsupportedLaunch> {
    let Some(first) = nodes.first() else {
        return Err("no products".into());
    };
    let b = first.source_operand(1)?;
    let (lanes, rows) = capacity.packed_shape([b.shape[0], b.shape[1]], nodes);
    let mut operands = Vec::new();
    let (mut functions, mut calls, mut groups) = (String::new(), String::new(), 0);
    for (&node, [weights, result]) in nodes.iter().zip([['a', 'y'], ['b', 'z'], ['c', 'v']]) {
        let y = node.result().in_node(node).named(result);
        let a = node
            .source_operand(0)?
            .packed()
            .in_node(node)
            .named(weights);
        let count = a.shape[1].div_ceil(rows);
        let names = [("weights", weights), ("result", result)];
        let names = names.map(|(name, operand)| (name, operand.to_string()));
        functions += &include("mul_mat_q8_matrix", names);
        calls += &format!(
            "    if number < {count}u {{ matrix_{weights}(number, local, place); return; }}\n    number -= {count}u;\n"
        );
        groups += count;
        operands.extend([y, a]);
    }
    let scratch = operands.len();
    operands.push(numbers(&b, Access::Wide));
    floats(operands.iter().take(scratch))?;
    let launch = Launch::new("mul_mat_q8", operands, WorkgroupCount::Groups(groups))
        .with("matrices", functions)
        .with("calls", calls)
        .with("scratch", scratch)
        .with("row_count", rows)
        .with("column_count", b.shape[1])
        .with("group_size", lanes);
    Ok(launch.reduces(capacity))
}

/// Computes the sum of outer products.
pub fn out_prod(node: Node<'_>) -> Result<Launch, UnsupportedLaunch> {
    let operands = vec![
        node.result(),
        node.source_operand(0)?,
        node.source_operand(1)?,
    ];
    floats(&operands)?;
    Ok(Launch::new("out_prod", operands, WorkgroupCount::Elements))
}

const _: () = assert!(
    GROUP as usize == 4 * TILE,
    "each invocation loads four elements of a tile's depth of 16"
);
