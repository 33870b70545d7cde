//! `libggml-samite.so`: samite's CPU device as a backend for ggml programs.
//!
//! ```text
//! GGML_BACKEND_PATH=$PWD/target/release/libggml_samite.so llama-cli -m model.gguf -dev samite-cpu
//! ```
//!
//! The library exports the functions that ggml's registry requires of a plugin, `ggml_backend_init`
//! and `ggml_backend_score`. Everything else is in function tables, which `ggml_backend_init` fills
//! for the interface of the host's ggml. A host of an unknown version is rejected with a log
//! message.
//!
//! # The device
//! `samite-cpu` registers as an integrated GPU, because programs place models there but not on a
//! second CPU. It works on host memory (its own, that of ggml's CPU backend, a mapped file) and has
//! an extra buffer type for packed weights. To place weights, a program asks whether an operation
//! is supported with the weight in an empty buffer of each type, the default type first. The device
//! rejects the default type for weights that it can pack, so they go to the packed type. Weights
//! that are already in memory are supported in both. With `SAMITE_GGML_EXPLAIN=1` in the
//! environment, the reason of every rejection is logged.
//!
//! # Graphs
//! A graph is imported and prepared once. The prepared work is cached under a fingerprint of
//! everything it depends on, so that the next token only compares and runs. Support queries use the
//! same import.
//!
//! # Safety
//! Like ggml, a host passes valid pointers and uses one thread at a time per backend. Panics do not
//! unwind into the host: a call that panics fails.
#![cfg(unix)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod buffers;
mod device;
mod graphs;
mod host;
mod memory;
mod stream;

use samite_ggml::abi::Reg;

/// Returns the registration with its single device, or null if the host's ggml is unsupported. The
/// host calls this first.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut Reg {
    host::guard(std::ptr::null_mut(), || {
        device::registration().unwrap_or(std::ptr::null_mut())
    })
}

/// Returns the priority of this library: it works everywhere and has no variants to choose from.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> i32 {
    1
}
