//! Loads a plugin and performs the handshake.

use super::buffer::GgmlBufferType;
use super::log::{self, SetLogFn};
use crate::abi::{
    AbortCallback, Backend, Buffer, BufferType, Device, Feature, InitFn, Reg, ScoreFn, Version,
    proc_name,
};
use crate::base;
#[cfg(unix)]
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
#[cfg(windows)]
use libloading::os::windows::{LOAD_WITH_ALTERED_SEARCH_PATH, Library};
use samite_core::BufferType as BufferTypeTrait;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// `void ggml_backend_set_n_threads(backend, int)`
pub type SetThreadsFn = unsafe extern "C" fn(*mut Backend, c_int);
/// `void ggml_backend_set_abort_callback(backend, callback, data)`
pub type SetAbortFn = unsafe extern "C" fn(*mut Backend, Option<AbortCallback>, *mut c_void);
type GetFeaturesFn = unsafe extern "C" fn(*mut Reg) -> *const Feature;
type GetExtraTypesFn = unsafe extern "C" fn(*mut Device) -> *mut *mut BufferType;

/// A loaded plugin whose tables can be used. It is never unloaded.
pub struct Plugin {
    pub path: PathBuf,
    pub version: Version,
    /// Release that its `libggml-base` reports, or a description if unknown.
    pub release: String,
    /// True if it came without upstream's `libggml-base` and uses samite's.
    pub alone: bool,
    /// Name that the plugin reports.
    pub name: String,
    /// Score of the plugin on this machine; 1 if it reports none.
    pub score: i32,
    pub devices: Vec<*mut Device>,
    /// Memory types of its devices.
    memories: Mutex<Vec<Weak<GgmlBufferType>>>,
    reg: *mut Reg,
    buffer_free: unsafe extern "C" fn(*mut Buffer),
}

// SAFETY: the tables do not change, and ggml's registration and device functions may be called from
// any thread.
unsafe impl Send for Plugin {}
// SAFETY: the tables do not change, the list of memories has a lock, and ggml's registration and
// device functions may be called from several threads at once.
unsafe impl Sync for Plugin {}

/// Copies a C string, if there is one.
///
/// # Safety
/// `text` must be null or a C string.
pub unsafe fn string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the text is not null, so it is a zero-terminated string. It is copied before the call
    // ends.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Returns the message of the dynamic loader itself, which is the source of the error.
pub fn loader_error(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}

/// Loads a library by its full path. On Windows, its dependencies are searched in its folder first.
fn open(path: &Path) -> Result<Library, String> {
    #[cfg(windows)]
    // SAFETY: as below.
    let library = unsafe { Library::load_with_flags(path, LOAD_WITH_ALTERED_SEARCH_PATH) };
    #[cfg(unix)]
    // SAFETY: loading runs the library's initialisers. The user named the file or its directory,
    // and no other user can write to it.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library.map_err(|error| loader_error(&error))
}

/// Returns the address of a function in a library.
fn address(library: &Library, name: &str) -> Option<*mut c_void> {
    // SAFETY: only the address is taken here; its user determines the type.
    let symbol = unsafe { library.get::<*mut c_void>(name.as_bytes()) }.ok()?;
    let address = symbol.as_raw_ptr();
    (!address.is_null()).then_some(address)
}

/// Returns the address of a function of `libggml-base`. On Unix, looking in a plugin also searches
/// its dependencies. On Windows, the library is found by its name.
fn address_in_base(plugin: &Library, name: &str) -> Option<*mut c_void> {
    #[cfg(windows)]
    for base in ["ggml-base.dll", "libggml-base.dll"] {
        if let Ok(base) = Library::open_already_loaded(base)
            && let Some(address) = address(&base, name)
        {
            return Some(address);
        }
    }
    address(plugin, name)
}

/// Fails if a file must not be loaded.
fn check_file(path: &Path) -> Result<(), String> {
    if !path.is_absolute() {
        return Err("the path is not absolute".into());
    }
    if std::fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink()) && !path.exists() {
        return Err("a link to a file that does not exist".into());
    }
    let file = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if file.is_dir() {
        return Err("a directory, not a library".into());
    }
    if !file.is_file() {
        return Err("not a regular file".into());
    }
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::mode(&file) & 0o002 != 0 {
        return Err("everybody can write to this file; take that right away (chmod o-w)".into());
    }
    Ok(())
}

