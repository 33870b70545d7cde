//! Stub for systems without samite's `libggml-base`: plugins need upstream's.

use crate::abi::Version;
use std::ffi::c_void;

pub fn provide(name: &str, _version: Version) -> Result<(), String> {
    Err(format!(
        "{name} is not there, and samite's own is for Linux on x86-64 and aarch64 only"
    ))
}

pub fn is_used(_ggml_version: *const c_void) -> bool {
    false
}

pub fn is_serving() -> bool {
    false
}
