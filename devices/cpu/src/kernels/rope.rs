//! Rotary position embedding.
//!
//! Angles are the same for all heads of a token, so the first phase computes their sines and
//! cosines once per token. They stay in memory until others are computed, so usually one
//! computation serves all layers. Angles are f64: at position 100,000 an f32 angle would be wrong
//! by 0.004.

use crate::detect::{Isa, vectorized};
use crate::kernel::InputSource;
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::operand::whole;
use crate::simd::math::sin_cos;
use samite_core::{DType, Error, Graph, Node, Op, Result, Rope, RopeMode, TensorId};

/// Rotation of a pair. Only the angle depends on the position.
#[derive(Clone, Copy)]
struct PairRotation {
    /// Angle for each position, before YaRN and the frequency divisors.
    frequency: f64,
    /// Share of the unscaled angle.
    extrapolation: f64,
    /// Index of the token's position.
    axis: usize,
}

/// Inputs of a node's angles.
#[derive(PartialEq)]
pub(crate) struct Angles {
    rope: Rope,
    is_back: bool,
    /// Positions and optional divisors: memory, type and length.
    sources: [Option<(TensorId, usize, DType, usize)>; 2],
}

impl Angles {
    /// Returns `None` if the node has no angles, or sources with gaps.
    pub fn for_node(node: Node<'_>) -> Option<Self> {
        let (Op::Rope(rope) | Op::RopeBack(rope)) = *node.op() else {
            return None;
        };
        let source = |index| {
            let Some(source) = node.source(index) else {
                return Some(None);
            };
            let (memory, offset) = whole(source)?;
            let len = source.layout().elements();
            Some(Some((memory, offset, source.dtype(), len)))
        };
        Some(Angles {
            rope,
            is_back: matches!(node.op(), Op::RopeBack(_)),
            sources: [source(1)?, source(2)?],
        })
    }

    /// Returns whether `node` writes to these inputs.
    pub fn change_with(&self, node: Node<'_>, graph: &Graph) -> bool {
        node.tensor().written().any(|(_, written)| {
            let memory = graph.memory_of(written);
            let mut sources = self.sources.iter().flatten();
            sources.any(|source| source.0 == memory)
        })
    }
}

/// Returns the bytes of a token's cosines and sines.
fn token_bytes(rope: &Rope) -> Option<usize> {
    let floats = rope.pairs().checked_mul(2)?;
    floats.checked_mul(4)?.checked_next_multiple_of(64)
}

/// Returns the bytes at the start of the workspace for the angles of one of these nodes at a time.
pub(crate) fn table_bytes<'g>(nodes: impl IntoIterator<Item = Node<'g>>) -> Result<usize> {
    let mut most = 0;
    for node in nodes {
        if let Op::Rope(rope) | Op::RopeBack(rope) = node.op() {
            let [_, _, tokens, _] = node.layout().shape();
            let bytes = token_bytes(rope).and_then(|bytes| bytes.checked_mul(tokens));
            most = most.max(bytes.ok_or_else(too_large)?);
        }
    }
    Ok(most)
}

fn too_large() -> Error {
    Error::shape("rope: the size of its workspace overflows")
}

/// Returns the bytes of a worker's row.
fn row_bytes(node: Node<'_>) -> Option<usize> {
    let [n0, ..] = node.layout().shape();
    match node.dtype() {
        DType::F32 => Some(0),
        _ => n0.checked_mul(4)?.checked_next_multiple_of(64),
    }
}

pub(crate) fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    row_bytes(node)?.checked_mul(threads)
}

/// Returns the dimension at which a vector makes `rotations` turns within the original context.
fn correction_dimension(rope: &Rope, rotations: f32) -> f64 {
    let turns = f64::from(rotations) * 2.0 * std::f64::consts::PI;
    rope.dims as f64 * (rope.original_context as f64 / turns).ln()
        / (2.0 * f64::from(rope.freq_base).ln())
}

fn pairs(rope: &Rope) -> Vec<PairRotation> {
    let low = correction_dimension(rope, rope.beta_fast).floor().max(0.0);
    let high = correction_dimension(rope, rope.beta_slow)
        .ceil()
        .min(rope.dims as f64 - 1.0);
    (0..rope.pairs())
        .map(|pair| {
            let turn = rope.turn(pair);
            let exponent = -2.0 * turn.step as f64 / rope.dims as f64;
            let ramp = (pair as f64 - low) / (high - low).max(0.001);
            PairRotation {
                frequency: f64::from(rope.freq_base).powf(exponent),
                extrapolation: if rope.ext_factor == 0.0 {
                    0.0
                } else {
                    (1.0 - ramp.clamp(0.0, 1.0)) * f64::from(rope.ext_factor)
                },
                axis: turn.axis,
            }
        })
        .collect()
}

/// Rotates by angles. The gradient rotates `back`.
pub(crate) fn rotation(context: &KernelContext<'_>, rope: Rope, back: bool) -> Result<Vec<Phase>> {
    let angles = Table {
        at: context.angles(table_bytes([context.node])?)?,
        token: token_bytes(&rope).ok_or_else(too_large)?,
    };
    let rotated = rotate(context, rope, angles)?;
    Ok(match context.input {
        InputSource::Shared => vec![rotated],
        _ => vec![compute(context, rope, back, angles)?, rotated],
    })
}

/// Cosines, then sines, of all pairs of each token.
#[derive(Clone, Copy)]
struct Table {
    at: Scratch,
    /// Bytes of a token's angles.
    token: usize,
}

impl Table {
    fn token(&self, token: usize) -> *mut f32 {
        self.at.at(token * self.token).cast()
    }
}

