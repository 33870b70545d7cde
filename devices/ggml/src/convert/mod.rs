//! Operations, tensors and graphs, from samite's to ggml's and back.
//!
//! What has nothing to do with pointers is in `samite-wire`.
//!
//! - [`import`]: a host's tensors as a [`Graph`](samite_core::Graph).
//! - [`export`]: a part of a graph as ggml's tensors, for a plugin.

pub mod export;
pub mod import;
pub use samite_wire::{Reason, params};

#[cfg(test)]
mod tests;
