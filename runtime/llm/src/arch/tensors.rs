//! The list of tensors that an architecture expects in a file.

use crate::hparams::{Experts, Hyperparameters};
use crate::rules::Role;
use samite_core::{DType, Graph, Layout, Result, Shape, TensorId};

/// How a graph uses a weight: decides which devices and types are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightUse {
    /// Rows are looked up.
    Rows,
    /// A matrix product.
    Product,
    /// Matrix products with some of the matrices, chosen for each column.
    Experts,
    /// Multiplied element by element: the scale of a norm.
    Scale,
    /// Added.
    Bias,
    /// Divisors of rotary frequencies.
    RopeDivisors,
}

/// A tensor that a file has, or may have.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Extents, innermost first.
    pub shape: Shape,
    /// Where it belongs.
    pub role: Role,
    /// How it is used.
    pub usage: WeightUse,
    /// Whether a file without it is incomplete.
    pub required: bool,
    /// The tensor whose data is used if this one is missing.
    pub otherwise: Option<&'static str>,
}

impl TensorSpec {
    /// A graph whose last node uses such a weight of type `dtype` as the model does, for questions to devices.
    pub(crate) fn sample(&self, dtype: DType) -> Result<(Graph, TensorId)> {
        let mut graph = Graph::new();
        let [n0, n1, n2, _] = self.shape;
        let weight = graph.leaf(&self.name, dtype, self.shape)?;
        let node = match self.usage {
            WeightUse::Rows => {
                let rows = graph.input("rows", DType::I32, [1, 1, 1, 1])?;
                graph.get_rows(weight, rows)?
            }
            WeightUse::Product => {
                let x = graph.input("x", DType::F32, [n0, 1, 1, 1])?;
                graph.mul_mat(weight, x)?
            }
            WeightUse::Experts => {
                let x = graph.input("x", DType::F32, [n0, 1, 1, 1])?;
                let chosen = graph.input("chosen", DType::I32, [n2.min(2), 1, 1, 1])?;
                graph.mul_mat_id(weight, x, chosen)?
            }
            WeightUse::Scale => {
                let x = graph.input("x", DType::F32, [n0, n1, 1, 1])?;
                graph.mul(x, weight)?
            }
            WeightUse::Bias => {
                let x = graph.input("x", DType::F32, [n0, n1, 1, 1])?;
                graph.add(x, weight)?
            }
            WeightUse::RopeDivisors => {
                let x = graph.input("x", DType::F32, [2 * n0, 1, 1, 1])?;
                let positions = graph.input("positions", DType::I32, [1, 1, 1, 1])?;
                let rope = samite_core::Rope::new(2 * n0, samite_core::RopeMode::Normal, 1e4);
                graph.rope(x, positions, Some(weight), rope)?
            }
        };
        Ok((graph, node))
    }

    /// What it does in the model, for devices that give weights a form of their own.
    pub fn weight_role(&self) -> samite_core::Role {
        use samite_core::Role;
        match self.usage {
            WeightUse::Rows => Role::Embedding,
            WeightUse::Scale | WeightUse::Bias | WeightUse::RopeDivisors => Role::Vector,
            WeightUse::Product | WeightUse::Experts => {
                match self.name.rsplit('.').nth(1).unwrap_or_default() {
                    "attn_output" | "ffn_down" | "ffn_down_exps" => Role::Reduce,
                    "output" => Role::Head,
                    // A router's results are compared with each other.
                    "ffn_gate_inp" => Role::Unknown,
                    _ => Role::Expand,
                }
            }
        }
    }

    /// The layout with elements of type `dtype`.
    pub(crate) fn layout(&self, dtype: DType) -> Result<Layout> {
        Layout::contiguous(dtype, self.shape)
    }
}

/// Whether a linear layer has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// It has.
    Required,
    /// It may have.
    Optional,
}

/// Collects the tensors of a model.
#[derive(Debug)]
pub struct TensorList<'a> {
    /// The model's numbers.
    pub hparams: &'a Hyperparameters,
    specs: Vec<TensorSpec>,
}

impl<'a> TensorList<'a> {
    /// An empty list for a model of these numbers.
    pub fn new(hparams: &'a Hyperparameters) -> Self {
        TensorList {
            hparams,
            specs: Vec::new(),
        }
    }

    /// The tensors listed.
    pub fn into_specs(self) -> Vec<TensorSpec> {
        self.specs
    }

