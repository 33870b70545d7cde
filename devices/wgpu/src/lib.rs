//! GPU device for Vulkan, Metal and DirectX, on the `wgpu` crate with kernels in WGSL.
//!
//! Each adapter that the system's drivers report is a device: `wgpu0`, `wgpu1`, and so on. It is
//! opened on first use. A software adapter, such as Mesa's lavapipe, is used only if the user names
//! it.
//!
//! - **Memory.** A buffer is one storage buffer, which kernels see as an array of 32-bit words.
//!   Each operand of a kernel has its own binding; its shape, strides and first byte are
//!   parameters. All buffers of a device share one queue, so reads, writes and runs execute in the
//!   order of the calls.
//! - **Kernels.** `ops` is the operation table: it maps a node to launches, or to the reason why
//!   the node is unsupported. Both the device's `supports` and its runs use it, so they agree. A
//!   launch names a shader, which consists of a preamble, one accessor per operand for its type,
//!   and the text of `kernels/*.wgsl`. Pipelines are created when work is first compiled, and
//!   cached.
//! - **Work.** [`prepare`](samite_core::Stream::prepare) binds each launch: it gets a pipeline, a
//!   bind group and parameters. All parameters are in one buffer. A run records the launches in
//!   compute passes and submits them. An event is a submission index.
//! - **Indices from tensors**, such as row numbers, are checked in kernels. A kernel skips an
//!   invalid index and writes the number of its node to the failure word. The stream reads this
//!   word when it waits.
//! - **Failure.** Running out of memory, a shader that a driver rejects, and a lost device are
//!   errors. The crate never panics or aborts.
//!
//! | file | content |
//! |---|---|
//! | `backend` | adapters, and which of them are offered |
//! | `options` | options to turn features off or lower limits |
//! | `gpu` | an opened adapter: device, queue, waits, reads, errors |
//! | `self_test` | test that rejects adapters and features with wrong results |
//! | `limits` | measured peak rates of an adapter |
//! | `tuning` | workgroup and tile sizes that suit an adapter |
//! | `buffer` | device memory |
//! | `experimental` | enables cooperative matrices |
//! | `emulated` | emulated cooperative matrices, for tests |
//! | `packed` | memory of packed weights |
//! | `fuse` | fusion of nodes into launches |
//! | `device`, `stream`, `event` | the traits of `samite-core` |
//! | `waiting` | waiting for the driver, also in browsers |
//! | `plan` | launches: operands, parameters, workgroup counts; splitting at the binding limit |
//! | `grids` | tables that kernels of IQ types read |
//! | `windows` | merges overlapping buffer bindings |
//! | `shader` | assembles the text of a shader |
//! | `template` | expands templates of WGSL |
//! | `pipelines` | compiled shaders |
//! | `stored_pipelines` | disk cache of compiled shaders |
//! | `ops` | the operation table |
//! | `kernels/*.wgsl` | the kernels; `kernels/types/*.wgsl` read and write each type |
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
mod template;
mod tuning;
mod waiting;
mod windows;

pub use backend::WgpuBackend;
pub use device::WgpuDevice;
pub use options::WgpuOptions;
