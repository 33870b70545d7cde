//! The device contract: backends, devices, streams, events, prepared graphs.
//!
//! Whatever computes is a [`Device`]: it says what it is, which memory it works on and which nodes it can run. Work is
//! given to a [`Stream`], which runs it in order. The contract in short:
//!
//! - [`Device::supports`] is the truth: a stream runs every node that its device supports, on sources in memory that
//!   [`Device::supports_buffer_type`] accepts, and nothing else is ever asked of it.
//! - Nodes were checked by [`infer`](crate::infer): shapes and types fit. Values (row numbers, for example) are checked
//!   by kernels, which fail with an [`Error`] instead of touching other memory.
//! - A stream's calls may return before the work is done; they are ordered among themselves. The host waits with
//!   [`Stream::synchronize`]; other streams wait for events. A failure of queued work is returned by
//!   the next call that waits for it.
//! - Everything that a device lacks has a default here, built from what it has. Nothing panics.
//! - Work becomes runnable in two steps. [`Device::compile`] sees nodes without memory: what takes long, such as building
//!   kernels, happens there, can be cancelled, and is shared by all places and by later graphs of the same kind.
//!   [`Stream::prepare`] binds that to places. After it, [`Stream::run`] allocates nothing that grows with the graph.
//! - Questions come in bulk ([`Device::supports_each`], [`Device::workspaces`], [`BufferType::alloc_sizes`]), so that a device behind a wire
//!   answers in one round trip; the defaults ask one by one.
//! - A device that is gone fails with [`Error::DeviceLost`] from then on, everywhere, and quickly.

use crate::buffer::{Buffer, BufferType, Usage};
use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, TensorId};
use crate::memory::HostMemory;
use crate::parameters::Parameters;
use crate::rows::Rows;
use crate::support::Support;
use crate::tensor_ref::TensorRef;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The host's processors: where everything can run in the end.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// Something that takes some operations from the host, on host memory: BLAS, for example.
    Accelerator,
    /// Several devices that act as one.
    Meta,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::IntegratedGpu => "igpu",
            DeviceKind::Accelerator => "accel",
            DeviceKind::Meta => "meta",
        })
    }
}

/// What a device can do besides computing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Capabilities {
    /// Streams return before the work is done.
    pub asynchronous: bool,
    /// Has a [host buffer type](Device::host_buffer_type).
    pub host_buffer: bool,
    /// Can [import host memory](Device::import_host).
    pub import_host: bool,
    /// Can make events.
    pub events: bool,
    /// Work of several streams overlaps, so that copies can have a stream of their own. Needs events.
    pub streams: bool,
}

/// Memory in bytes; `None` where the device does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryInfo {
    /// Not in use.
    pub free: Option<usize>,
    /// In all.
    pub total: Option<usize>,
}

/// What a device can do at most, measured.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct DeviceLimits {
    /// Bytes of its memory read per second.
    pub read_bytes: f64,
    /// F32 operations per second; a fused multiply-add counts as two.
    pub f32_operations: f64,
}

/// Whether a device can [choose](Device::selection) the largest of many numbers for samplers, and should.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selection {
    /// It does not choose as [`Exact`](Self::Exact) says, or nobody knows whether it does.
    #[default]
    Inexact,
    /// Of equal numbers it chooses the first, and `ArgMax` takes what is not a number as no larger than minus infinity.
    Exact,
    /// It chooses so, and that takes less time than reading all numbers.
    Wanted,
}

/// Something that was found, or that the user named, and cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// A file, or what else it is.
    pub what: String,
    /// Why.
    pub why: String,
    /// Whether the user named it, so that people must be told.
    pub named: bool,
}

/// One implementation of devices: lists those that exist on this machine.
pub trait Backend: Send + Sync {
    /// Name, such as `cpu` or `blas`.
    fn name(&self) -> &str;

    /// The devices found, in order of preference.
    fn devices(&self) -> &[Arc<dyn Device>];

