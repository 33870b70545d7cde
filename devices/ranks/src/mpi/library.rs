//! Loads an MPI library, detects its kind, and provides its functions.
//!
//! Both kinds have the same functions but different handles: Open MPI's are pointers to objects
//! that the library exports, MPICH's are numbers.

use super::transport::Mpi;
use super::{MpiError, PATH_VARIABLE};
use crate::{Launch, Launcher};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use samite_meta::comm::Transport;
use std::error::Error;
use std::ffi::{c_char, c_int, c_void};

/// Names passed to the system's loader, which does not search the current directory for them.
#[cfg(target_os = "macos")]
const OPEN_MPI: &[&str] = &["libmpi.40.dylib"];
#[cfg(target_os = "macos")]
const MPICH: &[&str] = &["libmpi.12.dylib", "libpmpi.12.dylib"];
#[cfg(not(target_os = "macos"))]
const OPEN_MPI: &[&str] = &["libmpi.so.40"];
#[cfg(not(target_os = "macos"))]
const MPICH: &[&str] = &["libmpich.so.12", "libmpi.so.12", "libmpi_cray.so.12"];
/// Name used by development packages of any MPI.
#[cfg(target_os = "macos")]
const ANY: &[&str] = &["libmpi.dylib"];
#[cfg(not(target_os = "macos"))]
const ANY: &[&str] = &["libmpi.so"];

/// `MPI_THREAD_SERIALIZED`: a single thread at a time calls MPI.
const THREAD_SERIALIZED: c_int = 2;

/// Buffer size for a library's version (MPICH: 8192) or an error.
const TEXT: usize = 8192;

/// An MPI handle: a number in MPICH, a pointer in Open MPI.
pub(crate) trait Handle: Copy + 'static {}
impl Handle for c_int {}
impl Handle for *mut c_void {}

type InitThread =
    unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
type About<H> = unsafe extern "C" fn(H, *mut c_int) -> c_int;
type SetErrorHandler<H> = unsafe extern "C" fn(H, H) -> c_int;
type GatherAll<H> = unsafe extern "C" fn(
    *const c_void,
    c_int,
    H,
    *mut c_void,
    *const c_int,
    *const c_int,
    H,
    H,
    *mut H,
) -> c_int;
type Test<H> = unsafe extern "C" fn(*mut H, *mut c_int, *mut c_void) -> c_int;
type BeginSend<H> = unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int;
type Probe<H> = unsafe extern "C" fn(c_int, c_int, H, *mut c_int, *mut c_void) -> c_int;
type Receive<H> =
    unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut c_void) -> c_int;
type MpiAbort<H> = unsafe extern "C" fn(H, c_int) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;
type LibraryVersion = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// Functions and handles of a library.
pub(crate) struct Api<H> {
    pub init_thread: InitThread,
    pub rank: About<H>,
    pub size: About<H>,
    pub set_error_handler: SetErrorHandler<H>,
    pub gather_all: GatherAll<H>,
    pub test: Test<H>,
    pub send: BeginSend<H>,
    pub probe: Probe<H>,
    pub receive: Receive<H>,
    pub abort: MpiAbort<H>,
    pub error_text: ErrorText,
    pub finalize: unsafe extern "C" fn() -> c_int,
    /// `MPI_COMM_WORLD`: all processes.
    pub world: H,
    /// `MPI_BYTE`: type of all data.
    pub byte: H,
    /// `MPI_ERRORS_RETURN`.
    pub errors_return: H,
    /// `MPI_REQUEST_NULL`.
    pub no_request: H,
    /// `MPI_STATUS_IGNORE`.
    pub ignore_status: *mut c_void,
}

/// Returns the loader's message, which names the file or the symbol.
fn said(error: &libloading::Error) -> String {
    let source = error.source();
    source.map_or_else(|| error.to_string(), |source| source.to_string())
}

/// A loaded library. It is never unloaded, because its background threads may still run.
struct MpiLibrary {
    path: String,
    library: Library,
    version: String,
}

impl MpiLibrary {
    fn load(path: &str) -> Result<Self, String> {
        // Open MPI's plugins look up its symbols globally. SAFETY: loading runs the library's
        // initializers. The candidates are well-known libraries found by the system's loader, or
        // one that the user named.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|error| said(&error))?;
        // SAFETY: this is the function's type in every MPI since 3.0.
        let about = *unsafe { library.get::<LibraryVersion>(b"MPI_Get_library_version\0") }
            .map_err(|error| said(&error))?;
        let version = text(|text, len| {
            // SAFETY: the function may be called before MPI is initialized. It writes at most the
            // maximum version length of either kind, which is less than the buffer's size.
            unsafe { about(text, len) };
        });
        Ok(MpiLibrary {
            path: path.to_owned(),
            library,
            version,
        })
    }

