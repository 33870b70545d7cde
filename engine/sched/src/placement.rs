//! Placement: the device that computes each node, and the reason.
//!
//! Placement is a pure function from (graph, devices, assignments, options) to a device and a
//! [`Reason`] for each tensor. Its passes are those of ggml's scheduler:
//!
//! 1. Stored tensors decide. A node that writes to a stored tensor runs where that tensor is
//!    stored. So does a node with weights, unless a faster device wants to take it over
//!    (*offload*). Inputs start on the last device.
//! 2. Decisions spread to undecided neighbours, from faster devices first, forwards before
//!    backwards.
//! 3. The remaining nodes go to the device with most of their operands. Decided nodes are
//!    *upgraded* to a preferred device on the same memory, so that a BLAS library takes matrix
//!    products from the CPU.
//! 4. Views follow their memory, leaves follow their first user.
//!
//! A fifth pass is specific to samite. A cheap node between two devices moves to a device that uses
//! its result or has its operands, if this reduces the copied bytes. Otherwise a layer's first norm
//! would stay on the previous layer's device, and both its operand and its result would be copied.
//! The sum at a layer's end would be on the next layer's device, and both of its operands would be
//! copied.

use crate::devices::DeviceSet;
use crate::options::{Assignment, Assignments, Fallback, Options};
use samite_core::{DeviceKind, Error, Graph, Op, Result, StoredTensor, Support, TensorId, Usage};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Reason for the device of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The application assigned it.
    Assigned,
    /// It is stored there, or writes to a tensor that is stored there.
    Stored {
        /// Name of the stored tensor.
        tensor: String,
    },
    /// Inputs start on the last device.
    Input,
    /// Its weights are there.
    Weights {
        /// Name of the weight.
        tensor: String,
    },
    /// Its weights are in host memory, but this faster device wants it.
    Offloaded {
        /// Name of the weight.
        tensor: String,
    },
    /// A neighbour in the graph is on that device.
    Neighbour {
        /// The neighbour.
        of: TensorId,
    },
    /// Most of its operands are on that device.
    Operands {
        /// Number of these operands.
        count: usize,
    },
    /// This preferred device works on the same memory.
    Upgraded {
        /// The device from which it was upgraded.
        from: usize,
    },
    /// Fewer bytes are copied than on the device with its operands.
    Nearer {
        /// Number of bytes saved.
        saved: usize,
    },
    /// It lies in the memory of this tensor.
    SameMemory {
        /// The owner of the memory.
        of: TensorId,
    },
    /// Its first user is on that device.
    User {
        /// The user.
        of: TensorId,
    },
    /// The first device that supports it.
    FirstSupporting,
}

impl Reason {
    /// Returns the kind of reason, worded to follow a number of nodes: `12 next to others`.
    pub(crate) fn summary(&self) -> &'static str {
        match self {
            Reason::Assigned => "assigned",
            Reason::Stored { .. } => "where they write to",
            Reason::Input => "inputs",
            Reason::Weights { .. } => "where their weights are",
            Reason::Offloaded { .. } => "taken over from the host",
            Reason::Neighbour { .. } => "next to others",
            Reason::Operands { .. } => "where their operands are",
            Reason::Upgraded { .. } => "preferred on the same memory",
            Reason::Nearer { .. } => "where less is copied",
            Reason::SameMemory { .. } => "where their memory is",
            Reason::User { .. } => "where they are used",
            Reason::FirstSupporting => "on the first device that can",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Assigned => f.write_str("assigned"),
            Reason::Stored { tensor } => write!(f, "'{tensor}' is stored there"),
            Reason::Input => f.write_str("input"),
            Reason::Weights { tensor } => write!(f, "weights '{tensor}' are there"),
            Reason::Offloaded { tensor } => {
                write!(f, "takes over weights '{tensor}' from the host")
            }
            Reason::Neighbour { of } => write!(f, "next to {of}"),
            Reason::Operands { count } => write!(f, "{count} operands are there"),
            Reason::Upgraded { .. } => f.write_str("preferred on the same memory"),
            Reason::Nearer { saved } => write!(f, "copies {saved} bytes less there"),
            Reason::SameMemory { of } => write!(f, "in the memory of {of}"),
            Reason::User { of } => write!(f, "used by {of}"),
            Reason::FirstSupporting => f.write_str("first device that can"),
        }
    }
}

