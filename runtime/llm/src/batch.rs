//! Tokens to decode, and embeddings in their place, with their positions and sequences.

use crate::error::{Error, Result};
use crate::kv::Cells;

/// One token of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// Token id; 0 if an embedding replaces the token.
    pub id: u32,
    /// Position in its sequences: the number of tokens before it.
    pub position: i32,
    /// Position for rotations on three axes (M-RoPE): time, row and column. Equal to `position` in
    /// a text without images.
    pub axes: [i32; 3],
    /// Last position that it attends to: its own, or that of the last token of its image if the
    /// tokens of an image attend to each other in both directions.
    pub last_attended: i32,
    /// True if the logits after the token, or its embedding, are requested. Embeddings of whole
    /// sequences do not need this.
    pub wants_logits: bool,
    /// Index of its embedding in the batch, if it has one.
    embedding: Option<usize>,
    first_sequence: usize,
    end_sequence: usize,
}

impl BatchToken {
    /// Returns whether an embedding replaces the token.
    pub fn is_embedded(&self) -> bool {
        self.embedding.is_some()
    }
}

/// Tokens that are decoded together. Reusing a batch saves allocations.
///
/// Embeddings can replace tokens, for example those of images.
///
/// ```
/// use samite_llm::Batch;
///
/// let mut batch = Batch::new();
/// // Both sequences begin with token 1 and go on with different ones, which have logits.
/// batch.add(1, 0, &[0, 1], false);
/// batch.add(2, 1, &[0], true);
/// batch.add(3, 1, &[1], true);
/// assert_eq!(batch.len(), 3);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<BatchToken>,
    sequences: Vec<u32>,
    /// One row for each embedding.
    embeddings: Vec<f32>,
    /// Number of embeddings.
    n_embedded: usize,
}

impl Batch {
    /// Creates an empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a batch of tokens at consecutive positions of one sequence, starting at `position`.
    /// Logits are requested after the last token.
    pub fn sequence(tokens: &[u32], position: i32, sequence: u32) -> Self {
        let mut batch = Self::new();
        for (i, &id) in tokens.iter().enumerate() {
            let position = position.saturating_add(i32::try_from(i).unwrap_or(i32::MAX));
            batch.add(id, position, &[sequence], i + 1 == tokens.len());
        }
        batch
    }

    /// Appends a token. It is stored once for all `sequences`, and sees the past of the first of
    /// them.
    pub fn add(&mut self, id: u32, position: i32, sequences: &[u32], wants_logits: bool) {
        let first_sequence = self.sequences.len();
        self.sequences.extend_from_slice(sequences);
        self.tokens.push(BatchToken {
            id,
            position,
            axes: [position; 3],
            last_attended: position,
            wants_logits,
            embedding: None,
            first_sequence,
            end_sequence: self.sequences.len(),
        });
    }

    /// Appends an embedding like [`add`](Self::add) appends a token. It has as many elements as
    /// [`Spec::input_width`](crate::arch::Spec::input_width).
    pub fn add_embedding(
        &mut self,
        embedding: &[f32],
        position: i32,
        sequences: &[u32],
        wants_logits: bool,
    ) {
        self.add(0, position, sequences, wants_logits);
        if let Some(token) = self.tokens.last_mut() {
            token.embedding = Some(self.n_embedded);
        }
        self.embeddings.extend_from_slice(embedding);
        self.n_embedded += 1;
    }

    /// Sets the [axes](BatchToken::axes) of the last token, and the last position that it
    /// [last_attended](BatchToken::last_attended).
    pub fn set_last_positions(&mut self, axes: [i32; 3], last_attended: i32) {
        if let Some(token) = self.tokens.last_mut() {
            (token.axes, token.last_attended) = (axes, last_attended);
        }
    }

    /// Removes all tokens except the first `count`.
    pub fn truncate(&mut self, count: usize) {
        let removed = self.tokens.get(count..).unwrap_or_default();
        let Some(first) = removed.first() else { return };
        self.sequences.truncate(first.first_sequence);
        let embedded = removed.iter().filter(|token| token.is_embedded()).count();
        let width = self.embeddings.len() / self.n_embedded.max(1);
        self.n_embedded -= embedded;
        self.embeddings.truncate(self.n_embedded * width);
        self.tokens.truncate(count);
    }

