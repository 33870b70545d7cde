//! The backend registration and its device, as function tables.

use crate::buffers::{self, Kind, kind};
use crate::host::{Host, guard, log_error};
use crate::memory::QueryLocations;
use crate::stream;
use samite_core::formula::is_formula;
use samite_core::{Backend as _, DType, Device as _, Support};
use samite_cpu::{CpuBackend, CpuDevice, CpuOptions};
use samite_ggml::abi::{
    BufferType, DevCaps, DevProps, Device, DeviceI, Feature, Reg, RegI, Tensor, device_type, op,
    proc_name,
};
use samite_ggml::convert::UnsupportedConversion;
use samite_ggml::convert::import::{Importer, layout, supported};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Environment variable that makes the plugin log the reason of every rejected operation.
const EXPLAIN_VARIABLE: &str = "SAMITE_GGML_EXPLAIN";

const REG_NAME: &CStr = c"samite";
/// Name of the device, for ggml and in errors.
pub const DEVICE_NAME: &CStr = c"samite-cpu";

/// State that lives as long as the process.
pub struct Plugin {
    pub host: Host,
    /// Device with the default number of threads, which answers support queries.
    pub cpu: Arc<CpuDevice>,
    pub plain_type: *mut BufferType,
    pub packed_type: *mut BufferType,
    /// samite's counterpart of `packed_type`, if the processor has kernels for it.
    pub packed: Option<Arc<dyn samite_core::BufferType>>,
    /// Null-terminated list.
    pub extra_types: Vec<*mut BufferType>,
    /// True if rejected operations are logged.
    explain: bool,
    description: CString,
    /// Names and values of `features`.
    _feature_texts: Vec<(CString, CString)>,
    /// List terminated by null names.
    features: Vec<Feature>,
    reg: *mut Reg,
    device: *mut Device,
}

// SAFETY: the pointers refer to leaked tables that never change after their creation.
unsafe impl Send for Plugin {}
// SAFETY: the pointers refer to leaked tables that never change after their creation, so threads
// only read them.
unsafe impl Sync for Plugin {}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

/// Returns the plugin. The host calls `ggml_backend_init` before anything else.
pub fn plugin() -> &'static Plugin {
    PLUGIN
        .get()
        .expect("ggml_backend_init comes before all other calls") // caught by `guard`
}

/// Returns the registration. On failure, returns `None` and logs the reason.
pub fn registration() -> Option<*mut Reg> {
    let host = match Host::get() {
        Ok(host) => host,
        Err(reason) => {
            log_error(&reason);
            return None;
        }
    };
    Some(PLUGIN.get_or_init(|| make(host)).reg)
}

fn make(host: Host) -> Plugin {
    let cpu = CpuDevice::with_name("samite-cpu", CpuOptions::default());
    let packed = cpu.extra_buffer_types().into_iter().next();
    let reg = Box::into_raw(Box::new(Reg {
        api_version: host.version.api(),
        iface: RegI {
            get_name: Some(reg_name),
            get_device_count: Some(device_count),
            get_device: Some(device_at),
            get_proc_address: Some(proc_address),
        },
        context: null_mut(),
    }));
    let device = Box::into_raw(Box::new(Device {
        iface: DEVICE,
        reg,
        context: null_mut(),
    }));
    let plain_type = buffers::plain_type(device, host.version);
    let packed_type = buffers::packed_type(device, host.version);
    let mut extra_types = Vec::new();
    extra_types.extend(packed.is_some().then_some(packed_type));
    extra_types.push(null_mut());
    let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let feature_texts: Vec<_> = CpuBackend::new(CpuOptions::default())
        .features()
        .into_iter()
        .map(|(name, value)| (text(&name), text(&value)))
        .collect();
    let end = Feature {
        name: null(),
        value: null(),
    };
    let features = feature_texts
        .iter()
        .map(|(name, value)| Feature {
            name: name.as_ptr(),
            value: value.as_ptr(),
        })
        .chain([end])
        .collect();
    Plugin {
        host,
        plain_type,
        packed_type,
        packed,
        extra_types,
        explain: std::env::var_os(EXPLAIN_VARIABLE).is_some(),
        description: text(&cpu.description()),
        _feature_texts: feature_texts,
        features,
        reg,
        device,
        cpu,
    }
}

