//! The list of tensors that a model needs: a walk over its [`Spec`].

use super::spec::{
    AltUp, Attention, Classifier, DeltaInput, DeltaNet, DeltaRates, Experts, Gate, Latent,
    LatentUp, Layer, Linear, Mixer, Mlp, Norm, Presence, Projection, RopeFactors, RouterInput,
    Spec, StateSpace, Steps, SubLayer,
};
use crate::rules::Role;
use samite_core::{DType, Graph, Layout, Result, Shape, TensorId};

/// Use of a weight in a graph, which decides which devices and types are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightUse {
    /// Row lookup.
    Rows,
    /// A matrix product.
    Product,
    /// Matrix products with some of the matrices, chosen for each column.
    Experts,
    /// Element-wise multiplication: the scale of a norm.
    Scale,
    /// Addition.
    Bias,
    /// Addition of the row of the chosen expert.
    ExpertBias,
    /// Divisors of rotary frequencies.
    RopeDivisors,
    /// Weights of a convolution over time.
    Convolution,
    /// Negative decay rates, multiplied element by element.
    Decay,
}

/// Tensor that a file has or may have.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Extents, innermost first.
    pub shape: Shape,
    /// Part of the model that the tensor belongs to.
    pub role: Role,
    /// Use of the tensor in graphs.
    pub usage: WeightUse,
    /// True if a file without it is incomplete.
    pub required: bool,
    /// Tensor whose data is used if this one is missing.
    pub otherwise: Option<&'static str>,
}

impl TensorSpec {
    /// Returns a graph whose last node uses a weight of type `dtype` as the model does. It serves
    /// to query the support of devices.
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
                let x = graph.input("x", DType::F32, [n0, 1, n2, 1])?;
                graph.mul_mat(weight, x)?
            }
            WeightUse::Experts => {
                let x = graph.input("x", DType::F32, [n0, 1, 1, 1])?;
                let chosen = graph.input("chosen", DType::I32, [n2.min(2), 1, 1, 1])?;
                graph.mul_mat_id(weight, x, chosen)?
            }
            WeightUse::Scale | WeightUse::Decay => {
                let x = graph.input("x", DType::F32, [n0, n1, 1, 1])?;
                graph.mul(x, weight)?
            }
            WeightUse::Bias => {
                let x = graph.input("x", DType::F32, [n0, n1, 1, 1])?;
                graph.add(x, weight)?
            }
            WeightUse::ExpertBias => {
                let x = graph.input("x", DType::F32, [n0, 1, 1, 1])?;
                let chosen = graph.input("chosen", DType::I32, [1, 1, 1, 1])?;
                graph.add_id(x, weight, chosen)?
            }
            WeightUse::Convolution => {
                let x = graph.input("x", DType::F32, [n0, n1, 1, 1])?;
                graph.ssm_conv(x, weight)?
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

    /// Returns the role of the weight, for devices that convert weights to their own format.
    pub fn weight_role(&self) -> samite_core::Role {
        use samite_core::Role;
        match self.usage {
            WeightUse::Rows => Role::Embedding,
            WeightUse::Scale
            | WeightUse::Bias
            | WeightUse::ExpertBias
            | WeightUse::Convolution
            | WeightUse::Decay
            | WeightUse::RopeDivisors => Role::Vector,
            WeightUse::Product | WeightUse::Experts => {
                match self.name.rsplit('.').nth(1).unwrap_or_default() {
                    // The matrices of embeddings and classifiers have small results.
                    _ if self.name.starts_with("cls") || self.name.starts_with("dense_") => {
                        Role::Unknown
                    }
                    "attn_output" | "ffn_down" | "ffn_down_exps" => Role::Reduce,
                    "output" => Role::Head,
                    // The results of a router are compared with each other.
                    "ffn_gate_inp" => Role::Unknown,
                    _ => Role::Expand,
                }
            }
        }
    }

    /// Returns the layout with elements of type `dtype`.
    pub(crate) fn layout(&self, dtype: DType) -> Result<Layout> {
        Layout::contiguous(dtype, self.shape)
    }
}

/// The names of tensors that belong to no layer.
pub(super) mod names {
    /// Embedding table.
    pub const EMBEDDING: &str = "token_embd.weight";
    /// Table of per-layer embeddings.
    pub const PER_LAYER: &str = "per_layer_token_embd.weight";
    /// Table of learned positions.
    pub const POSITIONS: &str = "position_embd.weight";
    /// Table of token types.
    pub const TOKEN_TYPES: &str = "token_types.weight";
    /// Divisors of rotary frequencies.
    pub const FREQUENCIES: &str = "rope_freqs.weight";
    /// Divisors of rotary frequencies for long contexts and for short ones.
    pub const LONG_SHORT: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];
}

