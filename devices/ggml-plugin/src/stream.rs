//! ggml backends: streams that compute graphs.

use crate::buffers::generation;
use crate::device::{DEVICE_NAME, cpu_with_threads, plugin};
use crate::graphs::Recent;
use crate::host::{guard, log_error};
use crate::memory::TensorLocations;
use samite_core::{
    CancelToken, DType, Device as _, Error, Layout, PlacedGraph, Prepared, Result, RunControl,
    RunObserver, Slot, TensorId, TensorRef, Usage, host_buffer_type,
};
use samite_cpu::CpuDevice;
use samite_ggml::abi::{AbortCallback, Backend, BackendI, CGraph, Device, Guid, Status};
use samite_ggml::convert::import::{Imported, Importer};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// Identifies backends of this library: `samite-ggml-cpu1`.
static GUID: Guid = *b"samite-ggml-cpu1";

/// Maximum number of threads, equal to the device's limit.
const MAX_THREADS: usize = 512;

const STREAM: BackendI = BackendI {
    get_name: Some(name),
    free: Some(free),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: None,
    synchronize: None,
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

/// State of a backend.
struct Stream {
    /// One lane for each thread count used so far, the current one first. Programs switch between
    /// counts for prompts and single tokens.
    lanes: Vec<FixedThreadStream>,
    abort: Option<Abort>,
    /// Buffer generation for which graphs were prepared.
    generation: u64,
    /// Scratch memory shared by all graphs.
    workspace: Option<TensorRef>,
}

/// A stream with a fixed number of threads.
struct FixedThreadStream {
    device: Arc<CpuDevice>,
    stream: Box<dyn samite_core::Stream>,
    graphs: Recent<PluginGraph>,
}

impl FixedThreadStream {
    fn new(device: Arc<CpuDevice>) -> Result<Self> {
        Ok(FixedThreadStream {
            stream: Arc::clone(&device).open_stream()?,
            device,
            graphs: Recent::default(),
        })
    }
}

/// Abort callback of the host.
#[derive(Clone, Copy)]
struct Abort {
    callback: AbortCallback,
    data: *mut c_void,
}

/// A prepared graph, with memory for tensors that the host did not place.
struct PluginGraph {
    prepared: Box<dyn Prepared>,
    /// Keeps temporary memory alive.
    _places: Vec<Option<TensorRef>>,
}

/// Calls the host's abort callback after each node.
struct Watch {
    abort: Abort,
    cancel: CancelToken,
}

// SAFETY: the CPU device reports nodes only while the graph runs, in the thread that runs it, which
// is the one in which the host waits.
unsafe impl Send for Watch {}
// SAFETY: the CPU device reports nodes only in the thread that runs the graph, so two threads never
// call the host at once; the cancel token is thread-safe.
unsafe impl Sync for Watch {}

impl RunObserver for Watch {
    fn ran(&self, _: TensorId, _: Duration, _: Duration) {
        // SAFETY: the host guarantees that the callback can be called with its data while a graph
        // runs.
        if unsafe { (self.abort.callback)(self.abort.data) } {
            self.cancel.cancel();
        }
    }
}

impl Stream {
    fn new(device: Arc<CpuDevice>) -> Result<Self> {
        Ok(Stream {
            lanes: vec![FixedThreadStream::new(device)?],
            abort: None,
            generation: generation(),
            workspace: None,
        })
    }

    fn set_threads(&mut self, threads: usize) -> Result<()> {
        match self
            .lanes
            .iter()
            .position(|lane| lane.device.threads() == threads)
        {
            Some(at) => self.lanes.swap(0, at),
            None => self
                .lanes
                .insert(0, FixedThreadStream::new(cpu_with_threads(threads))?),
        }
        Ok(())
    }

    /// Computes a graph.
    ///
    /// # Safety
    /// The graph must be valid.
    unsafe fn compute(&mut self, graph: &CGraph) -> Result<()> {
        let generation = generation();
        if self.generation != generation {
            self.lanes.iter_mut().for_each(|lane| lane.graphs.clear());
            self.generation = generation;
        }
        let workspace = &mut self.workspace;
        let FixedThreadStream {
            device,
            stream,
            graphs,
        } = &mut self.lanes[0];
        // SAFETY: the graph is valid, as `get` and `Importer::graph` require.
        let work = unsafe {
            graphs.get(graph, || {
                let imported = Importer::new(TensorLocations::default(), plugin().host.version)
                    .graph(graph)
                    .map_err(|reason| Error::device(device.name(), reason.into_owned()))?;
                prepare(device, &mut **stream, workspace, imported)
            })
        }?;
        let cancel = CancelToken::new();
        let watch = self.abort.map(|abort| -> Arc<dyn RunObserver> {
            Arc::new(Watch {
                abort,
                cancel: cancel.clone(),
            })
        });
        let control = RunControl {
            cancel: &cancel,
            observer: watch.as_ref(),
        };
        stream.run(&mut *work.prepared, control)?;
        stream.synchronize()
    }
}

fn prepare(
    device: &CpuDevice,
    stream: &mut dyn samite_core::Stream,
    workspace: &mut Option<TensorRef>,
    imported: Imported,
) -> Result<PluginGraph> {
    let Imported {
        graph,
        nodes,
        places,
    } = imported;
    let bytes = device.workspace(&graph, &nodes)?;
    if workspace
        .as_ref()
        .is_none_or(|workspace| workspace.layout().bytes() < bytes)
    {
        let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?;
        let buffer = host_buffer_type().allocate(bytes, Usage::Compute)?;
        let slot = Slot { offset: 0, layout };
        *workspace = Some(TensorRef { buffer, slot });
    }
    let prepared = stream.prepare(PlacedGraph {
        graph: &graph,
        nodes: &nodes,
        places: &places,
        workspace: workspace.as_ref(),
        compiled: None,
    })?;
    Ok(PluginGraph {
        prepared,
        _places: places,
    })
}

/// Opens a stream with the default number of threads.
pub unsafe extern "C" fn init(device: *mut Device, _params: *const c_char) -> *mut Backend {
    guard(null_mut(), || {
        let stream = match Stream::new(Arc::clone(&plugin().cpu)) {
            Ok(stream) => stream,
            Err(error) => {
                log_error(&error.to_string());
                return null_mut();
            }
        };
        Box::into_raw(Box::new(Backend {
            guid: (&raw const GUID).cast_mut(),
            iface: STREAM,
            device,
            context: Box::into_raw(Box::new(stream)).cast(),
        }))
    })
}

unsafe extern "C" fn name(_: *mut Backend) -> *const c_char {
    DEVICE_NAME.as_ptr()
}

unsafe extern "C" fn free(backend: *mut Backend) {
    guard((), || {
        // SAFETY: both were made by `init`, and a backend is freed once.
        unsafe {
            let backend = Box::from_raw(backend);
            drop(Box::from_raw(backend.context.cast::<Stream>()));
        }
    });
}

/// Returns the stream of a backend.
///
/// # Safety
/// `backend` must come from `init` and must not be used elsewhere meanwhile.
unsafe fn stream_of<'a>(backend: *mut Backend) -> &'a mut Stream {
    // SAFETY: the backend comes from `init`, its context is a `Stream` until it is freed, and it is
    // not used elsewhere meanwhile.
    unsafe { &mut *(*backend).context.cast::<Stream>() }
}

unsafe extern "C" fn graph_compute(backend: *mut Backend, graph: *mut CGraph) -> Status {
    guard(Status::FAILED, || {
        // SAFETY: the host passes a backend of this plugin and a valid graph, in one thread at a
        // time.
        let result = unsafe { stream_of(backend).compute(&*graph) };
        match result {
            Ok(()) => Status::SUCCESS,
            Err(Error::Cancelled) => Status::ABORTED,
            Err(error) => {
                log_error(&error.to_string());
                match error {
                    Error::OutOfMemory { .. } => Status::ALLOC_FAILED,
                    _ => Status::FAILED,
                }
            }
        }
    })
}

/// `ggml_backend_set_n_threads`
pub unsafe extern "C" fn set_n_threads(backend: *mut Backend, threads: c_int) {
    guard((), || {
        let threads = usize::try_from(threads).unwrap_or(0).clamp(1, MAX_THREADS);
        // SAFETY: the host passes a backend of this plugin, in one thread at a time.
        if let Err(error) = unsafe { stream_of(backend) }.set_threads(threads) {
            log_error(&error.to_string());
        }
    });
}

/// `ggml_backend_set_abort_callback`
pub unsafe extern "C" fn set_abort_callback(
    backend: *mut Backend,
    callback: Option<AbortCallback>,
    data: *mut c_void,
) {
    guard((), || {
        // SAFETY: the host passes a backend of this plugin, in one thread at a time.
        let stream = unsafe { stream_of(backend) };
        stream.abort = callback.map(|callback| Abort { callback, data });
    });
}
