//! Converts operations, tensors and graphs between samite and ggml.
//!
//! `samite-wire` has everything that does not involve pointers.
//!
//! - [`import`]: a host's tensors as a [`Graph`](samite_core::Graph).
//! - [`export`]: a part of a graph as ggml's tensors, for a plugin.

pub mod export;
pub mod import;
pub use samite_wire::{UnsupportedConversion, params};

#[cfg(test)]
mod tests;