impl Spec {
    /// Returns whether a file may have the tensor called `name` although no graph reads it. This
    /// applies to activation ranges that come with NVFP4, to classifier heads, and to the spec's
    /// own list.
    pub(crate) fn is_spare(&self, name: &str) -> bool {
        let layer = name.strip_prefix("blk.").and_then(|rest| {
            let (number, within) = rest.split_once('.')?;
            Some((number.parse::<usize>().ok()?, within))
        });
        let within = layer.map_or(name, |(_, within)| within);
        let blocks = self.layers.iter().map(|layer| layer.block + 1).max();
        let first = blocks.unwrap_or(0);
        name.ends_with(".input_scale")
            || name.starts_with("cls.")
            || self
                .ignored
                .names
                .iter()
                .any(|ignored| within.starts_with(ignored))
            || layer
                .is_some_and(|(number, _)| (first..first + self.ignored.layers).contains(&number))
    }

    /// Returns the tensors that a file of this model has or may have, each once.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = TensorList {
            specs: Vec::new(),
            prefix: String::new(),
            role: Role::Embedding,
        };
        let table = |rows| [self.n_embd, rows, 1, 1];
        let (vocabulary, required) = (table(self.n_vocab), Presence::Required);
        list.add(names::EMBEDDING, vocabulary, WeightUse::Rows, required);
        let embedding = &self.embedding;
        if let Some(count) = embedding.positions {
            list.add(names::POSITIONS, table(count), WeightUse::Rows, required);
        }
        if let Some(count) = embedding.token_types {
            list.add(names::TOKEN_TYPES, table(count), WeightUse::Bias, required);
        }
        embedding.norm.iter().for_each(|norm| list.norm(norm));
        if let Some(per_layer) = &embedding.per_layer {
            let shape = [per_layer.size * self.n_layer(), self.n_vocab, 1, 1];
            list.add(names::PER_LAYER, shape, WeightUse::Rows, required);
            list.linear(&per_layer.projection);
            list.norm(&per_layer.norm);
        }
        let square = |altup: &AltUp| [self.n_embd, self.n_embd, altup.count - 1, 1];
        if let Some(altup) = &self.altup {
            list.add(altup.begin, square(altup), WeightUse::Product, required);
        }
        list.role = Role::Output;
        if let Some(altup) = &self.altup {
            list.add(altup.end, square(altup), WeightUse::Product, required);
        }
        self.head.norm.iter().for_each(|norm| list.norm(norm));
        if let Some(linear) = &self.head.output {
            let optional = Presence::Optional;
            list.add("output.weight", vocabulary, WeightUse::Product, optional);
            if let Some(output) = list.specs.last_mut() {
                output.otherwise = Some(names::EMBEDDING);
            }
            list.bias(linear);
        }
        let dense = self.head.dense.iter();
        dense.for_each(|linear| list.linear(linear));
        let classifier = self.head.classifier.iter();
        classifier.for_each(|classifier| list.classifier(classifier));
        for (il, layer) in self.layers.iter().enumerate() {
            list.prefix = format!("blk.{}.", layer.block);
            list.role = Role::Layer(il);
            list.layer(layer);
            self.altup.iter().for_each(|altup| list.altup(altup));
        }
        list.specs
    }
}

/// Collects the tensors of a model.
struct TensorList {
    specs: Vec<TensorSpec>,
    /// Prefix of the names.
    prefix: String,
    role: Role,
}

impl TensorList {
    fn add(&mut self, name: &str, shape: Shape, usage: WeightUse, presence: Presence) {
        self.add_global(&format!("{}{name}", self.prefix), shape, usage, presence);
    }

    /// Adds a tensor that does not belong to a single layer.
    fn add_global(&mut self, name: &str, shape: Shape, usage: WeightUse, presence: Presence) {
        let is_known = self.specs.iter().any(|spec| spec.name == name);
        if presence == Presence::Absent || is_known {
            return;
        }
        self.specs.push(TensorSpec {
            name: name.to_owned(),
            shape,
            role: self.role,
            usage,
            required: presence == Presence::Required,
            otherwise: None,
        });
    }

    fn vector(&mut self, name: &str, width: usize, usage: WeightUse, presence: Presence) {
        self.add(name, [width, 1, 1, 1], usage, presence);
    }

