//! The CPU device: fast kernels on host memory, run by a pool of worker threads.
//!
//! [`CpuBackend`] has one [`CpuDevice`] for all processors that the process may use. It works on any host memory, its
//! streams are synchronous, and it runs every operation of [`Op`](samite_core::Op) on the types that `samite-quant`
//! decodes.
//!
//! # How a graph runs
//! *Preparing* looks every node up in one table of kernels (the same that answers
//! [`supports`](samite_core::Device::supports)), resolves addresses, strides and parameters, and yields a flat list of
//! phases, each a closure over a number of independent tasks. *Running* enters the gates of all memory involved and
//! walks the list: phases that are too small to be shared run in the calling thread, the others are shared out among the
//! workers, with a barrier behind. Nothing is allocated.
//!
//! Some nodes are computed together, as the last of them: products of the same columns pack them once, and norms and
//! gated units between products are never in memory. An observer then sees that the others take no time.
//!
//! # Packed weights
//! The device offers memory of its own for weights, `cpu-packed`, an
//! [extra buffer type](samite_core::Device::extra_buffer_types). It takes as many bytes as a file, rearranged for
//! products that are several times as fast, more so where there is AMX; what is written is packed, what is read unpacked.
//!
//! # What kernels promise
//! - Results do not depend on the number of threads: every element is computed by one task, in a fixed order.
//! - Values in memory (row numbers) are checked before they become addresses; a bad one is an error that names it.
//! - Instruction sets are chosen at run time by tokens that only detection makes; portable code is always there.
#![warn(clippy::undocumented_unsafe_blocks)]

mod activations;
mod calibrate;
mod detect;
mod device;
mod fuse;
#[cfg(test)]
mod harness;
mod kernel;
mod kernels;
mod machine;
mod operand;
mod packed;
mod packed_buffer_type;
mod pool;
mod product;
mod program;
mod simd;
mod table;
#[cfg(test)]
mod tests;
mod tune;
mod unpacked;

pub use calibrate::{Peaks, Probe, allowed_threads, measure_peaks};
pub use detect::{ISA_VARIABLE, IsaLevel};
pub use device::{CpuBackend, CpuDevice, CpuOptions};
pub use tune::TUNING_VARIABLE;
