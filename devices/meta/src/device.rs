//! The device.

use crate::comm::ProcessGroup;
use crate::local_plan::LocalPlan;
use crate::memory::{MemberMemory, Members, MetaMemory};
use crate::partition::{Leaf, Partition, Task};
use crate::stand_in;
use crate::state::SplitState;
use crate::stream::MetaStream;
use samite_core::{
    BufferType, Capabilities, Device, DeviceKind, Error, Graph, MemoryInfo, Node, Result,
    StoredTensor, Stream, Support, TensorId, same_buffer_type,
};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of a device with several members.
#[derive(Clone, Debug)]
pub struct MetaOptions {
    /// Name of the device.
    pub name: String,
    /// Relative shares of the members; equal by default.
    pub ratios: Option<Vec<f32>>,
    /// Time that members wait for each other before they report a failure.
    pub deadline: Duration,
}

impl Default for MetaOptions {
    fn default() -> Self {
        MetaOptions {
            name: "meta".to_owned(),
            ratios: None,
            deadline: Duration::from_secs(30),
        }
    }
}

/// Maximum number of members of a device.
pub(crate) const MAX_MEMBERS: usize = 64;

/// Several devices combined into one.
pub struct MetaDevice {
    pub(crate) name: String,
    pub(crate) members: Arc<Members>,
    pub(crate) deadline: Duration,
    /// The process group, if each process has one member.
    pub(crate) group: Option<ProcessGroup>,
    plain: Arc<MetaMemory>,
    packed: Arc<MetaMemory>,
    plain_type: Arc<dyn BufferType>,
    packed_type: Arc<dyn BufferType>,
    member_memories: Vec<Arc<dyn BufferType>>,
    alike: bool,
}

impl fmt::Debug for MetaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetaDevice")
            .field("name", &self.name)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

/// Spins of a waiting member before it sleeps, if each has its own processor: some tens of
/// microseconds.
const SPINS: usize = 5_000;
/// Spins if members share processors. Spinning would take time from the member that others wait
/// for.
const FEW_SPINS: usize = 50;

impl MetaDevice {
    /// Creates a device from `members`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `members` is empty or has duplicates, for members that
    /// cannot compute whole graphs, and for ratios that do not match.
    pub fn new(members: Vec<Arc<dyn Device>>, options: MetaOptions) -> Result<Arc<Self>> {
        Self::with_members(members, None, options)
    }

    /// Creates a device from one device of each process in a group. `own` is this process's device;
    /// `host` names its machine. All processes call this at the same time with the
    /// same options, and use the device in the same way from then on.
    ///
    /// Each process plans for all members and computes as its own member. Inputs and outputs of its
    /// graphs are whole in each process. Stored tensors are written as a whole, and each process
    /// keeps its member's shard; the shards of other members cannot be read.
    ///
    /// # Errors
    /// Returns the errors of [`new`](MetaDevice::new). Also fails if a process cannot continue or
    /// does not arrive.
    pub fn among(
        own: &Arc<dyn Device>,
        group: ProcessGroup,
        host: &str,
        options: MetaOptions,
    ) -> Result<Arc<Self>> {
        let members = stand_in::members(own, &group, host)?;
        Self::with_members(members, Some(group), options)
    }

    fn with_members(
        members: Vec<Arc<dyn Device>>,
        group: Option<ProcessGroup>,
        options: MetaOptions,
    ) -> Result<Arc<Self>> {
        let wrong = |why: String| Err(Error::invalid(format!("device '{}': {why}", options.name)));
        if members.is_empty() || members.len() > MAX_MEMBERS {
            return wrong(format!("it needs 1 to {MAX_MEMBERS} members"));
        }
        for (i, member) in members.iter().enumerate() {
            if members[..i].iter().any(|m| m.name() == member.name()) {
                return wrong(format!("member '{}' is named twice", member.name()));
            }
            match member.kind() {
                DeviceKind::Accelerator => {
                    return wrong(format!(
                        "'{}' takes some operations only and cannot be a member",
                        member.name()
                    ));
                }
                DeviceKind::Meta => {
                    return wrong(format!("'{}' has members itself", member.name()));
                }
                DeviceKind::Cpu | DeviceKind::Gpu | DeviceKind::IntegratedGpu => {}
            }
        }
        let ratios = options.ratios.unwrap_or_else(|| vec![1.0; members.len()]);
        if ratios.len() != members.len() {
            return wrong(format!(
                "there are {} ratios for {} members: name one for each",
                ratios.len(),
                members.len()
            ));
        }
        let is_good = |&ratio: &f32| ratio.is_finite() && ratio >= 0.0;
        if !ratios.iter().all(is_good) || ratios.iter().sum::<f32>() <= 0.0 {
            return wrong("ratios must be finite and not negative, and not all 0".to_owned());
        }
        let kind = |member: &Arc<dyn Device>| (member.kind(), member.description());
        let alike = members
            .iter()
            .all(|member| kind(member) == kind(&members[0]));
        let here = match &group {
            None => 0..members.len(),
            Some(group) => group.rank()..group.rank() + 1,
        };
        let member_memories = members
            .iter()
            .enumerate()
            .map(|(number, member)| {
                Arc::new(MemberMemory {
                    name: member.name().to_owned(),
                    inner: member.buffer_type(),
                    is_here: here.contains(&number),
                }) as _
            })
            .collect();
        let members = Arc::new(Members {
            devices: members,
            ratios,
            here,
        });
        let plain = MetaMemory::new(options.name.clone(), &members, false);
        let packed = MetaMemory::new(format!("{}-packed", options.name), &members, true);
        Ok(Arc::new(MetaDevice {
            name: options.name,
            deadline: options.deadline,
            group,
            plain_type: Arc::clone(&plain) as _,
            packed_type: Arc::clone(&packed) as _,
            plain,
            packed,
            member_memories,
            members,
            alike,
        }))
    }

