//! Block events: report which blocks of tokens are in the cache, for routers that send a prompt to
//! the server with the longest cached prefix.

use crate::prefix_cache::common;
use std::collections::{BTreeMap, BTreeSet};

/// A change of the cache. A block is a fixed number of tokens together with all tokens before them;
/// its hash covers them all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// Consecutive blocks were added.
    Stored {
        /// Block before the first one; `None` at the start of a text.
        parent: Option<u64>,
        /// Hashes of the blocks.
        hashes: Vec<u64>,
        /// Tokens of all these blocks.
        tokens: Vec<u32>,
    },
    /// Blocks were removed.
    Removed {
        /// Hashes of the blocks.
        hashes: Vec<u64>,
    },
    /// All blocks were removed.
    Cleared,
}

/// Callback for events. It must not block, because it is called between two steps.
pub type BlockObserver = Box<dyn FnMut(Vec<BlockEvent>) + Send>;

/// Reported blocks of one sequence.
#[derive(Debug, Default)]
struct ReportedBlocks {
    tokens: Vec<u32>,
    hashes: Vec<u64>,
}

/// Reported blocks of all sequences.
pub(crate) struct Blocks {
    size: usize,
    by_sequence: BTreeMap<usize, ReportedBlocks>,
    /// Number of sequences that have each block.
    holders: BTreeMap<u64, usize>,
    observer: BlockObserver,
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let blocks = self.holders.len();
        write!(f, "Blocks({blocks} of {} tokens)", self.size)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if !self.holders.is_empty() {
            (self.observer)(vec![BlockEvent::Cleared]);
        }
    }
}

/// Returns the hash of a block after another one: the first 8 bytes of BLAKE3 over the parent's
/// hash and the tokens.
fn hash(parent: Option<u64>, tokens: &[u32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.unwrap_or(0).to_le_bytes());
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    let hashed = hasher.finalize();
    u64::from_le_bytes(std::array::from_fn(|at| hashed.as_bytes()[at]))
}

impl Blocks {
    /// Reports blocks of `size` tokens, at least one.
    pub fn new(size: usize, observer: BlockObserver) -> Self {
        Blocks {
            size: size.max(1),
            by_sequence: BTreeMap::new(),
            holders: BTreeMap::new(),
            observer,
        }
    }

