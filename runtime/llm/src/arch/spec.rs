//! What a model is made of, as data.
//!
//! A [`Spec`] says everything about a model but the values of its weights: its layers, the parts of each, and the tensors of every part
//! by name and extents. One walk over it lists the tensors, another one builds the graph; memory,
//! placement, cost and training come from it, too.

use samite_core::{Glu, Rope, Unary};

/// A model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Tokens of the vocabulary.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Context length that the model was trained with.
    pub n_ctx_train: usize,
    /// From tokens to the residual stream.
    pub embedding: Embedding,
    /// What changes the residual stream, in this order.
    pub layers: Vec<Layer>,
    /// Further residual streams beside the one that layers change, if there are some.
    pub streams: Option<Streams>,
    /// From the residual stream to logits, or to embeddings.
    pub head: Head,
    /// What embeddings of texts are made of, if the file says so.
    pub pooling: Option<Pooling>,
    /// Tensors that a file may have and that nothing here reads.
    pub spare: Spare,
}

/// Which tensors a file may have although nothing reads them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spare {
    /// Beginnings of names, without those of layers.
    pub names: Vec<&'static str>,
    /// Layers behind the last one that predict further tokens.
    pub layers: usize,
}

impl Spec {
    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// The experts of the first mixture, if there is one: how many there are, and how many a token uses.
    pub fn experts(&self) -> Option<[usize; 2]> {
        let mut branches = self.layers.iter().flat_map(Layer::branches);
        branches.find_map(|branch| match &branch.mixer {
            Mixer::Experts(mixture) => Some([mixture.router.to, mixture.used]),
            _ => None,
        })
    }

    /// The number of the last layer, and of its part, whose result depends on other tokens; the first one if there is none.
    pub(crate) fn last_mixing(&self) -> [usize; 2] {
        let parts = (self.layers.iter().enumerate())
            .flat_map(|(il, layer)| layer.parts.iter().enumerate().map(move |at| (il, at)));
        let mut mixing =
            parts.filter(|(_, (_, part))| part.branches.iter().any(Branch::mixes_tokens));
        mixing.next_back().map_or([0, 0], |(il, (at, _))| [il, at])
    }

    /// The longest way back that layers look which do not look at everything; `None` if there are none, or layers share keys of which they see
    /// different parts.
    pub(crate) fn window(&self) -> Option<usize> {
        if self.sees_later() {
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

    /// Whether something is kept of every sequence, which cannot be taken back token by token.
    pub fn has_state(&self) -> bool {
        self.layers.iter().any(|layer| layer.memory().has_state())
    }

    /// Whether positions of cached tokens can change: not where a position is part of the embedding, or nothing is known of a single token.
    pub(crate) fn can_shift(&self) -> bool {
        self.embedding.positions.is_none() && !self.has_state() && !self.sees_later()
    }

    /// Whether tokens look at later ones, too. Then nothing is kept, and all tokens of a sequence come together.
    pub fn sees_later(&self) -> bool {
        let mut attentions = self.layers.iter().filter_map(Layer::attention);
        attentions.any(|attention| attention.sees_later)
    }

    /// Has the tokens of all layers look at later ones, too.
    pub(crate) fn set_sees_later(&mut self) {
        let parts = self.layers.iter_mut().flat_map(|layer| &mut layer.parts);
        for branch in parts.flat_map(|part| &mut part.branches) {
            match &mut branch.mixer {
                Mixer::Attention(attention) => attention.sees_later = true,
                Mixer::ShortConv(conv) => conv.sees_later = true,
                _ => {}
            }
        }
    }

    /// Whether what becomes of a token depends on which tokens are beside it in a micro-batch, so that sequences do not mix there.
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
            | Mixer::Nothing => false,
        })
    }

    /// Elements of an embedding with this pooling; of a rank, one score for each label.
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

/// From tokens to the residual stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Embedding {
    /// What rows of the table are multiplied with, if not with 1.
    pub scale: Option<f32>,
    /// Embeddings that stand in the place of tokens are not multiplied with it.
    pub scales_table_alone: bool,
    /// Learned positions that are added: how many there are.
    pub positions: Option<usize>,
    /// Added to every row: the first of so many kinds of tokens.
    pub token_types: Option<usize>,
    /// Follows the sum.
    pub norm: Option<Norm>,
    /// Further embeddings, a short row for each layer.
    pub per_layer: Option<PerLayer>,
}

