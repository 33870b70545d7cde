//! ggml's plugin interface as C structures: the exports of a plugin, and the functions that its
//! host calls.
//!
//! Upstream guarantees none of this: the structures are internal to ggml, and the interface version
//! (2 or 3) does not identify all changes. [`Version`] lists the releases against which these
//! declarations were checked, and the steps for a new one. Code that loads a plugin or is loaded as
//! one asks for the version of `libggml-base` first and rejects unknown ones. Sizes and offsets are
//! for 64-bit systems, and tested against values from upstream's headers.
//!
//! All pointers are raw, as in C. A field that upstream calls optional is an `Option`. So are
//! mandatory fields, because a plugin's table is foreign memory.

mod backend;
mod buffer;
mod device;
mod graph;
mod tensor;
mod version;

pub use backend::{
    AddAllocDep, Backend, BackendEvent, BackendI, GraphOptimize, GraphOptimizeParams, Guid, Status,
};
pub use buffer::{
    Buffer, BufferFields, BufferI, BufferI28, BufferNI, BufferType, BufferTypeI25, BufferTypeI26,
    BufferTypeTable, BufferTypeV25, BufferTypeV26, BufferV25, BufferV28, usage,
};
pub use device::{
    AbortCallback, DevCaps, DevProps, Device, DeviceI, Feature, InitFn, Reg, RegI, ScoreFn,
    device_type, proc_name,
};
pub use graph::{CGraph, HashSet};
pub use tensor::{
    MAX_DIMS, MAX_NAME, MAX_OP_PARAMS, MAX_SRC, Tensor, flag, glu, op, precision, rope_mode,
};
pub use version::{UnknownVersion, Version};