    /// Features for people: instruction sets, library versions.
    fn features(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Whether its devices are used without being named. False for those that only serve tests and comparisons, or are
    /// slower than others that are always there.
    fn is_automatic(&self) -> bool {
        true
    }

    /// Why `device`, one of its devices, is used only if it is named although the backend is [automatic](Backend::is_automatic): it failed a
    /// trial, for example.
    fn doubt(&self, _device: &dyn Device) -> Option<String> {
        None
    }

    /// `device`, one of its devices, as `parameters` say. The result works on the same memory, and has the same name unless the parameters make it a part
    /// of the device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for parameters that it does not have, and what the device says of their values.
    fn configure(
        &self,
        device: &Arc<dyn Device>,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        parameters.finish(device.name(), &[])?;
        Ok(Arc::clone(device))
    }

    /// What was found but cannot be used, with the reason.
    fn rejected(&self) -> Vec<Rejected> {
        Vec::new()
    }
}

/// One piece of hardware that computes, or a library that does.
pub trait Device: Send + Sync + fmt::Debug {
    /// Unique name, such as `cpu` or `cuda0`.
    fn name(&self) -> &str;

    /// What the hardware calls itself.
    fn description(&self) -> String;

    /// What it is.
    fn kind(&self) -> DeviceKind;

    /// Stable identity of the hardware, such as a PCI address: equal for two views of the same device.
    fn physical_id(&self) -> Option<String> {
        None
    }

    /// Memory now.
    fn memory(&self) -> MemoryInfo {
        MemoryInfo::default()
    }

    /// Fails if it is known to have less than `bytes` of free memory. Operating systems promise memory that they do not have,
    /// so this is asked before large allocations.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], naming `what` the memory is for.
    fn check_free(&self, bytes: usize, what: &str) -> Result<()> {
        match self.memory().free {
            Some(free) if free < bytes => Err(Error::OutOfMemory {
                device: self.name().into(),
                what: what.into(),
                asked: bytes,
                free: Some(free),
            }),
            _ => Ok(()),
        }
    }

    /// What it can do besides computing.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// The memory that it works on.
    fn buffer_type(&self) -> Arc<dyn BufferType>;

    /// Host memory that it copies to and from quickly: pinned, for example. Devices that work on host memory get it for their
    /// results when they work together with this one.
    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        None
    }

