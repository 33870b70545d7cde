//! Operations, tensors and graphs, from samite's to ggml's and back.
//!
//! - [`params`]: an operation as a number and 16 words of parameters, by one table.
//! - [`import`]: ggml's tensors as a [`Graph`](samite_core::Graph), through [`infer`](samite_core::infer) like all graphs.
//! - [`export`]: a part of a graph as ggml's tensors, for a plugin.

pub mod export;
pub mod import;
pub mod params;

mod field;

use std::borrow::Cow;

/// Why something cannot be converted.
pub type Reason = Cow<'static, str>;

#[cfg(test)]
mod tests;