/// Embeddings for each layer: looked up by token, plus what a matrix makes of the embeddings, normalised, over the root of 2.
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayer {
    /// Elements of a layer's row.
    pub size: usize,
    /// From the embeddings to the rows of all layers.
    pub projection: Linear,
    /// The norm of what that gives, layer by layer.
    pub norm: Norm,
}

/// Several residual streams ([Baykal et al. 2023](https://arxiv.org/abs/2301.13310)): before a layer, a mixture of all is added to each, and the
/// layer changes the first. What it changed there corrects all of them; the others get a row of further embeddings, too. The streams begin as
/// products of the embedding, and end as the mean of products, all of them as long as the first one is.
#[derive(Clone, Debug, PartialEq)]
pub struct Streams {
    /// How many there are.
    pub count: usize,
    /// The norm of what the router sees.
    pub router_norm: Norm,
    /// Gives one number for each stream.
    pub router: Linear,
    /// From these to the shares of all streams in what each gets before a layer.
    pub predict: Linear,
    /// From these to the share of the correction that each gets, less 1.
    pub correct: Linear,
    /// The name of a vector that the corrected first stream is multiplied with, before the others get something of it.
    pub correct_scale: &'static str,
    /// What the others get of it, with the layer's row of further embeddings: the gate, the matrix behind it, and a norm.
    pub others: (Linear, Linear, Norm),
    /// The matrices, one for each stream but the first, that make them of the embedding.
    pub begin: &'static str,
    /// The same for what becomes of them.
    pub end: &'static str,
}

/// From the residual stream to logits, or to embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// The last norm; embeddings are what it gives.
    pub norm: Option<Norm>,
    /// The matrix that gives logits; in a file without it, the table of embeddings is it, too. Absent if the model gives no logits.
    pub output: Option<Linear>,
    /// What logits are multiplied with, if not with 1.
    pub scale: Option<f32>,
    /// If not 0, logits become `softcap · tanh(logit / softcap)`.
    pub softcap: f32,
    /// Matrices that embeddings go through, one after the other.
    pub dense: Vec<Linear>,
    /// Gives texts scores, in the place of embeddings.
    pub classifier: Option<Classifier>,
}

/// What the embedding of a text is made of; numbered as in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// There is one of every token.
    None,
    /// The mean over all tokens.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
    /// Scores of a [`Classifier`] in the place of an embedding.
    Rank,
}

impl Pooling {
    /// All of them, by number.
    pub const ALL: [Pooling; 5] = [
        Pooling::None,
        Pooling::Mean,
        Pooling::Cls,
        Pooling::Last,
        Pooling::Rank,
    ];
}

/// Gives a text one score for each label.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// It sees the mean over all tokens; else the last token, or the first one where tokens look at later ones.
    pub of_mean: bool,
    /// A matrix, and the function of what it gives.
    pub dense: Option<(Linear, Unary)>,
    /// Follows it.
    pub norm: Option<Norm>,
    /// The matrix that gives scores.
    pub output: Option<Linear>,
    /// Scores are shares that add up to 1.
    pub shares: bool,
}

/// Whether a tensor is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// It is not.
    #[default]
    Absent,
    /// A file may have it.
    Optional,
    /// A file without it is incomplete.
    Required,
}

/// A layer: parts one after the other, each of which adds to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The number in the names of its tensors. Layers that are gone through several times share one.
    pub block: usize,
    /// The parts.
    pub parts: Vec<Part>,
    /// The name of one number that the result is multiplied with, if the file has it.
    pub scale: Option<&'static str>,
    /// The name of one number; the embeddings times this are added to the result.
    pub skip: Option<&'static str>,
    /// The result goes through the norm of the head before the next layer.
    pub norm_again: bool,
}

impl Layer {
    /// All branches of all parts.
    pub fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.parts.iter().flat_map(|part| &part.branches)
    }

    /// The attention, if it has one.
    pub fn attention(&self) -> Option<&Attention> {
        self.branches().find_map(|branch| match &branch.mixer {
            Mixer::Attention(attention) => Some(&**attention),
            _ => None,
        })
    }

    /// Whether it looks through a window, or at chunks.
    pub(crate) fn has_window(&self) -> bool {
        self.attention()
            .is_some_and(|attention| attention.span != Span::Full)
    }

    /// Has no biases but those of queries, keys and values.
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
                | Mixer::Nothing => {}
            }
        }
    }

    /// What it keeps.
    pub fn memory(&self) -> Memory {
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
            | Mixer::Nothing => Memory::default(),
        });
        branches.fold(Memory::default(), Memory::and)
    }
}

