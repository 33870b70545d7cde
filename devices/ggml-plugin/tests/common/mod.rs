//! A minimal host with the parts of ggml that the plugin needs.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::op::Unary;
use samite_core::{DType, Graph, Op, TensorId};
use samite_ggml::abi::{
    AbortCallback, Backend, Buffer, BufferType, BufferTypeTable, DevProps, Device, Status, Tensor,
    Version, device_type, proc_name, usage,
};
use samite_ggml::convert::UnsupportedConversion;
use samite_ggml::convert::export::{Exported, TensorLocation, bare};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;

/// Functions of the fixture that the test calls.
struct Base {
    free: unsafe extern "C" fn(*mut Buffer),
    last_message: *const c_char,
}

impl Base {
    /// Builds and loads the fixture without global visibility.
    fn load(release: &str, version: Version) -> Option<Base> {
        let directory = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/base.c");
        let path = directory.path().join("libggml-base.so");
        let is_host = match version {
            Version::V25 => 5,
            Version::V26 | Version::V27 | Version::V28 => 7,
        };
        let functions = match version {
            Version::V25 | Version::V26 | Version::V27 => 11,
            Version::V28 => 14,
        };
        let status = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-fPIC", "-o"])
            .arg(&path)
            .arg(format!("-DVERSION=\"{release}\""))
            .arg(format!("-DIS_HOST={is_host}"))
            .arg(format!("-DFUNCTIONS={functions}"))
            .arg(source)
            .status();
        match status {
            Ok(status) => assert!(status.success(), "the fixture does not compile"),
            Err(error) => {
                samite_testing::skipped(format_args!("no C compiler ({error})"));
                return None;
            }
        }
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the fixture has no initializers; it stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        // SAFETY: the symbols have these types in the fixture.
        unsafe {
            let free = libc::dlsym(handle, c"ggml_backend_buffer_free".as_ptr());
            let last_message = libc::dlsym(handle, c"last_message".as_ptr());
            assert!(!free.is_null() && !last_message.is_null());
            Some(Base {
                free: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Buffer)>(free),
                last_message: last_message.cast(),
            })
        }
    }

    fn last_message(&self) -> String {
        // SAFETY: this is a string in the fixture, which only calls of this thread change.
        unsafe { CStr::from_ptr(self.last_message) }
            .to_string_lossy()
            .into_owned()
    }
}

/// The plugin's device and tables, obtained like a host does.
struct Host {
    base: Base,
    version: Version,
    device: *mut Device,
    reg: *mut samite_ggml::abi::Reg,
}

impl Host {
    fn table(&self, buffer_type: *mut BufferType) -> BufferTypeTable {
        // SAFETY: the plugin created it for this version.
        unsafe { BufferTypeTable::read(buffer_type, self.version) }
    }

    fn allocate(&self, buffer_type: *mut BufferType, size: usize) -> *mut Buffer {
        // SAFETY: the function belongs to the type.
        let buffer =
            unsafe { self.table(buffer_type).iface.alloc_buffer.unwrap()(buffer_type, size) };
        assert!(!buffer.is_null());
        buffer
    }

    fn proc_address(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the function belongs to the registration.
        unsafe { (*self.reg).iface.get_proc_address.unwrap()(self.reg, name.as_ptr()) }
    }

    fn supports(&self, tensor: *const Tensor) -> bool {
        // SAFETY: the function belongs to the device, and tests pass valid tensors.
        unsafe { (*self.device).iface.supports_op.unwrap()(self.device, tensor) }
    }
}

const K: usize = 64;
const ROWS: usize = 48;
const COLUMNS: usize = 3;

/// `silu(w · rms_norm(x))`, and a row lookup in a table.
struct Model {
    graph: Graph,
    x: TensorId,
    w: TensorId,
    index: TensorId,
    product: TensorId,
    y: TensorId,
    picked: TensorId,
}

fn model() -> Model {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [K, COLUMNS, 1, 1]).unwrap();
    let w = graph.leaf("w", DType::Q8_0, [K, ROWS, 1, 1]).unwrap();
    let index = graph.input("index", DType::I32, [2, 1, 1, 1]).unwrap();
    let normed = graph.rms_norm(x, 1e-5).unwrap();
    let product = graph.mul_mat(w, normed).unwrap();
    let y = graph
        .push(Op::Unary(Unary::Silu), &[Some(product)])
        .unwrap();
    let picked = graph.push(Op::GetRows, &[Some(y), Some(index)]).unwrap();
    Model {
        graph,
        x,
        w,
        index,
        product,
        y,
        picked,
    }
}

