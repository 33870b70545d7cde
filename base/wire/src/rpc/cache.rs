//! Graphs that a server keeps, so that a client can refer to them by uid.
//!
//! Client and server must agree on what is cached: a server closes the connection of a client that
//! refers to another graph. Both therefore keep a [`GraphCache`], and change it in the order of the
//! messages. Upstream's rules are that a new graph clears a full cache, and that a graph whose
//! memory was freed still counts. samite also bounds the memory of a cache: the least recently used
//! graphs are dropped as soon as all have more than [`MAX_TENSORS`].

use super::version::Protocol;
use std::collections::BTreeMap;

/// Maximum number of tensors of all cached graphs of a device, unless a single graph has more.
pub const MAX_TENSORS: usize = 1 << 17;

/// The cached graphs of a device.
#[derive(Debug)]
pub struct GraphCache<T> {
    /// Maximum number of entries.
    most: usize,
    /// Graphs by uid. Entries without a graph count as well.
    entries: BTreeMap<u64, Option<CachedGraph<T>>>,
    /// Number of tensors of all graphs.
    tensors: usize,
    /// Number of uses of all graphs.
    uses: u64,
}

#[derive(Debug)]
struct CachedGraph<T> {
    graph: T,
    tensors: usize,
    last_use: u64,
}

impl<T> GraphCache<T> {
    /// Creates an empty cache.
    pub fn new(protocol: &Protocol) -> Self {
        GraphCache {
            most: protocol.cached_graphs,
            entries: BTreeMap::new(),
            tensors: 0,
            uses: 0,
        }
    }

    /// Drops graphs to make room for one with a number of tensors.
    pub fn make_room(&mut self, uid: u64, tensors: usize) {
        if self.entries.len() >= self.most {
            self.entries.clear();
            self.tensors = 0;
        }
        self.drop_graph(uid);
        while self.tensors + tensors > MAX_TENSORS
            && let Some(oldest) = self.least_recently_used()
        {
            self.drop_graph(oldest);
        }
    }

    /// Inserts a graph for which [`make_room`](GraphCache::make_room) has made room.
    pub fn insert(&mut self, uid: u64, tensors: usize, graph: T) -> &mut T {
        self.uses += 1;
        self.tensors += tensors;
        let cached = CachedGraph {
            graph,
            tensors,
            last_use: self.uses,
        };
        let entry = self.entries.entry(uid).or_default();
        &mut entry.insert(cached).graph
    }

    /// Returns the graph with this uid.
    pub fn get(&mut self, uid: u64) -> Option<&mut T> {
        let cached = self.entries.get_mut(&uid)?.as_mut()?;
        self.uses += 1;
        cached.last_use = self.uses;
        Some(&mut cached.graph)
    }

    /// Drops some graphs. Their entries remain.
    pub fn drop_if(&mut self, is_dropped: impl Fn(&T) -> bool) {
        for entry in self.entries.values_mut() {
            if let Some(cached) = entry.take_if(|cached| is_dropped(&cached.graph)) {
                self.tensors -= cached.tensors;
            }
        }
    }

    fn drop_graph(&mut self, uid: u64) {
        if let Some(cached) = self.entries.get_mut(&uid).and_then(Option::take) {
            self.tensors -= cached.tensors;
        }
    }

    fn least_recently_used(&self) -> Option<u64> {
        let graphs = self.entries.iter();
        let graphs = graphs.filter_map(|(&uid, entry)| Some((entry.as_ref()?.last_use, uid)));
        graphs.min().map(|(_, uid)| uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::version::{V7, V8};

    fn add(cache: &mut GraphCache<u64>, uid: u64, tensors: usize) {
        cache.make_room(uid, tensors);
        cache.insert(uid, tensors, uid);
    }

    fn cached(cache: &mut GraphCache<u64>, uids: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let uids = uids.into_iter();
        uids.filter(|&uid| cache.get(uid).is_some_and(|graph| *graph == uid))
            .collect()
    }

    #[test]
    fn a_new_graph_clears_a_full_cache() {
        let mut cache = GraphCache::new(&V7);
        add(&mut cache, 1, 1);
        add(&mut cache, 2, 1);
        assert_eq!(
            cached(&mut cache, 0..9),
            [2],
            "protocol 7 keeps the last one"
        );
        let mut cache = GraphCache::new(&V8);
        (1..=1024).for_each(|uid| add(&mut cache, uid, 1));
        assert_eq!(cached(&mut cache, 0..2000).len(), 1024);
        add(&mut cache, 1025, 1);
        assert_eq!(cached(&mut cache, 0..2000), [1025]);
    }

    /// Upstream's server counts the entry of a graph that it has dropped, and so must both sides.
    #[test]
    fn dropped_graphs_count() {
        let mut cache = GraphCache::new(&V8);
        (1..=1000).for_each(|uid| add(&mut cache, uid, 1));
        cache.drop_if(|&uid| uid > 1);
        assert_eq!(cached(&mut cache, 0..2000), [1]);
        // The graph is sent again.
        add(&mut cache, 2, 1);
        (1001..=1024).for_each(|uid| add(&mut cache, uid, 1));
        assert_eq!(cached(&mut cache, 0..2000).len(), 26);
        add(&mut cache, 1025, 1);
        assert_eq!(cached(&mut cache, 0..2000), [1025]);
    }

    #[test]
    fn the_least_recently_used_graphs_make_room() {
        let mut cache = GraphCache::new(&V8);
        (1..=4).for_each(|uid| add(&mut cache, uid, MAX_TENSORS / 4));
        assert!(cache.get(1).is_some());
        add(&mut cache, 5, MAX_TENSORS / 2);
        assert_eq!(cached(&mut cache, 0..9), [1, 4, 5]);
        // A graph replaces the one with the same uid.
        add(&mut cache, 5, MAX_TENSORS / 4);
        add(&mut cache, 6, MAX_TENSORS / 4);
        assert_eq!(cached(&mut cache, 0..9), [1, 4, 5, 6]);
        add(&mut cache, 7, 2 * MAX_TENSORS);
        assert_eq!(cached(&mut cache, 0..9), [7]);
        add(&mut cache, 8, 1);
        assert_eq!(cached(&mut cache, 0..9), [8]);
    }
}
