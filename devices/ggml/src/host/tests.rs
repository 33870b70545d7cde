//! A plugin as lazy as the interface allows: queued work runs only when a caller waits for it.

use super::buffer::GgmlBuffer;
use super::device::GgmlDevice;
use super::library::Plugin;
use crate::abi::{
    Backend, BackendEvent, BackendI, Buffer, BufferFields, BufferI, BufferType, BufferTypeI25,
    BufferTypeTable, CGraph, DevCaps, DevProps, Device, DeviceI, GraphOptimizeParams, Reg, RegI,
    Status, Tensor, Version, device_type, op, usage,
};
use samite_core::{
    CancelToken, DType, Device as _, Graph, HostMemory, KeepAlive, Layout, PlacedGraph, Prepared,
    Rows, RunControl, Slot, StoredTensor, Stream, TensorGroup, TensorId, TensorInfo, TensorRef,
    Usage,
};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::Mutex;

/// Queued work, with addresses as numbers.
enum Command {
    Copy {
        from: usize,
        to: usize,
        len: usize,
    },
    Scale {
        from: usize,
        to: usize,
        len: usize,
        factor: f32,
    },
}

/// Log of the calls, in the context of the plugin's device.
#[derive(Default)]
struct Log {
    queue: Vec<Command>,
    calls: Vec<&'static str>,
    /// Names and offsets of the tensors that buffers initialised, in order, and resets.
    given: Vec<String>,
    /// `uid` of the graphs that were computed.
    uids: Vec<u64>,
    optimize: Option<Optimize>,
}

/// Optimization of a plugin: gets the graph, and the host's function that keeps tensors until
/// others are computed.
type Optimize = Box<dyn FnMut(&mut CGraph, &dyn Fn(*mut Tensor, *mut Tensor)) + Send>;

type Context = Mutex<Log>;

/// Locks the log and passes it to `f`.
///
/// # Safety
/// The pointer must be the context of this plugin's device.
unsafe fn log<R>(context: *mut c_void, f: impl FnOnce(&mut Log) -> R) -> R {
    // SAFETY: it is the context of this plugin's device, a `Context` that tests keep alive, and
    // only its lock gives access.
    f(&mut unsafe { &*context.cast::<Context>() }.lock().unwrap())
}

fn work_off(log: &mut Log) {
    for command in log.queue.drain(..) {
        // SAFETY: the host keeps all resources of queued work until it has waited for it. This is
        // what the test checks.
        unsafe {
            match command {
                Command::Copy { from, to, len } => {
                    std::ptr::copy(from as *const u8, to as *mut u8, len);
                }
                Command::Scale {
                    from,
                    to,
                    len,
                    factor,
                } => {
                    for i in 0..len {
                        let x = (from as *const f32).add(i).read();
                        (to as *mut f32).add(i).write(x * factor);
                    }
                }
            }
        }
    }
}

macro_rules! queued {
    ($stream:expr, $name:literal, $($command:expr),*) => {
        // SAFETY: streams have their device's context.
        unsafe {
            log((*$stream).context, |log| {
                log.calls.push($name);
                log.queue.extend([$($command),*]);
            })
        }
    };
}

fn address(tensor: *const Tensor, offset: usize) -> usize {
    // SAFETY: the host passes valid tensors.
    unsafe { (*tensor).data as usize + offset }
}

unsafe extern "C" fn set(
    s: *mut Backend,
    t: *mut Tensor,
    data: *const c_void,
    at: usize,
    len: usize,
) {
    queued!(
        s,
        "set",
        Command::Copy {
            from: data as usize,
            to: address(t, at),
            len
        }
    );
}

unsafe extern "C" fn get(
    s: *mut Backend,
    t: *const Tensor,
    data: *mut c_void,
    at: usize,
    len: usize,
) {
    queued!(
        s,
        "get",
        Command::Copy {
            from: address(t, at),
            to: data as usize,
            len
        }
    );
}

unsafe extern "C" fn set_2d(
    s: *mut Backend,
    t: *mut Tensor,
    data: *const c_void,
    at: usize,
    len: usize,
    count: usize,
    stride: usize,
    data_stride: usize,
) {
    queued!(s, "set 2d",);
    for row in 0..count {
        let (from, to) = (
            data as usize + row * data_stride,
            address(t, at + row * stride),
        );
        queued!(s, "row", Command::Copy { from, to, len });
    }
}