    fn norm(&mut self, norm: &Norm) {
        let [width, rows] = norm.extents;
        let shape = [width, rows, 1, 1];
        let [weight, bias] = [norm.suffix, ".bias"].map(|suffix| format!("{}{suffix}", norm.name));
        self.add(&weight, shape, WeightUse::Scale, norm.weight);
        self.add(&bias, shape, WeightUse::Bias, norm.bias);
    }

    fn linear(&mut self, linear: &Linear) {
        let (count, usage) = match linear.experts {
            Some(count) => (count, WeightUse::Experts),
            None => (1, WeightUse::Product),
        };
        let shape = [linear.from, linear.to, count, 1];
        self.add(
            &format!("{}.weight", linear.name),
            shape,
            usage,
            Presence::Required,
        );
        // NVFP4 matrices have a scale.
        let scale = format!("{}.scale", linear.name);
        self.vector(&scale, count, WeightUse::Scale, linear.scale);
        self.bias(linear);
    }

    fn bias(&mut self, linear: &Linear) {
        let (shape, usage) = match linear.experts {
            Some(count) => ([linear.to, count, 1, 1], WeightUse::ExpertBias),
            None => ([linear.to, 1, 1, 1], WeightUse::Bias),
        };
        self.add(&format!("{}.bias", linear.name), shape, usage, linear.bias);
    }

    fn classifier(&mut self, classifier: &Classifier) {
        let dense = classifier.dense.iter().map(|(linear, _)| linear);
        let matrices = dense.chain(&classifier.output);
        matrices.for_each(|linear| self.linear(linear));
        classifier.norm.iter().for_each(|norm| self.norm(norm));
    }

    fn layer(&mut self, layer: &Layer) {
        layer.parts.iter().for_each(|part| self.part(part));
        if let Some(name) = layer.scale {
            self.vector(name, 1, WeightUse::Scale, Presence::Optional);
        }
        if let Some(name) = layer.skip {
            self.vector(name, 1, WeightUse::Scale, Presence::Required);
        }
    }

    /// Adds a layer's tensors for several residual streams.
    fn altup(&mut self, altup: &AltUp) {
        let (gate, output, post) = &altup.others;
        let matrices = [&altup.router, &altup.predict, &altup.correct, gate, output];
        matrices.into_iter().for_each(|linear| self.linear(linear));
        self.norm(&altup.router_norm);
        self.norm(post);
        let (scale, width) = (altup.correct_scale, output.to);
        self.vector(scale, width, WeightUse::Scale, Presence::Required);
    }

    fn part(&mut self, part: &SubLayer) {
        part.norm.iter().for_each(|norm| self.norm(norm));
        for branch in &part.branches {
            branch.norm.iter().for_each(|norm| self.norm(norm));
            match &branch.mixer {
                Mixer::Attention(attention) => self.attention(attention),
                Mixer::DeltaNet(net) => self.delta_net(net),
                Mixer::ShortConv(conv) => {
                    self.linear(&conv.input);
                    self.conv(conv.weights, [conv.width, conv.channels]);
                    self.linear(&conv.output);
                }
                Mixer::StateSpace(space) => self.state_space(space),
                Mixer::Mlp(mlp) => self.mlp(mlp),
                Mixer::Experts(experts) => self.experts(experts),
                Mixer::Linear(linear) => self.linear(linear),
                Mixer::LowRank(down, up) => {
                    self.linear(down);
                    self.linear(up);
                }
                Mixer::PerLayer(gate, output) => {
                    self.linear(gate);
                    self.linear(output);
                }
                Mixer::Identity => {}
            }
            branch.post.iter().for_each(|norm| self.norm(norm));
        }
        let norms = part.post.iter().chain(&part.sum_norm);
        norms.for_each(|norm| self.norm(norm));
    }

    fn attention(&mut self, attention: &Attention) {
        match &attention.projection {
            Projection::Fused(linear) => self.linear(linear),
            Projection::Latent(latent) => self.latent(latent, attention.n_head),
            Projection::Separate { q, kv } => {
                self.linear(q);
                if let Some((k, v)) = kv {
                    self.linear(k);
                    v.iter().for_each(|v| self.linear(v));
                }
            }
        }
        self.linear(&attention.output);
        attention
            .norms
            .iter()
            .flatten()
            .for_each(|norm| self.norm(norm));
        attention.sub_norm.iter().for_each(|norm| self.norm(norm));
        if let Some(name) = attention.sinks {
            self.vector(name, attention.n_head, WeightUse::Bias, Presence::Required);
        }
        if let Some(Gate::Linear(linear, _)) = &attention.gate {
            self.linear(linear);
        }
        if let Some(rotation) = &attention.rotation {
            let pairs = [rotation.rope.dims / 2, 1, 1, 1];
            let tensors: &[&str] = match rotation.rope_factors {
                RopeFactors::None | RopeFactors::Yarn(_) => &[],
                RopeFactors::Frequencies => &[names::FREQUENCIES],
                RopeFactors::LongShort { .. } => &names::LONG_SHORT,
            };
            for name in tensors {
                self.add_global(name, pairs, WeightUse::RopeDivisors, Presence::Optional);
            }
        }
    }