/// Returns the device with this number of threads. Streams with the same number share its threads.
pub fn cpu_with_threads(threads: usize) -> Arc<CpuDevice> {
    static DEVICES: Mutex<BTreeMap<usize, Weak<CpuDevice>>> = Mutex::new(BTreeMap::new());
    if threads == plugin().cpu.threads() {
        return Arc::clone(&plugin().cpu);
    }
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = devices.get(&threads).and_then(Weak::upgrade) {
        return device;
    }
    let options = CpuOptions::default().with_threads(threads);
    let device = CpuDevice::with_name("samite-cpu", options);
    devices.retain(|_, device| device.strong_count() > 0);
    devices.insert(threads, Arc::downgrade(&device));
    device
}

const DEVICE: DeviceI = DeviceI {
    get_name: Some(device_name),
    get_description: Some(device_description),
    get_memory: Some(device_memory),
    get_type: Some(device_kind),
    get_props: Some(device_props),
    init_backend: Some(stream::init),
    get_buffer_type: Some(device_buffer_type),
    get_host_buffer_type: None,
    buffer_from_host_ptr: Some(buffers::buffer_from_host_ptr),
    supports_op: Some(supports_op),
    supports_buft: Some(supports_buffer_type),
    offload_op: None,
    event_new: None,
    event_free: None,
    event_synchronize: None,
};

unsafe extern "C" fn reg_name(_: *mut Reg) -> *const c_char {
    REG_NAME.as_ptr()
}

unsafe extern "C" fn device_count(_: *mut Reg) -> usize {
    1
}

unsafe extern "C" fn device_at(_: *mut Reg, index: usize) -> *mut Device {
    guard(null_mut(), || match index {
        0 => plugin().device,
        _ => null_mut(),
    })
}

unsafe extern "C" fn proc_address(_: *mut Reg, name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return null_mut();
    }
    // SAFETY: the host passes a string.
    let name = unsafe { CStr::from_ptr(name) };
    if name == proc_name::SET_N_THREADS {
        stream::set_n_threads as *mut c_void
    } else if name == proc_name::SET_ABORT_CALLBACK {
        stream::set_abort_callback as *mut c_void
    } else if name == proc_name::GET_FEATURES {
        features as *mut c_void
    } else if name == proc_name::GET_EXTRA_BUFTS {
        buffers::extra_types as *mut c_void
    } else {
        null_mut()
    }
}

unsafe extern "C" fn features(_: *mut Reg) -> *const Feature {
    guard(null(), || plugin().features.as_ptr())
}

unsafe extern "C" fn device_name(_: *mut Device) -> *const c_char {
    DEVICE_NAME.as_ptr()
}

unsafe extern "C" fn device_description(_: *mut Device) -> *const c_char {
    guard(DEVICE_NAME.as_ptr(), || plugin().description.as_ptr())
}

unsafe extern "C" fn device_kind(_: *mut Device) -> i32 {
    device_type::IGPU
}

unsafe extern "C" fn device_memory(_: *mut Device, free: *mut usize, total: *mut usize) {
    let memory = guard(Default::default(), || plugin().cpu.memory());
    // SAFETY: the host passes valid pointers for both.
    unsafe {
        free.write(memory.free.unwrap_or(0));
        total.write(memory.total.unwrap_or(0));
    }
}

unsafe extern "C" fn device_props(device: *mut Device, props: *mut DevProps) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the host passes valid pointers.
    unsafe {
        device_memory(device, &raw mut free, &raw mut total);
        props.write(DevProps {
            name: DEVICE_NAME.as_ptr(),
            description: device_description(device),
            memory_free: free,
            memory_total: total,
            kind: device_type::IGPU,
            device_id: null(),
            caps: DevCaps {
                buffer_from_host_ptr: true,
                mmap_support: true,
                ..DevCaps::default()
            },
        });
    }
}

