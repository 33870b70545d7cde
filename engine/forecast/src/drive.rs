//! Plans as tasks: the work of the program, of the devices, and of the links between them.
//!
//! The program issues a plan's actions in order. Work on host memory is done when the call returns.
//! Another machine gets messages and works in their order, and the program continues until it needs
//! a result. Runs therefore overlap as they do with the real scheduler.

use crate::events::{Kind, Resource, TaskId, Tasks};
use crate::exchange::{ExchangeKind, Ports, exchange, message};
use crate::machines::{AccessPath, Algorithm, Cluster, DeviceRates, Link};
use crate::work::work;
use samite_core::{Error, Graph, Result, TensorId};
use samite_meta::{Exchange, MetaDevice, Partition, PartitionStep};
use samite_sched::Plan;
use samite_sched::order::Work as Action;
use std::sync::Arc;

/// Resource of the program and of the host's processor.
const HOST: Resource = 0;
/// Bytes of a message besides its content.
const HEADER: f64 = 64.0;

/// Place of a plan's device.
enum DevicePlace {
    Host,
    /// A processor on host memory.
    Near(usize),
    Far(usize),
    Divided(Vec<usize>),
}

/// A plan with its devices located in a cluster.
pub(crate) struct LocatedPlan<'a> {
    plan: &'a Plan,
    seats: Vec<DevicePlace>,
    /// Partitions of the nodes of each split, if they are split.
    partitions: Vec<Option<Partition>>,
}

impl<'a> LocatedPlan<'a> {
    pub fn new(plan: &'a Plan, cluster: &Cluster) -> Result<Self> {
        let find = |name: &str| {
            cluster.member(name).ok_or_else(|| {
                Error::invalid(format!("device '{name}' is none of the file's machines"))
            })
        };
        let seat = |device: &Arc<dyn samite_core::Device>| {
            if let Some(meta) = device.as_any().downcast_ref::<MetaDevice>() {
                let members = meta.members().iter().map(|member| find(member.name()));
                return Ok(DevicePlace::Divided(members.collect::<Result<_>>()?));
            }
            Ok(match device.name() {
                "cpu" => DevicePlace::Host,
                name => {
                    let number = find(name)?;
                    match cluster.members[number].reached {
                        Some(_) => DevicePlace::Far(number),
                        None => DevicePlace::Near(number),
                    }
                }
            })
        };
        let seats = plan.devices().iter().map(seat).collect::<Result<_>>()?;
        let graph = &plan.lowered().graph;
        let partition = |split: &samite_sched::Split| {
            let device = plan.devices().get(split.device);
            let meta = device.as_any().downcast_ref::<MetaDevice>();
            meta.map(|meta| meta.partition(graph, &split.nodes))
                .transpose()
        };
        Ok(LocatedPlan {
            plan,
            seats,
            partitions: plan.splits().iter().map(partition).collect::<Result<_>>()?,
        })
    }

    /// Returns the machine of a device with its own memory.
    fn far(&self, device: usize) -> Option<usize> {
        match self.seats[device] {
            DevicePlace::Far(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the device whose memory contains a tensor.
    fn origin(&self, tensor: TensorId) -> usize {
        let lowered = self.plan.lowered();
        let devices = self.plan.devices();
        let base = lowered.graph.memory_of(tensor);
        match &lowered.graph.tensor(base).stored {
            Some(stored) => {
                let memory = stored.tensor().buffer.buffer_type();
                let mut all = devices.iter();
                all.position(|device| device.supports_buffer_type(memory))
                    .unwrap_or(devices.last())
            }
            None => lowered.devices[base.index()].unwrap_or(devices.last()),
        }
    }
}

/// Tasks of consecutive runs.
pub(crate) struct Drive<'a> {
    cluster: &'a Cluster,
    pub tasks: Tasks,
    ports: Ports,
    /// Last task of the program.
    host: Option<TaskId>,
    /// Last message to each machine.
    far: Vec<Option<TaskId>>,
    /// Bytes to send with the next message to each machine.
    pending: Vec<f64>,
    /// By run of the current plan, the last task of each action.
    ended: Vec<Vec<Option<TaskId>>>,
}

impl<'a> Drive<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        let members = cluster.members.len();
        Drive {
            cluster,
            tasks: Tasks::new(),
            ports: Ports::behind(1 + members),
            host: None,
            far: vec![None; members],
            pending: vec![0.0; members],
            ended: Vec::new(),
        }
    }

