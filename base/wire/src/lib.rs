//! ggml's binary formats, shared by the plugin interface and the RPC protocol.
//!
//! This crate does not deal with C or with foreign memory: `devices/ggml` handles the pointers in
//! ggml's structures.
//!
//! - [`numbers`]: enumerations and limits.
//! - [`params`]: an operation as a number and 16 parameter words, from one table.
//! - [`import`]: ggml tensors to a [`Graph`](samite_core::Graph), through
//!   [`infer`](samite_core::infer) like all graphs.
//! - [`export`]: graph nodes to ggml tensors.
//! - [`gaps`]: nodes that ggml's CPU kernels cannot handle.
//! - [`rpc`]: messages of ggml's RPC protocol.
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

/// Reason why a conversion is impossible.
pub type UnsupportedConversion = Cow<'static, str>;

/// A ggml tensor without its pointers.
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
    /// True if it lies in another tensor's memory.
    pub is_view: bool,
}
