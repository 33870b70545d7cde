//! Devices, and the registration that lists them.

use super::{Backend, BackendEvent, Buffer, BufferType, Tensor};
use std::ffi::{c_char, c_void};

/// `ggml_backend_dev_caps`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // upstream's names
pub struct DevCaps {
    pub async_: bool,
    pub host_buffer: bool,
    pub buffer_from_host_ptr: bool,
    pub events: bool,
    pub mmap_support: bool,
}

/// `ggml_backend_dev_props`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // upstream's names
pub struct DevProps {
    pub name: *const c_char,
    pub description: *const c_char,
    pub memory_free: usize,
    pub memory_total: usize,
    /// See [`device_type`].
    pub kind: i32,
    /// PCI address in lower case, or null.
    pub device_id: *const c_char,
    pub caps: DevCaps,
}

impl DevProps {
    /// Returns zeroed properties, as a host passes them to a plugin.
    pub const fn zeroed() -> Self {
        DevProps {
            name: std::ptr::null(),
            description: std::ptr::null(),
            memory_free: 0,
            memory_total: 0,
            kind: 0,
            device_id: std::ptr::null(),
            caps: DevCaps {
                async_: false,
                host_buffer: false,
                buffer_from_host_ptr: false,
                events: false,
                mmap_support: false,
            },
        }
    }
}

/// `ggml_backend_dev_type`
#[allow(missing_docs)]
pub mod device_type {
    pub const CPU: i32 = 0;
    pub const GPU: i32 = 1;
    pub const IGPU: i32 = 2;
    pub const ACCEL: i32 = 3;
    pub const META: i32 = 4;
}

/// `ggml_backend_device_i`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct DeviceI {
    pub get_name: Option<unsafe extern "C" fn(*mut Device) -> *const c_char>,
    pub get_description: Option<unsafe extern "C" fn(*mut Device) -> *const c_char>,
    pub get_memory: Option<unsafe extern "C" fn(*mut Device, *mut usize, *mut usize)>,
    pub get_type: Option<unsafe extern "C" fn(*mut Device) -> i32>,
    pub get_props: Option<unsafe extern "C" fn(*mut Device, *mut DevProps)>,
    pub init_backend: Option<unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend>,
    pub get_buffer_type: Option<unsafe extern "C" fn(*mut Device) -> *mut BufferType>,
    pub get_host_buffer_type: Option<unsafe extern "C" fn(*mut Device) -> *mut BufferType>,
    pub buffer_from_host_ptr:
        Option<unsafe extern "C" fn(*mut Device, *mut c_void, usize, usize) -> *mut Buffer>,
    pub supports_op: Option<unsafe extern "C" fn(*mut Device, *const Tensor) -> bool>,
    pub supports_buft: Option<unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool>,
    pub offload_op: Option<unsafe extern "C" fn(*mut Device, *const Tensor) -> bool>,
    pub event_new: Option<unsafe extern "C" fn(*mut Device) -> *mut BackendEvent>,
    pub event_free: Option<unsafe extern "C" fn(*mut Device, *mut BackendEvent)>,
    pub event_synchronize: Option<unsafe extern "C" fn(*mut Device, *mut BackendEvent)>,
}

/// `ggml_backend_device`
#[repr(C)]
pub struct Device {
    /// Function table.
    pub iface: DeviceI,
    /// Registration of the device.
    pub reg: *mut Reg,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// `ggml_backend_reg_i`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct RegI {
    pub get_name: Option<unsafe extern "C" fn(*mut Reg) -> *const c_char>,
    pub get_device_count: Option<unsafe extern "C" fn(*mut Reg) -> usize>,
    pub get_device: Option<unsafe extern "C" fn(*mut Reg, usize) -> *mut Device>,
    pub get_proc_address: Option<unsafe extern "C" fn(*mut Reg, *const c_char) -> *mut c_void>,
}

/// `ggml_backend_reg`
#[repr(C)]
pub struct Reg {
    /// 2 or 3, see [`Version::api`](super::Version::api).
    pub api_version: i32,
    /// Function table.
    pub iface: RegI,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// `ggml_backend_init`, exported by every plugin.
pub type InitFn = unsafe extern "C" fn() -> *mut Reg;
/// `ggml_backend_score`, exported by some plugins: 0 if the plugin cannot be used on this machine.
/// Of several variants, the highest score is best.
pub type ScoreFn = unsafe extern "C" fn() -> i32;
/// Returns whether to stop.
pub type AbortCallback = unsafe extern "C" fn(*mut c_void) -> bool;

/// `ggml_backend_feature`, in arrays that end with a null name.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Feature {
    /// Name, such as `AVX2`.
    pub name: *const c_char,
    /// Value, such as `1`.
    pub value: *const c_char,
}

/// Names to pass to `get_proc_address`.
pub mod proc_name {
    use std::ffi::CStr;

    /// `void (backend, int)`
    pub const SET_N_THREADS: &CStr = c"ggml_backend_set_n_threads";
    /// `void (backend, AbortCallback, void *)`
    pub const SET_ABORT_CALLBACK: &CStr = c"ggml_backend_set_abort_callback";
    /// `Feature * (reg)`
    pub const GET_FEATURES: &CStr = c"ggml_backend_get_features";
    /// `BufferType ** (device)`, ending with null.
    pub const GET_EXTRA_BUFTS: &CStr = c"ggml_backend_dev_get_extra_bufts";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layouts_match_upstream() {
        assert_eq!(size_of::<Device>(), 136);
        assert_eq!(offset_of!(Device, reg), 120);
        assert_eq!(offset_of!(DeviceI, init_backend), 40);
        assert_eq!(offset_of!(DeviceI, supports_op), 72);
        assert_eq!(offset_of!(DeviceI, event_synchronize), 112);
        assert_eq!(size_of::<DevProps>(), 56);
        assert_eq!(offset_of!(DevProps, kind), 32);
        assert_eq!(offset_of!(DevProps, device_id), 40);
        assert_eq!(offset_of!(DevProps, caps), 48);
        assert_eq!(size_of::<DevCaps>(), 5);
        assert_eq!(size_of::<Reg>(), 48);
        assert_eq!(offset_of!(Reg, iface), 8);
        assert_eq!(offset_of!(Reg, context), 40);
    }
}
