//! A trie of texts by their bytes, for finding all tokens that start at a position.

/// No token, or no child.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    /// Token whose text ends here.
    token: u32,
    first_edge: u32,
    edges: u16,
}

/// A set of texts with one token each.
#[derive(Debug)]
pub(crate) struct Trie {
    nodes: Vec<Node>,
    /// Bytes and children. Those of a node are adjacent, in the order of bytes.
    edges: Vec<(u8, u32)>,
    /// Children of the root, where each walk starts.
    root: Box<[u32; 256]>,
}

/// A position in a trie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(u32);

impl Trie {
    /// Creates a trie. The first of equal texts applies. Empty texts are ignored.
    pub(crate) fn new<'t>(texts: impl Iterator<Item = (&'t [u8], u32)>) -> Self {
        let mut texts: Vec<(&[u8], u32)> = texts.filter(|(text, _)| !text.is_empty()).collect();
        texts.sort_by_key(|&(text, _)| text);
        texts.dedup_by_key(|&mut (text, _)| text);
        let fresh = Node {
            token: NONE,
            first_edge: 0,
            edges: 0,
        };
        let mut trie = Self {
            nodes: vec![fresh],
            edges: Vec::new(),
            root: Box::new([NONE; 256]),
        };
        // The texts of a node, which have the same first bytes.
        let mut waiting = vec![(0, texts.len(), 0)];
        let mut node = 0;
        while let Some(&(mut start, end, depth)) = waiting.get(node) {
            if let Some(&(text, token)) = texts.get(start)
                && text.len() == depth
            {
                trie.nodes[node].token = token;
                start += 1;
            }
            trie.nodes[node].first_edge = trie.edges.len() as u32;
            while start < end {
                let byte = texts[start].0[depth];
                let same = texts[start..end].partition_point(|text| text.0[depth] == byte);
                let child = trie.nodes.len() as u32;
                trie.nodes.push(fresh);
                trie.edges.push((byte, child));
                trie.nodes[node].edges += 1;
                waiting.push((start, start + same, depth + 1));
                start += same;
            }
            node += 1;
        }
        for &(byte, child) in &trie.edges[..usize::from(trie.nodes[0].edges)] {
            trie.root[usize::from(byte)] = child;
        }
        trie
    }

    /// Returns the position of a walk that starts with `byte`.
    #[inline]
    pub(crate) fn enter(&self, byte: u8) -> Option<Place> {
        let child = self.root[usize::from(byte)];
        (child != NONE).then_some(Place(child))
    }

    /// Continues with `byte`.
    #[inline]
    pub(crate) fn step(&self, place: Place, byte: u8) -> Option<Place> {
        let node = self.nodes[place.0 as usize];
        let first = node.first_edge as usize;
        let edges = &self.edges[first..first + usize::from(node.edges)];
        let child = if edges.len() <= 8 {
            edges.iter().find(|edge| edge.0 == byte)
        } else {
            let found = edges.binary_search_by_key(&byte, |edge| edge.0);
            found.ok().map(|index| &edges[index])
        };
        child.map(|edge| Place(edge.1))
    }

    /// Returns the token whose text ends here.
    #[inline]
    pub(crate) fn token(&self, place: Place) -> Option<u32> {
        let token = self.nodes[place.0 as usize].token;
        (token != NONE).then_some(token)
    }

    /// Calls `found` with each token that is a prefix of `text` and its length, the shortest first.
    #[inline]
    pub(crate) fn prefixes(&self, text: &[u8], mut found: impl FnMut(u32, usize)) {
        let Some((&first, rest)) = text.split_first() else {
            return;
        };
        let mut place = self.enter(first);
        let mut length = 1;
        let mut rest = rest.iter();
        while let Some(here) = place {
            if let Some(token) = self.token(here) {
                found(token, length);
            }
            place = rest.next().and_then(|&byte| self.step(here, byte));
            length += 1;
        }
    }

    /// Returns the longest token that is a prefix of `text`, and its length.
    pub(crate) fn longest(&self, text: &[u8]) -> Option<(u32, usize)> {
        let mut longest = None;
        self.prefixes(text, |token, length| longest = Some((token, length)));
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_trie_finds_all_prefixes(texts in prop::collection::vec("[ab\u{e9}]{0,5}", 0..20),
            text in "[ab\u{e9}c]{0,8}") {
            let trie = Trie::new((0..).zip(&texts).map(|(id, text)| (text.as_bytes(), id)));
            let mut expected: Vec<(usize, u32)> = Vec::new();
            for length in 1..=text.len() {
                if let Some(id) = texts
                    .iter()
                    .position(|other| other.as_bytes() == &text.as_bytes()[..length])
                {
                    expected.push((length, id as u32));
                }
            }
            let mut found = Vec::new();
            trie.prefixes(text.as_bytes(), |token, length| found.push((length, token)));
            prop_assert_eq!(
                trie.longest(text.as_bytes()),
                expected.last().map(|&(length, id)| (id, length))
            );
            prop_assert_eq!(found, expected);
        }
    }
}
