//! The structure of a model, as data.
//!
//! A [`Spec`] describes everything about a model except the values of its weights: its layers,
//! their sub-layers, and the name and shape of every tensor. One walk over it lists the tensors and
//! another builds the graph. Memory, placement, cost and training derive from it as well.

use samite_core::{Glu, Rope, RopeMode, Unary};

/// The structure of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Size of the vocabulary.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Context length that the model was trained with.
    pub n_ctx_train: usize,
    /// Path from tokens to the residual stream.
    pub embedding: Embedding,
    /// Layers, in the order in which they change the residual stream.
    pub layers: Vec<Layer>,
    /// Number of first layers after which rows of an image are added to the residual stream
    /// (DeepStack). They follow an embedding's other elements.
    pub n_deepstack: usize,
    /// Additional residual streams (AltUp), if the model has them.
    pub altup: Option<AltUp>,
    /// Path from the residual stream to logits or embeddings.
    pub head: Head,
    /// Pooling of embeddings, if the file specifies it.
    pub pooling: Option<Pooling>,
    /// Tensors that a file may have but no graph reads.
    pub ignored: IgnoredTensors,
}

/// Tensors that a file may have although no graph reads them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IgnoredTensors {
    /// Prefixes of tensor names, without the prefix of the layer.
    pub names: Vec<&'static str>,
    /// Number of MTP layers after the last layer.
    pub layers: usize,
}

impl Spec {
    /// Returns the number of elements of an embedding that replaces a token, with those of
    /// DeepStack.
    pub fn input_width(&self) -> usize {
        self.n_embd * (1 + self.n_deepstack)
    }

    /// Returns whether positions have several axes (M-RoPE).
    pub fn has_axes(&self) -> bool {
        let mut rotations = self.layers.iter().filter_map(Layer::attention);
        rotations.any(|attention| {
            let rotation = attention.rotation.as_ref();
            rotation.is_some_and(|rotation| rotation.axes.is_some())
        })
    }

    /// Returns the number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Returns the number of experts, and of those that a token uses, in the first mixture of
    /// experts.
    pub fn experts(&self) -> Option<[usize; 2]> {
        let mut branches = self.layers.iter().flat_map(Layer::branches);
        branches.find_map(|branch| match &branch.mixer {
            Mixer::Experts(mixture) => Some([mixture.router.to, mixture.used]),
            _ => None,
        })
    }

    /// Returns the indices of the last layer and sub-layer whose result depends on other tokens, or
    /// zeros if there is none.
    pub(crate) fn last_mixing(&self) -> [usize; 2] {
        let parts = (self.layers.iter().enumerate())
            .flat_map(|(il, layer)| layer.parts.iter().enumerate().map(move |at| (il, at)));
        let mut mixing =
            parts.filter(|(_, (_, part))| part.branches.iter().any(Branch::mixes_tokens));
        mixing.next_back().map_or([0, 0], |(il, (at, _))| [il, at])
    }

    /// Returns the size of the largest attention window or chunk. Returns `None` if no layer has
    /// one, if attention is bidirectional, or if a layer shares the keys of another that sees a
    /// different part of them.
    pub(crate) fn window(&self) -> Option<usize> {
        if self.is_bidirectional() {
            return None;
        }
        let attention = |il: usize| self.layers.get(il).and_then(Layer::attention);
        let mut longest = None;
        for il in 0..self.n_layer() {
            let Some(own) = attention(il) else { continue };
            if own.keys_of.is_some_and(|owner| {
                attention(owner).is_none_or(|a| (a.span == Span::Full) != (own.span == Span::Full))
            }) {
                return None;
            }
            longest = longest.max(own.span.size());
        }
        longest
    }

    /// Returns whether sequences have a recurrent state, which cannot be rolled back token by
    /// token.
    pub fn has_state(&self) -> bool {
        self.layers.iter().any(|layer| layer.memory().has_state())
    }

    /// Returns whether the positions of cached tokens can change. They cannot if positions are part
    /// of the embedding, if sequences have a recurrent state, or if nothing is cached per token.
    pub(crate) fn can_shift(&self) -> bool {
        self.embedding.positions.is_none() && !self.has_state() && !self.is_bidirectional()
    }

    /// Returns whether attention is bidirectional. Then nothing is cached, and all tokens of a
    /// sequence must be in one batch.
    pub fn is_bidirectional(&self) -> bool {
        let mut attentions = self.layers.iter().filter_map(Layer::attention);
        attentions.any(|attention| attention.is_bidirectional)
    }

    /// Makes all layers bidirectional.
    pub(crate) fn set_bidirectional(&mut self) {
        let parts = self.layers.iter_mut().flat_map(|layer| &mut layer.parts);
        for branch in parts.flat_map(|part| &mut part.branches) {
            match &mut branch.mixer {
                Mixer::Attention(attention) => attention.is_bidirectional = true,
                Mixer::ShortConv(conv) => conv.is_bidirectional = true,
                _ => {}
            }
        }
    }

