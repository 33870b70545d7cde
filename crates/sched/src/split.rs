//! Cutting a placed graph into splits, with the copies between them.
//!
//! A *split* is a run of nodes on one device. What a split reads from memory that its device cannot use is copied
//! before: the lowered graph has one more leaf for each such copy, and the split's nodes read that leaf instead.

use crate::devices::DeviceSet;
use crate::placement::Placement;
use samite_core::{Error, Graph, Op, Result, TensorId, Usage};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;

/// A run of nodes on one device.
#[derive(Clone, Debug, Serialize)]
pub struct Split {
    /// Number of the device.
    pub device: usize,
    /// Computed nodes in order.
    pub nodes: Vec<TensorId>,
    /// Copies made before it starts, by number.
    pub copies: Vec<usize>,
}

/// A tensor that is copied to another device's memory for a split.
#[derive(Clone, Debug, Serialize)]
pub struct Copy {
    /// The original.
    pub from: TensorId,
    /// The leaf in the lowered graph.
    pub to: TensorId,
    /// Bytes, gaps included.
    pub bytes: usize,
    /// For expert weights of which only those named by this tensor (i32) are needed: the names.
    pub experts: Option<TensorId>,
}

/// A graph cut into splits.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// The original tensors, followed by the leaves of copies.
    pub graph: Graph,
    /// Device of each tensor of the lowered graph.
    pub devices: Vec<Option<usize>>,
    /// The splits in the order in which they run.
    pub splits: Vec<Split>,
    /// All copies.
    pub copies: Vec<Copy>,
    /// By tensor: which tensor stands for the memory that it lies in. Stored tensors that overlap have the same.
    pub memory: Vec<TensorId>,
}

struct Cutter<'a> {
    devices: &'a DeviceSet,
    lowered: Lowered,
    /// How often the memory of a tensor was written to so far.
    version: Vec<usize>,
    /// Copies that exist, by original, device and version.
    known: HashMap<(TensorId, usize, usize), TensorId>,
}

/// Cuts the live part of a placed graph.
///
/// # Errors
/// If a device reorders nodes against their dependencies.
pub fn cut(
    graph: &Graph,
    live: &[bool],
    devices: &DeviceSet,
    placement: &Placement,
) -> Result<Lowered> {
    let mut cutter = Cutter {
        devices,
        lowered: Lowered {
            graph: graph.clone(),
            devices: placement.devices.clone(),
            memory: memories(graph),
            ..Lowered::default()
        },
        version: vec![0; graph.len()],
        known: HashMap::new(),
    };
    for id in graph
        .ids()
        .filter(|id| live[id.index()] && graph.tensor(*id).is_computed())
    {
        cutter.add(graph, id)?;
    }
    let mut lowered = cutter.lowered;
    for split in &mut lowered.splits {
        let before = split.nodes.clone();
        devices
            .get(split.device)
            .optimize(&lowered.graph, &mut split.nodes);
        if before != split.nodes {
            check_order(
                &lowered.graph,
                &lowered.memory,
                &before,
                &split.nodes,
                devices.get(split.device).name(),
            )?;
        }
    }
    lowered.find_expert_copies();
    Ok(lowered)
}

impl Cutter<'_> {
    fn add(&mut self, graph: &Graph, id: TensorId) -> Result<()> {
        // Placement gives every live tensor a device.
        let device = self.lowered.devices[id.index()].unwrap_or(self.devices.last());
        let foreign: Vec<(usize, TensorId)> = graph
            .tensor(id)
            .operands()
            .filter(|&(_, source)| !self.is_usable(graph, source, device))
            .collect();
        // A copy would take the write.
        let written = graph.tensor(id).op.written_sources();
        if let Some((index, _)) = foreign.iter().find(|(index, _)| written.contains(index)) {
            return Err(Error::Placement(
                format!(
                    "{:?} writes to its source {index}, which {} cannot reach",
                    graph.node(id),
                    self.devices.get(device).name()
                )
                .into(),
            ));
        }

        let is_weight = |source: TensorId| {
            graph
                .node(source)
                .stored()
                .is_some_and(|stored| stored.tensor().buffer.usage() == Usage::Weights)
        };
        let start_new = match self.lowered.splits.last() {
            Some(split) if split.device == device => {
                // A copied weight is large. In a split of its own, its memory can be reused for the next one.
                !split.copies.is_empty() && foreign.iter().any(|&(_, source)| is_weight(source))
            }
            _ => true,
        };
        if start_new {
            self.lowered.splits.push(Split {
                device,
                nodes: Vec::new(),
                copies: Vec::new(),
            });
        }
        for (index, source) in foreign {
            let copy = self.copy(graph, source, device)?;
            self.lowered.graph.redirect(id, index, copy)?;
        }
        if let Some(split) = self.lowered.splits.last_mut() {
            split.nodes.push(id);
        }
        for (_, source) in graph.tensor(id).written() {
            self.version[self.lowered.memory[source.index()].index()] += 1;
        }
        Ok(())
    }

    fn is_usable(&self, graph: &Graph, source: TensorId, device: usize) -> bool {
        if let Some(stored) = graph.node(source).stored() {
            return self.devices.can_use(device, stored);
        }
        let owner =
            self.lowered.devices[graph.memory_of(source).index()].unwrap_or(self.devices.last());
        self.devices.shares_memory(device, owner)
    }

    fn copy(&mut self, graph: &Graph, source: TensorId, device: usize) -> Result<TensorId> {
        let key = (
            source,
            device,
            self.version[self.lowered.memory[source.index()].index()],
        );
        if let Some(&known) = self.known.get(&key) {
            return Ok(known);
        }
        let tensor = graph.tensor(source);
        let name = format!("{}#{}", self.devices.get(device).name(), tensor.name);
        let to = self.lowered.graph.copy_of(source, &name)?;
        self.lowered.devices.push(Some(device));
        self.lowered.memory.push(to);
        self.lowered.copies.push(Copy {
            from: source,
            to,
            bytes: tensor.layout.bytes(),
            experts: None,
        });
        if let Some(split) = self.lowered.splits.last_mut() {
            split.copies.push(self.lowered.copies.len() - 1);
        }
        self.known.insert(key, to);
        Ok(to)
    }
}

