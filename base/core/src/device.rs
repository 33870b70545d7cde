//! The device contract: backends, devices, streams, events, prepared graphs.
//!
//! Everything that computes is a [`Device`]. It describes itself, the memory that it works on and
//! the nodes that it can run. Callers queue work in a [`Stream`], which runs it in order. The
//! contract in short:
//!
//! - [`Device::supports`] is authoritative. A stream runs every node that its device supports,
//!   provided the sources are in memory that [`Device::supports_buffer_type`] accepts. It never
//!   gets any other node.
//! - [`infer`](crate::infer) has checked the shapes and types of all nodes. Kernels check values
//!   (row numbers, for example) and fail with an [`Error`] instead of touching other memory.
//! - A stream's calls may return before the work is done, but they are ordered among themselves.
//!   The host waits with [`Stream::synchronize`], other streams wait for events. The next call that
//!   waits for failed work returns the error.
//! - Every optional feature has a default here, built from the required ones. Nothing panics.
//! - Work becomes runnable in two steps. [`Device::compile`] sees nodes without memory. It does
//!   what takes long, such as building kernels. It can be cancelled, and its result is shared by
//!   all placements and by later graphs of the same kind. [`Stream::prepare`] binds the result to
//!   memory. After it, [`Stream::run`] makes no allocation that grows with the graph.
//! - Queries come in bulk ([`Device::supports_each`], [`Device::workspaces`],
//!   [`BufferType::alloc_sizes`]), so that a remote device answers in one round trip. The defaults
//!   query one item at a time.
//! - Every call to a lost device fails quickly with [`Error::DeviceLost`].

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

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The host's processors. Every graph can fall back to them.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A library that runs some operations for the host, in host memory, such as BLAS.
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

/// Optional features of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Capabilities {
    /// True if streams return before the work is done.
    pub asynchronous: bool,
    /// True if it has a [host buffer type](Device::host_buffer_type).
    pub host_buffer: bool,
    /// True if it can [import host memory](Device::import_host).
    pub import_host: bool,
    /// True if it can create events.
    pub events: bool,
    /// True if the work of several streams overlaps, so that copies can use a stream of their own.
    /// Requires events.
    pub streams: bool,
}

/// Memory in bytes, or `None` if the device does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryInfo {
    /// Free memory.
    pub free: Option<usize>,
    /// Total memory.
    pub total: Option<usize>,
}

/// Measured peak performance of a device.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct DeviceLimits {
    /// Bytes read from device memory per second.
    pub read_bytes: f64,
    /// F32 operations per second; a fused multiply-add counts as two.
    pub f32_operations: f64,
}

/// Ability of a device to [select](Device::selection) the largest of many numbers for samplers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selection {
    /// The device does not select as [`Exact`](Self::Exact) describes, or this is unknown.
    #[default]
    Inexact,
    /// The device selects the first of equal numbers, and `ArgMax` ranks NaN no higher than minus
    /// infinity.
    Exact,
    /// The device selects as [`Exact`](Self::Exact) describes, and faster than the host can read
    /// all numbers.
    Wanted,
}

/// A backend, device or file that was found or that the user named, but that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// A file name or another description.
    pub what: String,
    /// Reason for the rejection.
    pub why: String,
    /// True if the user named it, so that the rejection must be reported.
    pub named: bool,
}

/// An implementation of devices. Lists those of this machine.
pub trait Backend: Send + Sync {
    /// Returns the name, such as `cpu` or `blas`.
    fn name(&self) -> &str;

    /// Returns the devices found, in order of preference.
    fn devices(&self) -> &[Arc<dyn Device>];

    /// Features to show to users, such as instruction sets and library versions.
    fn features(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns whether its devices are used without being named. False for backends that only serve
    /// tests and comparisons, or that are slower than one that is always available.
    fn is_automatic(&self) -> bool {
        true
    }

    /// Returns the reason why `device` is used only by name even though the backend is
    /// [automatic](Backend::is_automatic): it failed a trial, for example. `device` belongs to this
    /// backend.
    fn doubt(&self, _device: &dyn Device) -> Option<String> {
        None
    }

    /// Returns `device`, which belongs to this backend, configured with `parameters`. The result
    /// works on the same memory. It has the same name unless the parameters make it a part of the
    /// device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for unknown parameters, or the device's error for their values.
    fn configure(
        &self,
        device: &Arc<dyn Device>,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        parameters.finish(device.name(), &[])?;
        Ok(Arc::clone(device))
    }

    /// Returns what was found but cannot be used, with the reasons.
    fn rejected(&self) -> Vec<Rejected> {
        Vec::new()
    }
}

/// A piece of hardware or a library that computes.
pub trait Device: Send + Sync + fmt::Debug {
    /// Returns the unique name, such as `cpu` or `cuda0`.
    fn name(&self) -> &str;

