//! Graph of an encoder: from patches to rows for the language model.

mod attention;
mod projection;

use crate::patches::PatchOrder;
use crate::projector::PositionTable;
use crate::spec::{Norm, VisionSpec};
use crate::weights::EncoderWeights;
use samite_core::{DType, Error, Glu, Graph, Result, TensorId, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// Inputs and result of a graph.
#[derive(Debug)]
pub(crate) struct VisionGraph {
    pub graph: Graph,
    /// Pixels of patches: f32 `[3 · patch size², patches]`.
    pub pixels: TensorId,
    /// Positions for rotations: i32 `[4 · patches]`.
    pub positions: Option<TensorId>,
    /// Rows of the table of positions: i32, one or four for each patch, or all.
    pub table_rows: Option<TensorId>,
    /// Weights of these rows: f32 `[1, 4 · patches]`, or `[all, patches]`.
    pub table_weights: Option<TensorId>,
    /// Number of rows before those of the patches: the class token, if the encoder has one.
    pub class_rows: usize,
    /// Rows for the language model, in the order of patches: f32 `[row width, rows]`. The last one
    /// is that between the rows of an image, if the projector has one.
    pub result: TensorId,
    /// Names of the weights that the graph uses.
    pub used: BTreeSet<String>,
}

/// Row between the rows of an image.
const BREAK_TOKEN: &str = "v.token_embd.img_break";

/// Vector that precedes the patches.
const CLASS_TOKEN: &str = "v.class_embd";

struct VitBuilder<'a> {
    spec: &'a VisionSpec,
    weights: &'a EncoderWeights,
    order: &'a PatchOrder,
    /// Number of rows: patches, and the class token.
    rows: usize,
    graph: Graph,
    leaves: BTreeMap<String, TensorId>,
}

/// Builds the graph for an image with this order of patches.
///
/// # Errors
/// Returns an error if a weight is missing, or if shapes do not match.
pub(crate) fn build(
    spec: &VisionSpec,
    weights: &EncoderWeights,
    order: &PatchOrder,
) -> Result<VisionGraph> {
    let class_rows = usize::from(weights.get(CLASS_TOKEN).is_some());
    let n = order.len();
    let mut builder = VitBuilder {
        spec,
        weights,
        order,
        rows: n + class_rows,
        graph: Graph::new(),
        leaves: BTreeMap::new(),
    };
    let patch = 3 * spec.patch_size * spec.patch_size;
    let pixels = builder
        .graph
        .input("pixels", DType::F32, [patch, n, 1, 1])?;
    let mut x = builder.product(pixels, "v.patch_embd.weight")?;
    if spec.projector.reads_frames() {
        let y = builder.product(pixels, "v.patch_embd.weight.1")?;
        x = builder.graph.add(x, y)?;
    }
    x = builder.biased(x, "v.patch_embd.bias")?;
    if class_rows > 0 {
        let class = builder.vector(x, CLASS_TOKEN)?;
        x = builder.graph.concat(class, x, 1)?;
    }
    let (mut table_rows, mut table_weights) = (None, None);
    if spec.projector.table() != PositionTable::None {
        let (embeddings, inputs) = builder.position_embeddings()?;
        (table_rows, table_weights) = inputs;
        x = builder.graph.add(x, embeddings)?;
    }
    let positions = spec
        .projector
        .rotates()
        .then(|| {
            builder
                .graph
                .input("positions", DType::I32, [4 * n, 1, 1, 1])
        })
        .transpose()?;
    x = builder.norm_if_present(x, "v.pre_ln")?;
    let mut extra = Vec::new();
    for layer in 0..spec.n_layer {
        x = builder.layer(x, layer, positions)?;
        if spec.deepstack.contains(&layer) {
            extra.push(builder.deepstack(x, layer)?);
        }
    }
    if class_rows > 0 {
        x = builder.graph.rows(x, class_rows, n)?;
    }
    let mut result = builder.projected(x)?;
    for rows in extra {
        result = builder.graph.concat(result, rows, 0)?;
    }
    if spec.projector.has_breaks() {
        let token = builder.vector(result, BREAK_TOKEN)?;
        result = builder.graph.concat(result, token, 1)?;
    }
    builder.graph.set_output(result);
    Ok(VisionGraph {
        pixels,
        positions,
        table_rows,
        table_weights,
        class_rows,
        result,
        used: builder.leaves.into_keys().collect(),
        graph: builder.graph,
    })
}

