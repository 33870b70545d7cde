//! Tokens to decode, with their positions and sequences.

/// One token of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The token.
    pub id: u32,
    /// Its position in its sequences.
    pub position: i32,
    /// Whether the logits after it are wanted.
    pub wants_logits: bool,
    first_sequence: usize,
    end_sequence: usize,
}

/// Tokens to decode together. Reusing one saves allocations.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<BatchToken>,
    sequences: Vec<u32>,
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
            first_sequence,
            end_sequence: self.sequences.len(),
        });
    }

    /// Removes all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
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
}
