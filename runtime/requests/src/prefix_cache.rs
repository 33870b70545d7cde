//! The prefix cache: texts that earlier requests left in the context, and the search for usable
//! prefixes of a prompt.

use crate::event::{CacheMiss, MissCause};
use samite_llm::Context;
use std::collections::VecDeque;

/// Key that must be equal for two requests to share anything: the number of the set of adapters,
/// and the salt.
pub(crate) type Key = (usize, u64);

/// A cached text in a sequence of the context.
#[derive(Debug)]
pub(crate) struct CachedPrefix {
    pub sequence: usize,
    pub tokens: Vec<u32>,
    pub key: Key,
    /// Slot that computed it last.
    pub slot: usize,
    /// Time of the last use, as a count.
    pub used: u64,
}

/// All cached texts.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    texts: Vec<CachedPrefix>,
    /// Recently evicted texts, to report evictions.
    evicted: VecDeque<(Key, Vec<u32>)>,
    clock: u64,
}

/// A prefix of a prompt in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Location: the index of a cached text, or an active sequence.
    pub place: Place,
    /// Number of tokens.
    pub common: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Cached(usize),
    Running(usize),
}

/// Returns the length of the common prefix of two texts.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Returns how many of the first `most` tokens of a sequence of `length` tokens are usable, and the
/// reason why not more are.
fn usable(
    context: &Context,
    sequence: usize,
    length: usize,
    most: usize,
) -> (usize, Option<MissCause>) {
    let can = |place: usize| {
        i32::try_from(place).is_ok_and(|at| context.kv_cache().can_cut(sequence, at))
    };
    if most == 0 || most == length || can(most) {
        return (most, None);
    }
    let mark = context
        .kv_cache()
        .marked(sequence)
        .and_then(|mark| usize::try_from(mark).ok());
    let cause = MissCause::uncuttable(context.kv_cache().kind());
    match mark.filter(|&mark| mark <= most && can(mark)) {
        Some(mark) => (mark, Some(cause)),
        None => (0, Some(cause)),
    }
}

impl PrefixCache {
    const MAX_EVICTED: usize = 32;

    pub fn len(&self) -> usize {
        self.texts.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &CachedPrefix> {
        self.texts.iter()
    }

    pub fn get(&self, number: usize) -> Option<&CachedPrefix> {
        self.texts.get(number)
    }

    /// Adds a text that a request left in a slot. If texts can be cut, it replaces another text of
    /// this slot that is a prefix of it, whose sequence is returned.
    pub fn add(
        &mut self,
        sequence: usize,
        tokens: Vec<u32>,
        key: Key,
        slot: usize,
        can_cut: bool,
    ) -> Vec<usize> {
        let mut freed = Vec::new();
        self.texts.retain(|text| {
            let is_covered = text.key == key
                && text.slot == slot
                && tokens.starts_with(&text.tokens)
                && (can_cut || tokens.len() == text.tokens.len());
            if is_covered {
                freed.push(text.sequence);
            }
            !is_covered
        });
        self.clock += 1;
        self.texts.push(CachedPrefix {
            sequence,
            tokens,
            key,
            slot,
            used: self.clock,
        });
        freed
    }

    /// Records the use of a text.
    pub fn touch(&mut self, number: usize) {
        self.clock += 1;
        if let Some(text) = self.texts.get_mut(number) {
            text.used = self.clock;
        }
    }

    /// Removes a text.
    pub fn take(&mut self, number: usize) -> Option<CachedPrefix> {
        (number < self.texts.len()).then(|| self.texts.swap_remove(number))
    }

    /// Removes the least recently used text, except `spared`, and returns its sequence.
    pub fn evict(&mut self, spared: Option<usize>) -> Option<usize> {
        let texts = self.texts.iter().enumerate();
        let others = texts.filter(|(number, _)| Some(*number) != spared);
        let (number, _) = others.min_by_key(|(_, text)| text.used)?;
        let text = self.take(number)?;
        if self.evicted.len() == Self::MAX_EVICTED {
            self.evicted.pop_front();
        }
        self.evicted.push_back((text.key, text.tokens));
        Some(text.sequence)
    }

    /// Removes the texts for which `is_lost` returns true, and returns their sequences.
    pub fn remove_if(&mut self, is_lost: impl Fn(&CachedPrefix) -> bool) -> Vec<usize> {
        let mut lost = Vec::new();
        self.texts.retain(|text| {
            let is_lost = is_lost(text);
            if is_lost {
                lost.push(text.sequence);
            }
            !is_lost
        });
        lost
    }

    /// Removes all texts that were computed with a set of adapters, and returns their sequences.
    pub fn forget_adapters(&mut self, set: usize) -> Vec<usize> {
        self.evicted.retain(|((other, _), _)| *other != set);
        self.remove_if(|text| text.key.0 == set)
    }

    /// Finds the longest usable prefix of `prompt` among cached and `running` texts (sequence,
    /// tokens in the cache). Also returns the end of the longest prefix, usable or not, and its
    /// cause. The last token of a prompt is always computed. With a `slot`, only texts that were
    /// left in this slot count.
    pub fn find<'a>(
        &self,
        context: &Context,
        prompt: &[u32],
        key: Key,
        slot: Option<usize>,
        running: impl Iterator<Item = (usize, &'a [u32])>,
    ) -> (Option<Found>, CacheMiss) {
        let most = prompt.len().saturating_sub(1);
        let kept = self.texts.iter().enumerate();
        let kept = kept
            .filter(|(_, text)| text.key == key && slot.is_none_or(|slot| slot == text.slot))
            .map(|(number, text)| (Place::Cached(number), text.sequence, text.tokens.as_slice()));
        let running =
            running.map(|(sequence, tokens)| (Place::Running(sequence), sequence, tokens));
        let mut best: Option<Found> = None;
        let mut miss = (0, MissCause::Ends);
        for (place, sequence, tokens) in kept.chain(running) {
            let same = common(tokens, prompt);
            let (usable, limit) = usable(context, sequence, tokens.len(), same.min(most));
            let cause = match limit {
                Some(cause) => cause,
                None if same < tokens.len() => MissCause::Differs,
                None => MissCause::Ends,
            };
            if same > miss.0 {
                miss = (same, cause);
            }
            if usable > best.map_or(0, |found| found.common) {
                best = Some(Found {
                    place,
                    common: usable,
                });
            }
        }
        let (at, cause) = miss;
        let evicted = self.evicted.iter().filter(|(known, _)| *known == key);
        let evicted = evicted.map(|(_, tokens)| common(tokens, prompt)).max();
        let cause = match evicted {
            Some(gone) if gone > at => MissCause::Evicted,
            _ => cause,
        };
        let miss = CacheMiss {
            at_token: at,
            cause,
        };
        (best, miss)
    }
}