    /// Reports changes: `texts` are the sequences in the cache with their cached tokens.
    pub fn update<'a>(&mut self, texts: impl Iterator<Item = (usize, &'a [u32])>) {
        let texts: BTreeMap<usize, &[u32]> = texts.collect();
        // Previous number of holders of the blocks that changed.
        let mut before: BTreeMap<u64, usize> = BTreeMap::new();
        let mut added: Vec<(Option<u64>, u64, &[u32])> = Vec::new();
        let mut gone: Vec<u64> = Vec::new();
        self.by_sequence.retain(|sequence, told| {
            let is_there = texts.contains_key(sequence);
            if !is_there {
                gone.append(&mut told.hashes);
            }
            is_there
        });
        for (&sequence, &tokens) in &texts {
            let told = self.by_sequence.entry(sequence).or_default();
            let same = common(&told.tokens, tokens) / self.size;
            gone.extend(told.hashes.drain(same.min(told.hashes.len())..));
            told.tokens.truncate(same * self.size);
            for block in tokens[same * self.size..].chunks_exact(self.size) {
                let parent = told.hashes.last().copied();
                let hash = hash(parent, block);
                told.hashes.push(hash);
                told.tokens.extend_from_slice(block);
                let count = self.holders.entry(hash).or_default();
                before.entry(hash).or_insert(*count);
                *count += 1;
                added.push((parent, hash, block));
            }
        }
        let mut removed = BTreeSet::new();
        for hash in gone {
            let Some(count) = self.holders.get_mut(&hash) else {
                continue;
            };
            before.entry(hash).or_insert(*count);
            *count -= 1;
            if *count == 0 {
                self.holders.remove(&hash);
                removed.insert(hash);
            }
        }
        let was_there = |hash: &u64| before.get(hash).is_some_and(|&count| count > 0);
        let mut events = Vec::new();
        let removed: Vec<u64> = removed.into_iter().filter(was_there).collect();
        if !removed.is_empty() {
            events.push(BlockEvent::Removed { hashes: removed });
        }
        let mut new = BTreeSet::new();
        for (parent, hash, block) in added {
            if was_there(&hash) || !new.insert(hash) {
                continue;
            }
            match events.last_mut() {
                Some(BlockEvent::Stored { hashes, tokens, .. })
                    if hashes.last().copied() == parent =>
                {
                    hashes.push(hash);
                    tokens.extend_from_slice(block);
                }
                _ => events.push(BlockEvent::Stored {
                    parent,
                    hashes: vec![hash],
                    tokens: block.to_vec(),
                }),
            }
        }
        if !events.is_empty() {
            (self.observer)(events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// Knowledge of an observer of the events: the whole text up to the end of each block, by hash.
    #[derive(Default)]
    struct BlockTexts(BTreeMap<u64, Vec<u32>>);

    impl BlockTexts {
        fn hear(&mut self, size: usize, events: Vec<BlockEvent>) {
            for event in events {
                match event {
                    BlockEvent::Cleared => self.0.clear(),
                    BlockEvent::Removed { hashes } => {
                        for hash in hashes {
                            assert!(self.0.remove(&hash).is_some(), "it was not there");
                        }
                    }
                    BlockEvent::Stored {
                        parent,
                        hashes,
                        tokens,
                    } => {
                        assert_eq!(tokens.len(), hashes.len() * size);
                        let mut text = parent.map_or(Vec::new(), |parent| self.0[&parent].clone());
                        for (hash, block) in hashes.iter().zip(tokens.chunks(size)) {
                            text.extend_from_slice(block);
                            let other = self.0.insert(*hash, text.clone());
                            assert!(other.is_none(), "it was there already");
                        }
                    }
                }
            }
        }
    }

    fn blocks(size: usize) -> (Blocks, Receiver<Vec<BlockEvent>>) {
        let (sender, receiver) = channel();
        let observer = Box::new(move |events| drop(sender.send(events)));
        (Blocks::new(size, observer), receiver)
    }

    #[test]
    fn block_events_describe_the_cached_blocks() {
        let (mut blocks, receiver) = blocks(3);
        let mut known = BlockTexts::default();
        let mut state = 1u32;
        let mut chance = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        let mut texts: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for _ in 0..2000 {
            let sequence = chance(5) as usize;
            match chance(6) {
                0 => drop(texts.remove(&sequence)),
                // Another text continues a prefix of it.
                1 => {
                    let mut text = texts.get(&sequence).cloned().unwrap_or_default();
                    text.truncate(chance(12) as usize);
                    texts.insert(chance(5) as usize, text);
                }
                2 => {
                    let text = texts.entry(sequence).or_default();
                    text.truncate(chance(12) as usize);
                }
                _ => {
                    let text = texts.entry(sequence).or_default();
                    text.extend((0..chance(5)).map(|_| chance(2)));
                    text.truncate(40);
                }
            }
            // Changes of several steps may be reported at once.
            if chance(3) == 0 {
                continue;
            }
            blocks.update(texts.iter().map(|(&sequence, text)| (sequence, &text[..])));
            receiver.try_iter().for_each(|events| known.hear(3, events));
            let expected: BTreeSet<Vec<u32>> = texts
                .values()
                .flat_map(|text| (1..=text.len() / 3).map(|count| text[..count * 3].to_vec()))
                .collect();
            let heard: BTreeSet<Vec<u32>> = known.0.values().cloned().collect();
            assert_eq!(heard, expected);
            assert_eq!(heard.len(), known.0.len());
        }
        drop(blocks);
        receiver.try_iter().for_each(|events| known.hear(3, events));
        assert!(known.0.is_empty());
    }

    #[test]
    fn unchanged_blocks_cause_no_events() {
        let (mut blocks, receiver) = blocks(2);
        let text = [1, 2, 3, 4, 5];
        blocks.update([(0, &text[..])].into_iter());
        assert_eq!(receiver.try_iter().count(), 1);
        blocks.update([(0, &text[..])].into_iter());
        // The text moves to another sequence, and gets an incomplete block.
        blocks.update([(7, &text[..4])].into_iter());
        blocks.update([(7, &text[..])].into_iter());
        assert_eq!(receiver.try_iter().count(), 0);
    }
}