/// Inputs of a table of positions: rows, and their weights.
type TableInputs = (Option<TensorId>, Option<TensorId>);

impl VitBuilder<'_> {
    /// Returns the position embeddings of all rows, and the inputs that select them.
    fn position_embeddings(&mut self) -> Result<(TensorId, TableInputs)> {
        let name = "v.position_embd.weight";
        let table = self.weight(name)?;
        self.check_width(table, self.spec.n_embd, name)?;
        let (n, all) = (self.rows, self.spec.table_side * self.spec.table_side);
        let (count, weights) = match self.spec.projector.table() {
            PositionTable::Stretched => (4 * n, Some([1, 4 * n, 1, 1])),
            PositionTable::Resized => (all, Some([all, n, 1, 1])),
            PositionTable::Axes => (2 * n, None),
            PositionTable::Plain | PositionTable::None => (n, None),
        };
        let rows = self
            .graph
            .input("table_rows", DType::I32, [count, 1, 1, 1])?;
        let selected = self.graph.get_rows(table, rows)?;
        let Some(shape) = weights else {
            let mut sum = selected;
            if count > n {
                let columns = self.graph.rows(selected, 0, n)?;
                let lines = self.graph.rows(selected, n, n)?;
                sum = self.graph.add(columns, lines)?;
            }
            return Ok((sum, (Some(rows), None)));
        };
        let weights = self.graph.input("table_weights", DType::F32, shape)?;
        let inputs = (Some(rows), Some(weights));
        if self.spec.projector.table() == PositionTable::Resized {
            let transposed = self.graph.permute(selected, [1, 0, 2, 3])?;
            let transposed = self.graph.cont(transposed)?;
            return Ok((self.graph.mul_mat(transposed, weights)?, inputs));
        }
        let scaled = self.graph.mul(selected, weights)?;
        let mut sum = self.graph.rows(scaled, 0, n)?;
        for corner in 1..4 {
            let other = self.graph.rows(scaled, corner * n, n)?;
            sum = self.graph.add(sum, other)?;
        }
        Ok((sum, inputs))
    }

    fn weight(&mut self, name: &str) -> Result<TensorId> {
        if let Some(&leaf) = self.leaves.get(name) {
            return Ok(leaf);
        }
        let stored = self.weights.get(name);
        let missing = || Error::invalid(format!("the encoder has no tensor '{name}'"));
        let leaf = self.graph.stored(stored.ok_or_else(missing)?)?;
        self.leaves.insert(name.to_owned(), leaf);
        Ok(leaf)
    }

    /// Checks the extents of a vector, or of the rows of a table.
    fn check_width(&self, tensor: TensorId, width: usize, name: &str) -> Result<()> {
        let [found, _, n2, n3] = self.graph.tensor(tensor).layout.shape();
        if [found, n2, n3] == [width, 1, 1] {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor '{name}' has {found} elements in a row, must have {width}"
        )))
    }

    /// Returns the vector called `name`, with an element for each element of a row of `x`.
    fn vector(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let vector = self.weight(name)?;
        let width = self.graph.tensor(x).layout.shape()[0];
        self.check_width(vector, width, name)?;
        if self.graph.tensor(vector).layout.shape()[1] != 1 {
            return Err(Error::invalid(format!("tensor '{name}' is not a vector")));
        }
        Ok(vector)
    }

    /// Adds the bias called `name`, if there is one.
    fn biased(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        if self.weights.get(name).is_none() {
            return Ok(x);
        }
        let bias = self.vector(x, name)?;
        self.graph.add(x, bias)
    }

    fn product(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let matrix = self.weight(name)?;
        let named = |error: Error| match error {
            Error::Shape(what) => Error::invalid(format!("tensor '{name}': {what}")),
            error => error,
        };
        let [input, output] = self.weights.bounds(name);
        let x = self.clamped(x, input)?;
        let y = self.graph.mul_mat(matrix, x).map_err(named)?;
        self.clamped(y, output)
    }

    /// Limits all elements to these bounds.
    fn clamped(&mut self, x: TensorId, bounds: Option<[f32; 2]>) -> Result<TensorId> {
        match bounds {
            Some([min, max]) => self.graph.clamp(x, min, max),
            None => Ok(x),
        }
    }

    /// Applies the matrix `name.weight`, and the bias `name.bias` if there is one.
    fn linear(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let y = self.product(x, &format!("{name}.weight"))?;
        self.biased(y, &format!("{name}.bias"))
    }

    /// Applies the norm called `name`, with its bias if there is one.
    fn norm(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let has_bias = self.weights.get(&format!("{name}.bias")).is_some();
        let normal = match self.spec.norm {
            Norm::LayerIfBiased if !has_bias => self.graph.rms_norm(x, self.spec.eps)?,
            Norm::Layer | Norm::LayerIfBiased => self.graph.norm(x, self.spec.eps)?,
            Norm::Rms => self.graph.rms_norm(x, self.spec.eps)?,
        };
        self.scaled(normal, name)
    }

    /// Applies the norm called `name`, if there is one.
    fn norm_if_present(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        if self.weights.get(&format!("{name}.weight")).is_none() {
            return Ok(x);
        }
        self.norm(x, name)
    }

    /// Multiplies with the vector `name.weight`, and adds the vector `name.bias` if there is one.
    fn scaled(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let scale = self.vector(x, &format!("{name}.weight"))?;
        let scaled = self.graph.mul(x, scale)?;
        self.biased(scaled, &format!("{name}.bias"))
    }

    fn layer(
        &mut self,
        x: TensorId,
        layer: usize,
        positions: Option<TensorId>,
    ) -> Result<TensorId> {
        let prefix = format!("v.blk.{layer}");
        let normal = self.norm(x, &format!("{prefix}.ln1"))?;
        let attention = self.attention(normal, layer, positions)?;
        let attention = self.layer_scaled(attention, &format!("{prefix}.ls1"))?;
        let attention = self.norm_if_present(attention, &format!("{prefix}.attn_post_norm"))?;
        let x = self.graph.add(x, attention)?;
        self.graph.set_name(x, format!("ffn_inp-{layer}"));
        let normal = self.norm(x, &format!("{prefix}.ln2"))?;
        let [up, down] = self.feed_forward_names(&prefix);
        let up = self.linear(normal, &up)?;
        let inner = if self
            .weights
            .get(&format!("{prefix}.ffn_gate.weight"))
            .is_some()
        {
            let gate = self.linear(normal, &format!("{prefix}.ffn_gate"))?;
            let kind = match self.spec.activation {
                Unary::Silu => Glu::Swiglu,
                Unary::Gelu => Glu::Geglu,
                Unary::GeluErf => Glu::GegluErf,
                _ => Glu::GegluQuick,
            };
            self.graph.glu_split(gate, up, kind)?
        } else {
            self.graph.unary(up, self.spec.activation)?
        };
        let down = self.linear(inner, &down)?;
        let down = self.layer_scaled(down, &format!("{prefix}.ls2"))?;
        let down = self.norm_if_present(down, &format!("{prefix}.ffn_post_norm"))?;
        let y = self.graph.add(x, down)?;
        self.graph.set_name(y, format!("layer_out-{layer}"));
        Ok(y)
    }

    /// Returns the names of the first and the last matrix of a layer's network. Old files
    /// interchange them.
    fn feed_forward_names(&self, prefix: &str) -> [String; 2] {
        let names = [format!("{prefix}.ffn_up"), format!("{prefix}.ffn_down")];
        let takes_rows = |name: &String| {
            let matrix = self.weights.get(&format!("{name}.weight"));
            matrix.is_some_and(|matrix| matrix.layout().shape()[0] == self.spec.n_embd)
        };
        let [up, down] = names;
        if takes_rows(&down) && !takes_rows(&up) {
            [down, up]
        } else {
            [up, down]
        }
    }

    /// Multiplies with the vector `name.weight`, if there is one (LayerScale).
    fn layer_scaled(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        if self.weights.get(&format!("{name}.weight")).is_none() {
            return Ok(x);
        }
        self.scaled(x, name)
    }
}
