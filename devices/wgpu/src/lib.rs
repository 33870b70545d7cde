//! A GPU device for Vulkan, Metal and DirectX: the crate `wgpu`, with kernels in WGSL.
//!
//! Each adapter that the system's drivers offer is a device, `wgpu0`, `wgpu1`, and so on. It is opened when it is first used. A software adapter,
//! such as Mesa's lavapipe, is offered only to those who name it.
//!
//! - **Memory.** A buffer is one storage buffer. Kernels see it as an array of 32-bit words; every operand of a kernel is bound by itself, with its
//!   place in words and bytes among the parameters. All buffers of a device hang on one queue, so that reads, writes and runs happen in the order in
//!   which they were asked for.
//! - **Kernels.** `ops` is the table: for a node, it gives launches or the reason why there are none. What the device says it
//!   supports and what it runs both come from there. A launch names a shader: the text of `kernels/*.wgsl` behind a preamble and one accessor for each
//!   operand, by type. Pipelines are made when work is first compiled, and kept.
//! - **Work.** [`prepare`](samite_core::Stream::prepare) binds launches to places: a pipeline, a bind group and parameters each, all parameters in one
//!   buffer. A run records them in one pass and submits it. An event is the number of a submission.
//! - **Values** from outside, such as row numbers, are checked in kernels: a wrong one is left out, and the number of the node goes to a word that
//!   the stream reads when it waits.
//! - **Failure.** Memory that cannot be had, a shader that a driver refuses, and a device that is gone are errors. Nothing here panics or aborts.
//!
//! | file | what |
//! |---|---|
//! | `backend` | adapters, and which of them are offered |
//! | `options` | what can be turned off, or made smaller |
//! | `gpu` | an opened adapter: device, queue, waiting, reading, errors |
//! | `self_test` | refuses what computes wrong |
//! | `limits` | what an adapter can do at most |
//! | `tuning` | sizes that suit an adapter |
//! | `kept` | what is kept on disk about an adapter |
//! | `buffer` | the memory |
//! | `experimental` | leave to use cooperative matrices |
//! | `emulated` | these by ordinary numbers, for tests |
//! | `packed` | the memory of packed weights |
//! | `fuse` | which nodes are computed together |
//! | `device`, `stream`, `event` | the contract of `samite-core` |
//! | `waiting` | waiting for the driver, in browsers too |
//! | `plan` | launches: operands, parameters, how many workgroups; cutting them at the binding limit |
//! | `grids` | tables that kernels of IQ types read |
//! | `windows` | what bindings show of buffers |
//! | `shader` | the text of a shader from its parts |
//! | `pipelines` | compiled shaders |
//! | `stored_pipelines` | the same on disk |
//! | `ops` | the table of operations |
//! | `kernels/*.wgsl` | the kernels; `kernels/types/*.wgsl` how each type is read and written |
#![deny(unsafe_code)]

mod backend;
mod buffer;
mod device;
mod emulated;
mod event;
mod experimental;
mod fuse;
mod gpu;
mod grids;
mod kept;
mod limits;
mod ops;
mod options;
mod packed;
mod pipelines;
mod plan;
mod self_test;
mod shader;
mod stored_pipelines;
mod stream;
mod tuning;
mod waiting;
mod windows;

pub use backend::WgpuBackend;
pub use device::WgpuDevice;
pub use options::WgpuOptions;