    /// Returns the name that the hardware reports.
    fn description(&self) -> String;

    /// Returns the kind of the device.
    fn kind(&self) -> DeviceKind;

    /// Returns the stable identity of the hardware, such as a PCI address: equal for two views of
    /// the same device.
    fn physical_id(&self) -> Option<String> {
        None
    }

    /// Returns the current memory.
    fn memory(&self) -> MemoryInfo {
        MemoryInfo::default()
    }

    /// Fails if the device is known to have less than `bytes` of free memory. Operating systems
    /// overcommit memory, so callers check this before large allocations.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], which states in `what` the purpose of the memory.
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

    /// Returns the optional features of the device.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Returns the memory type that the device works on.
    fn buffer_type(&self) -> Arc<dyn BufferType>;

    /// Returns host memory that it copies to and from quickly, such as pinned memory. Devices that
    /// work on host memory use it for their results when they cooperate with this device.
    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        None
    }

    /// Returns memory types that store weights in a special form, such as packed, in order of
    /// preference.
    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        Vec::new()
    }

    /// Returns the required alignment of imported memory and of the tensors in it. A power of two.
    fn import_alignment(&self) -> usize {
        1
    }

    /// Makes host memory a buffer of this device without copying. A caller must be able to copy
    /// instead.
    ///
    /// Such memory does not belong to the device, which limits what the device may do with it:
    ///
    /// - Read-only memory, such as a mapped file, is never written to: [`Buffer::is_writable`]
    ///   returns false, and writes are errors.
    /// - A tensor starts where it already is, at a multiple of the [import
    ///   alignment](Device::import_alignment) or of the mapped file's alignment. Either can be less
    ///   than [`BufferType::alignment`]. A device refuses a tensor that it cannot use at its
    ///   address.
    /// - The bytes keep the standard layout, because others read them. Weights are packed only in
    ///   memory that the device allocated.
    /// - Others may access it at any time, so the device takes its [range locks](crate::memory)
    ///   like everyone else.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::import_host`], or for memory that cannot be
    /// imported because of its [alignment](Device::import_alignment), size or origin. Otherwise the
    /// device's error.
    fn import_host(&self, _memory: Arc<HostMemory>, _usage: Usage) -> Result<Arc<dyn Buffer>> {
        Err(Error::unsupported(
            self.name(),
            "import of host memory",
            "it has memory of its own",
        ))
    }

    /// Returns whether the device can run `node`, or why not.
    fn supports(&self, node: Node<'_>) -> Support;

    /// Calls [`supports`](Device::supports) for several nodes of a graph, in order.
    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        nodes
            .iter()
            .map(|&id| self.supports(graph.node(id)))
            .collect()
    }

    /// Returns whether its kernels can use memory of this type.
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool;

    /// Returns whether its streams can [copy](Stream::copy) from one memory type to the other.
    fn can_copy(&self, _from: &Arc<dyn BufferType>, _to: &Arc<dyn BufferType>) -> bool {
        false
    }

    /// Measures the peak performance, which may take a second. Returns `None` if the device cannot.
    ///
    /// # Errors
    /// If the measurement fails.
    fn limits(&self) -> Result<Option<DeviceLimits>> {
        Ok(None)
    }

    /// Returns whether moving `node` to this device is worthwhile although its weights lie in host
    /// memory.
    fn wants_offload(&self, _node: Node<'_>) -> bool {
        false
    }

    /// Returns how well `ArgMax` and `TopK` on this device can select the largest of many numbers,
    /// instead of the host reading all of them.
    fn selection(&self) -> Selection {
        Selection::default()
    }

    /// Returns the bytes of scratch memory, in its own buffer type, that it needs to run these
    /// nodes.
    ///
    /// # Errors
    /// If the size overflows.
    fn workspace(&self, _graph: &Graph, _nodes: &[TensorId]) -> Result<usize> {
        Ok(0)
    }

    /// Calls [`workspace`](Device::workspace) for several sets of nodes of a graph, in order.
    ///
    /// # Errors
    /// As [`workspace`](Device::workspace).
    fn workspaces(&self, graph: &Graph, parts: &[&[TensorId]]) -> Result<Vec<usize>> {
        parts
            .iter()
            .map(|nodes| self.workspace(graph, nodes))
            .collect()
    }

    /// Returns memory types besides its own in which it needs scratch memory. For a composite
    /// device these are the memory types of its members. A composite device plans intermediate
    /// results itself. It gets places only for tensors that are [needed
    /// outside](Graph::needed_outside) its nodes, and puts the rest in its
    /// [`member_workspaces`](Device::member_workspaces).
    fn member_memories(&self) -> Vec<Arc<dyn BufferType>> {
        Vec::new()
    }

    /// Returns the bytes that it needs in each of its [`member_memories`](Device::member_memories)
    /// to run these nodes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for unsupported nodes, or an error if a size overflows.
    fn member_workspaces(&self, _graph: &Graph, _nodes: &[TensorId]) -> Result<Vec<usize>> {
        Ok(Vec::new())
    }

    /// Builds kernels, pipelines and everything else for `nodes` that takes long and needs no
    /// memory. [`Stream::prepare`] binds the result to memory, any number of times and for several
    /// streams at once. `earlier` is the result for a graph of the same kind: the same operations,
    /// types and operands. Extents and parameters may differ, as they do when a cache grows. The
    /// device returns `earlier` again if it fits.
    ///
    /// Returns `None` if there is nothing to share.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unsupported node, [`Error::Cancelled`], or the device's error.
    fn compile(
        &self,
        _graph: &Graph,
        _nodes: &[TensorId],
        _earlier: Option<&Arc<dyn Compiled>>,
        _cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        Ok(None)
    }

    /// Optionally [reorders](crate::reorder) the nodes of one split to run faster. Returns tensors
    /// whose memory must live longer than the graph requires, because the device runs several nodes
    /// at once. The scheduler calls it before it plans memory, so only stored tensors have a place.
    fn optimize(&self, _graph: &Graph, _nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        Vec::new()
    }

    /// Opens a new queue of work.
    ///
    /// # Errors
    /// If the device fails.
    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>>;

    /// Creates an event.
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

    /// Lets a backend recognise its own devices.
    fn as_any(&self) -> &dyn Any;
}

