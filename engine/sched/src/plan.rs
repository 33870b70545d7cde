//! The plan: all decisions about one graph, as data.

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
/// A plan is made without data and without memory, and is the same for the same input. It can be
/// [explained](crate::explain), [checked for races](crate::race_check) or executed by a
/// [`Scheduler`](crate::Scheduler).
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
    /// Asynchronous devices that write to memory with several writers.
    writers: BTreeMap<TensorId, Vec<usize>>,
}

impl Plan {
    /// Plans `graph` on `devices`.
    ///
    /// # Errors
    /// [`Error::Placement`](samite_core::Error::Placement) if no device can run a node,
    /// [`Error::OutOfMemory`](samite_core::Error::OutOfMemory) if a tensor exceeds its device's
    /// maximum buffer size.
    pub fn new(
        graph: &Graph,
        devices: &DeviceSet,
        assignments: &Assignments,
        options: &Options,
    ) -> Result<Plan> {
        let copies = options.copies.max(1);
        let live = graph.live();
        let placement = placement::place(graph, &live, devices, assignments, options)?;
        let buggify = &*options.environment.buggify;
        let lowered = split::cut(graph, &live, devices, &placement, buggify)?;
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

    /// Returns the graph that was planned.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns whether this plan also fits `graph`: same operations, operands, layouts, roles and
    /// stored tensors. Names do not matter. Does not allocate.
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

    /// Returns the devices, in order of preference.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Returns the device and reason of each tensor.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the graph with its copies, cut into splits.
    pub fn lowered(&self) -> &Lowered {
        &self.lowered
    }

    /// Returns the splits in execution order.
    pub fn splits(&self) -> &[Split] {
        &self.lowered.splits
    }

    /// Returns the copies between devices.
    pub fn copies(&self) -> &[Copy] {
        &self.lowered.copies
    }

    /// Returns the number of pipeline copies.
    pub fn pipeline_copies(&self) -> usize {
        self.copies
    }

    /// Returns the memory plan.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// Returns copies and splits in issue order, with their waits.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Returns the operations on a slower device than their neighbours.
    pub fn fallbacks(&self) -> &[Refusal] {
        &self.placement.refusals
    }

    /// Returns the bytes copied between devices per run. Counts expert weights completely, although
    /// a run may copy fewer.
    pub fn bytes_copied(&self) -> usize {
        self.lowered.copies.iter().map(|copy| copy.bytes).sum()
    }

    /// Returns the numbers of copies that go through host memory although neither end is host
    /// memory, because no device can make them.
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

    /// Returns the bytes of compute memory by memory type: `(name, bytes)`.
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

    /// Returns the lane that computes tensor `id`.
    pub(crate) fn lane(&self, id: TensorId) -> Lane {
        match self.lowered.devices[self.graph.memory_of(id).index()] {
            Some(device) if self.devices.is_asynchronous(device) => Lane::Device(device),
            _ => Lane::Host,
        }
    }

    /// Returns the asynchronous devices that write to the memory of `id` after its creation.
    pub(crate) fn writers(&self, id: TensorId) -> &[usize] {
        self.writers
            .get(&self.lowered.memory[id.index()])
            .map_or(&[], Vec::as_slice)
    }
}
