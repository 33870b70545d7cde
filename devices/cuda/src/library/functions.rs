//! The driver's functions, and errors of their calls.
#![allow(unsafe_code)]

use crate::driver::{DriverError, DriverErrorKind, DriverResult};
use libloading::Library;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

/// Result code of a call.
pub type Code = c_int;

/// Lowest version of the driver, as it reports it: CUDA 12.0. Kernels are PTX ISA 8.0.
const MIN_VERSION: c_int = 12_000;

#[cfg(unix)]
const NAME: &str = "libcuda.so.1";
#[cfg(windows)]
const NAME: &str = "nvcuda.dll";

/// Parameters of a kernel node, version 1.
#[repr(C)]
pub struct KernelNode {
    pub function: *mut c_void,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    pub parameters: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}

/// Attribute of a launch: its number, and a value that begins with an integer.
#[repr(C)]
pub struct LaunchAttribute {
    pub id: c_int,
    pub padding: c_int,
    pub value: [u64; 8],
}

impl LaunchAttribute {
    /// The attribute of a kernel that may start before the end of the launch before it.
    pub const EARLY: Self = LaunchAttribute {
        id: 6,
        padding: 0,
        value: [1, 0, 0, 0, 0, 0, 0, 0],
    };
}

/// Parameters of a launch with attributes.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    pub stream: *mut c_void,
    pub attributes: *mut LaunchAttribute,
    pub attribute_count: c_uint,
}

