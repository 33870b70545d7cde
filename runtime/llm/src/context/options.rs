//! The options of a context.

use crate::adapter::ScaledAdapter;
use crate::arch::spec::Pooling;
use crate::arch::{GraphShape, Output, Spec};
use crate::error::{Error, Result};
use crate::graphs::GraphCache;
use samite_core::{CancelToken, DType, Environment};
use samite_sched::{Fallback, Options};

/// How a [`Context`](crate::Context) is set up.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Cells of the KV cache, for all sequences together; `None` for the model's own context, at
    /// most 4096. [`longest_context`](Self::longest_context) says how many fit into free memory.
    pub n_ctx: Option<usize>,
    /// Most tokens of one [`Context::decode`](crate::Context::decode).
    pub n_batch: usize,
    /// Most tokens of one graph. It becomes `n_batch` for models whose tokens look at later ones: all of a batch are computed at once.
    pub n_ubatch: usize,
    /// Number of sequences.
    pub n_seq: usize,
    /// What is computed of tokens.
    pub output: Output,
    /// Most rows of logits of one graph; `None` for one for each sequence, at least 16. Perplexity is faster with
    /// `n_ubatch`, at the cost of memory.
    pub n_logits: Option<usize>,
    /// Types of cached keys and values.
    pub kv_types: [DType; 2],
    /// Attention as one operation. Without, it is done in several steps; values must be F32, F16 or BF16 then.
    pub flash: bool,
    /// Layers that look through a window keep all tokens, too. Without, they keep what the window needs, and a batch, if that is less: a sequence
    /// cannot be cut, then, where earlier tokens than they have would be seen.
    pub full_windows: bool,
    /// Threads of devices that compute on the host, for a single token; `None` for all that a device has.
    pub threads: Option<usize>,
    /// The same for several tokens at once, such as those of a prompt.
    pub threads_batch: Option<usize>,
    /// Adapters of the model, each with the share in which it counts.
    pub adapters: Vec<ScaledAdapter>,
    /// Pipeline copies, see [`Options::copies`].
    pub copies: usize,
    /// Whether devices take over operations on weights in host memory, see [`Options::offload`].
    pub offload: bool,
    /// About operations that land on a slower device.
    pub fallback: Fallback,
    /// Stops decoding. A decode that was stopped leaves the cache as it was before.
    pub cancel: CancelToken,
    /// Where time comes from.
    pub environment: Environment,
}

impl Default for ContextOptions {
    fn default() -> Self {
        ContextOptions {
            n_ctx: None,
            n_batch: 2048,
            n_ubatch: 512,
            n_seq: 1,
            output: Output::Logits,
            n_logits: None,
            kv_types: [DType::F16, DType::F16],
            flash: true,
            full_windows: false,
            threads: None,
            threads_batch: None,
            adapters: Vec::new(),
            copies: 1,
            offload: true,
            fallback: Fallback::default(),
            cancel: CancelToken::new(),
            environment: Environment::system(),
        }
    }
}

/// Numbers that follow from options and model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub n_cells: usize,
    /// Cells for layers that look through a window; 0 if they are not apart.
    pub n_window: usize,
    pub n_ubatch: usize,
    pub n_logits: usize,
    pub n_seq: usize,
    /// Whether tokens look at later ones.
    pub sees_later: bool,
    /// Whether sequences do not mix in a micro-batch.
    pub by_sequence: bool,
    /// Whether means over the tokens of sequences are computed.
    pub means: bool,
}

impl Sizes {
    /// The graphs for which memory is reserved: that of most tokens, that of a single token, and that of one token of each sequence, where each
    /// has a state.
    pub fn reserved(&self) -> impl Iterator<Item = GraphShape> {
        let n_seqs = self.n_seq.min(self.n_ubatch);
        let of_each = || GraphShape {
            n_seqs,
            ..self.shape(n_seqs, n_seqs.min(self.n_logits), n_seqs)
        };
        [self.largest(), self.shape(1, 1, 1)]
            .into_iter()
            .chain((self.by_sequence && n_seqs > 1).then(of_each))
    }

    /// The graph of most tokens.
    pub fn largest(&self) -> GraphShape {
        self.shape(self.n_ubatch, self.n_logits, self.n_seq)
    }

    /// The graph of a micro-batch at the end of a full cache.
    pub fn at_the_end(&self, n_tokens: usize) -> GraphShape {
        self.shape(n_tokens, n_tokens.min(1), 1)
    }