/// Computes the angles.
fn compute(context: &KernelContext<'_>, rope: Rope, back: bool, angles: Table) -> Result<Phase> {
    let (positions, divisors) = (context.source(1)?, context.optional(2));
    let axes = rope.axes();
    let tokens = positions.shape()[0] / axes;
    let half = rope.pairs();
    let magnitude = if rope.ext_factor == 0.0 {
        rope.attn_factor
    } else {
        rope.attn_factor * (1.0 + 0.1 * (1.0 / rope.freq_scale).ln())
    };
    // A gradient rotates in the opposite direction, with the same magnitude.
    let direction = if back { -magnitude } else { magnitude };
    let turns = RotationTable {
        pairs: pairs(&rope),
        scale: f64::from(rope.freq_scale),
        magnitude,
        direction,
    };
    let isa = context.isa;
    Ok(Phase::new(
        tokens,
        (tokens * half) as f64 * 3.0,
        move |tasks, _| {
            for token in tasks {
                let mut at = [0.0; 4];
                // SAFETY: each token has a position for each axis and one table. Inference checked
                // that each pair has one divisor.
                let (table, divisors) = unsafe {
                    for (axis, at) in at.iter_mut().take(axes).enumerate() {
                        *at = positions.integer([0; 3], axis * tokens + token) as f64;
                    }
                    (
                        std::slice::from_raw_parts_mut(angles.token(token), 2 * half),
                        divisors.map(|divisors| {
                            std::slice::from_raw_parts(divisors.base().cast::<f32>(), half)
                        }),
                    )
                };
                match axes {
                    1 => turn(isa, &turns, at[0], divisors, table),
                    _ => turn_by_axes(isa, &turns, at, divisors, table),
                }
            }
            Ok(())
        },
    ))
}

/// Rotation of positions.
struct RotationTable {
    pairs: Vec<PairRotation>,
    /// Factor of the positions.
    scale: f64,
    /// Factor of cosines and sines.
    magnitude: f32,
    direction: f32,
}

vectorized! {
    /// Computes cosines, then sines, of all pairs at a position.
    fn turn(turns: &RotationTable, position: f64, divisors: Option<&[f32]>, table: &mut [f32]) {
        let &RotationTable { ref pairs, scale, magnitude, direction } = turns;
        let (cosines, sines) = table.split_at_mut(pairs.len());
        for (i, ((cos, sin), pair)) in cosines.iter_mut().zip(sines).zip(pairs).enumerate() {
            let full = position * pair.frequency
                / divisors.map_or(1.0, |divisors| f64::from(divisors[i]));
            let angle = full * (scale + (1.0 - scale) * pair.extrapolation);
            let (s, c) = sin_cos(angle);
            (*cos, *sin) = (c * magnitude, s * direction);
        }
    }
}

vectorized! {
    /// Does what [`turn`] does with several positions that each rotate some pairs.
    fn turn_by_axes(
        turns: &RotationTable,
        at: [f64; 4],
        divisors: Option<&[f32]>,
        table: &mut [f32],
    ) {
        let &RotationTable { ref pairs, scale, magnitude, direction } = turns;
        let (cosines, sines) = table.split_at_mut(pairs.len());
        for (i, ((cos, sin), pair)) in cosines.iter_mut().zip(sines).zip(pairs).enumerate() {
            let full = at[pair.axis % 4] * pair.frequency
                / divisors.map_or(1.0, |divisors| f64::from(divisors[i]));
            let angle = full * (scale + (1.0 - scale) * pair.extrapolation);
            let (s, c) = sin_cos(angle);
            (*cos, *sin) = (c * magnitude, s * direction);
        }
    }
}

/// Rotates the pairs of every head.
fn rotate(context: &KernelContext<'_>, rope: Rope, angles: Table) -> Result<Phase> {
    let (result, source, isa) = (context.result(), context.source(0)?, context.isa);
    let n0 = result.shape()[0];
    let row_bytes = row_bytes(context.node).ok_or_else(too_large)?;
    let scratch = context.scratch(
        row_bytes
            .checked_mul(context.threads)
            .ok_or_else(too_large)?,
    )?;
    Ok(Phase::new(
        result.rows(),
        result.elements() as f64 * 0.6,
        move |tasks, worker| {
            for row in tasks {
                let row = result.layout().row_index(row);
                // SAFETY: the row is inside the shape of both operands. Tasks are rows. A phase
                // before wrote the token's table. Each worker has its own row.
                unsafe {
                    let turned = 2 * rope.pairs();
                    let table = std::slice::from_raw_parts(angles.token(row[1]), turned);
                    let out = if result.dtype() == DType::F32 {
                        result.row_mut::<f32>(row)
                    } else {
                        let own = scratch.at(worker * row_bytes).cast::<f32>();
                        std::slice::from_raw_parts_mut(own, n0)
                    };
                    source.load(row, 0, out);
                    let rotated = &mut out[rope.offset..][..turned];
                    isa.run(|| rotate_head(rotated, table, rope.mode));
                    if result.dtype() != DType::F32 {
                        result.store(isa, row, 0, out);
                    }
                }
            }
            Ok(())
        },
    ))
}

#[inline(always)]
fn rotate_head(x: &mut [f32], table: &[f32], mode: RopeMode) {
    let (cosines, sines) = table.split_at(table.len() / 2);
    let angles = cosines.iter().zip(sines);
    match mode {
        RopeMode::Normal => {
            for ([a, b], (cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        _ => {
            let (a, b) = x.split_at_mut(cosines.len());
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
    }
}