/// What a layer keeps: of every token, and of every sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Keys of a token: heads, and elements of each.
    pub keys: Option<[usize; 2]>,
    /// Values of a token: the same. Absent where the keys hold them.
    pub values: Option<[usize; 2]>,
    /// Elements of what went last into a convolution of a sequence.
    pub conv: Option<usize>,
    /// Elements of the matrices of a sequence.
    pub state: Option<usize>,
}

impl Memory {
    /// Whether something is kept of every sequence, which cannot be taken back token by token.
    pub fn has_state(self) -> bool {
        self.conv.is_some() || self.state.is_some()
    }

    fn and(self, other: Memory) -> Memory {
        Memory {
            keys: self.keys.or(other.keys),
            values: self.values.or(other.values),
            conv: self.conv.or(other.conv),
            state: self.state.or(other.state),
        }
    }
}

/// A part of a layer: `x + scale · post(branches(norm(x)))`, where `x` is the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What the branches see is normalised first.
    pub norm: Option<Norm>,
    /// Side by side; their results add up.
    pub branches: Vec<Branch>,
    /// Follows the branches.
    pub post: Option<Norm>,
    /// What is added is multiplied with this, if not with 1.
    pub scale: Option<f32>,
    /// The sum is multiplied with this, if not with 1.
    pub sum_scale: Option<f32>,
    /// Follows the addition, and makes the new residual stream.
    pub sum_norm: Option<Norm>,
}

impl Part {
    /// `x + mixer(norm(x))`.
    pub fn new(norm: Norm, mixer: impl Into<Mixer>) -> Self {
        Part {
            norm: Some(norm),
            ..Part::bare(mixer)
        }
    }

    /// `x + mixer(x)`.
    pub fn bare(mixer: impl Into<Mixer>) -> Self {
        Part {
            norm: None,
            branches: vec![Branch::new(mixer)],
            post: None,
            scale: None,
            sum_scale: None,
            sum_norm: None,
        }
    }
}

/// One of several mixers side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Branch {
    /// Its own norm of the residual stream, instead of the part's.
    pub norm: Option<Norm>,
    /// It sees the layer's residual stream, not the part's.
    pub of_layer: bool,
    /// What it does.
    pub mixer: Mixer,
    /// Follows it.
    pub post: Option<Norm>,
    /// What its result is multiplied with, if not with 1.
    pub scale: Option<f32>,
}

impl Branch {
    /// A mixer that sees what the part's norm gives.
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
            | Mixer::Nothing => false,
        }
    }
}

/// What a branch does.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Tokens look at earlier ones.
    Attention(Box<Attention>),
    /// Tokens change matrices, and ask them.
    DeltaNet(Box<DeltaNet>),
    /// A convolution over some tokens.
    ShortConv(Box<ShortConv>),
    /// Tokens change matrices that forget, and ask them.
    StateSpace(Box<StateSpace>),
    /// A feed-forward part.
    Mlp(Box<Mlp>),
    /// A mixture of feed-forward parts.
    Experts(Box<Experts>),
    /// A matrix product.
    Linear(Linear),
    /// Two matrix products, with a short row between them.
    LowRank(Linear, Linear),
    /// The layer's row of further embeddings, with a gate of what goes in, and a matrix.
    PerLayer(Linear, Linear),
    /// What it sees, as it is.
    Nothing,
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

/// Which function normalises, with the number that keeps it from dividing by 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// Divides by the root of the mean of squares.
    Rms(f32),
    /// Shifts to mean 0 and scales to variance 1.
    Layer(f32),
}

/// A norm of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// Name of its tensors, without `.weight`.
    pub name: &'static str,
    /// What the name of its scale has behind it; usually `.weight`.
    pub suffix: &'static str,
    /// Extents of its scale: elements of a row, and rows that have scales of their own.
    pub extents: [usize; 2],
    /// The function.
    pub kind: NormKind,
    /// Whether rows are scaled element by element.
    pub weight: Presence,
    /// Whether something is added to them.
    pub bias: Presence,
}

