//! The options of a context.

use crate::adapter::ScaledAdapter;
use crate::arch::spec::Pooling;
use crate::arch::{GraphShape, Output, Spec};
use crate::error::{Error, Result};
use crate::graphs::GraphCache;
use samite_core::{CancelToken, DType, Environment};
use samite_sched::{Fallback, Options};

/// Options of a [`Context`](crate::Context).
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Number of cells in the KV cache, for all sequences together. `None` uses the model's context
    /// length, at most 4096. [`longest_context`](Self::longest_context) returns how many fit into
    /// free memory.
    pub n_ctx: Option<usize>,
    /// Maximum number of tokens in one [`Context::decode`](crate::Context::decode).
    pub n_batch: usize,
    /// Maximum number of tokens in one graph. For models with bidirectional attention it becomes
    /// `n_batch`, because they compute a batch at once.
    pub n_ubatch: usize,
    /// Number of sequences.
    pub n_seq: usize,
    /// Requested results.
    pub output: Output,
    /// Maximum number of rows of logits in one graph. `None` uses one for each sequence, and at
    /// least 16. Perplexity is faster with `n_ubatch`, at the cost of memory.
    pub n_logits: Option<usize>,
    /// Types of cached keys and values.
    pub kv_types: [DType; 2],
    /// True to compute attention with one operation (flash attention). Otherwise several operations
    /// compute it, and values must be F32, F16 or BF16.
    pub flash: bool,
    /// True if layers with a window keep all tokens. Otherwise they keep the tokens that the window
    /// needs, plus a batch, if that is less. A sequence then cannot be cut at a position where the
    /// window would need removed tokens.
    pub full_windows: bool,
    /// Threads of host devices for a single token. `None` uses all threads of a device.
    pub threads: Option<usize>,
    /// Threads of host devices for several tokens at once, for example in prefill.
    pub threads_batch: Option<usize>,
    /// True to reserve memory for embeddings in place of tokens, as images have them. Otherwise it
    /// is allocated when they first occur.
    pub images: bool,
    /// Adapters of the model with their scales.
    pub adapters: Vec<ScaledAdapter>,
    /// Pipeline copies, see [`Options::copies`].
    pub copies: usize,
    /// True if devices may take over operations on weights in host memory, see
    /// [`Options::offload`].
    pub offload: bool,
    /// Policy for operations that run on a slower device.
    pub fallback: Fallback,
    /// Token that stops decoding. A decode that is stopped leaves the cache unchanged.
    pub cancel: CancelToken,
    /// Source of time.
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
            images: false,
            adapters: Vec::new(),
            copies: 1,
            offload: true,
            fallback: Fallback::default(),
            cancel: CancelToken::new(),
            environment: Environment::system(),
        }
    }
}

/// Sizes that derive from options and model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub n_cells: usize,
    /// Number of cells for layers with a window; 0 if these use the same cells as the other layers.
    pub n_window: usize,
    pub n_ubatch: usize,
    pub n_logits: usize,
    pub n_seq: usize,
    /// True if attention is bidirectional.
    pub is_bidirectional: bool,
    /// True if sequences are not interleaved in a micro-batch.
    pub by_sequence: bool,
    /// True if means over the tokens of sequences are computed.
    pub means: bool,
    /// True if the positions of images differ between axes; `None` without images.
    pub images: Option<bool>,
}

impl Sizes {
    /// Returns the shapes of the graphs that memory is reserved for: the one with the most tokens,
    /// the one for a single token, and, if sequences have a recurrent state, the one with one token
    /// of each sequence, and the largest one with images.
    pub fn reserved(&self) -> impl Iterator<Item = GraphShape> {
        let n_seqs = self.n_seq.min(self.n_ubatch);
        let of_each = || GraphShape {
            n_seqs,
            ..self.shape(n_seqs, n_seqs.min(self.n_logits), n_seqs)
        };
        let of_images = |has_axes: bool| GraphShape {
            is_embedded: true,
            has_axes,
            ..self.largest()
        };
        [self.largest(), self.shape(1, 1, 1)]
            .into_iter()
            .chain((self.by_sequence && n_seqs > 1).then(of_each))
            .chain(self.images.map(of_images))
    }

    /// Returns the shape of the graph with the most tokens.
    pub fn largest(&self) -> GraphShape {
        self.shape(self.n_ubatch, self.n_logits, self.n_seq)
    }