macro_rules! functions {
    ($($symbol:ident as $name:ident($($argument:ty),* $(,)?);)*) => {
        /// Addresses of the driver's functions. The library stays loaded for the process's life.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Functions {
            /// Finds every function in `library`.
            ///
            /// # Errors
            /// The name of a missing one.
            fn find(library: &Library) -> Result<Self, String> {
                Ok(Functions {
                    $($name: {
                        let symbol = concat!(stringify!($symbol), "\0");
                        // SAFETY: the driver exports this symbol as a function of this type.
                        *unsafe { library.get(symbol.as_bytes()) }
                            .map_err(|_| concat!("it has no function ", stringify!($symbol)))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit as init(c_uint);
    cuDriverGetVersion as version(*mut c_int);
    cuDeviceGetCount as device_count(*mut c_int);
    cuDeviceGet as device(*mut c_int, c_int);
    cuDeviceGetName as device_name(*mut c_char, c_int, c_int);
    cuDeviceGetPCIBusId as device_bus_address(*mut c_char, c_int, c_int);
    cuDeviceGetAttribute as device_attribute(*mut c_int, c_int, c_int);
    cuDeviceTotalMem_v2 as device_memory(*mut usize, c_int);
    cuDevicePrimaryCtxRetain as retain_context(*mut *mut c_void, c_int);
    cuDevicePrimaryCtxRelease_v2 as release_context(c_int);
    cuCtxSetCurrent as set_current(*mut c_void);
    cuCtxSynchronize as synchronize_context();
    cuMemGetInfo_v2 as memory(*mut usize, *mut usize);
    cuMemAlloc_v2 as alloc(*mut u64, usize);
    cuMemFree_v2 as free(u64);
    cuMemcpyHtoDAsync_v2 as write(u64, *const c_void, usize, *mut c_void);
    cuMemcpyDtoHAsync_v2 as read(*mut c_void, u64, usize, *mut c_void);
    cuMemcpyDtoDAsync_v2 as copy(u64, u64, usize, *mut c_void);
    cuMemsetD8Async as fill(u64, u8, usize, *mut c_void);
    cuModuleLoadDataEx as load(
        *mut *mut c_void,
        *const c_void,
        c_uint,
        *mut c_int,
        *mut *mut c_void,
    );
    cuModuleGetFunction as function(*mut *mut c_void, *mut c_void, *const c_char);
    cuStreamCreate as create_stream(*mut *mut c_void, c_uint);
    cuStreamDestroy_v2 as destroy_stream(*mut c_void);
    cuStreamSynchronize as synchronize(*mut c_void);
    cuStreamWaitEvent as wait(*mut c_void, *mut c_void, c_uint);
    cuEventCreate as create_event(*mut *mut c_void, c_uint);
    cuEventDestroy_v2 as destroy_event(*mut c_void);
    cuEventRecord as record(*mut c_void, *mut c_void);
    cuEventSynchronize as synchronize_event(*mut c_void);
    cuLaunchKernel as launch(
        *mut c_void,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    );
    cuLaunchKernelEx as launch_with(
        *const LaunchConfig,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    );
    cuStreamBeginCapture_v2 as begin_capture(*mut c_void, c_int);
    cuStreamEndCapture as end_capture(*mut c_void, *mut *mut c_void);
    cuGraphCreate as create_graph(*mut *mut c_void, c_uint);
    cuGraphAddKernelNode as add_node(
        *mut *mut c_void,
        *mut c_void,
        *const *mut c_void,
        usize,
        *const KernelNode,
    );
    cuGraphInstantiateWithFlags as instantiate(*mut *mut c_void, *mut c_void, u64);
    cuGraphDestroy as destroy_graph(*mut c_void);
    cuGraphLaunch as launch_graph(*mut c_void, *mut c_void);
    cuGraphExecDestroy as destroy_instance(*mut c_void);
    cuGetErrorName as error_name(Code, *mut *const c_char);
    cuGetErrorString as error_text(Code, *mut *const c_char);
}

impl Functions {
    /// Loads and initializes the driver. Returns its version, such as 13000.
    ///
    /// # Errors
    /// The reason why there is none, or why it cannot be used.
    pub fn load() -> Result<(Self, c_int), String> {
        // SAFETY: loading runs the library's initializers. It is the system's driver, found by the
        // system's loader.
        let library = unsafe { Library::new(NAME) }.map_err(|error| {
            let said = error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string);
            format!("{said} (it comes with NVIDIA's driver)")
        })?;
        // Work of the driver's threads may outlive everything here, even if it cannot be used.
        let library = std::mem::ManuallyDrop::new(library);
        let functions = Functions::find(&library)?;
        let mut version = 0;
        // SAFETY: the version is written to a variable that outlives the call.
        let code = unsafe { (functions.version)(&raw mut version) };
        functions
            .check("cuDriverGetVersion", code)
            .map_err(|error| error.message)?;
        if version < MIN_VERSION {
            return Err(format!(
                "it supports CUDA {}.{}; 12.0 is needed: update the driver",
                version / 1000,
                version % 1000 / 10
            ));
        }
        // SAFETY: no preconditions; the flags must be 0.
        let code = unsafe { (functions.init)(0) };
        functions
            .check("cuInit", code)
            .map_err(|error| error.message)?;
        Ok((functions, version))
    }

    /// Converts the result code of `call`.
    ///
    /// # Errors
    /// If it is not 0.
    pub fn check(&self, call: &str, code: Code) -> DriverResult<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = ptr::null();
            // SAFETY: the pointer is written to a variable that outlives the call.
            let found = unsafe { function(code, &raw mut text) } == 0 && !text.is_null();
            if !found {
                return None;
            }
            // SAFETY: the driver returns a static string with a terminator.
            let text = unsafe { CStr::from_ptr(text) };
            Some(text.to_string_lossy().into_owned())
        };
        let name = text(self.error_name).unwrap_or_else(|| format!("error {code}"));
        let text = text(self.error_text).unwrap_or_default();
        Err(DriverError {
            kind: kind_of(code),
            message: format!("{call}: {name}: {text}"),
        })
    }
}

/// Returns the kind of a result code other than 0.
fn kind_of(code: Code) -> DriverErrorKind {
    match code {
        2 => DriverErrorKind::OutOfMemory,
        // A forked process, shutdown, missing device, destroyed context, memory and link errors,
        // faults of kernels, unknown errors: the driver's documentation says that the process must
        // start again.
        3
        | 4
        | 46
        | 100
        | 101
        | 201
        | 214
        | 220
        | 226
        | 700
        | 702
        | 709
        | 710
        | 714..=719
        | 721
        | 810
        | 911
        | 999 => DriverErrorKind::Lost,
        _ => DriverErrorKind::Other,
    }
}