    /// Returns whether the result for a token depends on which tokens are next to it in a
    /// micro-batch. Sequences are not interleaved then.
    pub(crate) fn is_by_sequence(&self) -> bool {
        let mut branches = self.layers.iter().flat_map(Layer::branches);
        branches.any(|branch| match branch.mixer {
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::StateSpace(_) => true,
            Mixer::Attention(_)
            | Mixer::Mlp(_)
            | Mixer::Experts(_)
            | Mixer::Linear(_)
            | Mixer::LowRank(..)
            | Mixer::PerLayer(..)
            | Mixer::Identity => false,
        })
    }

    /// Returns the width of an embedding with this pooling. With [`Pooling::Rank`], that is the
    /// number of labels.
    pub fn embedding_width(&self, pooling: Pooling) -> usize {
        let last = match (pooling, &self.head.classifier) {
            (Pooling::Rank, Some(classifier)) => {
                let dense = classifier.dense.as_ref().map(|(linear, _)| linear);
                classifier.output.as_ref().or(dense)
            }
            _ => self.head.dense.last(),
        };
        last.map_or(self.n_embd, |linear| linear.to)
    }
}

/// Path from tokens to the residual stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Embedding {
    /// Factor of the rows of the embedding table, if not 1.
    pub scale: Option<f32>,
    /// True if embeddings that the caller passes instead of tokens are not scaled.
    pub scales_table_alone: bool,
    /// Number of learned positions, which are added, if there are any.
    pub positions: Option<usize>,
    /// Number of token types. The embedding of the first type is added to every row.
    pub token_types: Option<usize>,
    /// Norm after the sum.
    pub norm: Option<Norm>,
    /// Per-layer embeddings, a short row for each layer.
    pub per_layer: Option<PerLayer>,
}

/// Per-layer embeddings: the sum of a row looked up by token and a normalized projection of the
/// embeddings, divided by the square root of 2.
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayer {
    /// Elements of the row of a layer.
    pub size: usize,
    /// Projection from the embeddings to the rows of all layers.
    pub projection: Linear,
    /// Norm of the projection, applied layer by layer.
    pub norm: Norm,
}

/// AltUp ([Baykal et al. 2023](https://arxiv.org/abs/2301.13310)): several residual streams, as in
/// Gemma 3n.
///
/// Before a layer, each stream is predicted by adding a mixture of all streams. The layer runs on
/// the first one. The change that it made there corrects all streams. The other streams also get
/// the layer's row of per-layer embeddings. Initially, the other streams are products of the
/// embedding with a matrix each. In the end, they go through a matrix each, and the mean of all
/// streams is the result. These products are rescaled to the length of the first stream.
#[derive(Clone, Debug, PartialEq)]
pub struct AltUp {
    /// Number of streams.
    pub count: usize,
    /// Norm of the router's input.
    pub router_norm: Norm,
    /// Router, which returns one number for each stream.
    pub router: Linear,
    /// Matrix from the router's result to the coefficients that mix all streams for each stream.
    pub predict: Linear,
    /// Matrix from the router's result to each stream's coefficient of the correction, minus 1.
    pub correct: Linear,
    /// Name of the vector that the corrected first stream is multiplied by before it contributes to
    /// the other streams.
    pub correct_scale: &'static str,
    /// Gate, output matrix and norm of the contribution to the other streams, which also uses the
    /// layer's row of per-layer embeddings.
    pub others: (Linear, Linear, Norm),
    /// Name of the matrices, one for each stream but the first, that create the streams from the
    /// embedding.
    pub begin: &'static str,
    /// Name of the matrices that the streams go through before they are merged.
    pub end: &'static str,
}

/// Path from the residual stream to logits or embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Last norm. Its result is the embedding.
    pub norm: Option<Norm>,
    /// Output matrix. A file without it uses the embedding table. Absent if the model does not
    /// return logits.
    pub output: Option<Linear>,
    /// Factor of the logits, if not 1.
    pub scale: Option<f32>,
    /// Soft cap of the logits: if not 0, they become `softcap · tanh(logit / softcap)`.
    pub softcap: f32,
    /// Matrices that embeddings go through, in this order.
    pub dense: Vec<Linear>,
    /// Classifier, which returns scores instead of embeddings.
    pub classifier: Option<Classifier>,
}

/// Pooling of token embeddings into the embedding of a text. The numbers are those in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// No pooling: one embedding for each token.
    None,
    /// Mean over all tokens.
    Mean,
    /// Embedding of the first token.
    Cls,
    /// Embedding of the last token.
    Last,
    /// Scores of a [`Classifier`] instead of an embedding.
    Rank,
}

impl Pooling {
    /// All kinds of pooling, by number.
    pub const ALL: [Pooling; 5] = [
        Pooling::None,
        Pooling::Mean,
        Pooling::Cls,
        Pooling::Last,
        Pooling::Rank,
    ];
}

