//! Reordering of a graph's nodes without changing the results.
//!
//! A node sees all writes of earlier nodes. So two nodes may be swapped unless both access the same
//! memory and one of them writes to it. A result counts as a write to its own memory.

use crate::error::{Error, Result};
use crate::graph::{Graph, TensorId};
use crate::memory::MemoryId;
use std::collections::BTreeMap;

/// Returns, by tensor, the tensor that represents its memory: the base of a view, or the first of
/// all overlapping stored tensors.
pub fn memories(graph: &Graph) -> Vec<TensorId> {
    let mut owners: Vec<TensorId> = graph.ids().collect();
    let mut stored: Vec<_> = graph
        .ids()
        .filter_map(|id| {
            let place = graph.tensor(id).stored.as_ref()?.tensor();
            let start = place.location();
            let end = start.offset.saturating_add(place.layout().bytes());
            Some((start, end, id))
        })
        .collect();
    stored.sort_unstable();
    let mut last: Option<(MemoryId, usize, TensorId)> = None;
    for (start, end, id) in stored {
        last = Some(match last {
            Some((memory, reach, owner)) if memory == start.memory && start.offset < reach => {
                owners[id.index()] = owner;
                (memory, reach.max(end), owner)
            }
            _ => (start.memory, end, id),
        });
    }
    graph
        .ids()
        .map(|id| owners[graph.memory_of(id).index()])
        .collect()
}

/// Checks that `after` is a permutation of `before`, nodes of `graph`, with the same results.
/// `memories` is the result of [`memories()`](memories()).
///
/// # Errors
/// [`Error::InvalidArgument`], naming the first node of `before` that was moved incorrectly.
pub fn check_order(
    graph: &Graph,
    memories: &[TensorId],
    before: &[TensorId],
    after: &[TensorId],
) -> Result<()> {
    let position: BTreeMap<TensorId, usize> =
        after.iter().enumerate().map(|(i, &id)| (id, i)).collect();
    if position.len() != before.len() || before.len() != after.len() {
        return Err(Error::invalid(format!(
            "the new order has {} nodes, {} of them different, instead of {}",
            after.len(),
            position.len(),
            before.len()
        )));
    }
    /// Positions of the last write to a memory and of the last read since.
    #[derive(Default)]
    struct Last {
        write: Option<usize>,
        read: Option<usize>,
    }
    let mut last: BTreeMap<TensorId, Last> = BTreeMap::new();
    for &id in before {
        let node = graph.tensor(id);
        let at = *position.get(&id).ok_or_else(|| {
            Error::invalid(format!("{id} '{}' is not in the new order", node.name))
        })?;
        let at = Some(at);
        let early = || {
            Error::invalid(format!(
                "the new order has {id} '{}' before a node that it depends on",
                node.name
            ))
        };
        for (_, source) in node.operands() {
            let known = last.entry(memories[source.index()]).or_default();
            if known.write > at {
                return Err(early());
            }
            known.read = known.read.max(at);
        }
        let written = node.written().map(|(_, source)| source);
        for target in written.chain([id]) {
            let known = last.entry(memories[target.index()]).or_default();
            if known.write.max(known.read) > at {
                return Err(early());
            }
            *known = Last {
                write: at,
                read: None,
            };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn stored_tensors_that_share_a_byte_share_memory() {
        let memory = crate::HostMemory::allocate(12, "test", "bytes").unwrap();
        let mut g = Graph::new();
        // Bytes 0 to 3, 3 to 6, and 7 to 10, each in a buffer of its own.
        let tensors = [0, 3, 7].map(|at| {
            let buffer = crate::host_buffer(std::sync::Arc::clone(&memory), crate::Usage::Any);
            let layout = crate::Layout::contiguous(DType::I8, [4, 1, 1, 1]).unwrap();
            let stored = crate::StoredTensor::new("t", buffer, at, layout).unwrap();
            g.stored(&stored).unwrap()
        });
        assert_eq!(memories(&g), [tensors[0], tensors[0], tensors[2]]);
    }

    #[test]
    fn orders_of_dependent_nodes_are_checked() {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
        let scratch = g.leaf("scratch", DType::F32, [4, 1, 1, 1]).unwrap();
        let a = g.sqr(x).unwrap();
        let b = g.sqrt(x).unwrap();
        let written = g.cpy(a, scratch).unwrap();
        let read = g.sqr(scratch).unwrap();
        let again = g.cpy(b, scratch).unwrap();
        let before = [a, b, written, read, again];
        let check = |after: &[TensorId]| check_order(&g, &memories(&g), &before, after);
        check(&before).unwrap();
        check(&[b, a, written, read, again]).unwrap();
        check(&[a, written, read, b, again]).unwrap();
        for wrong in [
            &[written, a, b, read, again][..],
            &[a, b, read, written, again],
            &[a, b, written, again, read],
            &[a, b, again, written, read],
            &[a, b, written, read],
            &[a, a, written, read, again],
            &[a, b, written, read, x],
        ] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }
}