unsafe extern "C" fn copy(
    s: *mut Backend,
    receiver: *mut Backend,
    from: *const Tensor,
    to: *mut Tensor,
) -> bool {
    // A copy between two devices runs after the queued work of the source and before the pending
    // work of the target.
    if s != receiver {
        queued!(s, "give",);
        // SAFETY: streams have their device's context.
        unsafe { log((*s).context, work_off) };
    }
    let s = receiver;
    // SAFETY: valid tensors.
    let len = unsafe { (*from).nb[3] * (*from).ne[3] as usize };
    queued!(
        s,
        "copy",
        Command::Copy {
            from: address(from, 0),
            to: address(to, 0),
            len
        }
    );
    true
}

unsafe extern "C" fn synchronize(s: *mut Backend) {
    queued!(s, "synchronize",);
    // SAFETY: streams have their device's context.
    unsafe { log((*s).context, work_off) };
}

unsafe extern "C" fn compute(s: *mut Backend, graph: *mut CGraph) -> Status {
    // SAFETY: the graph is valid, and streams have their device's context.
    unsafe { log((*s).context, |log| log.uids.push((*graph).uid)) };
    // SAFETY: a valid graph of products with a number.
    for &node in unsafe { (*graph).nodes() } {
        // SAFETY: nodes of a valid graph are valid tensors.
        let t = unsafe { &*node };
        queued!(
            s,
            "compute",
            Command::Scale {
                from: address(t.src[0], 0),
                to: address(t, 0),
                len: t.ne.iter().product::<i64>() as usize,
                factor: f32::from_bits(t.op_params[0].cast_unsigned()),
            }
        );
    }
    Status::SUCCESS
}

unsafe extern "C" fn record(s: *mut Backend, _: *mut BackendEvent) {
    queued!(s, "record",);
}

unsafe extern "C" fn wait(s: *mut Backend, _: *mut BackendEvent) {
    queued!(s, "wait",);
}

unsafe extern "C" fn optimize(
    s: *mut Backend,
    graph: *mut CGraph,
    params: *mut GraphOptimizeParams,
) {
    queued!(s, "optimize",);
    // SAFETY: the host passes a valid graph and its function.
    unsafe {
        let params = &*params;
        let keep = |tensor, until| params.add_alloc_dep.unwrap()(params.user_data, tensor, until);
        log((*s).context, |log| {
            if let Some(optimize) = &mut log.optimize {
                optimize(&mut *graph, &keep);
            }
        });
    }
}

unsafe extern "C" fn free_stream(stream: *mut Backend) {
    // SAFETY: created by `open`, with ownership passed back.
    drop(unsafe { Box::from_raw(stream) });
}

unsafe extern "C" fn open(device: *mut Device, _: *const c_char) -> *mut Backend {
    Box::into_raw(Box::new(Backend {
        guid: null_mut(),
        iface: BackendI {
            get_name: None,
            free: Some(free_stream),
            set_tensor_async: Some(set),
            get_tensor_async: Some(get),
            set_tensor_2d_async: Some(set_2d),
            get_tensor_2d_async: None,
            cpy_tensor_async: Some(copy),
            synchronize: Some(synchronize),
            graph_plan_create: None,
            graph_plan_free: None,
            graph_plan_update: None,
            graph_plan_compute: None,
            graph_compute: Some(compute),
            event_record: Some(record),
            event_wait: Some(wait),
            graph_optimize: Some(optimize),
        },
        device,
        // SAFETY: the host passes the device of the test.
        context: unsafe { (*device).context },
    }))
}

unsafe extern "C" fn event_new(device: *mut Device) -> *mut BackendEvent {
    // SAFETY: the host passes the device of the test.
    let context = unsafe { (*device).context };
    Box::into_raw(Box::new(BackendEvent { device, context }))
}

unsafe extern "C" fn event_free(_: *mut Device, event: *mut BackendEvent) {
    // SAFETY: created by `event_new`, with ownership passed back.
    drop(unsafe { Box::from_raw(event) });
}

unsafe extern "C" fn event_synchronize(device: *mut Device, _: *mut BackendEvent) {
    // SAFETY: the device of the test.
    unsafe { log((*device).context, work_off) };
}

unsafe extern "C" fn name(_: *mut Device) -> *const c_char {
    c"Lazy".as_ptr()
}

unsafe extern "C" fn type_name(_: *mut BufferType) -> *const c_char {
    c"Lazy".as_ptr()
}

unsafe extern "C" fn alignment(_: *mut BufferType) -> usize {
    64
}

