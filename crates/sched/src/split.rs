//! Cutting a placed graph into splits, with the copies between them.
//!
//! A *split* is a run of nodes on one device. What a split reads from memory that its device cannot use is copied
//! before: the lowered graph has one more leaf for each such copy, and the split's nodes read that leaf instead.

use crate::devices::DeviceSet;
use crate::placement::Placement;
use samite_core::{Error, Graph, Op, Result, TensorId, Usage};
use serde::Serialize;
use std::collections::HashMap;

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
        check_order(
            &lowered.graph,
            &before,
            &split.nodes,
            devices.get(split.device).name(),
        )?;
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
        if graph.tensor(id).op.written_source().is_some() {
            self.version[graph.memory_of(id).index()] += 1;
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
            self.version[graph.memory_of(source).index()],
        );
        if let Some(&known) = self.known.get(&key) {
            return Ok(known);
        }
        let tensor = graph.tensor(source);
        let name = format!("{}#{}", self.devices.get(device).name(), tensor.name);
        let to = self.lowered.graph.copy_of(source, &name)?;
        self.lowered.devices.push(Some(device));
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
            let uses = self
                .graph
                .ids()
                .filter(|&id| self.graph.tensor(id).operands().any(|(_, s)| s == experts))
                .count();
            let original = self.graph.tensor(self.copies[number].from);
            // The names are read from where they were computed, before any of this split runs.
            let ids = self
                .copies
                .iter()
                .find(|copy| copy.to == ids)
                .map_or(ids, |copy| copy.from);
            let computed_here = split.nodes.contains(&ids);
            if uses == 1
                && original.stored.is_some()
                && original.layout.is_contiguous()
                && !computed_here
            {
                self.copies[number].experts = Some(ids);
            }
        }
    }
}

/// Checks that `after` is a permutation of `before` in which no node moves across one that it depends on, or that shares
/// written memory with it.
fn check_order(graph: &Graph, before: &[TensorId], after: &[TensorId], device: &str) -> Result<()> {
    if before == after {
        return Ok(());
    }
    let position: HashMap<TensorId, usize> =
        after.iter().enumerate().map(|(i, &id)| (id, i)).collect();
    let broken = || Error::device(device, "optimize() broke the order of dependent nodes");
    if position.len() != before.len() || before.len() != after.len() {
        return Err(broken());
    }
    for (i, &later) in before.iter().enumerate() {
        let at = *position.get(&later).ok_or_else(broken)?;
        for &earlier in &before[..i] {
            if position.get(&earlier).is_none_or(|&e| e > at) && depends(graph, later, earlier) {
                return Err(broken());
            }
        }
    }
    Ok(())
}

/// Whether two nodes touch the same memory and one of them writes to it.
fn depends(graph: &Graph, a: TensorId, b: TensorId) -> bool {
    let memory = |id: TensorId| graph.memory_of(id);
    let reads =
        |id: TensorId, m: TensorId| graph.tensor(id).operands().any(|(_, s)| memory(s) == m);
    memory(a) == memory(b) || reads(a, memory(b)) || reads(b, memory(a))
}
