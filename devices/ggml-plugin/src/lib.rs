//! `libggml-samite.so`: samite's CPU device as a backend of ggml's programs.
//!
//! ```text
//! GGML_BACKEND_PATH=$PWD/target/release/libggml_samite.so llama-cli -m model.gguf -dev samite-cpu
//! ```
//!
//! The library exports what ggml's registry asks a plugin for, `ggml_backend_init` and `ggml_backend_score`. Everything else
//! are tables of functions that `ggml_backend_init` fills for the interface of the host's ggml; a host whose version is
//! not known is refused with a line in its log.
//!
//! # The device
//! `samite-cpu` says that it is an integrated GPU: programs offer models to those, and not to a second CPU. It works on host
//! memory (its own, that of ggml's CPU backend, a mapped file) and has an extra buffer type for packed weights.
//! When a program looks for a place for weights, it asks whether an operation is supported with the weight in an empty buffer of
//! each type, the default type first. The device then says no to the default for weights that it can pack,
//! which sends them to the packed type; weights that lie in memory already are supported in both. With `SAMITE_GGML_EXPLAIN=1`
//! in the environment, the reason of every refusal goes to the host's log.
//!
//! # Graphs
//! A graph is imported and prepared once; the prepared work is kept and recognised by everything that it depends on,
//! so that the next token only compares and runs. Whether an operation is supported is asked of the same import.
//!
//! # Safety
//! A host calls with valid pointers and one thread at a time for each backend, as ggml does. No panic crosses
//! into the host: a call that panics fails.
#![cfg(unix)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod buffers;
mod device;
mod graphs;
mod host;
mod memory;
mod stream;

use samite_ggml::abi::Reg;

/// What a host calls first: the registration with its one device, or null if the host's ggml is not known.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut Reg {
    host::guard(std::ptr::null_mut(), || {
        device::registration().unwrap_or(std::ptr::null_mut())
    })
}

/// How well this library fits the machine: it works everywhere, and has no variants to compete with.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> i32 {
    1
}
