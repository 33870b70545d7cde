//! The driver of this system, its cards and contexts.
#![allow(unsafe_code)]

use super::functions::{Functions, KernelNode, LaunchAttribute, LaunchConfig};
use crate::driver::{
    Address, CardInfo, Driver, DriverContext, DriverError, DriverErrorKind, DriverResult,
    EventHandle, FunctionHandle, GraphHandle, KernelLaunch, ModuleHandle, StreamHandle,
};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

const PROCESSORS: c_int = 16;
const INTEGRATED: c_int = 18;
const CAPABILITY: [c_int; 2] = [75, 76];
const NON_BLOCKING_STREAM: c_uint = 1;
/// Only calls of this thread are recorded, and only they must not break the recording.
const CAPTURE_MODE: c_int = 1;
/// The host sleeps instead of spinning, and no time is measured.
const EVENT_FLAGS: c_uint = 1 | 2;
const ERROR_LOG: c_int = 5;
const ERROR_LOG_SIZE: c_int = 6;

/// Loads the system's driver.
///
/// # Errors
/// The reason why there is none, or why it cannot be used.
pub fn load() -> Result<Arc<dyn Driver>, String> {
    let (functions, version) = Functions::load()?;
    let functions = Arc::new(functions);
    let cards = cards(&functions).map_err(|error| error.message)?;
    Ok(Arc::new(SystemDriver {
        functions,
        version,
        cards,
    }))
}

fn cards(functions: &Functions) -> DriverResult<Vec<CardInfo>> {
    let mut count = 0;
    // SAFETY: the count is written to a variable that outlives the call.
    functions.check("cuDeviceGetCount", unsafe {
        (functions.device_count)(&raw mut count)
    })?;
    (0..count).map(|index| card(functions, index)).collect()
}

fn device(functions: &Functions, index: c_int) -> DriverResult<c_int> {
    let mut device = 0;
    // SAFETY: the device is written to a variable that outlives the call.
    functions.check("cuDeviceGet", unsafe {
        (functions.device)(&raw mut device, index)
    })?;
    Ok(device)
}

fn card(functions: &Functions, index: c_int) -> DriverResult<CardInfo> {
    let device = device(functions, index)?;
    let text = |call: &str, function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
        let mut text = [0 as c_char; 256];
        // SAFETY: the driver writes at most the given number of characters, with a terminator.
        functions.check(call, unsafe {
            function(text.as_mut_ptr(), text.len() as c_int - 1, device)
        })?;
        // SAFETY: the array's last character is a terminator in any case.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_string_lossy().into_owned())
    };
    let attribute = |number: c_int| {
        let mut value = 0;
        // SAFETY: the value is written to a variable that outlives the call.
        functions.check("cuDeviceGetAttribute", unsafe {
            (functions.device_attribute)(&raw mut value, number, device)
        })?;
        Ok::<_, DriverError>(value.unsigned_abs())
    };
    let mut memory = 0;
    // SAFETY: the size is written to a variable that outlives the call.
    functions.check("cuDeviceTotalMem", unsafe {
        (functions.device_memory)(&raw mut memory, device)
    })?;
    Ok(CardInfo {
        name: text("cuDeviceGetName", functions.device_name)?,
        bus_address: text("cuDeviceGetPCIBusId", functions.device_bus_address)?,
        capability: attribute(CAPABILITY[0])? * 10 + attribute(CAPABILITY[1])?,
        processors: attribute(PROCESSORS)?,
        memory,
        is_integrated: attribute(INTEGRATED)? != 0,
    })
}

struct SystemDriver {
    functions: Arc<Functions>,
    version: c_int,
    cards: Vec<CardInfo>,
}

impl fmt::Debug for SystemDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SystemDriver({})", self.version)
    }
}

impl Driver for SystemDriver {
    fn description(&self) -> String {
        let (major, minor) = (self.version / 1000, self.version % 1000 / 10);
        format!("driver of CUDA {major}.{minor}")
    }

    fn cards(&self) -> &[CardInfo] {
        &self.cards
    }

    fn open(&self, card: usize) -> DriverResult<Arc<dyn DriverContext>> {
        let functions = &self.functions;
        let device = device(functions, card as c_int)?;
        let mut context = ptr::null_mut();
        // SAFETY: the context is written to a variable that outlives the call.
        functions.check("cuDevicePrimaryCtxRetain", unsafe {
            (functions.retain_context)(&raw mut context, device)
        })?;
        Ok(Arc::new(SystemContext {
            functions: Arc::clone(functions),
            device,
            context: context as usize,
        }))
    }
}

/// The primary context of a card.
struct SystemContext {
    functions: Arc<Functions>,
    device: c_int,
    /// The driver's pointer.
    context: usize,
}