/// A device's refusal of a node whose neighbours it computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The node.
    pub node: TensorId,
    /// The device that refused it.
    pub device: usize,
    /// Reason of the refusal.
    pub reason: String,
}

/// Device and reason of every needed tensor.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// Devices by position in the graph. `None` for unneeded tensors.
    pub devices: Vec<Option<usize>>,
    /// Reasons by position in the graph.
    pub reasons: Vec<Option<Reason>>,
    /// Computed nodes that a preferred neighbour device refused.
    pub refusals: Vec<Refusal>,
}

struct Placer<'a> {
    graph: &'a Graph,
    devices: &'a DeviceSet,
    options: &'a Options,
    live: &'a [bool],
    placement: Placement,
    /// Results of `supports`, by device and tensor. Empty for devices that were not queried yet.
    supports: Vec<Vec<Option<Support>>>,
    /// The contents of `placement.refusals`, for lookup.
    refused: BTreeSet<(TensorId, usize)>,
}

/// Uses of tensors.
struct TensorUses {
    /// Computed nodes that read each tensor.
    readers: Vec<Vec<TensorId>>,
    /// Views of each tensor.
    views: Vec<Vec<TensorId>>,
}

impl TensorUses {
    /// Returns a node's result and its views.
    fn results(&self, id: TensorId) -> impl Iterator<Item = TensorId> + '_ {
        std::iter::once(id).chain(self.views[id.index()].iter().copied())
    }

    /// Returns the nodes that read a node's result.
    fn users(&self, id: TensorId) -> impl Iterator<Item = TensorId> + '_ {
        self.results(id)
            .flat_map(|result| self.readers[result.index()].iter().copied())
    }
}

/// Places the live tensors of `graph`.
///
/// # Errors
/// [`Error::Placement`] if no device can compute a tensor, or not the one that must.
/// [`Error::InvalidArgument`] for an assignment with an invalid tensor or device.
pub fn place(
    graph: &Graph,
    live: &[bool],
    devices: &DeviceSet,
    assignments: &Assignments,
    options: &Options,
) -> Result<Placement> {
    let n = graph.len();
    let mut placer = Placer {
        graph,
        devices,
        options,
        live,
        placement: Placement {
            devices: vec![None; n],
            reasons: vec![None; n],
            refusals: Vec::new(),
        },
        supports: vec![Vec::new(); devices.len()],
        refused: BTreeSet::new(),
    };
    placer.assign(assignments)?;
    placer.by_stored()?;
    placer.expand();
    placer.by_operands_and_upgrade();
    placer.views_and_leaves()?;
    placer.move_across_boundaries();
    placer.check_fallback()?;
    Ok(placer.placement)
}