    /// Returns the resource of a machine.
    pub fn resource(machine: usize) -> Resource {
        1 + machine
    }

    fn reached(&self, machine: usize) -> Result<(AccessPath, Arc<Link>)> {
        let member = &self.cluster.members[machine];
        let reached = member.reached.clone();
        reached.ok_or_else(|| Error::invalid(format!("machine '{}' has no link", member.name)))
    }

    /// Waits for everything, before another plan.
    pub fn join(&mut self) {
        let all = self.far.iter().copied().flatten().chain(self.host);
        let all: Vec<_> = all.collect();
        self.host = Some(self.tasks.add(HOST, Kind::Compute, 0.0, 0.0, all));
        self.ended.clear();
    }

    /// Sends a message from the program to a machine.
    fn tell(&mut self, machine: usize, bytes: f64, waits: &[TaskId]) -> Result<TaskId> {
        let (_, link) = self.reached(machine)?;
        let to = Self::resource(machine);
        let port = [HOST, to, to];
        let after = self.host.into_iter().chain(waits.iter().copied());
        let bytes = bytes + HEADER;
        let there = message(&mut self.tasks, &mut self.ports, &link, port, bytes, after);
        // The program continues after sending, which is two tasks before.
        self.host = Some(there - 2);
        let after = self.far[machine].into_iter().chain([there]);
        // Machines process messages in order.
        let there = self.tasks.add(to, Kind::Message, 0.0, 0.0, after);
        self.far[machine] = Some(there);
        Ok(there)
    }

    /// Makes the program read from a machine, and wait for it.
    fn read(&mut self, machine: usize, bytes: f64, waits: &[TaskId]) -> Result<TaskId> {
        let (through, link) = self.reached(machine)?;
        let from = Self::resource(machine);
        if through == AccessPath::Rpc {
            self.tell(machine, 0.0, waits)?;
        }
        let after = self.far[machine].into_iter().chain(waits.iter().copied());
        let after = after.chain(self.host);
        let bytes = bytes + HEADER;
        let route = [from, HOST, from];
        let there = message(&mut self.tasks, &mut self.ports, &link, route, bytes, after);
        self.far[machine] = Some(there - 2);
        self.host = Some(there);
        Ok(there)
    }

    /// Adds a copy between a card and the host, made by the card.
    fn over_the_bus(&mut self, machine: usize, bytes: f64, waits: &[TaskId]) -> Result<TaskId> {
        let (_, link) = self.reached(machine)?;
        let to = Self::resource(machine);
        let after: Vec<_> = self.far[machine]
            .into_iter()
            .chain(self.host)
            .chain(waits.iter().copied())
            .collect();
        let there = message(
            &mut self.tasks,
            &mut self.ports,
            &link,
            [to, to, to],
            bytes,
            after,
        );
        self.far[machine] = Some(there);
        Ok(there)
    }

    fn is_bus(&self, machine: usize) -> bool {
        matches!(
            self.cluster.members[machine].reached,
            Some((AccessPath::Bus, _))
        )
    }