impl fmt::Debug for SystemContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SystemContext({})", self.device)
    }
}

impl Drop for SystemContext {
    fn drop(&mut self) {
        // SAFETY: the context was retained once by `open`, and everything in it is gone.
        unsafe { (self.functions.release_context)(self.device) };
    }
}

impl SystemContext {
    /// Makes the context current in this thread and calls the driver.
    ///
    /// # Safety
    /// As for the function that `make` calls.
    unsafe fn call(&self, name: &str, make: impl FnOnce(&Functions) -> c_int) -> DriverResult<()> {
        let functions = &self.functions;
        // SAFETY: the context is retained as long as `self` exists.
        let current = unsafe { (functions.set_current)(self.context as *mut c_void) };
        functions.check("cuCtxSetCurrent", current)?;
        functions.check(name, make(functions))
    }

    /// Calls a function that writes a handle.
    ///
    /// # Safety
    /// As for the function that `make` calls with a valid pointer.
    unsafe fn create(
        &self,
        name: &str,
        make: impl FnOnce(&Functions, *mut *mut c_void) -> c_int,
    ) -> DriverResult<u64> {
        let mut handle = ptr::null_mut();
        // SAFETY: passed on to the caller; the handle outlives the call.
        unsafe { self.call(name, |functions| make(functions, &raw mut handle)) }?;
        Ok(handle as u64)
    }
}

fn pointer(handle: u64) -> *mut c_void {
    handle as usize as *mut c_void
}

/// Returns the list that passes `bytes` as the parameters of a kernel. It points to both.
fn packed(bytes: &[u8], size: &mut usize) -> [*mut c_void; 5] {
    *size = bytes.len();
    [
        pointer(1),
        bytes.as_ptr().cast_mut().cast(),
        pointer(2),
        ptr::from_mut(size).cast(),
        ptr::null_mut(),
    ]
}