/// Classifier, which returns one score for each label of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// True if the input is the mean over all tokens. Otherwise it is the first token with
    /// bidirectional attention, and the last token without.
    pub of_mean: bool,
    /// First matrix and its activation function.
    pub dense: Option<(Linear, Unary)>,
    /// Norm after the first matrix.
    pub norm: Option<Norm>,
    /// Matrix that returns the scores.
    pub output: Option<Linear>,
    /// True if scores go through a softmax.
    pub shares: bool,
}

/// Presence of a tensor in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// No file has it.
    #[default]
    Absent,
    /// A file may have it.
    Optional,
    /// A file without it is incomplete.
    Required,
}

/// Layer: a sequence of sub-layers that each add to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Number in the names of its tensors. Repeated layers share one.
    pub block: usize,
    /// Sub-layers.
    pub parts: Vec<SubLayer>,
    /// Name of an optional scalar that the result is multiplied by.
    pub scale: Option<&'static str>,
    /// Name of a scalar. The embeddings times this scalar are added to the result.
    pub skip: Option<&'static str>,
    /// True if the result goes through the norm of the head before the next layer.
    pub norm_again: bool,
}

impl Layer {
    /// Returns the branches of all sub-layers.
    pub fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.parts.iter().flat_map(|part| &part.branches)
    }

    /// Returns the attention of the layer, if it has one.
    pub fn attention(&self) -> Option<&Attention> {
        self.branches().find_map(|branch| match &branch.mixer {
            Mixer::Attention(attention) => Some(&**attention),
            _ => None,
        })
    }

    /// Returns whether the attention is limited to a window or to chunks.
    pub(crate) fn has_window(&self) -> bool {
        self.attention()
            .is_some_and(|attention| attention.span != Span::Full)
    }

    /// Removes all biases except those of queries, keys and values.
    pub fn without_biases(&mut self) {
        for branch in self
            .parts
            .iter_mut()
            .flat_map(|part| part.branches.iter_mut())
        {
            match &mut branch.mixer {
                Mixer::Attention(attention) => attention.output.bias = Presence::Absent,
                Mixer::Mlp(mlp) => {
                    let matrices = mlp.gate.iter_mut().chain([&mut mlp.up, &mut mlp.down]);
                    matrices.for_each(|linear| linear.bias = Presence::Absent);
                }
                Mixer::DeltaNet(_)
                | Mixer::ShortConv(_)
                | Mixer::StateSpace(_)
                | Mixer::Experts(_)
                | Mixer::Linear(_)
                | Mixer::LowRank(..)
                | Mixer::PerLayer(..)
                | Mixer::Identity => {}
            }
        }
    }

    /// Returns what the layer caches.
    pub fn memory(&self) -> LayerCacheSize {
        let branches = self.branches().map(|branch| match &branch.mixer {
            Mixer::Attention(attention) => attention.memory(),
            Mixer::DeltaNet(net) => net.memory(),
            Mixer::ShortConv(conv) => conv.memory(),
            Mixer::StateSpace(space) => space.memory(),
            Mixer::Mlp(_)
            | Mixer::Experts(_)
            | Mixer::Linear(_)
            | Mixer::LowRank(..)
            | Mixer::PerLayer(..)
            | Mixer::Identity => LayerCacheSize::default(),
        });
        branches.fold(LayerCacheSize::default(), LayerCacheSize::and)
    }
}

/// Cache of a layer: elements per token and per sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCacheSize {
    /// Keys of a token: number of heads and elements of each.
    pub keys: Option<[usize; 2]>,
    /// Values of a token: number of heads and elements of each. Absent if the keys contain them.
    pub values: Option<[usize; 2]>,
    /// Elements of the convolution state of a sequence.
    pub conv: Option<usize>,
    /// Elements of the recurrent state of a sequence.
    pub state: Option<usize>,
}

impl LayerCacheSize {
    /// Returns whether sequences have a recurrent state, which cannot be rolled back token by
    /// token.
    pub fn has_state(self) -> bool {
        self.conv.is_some() || self.state.is_some()
    }

    fn and(self, other: LayerCacheSize) -> LayerCacheSize {
        LayerCacheSize {
            keys: self.keys.or(other.keys),
            values: self.values.or(other.values),
            conv: self.conv.or(other.conv),
            state: self.state.or(other.state),
        }
    }
}

/// Sub-layer: `x + scale · post(branches(norm(x)))`, where `x` is the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct SubLayer {
    /// Norm of the input of the branches.
    pub norm: Option<Norm>,
    /// Parallel branches, whose results are added.
    pub branches: Vec<Branch>,
    /// Norm after the branches.
    pub post: Option<Norm>,
    /// Factor of what is added to the residual stream, if not 1.
    pub scale: Option<f32>,
    /// Factor of the sum, if not 1.
    pub sum_scale: Option<f32>,
    /// Norm after the addition. Its result is the new residual stream.
    pub sum_norm: Option<Norm>,
}

impl SubLayer {
    /// Creates `x + mixer(norm(x))`.
    pub fn new(norm: Norm, mixer: impl Into<Mixer>) -> Self {
        SubLayer {
            norm: Some(norm),
            ..SubLayer::bare(mixer)
        }
    }

