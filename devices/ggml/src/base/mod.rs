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
//! import, and that the sources of all other backends of 0.25 to 0.28 call, except RPC, which
//! samite has itself, and ET, which builds graphs. The loader rejects a plugin that needs more and
//! names the symbol. Left out are
//! - graphs and tensors in arenas (`ggml_new_tensor_1d`, `ggml_new_buffer`): only helpers for
//!   programs that link to the plugin call them, never the plugin itself;
//! - encoders of the IQ1, IQ2 and IQ3 types, which need an importance matrix or a search: no kernel
//!   calls them.
//!
//! # Versions
//! Structures and numbers depend on the release, which a plugin alone does not report: several
//! releases have one interface version. So the probe tries releases, each in a process of its own,
//! and the caller of [`provide`] names the one to serve. A process serves one.

mod buffers;
mod image;
mod names;
mod process;
mod tensors;
mod text;
mod transfer;
mod types;

use crate::abi::Version;
use std::ffi::{c_char, c_void};
use std::fs::File;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

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

/// Returns all functions for plugins of `version`, sorted by name.
fn symbols(version: Version) -> Vec<Symbol> {
    let mut all = exports![version_text as ggml_version];
    all.extend(buffers::symbols(version));
    all.extend(process::symbols());
    all.extend(tensors::symbols());
    all.extend(text::symbols());
    all.extend(transfer::symbols());
    all.extend(types::symbols());
    all.sort_unstable_by_key(|symbol| symbol.name);
    all
}

/// Release of the plugins that use this library.
static SERVED: OnceLock<Version> = OnceLock::new();

/// Returns the release of the plugins that use this library. No plugin calls it before it is known.
fn version() -> Version {
    *SERVED.get().unwrap_or(&Version::V25)
}

/// `ggml_version` of this library.
unsafe extern "C" fn version_text() -> *const c_char {
    match version() {
        Version::V25 => c"0.25".as_ptr(),
        Version::V26 => c"0.26".as_ptr(),
        Version::V27 => c"0.27".as_ptr(),
        Version::V28 => c"0.28".as_ptr(),
    }
}

/// Returns whether the address of a plugin's `ggml_version` shows that it uses this library.
pub fn is_used(ggml_version: *const c_void) -> bool {
    std::ptr::eq(ggml_version, version_text as *const c_void)
}

/// Returns whether a plugin uses this library.
pub fn is_serving() -> bool {
    !loaded().is_empty()
}

/// Returns the names and files of the loaded libraries. The loader identifies libraries by inode,
/// so the files stay open.
fn loaded() -> MutexGuard<'static, Vec<(String, File)>> {
    static LOADED: Mutex<Vec<(String, File)>> = Mutex::new(Vec::new());
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Decides which release the library serves.
///
/// # Errors
/// Returns an error if the process serves another one.
fn serve(wanted: Version) -> Result<(), String> {
    let served = *SERVED.get_or_init(|| wanted);
    if served == wanted {
        Ok(())
    } else {
        Err(format!(
            "it is of ggml {wanted}, but samite's libggml-base serves ggml {served} in this process"
        ))
    }
}

/// Loads this library under the name that a plugin of `version` needs, such as `libggml-base.so.0`,
/// until the process ends.
///
/// # Errors
/// Returns an error if the system rejects it, or if the process serves another version.
pub fn provide(name: &str, version: Version) -> Result<(), String> {
    serve(version)?;
    let mut loaded = loaded();
    if loaded.iter().any(|(known, _)| known == name) {
        return Ok(());
    }
    let file = image::load(name, &symbols(version)).map_err(|reason| {
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
        for version in Version::ALL {
            let all = symbols(version);
            assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name));
            assert!(all.iter().all(|symbol| !symbol.address.is_null()));
        }
    }

    /// Returns those of `names` that the library lacks.
    fn missing(
        names: impl IntoIterator<Item = &'static str>,
        version: Version,
    ) -> Vec<&'static str> {
        let all = symbols(version);
        let is_missing = |name: &&str| !all.iter().any(|symbol| symbol.name == *name);
        names.into_iter().filter(is_missing).collect()
    }

    #[test]
    fn symbols_imported_by_the_cuda_plugin_exist() {
        // `nm -D --undefined-only libggml-cuda.so` of npm's @node-llama-cpp/linux-x64-cuda 3.22.1,
        // and further functions that its sources of 0.25.3 call. Tests load the other plugins.
        let names = include_str!("../../tests/fixtures/imports-of-cuda.txt").lines();
        assert_eq!(missing(names, Version::V25), [""; 0]);
    }

    #[test]
    fn symbols_called_by_other_backends_exist() {
        // Functions of `libggml-base` that the sources of these backends of 0.28 call, and the CUDA
        // plugin of 0.25 does not.
        let hexagon = [
            "ggml_backend_buffer_init_tensor",
            "ggml_backend_buft_get_alignment",
            "ggml_backend_dev_name",
            "ggml_backend_multi_buffer_alloc_buffer",
            "ggml_backend_tensor_get",
            "ggml_backend_tensor_get_2d",
            "ggml_backend_tensor_set",
            "ggml_backend_tensor_set_2d",
            "ggml_backend_view_init",
            "ggml_fp32_to_bf16",
            "ggml_is_view",
            "ggml_tallocr_alloc",
            "ggml_tallocr_new",
        ];
        let metal = ["ggml_graph_node"];
        let openvino = ["ggml_backend_buffer_clear", "ggml_backend_tensor_get"];
        let names = [&hexagon[..], &metal, &openvino].concat();
        assert_eq!(missing(names, Version::V28), [""; 0]);
    }

    #[test]
    fn a_process_serves_one_release() {
        // Other tests of this process need the default, which is this one.
        assert_eq!(serve(Version::V25), Ok(()));
        let error = serve(Version::V28).unwrap_err();
        assert!(error.contains("0.28") && error.contains("serves ggml 0.25"));
        assert_eq!((serve(Version::V25), version()), (Ok(()), Version::V25));
    }
}
