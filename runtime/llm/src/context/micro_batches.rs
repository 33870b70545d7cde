//! A batch in the parts that are computed at once.

use crate::batch::{Batch, BatchToken};

/// Room that the graph of one micro-batch has for the others of its batch, so that all are runs of one graph: only such runs overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Tokens that follow in other micro-batches, whose cells the graph reaches as well.
    pub n_to_come: usize,
    /// The most rows of logits that one of them wants.
    pub n_outputs: usize,
}

/// The micro-batches of a batch, each with the room that its graph needs besides: limited in tokens and in rows of logits.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatches<'a> {
    rest: &'a [BatchToken],
    /// For a model that keeps something of sequences, to which tokens belong: a part is of one sequence, or has one token of each.
    alike: Option<&'a Batch>,
    size: usize,
    n_logits: usize,
    /// Of runs that overlap: the most rows of logits that one of them wants.
    n_outputs: Option<usize>,
}

impl<'a> MicroBatches<'a> {
    /// Those of `tokens`, with at most `n_ubatch` tokens and `n_logits` rows of logits, neither of them 0. Those that `overlap` are of one size as
    /// far as possible.
    pub fn new(tokens: &'a [BatchToken], n_ubatch: usize, n_logits: usize, overlap: bool) -> Self {
        let parts = MicroBatches {
            rest: tokens,
            alike: None,
            size: n_ubatch,
            n_logits,
            n_outputs: None,
        };
        if !overlap || tokens.is_empty() {
            return parts;
        }
        let size = tokens.len().div_ceil(tokens.len().div_ceil(n_ubatch));
        let parts = MicroBatches { size, ..parts };
        let wanted = |part: &[BatchToken]| part.iter().filter(|token| token.wants_logits).count();
        MicroBatches {
            n_outputs: parts.clone().map(|(part, _)| wanted(part)).max(),
            ..parts
        }
    }
}

impl<'a> MicroBatches<'a> {
    /// The same, but each part is of one sequence, or has one token of each, as `batch` says.
    pub fn alike(self, batch: &'a Batch) -> Self {
        MicroBatches {
            alike: Some(batch),
            ..self
        }
    }

    /// How many of the first tokens can be in a part.
    fn most(&self) -> usize {
        let most = self.rest.len().min(self.size);
        let Some(batch) = self.alike else {
            return most;
        };
        let of = |at: usize| batch.sequences(&self.rest[at]);
        if most < 2 {
            return most;
        }
        if of(0) == of(1) {
            return (1..most).find(|&at| of(at) != of(0)).unwrap_or(most);
        }
        let is_known =
            |at: usize| (0..at).any(|before| of(before).iter().any(|s| of(at).contains(s)));
        (1..most).find(|&at| is_known(at)).unwrap_or(most)
    }
}

impl<'a> Iterator for MicroBatches<'a> {
    type Item = (&'a [BatchToken], Room);

    fn next(&mut self) -> Option<Self::Item> {
        let most = self.most();
        let mut outputs = 0;
        let too_many = self.rest[..most].iter().position(|token| {
            outputs += usize::from(token.wants_logits);
            outputs > self.n_logits
        });
        let (part, rest) = self.rest.split_at(too_many.unwrap_or(most));
        self.rest = rest;
        let room = self.n_outputs.map(|n_outputs| Room {
            n_to_come: rest.len(),
            n_outputs,
        });
        (!part.is_empty()).then(|| (part, room.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens, tokens to come, and outputs of each micro-batch of at most 4 tokens and 2 rows of logits.
    fn parts(wanted: &[u8], overlap: bool) -> Vec<[usize; 3]> {
        let mut batch = Batch::new();
        for (position, wants) in wanted.iter().enumerate() {
            batch.add(1, position as i32, &[0], *wants == 1);
        }
        let parts = MicroBatches::new(batch.tokens(), 4, 2, overlap);
        let numbers = parts.map(|(part, room)| [part.len(), room.n_to_come, room.n_outputs]);
        numbers.collect()
    }

    #[test]
    fn parts_are_limited_in_tokens_and_in_logits() {
        assert_eq!(parts(&[0; 6], false), [[4, 0, 0], [2, 0, 0]]);
        assert_eq!(parts(&[1, 0, 1, 1, 0], false), [[3, 0, 0], [2, 0, 0]]);
        assert_eq!(parts(&[], true), [[0; 3]; 0]);
    }

    #[test]
    fn parts_are_of_one_sequence_or_have_one_token_of_each() {
        let mut batch = Batch::new();
        let sequences: [&[u32]; 9] = [&[0], &[0], &[1], &[0], &[2], &[1], &[0], &[1, 2], &[0, 1]];
        for (position, sequences) in sequences.iter().enumerate() {
            batch.add(1, position as i32, sequences, false);
        }
        let parts = MicroBatches::new(batch.tokens(), 4, 2, false).alike(&batch);
        let sizes: Vec<usize> = parts.map(|(part, _)| part.len()).collect();
        assert_eq!(sizes, [2, 3, 2, 1, 1]);
    }

    #[test]
    fn parts_that_overlap_are_alike_and_their_graphs_have_room_for_all() {
        assert_eq!(parts(&[0; 6], true), [[3, 3, 0], [3, 0, 0]]);
        let last = [0, 0, 0, 0, 1, 1];
        assert_eq!(parts(&last, true), [[3, 3, 2], [3, 0, 2]]);
        // Too many logits in the first.
        let first = [1, 1, 1, 0, 0, 0];
        assert_eq!(parts(&first, true), [[2, 4, 2], [3, 1, 2], [1, 0, 2]]);
    }
}