    /// Creates `x + mixer(x)`.
    pub fn bare(mixer: impl Into<Mixer>) -> Self {
        SubLayer {
            norm: None,
            branches: vec![Branch::new(mixer)],
            post: None,
            scale: None,
            sum_scale: None,
            sum_norm: None,
        }
    }
}

/// One of several parallel mixers.
#[derive(Clone, Debug, PartialEq)]
pub struct Branch {
    /// Norm of the residual stream that replaces the sub-layer's norm.
    pub norm: Option<Norm>,
    /// True if the input is the residual stream before the layer, not before the sub-layer.
    pub of_layer: bool,
    /// Mixer of the branch.
    pub mixer: Mixer,
    /// Norm after the mixer.
    pub post: Option<Norm>,
    /// Factor of the result, if not 1.
    pub scale: Option<f32>,
}

impl Branch {
    /// Creates a branch whose input is the result of the sub-layer's norm.
    pub fn new(mixer: impl Into<Mixer>) -> Self {
        Branch {
            norm: None,
            of_layer: false,
            mixer: mixer.into(),
            post: None,
            scale: None,
        }
    }

    fn mixes_tokens(&self) -> bool {
        match self.mixer {
            Mixer::Attention(_)
            | Mixer::DeltaNet(_)
            | Mixer::ShortConv(_)
            | Mixer::StateSpace(_) => true,
            Mixer::Mlp(_)
            | Mixer::Experts(_)
            | Mixer::Linear(_)
            | Mixer::LowRank(..)
            | Mixer::PerLayer(..)
            | Mixer::Identity => false,
        }
    }
}

/// Operation of a branch.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Self-attention.
    Attention(Box<Attention>),
    /// Gated delta net: linear attention with a matrix state per sequence.
    DeltaNet(Box<DeltaNet>),
    /// Short convolution over a few tokens.
    ShortConv(Box<ShortConv>),
    /// Selective state space: Mamba 1 and 2.
    StateSpace(Box<StateSpace>),
    /// Feed-forward network.
    Mlp(Box<Mlp>),
    /// Mixture of experts.
    Experts(Box<Experts>),
    /// Matrix product.
    Linear(Linear),
    /// Low-rank matrix: two matrix products with a short row in between.
    LowRank(Linear, Linear),
    /// Per-layer embedding: the layer's row, gated by the input, times a matrix.
    PerLayer(Linear, Linear),
    /// Identity.
    Identity,
}

impl From<Attention> for Mixer {
    fn from(attention: Attention) -> Self {
        Mixer::Attention(Box::new(attention))
    }
}

impl From<DeltaNet> for Mixer {
    fn from(net: DeltaNet) -> Self {
        Mixer::DeltaNet(Box::new(net))
    }
}

impl From<StateSpace> for Mixer {
    fn from(space: StateSpace) -> Self {
        Mixer::StateSpace(Box::new(space))
    }
}

impl From<ShortConv> for Mixer {
    fn from(conv: ShortConv) -> Self {
        Mixer::ShortConv(Box::new(conv))
    }
}

impl From<Linear> for Mixer {
    fn from(linear: Linear) -> Self {
        Mixer::Linear(linear)
    }
}

impl From<Mlp> for Mixer {
    fn from(mlp: Mlp) -> Self {
        Mixer::Mlp(Box::new(mlp))
    }
}

impl From<Experts> for Mixer {
    fn from(experts: Experts) -> Self {
        Mixer::Experts(Box::new(experts))
    }
}

/// Normalization function, with its epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// RMSNorm.
    Rms(f32),
    /// LayerNorm.
    Layer(f32),
}

/// Norm of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// Name of its tensors, without `.weight`.
    pub name: &'static str,
    /// Suffix of the scale's name, usually `.weight`.
    pub suffix: &'static str,
    /// Shape of its scale: elements of a row, and the number of rows that have their own scale.
    pub extents: [usize; 2],
    /// Normalization function.
    pub kind: NormKind,
    /// Presence of the scale.
    pub weight: Presence,
    /// Presence of the bias.
    pub bias: Presence,
}

/// Linear layer: maps rows of `from` elements to rows of `to` elements, with an optional bias.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Name of its tensors, without `.weight`.
    pub name: &'static str,
    /// Elements of an input row.
    pub from: usize,
    /// Elements of an output row.
    pub to: usize,
    /// Number of stacked matrices of a mixture of experts. Each token uses some of them.
    pub experts: Option<usize>,
    /// Presence of the bias.
    pub bias: Presence,
    /// Presence of a scalar that the product is multiplied by, which NVFP4 needs.
    pub scale: Presence,
}

impl Linear {
    /// Creates a linear layer without bias.
    pub fn new(name: &'static str, [from, to]: [usize; 2]) -> Self {
        Linear {
            name,
            from,
            to,
            experts: None,
            bias: Presence::Absent,
            scale: Presence::Optional,
        }
    }

    /// Sets the presence of the bias.
    pub fn bias(self, bias: Presence) -> Self {
        Linear { bias, ..self }
    }
}

