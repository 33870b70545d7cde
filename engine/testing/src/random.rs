//! Random graphs for tests of schedulers.

use crate::recipe::{Recipe, Rng};
use samite_core::{
    DType, Glu, Graph, Layout, Op, Result, Rope, RopeMode, Shape, StoredTensor, TensorId, Unary,
    Usage,
};
use std::sync::Arc;

/// A graph with data for its inputs.
#[derive(Clone, Debug)]
pub struct RandomGraph {
    /// A graph of 1 to 40 computed nodes with their leaves and views. At least one output.
    pub graph: Graph,
    /// Data to write to each input before a run.
    pub inputs: Vec<(TensorId, Vec<u8>)>,
}

/// Function that stores a tensor with name, layout, usage and contents.
pub type StoreTensor<'a> = dyn FnMut(&str, Layout, Usage, &[u8]) -> Result<Arc<StoredTensor>> + 'a;

/// Creates a graph of many operations with small shapes: chains and joins, views and permutations,
/// copies into leaves, rows set in stored tensors and read again, several inputs and outputs. The
/// same seed gives the same graph, and all values stay finite and small.
///
/// `store` places each stored tensor: weights ([`Usage::Weights`]) and caches ([`Usage::Any`]),
/// with name, layout and initial contents, which it writes.
///
/// # Errors
/// If `store` fails.
pub fn random_graph(seed: u64, store: &mut StoreTensor<'_>) -> Result<RandomGraph> {
    random_graph_up_to(seed, 40, store)
}

/// Does what [`random_graph`] does, but ends after this number of computed nodes, plus a few that
/// belong to the last one. The result is the start of the same graph.
///
/// # Errors
/// As [`random_graph`].
pub fn random_graph_up_to(
    seed: u64,
    most_nodes: usize,
    store: &mut StoreTensor<'_>,
) -> Result<RandomGraph> {
    let mut maker = Maker {
        rng: Rng::new(seed),
        graph: Graph::new(),
        inputs: Vec::new(),
        values: Vec::new(),
        stored: 0,
        store,
    };
    for _ in 0..1 + maker.rng.below(3) {
        maker.input()?;
    }
    let nodes = (1 + maker.rng.below(40)).min(most_nodes);
    while maker.computed() < nodes {
        maker.grow()?;
    }
    maker.finish()
}

/// Extent of dimension 0 of every value: a whole block of the small quantized types.
const WIDTH: usize = 32;

/// Some of the operations of these graphs, by [name](Op::name), which a test device may lack.
pub const RANDOM_GRAPH_OPS: &[&str] = &[
    "silu", "rms_norm", "add", "mul_mat", "soft_max", "cpy", "set_rows", "get_rows", "scale",
    "concat",
];

/// Magnitude beyond which values are clamped, so that chains of products do not overflow.
const BOUND: f32 = 16.0;

/// An f32 tensor `[32, rows]` that later nodes may use.
#[derive(Clone, Copy)]
struct Value {
    id: TensorId,
    rows: usize,
}

struct Maker<'a, 's> {
    rng: Rng,
    graph: Graph,
    inputs: Vec<(TensorId, Vec<u8>)>,
    values: Vec<Value>,
    stored: usize,
    store: &'a mut StoreTensor<'s>,
}

impl Maker<'_, '_> {
    fn computed(&self) -> usize {
        let tensors = self.graph.tensors().iter();
        tensors.filter(|tensor| tensor.is_computed()).count()
    }

    fn leaf(&mut self, name: &str, dtype: DType, shape: Shape, recipe: Recipe) -> Result<TensorId> {
        let name = format!("{name}{}", self.inputs.len());
        let id = self.graph.input(&name, dtype, shape)?;
        let bytes = recipe.bytes(&self.graph.tensor(id).layout, &mut self.rng)?;
        self.inputs.push((id, bytes));
        Ok(id)
    }

