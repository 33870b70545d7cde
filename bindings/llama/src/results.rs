//! Results of a batch: rows of logits and embeddings, in memory that stays valid until the context
//! is freed, even if later results are larger.

use crate::context::context;
use crate::entry::{Failure, Outcome, export};
use crate::layout::{Opaque, TOKEN_NULL};
use samite_llm::{Batch, Context as Engine};
use std::collections::BTreeMap;

/// Rows at an address that stays valid.
#[derive(Default)]
struct OutputRows {
    current: Vec<f32>,
    /// Earlier buffers that callers may still read. Each is at most half as large as the next one.
    old: Vec<Vec<f32>>,
    width: usize,
    count: usize,
}

impl OutputRows {
    fn clear(&mut self) {
        self.count = 0;
    }

    fn push(&mut self, row: &[f32], expected: usize) -> Outcome<()> {
        if self.count == 0 {
            self.width = row.len();
            self.make_room(expected.saturating_mul(row.len()))?;
            self.current.clear();
        }
        if self.current.len() + row.len() <= self.current.capacity() {
            self.current.extend_from_slice(row);
            self.count += 1;
        }
        Ok(())
    }

    fn make_room(&mut self, needed: usize) -> Outcome<()> {
        let before = self.current.capacity();
        if needed > before {
            let mut larger = Vec::new();
            let reserved = larger.try_reserve_exact(needed.max(before.saturating_mul(2)));
            reserved
                .map_err(|_| Failure::new(format!("there is no memory for {needed} results")))?;
            let old = std::mem::replace(&mut self.current, larger);
            if before > 0 {
                self.old.push(old);
            }
        }
        Ok(())
    }

    fn all(&mut self) -> *mut f32 {
        match self.count {
            0 => std::ptr::null_mut(),
            _ => self.current.as_mut_ptr(),
        }
    }

    fn row(&mut self, row: usize) -> Option<*mut f32> {
        let at = row.checked_mul(self.width).filter(|_| row < self.count)?;
        Some(self.current.get_mut(at..)?.as_mut_ptr())
    }
}

/// Results of the last batch.
#[derive(Default)]
pub struct Results {
    /// Row of each token that has one.
    outputs: Vec<Option<usize>>,
    n_outputs: usize,
    logits: OutputRows,
    embeddings: OutputRows,
    pooled: OutputRows,
    sequences: BTreeMap<i32, usize>,
}

impl Results {
    /// Clears the results; callers can still read the memory.
    pub fn clear(&mut self) {
        self.outputs.clear();
        self.n_outputs = 0;
        self.logits.clear();
        self.embeddings.clear();
        self.pooled.clear();
        self.sequences.clear();
    }

    /// Copies the results of `batch`.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn take(&mut self, engine: &Engine, batch: &Batch) -> Outcome<()> {
        self.clear();
        let wanted = batch
            .tokens()
            .iter()
            .filter(|token| token.wants_logits)
            .count();
        for (index, token) in batch.tokens().iter().enumerate() {
            if !token.wants_logits {
                self.outputs.push(None);
                continue;
            }
            self.outputs.push(Some(self.n_outputs));
            self.n_outputs += 1;
            if let Some(row) = engine.logits(index) {
                self.logits.push(row, wanted)?;
            }
            if let Some(row) = engine.embedding(index) {
                self.embeddings.push(row, wanted)?;
            }
        }
        let sequences = batch
            .tokens()
            .iter()
            .flat_map(|token| batch.sequences(token));
        let mut sequences: Vec<u32> = sequences.copied().collect();
        sequences.sort_unstable();
        sequences.dedup();
        for &sequence in &sequences {
            if let Some(row) = engine.pooled(sequence) {
                let at = self.pooled.count;
                self.pooled.push(row, sequences.len())?;
                self.sequences.insert(sequence as i32, at);
            }
        }
        Ok(())
    }

    /// Returns the row of a token in the batch; negative indices count from the last row.
    fn row_of(&self, index: i32) -> Outcome<usize> {
        let unknown = |why: String| Failure::new(format!("no results {index}: {why}"));
        match usize::try_from(index) {
            Ok(at) => match self.outputs.get(at) {
                Some(Some(row)) => Ok(*row),
                Some(None) => Err(unknown("the batch did not ask for them".to_owned())),
                None => Err(unknown(format!(
                    "the last batch had {} tokens",
                    self.outputs.len()
                ))),
            },
            Err(_) => {
                let back = index.unsigned_abs() as usize;
                let row = self.n_outputs.checked_sub(back);
                row.ok_or_else(|| unknown(format!("there are {} rows", self.n_outputs)))
            }
        }
    }

    /// Returns the logits of a token.
    ///
    /// # Errors
    /// If there are none.
    pub fn logits_of(&mut self, index: i32) -> Outcome<(*mut f32, usize)> {
        let row = self.row_of(index)?;
        let width = self.logits.width;
        let found = self.logits.row(row).map(|row| (row, width));
        found.ok_or_else(|| {
            Failure::new("the last batch gave no logits: only embeddings were computed")
        })
    }
}

