//! Embeddings of texts, for programs that embed samite.

use crate::llm::arch::spec::Pooling;
use crate::llm::{self, Context, ContextOptions, Error, Model, Normalization, embed, fit_to};
use crate::open::load;
use std::path::Path;
use std::sync::Arc;

/// Computes embeddings of texts.
///
/// ```no_run
/// use samite::TextEmbedder;
/// use samite::llm::cosine;
///
/// let mut embedder = TextEmbedder::open("model.gguf")?;
/// let embeddings = embedder.embed(&["a cat", "a dog", "the sea"])?;
/// assert!(cosine(&embeddings[0], &embeddings[1]) > cosine(&embeddings[0], &embeddings[2]));
/// # Ok::<_, samite::llm::Error>(())
/// ```
#[derive(Debug)]
pub struct TextEmbedder {
    model: Arc<Model>,
    options: ContextOptions,
    pooling: Pooling,
    /// Context of the last call. `None` before the first one.
    context: Option<Context>,
}

impl TextEmbedder {
    /// Opens the embedding model in a file, on the best devices of this machine.
    ///
    /// # Errors
    /// If the model cannot be loaded, or is a reranker.
    pub fn open(model: impl AsRef<Path>) -> llm::Result<Self> {
        Self::new(load(model)?, ContextOptions::default())
    }

    /// Creates an embedder with a model. Texts may be as long as `options.n_ctx`, by default as
    /// the model's context.
    ///
    /// Uses the pooling that the model file names, or the mean of all tokens if it names none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the model has no vocabulary or is a reranker.
    pub fn new(model: Arc<Model>, options: ContextOptions) -> llm::Result<Self> {
        model.tokenizer()?;
        let pooling = match model.spec().pooling {
            Some(Pooling::Rank) => {
                let message = "the model is a reranker: it has scores of pairs, not embeddings";
                return Err(Error::InvalidArgument(message.into()));
            }
            None | Some(Pooling::None) => Pooling::Mean,
            Some(pooling) => pooling,
        };
        Ok(Self {
            model,
            options,
            pooling,
            context: None,
        })
    }

    /// Returns the number of elements of an embedding.
    pub fn width(&self) -> usize {
        self.model.spec().embedding_width(self.pooling)
    }

    /// Computes an embedding of length 1 for each text.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a text that has no tokens or is longer than the context. Also
    /// fails like [`Context::decode`].
    pub fn embed(&mut self, texts: &[impl AsRef<str>]) -> llm::Result<Vec<Vec<f32>>> {
        let tokenizer = self.model.tokenizer()?;
        let texts: Vec<_> = texts
            .iter()
            .map(|text| Ok(tokenizer.tokenize(text.as_ref(), true, false)?))
            .collect::<llm::Result<_>>()?;
        let mut embeddings = Vec::with_capacity(texts.len());
        embed(self.context_for(&texts)?, &texts, |_, embedding| {
            let mut embedding = embedding.to_vec();
            Normalization::Norm(2).apply(&mut embedding);
            embeddings.push(embedding);
            Ok::<_, Error>(())
        })?;
        Ok(embeddings)
    }

    /// Returns a context with room for `texts`. Reuses the last context if it is large enough.
    fn context_for(&mut self, texts: &[Vec<u32>]) -> llm::Result<&mut Context> {
        let spec = self.model.spec();
        let n_ctx = self.options.n_ctx.unwrap_or(spec.n_ctx_train);
        // Texts longer than the context get no room; `embed` rejects them.
        let lengths: Vec<_> = texts.iter().map(|text| text.len().min(n_ctx)).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let context = self.context.take();
        let mut options = self.options.clone();
        options.n_ctx = Some(n_ctx);
        fit_to(&mut options, spec, self.pooling, &lengths);
        // One that is too small would embed the texts one by one.
        let is_large_enough = |context: &Context| {
            let given = context.options();
            given.n_seq >= options.n_seq
                && given.n_batch >= options.n_batch
                && given.n_ubatch >= options.n_ubatch.min(options.n_batch)
                && context.n_ctx() >= longest
        };
        let context = match context.filter(is_large_enough) {
            Some(context) => context,
            None => Context::new(self.model.clone(), options)?,
        };
        Ok(self.context.insert(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::SyntheticModel;

    fn embedder(options: ContextOptions) -> TextEmbedder {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        SyntheticModel::tiny("llama").write(&path).unwrap();
        TextEmbedder::new(load(&path).unwrap(), options).unwrap()
    }

    #[test]
    fn embeddings_do_not_depend_on_other_texts() {
        let mut embedder = embedder(ContextOptions::default());
        let alone = embedder.embed(&["a cat"]).unwrap().remove(0);
        let long = "the sea ".repeat(8);
        let together = embedder.embed(&["a dog", "a cat", &long]).unwrap();
        assert_eq!(together.len(), 3);
        assert!(together.iter().all(|one| one.len() == embedder.width()));
        assert!(crate::llm::cosine(&together[1], &alone) > 0.9999);
        assert!(crate::llm::cosine(&together[0], &alone) < 0.9999);
        let length: f32 = alone.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
        assert!(embedder.embed(&[""; 0]).unwrap().is_empty());
        let context = embedder.context.as_ref().unwrap();
        assert_eq!(context.options().n_seq, 3, "three texts at once");
    }

    #[test]
    fn an_overlong_text_is_named() {
        let mut embedder = embedder(ContextOptions {
            n_ctx: Some(16),
            ..ContextOptions::default()
        });
        let long = "the sea ".repeat(40);
        let error = embedder.embed(&["a cat", &long]).unwrap_err().to_string();
        assert!(error.starts_with("text 1 has "), "{error}");
        assert_eq!(embedder.embed(&["a cat"]).unwrap().len(), 1);
    }
}
