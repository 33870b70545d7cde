//! `ggml_cgraph`: nodes in order, and their use counts.

use super::Tensor;
use std::ptr::null_mut;

/// `ggml_hash_set`: open addressing, with the address divided by 16 as hash.
#[repr(C)]
#[derive(Debug)]
pub struct HashSet {
    /// Number of slots.
    pub size: usize,
    /// One bit per slot, set if it is in use.
    pub used: *mut u32,
    /// The tensors.
    pub keys: *mut *mut Tensor,
}

/// `ggml_cgraph`
#[repr(C)]
#[derive(Debug)]
pub struct CGraph {
    /// Maximum number of nodes.
    pub size: i32,
    /// Number of nodes.
    pub n_nodes: i32,
    /// Number of leaves.
    pub n_leafs: i32,
    /// Nodes in topological order.
    pub nodes: *mut *mut Tensor,
    /// Gradients by slot, or null.
    pub grads: *mut *mut Tensor,
    /// Gradient accumulators by slot, or null.
    pub grad_accs: *mut *mut Tensor,
    /// Tensors that are not computed.
    pub leafs: *mut *mut Tensor,
    /// Number of uses of each tensor as an operand, by slot of `visited`.
    pub use_counts: *mut i32,
    /// All tensors of the graph, or of the whole graph if this is a part.
    pub visited: HashSet,
    /// 0 for left to right.
    pub order: i32,
    /// Two graphs with the same number other than 0 are equal.
    pub uid: u64,
}

impl HashSet {
    /// Returns the slot of `tensor`, if the set contains it.
    ///
    /// # Safety
    /// The set's arrays must be valid.
    pub unsafe fn find(&self, tensor: *const Tensor) -> Option<usize> {
        if self.size == 0 || self.used.is_null() || self.keys.is_null() {
            return None;
        }
        let first = (tensor as usize >> 4) % self.size;
        let mut slot = first;
        loop {
            // SAFETY: `slot` is below `size`, and both arrays have this many entries.
            let (word, key) = unsafe { (*self.used.add(slot / 32), *self.keys.add(slot)) };
            if word >> (slot % 32) & 1 == 0 {
                return None;
            }
            if key.cast_const() == tensor {
                return Some(slot);
            }
            slot = (slot + 1) % self.size;
            if slot == first {
                return None;
            }
        }
    }
}

impl CGraph {
    /// Creates a graph of `count` nodes alone, which points to `nodes`.
    pub fn new(nodes: *mut *mut Tensor, count: usize) -> Self {
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        CGraph {
            size: count,
            n_nodes: count,
            n_leafs: 0,
            nodes,
            grads: null_mut(),
            grad_accs: null_mut(),
            leafs: null_mut(),
            use_counts: null_mut(),
            visited: HashSet {
                size: 0,
                used: null_mut(),
                keys: null_mut(),
            },
            order: 0,
            uid: 0,
        }
    }

    /// Returns the nodes.
    ///
    /// # Safety
    /// The graph must be valid and must not change while the result is in use.
    pub unsafe fn nodes(&self) -> &[*mut Tensor] {
        match usize::try_from(self.n_nodes) {
            // SAFETY: a valid graph has this many nodes.
            Ok(count) if count > 0 && !self.nodes.is_null() => unsafe {
                std::slice::from_raw_parts(self.nodes, count)
            },
            _ => &[],
        }
    }

    /// Returns the number of uses of `tensor` as an operand, or `None` if unknown. If this graph is
    /// a part, the uses in the whole graph count.
    ///
    /// # Safety
    /// The conditions of [`nodes`](CGraph::nodes) apply.
    pub unsafe fn uses(&self, tensor: *const Tensor) -> Option<usize> {
        if self.use_counts.is_null() {
            return None;
        }
        // SAFETY: the graph is valid, so there is a count for each slot of `visited`, and `find`
        // returns one of these.
        let count = unsafe { *self.use_counts.add(self.visited.find(tensor)?) };
        usize::try_from(count).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layout_matches_upstream() {
        assert_eq!(size_of::<CGraph>(), 96);
        let offsets = [
            offset_of!(CGraph, size),
            offset_of!(CGraph, n_nodes),
            offset_of!(CGraph, n_leafs),
            offset_of!(CGraph, nodes),
            offset_of!(CGraph, grads),
            offset_of!(CGraph, grad_accs),
            offset_of!(CGraph, leafs),
            offset_of!(CGraph, use_counts),
            offset_of!(CGraph, visited),
            offset_of!(CGraph, order),
            offset_of!(CGraph, uid),
        ];
        assert_eq!(offsets, [0, 4, 8, 16, 24, 32, 40, 48, 56, 80, 88]);
        assert_eq!(offset_of!(HashSet, used), 8);
        assert_eq!(offset_of!(HashSet, keys), 16);
    }

    #[test]
    fn tensors_are_found_by_linear_probing() {
        let mut tensors = [Tensor::zeroed(); 3];
        let pointers = tensors.each_mut().map(std::ptr::from_mut);
        let (mut used, mut keys) = ([0u32; 1], [std::ptr::null_mut(); 5]);
        // All three after the home slot of the first, as if they had collided.
        let home = (pointers[0] as usize >> 4) % 5;
        for (i, &tensor) in pointers.iter().enumerate().take(2) {
            let slot = (home + i) % 5;
            used[0] |= 1 << slot;
            keys[slot] = tensor;
        }
        let set = HashSet {
            size: 5,
            used: used.as_mut_ptr(),
            keys: keys.as_mut_ptr(),
        };
        // SAFETY: both arrays have five entries.
        unsafe {
            assert_eq!(set.find(pointers[0]), Some(home));
            let second = set.find(pointers[1]);
            let reachable = (pointers[1] as usize >> 4) % 5 == home
                || (pointers[1] as usize >> 4) % 5 == (home + 1) % 5;
            assert_eq!(second.is_some(), reachable);
            assert_eq!(set.find(pointers[2]), None);
        }
    }
}