/// A matrix product, perhaps with a bias: `to` rows of `from` elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Name of its tensors, without `.weight`.
    pub name: &'static str,
    /// Elements of a row that goes in.
    pub from: usize,
    /// Elements of a row that comes out.
    pub to: usize,
    /// Matrices one behind the other, of which each token has some.
    pub experts: Option<usize>,
    /// Whether something is added to the product.
    pub bias: Presence,
    /// Whether the product is multiplied with one number, as NVFP4 wants it.
    pub scale: Presence,
}

impl Linear {
    /// A matrix without bias.
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

    /// The same with a bias, or perhaps with one.
    pub fn bias(self, bias: Presence) -> Self {
        Linear { bias, ..self }
    }
}

/// Where the queries, keys and values of attention come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Projection {
    /// A matrix each.
    Separate {
        /// Of queries.
        q: Linear,
        /// Of keys and of values; absent where [another layer's](Attention::keys_of) are used. Without one of values, keys before their norm
        /// are the values.
        kv: Option<(Linear, Option<Linear>)>,
    },
    /// One matrix: rows of queries, then of keys, then of values.
    Fused(Linear),
    /// Keys and values of all heads in a short row, which is what is kept.
    Latent(Box<Latent>),
}

/// Latent attention ([DeepSeek-AI 2024](https://arxiv.org/abs/2405.04434)): a short row, and some elements that are rotated and that all
/// heads share, stand for the keys and values of a token.
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
    /// Queries: a matrix, or a short row of their own, its norm, and a matrix.
    pub q: (Option<(Linear, Norm)>, Linear),
    /// The short row and the rotated elements of keys.
    pub kv: Linear,
    /// The norm of the short row.
    pub norm: Norm,
    /// From the short row to keys and values.
    pub up: LatentUp,
}

/// From the short row of latent attention to keys and values.
#[derive(Clone, Debug, PartialEq)]
pub enum LatentUp {
    /// Never: queries are brought down to the short row, and what they find there up to values, head by head. The names of the two
    /// tensors, `[plain, rank, heads]` and `[rank, head_v, heads]`.
    Absorbed([&'static str; 2]),
    /// At once, by a matrix that gives keys and values of all heads; these are what is kept.
    Joint(Linear),
}

/// Which norm queries and keys have before they meet, and what it is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormOver {
    /// Each head by itself, before the rotation.
    #[default]
    Heads,
    /// Each head by itself, after the rotation.
    RotatedHeads,
    /// All heads of a token together, before the rotation.
    Token,
}

/// A rotation of queries and keys by their positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Its numbers.
    pub rope: Rope,
    /// What frequencies are divided by.
    pub divisors: Divisors,
}

/// What divides rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Divisors {
    /// There are none.
    None,
    /// `rope_freqs.weight`, if the file has it.
    Frequencies,
    /// `rope_factors_long.weight` for contexts longer than `above`, else `rope_factors_short.weight`; if the file has them.
    LongShort {
        /// The longest context of the short ones.
        above: usize,
    },
    /// What YaRN divides them by.
    Yarn(Yarn),
}

/// YaRN ([Peng et al., 2023](https://arxiv.org/abs/2309.00071)) without the rounding that [`Rope`] does: pairs that rotate often enough within
/// the original context keep their frequencies, those that rotate too little are slower by a factor, and between are mixtures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn(pub Rope);

impl Yarn {
    /// What the frequencies of all pairs of elements are divided by.
    pub fn divisors(self) -> impl Iterator<Item = f32> {
        (0..self.0.dims / 2).map(move |pair| self.divisor(pair))
    }

    /// What the frequency of a pair is divided by.
    fn divisor(self, pair: usize) -> f32 {
        let rope = self.0;
        // The pair that rotates so often in the original context.
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

/// Which tokens a token looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Span {
    /// All.
    Full,
    /// The nearest earlier ones, itself included.
    Window(usize),
    /// Those from the beginning of its chunk of so many positions on.
    Chunk(usize),
    /// Those at most half so many positions away.
    Around(usize),
}

impl Span {
    /// How many positions a token sees at most, if it does not see all.
    pub fn size(self) -> Option<usize> {
        match self {
            Span::Full => None,
            Span::Window(size) | Span::Around(size) | Span::Chunk(size) => Some(size),
        }
    }