impl Lowered {
    /// Finds copies of stored expert weights whose only use is by one `mul_mat_id` that starts its split: then
    /// the chosen experts are known before the copy, and only those have to move.
    fn find_expert_copies(&mut self) {
        let mut uses = vec![0usize; self.graph.len()];
        for tensor in self.graph.tensors() {
            tensor.operands().for_each(|(_, s)| uses[s.index()] += 1);
        }
        for split in &self.splits {
            let Some(&first) = split.nodes.first() else {
                continue;
            };
            let node = self.graph.tensor(first);
            let (Op::MulMatId { .. }, &[Some(experts), _, Some(ids)]) = (&node.op, &*node.sources)
            else {
                continue;
            };
            let Some(&number) = split.copies.iter().find(|&&c| self.copies[c].to == experts) else {
                continue;
            };
            let original = self.graph.tensor(self.copies[number].from);
            // The names are read from where they were computed, before any of this split runs. Leaves of copies follow the
            // original tensors, in order.
            let first_copy = self.graph.len() - self.copies.len();
            let ids = ids
                .index()
                .checked_sub(first_copy)
                .map_or(ids, |copy| self.copies[copy].from);
            let in_plain_memory = original
                .stored
                .as_ref()
                .is_some_and(|stored| stored.tensor().buffer.host().is_some());
            if uses[experts.index()] == 1
                && in_plain_memory
                && original.layout.is_contiguous()
                && self.graph.tensor(ids).layout.has_contiguous_rows()
            {
                self.copies[number].experts = Some(ids);
            }
        }
    }
}

/// The tensor that stands for the memory of each: the owner, or the first of all stored tensors that overlap.
fn memories(graph: &Graph) -> Vec<TensorId> {
    let mut owners: Vec<TensorId> = graph.ids().collect();
    let mut stored: Vec<_> = graph
        .ids()
        .filter_map(|id| {
            let place = graph.tensor(id).stored.as_ref()?.tensor();
            let buffer = Arc::as_ptr(&place.buffer).addr();
            let start = place.slot.offset;
            Some((buffer, start, start + place.layout().bytes(), id))
        })
        .collect();
    stored.sort_unstable();
    let mut last: Option<(usize, usize, TensorId)> = None;
    for (buffer, start, end, id) in stored {
        last = Some(match last {
            Some((known, reach, owner)) if known == buffer && start < reach => {
                owners[id.index()] = owner;
                (known, reach.max(end), owner)
            }
            _ => (buffer, end, id),
        });
    }
    graph
        .ids()
        .map(|id| owners[graph.memory_of(id).index()])
        .collect()
}

/// Checks that `after` is a permutation of `before` in which accesses to each memory keep their order, as far as one of them
/// writes.
fn check_order(
    graph: &Graph,
    memory: &[TensorId],
    before: &[TensorId],
    after: &[TensorId],
    device: &str,
) -> Result<()> {
    let broken = || Error::device(device, "optimize() broke the order of dependent nodes");
    let position: HashMap<TensorId, usize> =
        after.iter().enumerate().map(|(i, &id)| (id, i)).collect();
    if position.len() != before.len() || before.len() != after.len() {
        return Err(broken());
    }
    /// Where the last write to a memory and the last read since went.
    #[derive(Default)]
    struct Last {
        write: Option<usize>,
        read: Option<usize>,
    }
    let mut last: HashMap<TensorId, Last> = HashMap::new();
    for id in before {
        let at = Some(*position.get(id).ok_or_else(broken)?);
        for (_, source) in graph.tensor(*id).operands() {
            let known = last.entry(memory[source.index()]).or_default();
            if known.write > at {
                return Err(broken());
            }
            known.read = known.read.max(at);
        }
        let written = graph.tensor(*id).written().map(|(_, source)| source);
        for target in written.chain([*id]) {
            let known = last.entry(memory[target.index()]).or_default();
            if known.write.max(known.read) > at {
                return Err(broken());
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
    use samite_core::DType;

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
        let check = |after: &[TensorId]| check_order(&g, &memories(&g), &before, after, "d");
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
