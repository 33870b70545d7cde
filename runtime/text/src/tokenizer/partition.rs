//! Splits special tokens off a text.
//!
//! The algorithm is llama.cpp's: each special token takes all its occurrences in the text that is
//! still free, from left to right. The longest token goes first, and among equal ones the one with
//! the lower id. A separate search for each token would take time in proportion to their number.
//! Here a trie finds the tokens at each position, and a heap applies the order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::str;

use foldhash::{HashMap, HashMapExt};

use crate::vocab::{TokenAttributes, Vocab};

/// A piece of a text: a special token, or the text between two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fragment<'a> {
    Token(u32),
    Text(&'a str),
}

#[derive(Debug, Clone, Copy)]
struct Special {
    id: u32,
    /// True if the token is recognized only on request.
    on_demand: bool,
    strips_left: bool,
    strips_right: bool,
}

/// The special tokens of a vocabulary.
#[derive(Debug)]
pub(crate) struct SpecialMatcher {
    /// A trie: the child of a node by the next byte. The root is node 0.
    children: HashMap<(u32, u8), u32>,
    /// Token that ends at a node.
    ends: Vec<Option<Special>>,
    /// First bytes of special tokens; other bytes need no lookup in the trie.
    starts: Box<[bool; 256]>,
}

/// An occurrence of a token. Ordered by precedence: the longest, then the lowest id, then the
/// leftmost.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Match {
    length: usize,
    id: Reverse<u32>,
    start: Reverse<usize>,
    strips_left: bool,
    strips_right: bool,
}

impl SpecialMatcher {
    pub(crate) fn new(vocab: &Vocab) -> Self {
        let on_demand = TokenAttributes::CONTROL.union(TokenAttributes::UNKNOWN);
        let special = on_demand.union(TokenAttributes::USER_DEFINED);
        let mut matcher = Self {
            children: HashMap::new(),
            ends: vec![None],
            starts: Box::new([false; 256]),
        };
        for (id, token) in (0..).zip(&vocab.tokens) {
            // Bytes that are not UTF-8 cannot occur in a text.
            if !token.attributes.intersects(special) || str::from_utf8(&token.text).is_err() {
                continue;
            }
            let end = matcher.insert(&token.text);
            matcher.ends[end as usize] = Some(Special {
                id,
                on_demand: token.attributes.intersects(on_demand),
                strips_left: token.attributes.intersects(TokenAttributes::LEFT_STRIP),
                strips_right: token.attributes.intersects(TokenAttributes::RIGHT_STRIP),
            });
        }
        matcher
    }

    fn insert(&mut self, text: &[u8]) -> u32 {
        if let Some(&first) = text.first() {
            self.starts[usize::from(first)] = true;
        }
        let mut node = 0;
        for &byte in text {
            let fresh = self.ends.len() as u32;
            node = *self.children.entry((node, byte)).or_insert(fresh);
            if node == fresh {
                self.ends.push(None);
            }
        }
        node
    }

    /// Returns the longest token at `start` that ends before the first taken byte. With `taken`
    /// empty, no byte is taken.
    fn longest(
        &self,
        text: &[u8],
        start: usize,
        taken: &[bool],
        parse_special: bool,
    ) -> Option<Match> {
        let mut longest = None;
        let mut node = 0;
        for (position, byte) in text.iter().enumerate().skip(start) {
            if taken.get(position) == Some(&true) {
                break;
            }
            let Some(&child) = self.children.get(&(node, *byte)) else {
                break;
            };
            node = child;
            if let Some(special) =
                self.ends[node as usize].filter(|special| parse_special || !special.on_demand)
            {
                let length = position + 1 - start;
                longest = Some(Match {
                    length,
                    id: Reverse(special.id),
                    start: Reverse(start),
                    strips_left: special.strips_left,
                    strips_right: special.strips_right,
                });
            }
        }
        longest
    }

