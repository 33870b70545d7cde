//! Test cases of one operation, as data.

use crate::recipe::{Recipe, Rng};
use samite_core::{DType, Graph, Result, Shape, TensorId};

/// Maximum difference from the reference's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Maximum normalised mean squared error of the decoded values.
    Nmse(f64),
    /// Equal bytes.
    Exact,
    /// For results with indices into the rows of source 0 that sort them: compares the indexed
    /// values in order.
    SortedIndices,
    /// For results with indices into the rows of source 0: compares the sets of indexed values.
    IndexSets,
}

/// An input of a case.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Leaf of the graph.
    pub tensor: TensorId,
    /// Recipe for its content.
    pub recipe: Recipe,
    /// True for a weight, which a device may store in a special layout.
    pub weights: bool,
}

/// A test of one operation: a graph, the data of its inputs, and the limit for the output.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique name: operation, operands, and special properties.
    pub name: String,
    /// [Name](samite_core::Op::name) of the operation that computes the output.
    pub op: &'static str,
    /// The graph: inputs, views of them, and the operation. A few cases have a chain of operations
    /// that devices may fuse.
    pub graph: Graph,
    /// All leaves.
    pub inputs: Vec<Input>,
    /// Tensor to compare. If it lies in the memory of an input, that whole input is compared.
    pub output: TensorId,
    /// Limit for its difference.
    pub limit: Limit,
    /// Source of the output in whose memory the output is placed: a leaf of equal layout.
    pub in_place: Option<usize>,
}

impl Case {
    /// Returns the bytes of input number `index`, always the same.
    ///
    /// # Errors
    /// If the recipe does not fit the type.
    pub fn input_bytes(&self, index: usize) -> Result<Vec<u8>> {
        let input = &self.inputs[index];
        let mut rng = Rng::from_name(&format!("{}/{index}", self.name));
        let layout = &self.graph.tensor(input.tensor).layout;
        input.recipe.bytes(layout, &mut rng)
    }

    /// Returns copies of this case that place the output in the memory of each source that it may
    /// overwrite.
    pub(crate) fn in_place(&self) -> Vec<Case> {
        let output = self.graph.tensor(self.output);
        let sources: Vec<_> = output.operands().map(|(_, id)| id).collect();
        output
            .operands()
            .filter(|&(number, id)| {
                let source = self.graph.tensor(id);
                output.op.may_overwrite(number)
                    && source.flags.input
                    && source.layout == output.layout
                    && sources.iter().filter(|&&other| other == id).count() == 1
            })
            .map(|(number, _)| Case {
                name: format!("{}, in place of source {number}", self.name),
                in_place: Some(number),
                ..self.clone()
            })
            .collect()
    }
}

/// Memory layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Form {
    /// No gaps.
    Plain,
    /// A window into longer rows.
    Gaps,
    /// Dimensions 1 and 2 swapped, like heads and tokens in attention.
    Permuted,
    /// Dimensions 0 and 1 swapped.
    Transposed,
}

/// A case under construction.
#[derive(Default)]
pub(crate) struct Builder {
    pub graph: Graph,
    pub inputs: Vec<Input>,
}

impl Builder {
    /// Returns an input without gaps.
    pub fn input(&mut self, dtype: DType, shape: Shape, recipe: Recipe) -> Result<TensorId> {
        let name = format!("in{}", self.inputs.len());
        let tensor = self.graph.input(&name, dtype, shape)?;
        self.inputs.push(Input {
            tensor,
            recipe,
            weights: false,
        });
        Ok(tensor)
    }

    /// Returns an input without gaps that is a weight.
    pub fn weights(&mut self, dtype: DType, shape: Shape, recipe: Recipe) -> Result<TensorId> {
        let tensor = self.input(dtype, shape, recipe)?;
        self.inputs.iter_mut().for_each(|input| {
            input.weights |= input.tensor == tensor;
        });
        Ok(tensor)
    }

    /// Returns an operand of `shape` in an input with this form.
    pub fn operand(
        &mut self,
        dtype: DType,
        shape: Shape,
        recipe: Recipe,
        form: Form,
    ) -> Result<TensorId> {
        let [n0, n1, n2, n3] = shape;
        match form {
            Form::Plain => self.input(dtype, shape, recipe),
            Form::Gaps => {
                let block = dtype.block_len();
                let base = self.input(dtype, [n0 + 3 * block, n1 + 1, n2, n3], recipe)?;
                let [s0, s1, s2, s3] = self.graph.tensor(base).layout.strides();
                self.graph.view(base, shape, [s1, s2, s3], s1 + s0)
            }
            Form::Permuted => {
                let base = self.input(dtype, [n0, n2, n1, n3], recipe)?;
                self.graph.permute(base, [0, 2, 1, 3])
            }
            Form::Transposed => {
                let base = self.input(dtype, [n1, n0, n2, n3], recipe)?;
                self.graph.transpose(base)
            }
        }
    }
}

/// Cases created so far.
#[derive(Default)]
pub(crate) struct Cases(pub Vec<Case>);

impl Cases {
    /// Adds the case that `build` creates, and its in-place variants. `note` names special
    /// properties, if any. The name also contains the operation and its operands.
    ///
    /// # Panics
    /// If the case is malformed, which is a bug in this crate.
    pub fn add(
        &mut self,
        note: &str,
        limit: Limit,
        build: impl FnOnce(&mut Builder) -> Result<TensorId>,
    ) {
        let mut builder = Builder::default();
        let output = match build(&mut builder) {
            Ok(output) => output,
            Err(error) => panic!("a case of the conformance suite is malformed: {error}"),
        };
        let graph = builder.graph;
        let node = graph.tensor(output);
        let operands: Vec<_> = node
            .sources
            .iter()
            .map(|source| source.map_or("-".into(), |id| graph.tensor(id).layout.to_string()))
            .collect();
        let mut name = format!("{}: {} -> {}", node.op, operands.join(", "), node.layout);
        if !note.is_empty() {
            name = format!("{name}, {note}");
        }
        let case = Case {
            name,
            op: node.op.name(),
            inputs: builder.inputs,
            output,
            limit,
            in_place: None,
            graph,
        };
        let variants = case.in_place();
        self.0.push(case);
        self.0.extend(variants);
    }
}