impl<'a> Placer<'a> {
    fn ids(&self) -> impl DoubleEndedIterator<Item = TensorId> + use<'a> {
        let live = self.live;
        self.graph.ids().filter(move |id| live[id.index()])
    }

    fn device(&self, id: TensorId) -> Option<usize> {
        self.placement.devices[id.index()]
    }

    fn set(&mut self, id: TensorId, device: usize, reason: Reason) {
        self.placement.devices[id.index()] = Some(device);
        self.placement.reasons[id.index()] = Some(reason);
    }

    /// Returns whether `device` can compute `id`, including writes to its destination. The first
    /// query of a device covers all nodes at once.
    fn supports(&mut self, id: TensorId, device: usize) -> Support {
        if self.supports[device].is_empty() {
            let graph = self.graph;
            let is_computed = |id: &TensorId| graph.tensor(*id).is_computed();
            let ids: Vec<_> = self.ids().filter(is_computed).collect();
            let answers = self.devices.get(device).supports_each(graph, &ids);
            let mut known = vec![None; graph.len()];
            for (id, answer) in ids.into_iter().zip(answers) {
                known[id.index()] = Some(self.with_written(id, device, answer));
            }
            self.supports[device] = known;
        }
        if let Some(known) = &self.supports[device][id.index()] {
            return known.clone();
        }
        let answer = self.devices.get(device).supports(self.graph.node(id));
        let answer = self.with_written(id, device, answer);
        self.supports[device][id.index()] = Some(answer.clone());
        answer
    }

    /// Returns the `answer` of `device` for `id`, or a refusal if the device cannot write to the
    /// destination.
    fn with_written(&self, id: TensorId, device: usize, answer: Support) -> Support {
        if !answer.is_yes() {
            return answer;
        }
        let written = self.graph.tensor(id).written();
        for stored in written.filter_map(|(_, source)| self.graph.node(source).stored()) {
            let buffer = &stored.tensor().buffer;
            if !buffer.is_writable() {
                return Support::no(format!("'{}' is in read-only memory", stored.name()));
            }
            if !self.devices.can_use(device, stored) {
                return Support::no(format!(
                    "it cannot write to '{}' in {}",
                    stored.name(),
                    buffer.buffer_type().name()
                ));
            }
        }
        answer
    }

    /// Records that `device` refuses `id`, which would belong there. Accelerators are expected to
    /// support only some operations.
    fn refuse(&mut self, id: TensorId, device: usize, reason: String) {
        let is_expected = self.devices.get(device).kind() == DeviceKind::Accelerator;
        if !is_expected && self.refused.insert((id, device)) {
            self.placement.refusals.push(Refusal {
                node: id,
                device,
                reason,
            });
        }
    }

    /// Returns the answers of all devices for `id`, for messages.
    fn all_reasons(&mut self, id: TensorId) -> String {
        (0..self.devices.len())
            .map(|device| match self.supports(id, device) {
                Support::Yes => format!("{}: yes", self.devices.get(device).name()),
                Support::No(reason) => format!("{}: {reason}", self.devices.get(device).name()),
            })
            .collect::<Vec<_>>()
            .join("; ")
    }

    fn describe(&self, id: TensorId) -> String {
        describe(self.graph, id)
    }

    fn assign(&mut self, assignments: &Assignments) -> Result<()> {
        for &Assignment {
            tensor: id,
            device,
            yields,
        } in assignments.iter()
        {
            if id.index() >= self.graph.len() || device >= self.devices.len() {
                return Err(Error::invalid(format!(
                    "assignment of tensor {id} to device number {device}: there is no such thing"
                )));
            }
            if !self.live[id.index()] {
                continue;
            }
            if self.graph.tensor(id).is_computed()
                && let Support::No(reason) = self.supports(id, device)
            {
                return Err(Error::Placement(
                    format!(
                        "{} is assigned to {}, which refuses: {reason}",
                        self.describe(id),
                        self.devices.get(device).name()
                    )
                    .into(),
                ));
            }
            let taken = if yields {
                self.taken_over(id, device)
            } else {
                None
            };
            let (device, reason) = taken.unwrap_or((device, Reason::Assigned));
            self.set(id, device, reason);
        }
        Ok(())
    }

    fn by_stored(&mut self) -> Result<()> {
        for id in self.ids() {
            if self.device(id).is_some() {
                continue;
            }
            let node = self.graph.node(id);
            let computed = node.tensor().is_computed();
            if let Some(stored) = node.stored() {
                let candidates: Vec<_> = (0..self.devices.len())
                    .filter(|&d| self.devices.can_use(d, stored))
                    .collect();
                let found = candidates
                    .iter()
                    .copied()
                    .find(|&d| !computed || self.supports(id, d).is_yes());
                let Some(device) = found else {
                    let memory = stored.tensor().buffer.buffer_type().name().to_owned();
                    let message = if candidates.is_empty() {
                        format!(
                            "tensor '{}' is in memory '{memory}', which none of the devices ({}) can use: add the device that owns it",
                            stored.name(),
                            self.devices.names()
                        )
                    } else {
                        format!(
                            "no device can run {} on memory '{memory}': {}",
                            self.describe(id),
                            self.all_reasons(id)
                        )
                    };
                    return Err(Error::Placement(message.into()));
                };
                self.set(
                    id,
                    device,
                    Reason::Stored {
                        tensor: stored.name().to_owned(),
                    },
                );
            } else if node.tensor().flags.input {
                self.set(id, self.devices.last(), Reason::Input);
            } else if computed {
                self.by_weights(id);
            }
        }
        Ok(())
    }

    /// Returns the weights that determine where `id` is computed.
    fn weights(&self, id: TensorId) -> Option<&'a Arc<StoredTensor>> {
        let node = self.graph.node(id);
        // The weights of these operations are too small to determine the device.
        if matches!(node.op(), Op::Rope(_) | Op::FlashAttn { .. }) {
            return None;
        }
        node.tensor()
            .operands()
            .filter_map(|(_, source)| self.graph.node(source).stored())
            .find(|stored| stored.tensor().buffer.usage() == Usage::Weights)
    }

    /// Returns the faster device that takes `id` over from `owner`, the host, which has its
    /// weights. Only this function decides about offload.
    fn taken_over(&mut self, id: TensorId, owner: usize) -> Option<(usize, Reason)> {
        // This includes weights in a layout of the host's device: a copy transfers the tensor's
        // content, not its layout.
        if !(self.options.offload && self.devices.is_host(owner)) {
            return None;
        }
        let tensor = self.weights(id)?.name().to_owned();
        let node = self.graph.node(id);
        let device = (0..owner).find(|&device| {
            self.devices.get(device).wants_offload(node) && self.supports(id, device).is_yes()
        })?;
        Some((device, Reason::Offloaded { tensor }))
    }

    fn by_weights(&mut self, id: TensorId) {
        let Some(stored) = self.weights(id) else {
            return;
        };
        let Some(owner) = (0..self.devices.len())
            .find(|&d| self.devices.can_use(d, stored) && self.supports(id, d).is_yes())
        else {
            for device in 0..self.devices.len() {
                if let (true, Support::No(reason)) = (
                    self.devices.can_use(device, stored),
                    self.supports(id, device),
                ) {
                    self.refuse(id, device, reason.into_owned());
                }
            }
            return;
        };
        let (device, reason) = self.taken_over(id, owner).unwrap_or_else(|| {
            let tensor = stored.name().to_owned();
            (owner, Reason::Weights { tensor })
        });
        self.set(id, device, reason);
    }

    fn expand(&mut self) {
        for with_host in [false, true] {
            for backwards in [false, true] {
                let ids: Vec<_> = if backwards {
                    self.ids().rev().collect()
                } else {
                    self.ids().collect()
                };
                let mut current: Option<(usize, TensorId)> = None;
                for id in ids {
                    if !self.graph.tensor(id).is_computed() {
                        continue;
                    }
                    match (self.device(id), current) {
                        (Some(device), _) => {
                            current = (with_host || !self.devices.is_host(device))
                                .then_some((device, id));
                        }
                        (None, Some((device, of))) => match self.supports(id, device) {
                            Support::Yes => self.set(id, device, Reason::Neighbour { of }),
                            Support::No(reason) => {
                                self.refuse(id, device, reason.into_owned());
                            }
                        },
                        (None, None) => {}
                    }
                }
            }
        }
    }

    /// Returns whether `device` can read `id` at its presumed place.
    fn operand_is_there(&self, id: TensorId, device: usize) -> bool {
        if let Some(stored) = self.graph.node(id).stored() {
            return self.devices.can_use(device, stored);
        }
        let owner = self
            .device(id)
            .or_else(|| self.device(self.graph.memory_of(id)));
        owner.is_some_and(|owner| self.devices.shares_memory(device, owner))
    }

    fn by_operands_and_upgrade(&mut self) {
        for id in self.ids() {
            let tensor = self.graph.tensor(id);
            if !tensor.is_computed() {
                continue;
            }
            match self.device(id) {
                None => {
                    let mut best: Option<(usize, usize)> = None;
                    for device in 0..self.devices.len() {
                        if !self.supports(id, device).is_yes() {
                            continue;
                        }
                        let count = tensor
                            .operands()
                            .filter(|&(_, source)| self.operand_is_there(source, device))
                            .count();
                        if best.is_none_or(|(_, most)| count > most) {
                            best = Some((device, count));
                        }
                    }
                    if let Some((device, count)) = best {
                        self.set(id, device, Reason::Operands { count });
                    }
                }
                Some(current) if self.placement.reasons[id.index()] != Some(Reason::Assigned) => {
                    for device in 0..current {
                        if self.devices.memory_of(device) == self.devices.memory_of(current)
                            && self.supports(id, device).is_yes()
                            && tensor
                                .operands()
                                .all(|(_, source)| self.operand_is_there(source, device))
                        {
                            self.set(id, device, Reason::Upgraded { from: current });
                            break;
                        }
                    }
                }
                Some(_) => {}
            }
        }
    }

    fn views_and_leaves(&mut self) -> Result<()> {
        for id in self.ids() {
            let tensor = self.graph.tensor(id);
            if tensor.is_computed() && self.device(id).is_none() {
                let Some(device) = (0..self.devices.len()).find(|&d| self.supports(id, d).is_yes())
                else {
                    return Err(Error::Placement(
                        format!(
                            "no device can run {}: {}",
                            self.describe(id),
                            self.all_reasons(id)
                        )
                        .into(),
                    ));
                };
                self.set(id, device, Reason::FirstSupporting);
            }
            // Unplaced leaves follow their first user. A destination follows its first writer.
            if let (true, Some(device)) = (tensor.is_computed(), self.device(id)) {
                for (_, source) in tensor.operands() {
                    let base = self.graph.memory_of(source);
                    if matches!(self.graph.tensor(base).op, Op::Leaf) && self.device(base).is_none()
                    {
                        self.set(base, device, Reason::User { of: id });
                    }
                }
            }
        }
        for id in self.ids() {
            let tensor = self.graph.tensor(id);
            let base = self.graph.memory_of(id);
            if tensor.op.is_view() {
                let device = self.device(base).unwrap_or(self.devices.last());
                self.set(id, device, Reason::SameMemory { of: base });
            } else if let (false, Some(device), Some(owner)) = (
                tensor.op.written_sources().is_empty(),
                self.device(id),
                self.device(base),
            ) {
                // A device that writes must be able to use the destination's memory.
                if self.graph.tensor(base).stored.is_none()
                    && !self.devices.shares_memory(device, owner)
                {
                    if self.placement.reasons[id.index()] == Some(Reason::Assigned) {
                        return Err(Error::Placement(
                            format!(
                                "{} is assigned to {}, but writes to memory of {}",
                                self.describe(id),
                                self.devices.get(device).name(),
                                self.devices.get(owner).name()
                            )
                            .into(),
                        ));
                    }
                    if let Support::No(reason) = self.supports(id, owner) {
                        return Err(Error::Placement(
                            format!(
                                "{} writes to memory of {}, which cannot run it: {reason}",
                                self.describe(id),
                                self.devices.get(owner).name()
                            )
                            .into(),
                        ));
                    }
                    self.set(id, owner, Reason::SameMemory { of: base });
                }
            } else if self.device(id).is_none() {
                // A leaf that only views use.
                self.set(id, self.devices.last(), Reason::FirstSupporting);
            }
        }
        Ok(())
    }

    /// Moves cheap nodes to a device of their operands or users if this reduces the copied bytes:
    /// once in graph order, once in reverse.
    fn move_across_boundaries(&mut self) {
        let mut neighbours = TensorUses {
            readers: vec![Vec::new(); self.graph.len()],
            views: vec![Vec::new(); self.graph.len()],
        };
        for id in self.ids() {
            let tensor = self.graph.tensor(id);
            if tensor.is_computed() {
                for (_, source) in tensor.operands() {
                    neighbours.readers[source.index()].push(id);
                }
            }
            if let Some(view) = tensor.view {
                neighbours.views[view.base.index()].push(id);
            }
        }
        let ids: Vec<_> = self.ids().filter(|&id| self.is_cheap(id)).collect();
        // Forwards first: this moves a layer's first norm and then its input to the layer's device.
        // Other readers of the input then have no reason to be elsewhere.
        for &id in ids.iter().chain(ids.iter().rev()) {
            self.move_nearer(id, &neighbours);
        }
    }

    /// Returns whether a node costs less than the copies for it, and is not bound to a device.
    fn is_cheap(&self, id: TensorId) -> bool {
        let tensor = self.graph.tensor(id);
        let is_free = matches!(
            self.placement.reasons[id.index()],
            Some(Reason::Neighbour { .. } | Reason::Operands { .. } | Reason::FirstSupporting)
        );
        let is_expensive = matches!(
            tensor.op,
            Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttn { .. }
        );
        let is_new = tensor.is_computed() && tensor.view.is_none();
        is_new && is_free && !is_expensive && !tensor.flags.output
    }

    fn move_nearer(&mut self, id: TensorId, neighbours: &TensorUses) {
        let Some(here) = self.device(id) else { return };
        let operands = self.graph.tensor(id).operands();
        let operands = operands.filter_map(|(_, source)| self.device(source));
        let users = neighbours.users(id).filter_map(|user| self.device(user));
        let mut candidates: Vec<usize> = users.chain(operands).collect();
        candidates.sort_unstable();
        candidates.dedup();
        let now = self.bytes_copied(id, here, neighbours);
        let best = candidates
            .into_iter()
            .map(|there| (self.bytes_copied(id, there, neighbours), there))
            .filter(|&(then, _)| then < now)
            .min();
        let Some((then, there)) = best else { return };
        if self.supports(id, there).is_yes() {
            self.set(id, there, Reason::Nearer { saved: now - then });
            for &view in &neighbours.views[id.index()] {
                self.set(view, there, Reason::SameMemory { of: id });
            }
        }
    }

    /// Returns the bytes that are copied if `id` is computed on `device`: operands that no other
    /// node needs there, and results for other devices.
    fn bytes_copied(&self, id: TensorId, device: usize, neighbours: &TensorUses) -> usize {
        let bytes = |id: TensorId| self.graph.tensor(id).layout.bytes();
        let is_copied = |source: &TensorId| {
            let mut others = neighbours.readers[source.index()].iter();
            !self.operand_is_there(*source, device)
                && !others.any(|&user| user != id && self.device(user) == Some(device))
        };
        let mut operands: Vec<TensorId> = self.graph.tensor(id).operands().map(|o| o.1).collect();
        operands.sort_unstable();
        operands.dedup();
        let operands: usize = operands.into_iter().filter(is_copied).map(bytes).sum();
        let results = neighbours.results(id).map(|result| {
            let users = neighbours.readers[result.index()].iter();
            let users = users.filter_map(|&user| self.device(user));
            let mut memories: Vec<usize> = users
                .filter(|&user| !self.devices.shares_memory(user, device))
                .map(|user| self.devices.memory_of(user))
                .collect();
            memories.sort_unstable();
            memories.dedup();
            memories.len() * bytes(result)
        });
        operands + results.sum::<usize>()
    }

    fn check_fallback(&mut self) -> Result<()> {
        let devices = &self.placement.devices;
        self.placement.refusals.retain(|refusal| {
            devices[refusal.node.index()].is_some_and(|device| refusal.device < device)
        });
        let count = self.placement.refusals.len();
        match self.placement.refusals.first() {
            Some(first) if self.options.fallback == Fallback::Deny => {
                let example = self.placement.describe(first, self.graph, self.devices);
                Err(Error::Placement(format!("{count} operations fall back to a slower device, which is denied; first: {example}").into()))
            }
            _ => Ok(()),
        }
    }
}

impl Placement {
    /// Returns a refusal as text: node, device, reason, and the device that is used instead.
    pub(crate) fn describe(&self, refusal: &Refusal, graph: &Graph, devices: &DeviceSet) -> String {
        let instead = self.devices[refusal.node.index()];
        format!(
            "{} does not run on {} ({}) and falls back to {}",
            describe(graph, refusal.node),
            devices.get(refusal.device).name(),
            refusal.reason,
            instead.map_or("nothing", |device| devices.get(device).name())
        )
    }
}

/// Returns a tensor as text: number, name and operation.
fn describe(graph: &Graph, id: TensorId) -> String {
    let tensor = graph.tensor(id);
    match &*tensor.name {
        "" => format!("{id} ({})", tensor.op),
        name => format!("{id} '{name}' ({})", tensor.op),
    }
}