// Handles are valid in all calls below: they come from the driver, and the types that own them
// (`DriverStream` and the like) destroy each once. Addresses come from `alloc`, and `CudaBuffer`
// checks every range. What kernels access is checked in kernels.
impl DriverContext for SystemContext {
    fn memory(&self) -> DriverResult<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the sizes are written to variables that outlive the call.
        unsafe {
            self.call("cuMemGetInfo", |f| {
                (f.memory)(&raw mut free, &raw mut total)
            })
        }?;
        Ok((free, total))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        let mut address = 0;
        // SAFETY: the address is written to a variable that outlives the call.
        unsafe { self.call("cuMemAlloc", |f| (f.alloc)(&raw mut address, bytes)) }?;
        Ok(address)
    }

    fn free(&self, address: Address) {
        // Queued copies may still use the memory, and that the driver waits is documented nowhere.
        // SAFETY: no preconditions.
        let waited = unsafe { self.call("cuCtxSynchronize", |f| (f.synchronize_context)()) };
        if let Err(error) = waited {
            tracing::debug!("{error}");
        }
        // SAFETY: the address comes from `alloc`, and nothing uses the memory any more.
        let freed = unsafe { self.call("cuMemFree", |f| (f.free)(address)) };
        if let Err(error) = freed {
            tracing::debug!("{error}");
        }
    }

    fn load(&self, ptx: &str) -> DriverResult<ModuleHandle> {
        let invalid = |_| DriverError {
            kind: DriverErrorKind::Other,
            message: "the text of a module contains a zero".into(),
        };
        let text = CString::new(ptx).map_err(invalid)?;
        let mut log = vec![0_u8; 4096];
        let mut options = [ERROR_LOG, ERROR_LOG_SIZE];
        let mut values = [log.as_mut_ptr().cast(), pointer(log.len() as u64 - 1)];
        // SAFETY: text, options and log outlive the call; the driver writes at most the given
        // number of bytes to the log.
        let loaded = unsafe {
            self.create("cuModuleLoadDataEx", |f, module| {
                let options = options.as_mut_ptr();
                (f.load)(
                    module,
                    text.as_ptr().cast(),
                    2,
                    options,
                    values.as_mut_ptr(),
                )
            })
        };
        loaded.map(ModuleHandle).map_err(|mut error| {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(0);
            let said = String::from_utf8_lossy(&log[..end]);
            error.message = format!("{} {}", error.message, said.trim());
            error
        })
    }

    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        let invalid = |_| DriverError {
            kind: DriverErrorKind::Other,
            message: "the name of a kernel contains a zero".into(),
        };
        let name = CString::new(name).map_err(invalid)?;
        // SAFETY: the name outlives the call.
        let function = unsafe {
            self.create("cuModuleGetFunction", |f, function| {
                (f.function)(function, pointer(module.0), name.as_ptr())
            })
        }?;
        Ok(FunctionHandle(function))
    }

    fn create_stream(&self) -> DriverResult<StreamHandle> {
        // SAFETY: the handle outlives the call.
        let stream = unsafe {
            self.create("cuStreamCreate", |f, stream| {
                (f.create_stream)(stream, NON_BLOCKING_STREAM)
            })
        };
        stream.map(StreamHandle)
    }

    fn destroy_stream(&self, stream: StreamHandle) {
        // SAFETY: the caller owns the stream and does not use it again.
        let destroyed =
            unsafe { self.call("cuStreamDestroy", |f| (f.destroy_stream)(pointer(stream.0))) };
        if let Err(error) = destroyed {
            tracing::debug!("{error}");
        }
    }

    fn synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        // SAFETY: the stream is valid.
        unsafe {
            self.call("cuStreamSynchronize", |f| {
                (f.synchronize)(pointer(stream.0))
            })
        }
    }

    fn write(&self, stream: StreamHandle, to: Address, data: &[u8]) -> DriverResult<()> {
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: `data` outlives the copy, because the stream is synchronized below. The driver
        // need not copy it before it returns, least of all if something else pinned it.
        unsafe {
            self.call("cuMemcpyHtoDAsync", |f| {
                let (from, len) = (data.as_ptr().cast(), data.len());
                (f.write)(to, from, len, pointer(stream.0))
            })
        }?;
        self.synchronize(stream)
    }

    fn read(&self, stream: StreamHandle, from: Address, out: &mut [u8]) -> DriverResult<()> {
        if !out.is_empty() {
            // SAFETY: `out` outlives the copy, because the stream is synchronized below.
            unsafe {
                self.call("cuMemcpyDtoHAsync", |f| {
                    let (to, len) = (out.as_mut_ptr().cast(), out.len());
                    (f.read)(to, from, len, pointer(stream.0))
                })
            }?;
        }
        self.synchronize(stream)
    }

    fn fill(&self, stream: StreamHandle, to: Address, len: usize, value: u8) -> DriverResult<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: see above.
        unsafe {
            self.call("cuMemsetD8Async", |f| {
                (f.fill)(to, value, len, pointer(stream.0))
            })
        }
    }

    fn copy(
        &self,
        stream: StreamHandle,
        to: Address,
        from: Address,
        len: usize,
    ) -> DriverResult<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: see above.
        unsafe {
            self.call("cuMemcpyDtoDAsync", |f| {
                (f.copy)(to, from, len, pointer(stream.0))
            })
        }
    }

    fn launch(&self, stream: StreamHandle, launch: &KernelLaunch) -> DriverResult<()> {
        let mut size = 0;
        let mut extra = packed(&launch.arguments, &mut size);
        if launch.is_early {
            let mut attributes = [LaunchAttribute::EARLY];
            let config = LaunchConfig {
                grid: [launch.groups, 1, 1],
                block: [launch.threads, 1, 1],
                shared: 0,
                stream: pointer(stream.0),
                attributes: attributes.as_mut_ptr(),
                attribute_count: 1,
            };
            // SAFETY: the function is valid, the configuration and its attribute outlive the call,
            // and the driver copies the parameters before it returns.
            return unsafe {
                self.call("cuLaunchKernelEx", |f| {
                    let function = pointer(launch.function.0);
                    let none = ptr::null_mut();
                    (f.launch_with)(&raw const config, function, none, extra.as_mut_ptr())
                })
            };
        }
        // SAFETY: the function is valid, and the driver copies the parameters before it returns.
        unsafe {
            self.call("cuLaunchKernel", |f| {
                (f.launch)(
                    pointer(launch.function.0),
                    launch.groups,
                    1,
                    1,
                    launch.threads,
                    1,
                    1,
                    0,
                    pointer(stream.0),
                    ptr::null_mut(),
                    extra.as_mut_ptr(),
                )
            })
        }
    }

    fn create_graph(&self, launches: &[KernelLaunch]) -> DriverResult<GraphHandle> {
        if launches.iter().any(|launch| launch.is_early) {
            match self
                .capture(launches)
                .and_then(|graph| self.instance(graph))
            {
                Err(error) if error.kind != DriverErrorKind::Lost => {
                    tracing::debug!("a graph without early starts: {error}");
                }
                done => return done,
            }
        }
        // SAFETY: the handle outlives the call; the flags must be 0.
        let graph = unsafe { self.create("cuGraphCreate", |f, graph| (f.create_graph)(graph, 0)) }?;
        match self.add_nodes(graph, launches) {
            Ok(()) => self.instance(graph),
            Err(error) => self.destroy(graph).and(Err(error)),
        }
    }

    fn launch_graph(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        // SAFETY: both handles are valid.
        unsafe {
            self.call("cuGraphLaunch", |f| {
                (f.launch_graph)(pointer(graph.0), pointer(stream.0))
            })
        }
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: the caller owns the graph, and its last run is done.
        let destroyed = unsafe {
            self.call("cuGraphExecDestroy", |f| {
                (f.destroy_instance)(pointer(graph.0))
            })
        };
        if let Err(error) = destroyed {
            tracing::debug!("{error}");
        }
    }

    fn create_event(&self) -> DriverResult<EventHandle> {
        // SAFETY: the handle outlives the call.
        let event = unsafe {
            self.create("cuEventCreate", |f, event| {
                (f.create_event)(event, EVENT_FLAGS)
            })
        };
        event.map(EventHandle)
    }

    fn destroy_event(&self, event: EventHandle) {
        // SAFETY: the caller owns the event and does not use it again.
        let destroyed =
            unsafe { self.call("cuEventDestroy", |f| (f.destroy_event)(pointer(event.0))) };
        if let Err(error) = destroyed {
            tracing::debug!("{error}");
        }
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        // SAFETY: both handles are valid.
        unsafe {
            self.call("cuEventRecord", |f| {
                (f.record)(pointer(event.0), pointer(stream.0))
            })
        }
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        // SAFETY: both handles are valid; the flags must be 0.
        unsafe {
            self.call("cuStreamWaitEvent", |f| {
                (f.wait)(pointer(stream.0), pointer(event.0), 0)
            })
        }
    }

    fn synchronize_event(&self, event: EventHandle) -> DriverResult<()> {
        // SAFETY: the event is valid.
        unsafe {
            self.call("cuEventSynchronize", |f| {
                (f.synchronize_event)(pointer(event.0))
            })
        }
    }
}