impl Plugin {
    /// Loads a plugin and checks everything that can be checked. If it comes without
    /// `libggml-base`, it is taken for one of `release`, or of ggml 0.25.
    ///
    /// # Errors
    /// Returns the reason if it cannot be used.
    pub fn load(path: &Path, release: Option<Version>) -> Result<Self, String> {
        check_file(path)?;
        let library = match open(path) {
            // The loader's message starts with the missing library.
            Err(reason) if reason.starts_with("libggml-base.") => {
                let needed = reason.split(':').next().unwrap_or_default();
                base::provide(needed, release.unwrap_or(Version::V25))?;
                open(path)
            }
            other => other,
        }?;
        let symbol = |name: &str| address(&library, name);
        let missing = |name: &str| format!("{name} is missing: not a plugin of ggml");
        let init = symbol("ggml_backend_init").ok_or_else(|| missing("ggml_backend_init"))?;
        let of_base = |name: &str| {
            address_in_base(&library, name)
                .ok_or_else(|| format!("{name} is missing: it comes without libggml-base"))
        };
        let (version, buffer_free) = (
            of_base("ggml_version")?,
            of_base("ggml_backend_buffer_free")?,
        );
        let alone = base::is_used(version);
        // SAFETY: this is the type of `ggml_version` wherever it exists.
        let version = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(version)()
        };
        if version.is_null() {
            return Err("ggml_version says nothing".into());
        }
        // SAFETY: it returns a static string.
        let release = unsafe { CStr::from_ptr(version) }.to_string_lossy();
        let version = Version::of_release(&release).map_err(|error| error.to_string())?;
        if let Some(set_log) = address_in_base(&library, "ggml_log_set") {
            // SAFETY: the type of the function in all versions; the listener takes any text.
            unsafe {
                let set_log = std::mem::transmute::<*mut c_void, SetLogFn>(set_log);
                set_log(Some(log::listener), std::ptr::null_mut());
            }
        }
        let score = match symbol("ggml_backend_score") {
            // SAFETY: the type of the function in all versions.
            Some(score) => unsafe { std::mem::transmute::<*mut c_void, ScoreFn>(score)() },
            None => 1,
        };
        if score <= 0 {
            return Err("score 0: it cannot run on this processor".into());
        }
        // SAFETY: the type of the function in all versions.
        let reg = unsafe { std::mem::transmute::<*mut c_void, InitFn>(init)() };
        if reg.is_null() {
            return Err("ggml_backend_init returned nothing".into());
        }
        // SAFETY: the number comes first in all versions.
        let api = unsafe { (*reg).api_version };
        if api != version.api() {
            let expected = version.api();
            return Err(if alone {
                format!(
                    "its interface has version {api}; it is taken for ggml {release}, \
                     whose interface is {expected}"
                )
            } else {
                format!("its interface has version {api}; that of ggml {release} is {expected}")
            });
        }
        // SAFETY: the version is one whose registration looks so.
        let table = unsafe { (*reg).iface };
        let (Some(get_name), Some(count), Some(get_device)) =
            (table.get_name, table.get_device_count, table.get_device)
        else {
            return Err("its registration lacks functions".into());
        };
        // SAFETY: the registration is valid as long as the library is loaded, which is from now on.
        let (name, devices) = unsafe {
            let name = string(get_name(reg)).unwrap_or_default();
            let devices: Vec<_> = (0..count(reg)).map(|i| get_device(reg, i)).collect();
            (name, devices)
        };
        for &device in &devices {
            check_device(device)?;
        }
        let plugin = Plugin {
            path: path.to_owned(),
            version,
            release: if alone {
                format!("ggml {version} on samite's libggml-base")
            } else {
                format!("ggml {release}")
            },
            alone,
            name,
            score,
            devices,
            memories: Mutex::default(),
            reg,
            // SAFETY: the type of the function in all versions.
            buffer_free: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Buffer)>(buffer_free)
            },
        };
        std::mem::forget(library);
        Ok(plugin)
    }

    /// Creates a plugin that is part of the test.
    #[cfg(test)]
    pub fn of_test(
        device: *mut Device,
        reg: *mut Reg,
        buffer_free: unsafe extern "C" fn(*mut Buffer),
    ) -> Self {
        Plugin {
            path: "/test".into(),
            version: Version::V28,
            release: "test".into(),
            alone: false,
            name: "test".into(),
            score: 1,
            devices: vec![device],
            memories: Mutex::default(),
            reg,
            buffer_free,
        }
    }

    /// Returns whether the plugin's devices can copy and wait for each other. ggml's own scheduler
    /// relies on that only in `cpy_tensor_async`, where most plugins reject two devices. The
    /// plugins listed here copy between cards, and their events are the driver's, for which the
    /// queue of any card can wait.
    pub fn joins_devices(&self) -> bool {
        ["CUDA", "ROCm", "MUSA"].contains(&&*self.name)
    }

    /// Registers a memory type of one of its devices.
    pub fn add_memory(&self, memory: &Arc<GgmlBufferType>) {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories.push(Arc::downgrade(memory));
    }

    /// Returns whether `memory` belongs to one of its devices.
    pub fn has_memory(&self, memory: &Arc<dyn BufferTypeTrait>) -> bool {
        let memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = memories.iter();
        known.any(|known| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(memory)))
    }

    /// Frees a buffer.
    ///
    /// # Safety
    /// It must belong to this plugin and not be used again.
    pub unsafe fn free_buffer(&self, buffer: *mut Buffer) {
        // SAFETY: the buffer belongs to this plugin, whose function this is, and it is not used
        // again.
        unsafe { (self.buffer_free)(buffer) };
    }

    fn proc_address(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the registration is valid.
        let address = unsafe { (*self.reg).iface.get_proc_address?(self.reg, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// Returns the function that sets the number of threads, if the plugin has it.
    pub fn set_threads(&self) -> Option<SetThreadsFn> {
        // SAFETY: the function's type under this name.
        self.proc_address(proc_name::SET_N_THREADS)
            .map(|address| unsafe { std::mem::transmute::<*mut c_void, SetThreadsFn>(address) })
    }

    /// Returns the function that sets the abort callback, if the plugin has it.
    pub fn set_abort(&self) -> Option<SetAbortFn> {
        // SAFETY: the function's type under this name.
        self.proc_address(proc_name::SET_ABORT_CALLBACK)
            .map(|address| unsafe { std::mem::transmute::<*mut c_void, SetAbortFn>(address) })
    }

    /// Returns features, such as instruction sets.
    pub fn features(&self) -> Vec<(String, String)> {
        let mut features = Vec::new();
        let Some(address) = self.proc_address(proc_name::GET_FEATURES) else {
            return features;
        };
        // SAFETY: the function's type under this name; it returns an array that ends with a null
        // name.
        unsafe {
            let mut at = std::mem::transmute::<*mut c_void, GetFeaturesFn>(address)(self.reg);
            while !at.is_null()
                && let Some(name) = string((*at).name)
            {
                features.push((name, string((*at).value).unwrap_or_default()));
                at = at.add(1);
            }
        }
        features
    }

    /// Returns the buffer types with special layouts for weights on `device`.
    pub fn extra_types(&self, device: *mut Device) -> Vec<*mut BufferType> {
        let mut types = Vec::new();
        let Some(address) = self.proc_address(proc_name::GET_EXTRA_BUFTS) else {
            return types;
        };
        // SAFETY: the function's type under this name; it returns an array that ends with null, or
        // null.
        unsafe {
            let mut at = std::mem::transmute::<*mut c_void, GetExtraTypesFn>(address)(device);
            while !at.is_null() && !(*at).is_null() {
                types.push(*at);
                at = at.add(1);
            }
        }
        types
    }
}

/// Checks that a device has all mandatory functions.
fn check_device(device: *mut Device) -> Result<(), String> {
    if device.is_null() {
        return Err("a device is missing".into());
    }
    // SAFETY: the plugin's version is one whose devices look so.
    let table = unsafe { (*device).iface };
    let complete = table.get_name.is_some()
        && table.get_props.is_some()
        && table.init_backend.is_some()
        && table.get_buffer_type.is_some()
        && table.supports_op.is_some()
        && table.supports_buft.is_some();
    if complete {
        Ok(())
    } else {
        Err("a device lacks functions".into())
    }
}