    /// Memory that gives weights a form of its own, such as packed, most wanted first.
    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        Vec::new()
    }

    /// Imported memory, and tensors in it, must begin at a multiple of this. A power of two.
    fn import_alignment(&self) -> usize {
        1
    }

    /// Makes host memory a buffer of this device without copying. Who asks for it must be able to copy instead.
    ///
    /// Such memory is not the device's own, so the device may do less with it:
    ///
    /// - Read-only memory, such as a mapped file, is never written to: [`Buffer::is_writable`] says no, and writes are errors.
    /// - A tensor begins where it is, at a multiple of the [import's alignment](Device::import_alignment) or of a mapped file's, which can
    ///   be less than [`BufferType::alignment`]. A device refuses a tensor that it cannot use there.
    /// - Its bytes keep the standard layout, since others read them too. Weights are packed only in memory that the device allocated.
    /// - Others may access it at any time: the device enters its [gate](crate::memory) like everybody else.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::import_host`], or for memory that cannot be imported: its
    /// [alignment](Device::import_alignment), size or origin; and what the device says.
    fn import_host(&self, _memory: Arc<HostMemory>, _usage: Usage) -> Result<Arc<dyn Buffer>> {
        Err(Error::unsupported(
            self.name(),
            "import of host memory",
            "it has memory of its own",
        ))
    }

    /// Whether it can run `node`, and why not.
    fn supports(&self, node: Node<'_>) -> Support;

    /// [`supports`](Device::supports) for several nodes of a graph, in their order.
    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        nodes
            .iter()
            .map(|&id| self.supports(graph.node(id)))
            .collect()
    }

    /// Whether its kernels can use memory of this type.
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool;

    /// Whether its streams can [copy](Stream::copy) from memory of one type to memory of the other.
    fn can_copy(&self, _from: &Arc<dyn BufferType>, _to: &Arc<dyn BufferType>) -> bool {
        false
    }

    /// What it can do at most, measured now, which may take a second; `None` if it cannot tell.
    ///
    /// # Errors
    /// If it fails.
    fn limits(&self) -> Result<Option<DeviceLimits>> {
        Ok(None)
    }

    /// Whether `node` is worth moving here although its weights lie in host memory.
    fn wants_offload(&self, _node: Node<'_>) -> bool {
        false
    }

    /// Whether the largest of many numbers in its memory can be chosen here, by `ArgMax` and `TopK`, instead of reading all of them.
    fn selection(&self) -> Selection {
        Selection::default()
    }

    /// Bytes of scratch memory, in its own buffer type, that it needs while it runs these nodes of `graph`.
    ///
    /// # Errors
    /// If the size overflows.
    fn workspace(&self, _graph: &Graph, _nodes: &[TensorId]) -> Result<usize> {
        Ok(0)
    }

    /// [`workspace`](Device::workspace) for several parts of a graph, in their order.
    ///
    /// # Errors
    /// As [`workspace`](Device::workspace).
    fn workspaces(&self, graph: &Graph, parts: &[&[TensorId]]) -> Result<Vec<usize>> {
        parts
            .iter()
            .map(|nodes| self.workspace(graph, nodes))
            .collect()
    }

    /// Kinds of memory besides its own in which it needs scratch memory: those of its members, for a device that is made of several. Such a
    /// device plans intermediate results itself: it gets places for what is [needed outside](Graph::needed_outside) of its nodes only, and the
    /// rest lies in [`member_workspaces`](Device::member_workspaces).
    fn member_memories(&self) -> Vec<Arc<dyn BufferType>> {
        Vec::new()
    }

    /// Bytes in each of its [`member_memories`](Device::member_memories) that it needs while it runs these nodes of `graph`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for nodes that it does not support; if a size overflows.
    fn member_workspaces(&self, _graph: &Graph, _nodes: &[TensorId]) -> Result<Vec<usize>> {
        Ok(Vec::new())
    }

    /// Does for `nodes` of `graph` what takes long and needs no memory: kernels, pipelines. The result is bound to places by
    /// [`Stream::prepare`], as often as wanted and by several streams at once. `earlier` is the result for a graph of the same
    /// kind (same operations, types and operands; extents and parameters may differ, as they do when a cache grows): the device returns it
    /// again where it fits.
    ///
    /// `None` if there is nothing to share.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a node that the device does not support, [`Error::Cancelled`], or what the device says.
    fn compile(
        &self,
        _graph: &Graph,
        _nodes: &[TensorId],
        _earlier: Option<&Arc<dyn Compiled>>,
        _cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        Ok(None)
    }

    /// May [reorder](crate::reorder) the nodes of one split for better speed. Returns which memory must stay for longer than
    /// the graph says, because the device runs several nodes at once. Called before memory is planned, so that nothing but
    /// stored tensors has a place yet.
    fn optimize(&self, _graph: &Graph, _nodes: &mut [TensorId]) -> Vec<Keep> {
        Vec::new()
    }

    /// A new queue of work.
    ///
    /// # Errors
    /// If the device fails.
    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>>;

    /// A new event.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::events`].
    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Err(Error::unsupported(
            self.name(),
            "events",
            "its streams work synchronously",
        ))
    }

    /// For a backend to recognise its own devices.
    fn as_any(&self) -> &dyn Any;
}

/// A wish of [`Device::optimize`]: no other tensor may take the memory that `tensor` lies in before `until` was computed, not even the
/// result of `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Keep {
    /// Any tensor of the graph; for a view, it is the memory of what it looks at.
    pub tensor: TensorId,
    /// A node that [`Device::optimize`] was given.
    pub until: TensorId,
}