/// Origin of the queries, keys and values of attention.
#[derive(Clone, Debug, PartialEq)]
pub enum Projection {
    /// Separate matrices.
    Separate {
        /// Matrix of queries.
        q: Linear,
        /// Matrices of keys and of values. Absent if the layer uses [those of another
        /// layer](Attention::keys_of). Without a matrix of values, the keys before their norm are
        /// the values.
        kv: Option<(Linear, Option<Linear>)>,
    },
    /// One matrix: rows of queries, then of keys, then of values.
    Fused(Linear),
    /// Latent attention: a short row for the keys and values of all heads, which is what is cached.
    Latent(Box<Latent>),
}

/// Latent attention (MLA, [DeepSeek-AI 2024](https://arxiv.org/abs/2405.04434)). The keys and
/// values of a token derive from a short row and from some rotated elements that all heads share.
///
/// The rotated elements of queries and keys come last.
#[derive(Clone, Debug, PartialEq)]
pub struct Latent {
    /// Elements of the short row.
    pub rank: usize,
    /// Elements of a head that are not rotated.
    pub plain: usize,
    /// Elements that are rotated.
    pub rotated: usize,
    /// Elements of a head of values.
    pub head_v: usize,
    /// Matrix of queries, optionally after a low-rank projection and its norm.
    pub q: (Option<(Linear, Norm)>, Linear),
    /// Matrix of the short row and of the rotated elements of keys.
    pub kv: Linear,
    /// Norm of the short row.
    pub norm: Norm,
    /// Path from the short row to keys and values.
    pub up: LatentUp,
}

/// Path from the short row of latent attention to keys and values.
#[derive(Clone, Debug, PartialEq)]
pub enum LatentUp {
    /// Absorbed form: keys and values are never expanded. Queries are projected down to the short
    /// row, and the result of attention up to values, head by head. Holds the names of the two
    /// tensors, `[plain, rank, heads]` and `[rank, head_v, heads]`.
    Absorbed([&'static str; 2]),
    /// Expanded form: one matrix computes the keys and values of all heads, and these are cached.
    Joint(Linear),
}

/// Scope of the norm of queries and keys (QK-norm).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormOver {
    /// Each head separately, before the rotation.
    #[default]
    Heads,
    /// Each head separately, after the rotation.
    RotatedHeads,
    /// All heads of a token together, before the rotation.
    Token,
}

/// Rotary position embedding (RoPE) of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Parameters of the operation.
    pub rope: Rope,
    /// Divisors of the frequencies.
    pub rope_factors: RopeFactors,
    /// Mode for tokens whose position differs between axes (M-RoPE), if the model has one.
    pub axes: Option<RopeMode>,
}

/// Divisors of rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeFactors {
    /// None.
    None,
    /// `rope_freqs.weight`, if the file has it.
    Frequencies,
    /// `rope_factors_long.weight` for contexts longer than `above`, else
    /// `rope_factors_short.weight`, if the file has them.
    LongShort {
        /// Longest context that uses the short factors.
        above: usize,
    },
    /// Divisors computed by YaRN.
    Yarn(Yarn),
}

/// YaRN ([Peng et al., 2023](https://arxiv.org/abs/2309.00071)) without the rounding that [`Rope`]
/// does.
///
/// Pairs that rotate often enough within the original context keep their frequencies. Pairs that
/// rotate too little are slowed down by a factor. Pairs in between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn(pub Rope);

impl Yarn {
    /// Returns the divisors of the frequencies of all pairs of elements.
    pub fn rope_factors(self) -> impl Iterator<Item = f32> {
        (0..self.0.dims / 2).map(move |pair| self.divisor(pair))
    }

    /// Returns the divisor of the frequency of a pair.
    fn divisor(self, pair: usize) -> f32 {
        let rope = self.0;
        // The pair that rotates this many times in the original context.
        let pair_of = |rotations: f32| {
            let period = rope.original_context as f32 / (rotations * std::f32::consts::TAU);
            rope.dims as f32 * period.ln() / (2.0 * rope.freq_base.ln())
        };
        let first = pair_of(rope.beta_fast).max(0.0);
        let last = pair_of(rope.beta_slow).min(rope.dims as f32 - 1.0);
        let slowed = ((pair as f32 - first) / (last - first).max(1e-3)).clamp(0.0, 1.0);
        let kept = rope.ext_factor * (1.0 - slowed);
        1.0 / (rope.freq_scale * (1.0 - kept) + kept)
    }
}

/// Span of attention: the tokens that a token attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Span {
    /// All tokens.
    Full,
    /// A window of the most recent tokens, including the token itself.
    Window(usize),
    /// The tokens since the start of the token's chunk of this many positions.
    Chunk(usize),
    /// The tokens at most half this many positions away.
    Around(usize),
}

impl Span {
    /// Returns the maximum number of positions that a token attends to, if there is a limit.
    pub fn size(self) -> Option<usize> {
        match self {
            Span::Full => None,
            Span::Window(size) | Span::Around(size) | Span::Chunk(size) => Some(size),
        }
    }

