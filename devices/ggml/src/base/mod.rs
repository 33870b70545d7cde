//! samite's replacement for `libggml-base.so`, so that a plugin's file alone is enough.
//!
//! ggml's plugins link to upstream's `libggml-base`, which has the functions that inspect tensors,
//! convert numbers and own buffers. If the dynamic loader does not find that library, [`provide`]
//! supplies one: a shared library without code, built in memory, whose symbols are the functions of
//! this module. So no second file is needed, both names of the library (`libggml-base.so`,
//! `libggml-base.so.0`) work, and nothing is exported to other libraries of the process.
//!
//! # Coverage
//! The library has everything that upstream's prebuilt CPU, CUDA and Vulkan plugins of ggml 0.25
//! import, and that the sources of the CUDA, SYCL, OpenCL, CANN and WebGPU backends call. The
//! loader rejects a plugin that needs more and names the symbol. Left out are
//! - graphs and tensors in arenas (`ggml_new_tensor_1d`, `ggml_new_buffer`): only helpers for
//!   programs that link to the plugin call them, never the plugin itself;
//! - encoders of the IQ1, IQ2 and IQ3 types, which need an importance matrix or a search: no kernel
//!   calls them.
//!
//! # Versions
//! The layout of buffer types depends on the interface version, which a plugin reports only after
//! it is loaded. The first plugin settles it for the process: see [`settle`].

mod buffers;
mod image;
mod names;
mod process;
mod tensors;
mod text;
mod types;

use crate::abi::Version;
use std::ffi::{c_char, c_void};
use std::fs::File;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A function, under the name that plugins use.
struct Symbol {
    name: &'static str,
    address: *const (),
}

/// Creates a list of symbols of functions under the names that plugins use.
macro_rules! exports {
    ($($function:path as $name:ident),* $(,)?) => {
        vec![$(Symbol { name: stringify!($name), address: $function as *const () }),*]
    };
}
use exports;

/// Returns all functions, sorted by name.
fn symbols() -> Vec<Symbol> {
    let mut all = exports![version_text as ggml_version];
    all.extend(buffers::symbols());
    all.extend(process::symbols());
    all.extend(tensors::symbols());
    all.extend(text::symbols());
    all.extend(types::symbols());
    all.sort_unstable_by_key(|symbol| symbol.name);
    all
}

/// Interface of the plugins that use this library.
static SETTLED: OnceLock<Version> = OnceLock::new();

/// Returns the settled version. A plugin that needs it before it has reported its own counts as
/// version 2, and is rejected if it then reports another one.
fn version() -> Version {
    *SETTLED.get_or_init(|| Version::V25)
}

/// `ggml_version` of this library. It describes the functions, not the release of a plugin; plugins
/// must be asked for their interface version.
unsafe extern "C" fn version_text() -> *const c_char {
    match SETTLED.get() {
        Some(Version::V26) => c"0.26".as_ptr(),
        _ => c"0.25".as_ptr(),
    }
}

/// Returns whether the address of a plugin's `ggml_version` shows that it uses this library.
pub fn is_used(ggml_version: *const c_void) -> bool {
    std::ptr::eq(ggml_version, version_text as *const c_void)
}

/// Settles the interface version of this library, from the number that a plugin which uses it
/// reports.
///
/// # Errors
/// Returns an error if the number is unknown, or if another version was settled before.
pub fn settle(api_version: i32) -> Result<Version, String> {
    let wanted = Version::of_api(api_version).ok_or_else(|| {
        let known = Version::known_apis();
        format!("its interface has version {api_version}; known are {known}")
    })?;
    let settled = *SETTLED.get_or_init(|| wanted);
    if settled == wanted {
        Ok(settled)
    } else {
        Err(format!(
            "its interface has version {api_version}, but samite's libggml-base serves plugins of version {} in this process",
            settled.api()
        ))
    }
}

/// Loads this library under the name that a plugin needs, such as `libggml-base.so.0`, until the
/// process ends.
///
/// # Errors
/// Returns an error if the system rejects it.
pub fn provide(name: &str) -> Result<(), String> {
    /// Files of loaded libraries. The loader identifies libraries by inode, so the files stay open.
    static LOADED: Mutex<Vec<(String, File)>> = Mutex::new(Vec::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if loaded.iter().any(|(known, _)| known == name) {
        return Ok(());
    }
    let file = image::load(name, &symbols()).map_err(|reason| {
        format!("{name} is not there, and samite's cannot be loaded: {reason}")
    })?;
    loaded.push((name.to_owned(), file));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_unique() {
        let all = symbols();
        assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name));
        assert!(all.iter().all(|symbol| !symbol.address.is_null()));
    }

    #[test]
    fn symbols_imported_by_the_cuda_plugin_exist() {
        // `nm -D --undefined-only libggml-cuda.so` of npm's @node-llama-cpp/linux-x64-cuda 3.22.1,
        // and further functions that its sources of 0.25.3 call. Tests load the other plugins.
        let names = include_str!("../../tests/fixtures/imports-of-cuda.txt").lines();
        let all = symbols();
        let missing: Vec<_> = names
            .filter(|name| !all.iter().any(|symbol| symbol.name == *name))
            .collect();
        assert_eq!(missing, [""; 0]);
    }

    #[test]
    fn the_first_plugin_fixes_the_interface_version() {
        // The only test of this process that settles, so the order of tests does not matter.
        assert!(settle(99).unwrap_err().contains("known are 2 and 3"));
        assert_eq!(settle(2), Ok(Version::V25));
        let error = settle(3).unwrap_err();
        assert!(error.contains("serves plugins of version 2"), "{error}");
        assert_eq!(settle(2), Ok(Version::V25));
        assert_eq!(version(), Version::V25);
    }
}