    fn copy(
        &mut self,
        known: &LocatedPlan<'_>,
        number: usize,
        waits: &[TaskId],
    ) -> Result<Option<TaskId>> {
        let copy = &known.plan.copies()[number];
        let lowered = known.plan.lowered();
        let from = known.far(known.origin(copy.from));
        let to = lowered.devices[copy.to.index()].and_then(|device| known.far(device));
        let mut bytes = copy.bytes as f64;
        if let Some(chosen) = copy.experts {
            let all = lowered.graph.tensor(copy.to).layout.shape()[2].max(1) as f64;
            let chosen = lowered.graph.tensor(chosen).layout.elements() as f64;
            bytes *= chosen.min(all) / all;
        }
        let mut end = None;
        match from {
            Some(machine) if self.is_bus(machine) => {
                let there = self.over_the_bus(machine, bytes, waits)?;
                // The next user of the data waits for it.
                self.host = Some(self.tasks.add(HOST, Kind::Compute, 0.0, 0.0, [there]));
                end = Some(there);
            }
            Some(machine) => end = Some(self.read(machine, bytes, waits)?),
            None => {}
        }
        match to {
            Some(machine) if self.is_bus(machine) => {
                end = Some(self.over_the_bus(machine, bytes, waits)?);
            }
            Some(machine) => match self.reached(machine)?.0 {
                AccessPath::Remote => {
                    self.pending[machine] += bytes;
                    let after: Vec<_> =
                        self.host.into_iter().chain(waits.iter().copied()).collect();
                    self.host = Some(self.tasks.add(HOST, Kind::Compute, 0.0, 0.0, after));
                }
                _ => end = Some(self.tell(machine, bytes, waits)?),
            },
            None => {}
        }
        if from.is_none() && to.is_none() {
            let seconds = 2.0 * bytes / self.cluster.host.results;
            end = Some(self.near(HOST, seconds, waits));
        }
        Ok(end)
    }

    /// Adds a computation of the program or of a processor of its machine.
    fn near(&mut self, resource: Resource, seconds: f64, waits: &[TaskId]) -> TaskId {
        let after: Vec<_> = self.host.into_iter().chain(waits.iter().copied()).collect();
        let done = self.tasks.add(resource, Kind::Compute, seconds, 0.0, after);
        self.host = Some(done);
        done
    }

    fn divided(
        &mut self,
        partition: &Partition,
        members: &[usize],
        seen: f64,
        waits: &[TaskId],
    ) -> Result<TaskId> {
        let by = self.cluster.exchange.clone().ok_or_else(|| {
            Error::invalid(
                "the file does not say how members exchange: add [exchange] with link and algorithm (direct, ring or doubling)",
            )
        })?;
        let resources: Vec<_> = members.iter().map(|&m| Self::resource(m)).collect();
        let first: Vec<_> = self.host.into_iter().chain(waits.iter().copied()).collect();
        let mut last = vec![first; members.len()];
        for step in &partition.steps {
            match step {
                PartitionStep::Run(nodes) => {
                    for (number, &member) in members.iter().enumerate() {
                        let device = &self.cluster.members[member].device;
                        let graph = &partition.graphs[number];
                        let seconds = seconds(graph, &nodes[number], device, seen)?;
                        let resource = resources[number];
                        let after = std::mem::take(&mut last[number]);
                        let done = self.tasks.add(resource, Kind::Compute, seconds, 0.0, after);
                        last[number].push(done);
                    }
                }
                PartitionStep::Exchange(collective) => {
                    let bytes = collective.layout.bytes() as f64;
                    let what = match collective.exchange {
                        Exchange::Sum => ExchangeKind::Sum,
                        Exchange::Gather => ExchangeKind::Gather,
                        Exchange::Broadcast => ExchangeKind::Broadcast,
                    };
                    let link: (&Link, Algorithm) = (&by.link, by.algorithm);
                    let exchanged = (what, bytes);
                    let (tasks, ports) = (&mut self.tasks, &mut self.ports);
                    exchange(tasks, ports, link, &resources, &mut last, exchanged);
                    // Each reads what came from all, and writes the result.
                    for (number, &member) in members.iter().enumerate() {
                        let device = &self.cluster.members[member].device;
                        let parts = match what {
                            ExchangeKind::Sum => members.len() as f64 + 1.0,
                            ExchangeKind::Gather | ExchangeKind::Broadcast => 2.0,
                        };
                        let seconds = parts * bytes / device.results;
                        let after = std::mem::take(&mut last[number]);
                        let done =
                            self.tasks
                                .add(resources[number], Kind::Compute, seconds, 0.0, after);
                        last[number].push(done);
                    }
                }
            }
        }
        let all: Vec<_> = last.into_iter().flatten().collect();
        let done = self.tasks.add(HOST, Kind::Compute, 0.0, 0.0, all);
        self.host = Some(done);
        Ok(done)
    }