/// A lifetime extension that [`Device::optimize`] requests. No other tensor may use the memory of
/// `tensor` until `until` has been computed, not even the result of `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct KeepAlive {
    /// Any tensor of the graph. For a view, the memory of the viewed tensor is kept.
    pub tensor: TensorId,
    /// A node that was passed to [`Device::optimize`].
    pub until: TensorId,
}

/// A point in a stream's work that the host and other streams can wait for.
///
/// - [`Device::create_event`] creates one if [`Capabilities::events`] is set.
/// - [`Stream::record`] sets the point after everything queued in that stream so far. Recording
///   again moves the point.
/// - [`Event::synchronize`] makes the host wait. [`Stream::wait`] makes another stream wait, also
///   one of another device.
/// - Without a recorded point, waits return at once.
/// - A wait is for the point at the time of the call. Recording again does not affect waits in
///   progress, so each run can reuse an event while work of the last run is still queued.
/// - After the wait, the waiter sees everything that the work before the point wrote. If that work
///   failed, the wait fails, or the stream in which the wait is queued fails.
pub trait Event: Send + Sync + fmt::Debug {
    /// Blocks the host until the recorded point is reached. Returns at once if none was recorded.
    ///
    /// # Errors
    /// If work before the point failed.
    fn synchronize(&self) -> Result<()>;

    /// Lets a stream recognise its own events.
    fn as_any(&self) -> &dyn Any;
}

/// Nodes of a graph with memory for every tensor: the input of [`Stream::prepare`].
///
/// A device may skip writing results that cannot be read after the run. In graphs that have
/// [outputs](crate::Graph::set_output) or write to operands, those are results that are no outputs,
/// not [copied](crate::Flags::copied), and operands only of nodes of this part.
#[derive(Clone, Copy)]
pub struct PlacedGraph<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The nodes to run, in order. Views among them are not computed.
    pub nodes: &'a [TensorId],
    /// Memory of each tensor, by position in the graph. Contains at least the nodes, their sources
    /// and the tensors that these are views of.
    pub places: &'a [Option<TensorRef>],
    /// Scratch memory of [`Device::workspace`] bytes.
    pub workspace: Option<&'a TensorRef>,
    /// Result of [`Device::compile`] for these nodes. If absent, the stream compiles them itself.
    pub compiled: Option<&'a Arc<dyn Compiled>>,
}

impl<'a> PlacedGraph<'a> {
    /// Returns the memory of `id`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has no memory.
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

