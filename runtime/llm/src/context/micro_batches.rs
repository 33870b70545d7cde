//! Splits a batch into micro-batches, which are computed at once.

use crate::batch::{Batch, BatchToken};

/// Room in the graph of one micro-batch for the others of its batch. All of them then run the same
/// graph, which is necessary for their runs to overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Number of tokens in later micro-batches, whose cells the graph reads as well.
    pub n_to_come: usize,
    /// Maximum number of rows of logits in one micro-batch.
    pub n_outputs: usize,
}

/// Iterator over the micro-batches of a batch, with limited numbers of tokens and rows of logits.
/// Each comes with the additional room that its graph needs.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatches<'a> {
    rest: &'a [BatchToken],
    /// Batch of the tokens, for a model with recurrent state. A micro-batch then contains one
    /// sequence, or one token of each sequence.
    alike: Option<&'a Batch>,
    size: usize,
    n_logits: usize,
    /// For overlapping runs: the maximum number of rows of logits in one micro-batch.
    n_outputs: Option<usize>,
}

impl<'a> MicroBatches<'a> {
    /// Splits `tokens` into micro-batches with at most `n_ubatch` tokens and `n_logits` rows of
    /// logits, both at least 1. If they `overlap`, their sizes are as equal as possible.
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
    /// Limits each micro-batch to one sequence, or to one token of each sequence, according to
    /// `batch`.
    pub fn alike(self, batch: &'a Batch) -> Self {
        MicroBatches {
            alike: Some(batch),
            ..self
        }
    }

    /// Returns the number of tokens that the next micro-batch can have. All or none of them have
    /// embeddings, and all tokens of an image are there that attend to each other.
    fn most(&self) -> usize {
        let most = self.rest.len().min(self.size);
        let is_other = |token: &BatchToken| token.is_embedded() != self.rest[0].is_embedded();
        let most = self.rest[..most].iter().position(is_other).unwrap_or(most);
        let most = without_cut_images(self.rest, most);
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
        let repeats =
            |at: usize| (0..at).any(|before| of(before).iter().any(|s| of(at).contains(s)));
        (1..most).find(|&at| repeats(at)).unwrap_or(most)
    }
}

/// Returns `most`, or fewer if the tokens of an image that attend to each other would be cut there.
fn without_cut_images(tokens: &[BatchToken], most: usize) -> usize {
    let Some(next) = tokens.get(most) else {
        return most;
    };
    let is_before = |token: &&BatchToken| {
        token.last_attended == next.last_attended && token.last_attended > token.position
    };
    let cut = tokens[..most].iter().rev().take_while(is_before).count();
    if cut < most {
        return most - cut;
    }
    // An image alone is computed at once.
    let rest = tokens[most..].iter();
    most + rest
        .take_while(|token| token.last_attended == next.last_attended)
        .count()
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
        let end = too_many.map_or(most, |end| without_cut_images(self.rest, end));
        let (part, rest) = self.rest.split_at(end);
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

    /// Returns the tokens, tokens to come, and outputs of micro-batches with at most 4 tokens and 2
    /// rows of logits.
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
    fn micro_batches_limit_tokens_and_logits() {
        assert_eq!(parts(&[0; 6], false), [[4, 0, 0], [2, 0, 0]]);
        assert_eq!(parts(&[1, 0, 1, 1, 0], false), [[3, 0, 0], [2, 0, 0]]);
        assert_eq!(parts(&[], true), [[0; 3]; 0]);
    }

    #[test]
    fn micro_batches_have_one_sequence_or_one_token_of_each() {
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
    fn micro_batches_do_not_cut_images_whose_tokens_attend_to_each_other() {
        let mut batch = Batch::new();
        for position in 0..12 {
            // An image at 2 to 4, and one at 5 to 10.
            let last = match position {
                2..5 => 4,
                5..11 => 10,
                _ => position,
            };
            if last > 2 && position < 11 {
                batch.add_embedding(&[0.0], position, &[0], position == 6);
            } else {
                batch.add(1, position, &[0], false);
            }
            batch.set_last_positions([position; 3], last);
        }
        for overlap in [false, true] {
            for size in 1..12 {
                let parts = MicroBatches::new(batch.tokens(), size, 1, overlap);
                let ends: Vec<i32> = parts
                    .map(|(part, _)| part[part.len() - 1].position)
                    .collect();
                let cuts = [2, 3, 5, 6, 7, 8, 9];
                assert!(
                    ends.iter().all(|end| !cuts.contains(end)),
                    "{size}: {ends:?}"
                );
                assert_eq!(ends.last(), Some(&11));
            }
        }
    }

    #[test]
    fn overlapping_micro_batches_share_one_graph_size() {
        assert_eq!(parts(&[0; 6], true), [[3, 3, 0], [3, 0, 0]]);
        let last = [0, 0, 0, 0, 1, 1];
        assert_eq!(parts(&last, true), [[3, 3, 2], [3, 0, 2]]);
        // The first micro-batch would have too many logits.
        let first = [1, 1, 1, 0, 0, 0];
        assert_eq!(parts(&first, true), [[2, 4, 2], [3, 1, 2], [1, 0, 2]]);
    }
}