    /// Returns the positions, up to its own, that a token at `position` attends to.
    pub fn positions(self, position: i32) -> std::ops::RangeInclusive<i32> {
        let at_most = |size: usize| i32::try_from(size).unwrap_or(i32::MAX);
        let first = match self {
            Span::Full => 0,
            Span::Window(size) => position.saturating_sub(at_most(size)).saturating_add(1),
            Span::Chunk(size) => position - position % at_most(size.max(1)),
            Span::Around(size) => position.saturating_sub(at_most(size / 2)),
        };
        first..=position
    }

    /// Returns the positions that a token at `position` attends to with bidirectional attention.
    pub fn on_both_sides(self, position: i32) -> std::ops::RangeInclusive<i32> {
        let last = match self {
            Span::Around(size) => {
                position.saturating_add(i32::try_from(size / 2).unwrap_or(i32::MAX))
            }
            Span::Full | Span::Window(_) | Span::Chunk(_) => i32::MAX,
        };
        *self.positions(position).start()..=last
    }
}

/// Attention temperature: scales queries by the logarithm of their position, `1 + scale ·
/// ln(floor((position + offset) / floor) + 1)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Factor of the logarithm.
    pub scale: f32,
    /// Number of positions of one step.
    pub floor: f32,
    /// Added to positions.
    pub offset: f32,
}

impl Temperature {
    /// Returns the factor of a query at `position`.
    pub fn at(self, position: i32) -> f32 {
        let steps = ((position as f32 + self.offset) / self.floor).floor();
        (steps + 1.0).ln() * self.scale + 1.0
    }
}

/// Gate of the attention's result.
#[derive(Clone, Debug, PartialEq)]
pub enum Gate {
    /// Sigmoid of the second half of each head of the query matrix.
    InQueries,
    /// Function of a product with the attention's input. If the matrix returns one number for each
    /// head, the gate applies to whole heads.
    Linear(Linear, Unary),
}

/// Self-attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Number of query heads.
    pub n_head: usize,
    /// Number of key and value heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a query or key head.
    pub head_k: usize,
    /// Elements of a value head.
    pub head_v: usize,
    /// Origin of queries, keys and values.
    pub projection: Projection,
    /// Limit of the absolute values of queries, keys and values.
    pub clamp: Option<f32>,
    /// Norms of queries, keys and values.
    pub norms: [Option<Norm>; 3],
    /// Scope of the norms of queries and keys.
    pub norm_over: NormOver,
    /// Rotation, if there is one.
    pub rotation: Option<Rotation>,
    /// Tokens that a token attends to.
    pub span: Span,
    /// True if attention is bidirectional. Then all tokens of a sequence are computed together and
    /// nothing is cached.
    pub is_bidirectional: bool,
    /// True if tokens of an image attend to earlier ones only, whatever the image says.
    pub are_images_causal: bool,
    /// Layer whose keys and values are used, if not its own.
    pub keys_of: Option<usize>,
    /// Scale of the attention logits.
    pub scale: f32,
    /// Soft cap of the attention logits: if not 0, they become `softcap · tanh(logit / softcap)`.
    pub softcap: f32,
    /// Largest ALiBi bias; 0 for none.
    pub max_bias: f32,
    /// Name of the attention sinks (one more logit for each head), if there are any.
    pub sinks: Option<&'static str>,
    /// Temperature of queries.
    pub temperature: Option<Temperature>,
    /// Gate of the result.
    pub gate: Option<Gate>,
    /// Norm before the output matrix.
    pub sub_norm: Option<Norm>,
    /// Output matrix.
    pub output: Linear,
}

impl Experts {
    /// Replaces the activation function of the experts.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.experts.activation = activation;
        self
    }

    /// Adds a shared expert.
    pub fn with_shared(self, shared: Mlp) -> Self {
        Experts {
            shared: Some((shared, None)),
            ..self
        }
    }
}

impl Attention {
    /// Sets the divisors of the frequencies, if there is a rotation.
    pub fn set_rope_factors(&mut self, rope_factors: RopeFactors) {
        if let Some(rotation) = &mut self.rotation {
            rotation.rope_factors = rope_factors;
        }
    }

    /// Sets the mode for tokens whose position differs between axes, if there is a rotation.
    pub fn set_axes(&mut self, mode: RopeMode) {
        if let Some(rotation) = &mut self.rotation {
            rotation.axes = Some(mode);
        }
    }

    /// Makes the rotation compute YaRN without rounding, if it uses YaRN.
    pub fn set_exact_yarn(&mut self) {
        let Some(rotation) = self
            .rotation
            .as_mut()
            .filter(|rotation| rotation.rope.ext_factor != 0.0)
        else {
            return;
        };
        let yarn = rotation.rope;
        rotation.rope_factors = RopeFactors::Yarn(Yarn(yarn));
        rotation.rope = Rope {
            attn_factor: yarn.attn_factor * (1.0 + 0.1 * (1.0 / yarn.freq_scale).ln()),
            ..Rope::new(yarn.dims, yarn.mode, yarn.freq_base)
        };
    }