fn numbers(seed: u32, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            let word = i.wrapping_add(seed).wrapping_mul(0x9e37_79b9);
            (word >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Returns weights of type Q8_0 and their values.
fn weights() -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for (block, x) in numbers(3, K * ROWS).chunks(32).enumerate() {
        let codes: Vec<_> = x.iter().map(|x| (x * 127.0) as i8).collect();
        // 1 or 1/2 as half-precision floats.
        let (scale, d) = [(0x3c00u16, 1.0f32), (0x3800, 0.5)][block % 2];
        bytes.extend(scale.to_le_bytes());
        bytes.extend(codes.iter().map(|&code| code as u8));
        values.extend(codes.iter().map(|&code| f32::from(code) * d));
    }
    (bytes, values)
}

/// Computes the model in double precision.
fn expected(x: &[f32], w: &[f32]) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks(K) {
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let scale = 1.0 / (squares / K as f64 + 1e-5).sqrt();
        for w in w.chunks(K) {
            let products = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            let product = scale * products.sum::<f64>();
            y.push(product / (1.0 + (-product).exp()));
        }
    }
    y
}

fn nmse(got: &[f32], expected: &[f64]) -> f64 {
    let errors = got
        .iter()
        .zip(expected)
        .map(|(&g, e)| (f64::from(g) - e).powi(2));
    errors.sum::<f64>() / expected.iter().map(|e| e * e).sum::<f64>()
}

unsafe extern "C" fn always(_: *mut c_void) -> bool {
    true
}

/// Uses the plugin like ggml's programs do.
pub fn exercise(release: &str, version: Version) {
    let Some(base) = Base::load(release, version) else {
        return;
    };
    let reg = ggml_samite::ggml_backend_init();
    assert!(!reg.is_null(), "{}", base.last_message());
    assert!(ggml_samite::ggml_backend_score() > 0);
    // SAFETY: these are the plugin's tables, whose layout the version determines.
    let device = unsafe {
        assert_eq!((*reg).api_version, version.api());
        assert_eq!((*reg).iface.get_device_count.unwrap()(reg), 1);
        assert!((*reg).iface.get_device.unwrap()(reg, 1).is_null());
        (*reg).iface.get_device.unwrap()(reg, 0)
    };
    let host = Host {
        base,
        version,
        device,
        reg,
    };
    describes_itself(&host);
    computes(&host);
    stays_alive(&host);
}

fn describes_itself(host: &Host) {
    let mut props = DevProps::zeroed();
    // SAFETY: the functions belong to the device.
    unsafe {
        (*host.device).iface.get_props.unwrap()(host.device, &raw mut props);
        assert_eq!(CStr::from_ptr(props.name), c"samite-cpu");
        assert!(!CStr::from_ptr(props.description).is_empty());
    }
    assert_eq!(props.kind, device_type::IGPU);
    assert!(props.memory_total > 0 && props.caps.buffer_from_host_ptr && !props.caps.async_);
    assert!(!host.proc_address(proc_name::GET_FEATURES).is_null());
    assert!(host.proc_address(c"ggml_no_such_function").is_null());
}