    /// Looks up a function.
    ///
    /// # Safety
    /// `F` must be its type.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, MpiError> {
        // SAFETY: the caller guarantees the type.
        let found = unsafe { self.library.get::<F>(name.as_bytes()) };
        found
            .map(|symbol| *symbol)
            .map_err(|error| MpiError::Start {
                path: self.path.clone(),
                what: said(&error),
            })
    }

    /// Returns the address of an Open MPI object, which is its handle.
    fn object(&self, name: &str) -> Option<*mut c_void> {
        // SAFETY: only the address of the symbol is taken.
        let symbol = unsafe { self.library.get::<*mut c_void>(name.as_bytes()) };
        symbol.ok().map(libloading::os::unix::Symbol::as_raw_ptr)
    }

    /// Looks up all functions, for handles of type `H`.
    ///
    /// # Safety
    /// The library must have handles of type `H`, and the given handles must be its own.
    unsafe fn api<H: Handle>(
        &self,
        [world, byte, errors_return, no_request]: [H; 4],
        ignore_status: *mut c_void,
    ) -> Result<Api<H>, MpiError> {
        // SAFETY: these are the types of MPI's functions, with handles of the library's own type.
        unsafe {
            Ok(Api {
                init_thread: self.function("MPI_Init_thread")?,
                rank: self.function("MPI_Comm_rank")?,
                size: self.function("MPI_Comm_size")?,
                set_error_handler: self.function("MPI_Comm_set_errhandler")?,
                gather_all: self.function("MPI_Iallgatherv")?,
                test: self.function("MPI_Test")?,
                send: self.function("MPI_Isend")?,
                probe: self.function("MPI_Iprobe")?,
                receive: self.function("MPI_Recv")?,
                abort: self.function("MPI_Abort")?,
                error_text: self.function("MPI_Error_string")?,
                finalize: self.function("MPI_Finalize")?,
                world,
                byte,
                errors_return,
                no_request,
                ignore_status,
            })
        }
    }

    fn begin(self) -> Result<Box<dyn Transport>, MpiError> {
        let objects = [
            "ompi_mpi_comm_world",
            "ompi_mpi_byte",
            "ompi_mpi_errors_return",
            "ompi_request_null",
        ];
        let objects: Option<Vec<_>> = objects.iter().map(|name| self.object(name)).collect();
        let is_mpich = ["MPICH", "Intel(R) MPI", "MVAPICH"]
            .iter()
            .any(|name| self.version.contains(name));
        let transport: Box<dyn Transport> = match objects.as_deref() {
            Some(&[world, byte, errors_return, no_request]) => {
                let handles = [world, byte, errors_return, no_request];
                // SAFETY: the library exports Open MPI's objects, so its handles are their
                // addresses. Its `MPI_STATUS_IGNORE` is null.
                let api = unsafe { self.api(handles, std::ptr::null_mut()) }?;
                Box::new(self.init(api)?)
            }
            _ if is_mpich => {
                let handles: [c_int; 4] = [0x4400_0000, 0x4c00_010d, 0x5400_0001, 0x2c00_0000];
                // SAFETY: the library has MPICH's ABI, whose handles are numbers that have not
                // changed since the ABI was defined. Its `MPI_STATUS_IGNORE` is 1.
                let api = unsafe { self.api(handles, std::ptr::without_provenance_mut(1)) }?;
                Box::new(self.init(api)?)
            }
            _ => {
                return Err(MpiError::Unknown {
                    path: self.path,
                    version: self.version,
                });
            }
        };
        // Never unloaded.
        std::mem::forget(self.library);
        Ok(transport)
    }

    /// Initializes MPI.
    fn init<H: Handle>(&self, api: Api<H>) -> Result<Mpi<H>, MpiError> {
        let mut provided = 0;
        // SAFETY: this happens once per process, because a second library is never initialized.
        // Null pointers mean no arguments.
        let failed = unsafe {
            (api.init_thread)(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                THREAD_SERIALIZED,
                &mut provided,
            )
        };
        let wrong = |what: String| MpiError::Start {
            path: self.path.clone(),
            what,
        };
        if failed != 0 {
            return Err(wrong(format!("MPI does not begin (error {failed})")));
        }
        if provided < THREAD_SERIALIZED {
            return Err(wrong("it is for programs of one thread only".to_owned()));
        }
        let name = self.version.lines().next().unwrap_or_default();
        // Only the first words: some libraries list their whole build configuration.
        let name = name.split(',').next().unwrap_or_default();
        let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
        tracing::debug!(library = self.path, name, "MPI");
        Mpi::new(api, name).map_err(wrong)
    }
}

/// Returns the text that an MPI function writes.
pub(crate) fn text(write: impl FnOnce(*mut c_char, *mut c_int)) -> String {
    let mut bytes = [0_u8; TEXT];
    let mut len = 0;
    write(bytes.as_mut_ptr().cast(), &mut len);
    let len = usize::try_from(len).unwrap_or(0).min(TEXT);
    let text = String::from_utf8_lossy(&bytes[..len]);
    text.trim_end_matches('\0').trim().to_owned()
}

/// Loads the library in `SAMITE_MPI_PATH`, or else the first one on the system, preferring those
/// that match the launcher; then initializes MPI.
pub(crate) fn start(launch: Option<Launch>) -> Result<Box<dyn Transport>, MpiError> {
    let named = std::env::var(PATH_VARIABLE).ok();
    let candidates = match &named {
        Some(path) if !path.starts_with('/') => {
            return Err(MpiError::Missing(format!(
                "{PATH_VARIABLE} must be an absolute path"
            )));
        }
        Some(path) => vec![path.as_str()],
        None => {
            let kinds = match launch.map(|launch| launch.launcher) {
                Some(Launcher::Mpich | Launcher::SrunPmi2) => [MPICH, OPEN_MPI, ANY],
                _ => [OPEN_MPI, MPICH, ANY],
            };
            kinds.concat()
        }
    };
    let mut rejected = Vec::new();
    for path in candidates {
        match MpiLibrary::load(path) {
            Ok(library) => return library.begin(),
            Err(reason) => rejected.push(reason),
        }
    }
    Err(MpiError::Missing(rejected.join("; ")))
}