    /// The positions up to its own that a token at `position` sees.
    pub fn of(self, position: i32) -> std::ops::RangeInclusive<i32> {
        let at_most = |size: usize| i32::try_from(size).unwrap_or(i32::MAX);
        let first = match self {
            Span::Full => 0,
            Span::Window(size) => position.saturating_sub(at_most(size)).saturating_add(1),
            Span::Chunk(size) => position - position % at_most(size.max(1)),
            Span::Around(size) => position.saturating_sub(at_most(size / 2)),
        };
        first..=position
    }

    /// The positions that a token at `position` sees if it looks at later ones, too.
    pub fn on_both_sides(self, position: i32) -> std::ops::RangeInclusive<i32> {
        let last = match self {
            Span::Around(size) => {
                position.saturating_add(i32::try_from(size / 2).unwrap_or(i32::MAX))
            }
            Span::Full | Span::Window(_) | Span::Chunk(_) => i32::MAX,
        };
        *self.of(position).start()..=last
    }
}

/// Scales queries by the logarithm of their position: `1 + scale · ln(floor((position + offset) / floor) + 1)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Factor of the logarithm.
    pub scale: f32,
    /// Positions of one step.
    pub floor: f32,
    /// Added to positions.
    pub offset: f32,
}

impl Temperature {
    /// What a query at `position` is multiplied with.
    pub fn at(self, position: i32) -> f32 {
        let steps = ((position as f32 + self.offset) / self.floor).floor();
        (steps + 1.0).ln() * self.scale + 1.0
    }
}

/// What the result of attention is multiplied with.
#[derive(Clone, Debug, PartialEq)]
pub enum Gate {
    /// The sigmoid of the second half of each head of the query matrix.
    InQueries,
    /// A function of a product with what goes into attention; of one number a head, if that is what the matrix gives.
    Linear(Linear, Unary),
}

/// Attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Heads of queries.
    pub n_head: usize,
    /// Heads of keys and values; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a head of queries and keys.
    pub head_k: usize,
    /// Elements of a head of values.
    pub head_v: usize,
    /// Where queries, keys and values come from.
    pub projection: Projection,
    /// They are limited to this, in both directions.
    pub clamp: Option<f32>,
    /// Norms of queries, keys and values.
    pub norms: [Option<Norm>; 3],
    /// What the norms of queries and keys are over.
    pub norm_over: NormOver,
    /// The rotation, if there is one.
    pub rotation: Option<Rotation>,
    /// Whom tokens look at.
    pub span: Span,
    /// They look at later tokens, too. Then all tokens of a sequence are computed together, and nothing is kept.
    pub sees_later: bool,
    /// The layer whose keys and values are looked at, if not its own.
    pub keys_of: Option<usize>,
    /// Factor of the logits.
    pub scale: f32,
    /// If not 0, logits become `softcap · tanh(logit / softcap)`.
    pub softcap: f32,
    /// Largest ALiBi bias; 0 for none.
    pub max_bias: f32,
    /// The name of one more logit for each head, if there is one.
    pub sinks: Option<&'static str>,
    /// Scales queries.
    pub temperature: Option<Temperature>,
    /// Scales the result.
    pub gate: Option<Gate>,
    /// A norm before the last matrix.
    pub sub_norm: Option<Norm>,
    /// The last matrix.
    pub output: Linear,
}

impl Experts {
    /// The same with another function in the experts.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.experts.activation = activation;
        self
    }

    /// The same with an expert that every token uses.
    pub fn with_shared(self, shared: Mlp) -> Self {
        Experts {
            shared: Some((shared, None)),
            ..self
        }
    }
}

impl Attention {
    /// Has frequencies be divided, if there is a rotation.
    pub fn set_divisors(&mut self, divisors: Divisors) {
        if let Some(rotation) = &mut self.rotation {
            rotation.divisors = divisors;
        }
    }

    /// Has the rotation do what YaRN asks for exactly, if it does YaRN.
    pub fn set_exact_yarn(&mut self) {
        let Some(rotation) = self
            .rotation
            .as_mut()
            .filter(|rotation| rotation.rope.ext_factor != 0.0)
        else {
            return;
        };
        let yarn = rotation.rope;
        rotation.divisors = Divisors::Yarn(Yarn(yarn));
        rotation.rope = Rope {
            attn_factor: yarn.attn_factor * (1.0 + 0.1 * (1.0 / yarn.freq_scale).ln()),
            ..Rope::new(yarn.dims, yarn.mode, yarn.freq_base)
        };
    }