fn computes(host: &Host) {
    let m = model();
    // SAFETY: the functions belong to the device.
    let (plain_type, backend) = unsafe {
        let iface = (*host.device).iface;
        (
            iface.get_buffer_type.unwrap()(host.device),
            iface.init_backend.unwrap()(host.device, std::ptr::null()),
        )
    };
    assert!(!backend.is_null());
    let packed_type = extra_type(host);

    let plain = host.allocate(plain_type, 1 << 20);
    // SAFETY: the functions belong to the buffer, which has this size.
    let memory = unsafe {
        (*plain).iface.clear.unwrap()(plain, 0);
        (*plain).iface.get_base.unwrap()(plain).cast::<u8>()
    };
    let mut offsets = vec![0; m.graph.len()];
    let mut end = 0;
    for id in m.graph.ids() {
        offsets[id.index()] = end;
        end += m.graph.tensor(id).layout.bytes().next_multiple_of(64);
    }
    let at = |id: TensorId| memory.wrapping_add(offsets[id.index()]);
    let (x, (bytes, values)) = (numbers(9, K * COLUMNS), weights());
    // SAFETY: all offsets are within the buffer.
    unsafe {
        at(m.x).copy_from(x.as_ptr().cast(), x.len() * 4);
        at(m.w).copy_from(bytes.as_ptr(), bytes.len());
        at(m.index).cast::<[i32; 2]>().write([2, 0]);
    }
    let read = |id: TensorId| -> Vec<f32> {
        let count = m.graph.tensor(id).layout.elements();
        // SAFETY: the tensor has this many numbers, and no graph runs.
        unsafe { std::slice::from_raw_parts(at(id).cast::<f32>(), count) }.to_vec()
    };

    let nodes: Vec<_> = m
        .graph
        .ids()
        .filter(|&id| m.graph.tensor(id).is_computed())
        .collect();
    let in_plain = |id: TensorId| -> Result<TensorLocation, UnsupportedConversion> {
        Ok(TensorLocation::At(plain, at(id)))
    };
    let mut exported = Exported::new(host.version, &m.graph, &nodes, in_plain).unwrap();
    exported.count_uses(&m.graph);
    let mut graph = exported.graph();
    let mut run = || -> Status {
        // SAFETY: the graph is valid, and its memory is allocated.
        unsafe { (*backend).iface.graph_compute.unwrap()(backend, &raw mut graph) }
    };
    assert_eq!(run(), Status::SUCCESS, "{}", host.base.last_message());
    let expected = expected(&x, &values);
    let y = read(m.y);
    assert!(nmse(&y, &expected) < 1e-4, "{}", nmse(&y, &expected));
    assert_eq!(read(m.picked)[..ROWS], y[2 * ROWS..]);

    // Results do not depend on the number of threads, nor on reusing the prepared graph.
    let set_threads = host.proc_address(proc_name::SET_N_THREADS);
    for threads in [1, 3, 1] {
        // SAFETY: this is the function's type under this name.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Backend, c_int)>(
                set_threads,
            )(backend, threads);
            at(m.y).write_bytes(0xff, y.len() * 4);
        }
        assert_eq!(run(), Status::SUCCESS);
        assert_eq!(read(m.y), y);
    }

    // Aborted by the host.
    let set_abort = host.proc_address(proc_name::SET_ABORT_CALLBACK);
    type SetAbort = unsafe extern "C" fn(*mut Backend, Option<AbortCallback>, *mut c_void);
    // SAFETY: this is the function's type under this name.
    let set_abort = unsafe { std::mem::transmute::<*mut c_void, SetAbort>(set_abort) };
    // SAFETY: the callback ignores its argument.
    unsafe { set_abort(backend, Some(always), null_mut()) };
    assert_eq!(run(), Status::ABORTED);
    // SAFETY: the backend is valid and runs no graph, and null means no callback.
    unsafe { set_abort(backend, None, null_mut()) };
    assert_eq!(run(), Status::SUCCESS);

    // An invalid row number fails the graph, but the backend remains usable. SAFETY: the offset is
    // within the buffer.
    unsafe { at(m.index).cast::<[i32; 2]>().write([2, 99]) };
    assert_eq!(run(), Status::FAILED);
    assert!(
        host.base.last_message().contains("99"),
        "{}",
        host.base.last_message()
    );
    // SAFETY: the offset is within the buffer, and no graph runs.
    unsafe { at(m.index).cast::<[i32; 2]>().write([1, 0]) };
    assert_eq!(run(), Status::SUCCESS);

    if let Some(packed_type) = packed_type {
        let packed = packed_weights(host, packed_type, &m, &bytes);
        let in_both = |id: TensorId| -> Result<TensorLocation, UnsupportedConversion> {
            Ok(if id == m.w {
                TensorLocation::Tensor((&raw const *packed.tensor).cast_mut())
            } else {
                TensorLocation::At(plain, at(id))
            })
        };
        let mut exported = Exported::new(host.version, &m.graph, &nodes, in_both).unwrap();
        exported.count_uses(&m.graph);
        let mut graph = exported.graph();
        // SAFETY: the graph is valid, and its memory is allocated.
        let status = unsafe { (*backend).iface.graph_compute.unwrap()(backend, &raw mut graph) };
        assert_eq!(status, Status::SUCCESS, "{}", host.base.last_message());
        assert!(nmse(&read(m.y), &expected) < 1e-4);
        asks_for_packed_memory(host, &m, plain_type, packed_type);
        // SAFETY: it is not used any more.
        unsafe { (host.base.free)(packed.buffer) };
    }
    // SAFETY: they are not used any more.
    unsafe {
        (*backend).iface.free.unwrap()(backend);
        (host.base.free)(plain);
    }
}

