//! Runs CUDA kernels without a GPU.
//!
//! The interpreter executes the PTX that a compiler made of a kernel, with 32 lanes of a warp at a
//! time. It sees every access of memory, so that it finds what a card hides: reads out of bounds
//! or of memory that was never written, data races, divergent barriers, and results that depend on
//! the order of blocks.
//!
//! - [`ptx`] parses and decodes modules.
//! - [`memory`] is the global memory of a card.
//! - [`machine`] runs a kernel.
//! - [`EmulatedDriver`] has cards, streams and events, so that the CUDA device runs on it.
//!
//! What it does not model: caches, time, and the weak order of memory accesses of one warp.
#![forbid(unsafe_code)]

mod driver;
pub mod machine;
pub mod memory;
pub mod ptx;

pub use driver::{EmulatedContext, EmulatedDriver};

/// Returns a backend of the CUDA device with emulated cards, `cuda-emu0` to `cuda-emu3`.
#[must_use]
pub fn backend() -> samite_cuda::CudaBackend {
    let driver = std::sync::Arc::new(EmulatedDriver::default());
    samite_cuda::CudaBackend::with_driver("cuda-emu", driver)
}
