//! The options of a context.

use crate::adapter::ScaledAdapter;
use crate::arch::{GraphShape, Spec};
use crate::error::{Error, Result};
use crate::graphs::GraphCache;
use samite_core::{CancelToken, DType, Environment};
use samite_sched::{Fallback, Options};

/// Longest context that is chosen without being asked for.
const DEFAULT_CONTEXT: usize = 4096;

/// How a [`Context`](crate::Context) is set up.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Cells of the KV cache, for all sequences together; `None` for the model's own context, at most 4096.
    pub n_ctx: Option<usize>,
    /// Most tokens of one [`Context::decode`](crate::Context::decode).
    pub n_batch: usize,
    /// Most tokens of one graph.
    pub n_ubatch: usize,
    /// Number of sequences.
    pub n_seq: usize,
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
}

impl Sizes {
    /// The graphs for which memory is reserved: the largest one, and that of a single token.
    pub fn reserved(&self) -> [GraphShape; 2] {
        [(self.n_ubatch, self.n_logits), (1, 1)].map(|(n_tokens, n_outputs)| GraphShape {
            n_tokens,
            n_kv: self.n_cells,
            n_window: self.n_window,
            n_outputs,
            n_seqs: 1,
        })
    }

    /// The graph of a micro-batch at the end of a full cache.
    pub fn at_the_end(&self, n_tokens: usize) -> GraphShape {
        GraphShape {
            n_tokens,
            n_kv: self.n_cells,
            n_window: self.n_window,
            n_outputs: n_tokens.min(1),
            n_seqs: 1,
        }
    }
}

impl ContextOptions {
    /// Fills in what is not said, and limits what cannot occur.
    pub(crate) fn sizes(&self, spec: &Spec) -> Result<Sizes> {
        let n_cells = self.n_ctx.unwrap_or(spec.n_ctx_train.min(DEFAULT_CONTEXT));
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
        let n_ubatch = self.n_ubatch.min(self.n_batch).min(n_cells);
        let n_logits = self.n_logits.unwrap_or(self.n_seq.max(16)).min(n_ubatch);
        // What each sequence sees of the past, and a batch: what it replaces is kept until the batch is done.
        let room = |size: usize| {
            let seen = size.saturating_mul(self.n_seq);
            let cells = seen
                .saturating_add(self.n_batch)
                .checked_next_multiple_of(256);
            cells.filter(|&cells| cells < n_cells)
        };
        let window = spec.window().filter(|_| !self.full_windows);
        Ok(Sizes {
            n_cells,
            n_window: window.and_then(room).unwrap_or(0),
            n_ubatch,
            n_logits,
            n_seq: self.n_seq,
        })
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