    /// The graph of most tokens of which all logits are wanted, at the end of a full cache.
    pub fn of_outputs(&self) -> GraphShape {
        let n_tokens = self.n_logits.min(self.n_ubatch).max(1);
        self.shape(n_tokens, n_tokens, self.n_seq)
    }

    fn shape(&self, n_tokens: usize, n_outputs: usize, n_seq: usize) -> GraphShape {
        GraphShape {
            n_tokens,
            n_window: self.n_window,
            n_kv: match self.sees_later {
                true => n_tokens,
                false => self.n_cells,
            },
            n_outputs: match self.means {
                true => n_tokens,
                false => n_outputs,
            },
            n_seqs: 1,
            n_means: match self.means {
                true => n_seq.min(n_tokens),
                false => 0,
            },
            is_embedded: false,
            mixed: None,
            n_likeliest: 0,
        }
    }
}

/// Whether an output is made of means over the tokens of sequences.
pub(crate) fn takes_means(output: Output, spec: &Spec) -> bool {
    let classifier = spec.head.classifier.as_ref();
    match output {
        Output::Embeddings(Pooling::Mean) => true,
        Output::Embeddings(Pooling::Rank) => classifier.is_some_and(|c| c.of_mean),
        _ => false,
    }
}

impl ContextOptions {
    /// Longest context without `n_ctx`, and least one that is chosen by free memory.
    pub const DEFAULT_CONTEXT: usize = 4096;

    /// Fills in what is not said, and limits what cannot occur.
    pub(crate) fn sizes(&self, spec: &Spec) -> Result<Sizes> {
        let n_cells = self
            .n_ctx
            .unwrap_or(spec.n_ctx_train.min(Self::DEFAULT_CONTEXT));
        for (name, value) in [
            ("n_ctx", n_cells),
            ("n_batch", self.n_batch),
            ("n_ubatch", self.n_ubatch),
            ("n_seq", self.n_seq),
            ("n_logits", self.n_logits.unwrap_or(1)),
            ("threads", self.threads.unwrap_or(1)),
            ("threads_batch", self.threads_batch.unwrap_or(1)),
        ] {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(Error::invalid(format!(
                    "{name} is {value}, must be 1 to 2147483647"
                )));
            }
        }
        // What each sequence sees of the past, and a batch: what it replaces is kept until the batch is done.
        let room = |size: usize| {
            let seen = size.saturating_mul(self.n_seq);
            let cells = seen
                .saturating_add(self.n_batch)
                .checked_next_multiple_of(256);
            cells.filter(|&cells| cells < n_cells)
        };
        let window = spec.window().filter(|_| !self.full_windows);
        let sees_later = spec.sees_later();
        let n_ubatch = match sees_later {
            true => self.n_batch,
            false => self.n_ubatch.min(self.n_batch),
        };
        let n_ubatch = n_ubatch.min(n_cells);
        let means = takes_means(self.output, spec);
        let n_logits = match self.output {
            Output::Logits => self.n_logits.unwrap_or(self.n_seq.max(16)),
            Output::Embeddings(Pooling::None) => self.n_logits.unwrap_or(n_ubatch),
            Output::Both => self.n_logits.unwrap_or(n_ubatch),
            // All tokens go into means.
            Output::Embeddings(_) if means => n_ubatch,
            Output::Embeddings(_) => self.n_seq,
        };
        Ok(Sizes {
            n_cells,
            n_window: window.and_then(room).unwrap_or(0),
            n_ubatch,
            n_logits: n_logits.min(n_ubatch),
            n_seq: self.n_seq,
            sees_later,
            by_sequence: spec.is_by_sequence(),
            means,
        })
    }

    /// Checks that a model gives what is wanted of it.
    pub(crate) fn check_output(&self, spec: &Spec) -> Result<()> {
        match self.output {
            Output::Logits | Output::Both if spec.head.output.is_none() => Err(Error::invalid(
                "this model gives embeddings of texts and no logits: it cannot write text; `samite embed` is for it",
            )),
            Output::Embeddings(Pooling::Rank) if spec.head.classifier.is_none() => {
                Err(Error::invalid(
                    "pooling by rank: the model has no classifier (tensors \"cls.weight\", \"cls.output.weight\"); choose none, mean, cls or last",
                ))
            }
            _ => Ok(()),
        }
    }

    /// How the scheduler of a context decides.
    pub(crate) fn scheduler(&self) -> Options {
        Options {
            copies: self.copies.max(1),
            offload: self.offload,
            fallback: self.fallback,
            // And one for moving keys. The graphs that are given up by the context are those whose plans go.
            cached_plans: GraphCache::SIZE + 1,
            environment: self.environment.clone(),
        }
    }
}
