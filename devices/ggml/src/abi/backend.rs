//! Backends in ggml's terms, which are streams of work, and events.

use super::{CGraph, Device, Tensor};
use std::ffi::{c_char, c_void};

/// `ggml_status`. A plugin's answer may be any number, so this is not an enum.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub i32);

impl Status {
    /// Out of memory.
    pub const ALLOC_FAILED: Status = Status(-2);
    /// The operation failed.
    pub const FAILED: Status = Status(-1);
    /// The operation succeeded.
    pub const SUCCESS: Status = Status(0);
    /// The abort callback requested a stop.
    pub const ABORTED: Status = Status(1);
}

/// `ggml_guid`: identifies the kind of a backend.
pub type Guid = [u8; 16];

/// Tells the host to keep a tensor's memory until another tensor is computed.
pub type AddAllocDep = unsafe extern "C" fn(*mut c_void, *mut Tensor, *mut Tensor);

/// `ggml_backend_graph_optimize_params`
#[repr(C)]
pub struct GraphOptimizeParams {
    /// Function of the host.
    pub add_alloc_dep: Option<AddAllocDep>,
    /// First argument of the function.
    pub user_data: *mut c_void,
}

/// Orders a graph's nodes. Releases before 0.25 had no parameters; they ignore the third argument.
pub type GraphOptimize = unsafe extern "C" fn(*mut Backend, *mut CGraph, *mut GraphOptimizeParams);

type SetAsync = unsafe extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize);
type GetAsync = unsafe extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize);
type Set2dAsync = unsafe extern "C" fn(
    *mut Backend,
    *mut Tensor,
    *const c_void,
    usize,
    usize,
    usize,
    usize,
    usize,
);
type Get2dAsync = unsafe extern "C" fn(
    *mut Backend,
    *const Tensor,
    *mut c_void,
    usize,
    usize,
    usize,
    usize,
    usize,
);
type CopyAsync =
    unsafe extern "C" fn(*mut Backend, *mut Backend, *const Tensor, *mut Tensor) -> bool;

/// `ggml_backend_i`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BackendI {
    pub get_name: Option<unsafe extern "C" fn(*mut Backend) -> *const c_char>,
    pub free: Option<unsafe extern "C" fn(*mut Backend)>,
    pub set_tensor_async: Option<SetAsync>,
    pub get_tensor_async: Option<GetAsync>,
    pub set_tensor_2d_async: Option<Set2dAsync>,
    pub get_tensor_2d_async: Option<Get2dAsync>,
    pub cpy_tensor_async: Option<CopyAsync>,
    pub synchronize: Option<unsafe extern "C" fn(*mut Backend)>,
    pub graph_plan_create: Option<unsafe extern "C" fn(*mut Backend, *const CGraph) -> *mut c_void>,
    pub graph_plan_free: Option<unsafe extern "C" fn(*mut Backend, *mut c_void)>,
    pub graph_plan_update: Option<unsafe extern "C" fn(*mut Backend, *mut c_void, *const CGraph)>,
    pub graph_plan_compute: Option<unsafe extern "C" fn(*mut Backend, *mut c_void) -> Status>,
    pub graph_compute: Option<unsafe extern "C" fn(*mut Backend, *mut CGraph) -> Status>,
    pub event_record: Option<unsafe extern "C" fn(*mut Backend, *mut BackendEvent)>,
    pub event_wait: Option<unsafe extern "C" fn(*mut Backend, *mut BackendEvent)>,
    pub graph_optimize: Option<GraphOptimize>,
}

/// `ggml_backend`
#[repr(C)]
pub struct Backend {
    /// Kind of the backend.
    pub guid: *mut Guid,
    /// Function table.
    pub iface: BackendI,
    /// Device of the backend.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// `ggml_backend_event`
#[repr(C)]
pub struct BackendEvent {
    /// Device of the event.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layouts_match_upstream() {
        assert_eq!(size_of::<BackendI>(), 16 * 8);
        assert_eq!(size_of::<Backend>(), 152);
        assert_eq!(offset_of!(Backend, iface), 8);
        assert_eq!(offset_of!(Backend, device), 136);
        assert_eq!(offset_of!(BackendI, synchronize), 56);
        assert_eq!(offset_of!(BackendI, graph_compute), 96);
        assert_eq!(offset_of!(BackendI, graph_optimize), 120);
        assert_eq!(size_of::<BackendEvent>(), 16);
        assert_eq!(size_of::<Status>(), 4);
    }
}