    /// Limits attention to a window, and replaces the rotation if there is one.
    pub fn set_window(&mut self, size: usize, rope: Rope) {
        self.span = Span::Window(size);
        if let Some(rotation) = &mut self.rotation {
            rotation.rope = rope;
        }
    }

    /// Sets the presence of the biases of queries, keys and values.
    pub fn with_projection_bias(mut self, bias: Presence) -> Self {
        match &mut self.projection {
            Projection::Fused(linear) => linear.bias = bias,
            Projection::Latent(latent) => latent.q.1.bias = bias,
            Projection::Separate { q, kv } => {
                q.bias = bias;
                if let Some((k, v)) = kv {
                    k.bias = bias;
                    v.iter_mut().for_each(|v| v.bias = bias);
                }
            }
        }
        self
    }

    /// Returns what the attention caches.
    pub fn memory(&self) -> LayerCacheSize {
        if self.is_bidirectional {
            return LayerCacheSize::default();
        }
        let keys = Some([self.n_head_kv, self.head_k]);
        match (self.keys_of, &self.projection) {
            (Some(_), _) => LayerCacheSize::default(),
            (None, Projection::Latent(latent)) if matches!(latent.up, LatentUp::Absorbed(_)) => {
                LayerCacheSize {
                    keys,
                    ..LayerCacheSize::default()
                }
            }
            (None, _) => LayerCacheSize {
                keys,
                values: Some([self.n_head_kv, self.head_v]),
                ..LayerCacheSize::default()
            },
        }
    }
}

/// Gated delta net: linear attention after a short convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Number of query and key heads; divides `n_head`.
    pub n_head_k: usize,
    /// Number of value heads.
    pub n_head: usize,
    /// Elements of a head.
    pub size: usize,
    /// Kernel size of the convolution.
    pub width: usize,
    /// Origin of queries, keys, values and gates.
    pub input: DeltaInput,
    /// Origin of decays and betas.
    pub rates: DeltaRates,
    /// True if value heads that share a key head are adjacent. Otherwise they are `n_head_k` heads
    /// apart.
    pub neighbours: bool,
    /// Names of the convolution's weights, and of the bias and the factor of the decays.
    pub names: [&'static str; 3],
    /// Epsilon of the norm of queries and keys.
    pub eps: f32,
    /// Norm of each head of the result.
    pub norm: Norm,
    /// Output matrix.
    pub output: Linear,
}

/// Origin of the queries, keys, values and gates of a gated delta net.
#[derive(Clone, Debug, PartialEq)]
pub enum DeltaInput {
    /// A matrix of queries, keys and values, and one of gates.
    Split(Linear, Linear),
    /// One matrix: for each key head, its query, its key, its values and its gates.
    ByHead(Linear),
}

/// Origin of decays and betas.
#[derive(Clone, Debug, PartialEq)]
pub enum DeltaRates {
    /// A matrix for the decays, and one for the betas.
    Split(Linear, Linear),
    /// One matrix: for each key head, the betas of its value heads, then their decays.
    ByHead(Linear),
}

impl DeltaNet {
    /// Returns the number of channels of the convolution.
    pub fn channels(&self) -> usize {
        (2 * self.n_head_k + self.n_head) * self.size
    }

    /// Returns what the layer caches.
    pub fn memory(&self) -> LayerCacheSize {
        LayerCacheSize {
            conv: Some((self.width - 1) * self.channels()),
            state: Some(self.size * self.size * self.n_head),
            ..LayerCacheSize::default()
        }
    }
}

/// Short convolution instead of attention, with gates before and after it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConv {
    /// Number of channels.
    pub channels: usize,
    /// Kernel size.
    pub width: usize,
    /// True if half of these tokens are later ones. Then nothing is cached.
    pub is_bidirectional: bool,
    /// Matrix of the gate before the convolution, the gate after it, and its input.
    pub input: Linear,
    /// Name of the convolution's weights.
    pub weights: &'static str,
    /// Output matrix.
    pub output: Linear,
}

impl ShortConv {
    /// Returns what the layer caches.
    pub fn memory(&self) -> LayerCacheSize {
        LayerCacheSize {
            conv: (!self.is_bidirectional).then(|| (self.width - 1) * self.channels),
            ..LayerCacheSize::default()
        }
    }
}

/// Selective state space after a convolution: Mamba 1 ([Gu & Dao
/// 2023](https://arxiv.org/abs/2312.00752)) and Mamba 2 ([Dao & Gu
/// 2024](https://arxiv.org/abs/2405.21060)).
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpace {
    /// Number of heads. In Mamba 1, every channel is a head.
    pub n_head: usize,
    /// Elements of a head.
    pub size: usize,
    /// Number of groups. The heads of a group are adjacent and share B and C.
    pub groups: usize,
    /// Columns of a head's state matrix.
    pub columns: usize,
    /// Kernel size of the convolution.
    pub width: usize,
    /// Input matrix.
    pub input: Linear,
    /// Origin of B, C and the time steps.
    pub steps: Steps,
    /// Norm of each group of the result.
    pub norm: Option<Norm>,
    /// Output matrix.
    pub output: Linear,
}