impl SystemContext {
    /// Records launches as a graph that keeps their early starts. Drivers before CUDA 12.3 cannot.
    fn capture(&self, launches: &[KernelLaunch]) -> DriverResult<u64> {
        let stream = self.create_stream()?;
        // SAFETY: the stream is valid, and nothing else uses it.
        let begun = unsafe {
            self.call("cuStreamBeginCapture", |f| {
                (f.begin_capture)(pointer(stream.0), CAPTURE_MODE)
            })
        };
        let graph = begun.and_then(|()| {
            let mut launches = launches.iter();
            let queued = launches.try_for_each(|launch| self.launch(stream, launch));
            // SAFETY: the recording of this stream began above. It ends also if it failed.
            let graph = unsafe {
                self.create("cuStreamEndCapture", |f, graph| {
                    (f.end_capture)(pointer(stream.0), graph)
                })
            };
            match (queued, graph) {
                (Ok(()), graph) => graph,
                (Err(error), Ok(graph)) => self.destroy(graph).and(Err(error)),
                (Err(error), Err(_)) => Err(error),
            }
        });
        self.destroy_stream(stream);
        graph
    }

    /// Makes a graph ready to run, and destroys its description.
    fn instance(&self, graph: u64) -> DriverResult<GraphHandle> {
        // SAFETY: the graph is complete.
        let instance = unsafe {
            self.create("cuGraphInstantiateWithFlags", |f, instance| {
                (f.instantiate)(instance, pointer(graph), 0)
            })
        };
        self.destroy(graph)?;
        instance.map(GraphHandle)
    }

    /// Destroys the description of a graph, which an instance does not need.
    fn destroy(&self, graph: u64) -> DriverResult<()> {
        // SAFETY: the caller owns the graph.
        unsafe { self.call("cuGraphDestroy", |f| (f.destroy_graph)(pointer(graph))) }
    }

    /// Adds a chain of launches to a graph.
    fn add_nodes(&self, graph: u64, launches: &[KernelLaunch]) -> DriverResult<()> {
        let mut before: Option<*mut c_void> = None;
        for launch in launches {
            let mut size = 0;
            let mut extra = packed(&launch.arguments, &mut size);
            let node = KernelNode {
                function: pointer(launch.function.0),
                grid: [launch.groups, 1, 1],
                block: [launch.threads, 1, 1],
                shared: 0,
                parameters: ptr::null_mut(),
                extra: extra.as_mut_ptr(),
            };
            let dependencies = before.as_slice();
            // SAFETY: dependencies are nodes of this graph; the driver copies the parameters
            // before it returns.
            let added = unsafe {
                self.create("cuGraphAddKernelNode", |f, added| {
                    let (first, count) = (dependencies.as_ptr(), dependencies.len());
                    (f.add_node)(added, pointer(graph), first, count, &raw const node)
                })
            }?;
            before = Some(pointer(added));
        }
        Ok(())
    }
}