    /// Has tokens look through a window, with a rotation of its own if there is any.
    pub fn set_window(&mut self, size: usize, rope: Rope) {
        self.span = Span::Window(size);
        if let Some(rotation) = &mut self.rotation {
            rotation.rope = rope;
        }
    }

    /// The same with these biases of queries, keys and values.
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

    /// What it keeps.
    pub fn memory(&self) -> Memory {
        if self.sees_later {
            return Memory::default();
        }
        let keys = Some([self.n_head_kv, self.head_k]);
        match (self.keys_of, &self.projection) {
            (Some(_), _) => Memory::default(),
            (None, Projection::Latent(latent)) if matches!(latent.up, LatentUp::Absorbed(_)) => {
                Memory {
                    keys,
                    ..Memory::default()
                }
            }
            (None, _) => Memory {
                keys,
                values: Some([self.n_head_kv, self.head_v]),
                ..Memory::default()
            },
        }
    }
}

/// The gated delta rule in the place of attention, behind a convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Heads of queries and keys; divides `n_head`.
    pub n_head_k: usize,
    /// Heads of values.
    pub n_head: usize,
    /// Elements of a head.
    pub size: usize,
    /// Tokens that the convolution sees.
    pub width: usize,
    /// Queries, keys and values, and what the result is multiplied with.
    pub input: DeltaInput,
    /// What becomes decays, and betas: a matrix each, or one whose rows are the betas and what becomes decays of each head of keys.
    pub rates: DeltaRates,
    /// Heads of values that share one of keys are neighbours, not as many heads apart as there are of keys.
    pub neighbours: bool,
    /// The names of the convolution's weights, of what is added to what becomes decays, and of what that is multiplied with.
    pub names: [&'static str; 3],
    /// Keeps queries and keys from being divided by 0.
    pub eps: f32,
    /// The norm of each head of the result.
    pub norm: Norm,
    /// The last matrix.
    pub output: Linear,
}

/// Where queries, keys, values and gates of the gated delta rule come from.
#[derive(Clone, Debug, PartialEq)]
pub enum DeltaInput {
    /// A matrix of queries, keys and values, and one of gates.
    Split(Linear, Linear),
    /// One matrix: for each head of keys, its query, its key, its values, its gates.
    ByHead(Linear),
}

/// Where decays and betas come from.
#[derive(Clone, Debug, PartialEq)]
pub enum DeltaRates {
    /// A matrix of what becomes decays, and one of betas.
    Split(Linear, Linear),
    /// One matrix: for each head of keys, the betas of its heads of values, then what becomes their decays.
    ByHead(Linear),
}

impl DeltaNet {
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        (2 * self.n_head_k + self.n_head) * self.size
    }

    /// What it keeps.
    pub fn memory(&self) -> Memory {
        Memory {
            conv: Some((self.width - 1) * self.channels()),
            state: Some(self.size * self.size * self.n_head),
            ..Memory::default()
        }
    }
}

/// A short convolution in the place of attention, with gates before and after it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConv {
    /// Channels.
    pub channels: usize,
    /// Tokens that it sees.
    pub width: usize,
    /// Half of them are later ones. Then nothing is kept.
    pub sees_later: bool,
    /// The gate before it, the gate behind it, and what goes through it.
    pub input: Linear,
    /// The name of its weights.
    pub weights: &'static str,
    /// The last matrix.
    pub output: Linear,
}

impl ShortConv {
    /// What it keeps.
    pub fn memory(&self) -> Memory {
        Memory {
            conv: (!self.sees_later).then(|| (self.width - 1) * self.channels),
            ..Memory::default()
        }
    }
}

