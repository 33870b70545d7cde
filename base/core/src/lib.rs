//! Tensors, operations, graphs and the device contract of samite.
//!
//! Every other crate builds on this one. It holds no kernels:
//!
//! - [`DType`] and [`Layout`]: how to read a tensor's bytes. Four extents, innermost first, and
//!   four byte strides, as in ggml.
//! - [`Op`] and [`infer`]: the operations. Shape inference is the only validator of nodes.
//! - [`formula`]: element-wise definitions of rarely optimised operations.
//! - [`Graph`]: a computation as plain data, with [text and DOT](mod@print) output, and JSON in
//!   both directions.
//! - [`BufferType`], [`Buffer`], [`StoredTensor`]: memory. [`HostMemory`]: host memory, locked
//!   against conflicting accesses.
//! - [`Device`], [`Stream`], [`Event`]: the contract between devices and the scheduler, described
//!   in [`device`].
//! - [`Environment`]: time, files, threads and connections, so that tests can replace them.
//! - [`Error`]: the error type, with names and reasons.
//!
//! ```
//! use samite_core::{DType, Graph};
//!
//! let mut graph = Graph::new();
//! let weights = graph.leaf("weights", DType::F32, [64, 8, 1, 1])?;
//! let x = graph.input("x", DType::F32, [64, 1, 1, 1])?;
//! let normed = graph.rms_norm(x, 1e-5)?;
//! let y = graph.mul_mat(weights, normed)?;
//! graph.set_output(y);
//! assert_eq!(graph.tensor(y).layout.shape(), [8, 1, 1, 1]);
//! # Ok::<_, samite_core::Error>(())
//! ```

mod address_space;
pub mod arena;
pub mod buffer;
pub mod build;
mod cancel;
pub mod device;
mod device_wrapper;
mod dtype;
pub mod environment;
mod error;
mod exact;
pub mod formula;
pub mod graph;
mod host_buffer;
mod infer;
mod json;
mod layout;
mod ledger;
mod lock;
pub mod memory;
pub mod op;
mod parameters;
pub mod print;
mod range_lock;
mod readers;
pub mod reorder;
mod repeated;
mod room;
mod rows;
mod stored;
mod support;
mod tensor_ref;
mod unallocated;

pub use address_space::{free_address_space, share_heap_if_limited};
pub use buffer::{
    Buffer, BufferType, Cut, Role, Slot, TensorInfo, Usage, align_up, same_buffer_type,
};
pub use cancel::CancelToken;
pub use device::{
    Backend, Capabilities, Compiled, Device, DeviceKind, DeviceLimits, Event, KeepAlive,
    MemoryInfo, PlacedGraph, Prepared, Rejected, RunControl, RunObserver, Selection, Stream,
};
pub use device_wrapper::{DeviceWrapper, WrappedDevice};
pub use dtype::DType;
pub use environment::Environment;
pub use error::{Error, Result};
pub use graph::{Flags, Graph, Node, Tensor, TensorId, ViewOf};
pub use host_buffer::{host_buffer, host_buffer_of, host_buffer_type};
pub use infer::infer;
pub use layout::{DIMS, Layout, Shape, shape};
pub use ledger::{Charge, Ledger};
pub use lock::{LockRefused, LockedMemory, page_bytes};
pub use memory::{GuardedCopy, HostMemory, Location, MemoryId, MemorySet, RangeGuard};
pub use op::{
    Glu, Interpolation, Op, OpKind, Pool, Precision, Rope, RopeAngle, RopeMode, SortOrder,
    Triangle, Unary, Window,
};
pub use parameters::Parameters;
pub use print::counted;
pub use range_lock::Access;
pub use readers::Readers;
pub use repeated::{MAX_REPEATED_BYTES, check_repeated};
pub use room::ask_for_memory;
pub use rows::Rows;
pub use samite_threads::thread_builder;
pub use stored::{StoredTensor, TensorGroup};
pub use support::Support;
pub use tensor_ref::{BounceBuffer, TensorRef};
pub use unallocated::unallocated;
