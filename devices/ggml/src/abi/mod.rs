//! ggml's plugin interface as C structures: what a plugin exports, and what its host calls.
//!
//! Nothing here is a promise of upstream's: the structures are internal to ggml, and its version number of the interface
//! (2 or 3) does not tell everything. [`Version`] says which releases these declarations were checked against; whoever
//! loads or is loaded asks for the version of `libggml-base` first and refuses others. Sizes and offsets are for 64-bit
//! systems and tested against figures taken from upstream's headers.
//!
//! All pointers are as raw as in C. A field that upstream calls optional is an `Option`; so are those that it calls
//! mandatory, because a plugin's table is somebody else's memory.

mod backend;
mod buffer;
mod device;
mod graph;
mod tensor;
mod version;

pub use backend::{
    AddAllocDep, Backend, BackendI, Event, GraphOptimize, GraphOptimizeParams, Guid, Status,
};
pub use buffer::{
    Buffer, BufferI, BufferType, BufferTypeI2, BufferTypeI3, BufferTypeTable, BufferTypeV2,
    BufferTypeV3, usage,
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
