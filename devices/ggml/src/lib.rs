//! ggml's plugin interface, from both sides.
//!
//! ggml, the library under llama.cpp, loads its backends at run time from shared libraries
//! `libggml-<name>.so`. Their interface is a set of C structures with tables of functions: [`abi`].
//! This crate
//!
//! - converts operations, tensors and graphs to those structures and back without loss:
//!   [`convert`];
//! - uses ggml's plugins as devices of samite: [`GgmlBackend`], also without the library
//!   `libggml-base` to which they link;
//! - is the basis of `samite-ggml-plugin`, the library `libggml-samite.so`, with which samite's CPU
//!   device computes in ggml's programs.
//!
//! # Trust
//! A plugin or host is machine code in the same process, so its pointers are trusted. Its
//! descriptions of itself are not: versions, types, shapes, strides and locations in memory are
//! checked before use.

pub mod abi;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod base;
#[cfg(all(
    any(unix, windows),
    not(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64")
    ))
))]
#[path = "base/absent.rs"]
mod base;
pub mod convert;
#[cfg(any(unix, windows))]
mod host;

#[cfg(any(unix, windows))]
pub use host::{GgmlBackend, GgmlOptions, PATH_VARIABLE, ProbeOptions, probe};
