//! The prefix cache: texts that earlier requests left in the context, and the search for usable
//! prefixes of a prompt.
//!
//! If there are too many texts, the cache first evicts those that a later request has continued.
//! Then it evicts the shortest one, with aging: GreedyDual (Young, 1994). So short requests between
//! two turns do not evict a long conversation. If cells are needed, the cache evicts the least
//! recently used text.

use crate::event::{CacheMiss, MissCause};
use samite_llm::{Context, Images};
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
    /// [`PrefixCache::level`] at the last use.
    credit: usize,
    /// True if a later request has continued it, or will rather continue a longer text.
    is_continued: bool,
    /// [`PrefixCache::clock`] until which it is evicted after others.
    held_until: u64,
}

impl CachedPrefix {
    /// Returns the tokens to compute if the text is evicted and needed again, with its age.
    fn value(&self) -> usize {
        self.credit.saturating_add(self.tokens.len())
    }
}

/// All cached texts.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    texts: Vec<CachedPrefix>,
    /// Recently evicted texts, to report evictions.
    evicted: VecDeque<(Key, Vec<u32>)>,
    clock: u64,
    /// Value of evicted texts, which ages those that stay.
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
    /// Number of uses of texts after which a hold ends, if its owner is gone.
    const MAX_HOLD_USES: u64 = 64;

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
        let is_replaced = |text: &CachedPrefix| {
            text.key == key
                && text.slot == slot
                && tokens.starts_with(&text.tokens)
                && (can_cut || tokens.len() == text.tokens.len())
        };
        let replaced = self.texts.iter().filter(|text| is_replaced(text));
        let held_until = replaced.map(|text| text.held_until).max().unwrap_or(0);
        let freed = self.remove_if(is_replaced);
        self.clock += 1;
        self.texts.push(CachedPrefix {
            sequence,
            tokens,
            key,
            slot,
            used: self.clock,
            credit: self.level,
            is_continued: false,
            held_until,
        });
        freed
    }

    /// Records that a request continues texts: all those that have almost everything in common with
    /// its tokens.
    pub fn note_request(&mut self, key: Key, tokens: &[u32]) {
        for text in self.texts.iter_mut().filter(|text| text.key == key) {
            text.is_continued |= common(&text.tokens, tokens) >= text.tokens.len() / 8 * 7;
        }
    }

    /// Records the use of a text.
    pub fn touch(&mut self, number: usize) {
        self.clock += 1;
        if let Some(text) = self.texts.get_mut(number) {
            text.used = self.clock;
            text.credit = self.level;
        }
    }

    /// Removes a text.
    pub fn take(&mut self, number: usize) -> Option<CachedPrefix> {
        (number < self.texts.len()).then(|| self.texts.swap_remove(number))
    }

    /// Lets the text that was added last be evicted before others: a later one of its request is
    /// more likely to be continued.
    pub fn depreciate_last(&mut self) {
        if let Some(text) = self.texts.last_mut() {
            text.is_continued = true;
        }
    }

    /// Holds the text that was added last: it is evicted after others.
    pub fn hold_last(&mut self) {
        if let Some(text) = self.texts.last_mut() {
            text.held_until = self.clock + Self::MAX_HOLD_USES;
        }
    }

    /// Ends the hold of a text.
    pub fn release(&mut self, number: usize) {
        if let Some(text) = self.texts.get_mut(number) {
            text.held_until = 0;
        }
    }

    /// Returns whether a text is held.
    pub fn is_held(&self, number: usize) -> bool {
        let text = self.texts.get(number);
        text.is_some_and(|text| text.held_until > self.clock)
    }

    /// Removes the least recently used text, and returns its sequence.
    pub fn evict_oldest(&mut self) -> Option<usize> {
        let texts = self.texts.iter().enumerate();
        let (number, _) =
            texts.min_by_key(|(_, text)| (text.held_until > self.clock, text.used))?;
        self.evict(number)
    }

    /// Removes the text that is needed least, except `spared`, and returns its sequence.
    pub fn evict_cheapest(&mut self, spared: Option<usize>) -> Option<usize> {
        let number = self.cheapest(spared)?;
        let text = &self.texts[number];
        if !text.is_continued {
            self.level = self.level.max(text.value());
        }
        self.evict(number)
    }

    fn cheapest(&self, spared: Option<usize>) -> Option<usize> {
        let texts = self.texts.iter().enumerate();
        let others = texts.filter(|(number, _)| Some(*number) != spared);
        // Continued texts come first, the least recently used one before others.
        let rank = |text: &CachedPrefix| {
            let value = if text.is_continued { 0 } else { text.value() };
            (text.held_until > self.clock, value, text.used)
        };
        let (number, _) = others.min_by_key(|(_, text)| rank(text))?;
        Some(number)
    }

    /// Returns whether a text of `length` tokens is worth the cheapest one's place. If not, it ages
    /// the texts as if it had been evicted.
    pub fn is_worth_a_place(&mut self, length: usize) -> bool {
        let value = self.level.saturating_add(length);
        let cheapest = self.cheapest(None).map(|number| &self.texts[number]);
        let is_worth = cheapest.is_none_or(|text| text.is_continued || text.value() <= value);
        if !is_worth {
            self.level = value;
        }
        is_worth
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
    /// left in this slot count. `images` are those of the prompt.
    pub fn find<'a>(
        &self,
        context: &Context,
        (prompt, images): (&[u32], &Images),
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
            let most = images.reusable(same.min(most));
            let (usable, limit) = usable(context, sequence, tokens.len(), most);
            let usable = if images.reusable(usable) == usable {
                usable
            } else {
                0
            };
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

    /// Adds a text of `length` equal tokens.
    fn add(cache: &mut PrefixCache, sequence: usize, length: usize, token: u32) {
        cache.add(sequence, vec![token; length], (0, 0), sequence, false);
    }

    fn left(cache: &PrefixCache) -> Vec<usize> {
        let mut sequences: Vec<usize> = cache.iter().map(|text| text.sequence).collect();
        sequences.sort_unstable();
        sequences
    }

    #[test]
    fn the_shortest_text_is_evicted_and_others_age() {
        let mut cache = PrefixCache::default();
        add(&mut cache, 0, 1000, 0);
        add(&mut cache, 1, 20, 1);
        add(&mut cache, 2, 30, 2);
        assert_eq!(cache.evict_cheapest(None), Some(1));
        assert_eq!(
            cache.evict_cheapest(Some(1)),
            Some(0),
            "the other one is spared"
        );
        add(&mut cache, 3, 1000, 3);
        // Short texts outlive a long one that is not used any more.
        for sequence in 4..150 {
            add(&mut cache, sequence, 30, 8000 + sequence as u32);
            if cache.evict_cheapest(None) == Some(3) {
                assert!(sequence > 30, "{sequence}");
                return;
            }
        }
        panic!("the long text stays for ever");
    }

    #[test]
    fn continued_texts_are_evicted_first() {
        let mut cache = PrefixCache::default();
        // The beginning of a turn, the whole turn, and another text.
        add(&mut cache, 0, 900, 0);
        add(&mut cache, 1, 1000, 0);
        add(&mut cache, 2, 50, 2);
        // The next turn has almost all of it. A request with only the beginning does not continue
        // the texts.
        cache.note_request((0, 0), &[0; 500]);
        assert_eq!(cache.evict_cheapest(None), Some(2));
        cache.note_request((0, 1), &[0; 1000]);
        cache.note_request((0, 0), &[0; 890]);
        cache.touch(0);
        add(&mut cache, 3, 20, 3);
        assert_eq!(cache.evict_cheapest(None), Some(1));
        assert_eq!(cache.evict_cheapest(None), Some(0));
        assert_eq!(left(&cache), [3]);
    }

    #[test]
    fn held_texts_are_evicted_last_and_not_for_ever() {
        let mut cache = PrefixCache::default();
        add(&mut cache, 0, 10, 0);
        cache.hold_last();
        add(&mut cache, 1, 1000, 1);
        add(&mut cache, 2, 2000, 2);
        assert!(cache.is_held(0) && !cache.is_held(1));
        assert_eq!(cache.evict_cheapest(None), Some(1));
        assert_eq!(cache.evict_oldest(), Some(2));
        add(&mut cache, 3, 1000, 3);
        cache.release(0);
        assert_eq!(cache.evict_cheapest(None), Some(0));
        cache.hold_last();
        for _ in 0..PrefixCache::MAX_HOLD_USES {
            assert!(cache.is_held(0));
            cache.touch(0);
        }
        assert!(!cache.is_held(0));
    }

    #[test]
    fn a_short_text_does_not_take_the_place_of_a_long_one() {
        let mut cache = PrefixCache::default();
        add(&mut cache, 0, 100, 0);
        assert!(cache.is_worth_a_place(100));
        assert!(!cache.is_worth_a_place(40) && !cache.is_worth_a_place(40));
        // Refused texts age it.
        assert!(cache.is_worth_a_place(40));
        add(&mut cache, 1, 500, 1);
        cache.note_request((0, 0), &[0; 100]);
        assert!(cache.is_worth_a_place(1), "a continued text has no value");
        add(&mut cache, 2, 900, 2);
        cache.depreciate_last();
        cache.touch(0);
        assert_eq!(cache.evict_cheapest(None), Some(2));
        assert_eq!(cache.evict_oldest(), Some(1));
    }
}