unsafe extern "C" fn allocate(buft: *mut BufferType, size: usize) -> *mut Buffer {
    let words = vec![0u64; size.div_ceil(8)].into_boxed_slice();
    let iface = BufferI {
        get_base: Some(base),
        init_tensor: Some(init_tensor),
        reset: Some(reset),
        memset_tensor: Some(set_bytes),
        set_tensor: Some(set_now),
        get_tensor: Some(get_now),
        clear: Some(clear),
        ..BufferI::NONE
    };
    let context = Box::into_raw(Box::new(words)).cast();
    create(iface, buft, context, size)
}

/// Release of the test's plugin.
const VERSION: Version = Version::V28;

fn create(iface: BufferI, buft: *mut BufferType, context: *mut c_void, size: usize) -> *mut Buffer {
    let fields = BufferFields {
        buft,
        context,
        size,
        usage: usage::ANY,
    };
    Buffer::create(iface, fields, VERSION)
}

/// Returns the fields of a buffer from `create`.
unsafe fn fields(buffer: *mut Buffer) -> BufferFields {
    // SAFETY: a buffer of this version.
    unsafe { *Buffer::fields(buffer, VERSION) }
}

unsafe extern "C" fn free_buffer(buffer: *mut Buffer) {
    // SAFETY: created by `allocate` or `from_host`, with ownership passed back.
    unsafe {
        if (*buffer).iface.clear.is_some() {
            drop(Box::from_raw(fields(buffer).context.cast::<Box<[u64]>>()));
        }
        Buffer::free(buffer, VERSION);
    }
}

unsafe extern "C" fn base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: a buffer of `allocate`.
    unsafe {
        (*fields(buffer).context.cast::<Box<[u64]>>())
            .as_mut_ptr()
            .cast()
    }
}

/// Passes a line to the log of a buffer's device.
unsafe fn note(buffer: *mut Buffer, line: String) {
    // SAFETY: a buffer of this plugin, whose type has a device with a context.
    unsafe {
        let buffer_type = BufferTypeTable::read(fields(buffer).buft, VERSION);
        log((*buffer_type.device).context, |log| log.given.push(line));
    }
}

/// Marks the tensor, as plugins do.
unsafe extern "C" fn init_tensor(buffer: *mut Buffer, tensor: *mut Tensor) -> Status {
    // SAFETY: the host passes its buffer and a valid tensor.
    unsafe {
        assert!((*tensor).extra.is_null(), "it is initialised once");
        (*tensor).extra = std::ptr::without_provenance_mut(1);
        let offset = (*tensor).data as usize - base(buffer) as usize;
        note(buffer, format!("{} at {offset}", (*tensor).name()));
    }
    Status::SUCCESS
}

unsafe extern "C" fn reset(buffer: *mut Buffer) {
    // SAFETY: the host passes its buffer.
    unsafe { note(buffer, "reset".into()) };
}

unsafe extern "C" fn set_now(
    _: *mut Buffer,
    t: *mut Tensor,
    data: *const c_void,
    at: usize,
    len: usize,
) {
    // SAFETY: the host checks ranges.
    unsafe { std::ptr::copy(data.cast::<u8>(), address(t, at) as *mut u8, len) };
}

unsafe extern "C" fn get_now(
    _: *mut Buffer,
    t: *const Tensor,
    data: *mut c_void,
    at: usize,
    len: usize,
) {
    // SAFETY: the host checks ranges.
    unsafe { std::ptr::copy(address(t, at) as *const u8, data.cast::<u8>(), len) };
}

/// Clears like a GPU queue: in words that hold the value in one byte only.
unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: all of it, which is a number of words.
    unsafe {
        let words = base(buffer).cast::<u32>();
        for word in 0..fields(buffer).size / 4 {
            words.add(word).write(value.into());
        }
    };
}

/// Fills like a GPU queue: only whole words, rounded down.
unsafe extern "C" fn set_bytes(_: *mut Buffer, t: *mut Tensor, value: u8, at: usize, len: usize) {
    // SAFETY: the host checks ranges.
    unsafe { ((address(t, at) / 4 * 4) as *mut u8).write_bytes(value, len / 4 * 4) };
}

/// Bytes of auxiliary data after results.
const NOTES: usize = 100;

