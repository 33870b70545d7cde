//! A context for embeddings, which runs one batch of texts at a time.

use crate::app::lock;
use samite_llm::{Context, Error, Normalization, embed};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Computes embeddings.
pub struct Embedder {
    context: Mutex<Context>,
    /// True if each token has its own embedding.
    pub(crate) is_of_tokens: bool,
    /// True if the model computes scores instead.
    pub(crate) is_rank: bool,
    /// Numbers per embedding.
    pub(crate) width: usize,
    /// Maximum tokens of a text.
    pub(crate) longest: usize,
    pub(crate) normalization: Normalization,
    tokens: AtomicU64,
    batches: AtomicU64,
}

impl std::fmt::Debug for Embedder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedder")
            .field("longest", &self.longest)
            .finish_non_exhaustive()
    }
}

impl Embedder {
    /// Creates an embedder for the output type of `context`.
    pub fn new(context: Context, normalization: Normalization) -> Self {
        use samite_llm::arch::Output;
        use samite_llm::arch::spec::Pooling;
        let output = context.options().output;
        let room = context.options().n_batch.min(context.n_ctx());
        let longest = if context.pools_by_mean() {
            room.min(context.options().n_ubatch)
        } else {
            room
        };
        Embedder {
            is_of_tokens: output == Output::Embeddings(Pooling::None),
            is_rank: output == Output::Embeddings(Pooling::Rank),
            width: context.model().spec().n_embd,
            longest,
            normalization,
            context: Mutex::new(context),
            tokens: AtomicU64::new(0),
            batches: AtomicU64::new(0),
        }
    }

    /// Computes the embeddings of each text: one per text, or one per token.
    pub(crate) fn embed(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<Vec<f32>>>, Error> {
        let mut found = vec![Vec::new(); texts.len()];
        let mut context = lock(&self.context);
        embed::<Error>(&mut context, texts, |text, embedding| {
            if let Some(list) = found.get_mut(text) {
                list.push(embedding.to_vec());
            }
            Ok(())
        })?;
        let tokens: usize = texts.iter().map(Vec::len).sum();
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.batches.fetch_add(1, Ordering::Relaxed);
        Ok(found)
    }

    /// Returns the number of tokens and batches so far.
    pub(crate) fn totals(&self) -> (u64, u64) {
        (
            self.tokens.load(Ordering::Relaxed),
            self.batches.load(Ordering::Relaxed),
        )
    }
}