    fn latent(&mut self, latent: &Latent, n_head: usize) {
        let (down, q) = &latent.q;
        if let Some((down, norm)) = down {
            self.linear(down);
            self.norm(norm);
        }
        self.linear(q);
        self.linear(&latent.kv);
        self.norm(&latent.norm);
        match &latent.up {
            LatentUp::Joint(linear) => self.linear(linear),
            LatentUp::Absorbed(names) => {
                let (rank, required) = (latent.rank, Presence::Required);
                let extents = [[latent.plain, rank], [rank, latent.head_v]];
                for (name, [from, to]) in names.iter().zip(extents) {
                    self.add(name, [from, to, n_head, 1], WeightUse::Product, required);
                }
            }
        }
    }

    fn conv(&mut self, name: &str, [width, channels]: [usize; 2]) {
        let shape = [width, channels, 1, 1];
        self.add(name, shape, WeightUse::Convolution, Presence::Required);
    }

    fn delta_net(&mut self, net: &DeltaNet) {
        match &net.input {
            DeltaInput::Split(qkv, gate) => [qkv, gate]
                .into_iter()
                .for_each(|linear| self.linear(linear)),
            DeltaInput::ByHead(all) => self.linear(all),
        }
        match &net.rates {
            DeltaRates::Split(decays, betas) => {
                let matrices = [decays, betas].into_iter();
                matrices.for_each(|linear| self.linear(linear));
            }
            DeltaRates::ByHead(all) => self.linear(all),
        }
        let [conv, bias, factor] = net.names;
        self.conv(conv, [net.width, net.channels()]);
        self.vector(bias, net.n_head, WeightUse::Bias, Presence::Required);
        self.vector(factor, net.n_head, WeightUse::Decay, Presence::Required);
        self.norm(&net.norm);
        self.linear(&net.output);
    }

    fn state_space(&mut self, s: &StateSpace) {
        self.linear(&s.input);
        self.conv("ssm_conv1d.weight", [s.width, s.channels()]);
        let required = Presence::Required;
        let bias = Presence::Optional;
        self.vector("ssm_conv1d.bias", s.channels(), WeightUse::Bias, bias);
        let rates = match &s.steps {
            Steps::OfInput => {
                self.vector("ssm_dt.bias", s.n_head, WeightUse::Bias, required);
                1
            }
            Steps::OfConvolution(steps) => {
                self.linear(&steps.all);
                steps
                    .norms
                    .iter()
                    .flatten()
                    .for_each(|norm| self.norm(norm));
                self.linear(&steps.up);
                s.columns
            }
        };
        let rates = [rates, s.n_head, 1, 1];
        self.add("ssm_a", rates, WeightUse::Decay, required);
        let factors = match s.size {
            1 => [s.n_head, 1, 1, 1],
            _ => [1, s.n_head, 1, 1],
        };
        self.add("ssm_d", factors, WeightUse::Scale, required);
        s.norm.iter().for_each(|norm| self.norm(norm));
        self.linear(&s.output);
    }

    fn mlp(&mut self, mlp: &Mlp) {
        mlp.gate.iter().for_each(|gate| self.linear(gate));
        self.linear(&mlp.up);
        if let Some(name) = mlp.divisor {
            let width = mlp.down.from;
            self.vector(name, width, WeightUse::Scale, Presence::Required);
        }
        mlp.sub_norm.iter().for_each(|norm| self.norm(norm));
        self.linear(&mlp.down);
    }

    fn experts(&mut self, experts: &Experts) {
        if let RouterInput::Normed(norm, _) = &experts.router_input {
            self.norm(norm);
        }
        self.linear(&experts.router);
        let count = experts.router.to;
        if let Some((name, presence)) = experts.selection_bias {
            self.vector(name, count, WeightUse::Bias, presence);
        }
        self.mlp(&experts.experts);
        if let Some((mlp, gate)) = &experts.shared {
            gate.iter().for_each(|gate| self.linear(gate));
            self.mlp(mlp);
        }
    }
}