/// Origin of a state space's B, C and time steps.
#[derive(Clone, Debug, PartialEq)]
pub enum Steps {
    /// The input matrix (Mamba 2). Its rows are gates, then x, B and C, which go through the
    /// convolution, then the time steps.
    OfInput,
    /// The result of the convolution (Mamba 1). The input matrix returns x and gates.
    OfConvolution(Box<ConvolutionSteps>),
}

/// Time steps, B and C that derive from the result of a convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionSteps {
    /// Rank of the time steps: elements of the row that is projected up to them.
    pub rank: usize,
    /// Matrix of that row, B and C.
    pub all: Linear,
    /// Norms of the three, if they have norms.
    pub norms: Option<[Norm; 3]>,
    /// Matrix from the row to the time steps.
    pub up: Linear,
}

impl StateSpace {
    /// Returns the number of elements of all heads.
    pub fn inner(&self) -> usize {
        self.n_head * self.size
    }

    /// Returns the number of channels of the convolution.
    pub fn channels(&self) -> usize {
        match self.steps {
            Steps::OfInput => self.inner() + 2 * self.groups * self.columns,
            Steps::OfConvolution(_) => self.inner(),
        }
    }

    /// Returns what the layer caches.
    pub fn memory(&self) -> LayerCacheSize {
        LayerCacheSize {
            conv: Some((self.width - 1) * self.channels()),
            state: Some(self.columns * self.inner()),
            ..LayerCacheSize::default()
        }
    }
}

/// Activation function of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// Function of gate and value.
    Gated(Glu),
    /// Function of one value.
    Plain(Unary),
    /// Squared ReLU.
    SquaredRelu,
    /// `min(silu(gate), limit) · clamp(value, -limit, limit)`.
    ClampedSwiglu {
        /// Limit of gate and value.
        limit: f32,
    },
    /// GELU of the amount by which the gate exceeds the mean of its row plus `deviations` standard
    /// deviations, times the value.
    SparseGeglu {
        /// Number of standard deviations.
        deviations: f32,
    },
}

impl Activation {
    /// Returns the name of the function.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Gated(function) => function.name(),
            Activation::Plain(function) => function.name(),
            Activation::SquaredRelu => "relu_sqr",
            Activation::ClampedSwiglu { .. } => "swiglu_clamped",
            Activation::SparseGeglu { .. } => "geglu_sparse",
        }
    }
}

/// Feed-forward network, or experts of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// Gate matrix. If it is absent and the activation is gated, `up` returns gate and value.
    pub gate: Option<Linear>,
    /// Matrix of the value.
    pub up: Linear,
    /// Activation function between the matrices.
    pub activation: Activation,
    /// Name of a vector that the activations are divided by.
    pub divisor: Option<&'static str>,
    /// Norm before the last matrix.
    pub sub_norm: Option<Norm>,
    /// Last matrix.
    pub down: Linear,
}

/// Function from the router's logits to the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts.
    SoftmaxOfChosen,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Square root of the softplus of each logit.
    SqrtSoftplus,
}

/// Input of a router.
#[derive(Clone, Debug, PartialEq)]
pub enum RouterInput {
    /// Input of the experts.
    Experts,
    /// The residual stream before the layer.
    Layer,
    /// Residual stream before the sub-layer, normalized and scaled.
    Normed(Norm, f32),
}

/// Mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Router matrix, which returns a logit for each expert.
    pub router: Linear,
    /// Input of the router.
    pub router_input: RouterInput,
    /// Function from the router's logits to weights.
    pub routing: Routing,
    /// Name of a bias for each expert that affects only the choice of experts.
    pub selection_bias: Option<(&'static str, Presence)>,
    /// Number of expert groups, and of the best groups that experts are chosen from.
    pub groups: Option<[usize; 2]>,
    /// Number of experts that a token uses.
    pub used: usize,
    /// True if the weights of the chosen experts are normalized to sum to 1.
    pub normalize: bool,
    /// Factor of the weights, if not 1.
    pub scale: Option<f32>,
    /// True if the weights apply to the experts' input instead of their output.
    pub weigh_input: bool,
    /// Experts.
    pub experts: Mlp,
    /// Shared expert, which every token uses, and the matrix of its weight, to which a sigmoid is
    /// applied.
    pub shared: Option<(Mlp, Option<Linear>)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ARCHITECTURES;
    use crate::synthetic::SyntheticModel;

    #[test]
    fn recurrent_models_batch_by_sequence() {
        let mut with_state = 0;
        for arch in ARCHITECTURES {
            let metadata = SyntheticModel::tiny(arch.name).metadata().unwrap();
            let spec = Spec::from_metadata(&metadata, usize::MAX, &|_| false).unwrap();
            if spec.has_state() {
                assert!(spec.is_by_sequence(), "{}", arch.name);
                with_state += 1;
            }
        }
        assert!(with_state > 0);
    }
}