/// Returns the packed buffer type, if the processor supports it.
fn extra_type(host: &Host) -> Option<*mut BufferType> {
    type Extra = unsafe extern "C" fn(*mut Device) -> *mut *mut BufferType;
    let extra = host.proc_address(proc_name::GET_EXTRA_BUFTS);
    // SAFETY: this is the function's type under this name; the list ends with null.
    let first = unsafe { *std::mem::transmute::<*mut c_void, Extra>(extra)(host.device) };
    (!first.is_null()).then_some(first)
}

struct PackedWeights {
    buffer: *mut Buffer,
    tensor: Box<Tensor>,
}

fn packed_weights(
    host: &Host,
    packed_type: *mut BufferType,
    m: &Model,
    bytes: &[u8],
) -> PackedWeights {
    let mut tensor = Box::new(bare(&m.graph.tensor(m.w).layout, host.version).unwrap());
    tensor.set_name("w");
    let table = host.table(packed_type).iface;
    assert!(table.is_host.is_none(), "its layout is not ggml's");
    // SAFETY: the functions belong to the type and its buffer, which contains the tensor.
    unsafe {
        let size = table.get_alloc_size.unwrap()(packed_type, &raw const *tensor);
        let buffer = host.allocate(packed_type, size);
        (*Buffer::fields(buffer, host.version)).usage = usage::WEIGHTS;
        let iface = (*buffer).iface;
        tensor.buffer = buffer;
        tensor.data = iface.get_base.unwrap()(buffer);
        assert_eq!(
            iface.init_tensor.unwrap()(buffer, &raw mut *tensor),
            Status::SUCCESS
        );
        iface.set_tensor.unwrap()(
            buffer,
            &raw mut *tensor,
            bytes.as_ptr().cast(),
            0,
            bytes.len(),
        );
        let mut back = vec![0u8; bytes.len()];
        iface.get_tensor.unwrap()(
            buffer,
            &raw const *tensor,
            back.as_mut_ptr().cast(),
            0,
            back.len(),
        );
        assert!(back == bytes, "what is packed is unpacked");
        // A tensor that cannot be packed is rejected.
        let mut other = Tensor::zeroed();
        other.dtype = DType::I32.id();
        other.ne = [3, 1, 1, 1];
        other.nb = [4, 12, 12, 12];
        other.buffer = buffer;
        other.data = tensor.data;
        assert_eq!(
            iface.init_tensor.unwrap()(buffer, &raw mut other),
            Status::FAILED
        );
        assert!(host.base.last_message().contains("cannot be packed"));
        PackedWeights { buffer, tensor }
    }
}

/// Queries support with weights in empty buffers, as programs do to choose a buffer type.
fn asks_for_packed_memory(
    host: &Host,
    m: &Model,
    plain_type: *mut BufferType,
    packed_type: *mut BufferType,
) {
    let supported = |buffer_type: Option<*mut BufferType>| {
        let empty = Buffer::create_empty(buffer_type.unwrap_or(null_mut()), host.version);
        let place = |id: TensorId| -> Result<TensorLocation, UnsupportedConversion> {
            let buffer = if buffer_type.is_some() && id == m.w {
                empty
            } else {
                null_mut()
            };
            Ok(TensorLocation::At(buffer, null_mut()))
        };
        let exported = Exported::new(host.version, &m.graph, &[m.product], place).unwrap();
        let answer = host.supports(*exported.nodes().last().unwrap());
        // SAFETY: created above with this version.
        unsafe { Buffer::free(empty, host.version) };
        answer
    };
    assert!(supported(None));
    assert!(supported(Some(packed_type)));
    assert!(
        !supported(Some(plain_type)),
        "they belong into packed memory"
    );
}

fn stays_alive(host: &Host) {
    // SAFETY: the functions belong to the device.
    unsafe {
        let iface = (*host.device).iface;
        let plain_type = iface.get_buffer_type.unwrap()(host.device);
        assert!(iface.supports_buft.unwrap()(host.device, plain_type));
        for round in 0..1000 {
            let backend = iface.init_backend.unwrap()(host.device, std::ptr::null());
            let buffer = host.allocate(plain_type, 1024);
            if round % 2 == 0 {
                (*backend).iface.free.unwrap()(backend);
                (host.base.free)(buffer);
            } else {
                (host.base.free)(buffer);
                (*backend).iface.free.unwrap()(backend);
            }
        }
        // An invalid operation is rejected and not computed.
        let mut tensor = Tensor::zeroed();
        tensor.op = 4000;
        assert!(!host.supports(&raw const tensor));
    }
}
