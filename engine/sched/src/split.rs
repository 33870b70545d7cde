//! Cuts a placed graph into splits, with the copies between them.
//!
//! A *split* consists of consecutive nodes that one device runs as a whole. A new split starts
//! where the next node is on another device, or where another weight must be copied, so that the
//! first copy's memory can be reused. Tensors in memory that the split's device cannot use are
//! copied first. The lowered graph has an additional leaf for each copy, and the split's nodes read
//! that leaf.

use crate::devices::DeviceSet;
use crate::placement::Placement;
use samite_core::environment::Buggify;
use samite_core::reorder::{check_order, memories};
use samite_core::{Error, Graph, KeepAlive, Op, Result, TensorId, Usage};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Consecutive nodes that one device runs as a whole.
#[derive(Clone, Debug, Serialize)]
pub struct Split {
    /// Number of the device.
    pub device: usize,
    /// Computed nodes, in order.
    pub nodes: Vec<TensorId>,
    /// Copies made before it starts, by number.
    pub copies: Vec<usize>,
    /// Memory that the device keeps for longer than the graph requires.
    pub kept: Vec<KeepAlive>,
}

impl Split {
    /// Returns the tensors kept until each node, by node.
    pub(crate) fn kept_until(&self) -> BTreeMap<TensorId, Vec<TensorId>> {
        let mut ends: BTreeMap<TensorId, Vec<TensorId>> = BTreeMap::new();
        for keep in &self.kept {
            ends.entry(keep.until).or_default().push(keep.tensor);
        }
        ends
    }
}

/// A tensor that is copied to another device's memory for a split.
#[derive(Clone, Debug, Serialize)]
pub struct Copy {
    /// The original.
    pub from: TensorId,
    /// The leaf in the lowered graph.
    pub to: TensorId,
    /// Bytes, including gaps.
    pub bytes: usize,
    /// Tensor (i32) with the ids of the needed experts, for expert weights.
    pub experts: Option<TensorId>,
}

/// A graph cut into splits.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// The original tensors, followed by the leaves of the copies.
    pub graph: Graph,
    /// Device of each tensor of the lowered graph.
    pub devices: Vec<Option<usize>>,
    /// The splits in execution order.
    pub splits: Vec<Split>,
    /// All copies.
    pub copies: Vec<Copy>,
    /// Representative of each tensor's memory. Overlapping stored tensors have the same one.
    pub memory: Vec<TensorId>,
}

struct Cutter<'a> {
    devices: &'a DeviceSet,
    buggify: &'a dyn Buggify,
    lowered: Lowered,
    /// Number of writes to the memory of a tensor so far.
    version: Vec<usize>,
    /// Existing copies, by original, device and version.
    known: BTreeMap<(TensorId, usize, usize), TensorId>,
}

/// Cuts the live part of a placed graph. The fault injection point `split` adds random cuts.
///
/// # Errors
/// If a device orders nodes against their dependencies, or requests to keep memory until a node
/// that is not in the split.
pub fn cut(
    graph: &Graph,
    live: &[bool],
    devices: &DeviceSet,
    placement: &Placement,
    buggify: &dyn Buggify,
) -> Result<Lowered> {
    let mut cutter = Cutter {
        devices,
        buggify,
        lowered: Lowered {
            graph: graph.clone(),
            devices: placement.devices.clone(),
            memory: memories(graph),
            ..Lowered::default()
        },
        version: vec![0; graph.len()],
        known: BTreeMap::new(),
    };
    for id in graph
        .ids()
        .filter(|id| live[id.index()] && graph.tensor(*id).is_computed())
    {
        cutter.add(graph, id)?;
    }
    let mut lowered = cutter.lowered;
    lowered.optimize(devices)?;
    lowered.find_expert_copies(devices);
    Ok(lowered)
}

impl Cutter<'_> {
    fn add(&mut self, graph: &Graph, id: TensorId) -> Result<()> {
        // Placement assigns a device to every live tensor.
        let device = self.lowered.devices[id.index()].unwrap_or(self.devices.last());
        let foreign: Vec<(usize, TensorId)> = graph
            .tensor(id)
            .operands()
            .filter(|&(_, source)| !self.is_usable(graph, source, device))
            .collect();
        // The write would go to a copy.
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
                // A copied weight is large. In a split of its own, its memory can be reused for the
                // next one.
                !split.copies.is_empty() && foreign.iter().any(|&(_, source)| is_weight(source))
                    || self.buggify.fires("split")
            }
            _ => true,
        };
        if start_new {
            self.lowered.splits.push(Split {
                device,
                nodes: Vec::new(),
                copies: Vec::new(),
                kept: Vec::new(),
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
    /// Lets devices reorder the nodes of their splits and request memory to keep.
    fn optimize(&mut self, devices: &DeviceSet) -> Result<()> {
        for split in &mut self.splits {
            let device = devices.get(split.device);
            let wrong = |reason: String| {
                Error::device(device.name(), format!("its optimize() is wrong: {reason}"))
            };
            let before = split.nodes.clone();
            split.kept = device.optimize(&self.graph, &mut split.nodes);
            if before != split.nodes {
                check_order(&self.graph, &self.memory, &before, &split.nodes)
                    .map_err(|error| wrong(error.to_string()))?;
            }
            if split.kept.is_empty() {
                continue;
            }
            let nodes: BTreeSet<TensorId> = before.into_iter().collect();
            for KeepAlive { tensor, until } in &split.kept {
                if tensor.index() >= self.graph.len() || !nodes.contains(until) {
                    return Err(wrong(format!(
                        "{tensor} cannot be kept until {until}, which is not a node of the split, or is not there itself"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Finds copies of stored expert weights that are used only by one `mul_mat_id` at the start of
    /// its split. The selected experts are then known before the copy, and only those are copied.
    fn find_expert_copies(&mut self, devices: &DeviceSet) {
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
            // The ids are read from where they were computed, before this split runs. Leaves of
            // copies follow the original tensors, in order.
            let first_copy = self.graph.len() - self.copies.len();
            let ids = ids
                .index()
                .checked_sub(first_copy)
                .map_or(ids, |copy| self.copies[copy].from);
            let owner = self.devices[self.copies[number].from.index()];
            let on_host = original.stored.as_ref().is_some_and(|stored| {
                stored.tensor().buffer.host().is_some()
                    || owner.is_some_and(|device| devices.is_host(device))
            });
            if uses[experts.index()] == 1
                && on_host
                && original.layout.is_contiguous()
                && self.graph.tensor(ids).layout.has_contiguous_rows()
            {
                self.copies[number].experts = Some(ids);
            }
        }
    }
}
