//! Streams of a plugin's device, which are ggml's backends.

use super::buffer::{GgmlBuffer, GraphUse, RawBuffer};
use super::device::GgmlDevice;
use super::event::GgmlEvent;
use crate::abi::{self, Status};
use crate::convert::UnsupportedConversion;
use crate::convert::export::{Exported, TensorLocation, with_views};
use samite_core::{
    Access, Buffer, CancelToken, Device, Error, Event, HostMemory, MemorySet, PlacedGraph,
    Prepared, Result, Rows, RunControl, Stream, TensorRef,
};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment at which foreign host memory is wrapped for the plugin, as ggml's CPU backend
/// requires.
const HOST_ALIGNMENT: usize = 64;

/// Maximum bytes of queued writes. A stream with more waits for them first.
const MAX_STAGED: usize = 64 << 20;

/// A backend of ggml's.
pub struct GgmlStream {
    device: Arc<GgmlDevice>,
    raw: NonNull<abi::Backend>,
    /// Number of threads last passed to the plugin.
    threads: Option<usize>,
    /// Resources of queued work, kept until the next synchronization.
    pending: Pending,
    /// Queues of other devices of the plugin, from which it copies.
    peers: Vec<PeerQueue>,
}

/// A queue of another device of the plugin, for copies from there: plugins run copies on the
/// source's side.
struct PeerQueue {
    device: *mut abi::Device,
    raw: NonNull<abi::Backend>,
    /// Position of this stream when the last copy was queued.
    before: GgmlEvent,
}

impl PeerQueue {
    fn iface(&self) -> abi::BackendI {
        // SAFETY: the backend is valid as long as this value.
        unsafe { (*self.raw.as_ptr()).iface }
    }
}