unsafe extern "C" fn alloc_size(_: *mut BufferType, tensor: *const Tensor) -> usize {
    // SAFETY: a valid tensor, and a valid source of a product with a number.
    unsafe {
        let bytes = (*tensor).nb[3] * (*tensor).ne[3] as usize;
        if (*tensor).op == op::SCALE && !(*tensor).src[0].is_null() {
            bytes + NOTES
        } else {
            bytes
        }
    }
}

unsafe extern "C" fn given_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: a buffer of `from_host`.
    unsafe { fields(buffer).context }
}

/// Wraps memory of the host, which must consist of whole pages.
unsafe extern "C" fn from_host(
    device: *mut Device,
    data: *mut c_void,
    size: usize,
    _: usize,
) -> *mut Buffer {
    assert_eq!((data as usize % 4096, size % 4096), (0, 0));
    let iface = BufferI {
        get_base: Some(given_base),
        ..BufferI::NONE
    };
    // SAFETY: the device of the test.
    create(iface, unsafe { buffer_type(device) }, data, size)
}

unsafe extern "C" fn buffer_type(device: *mut Device) -> *mut BufferType {
    let iface = BufferTypeI25 {
        get_name: Some(type_name),
        alloc_buffer: Some(allocate),
        get_alignment: Some(alignment),
        get_max_size: None,
        get_alloc_size: Some(alloc_size),
        is_host: None,
    };
    BufferTypeTable {
        iface,
        device,
        context: null_mut(),
    }
    .leak(VERSION)
}

unsafe extern "C" fn host_type(device: *mut Device) -> *mut BufferType {
    unsafe extern "C" fn yes(_: *mut BufferType) -> bool {
        true
    }
    // SAFETY: a type of this version, changed before any other code has it.
    unsafe {
        let host = buffer_type(device);
        (*host.cast::<crate::abi::BufferTypeV26>()).iface.is_host = Some(yes);
        host
    }
}

unsafe extern "C" fn props(_: *mut Device, props: *mut DevProps) {
    // SAFETY: the host passes space for the properties.
    unsafe {
        *props = DevProps {
            kind: device_type::GPU,
            caps: DevCaps {
                async_: true,
                host_buffer: true,
                buffer_from_host_ptr: true,
                events: true,
                ..DevCaps::default()
            },
            ..DevProps::zeroed()
        };
    }
}

unsafe extern "C" fn supports(_: *mut Device, tensor: *const Tensor) -> bool {
    // SAFETY: a valid tensor.
    unsafe { (*tensor).op == op::SCALE }
}

unsafe extern "C" fn supports_type(_: *mut Device, _: *mut BufferType) -> bool {
    true
}

/// Returns a device of the lazy plugin, which lives until the process ends, and its log.
fn lazy() -> (Arc<GgmlDevice>, &'static Context) {
    let [one, _] = lazy_pair("test");
    one
}

/// Returns two devices of a plugin with this name.
fn lazy_pair(name: &str) -> [(Arc<GgmlDevice>, &'static Context); 2] {
    let [(first, reg, context), (second, _, other)] = [raw_device(), raw_device()];
    let mut plugin = Plugin::of_test(first, reg, free_buffer);
    plugin.name = name.into();
    let plugin = Arc::new(plugin);
    [(first, context), (second, other)].map(|(device, context)| {
        let device = GgmlDevice::new(Arc::clone(&plugin), device, None, |_| false);
        (device.unwrap(), context)
    })
}

fn raw_device() -> (*mut Device, *mut Reg, &'static Context) {
    let context: &'static Context = Box::leak(Box::default());
    let reg = Box::into_raw(Box::new(Reg {
        api_version: 2,
        iface: RegI {
            get_name: None,
            get_device_count: None,
            get_device: None,
            get_proc_address: None,
        },
        context: null_mut(),
    }));
    let device = Box::into_raw(Box::new(Device {
        iface: DeviceI {
            get_name: Some(name),
            get_description: None,
            get_memory: None,
            get_type: None,
            get_props: Some(props),
            init_backend: Some(open),
            get_buffer_type: Some(buffer_type),
            get_host_buffer_type: Some(host_type),
            buffer_from_host_ptr: Some(from_host),
            supports_op: Some(supports),
            supports_buft: Some(supports_type),
            offload_op: None,
            event_new: Some(event_new),
            event_free: Some(event_free),
            event_synchronize: Some(event_synchronize),
        },
        reg,
        context: std::ptr::from_ref(context).cast_mut().cast(),
    }));
    (device, reg, context)
}

fn calls(context: &Context) -> Vec<&'static str> {
    std::mem::take(&mut context.lock().unwrap().calls)
}

