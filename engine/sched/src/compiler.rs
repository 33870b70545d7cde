//! Compiled work, shared by pipeline copies, by plans, and by graphs that differ only in extents.

use samite_core::{CancelToken, Compiled, Device, Graph, Result, TensorId};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Maximum number of cached results.
const KEPT: usize = 256;

/// Lets devices compile, and caches the results.
#[derive(Default)]
pub(crate) struct Compiler {
    /// Cached results, least recently used first.
    known: Vec<CachedCompilation>,
    /// Number of new compilations.
    pub compiled: usize,
}

struct CachedCompilation {
    device: usize,
    kind: u64,
    compiled: Arc<dyn Compiled>,
}

impl Compiler {
    /// Clears the cache, because the devices were renumbered.
    pub fn clear(&mut self) {
        self.known.clear();
    }

    /// Lets `device`, number `number`, compile these nodes.
    pub fn compile(
        &mut self,
        number: usize,
        device: &Arc<dyn Device>,
        graph: &Graph,
        nodes: &[TensorId],
        cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        let kind = kind(graph, nodes);
        let is_same = |entry: &CachedCompilation| (entry.device, entry.kind) == (number, kind);
        let earlier = self.known.iter().position(is_same);
        let earlier = earlier.map(|at| self.known.remove(at).compiled);
        let result = device.compile(graph, nodes, earlier.as_ref(), cancel);
        let (made, kept) = match &result {
            Ok(Some(compiled)) => {
                let again = earlier.is_some_and(|earlier| Arc::ptr_eq(&earlier, compiled));
                (!again, Some(Arc::clone(compiled)))
            }
            // A failure or a missing result keeps the cached one.
            Ok(None) | Err(_) => (false, earlier),
        };
        self.compiled += usize::from(made);
        if let Some(compiled) = kept {
            if self.known.len() >= KEPT {
                self.known.remove(0);
            }
            self.known.push(CachedCompilation {
                device: number,
                kind,
                compiled,
            });
        }
        result
    }
}

/// Returns a hash that is equal for nodes with the same operations, types and operands. Parameters
/// and extents are up to the device.
fn kind(graph: &Graph, nodes: &[TensorId]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let inside: BTreeMap<TensorId, usize> = nodes.iter().copied().zip(0..).collect();
    for &id in nodes {
        let tensor = graph.tensor(id);
        tensor.op.name().hash(&mut hasher);
        tensor.layout.dtype().hash(&mut hasher);
        for source in &tensor.sources {
            let source =
                source.map(|source| (inside.get(&source), graph.tensor(source).layout.dtype()));
            source.hash(&mut hasher);
        }
    }
    hasher.finish()
}