    /// Splits `text` into special tokens and the text between them. Without `parse_special`, only
    /// user-defined tokens are recognized.
    pub(crate) fn partition<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Fragment<'a>> {
        let bytes = text.as_bytes();
        let mut fragments = Vec::new();
        let mut free_from = 0;
        for (start, end, id) in self.find(bytes, parse_special) {
            if free_from < start {
                fragments.push(Fragment::Text(&text[free_from..start]));
            }
            fragments.push(Fragment::Token(id));
            free_from = end;
        }
        if free_from < text.len() {
            fragments.push(Fragment::Text(&text[free_from..]));
        }
        fragments
    }

    /// Returns the start, end and id of the special tokens, in the order of the text, including
    /// white space that a token strips.
    fn find(&self, text: &[u8], parse_special: bool) -> Vec<(usize, usize, u32)> {
        let starts = (0..text.len()).filter(|&start| self.starts[usize::from(text[start])]);
        let mut waiting: BinaryHeap<Match> = starts
            .filter_map(|start| self.longest(text, start, &[], parse_special))
            .collect();
        let mut taken = vec![false; if waiting.is_empty() { 0 } else { text.len() }];
        let mut found = Vec::new();
        while let Some(next) = waiting.pop() {
            let start = next.start.0;
            let mut end = start + next.length;
            if taken[start] {
                continue;
            }
            // Tokens that were placed before are not shorter, so an overlapping one covers an end
            // of this one.
            if taken[end - 1] {
                waiting.extend(self.longest(text, start, &taken, parse_special));
                continue;
            }
            let space = |position: usize| {
                !taken[position] && matches!(text[position], b' ' | b'\t'..=b'\r')
            };
            let mut begin = start;
            if next.strips_left {
                begin -= (0..start).rev().take_while(|&at| space(at)).count();
            }
            if next.strips_right {
                end += (end..text.len()).take_while(|&at| space(at)).count();
            }
            taken[begin..end].fill(true);
            found.push((begin, end, next.id.0));
        }
        found.sort_unstable();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocab::{TokenizerModel, VocabData};
    use proptest::prelude::*;

    fn matcher(tokens: &[&str]) -> SpecialMatcher {
        let mut data = VocabData::new(
            TokenizerModel::Gpt2,
            tokens
                .iter()
                .map(|token| token.as_bytes().to_vec())
                .collect(),
        );
        data.token_types = Some(vec![4; tokens.len()]);
        SpecialMatcher::new(&Vocab::new(&data).unwrap())
    }

    /// The reference algorithm: search the free text for each token in turn.
    fn by_search<'a>(tokens: &[&str], text: &'a str) -> Vec<Fragment<'a>> {
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|&id| Reverse(tokens[id].len()));
        let mut fragments = vec![Fragment::Text(text)];
        for id in order {
            let mut next = Vec::new();
            for fragment in fragments {
                let Fragment::Text(mut rest) = fragment else {
                    next.push(fragment);
                    continue;
                };
                while let Some((before, after)) = rest.split_once(tokens[id]) {
                    next.extend((!before.is_empty()).then_some(Fragment::Text(before)));
                    next.push(Fragment::Token(id as u32));
                    rest = after;
                }
                next.extend((!rest.is_empty()).then_some(Fragment::Text(rest)));
            }
            fragments = next;
        }
        fragments
    }

    #[test]
    fn the_longest_special_token_has_priority() {
        let fragments = matcher(&["ab", "bcd"]).partition("xabcdab", false);
        let expected = [Fragment::Text("xa"), Fragment::Token(1), Fragment::Token(0)];
        assert_eq!(fragments, expected);
    }

    proptest! {
        #[test]
        fn partition_matches_one_search_per_token(
            tokens in prop::collection::btree_set("[ab]{1,4}", 1..6),
            text in "[abc]{1,24}",
        ) {
            let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
            prop_assert_eq!(matcher(&tokens).partition(&text, false), by_search(&tokens, &text));
        }
    }
}