export! {
    /// Returns the logits of all tokens that requested them.
    fn llama_get_logits(handle: *mut Opaque) -> *mut f32, or std::ptr::null_mut(); {
        Ok(context(handle)?.lock().results.logits.all())
    }

    /// Returns the logits of one token.
    fn llama_get_logits_ith(handle: *mut Opaque, index: i32) -> *mut f32, or std::ptr::null_mut(); {
        Ok(context(handle)?.lock().results.logits_of(index)?.0)
    }

    /// Returns the embeddings of all tokens that requested them, if embeddings are not pooled.
    fn llama_get_embeddings(handle: *mut Opaque) -> *mut f32, or std::ptr::null_mut(); {
        Ok(context(handle)?.lock().results.embeddings.all())
    }

    /// Returns the embedding of one token.
    fn llama_get_embeddings_ith(handle: *mut Opaque, index: i32) -> *mut f32,
        or std::ptr::null_mut(); {
        let context = context(handle)?;
        let results = &mut context.lock().results;
        let row = results.row_of(index)?;
        let found = results.embeddings.row(row);
        found.ok_or_else(|| {
            Failure::new(
                "there are no embeddings of tokens: ask for them (embeddings), and for no pooling",
            )
        })
    }

    /// Returns the pooled embedding of a sequence.
    fn llama_get_embeddings_seq(handle: *mut Opaque, sequence: i32) -> *mut f32,
        or std::ptr::null_mut(); {
        let context = context(handle)?;
        let results = &mut context.lock().results;
        let row = results.sequences.get(&sequence).copied();
        Ok(row.and_then(|row| results.pooled.row(row)).unwrap_or(std::ptr::null_mut()))
    }

    /// Returns the token that a device sampler chose: none.
    fn llama_get_sampled_token_ith(handle: *mut Opaque, _index: i32) -> i32, or TOKEN_NULL; {
        context(handle).map(|_| TOKEN_NULL)
    }

    /// See the previous function.
    fn llama_get_sampled_probs_ith(handle: *mut Opaque, _index: i32) -> *mut f32,
        or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// See the previous function.
    fn llama_get_sampled_probs_count_ith(handle: *mut Opaque, _index: i32) -> u32, or 0; {
        context(handle).map(|_| 0)
    }

    /// See the previous function.
    fn llama_get_sampled_logits_ith(handle: *mut Opaque, _index: i32) -> *mut f32,
        or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// Returns the number of logits without a device sampler: all.
    fn llama_get_sampled_logits_count_ith(handle: *mut Opaque, _index: i32) -> u32, or 0; {
        Ok(context(handle)?.all_tokens().len() as u32)
    }

    /// Returns the tokens of these logits: all.
    fn llama_get_sampled_candidates_ith(handle: *mut Opaque, _index: i32) -> *mut i32,
        or std::ptr::null_mut(); {
        // Callers do not write here: the header lacks a `const`.
        Ok(context(handle)?.all_tokens().as_ptr().cast_mut())
    }

    /// See the previous function.
    fn llama_get_sampled_candidates_count_ith(handle: *mut Opaque, _index: i32) -> u32, or 0; {
        context(handle).map(|_| 0)
    }
}
