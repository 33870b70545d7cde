//! Repeated merging of the best adjacent pair, shared by both kinds of tokenizer.
//!
//! Symbols form a doubly linked list inside a vector; pairs that can merge are in a heap. A pair is
//! checked for staleness when it is popped, instead of being removed when one of its halves
//! changes. Merging a text of n symbols therefore takes O(n log n) time and O(n) memory for any
//! text.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

const NONE: u32 = u32::MAX;

/// A section of text that has become one unit. The meaning of `id` depends on the tokenizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    pub start: u32,
    /// Length in bytes; zero after the symbol was merged into its left neighbour.
    pub length: u32,
    pub id: u32,
    previous: u32,
    next: u32,
}

impl Symbol {
    pub(crate) fn end(&self) -> u32 {
        self.start + self.length
    }
}

#[derive(Debug)]
struct MergeCandidate<P> {
    priority: P,
    left: u32,
    right: u32,
    /// Bytes of both halves when the pair was found; a different sum later means that the pair is
    /// stale.
    length: u32,
    merged: u32,
}

impl<P: Ord> Ord for MergeCandidate<P> {
    /// Orders by priority, then leftmost first.
    fn cmp(&self, other: &Self) -> Ordering {
        self.priority
            .cmp(&other.priority)
            .then_with(|| other.left.cmp(&self.left))
    }
}

impl<P: Ord> PartialOrd for MergeCandidate<P> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<P: Ord> PartialEq for MergeCandidate<P> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<P: Ord> Eq for MergeCandidate<P> {}

/// Temporary buffers of a merge, which are reused so that short words need no allocation.
#[derive(Debug)]
pub(crate) struct Merger<P> {
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<MergeCandidate<P>>,
}

impl<P: Ord> Default for Merger<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Ord> Merger<P> {
    pub(crate) fn new() -> Self {
        Self {
            symbols: Vec::new(),
            pairs: BinaryHeap::new(),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.symbols.clear();
        self.pairs.clear();
    }

    /// Appends a symbol. `length` must not be zero.
    pub(crate) fn push(&mut self, start: u32, length: u32, id: u32) {
        let index = self.symbols.len() as u32;
        let previous = match self.symbols.last_mut() {
            Some(last) => {
                last.next = index;
                index - 1
            }
            None => NONE,
        };
        self.symbols.push(Symbol {
            start,
            length,
            id,
            previous,
            next: NONE,
        });
    }

    /// Merges until no pair is left. `lookup` returns a pair's priority and the id of the merged
    /// symbol.
    pub(crate) fn run(&mut self, lookup: impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>) {
        for left in 1..self.symbols.len() as u32 {
            self.consider(left - 1, left, &lookup);
        }
        while let Some(pair) = self.pairs.pop() {
            let (left, right) = (
                self.symbols[pair.left as usize],
                self.symbols[pair.right as usize],
            );
            if left.length == 0 || right.length == 0 || left.length + right.length != pair.length {
                continue;
            }
            self.symbols[pair.right as usize].length = 0;
            let merged = &mut self.symbols[pair.left as usize];
            merged.length = pair.length;
            merged.id = pair.merged;
            merged.next = right.next;
            if right.next != NONE {
                self.symbols[right.next as usize].previous = pair.left;
            }
            if left.previous != NONE {
                self.consider(left.previous, pair.left, &lookup);
            }
            if right.next != NONE {
                self.consider(pair.left, right.next, &lookup);
            }
        }
    }

    fn consider(
        &mut self,
        left: u32,
        right: u32,
        lookup: &impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>,
    ) {
        let (a, b) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some((priority, merged)) = lookup(a, b) {
            self.pairs.push(MergeCandidate {
                priority,
                left,
                right,
                length: a.length + b.length,
                merged,
            });
        }
    }

    /// Returns the remaining symbols, in the order of the text.
    pub(crate) fn remaining(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.length > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;

    fn spans(merger: &Merger<Reverse<u32>>) -> Vec<(u32, u32)> {
        merger
            .remaining()
            .map(|symbol| (symbol.start, symbol.end()))
            .collect()
    }

    #[test]
    fn equal_pairs_merge_from_the_left() {
        let mut merger = Merger::new();
        for position in 0..5 {
            merger.push(position, 1, 0);
        }
        merger.run(|a, b| (a.id == 0 && b.id == 0).then_some((Reverse(7), 1)));
        assert_eq!(spans(&merger), [(0, 2), (2, 4), (4, 5)]);
    }

    #[test]
    fn better_pairs_win_and_stale_ones_are_dropped() {
        let mut merger = Merger::new();
        for (position, id) in [0, 1, 2].into_iter().enumerate() {
            merger.push(position as u32, 1, id);
        }
        // (1 2) ranks before (0 1), which is stale at that point.
        merger.run(|a, b| match (a.id, b.id) {
            (0, 1) => Some((Reverse(2), 10)),
            (1, 2) => Some((Reverse(1), 11)),
            _ => None,
        });
        assert_eq!(spans(&merger), [(0, 1), (1, 3)]);
    }
}