    fn input(&mut self) -> Result<Value> {
        let rows = 1 + self.rng.below(4);
        let id = self.leaf("x", DType::F32, [WIDTH, rows, 1, 1], Recipe::UNIT)?;
        let value = Value { id, rows };
        self.values.push(value);
        Ok(value)
    }

    fn stored(&mut self, dtype: DType, shape: Shape, usage: Usage) -> Result<TensorId> {
        let layout = Layout::contiguous(dtype, shape)?;
        let recipe = match usage {
            Usage::Weights => Recipe::Uniform {
                min: -0.2,
                max: 0.2,
            },
            _ => Recipe::UNIT,
        };
        let bytes = recipe.bytes(&layout, &mut self.rng)?;
        let name = match usage {
            Usage::Weights => format!("weight{}", self.stored),
            _ => format!("cache{}", self.stored),
        };
        self.stored += 1;
        let tensor = (self.store)(&name, layout, usage, &bytes)?;
        self.graph.stored(&tensor)
    }

    /// Returns an earlier value. Late ones are more likely.
    fn value(&mut self) -> Value {
        let n = self.values.len();
        let at = self.rng.below(n).max(self.rng.below(n));
        self.values[at]
    }

    /// Returns a value with `rows` rows, or with one, which repeats. Adds an input if there is
    /// none.
    fn partner(&mut self, rows: usize) -> Result<Value> {
        let fit: Vec<_> = self
            .values
            .iter()
            .copied()
            .filter(|value| value.rows == rows || value.rows == 1)
            .collect();
        if fit.is_empty() || self.rng.one_in(8) {
            let id = self.leaf("x", DType::F32, [WIDTH, rows, 1, 1], Recipe::UNIT)?;
            return Ok(Value { id, rows });
        }
        Ok(self.rng.pick(&fit))
    }