    /// Returns the members.
    pub fn members(&self) -> &[Arc<dyn Device>] {
        &self.members.devices
    }

    /// Returns the relative share of each member.
    pub fn ratios(&self) -> &[f32] {
        &self.members.ratios
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn plain_memory(&self) -> &MetaMemory {
        &self.plain
    }

    /// Returns the members that compute in this process.
    pub(crate) fn here(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.members.devices[self.members.here.clone()].iter()
    }

    /// Returns the number of spins of a waiting member before it sleeps.
    pub(crate) fn spins(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        if self.members.here.len() <= processors {
            SPINS
        } else {
            FEW_SPINS
        }
    }

    /// Returns the members' shards of a stored tensor.
    fn stored(&self, stored: &StoredTensor) -> Result<Leaf> {
        let own = stored.tensor().buffer.buffer_type();
        let memory = match () {
            () if same_buffer_type(own, &self.plain_type) => &self.plain,
            () if same_buffer_type(own, &self.packed_type) => &self.packed,
            () => {
                return Err(Error::unsupported(
                    &self.name,
                    format!("'{}' in memory '{}'", stored.name(), own.name()),
                    "its members cannot reach it",
                ));
            }
        };
        let (state, locals) = memory.locals(stored)?;
        Ok(Leaf {
            state,
            stored: Some(locals),
        })
    }

    /// Divides nodes of a graph among the members.
    ///
    /// # Errors
    /// Returns the errors of [`Partition::new`].
    pub fn partition(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Partition> {
        let escaping = graph.needed_outside(nodes);
        let task = Task {
            graph,
            nodes,
            escaping: &escaping,
            members: self.members.len(),
            alike: self.alike,
        };
        Partition::new(&task, &|id| match &graph.tensor(id).stored {
            Some(stored) => self.stored(stored),
            None => Ok(Leaf {
                state: SplitState::Mirrored,
                stored: None,
            }),
        })
    }

    /// Returns the members' plans for a divided graph.
    pub(crate) fn plans(&self, partition: &Partition) -> Result<Vec<LocalPlan>> {
        let members = self.members.devices.iter().enumerate();
        members
            .map(|(member, device)| LocalPlan::new(partition, member, &**device))
            .collect()
    }

    /// Returns whether the members support their parts of nodes.
    fn supports_parts(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let partition = match self.partition(graph, nodes) {
            Ok(partition) => partition,
            // Try the nodes one by one to find the one that fails.
            Err(error) => {
                return match nodes {
                    [_] => vec![Support::no(error.to_string())],
                    nodes => nodes
                        .iter()
                        .flat_map(|&id| self.supports_parts(graph, &[id]))
                        .collect(),
                };
            }
        };
        let mut refused: BTreeMap<TensorId, String> = BTreeMap::new();
        for (member, device) in self.members.devices.iter().enumerate() {
            let (locals, origins): (Vec<_>, Vec<_>) = partition.origins[member].iter().unzip();
            let answers = device.supports_each(&partition.graphs[member], &locals);
            for (origin, answer) in origins.into_iter().zip(answers) {
                if let Support::No(reason) = answer {
                    let reason = format!("{}: {reason}", device.name());
                    refused.entry(origin).or_insert(reason);
                }
            }
        }
        nodes
            .iter()
            .map(|id| match refused.remove(id) {
                Some(reason) => Support::no(reason),
                None => Support::Yes,
            })
            .collect()
    }
}

impl Device for MetaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        let names = self.members.devices.iter().zip(&self.members.ratios);
        let names: Vec<_> = names
            .map(|(device, ratio)| format!("{} ({ratio})", device.name()))
            .collect();
        format!("tensors divided among {}", names.join(", "))
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Meta
    }

    fn memory(&self) -> MemoryInfo {
        // Members on the same hardware share its memory, so count it once.
        let mut counted: Vec<String> = Vec::new();
        let mut sum = MemoryInfo {
            free: Some(0),
            total: Some(0),
        };
        for device in &self.members.devices {
            if let Some(id) = device.physical_id() {
                if counted.contains(&id) {
                    continue;
                }
                counted.push(id);
            }
            let more = device.memory();
            let add = |a: Option<usize>, b: Option<usize>| Some(a?.saturating_add(b?));
            sum = MemoryInfo {
                free: add(sum.free, more.free),
                total: add(sum.total, more.total),
            };
        }
        sum
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.plain_type)
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        vec![Arc::clone(&self.packed_type)]
    }

    /// Returns whether the members can compute the whole node.
    /// [`supports_each`](Device::supports_each) checks their parts.
    fn supports(&self, node: Node<'_>) -> Support {
        for device in &self.members.devices {
            if let Support::No(reason) = device.supports(node) {
                return Support::no(format!("{}: {reason}", device.name()));
            }
        }
        Support::Yes
    }

    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let mut answers = self.supports_parts(graph, nodes);
        for (&id, answer) in nodes.iter().zip(&mut answers) {
            if answer.is_yes() {
                *answer = self.supports(graph.node(id));
            }
        }
        answers
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(buffer_type, &self.plain_type)
            || same_buffer_type(buffer_type, &self.packed_type)
    }

    fn member_memories(&self) -> Vec<Arc<dyn BufferType>> {
        self.member_memories.clone()
    }

    fn member_workspaces(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Vec<usize>> {
        let plans = self.plans(&self.partition(graph, nodes)?)?;
        Ok(plans.iter().map(|plan| plan.size).collect())
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(MetaStream::new(self)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