/// Returns rows of four numbers in a new buffer of the device.
fn rows(device: &GgmlDevice, count: usize) -> TensorRef {
    let layout = Layout::contiguous(DType::F32, [4, count, 1, 1]).unwrap();
    TensorRef {
        buffer: device
            .buffer_type()
            .allocate(layout.bytes(), Usage::Compute)
            .unwrap(),
        slot: Slot { offset: 0, layout },
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// Prepares one node.
fn prepare(
    stream: &mut dyn Stream,
    graph: &Graph,
    node: TensorId,
    places: &[Option<TensorRef>],
) -> Box<dyn Prepared> {
    let work = PlacedGraph {
        graph,
        nodes: &[node],
        places,
        workspace: None,
        compiled: None,
    };
    stream.prepare(work).unwrap()
}

fn run(stream: &mut dyn Stream, prepared: &mut dyn Prepared) {
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(prepared, control).unwrap();
}

#[test]
fn plugin_capabilities_are_forwarded() {
    let (device, _) = lazy();
    let capabilities = device.capabilities();
    assert!(capabilities.asynchronous && capabilities.events && capabilities.host_buffer);
    let host = device.host_buffer_type().unwrap();
    let buffer = host.allocate(64, Usage::Any).unwrap();
    assert!(host.is_host() && buffer.host().is_some());
    assert!(!device.buffer_type().is_host());
}

#[test]
fn writes_are_queued_with_their_data_without_waiting() {
    let (device, context) = lazy();
    let tensor = rows(&device, 3);
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    calls(context);
    let mut data = bytes(&[1.0; 12]);
    stream.write(&tensor, 0, &data).unwrap();
    data.fill(0xff);
    let mut data = bytes(&[2.0, 0.0, 3.0, 0.0]);
    let pieces = Rows {
        offset: 4,
        len: 4,
        count: 2,
        stride: 16,
        host_stride: 8,
    };
    stream.write_rows(&tensor, pieces, &data).unwrap();
    data.fill(0xff);
    drop(data);
    assert_eq!(calls(context), ["set", "set 2d", "row", "row"]);
    let mut out = vec![0; 48];
    tensor.read(0, &mut out).unwrap();
    assert_eq!(out, [0; 48], "nothing has happened yet");
    stream.read(&tensor, 0, &mut out).unwrap();
    assert_eq!(
        out,
        bytes(&[1.0, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    );
    assert_eq!(calls(context), ["get", "synchronize"]);

    // Invalid writes fail before they are queued, and unsupported ones take another path.
    assert!(stream.write(&tensor, 40, &[0; 12]).is_err());
    let wide = Rows {
        stride: 48,
        ..pieces
    };
    assert!(stream.write_rows(&tensor, wide, &[0; 16]).is_err());
    let mut two = [0; 8];
    stream
        .read_rows(
            &tensor,
            Rows {
                host_stride: 4,
                ..pieces
            },
            &mut two,
        )
        .unwrap();
    assert_eq!(two[..], bytes(&[2.0, 3.0]));
}

#[test]
fn memory_lives_until_queued_work_is_done() {
    let (device, context) = lazy();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let (x, copied) = (rows(&device, 1), rows(&device, 1));
    {
        let mut graph = Graph::new();
        let a = graph.input("a", DType::F32, [4, 1, 1, 1]).unwrap();
        let b = graph.scale(a, 3.0).unwrap();
        let y = rows(&device, 1);
        let places = [Some(x.clone()), Some(y.clone())];
        let mut prepared = prepare(&mut *stream, &graph, b, &places);
        stream.write(&x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        calls(context);
        run(&mut *stream, &mut *prepared);
        assert!(device.can_copy(&device.buffer_type(), &device.buffer_type()));
        stream.copy(&y, &copied).unwrap();
        assert_eq!(calls(context), ["compute", "copy"], "nobody waited");
        // The graph and its result's memory are dropped here, with all work still pending.
    }
    let mut out = vec![0; 16];
    stream.read(&copied, 0, &mut out).unwrap();
    assert_eq!(out, bytes(&[3.0, 6.0, 9.0, 12.0]));
    stream.write(&x, 0, &[0; 16]).unwrap();
    drop(x);
    drop(stream); // waits for the write
    assert_eq!(calls(context).last(), Some(&"synchronize"));
}

fn given(context: &Context) -> Vec<String> {
    std::mem::take(&mut context.lock().unwrap().given)
}

#[test]
fn plugins_get_names_and_constant_graphs() {
    let (device, context) = lazy();
    let weights = TensorGroup::allocate(
        &device.buffer_type(),
        Usage::Weights,
        &[
            (
                "token_embd.weight",
                Layout::contiguous(DType::F32, [4, 2, 1, 1]).unwrap(),
            ),
            (
                "cache_k_l0",
                Layout::contiguous(DType::F32, [4, 1, 1, 1]).unwrap(),
            ),
        ],
    );
    let weights = weights.unwrap().tensors;
    assert_eq!(
        given(context),
        ["token_embd.weight at 0", "cache_k_l0 at 64"]
    );
    let buffer = weights[0].tensor().buffer.as_any();
    let buffer = buffer.downcast_ref::<GgmlBuffer>().unwrap();
    // SAFETY: a buffer of this plugin.
    assert_eq!(unsafe { fields(buffer.raw()) }.usage, usage::WEIGHTS);
    weights[1].tensor().write(0, &[0; 16]).unwrap();
    assert_eq!(given(context), [""; 0], "writing initialises nothing again");

    let mut graph = Graph::new();
    let cache = graph.stored(&weights[1]).unwrap();
    let scaled = graph.scale(cache, 3.0).unwrap();
    graph.set_name(scaled, "Kcur-0");
    let result = rows(&device, 1);
    let places = [Some(weights[1].tensor().clone()), Some(result.clone())];
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let mut prepared = [(); 2].map(|()| prepare(&mut *stream, &graph, scaled, &places));
    assert_eq!(given(context), ["Kcur-0 at 0"; 2]);
    for number in [0, 1, 0] {
        run(&mut *stream, &mut *prepared[number]);
    }
    let uids = std::mem::take(&mut context.lock().unwrap().uids);
    assert!(uids[0] == uids[2] && uids[0] != uids[1] && !uids.contains(&0));
    stream.read(&result, 0, &mut [0; 16]).unwrap();
    let initialised = given(context);
    assert_eq!(initialised, [" at 0"], "for reading");

    let [first, second] = prepared;
    drop(first);
    assert_eq!(given(context), [""; 0], "the other graph uses the buffer");
    drop(second);
    assert_eq!(given(context), ["reset"]);
    stream.read(&result, 0, &mut [0; 16]).unwrap();
    assert_eq!(given(context), initialised, "after a reset");
    drop((graph, weights, places));
    assert_eq!(given(context), [""; 0], "only results are reset");
}

#[test]
fn buffers_are_reset_only_after_queued_work() {
    let (device, context) = lazy();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = graph.scale(x, 3.0).unwrap();
    let places = [Some(rows(&device, 1)), Some(rows(&device, 1))];
    let mut prepared = prepare(&mut *stream, &graph, y, &places);
    run(&mut *stream, &mut *prepared);
    given(context);
    drop(prepared);
    assert_eq!(given(context), [""; 0], "the work is still queued");
    stream.synchronize().unwrap();
    assert_eq!(given(context), ["reset"; 2]);
}

#[test]
fn events_use_the_plugin_events() {
    let (device, context) = lazy();
    let tensor = rows(&device, 1);
    let [mut first, mut second] = [(), ()].map(|()| Arc::clone(&device).open_stream().unwrap());
    let event = device.create_event().unwrap();
    calls(context);
    event.synchronize().unwrap();
    second.wait(&*event).unwrap();
    assert!(calls(context).is_empty(), "nothing was recorded");
    first.write(&tensor, 0, &[7; 16]).unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();
    assert_eq!(calls(context), ["set", "record", "wait"]);
    event.synchronize().unwrap();
    let mut out = vec![0; 16];
    tensor.read(0, &mut out).unwrap();
    assert_eq!(out, [7; 16]);

    let (other, _) = lazy();
    let foreign = other.create_event().unwrap();
    assert!(first.record(&*foreign).is_err());
    first.wait(&*foreign).unwrap();
}

#[test]
fn memory_fills_are_byte_exact() {
    let (device, _) = lazy();
    let tensor = rows(&device, 2);
    let bytes = || {
        let mut out = vec![0; 32];
        tensor.read(0, &mut out).unwrap();
        out
    };
    tensor.buffer.clear(3).unwrap();
    assert_eq!(bytes(), [3; 32]);
    tensor.buffer.fill(tensor.slot, 5, 7, 9).unwrap();
    tensor.buffer.fill(tensor.slot, 16, 8, 1).unwrap();
    let mut expected = [3; 32];
    expected[5..12].fill(9);
    expected[16..24].fill(1);
    assert_eq!(bytes(), expected);
}

#[test]
fn result_sizes_follow_the_plugin_allocation_size() {
    let (device, _) = lazy();
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = graph.scale(x, 3.0).unwrap();
    assert!(device.supports(graph.node(y)).is_yes());
    let size = |id| {
        let info = TensorInfo::from_node(graph.node(id), Usage::Compute);
        device.buffer_type().alloc_size(&info).unwrap()
    };
    assert_eq!((size(x), size(y)), (16, 16 + NOTES));
}

#[test]
fn devices_of_one_plugin_copy_and_wait_directly() {
    let [(giver, given), (taker, taken)] = lazy_pair("CUDA");
    let memory = [giver.buffer_type(), taker.buffer_type()];
    assert!(taker.can_copy(&memory[0], &memory[1]));
    assert!(
        !giver.can_copy(&memory[0], &memory[1]),
        "the receiver copies"
    );
    let (from, to) = (rows(&giver, 1), rows(&taker, 1));
    let mut first = Arc::clone(&giver).open_stream().unwrap();
    let mut second = Arc::clone(&taker).open_stream().unwrap();
    let event = giver.create_event().unwrap();
    calls(given);
    first
        .write(&from, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();
    second.copy(&from, &to).unwrap();
    drop(from); // its memory is still to be read
    // The source device continues once the target is ready, and no host thread waits.
    assert_eq!(calls(given), ["set", "record", "wait", "give"]);
    assert_eq!(calls(taken), ["wait", "record", "copy"]);
    let mut out = vec![0; 16];
    second.read(&to, 0, &mut out).unwrap();
    assert_eq!(out, bytes(&[1.0, 2.0, 3.0, 4.0]));

    // Events of other plugins may be private to a device.
    let [(giver, given), (taker, _)] = lazy_pair("Vulkan");
    assert!(!taker.can_copy(&giver.buffer_type(), &taker.buffer_type()));
    let event = giver.create_event().unwrap();
    let mut first = Arc::clone(&giver).open_stream().unwrap();
    let mut second = Arc::clone(&taker).open_stream().unwrap();
    let from = rows(&giver, 1);
    first.write(&from, 0, &[7; 16]).unwrap();
    first.record(&*event).unwrap();
    calls(given);
    second.wait(&*event).unwrap();
    assert!(
        given.lock().unwrap().queue.is_empty(),
        "the host has waited"
    );
}

#[test]
fn mapped_memory_is_used_in_place() {
    let (device, context) = lazy();
    assert!(device.capabilities().import_host);
    let numbers: &'static [f32] = Box::leak(Box::new([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]));
    let base = std::ptr::NonNull::from(numbers).cast();
    // SAFETY: the memory stays unchanged until the process ends.
    let memory = unsafe { HostMemory::borrow(base, 32, false, Box::new(())) };
    let buffer = device
        .import_host(Arc::clone(&memory), Usage::Weights)
        .unwrap();
    assert_eq!(buffer.location(), memory.location());
    assert!(!buffer.is_writable() && buffer.host().is_none());
    let layout = Layout::contiguous(DType::F32, [4, 1, 1, 1]).unwrap();
    let weights = StoredTensor::new("w", buffer, 16, layout).unwrap();
    assert!(weights.tensor().write(0, &[0; 16]).is_err());
    let mut out = vec![0; 16];
    weights.tensor().read(0, &mut out).unwrap();
    assert_eq!(out, bytes(&numbers[4..]));

    let mut graph = Graph::new();
    let w = graph.stored(&weights).unwrap();
    let y = graph.scale(w, 2.0).unwrap();
    let result = rows(&device, 1);
    let places = [Some(weights.tensor().clone()), Some(result.clone())];
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let mut prepared = prepare(&mut *stream, &graph, y, &places);
    calls(context);
    run(&mut *stream, &mut *prepared);
    assert_eq!(calls(context), ["compute"], "nobody waited");
    stream.read(&result, 0, &mut out).unwrap();
    assert_eq!(out, bytes(&[2.0, 4.0, 6.0, 8.0]));

    // Writable memory has a lock, which the device acquires.
    let memory = HostMemory::allocate(64, "host", "a test").unwrap();
    let buffer = device.import_host(Arc::clone(&memory), Usage::Any).unwrap();
    assert!(buffer.is_writable() && buffer.host().is_some());
    memory.write(16, &bytes(&[5.0; 4])).unwrap();
    let cache = StoredTensor::new("c", buffer, 16, layout).unwrap();
    cache.tensor().read(0, &mut out).unwrap();
    assert_eq!(out, bytes(&[5.0; 4]));
}

/// Returns `x -> a -> (view of a) -> c`, and `x -> b`, in that order.
fn branches() -> (Graph, [TensorId; 5]) {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 2, 1, 1]).unwrap();
    let a = graph.scale(x, 2.0).unwrap();
    let half = graph.view(a, [4, 1, 1, 1], [16, 16, 16], 16).unwrap();
    let c = graph.scale(half, 3.0).unwrap();
    let b = graph.scale(x, 4.0).unwrap();
    (graph, [x, a, half, c, b])
}

fn optimized(
    optimize: impl FnMut(&mut CGraph, &dyn Fn(*mut Tensor, *mut Tensor)) + Send + 'static,
) -> ([TensorId; 3], Vec<KeepAlive>) {
    let (device, context) = lazy();
    context.lock().unwrap().optimize = Some(Box::new(optimize));
    let (graph, [_, a, _, c, b]) = branches();
    let mut nodes = [a, c, b];
    let kept = device.optimize(&graph, &mut nodes);
    assert_eq!(calls(context), ["optimize"]);
    (nodes, kept)
}

/// Returns the nodes, for a plugin that reorders them.
fn nodes(graph: &mut CGraph) -> &mut [*mut Tensor] {
    // SAFETY: a valid graph.
    unsafe { std::slice::from_raw_parts_mut(graph.nodes, graph.n_nodes as usize) }
}

#[test]
fn plugins_see_graphs_before_memory_is_planned() {
    let (_, [x, a, _, c, b]) = branches();
    let (order, kept) = optimized(|graph, keep| {
        let &mut [first, view, second, third] = nodes(graph) else {
            panic!("a view is a node, too");
        };
        // SAFETY: valid tensors.
        unsafe {
            assert!(nodes(graph).iter().all(|&node| (*node).data.is_null()));
            assert_eq!((*view).op, op::VIEW);
            assert_eq!(((*view).view_src, (*view).view_offs), (first, 16));
            assert_eq!(((*view).src[0], (*second).src[0]), (first, view));
            let x = (*first).src[0];
            assert_eq!((*third).src[0], x);
            let uses = [x, first, view, second].map(|tensor| graph.uses(tensor));
            assert_eq!(uses, [Some(2), Some(1), Some(1), Some(0)]);
            assert!((*graph.nodes.add(4)).is_null(), "some look one too far");
            keep(x, view);
            keep(view, second);
            keep(first, third);
            keep(third, null_mut());
            keep(null_mut(), third);
        }
        nodes(graph).copy_from_slice(&[third, first, view, second]);
    });
    assert_eq!(order, [b, a, c]);
    let keep = |tensor, until| KeepAlive { tensor, until };
    // The first node after a view; the later of two ends; the end of the sequence if unknown.
    assert_eq!(kept, [keep(x, c), keep(a, c), keep(b, c)]);
}

#[test]
fn invalid_node_orders_of_plugins_are_ignored() {
    type Change = fn(&mut CGraph);
    let changes: [Change; 6] = [
        |graph| nodes(graph).swap(0, 2),
        |graph| nodes(graph)[3] = nodes(graph)[0],
        |graph| nodes(graph)[3] = null_mut(),
        |graph| nodes(graph)[3] = Box::into_raw(Box::new(Tensor::zeroed())),
        |graph| graph.n_nodes -= 1,
        |graph| graph.nodes = Box::into_raw(Box::new([null_mut::<Tensor>(); 5])).cast(),
    ];
    let (_, [x, a, _, c, b]) = branches();
    for change in changes {
        let (order, _) = optimized(move |graph, _| change(graph));
        assert_eq!(order, [a, c, b]);
    }
    // Tensors to keep are valid in any order.
    let (order, kept) = optimized(|graph, keep| {
        let &mut [first, _, second, _] = nodes(graph) else {
            panic!("four nodes");
        };
        // SAFETY: a valid tensor.
        keep(unsafe { (*first).src[0] }, second);
        nodes(graph).swap(0, 2);
    });
    let expected = KeepAlive {
        tensor: x,
        until: c,
    };
    assert_eq!((order, kept), ([a, c, b], vec![expected]));
}