    /// Adds one operation, with the nodes that it needs.
    fn grow(&mut self) -> Result<()> {
        let a = self.value();
        let x = a.id;
        let mut rows = a.rows;
        let id = match self.rng.below(17) {
            0 => {
                let b = self.partner(rows)?.id;
                let op = self.rng.pick(&[Op::Add, Op::Sub]);
                self.graph.push(op, &[Some(x), Some(b)])?
            }
            1 => {
                let b = self.partner(rows)?.id;
                self.graph.mul(x, b)?
            }
            2 => {
                let function = self.rng.pick(&[
                    Unary::Silu,
                    Unary::Tanh,
                    Unary::Relu,
                    Unary::Gelu,
                    Unary::Neg,
                ]);
                self.graph.unary(x, function)?
            }
            3 => self.graph.rms_norm(x, 1e-5)?,
            4 | 5 => {
                let dtype = self
                    .rng
                    .pick(&[DType::F32, DType::F16, DType::Q8_0, DType::Q4_0]);
                let weight = self.stored(dtype, [WIDTH, WIDTH, 1, 1], Usage::Weights)?;
                self.graph.mul_mat(weight, x)?
            }
            6 => self.graph.soft_max(x, None, None, 0.5, 0.0)?,
            7 => {
                let positions = Recipe::Positions { start: 1 };
                let positions = self.leaf("positions", DType::I32, [rows, 1, 1, 1], positions)?;
                let heads = self.graph.reshape(x, [8, 4, rows, 1])?;
                let rope = Rope::new(8, RopeMode::Neox, 100.0);
                let turned = self.graph.rope(heads, positions, None, rope)?;
                self.graph.reshape(turned, [WIDTH, rows, 1, 1])?
            }
            8 => {
                let picked = 1 + self.rng.below(4);
                let ids = Recipe::Ids { limit: rows };
                let ids = self.leaf("ids", DType::I32, [picked, 1, 1, 1], ids)?;
                rows = picked;
                self.graph.get_rows(x, ids)?
            }
            9 => {
                let b = self.value();
                rows += b.rows;
                let joined = self.graph.concat(x, b.id, 1)?;
                if rows > 4 {
                    rows = 3;
                    self.graph.rows(joined, 1, 3)?
                } else {
                    joined
                }
            }
            10 => {
                // Transposes twice.
                let turned = self.graph.transpose(x)?;
                let turned = self.graph.cont(turned)?;
                let back = self.graph.transpose(turned)?;
                self.graph.cont(back)?
            }
            11 => {
                let scratch = self
                    .graph
                    .leaf("scratch", DType::F16, [WIDTH, rows, 1, 1])?;
                let copy = self.graph.cpy(x, scratch)?;
                let through = self.rng.pick(&[copy, scratch]);
                self.graph.cast(through, DType::F32)?
            }
            12 => {
                // Writes to a cache and reads it, through the result or through the cache itself.
                let dtype = self.rng.pick(&[DType::F32, DType::F16, DType::Q8_0]);
                let cache = self.stored(dtype, [WIDTH, 8, 1, 1], Usage::Any)?;
                let numbers = Recipe::DistinctIds { limit: 8 };
                let numbers = self.leaf("numbers", DType::I64, [rows, 1, 1, 1], numbers)?;
                let mut x = x;
                if self.rng.one_in(2) {
                    // Old contents must not be mistaken for what is read afterwards.
                    let ids = Recipe::Ids { limit: 8 };
                    let ids = self.leaf("ids", DType::I32, [rows, 1, 1, 1], ids)?;
                    let before = self.graph.get_rows(cache, ids)?;
                    x = self.graph.push(Op::Add, &[Some(x), Some(before)])?;
                }
                let written = self.graph.set_rows(x, numbers, cache)?;
                let from = self.rng.pick(&[cache, written]);
                rows = 1 + self.rng.below(4);
                let ids =
                    self.leaf("ids", DType::I32, [rows, 1, 1, 1], Recipe::Ids { limit: 8 })?;
                self.graph.get_rows(from, ids)?
            }
            13 => {
                let gate = self.graph.concat(x, x, 0)?;
                self.graph.glu(gate, Glu::Swiglu)?
            }
            14 => {
                let first = self.rng.below(rows);
                rows = 1;
                self.graph.rows(x, first, 1)?
            }
            15 => {
                // Experts selected by a computed node.
                let experts = self.stored(DType::F32, [WIDTH, WIDTH, 4, 1], Usage::Weights)?;
                let table = Recipe::Ids { limit: 4 };
                let table = self.leaf("chosen", DType::I32, [2, 8, 1, 1], table)?;
                let ids = Recipe::Ids { limit: 8 };
                let ids = self.leaf("ids", DType::I32, [rows, 1, 1, 1], ids)?;
                let chosen = self.graph.get_rows(table, ids)?;
                let x = self.graph.reshape(x, [WIDTH, 1, rows, 1])?;
                let product = self.graph.mul_mat_id(experts, x, chosen)?;
                let joined = self.graph.reshape(product, [WIDTH, 2 * rows, 1, 1])?;
                rows = (2 * rows).min(4);
                self.graph.rows(joined, 0, rows)?
            }
            _ => {
                let sum = self.graph.sum_rows(x)?;
                let mean = self.graph.scale(sum, 1.0 / WIDTH as f32)?;
                self.graph.repeat(mean, [WIDTH, rows, 1, 1])?
            }
        };
        let small = self.graph.clamp(id, -BOUND, BOUND)?;
        let keep_view = self.graph.tensor(id).view.is_some() && self.rng.one_in(2);
        let id = if keep_view { id } else { small };
        self.values.push(Value { id, rows });
        Ok(())
    }

    fn finish(mut self) -> Result<RandomGraph> {
        let last = self.values.len() - 1;
        self.graph.set_output(self.values[last].id);
        for _ in 0..self.rng.below(3) {
            let id = self.value().id;
            if self.graph.tensor(id).op != Op::Leaf {
                self.graph.set_output(id);
            }
        }
        Ok(RandomGraph {
            graph: self.graph,
            inputs: self.inputs,
        })
    }
}