/// A point in a stream's work that the host and other streams can wait for.
///
/// - [`Device::create_event`] makes one, where [`Capabilities::events`] says so.
/// - [`Stream::record`] sets the point: behind everything that was queued in that stream before. Recording again moves the point.
/// - [`Event::synchronize`] lets the host wait, [`Stream::wait`] another stream, also one of another device.
/// - Without a point, nobody waits.
/// - Who waits, waits for the point of that moment. Recording again does not change what is awaited already, so that an event
///   can be used in each run while work of the last one is still queued.
/// - When the wait is over, what the work before the point wrote is visible to whoever waited. If that work failed, the wait fails, or the stream in which it
///   is queued.
pub trait Event: Send + Sync + fmt::Debug {
    /// Blocks the host until the recorded point is reached; at once if nothing was recorded.
    ///
    /// # Errors
    /// If work before the point failed.
    fn synchronize(&self) -> Result<()>;

    /// For a stream to recognise its own events.
    fn as_any(&self) -> &dyn Any;
}

/// A part of a graph with a place in memory for every tensor: what a stream [prepares](Stream::prepare).
///
/// A device need not write results that nobody reads after the run: those of graphs that have [outputs](crate::Graph::set_output) or
/// write to operands, if they are no outputs, not [copied](crate::Flags::copied), and operands of nodes of this part only.
#[derive(Clone, Copy)]
pub struct Placed<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The nodes to run, in order. Views among them need no work.
    pub nodes: &'a [TensorId],
    /// By position in the graph: where each tensor lies. At least the nodes, their sources, and what these are views of are there.
    pub places: &'a [Option<TensorRef>],
    /// Scratch memory of [`Device::workspace`] bytes.
    pub workspace: Option<&'a TensorRef>,
    /// What [`Device::compile`] made of these nodes; where it is absent, the stream compiles them itself.
    pub compiled: Option<&'a Arc<dyn Compiled>>,
}