    /// Returns the shape of the graph of a micro-batch at the end of a full cache.
    pub fn at_the_end(&self, n_tokens: usize) -> GraphShape {
        self.shape(n_tokens, n_tokens.min(1), 1)
    }

    /// Returns the shape of the largest graph with logits for all tokens, at the end of a full
    /// cache.
    pub fn of_outputs(&self) -> GraphShape {
        let n_tokens = self.n_logits.min(self.n_ubatch).max(1);
        self.shape(n_tokens, n_tokens, self.n_seq)
    }

    fn shape(&self, n_tokens: usize, n_outputs: usize, n_seq: usize) -> GraphShape {
        GraphShape {
            n_tokens,
            n_window: self.n_window,
            n_kv: if self.is_bidirectional {
                n_tokens
            } else {
                self.n_cells
            },
            n_outputs: if self.means { n_tokens } else { n_outputs },
            n_seqs: 1,
            n_means: if self.means { n_seq.min(n_tokens) } else { 0 },
            is_embedded: false,
            has_axes: false,
            mixed: None,
            n_top_k: 0,
        }
    }
}

/// Returns whether an output needs means over the tokens of sequences.
pub(crate) fn pools_by_mean(output: Output, spec: &Spec) -> bool {
    let classifier = spec.head.classifier.as_ref();
    match output {
        Output::Embeddings(Pooling::Mean) => true,
        Output::Embeddings(Pooling::Rank) => classifier.is_some_and(|c| c.of_mean),
        _ => false,
    }
}

impl ContextOptions {
    /// Longest default context, and the shortest one that is chosen by free memory.
    pub const DEFAULT_CONTEXT: usize = 4096;

    /// Fills in defaults, and limits sizes to what can occur.
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
        // Room for the window of each sequence and a batch: replaced cells are kept until the batch
        // is done.
        let room = |size: usize| {
            let seen = size.saturating_mul(self.n_seq);
            let cells = seen
                .saturating_add(self.n_batch)
                .checked_next_multiple_of(256);
            cells.filter(|&cells| cells < n_cells)
        };
        let window = spec.window().filter(|_| !self.full_windows);
        let is_bidirectional = spec.is_bidirectional();
        let n_ubatch = if is_bidirectional {
            self.n_batch
        } else {
            self.n_ubatch.min(self.n_batch)
        };
        let n_ubatch = n_ubatch.min(n_cells);
        let means = pools_by_mean(self.output, spec);
        let n_logits = match self.output {
            Output::Logits => self.n_logits.unwrap_or(self.n_seq.max(16)),
            Output::Embeddings(Pooling::None) => self.n_logits.unwrap_or(n_ubatch),
            Output::Both => self.n_logits.unwrap_or(n_ubatch),
            // Means need all tokens.
            Output::Embeddings(_) if means => n_ubatch,
            Output::Embeddings(_) => self.n_seq,
        };
        Ok(Sizes {
            n_cells,
            n_window: window.and_then(room).unwrap_or(0),
            n_ubatch,
            n_logits: n_logits.min(n_ubatch),
            n_seq: self.n_seq,
            is_bidirectional,
            by_sequence: spec.is_by_sequence(),
            means,
            images: self.images.then(|| spec.has_axes()),
        })
    }

    /// Checks that the model supports the requested results.
    pub(crate) fn check_output(&self, spec: &Spec) -> Result<()> {
        match self.output {
            Output::Logits | Output::Both if spec.head.output.is_none() => Err(Error::invalid(
                "this model gives embeddings of texts and no logits: it cannot write text; `samite embed` is for it",
            )),
            Output::Embeddings(Pooling::Rank) if spec.head.classifier.is_none() => {
                Err(Error::invalid(
                    "pooling by rank: the model has no classifier \
                     (tensors \"cls.weight\", \"cls.output.weight\"); choose none, mean, cls or \
                     last",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the options of the context's scheduler.
    pub(crate) fn scheduler(&self) -> Options {
        Options {
            copies: self.copies.max(1),
            offload: self.offload,
            fallback: self.fallback,
            // One more for key shifts. The plans that the scheduler evicts belong to the graphs
            // that the context evicts.
            cached_plans: GraphCache::SIZE + 1,
            environment: self.environment.clone(),
        }
    }
}
