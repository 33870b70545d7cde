//! Functions of the host's `libggml-base`, looked up at run time.

use samite_ggml::abi::{Buffer, BufferFields, BufferI, BufferI28, BufferType, Version};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// Error level in ggml's log.
const LOG_ERROR: c_int = 4;

type VersionFn = unsafe extern "C" fn() -> *const c_char;
type IsHostFn = unsafe extern "C" fn(*mut BufferType) -> bool;
type LogFn = unsafe extern "C" fn(c_int, *const c_char, ...);

type InitFn<I> = unsafe extern "C" fn(*mut BufferType, I, *mut c_void, usize) -> *mut Buffer;

/// `ggml_backend_buffer_init`. The table of functions is passed by value.
#[derive(Clone, Copy)]
enum BufferInitFn {
    V25(InitFn<BufferI>),
    V28(InitFn<BufferI28>),
}

/// The ggml of the host program.
#[derive(Clone, Copy)]
pub struct Host {
    /// Interface version.
    pub version: Version,
    buffer_init: BufferInitFn,
    is_host: IsHostFn,
}

static HOST: OnceLock<Result<Host, String>> = OnceLock::new();

impl Host {
    /// Returns the host, if its version is supported.
    pub fn get() -> Result<Host, String> {
        HOST.get_or_init(find).clone()
    }

    /// Creates a buffer that the host allocates and frees. Returns null if the host is out of
    /// memory.
    ///
    /// # Safety
    /// `buffer_type` must be valid, and the functions must match the context.
    pub unsafe fn new_buffer(
        self,
        buffer_type: *mut BufferType,
        iface: BufferI,
        context: *mut c_void,
        size: usize,
    ) -> *mut Buffer {
        // SAFETY: the type is valid and the functions match the context; `find` chose the
        // function's type by the version.
        unsafe {
            match self.buffer_init {
                BufferInitFn::V25(init) => init(buffer_type, iface, context, size),
                BufferInitFn::V28(init) => init(buffer_type, iface.into(), context, size),
            }
        }
    }

    /// Returns the fields of a buffer.
    ///
    /// # Safety
    /// `buffer` must be a valid buffer of the host.
    pub unsafe fn fields(self, buffer: *const Buffer) -> BufferFields {
        // SAFETY: the buffer is valid and of the host's version.
        unsafe { *Buffer::fields(buffer, self.version) }
    }

    /// Returns whether memory of this type is plain host memory.
    ///
    /// # Safety
    /// `buffer_type` must be valid.
    pub unsafe fn is_host(self, buffer_type: *mut BufferType) -> bool {
        // SAFETY: the caller guarantees that the type is valid; this is the function's type in all
        // known versions.
        unsafe { (self.is_host)(buffer_type) }
    }
}

fn find() -> Result<Host, String> {
    let symbol = |name: &CStr| {
        find_symbol(name).ok_or_else(|| {
            format!(
                "the host has no function {}: it is no program with a shared ggml",
                name.to_string_lossy()
            )
        })
    };
    let version = symbol(c"ggml_version")?;
    let (buffer_init, is_host) = (
        symbol(c"ggml_backend_buffer_init")?,
        symbol(c"ggml_backend_buft_is_host")?,
    );
    // SAFETY: this is the function's type in every version of ggml that has it; it returns a static
    // string.
    let text = unsafe { CStr::from_ptr(std::mem::transmute::<*mut c_void, VersionFn>(version)()) };
    let release = text.to_string_lossy();
    let version = Version::of_release(&release).map_err(|error| error.to_string())?;
    // SAFETY: these are the function's types in the known versions.
    let buffer_init = unsafe {
        match version {
            Version::V25 | Version::V26 | Version::V27 => {
                BufferInitFn::V25(std::mem::transmute::<*mut c_void, InitFn<BufferI>>(
                    buffer_init,
                ))
            }
            Version::V28 => BufferInitFn::V28(
                std::mem::transmute::<*mut c_void, InitFn<BufferI28>>(buffer_init),
            ),
        }
    };
    Ok(Host {
        version,
        buffer_init,
        // SAFETY: this is the function's type in all known versions, and `symbol` found it under
        // its name.
        is_host: unsafe { std::mem::transmute::<*mut c_void, IsHostFn>(is_host) },
    })
}

/// Looks up a function of the program, or of a `libggml-base` that was loaded without global
/// visibility.
fn find_symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: only looks up an address.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if !found.is_null() {
        return Some(found);
    }
    let handle = base_library()?;
    // SAFETY: the handle belongs to a loaded library and stays open.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Finds the loaded library whose file name starts with `libggml-base`.
#[cfg(target_os = "linux")]
fn base_library() -> Option<*mut c_void> {
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes valid information, and `base_library` passes the rest.
        let (name, found) = unsafe { ((*info).dlpi_name, &mut *found.cast::<Option<CString>>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: names are C strings.
        let name = unsafe { CStr::from_ptr(name) };
        let file = name.to_bytes().rsplit(|&c| c == b'/').next();
        if file.is_some_and(|file| file.starts_with(b"libggml-base")) {
            *found = Some(name.to_owned());
            return 1;
        }
        0
    }
    let mut path: Option<CString> = None;
    // SAFETY: `look` is only called before this returns, with a pointer to `path`.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut path).cast()) };
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
    // SAFETY: the library is already loaded; this only takes another reference, which is never
    // released.
    let handle = unsafe { libc::dlopen(path?.as_ptr(), flags) };
    (!handle.is_null()).then_some(handle)
}

#[cfg(not(target_os = "linux"))]
fn base_library() -> Option<*mut c_void> {
    None
}

/// Logs a line to the host's log, which is standard error unless the program redirects it.
pub fn log_error(message: &str) {
    let Ok(text) = CString::new(format!("samite: {message}\n")) else {
        return;
    };
    if let Some(log) = find_symbol(c"ggml_log_internal") {
        // SAFETY: this is the function's type in all versions of ggml; the format takes one string.
        unsafe {
            std::mem::transmute::<*mut c_void, LogFn>(log)(
                LOG_ERROR,
                c"%s".as_ptr(),
                text.as_ptr(),
            );
        }
    }
}

/// Calls `f`. If it panics, logs the panic and returns `otherwise`.
pub fn guard<R>(otherwise: R, f: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        log_error("internal error: a call panicked");
        std::mem::forget(panic); // dropping it could panic again
        otherwise
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_the_error_value() {
        assert_eq!(guard(7, || 8), 8);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let answer = guard(7, || panic!("no"));
        std::panic::set_hook(hook);
        assert_eq!(answer, 7);
    }

    #[test]
    fn a_missing_host_has_a_reason() {
        let error = Host::get().err().unwrap();
        assert!(error.contains("ggml_version"), "{error}");
        assert!(crate::ggml_backend_init().is_null());
    }
}
