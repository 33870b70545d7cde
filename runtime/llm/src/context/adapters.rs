//! Adapters of individual sequences, which can differ within one batch.

use crate::adapter::{Adapter, ScaledAdapter};
use crate::batch::{Batch, BatchToken};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Adapters that sequences use instead of the context's.
#[derive(Debug, Default)]
pub(crate) struct SequenceAdapters {
    /// Adapters by sequence.
    own: Vec<Option<Vec<ScaledAdapter>>>,
    /// All adapters that a graph can have; the bits of
    /// [`GraphShape::mixed`](crate::arch::GraphShape) are indices into this list.
    known: Vec<Arc<Adapter>>,
}

impl SequenceAdapters {
    /// Maximum number of adapters, which is the number of bits.
    const MOST: usize = 64;

    pub fn new(n_seq: usize) -> Self {
        SequenceAdapters {
            own: vec![None; n_seq],
            known: Vec::new(),
        }
    }

    /// Returns all adapters that graphs can have.
    pub fn known(&self) -> &[Arc<Adapter>] {
        &self.known
    }

    /// Returns whether a sequence has its own list of adapters, which may be empty.
    pub fn any(&self) -> bool {
        self.own.iter().any(Option::is_some)
    }

    pub fn for_sequence(&self, sequence: usize) -> Option<&[ScaledAdapter]> {
        self.own.get(sequence)?.as_deref()
    }

    pub fn set(&mut self, sequence: usize, adapters: Option<Vec<ScaledAdapter>>) {
        if let Some(own) = self.own.get_mut(sequence) {
            *own = adapters;
        }
    }

    fn place(&self, adapter: &Arc<Adapter>) -> Option<usize> {
        let mut known = self.known.iter();
        known.position(|known| Arc::ptr_eq(known, adapter))
    }

    /// Registers the adapters in `further` and `context`. Returns the number of new ones, and
    /// whether unused ones were removed for them, which changes the meaning of bits.
    pub fn learn(
        &mut self,
        further: &[ScaledAdapter],
        context: &[ScaledAdapter],
    ) -> Result<(usize, bool)> {
        let wanted = |scaled: &&ScaledAdapter| scaled.share != 0.0;
        let all = further.iter().chain(context).filter(wanted);
        let mut new: Vec<&Arc<Adapter>> = Vec::new();
        for scaled in all {
            let adapter = &scaled.adapter;
            if self.place(adapter).is_none() && !new.iter().any(|known| Arc::ptr_eq(known, adapter))
            {
                new.push(adapter);
            }
        }
        if new.is_empty() {
            return Ok((0, false));
        }
        let before = self.known.len();
        if before + new.len() > Self::MOST {
            let sequences = self.own.iter().flatten().flatten();
            let used: Vec<&ScaledAdapter> = sequences.chain(further).chain(context).collect();
            let is_used = |known: &Arc<Adapter>| {
                let mut used = used.iter();
                used.any(|scaled| Arc::ptr_eq(&scaled.adapter, known))
            };
            self.known.retain(is_used);
        }
        if self.known.len() + new.len() > Self::MOST {
            return Err(Error::invalid(format!(
                "sequences have more than {} different adapters at the same time: use fewer",
                Self::MOST
            )));
        }
        let others_went = self.known.len() < before;
        self.known
            .extend(new.iter().map(|&adapter| Arc::clone(adapter)));
        Ok((new.len(), others_went))
    }

    /// Removes the last adapters that were [registered](Self::learn).
    pub fn unlearn(&mut self, count: usize) {
        self.known.truncate(self.known.len().saturating_sub(count));
    }

    /// Returns the bits of all adapters.
    pub fn all(&self) -> u64 {
        self.known
            .iter()
            .enumerate()
            .fold(0, |bits, (place, _)| bits | 1 << place)
    }

    /// Returns the adapters that the tokens of a micro-batch use, as bits, or `None` if all tokens
    /// use those of the context.
    pub fn mixed(
        &self,
        batch: &Batch,
        part: &[BatchToken],
        context: &[ScaledAdapter],
    ) -> Option<u64> {
        if !self.any() {
            return None;
        }
        let (mut bits, mut is_mixed, mut before) = (0, false, None);
        for token in part {
            let sequence = batch.sequences(token).first().copied();
            if before == Some(sequence) {
                continue;
            }
            before = Some(sequence);
            let own = sequence.and_then(|sequence| self.for_sequence(sequence as usize));
            is_mixed |= own.is_some();
            for scaled in own.unwrap_or(context) {
                if scaled.share != 0.0
                    && let Some(place) = self.place(&scaled.adapter)
                {
                    bits |= 1 << place;
                }
            }
        }
        // Without adapters, the graph is that of a context without adapters.
        let is_plain = bits == 0 && context.iter().all(|scaled| scaled.share == 0.0);
        (is_mixed && !is_plain).then_some(bits)
    }

    /// Returns the scale of the adapter at `place` for a token, times `factor`.
    pub fn share(
        &self,
        place: usize,
        factor: f32,
        sequence: Option<u32>,
        context: &[ScaledAdapter],
    ) -> f32 {
        let Some(adapter) = self.known.get(place) else {
            return 0.0;
        };
        let own = sequence.and_then(|sequence| self.for_sequence(sequence as usize));
        let scaled = own.unwrap_or(context).iter();
        let scaled = scaled.filter(|scaled| Arc::ptr_eq(&scaled.adapter, adapter));
        scaled.map(|scaled| scaled.share * factor).sum()
    }
}
