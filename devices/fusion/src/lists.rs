//! Caches the launch lists of the last graph.
//!
//! The scheduler asks for scratch memory before tensors have a place, then compiles the nodes, then
//! prepares them for each pipeline copy. All these calls need the same list.

use crate::{Kernels, LaunchList, Memory, Unsupported, launch_list};
use samite_core::{Graph, Tensor, TensorId};
use std::fmt;
use std::sync::Arc;

/// Maximum number of lists of a graph.
const MAX_LISTS: usize = 64;

/// The lists of one graph, for one set of kernels.
pub struct LaunchLists<K: Kernels> {
    kernels: Option<K>,
    /// Tensors of the graph, without their memory.
    tensors: Vec<Tensor>,
    lists: Vec<(Vec<TensorId>, Arc<LaunchList<K>>)>,
}

impl<K: Kernels> Default for LaunchLists<K> {
    fn default() -> Self {
        LaunchLists {
            kernels: None,
            tensors: Vec::new(),
            lists: Vec::new(),
        }
    }
}

impl<K: Kernels> fmt::Debug for LaunchLists<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaunchLists({})", self.lists.len())
    }
}

impl<K: Kernels> LaunchLists<K> {
    /// Returns the launches of `nodes`. Builds them if no cached list fits.
    ///
    /// # Errors
    /// Returns the node that the device does not support, and the reason.
    pub fn get(
        &mut self,
        graph: &Graph,
        nodes: &[TensorId],
        kernels: K,
        memory: Memory<'_>,
    ) -> Result<Arc<LaunchList<K>>, (TensorId, Unsupported)> {
        if self.kernels != Some(kernels) || !self.is_of(graph) {
            let tensors = graph.tensors().iter().map(|tensor| Tensor {
                stored: None,
                ..tensor.clone()
            });
            *self = LaunchLists {
                kernels: Some(kernels),
                tensors: tensors.collect(),
                lists: Vec::new(),
            };
        }
        let mut lists = self.lists.iter();
        let fits =
            |(of, list): &&(Vec<_>, Arc<LaunchList<K>>)| of == nodes && list.fits(graph, memory);
        if let Some((_, list)) = lists.find(fits) {
            return Ok(Arc::clone(list));
        }
        let list = Arc::new(launch_list(graph, nodes, kernels, memory)?);
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