    /// Removes all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.embeddings.clear();
        self.n_embedded = 0;
    }

    /// Returns the embeddings of `part`, a contiguous slice of this batch's embedded tokens.
    pub(crate) fn embeddings_of(&self, part: &[BatchToken], width: usize) -> &[f32] {
        let first = part.first().and_then(|token| token.embedding);
        let first = first.unwrap_or_default();
        let rows = first * width..(first + part.len()) * width;
        self.embeddings.get(rows).unwrap_or_default()
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[BatchToken] {
        &self.tokens
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether the batch has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the sequences of a token of this batch.
    pub fn sequences(&self, token: &BatchToken) -> &[u32] {
        self.sequences
            .get(token.first_sequence..token.end_sequence)
            .unwrap_or_default()
    }

    /// Returns the number of tokens whose results are requested.
    pub(crate) fn n_wanted(&self) -> usize {
        let tokens = self.tokens.iter();
        tokens.filter(|token| token.wants_logits).count()
    }

    /// Returns a copy that requests the results of the tokens for whose indices `wants` returns
    /// true.
    pub(crate) fn wanting(&self, wants: impl Fn(usize) -> bool) -> Self {
        let mut batch = self.clone();
        for (index, token) in batch.tokens.iter_mut().enumerate() {
            token.wants_logits = wants(index);
        }
        batch
    }

    /// Returns the sequences in the order in which they start, each with the indices of its first
    /// and last token.
    pub(crate) fn ends(&self) -> Vec<(u32, [usize; 2])> {
        let mut ends: Vec<(u32, [usize; 2])> = Vec::new();
        // Index in the list by sequence.
        let mut places = std::collections::BTreeMap::new();
        for (index, token) in self.tokens.iter().enumerate() {
            for &sequence in self.sequences(token) {
                let place = *places.entry(sequence).or_insert_with(|| {
                    ends.push((sequence, [index; 2]));
                    ends.len() - 1
                });
                ends[place].1[1] = index;
            }
        }
        ends
    }

    /// Checks that the batch can be decoded: at most `n_batch` tokens from a vocabulary of
    /// `n_vocab`, or embeddings of `width` elements, at positions that come next in their sequences
    /// in `cells`.
    pub(crate) fn check(
        &self,
        n_vocab: usize,
        width: usize,
        n_batch: usize,
        cells: &Cells,
    ) -> Result<()> {
        if self.is_empty() {
            return Err(Error::invalid("the batch is empty"));
        }
        if self.len() > n_batch {
            return Err(Error::invalid(format!(
                "the batch has {} tokens, n_batch is {n_batch}: split it",
                self.len(),
            )));
        }
        if self.embeddings.len() != self.n_embedded * width {
            return Err(Error::invalid(format!(
                "{} embeddings have {} elements, must have {width} each",
                self.n_embedded,
                self.embeddings.len()
            )));
        }
        for (i, token) in self.tokens.iter().enumerate() {
            let wrong =
                |what: String| Err(Error::invalid(format!("token {i} of the batch: {what}")));
            if token.id as usize >= n_vocab {
                return wrong(format!("id {}, the vocabulary has {n_vocab}", token.id));
            }
            let sequences = self.sequences(token);
            if sequences.is_empty() {
                return wrong("belongs to no sequence".to_owned());
            }
            for &sequence in sequences {
                let n = cells.n_sequences();
                if sequence as usize >= n {
                    return wrong(format!("sequence {sequence}, the context has {n} (n_seq)"));
                }
                let before = self
                    .last_before(i, sequence)
                    .or_else(|| cells.last_position(sequence as usize));
                let least = before.map_or(0, |last| last.saturating_add(1));
                if token.position < least {
                    return wrong(format!(
                        "position {} of sequence {sequence}, must be at least {least}: earlier positions are in the cache or the batch already",
                        token.position
                    ));
                }
            }
            if token.last_attended < token.position || token.axes.iter().any(|&axis| axis < 0) {
                return wrong("has a negative position, or does not attend to itself".to_owned());
            }
        }
        Ok(())
    }

    /// Returns the last position of `sequence` among the tokens before `index`. Batches are usually
    /// consecutive, so the search starts at the nearest token.
    fn last_before(&self, index: usize, sequence: u32) -> Option<i32> {
        let before = self.tokens[..index].iter().rev();
        before
            .filter(|token| self.sequences(token).contains(&sequence))
            .map(|token| token.position)
            .next()
    }
}