    /// Checks what kernels assume about overlapping memory. A node's written memory must not share
    /// elements with its sources, unless the operation [may overwrite](crate::Op::may_overwrite) an
    /// operand that lies exactly where the result does. Streams call this in `prepare`, because
    /// places need not come from the scheduler.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming the node and the operand.
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

    /// Iterates over the nodes that are computed.
    pub fn computed(&self) -> impl Iterator<Item = Node<'a>> + use<'a> {
        let graph = self.graph;
        self.nodes
            .iter()
            .map(move |&id| graph.node(id))
            .filter(|node| node.tensor().is_computed())
    }
}

/// Result of compiling nodes without knowing where their tensors lie.
pub trait Compiled: Send + Sync + fmt::Debug {
    /// Lets the device recognise its own results.
    fn as_any(&self) -> &dyn Any;
}

/// Work bound to memory, for repeated runs.
pub trait Prepared: Send {
    /// Lets the device recognise its own results.
    fn as_any(&mut self) -> &mut dyn Any;
}

/// Cancellation and observation of one run.
#[derive(Clone, Copy)]
pub struct RunControl<'a> {
    /// Checked between nodes and within long ones, as often as the device can.
    pub cancel: &'a CancelToken,
    /// Receives the time of each node, if the device can measure it.
    pub observer: Option<&'a Arc<dyn RunObserver>>,
}

/// Receives the time of each node.
///
/// A synchronous device reports a node right after running it. An asynchronous device reports as
/// soon as it has the time, at the latest in the call that waits for the run.
pub trait RunObserver: Send + Sync {
    /// Reports that `node` started `start` after this device began the run, and ran for `took`.
    fn ran(&self, node: TensorId, start: Duration, took: Duration);
}

/// An ordered queue of work on a device.
pub trait Stream: Send {
    /// Returns the device.
    fn device(&self) -> &dyn Device;

    /// Binds [compiled](Device::compile) work to places in memory, for [`run`](Stream::run).
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unsupported node, [`Error::InvalidArgument`] for places that
    /// the device cannot use.
    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>>;

    /// Does what [`prepare`](Stream::prepare) does, for a device with
    /// [members](Device::member_memories). `members` is scratch memory of the requested sizes, by
    /// member.
    ///
    /// # Errors
    /// As [`prepare`](Stream::prepare).
    fn prepare_with_members(
        &mut self,
        work: PlacedGraph<'_>,
        _members: &[Option<TensorRef>],
    ) -> Result<Box<dyn Prepared>> {
        self.prepare(work)
    }

    /// Queues prepared work.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or the device's error.
    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()>;

    /// Limits future runs to this number of host threads, or to the device's number if that is
    /// lower. `None` removes the limit. Devices that do not compute on the host ignore it.
    fn set_threads(&mut self, _threads: Option<usize>) {}

    /// Queues a write. Copies `data` before the call returns.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        self.synchronize()?;
        to.write(offset, data)
    }

    /// Reads after all queued work is done. To read without waiting, [`copy`](Stream::copy) to a
    /// host buffer.
    ///
    /// # Errors
    /// As [`Buffer::read`].
    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        self.synchronize()?;
        from.read(offset, out)
    }

    /// Queues a write of pieces at equal distances. Copies `data` before the call returns.
    ///
    /// # Errors
    /// As [`Buffer::write_rows`].
    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        self.synchronize()?;
        to.write_rows(rows, data)
    }

    /// Reads pieces at equal distances after all queued work is done.
    ///
    /// # Errors
    /// As [`Buffer::read_rows`].
    fn read_rows(&mut self, from: &TensorRef, rows: Rows, out: &mut [u8]) -> Result<()> {
        self.synchronize()?;
        from.read_rows(rows, out)
    }

    /// Queues a copy between tensors of equal layout, in memory types that [`Device::can_copy`]
    /// accepts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other memory types, or the device's error.
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

    /// Records this point of the queue in `event`, which must belong to the same device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another device's event, [`Error::Unsupported`] without
    /// events.
    fn record(&mut self, _event: &dyn Event) -> Result<()> {
        Err(Error::unsupported(
            self.device().name(),
            "events",
            "its streams work synchronously",
        ))
    }

    /// Makes work queued from now on wait for `event`, which can belong to any device.
    ///
    /// # Errors
    /// If work before the event failed.
    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        event.synchronize()
    }

    /// Blocks the host until all queued work is done.
    ///
    /// # Errors
    /// If any of it failed. Each error is reported once.
    fn synchronize(&mut self) -> Result<()>;
}