/// A selective state space ([Gu & Dao 2023](https://arxiv.org/abs/2312.00752), [Dao & Gu 2024](https://arxiv.org/abs/2405.21060)) in the place of
/// attention, behind a convolution: Mamba 1 and 2.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpace {
    /// Heads. In Mamba 1, every channel is one.
    pub n_head: usize,
    /// Elements of a head.
    pub size: usize,
    /// Heads next to each other share B and C: how many kinds of these there are.
    pub groups: usize,
    /// Columns of a head's matrix.
    pub columns: usize,
    /// Tokens that the convolution sees.
    pub width: usize,
    /// What goes in.
    pub input: Linear,
    /// Where B, C and steps come from.
    pub steps: Steps,
    /// The norm of what each group gives.
    pub norm: Option<Norm>,
    /// The last matrix.
    pub output: Linear,
}

/// Where a state space has its B, C and steps from.
#[derive(Clone, Debug, PartialEq)]
pub enum Steps {
    /// From the input matrix: its rows are gates, then x, B and C, which go through the convolution, then steps.
    OfInput,
    /// From what comes out of the convolution; the input matrix gives x and gates.
    OfConvolution(Box<ConvolutionSteps>),
}

/// Steps, B and C from what comes out of a convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionSteps {
    /// Elements of a row that becomes steps.
    pub rank: usize,
    /// That row, B and C.
    pub all: Linear,
    /// The norms of the three, if they have some.
    pub norms: Option<[Norm; 3]>,
    /// From the row to steps.
    pub up: Linear,
}

impl StateSpace {
    /// Elements of all heads.
    pub fn inner(&self) -> usize {
        self.n_head * self.size
    }

    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        match self.steps {
            Steps::OfInput => self.inner() + 2 * self.groups * self.columns,
            Steps::OfConvolution(_) => self.inner(),
        }
    }

    /// What it keeps.
    pub fn memory(&self) -> Memory {
        Memory {
            conv: Some((self.width - 1) * self.channels()),
            state: Some(self.columns * self.inner()),
            ..Memory::default()
        }
    }
}

/// A function between the matrices of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// Of gate and value.
    Gated(Glu),
    /// Of one value.
    Plain(Unary),
    /// The square of what is positive.
    SquaredRelu,
    /// `min(silu(gate), limit) · clamp(value, -limit, limit)`.
    ClampedSwiglu {
        /// The limit.
        limit: f32,
    },
    /// GELU of the gate, as far as it exceeds the mean of its row by so many standard deviations, times the value.
    SparseGeglu {
        /// How many.
        deviations: f32,
    },
}

impl Activation {
    /// The name of the function.
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

/// A feed-forward part, or experts of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// The matrix of the gate; if there is none and the activation is gated, `up` gives gate and value.
    pub gate: Option<Linear>,
    /// The matrix of the value.
    pub up: Linear,
    /// What is between.
    pub activation: Activation,
    /// The name of a vector that what comes out of it is divided by.
    pub divisor: Option<&'static str>,
    /// A norm before the last matrix.
    pub sub_norm: Option<Norm>,
    /// The last matrix.
    pub down: Linear,
}

/// How a router turns what it gives into the shares of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen ones.
    SoftmaxOfChosen,
    /// A sigmoid each.
    Sigmoid,
    /// The root of softplus, each.
    SqrtSoftplus,
}

/// What a router sees.
#[derive(Clone, Debug, PartialEq)]
pub enum RouterInput {
    /// What the experts see.
    Experts,
    /// The residual stream before the layer.
    Layer,
    /// The residual stream before the part, normalised and multiplied with a number.
    Normed(Norm, f32),
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// The matrix that gives one number for each expert.
    pub router: Linear,
    /// What the router sees.
    pub router_input: RouterInput,
    /// What becomes of it.
    pub routing: Routing,
    /// The name of a number for each expert that is added for the choice only.
    pub choice_bias: Option<(&'static str, Presence)>,
    /// Experts are in so many groups, of which the best so many count.
    pub groups: Option<[usize; 2]>,
    /// How many experts a token uses.
    pub used: usize,
    /// Shares of the chosen add up to 1.
    pub normalize: bool,
    /// What shares are multiplied with, if not with 1.
    pub scale: Option<f32>,
    /// Shares are applied to what goes in, not to what comes out.
    pub weigh_input: bool,
    /// The experts.
    pub experts: Mlp,
    /// An expert that every token uses, and the matrix of its share, of which the sigmoid counts.
    pub shared: Option<(Mlp, Option<Linear>)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ARCHITECTURES;
    use crate::synthetic::SyntheticModel;

    #[test]
    fn sequences_with_states_do_not_mix() {
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
