//! Cache of prepared graphs, and their fingerprints.

use samite_ggml::abi::{CGraph, Tensor, flag};

/// Everything that a prepared graph depends on, as words: graphs with equal words do the same in
/// the same memory.
#[derive(Default, PartialEq, Eq)]
pub struct Fingerprint(Vec<u64>);

impl Fingerprint {
    /// Replaces this with the fingerprint of `graph`, reusing the allocation.
    ///
    /// # Safety
    /// The graph must be valid.
    pub unsafe fn take(&mut self, graph: &CGraph) {
        self.0.clear();
        // SAFETY: the graph is valid, so its list has the stated number of nodes.
        for &node in unsafe { graph.nodes() } {
            // SAFETY: nodes of a valid graph are valid tensors, which do not change during the
            // call.
            let t = unsafe { &*node };
            self.tensor(t);
            self.0.push(t.flags as u64);
            self.0.push(t.view_src as u64);
            let params = t.op_params.chunks_exact(2);
            self.0.extend(
                params.map(|pair| u64::from(pair[0] as u32) << 32 | u64::from(pair[1] as u32)),
            );
            if t.flags & flag::COMPUTE == 0 {
                continue;
            }
            // SAFETY: the graph is valid, so its use counts are; the node is one of its tensors.
            let uses = unsafe { graph.uses(node) };
            self.0.push(uses.map_or(u64::MAX, |uses| uses as u64));
            for source in t.src {
                // SAFETY: sources of a valid tensor are null or valid.
                match unsafe { source.as_ref() } {
                    Some(source) => self.tensor(source),
                    None => self.0.push(0),
                }
            }
        }
    }

    fn tensor(&mut self, t: &Tensor) {
        let words = [
            std::ptr::from_ref(t) as u64,
            u64::from(t.op) << 32 | u64::from(t.dtype),
            t.data as u64,
            t.buffer as u64,
        ];
        self.0.extend(words);
        self.0.extend(t.ne.map(|extent| extent as u64));
        self.0.extend(t.nb.map(|stride| stride as u64));
    }
}

/// Cache of the most recently used graphs.
pub struct Recent<T> {
    entries: Vec<(Fingerprint, T)>,
    /// Buffer for the fingerprint of the next lookup.
    next: Fingerprint,
}

/// Capacity: prompts and single tokens of a model on a few splits.
const KEPT: usize = 16;

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Recent {
            entries: Vec::new(),
            next: Fingerprint::default(),
        }
    }
}

impl<T> Recent<T> {
    /// Clears the cache.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns the cached value of an equal graph, or caches and returns the result of `make`.
    ///
    /// # Errors
    /// Returns the error of `make`.
    ///
    /// # Safety
    /// The graph must be valid.
    pub unsafe fn get<E>(
        &mut self,
        graph: &CGraph,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<&mut T, E> {
        // SAFETY: the graph is valid, as `take` requires.
        unsafe { self.next.take(graph) };
        match self
            .entries
            .iter()
            .position(|(known, _)| *known == self.next)
        {
            Some(at) => self.entries[..=at].rotate_right(1),
            None => {
                let made = make()?;
                self.entries.truncate(KEPT - 1);
                self.entries
                    .insert(0, (std::mem::take(&mut self.next), made));
            }
        }
        Ok(&mut self.entries[0].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_ggml::abi::op;

    #[test]
    fn equal_graphs_share_a_fingerprint_and_changes_are_detected() {
        let mut x = Tensor::zeroed();
        let mut y = Tensor::zeroed();
        y.op = op::SQR;
        y.flags = flag::COMPUTE;
        y.src[0] = &raw mut x;
        let (x, y) = (&raw mut x, &raw mut y);
        let mut nodes = [y];
        let graph = CGraph::new(nodes.as_mut_ptr(), nodes.len());
        let mut recent = Recent::default();
        let mut made = 0;
        let mut ask = |recent: &mut Recent<i32>| {
            // SAFETY: the graph and its tensors are valid.
            *unsafe {
                recent.get(&graph, || {
                    made += 1;
                    Ok::<_, ()>(made)
                })
            }
            .unwrap()
        };
        assert_eq!((ask(&mut recent), ask(&mut recent)), (1, 1));
        // SAFETY: `x` and `y` are tensors of this test, and are not accessed otherwise between
        // calls of `ask`.
        unsafe {
            (*x).ne[1] = 5;
            assert_eq!(ask(&mut recent), 2);
            (*x).data = std::ptr::without_provenance_mut(64);
            assert_eq!(ask(&mut recent), 3);
            (*y).op_params[3] = 1;
            assert_eq!(ask(&mut recent), 4);
            (*y).op_params[3] = 0;
            assert_eq!(ask(&mut recent), 3, "the one before is still known");
            (*y).flags |= flag::OUTPUT;
            assert_eq!(ask(&mut recent), 5);
            for extent in 10..40 {
                (*y).ne[0] = extent;
                ask(&mut recent);
            }
        }
        assert_eq!(recent.entries.len(), KEPT);
        recent.clear();
        assert_eq!(ask(&mut recent), 36);
    }
}
