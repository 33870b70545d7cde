//! Who reads what is computed: devices that fuse nodes leave out results that nobody else reads.

use crate::graph::{Graph, TensorId};

/// How many operands of computed nodes lie in a tensor's memory.
#[derive(Debug)]
pub struct Readers(Vec<usize>);

impl Readers {
    /// Those of a graph.
    pub fn new(graph: &Graph) -> Self {
        let mut readers = vec![0usize; graph.len()];
        // A graph that neither has outputs nor writes anything is for all its results.
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

    /// Whether so many operands, and nobody else, read what is computed for a tensor.
    pub fn only(&self, id: TensorId, count: usize) -> bool {
        self.0[id.index()] == count
    }
}
