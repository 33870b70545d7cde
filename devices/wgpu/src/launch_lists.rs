//! Caches the launch lists of the last graph.
//!
//! The scheduler asks for scratch memory before tensors have a place, then compiles the nodes, then
//! prepares them for each pipeline copy. All these calls need the same list.

use crate::fuse::{self, LaunchList, Memory};
use crate::plan::{Capacity, UnsupportedLaunch};
use samite_core::{Graph, Tensor, TensorId};
use std::fmt;
use std::sync::Arc;

/// Maximum number of lists of a graph.
const MAX_LISTS: usize = 64;

/// The lists of one graph, for one capacity.
#[derive(Default)]
pub struct LaunchLists {
    capacity: Option<Capacity>,
    /// Tensors of the graph, without their memory.
    tensors: Vec<Tensor>,
    lists: Vec<(Vec<TensorId>, Arc<LaunchList>)>,
}

impl fmt::Debug for LaunchLists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaunchLists({})", self.lists.len())
    }
}

impl LaunchLists {
    /// Returns the launches of `nodes`. Builds them if no cached list fits.
    ///
    /// # Errors
    /// Returns the node that the device does not support, and the reason.
    pub fn get(
        &mut self,
        graph: &Graph,
        nodes: &[TensorId],
        capacity: &Capacity,
        memory: Memory<'_>,
    ) -> Result<Arc<LaunchList>, (TensorId, UnsupportedLaunch)> {
        if self.capacity != Some(*capacity) || !self.is_of(graph) {
            let tensors = graph.tensors().iter().map(|tensor| Tensor {
                stored: None,
                ..tensor.clone()
            });
            *self = LaunchLists {
                capacity: Some(*capacity),
                tensors: tensors.collect(),
                lists: Vec::new(),
            };
        }
        let mut lists = self.lists.iter();
        let fits =
            |(of, list): &&(Vec<_>, Arc<LaunchList>)| of == nodes && list.fits(graph, memory);
        if let Some((_, list)) = lists.find(fits) {
            return Ok(Arc::clone(list));
        }
        let list = Arc::new(fuse::launch_list(graph, nodes, capacity, memory)?);
        if self.lists.len() == MAX_LISTS {
            self.lists.remove(0);
        }
        self.lists.push((nodes.to_vec(), Arc::clone(&list)));
        Ok(list)
    }

    /// Returns whether the lists are of `graph`, whatever the names and the memory of its tensors.
    fn is_of(&self, graph: &Graph) -> bool {
        let is_same = |(a, b): (&Tensor, &Tensor)| {
            a.op == b.op
                && a.sources == b.sources
                && a.layout == b.layout
                && a.view == b.view
                && a.flags == b.flags
        };
        self.tensors.len() == graph.len() && self.tensors.iter().zip(graph.tensors()).all(is_same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::tests::capacity;
    use samite_core::DType;

    fn product(weights: DType, columns: usize) -> Graph {
        let mut graph = Graph::new();
        let w = graph.leaf("w", weights, [256, 32, 1, 1]).unwrap();
        let x = graph.input("x", DType::F32, [256, columns, 1, 1]).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        graph.set_output(y);
        graph
    }

    #[test]
    fn a_list_is_built_once_for_a_graph() {
        let mut lists = LaunchLists::default();
        let mut list = |graph: &Graph, memory| {
            let nodes: Vec<_> = graph.ids().collect();
            let list = lists.get(graph, &nodes, &capacity(false, 1 << 30), memory);
            list.unwrap_or_else(|(_, reason)| panic!("{reason}"))
        };
        let (halves, packable) = (product(DType::F16, 1), product(DType::Q4_0, 1));
        let first = list(&halves, Memory::Stored);
        assert!(Arc::ptr_eq(
            &first,
            &list(&halves.clone(), Memory::AllPacked)
        ));
        let plain = list(&packable, Memory::Stored);
        let packed = list(&packable, Memory::AllPacked);
        assert_eq!([plain.launches.len(), packed.launches.len()], [1, 2]);
        assert!(Arc::ptr_eq(&plain, &list(&packable, Memory::Stored)));
        assert!(Arc::ptr_eq(&packed, &list(&packable, Memory::AllPacked)));
        // Without places, nothing is packed or known to be aligned.
        let placed = list(&packable, Memory::Places(&[]));
        assert!(!Arc::ptr_eq(&packed, &placed) && placed.launches.len() == 1);
        let wider = list(&product(DType::Q4_0, 2), Memory::Stored);
        assert!(!Arc::ptr_eq(&plain, &wider));
    }
}
