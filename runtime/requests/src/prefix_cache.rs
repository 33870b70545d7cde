//! The prefix cache: texts that earlier requests left in the context, and the search for usable
//! prefixes of a prompt.
//!
//! If there are too many texts, the cache evicts the one that is cheapest to compute again, with
//! aging: GreedyDual (Young, 1994). A text costs the tokens after the longest other cached text
//! that is a prefix of it. So a short request between two turns does not evict a long conversation.
//! If cells are needed, whose number is proportional to the tokens, the cache evicts the least
//! recently used text.

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
    /// Length of the longest other cached text that is a prefix of this one.
    base: usize,
    /// [`PrefixCache::level`] at the last use.
    credit: usize,
    /// Number of requests that continued it, almost from its end.
    continued: usize,
}

impl CachedPrefix {
    /// Returns the number of tokens to compute if the text is evicted and needed again, weighted by
    /// how likely that is.
    fn cost(&self) -> usize {
        let tokens = self.tokens.len().saturating_sub(self.base);
        match self.continued {
            // A conversation that went on from here rarely comes back. A text that was continued
            // twice is a common beginning.
            1 => tokens / 8,
            _ => tokens,
        }
    }
}

/// All cached texts.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    texts: Vec<CachedPrefix>,
    /// Recently evicted texts, to report evictions.
    evicted: VecDeque<(Key, Vec<u32>)>,
    clock: u64,
    /// Cost of evicted texts, which ages those that stay.
    level: usize,
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
        let freed = self.remove_if(|text| {
            text.key == key
                && text.slot == slot
                && tokens.starts_with(&text.tokens)
                && (can_cut || tokens.len() == text.tokens.len())
        });
        let base = self.base_of(key, &tokens);
        for text in self.texts.iter_mut().filter(|text| text.key == key) {
            if text.tokens.len() > tokens.len() && text.tokens.starts_with(&tokens) {
                text.base = text.base.max(tokens.len());
            }
        }
        self.clock += 1;
        self.texts.push(CachedPrefix {
            sequence,
            tokens,
            key,
            slot,
            used: self.clock,
            base,
            credit: self.level,
            continued: 0,
        });
        freed
    }

    /// Returns the length of the longest cached text that is a proper prefix of `tokens`.
    fn base_of(&self, key: Key, tokens: &[u32]) -> usize {
        let others = self.texts.iter().filter(|text| text.key == key);
        let prefixes = others
            .filter(|text| text.tokens.len() < tokens.len() && tokens.starts_with(&text.tokens));
        prefixes.map(|text| text.tokens.len()).max().unwrap_or(0)
    }

    /// Records that a request continues the first `common` tokens of a text.
    pub fn touch(&mut self, number: usize, common: usize) {
        self.clock += 1;
        if let Some(text) = self.texts.get_mut(number) {
            text.used = self.clock;
            text.credit = self.level;
            // A text with only its beginning in common is another conversation.
            let is_end = common >= text.tokens.len() / 8 * 7;
            text.continued += usize::from(is_end);
        }
    }

    /// Removes a text.
    pub fn take(&mut self, number: usize) -> Option<CachedPrefix> {
        if number >= self.texts.len() {
            return None;
        }
        let gone = self.texts.swap_remove(number);
        for at in 0..self.texts.len() {
            let text = &self.texts[at];
            if text.key == gone.key && text.base == gone.tokens.len() {
                self.texts[at].base = self.base_of(gone.key, &self.texts[at].tokens);
            }
        }
        Some(gone)
    }

    /// Removes the least recently used text, and returns its sequence.
    pub fn evict_oldest(&mut self) -> Option<usize> {
        let texts = self.texts.iter().enumerate();
        let (number, _) = texts.min_by_key(|(_, text)| text.used)?;
        self.evict(number)
    }

    /// Removes the text that costs least, except `spared`, and returns its sequence.
    pub fn evict_cheapest(&mut self, spared: Option<usize>) -> Option<usize> {
        let texts = self.texts.iter().enumerate();
        let others = texts.filter(|(number, _)| Some(*number) != spared);
        let value = |text: &CachedPrefix| text.credit.saturating_add(text.cost());
        let (number, text) = others.min_by_key(|(_, text)| (value(text), text.used))?;
        self.level = self.level.max(value(text));
        self.evict(number)
    }

    fn evict(&mut self, number: usize) -> Option<usize> {
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
        while let Some(number) = self.texts.iter().position(&is_lost) {
            lost.extend(self.take(number).map(|text| text.sequence));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a text of `length` tokens, whose first `shared` ones are those of other texts.
    fn add(cache: &mut PrefixCache, sequence: usize, shared: u32, length: u32, own: u32) {
        let tokens = (0..length).map(|at| if at < shared { at } else { own });
        cache.add(sequence, tokens.collect(), (0, 0), sequence, false);
    }

    fn left(cache: &PrefixCache) -> Vec<usize> {
        let mut sequences: Vec<usize> = cache.iter().map(|text| text.sequence).collect();
        sequences.sort_unstable();
        sequences
    }

    #[test]
    fn the_cheapest_text_is_evicted_and_costs_age() {
        let mut cache = PrefixCache::default();
        add(&mut cache, 0, 0, 1000, 7000);
        add(&mut cache, 1, 0, 20, 7001);
        add(&mut cache, 2, 0, 30, 7002);
        assert_eq!(cache.evict_cheapest(None), Some(1));
        assert_eq!(
            cache.evict_cheapest(Some(1)),
            Some(0),
            "the other one is spared"
        );
        add(&mut cache, 3, 0, 1000, 7003);
        // Short texts outlive a long one that is not used any more.
        for sequence in 4..150 {
            add(&mut cache, sequence, 0, 30, 8000 + sequence as u32);
            if cache.evict_cheapest(None) == Some(3) {
                assert!(sequence > 30, "{sequence}");
                return;
            }
        }
        panic!("the long text stays for ever");
    }

    #[test]
    fn a_text_costs_what_its_prefixes_do_not_have() {
        let mut cache = PrefixCache::default();
        // 400 and 1000 tokens of one text, and another text of 500.
        add(&mut cache, 0, 400, 400, 0);
        add(&mut cache, 1, 1000, 1000, 0);
        add(&mut cache, 2, 0, 500, 7000);
        // A text in between: the longest one costs 50.
        add(&mut cache, 3, 950, 950, 0);
        assert_eq!(cache.evict_cheapest(None), Some(1));
        // Without the first one, the one in between costs 950.
        assert_eq!(cache.evict_cheapest(None), Some(0));
        assert_eq!(cache.evict_cheapest(None), Some(2));
        assert_eq!(left(&cache), [3]);
    }

    #[test]
    fn a_use_renews_a_text() {
        let mut cache = PrefixCache::default();
        for sequence in 0..4 {
            add(&mut cache, sequence, 0, 100, 7000 + sequence as u32);
        }
        cache.touch(0, 100);
        assert_eq!(cache.evict_oldest(), Some(1));
        // A text that was continued once is behind, and one that was continued twice is not.
        cache.touch(1, 100);
        cache.touch(1, 100);
        assert_eq!(cache.evict_cheapest(None), Some(0));
        // A common beginning does not count.
        add(&mut cache, 4, 0, 100, 7004);
        cache.touch(2, 50);
        assert_eq!(cache.evict_cheapest(None), Some(2));
        assert_eq!(left(&cache), [3, 4]);
    }

    #[test]
    fn one_of_two_equal_texts_remains_a_prefix() {
        let mut cache = PrefixCache::default();
        for (sequence, length) in [(0, 400), (1, 400), (2, 500)] {
            add(&mut cache, sequence, length, length, 0);
        }
        assert_eq!(cache.take(0).map(|text| text.sequence), Some(0));
        // The longest one costs 100 tokens, as before.
        assert_eq!(cache.evict_cheapest(None), Some(2));
        assert_eq!(left(&cache), [1]);
    }
}