impl Drop for PeerQueue {
    fn drop(&mut self) {
        if let Some(free) = self.iface().free {
            // SAFETY: this value owns the backend, and it is not used again.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}

/// Resources that must outlive queued work.
#[derive(Default)]
struct Pending {
    graphs: Vec<Arc<GraphResources>>,
    buffers: Vec<Arc<dyn Buffer>>,
    /// Copies of bytes to write, because plugins read them later.
    staged: Vec<Vec<u8>>,
    staged_bytes: usize,
    /// Memory to reuse for copies.
    spare: Vec<Vec<u8>>,
}

impl Pending {
    fn stage(&mut self, data: &[u8]) -> *const c_void {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(data);
        self.staged_bytes += data.len();
        let address = copy.as_ptr().cast();
        self.staged.push(copy); // its bytes do not move
        address
    }

    fn done(&mut self) {
        self.graphs.clear();
        self.buffers.clear();
        self.spare.append(&mut self.staged);
        self.staged_bytes = 0;
    }
}

// SAFETY: a backend may be used from any thread, by one at a time.
unsafe impl Send for GgmlStream {}

/// A graph in ggml's structures, with everything that they point to.
struct GgmlGraph {
    graph: Exported,
    memory: MemorySet,
    /// True if it uses guarded host memory, which is locked only during a call.
    guarded: bool,
    keep: Arc<GraphResources>,
    device: *const GgmlDevice,
}

// SAFETY: only the stream that created it uses it, by one thread at a time; `device` is only
// compared.
unsafe impl Send for GgmlGraph {}

impl Prepared for GgmlGraph {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// Returns the first byte and the total length of all pieces in the tensor, if there are any and
/// they lie inside both sides.
pub fn span(rows: Rows, tensor: usize, host: usize) -> Option<(usize, usize)> {
    let last = rows.count.checked_sub(1)?;
    let len = last.checked_mul(rows.stride)?.checked_add(rows.len)?;
    let host_len = last.checked_mul(rows.host_stride)?.checked_add(rows.len)?;
    let inside = rows.len > 0 && rows.offset.checked_add(len)? <= tensor && host_len <= host;
    inside.then_some((rows.offset, len))
}

/// Host memory wrapped in a buffer of the plugin.
struct Wrapped {
    memory: Arc<HostMemory>,
    buffer: RawBuffer,
}

/// An error of `convert` or of memory.
struct ConversionError(Error);

impl From<UnsupportedConversion> for ConversionError {
    fn from(reason: UnsupportedConversion) -> Self {
        ConversionError(Error::invalid(reason.into_owned()))
    }
}

impl From<Error> for ConversionError {
    fn from(error: Error) -> Self {
        ConversionError(error)
    }
}

impl GgmlStream {
    pub fn open(device: Arc<GgmlDevice>, threads: Option<usize>) -> Result<Self> {
        let failed = || Error::device(device.name(), "the plugin opened no stream");
        let raw = device.open_backend().ok_or_else(failed)?;
        // SAFETY: the backend is new.
        let iface = unsafe { (*raw.as_ptr()).iface };
        if iface.graph_compute.is_none()
            || (device.is_asynchronous() && iface.synchronize.is_none())
        {
            return Err(failed());
        }
        let mut stream = GgmlStream {
            device,
            raw,
            threads: None,
            pending: Pending::default(),
            peers: Vec::new(),
        };
        stream.use_threads(threads);
        Ok(stream)
    }

    fn use_threads(&mut self, threads: Option<usize>) {
        if let (Some(threads), Some(set_threads)) =
            (threads, self.device.core().plugin.set_threads())
            && self.threads != Some(threads)
        {
            self.threads = Some(threads);
            let threads = i32::try_from(threads).unwrap_or(i32::MAX);
            // SAFETY: the function belongs to the plugin of the backend.
            unsafe { set_threads(self.raw.as_ptr(), threads) };
        }
    }

    fn iface(&self) -> abi::BackendI {
        // SAFETY: the backend is valid as long as this value.
        unsafe { (*self.raw.as_ptr()).iface }
    }

    /// Wraps a piece of host memory for the plugin.
    fn wrap(&self, memory: &Arc<HostMemory>) -> Result<Wrapped> {
        Ok(Wrapped {
            memory: Arc::clone(memory),
            buffer: self.device.wrap(memory, HOST_ALIGNMENT)?.0,
        })
    }

    fn place(
        &self,
        place: &TensorRef,
        keep: &mut GraphResources,
        is_leaf: bool,
    ) -> Result<TensorLocation> {
        keep.add(place);
        let own = place.buffer.as_any().downcast_ref::<GgmlBuffer>();
        let own = own.filter(|buffer| buffer.is_of(&self.device.core().plugin));
        if let Some(buffer) = own {
            if is_leaf && buffer.usage() != samite_core::Usage::Compute {
                return buffer.tensor(place.slot).map(TensorLocation::Tensor);
            }
            return Ok(TensorLocation::At(
                buffer.raw(),
                buffer.address(place.slot.offset),
            ));
        }
        let Some(host) = place.buffer.host() else {
            return Err(Error::unsupported(
                self.device.name(),
                format!("memory of type {}", place.buffer.buffer_type().name()),
                "it is another device's",
            ));
        };
        let known = keep
            .wrapped
            .iter()
            .position(|wrapped| Arc::ptr_eq(&wrapped.memory, host));
        let at = match known {
            Some(at) => at,
            None => {
                keep.wrapped.push(self.wrap(host)?);
                keep.wrapped.len() - 1
            }
        };
        Ok(TensorLocation::At(
            keep.wrapped[at].buffer.as_ptr(),
            host.base().as_ptr().wrapping_add(place.slot.offset),
        ))
    }
}

/// Resources that a graph keeps alive.
#[derive(Default)]
struct GraphResources {
    buffers: Vec<GraphUse>,
    /// Foreign host memory.
    wrapped: Vec<Wrapped>,
}

impl GraphResources {
    fn add(&mut self, place: &TensorRef) {
        if !self
            .buffers
            .iter()
            .any(|known| Arc::ptr_eq(known.buffer(), &place.buffer))
        {
            self.buffers.push(GraphUse::new(Arc::clone(&place.buffer)));
        }
    }
}

/// Returns whether to stop a graph, by its token.
unsafe extern "C" fn is_cancelled(token: *mut c_void) -> bool {
    // SAFETY: `run` passes a token that outlives the graph's run.
    unsafe { &*token.cast::<CancelToken>() }.is_cancelled()
}

impl Stream for GgmlStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let mut keep = GraphResources::default();
        let (mut memory, mut guarded) = (MemorySet::default(), false);
        for node in work.computed() {
            if let samite_core::Support::No(reason) = self.device.supports(node) {
                return Err(Error::unsupported(
                    self.device.name(),
                    node.op().to_string(),
                    reason.into_owned(),
                ));
            }
            let sources = node.tensor().operands();
            for (id, access) in sources
                .map(|(_, id)| (id, Access::Read))
                .chain([(node.id(), Access::Write)])
            {
                if let Some(host) = work.place(id)?.buffer.host() {
                    memory.add(host, access)?;
                    guarded = true;
                }
            }
        }
        // Empty results need no computation, and plugins may not support them.
        let nodes = with_views(work.graph, work.nodes);
        let version = self.device.core().plugin.version;
        let mut graph = Exported::new(version, work.graph, &nodes, |id| {
            let is_leaf = work.graph.tensor(id).stored.is_some();
            let place = self.place(work.place(id)?, &mut keep, is_leaf)?;
            Ok::<_, ConversionError>(place)
        })
        .map_err(|failure| failure.0)?;
        graph.count_uses(work.graph);
        for tensor in graph.tensors() {
            for buffer in &keep.buffers {
                let buffer = buffer.buffer().as_any().downcast_ref::<GgmlBuffer>();
                let Some(buffer) = buffer else {
                    continue;
                };
                // SAFETY: the tensors were just made, with these buffers.
                unsafe {
                    if (*tensor).buffer == buffer.raw() {
                        buffer.init(tensor)?;
                    }
                }
            }
        }
        Ok(Box::new(GgmlGraph {
            graph,
            memory,
            guarded,
            keep: Arc::new(keep),
            device: Arc::as_ptr(&self.device),
        }))
    }

    fn set_threads(&mut self, threads: Option<usize>) {
        let most = self.device.threads();
        self.use_threads(threads.or(most).min(most.or(threads)));
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let work = prepared
            .as_any()
            .downcast_mut::<GgmlGraph>()
            .filter(|work| work.device == Arc::as_ptr(&self.device))
            .ok_or_else(|| Error::invalid("work that another device prepared cannot run here"))?;
        control.cancel.check()?;
        let iface = self.iface();
        let raw = self.raw.as_ptr();
        let compute = iface
            .graph_compute
            .ok_or_else(|| Error::device(self.device.name(), "it cannot compute graphs"))?;
        let set_abort = self.device.core().plugin.set_abort();
        let waits = work.guarded || !self.device.is_asynchronous();
        let mut graph = work.graph.graph();
        let status = work.memory.with(|| {
            // SAFETY: the functions belong to this backend, the graph is valid, its memory is
            // locked, and the token outlives the call.
            unsafe {
                if let Some(set_abort) = set_abort {
                    let token = std::ptr::from_ref(control.cancel).cast_mut();
                    set_abort(raw, Some(is_cancelled), token.cast());
                }
                let status = match graph.n_nodes {
                    0 => Status::SUCCESS,
                    _ => compute(raw, &raw mut graph),
                };
                if waits && let Some(synchronize) = iface.synchronize {
                    synchronize(raw);
                }
                if let Some(set_abort) = set_abort {
                    set_abort(raw, None, std::ptr::null_mut());
                }
                status
            }
        });
        if waits {
            self.pending.done()
        } else {
            self.pending.graphs.push(Arc::clone(&work.keep))
        }
        match status {
            Status::SUCCESS => Ok(()),
            Status::ABORTED => Err(Error::Cancelled),
            Status::ALLOC_FAILED => Err(Error::OutOfMemory {
                device: self.device.name().into(),
                what: "the work space of a graph".into(),
                asked: 0,
                free: None,
            }),
            Status(status) => Err(Error::device(
                self.device.name(),
                format!("the plugin failed to compute a graph (status {status})"),
            )),
        }
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        let set = self.iface().set_tensor_async;
        let (Some(set), Some(tensor)) = (set, self.queue(to, offset, data.len())?) else {
            self.synchronize()?;
            return to.write(offset, data);
        };
        let bytes = self.pending.stage(data);
        // SAFETY: the tensor and its range were checked. The bytes live until the stream is
        // synchronized.
        unsafe { set(self.raw.as_ptr(), tensor, bytes, offset, data.len()) };
        Ok(())
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        let get = self.iface().get_tensor_async;
        let (Some(get), Some(tensor)) = (get, self.queue(from, offset, out.len())?) else {
            self.synchronize()?;
            return from.read(offset, out);
        };
        let bytes = out.as_mut_ptr().cast();
        // SAFETY: the tensor and its range were checked. The bytes live until the synchronization.
        unsafe { get(self.raw.as_ptr(), tensor, bytes, offset, out.len()) };
        self.synchronize()
    }

    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        let set = self.iface().set_tensor_2d_async;
        let span = span(rows, to.layout().bytes(), data.len());
        let (Some(set), Some((offset, len))) = (set, span) else {
            self.synchronize()?;
            return to.write_rows(rows, data);
        };
        let Some(tensor) = self.queue(to, offset, len)? else {
            self.synchronize()?;
            return to.write_rows(rows, data);
        };
        let bytes = self.pending.stage(data);
        let Rows {
            len,
            count,
            stride,
            host_stride,
            ..
        } = rows;
        // SAFETY: the pieces lie in the tensor and in the bytes, which live until the stream is
        // synchronized.
        unsafe {
            set(
                self.raw.as_ptr(),
                tensor,
                bytes,
                offset,
                len,
                count,
                stride,
                host_stride,
            )
        };
        Ok(())
    }

    fn read_rows(&mut self, from: &TensorRef, rows: Rows, out: &mut [u8]) -> Result<()> {
        let get = self.iface().get_tensor_2d_async;
        let span = span(rows, from.layout().bytes(), out.len());
        let (Some(get), Some((offset, len))) = (get, span) else {
            self.synchronize()?;
            return from.read_rows(rows, out);
        };
        let Some(tensor) = self.queue(from, offset, len)? else {
            self.synchronize()?;
            return from.read_rows(rows, out);
        };
        let bytes = out.as_mut_ptr().cast();
        let Rows {
            len,
            count,
            stride,
            host_stride,
            ..
        } = rows;
        // SAFETY: the pieces lie in the tensor and in the bytes, which live until the
        // synchronization.
        unsafe {
            get(
                self.raw.as_ptr(),
                tensor,
                bytes,
                offset,
                len,
                count,
                stride,
                host_stride,
            )
        };
        self.synchronize()
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        if from.layout() == to.layout()
            && let Some(copy) = self.iface().cpy_tensor_async
            && let Some(target) = self.queue(to, 0, to.layout().bytes())?
        {
            let stream = self.raw.as_ptr();
            if let Some(source) = self.queue(from, 0, from.layout().bytes())? {
                // SAFETY: tensors of equal layout in buffers of this stream's device.
                if unsafe { copy(stream, stream, source, target) } {
                    return Ok(());
                }
            } else if let Some((peer, source)) = self.queue_at_peer(from)? {
                // SAFETY: tensors of equal layout, each in a buffer of its stream's device.
                if unsafe { copy(peer, stream, source, target) } {
                    return Ok(());
                }
            }
        }
        self.synchronize()?;
        to.copy_from(from)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = GgmlEvent::of(event, self.device.core())
            .ok_or_else(|| Error::invalid("an event of another device cannot be recorded here"))?;
        let record = self.iface().event_record.ok_or_else(|| {
            Error::unsupported(
                self.device.name(),
                "events",
                "the plugin has no function for it",
            )
        })?;
        // SAFETY: the function belongs to this backend, and the event to its device.
        unsafe { record(self.raw.as_ptr(), event.raw()) };
        event.set_recorded();
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let own = GgmlEvent::within_reach(event, self.device.core());
        match (own, self.iface().event_wait) {
            (Some(own), Some(wait)) => {
                if own.was_recorded() {
                    // SAFETY: the function belongs to this backend, and the event to its device.
                    unsafe { wait(self.raw.as_ptr(), own.raw()) };
                }
                Ok(())
            }
            _ => event.synchronize(),
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        if let Some(synchronize) = self.iface().synchronize {
            // SAFETY: the function belongs to this backend.
            unsafe { synchronize(self.raw.as_ptr()) };
        }
        self.pending.done();
        Ok(())
    }
}

impl GgmlStream {
    /// Returns the structure of a tensor for the plugin's queue, if the queue can access it: the
    /// tensor lies in private memory of this device, and the range lies in it.
    fn queue(
        &mut self,
        place: &TensorRef,
        offset: usize,
        len: usize,
    ) -> Result<Option<*mut abi::Tensor>> {
        let Some(buffer) = place.buffer.as_any().downcast_ref::<GgmlBuffer>() else {
            return Ok(None);
        };
        if !self.device.is_asynchronous() || !self.device.owns(buffer) || len == 0 {
            return Ok(None);
        }
        GgmlBuffer::check_range(place.slot, offset, len)?;
        if self.pending.staged_bytes > MAX_STAGED {
            self.synchronize()?;
        }
        let tensor = buffer.tensor(place.slot)?;
        self.pending.buffers.push(Arc::clone(&place.buffer));
        Ok(Some(tensor))
    }
}

impl GgmlStream {
    /// Returns a queue of the plugin's device that owns `place`, and the tensor's structure. The
    /// queue waits for this stream, and the plugin makes this stream wait for the copy that runs
    /// there. Returns `None` if it is not another device of a plugin that joins its devices.
    fn queue_at_peer(
        &mut self,
        place: &TensorRef,
    ) -> Result<Option<(*mut abi::Backend, *mut abi::Tensor)>> {
        let core = Arc::clone(self.device.core());
        let Some(buffer) = place.buffer.as_any().downcast_ref::<GgmlBuffer>() else {
            return Ok(None);
        };
        let device = buffer.device();
        let joined =
            core.plugin.joins_devices() && core.plugin.has_memory(place.buffer.buffer_type());
        let is_usable = joined && buffer.is_of(&core.plugin) && buffer.only_the_plugins();
        if !is_usable || device.is_null() || place.layout().is_empty() {
            return Ok(None);
        }
        let Some(record) = self.iface().event_record else {
            return Ok(None);
        };
        let known = self.peers.iter().position(|peer| peer.device == device);
        let number = match known {
            Some(number) => number,
            None => {
                // SAFETY: the device is one of the plugin's, and parameters are optional.
                let init = unsafe { (*device).iface.init_backend };
                // SAFETY: the function belongs to this device, and null means no parameters. The
                // new backend belongs to this stream.
                let raw =
                    init.and_then(|init| NonNull::new(unsafe { init(device, std::ptr::null()) }));
                let Some(raw) = raw else { return Ok(None) };
                let before = GgmlEvent::new(core, self.device.name())?;
                self.peers.push(PeerQueue {
                    device,
                    raw,
                    before,
                });
                self.peers.len() - 1
            }
        };
        let source = buffer.tensor(place.slot)?;
        let peer = &self.peers[number];
        let Some(wait) = peer.iface().event_wait else {
            return Ok(None);
        };
        // SAFETY: the event belongs to this stream's device, and queues of the plugin's devices can
        // wait for each other's events.
        unsafe {
            record(self.raw.as_ptr(), peer.before.raw());
            wait(peer.raw.as_ptr(), peer.before.raw());
        }
        let raw = peer.raw.as_ptr();
        self.pending.buffers.push(Arc::clone(&place.buffer));
        Ok(Some((raw, source)))
    }
}

impl Drop for GgmlStream {
    fn drop(&mut self) {
        // Queued work may still use resources that are freed now. A failure cannot be reported
        // here.
        let _ = self.synchronize();
        self.peers.clear();
        if let Some(free) = self.iface().free {
            // SAFETY: this value owns the backend, and it is not used again.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}
