//! Device for NVIDIA GPUs, through the CUDA driver alone: no toolkit, no library but the driver.
//!
//! Each card that the driver reports is a device: `cuda0`, `cuda1`, and so on. It is opened on
//! first use.
//!
//! - **Kernels** are written in a C dialect in `kernels/` and compiled to PTX by clang, which needs
//!   no file of NVIDIA's. The PTX is part of this crate; the driver compiles it for the card.
//! - **Driver.** [`driver`] has the driver's functions as traits. One implementation loads
//!   `libcuda`; another one, the crate `samite-cuda-emu`, interprets the PTX, so that kernels and
//!   this crate are tested without a GPU.
//! - **Memory.** A buffer is one allocation. The memory plan of the scheduler makes pools
//!   unnecessary.
//! - **Work.** `ops` is the operation table: it maps a node to launches, or to the reason why the
//!   node is unsupported. [`prepare`](samite_core::Stream::prepare) adds addresses. The first run
//!   queues the launches; later runs replay them as one recorded graph, unchanged, because
//!   everything that differs between tokens lies in device memory.
//! - **Indices from tensors**, such as row numbers, are checked in kernels. A kernel skips an
//!   invalid index and writes the number of its node to the failure word of the stream, which reads
//!   it when it waits.
//! - **Failure.** A driver error is an [`Error`](samite_core::Error). After an error that makes the
//!   context unusable, every call fails with [`DeviceLost`](samite_core::Error::DeviceLost).
//!
//! | file | content |
//! |---|---|
//! | `backend` | the cards of a driver |
//! | `options` | options to turn features off |
//! | `driver` | the driver's functions as traits |
//! | `library` | the driver's library |
//! | `gpu` | an opened card: context, modules, transfers, errors |
//! | `buffer` | device memory |
//! | `packed` | memory of packed weights |
//! | `device`, `stream`, `event` | the traits of `samite-core` |
//! | `failures` | failure words |
//! | `fuse` | fusion of nodes into launches |
//! | `plan` | launches: kernel, operands, parameters, grid |
//! | `ops` | the operation table |
//! | `modules` | the PTX of all kernels |
//! | `tables` | tables that kernels of IQ types read |
#![deny(unsafe_code)]

mod backend;
mod buffer;
mod device;
pub mod driver;
mod event;
mod failures;
mod fuse;
mod gpu;
mod library;
mod modules;
mod ops;
mod options;
mod packed;
mod plan;
mod stream;
mod tables;

pub use backend::CudaBackend;
pub use device::CudaDevice;
pub use modules::{MODULES, Module};
pub use options::CudaOptions;
