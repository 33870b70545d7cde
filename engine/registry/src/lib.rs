//! Finds and lists samite's backends and devices.
//!
//! A [`Registry`] is a value: an application makes one, adds backends of its own if it has any, and asks for devices by name,
//! by kind, or for the best ones. There is no global state, and making a registry starts no work on any device.

#![forbid(unsafe_code)]

mod registry;

pub use registry::{BuiltIn, Registry, RegistryError};
pub use samite_cpu::{Peaks, Probe, allowed_threads, measure_peaks};
#[cfg(unix)]
pub use samite_ggml::{GgmlOptions, PATH_VARIABLE, probe as probe_ggml_plugin};