    /// Adds a tensor that must be there.
    pub fn require(&mut self, name: String, extents: [usize; 2], role: Role, usage: WeightUse) {
        self.specs.push(TensorSpec {
            name,
            shape: [extents[0], extents[1], 1, 1],
            role,
            usage,
            required: true,
            otherwise: None,
        });
    }

    /// Adds a tensor that may be missing.
    pub fn allow(&mut self, name: String, extents: [usize; 2], role: Role, usage: WeightUse) {
        self.require(name, extents, role, usage);
        if let Some(spec) = self.specs.last_mut() {
            spec.required = false;
        }
    }

    /// Adds the embedding, the last norm and the output matrix, which may be the embedding again.
    pub fn embedding_and_output(&mut self) {
        let (n_embd, n_vocab) = (self.hparams.n_embd, self.hparams.n_vocab);
        let matrix = [n_embd, n_vocab];
        let name = |name: &str| name.to_owned();
        self.require(
            name("token_embd.weight"),
            matrix,
            Role::Embedding,
            WeightUse::Rows,
        );
        self.require(
            name("output_norm.weight"),
            [n_embd, 1],
            Role::Output,
            WeightUse::Scale,
        );
        self.allow(
            name("output.weight"),
            matrix,
            Role::Output,
            WeightUse::Product,
        );
        if let Some(output) = self.specs.last_mut() {
            output.otherwise = Some("token_embd.weight");
        }
        self.allow(
            name("output.bias"),
            [n_vocab, 1],
            Role::Output,
            WeightUse::Bias,
        );
    }

    /// Adds the scale of a norm of layer `il`.
    pub fn norm(&mut self, il: usize, name: &str, width: usize) {
        let name = format!("blk.{il}.{name}.weight");
        self.require(name, [width, 1], Role::Layer(il), WeightUse::Scale);
    }

    /// Adds the matrix of a linear layer of layer `il`, and its bias.
    pub fn linear(&mut self, il: usize, name: &str, [from, to]: [usize; 2], bias: Bias) {
        let role = Role::Layer(il);
        let matrix = format!("blk.{il}.{name}.weight");
        self.require(matrix, [from, to], role, WeightUse::Product);
        let vector = format!("blk.{il}.{name}.bias");
        match bias {
            Bias::Required => self.require(vector, [to, 1], role, WeightUse::Bias),
            Bias::Optional => self.allow(vector, [to, 1], role, WeightUse::Bias),
        }
    }

    /// Adds the matrices of all experts of layer `il`, one behind the other.
    fn experts(&mut self, il: usize, name: &str, [from, to]: [usize; 2], count: usize) {
        self.specs.push(TensorSpec {
            name: format!("blk.{il}.{name}.weight"),
            shape: [from, to, count, 1],
            role: Role::Layer(il),
            usage: WeightUse::Experts,
            required: true,
            otherwise: None,
        });
    }

    /// Adds what the layers of all decoders here have: norms, projections of attention, and a gated feed-forward part or a
    /// mixture of several.
    pub fn decoder_layer(&mut self, il: usize, qkv_bias: Bias) {
        let hp = self.hparams;
        let (n_embd, layer) = (hp.n_embd, hp.layers[il]);
        self.norm(il, "attn_norm", n_embd);
        let n_embd_q = hp.head_dim_k * layer.n_head;
        self.linear(il, "attn_q", [n_embd, n_embd_q], qkv_bias);
        self.linear(il, "attn_k", [n_embd, hp.n_embd_k(il)], qkv_bias);
        self.linear(il, "attn_v", [n_embd, hp.n_embd_v(il)], qkv_bias);
        let n_embd_attended = hp.head_dim_v * layer.n_head;
        self.linear(il, "attn_output", [n_embd_attended, n_embd], Bias::Optional);
        self.norm(il, "ffn_norm", n_embd);
        if let Some(Experts { count, n_ff, .. }) = hp.experts {
            let router = format!("blk.{il}.ffn_gate_inp.weight");
            let role = Role::Layer(il);
            self.require(router, [n_embd, count], role, WeightUse::Product);
            self.experts(il, "ffn_gate_exps", [n_embd, n_ff], count);
            self.experts(il, "ffn_up_exps", [n_embd, n_ff], count);
            self.experts(il, "ffn_down_exps", [n_ff, n_embd], count);
            return;
        }
        self.linear(il, "ffn_gate", [n_embd, layer.n_ff], Bias::Optional);
        self.linear(il, "ffn_up", [n_embd, layer.n_ff], Bias::Optional);
        self.linear(il, "ffn_down", [layer.n_ff, n_embd], Bias::Optional);
    }
}
