//! What ggml says in bytes, for everybody who speaks with its programs: over its plugin interface or over its network protocol.
//!
//! Nothing here has to do with C or with memory that somebody else owns: pointers of ggml's structures are a matter of `devices/ggml`.
//!
//! - [`numbers`]: its enumerations and limits.
//! - [`params`]: an operation as a number and 16 words of parameters, by one table.
//! - [`import`]: its tensors as a [`Graph`](samite_core::Graph), through [`infer`](samite_core::infer) like all graphs.
//! - [`export`]: nodes of a graph as its tensors.
//! - [`gaps`]: what its CPU kernels do not survive.
//! - [`rpc`]: the messages of its RPC protocol.
#![forbid(unsafe_code)]

pub mod export;
pub mod gaps;
pub mod import;
pub mod numbers;
pub mod params;
pub mod rpc;

mod field;

use numbers::{MAX_DIMS, MAX_OP_PARAMS};
use std::borrow::Cow;

/// Why something cannot be converted.
pub type Reason = Cow<'static, str>;

/// A tensor of ggml's without its pointers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Number of the element type, as in [`DType::id`](samite_core::DType::id).
    pub dtype: u32,
    /// Extents, innermost first.
    pub ne: [i64; MAX_DIMS],
    /// Byte strides.
    pub nb: [usize; MAX_DIMS],
    /// Number of the operation, see [`numbers::op`].
    pub op: u32,
    /// Parameters of the operation: integers, or the bits of floats.
    pub op_params: [i32; MAX_OP_PARAMS],
    /// See [`numbers::flag`].
    pub flags: i32,
    /// Whether it lies in another tensor's memory.
    pub is_view: bool,
}