    fn split(
        &mut self,
        known: &LocatedPlan<'_>,
        number: usize,
        seen: f64,
        waits: &[TaskId],
    ) -> Result<Option<TaskId>> {
        let split = &known.plan.splits()[number];
        let graph = &known.plan.lowered().graph;
        let cluster = self.cluster;
        Ok(Some(match &known.seats[split.device] {
            DevicePlace::Host => {
                let seconds = seconds(graph, &split.nodes, &cluster.host, seen)?;
                self.near(HOST, seconds, waits)
            }
            &DevicePlace::Near(machine) => {
                let device = &cluster.members[machine].device;
                let seconds = seconds(graph, &split.nodes, device, seen)?;
                self.near(Self::resource(machine), seconds, waits)
            }
            &DevicePlace::Far(machine) => {
                let device = &cluster.members[machine].device;
                let seconds = seconds(graph, &split.nodes, device, seen)?;
                let mut after: Vec<_> = waits.to_vec();
                if self.is_bus(machine) {
                    after.extend(self.host);
                } else {
                    let bytes = std::mem::take(&mut self.pending[machine]);
                    self.tell(machine, bytes, waits)?;
                }
                after.extend(self.far[machine]);
                let resource = Self::resource(machine);
                let done = self.tasks.add(resource, Kind::Compute, seconds, 0.0, after);
                self.far[machine] = Some(done);
                done
            }
            DevicePlace::Divided(members) => {
                let partition = known.partitions[number].as_ref();
                let partition =
                    partition.ok_or_else(|| Error::invalid("a divided split without its parts"))?;
                self.divided(partition, members, seen, waits)?
            }
        }))
    }

    /// Adds one more run of a plan, in which a token sees `seen` tokens on average. `reads` tells
    /// if the program reads the outputs.
    pub fn run(&mut self, known: &LocatedPlan<'_>, seen: f64, reads: bool) -> Result<()> {
        let run = self.ended.len();
        self.ended.push(Vec::new());
        for action in known.plan.actions() {
            let waits = action.waits.iter().filter_map(|wait| {
                let earlier = run.checked_sub(wait.runs_ago)?;
                *self.ended.get(earlier)?.get(wait.action)?
            });
            let waits: Vec<_> = waits.collect();
            let end = match action.work {
                Action::Inputs => self.host,
                Action::Copy(number) => self.copy(known, number, &waits)?,
                Action::Split(number) => self.split(known, number, seen, &waits)?,
            };
            self.ended[run].push(end);
        }
        if reads {
            let graph = &known.plan.lowered().graph;
            for id in graph.ids() {
                let tensor = graph.tensor(id);
                if !(tensor.flags.output && tensor.is_computed()) {
                    continue;
                }
                let bytes = tensor.layout.bytes() as f64;
                match known.far(known.origin(id)) {
                    Some(machine) if self.is_bus(machine) => {
                        let there = self.over_the_bus(machine, bytes, &[])?;
                        self.host = Some(there);
                    }
                    Some(machine) => {
                        self.read(machine, bytes, &[])?;
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}

/// Returns the seconds that nodes take on a device.
fn seconds(graph: &Graph, nodes: &[TensorId], device: &DeviceRates, seen: f64) -> Result<f64> {
    let mut sum = 0.0;
    for &id in nodes {
        if let Some(work) = work(graph.node(id), seen) {
            sum += work.seconds(device)?;
        }
    }
    Ok(sum)
}
