//! Fuses the nodes before attention: QK norms, RoPE, and the writes to the KV cache.

use crate::planner::{ColumnSource, FusionPlanner};
use crate::{BeforeAttention, FusedRotation, Kernels};
use samite_core::{DType, Node, Op, TensorId};

/// Nodes that may become one launch.
#[derive(Default)]
struct FusionCandidate<'a> {
    rotations: Vec<FusedRotation<'a>>,
    writes: Vec<Node<'a>>,
    /// Number of nodes.
    count: usize,
    /// Number of nodes of the first rotation, if it comes first.
    first: usize,
}

impl<'a, K: Kernels> FusionPlanner<'a, K> {
    /// Fuses two rotations and two cache writes from node `at` on. The rotations are of queries and
    /// keys by the same angles; the writes are of the rotated keys and of the values. Otherwise
    /// fuses one rotation with its norm.
    pub fn before_attention(&mut self, at: usize) -> Option<usize> {
        let candidate = self.candidate(at);
        let all = self.all_parts(&candidate);
        let all = all.and_then(|nodes| Some((nodes, self.kernels.before_attention(&nodes)?)));
        if let Some((nodes, launches)) = all {
            self.push_other(nodes.keys, launches);
            return Some(candidate.count);
        }
        let rotation = candidate.rotations.first();
        let &rotation = rotation.filter(|_| candidate.first > 1)?;
        let (node, source) = (rotation.rope, rotation.source()?);
        let &Op::Rope(rope) = node.op() else {
            return None;
        };
        let fits = self.memory.are_apart(node.id(), source.id(), true)
            && self.angles_are_apart(rotation, node.id());
        if !fits {
            return None;
        }
        let launches = self.kernels.rotation(&rotation, rope)?;
        self.push_other(node, launches);
        Some(candidate.first)
    }

    /// Collects rotations and cache writes from node `at` on.
    fn candidate(&self, at: usize) -> FusionCandidate<'a> {
        let mut candidate = FusionCandidate::default();
        while candidate.rotations.len() + candidate.writes.len() < 4 {
            let Some(&node) = self.nodes.get(at + candidate.count) else {
                break;
            };
            if let Some((rotation, count)) = self.rotation_at(at + candidate.count) {
                if candidate.count == 0 {
                    candidate.first = count;
                }
                candidate.rotations.push(rotation);
                candidate.count += count;
            } else if matches!(node.op(), Op::SetRows) {
                candidate.writes.push(node);
                candidate.count += 1;
            } else {
                break;
            }
        }
        candidate
    }

    /// Returns the rotation that starts at node `at`, with the norm and multiplication before it if
    /// present, and its number of nodes.
    fn rotation_at(&self, at: usize) -> Option<(FusedRotation<'a>, usize)> {
        let first = *self.nodes.get(at)?;
        if matches!(first.op(), Op::Rope(_)) {
            let rotation = FusedRotation {
                rope: first,
                norm: None,
            };
            return Some((rotation, 1));
        }
        let norm = self.scaled_norm(at)?;
        let (scaled, rope) = (norm.scaled, *self.nodes.get(at + 2)?);
        let fits = matches!(rope.op(), Op::Rope(_))
            && rope.source(0).map(Node::id) == Some(scaled.id())
            && self.readers.only(scaled.id(), 1)
            && scaled.tensor().view.is_none()
            && [norm.norm, scaled]
                .iter()
                .all(|node| node.dtype() == DType::F32)
            && !rope.layout().is_empty();
        let rotation = FusedRotation {
            rope,
            norm: Some(norm),
        };
        fits.then_some((rotation, 3))
    }

    /// Returns whether the other inputs of a rotation, besides the heads, do not overlap `written`.
    fn angles_are_apart(&self, rotation: FusedRotation<'_>, written: TensorId) -> bool {
        let factor = rotation.norm.and_then(|norm| norm.scaled.source(1));
        let mut read = [rotation.rope.source(1), rotation.rope.source(2), factor]
            .into_iter()
            .flatten();
        read.all(|read| self.memory.are_apart(written, read.id(), false))
    }

    /// Returns two rotations and two cache writes that can be one launch.
    fn all_parts(&self, candidate: &FusionCandidate<'a>) -> Option<BeforeAttention<'a>> {
        let &[first, second] = candidate.rotations.as_slice() else {
            return None;
        };
        let &[one, other] = candidate.writes.as_slice() else {
            return None;
        };
        let writes_all_of = |write: Node<'_>, node: Node<'_>| {
            let source = write.source(0);
            source.is_some_and(|source| ColumnSource::from_node(source).are_rows_of_memory(node))
        };
        // Match each rotation with the cache that it is written to.
        let (key, query, keys, values) = [
            (first, second, one, other),
            (first, second, other, one),
            (second, first, one, other),
            (second, first, other, one),
        ]
        .into_iter()
        .find(|(key, _, keys, _)| writes_all_of(*keys, key.rope))?;
        let &Op::Rope(rope) = query.rope.op() else {
            return None;
        };
        let id = |node: Node<'_>, index: usize| node.source(index).map(Node::id);
        let shape = |node: Node<'_>| node.layout().shape();
        let (q, k, v) = (query.source()?, key.source()?, values.source(0)?);
        let key_shape = shape(key.rope);
        let tokens = key_shape[2];
        let is_plain = |node: Node<'_>| shape(node)[2..] == [1, 1];
        let are_whole = |node: Node<'_>, len: usize| len.is_multiple_of(node.dtype().block_len());
        let fits = key.rope.op() == query.rope.op()
            && key.norm.is_some() == query.norm.is_some()
            && id(key.rope, 1) == id(query.rope, 1)
            && id(key.rope, 2) == id(query.rope, 2)
            && id(keys, 1) == id(values, 1)
            && self.readers.only(key.rope.id(), 1)
            && key.rope.tensor().view.is_none()
            && key.rope.dtype() == DType::F32
            && [
                shape(query.rope)[0],
                shape(query.rope)[2],
                shape(query.rope)[3],
            ] == [key_shape[0], tokens, 1]
            && [keys, values].into_iter().all(is_plain)
            && are_whole(keys, key_shape[0])
            && are_whole(values, shape(v)[0])
            && shape(keys.source(0)?) == [key_shape[0] * key_shape[1], tokens, 1, 1]
            && shape(v)[1..] == [tokens, 1, 1]
            && shape(keys.source(1)?) == [tokens, 1, 1, 1];
        // No part may write what another part reads.
        let apart =
            |written: TensorId, read: Node<'_>| self.memory.are_apart(written, read.id(), false);
        let written = [query.rope.id(), keys.id(), values.id()];
        let are_apart = [k, v]
            .into_iter()
            .all(|read| written.iter().all(|&id| apart(id, read)))
            && written[1..].iter().all(|&id| apart(id, q))
            && self.memory.are_apart(query.rope.id(), q.id(), true)
            && [query, key]
                .iter()
                .all(|part| self.angles_are_apart(*part, query.rope.id()))
            && apart(keys.id(), values)
            && apart(query.rope.id(), keys.source(1)?)
            && apart(query.rope.id(), keys)
            && apart(query.rope.id(), values);
        (fits && are_apart).then_some(BeforeAttention {
            query,
            key,
            keys,
            values,
            rope,
        })
    }
}