unsafe extern "C" fn device_buffer_type(_: *mut Device) -> *mut BufferType {
    guard(null_mut(), || plugin().plain_type)
}

unsafe extern "C" fn supports_buffer_type(_: *mut Device, buffer_type: *mut BufferType) -> bool {
    guard(false, || {
        let plugin = plugin();
        buffer_type == plugin.plain_type
            || (buffer_type == plugin.packed_type && plugin.packed.is_some())
            // SAFETY: the host passes a valid buffer type.
            || unsafe { plugin.host.is_host(buffer_type) }
    })
}

unsafe extern "C" fn supports_op(_: *mut Device, tensor: *const Tensor) -> bool {
    guard(false, || {
        // SAFETY: the host passes a valid tensor.
        let answer = unsafe { support(tensor) };
        if let (Err(reason), true) = (&answer, plugin().explain) {
            // SAFETY: the host passes a valid tensor and does not change it during the call.
            let t = unsafe { &*tensor };
            log_error(&format!(
                "op {} '{}' is not supported: {reason}",
                operation(t),
                t.name()
            ));
        }
        answer.is_ok()
    })
}

/// Returns the operation of a host's tensor, as a number of the newest release.
fn operation(t: &Tensor) -> u32 {
    plugin().host.version.numbers().op_of(t.op)
}

/// Returns an error if the device does not support a node.
///
/// # Safety
/// `tensor` and everything it points to must be valid.
unsafe fn support(tensor: *const Tensor) -> Result<(), UnsupportedConversion> {
    // SAFETY: the tensor is valid, and the host does not change it during the call.
    let t = unsafe { &*tensor };
    let number = operation(t);
    if number == op::NONE || op::is_view(number) {
        return Ok(());
    }
    let plugin = plugin();
    // SAFETY: sources of a valid tensor are null or valid.
    let source = unsafe { t.src[0].as_ref() };
    if let Some(source) = source {
        as_ggml_computes_it(t, source)?;
    }
    // SAFETY: the first source is valid, and so is its buffer if it is not null.
    let weights = source.map_or(Kind::Host, |weights| unsafe { kind(weights) });
    let mut importer = Importer::new(QueryLocations, plugin.host.version);
    // SAFETY: the tensor and everything it points to are valid, as `node` requires.
    let id = unsafe { importer.node(tensor) }?;
    let imported = importer.finish();
    if is_formula(imported.graph.tensor(id).op.kind()) {
        return Err("ggml's own kernels for it are faster".into());
    }
    if let Support::No(reason) = supported(&*plugin.cpu, &imported) {
        return Err(reason);
    }
    let accepted = || match &plugin.packed {
        Some(packed) => packed.accepts(imported.graph.node(id)),
        None => Support::no("weights cannot be packed here"),
    };
    match weights {
        Kind::PackedAsked => match accepted() {
            Support::Yes => Ok(()),
            Support::No(reason) => Err(reason),
        },
        // Reject weights that can be packed here, so that they go to packed memory.
        Kind::Asked if matches!(number, op::MUL_MAT | op::MUL_MAT_ID) && accepted().is_yes() => {
            Err("such weights belong into packed memory".into())
        }
        _ => Ok(()),
    }
}

/// Rejects operations that ggml's own CPU kernels compute differently, so that a host gets the same
/// result wherever it runs a graph.
fn as_ggml_computes_it(t: &Tensor, source: &Tensor) -> Result<(), UnsupportedConversion> {
    let number = operation(t);
    if number == op::CPY && t.dtype == DType::Q8_0.id() && source.dtype == DType::BF16.id() {
        // Values with few digits often lie exactly between two codes. samite rounds such ties
        // like ggml's reference; ggml's vectorized kernels round them to even.
        return Err("ggml's kernels round ties of bf16 in another way".into());
    }
    if number == op::SUM && !layout(source)?.has_contiguous_rows() {
        return Err("ggml's kernel does not see gaps between elements".into());
    }
    Ok(())
}
