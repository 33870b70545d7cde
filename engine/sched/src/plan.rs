//! The plan: everything that is decided about one graph, as data.

use crate::devices::DeviceSet;
use crate::memory_plan::{self, MemoryPlan};
use crate::options::{Assignments, Options};
use crate::order::{self, Action, Lane, Work, origin};
use crate::placement::{self, Placement, Refusal};
use crate::split::{self, Copy, Lowered, Split};
use samite_core::{Graph, Result, Tensor, TensorId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Placement, splits, copies, memory and order for one graph on a set of devices.
///
/// A plan is made without data and without memory, is the same for the same input, and can be
/// [explained](crate::explain), [checked for races](crate::race) or executed by a [`Scheduler`](crate::Scheduler).
#[derive(Debug)]
pub struct Plan {
    pub(crate) graph: Graph,
    pub(crate) assignments: Assignments,
    pub(crate) live: Vec<bool>,
    pub(crate) placement: Placement,
    pub(crate) lowered: Lowered,
    pub(crate) memory: MemoryPlan,
    pub(crate) actions: Vec<Action>,
    pub(crate) copies: usize,
    pub(crate) devices: DeviceSet,
    /// Which asynchronous devices write to memory that several nodes may write to.
    writers: BTreeMap<TensorId, Vec<usize>>,
}

impl Plan {
    /// Plans `graph` on `devices`.
    ///
    /// # Errors
    /// [`Error::Placement`](samite_core::Error::Placement) if something can run nowhere,
    /// [`Error::OutOfMemory`](samite_core::Error::OutOfMemory) if a tensor exceeds its device's largest buffer.
    pub fn new(
        graph: &Graph,
        devices: &DeviceSet,
        assignments: &Assignments,
        options: &Options,
    ) -> Result<Plan> {
        let copies = options.copies.max(1);
        let live = graph.live();
        let placement = placement::place(graph, &live, devices, assignments, options)?;
        let chance = &*options.environment.chance;
        let lowered = split::cut(graph, &live, devices, &placement, chance)?;
        let memory = memory_plan::plan(&lowered, &live, devices, copies)?;
        let actions = order::order(&lowered, &memory, devices, copies)?;
        let mut writers: BTreeMap<TensorId, Vec<usize>> = BTreeMap::new();
        for split in &lowered.splits {
            for id in &split.nodes {
                if !devices.is_asynchronous(split.device) {
                    continue;
                }
                for (_, source) in lowered.graph.tensor(*id).written() {
                    let known = writers.entry(lowered.memory[source.index()]).or_default();
                    if !known.contains(&split.device) {
                        known.push(split.device);
                    }
                }
            }
        }
        Ok(Plan {
            writers,
            graph: graph.clone(),
            assignments: assignments.clone(),
            live,
            placement,
            lowered,
            memory,
            actions,
            copies,
            devices: devices.clone(),
        })
    }

    /// The graph that was planned.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Whether this plan also fits `graph`: same operations, operands, layouts, roles and stored tensors. Names do not
    /// matter. Allocates nothing.
    pub fn fits(&self, graph: &Graph, assignments: &Assignments) -> bool {
        fn same(a: &Tensor, b: &Tensor) -> bool {
            let stored = match (&a.stored, &b.stored) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            stored
                && a.op == b.op
                && a.sources == b.sources
                && a.layout == b.layout
                && a.view == b.view
                && a.flags == b.flags
        }
        self.graph.len() == graph.len()
            && self.assignments == *assignments
            && self
                .graph
                .tensors()
                .iter()
                .zip(graph.tensors())
                .all(|(a, b)| same(a, b))
    }

    /// The devices, in order of preference.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Device and reason of each tensor.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The graph with its copies, cut into splits.
    pub fn lowered(&self) -> &Lowered {
        &self.lowered
    }

    /// The splits in the order in which they run.
    pub fn splits(&self) -> &[Split] {
        &self.lowered.splits
    }

    /// The copies between devices.
    pub fn copies(&self) -> &[Copy] {
        &self.lowered.copies
    }

    /// Number of pipeline copies.
    pub fn pipeline_copies(&self) -> usize {
        self.copies
    }

    /// The memory plan.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// Copies and splits in the order in which they are issued, with their waits.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Operations on a slower device than their neighbours.
    pub fn fallbacks(&self) -> &[Refusal] {
        &self.placement.refusals
    }

    /// Bytes copied between devices per run. Expert weights count whole, though fewer may move.
    pub fn bytes_copied(&self) -> usize {
        self.lowered.copies.iter().map(|copy| copy.bytes).sum()
    }

    /// The numbers of copies that go through the host's memory although neither end lies there: no device makes them.
    pub fn detours(&self) -> impl Iterator<Item = usize> + '_ {
        let made_by_host = self.actions.iter().filter_map(|action| match action.work {
            Work::Copy(number) if action.copier.is_none() => Some(number),
            _ => None,
        });
        made_by_host.filter(|&number| {
            let copy = &self.lowered.copies[number];
            let ends = [copy.from, copy.to].map(|id| origin(&self.lowered, id, &self.devices));
            ends.iter().all(|memory| !memory.is_host())
        })
    }

    /// Bytes of compute memory by kind of memory, `(name, bytes)`.
    pub fn memory_by_type(&self) -> Vec<(String, usize)> {
        let names = self
            .devices
            .memories()
            .iter()
            .map(|memory| memory.name().to_owned());
        names
            .enumerate()
            .map(|(i, name)| (name, self.memory.size(i)))
            .collect()
    }

    /// Where the work for tensor `id` happens.
    pub(crate) fn lane(&self, id: TensorId) -> Lane {
        match self.lowered.devices[self.graph.memory_of(id).index()] {
            Some(device) if self.devices.is_asynchronous(device) => Lane::Device(device),
            _ => Lane::Host,
        }
    }

    /// The asynchronous devices that write to the memory of `id` after it was made.
    pub(crate) fn writers(&self, id: TensorId) -> &[usize] {
        self.writers
            .get(&self.lowered.memory[id.index()])
            .map_or(&[], Vec::as_slice)
    }
}
