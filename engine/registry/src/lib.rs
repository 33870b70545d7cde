//! Finds and lists samite's backends and devices.
//!
//! A [`Registry`] is a value. An application creates one, optionally adds its own backends, and
//! looks up devices by name or kind, or the best ones. There is no global state, and creating a
//! registry starts no work on any device.
//!
//! Each built-in device is a feature of this crate: `blas`, `cpu`, `cuda`, `cuda-emu`, `ggml`,
//! `meta`, `ranks`, `reference`, `remote`, `rpc`, `wgpu`. All except `cuda-emu`, `remote` and
//! `wgpu` are on by default.

#![forbid(unsafe_code)]

mod registry;

pub use registry::{BuiltIn, DISABLE_VARIABLE, Registry, RegistryError};
#[cfg(feature = "cpu")]
pub use samite_cpu::{
    CpuSet, Peaks, Pool, PoolError, PoolOptions, Priority, Probe, allowed_threads,
    allowed_threads_on, measure_peaks,
};
#[cfg(all(any(unix, windows), feature = "ggml"))]
pub use samite_ggml::{GgmlOptions, PATH_VARIABLE, ProbeOptions, probe as probe_ggml_plugin};
#[cfg(feature = "meta")]
pub use samite_meta::{
    Explanation, MetaDevice, MetaOptions, Prediction,
    comm::{ProcessGroup, ProcessOptions, Transport},
};
#[cfg(feature = "ranks")]
pub use samite_ranks as ranks;
#[cfg(feature = "remote")]
pub use samite_remote::{
    KEY_FILE, RemoteBackend, RemoteOptions, RemoteServer, RemoteServerOptions, TOKEN_FILE,
    settings_folder,
};
#[cfg(feature = "rpc")]
pub use samite_rpc::{ClientOptions, Protocol as RpcProtocol, Server, ServerOptions};
