//! Tokens to decode, or embeddings in their place, with their positions and sequences.

use crate::error::{Error, Result};
use crate::kv::Cells;

/// One token of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The token; 0 where an embedding stands in its place.
    pub id: u32,
    /// Its position in its sequences.
    pub position: i32,
    /// Whether the logits after it are wanted, or its embedding. What embeddings of whole sequences need, is known without.
    pub wants_logits: bool,
    /// Its place in the batch.
    index: usize,
    first_sequence: usize,
    end_sequence: usize,
}

/// Tokens to decode together. Reusing one saves allocations.
///
/// Embeddings can stand in the place of tokens, as those of pictures do: of all or of none.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<BatchToken>,
    sequences: Vec<u32>,
    /// One row for each token that has one.
    embeddings: Vec<f32>,
    /// Tokens that have one.
    n_embedded: usize,
}

impl Batch {
    /// No tokens yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens at consecutive positions of one sequence, from `position` on; logits are wanted after the last.
    pub fn sequence(tokens: &[u32], position: i32, sequence: u32) -> Self {
        let mut batch = Self::new();
        for (i, &id) in tokens.iter().enumerate() {
            let position = position.saturating_add(i32::try_from(i).unwrap_or(i32::MAX));
            batch.add(id, position, &[sequence], i + 1 == tokens.len());
        }
        batch
    }

    /// Appends a token. It is stored once for all `sequences`, and sees the past of the first of them.
    pub fn add(&mut self, id: u32, position: i32, sequences: &[u32], wants_logits: bool) {
        let first_sequence = self.sequences.len();
        self.sequences.extend_from_slice(sequences);
        self.tokens.push(BatchToken {
            id,
            position,
            wants_logits,
            index: self.tokens.len(),
            first_sequence,
            end_sequence: self.sequences.len(),
        });
    }

    /// Appends an embedding, as many elements as the model is wide, as [`add`](Self::add) does a token.
    pub fn add_embedding(
        &mut self,
        embedding: &[f32],
        position: i32,
        sequences: &[u32],
        wants_logits: bool,
    ) {
        self.add(0, position, sequences, wants_logits);
        self.embeddings.extend_from_slice(embedding);
        self.n_embedded += 1;
    }

    /// Removes all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.embeddings.clear();
        self.n_embedded = 0;
    }

    /// Whether embeddings stand in the place of tokens.
    pub fn is_embedded(&self) -> bool {
        self.n_embedded > 0
    }

    /// The embeddings of `part`, which is some of this batch's tokens in a row.
    pub(crate) fn embeddings_of(&self, part: &[BatchToken], width: usize) -> &[f32] {
        let first = part.first().map_or(0, |token| token.index);
        let rows = first * width..(first + part.len()) * width;
        self.embeddings.get(rows).unwrap_or_default()
    }

    /// The tokens.
    pub fn tokens(&self) -> &[BatchToken] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The sequences of a token of this batch.
    pub fn sequences(&self, token: &BatchToken) -> &[u32] {
        self.sequences
            .get(token.first_sequence..token.end_sequence)
            .unwrap_or_default()
    }

    /// How many of the tokens are wanted.
    pub(crate) fn n_wanted(&self) -> usize {
        let tokens = self.tokens.iter();
        tokens.filter(|token| token.wants_logits).count()
    }

    /// The same tokens, of which those are wanted that `wants` says by number.
    pub(crate) fn wanting(&self, wants: impl Fn(usize) -> bool) -> Self {
        let mut batch = self.clone();
        for (index, token) in batch.tokens.iter_mut().enumerate() {
            token.wants_logits = wants(index);
        }
        batch
    }

    /// The sequences in the order in which they begin, each with the numbers of its first and its last token.
    pub(crate) fn ends(&self) -> Vec<(u32, [usize; 2])> {
        let mut ends: Vec<(u32, [usize; 2])> = Vec::new();
        // By sequence: its place in the list.
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

    /// Checks that the tokens can be decoded: of a vocabulary of `n_vocab`, or embeddings of `width` elements, at most `n_batch` of them, at positions of
    /// sequences that come next in `cells`.
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
        if self.is_embedded() && self.n_embedded != self.len() {
            return Err(Error::invalid(
                "the batch has tokens and embeddings: decode one after the other",
            ));
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
        }
        Ok(())
    }

    /// The last position of `sequence` among the tokens before number `index`. Batches are usually consecutive, so the
    /// nearest token is looked at first.
    fn last_before(&self, index: usize, sequence: u32) -> Option<i32> {
        let before = self.tokens[..index].iter().rev();
        before
            .filter(|token| self.sequences(token).contains(&sequence))
            .map(|token| token.position)
            .next()
    }
}