impl<'a> Placed<'a> {
    /// Where `id` lies.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the scheduler gave it no place.
    pub fn place(&self, id: TensorId) -> Result<&'a TensorRef> {
        self.places
            .get(id.index())
            .and_then(Option::as_ref)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "tensor {id} '{}' has no place in memory",
                    self.graph.tensor(id).name
                ))
            })
    }

    /// Checks what kernels rely on where places overlap: memory that a node writes to has no elements in common with what it reads,
    /// unless the operation [may overwrite](crate::Op::may_overwrite) an operand in exactly the result's place. Streams call it when
    /// they prepare work, since places need not come from the scheduler.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming node and operand.
    pub fn check(&self) -> Result<()> {
        for node in self.computed() {
            let tensor = node.tensor();
            let written = tensor.op.written_sources();
            let result = tensor.view.is_none().then_some((None, node.id()));
            let operands = tensor.operands().map(|(index, id)| (Some(index), id));
            let targets = operands.filter(|(index, _)| index.is_some_and(|i| written.contains(&i)));
            for (target, target_id) in targets.chain(result) {
                let target_place = self.place(target_id)?;
                for (index, source) in tensor
                    .operands()
                    .filter(|&(index, _)| target != Some(index))
                {
                    let place = self.place(source)?;
                    let same = place.location() == target_place.location()
                        && place.layout() == target_place.layout();
                    let allowed = match target {
                        Some(_) => matches!(tensor.op, crate::Op::Cpy) && same,
                        None => tensor.op.may_overwrite(index) && same,
                    };
                    if !allowed && place.may_share_elements(target_place) {
                        return Err(Error::invalid(format!(
                            "{node:?} '{}' writes to elements that it reads as source {index}",
                            tensor.name
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// The nodes that need work.
    pub fn computed(&self) -> impl Iterator<Item = Node<'a>> + use<'a> {
        let graph = self.graph;
        self.nodes
            .iter()
            .map(move |&id| graph.node(id))
            .filter(|node| node.tensor().is_computed())
    }
}

/// What a device made of nodes without knowing where their tensors lie.
pub trait Compiled: Send + Sync + fmt::Debug {
    /// For the device to recognise its own.
    fn as_any(&self) -> &dyn Any;
}

/// Work that is bound to places in memory, for repeated runs.
pub trait Prepared: Send {
    /// For the device to recognise its own.
    fn as_any(&mut self) -> &mut dyn Any;
}

/// How one run is watched and stopped.
#[derive(Clone, Copy)]
pub struct RunControl<'a> {
    /// Checked between nodes and within long ones, as often as the device can.
    pub cancel: &'a CancelToken,
    /// Told about each node that ran, where the device can time them.
    pub observer: Option<&'a Arc<dyn RunObserver>>,
}

/// Is told which node ran when.
///
/// A synchronous device tells it of a node right after that ran. An asynchronous one tells it when it knows: at the latest, in the call that waits
/// for the run.
pub trait RunObserver: Send + Sync {
    /// `node` took `took`, and began `start` after the device had begun with this run.
    fn ran(&self, node: TensorId, start: Duration, took: Duration);
}

/// An ordered queue of work on a device.
pub trait Stream: Send {
    /// The device.
    fn device(&self) -> &dyn Device;

    /// Binds [compiled](Device::compile) work to places in memory, for [`run`](Stream::run).
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a node that the device does not support; [`Error::InvalidArgument`] for places that it cannot use.
    fn prepare(&mut self, work: Placed<'_>) -> Result<Box<dyn Prepared>>;

    /// [`prepare`](Stream::prepare) for a device with [members](Device::member_memories): `members` is scratch memory of the sizes that it asked for, by
    /// member.
    ///
    /// # Errors
    /// As [`prepare`](Stream::prepare).
    fn prepare_with_members(
        &mut self,
        work: Placed<'_>,
        _members: &[Option<TensorRef>],
    ) -> Result<Box<dyn Prepared>> {
        self.prepare(work)
    }

    /// Queues prepared work.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or what the device says.
    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()>;

    /// Lets runs from now on use so many threads of the host, or as many as the device has if that is fewer; `None` for all. A device that computes
    /// elsewhere ignores it.
    fn set_threads(&mut self, _threads: Option<usize>) {}

    /// Queues a write. `data` is taken before the call returns.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        self.synchronize()?;
        to.write(offset, data)
    }

    /// Reads, after everything queued before. (To read without waiting, [`copy`](Stream::copy) to a host buffer.)
    ///
    /// # Errors
    /// As [`Buffer::read`].
    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        self.synchronize()?;
        from.read(offset, out)
    }

    /// Queues a write of pieces at even distances. `data` is taken before the call returns.
    ///
    /// # Errors
    /// As [`Buffer::write_rows`].
    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        self.synchronize()?;
        to.write_rows(rows, data)
    }

    /// Reads pieces at even distances, after everything queued before.
    ///
    /// # Errors
    /// As [`Buffer::read_rows`].
    fn read_rows(&mut self, from: &TensorRef, rows: Rows, out: &mut [u8]) -> Result<()> {
        self.synchronize()?;
        from.read_rows(rows, out)
    }

    /// Queues a copy between tensors of equal layout in memory for which [`Device::can_copy`] says yes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other memory; or what the device says.
    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        Err(Error::unsupported(
            self.device().name(),
            format!(
                "a copy from {} to {}",
                from.buffer.buffer_type().name(),
                to.buffer.buffer_type().name()
            ),
            "its streams do not copy",
        ))
    }

    /// Marks this point of the queue in `event`, which must come from the same device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an event of another device, [`Error::Unsupported`] without events.
    fn record(&mut self, _event: &dyn Event) -> Result<()> {
        Err(Error::unsupported(
            self.device().name(),
            "events",
            "its streams work synchronously",
        ))
    }

    /// Lets work queued from now on wait for `event`, of whatever device.
    ///
    /// # Errors
    /// If work before the event failed.
    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        event.synchronize()
    }

    /// Blocks the host until everything queued is done.
    ///
    /// # Errors
    /// If some of it failed; the error is reported once.
    fn synchronize(&mut self) -> Result<()>;
}
