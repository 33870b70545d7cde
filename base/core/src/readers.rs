//! Readers of computed results. Devices that fuse nodes skip results without other readers.

use crate::graph::{Graph, TensorId};

/// Number of operands of computed nodes in each tensor's memory.
#[derive(Debug)]
pub struct Readers(Vec<usize>);

impl Readers {
    /// Counts the readers in a graph.
    pub fn new(graph: &Graph) -> Self {
        let mut readers = vec![0usize; graph.len()];
        // In a graph without outputs and writes, all results count as outputs.
        let has_purpose = graph
            .tensors()
            .iter()
            .any(|tensor| tensor.flags.output || tensor.written().next().is_some());
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            if tensor.flags.output || tensor.flags.copied || !has_purpose {
                readers[graph.memory_of(id).index()] = usize::MAX;
            }
            for (_, operand) in tensor.operands().filter(|_| tensor.is_computed()) {
                let count = &mut readers[graph.memory_of(operand).index()];
                *count = count.saturating_add(1);
            }
        }
        Readers(readers)
    }

    /// Returns whether exactly `count` operands, and nothing else, read the memory of a computed
    /// tensor.
    pub fn only(&self, id: TensorId, count: usize) -> bool {
        self.0[id.index()] == count
    }
}
